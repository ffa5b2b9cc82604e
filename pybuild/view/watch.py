"""Who is told what happens in a build: a view for the person, a record for later, a log file; and the last word."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TextIO

from pybuild.errors import BuildError
from pybuild.events import Event, Listener, Over, Said
from pybuild.forecast import AFTERWARDS, Forecast
from pybuild.pause import clock, paused
from pybuild.view.lines import LineView
from pybuild.view.live import LiveView
from pybuild.view.progress import Progress
from pybuild.view.record import Head, last_afterwards, recording
from pybuild.view.summary import cause_of, next_command, summarise


def is_lively(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether lines can be drawn anew on `stream`: a terminal, and not one that TERM calls dumb."""
    return stream.isatty() and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


@contextlib.contextmanager
def choose_listener(
    stream: TextIO,
    *,
    environ: Mapping[str, str] | None = None,
    verbose: bool = False,
    afterwards: float = AFTERWARDS,
) -> Iterator[Listener]:
    """The view that suits `stream`: live on a terminal, else lines. It is gone when the context is left.

    `verbose` shows all of the output, such as the compilers' command lines; `afterwards` is how many seconds the steps
    after the last compile take.
    """
    forecast = Forecast(afterwards)
    if is_lively(stream, os.environ if environ is None else environ):
        with LiveView(stream, verbose=verbose, forecast=forecast).shown() as live:
            yield live
    else:
        with LineView(stream, verbose=verbose, forecast=forecast).shown() as lines:
            yield lines


@contextlib.contextmanager
def watching(
    head: Head,
    *,
    stream: TextIO | None = None,
    verbose: bool = False,
    log: TextIO | None = None,
    since: float | None = None,
) -> Iterator[Listener]:
    """A Listener that shows a build on `stream` (standard error), records it, and keeps its output in `log`.

    `since` is the moment of pybuild.pause.clock from which the events' times count; None is now. No event is later than
    that clock: the time for which Ctrl-Z stops all is not the build's.

    When the context is left, a summary is written. A BuildError that leaves it gets the command to type next.
    """
    out = stream or sys.stderr
    progress = Progress()
    began = clock() if since is None else since
    name: str | None = None

    def finish() -> None:
        if progress.over is not None:
            for line in summarise(progress, name):
                print(line, file=out)

    try:
        afterwards = last_afterwards(head.package)
        with (
            recording(head) as recorder,
            choose_listener(out, verbose=verbose, afterwards=AFTERWARDS if afterwards is None else afterwards) as view,
        ):
            name = recorder.name if recorder else None
            listeners: list[Listener] = [progress, view, *([recorder] if recorder else [])]

            def tell(event: Event) -> None:
                if paused() and event.time > clock() - began:
                    event = replace(event, time=clock() - began)
                if log is not None and isinstance(event, Said):
                    log.write(event.text + "\n")
                for listener in listeners:
                    listener(event)

            try:
                yield tell
            except KeyboardInterrupt:
                tell(Over(progress.now, error="stopped by Ctrl-C", stopped=True))
                raise
            except BuildError as error:
                if progress.over is None:
                    tell(Over(progress.now, error=str(error)))
                raise
    except KeyboardInterrupt:
        finish()
        raise
    except BuildError as error:
        finish()
        command = next_command(cause_of(progress), head.command, progress.cores)
        raise BuildError(error.what, f"{error.remedy}\nNext: {command}".lstrip()) from error
    finish()
