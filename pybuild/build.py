"""Run a planned build: watch it, stop it, bring the wheel to where the user wants it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pybuild.errors import BuildError
from pybuild.fetch import fetch_files
from pybuild.nix import Nix, outputs
from pybuild.nixlog import BuildLog
from pybuild.plan import Plan

_BUILDING = re.compile(r"building '/nix/store/[0-9a-z]{32}-(.+)\.drv'")
# ninja's line for one compile, as nix's --print-build-logs shows it: `flash-attn> [3/73] nvcc ... -o .../name.o`.
_COMPILED = re.compile(r"> \[(\d+)/(\d+)\] .* -o \S*?([\w.+-]+)\.o(?:\s|$)")


def fetch_inputs(plan: Plan) -> list[str]:
    """Bring the plan's pinned files into the store; their store paths. Checks first that the disk has room."""
    if plan.missing():
        plan.nix.require_free()
    return fetch_files(plan.pins, plan.nix)


def run_build(plan: Plan, dist: Path, *, log: TextIO | None = None, say: Callable[[str], None]) -> list[Path]:
    """Run the plan's command line and copy the wheels it made into `dist`; their paths there.

    `log` gets every line that nix says, `say` the few that a person wants. Raises BuildError, with the end of the
    failing derivation's log, where nix fails. However it ends, no process is left.
    """
    started = time.monotonic()
    record = BuildLog()
    with plan.nix.popen(plan.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            if log:
                log.write(line + "\n")
            record.feed(line)
            if shown := progress_of(line):
                say(shown)
        built = process.stdout.read().decode()
        status = process.wait()
    if status != 0:
        raise plan.nix.explain_failure(record, doing=f"building {plan.spec.package}")
    wheels = copy_wheels(plan.nix, outputs(built)["out"], dist)
    say(f"built in {(time.monotonic() - started) / 60:.1f} minutes")
    return wheels


def progress_of(line: str) -> str | None:
    """What a person wants to know of one line of nix's: a derivation begins, a compile is done. None for the rest."""
    if match := _COMPILED.search(line):
        return f"  {match[1]} of {match[2]} compiled: {match[3]}"
    if match := _BUILDING.search(line):
        return f"building {match[1]}"
    return None


def copy_wheels(nix: Nix, store_path: str, dist: Path) -> list[Path]:
    """Copy the wheels in a store path's dist/ into `dist` as ordinary files: the store may not be visible to pip."""
    dist.mkdir(parents=True, exist_ok=True)
    copied = []
    for wheel in sorted((nix.real_path(store_path) / "dist").glob("*.whl")):
        draft = dist / f".{wheel.name}.part"
        shutil.copyfile(wheel, draft)
        copied.append(draft.replace(dist / wheel.name))
    if not copied:
        raise BuildError(f"{store_path} holds no wheel", "Please report this: the build said that it succeeded.")
    return copied
