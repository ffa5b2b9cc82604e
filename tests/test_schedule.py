"""The scheduling of kernels, over processes that stand in for nix: real ones, with real memory, ended for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest
from fixed import Fixed

from pybuild.events import Began, Ended, Event, Memory, Reading, Said
from pybuild.nix import Nix, Store
from pybuild.plan import Kernel, Plan
from pybuild.schedule import realise


class Scripts:
    """A plan whose derivations are shell scripts."""

    def __init__(self) -> None:
        self.cores = 2
        self.nix = Nix(("nix",), ("nix-store",), (2, 8), Store("local"), dict(os.environ))

    def realise_argv(self, derivation: str) -> list[str]:
        return ["sh", "-c", derivation]


def play(scripts: Mapping[str, str], jobs: int = 2) -> tuple[list[str], list[Event], list[str]]:
    """Names of the kernels that failed, the events, and what the failed ones said."""
    events: list[Event] = []
    kernels = [Kernel(name, script, f"/nix/store/{name}") for name, script in scripts.items()]
    failed = realise(cast(Plan, Scripts()), kernels, Fixed(jobs), lambda e: events.append(e), interval=0.02)
    return [f.kernel.name for f in failed], events, [f.said for f in failed]


def test_every_kernel_is_built_once_and_no_more_than_allowed_run_at_once(tmp_path: Path) -> None:
    scripts = {f"k{n}": f"echo {n} >> {tmp_path}/built; sleep 0.1" for n in range(7)}
    failed, events, _ = play(scripts, jobs=3)
    assert failed == []
    assert sorted((tmp_path / "built").read_text().split()) == [str(n) for n in range(7)]
    running = most = 0
    for event in events:
        running += isinstance(event, Began) - isinstance(event, Ended)
        most = max(most, running)
    assert most == 3


def test_a_kernel_that_fails_ends_no_other_and_is_reported_with_its_words(tmp_path: Path) -> None:
    scripts = {
        "bad": "echo 'fatal error: no such header' >&2; exit 7",
        "good": f"sleep 0.2; touch {tmp_path}/good",
        "late": f"touch {tmp_path}/late",
    }
    failed, events, said = play(scripts, jobs=2)
    assert failed == ["bad"]
    assert "no such header" in said[0]
    assert "bad> fatal error: no such header" in [event.text for event in events if isinstance(event, Said)]
    assert (tmp_path / "good").exists()
    assert (tmp_path / "late").exists()
    assert {event.compile for event in events if isinstance(event, Ended) and event.ok} == {"good", "late"}


def test_memory_and_processor_time_of_all_below_are_seen(tmp_path: Path) -> None:
    # A compiler by name: a link to the interpreter, so that /proc says cicc.
    (tmp_path / "cicc").symlink_to(Path(sys.executable).resolve())
    program = tmp_path / "program.py"
    program.write_text("import time\nblock = b'x' * 2**26\nwhile time.process_time() < 1: pass\n")
    _, events, _ = play({"k": f"sh -c '{tmp_path}/cicc -S {program}; true'"})
    readings = [event for event in events if isinstance(event, Reading)]
    assert max(event.memory for event in readings) > 2**26
    assert any(event.tool == "cicc" for event in readings)
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert ended.peak > 2**26
    assert max(event.used for event in events if isinstance(event, Memory)) > 2**26
    assert ended.cpu > 0.2


class EvictOnce:
    """Stops the second compile once, when both run."""

    def __init__(self) -> None:
        self.evicted: list[str] = []

    def admit(self, now: float, running: Mapping[str, Reading], waiting: Sequence[str]) -> list[str]:
        room = 1 if self.evicted and running else 2 - len(running)
        return list(waiting[: max(0, room)])

    def evict(self, now: float, running: Mapping[str, Reading]) -> list[str]:
        if len(running) == 2 and not self.evicted and now > 0.1:
            self.evicted = [sorted(running)[1]]
            return self.evicted
        return []


def test_a_kernel_that_is_stopped_for_memory_is_built_later(tmp_path: Path) -> None:
    admission = EvictOnce()
    scripts = {name: f"echo {name} >> {tmp_path}/started; sleep 0.5; echo {name} >> {tmp_path}/built" for name in "ab"}
    kernels = [Kernel(name, script, name) for name, script in scripts.items()]
    start = time.monotonic()
    failed = realise(
        cast(Plan, Scripts()), kernels, admission, lambda _: None, clock=lambda: time.monotonic() - start, interval=0.02
    )
    assert failed == []
    assert admission.evicted == ["b"]
    assert sorted((tmp_path / "built").read_text().split()) == ["a", "b"]
    assert sorted((tmp_path / "started").read_text().split()) == ["a", "b", "b"]


PROGRAM = """
import os, sys
from typing import cast
sys.path.insert(0, {tests!r})
from fixed import Fixed
from test_schedule import Scripts
from pybuild.cli import end_in_order
from pybuild.plan import Kernel
from pybuild.schedule import realise
end_in_order()
# As nix does, the script ends what it started when it is asked to end.
kernels = [Kernel(f"k{{n}}", "trap 'trap - TERM; kill 0' INT TERM; sleep 300 & sleep 300 & wait", "") for n in range(3)]
realise(Scripts(), kernels, Fixed(3), lambda event: print(event, flush=True))
"""


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_stopped_leaves_no_process(sign: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "build.py"
    script.write_text(textwrap.dedent(PROGRAM.format(tests=str(Path(__file__).parent))))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if "k2" in line:
                break
        deadline = time.monotonic() + 20
        below: list[psutil.Process] = []
        # All the programs have to run: a shell that was just forked may lose a signal.
        while sum(_name(child) == "sleep" for child in below) < 6 and time.monotonic() < deadline:
            below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 9
        process.send_signal(sign)
        process.wait(10)
        _, left = psutil.wait_procs(below, timeout=2)
        # Whoever inherits an orphan may take its time to bury it.
        alive = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        try:
            assert not alive
        finally:
            for one in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def test_the_compilers_command_line_is_said_when_a_kernel_has_ended(tmp_path: Path) -> None:
    scripts = Scripts()
    scripts.nix = replace(scripts.nix, store=Store("home", tmp_path))
    objects = tmp_path / "nix/store/k"
    objects.mkdir(parents=True)
    (objects / "k.json").write_text(json.dumps(["-O3", "a b.cu"]))
    said: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.text)

    kernel = Kernel("k", "printf '\\033[31mred\\033[0m\\n' >&2", "/nix/store/k")
    realise(cast(Plan, scripts), [kernel], Fixed(1), listen, interval=0.02)
    assert said == ["k> -O3 'a b.cu'", "k> red"]
