"""Admission control for compilers, so that memory lasts. Standard library only, runs inside builds.

    python -m pybuild.gate --cores N --curves FILE [--budget BYTES] -- COMMAND...     a build, gated

A compile's memory is a spike and a long cheap tail. The gate knows that shape (a curve, pybuild/curve.py), sees what
each running compile holds now, and lets the next one in when the sum of all that is to come fits the budget at every
moment.

The file holds {NAME: [[seconds, bytes], ...]}: memory over time of each compile, by the stem of its source. `*.cu` and
`*.cpp` stand for all others. COMMAND gets PYBUILD_LAUNCHER, the start of a command line that puts a compiler under the
gate (pybuild/launch.py), and MAX_JOBS.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

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

# The pace of a machine is the mean of so many compiles', and is changed when it is off by this part.
_PACES = 16
_PACE_STEP = 0.08

# What one decision does at most, so that it takes less than 10 ms with 10,000 waiting; who is not looked at is half a
# second later. Groups of compiles that are found not to fit; forecasts that are made anew, which takes longest; and of
# those that have come, how many are taken in, and how many curves among them that nobody had before. With nothing
# running there is nothing to miss meanwhile, and the cores are idle: all of a usual package are looked at.
_CHECKS = 2000
_FORECASTS = 16
_FORECASTS_IDLE = 100
_NEW_KEYS = 1000
_NEW_CURVES = 100

# Forecasts that are kept for others with the same curve. Learning makes a curve for every source.
_KEPT = 1024

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

    def __init__(self, curve: Curve, step: float, pace: float) -> None:
        curve = curve.scaled(time=pace)
        self.curve = curve
        self.step = step
        self.pace = pace
        self.count = int(curve.duration * (1 + STRETCH) / step) + 1
        starts = list(self._highest())
        # From a moment within a step, the next step's worth of time touches two.
        self._later = [max(pair) for pair in zip(starts, [*starts[1:], 0.0], strict=True)]
        self._starts = starts
        self._packed: dict[tuple[bool, int], int] = {}
        self.highest = starts.index(max(starts))
        high = [index for index, memory in enumerate(curve.memory) if memory >= curve.peak / 2]
        self.rise = curve.times[curve.memory.index(curve.peak)]
        # The end of the spike: from here on the compile holds less than half of its peak, to its end.
        self.fall = curve.times[min(high[-1] + 1, len(curve.times) - 1)]
        self.single = high == list(range(high[0], high[-1] + 1))
        # When half of the peak is passed on the way down.
        last = high[-1]
        self.halfway = self.fall
        if last + 1 < len(curve.times) and curve.memory[last + 1] < curve.memory[last]:
            part = (curve.memory[last] - curve.peak / 2) / (curve.memory[last] - curve.memory[last + 1])
            self.halfway = curve.times[last] + (self.fall - curve.times[last]) * part

    def _highest(self) -> Iterator[float]:
        """The most that the curve has in each step, or a little earlier or later."""
        times, memory = self.curve.times, self.curve.memory
        points = zip(times, times[1:], memory, memory[1:], strict=False)
        slopes = [0.0, *((m1 - m0) / (t1 - t0) for t0, t1, m0, m1 in points), 0.0]
        first = after = 0  # the first point that is not before the step, and the first after it
        for index in range(self.count):
            start, end = index * self.step / (1 + STRETCH), (index + 1) * self.step / (1 - STRETCH)
            while first < len(times) and times[first] < start:
                first += 1
            while after < len(times) and times[after] <= end:
                after += 1
            # Between two points the curve is a line; before the first and after the last it is nothing.
            left = memory[first - 1] + slopes[first] * (start - times[first - 1]) if 0 < first < len(times) else 0.0
            right = memory[after - 1] + slopes[after] * (end - times[after - 1]) if after < len(times) else 0.0
            yield max(left, right, *memory[first:after])

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
    late: float = 0.0  # seconds that the compile has taken longer than its curve
    pace: float | None = None  # seconds that it took for a second of its curve, when its spike was over
    fallen: bool = False  # whether its spike is over; the host compiler comes last
    coming: bool = False  # whether it is late for its spike

    def look(self, now: float, reading: Reading) -> None:
        """Take in what is seen now: move along the curve, as far as tool and memory agree."""
        shape, peak = self.shape, self.shape.curve.peak
        self.position += max(0.0, now - self.seen)
        self.seen = now
        self.memory = reading.memory
        self.highest = max(self.highest, self.memory)
        self.ratio = max(self.ratio, self.memory / peak) if peak else self.ratio
        self.coming = False
        dropped = self.highest >= 0.6 * peak and self.memory < 0.5 * self.highest
        if shape.single and (dropped or reading.tool in _TAIL_TOOLS or (self.fallen and self.memory < 0.5 * peak)):
            if not self.fallen:
                if self.pace is None and self.highest >= 0.6 * peak:
                    self.pace = (now - self.started) / shape.halfway * shape.pace
                self.position, self.late = max(self.position, shape.fall), 0.0
            self.fallen = True
        elif self.memory >= 0.5 * peak:  # the spike is not over
            self.fallen = False
            self._wait_at(shape.fall * (1 - 2 * STRETCH))
        elif self.highest < 0.6 * peak and reading.tool:
            self.coming = self._wait_at(shape.rise * (1 - 2 * STRETCH))
        self._wait_at(shape.curve.duration)

    def _wait_at(self, position: float) -> bool:
        """Do not pass this position of the curve yet; whether it was passed, by time alone."""
        over = self.position - position
        self.position -= max(over, 0.0)
        self.late += max(over, 0.0)
        return over >= 0

    def reshape(self, shape: _Shape) -> None:
        """Go on with the same curve at another pace, or with another curve."""
        self.position *= shape.pace / self.shape.pace
        self.shape = shape

    def held(self) -> float:
        """Bytes that it holds now; as its curve says for one that can't be seen, such as a builder of nix's daemon."""
        return self.memory if self.highest else self.shape.curve.at(self.position)

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
        # As late as it is by now, it will be once more; and a curve that is wrong about memory is wrong about time.
        late = max(self.late, self.seen - self.started if self.ratio > margin else 0.0)
        steps = min(int(late / shape.step), shape.count)
        if steps:
            level = max(held, int(shape.curve.peak * factor / _MIB) + 1 if self.coming else 0)
            ahead = (ahead << _LANE * steps) + level * (((1 << _LANE * steps) - 1) // ((1 << _LANE) - 1))
        for lane in range(3):
            shift = _LANE * lane
            ahead += max(0, held - (ahead >> shift & (1 << _LANE) - 1)) << shift
        return ahead


@dataclass
class _Group:
    """Those that wait and need the same, in the order in which they asked. Their forecast is made when it is needed."""

    curve: Curve
    factor: float
    use: float = 0.0  # of the machine, as `Admission._ordered` counts it
    keys: dict[str, None] = field(default_factory=dict)
    shape: _Shape | None = None
    needs: int = 0
    lane: int = 0  # of the peak
    peak: int = 0

    def take(self, shape: _Shape) -> None:
        """Make the forecast from this shape of the curve."""
        self.shape, self.needs, self.lane = shape, shape.forecast(self.factor), shape.highest
        self.peak = self.needs >> _LANE * self.lane & (1 << _LANE) - 1


class _Room:
    """What is left of the budget in each step from now on, in MiB.

    Each step has one more bit, which is set unless less than nothing is left.
    """

    def __init__(self, budget: float, steps: int) -> None:
        ones = ((1 << _LANE * steps) - 1) // ((1 << _LANE) - 1)
        self._guards = ones * _GUARD
        self._left = ones * (min(max(int(budget / _MIB), 0), _MOST) + _GUARD)
        self._steps = steps
        self._lanes: tuple[int, ...] | None = None

    def may_fit(self, group: _Group) -> bool:
        """Whether the peak of these is within the budget: a quick look before `fits`."""
        if self._lanes is None:
            self._lanes = struct.unpack(f"<{self._steps}I", self._left.to_bytes(self._steps * _LANE // 8, "little"))
        return self._lanes[group.lane] - group.peak >= _GUARD

    def fits(self, needs: int) -> bool:
        """Whether these needs are within the budget in every step."""
        return (self._left - needs) & self._guards == self._guards

    def take(self, needs: int) -> None:
        """Somebody needs this."""
        self._left -= needs
        self._lanes = None

    def reserve(self, needs: int) -> None:
        """Somebody will need this from the first moment on at which it fits."""
        places = range(0, self._steps // 2, 4)
        self.take(next((needs << _LANE * step for step in places if self.fits(needs << _LANE * step)), 0))


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
    # By pace and the identity of the curve, which hashes slowly; the curve is kept so that it keeps its identity.
    _shapes: dict[tuple[int, float], tuple[Curve, _Shape]] = field(default_factory=dict)
    _pace: float = 1.0
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_PACES))
    _waits: dict[str, _Group] = field(default_factory=dict)
    _groups: dict[tuple[int, float], _Group] = field(default_factory=dict)
    _order: list[_Group] = field(default_factory=list)
    _order_budget: float = 0.0  # for which `_order` is; 0: for none
    _longest: float = 0.0  # seconds of the longest curve so far
    _asked: dict[str, float] = field(default_factory=dict)
    _stopped: dict[str, float] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)

    def admit(self, now: float, running: Mapping[str, Reading], waiting: Collection[str]) -> list[str]:
        """Those of `waiting` that start now, the largest first. With nothing running, at least one."""
        self._look(now, running)
        self._take_in(now, waiting)
        free = self.cores - len(running)
        if not waiting or free <= 0 or any(key in self.alone for key in running):
            return []
        single = next((key for key in self.alone if key in self._waits), None)
        if single is not None:
            return [] if running else [self._start(single, now)]
        budget = self.budget(sum(run.held() for run in self._runs.values()))
        room = _Room(budget, 2 * int(self._longest * self._pace * (1 + STRETCH) / self.step) + 5)
        for run in self._runs.values():
            room.take(run.forecast(self.margin))
        due = next(key for key in self._asked if key in self._waits)
        overtaken = self._waits[due]
        if now > self._asked[due] + max(_PATIENCE, 10 * overtaken.curve.duration * self._pace):
            # It has been overtaken for long: whoever starts now must not be in its way.
            self._forecast(overtaken)
            if room.fits(overtaken.needs) or not running:
                return [self._start(due, now)]
            room.reserve(overtaken.needs)
        admitted: list[str] = []
        checks = _CHECKS
        forecasts = _FORECASTS if running else _FORECASTS_IDLE
        for group in self._ordered(budget):
            if group.keys and self._forecast(group):
                forecasts -= 1
            for key in group.keys:
                if running and now < self._stopped.get(key, -math.inf) + _PAUSE:
                    continue
                if not room.may_fit(group) or not room.fits(group.needs):
                    checks -= 1
                    if running or admitted:
                        break
                admitted.append(key)
                room.take(group.needs)
                if len(admitted) == free:
                    break
            if len(admitted) == free or checks == 0 or forecasts == 0:
                break
        return [self._start(key, now) for key in admitted]

    def _take_in(self, now: float, waiting: Collection[str]) -> None:
        """Sort those that are new among the waiting into groups, and forget about others."""
        here = set(waiting)
        for key in self._waits.keys() - here:
            del self._waits.pop(key).keys[key]
        curves = _NEW_CURVES
        for key in itertools.islice((key for key in waiting if key not in self._waits), _NEW_KEYS):
            self._asked.setdefault(key, now)
            curve, factor = self.curve_of(key), max(self.margin, self._ratios.get(key, 1.0) * 1.05)
            group = self._groups.get((id(curve), factor))
            if group is None:
                if curves == 0:
                    break
                curves -= 1
                group = self._groups[id(curve), factor] = _Group(curve, factor)
                self._longest = max(self._longest, curve.duration)
                if self._order_budget:
                    group.use = self._use(group, self._order_budget)
                    insort(self._order, group, key=lambda other: -other.use)
            group.keys[key] = None
            self._waits[key] = group

    def _forecast(self, group: _Group) -> bool:
        """See to it that the group has a forecast for the pace of now; whether one had to be made."""
        if group.shape is not None and group.shape.pace == self._pace:
            return False
        group.take(self._shape(group.curve))
        return True

    def _use(self, group: _Group, budget: float) -> float:
        """How much a compile of this group uses up of the machine, its cores and its memory.

        Memory counts half. With any weight from 0.4 to 1.5 flash-attn's builds take the same time within 3 %
        (`bench/bench.py virtual`); without it 5 % longer, where memory is short.
        """
        return group.curve.duration / self.cores + group.curve.area / budget / 2

    def _ordered(self, budget: float) -> list[_Group]:
        """The groups, first that whose compiles use up most of the machine."""
        budget = max(budget, 1.0)
        stale = not self._order_budget or abs(budget / self._order_budget - 1) > 0.1
        if stale or len(self._order) > 2 * len(self._waits) + 64:
            self._groups = {place: group for place, group in self._groups.items() if group.keys}
            for group in self._groups.values():
                group.use = self._use(group, budget)
            self._order = sorted(self._groups.values(), key=lambda group: -group.use)
            self._order_budget = budget
        return self._order

    def evict(self, now: float, running: Mapping[str, Reading]) -> list[str]:
        """Those of `running` that have to stop, the youngest first, where memory is short. Never the oldest."""
        self._look(now, running)
        held = sum(run.held() for run in self._runs.values())
        limit = self.budget(held) * _OVER
        evicted: list[str] = []
        for key in sorted(running, key=lambda key: self._runs[key].started, reverse=True)[:-1]:
            if held <= limit:
                break
            run = self._runs.pop(key)
            held -= run.held()
            self._ratios[key] = run.ratio
            self._stopped[key] = now
            evicted.append(key)
        return evicted

    def _look(self, now: float, running: Mapping[str, Reading]) -> None:
        for key in [key for key in self._runs if key not in running]:
            del self._runs[key]
        for key, reading in running.items():
            if key not in self._runs:
                self._start(key, now)
            run = self._runs[key]
            known = run.pace
            run.look(now, reading)
            if run.pace is not None and known is None:
                self._paces.append(run.pace)
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Take the machine to be as fast as the compiles show that it is, against those that the curves are from."""
        if not self._paces:
            return
        pace = sum(self._paces) / len(self._paces)
        # A new pace makes all forecasts anew, and one that is off by this much does no harm.
        if abs(pace / self._pace - 1) < _PACE_STEP:
            return
        self._pace = pace
        self._shapes.clear()
        for key, run in self._runs.items():
            run.reshape(self._shape(self.curve_of(key)))

    def forget(self, key: str) -> None:
        """A compile that is over, or does not want to start any more."""
        if key in self._waits:
            del self._waits.pop(key).keys[key]
        for known in (self._asked, self._ratios, self._stopped, self._runs):
            known.pop(key, None)
        self.alone.discard(key)

    def relearn(self, key: str) -> None:
        """The curve of a compile is another one now."""
        if key in self._waits:
            del self._waits.pop(key).keys[key]
        if key in self._runs:
            self._runs[key].reshape(self._shape(self.curve_of(key)))

    def highest(self, key: str) -> float:
        """The most that a running compile was seen to hold, in bytes."""
        return self._runs[key].highest if key in self._runs else 0.0

    def _shape(self, curve: Curve) -> _Shape:
        found = self._shapes.get((id(curve), self._pace))
        if found is None:
            if len(self._shapes) == _KEPT:
                self._shapes.clear()
            self._longest = max(self._longest, curve.duration)
            found = self._shapes[id(curve), self._pace] = curve, _Shape(curve, self.step, self._pace)
        return found[1]

    def _start(self, key: str, now: float) -> str:
        self._runs[key] = _Run(self._shape(self.curve_of(key)), now, now, ratio=self._ratios.get(key, 1.0))
        return key


