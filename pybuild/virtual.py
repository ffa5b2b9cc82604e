"""A build in virtual time: compiles with known curves, played under an admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pybuild.curve import Curve
from pybuild.events import Reading
from pybuild.schedule import Admission


@dataclass(frozen=True)
class Played:
    """How a build went: seconds, highest memory in bytes, and how many compiles had to stop."""

    time: float
    peak: float
    stopped: int


def play(compiles: Sequence[tuple[str, Curve]], admission: Admission, *, interval: float = 0.5) -> Played:
    """Play the compiles, all waiting from the beginning; each curve is what the compile really does.

    A decision is made every `interval` seconds.
    """
    actual = dict(compiles)
    waiting = list(actual)
    running: dict[str, float] = {}
    now, peak, stopped, last = 0.0, 0.0, 0, 0.0
    while waiting or running:
        for name in [name for name, began in running.items() if now - began >= actual[name].duration]:
            last = max(last, running.pop(name) + actual[name].duration)
        held = {name: actual[name].at(now - began) for name, began in running.items()}
        peak = max(peak, sum(held.values()))
        readings = {name: Reading(now, name, "", int(memory)) for name, memory in held.items()}
        for name in admission.evict(now, readings):
            stopped += 1
            waiting.append(name)
            del running[name], readings[name]
        for name in admission.admit(now, readings, waiting):
            waiting.remove(name)
            running[name] = now
        now += interval
    return Played(last, peak, stopped)


def lower_bound(compiles: Sequence[tuple[str, Curve]], cores: int, budget: float) -> float:
    """Seconds that no order can beat: the largest of CPU time / cores, memory-seconds / budget, longest compile."""
    curves = [curve for _, curve in compiles]
    area = sum(curve.area for curve in curves)
    seconds = [curve.duration for curve in curves]
    return max(sum(seconds) / cores, area / budget, max(seconds))
