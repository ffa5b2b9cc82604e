"""The gate over a planned build: its curves, and the budget that follows the machine."""

from __future__ import annotations

from collections.abc import Callable

from pybuild.gate import Admission
from pybuild.host import read_memory
from pybuild.machine import Machine
from pybuild.profile import CAUTIOUS, workload
from pybuild.recommend import nvcc_threads, reserve_of
from pybuild.spec import BuildSpec


def live_budget(machine: Machine) -> Callable[[float], int]:
    """What our compiles may hold together, in bytes, from what they hold now.

    What is available to the machine now, and what they hold already, less the reserve of pybuild.recommend. It is read
    anew each time, so others' memory is respected as it comes and goes.
    """

    def budget(held: float) -> int:
        room = read_memory(machine).available + int(held)
        return room - reserve_of(room)

    return budget


def admission_for(spec: BuildSpec, cores: int, budget: Callable[[float], int]) -> Admission:
    """The gate for the kernels of `spec`, `cores` at once at most."""
    curves = dict(workload(spec, nvcc_threads(spec)).compiles)
    return Admission(curve_of=lambda name: curves.get(name, CAUTIOUS), budget=budget, cores=cores)
