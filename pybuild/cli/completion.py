"""`pybuild completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

# Where each shell looks for completions of its own accord, or the line that its start-up file needs.
_HOW = {
    "bash": "pybuild completion bash > ~/.local/share/bash-completion/completions/pybuild",
    "zsh": 'pybuild completion zsh > "${fpath[1]}/_pybuild"',
    "fish": "pybuild completion fish > ~/.config/fish/completions/pybuild.fish",
}


@click.command(epilog=f"Example: {_HOW['bash']}")
@click.argument("shell", type=click.Choice(list(_HOW)))
def command(shell: str) -> None:
    """Print the script that completes pybuild's commands, options and values in SHELL.

    Keep what it prints where the shell looks for completions; new shells have it.
    """
    from pybuild.cli import cli

    completer = get_completion_class(shell)
    assert completer is not None  # click knows all three
    click.echo(completer(cli, {}, "pybuild", "_PYBUILD_COMPLETE").source())
