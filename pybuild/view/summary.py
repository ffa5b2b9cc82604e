"""What a person is told when a build has ended: what it took and made, or what went wrong and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from pybuild.errors import PybuildError
from pybuild.nix import Cause, known_cause
from pybuild.units import format_gib, format_time
from pybuild.view.progress import Compile, Progress

# Compiles that a list of the slowest, or of those that waited, has.
_LISTED = 3

# Seconds of waiting that are worth a word.
_NOTABLE = 1.0


def summarise(progress: Progress, record: str | None = None) -> list[str]:
    """The lines for a build that is over. `record` is what `pybuild report` calls it, None where it is not recorded."""
    lines = [_outcome(progress), *_took(progress)]
    over = progress.over
    for wheel in over.wheels if over else ():
        lines += _wheel(Path(wheel))
    if record:
        lines.append(_labelled("report", f"pybuild report {record}"))
    return lines


def _labelled(label: str, text: str) -> str:
    return f"  {label:<9}{text}"


def _outcome(progress: Progress) -> str:
    verb = {"done": "built", "failed": "failed", "stopped": "stopped", "running": "cut short"}[progress.status]
    line = f"{progress.package or 'the build'}: {verb} after {format_time(progress.now)}"
    if progress.status != "done" and progress.planned:
        kept = len(progress.of("done", "stored"))
        line += f"; kernels that are finished and kept: {kept} of {len(progress.compiles)}"
    return line


def _took(progress: Progress) -> list[str]:
    ended = [c for c in progress.of("done", "failed") if c.began is not None]
    lines = []
    if ended:
        stored = len(progress.of("stored"))
        noun = progress.noun.removesuffix("s") if len(ended) == 1 else progress.noun
        compiled = f"{len(ended)} {noun} compiled" + (f", {stored} taken from the store" if stored else "")
        cores = f", {progress.cpu / progress.now:.1f} cores on average" if progress.now else ""
        cpu = f"{format_time(progress.cpu)} of CPU time{cores}; " if progress.cpu else ""
        lines.append(_labelled("time", cpu + compiled))
    if progress.peak:
        limit = f", of {format_gib(progress.budget)}" if progress.budget else ""
        lines.append(
            _labelled("memory", f"{format_gib(progress.peak)} at the peak{limit}, {format_time(progress.peak_time)} in")
        )
    if len(ended) > 1:
        lines.append(_labelled("slowest", _top(ended, lambda c: c.elapsed(progress.now))))
    waited = [c for c in progress.compiles.values() if c.waited >= _NOTABLE]
    if waited:
        total = format_time(sum(c.waited for c in waited))
        lines.append(_labelled("waited", f"{total} for memory: {_top(waited, lambda c: c.waited)}"))
    if evicted := [c for c in progress.compiles.values() if c.evictions]:
        lines.append(_labelled("again", f"stopped once memory got short: {', '.join(c.name for c in evicted)}"))
    return lines


def _top(compiles: Sequence[Compile], seconds: Callable[[Compile], float]) -> str:
    """Those with the most of these seconds: `name 2:41, name 2:30`."""
    first = sorted(compiles, key=seconds, reverse=True)[:_LISTED]
    return ", ".join(f"{c.name} {format_time(seconds(c))}" for c in first)


def _wheel(path: Path) -> list[str]:
    """Size, device code, and how to install it."""
    from pybuild.wheel import read_artifact  # not for those builds that fail

    try:
        size = format_gib(path.stat().st_size)
        codes = " ".join(map(str, read_artifact(path).codes))
    except OSError as error:
        return [_labelled("wheel", f"{path} can't be read: {error.strerror}")]
    except PybuildError as error:
        return [_labelled("wheel", error.what)]
    return [
        _labelled("wheel", f"{path}, {size}" + (f", for {codes}" if codes else "")),
        _labelled("install", f"pip install {shlex.quote(str(path))}"),
    ]


def cause_of(progress: Progress) -> Cause | None:
    """The known cause of a build's failure, by its error and the last lines of its output."""
    error = progress.over.error if progress.over else ""
    return known_cause([line.strip() for line in (*error.splitlines(), *progress.said)])


def next_command(cause: Cause | None, command: Sequence[str], cores: int) -> str:
    """What to type after a failure: `command` again, changed as its cause asks for.

    `command` are the words that were typed, `cores` how many compiles it ran at once.
    """
    again = shlex.join(command)
    if cause is None or cause.name in ("network", "compiler", "header", "trust", "signature", "namespaces"):
        return f"{again}  # when that is mended"
    if cause.name == "memory":
        return shlex.join(_with_cores(command, max(1, cores // 2)))
    if cause.name == "disk":
        return "nix-store --gc  # removes what no build needs; then the same command again"
    return f"pip config list  # which index serves it; once that is mended: {again}"


def _with_cores(command: Sequence[str], cores: int) -> list[str]:
    """`command` with --cores, in place of the one it has."""
    words = list(command)
    end = words.index("--") if "--" in words else len(words)
    options, rest = words[:end], words[end:]
    kept: list[str] = []
    skip = False
    for word in options:
        if skip:
            skip = False
        elif word == "--cores":
            skip = True
        elif not word.startswith("--cores="):
            kept.append(word)
    return [*kept, "--cores", str(cores), *rest]
