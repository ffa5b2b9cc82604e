"""A build in virtual time: compiles in the build's own order, so many at once, and the memory they hold together.

At any moment all compiles of a build run equally fast: at full speed while the cores hold their threads, else slowed by
threads / cores. So there are two steps. In progress time, where every compile runs at full speed, the memory held is an
exact sum of curves; then progress time is stretched to real time. It follows that the peak does not depend on the
cores; only its moment does.
"""

from __future__ import annotations

import random
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, repeat

from pybuild.curve import Curve
from pybuild.units import MIB

RUNS = 200
"""Runs with uneven durations that a number of jobs has to pass."""

# Changes of a compile's duration, of which each run draws one for each compile: so many steps become so many. The fp16
# and bf16 twins of a kernel are the same work, measured twice: over the 36 pairs of profiles/flash-attn-2.8.3.json one
# measurement strays by 4 % (standard deviation; the logarithm of a twin's ratio over the root of 2), 11 % at most.
_CHANGES = ((1, 1), (10, 9), (20, 19), (20, 21), (10, 11))

# Steps of the longest compile in `Trials`: 1 s for flash-attn, whose curves have a reading every 4 s. 300 steps find
# peaks that are 0 to 1 % lower, and take 1.4 times as long.
_STEPS = 200

# Bytes that hold the memory of one step, in MiB.
_LANE = 4


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
        return self.points[-1][0]

    @property
    def peak(self) -> float:
        """The most bytes held at any moment."""
        return max(memory for _, memory in self.points)

    @property
    def moment(self) -> float:
        """Seconds from the start to the peak, the first where there are several."""
        return max(self.points, key=lambda point: point[1])[0]


def simulate(curves: Sequence[Curve], jobs: int, *, cores: float, threads: float = 1.0) -> Simulation:
    """Play a build of `curves`, at least one, in their order, `jobs` at once; the next starts at the moment one ends.

    `threads` is how many cores one compile keeps busy, on average. More of them than `cores` slow each other down.
    """
    if not curves or jobs < 1:
        raise ValueError("a build has at least one compile, and one job")
    ends = [curve.duration for curve in curves[:jobs]]
    starts = [0.0] * len(ends)
    heapify(ends)
    for curve in curves[jobs:]:
        starts.append(ends[0])
        heapreplace(ends, ends[0] + curve.duration)
    real = _real_time(curves, starts, cores / threads)
    return Simulation(tuple((real(time), memory) for time, memory in _sums(curves, starts)), tuple(map(real, starts)))


def _sums(curves: Sequence[Curve], starts: Sequence[float]) -> Iterator[tuple[float, float]]:
    """(seconds, bytes of all curves together) wherever that sum bends, in progress time; a jump is two points."""
    # Time, jump in bytes, bend in bytes/s.
    changes: list[tuple[float, float, float]] = []
    for curve, start in zip(curves, starts, strict=True):
        jump, before = curve.memory[0], 0.0
        for t0, t1, m0, m1 in zip(curve.times, curve.times[1:], curve.memory, curve.memory[1:], strict=False):
            slope = (m1 - m0) / (t1 - t0)
            changes.append((start + t0, jump, slope - before))
            jump, before = 0.0, slope
        if jump:
            # A compile of no length holds its memory for a moment.
            changes.append((start, jump, 0.0))
        changes.append((start + curve.duration, -curve.memory[-1], -before))
    # What ends at a time comes before what starts at it: the sort is stable, and the compiles start in their order.
    changes.sort(key=lambda change: change[0])
    last = memory = slope = 0.0
    for time, jump, bend in changes:
        memory += slope * (time - last)
        yield time, memory
        if jump:
            memory += jump
            yield time, memory
        last, slope = time, slope + bend


def _real_time(curves: Sequence[Curve], starts: Sequence[float], full_speed: float) -> Callable[[float], float]:
    """A function from progress time to real time: as much slower as there are more compiles than run at full speed."""
    ends = [start + curve.duration for curve, start in zip(curves, starts, strict=True)]
    knots, real, pace, running = [0.0], [0.0], [1.0], 0
    for time, change in sorted(chain(zip(starts, repeat(1), strict=False), zip(ends, repeat(-1), strict=False))):
        real.append(real[-1] + (time - knots[-1]) * pace[-1])
        knots.append(time)
        running += change
        pace.append(max(1.0, running / full_speed))

    def convert(time: float) -> float:
        knot = bisect_right(knots, time) - 1
        return real[knot] + (time - knots[knot]) * pace[knot]

    return convert