# ---- what the machine has now

# Of the memory that is there for the build, this part is the budget. At least half a GiB is left: what sixteen compiles
# on the way to their peaks (0.2 GiB/s each) take between two looks where memory is short, and a bit.
PART = 0.9
_LEFT = 512 * _MIB

# Seconds between two looks at what runs, and where memory is short.
INTERVAL = 0.5
_HURRY = 0.1


class Seen(NamedTuple):
    """A process group as /proc shows it: a Reading."""

    memory: int
    tool: str


def groups(proc: str = "/proc") -> dict[int, Seen]:
    """Memory and main tool of each process group, by its number."""
    page = os.sysconf("SC_PAGE_SIZE")
    memory: dict[int, int] = {}
    largest: dict[int, tuple[int, str]] = {}
    for name in os.listdir(proc):  # noqa: PTH208 (twice as fast as pathlib, with thousands of processes)
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/stat", "rb") as file:  # noqa: PTH123
                text = file.read()
        except OSError:
            continue
        # The name stands in parentheses and may hold any character, parentheses among them: proc(5).
        _, _, rest = text.partition(b"(")
        tool, _, fields = rest.rpartition(b") ")
        values = fields.split()
        group, rss = int(values[2]), int(values[21]) * page
        if values[0] == b"Z":
            continue
        memory[group] = memory.get(group, 0) + rss
        if rss >= largest.get(group, (0, ""))[0]:
            largest[group] = (rss, tool.decode(errors="replace"))
    return {group: Seen(held, largest[group][1]) for group, held in memory.items()}


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None  # not there, or "max"


