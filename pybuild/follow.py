"""What `pybuild run` shows: a process beside the build, which hears the gate and the build's output through pipes.

A process, since the gate forks; and only from the first compile on, since most of what people run compiles nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from pybuild.events import Asked, Began, Ended, Event, Evicted, Listener, Memory, Over, Planned, Reading, Said
from pybuild.pause import clock, pausing
from pybuild.view.progress import Progress


def events_of(seconds: float, what: str, *facts: Any) -> Iterator[Event]:
    """The events in what the gate tells (pybuild.gate.Server), `seconds` after the build's start."""
    match what, facts:
        case "ask", (name,):
            yield Asked(seconds, name)
        case "go", (name,):
            yield Began(seconds, name)
        case "stop", (name,):
            yield Evicted(seconds, name)
        case "end", (name, status, peak):
            yield Ended(seconds, name, status == "0", 0.0, peak)
        case "see", (runs, budget, available, waiting):
            for name, tool, memory in runs:
                yield Reading(seconds, name, tool, memory)
            yield Memory(seconds, sum(memory for _, _, memory in runs), budget, available, waiting)


@contextlib.contextmanager
def following(package: str, command: Sequence[str], cores: int) -> Iterator[Callable[..., None]]:
    """Show and record the build that runs while the context lasts; gives the function that the gate is to tell.

    On a terminal the build's output comes through a pipe, so that it can be shown above the view. Call it while the
    process has one thread: it forks.
    """
    from pybuild.view.watch import is_lively

    started = clock()
    lively = is_lively(sys.stderr, os.environ)
    facts_there, facts = os.pipe()
    output_there, output = os.pipe() if lively else (-1, -1)
    sys.stdout.flush()
    sys.stderr.flush()
    follower = os.fork()
    if not follower:
        try:
            os.close(facts)
            if lively:
                os.close(output)
            # Ctrl-C and the like are for the build; this ends when it has ended.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            _follow(facts_there, output_there if lively else None, package, command, cores)
        finally:
            os._exit(0)
    os.close(facts_there)

    def tell(*told: Any) -> None:
        line = json.dumps([clock() - started, *told])
        with contextlib.suppress(OSError):  # whoever listened is gone; the build is worth more
            os.write(facts, line.encode() + b"\n")

    try:
        with pausing(threading.RLock()), _instead_of_terminal(output) if lively else contextlib.nullcontext():
            yield tell
    finally:
        os.close(facts)
        if lively:
            os.close(output_there)
            os.close(output)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(follower, 0)


@contextlib.contextmanager
def _instead_of_terminal(output: int) -> Iterator[None]:
    """Standard output and error are `output`, as far as they are a terminal."""
    kept = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
    for fd in kept:
        os.dup2(output, fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, before in kept.items():
            os.dup2(before, fd)
            os.close(before)


def _follow(facts: int, output: int | None, package: str, command: Sequence[str], cores: int) -> None:
    """Show what comes from the two pipes until the first has ended."""
    follower = Follower(package, command, cores, sys.stderr)
    streams = {facts: Lines(follower.hear)}
    if output is not None:
        os.set_blocking(output, False)
        streams[output] = Lines(follower.say)
    with selectors.DefaultSelector() as selector, follower:
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ)
        while facts in streams:
            ready = selector.select(0.5)
            if not ready and output in streams:
                # Nobody waits for the end of a line that does not come: a question, for one.
                streams[output].end()
            for key, _ in ready:
                if not _receive(key.fd, streams[key.fd]):
                    selector.unregister(key.fd)
                    streams.pop(key.fd).end()
        if output is not None and output in streams:
            while _receive(output, streams[output]):
                pass
            streams[output].end()


def _receive(fd: int, lines: Lines) -> bool:
    """Take in what is there; False at the end, or where nothing is."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return False
    lines.feed(data)
    return bool(data)


class Lines:
    """Bytes, put together to lines; each is given to `take`."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take in more bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def end(self) -> None:
        """The rest is a line as well."""
        rest, self._rest = self._rest, b""
        if rest:
            self._take(rest.decode(errors="replace"))


class Follower:
    """Shows and records a build from its first compile on; a context that ends with the last word about it."""

    def __init__(self, package: str, command: Sequence[str], cores: int, stream: TextIO) -> None:
        self._package, self._command, self._cores, self._stream = package, command, cores, stream
        self._started = clock()
        self._progress = Progress()
        self._listener: Listener | None = None
        self._stack = contextlib.ExitStack()
        self._status = 0

    def hear(self, line: str) -> None:
        """A line of the gate's, or the build's exit status at the end."""
        seconds, what, *facts = json.loads(line)
        if what == "over":
            self._status = facts[0]
            if self._status == 0:
                self._end_all(seconds)
            return
        for event in events_of(seconds, what, *facts):
            if self._listener is None:
                self._begin(seconds)
            self._tell(event)

    def _end_all(self, seconds: float) -> None:
        """What still ran a moment ago has ended with its build: the gate ends with it too, and may not have told."""
        for compile_ in self._progress.of("running"):
            self._tell(Ended(seconds, compile_.name, True, 0.0, compile_.peak))

    def say(self, line: str) -> None:
        """A line of the build's output. What a carriage return has overwritten is left out."""
        text = line.rstrip("\r").rpartition("\r")[2]
        if self._listener is None:
            with contextlib.suppress(OSError, ValueError):
                print(text, file=self._stream, flush=True)
        else:
            self._tell(Said(clock() - self._started, text))

    def _begin(self, seconds: float) -> None:
        from pybuild.view.record import head_of
        from pybuild.view.watch import watching

        head = head_of(self._package, list(self._command), {"cores": self._cores})
        self._listener = self._stack.enter_context(
            watching(head, stream=self._stream, verbose=True, since=self._started)
        )
        self._tell(Planned(seconds, self._package, (), (), self._cores, 0))

    def _tell(self, event: Event) -> None:
        assert self._listener is not None
        self._progress(event)
        self._listener(event)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        from pybuild.view.summary import cause_of, next_command

        if self._listener is None:
            return
        seconds = clock() - self._started
        stopped = self._status in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
        error = f"{shlex.join(self._command)} ended with status {self._status}" if self._status else ""
        self._tell(Over(seconds, error=error, stopped=stopped))
        self._stack.close()
        cause = cause_of(self._progress) if self._status and not stopped else None
        if cause:
            again = next_command(cause, self._command, self._cores)
            print(f"pybuild: {cause.remedy}\nNext: {again}", file=self._stream, flush=True)