class Trials:
    """Runs of one build, each with other durations: the same in every process, and for every number of jobs.

    Time goes in steps, of which each compile takes a whole number, and holds in each the most that its curve has there:
    a peak found here is not lower than that of the same durations in continuous time. The first run has the durations
    that were measured.

    A run takes 0.1 ms instead of the 3 ms of `simulate`: the steps of a job are one long integer, 32 bits a step, and
    one addition adds all steps of two jobs.
    """

    def __init__(self, curves: Sequence[Curve], runs: int = RUNS) -> None:
        if sum(curve.peak for curve in curves) >= MIB << 8 * _LANE:
            raise ValueError("curves that hold 4 PiB together")
        step = max(curve.duration for curve in curves) / _STEPS or 1.0
        measured = [_steps(curve, round(curve.duration / step) or 1) for curve in curves]
        choices = [_changed(memory) for memory in measured]
        self._runs = [measured]
        generator = random.Random(0)
        # Of all that `random` has, random() alone gives the same numbers in every version of Python.
        for _ in range(runs - 1):
            self._runs.append([changed[int(generator.random() * len(_CHANGES))] for changed in choices])

    def together(self) -> Iterator[int]:
        """The peak of the first compile, of the first two, and so on, all started at once, in bytes.

        Ascending. In the first run, so many jobs hold no less.
        """
        held = 0
        for memory in self._runs[0]:
            held += int.from_bytes(memory, "little")
            yield _highest(held)

    def peaks(self, jobs: int) -> Iterator[int]:
        """The peak of each run with `jobs` at once, in bytes."""
        for run in self._runs:
            # What each job does, one compile after another, and when it is free: steps * jobs + the job's number.
            work = [[memory] for memory in run[:jobs]]
            free = [len(memory) // _LANE * jobs + job for job, memory in enumerate(run[:jobs])]
            heapify(free)
            for memory in run[jobs:]:
                work[free[0] % jobs].append(memory)
                heapreplace(free, free[0] + len(memory) // _LANE * jobs)
            yield _highest(sum(int.from_bytes(b"".join(memory), "little") for memory in work))


def _highest(held: int) -> int:
    """The most memory in any step, in bytes."""
    steps = held.bit_length() // (8 * _LANE) + 1
    memory: tuple[int, ...] = struct.unpack(f"<{steps}I", held.to_bytes(steps * _LANE, "little"))
    return MIB * max(memory)


def _changed(memory: bytes) -> list[bytes]:
    """The steps of a compile with each of its durations.

    Longer, a step of each part comes twice; shorter, two become one that holds the most of both. A rest that makes no
    full part keeps its length.
    """
    steps = struct.unpack(f"<{len(memory) // _LANE}I", memory)
    # At each step the higher of it and the next.
    both = struct.pack(f"<{len(steps)}I", *map(max, steps, (*steps[1:], 0)))
    changed = [memory]
    for before, after in _CHANGES[1:]:
        part = before * _LANE
        rest = len(memory) // part * part
        pieces: list[bytes] = []
        for start in range(0, rest, part):
            last = start + part - _LANE
            if after < before:
                pieces += memory[start : last - _LANE], both[last - _LANE : last]
            else:
                pieces += memory[start : start + part], memory[last : start + part]
        changed.append(b"".join((*pieces, memory[rest:])))
    return changed


def _steps(curve: Curve, steps: int) -> bytes:
    """The highest memory in each of as many steps as the curve takes, in MiB, rounded up: 4 bytes a step."""
    highest = [curve.memory[0]]
    scale = steps / (curve.duration or 1.0)
    t0, m0 = 0.0, curve.memory[0]
    for time, m1 in zip(curve.times[1:], curve.memory[1:], strict=True):
        t1 = time * scale
        here, there = len(highest) - 1, min(int(t1), steps - 1)
        if there > here:
            slope = (m1 - m0) / (t1 - t0)
            start = m0 - slope * t0
            if slope > 0:
                # Up: each step is highest at its end.
                highest[here] = max(highest[here], start + slope * (here + 1))
                highest += [start + slope * (step + 1) for step in range(here + 1, there)]
                highest.append(m1)
            else:
                highest += [start + slope * step for step in range(here + 1, there + 1)]
        elif m1 > highest[here]:
            highest[here] = m1
        t0, m0 = t1, m1
    # A byte is left out, since points on a line may be off by a fraction of one.
    return struct.pack(f"<{steps}I", *[-int(-(memory - 1) // MIB) for memory in highest])
