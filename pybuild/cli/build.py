"""`pybuild build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pybuild.build import fetch_inputs, run_build
from pybuild.cli.options import build_options, plan_options, planned
from pybuild.events import Event, Reading, Said
from pybuild.schedule import Fixed


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
def command(dist: Path, **options: Any) -> None:
    """Build PACKAGE (flash-attn) and print the wheel's path.

    Fetches what is not in the store yet, compiles the kernels that are not there, and runs the line that `pybuild
    command` prints. What was finished is never lost: the same command goes on where it was stopped.
    """
    plan = planned(options)
    fetch_inputs(plan)
    for wheel in run_build(plan, dist, Fixed(plan.cores), _show, budget=0):
        click.echo(wheel)


def _show(event: Event) -> None:
    if not isinstance(event, Reading | Said):
        click.echo(event, err=True)
