"""The views of a build: what is drawn for each state and size, and a real program in a pseudo-terminal."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import flash_attn, simulate, small
from terminal import Terminal

from pybuild.curve import Curve
from pybuild.events import Began, Ended, Event, Evicted, Memory, Over, Planned, Reading, Said, Step
from pybuild.forecast import Forecast
from pybuild.units import GIB
from pybuild.view.lines import LineView
from pybuild.view.live import Region, about, render
from pybuild.view.progress import Progress
from pybuild.view.record import head_of, recording
from pybuild.view.watch import is_lively

HERE = Path(__file__).parent


def progress_of(events: Iterable[Event]) -> Progress:
    progress = Progress()
    for event in events:
        progress(event)
    return progress


def drawn(progress: Progress, *, width: int = 100, height: int = 24, left: float | None = 300.0) -> list[str]:
    lines = render(progress, now=progress.now, left=left, width=width, height=height, ascii_only=False)
    return [line.plain for line in lines]


def some_events() -> list[Event]:
    return [
        Planned(
            0.0, "flash-attn", ("done", "one", "two", "bad", "later", "stored"), ("stored",), 4, 8 * GIB, ("sm_100",)
        ),
        Step(0.0, "compile"),
        Began(1.0, "done"),
        Ended(9.0, "done", True, 8.0, 4 * GIB),
        Began(2.0, "one"),
        Began(3.0, "two"),
        Began(3.0, "bad"),
        Reading(60.0, "one", "ptxas", 1 * GIB),
        Reading(60.0, "two", "cicc", 5 * GIB),
        Ended(60.0, "bad", False, 8.0, 1 * GIB),
        Memory(60.0, 6 * GIB, 8 * GIB, 20 * GIB, 1, 1.9),
    ]


# What is drawn


def test_the_view_says_what_runs_how_much_memory_is_left_and_when_it_ends() -> None:
    title, kernels, memory, cores, *rows = drawn(progress_of(some_events()))
    assert title.startswith("flash-attn  sm_100  compiling")
    assert title.endswith("1:00, about 5 min left")
    assert "2 of 6 done, 2 running, 1 failed, 1 to come" in kernels
    assert "6.0 of 8.0 GiB, peak 6.0 GiB, 1 waits" in memory
    assert "1.9 busy, of 4" in cores
    # What failed first, then those with the most memory.
    assert [row.split()[0] for row in rows] == ["bad", "two", "one"]
    assert rows[1].split()[1:] == ["cicc", "5.0", "GiB", "0:57"]


def test_what_has_no_room_is_counted() -> None:
    lines = drawn(progress_of(some_events()), height=6)
    assert len(lines) == 6
    assert lines[-1].strip() == "and 2 more"


def test_of_a_long_name_both_ends_are_kept() -> None:
    name = "flash_fwd_split_hdim256_bf16_causal_sm80"
    events: list[Event] = [Planned(0.0, "p", (name,), (), 1, 0), Began(0.0, name), Reading(1.0, name, "cicc", GIB)]
    line = drawn(progress_of(events), width=60)[-1]
    assert re.search(r"flash_fwd\w*…\w*causal_sm80", line)


@settings(max_examples=60, deadline=None)
@given(
    seen=st.integers(0, 2000),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    left=st.none() | st.floats(0, 1e6),
    ascii_only=st.booleans(),
)
def test_no_view_is_larger_than_its_terminal(
    seen: int, width: int, height: int, left: float | None, ascii_only: bool
) -> None:
    events = EVENTS[: seen % len(EVENTS)]
    progress = progress_of(events)
    lines = render(progress, now=progress.now, left=left, width=width, height=height, ascii_only=ascii_only)
    assert 1 <= len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    if ascii_only:
        assert all(line.plain.isascii() for line in lines)


EVENTS: list[Event] = [*some_events(), *simulate(small(), jobs=2, budget=4 * GIB)]


def test_before_anything_is_known_there_is_a_view_as_well() -> None:
    (line,) = drawn(Progress(), left=None)
    assert line.split() == ["pybuild", "0:00"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "a moment"), (12, "about 10 s"), (89, "about 90 s"), (90, "about 2 min"), (700, "about 12 min")],
)
def test_a_forecast_is_no_more_precise_than_it_is(seconds: float, words: str) -> None:
    assert about(seconds) == words


# Time left


@pytest.mark.parametrize(
    ("jobs", "budget", "slower"),
    [(16, 16 * GIB, 1.6), (72, 288 * GIB, 0.7), (4, 12 * GIB, 1.3)],
)
def test_after_the_first_quarter_the_time_left_is_right_within_15_per_cent(
    jobs: int, budget: int, slower: float
) -> None:
    events = list(simulate(flash_attn(), jobs=jobs, budget=budget, slower=slower, uneven=0.1, tick=2.0))
    end = events[-1].time
    progress, forecast = Progress(), Forecast(afterwards=10.0)
    checked = 0
    for number, event in enumerate(events):
        progress(event)
        if end / 4 <= progress.now < end and number % 200 == 0:
            left = forecast.left(progress)
            assert left is not None
            # The last seconds are said as "a moment".
            assert abs(left - (end - progress.now)) <= max(0.15 * (end - progress.now), 10.0), progress.now / end
            checked += 1
    assert checked >= 10


def test_kernels_of_no_profile_are_taken_to_be_like_those_that_ended() -> None:
    curve = Curve((0.0, 5.0, 20.0), (0.0, GIB, GIB))
    events = list(simulate({f"k{n}": curve for n in range(40)}, jobs=4, budget=100 * GIB, link=0.0))
    progress, forecast = Progress(), Forecast(afterwards=0.0)
    half = events[-1].time / 2
    for event in events:
        if event.time > half:
            break
        progress(event)
    left = forecast.left(progress)
    assert left is not None
    assert abs(left - half) < 0.15 * half


def test_a_build_of_which_nothing_is_known_has_no_time_left() -> None:
    assert Forecast().left(Progress()) is None
    over: list[Event] = [*some_events(), Over(70.0)]
    assert Forecast().left(progress_of(over)) is None


# In a log


def test_a_log_has_a_line_an_event_and_says_nothing_of_readings() -> None:
    out = io.StringIO()
    view = LineView(out)
    for event in [*some_events(), Evicted(61.0, "one")]:
        view(event)
    assert out.getvalue().splitlines() == [
        "[   0:00] flash-attn for sm_100: 6 kernels, 1 of them in the store; at most 4 at once in 8.0 GiB",
        "[   0:00] compiling",
        "[   0:09] 2 of 6 done: done (0:08, 4.0 GiB)",
        "[   1:00] 3 of 6 FAILED: bad (0:57, 1.0 GiB)",
        "[   1:01] stopped for want of memory, again later: one",
    ]


def test_a_silent_build_says_how_it_stands() -> None:
    out = io.StringIO()
    view = LineView(out, every=0.05)
    with view.shown():
        for event in some_events():
            view(event)
        for _ in range(100):
            if "2 running, 1 to come, memory 6.0 GiB of 8.0 GiB, about" in out.getvalue():
                break
            subprocess.run(["sleep", "0.05"], check=True)
        else:
            pytest.fail(out.getvalue())


def test_verbose_shows_the_output() -> None:
    for verbose in (False, True):
        out = io.StringIO()
        LineView(out, verbose=verbose)(Said(0.0, "nvcc -c x.cu"))
        assert ("nvcc -c x.cu" in out.getvalue()) is verbose


# Which view


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(
    ("tty", "term", "lively"),
    [(True, "xterm", True), (True, "dumb", False), (True, None, False), (False, "xterm", False)],
)
def test_only_a_terminal_that_can_has_a_live_view(tty: bool, term: str | None, lively: bool) -> None:
    assert is_lively(Stream(tty), {} if term is None else {"TERM": term}) is lively


def test_a_terminal_that_went_away_is_no_reason_to_fail() -> None:
    from pybuild.view.live import LiveView

    class Gone(Stream):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    view = LiveView(Gone(True))
    with view.shown():
        view(Said(0.0, "x"))


def test_lines_that_a_narrower_terminal_wrapped_are_taken_back() -> None:
    from rich.text import Text

    class Narrowing(Region):
        columns = 50

        def size(self) -> tuple[int, int]:
            return self.columns, 24

    out = Stream(True)
    region = Narrowing(out)
    region.draw([Text("x" * 49), Text("y" * 10)])
    region.columns = 20
    out.truncate(0)
    region.draw([Text("z")])
    # 49 columns fill three lines of 20, 10 fill one.
    assert "\x1b[4A" in out.getvalue()


# In a terminal


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build with 73 kernels, as it was recorded."""
    folder = tmp_path_factory.mktemp("builds")
    with recording(head_of("flash-attn", ["pybuild", "build", "flash-attn"], {}), folder) as recorder:
        assert recorder is not None
        for event in simulate(flash_attn(), jobs=16, budget=32 * GIB, tick=4.0):
            recorder(event)
    return folder / f"{recorder.name}.jsonl"


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def replay(record: Path, seconds: float, *options: str) -> list[str]:
    return [sys.executable, str(HERE / "replay.py"), str(record), str(seconds), *options]


def titles(terminal: Terminal) -> int:
    """How many views are to be seen."""
    return sum(line.startswith("flash-attn ") for line in terminal.screen)


def test_a_build_on_a_terminal(record: Path, state: dict[str, str]) -> None:
    with Terminal(replay(record, 3), environ=state) as terminal:
        terminal.wait_for(terminal.shows("16 running"), "sixteen kernels that run")
        assert titles(terminal) == 1
        assert terminal.shows("of 32.0 GiB")()
        assert terminal.finish() == 0
        assert titles(terminal) == 0, "the view is gone at the end"
        assert terminal.shows("flash-attn: built after 0:0")()
        assert b"\x1b[?25l" not in terminal.raw, "a cursor that is never hidden needs never be brought back"


def test_another_size_leaves_one_view(record: Path, state: dict[str, str]) -> None:
    with Terminal(replay(record, 60), environ=state) as terminal:
        terminal.wait_for(terminal.shows(" running"), "the view")
        for columns, rows in ((60, 20), (120, 40), (40, 8), (30, 2), (90, 30)):
            terminal.resize(columns, rows)
            end = len(terminal.raw)
            terminal.wait_for(lambda end=end: terminal.raw.count(b"\x1b[?2026l", end) >= 2, "drawings")  # type: ignore[misc]
            assert titles(terminal) == 1 or rows < 3, terminal.screen
        terminal.type("\x03")
        assert terminal.finish() == 130


