"""A build on a terminal: a few lines at its bottom that say what runs, how much memory is left, and when it ends."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from pybuild.events import Ended, Event, Said
from pybuild.forecast import Forecast
from pybuild.pause import clock, pausing
from pybuild.units import format_gib, format_time
from pybuild.view.progress import Compile, Progress

INTERVAL = 0.25
"""Seconds between two drawings."""

# Seconds between two forecasts: each takes milliseconds, and a figure that jumps is not read.
_FORECAST = 2.0

# Beyond this many columns, lines are hard to read across.
_WIDEST = 108

COLOURS = {"cudafe++": "blue", "cc1plus": "blue", "cicc": "yellow", "ptxas": "green", "fatbinary": "green"}
"""The colour of a phase: the host's side, the one that takes the memory, the last one."""

STEPS = {"inputs": "preparing the toolkit and torch", "compile": "compiling", "link": "linking"}


def render(
    progress: Progress, *, now: float, left: float | None, width: int, height: int, ascii_only: bool
) -> list[Text]:
    """The lines of the view, none wider than `width` nor more than `height`.

    `now` is the time in seconds since the build began, `left` the seconds until it ends, None where unknown.
    """
    width = max(1, min(width, _WIDEST))
    lines = [_title(progress, now, left, width, ascii_only)]
    if progress.compiles:
        lines.append(_kernels(progress, width, ascii_only))
    if progress.memory:
        lines.append(_memory(progress, width, ascii_only))
        if progress.memory[-1].busy is not None and progress.cores:
            lines.append(_cores(progress, progress.memory[-1].busy, width, ascii_only))
    lines = lines[: max(1, height)]
    lines += _running(progress, now, width, height - len(lines), ascii_only)
    for line in lines:
        line.no_wrap = True
        _cut(line, width, ascii_only)
    return lines


def _cut(line: Text, width: int, ascii_only: bool) -> None:
    line.truncate(width, overflow="crop" if ascii_only else "ellipsis")


def _title(progress: Progress, now: float, left: float | None, width: int, ascii_only: bool) -> Text:
    name = Text(progress.package or "pybuild", style="bold")
    step = STEPS.get(progress.step, progress.step)
    elapsed = format_time(now)
    ends = f"{elapsed}, {about(left)} left" if left is not None else elapsed
    for part in (" ".join(progress.architectures), step):
        if part and name.cell_len + len(part) + len(ends) + 4 <= width:
            name.append(f"  {part}", style="dim" if part == step else "")
    return _spread(name, Text(ends), width, ascii_only)


def about(seconds: float) -> str:
    """A forecast in words no more precise than it is: `about 12 min`, `about 40 s`, `a moment`."""
    if seconds < 5:
        return "a moment"
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} hours"


def _spread(left: Text, right: Text, width: int, ascii_only: bool) -> Text:
    """Both on one line, `right` at its end; where there is no room for both, `left` is cut."""
    room = width - right.cell_len - 1
    if room < 1:
        return right
    _cut(left, room, ascii_only)
    left.pad_right(room - left.cell_len)
    return Text.assemble(left, " ", right)


def _bar(parts: list[tuple[float, str]], columns: int, ascii_only: bool) -> Text:
    """A bar of `columns`: each part as a share of the whole, with its style, and the rest dim."""
    filled, empty = ("#", "-") if ascii_only else ("━", "─")
    bar = Text()
    for share, style in parts:
        room = columns - bar.cell_len
        bar.append(filled * min(room, max(1 if share > 0 else 0, round(share * columns))), style=style)
    bar.append(empty * (columns - bar.cell_len), style="dim")
    return bar


def _line(label: str, parts: list[tuple[float, str]], words: Text, width: int, ascii_only: bool) -> Text:
    """`label`, a bar where there is room for one, and words."""
    columns = min(40, width - 9 - 44)
    line = Text(f"{label:<8} ")
    if columns >= 8:
        line.append_text(_bar(parts, columns, ascii_only)).append("  ")
    return line.append_text(words)


