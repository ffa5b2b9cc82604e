"""Builds in virtual time, for tests of what shows them: their events, as build.py would say them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from pybuild.curve import Curve
from pybuild.events import Began, Ended, Event, Memory, Over, Planned, Reading, Step
from pybuild.profile import load_profile
from pybuild.units import GIB


def flash_attn() -> dict[str, Curve]:
    """The 73 compiles of flash-attn, as measured."""
    profile = load_profile("flash-attn")
    assert profile is not None
    return dict(profile.curves(("sm_100",), 1))


def tool_at(curve: Curve, time: float) -> str:
    """Which tool has the memory: cudafe++, then cicc until the spike is over, then ptxas."""
    high = [t for t, memory in zip(curve.times, curve.memory, strict=True) if memory > curve.peak / 2]
    return "cudafe++" if time < high[0] else "cicc" if time <= high[-1] else "ptxas"


def simulate(
    curves: Mapping[str, Curve],
    *,
    jobs: int,
    budget: int,
    machine: int = 0,
    slower: float = 1.0,
    uneven: float = 0.0,
    inputs: float = 5.0,
    link: float = 10.0,
    tick: float = 0.5,
) -> Iterator[Event]:
    """The events of a build in which each compile takes `slower` times its curve's time, `uneven` more or less.

    The next begins where its peak fits beside what runs for the rest of its spike.
    """
    generator = random.Random(0)
    actual = {
        name: curve.scaled(time=slower * (1 + uneven * generator.uniform(-1, 1))) for name, curve in curves.items()
    }
    waiting = sorted(curves, key=lambda name: -curves[name].duration)
    running: dict[str, float] = {}
    yield Planned(0.0, "flash-attn", tuple(curves), (), jobs, budget, ("sm_100",))
    yield Step(0.0, "inputs")
    now = inputs
    yield Step(now, "compile")
    while waiting or running:
        for name, began in list(running.items()):
            if now - began >= actual[name].duration:
                del running[name]
                curve = actual[name]
                yield Ended(now, name, True, 0.97 * curve.duration, int(curve.peak))
        for name, began in running.items():
            at = now - began
            yield Reading(now, name, tool_at(actual[name], at), int(actual[name].at(at)))
        lacks = False
        while waiting and len(running) < jobs:
            fitting = [name for name in waiting if not running or _fits(actual, running, name, now, budget)]
            if not fitting:
                lacks = True
                break
            waiting.remove(fitting[0])
            running[fitting[0]] = now
            yield Began(now, fitting[0])
        used = int(sum(actual[name].at(now - began) for name, began in running.items()))
        free = max(0, (machine or 2 * budget) - used)
        yield Memory(
            now, used, budget, free, min(jobs - len(running), len(waiting)) if lacks else 0, float(len(running))
        )
        now += tick
    yield Step(now, "link")
    yield Over(now + link, wheels=("dist/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl",))


def _fits(actual: Mapping[str, Curve], running: Mapping[str, float], name: str, now: float, budget: int) -> bool:
    return all(
        sum(actual[other].at(now + ahead - began) for other, began in running.items()) + actual[name].at(ahead)
        <= budget
        for ahead in actual[name].times
    )


def small() -> dict[str, Curve]:
    """Three compiles of a few seconds."""
    shape = Curve((0.0, 1.0, 2.0, 3.0, 6.0), (0.0, 0.5 * GIB, 3 * GIB, 1 * GIB, 0.2 * GIB))
    return {"alpha": shape, "beta": shape.scaled(time=1.5), "gamma": shape.scaled(memory=1.2)}
