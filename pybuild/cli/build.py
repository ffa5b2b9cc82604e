"""`pybuild build`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from pybuild.build import fetch_inputs, run_build
from pybuild.builders import survey, urls_of, with_ssh_options
from pybuild.cli.options import build_options, plan_options, planned
from pybuild.exchange import take
from pybuild.facts.machine import Here
from pybuild.gated import live_budget
from pybuild.view.record import head_of
from pybuild.view.watch import watching


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
@click.option(
    "--builder",
    "given_builders",
    multiple=True,
    metavar="URL",
    help="Another machine that compiles: ssh-ng://USER@HOST, or @FILE, a machines file of nix. Repeatable.",
)
@click.option("--log", type=click.File("w", lazy=True), help="Keep all that nix says in this file.")
@click.option("-v", "--verbose", is_flag=True, help="Show the compilers' command lines and all that they say.")
def command(dist: Path, given_builders: tuple[str, ...], log: TextIO | None, verbose: bool, **options: Any) -> None:
    """Build PACKAGE (flash-attn) and print the wheel's path.

    Takes what the user's own caches in nix.conf have (see `pybuild push`), fetches what is not in the store yet,
    compiles the kernels that are not there, each as a derivation of its own, and links the wheel. What was finished is
    never lost: the same command goes on where it was stopped.
    """
    urls = urls_of(given_builders)
    plan = planned(options)
    if urls:
        plan = replace(plan, nix=replace(plan.nix, environ=with_ssh_options(plan.nix.environ)))
    if said := take(plan):
        click.echo(f"pybuild: {said}\npybuild: what the caches did not give is compiled here", err=True)
    if not plan.nix.is_valid([plan.wheel()])[plan.wheel()]:
        fetch_inputs(plan)
    builders = [survey(url, plan.spec, plan.nix, plan.facts) for url in urls]
    for builder in builders:
        click.echo(f"pybuild: {builder.url} compiles up to {builder.jobs} kernels at once", err=True)
    head = head_of(plan.spec.package, ["pybuild", *sys.argv[1:]], plan.spec.model_dump(mode="json"))
    with watching(head, verbose=verbose, log=log) as listener:
        wheels = run_build(plan, dist, listener, budget=live_budget(Here(os.environ)), builders=builders)
    for wheel in wheels:
        click.echo(wheel)