def _rows(path: str) -> dict[str, int]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines) if len(words) > 1}


def _cgroups() -> Iterator[tuple[bool, str]]:
    """Folders of the cgroups above this process that may limit memory, and whether they are of version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            roots = ["/sys/fs/cgroup/memory"]
        else:
            continue
        for root in roots:
            for folder in (Path(path), *Path(path).parents):
                yield number == "0", f"{root}{folder}"


def available() -> int:
    """Bytes that programs can still take here: MemAvailable, or what the cgroups above leave, if that is less.

    The same rule as pybuild.facts.cgroup has, of which this needs a few lines twice a second, inside builds: page cache
    that is neither mapped nor dirty counts as free.
    """
    least = _rows("/proc/meminfo").get("MemAvailable", 0) * 1024
    for v2, folder in _cgroups():
        limit = _number(f"{folder}/memory.max" if v2 else f"{folder}/memory.limit_in_bytes")
        used = _number(f"{folder}/memory.current" if v2 else f"{folder}/memory.usage_in_bytes")
        if limit is None or used is None or limit >= 1 << 60:
            continue
        rows = _rows(f"{folder}/memory.stat")
        names = ("active_file", "inactive_file") if v2 else ("total_active_file", "total_inactive_file")
        kept = ("file_mapped", "file_dirty") if v2 else ("total_mapped_file", "total_dirty")
        cache = sum(rows.get(name, 0) for name in names) - sum(rows.get(name, 0) for name in kept)
        least = min(least, limit - used + max(0, cache))
    return max(0, least)


# ---- the server

# A compile of which nothing is known: more than any compile for one architecture that was measured needs (nvcc 13.0),
# and than flash-attn's C++ (profiles/flash-attn-2.8.3.json).
_GIB = 1024**3
CAUTIOUS = {
    "cuda": Curve((0.0, 10.0, 240.0), (0.0, 8.0 * _GIB, 8.0 * _GIB)),
    "c++": Curve((0.0, 10.0, 120.0), (0.0, 2.0 * _GIB, 2.0 * _GIB)),
}
_SUFFIX = {"cuda": "*.cu", "c++": "*.cpp"}


def read_curves(path: str) -> dict[str, Curve]:
    """The curves of a file. Raises ValueError, with what is wrong, for anything else."""
    try:
        found = json.loads(Path(path).read_bytes())
        return {
            str(name): Curve(tuple(float(t) for t, _ in points), tuple(float(m) for _, m in points))
            for name, points in found.items()
        }
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no curves, {{NAME: [[seconds, bytes], ...]}}: {error}") from error


@dataclass
class _Launcher:
    """A connection, and what is asked for over it. `group` is the process group of its compiler."""

    key: str
    connection: socket.socket
    name: str = ""
    kind: str = "cuda"
    received: bytes = b""
    waits: bool = False
    group: int = 0
    status: str = ""
    readings: list[tuple[float, float]] = field(default_factory=list)
    stopping: bool = False
    gone: bool = False
    began: float = 0.0


# What was seen counts this much of itself with the next compile that is seen.
_DECAY = 0.8

# Readings that a learned curve keeps.
_KEPT = 60


def learned(readings: Sequence[tuple[float, float]], seconds: float) -> Curve:
    """The curve of a compile that took so many seconds, from (seconds since its start, bytes): the highest of each
    sixtieth of its time.
    """
    seconds = max(seconds, 0.1)
    highest: dict[int, float] = {}
    for at, held in readings:
        part = min(int(at / seconds * _KEPT), _KEPT - 1)
        highest[part] = max(highest.get(part, 0.0), held)
    times = [(part + 0.5) * seconds / _KEPT for part in sorted(highest)]
    memory = [highest[part] for part in sorted(highest)]
    return Curve((0.0, *times, seconds), (0.0, *memory, *(memory[-1:] or [0.0])))


def _at_least(curve: Curve, other: Curve, part: float) -> Curve:
    """`curve`, made as long and as high as this part of the other one."""
    time = max(1.0, part * other.duration / curve.duration)
    return curve.scaled(time=time, memory=max(1.0, part * other.peak / curve.peak))


class Server:
    """The gate at a Unix socket: hears the launchers, looks at what runs, lets in, and stops."""

    def __init__(
        self,
        listener: socket.socket,
        curves: Mapping[str, Curve],
        cores: int,
        *,
        budget: int | None = None,
        learn: Callable[[str, Curve], object] = lambda *_: None,
        log: Callable[[str], object] = lambda _: None,
        tell: Callable[..., object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._curves = dict(curves)
        self._given = frozenset(curves)
        self._learn = learn
        # What the cautious curves still count, by kind: half with each compile that was seen.
        self._caution = dict.fromkeys(CAUTIOUS, 1.0)
        self._fixed = budget
        self._log = log
        self._tell = tell
        self._clock = clock
        self._launchers: dict[str, _Launcher] = {}
        self._numbers = iter(range(1, 1 << 60))
        self._available = 0
        self._unseen = 0.0
        self._short = False
        longest = max((curve.duration for curve in curves.values()), default=240.0)
        self.admission = Admission(self._curve_of, self._budget, cores, step=max(0.5, longest / 400))
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        listener.setblocking(False)

    def serve(self) -> NoReturn:
        """Go on for ever."""
        while True:
            interval = _HURRY if self._short else INTERVAL
            for selected, _ in self._selector.select(interval if self._launchers else None):
                if selected.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(selected.data)
            self.decide()

    def decide(self) -> None:
        """Look at what runs; stop and let in accordingly."""
        now = self._clock()
        seen = groups() if any(launcher.group for launcher in self._launchers.values()) else {}
        self._available = available() if self._fixed is None else 0
        readings: dict[str, Seen] = {}
        self._unseen = 0.0
        for key, launcher in list(self._launchers.items()):
            reading = seen.get(launcher.group, Seen(0, "")) if launcher.group else Seen(0, "")
            if launcher.gone and not reading.memory:
                self._forget(launcher)
            elif launcher.stopping:
                self._unseen += reading.memory
            elif not launcher.waits:
                readings[key] = reading
                launcher.readings.append((now - launcher.began, reading.memory))
        for key in self.admission.evict(now, readings):
            launcher = self._launchers[key]
            launcher.stopping = True
            self._unseen += readings.pop(key).memory
            self._send(launcher, "stop")
            self._log(f"stop\t{launcher.name}")
            self._tell("stop", launcher.name)
        waiting = [key for key, launcher in self._launchers.items() if launcher.waits]
        for key in self.admission.admit(now, readings, waiting):
            launcher = self._launchers[key]
            launcher.waits, launcher.began = False, now
            launcher.readings.clear()
            self._send(launcher, "go")
            self._log(f"go\t{launcher.name}")
            self._tell("go", launcher.name)
        if self._launchers:
            self._tell_what_is_seen(readings)

    def _tell_what_is_seen(self, readings: Mapping[str, Seen]) -> None:
        runs = [(self._launchers[key].name, reading.tool, reading.memory) for key, reading in readings.items()]
        budget = int(self._budget(sum(memory for _, _, memory in runs)))
        waiting = sum(launcher.waits for launcher in self._launchers.values())
        cores = self.admission.cores - (len(self._launchers) - waiting)
        # Those that wait though there are cores for them wait for memory.
        self._tell("see", runs, budget, self._available, max(0, min(cores, waiting)))

    def _budget(self, held: float) -> float:
        held += self._unseen
        room = self._available + held
        total = self._fixed if self._fixed is not None else max(0.0, min(PART * room, room - _LEFT))
        self._short = held > 0.85 * total
        return total - self._unseen

    def _curve_of(self, key: str) -> Curve:
        launcher = self._launchers[key]
        return self._curves.get(launcher.name) or self._curves.get(_SUFFIX[launcher.kind]) or CAUTIOUS[launcher.kind]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            launcher = _Launcher(str(next(self._numbers)), connection)
            self._selector.register(connection, selectors.EVENT_READ, launcher)

    def _hear(self, launcher: _Launcher) -> None:
        try:
            received = launcher.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._selector.unregister(launcher.connection)
            launcher.connection.close()
            launcher.gone = True
            if launcher.waits or not launcher.group:
                self._forget(launcher)
        *lines, launcher.received = (launcher.received + received).split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split("\t")
            if words[0] == "ask" and len(words) >= 3:
                self._ask(launcher, *words[1:])
            elif words[0] == "runs" and len(words) == 2 and words[1].isdigit():
                launcher.group = int(words[1])
            elif words[0] == "ended" and len(words) == 2:
                launcher.status = words[1]

    def _ask(self, launcher: _Launcher, name: str, kind: str, *how: str) -> None:
        launcher.name, launcher.kind = name, kind if kind in CAUTIOUS else "cuda"
        launcher.waits, launcher.stopping, launcher.group = True, False, 0
        self._launchers[launcher.key] = launcher
        self._tell("ask", name)
        if "alone" in how:
            self.admission.alone.add(launcher.key)

    def _forget(self, launcher: _Launcher) -> None:
        self._launchers.pop(launcher.key, None)
        highest = self.admission.highest(launcher.key)
        self.admission.forget(launcher.key)
        seconds = self._clock() - launcher.began
        self._log(f"end\t{launcher.name}\t{seconds:.1f}\t{highest:.0f}\t{launcher.status}")
        self._tell("end", launcher.name, launcher.status, int(highest))
        if launcher.status == "0" and highest:
            self._teach(launcher, learned(launcher.readings, seconds))

    def _teach(self, launcher: _Launcher, curve: Curve) -> None:
        """A compile was seen from start to end: what it says about itself, and about those of which nothing is known.

        The latter are expected to take the most that was seen, which counts less with each compile after it.
        """
        self._learn(launcher.name, curve)
        if launcher.name not in self._given:
            self._curves[launcher.name] = _at_least(curve, self._curves.get(launcher.name, curve), _DECAY)
        suffix = _SUFFIX[launcher.kind]
        if suffix not in self._given:
            known = self._curves.get(suffix)
            flat = Curve((0.0, curve.duration / 10, curve.duration), (0.0, curve.peak, curve.peak))
            self._caution[launcher.kind] /= 2
            if known:
                flat = _at_least(flat, known, _DECAY)
            self._curves[suffix] = _at_least(flat, CAUTIOUS[launcher.kind], self._caution[launcher.kind])
            for other in self._launchers.values():
                if other.kind == launcher.kind and other.name not in self._given:
                    self.admission.relearn(other.key)

    def _send(self, launcher: _Launcher, word: str) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the next read shows
            launcher.connection.sendall(word.encode() + b"\n")


# ---- a build under the gate

# Seconds that a build has to end by itself after a signal, and then after SIGTERM to all of it.
_GRACE = (0.8, 0.4)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Blocked:
    """Signals that end us, and SIGCHLD, kept back while the context lasts: they are waited for.

    A handler could come between any two steps. What the user wants ignored (nohup) stays ignored.
    """

    def __enter__(self) -> _Blocked:
        usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self.ending = {number for number in usual if signal.getsignal(number) != signal.SIG_IGN}
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self.ending | {signal.SIGCHLD})
        return self

    def wait(self) -> int:
        """The next signal."""
        return signal.sigwaitinfo(self.ending | {signal.SIGCHLD}).si_signo

    def __exit__(self, *_: object) -> None:
        # Ctrl-C reaches all of us, and what the build said to it is what counts.
        while signal.sigtimedwait(self.ending, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def _descendants(proc: str = "/proc") -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"{proc}/{name}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b") ")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    found, pending = [], [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _signal_all(number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _reap(until: float) -> bool:
    """Collect children until there are none, then True, or until this moment of time.monotonic()."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)


