"""What a recorded build took: as data, and as one HTML file that needs nothing but a browser."""

from __future__ import annotations

import bisect
import html
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib import resources
from itertools import pairwise
from string import Template
from typing import Any

from pydantic import BaseModel, ConfigDict

from pybuild.events import Began, Ended, Evicted, Reading
from pybuild.facts.host import Host
from pybuild.units import GIB, format_gib, format_time
from pybuild.view.progress import Compile, Progress, State, Status
from pybuild.view.record import Build

PHASES = ("host", "cicc", "ptxas", "other")
"""The classes of phases that have a colour."""

_PHASE = {"cudafe++": "host", "cc1plus": "host", "cc1": "host", "cicc": "cicc", "ptxas": "ptxas", "fatbinary": "ptxas"}
_MEANING = {
    "host": "host code (cc1plus, cudafe++)",
    "cicc": "cicc",
    "ptxas": "ptxas",
    "other": "other",
    "wait": "waited for memory",
}

# Points of the memory chart: more than a screen has columns in it are drawn for nobody.
_POINTS = 600

# A machine whose memory is more than this many times what the chart needs is told of in words.
_FAR = 2.0


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(_Data):
    """Seconds in which a tool was at work, since the build began."""

    tool: str
    start: float
    end: float


class Kernel(_Data):
    """One compile; times in seconds, `began` since the build began, `peak` in bytes."""

    name: str
    state: State
    began: float | None
    seconds: float
    cpu: float
    peak: int
    waited: float
    evictions: int
    phases: tuple[Phase, ...]


class Point(_Data):
    """Memory at a moment, in bytes: of the build's compiles together, and of each class of phases (PHASES)."""

    time: float
    used: int
    by_phase: tuple[int, ...]


class Report(_Data):
    """A build in figures: seconds and bytes.

    `machine` is the memory of the whole machine, `noun` what the build's compiles are called.
    """

    name: str
    package: str
    status: Status
    error: str
    started: datetime
    pybuild: str
    command: tuple[str, ...]
    flags: dict[str, Any]
    host: Host
    architectures: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    cores: int
    budget: int
    machine: int
    noun: str
    peak: int
    peak_time: float
    waited: float
    steps: tuple[Phase, ...]
    kernels: tuple[Kernel, ...]
    memory: tuple[Point, ...]
    wheels: tuple[str, ...]


def report_of(build: Build) -> Report:
    """The figures of a recorded build."""
    progress = build.progress()
    head = build.head
    # A record without an end is that of a build that was killed, or that runs still.
    return Report(
        name=build.name,
        package=progress.package or head.package,
        status=progress.status,
        error=progress.over.error if progress.over else "",
        started=head.started,
        pybuild=head.pybuild,
        command=head.command,
        flags=head.flags,
        host=head.host,
        architectures=progress.architectures,
        seconds=progress.now,
        cpu_seconds=progress.cpu,
        cores=progress.cores,
        budget=progress.budget,
        machine=head.host.memory.total,
        noun=progress.noun,
        peak=progress.peak,
        peak_time=progress.peak_time,
        waited=sum(c.waited for c in progress.compiles.values()),
        steps=tuple(_spans([(time, name) for time, name in progress.steps], progress.now)),
        kernels=tuple(_kernel(c, progress.now) for c in progress.compiles.values()),
        memory=tuple(_thinned(list(_points(build, progress)))),
        wheels=progress.over.wheels if progress.over else (),
    )


def _spans(starts: Sequence[tuple[float, str]], end: float) -> Iterator[Phase]:
    for (start, name), (next_, _) in pairwise([*starts, (end, "")]):
        yield Phase(tool=name, start=start, end=next_)


