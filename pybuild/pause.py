"""Ctrl-Z: all that a build has started stops with it and goes on with it, and its clock stands meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

# Seconds within which what was started has to have stopped; what does not (a program that ignores Ctrl-Z) goes on.
_PATIENCE = 1.0

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

_stopped = 0.0  # seconds for which this process was stopped


def clock() -> float:
    """Seconds as time.monotonic's, less those for which Ctrl-Z had stopped this process."""
    return time.monotonic() - _stopped


def paused() -> float:
    """The seconds for which Ctrl-Z had stopped this process (within `pausing`), all together."""
    return _stopped


@contextlib.contextmanager
def pausing(at_rest: threading.RLock) -> Iterator[None]:
    """While the context lasts, Ctrl-Z stops first all that this process has started, then it, with `at_rest` held.

    When it goes on (`fg`, `bg`), so do they. In a child that was forked within the context, only the clock stands: the
    parent sees to all. Does nothing outside of the main thread, nor where Ctrl-Z is ignored.
    """
    ignored = signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def received(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            _stop(received)
            return
        # A second Ctrl-Z is the same one.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        # Whoever holds it may itself wait for a terminal that takes nothing (Ctrl-S): not for ever, then.
        held = at_rest.acquire(timeout=_PATIENCE)
        others: list[psutil.Process] = []
        try:
            _stop_others(others)
            _stop(received)
        finally:
            _go_on(others)
            if held:
                at_rest.release()

    before = signal.signal(signal.SIGTSTP, received)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _stop(handler: Callable[[int, FrameType | None], None]) -> None:
    """Stop this process, as Ctrl-Z does by itself; returns when it goes on, or at once where nobody could have it go
    on (a process group without a shell)."""
    global _stopped
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    began = time.monotonic()
    try:
        signal.raise_signal(signal.SIGTSTP)
    finally:
        _stopped += time.monotonic() - began
        signal.signal(signal.SIGTSTP, handler)


def _stop_others(stopped: list[psutil.Process]) -> None:
    """Stop what runs below this process, and note it in `stopped`.

    Looked at again until nothing new runs: what is not stopped yet may start more.
    """
    group = os.getpgrp()
    until = time.monotonic() + _PATIENCE
    while running := _running(group):
        for process in running:
            if process not in stopped:
                stopped.append(process)
                # Those of our group have it from the terminal, most of the time.
                with contextlib.suppress(psutil.Error, OSError):
                    in_group = os.getpgid(process.pid) == group
                    process.send_signal(signal.SIGTSTP if in_group else signal.SIGSTOP)
        if time.monotonic() > until:
            break
        time.sleep(0.01)


def _running(group: int) -> list[psutil.Process]:
    """What runs below this process and is to be stopped.

    A nix whose builder is stopped does nothing. It is left awake: should this process be killed while all is stopped,
    it ends the builder, which nobody else would.
    """
    mine = os.getpid()
    found: list[tuple[psutil.Process, int, str]] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append((process, process.ppid(), process.status()))
    parents = {parent for _, parent, status in found if status not in _ENDED}
    running = []
    for process, parent, status in found:
        with contextlib.suppress(OSError):
            nix = parent == mine and process.pid in parents and os.getpgid(process.pid) != group
            if not nix and status not in _STOPPED + _ENDED:
                running.append(process)
    return running


def _go_on(stopped: list[psutil.Process]) -> None:
    for process in reversed(stopped):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