def _kernels(progress: Progress, width: int, ascii_only: bool) -> Text:
    total = len(progress.compiles)
    done, stored = len(progress.of("done")), len(progress.of("stored"))
    running, failed, waiting = (len(progress.of(state)) for state in ("running", "failed", "waiting"))
    words = Text(f"{done + stored} of {total} done" if progress.planned else f"{done} done")
    if running:
        words.append(f", {running} running")
    if failed:
        words.append(f", {failed} failed", style="red")
    if waiting:
        words.append(f", {waiting} to come")
    parts = [((done + stored) / total, "green"), (failed / total, "red"), (running / total, "yellow")]
    return _line(progress.noun, parts, words, width, ascii_only)


def _memory(progress: Progress, width: int, ascii_only: bool) -> Text:
    used, budget, waiting = progress.used, progress.budget, progress.waiting_for_memory
    words = Text(f"{format_gib(used).removesuffix(' GiB')} of {format_gib(budget)}" if budget else format_gib(used))
    words.append(f", peak {format_gib(progress.peak)}" if width >= 50 else "")
    if waiting:
        words.append(f", {waiting} wait{'s' if waiting == 1 else ''}", style="yellow")
    share = used / budget if budget else 0.0
    style = "red" if share > 1 else "yellow" if share > 0.9 else "cyan"
    return _line("memory", [(min(share, 1.0), style)], words, width, ascii_only)


def _cores(progress: Progress, busy: float, width: int, ascii_only: bool) -> Text:
    words = Text(f"{busy:.1f} busy, of {progress.cores} for this build")
    return _line("cores", [(min(1.0, busy / progress.cores), "magenta")], words, width, ascii_only)


def _running(progress: Progress, now: float, width: int, room: int, ascii_only: bool) -> list[Text]:
    """A line for each compile that failed or runs, those with the most memory first, as many as there is room for."""
    shown = [*progress.of("failed"), *sorted(progress.of("running"), key=lambda c: c.memory, reverse=True)]
    if len(shown) > room:
        shown, more = shown[: max(0, room - 1)], len(shown) - max(0, room - 1)
    else:
        more = 0
    lines = [_row(compile_, now, width, ascii_only) for compile_ in shown]
    if more and room > 0:
        lines.append(Text(f"  and {more} more", style="dim"))
    return lines


def _row(compile_: Compile, now: float, width: int, ascii_only: bool) -> Text:
    if compile_.state == "failed":
        tail = Text("failed", style="red")
    else:
        tail = Text(f"{compile_.tool:<9}", style=COLOURS.get(compile_.tool, ""))
        tail.append(f" {format_gib(compile_.memory):>9}", style="default")
        tail.append(f" {format_time(compile_.elapsed(now)):>6}", style="default")
    room = width - tail.cell_len - 3
    if room < 8:
        return Text(f"  {compile_.name}")
    return Text.assemble("  ", _middle(compile_.name, min(room, 48), ascii_only), " ", tail)


def _middle(name: str, columns: int, ascii_only: bool) -> str:
    """`name` in exactly so many columns, cut in its middle where need be: both ends tell kernels apart."""
    if len(name) <= columns:
        return name.ljust(columns)
    dots = ".." if ascii_only else "…"
    head = (columns - len(dots)) // 2
    return name[:head] + dots + name[len(name) - (columns - len(dots) - head) :]


class Region:
    """The lines at the bottom of a terminal that are drawn anew again and again.

    The cursor is left below them, and visible: so there is nothing to put right however the program ends or stops.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[int] = []  # columns of each line that is there now
        # "auto" asks for a terminal's colours, and NO_COLOR; what it writes is kept.
        self._console = Console(file=stream, highlight=False, markup=False)
        self.ascii_only = not (stream.encoding or "").lower().startswith("utf")

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return columns or 80, lines or 24

    def draw(self, lines: list[Text], above: Sequence[str] = ()) -> None:
        """Replace the lines by these, after writing `above` where they stood."""
        columns, rows = self.size()
        lines = lines[: max(0, rows - 1)]
        out = io.StringIO()
        # One update for the terminals that know of it (mode 2026): no flicker.
        out.write("\x1b[?2026h\r")
        # A terminal that got narrower has wrapped the lines.
        if height := sum(max(1, -(-width // columns)) for width in self._drawn):
            out.write(f"\x1b[{height}A")
        for text in above:
            out.write(f"{text}\x1b[K\n")
        for line in lines:
            out.write(f"{self._escaped(line)}\x1b[K\n")
        out.write("\x1b[J\x1b[?2026l")
        self._drawn = [line.cell_len for line in lines]
        self._stream.write(out.getvalue())
        self._stream.flush()

    def _escaped(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
        return captured.get()

    def forget(self) -> None:
        """What was drawn is above now: another program has written below it."""
        self._drawn = []

    def is_ours(self) -> bool:
        """Whether this program is in the foreground of the terminal."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True  # it is not the terminal that controls us


