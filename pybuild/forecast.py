"""How long a build will still take: from profiles of its compiles, corrected by those that have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import zip_longest

from pybuild.curve import Curve
from pybuild.profile import CAUTIOUS, load_profile
from pybuild.view.progress import Progress

# The rest of a build is played in cells of time, so many to the mean compile: enough to show the spike of its memory.
_CELLS = 30

# A spike is known by its height, as a part of the profile's: before it there are the small hills of other tools.
_SPIKE = 0.6

# Part of its expected time that a compile which is over it already is taken to need still.
_OVERDUE = 0.05

# Weight of the newest forecast among all so far, and the part of the time left beyond which it counts alone.
_NEWEST = 0.5
_SURPRISE = 0.25

# Seconds of the steps after the last compile, where no earlier build tells: upstream's setup.py over the objects, the
# link, the wheel.
AFTERWARDS = 30.0


def expected_curves(package: str, names: Iterable[str], architectures: Sequence[str]) -> dict[str, Curve]:
    """The curve of each of these compiles that pybuild's profile of the package has; those of others are left out.

    With as many threads a compile as there are architectures, as pybuild builds.
    """
    profile = load_profile(package) if package else None
    if profile is None:
        return {}
    architectures = architectures or ("sm_100",)
    return dict(profile.curves(architectures, len(architectures), set(names)))


@dataclass
class Forecast:
    """Predicts the end of one build. `afterwards` is how many seconds its steps after the last compile take.

    `curves` are those of its compiles; None takes them from pybuild's profile of the package.
    """

    afterwards: float = AFTERWARDS
    curves: Mapping[str, Curve] | None = None
    _end: float | None = field(default=None, repr=False)

    def left(self, progress: Progress) -> float | None:
        """Seconds until the build ends; None where not all of its compiles are known, and where it is overdue."""
        if progress.over is not None or not progress.planned:
            return None
        if progress.step == "link":
            left = self.afterwards - (progress.now - progress.steps[-1][0])
            return left if left > 0 else None
        if self.curves is None:
            self.curves = expected_curves(progress.package, progress.compiles, progress.architectures)
        curves = _complete(self.curves, progress)
        speed = pace(progress, curves)
        running = [(curves[c.name].scaled(time=speed), c.elapsed(progress.now)) for c in progress.of("running")]
        waiting = [curves[c.name].scaled(time=speed) for c in progress.of("waiting")]
        rest = play(running, waiting, jobs=progress.cores, budget=progress.budget) + self.afterwards
        return self._steadied(progress.now, rest)

    def _steadied(self, now: float, rest: float) -> float:
        """`rest`, with the earlier forecasts: which kernels fit beside which makes a single one stray by 10 %."""
        end = now + rest
        if self._end is None or abs(end - self._end) > _SURPRISE * rest:
            self._end = end
        self._end += _NEWEST * (end - self._end)
        return max(0.0, self._end - now)


def _complete(known: Mapping[str, Curve], progress: Progress) -> Mapping[str, Curve]:
    """A curve for each compile: the known one, else a flat one with the mean time of those that ended."""
    unknown = [c for name, c in progress.compiles.items() if name not in known]
    if not unknown:
        return known
    ended = [c for c in unknown if c.state == "done"]
    time = sum(c.elapsed(progress.now) for c in ended) / len(ended) if ended else CAUTIOUS.duration
    peak = float(max((c.peak for c in ended), default=CAUTIOUS.peak))
    likely = Curve((0.0, max(time, 0.1)), (peak, peak))
    return {**dict.fromkeys([c.name for c in unknown], likely), **known}


def pace(progress: Progress, curves: Mapping[str, Curve]) -> float:
    """Seconds here for a second of `curves`: what the compiles show that have ended, have their spike behind them, or
    are overdue for either."""
    seen = [(c.elapsed(progress.now), curves[c.name].duration) for c in progress.of("done")]
    now = []
    for compile_ in progress.of("running"):
        curve, elapsed = curves[compile_.name], compile_.elapsed(progress.now)
        if compile_.peak < _SPIKE * curve.peak or compile_.memory > compile_.peak / 2:
            now.append((elapsed, _fall(curve)))
        else:
            # Several architectures, one after the other, have several spikes; then the first tells nothing.
            if len(progress.architectures) <= 1 and compile_.began is not None:
                seen.append((compile_.high - compile_.began, _fall(curve)))
            now.append((elapsed, curve.duration))
    speed = _ratio(seen)
    return _ratio([*seen, *((elapsed, expected) for elapsed, expected in now if elapsed > speed * expected)])


def _fall(curve: Curve) -> float:
    """Seconds after which less than half of the peak is held, to the end."""
    return max(time for time, memory in zip(curve.times, curve.memory, strict=True) if memory > curve.peak / 2)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    expected = sum(duration for _, duration in pairs)
    return sum(elapsed for elapsed, _ in pairs) / expected if expected else 1.0


def play(running: Sequence[tuple[Curve, float]], waiting: Sequence[Curve], *, jobs: int, budget: float) -> float:
    """Seconds until all of these have ended: `running`, each with the seconds it runs already, and then `waiting`.

    As the gate does it: the longest that fits begins when fewer than `jobs` run and all memory is within `budget`
    (0: no limit) at every moment to come; with nothing running, the longest begins anyhow.
    """
    durations = [curve.duration for curve, _ in running] + [curve.duration for curve in waiting]
    if not durations:
        return 0.0
    cell = sum(durations) / len(durations) / _CELLS
    ends: list[float] = []
    held: list[float] = []  # bytes in each cell from now on
    for curve, elapsed in running:
        left = max(curve.duration - elapsed, _OVERDUE * curve.duration)
        heappush(ends, left)
        held = _sum(held, _cells(curve, cell, curve.duration - left))
    now, last = 0.0, max(ends, default=0.0)
    queue = [(curve.duration, _cells(curve, cell, 0.0)) for curve in sorted(waiting, key=lambda c: -c.duration)]
    while queue:
        start = int(now / cell)
        free = len(ends) < max(jobs, 1)
        index = (
            next((i for i, (_, needs) in enumerate(queue) if _fits(held, needs, start, budget)), None) if free else None
        )
        if index is None and ends:
            # Memory falls between two ends as well, so time goes on by a cell where it is memory that lacks.
            now = min(ends[0], now + cell) if free else ends[0]
            while ends and ends[0] <= now:
                heappop(ends)
            continue
        duration, needs = queue.pop(index or 0)
        heappush(ends, now + duration)
        last = max(last, now + duration)
        held = _sum(held, [0.0] * start + needs)
    return last


def _cells(curve: Curve, cell: float, start: float) -> list[float]:
    """Bytes of `curve` in the middle of each cell of time from `start` to its end, and at its peak.

    The highest of each cell would be more careful, and lets a build look fuller than it is: 12 % longer at 16 GiB.
    """
    count = max(1, -int(-(curve.duration - start) // cell))
    found = [curve.at(min(start + (n + 0.5) * cell, curve.duration)) for n in range(count)]
    peak = curve.times[curve.memory.index(curve.peak)]
    if peak >= start:
        found[min(int((peak - start) / cell), count - 1)] = curve.peak
    return found


def _sum(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0.0)]


def _fits(held: list[float], needs: list[float], start: int, budget: float) -> bool:
    return not budget or all(
        (held[at] if at < len(held) else 0.0) + more <= budget for at, more in enumerate(needs, start)
    )
