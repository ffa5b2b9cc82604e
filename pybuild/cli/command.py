"""`pybuild command`."""

from __future__ import annotations

from typing import Any

import click

from pybuild.cli.options import build_options, plan_options, planned
from pybuild.nix import shell_line


@click.command(epilog="Example: pybuild command flash-attn --release cu130 --forward-only | sh")
@build_options
@plan_options
def command(**options: Any) -> None:
    """Print the nix command line that builds PACKAGE (flash-attn), for a shell on this machine.

    It builds from what `pybuild fetch` has brought into the store.
    """
    plan = planned(options)
    if plan.missing():
        click.echo("pybuild: not all inputs are in the store yet: run `pybuild fetch` before this line", err=True)
    click.echo(shell_line(plan.argv))
