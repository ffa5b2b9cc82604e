"""`pybuild run` on a terminal and in a log: what the gate tells, shown beside the build's own output."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Terminal

from pybuild.events import Asked, Began, Ended, Event, Evicted, Memory, Planned, Reading
from pybuild.follow import Follower, Lines, events_of
from pybuild.units import GIB
from pybuild.view.live import render
from pybuild.view.progress import Progress
from pybuild.view.record import find_build, list_builds, read_build
from pybuild.view.report import render_html, report_of

ROOT = Path(__file__).parent.parent

# What the gate tells of two compiles, the second of which waits for memory.
TOLD = [
    (0.0, "ask", "one"),
    (0.0, "go", "one"),
    (0.1, "ask", "two"),
    (1.0, "see", [["one", "cicc", 3 * GIB]], 4 * GIB, 9 * GIB, 1),
    (5.0, "end", "one", "0", 3 * GIB),
    (5.0, "go", "two"),
    (6.0, "stop", "two"),
    (7.0, "go", "two"),
    (9.0, "end", "two", "1", GIB),
]


def told() -> list[Event]:
    return [event for line in TOLD for event in events_of(*json.loads(json.dumps(line)))]


def test_what_the_gate_tells_becomes_events() -> None:
    assert told() == [
        Asked(0.0, "one"),
        Began(0.0, "one"),
        Asked(0.1, "two"),
        Reading(1.0, "one", "cicc", 3 * GIB),
        Memory(1.0, 3 * GIB, 4 * GIB, 9 * GIB, 1),
        Ended(5.0, "one", True, 0.0, 3 * GIB),
        Began(5.0, "two"),
        Evicted(6.0, "two"),
        Began(7.0, "two"),
        Ended(9.0, "two", False, 0.0, GIB),
    ]
    assert list(events_of(0.0, "something of a later gate", 3)) == []


def test_a_build_of_which_not_all_is_known_is_counted_and_not_forecast() -> None:
    progress = Progress()
    for event in [Planned(0.0, "p", (), (), 2, 0), *told()[:5]]:
        progress(event)
    lines = render(progress, now=2.0, left=None, width=100, height=9, ascii_only=False)
    assert "files" in lines[1].plain
    assert "0 done, 1 running, 1 to come" in lines[1].plain
    assert progress.compiles["two"].state == "waiting"


def test_lines_are_put_together_from_whatever_comes() -> None:
    taken: list[str] = []
    lines = Lines(taken.append)
    for part in (b"a", b"b\nc\n\xff", b"d\n", b"rest"):
        lines.feed(part)
    assert taken == ["ab", "c", "\ufffdd"]
    lines.end()
    lines.end()
    assert taken == ["ab", "c", "\ufffdd", "rest"]


# For real

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

SOURCE = "#include <map>\n#include <string>\nint {}(std::map<int, std::string>& m) {{ return m[1].size(); }}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources, and homes of their own for what pybuild keeps."""
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.cpp").write_text(SOURCE.format(name))
    (tmp_path / "bad.cpp").write_text("int bad() { return undefined_name; }\n")
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pybuild_run(script: str) -> list[str]:
    return [sys.executable, "-m", "pybuild", "run", "--", "sh", "-c", script]


BUILD = "echo first; for name in alpha beta; do $CXX -c $name.cpp; echo $name is there; done"


def test_on_a_terminal_the_output_stands_above_the_view_and_the_build_is_recorded(folder: Path) -> None:
    compiler = folder / "patient-c++"
    compiler.write_text('#!/bin/sh\nwhile ! test -e seen; do sleep 0.05; done\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    script = BUILD + "; printf 'no end of line'"
    with Terminal(pybuild_run(script), columns=110, rows=40, environ={"CXX": str(compiler)}) as terminal:
        terminal.wait_for(terminal.shows("1 running"), "a compile that runs")
        (folder / "seen").touch()
        assert terminal.finish() == 0
    lines = terminal.screen
    order = [lines.index(text) for text in ("first", "alpha is there", "beta is there", "no end of line")]
    assert order == sorted(order)
    assert any("built after" in line for line in lines)
    assert not any(line.startswith("files ") for line in lines), "the view is gone"
    assert (folder / "beta.o").exists()
    build = read_build(find_build(None))
    assert [kernel.name for kernel in report_of(build).kernels] == ["alpha", "beta"]
    assert "Files over time" in render_html(report_of(build))


def test_in_a_log_output_and_events_alternate(folder: Path) -> None:
    done = subprocess.run(pybuild_run(BUILD), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["first", "alpha is there", "beta is there"]
    assert "1 done: alpha (" in done.stderr
    assert "2 done: beta (" in done.stderr
    assert "2 files compiled" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_build_that_is_over_has_no_compile_that_runs(folder: Path) -> None:
    out = io.StringIO()
    with Follower("p", ["make"], 2, out) as follower:
        for told in ([0.0, "ask", "one"], [0.0, "go", "one"], [1.0, "ask", "two"], [1.0, "go", "two"]):
            follower.hear(json.dumps(told))
        follower.hear(json.dumps([2.0, "end", "one", "0", GIB]))
        follower.hear(json.dumps([3.0, "over", 0]))
    assert "2 done: two (0:02" in out.getvalue()
    assert "2 files compiled" in out.getvalue()


def test_what_compiles_nothing_is_not_watched(folder: Path) -> None:
    done = subprocess.run(pybuild_run("echo hello; exit 3"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "hello\n")
    assert "after" not in done.stderr
    assert list_builds() == []
    with Terminal(pybuild_run("echo hello; test -t 0 && exit 4"), columns=200) as terminal:
        assert terminal.finish() == 4
    assert b"\x1b" not in terminal.raw
    assert "hello" in terminal.screen


def test_a_failure_is_explained_from_the_output(folder: Path) -> None:
    with Terminal(pybuild_run("$CXX -c bad.cpp"), columns=160, rows=40) as terminal:
        assert terminal.finish() == 1
    text = "\n".join(terminal.screen)
    assert "was not declared in this scope" in text
    assert "failed after" in text
    assert "The compiler refuses this source" in text
    assert "Next: pybuild run -- sh -c '$CXX -c bad.cpp'" in text


def test_ctrl_c_ends_the_build_and_then_the_view(folder: Path) -> None:
    with Terminal(pybuild_run("$CXX -c alpha.cpp; echo waiting; sleep 100"), columns=110, rows=40) as terminal:
        terminal.wait_for(terminal.shows("waiting"), "the end of the compile")
        terminal.type("\x03")
        assert terminal.finish() == 130
    assert any("stopped after" in line for line in terminal.screen)


def test_a_view_that_is_killed_does_not_take_the_build_along(folder: Path) -> None:
    import psutil

    with subprocess.Popen(
        pybuild_run("$CXX -c alpha.cpp; touch half; while ! test -e go; do sleep 0.05; done; $CXX -c beta.cpp"),
        stderr=subprocess.PIPE,
    ) as process:
        while not (folder / "half").exists():
            assert process.poll() is None
        # The follower is the first that pybuild started.
        follower = min(psutil.Process(process.pid).children(), key=lambda child: (child.create_time(), child.pid))
        follower.kill()
        (folder / "go").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert (folder / "beta.o").exists()
