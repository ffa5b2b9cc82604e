"""`pybuild predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pybuild.cli.machine import machine_from, machine_options
from pybuild.cli.options import build_options, spec_from
from pybuild.errors import PybuildError
from pybuild.profile import workload
from pybuild.recommend import nvcc_threads
from pybuild.simulate import RUNS, Trials, simulate
from pybuild.units import format_gib, format_time


@click.command(
    epilog="\b\nExample:\n  pybuild predict flash-attn --jobs 32 --cores 128 --memory 288GiB --nvcc-threads 4"
)
@build_options
@click.option("--jobs", type=click.IntRange(1, 10**6), required=True, help="Compiles at once, such as MAX_JOBS.")
@machine_options
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw memory over time: FILE.svg.")
def command(jobs: int, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Print what a build of PACKAGE with a fixed number of jobs would need: peak memory, time, and whether it fits.

    It fits if it stays within the memory available, less a reserve, in each of 200 runs with uneven durations. Exit
    status 1 where it does not.
    """
    machine = machine_from(options)
    threads = options.pop("nvcc_threads")
    spec = spec_from(options)
    work = workload(spec, threads or nvcc_threads(spec))
    played = simulate(work.curves, jobs, cores=machine.cores, threads=work.busy)
    worst = max(played.peak, *Trials(work.curves).peaks(jobs))
    fits = worst <= machine.budget
    # How many compiles a package without a profile has is a guess, and so is its time.
    known = work.profile is not None
    if not known:
        click.echo(
            f"pybuild: no profile of {work.package}: each compile is taken to hold "
            f"{format_gib(work.curves[0].peak)} all the time; how long they take is not known",
            err=True,
        )
    if plot:
        from pybuild.view.plot import plot_svg

        title = f"{work.package}, {jobs} jobs, {', '.join(work.architectures)}"
        _write(plot, plot_svg(played, worst, machine.available, machine.budget, title))
        click.echo(f"pybuild: wrote {plot}", err=True)
    if as_json:
        report = {
            "jobs": jobs,
            "fits": fits,
            "peak_bytes": round(played.peak),
            "worst_peak_bytes": round(worst),
            "peak_at_seconds": round(played.moment, 1) if known else None,
            "seconds": round(played.time, 1) if known else None,
            "runs": RUNS,
            "machine_cores": machine.cores,
            "available_bytes": machine.available,
            "reserve_bytes": machine.reserve,
            "budget_bytes": machine.budget,
            "package": work.package,
            "profile": work.profile.name if work.profile else None,
            "architectures": work.architectures,
            "nvcc_threads": work.threads,
        }
        click.echo(json.dumps(report, indent=2))
    else:
        moment = f", {format_time(played.moment)} after the start" if known else ""
        click.echo(f"peak    {format_gib(played.peak)}{moment}; up to {format_gib(worst)} in {RUNS} uneven runs")
        click.echo(f"time    {f'{played.time / 60:.1f} minutes' if known else 'not known'}")
        click.echo(
            f"budget  {format_gib(machine.budget)} of {format_gib(machine.available)} available, "
            f"{format_gib(machine.reserve)} in reserve"
        )
        click.echo(
            "answer  fits" if fits else f"answer  does not fit: {format_gib(worst - machine.budget)} over the budget"
        )
    if not fits:
        raise click.exceptions.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PybuildError(f"--plot {path} can't be written: {error.strerror}", "Name a file that can be.") from error
