"""Memory of one compile over time. Standard library only: the gate uses it inside derivations."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Resident memory of one compile and all its children.

    `times` are seconds since its start, ascending, beginning with 0; `memory` are bytes at those times,
    linear between them. After the last time the compile is over and holds nothing.
    """

    times: tuple[float, ...]
    memory: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.memory):
            raise ValueError("a curve needs as many times as memory readings, and at least one")
        if self.times[0] != 0 or any(a >= b for a, b in zip(self.times, self.times[1:], strict=False)):
            raise ValueError("a curve's times begin with 0 and ascend")

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.times[-1]

    @functools.cached_property
    def peak(self) -> float:
        """The highest memory, in bytes."""
        return max(self.memory)

    @functools.cached_property
    def area(self) -> float:
        """Memory over time, in byte-seconds."""
        points = zip(self.times, self.times[1:], self.memory, self.memory[1:], strict=False)
        return sum((t1 - t0) * (m0 + m1) / 2 for t0, t1, m0, m1 in points)

    def at(self, time: float) -> float:
        """Bytes held `time` seconds after the start; 0 before it and after the end."""
        if time < 0 or time > self.times[-1]:
            return 0.0
        right = bisect_right(self.times, time)
        if right == len(self.times):
            return self.memory[-1]
        t0, t1 = self.times[right - 1], self.times[right]
        m0, m1 = self.memory[right - 1], self.memory[right]
        return m0 + (m1 - m0) * (time - t0) / (t1 - t0)

    def scaled(self, *, time: float = 1.0, memory: float = 1.0) -> Curve:
        """The same shape with every time and every reading multiplied."""
        return Curve(tuple(t * time for t in self.times), tuple(m * memory for m in self.memory))


def measured_curve(samples: Iterable[Sequence[float]], wall: float, peak: float) -> Curve:
    """The curve of a profile's compile: `samples` are [seconds, MiB], `wall` its seconds, `peak` its highest MiB.

    The samples kept may miss the peak; the highest of them is raised to it.
    """
    times, memory = [0.0], [0.0]
    for time, mib in samples:
        if time > times[-1]:
            times.append(time)
            memory.append(mib * 1024**2)
    if wall > times[-1]:
        times.append(wall)
        memory.append(memory[-1])
    highest = memory.index(max(memory))
    memory[highest] = max(memory[highest], peak * 1024**2)
    return Curve(tuple(times), tuple(memory))


# Seconds that an architecture takes, relative to sm_100 (profiles/flash-attn-2.8.3.json): three kernels were measured
# for sm_90 and took 1.79, 1.80 and 2.30 times the time, the one for sm_120 1.08 times. sm_80 was measured together with
# others only: four architectures took 5.75 to 6.78 times the CPU time of sm_100, which leaves 2.1 for it.
_TIME = {"sm_80": 2.1, "sm_90": 1.96, "sm_100": 1.0, "sm_120": 1.08}

# Memory of four architectures at once, relative to one: 3.86, 3.59, 3.80 and 3.76 in the four kernels measured. The
# peaks nearly add up, since they come at nearly the same time: each further one adds 11/12.
_OVERLAP = 11 / 12


def rounds(architectures: Collection[str], threads: int) -> list[list[float]]:
    """The times of the architectures relative to sm_100, those compiled at once together, the slowest first."""
    factors = sorted((_TIME.get(name, max(_TIME.values())) for name in architectures), reverse=True)
    at_once = max(1, min(threads, len(factors)))
    return [factors[start : start + at_once] for start in range(0, len(factors), at_once)]


def scale(one: Curve, architectures: Collection[str], threads: int) -> Curve:
    """The curve of a compile for several architectures, from that for sm_100.

    `threads` of them are compiled at once, the rest after them, drawn as one long spike. The time is the slowest's:
    with four architectures and threads the measured compiles took 2.07 to 2.53 times the time of sm_100 alone.
    """
    found = rounds(architectures, threads)
    at_once = max(map(len, found), default=1)
    return one.scaled(time=sum(map(max, found)) or 1.0, memory=1 + _OVERLAP * (at_once - 1))
