"""Admission control for compilers, so that memory lasts. Standard library only, runs inside builds.

A compile's memory is a spike and a long cheap tail. The gate knows that shape (a curve, pybuild/curve.py), sees what
each running compile holds now, and lets the next one in when the sum of all that is to come fits the budget at every
moment.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pybuild.curve import Curve

# A forecast is this much higher than the curve it is made of: the stated error of a curve's memory. What was measured
# of one family in fp16 and bf16 differs by less (profiles/flash-attn-2.8.3.json).
MARGIN = 1.15

# The stated error of a curve's times, as a part of them. A spike is taken to begin and end that much earlier and later;
# a compile that strays farther is seen by its memory and its tool.
STRETCH = 0.02

# Over the budget by this factor, the youngest compile has to stop. With the budget at 90 % of memory: at 94.5 %.
_OVER = 1.05

# Seconds before a compile that had to stop may start again beside others.
_PAUSE = 10.0

# A compile that waits this many seconds, and ten times as long as it takes, is kept a place.
_PATIENCE = 1800.0

# The tools that run after the spike of a compile: cicc is what takes the memory.
_TAIL_TOOLS = frozenset({"ptxas", "fatbinary"})

# A forecast is one long integer, 32 bits a step, in MiB: one addition adds all steps of two compiles, and one
# subtraction compares them all with the budget. That takes microseconds where lists would take milliseconds.
_LANE = 32
_MIB = 1024 * 1024
_MOST = 1 << 29
_GUARD = 1 << 31


class Reading(Protocol):
    """A running compile as seen now: bytes held, and which tool holds most of them ('' if that is not known)."""

    @property
    def memory(self) -> int: ...
    @property
    def tool(self) -> str: ...


def _packed(values: Sequence[float], factor: float) -> int:
    """A forecast: each value in bytes times `factor`, rounded up."""
    lanes = [min(int(value * factor / _MIB) + 1, _MOST) for value in values]
    return int.from_bytes(struct.pack(f"<{len(lanes)}I", *lanes), "little")


class _Shape:
    """A curve in steps of time, with its stated error, ready to be summed."""

    def __init__(self, curve: Curve, step: float) -> None:
        self.curve = curve
        self.step = step
        self.count = int(curve.duration * (1 + STRETCH) / step) + 1
        starts = [self._highest(i * step, (i + 1) * step) for i in range(self.count)]
        # From a moment within a step, the next step's worth of time touches two.
        self._later = [max(pair) for pair in zip(starts, [*starts[1:], 0.0], strict=True)]
        self._starts = starts
        self._packed: dict[tuple[bool, int], int] = {}
        high = [index for index, memory in enumerate(curve.memory) if memory >= curve.peak / 2]
        self.rise = curve.times[curve.memory.index(curve.peak)]
        # The end of the spike: from here on the compile holds less than half of its peak, to its end.
        self.fall = curve.times[min(high[-1] + 1, len(curve.times) - 1)]
        self.single = high == list(range(high[0], high[-1] + 1))

    def _highest(self, start: float, end: float) -> float:
        """The most that the curve has between these times, or a little earlier or later."""
        start, end = start / (1 + STRETCH), end / (1 - STRETCH)
        times, memory = self.curve.times, self.curve.memory
        between = memory[bisect_left(times, start) : bisect_right(times, end)]
        return max(self.curve.at(start), self.curve.at(end), *between)

    def forecast(self, factor: float, position: float | None = None) -> int:
        """Memory from now on, of a compile at this position of its curve, or of one that starts now."""
        percent = math.ceil(factor * 100)
        key = (position is None, percent)
        if key not in self._packed:
            self._packed[key] = _packed(self._starts if position is None else self._later, percent / 100)
        return self._packed[key] >> _LANE * int(position / self.step) if position else self._packed[key]

    def ratio(self, memory: float, position: float) -> float:
        """How `memory`, seen on the way to the peak, compares with the least that the curve has there."""
        expected = self.curve.at(position * (1 - STRETCH))
        return memory / expected if expected > 0 else math.inf


@dataclass
class _Run:
    """What the gate knows of a running compile: where it is on its curve, and how it compares with it."""

    shape: _Shape
    started: float
    seen: float
    ratio: float = 1.0
    position: float = 0.0
    memory: float = 0.0
    highest: float = 0.0

    def look(self, now: float, reading: Reading) -> None:
        """Take in what is seen now: move along the curve, as far as tool and memory agree."""
        shape, peak = self.shape, self.shape.curve.peak
        self.position += max(0.0, now - self.seen)
        self.seen = now
        self.memory = reading.memory
        self.highest = max(self.highest, self.memory)
        self.ratio = max(self.ratio, self.memory / peak) if peak else self.ratio
        fallen = reading.tool in _TAIL_TOOLS or (self.highest >= 0.6 * peak and self.memory < 0.5 * self.highest)
        if shape.single and fallen:
            self.position = max(self.position, shape.fall)
        elif self.memory >= 0.5 * peak:  # the spike is not over
            self.position = min(self.position, shape.fall * (1 - 2 * STRETCH))
        elif self.highest < 0.6 * peak and reading.tool:  # it is still to come
            self.position = min(self.position, shape.rise * (1 - 2 * STRETCH))
        self.position = min(self.position, shape.curve.duration * (1 - 2 * STRETCH))

    def forecast(self, margin: float) -> int:
        """Memory from now on."""
        shape = self.shape
        factor = max(margin, self.ratio * 1.05)
        if shape.single and self.position >= shape.rise / 2 and self.ratio <= 1.05:
            # The compile itself shows what it takes, better than a margin does.
            shown = shape.ratio(self.highest, min(self.position, shape.rise))
            factor = min(factor, max(1.0, shown))
        ahead = shape.forecast(factor, self.position)
        held = int(self.memory / _MIB) + 1
        for lane in range(3):
            shift = _LANE * lane
            ahead += max(0, held - (ahead >> shift & (1 << _LANE) - 1)) << shift
        return ahead


@dataclass
class Admission:
    """The gate's decisions, one after the other. Time and readings are arguments, so it runs in virtual time as well.

    `curve_of` gives the curve for a compile's key. `budget` gives the bytes that our compiles may hold together, from
    those they hold now. `cores` is how many run at once at most. `step` is the seconds of one step of a forecast.
    """

    curve_of: Callable[[str], Curve]
    budget: Callable[[float], float]
    cores: int
    margin: float = MARGIN
    step: float = 0.5
    alone: set[str] = field(default_factory=set)
    _runs: dict[str, _Run] = field(default_factory=dict)
    _shapes: dict[Curve, _Shape] = field(default_factory=dict)
    _of_key: dict[str, _Shape] = field(default_factory=dict)
    _ones: int = 1
    _asked: dict[str, float] = field(default_factory=dict)
    _stopped: dict[str, float] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)

    def admit(self, now: float, running: Mapping[str, Reading], waiting: Sequence[str]) -> list[str]:
        """Those of `waiting` that start now, the longest first. With nothing running, at least one."""
        self._look(now, running)
        free = self.cores - len(running)
        if not waiting or free <= 0 or any(key in self.alone for key in running):
            return []
        for key in waiting:
            self._asked.setdefault(key, now)
            self._shape(key)
        single = next((key for key in waiting if key in self.alone), None)
        if single is not None:
            return [] if running else [self._start(single, now)]
        lanes = max(shape.count for shape in self._shapes.values())
        self._ones = ((1 << _LANE * (2 * lanes + 3)) - 1) // ((1 << _LANE) - 1)
        load = sum(run.forecast(self.margin) for run in self._runs.values())
        budget = self.budget(sum(run.memory for run in self._runs.values()))
        admitted: list[str] = []
        due = min(waiting, key=self._asked.__getitem__)
        if now > self._asked[due] + max(_PATIENCE, 10 * self._shape(due).curve.duration):
            # It has been overtaken for long: whoever starts now must not be in its way.
            if self._fits(budget, load, self._needs(due)) or not running:
                return [self._start(due, now)]
            load += self._reserved(budget, load, self._needs(due))
        paused = running and {key for key, stopped in self._stopped.items() if now < stopped + _PAUSE}
        groups: dict[int, tuple[int, Curve, list[str]]] = {}  # by the identity of what they need
        for key in waiting:
            if not paused or key not in paused:
                needs = self._needs(key)
                groups.setdefault(id(needs), (needs, self._shape(key).curve, []))[2].append(key)
        for needs, _, keys in self._ordered(list(groups.values()), budget):
            for key in sorted(keys, key=self._asked.__getitem__)[:free]:
                if not self._fits(budget, load, needs) and (running or admitted):
                    break
                admitted.append(self._start(key, now))
                load += needs
                free -= 1
            if free <= 0:
                break
        return admitted

    def evict(self, now: float, running: Mapping[str, Reading]) -> list[str]:
        """Those of `running` that have to stop, the youngest first, where memory is short. Never the oldest."""
        self._look(now, running)
        held = sum(run.memory for run in self._runs.values())
        limit = self.budget(held) * _OVER
        evicted: list[str] = []
        for key in sorted(running, key=lambda key: self._runs[key].started, reverse=True)[:-1]:
            if held <= limit:
                break
            run = self._runs.pop(key)
            held -= run.memory
            self._ratios[key] = run.ratio
            self._stopped[key] = now
            evicted.append(key)
        return evicted

    def _look(self, now: float, running: Mapping[str, Reading]) -> None:
        for key in [key for key in self._runs if key not in running]:
            del self._runs[key]
        for key, reading in running.items():
            if key not in self._runs:
                self._runs[key] = _Run(self._shape(key), now, now, ratio=self._ratios.get(key, 1.0))
            self._runs[key].look(now, reading)

    def _shape(self, key: str) -> _Shape:
        found = self._of_key.get(key)
        if found is None:
            curve = self.curve_of(key)
            found = self._shapes.get(curve)
            if found is None:
                found = self._shapes[curve] = _Shape(curve, self.step)
            self._of_key[key] = found
        return found

    def _needs(self, key: str) -> int:
        return self._shape(key).forecast(max(self.margin, self._ratios.get(key, 1.0) * 1.05))

    def _ordered(self, groups: list[tuple[int, Curve, list[str]]], budget: float) -> list[tuple[int, Curve, list[str]]]:
        """First what uses up most of the machine, its cores and its memory."""
        cores, memory = self.cores, max(budget, 1.0)
        return sorted(groups, key=lambda group: -group[1].duration / cores - group[1].area / memory)

    def _fits(self, budget: float, load: int, needs: int) -> bool:
        """Whether load and needs together are within the budget in every step.

        Each step of the difference has one more bit, which is set unless the step is below zero.
        """
        guards = self._ones * _GUARD
        return (self._ones * (min(int(budget / _MIB), _MOST) + _GUARD) - load - needs) & guards == guards

    def _reserved(self, budget: float, load: int, needs: int) -> int:
        """`needs`, from the first moment on at which they fit beside `load`; nothing if they never fit."""
        steps = load.bit_length() // _LANE + 1
        return next((needs << _LANE * n for n in range(steps) if self._fits(budget, load, needs << _LANE * n)), 0)

    def _start(self, key: str, now: float) -> str:
        self._runs[key] = _Run(self._shape(key), now, now, ratio=self._ratios.get(key, 1.0))
        return key
