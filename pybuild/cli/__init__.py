"""The command line. One file a command; each is imported only when it is asked for."""

import importlib
import signal
import sys

import click

from pybuild import __version__
from pybuild.errors import PybuildError

# command -> (module in this package, one line of help): so `pybuild --help` imports none of the modules.
COMMANDS = {
    "build": ("build", "Build a package; prints the wheel's path."),
    "command": ("command", "Print the nix command line that builds a package."),
    "completion": ("completion", "Print the script for completion in a shell."),
    "config": ("config", "Print the settings in force, and where each comes from."),
    "doctor": ("doctor", "Find what is wrong with this machine, or with a wheel."),
    "fetch": ("fetch", "Bring the pinned inputs into the store."),
    "host": ("host", "Print what this machine has."),
    "pin": ("pin", "Make a release's data file (for maintainers)."),
    "push": ("push", "Copy what was built to a store that other machines read."),
    "predict": ("predict", "Say what a number of jobs would need, and whether it fits."),
    "profile": ("profile", "Measure what the compiles of a package need."),
    "report": ("report", "Write what a build took, as one HTML file."),
    "run": ("run", "Run any build, its compilers let in as memory allows."),
    "recommend-cores": ("recommend", "Print the number of cores to build with."),
}


class _LazyGroup(click.Group):
    """A click group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"pybuild.cli.{COMMANDS[cmd_name][0]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in sorted(COMMANDS.items())])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="pybuild")
def cli() -> None:
    """Build CUDA extensions for PyTorch without running the machine out of memory."""


def end_in_order() -> None:
    """Make `kill` and a closed terminal end this process as Ctrl-C does: what it started is ended first."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)


def main() -> None:
    """Entry point: runs the command, and turns every error of ours into one message and an exit status."""
    end_in_order()
    try:
        # Outside its standalone mode click returns the status of an Exit, and 0 after --help.
        sys.exit(cli(prog_name="pybuild", standalone_mode=False))
    except click.Abort:
        click.echo("pybuild: stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except PybuildError as error:
        click.echo(f"pybuild: {error}", err=True)
        sys.exit(error.exit_status)
