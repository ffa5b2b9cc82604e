"""`pybuild profile`."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pybuild.build import fetch_inputs
from pybuild.cli.options import build_options, plan_options, planned
from pybuild.errors import PybuildError
from pybuild.facts.host import read_host
from pybuild.gated import place_for
from pybuild.learn import Memory
from pybuild.measure import INTERVAL, keep, kept, measure_kernel
from pybuild.plan import Kernel, Plan
from pybuild.profile import Compile, load_profile
from pybuild.release import load_release, load_source
from pybuild.units import MIB, format_gib, format_time


@click.command(
    epilog="\b\nExample:\n  pybuild profile flash-attn 'flash_fwd_hdim128_*' --release cu130 --output here.json"
)
@build_options
@click.argument("kernels", nargs=-1)
@plan_options
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file as well.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured.")
def command(kernels: tuple[str, ...], output: Path | None, as_json: bool, **options: Any) -> None:
    """Compile the kernels of PACKAGE one at a time, and keep how much memory each took at each moment.

    KERNELS are names, or patterns such as '*_hdim128_*'; without any, all are measured. The result is kept in the
    cache directory, for the gate of later builds on this machine. Prints the path of the file. What a file has of
    other kernels stays. Let nothing else run meanwhile: the times count as well.
    """
    plan = planned(options)
    facts = _facts(plan)
    memory = Memory(place_for(plan.spec))
    if output:
        # Hours may follow.
        kept(output, facts["package"], facts["version"])
    shipped = load_profile(plan.spec.package)
    order = [compile_.kernel for compile_ in shipped.of_build] if shipped else []
    chosen = choose(plan.kernels(), kernels, order)
    fetch_inputs(plan)
    click.echo("pybuild: preparing the toolkit and torch", err=True)
    plan.nix.run(plan.inputs_argv, doing="preparing the toolkit and torch")
    measured: list[Compile] = []
    for number, kernel in enumerate(chosen, 1):
        click.echo(f"pybuild: {number} of {len(chosen)}, {kernel.name}", err=True)
        compile_ = measure_kernel(plan, kernel, facts["machine"])
        memory.learn(kernel.name, compile_.curve())
        if output:
            keep(output, facts, compile_, order)
        measured.append(compile_)
        click.echo(f"pybuild: {_line(compile_)}", err=True)
    if as_json:
        rows = [compile_.model_dump(mode="json", exclude_defaults=True) for compile_ in measured]
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(output or memory.path)


def choose(kernels: Sequence[Kernel], patterns: Sequence[str], order: Sequence[str]) -> list[Kernel]:
    """The kernels that the patterns name, in the build's order. Raises PybuildError for a pattern that names none."""
    found: dict[str, Kernel] = {}
    for pattern in patterns or ["*"]:
        named = {kernel.name: kernel for kernel in kernels if fnmatch.fnmatchcase(kernel.name, pattern)}
        if not named:
            names = "\n".join(f"  {kernel.name}" for kernel in kernels)
            raise PybuildError(f"no kernel is called {pattern!r}", f"There is:\n{names}")
        found |= named
    places = {name: place for place, name in enumerate(order)}
    return sorted(found.values(), key=lambda kernel: (places.get(kernel.name, len(order)), kernel.name))


def _facts(plan: Plan) -> dict[str, str]:
    """What a profile that is measured now says of itself."""
    spec, host = plan.spec, read_host(programs=False)
    source, release = load_source(spec.package), load_release(spec.release)
    return {
        "package": spec.package,
        "version": source.version,
        "source": f"{source.file}, each source compiled by its derivation",
        "compiler": f"nvcc of CUDA {release.cuda}, torch {release.torchVersion}",
        "machine": f"{host.cores.usable} cores, {format_gib(host.memory.total)}, one compile at a time",
        "sampled": f"resident memory of the compiler and all its children, every {INTERVAL} s; 'memory_mib' keeps the "
        "samples from which a line misses no other by more than 1 % of the peak; 'peak_mib' is the highest of all "
        "samples, 'tool_peak_mib' the highest of each tool",
    }


def _line(compile_: Compile) -> str:
    tool = max(compile_.tool_peak_mib, key=lambda name: compile_.tool_peak_mib[name], default="no tool")
    return (
        f"{compile_.kernel}: {format_time(compile_.wall_s)}, {format_gib(compile_.peak_mib * MIB)} at the peak, {tool}"
    )