def _kernel(compile_: Compile, now: float) -> Kernel:
    end = now if compile_.ended is None else compile_.ended
    phases = list(_spans(compile_.phases, end))
    if compile_.began is not None and compile_.state != "waiting":
        # What runs before the first tool is seen belongs to it.
        first = phases[0] if phases else Phase(tool="", start=end, end=end)
        phases[:1] = [first.model_copy(update={"start": compile_.began})]
    return Kernel(
        name=compile_.name,
        state=compile_.state,
        began=compile_.began,
        seconds=compile_.elapsed(now),
        cpu=compile_.cpu,
        peak=compile_.peak,
        waited=compile_.waited,
        evictions=compile_.evictions,
        phases=tuple(phases),
    )


def phase_class(tool: str) -> str:
    """Which of PHASES a tool belongs to."""
    return _PHASE.get(tool, "other")


def _points(build: Build, progress: Progress) -> Iterator[Point]:
    """The build's memory at each time that it was noted, and whose it was."""
    changes: list[tuple[float, str, str, int]] = []
    for event in build.events:
        match event:
            case Reading():
                changes.append((event.time, event.compile, event.tool, event.memory))
            case Began(time=time, compile=name) | Ended(time=time, compile=name) | Evicted(time=time, compile=name):
                changes.append((time, name, "", 0))
    held: dict[str, tuple[str, int]] = {}
    index = 0
    for noted in progress.memory:
        end = bisect.bisect_right(changes, noted.time, lo=index, key=lambda change: change[0])
        for _, name, tool, memory in changes[index:end]:
            held[name] = (tool, memory)
        index = end
        sums = dict.fromkeys(PHASES, 0)
        for tool, memory in held.values():
            sums[phase_class(tool)] += memory
        yield Point(time=noted.time, used=noted.used, by_phase=tuple(sums.values()))


def _thinned(points: list[Point]) -> Iterator[Point]:
    """At most _POINTS of them: of each bunch the highest, so that no peak is lost."""
    size = math.ceil(len(points) / _POINTS) or 1
    for start in range(0, len(points), size):
        yield max(points[start : start + size], key=lambda point: point.used)


# HTML


def render_html(report: Report) -> str:
    """The report as one HTML file: no script of others, no font, no image, nothing from the network."""
    files = resources.files("pybuild.view") / "report_template"
    columns = (report.noun.removesuffix("s"), "state", "began", "took", "CPU", "peak", "waited")
    return Template((files / "report.html").read_text(encoding="utf-8")).substitute(
        title=_text(f"{report.package}: {report.status} after {format_time(report.seconds)}"),
        style=(files / "report.css").read_text(encoding="utf-8"),
        script=(files / "report.js").read_text(encoding="utf-8"),
        package=_text(report.package),
        noun=_text(report.noun.capitalize()),
        status=_text(report.status if report.status != "running" else "unfinished"),
        started=_text(f"{report.started.astimezone():%A, %d %B %Y, %H:%M %Z}"),
        command=_text(shlex.join(report.command)),
        error=f'<section class="error"><h2>What went wrong</h2><pre>{_text(report.error)}</pre></section>'
        if report.error
        else "",
        tiles="\n".join(_tiles(report)),
        memory="\n".join(_memory_chart(report)) if report.memory else "<p>No memory was noted.</p>",
        gantt="\n".join(_gantt(report)),
        columns="".join(f'<th><button type="button">{name}</button></th>' for name in columns),
        rows="\n".join(map(_row, report.kernels)),
        facts="\n".join(f"<dt>{_text(term)}</dt><dd>{_text(fact)}</dd>" for term, fact in _facts(report)),
        version=_text(report.pybuild),
        name=_text(report.name),
    )


