"""Ctrl-Z, as a person types it: what a build has started stops and goes on with it, and no time passes for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from terminal import Terminal

from pybuild.view.record import find_build, read_build

ROOT = Path(__file__).parent.parent

# Stands for nix, in a session of its own, and for the compiler below it, which works: it writes.
NIX = "setsid sh -c 'while :; do echo x >> work; sleep 0.02; done' & wait"

# Stands for pybuild build: the end of a real one's chain, with real views and a real Nix.popen.
BUILD = f"""
import os
import sys
import time
from pybuild.cli import end_in_order
from pybuild.events import Began, Ended, Planned
from pybuild.nix import Nix, Store
from pybuild.view.record import head_of
from pybuild.view.watch import watching

end_in_order()
nix = Nix((), (), (2, 8), Store("local"), os.environ)
with watching(head_of("flash-attn", ["pybuild"], {{}}), stream=sys.stderr) as listener:
    start = time.monotonic()
    listener(Planned(0.0, "flash-attn", ("one",), (), 1, 0))
    with nix.popen(["sh", "-c", {NIX!r}]) as process:
        listener(Began(time.monotonic() - start, "one"))
        while not os.path.exists("enough"):
            time.sleep(0.02)
        listener(Ended(time.monotonic() - start, "one", True, 0.0, 1))
"""

# Stands for nvcc.
COMPILER = """#!/bin/sh
while ! test -e enough; do echo x >> work; sleep 0.02; done
touch one.o
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A shell in an empty folder, with programs that stand for compilers in it."""
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build.py").write_text(BUILD)
    (tmp_path / "one.cpp").touch()
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    argv = ["bash", "--norc", "--noprofile", "-i"]
    with Terminal(argv, columns=120, rows=40, environ={"PS1": "$ "}) as terminal:
        yield terminal


def done(folder: Path) -> int:
    """How much work there is."""
    work = folder / "work"
    return work.stat().st_size if work.exists() else 0


COMMANDS = {
    "build": f"{sys.executable} build.py",
    "build in a log": f"{sys.executable} build.py 2>log",
    "run": f"{sys.executable} -m pybuild run -- sh -c '$CXX -c one.cpp'",
    "run in a log": f"{sys.executable} -m pybuild run -- sh -c '$CXX -c one.cpp' 2>log",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_a_build_started_stops_and_goes_on_with_it(command: str, shell: Terminal, tmp_path: Path) -> None:
    shell.type(f"{command}\r")
    shell.wait_for(lambda: done(tmp_path) > 10, "work")
    shell.type("\x1a")
    shell.wait_for(shell.shows("Stopped"), "the shell's word")
    before, began = done(tmp_path), time.monotonic()
    time.sleep(1.5)
    assert done(tmp_path) == before, "what compiles stands still"
    shell.type("fg; echo status $?\r")
    shell.wait_for(lambda: done(tmp_path) > before + 10, "more work")
    paused = time.monotonic() - began
    (tmp_path / "enough").touch()
    shell.wait_for(shell.shows("status 0"), "the end")
    build = read_build(find_build(None))
    took = build.events[-1].time
    assert paused >= 1.5
    assert took < time.monotonic() - began, "the time for which it was stopped does not count"


def test_a_build_that_is_killed_while_it_is_stopped_leaves_nothing(shell: Terminal, tmp_path: Path) -> None:
    shell.type(f"{COMMANDS['build']}\r")
    shell.wait_for(lambda: done(tmp_path) > 10, "work")
    shell.type("\x1a")
    shell.wait_for(shell.shows("Stopped"), "the shell's word")
    below = psutil.Process().children(recursive=True)
    (build,) = [process for process in below if "build.py" in process.cmdline()]
    (nix,) = build.children()
    assert nix.status() != psutil.STATUS_STOPPED, "nix is awake, to end its builders when it has to"
    os.kill(build.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([nix], timeout=10)
    assert not alive
    for process in below:
        if process.pid not in (build.pid, nix.pid) and process.is_running() and process.name() == "sh":
            process.kill()  # a real nix ends these


def test_a_stopped_build_can_be_ended(shell: Terminal, tmp_path: Path) -> None:
    shell.type(f"{COMMANDS['build']}\r")
    shell.wait_for(lambda: done(tmp_path) > 10, "work")
    shell.type("\x1a")
    shell.wait_for(shell.shows("Stopped"), "the shell's word")
    shell.type("kill %1; fg\r")  # the shell's own kill has it go on, so that it can end
    shell.wait_for(shell.shows("stopped after"), "the last word")
    before = done(tmp_path)
    time.sleep(0.3)
    assert done(tmp_path) == before, "nothing is left"
