"""A simulated build as a picture: memory over time against the limit, as SVG, light or dark as the reader has it."""

from __future__ import annotations

import html
from collections.abc import Iterator

from pybuild.simulate import Simulation
from pybuild.units import GIB, format_gib, format_time
from pybuild.view.report import ticks

# In pixels: of the picture, and of the part that the axes enclose.
_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 740, 64, 350

_SECONDS = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
_MEMORY = tuple(digit * 10**exponent * GIB for exponent in range(-1, 6) for digit in (1, 2, 5))

_STYLE = """
  svg { --paper: #ffffff; --ink: #1d2126; --soft: #626a73; --rule: #e1e4e8; --held: #3f7fc4; --limit: #c0362c; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #14171a; --ink: #e4e7ea; --soft: #98a1aa; --rule: #30363c; --held: #5b9be0; --limit: #f0776c; }
  }
  text { font: 12px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--soft); }
  .title { font-size: 16px; font-weight: 600; fill: var(--ink); }
  .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
  .paper { fill: var(--paper); }
  .grid { stroke: var(--rule); }
  .axis { stroke: var(--soft); fill: none; }
  .held { fill: var(--held); fill-opacity: 0.25; stroke: var(--held); stroke-width: 1.5; stroke-linejoin: round; }
  .limit { stroke: var(--limit); stroke-width: 1.5; }
  .budget { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 4; }
  .worst { stroke: var(--held); stroke-width: 1.5; stroke-dasharray: 2 4; }
  .peak { fill: var(--held); stroke: var(--paper); stroke-width: 1.5; }
  .over { fill: var(--limit); }
"""


def plot_svg(simulation: Simulation, worst: float, available: int, budget: int, title: str) -> str:
    """The SVG. `worst` is the highest peak of uneven runs; it, `available` and `budget`, all in bytes, are lines."""
    return "\n".join(_drawn(simulation, worst, available, budget, title)) + "\n"


def _drawn(simulation: Simulation, worst: float, available: int, budget: int, title: str) -> Iterator[str]:
    end, peak = simulation.time or 1.0, simulation.peak
    top = 1.08 * max(worst, available, 1)

    def x(time: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * time / end

    def y(memory: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * memory / top

    words = (
        f"{format_gib(peak)} at the peak, {format_time(simulation.moment)} after the start; "
        f"{format_time(simulation.time)} in all"
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-labelledby="title words">'
    )
    yield f"<style>{_STYLE}</style>"
    yield f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>'
    yield f'<text id="title" class="title" x="{_LEFT}" y="26">{html.escape(title)}</text>'
    yield f'<text id="words" x="{_LEFT}" y="46">{html.escape(words)}</text>'
    for memory in ticks(top, _MEMORY, 6):
        yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(memory):.1f}" y2="{y(memory):.1f}"/>'
        label = f"{memory / GIB:g} GiB" if memory else "0"
        yield f'<text x="{_LEFT - 8}" y="{y(memory) + 4:.1f}" text-anchor="end">{label}</text>'
    for time in ticks(end, _SECONDS, 8):
        yield f'<line class="axis" x1="{x(time):.1f}" x2="{x(time):.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 4}"/>'
        yield f'<text x="{x(time):.1f}" y="{_BOTTOM + 19}" text-anchor="middle">{format_time(time)}</text>'
    yield f'<text x="{_RIGHT}" y="{_BOTTOM + 38}" text-anchor="end">time since the start</text>'
    line = " ".join(f"{x(time):.1f},{y(memory):.1f}" for time, memory in simulation.points)
    yield f'<path class="held" d="M{x(0):.1f},{_BOTTOM} {line} {x(end):.1f},{_BOTTOM}"/>'
    yield f'<path class="axis" d="M{_LEFT},{_TOP} V{_BOTTOM} H{_RIGHT}"/>'
    yield from _line("limit", y(available), f"available, {format_gib(available)}", up=True)
    yield from _line("budget", y(budget), f"budget, {format_gib(budget)}", up=False)
    yield from _line("worst", y(worst), f"uneven runs, up to {format_gib(worst)}", up=worst > budget, left=True)
    where = f'cx="{x(simulation.moment):.1f}" cy="{y(peak):.1f}"'
    yield f'<circle class="peak{" over" if peak > budget else ""}" {where} r="4"/>'
    yield "</svg>"


def _line(css: str, height: float, words: str, *, up: bool, left: bool = False) -> Iterator[str]:
    """A level over the whole width; its words above or below it, at the right or the left end."""
    x, anchor = (_LEFT + 6, "start") if left else (_RIGHT - 4, "end")
    yield f'<line class="{css}" x1="{_LEFT}" x2="{_RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
    yield (
        f'<text class="halo" x="{x}" y="{height + (-6 if up else 15):.1f}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )
