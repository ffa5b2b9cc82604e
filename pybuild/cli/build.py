"""`pybuild build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import click

from pybuild.build import fetch_inputs, run_build
from pybuild.cli.options import build_options, plan_options, planned


@click.command(epilog="Example: pybuild build flash-attn --release cu130 --head-dim 64 --dtype bf16")
@build_options
@plan_options
@click.option(
    "--dist",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("dist"),
    show_default=True,
    help="Where the wheel goes.",
)
@click.option("--log", type=click.File("w", lazy=True), help="Keep all that nix says in this file.")
def command(dist: Path, log: TextIO | None, **options: Any) -> None:
    """Build PACKAGE (flash-attn) and print the wheel's path.

    Fetches what is not in the store yet, then runs the line that `pybuild command` prints. What was built before is
    not built again.
    """
    plan = planned(options)
    fetch_inputs(plan)
    for wheel in run_build(plan, dist, log=log, say=lambda line: click.echo(line, err=True)):
        click.echo(wheel)
