"""What a compile needs: memory over time, measured, and scaled to other architectures and threads.

The files in profiles/ have the format that `pybuild profile` writes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pybuild.curve import Curve
from pybuild.errors import PybuildError
from pybuild.units import GIB, MIB


class Compile(BaseModel):
    """One source, compiled once and watched.

    `archs` are nvcc's names (sm_100), none for C++; `memory_mib` holds [seconds since the start, MiB] of the compiler
    and all its children; `peak_mib` is the highest of all samples, of which `memory_mib` may keep a part. `estimated`
    says from what, where the compile was not measured itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    archs: tuple[str, ...]
    nvcc_threads: int = 1
    wall_s: float
    cpu_s: float
    peak_mib: float
    tool_peak_mib: dict[str, float]
    memory_mib: tuple[tuple[float, float], ...]
    object_bytes: int | None = None
    estimated: str | None = None
    measured: str | None = None

    def curve(self) -> Curve:
        """The curve of this compile, with its true peak.

        The samples kept may miss the peak; the highest of them is raised to it.
        """
        times, memory = [0.0], [0.0]
        for time, mib in self.memory_mib:
            if time > times[-1]:
                times.append(time)
                memory.append(mib * MIB)
        if self.wall_s > times[-1]:
            times.append(self.wall_s)
            memory.append(memory[-1])
        highest = memory.index(max(memory))
        memory[highest] = max(memory[highest], self.peak_mib * MIB)
        return Curve(tuple(times), tuple(memory))


class Profile(BaseModel):
    """The compiles of a package, in the order in which its build starts them, and where they were measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    source: str
    compiler: str
    machine: str
    sampled: str
    missing: str = ""
    order: str = ""
    compiles: tuple[Compile, ...]

    def curves(
        self, architectures: Collection[str], threads: int, kernels: Collection[str] | None = None
    ) -> list[tuple[str, Curve]]:
        """Name and curve of each compile of a build for `architectures` (sm_100, ...), in the build's order.

        `threads` is nvcc's --threads: how many architectures one compile works on at once. `kernels` selects some by
        name; None means all. A compile of C++ is the same for all architectures.
        """
        return [
            (compile_.kernel, scale(compile_.curve(), architectures, threads) if compile_.archs else compile_.curve())
            for compile_ in self.compiles
            if len(compile_.archs) <= 1 and compile_.archs in ((), ("sm_100",))
            if kernels is None or compile_.kernel in kernels
        ]


# Seconds that an architecture takes, relative to sm_100 (profiles/flash-attn-2.8.3.json): three kernels were measured for
# sm_90 and took 1.79, 1.80 and 2.30 times the time, the one for sm_120 1.08 times. sm_80 was measured together with others
# only: four architectures took 5.75 to 6.78 times the CPU time of sm_100, which leaves 2.1 for it.
_TIME = {"sm_80": 2.1, "sm_90": 1.96, "sm_100": 1.0, "sm_120": 1.08}

# Memory of four architectures at once, relative to one: 3.86, 3.59, 3.80 and 3.76 in the four kernels measured. The
# peaks nearly add up, since they come at nearly the same time.
_OVERLAP = (3.75 - 1) / 3


def scale(one: Curve, architectures: Collection[str], threads: int) -> Curve:
    """The curve of a compile for several architectures, from that for sm_100.

    `threads` of them are compiled at once, the rest after them. The time is that of the slowest at once: with four
    architectures and threads the measured compiles took 2.07 to 2.53 times the time of sm_100 alone.
    """
    factors = sorted((_TIME.get(name, max(_TIME.values())) for name in architectures), reverse=True)
    at_once = max(1, min(threads, len(factors)))
    # As many rounds as it takes, the slowest architectures together.
    time = sum(factors[start] for start in range(0, len(factors), at_once)) or 1.0
    return one.scaled(time=time, memory=1 + _OVERLAP * (at_once - 1))


CAUTIOUS = Curve((0.0, 10.0, 240.0), (0.0, 8 * GIB, 8 * GIB))
"""A compile of which nothing is known: 8 GiB for four minutes. More than any of one architecture that was measured."""


@functools.cache
def load_profile(package: str) -> Profile | None:
    """The profile that pybuild ships for a package; None where it has none. Raises PybuildError for one that is bad."""
    folder = Path(__file__).parent / "profiles"
    paths = sorted(folder.glob(f"{package}-[0-9]*.json"))
    return read_profile(paths[-1]) if paths else None


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises PybuildError where it can't be read or is not one."""
    try:
        return Profile.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise PybuildError(f"{path} can't be read: {error.strerror}", "Name a profile that exists.") from error
    except (ValidationError, ValueError) as error:
        raise PybuildError(f"{path} is no profile: {error}", "Make one with `pybuild profile`.") from error
