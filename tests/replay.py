"""Shows a recorded build again, as the real program would: `replay.py RECORD SECONDS`, within so many seconds.

It stands for `pybuild build` in tests of views: pybuild's own views, summary, errors and exit status, with the events
of a build that took minutes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import click

import pybuild.cli
from pybuild.errors import BuildError
from pybuild.events import Over
from pybuild.view.record import read_build
from pybuild.view.watch import watching


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.argument("seconds", type=float)
@click.option("-v", "verbose", is_flag=True)
@click.option("--log", type=click.File("w"))
def replay(record: Path, seconds: float, verbose: bool, log: TextIO | None) -> None:
    """Tell a view the events of RECORD within SECONDS."""
    build = read_build(record)
    speed = max(1.0, build.events[-1].time / seconds)
    started = time.monotonic()
    with watching(build.head, verbose=verbose, log=log) as listener:
        for event in build.events:
            time.sleep(max(0.0, event.time / speed - (time.monotonic() - started)))
            if isinstance(event, Over) and event.stopped:
                raise KeyboardInterrupt
            listener(replace(event, time=event.time / speed))
            if isinstance(event, Over) and event.error:
                raise BuildError(event.error)


if __name__ == "__main__":
    pybuild.cli.cli = replay  # type: ignore[assignment]
    sys.exit(pybuild.cli.main())  # type: ignore[func-returns-value]
