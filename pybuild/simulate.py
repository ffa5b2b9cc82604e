"""A build in virtual time: compiles in the build's own order, so many at once, and the memory they hold together.

At any moment all compiles of a build run equally fast: at full speed while the cores hold their threads, else slowed by
threads / cores. So there are two steps. In progress time, where every compile runs at full speed, the memory held is an
exact sum of curves; then progress time is stretched to real time. It follows that the peak does not depend on the cores;
only its moment does.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, repeat
from operator import add, mul, truediv

from pybuild.curve import Curve

RUNS = 200
"""Runs with uneven durations that a number of jobs has to pass."""

# Durations stray from the measured ones by up to this fraction either way. The fp16 and bf16 twins of a kernel are the
# same work, measured twice: over the 36 pairs of profiles/flash-attn-2.8.3.json one measurement strays by 4 % (standard
# deviation; a twin's logarithm over sqrt 2), 11 % at most.
JITTER = 0.11

# How far an outline's line may lie above its curve, as a part of the curve's peak. 0.1 makes 500 lines of flash-attn's
# 2,000: finer ones settle more runs, coarser ones cost less a run.
_TOLERANCE = 0.1


@dataclass(frozen=True)
class Simulation:
    """What a build holds over time.

    `points` are (seconds since the build's start, bytes), ascending, linear between them; two of one time are a jump.
    `starts` are the seconds at which each compile starts, in the build's order.
    """

    points: tuple[tuple[float, float], ...]
    starts: tuple[float, ...]

    @property
    def time(self) -> float:
        """Seconds from the start of the first compile to the end of the last."""
        return self.points[-1][0] if self.points else 0.0

    @property
    def peak(self) -> float:
        """The most bytes held at any moment."""
        return max((memory for _, memory in self.points), default=0.0)

    @property
    def moment(self) -> float:
        """Seconds from the start to the peak, the first where there are several."""
        return max(self.points, key=lambda point: point[1], default=(0.0, 0.0))[0]


def simulate(curves: Sequence[Curve], jobs: int, *, cores: float, threads: float = 1.0) -> Simulation:
    """Play a build of `curves` in their order, `jobs` at once; the next starts at the moment one ends.

    `threads` is how many of the `cores` one compile keeps busy, on average. More compiles than there are cores for slow
    each other down.
    """
    lines = _Lines([_exact(curve) for curve in curves])
    durations = [curve.duration for curve in curves]
    starts = _schedule(durations, jobs)
    real_time = _real_time(starts, durations, cores / threads)
    points = [(real_time(time), memory) for time, memory in lines.sums(lines.times, lines.bends, starts)]
    return Simulation(tuple(points), tuple(map(real_time, starts)))


class Trials:
    """Runs of one build with uneven durations: the same durations in every process, for every number of jobs.

    The first run has the durations measured, the others each duration times a factor from 1 - JITTER to 1 + JITTER.
    """

    def __init__(self, curves: Sequence[Curve], runs: int = RUNS) -> None:
        self._curves = curves
        generator = random.Random(0)
        self._factors: list[list[float]] = [[1.0] * len(curves)]
        for _ in range(runs - 1):
            self._factors.append([1 - JITTER + 2 * JITTER * generator.random() for _ in curves])
        self._exact = _Lines([_exact(curve) for curve in curves])
        self._outline = _Lines([_outline(curve) for curve in curves])
        self._durations = [curve.duration for curve in curves]
        # What a run needs that is the same for every number of jobs.
        self._runs: dict[int, tuple[list[float], list[float], list[float]]] = {}

    def peaks(self, jobs: int) -> Iterator[float]:
        """The peak of each run with `jobs` at once, in bytes."""
        for factors in self._factors:
            starts = _schedule([d * f for d, f in zip(self._durations, factors, strict=True)], jobs)
            yield self._exact.peak(*self._exact.stretched(factors), starts)[0]

    def all_fit(self, jobs: int, budget: float) -> bool:
        """Whether every peak with `jobs` at once is within `budget` bytes. The same as `peaks` says, 5 times as fast.

        Most runs are settled by outlines, which are never below their curves: where their sum fits, so does the curves'.
        Where it does not, the curves often exceed the budget at the very moment of the outlines' peak. What is left
        between is summed exactly.
        """
        for run, factors in enumerate(self._factors):
            if run not in self._runs:
                durations = [d * f for d, f in zip(self._durations, factors, strict=True)]
                self._runs[run] = (durations, *self._outline.stretched(factors))
            durations, times, bends = self._runs[run]
            starts = _schedule(durations, jobs)
            peak, moment = self._outline.peak(times, bends, starts)
            if peak <= budget:
                continue
            if self._held(factors, starts, moment) > budget:
                return False
            if self._exact.peak(*self._exact.stretched(factors), starts)[0] > budget:
                return False
        return True

    def _held(self, factors: Sequence[float], starts: Sequence[float], moment: float) -> float:
        """Bytes held at a moment; where one compile starts as another ends, not both."""
        return sum(
            curve.at((moment - start) / factor)
            for curve, factor, start in zip(self._curves, factors, starts, strict=True)
            if start < moment
        )


def _schedule(durations: Sequence[float], jobs: int) -> list[float]:
    """When each starts, in seconds, with `jobs` at once."""
    if jobs < 1:
        raise ValueError("at least one job at once")
    ends = list(durations[:jobs])
    starts = [0.0] * len(ends)
    heapify(ends)
    for duration in durations[jobs:]:
        start = ends[0]
        starts.append(start)
        heapreplace(ends, start + duration)
    return starts


def _real_time(
    starts: Sequence[float], durations: Sequence[float], compiles_at_full_speed: float
) -> Callable[[float], float]:
    """A function from progress time to real time: slower by as much as there are more compiles than run at full speed."""
    ends = map(add, starts, durations)
    knots, real, pace, running = [0.0], [0.0], [1.0], 0
    for time, change in sorted(chain(zip(starts, repeat(1)), zip(ends, repeat(-1)))):
        real.append(real[-1] + (time - knots[-1]) * pace[-1])
        knots.append(time)
        running += change
        pace.append(max(1.0, running / compiles_at_full_speed))

    def convert(time: float) -> float:
        knot = bisect_right(knots, time) - 1
        return real[knot] + (time - knots[knot]) * pace[knot]

    return convert


# A straight piece of a curve: from (seconds, bytes) to (seconds, bytes).
_Line = tuple[float, float, float, float]


class _Lines:
    """The pieces of all curves of a build, as what changes at each of their ends: a jump in bytes, a bend in bytes/s.

    Flat lists over all curves; `_owner` is the curve that each entry is of.
    """

    def __init__(self, curves: Sequence[Sequence[_Line]]) -> None:
        self.times: list[float] = []
        self.bends: list[float] = []
        self._jumps: list[float] = []
        self._owner: list[int] = []
        for owner, lines in enumerate(curves):
            before, slope_before = 0.0, 0.0
            for t0, m0, t1, m1 in lines:
                slope = (m1 - m0) / (t1 - t0) if t1 > t0 else 0.0
                self.times.append(t0)
                self._jumps.append(m0 - before)
                self.bends.append(slope - slope_before)
                before, slope_before = m1, slope
            self.times.append(lines[-1][2])
            self._jumps.append(-before)
            self.bends.append(-slope_before)
            self._owner += [owner] * (len(lines) + 1)

    def stretched(self, factors: Sequence[float]) -> tuple[list[float], list[float]]:
        """`times` and `bends` with each curve's duration times its factor."""
        by_entry = [factors[owner] for owner in self._owner]
        return list(map(mul, self.times, by_entry)), list(map(truediv, self.bends, by_entry))

    def _in_order(
        self, times: Sequence[float], bends: Sequence[float], starts: Sequence[float]
    ) -> Iterator[tuple[float, float, float]]:
        """Time, jump and bend of each entry, ascending in time.

        What ends at a time comes before what starts at it: the sort is stable, and curves start in their order.
        """
        moments = list(map(add, map(starts.__getitem__, self._owner), times))
        order = sorted(range(len(moments)), key=moments.__getitem__)
        return zip(
            map(moments.__getitem__, order),
            map(self._jumps.__getitem__, order),
            map(bends.__getitem__, order),
            strict=True,
        )

    def sums(
        self, times: Sequence[float], bends: Sequence[float], starts: Sequence[float]
    ) -> Iterator[tuple[float, float]]:
        """(seconds, bytes of all curves together) at every change; a jump is two points."""
        last = memory = slope = 0.0
        for moment, jump, bend in self._in_order(times, bends, starts):
            memory += slope * (moment - last)
            yield moment, memory
            if jump:
                memory += jump
                yield moment, memory
            last, slope = moment, slope + bend

    def peak(self, times: Sequence[float], bends: Sequence[float], starts: Sequence[float]) -> tuple[float, float]:
        """The highest of `sums`, and its time. Written out, since this is where the time goes."""
        last = memory = slope = peak = at = 0.0
        for moment, jump, bend in self._in_order(times, bends, starts):
            memory += slope * (moment - last)
            if memory > peak:
                peak, at = memory, moment
            memory += jump
            if memory > peak:
                peak, at = memory, moment
            last = moment
            slope += bend
        return peak, at


def _exact(curve: Curve) -> list[_Line]:
    """The pieces of a curve; of a curve that ends where it begins, one of no length."""
    points = list(zip(curve.times, curve.memory, strict=True))
    return [(*a, *b) for a, b in zip(points, points[1:] or points, strict=False)]


def _outline(curve: Curve) -> list[_Line]:
    """Fewer pieces, nowhere below the curve, and above it by at most 2 * _TOLERANCE of its peak."""
    tolerance = _TOLERANCE * curve.peak
    times, memory = curve.times, curve.memory

    def cover(left: int, right: int) -> Iterator[_Line]:
        slope = (memory[right] - memory[left]) / (times[right] - times[left])
        above = [memory[i] - memory[left] - slope * (times[i] - times[left]) for i in range(left, right)]
        farthest = max(range(len(above)), key=lambda i: abs(above[i]))
        if abs(above[farthest]) > tolerance:
            yield from cover(left, left + farthest)
            yield from cover(left + farthest, right)
        else:
            up = max(above)
            yield times[left], memory[left] + up, times[right], memory[right] + up

    return list(cover(0, len(times) - 1)) if len(times) > 1 else _exact(curve)