def _text(text: str) -> str:
    return html.escape(text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%" if whole else "0%"


def _tiles(report: Report) -> Iterator[str]:
    done = [kernel for kernel in report.kernels if kernel.state == "done"]
    stored = sum(kernel.state == "stored" for kernel in report.kernels)
    figures = [(format_time(report.seconds), "from start to end")]
    if report.cpu_seconds and report.seconds:
        average = report.cpu_seconds / report.seconds
        figures.append((format_time(report.cpu_seconds), f"of CPU time, {average:.1f} cores on average"))
    if report.peak:
        of = f" of {format_gib(report.budget)}" if report.budget else ""
        figures.append((format_gib(report.peak), f"peak memory{of}, at {format_time(report.peak_time)}"))
    kept = f", {stored} more were in the store" if stored else ""
    figures.append((str(len(done)), f"of {len(report.kernels)} {report.noun} compiled{kept}"))
    if report.waited >= 1:
        figures.append((format_time(report.waited), f"{report.noun} waited for memory"))
    for figure, words in figures:
        yield f'<div class="tile"><b>{_text(figure)}</b><span>{_text(words)}</span></div>'


def ticks(end: float, steps: Iterable[float], most: int) -> list[float]:
    """Round values from 0 to `end`, at most `most` beyond 0: multiples of the smallest of `steps` that is enough."""
    step = next((step for step in steps if end / step <= most), end or 1.0)
    return [n * step for n in range(int(end / step) + 1)]


def _time_ticks(report: Report) -> list[float]:
    return ticks(report.seconds, (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400), 6)


def _x_axis(report: Report) -> str:
    return "".join(
        f'<span class="x" style="left:{_percent(time, report.seconds)}">{format_time(time)}</span>'
        for time in _time_ticks(report)
    )


def _legend(items: Iterable[tuple[str, str]]) -> str:
    """Each item a class of the style sheet, and what it means."""
    entries = "".join(f'<li><i class="{css}"></i>{_text(words)}</li>' for css, words in items)
    return f'<ul class="legend">{entries}</ul>'


def _memory_chart(report: Report) -> Iterator[str]:
    needed = max(report.budget, report.peak, max(point.used for point in report.memory), 1)
    machine_shown = 0 < report.machine <= _FAR * needed
    top = 1.05 * (max(needed, report.machine) if machine_shown else needed)
    end = report.seconds or 1.0

    def at(time: float, memory: float) -> str:
        return f"{1000 * time / end:.1f},{1000 * (1 - memory / top):.1f}"

    used_phases = [i for i, _ in enumerate(PHASES) if any(point.by_phase[i] for point in report.memory)]
    items = [(PHASES[i], _MEANING[PHASES[i]]) for i in used_phases]
    if report.budget:
        items.append(("line", f"budget, {format_gib(report.budget)}"))
    beyond = "" if machine_shown else ", beyond this chart"
    if report.machine:
        items.append(("line machine", f"the machine has {format_gib(report.machine)}{beyond}"))
    yield _legend(items)
    yield '<div class="chart">'
    label = f"Memory over time: {format_gib(report.peak)} at the peak, {format_time(report.peak_time)} after the start."
    yield f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{_text(label)}">'
    memory_ticks = ticks(top, (n * GIB for n in _round_numbers()), 5)
    for memory in memory_ticks[1:]:
        yield f'<path class="grid" d="M{at(0, memory)}H1000"/>'
    below = [0.0] * len(report.memory)
    for i in used_phases:
        above = [base + point.by_phase[i] for base, point in zip(below, report.memory, strict=True)]
        forth = [at(point.time, memory) for point, memory in zip(report.memory, above, strict=True)]
        back = [at(point.time, memory) for point, memory in zip(report.memory, below, strict=True)]
        yield f'<path class="{PHASES[i]}" d="M{" ".join([*forth, *reversed(back)])}Z"/>'
        below = above
    yield f'<path class="total" d="M{" ".join(at(point.time, point.used) for point in report.memory)}"/>'
    if report.budget:
        yield f'<path class="budget" d="M{at(0, report.budget)}H1000"/>'
    if machine_shown:
        yield f'<path class="machine" d="M{at(0, report.machine)}H1000"/>'
    yield "</svg>"
    for memory in memory_ticks:
        yield f'<span class="y" style="bottom:{_percent(memory, top)}">{_gib_label(memory)}</span>'
    yield _x_axis(report)
    yield "</div>"


def _round_numbers() -> Iterator[float]:
    """0.1, 0.2, 0.5, 1, 2, 5, 10, ..."""
    for exponent in range(-1, 5):
        for digit in (1, 2, 5):
            yield digit * 10.0**exponent


def _gib_label(memory: float) -> str:
    return f"{memory / GIB:g} GiB" if memory else "0"


def _gantt(report: Report) -> Iterator[str]:
    began = sorted((k for k in report.kernels if k.began is not None), key=lambda k: k.began or 0.0)
    classes = {phase_class(phase.tool) for kernel in began for phase in kernel.phases}
    items = [(css, _MEANING[css]) for css in PHASES if css in classes]
    if any(kernel.waited >= 1 for kernel in began):
        items.append(("wait", _MEANING["wait"]))
    yield _legend(items)
    yield '<div class="gantt">'
    yield f'<div class="head"><span></span><div class="axis">{_x_axis(report)}</div><span></span></div>'
    if report.steps:
        # The name of a step that is too short for it is in the tip alone.
        wide = 0.06 * report.seconds
        steps = "".join(
            _bar(step, report.seconds, "", step.tool if step.end - step.start > wide else "") for step in report.steps
        )
        yield f'<div class="row steps"><span class="name"></span><div class="track">{steps}</div><span></span></div>'
    for kernel in began:
        failed = " failed" if kernel.state == "failed" else ""
        yield (
            f'<div class="row{failed}"><span class="name" title="{_text(kernel.name)}">{_text(kernel.name)}</span>'
            f'<div class="track">{"".join(_bars(kernel, report.seconds))}</div>'
            f'<span class="took">{format_time(kernel.seconds)}</span></div>'
        )
    yield "</div>"


def _bars(kernel: Kernel, whole: float) -> Iterator[str]:
    if kernel.waited >= 1 and kernel.began is not None:
        yield _bar(Phase(tool="", start=kernel.began - kernel.waited, end=kernel.began), whole, "wait")
    for phase in kernel.phases:
        yield _bar(phase, whole, phase_class(phase.tool))


def _bar(phase: Phase, whole: float, css: str, words: str = "") -> str:
    length = phase.end - phase.start
    tip = f"{phase.tool or _MEANING.get(css, css)}, {format_time(length)} from {format_time(phase.start)} on"
    place = f"left:{_percent(phase.start, whole)};width:{_percent(length, whole)}"
    return f'<i class="{css}" style="{place}" title="{_text(tip)}">{_text(words)}</i>'


def _row(kernel: Kernel) -> str:
    def cell(shown: str, sort: float) -> str:
        return f'<td data-sort="{sort:.3f}">{shown}</td>'

    state = {"done": "compiled", "stored": "from the store"}.get(kernel.state, kernel.state)
    if kernel.evictions:
        state += f", stopped {kernel.evictions} times for memory"
    ran = kernel.began is not None
    return (
        f'<tr><td class="name">{_text(kernel.name)}</td><td class="{kernel.state}">{state}</td>'
        + cell(format_time(kernel.began or 0.0) if ran else "", kernel.began or 0.0)
        + cell(format_time(kernel.seconds) if ran else "", kernel.seconds)
        + cell(format_time(kernel.cpu) if kernel.cpu else "", kernel.cpu)
        + cell(format_gib(kernel.peak) if kernel.peak else "", kernel.peak)
        + cell(format_time(kernel.waited) if kernel.waited >= 1 else "", kernel.waited)
        + "</tr>"
    )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    for wheel in report.wheels:
        yield "wheel", wheel
    yield "architectures", " ".join(report.architectures)
    for name, value in report.flags.items():
        yield name, _shown(value)
    yield "compiles at once", f"at most {report.cores}"
    host = report.host
    memory = host.memory
    yield "machine", f"{host.cores.usable} cores, {format_gib(memory.total)}"
    yield "memory at the start", f"{format_gib(memory.available)} available ({memory.because})"
    yield "system", f"{host.system}, Linux {host.kernel}"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
