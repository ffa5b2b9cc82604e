"""A build in a log: a line an event, and one a minute that says how it stands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from pybuild.events import Ended, Event, Evicted, Planned, Said, Step
from pybuild.forecast import Forecast
from pybuild.pause import clock
from pybuild.units import format_gib, format_time
from pybuild.view.live import STEPS, about, regularly
from pybuild.view.progress import Progress

HEARTBEAT = 60.0
"""Seconds between two lines that say how it stands: CI systems end a job that is silent for minutes."""


def line_of(event: Event, progress: Progress) -> str | None:
    """What a log says of `event`, which `progress` has been fed; None for what happens too often."""
    match event:
        case Planned(compiles=()):
            return None
        case Planned():
            stored = f", {len(event.present)} of them in the store" if event.present else ""
            memory = f" in {format_gib(event.budget)}" if event.budget else ""
            target = f" for {' '.join(event.architectures)}" if event.architectures else ""
            count = len(event.compiles)
            kernels = "kernel" if count == 1 else "kernels"
            return f"{event.package}{target}: {count} {kernels}{stored}; at most {event.cores} at once{memory}"
        case Step(name=name):
            return STEPS.get(name, name)
        case Ended(compile=name, ok=ok, peak=peak, time=time):
            took = format_time(progress.compiles[name].elapsed(time))
            ended = f"{len(progress.of('done', 'failed', 'stored'))}"
            if progress.planned:
                ended += f" of {len(progress.compiles)}"
            verb = "done" if ok else "FAILED"
            return f"{ended} {verb}: {name} ({took}, {format_gib(peak)})"
        case Evicted(compile=name):
            return f"stopped for want of memory, again later: {name}"
    return None


def heartbeat(progress: Progress, left: float | None) -> str:
    """How a build stands, in one line."""
    running = progress.of("running")
    parts = [STEPS.get(progress.step, progress.step)] if not running else [f"{len(running)} running"]
    if waiting := len(progress.of("waiting")):
        parts.append(f"{waiting} to come")
    if progress.memory:
        limit = f" of {format_gib(progress.budget)}" if progress.budget else ""
        parts.append(f"memory {format_gib(progress.used)}{limit}")
    if left is not None:
        parts.append(f"{about(left)} left")
    return ", ".join(part for part in parts if part)


class LineView:
    """A Listener that writes lines, each with the time since the build began, while its context lasts.

    `verbose` writes every line of output as well.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        forecast: Forecast | None = None,
        every: float = HEARTBEAT,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._stream = stream
        self._progress = Progress()
        self._verbose = verbose
        self._forecast = forecast or Forecast()
        self._every = every
        self._clock = clock
        self._seen = clock()
        self._lock = threading.RLock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._progress(event)
            self._seen = self._clock()
            if isinstance(event, Said):
                if self._verbose:
                    self._write(event.text)
            elif line := line_of(event, self._progress):
                self._write(f"[{format_time(event.time):>7}] {line}")

    @contextlib.contextmanager
    def shown(self) -> Iterator[LineView]:
        """Say how it stands every so often, until the block is left."""
        with regularly(self._beat, self._every, self._lock):
            yield self

    def _beat(self) -> None:
        now = self._progress.now + self._clock() - self._seen
        self._write(f"[{format_time(now):>7}] {heartbeat(self._progress, self._forecast.left(self._progress))}")

    def _write(self, line: str) -> None:
        # Whoever read the log may have gone; the build is worth more.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()