@pytest.mark.parametrize(("columns", "rows"), [(20, 3), (10, 2), (1, 1), (300, 100)])
def test_small_terminals_and_large_ones(columns: int, rows: int, record: Path, state: dict[str, str]) -> None:
    with Terminal(replay(record, 0.6), columns=columns, rows=rows, environ=state) as terminal:
        assert terminal.finish() == 0


@pytest.mark.parametrize("key", [True, False], ids=["Ctrl-Z", "kill -STOP"])
def test_stopped_and_continued(key: bool, record: Path, state: dict[str, str]) -> None:
    with Terminal(["bash", "--norc", "--noprofile", "-i"], rows=60, environ={**state, "PS1": "$ "}) as terminal:
        terminal.type(" ".join(replay(record, 60)) + "; echo status $?\r")
        terminal.wait_for(terminal.shows(" running"), "the view")
        if key:
            terminal.type("\x1a")
        else:
            below = psutil.Process().children(recursive=True)
            (program,) = [process for process in below if str(HERE / "replay.py") in process.cmdline()]
            program.send_signal(signal.SIGSTOP)
        terminal.wait_for(terminal.shows("Stopped"), "bash's word that it is stopped")
        before = terminal.screen
        terminal.type("echo between\r")
        terminal.wait_for(lambda: "between" in terminal.screen, "the shell's answer")
        terminal.type("fg\r")
        end = len(terminal.raw)
        terminal.wait_for(lambda: terminal.raw.count(b"\x1b[?2026l", end) >= 2, "drawings")
        lines = terminal.screen
        assert "between" in lines, "what the shell wrote is left alone"
        assert lines.index("$ fg") == lines.index("between") + 1
        assert any(line.startswith("flash-attn  sm_100") for line in lines[lines.index("between") :])
        assert any("Stopped" in line for line in before)
        terminal.type("\x03")
        terminal.wait_for(terminal.shows("stopped after"), "the summary")


def test_ctrl_c(record: Path, state: dict[str, str]) -> None:
    with Terminal(replay(record, 60), environ=state) as terminal:
        terminal.wait_for(terminal.shows(" running"), "the view")
        terminal.type("\x03")
        assert terminal.finish() == 130
        assert titles(terminal) == 0
        assert terminal.shows("flash-attn: stopped after")()
        assert terminal.shows("finished and kept: ")()
        assert not terminal.shows("Traceback")()


COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9;]*)?m")


def test_no_color(record: Path, state: dict[str, str]) -> None:
    for environ, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with Terminal(replay(record, 1.5), environ={**state, **environ}) as terminal:
            terminal.wait_for(terminal.shows("running"), "kernels that run")
            terminal.finish()
            assert bool(COLOUR.search(terminal.raw)) is coloured


def test_a_dumb_terminal_gets_lines(record: Path, state: dict[str, str]) -> None:
    with Terminal(replay(record, 0.5), environ={**state, "TERM": "dumb"}) as terminal:
        assert terminal.finish() == 0
        assert b"\x1b" not in terminal.raw
        assert b"73 of 73 done" in terminal.raw


def test_an_old_locale_gets_ascii(record: Path, state: dict[str, str]) -> None:
    environ = {**state, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    with Terminal(replay(record, 1), environ=environ) as terminal:
        assert terminal.finish() == 0
        assert terminal.raw.isascii()


def test_not_on_a_terminal_there_is_a_line_an_event(record: Path, state: dict[str, str], tmp_path: Path) -> None:
    environ = {**os.environ, **state}
    done = subprocess.run(replay(record, 0.5), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0
    assert "\x1b" not in done.stderr
    assert "73 of 73 done" in done.stderr
    assert done.stdout == ""


def test_the_whole_output_goes_into_a_log(tmp_path: Path, state: dict[str, str]) -> None:
    path = tmp_path / "b.jsonl"
    with recording(head_of("p", ["pybuild"], {}), tmp_path) as recorder:
        assert recorder is not None
    lines = [f'{{"event":"Said","time":0.1,"text":"line {n}"}}' for n in range(5)]
    path.write_text(
        (tmp_path / f"{recorder.name}.jsonl").read_text() + "\n".join([*lines, '{"event":"Over","time":0.2}']) + "\n"
    )
    log = tmp_path / "log"
    environ = {**os.environ, **state}
    subprocess.run(replay(path, 0.2, "--log", str(log)), capture_output=True, env=environ, check=True)
    assert log.read_text().splitlines() == [f"line {n}" for n in range(5)]


# Recorded builds: nix 2.8 over derivations that compile C++ (g++ 12, sandboxed), one of them with an error, or killed;
# a download from a host that is not there; and a SIGINT.

SAID = {
    "success": ("4 of 4 done", "4 kernels compiled", "slowest  delta"),
    "compiler-error": (
        "'undefined_name' was not declared",
        "The compiler refuses this source",
        "All of its log: nix log",
    ),
    "out-of-memory": (
        "Killed signal terminated program cc1plus",
        "for want of memory",
        "Next: pybuild build small --cores 1",
    ),
    "network": ("resolve host name", "doesn't answer", "Next: pybuild build small --cores 2"),
    "ctrl-c": ("finished and kept: 0 of 3",),
}


@pytest.mark.parametrize("kind", SAID)
def test_recorded_builds_are_shown_and_told_of(kind: str, state: dict[str, str]) -> None:
    path = HERE / f"fakes/builds/{kind}.jsonl"
    with Terminal(replay(path, 0.7), columns=160, rows=45, environ=state) as terminal:
        terminal.wait_for(terminal.shows("small  sm_100"), "the view")
        status = terminal.finish()
    assert status == {"success": 0, "ctrl-c": 130}.get(kind, 1)
    said = terminal.raw.decode()
    assert "Traceback" not in said
    verb = {"success": "built", "ctrl-c": "stopped"}.get(kind, "failed")
    assert f"small: {verb} after" in said
    log = subprocess.run(replay(path, 0.3), capture_output=True, text=True, env={**os.environ, **state}, check=False)
    for words in SAID[kind]:
        assert words in said + log.stderr


def test_the_readmes_picture_is_made_of_a_record_and_loads_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "live.svg"
    script = HERE.parent / "scripts/picture.py"
    argv = [sys.executable, str(script), str(HERE / "fakes/builds/success.jsonl"), "20", str(picture)]
    subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    text = picture.read_text().replace("&#160;", " ")
    assert "$ pybuild build small --cores 2" in text
    assert "2 running, 2 to come" in text
    assert not re.search(r"url\(.?http|@import|@font-face|<script", text)
