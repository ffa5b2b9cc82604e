"""`pybuild fetch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pybuild.build import fetch_inputs
from pybuild.cli.options import build_options, spec_from
from pybuild.plan import make_plan


@click.command(epilog="\b\nExample:\n  PIP_INDEX_URL=file:///mnt/mirror/simple pybuild fetch --release cu130")
@build_options
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A toolkit of the release's CUDA.")
@click.option("--nix", help="The nix or nix-portable to use, instead of the one on PATH.")
def command(cuda_home: Path | None, nix: str | None, **options: Any) -> None:
    """Bring the pinned inputs of PACKAGE (flash-attn) into the store and print their store paths.

    They come from the index that pip is configured with, and each is checked against its hash. What the store has
    is not downloaded; a download that was cut off goes on where it was.
    """
    plan = make_plan(spec_from(options), os.environ, cores=1, nix=nix, cuda_home=cuda_home)
    for path in fetch_inputs(plan):
        click.echo(path)
