"""Memory of one compile over time. Standard library only: the gate uses it inside derivations."""

from __future__ import annotations

import functools
from bisect import bisect_right
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
