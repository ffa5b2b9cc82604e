"""How many compiles may run at once: what the cores and the memory allow, from a profile of the compiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pybuild.curve import Curve
from pybuild.profile import workload
from pybuild.simulate import Trials
from pybuild.spec import BuildSpec
from pybuild.units import GIB, MIB

if TYPE_CHECKING:
    from pybuild.facts.host import Host


def reserve_of(available: int) -> int:
    """Bytes left to the rest of the machine unless the user says otherwise: 10 % of `available`, at least 2 GiB."""
    return max(2 * GIB, available // 10)


def core_cap(cores: int, available: int, peak: int, reserve: int | None = None) -> int:
    """Compiles of `peak` bytes that `cores` and `available` bytes allow, at least 1, whatever each does over time.

    The build derives the same number where it runs (nix/jobs.py); nix/cap-vectors.json holds both to it.
    """
    budget = available - (reserve_of(available) if reserve is None else reserve)
    return max(1, min(cores, budget // peak))


def nvcc_threads(spec: BuildSpec) -> int:
    """nvcc's --threads in our builds (nix/extension/): one for each architecture."""
    return len(spec.architectures)


def recommend(curves: Sequence[Curve], cores: int, budget: int) -> int:
    """The largest number of jobs whose peak is within `budget` bytes in every run; at most `cores`, at least 1.

    It is for builds that no gate watches. The peak does not always grow with the jobs, since other compiles meet; so
    the search goes down from the largest number that is possible.
    """
    # So many fit even where all peaks meet; in whole MiB, as in the runs.
    highest = sorted((-int(-curve.peak // MIB) * MIB for curve in curves), reverse=True)
    sure = sum(total <= budget for total in accumulate(highest))
    if sure >= min(cores, len(curves)):
        return cores
    trials = Trials(curves)
    # The first compiles all start at once: what they hold together bounds the search.
    jobs = min(cores, sum(peak <= budget for peak in trials.together()))
    while jobs > max(1, sure) and any(peak > budget for peak in trials.peaks(jobs)):
        jobs -= 1
    return cores if jobs == len(curves) else max(1, jobs)


def cores_for(spec: BuildSpec, host: Host) -> int:
    """The number of cores for a build on `host` that no gate watches. Raises PybuildError for a bad profile."""
    available = host.memory.available
    work = workload(spec, nvcc_threads(spec))
    return recommend(work.curves, host.cores.usable, available - reserve_of(available))
