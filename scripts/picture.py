"""Draw the live view of a recorded build as SVG: `picture.py RECORD SECONDS OUTPUT.svg`.

RECORD is a file of `pybuild report --list` (in ~/.local/state/pybuild/builds), SECONDS a moment of it. The README's
picture is made of a real build:

    pybuild build flash-attn --release cu130 --head-dim 128 --dtype bf16
    scripts/picture.py ~/.local/state/pybuild/builds/<the newest>.jsonl 240 docs/live.svg
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pybuild.forecast import Forecast
from pybuild.view.live import render
from pybuild.view.progress import Progress
from pybuild.view.record import Build, read_build

WIDTH = 92


def picture(build: Build, moment: float) -> str:
    """The view as it was `moment` seconds after the build's start, below the command that was typed."""
    progress, forecast = Progress(), Forecast()
    left, asked = None, -1.0
    for event in build.events:
        if event.time > moment:
            break
        progress(event)
        # As often as the view asks: the forecast counts the ones before it.
        if event.time - asked >= 2.0:
            left, asked = forecast.left(progress), event.time
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {shlex.join(build.head.command)}", style="bold"))
    for line in render(progress, now=moment, left=left, width=WIDTH - 1, height=30, ascii_only=False):
        console.print(line)
    console.print()  # so that no font is cut at the lower edge
    svg = console.export_svg(title="pybuild")
    # rich's own loads a font from a server; a picture in a README shall load nothing.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace")


if __name__ == "__main__":
    record, seconds, output = sys.argv[1:]
    Path(output).write_text(picture(read_build(Path(record)), float(seconds)), encoding="utf-8")