def _end_all() -> None:
    """End all processes below this one; whose parents end come to us, a subreaper."""
    if _reap(time.monotonic() + _GRACE[0]):
        return
    _signal_all(signal.SIGTERM)
    if _reap(time.monotonic() + _GRACE[1]):
        return
    while not _reap(time.monotonic() + 0.05):
        _signal_all(signal.SIGKILL)


def gated(
    command: Sequence[str],
    environ: Mapping[str, str],
    curves: Mapping[str, Curve],
    cores: int,
    *,
    budget: int | None = None,
    learn: Callable[[str, Curve], object] = lambda *_: None,
    log: str | None = None,
    tell: Callable[..., object] = lambda *_: None,
) -> int:
    """Run a command whose compilers are under a gate; its exit status, 128 + n after signal n.

    `budget` in bytes; None follows the machine. `learn` is told, in another process, the name and curve of each compile
    that succeeds. `log` is a file that gets a line for whatever the gate does; `tell` is called for the same, and for
    what is seen of those that run: in another process too. When this
    process gets a signal that ends it, or is killed, all that the command started is gone two seconds later. Raises
    OSError where the command can't be started.
    """
    # Two processes watch over the build, this one and a guard, each of which outlives the other: all that they leave
    # behind comes to the one that is left.
    sys.stdout.flush()
    sys.stderr.flush()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="pybuild-gate-")
    if len(folder) > 80:  # the name of a Unix socket has 108 bytes at most, unix(7)
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="pybuild-gate-", dir="/tmp")
    failed, failed_there = os.pipe()
    try:
        with _Blocked() as signals:
            guard = os.fork()
            if not guard:
                try:
                    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
                    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                    server = _start_server(f"{folder}/gate", curves, cores, budget, learn, log, tell)
                    os._exit(_guarded(command, environ, f"{folder}/gate", server, signals))
                except OSError as error:
                    os.write(failed_there, str(error.errno).encode())
                finally:
                    os._exit(127)
            os.close(failed_there)
            while True:
                number = signals.wait()
                if number in signals.ending:
                    os.kill(guard, number)
                pid, status = os.waitpid(guard, os.WNOHANG)
                if pid:
                    break
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                _end_all()
                return 128 - code
        if errno := os.read(failed, 16):
            raise OSError(int(errno), os.strerror(int(errno)), command[0])
        return code
    finally:
        os.close(failed)
        shutil.rmtree(folder, ignore_errors=True)


