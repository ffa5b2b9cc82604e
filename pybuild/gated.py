"""The gate over a planned build: its curves, and the budget that follows the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pybuild import forecast
from pybuild.curve import Curve
from pybuild.facts.host import read_host, read_memory
from pybuild.facts.machine import Machine
from pybuild.gate import MARGIN, Admission
from pybuild.learn import place_of, recall
from pybuild.profile import CAUTIOUS, workload
from pybuild.recommend import nvcc_threads, reserve_of
from pybuild.spec import BuildSpec
from pybuild.virtual import play

# A number of cores is as good as the best if its build takes at most this part longer.
_AS_GOOD = 0.02


def live_budget(machine: Machine) -> Callable[[float], int]:
    """What our compiles may hold together, in bytes, from what they hold now.

    What is available to the machine now, and what they hold already, less the reserve of pybuild.recommend. It is read
    anew each time, so others' memory is respected as it comes and goes.
    """

    def budget(held: float) -> int:
        room = read_memory(machine).available + int(held)
        return room - reserve_of(room)

    return budget


def place_for(spec: BuildSpec) -> Path:
    """Where what was measured on this machine of the kernels of `spec` is kept (`pybuild profile`)."""
    # recommend-cores does without.
    from pybuild.release import load_release, load_source

    architectures = [name.removeprefix("sm_") for name in spec.architectures]
    compiler = f"nvcc{load_release(spec.release).cuda}"
    return place_of(spec.package, load_source(spec.package).version, architectures, compiler)


def admission_for(spec: BuildSpec, cores: int, budget: Callable[[float], int]) -> Admission:
    """The gate for the kernels of `spec`, `cores` at once at most; what was measured here comes first."""
    curves = {**dict(workload(spec, nvcc_threads(spec)).compiles), **recall(place_for(spec))}
    return Admission(curve_of=lambda name: curves.get(name, CAUTIOUS), budget=budget, cores=cores)


def gated_time(curves: Sequence[Curve], cores: int, budget: float) -> float:
    """Seconds that a build of `curves` takes under the gate, with `budget` bytes, in virtual time."""
    named = {str(number): curve for number, curve in enumerate(curves)}
    # Steps of a second, where the gate itself looks twice a second: 1 % away from it, in a third of the time.
    admission = Admission(named.__getitem__, lambda held: budget, cores, step=1.0)
    return play(list(named.items()), admission, interval=1.0).time


def gated_cores(curves: Sequence[Curve], cores: int, budget: float) -> int:
    """The smallest number, of `cores` at most, with which a build under the gate is within 2 % of the fastest.

    A gated build runs out of memory with no number; so a smaller one only leaves cores to others. Compared are the
    times of pybuild.forecast, a few milliseconds each, with what the gate adds to every curve taken off the budget.
    """
    top = min(cores, len(curves))

    def seconds(number: int) -> float:
        return forecast.play([], curves, jobs=number, budget=max(budget / MARGIN, 1.0))

    longest = seconds(top) * (1 + _AS_GOOD)
    # No order is faster than all cores at work all the time.
    least = max(1, math.ceil(sum(curve.duration for curve in curves) / longest))
    return next((number for number in range(least, top) if seconds(number) <= longest), top)


def cores_here(spec: BuildSpec) -> int:
    """The number of cores for a gated build on this machine. Raises PybuildError for a bad profile."""
    host = read_host(programs=False)
    available = host.memory.available
    curves = workload(spec, nvcc_threads(spec)).curves
    return gated_cores(curves, host.cores.usable, available - reserve_of(available))
