"""`pybuild completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog="Example: source <(pybuild completion bash)")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script that completes pybuild's commands, options and values in SHELL.

    The example is for one bash; in ~/.bashrc it is for all. To keep the script instead:

    \b
      pybuild completion bash > ~/.local/share/bash-completion/completions/pybuild
      pybuild completion zsh > "${fpath[1]}/_pybuild"
      pybuild completion fish > ~/.config/fish/completions/pybuild.fish
    """
    from pybuild.cli import cli

    completer = get_completion_class(shell)
    assert completer is not None  # click knows all three
    click.echo(completer(cli, {}, "pybuild", "_PYBUILD_COMPLETE").source())
