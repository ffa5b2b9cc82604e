"""A terminal for tests: a pseudo-terminal with a program in it, and the screen that a person would see."""

from __future__ import annotations

import builtins
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte


class Terminal:
    """`argv` in a terminal of `columns` and `rows`; `screen` is what is seen, `raw` all that was written.

    Leaving the context kills what still runs.
    """

    def __init__(
        self, argv: Sequence[str], *, columns: int = 100, rows: int = 24, environ: Mapping[str, str] | None = None
    ) -> None:
        self.raw = b""
        self.status: int | None = None
        self._pyte = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._pyte)
        names = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        env = {name: value for name, value in os.environ.items() if name not in names}
        env |= {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environ or {})}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            try:
                _set_size(0, columns, rows)
                os.execvpe(argv[0], list(argv), env)
            finally:
                os._exit(127)

    @property
    def screen(self) -> list[str]:
        """The lines of the screen, without those that are blank at its end."""
        lines = [line.rstrip() for line in self._pyte.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, columns: int, rows: int) -> None:
        """Make the terminal another size; the program is told."""
        _set_size(self._fd, columns, rows)
        self._pyte.resize(rows, columns)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._fd, text.encode())

    def read(self, seconds: float = 0.05) -> bool:
        """Take in what comes within so many seconds; False when the program has gone."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: nobody has the terminal open any more
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def wait_for(self, seen: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
        """Read until `seen`; fails where that takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while not seen():
            alive = self.read()
            if (time.monotonic() > end or not alive) and not seen():
                raise AssertionError(f"never saw {what}; the screen:\n" + "\n".join(self.screen))

    def shows(self, text: str) -> Callable[[], bool]:
        """Whether `text` is on the screen."""
        return lambda: any(text in line for line in self.screen)

    def finish(self, timeout: float = 30.0) -> int:
        """Read to the end; the program's exit status."""
        end = time.monotonic() + timeout
        while self.read():
            if time.monotonic() > end:
                raise AssertionError("it does not end; the screen:\n" + "\n".join(self.screen))
        self._reap()
        assert self.status is not None
        return self.status

    def _reap(self) -> None:
        if self.status is None:
            _, status = os.waitpid(self._pid, 0)
            self.status = os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: builtins.type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)  # hangs up: the session's foreground gets SIGHUP
        if self.status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()


def _set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
