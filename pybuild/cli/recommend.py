"""`pybuild recommend-cores`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from pybuild.cli.machine import Asked, machine_from, machine_options
from pybuild.cli.options import build_options, spec_from
from pybuild.gated import gated_cores, gated_time
from pybuild.profile import Workload, workload
from pybuild.recommend import core_cap, nvcc_threads, recommend
from pybuild.simulate import RUNS, Trials, simulate
from pybuild.units import format_gib


@click.command(
    "recommend-cores", epilog="\b\nExample:\n  pybuild recommend-cores flash-attn --cores 128 --memory 288GiB --explain"
)
@build_options
@machine_options
@click.option("--explain", is_flag=True, help="Say on standard error which limit binds, and what one core more does.")
@click.option("--ungated", is_flag=True, help="For a build that no gate watches: as many as never run out of memory.")
def command(explain: bool, ungated: bool, as_json: bool, **options: Any) -> None:
    """Print how many compiles of PACKAGE may run at once here.

    pybuild's builds are gated: compiles wait for memory, so no number runs out of it. The smallest whose build takes as
    long as the fastest, within 2 %, leaves the other cores to others.

    With --ungated the largest number whose memory stays within what is available, less a reserve, in each of 200
    simulated runs.
    """
    machine = machine_from(options)
    threads = options.pop("nvcc_threads")
    spec = spec_from(options)
    work = workload(spec, threads or nvcc_threads(spec))
    largest = max(curve.peak for curve in work.curves)
    if not (explain or work.profile):
        click.echo(f"pybuild: {_source(work)}", err=True)
    if largest > machine.budget:
        click.echo(
            f"pybuild: one compile alone takes up to {format_gib(largest)}, more than the {format_gib(machine.budget)} "
            "there are for it: it may run out of memory. Free some, or leave less in --reserve",
            err=True,
        )
    cores = None if ungated else gated_cores(work.curves, machine.cores, machine.budget)
    if not (cores is None or explain or as_json):
        click.echo(cores)
        return
    fixed = recommend(work.curves, machine.cores, machine.budget)
    if explain:
        gate = [] if cores is None else _gate_explained(work, machine, cores, fixed)
        for line in [str(machine), _source(work), *gate, *_explained(work, machine, fixed)]:
            click.echo(f"pybuild: {line}", err=True)
    if not as_json:
        click.echo(fixed if cores is None else cores)
    elif cores is None:
        click.echo(json.dumps({**_asked(work, machine), **_report(work, machine, fixed)}, indent=2))
    else:
        seconds = round(gated_time(work.curves, cores, machine.budget))
        gated = {"cores": cores, "seconds": seconds, "ungated": _report(work, machine, fixed)}
        click.echo(json.dumps({**_asked(work, machine), **gated}, indent=2))


def _gate_explained(work: Workload, machine: Asked, cores: int, fixed: int) -> Iterator[str]:
    def minutes(number: int) -> str:
        return f"{gated_time(work.curves, number, machine.budget) / 60:.1f} minutes"

    yield (
        f"under the gate {cores} at once take {minutes(cores)}, and all {machine.cores} cores {minutes(machine.cores)}"
    )
    without = simulate(work.curves, fixed, cores=machine.cores, threads=work.busy).time / 60
    yield f"without it (--ungated) {fixed} at once are safe, which take {without:.1f} minutes:"


def _source(work: Workload) -> str:
    largest = format_gib(max(curve.peak for curve in work.curves))
    if work.profile is None:
        return f"no profile of {work.package}: each compile is taken to hold {largest} all the time"
    architectures = ", ".join(work.architectures)
    return (
        f"profile of {work.profile.name} ({work.profile.compiler}): {len(work.curves)} compiles for {architectures}, "
        f"{work.threads} nvcc thread{'s'[: work.threads != 1]} each; one takes up to {largest}"
    )


def _explained(work: Workload, machine: Asked, cores: int) -> Iterator[str]:
    report = _report(work, machine, cores)
    limit = {"cores": "The cores bind, not memory", "memory": "Memory binds, not the cores"}[report["limit"]]
    yield f"{limit}: {cores} at once hold {format_gib(report['peak_bytes'])} at most in {RUNS} runs"
    more = report["one_more"]
    held = f"one core more: {more['cores']} at once hold up to {format_gib(more['peak_bytes'])}"
    if more["runs_over_budget"]:
        yield f"{held}, more than the budget in {more['runs_over_budget']} of the runs"
    else:
        yield f"{held}, which fits as well"
    yield f"counting each compile at its peak all the time, {report['safe_at_peak']} would be safe"


def _asked(work: Workload, machine: Asked) -> dict[str, Any]:
    return {
        "package": work.package,
        "profile": work.profile.name if work.profile else None,
        "architectures": work.architectures,
        "nvcc_threads": work.threads,
        "machine_cores": machine.cores,
        "available_bytes": machine.available,
        "available_because": machine.because,
        "reserve_bytes": machine.reserve,
        "budget_bytes": machine.budget,
    }


def _report(work: Workload, machine: Asked, cores: int) -> dict[str, Any]:
    trials = Trials(work.curves)
    peak, more = max(trials.peaks(cores)), list(trials.peaks(cores + 1))
    largest = -int(-max(curve.peak for curve in work.curves) // 1)
    return {
        "cores": cores,
        "limit": "cores" if cores == machine.cores and peak <= machine.budget else "memory",
        "peak_bytes": peak,
        "one_more": {
            "cores": cores + 1,
            "peak_bytes": max(more),
            "runs_over_budget": sum(held > machine.budget for held in more),
        },
        "runs": len(more),
        "safe_at_peak": core_cap(machine.cores, machine.available, largest, machine.reserve),
    }
