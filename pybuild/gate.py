"""Admission control for compilers: who may start now, so that memory lasts. Standard library only, runs inside builds.

A compile's memory is a spike and a long cheap tail. The gate knows that shape (a curve, pybuild/curve.py), sees what each
running compile holds now, and lets the next one in when the sum of all that is to come fits the budget at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pybuild.curve import Curve

# A forecast is this much higher than the curve it is made of. What was measured of one kernel on two machines, and of one
# family in fp16 and bf16, differs by less (profiles/flash-attn-2.8.3.json).
MARGIN = 1.15

# A curve's times are good to this part of themselves; what comes earlier or later than that is seen by its memory.
_STRETCH = 0.1

# Seconds of one step of a forecast, and steps that a forecast looks ahead at most: 20 minutes.
_STEP = 2.0
_STEPS = 600

# Over the budget by this factor, the youngest compile has to stop. With the budget at 90 % of memory: at 94.5 %.
_OVER = 1.05

# Seconds before a compile that had to stop may start again beside others.
_PAUSE = 10.0

# Checks of a candidate's whole curve in one decision. Whoever is not looked at waits for the next, half a second later.
_CHECKS = 300

# A compile that waits this many seconds, and ten times as long as it takes, is kept a place.
_PATIENCE = 1800.0

# The tools that run after the spike of a compile: cicc is what takes the memory.
_TAIL_TOOLS = frozenset({"ptxas", "fatbinary"})


class Reading(Protocol):
    """A running compile as seen now: bytes held, and which tool holds most of them ('' if that is not known)."""

    @property
    def memory(self) -> int: ...
    @property
    def tool(self) -> str: ...


class _Shape:
    """A curve in steps: the highest memory within each step, ready to be summed."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.duration = curve.duration
        self.peak = curve.peak
        count = min(_STEPS, int(curve.duration / _STEP) + 1)
        edges = [curve.at(i * _STEP) for i in range(count + 1)]
        steps = [max(edges[i], edges[i + 1]) for i in range(count)]
        for time, memory in zip(curve.times, curve.memory, strict=True):
            index = int(time / _STEP)
            if index < count:
                steps[index] = max(steps[index], memory)
        self.steps = steps
        # As seen from any moment within a step, the next step's worth of time touches two.
        self.pairs = [max(a, b) for a, b in zip(steps, [*steps[1:], 0.0], strict=True)]
        self.highest = steps.index(max(steps))
        high = [time for time, memory in zip(curve.times, curve.memory, strict=True) if memory >= self.peak / 2]
        self.rise = curve.times[curve.memory.index(self.peak)]
        # The end of the spike: from here on the compile holds less than half of its peak, to its end.
        self.fall = next((t for t in curve.times if t > high[-1]), curve.duration)
        between = [m for t, m in zip(curve.times, curve.memory, strict=True) if high[0] <= t <= high[-1]]
        self.single = min(between) >= self.peak / 2


@dataclass
class _Run:
    """What the gate knows of a running compile: where it is on its curve, and how it compares with it."""

    shape: _Shape
    started: float
    seen: float
    position: float = 0.0
    memory: float = 0.0
    highest: float = 0.0
    ratio: float = 1.0

    def look(self, now: float, reading: Reading) -> None:
        """Take in what is seen now: move along the curve, as far as tool and memory agree."""
        shape = self.shape
        self.position += max(0.0, now - self.seen)
        self.seen = now
        self.memory = reading.memory
        self.highest = max(self.highest, self.memory)
        tail = reading.tool in _TAIL_TOOLS
        dropped = self.highest >= 0.6 * shape.peak and self.memory < 0.5 * self.highest
        if shape.single and self.position < shape.fall and (tail or dropped):
            self.position = shape.fall
        elif reading.tool and not tail and not dropped:
            # Late: the spike is still to come, or goes on.
            if self.highest < 0.6 * shape.peak:
                self.position = min(self.position, max(shape.rise * (1 - _STRETCH), 0.0))
            elif self.memory >= 0.5 * shape.peak:
                self.position = min(self.position, shape.fall * (1 - _STRETCH))
        self.position = min(self.position, shape.duration * (1 - _STRETCH / 2))
        if self.memory > shape.peak:
            self.ratio = max(self.ratio, self.memory / shape.peak)

    def forecast(self, margin: float) -> list[float]:
        """Bytes held at most in each step from now on."""
        steps = self.shape.pairs[int(self.position / _STEP) :]
        factor = max(margin, self.ratio * 1.05)
        ahead = [factor * memory for memory in steps]
        for index in range(min(3, len(ahead))):
            ahead[index] = max(ahead[index], self.memory)
        return ahead


@dataclass
class Admission:
    """The gate's decisions, one after the other. Time and readings are arguments, so it runs in virtual time as well.

    `curve_of` gives the curve for a compile's key. `budget` gives the bytes that our compiles may hold together, from
    those they hold now. `cores` is how many run at once at most.
    """

    curve_of: Callable[[str], Curve]
    budget: Callable[[float], float]
    cores: int
    margin: float = MARGIN
    alone: set[str] = field(default_factory=set)
    _runs: dict[str, _Run] = field(default_factory=dict)
    _shapes: dict[Curve, _Shape] = field(default_factory=dict)
    _of_key: dict[str, _Shape] = field(default_factory=dict)
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
        budget = self.budget(sum(run.memory for run in self._runs.values()))
        load = self._load()
        admitted: list[str] = []
        single = next((key for key in waiting if key in self.alone), None)
        if single is not None:
            return [] if running else [self._start(single, now, load)]
        # TODO ageing
        checks = _CHECKS
        tried: set[tuple[int, float]] = set()
        for key in sorted(waiting, key=self._rank, reverse=True):
            if free <= 0 or checks <= 0:
                break
            if key in self._stopped and now < self._stopped[key] + _PAUSE and (running or admitted):
                continue
            shape, factor = self._shape(key), self._factor(key)
            if (id(shape), factor) in tried:
                continue
            fits = self._fits(load, shape, factor, budget)
            if fits is None:
                checks -= 1
            if fits or not (running or admitted):
                admitted.append(self._start(key, now, load))
                free -= 1
            else:
                tried.add((id(shape), factor))
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
                found = self._shapes[curve] = _Shape(curve)
            self._of_key[key] = found
        return found

    def _factor(self, key: str) -> float:
        return max(self.margin, self._ratios.get(key, 1.0) * 1.05)

    def _rank(self, key: str) -> tuple[float, float]:
        return self._shape(key).duration, -self._asked[key]

    def _load(self) -> list[float]:
        load = [0.0] * (_STEPS + 1)
        for run in self._runs.values():
            for index, memory in enumerate(run.forecast(self.margin)):
                load[index] += memory
        return load

    def _fits(self, load: list[float], shape: _Shape, factor: float, budget: float) -> bool | None:
        """Whether the candidate fits; None where only the whole curve showed that it does not."""
        if load[shape.highest] + factor * shape.peak > budget:
            return False
        if all(held + factor * more <= budget for held, more in zip(load, shape.steps, strict=False)):
            return True
        return None

    def _start(self, key: str, now: float, load: list[float]) -> str:
        shape, factor = self._shape(key), self._factor(key)
        self._runs[key] = _Run(shape, now, now, ratio=self._ratios.get(key, 1.0))
        for index, memory in enumerate(shape.steps):
            load[index] += factor * memory
        return key
