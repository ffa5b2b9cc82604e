"""`pybuild run`."""

from __future__ import annotations

import os
import sys

import click

from pybuild.facts.host import read_host
from pybuild.run import prepare, run
from pybuild.units import parse_size


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="\b\nExamples:\n"
    "  pybuild run -- uv pip install flash-attn --no-build-isolation\n"
    "  pybuild run -- cmake --build build",
)
@click.option(
    "--cores", type=click.IntRange(min=1), help="Compiles at once at most.  [default: MAX_JOBS, or all cores]"
)
@click.option(
    "--memory", metavar="SIZE", help="For all compiles together, e.g. 24GiB.  [default: 90 % of what is free]"
)
@click.argument("command_line", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(cores: int | None, memory: str | None, command_line: tuple[str, ...]) -> None:
    """Run any build so that its compilers start as memory allows.

    For pip, uv, CMake, torch's own JIT: what asks for a compiler through torch or CMake is let in by the gate. What
    compiles here is learned, and known the next time.
    """
    budget = parse_size(memory) if memory else None
    host = read_host()
    gpus = [gpu.capability for gpu in host.gpus if gpu.capability]
    prepared = prepare(command_line, os.environ, cores or host.cores.usable, gpus)
    for line in prepared.said:
        click.echo(f"pybuild: {line}", err=True)
    sys.exit(run(prepared, budget=budget))