class LiveView:
    """A Listener that keeps the view of a build at the bottom of a terminal, while its context lasts.

    `verbose` writes every line of output above it. If the terminal goes away, the build goes on unseen.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        forecast: Forecast | None = None,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._region = Region(stream)
        self._progress = Progress()
        self._verbose = verbose
        self._forecast = forecast or Forecast()
        self._clock = clock
        self._seen = clock()  # when the last event came, for the time that passes without any
        self._left: tuple[float, float | None] = (float("-inf"), None)
        self._lock = threading.RLock()
        self._above: list[str] = []  # what is to be written above the view with the next drawing
        self._gone = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._progress(event)
            self._seen = self._clock()
            match event:
                case Said(text=text) if self._verbose:
                    self._above.append(text)
                case Ended(ok=False, compile=name):
                    self._above.append(f"{name} failed")

    @contextlib.contextmanager
    def shown(self) -> Iterator[LiveView]:
        """Draw until the block is left; then the view is gone."""
        with _noting_continues():
            try:
                with regularly(self._draw, INTERVAL, self._lock):
                    yield self
            finally:
                self._clear()

    def _draw(self) -> None:
        if not self._region.is_ours():
            # In the background, another program has the terminal: no view, but what is said is not lost.
            self._region.forget()
            if self._above:
                self._write([])
            return
        now = self._progress.now + self._clock() - self._seen
        width, height = self._region.size()
        self._write(
            render(
                self._progress,
                now=now,
                left=self._time_left(now),
                width=width - 1,
                height=height - 1,
                ascii_only=self._region.ascii_only,
            )
        )

    def _time_left(self, now: float) -> float | None:
        made, left = self._left
        if now - made >= _FORECAST:
            made, left = self._left = (now, self._forecast.left(self._progress))
        return None if left is None else max(0.0, left - (now - made))

    def _clear(self) -> None:
        if not self._region.is_ours():
            self._region.forget()
        if self._above or self._region.is_ours():
            self._write([])

    def _write(self, lines: list[Text]) -> None:
        above, self._above = self._above, []
        if self._gone:
            return
        if _has_continued():
            # The shell has written below what was drawn.
            self._region.forget()
        try:
            self._region.draw(lines, above)
        except (OSError, ValueError):
            self._gone = True


@contextlib.contextmanager
def regularly(act: Callable[[], None], every: float, lock: threading.RLock) -> Iterator[None]:
    """Call `act` every so many seconds in a thread of its own, with `lock` held, while the context lasts.

    Ctrl-Z stops the process, and all that it has started, between two calls.
    """
    done = threading.Event()

    def keep_acting() -> None:
        while not done.wait(every):
            with lock:
                act()

    thread = threading.Thread(target=keep_acting, daemon=True)
    with pausing(lock):
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextlib.contextmanager
def _noting_continues() -> Iterator[None]:
    """Keep SIGCONT back while the context lasts, for `_has_continued`; in the main thread, and those started from it.

    A handler would run in the main thread only, some time after the process has gone on; what is kept back is there
    before any thread goes on. `kill -STOP` can't be handled at all. What is started meanwhile keeps it back as well,
    and goes on all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    try:
        yield
    finally:
        _has_continued()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_continued() -> bool:
    """Whether this process has been stopped and has gone on, since the last time this was asked."""
    return signal.sigtimedwait({signal.SIGCONT}, 0) is not None