def _guarded(command: Sequence[str], environ: Mapping[str, str], gate: str, server: int, signals: _Blocked) -> int:
    launcher = f"{sys.executable} -I -S {Path(__file__).absolute().with_name('launch.py')}"
    added = {"PYBUILD_GATE": gate, "PYBUILD_LAUNCHER": launcher}
    # Python ignores SIGPIPE, which the command must not inherit.
    reset = [signal.SIGPIPE, signal.SIGXFSZ]
    build = os.posix_spawnp(command[0], list(command), {**environ, **added}, setsigmask=signals.before, setsigdef=reset)
    while True:
        number = signals.wait()
        if number in signals.ending:
            with contextlib.suppress(OSError):
                os.kill(build, number)
            os.kill(server, signal.SIGKILL)
            _end_all()
            shutil.rmtree(Path(gate).parent, ignore_errors=True)
            return 128 + number
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == build:
                with contextlib.suppress(OSError):
                    os.kill(server, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if not pid:
                break


def _start_server(
    path: str,
    curves: Mapping[str, Curve],
    cores: int,
    budget: int | None,
    learn: Callable[[str, Curve], object],
    log: str | None,
    tell: Callable[..., object],
) -> int:
    """A child that is the gate; its process id."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    try:
        # Signals that end a build stay blocked here: the guard ends this process.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.ExitStack() as stack:
            write: Callable[[str], object] = lambda _: None  # noqa: E731
            if log:
                file = stack.enter_context(Path(log).open("a", buffering=1))
                write = lambda line: file.write(f"{time.time():.2f}\t{line}\n")  # noqa: E731
            Server(listener, curves, cores, budget=budget, learn=learn, log=write, tell=tell).serve()
    except Exception as error:
        sys.stderr.write(f"pybuild: the gate has ended: {error!r}\n")
        sys.stderr.flush()
    finally:
        os._exit(70)


def main() -> int:
    """`python -m pybuild.gate`; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pybuild.gate", description="Run a build under the gate.")
    parser.add_argument("--cores", type=int, required=True, help="compiles at once at most")
    parser.add_argument("--curves", required=True, help="memory over time of each compile, JSON")
    parser.add_argument("--budget", default="auto", help="bytes that all compiles may hold; auto follows the machine")
    parser.add_argument("--log", help="a file that gets a line for whatever the gate does")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.cores < 1:
        parser.error("--cores: at least 1")
    if options.budget != "auto" and not options.budget.isdigit():
        parser.error("--budget: a number of bytes, or auto")
    budget = None if options.budget == "auto" else int(options.budget)
    # More than run at once: those that wait are what the gate chooses from.
    environ = {**os.environ, "MAX_JOBS": str(min(4 * options.cores, options.cores + 64))}
    try:
        curves = read_curves(options.curves)
        return gated(options.command, environ, curves, options.cores, budget=budget, log=options.log)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{options.command[0]} can't be started: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main())
