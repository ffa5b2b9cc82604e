"""`pybuild push`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pybuild.cli.options import build_options, spec_from
from pybuild.exchange import destination, push, signing_key
from pybuild.plan import make_plan


@click.command(epilog="\b\nExample:\n  pybuild push file:///mnt/cache flash-attn --release cu130 --head-dim 64")
@click.argument("url", metavar="STORE-URL")
@build_options
@click.option("--key", type=click.Path(path_type=Path, dir_okay=False), help="Secret key; one is made without it.")
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A toolkit of the release's CUDA.")
@click.option("--nix", help="The nix or nix-portable to use, instead of the one on PATH.")
def command(url: str, key: Path | None, cuda_home: Path | None, nix: str | None, **options: Any) -> None:
    """Copy what was built of PACKAGE to STORE-URL, signed, and print the store paths.

    STORE-URL is file:///FOLDER or ssh-ng://USER@HOST. Another machine whose nix.conf names it, with the same compiler
    and Python, builds the wheel without compiling.
    """
    destination(url)  # a wrong one is told before anything else is done
    plan = make_plan(spec_from(options), os.environ, cores=1, nix=nix, cuda_home=cuda_home)
    signed_with = signing_key(plan.nix, key)
    click.echo(
        f"pybuild: a machine that shall use it needs these lines in its nix.conf:\n"
        f"extra-substituters = {url}\nextra-trusted-public-keys = {signed_with.public}",
        err=True,
    )
    for path in push(plan, url, signed_with):
        click.echo(path)
