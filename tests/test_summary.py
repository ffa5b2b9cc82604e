"""The last word of a build: what it took, what it made, what went wrong, and what to type next."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from simulated import simulate, small

from pybuild.errors import BuildError
from pybuild.events import Began, Ended, Event, Evicted, Memory, Over, Planned, Said
from pybuild.units import GIB
from pybuild.view.progress import Progress
from pybuild.view.record import head_of, list_builds
from pybuild.view.summary import cause_of, next_command, summarise
from pybuild.view.watch import watching


def progress_of(*events: Event) -> Progress:
    progress = Progress()
    for event in events:
        progress(event)
    return progress


def test_what_a_build_took() -> None:
    lines = summarise(
        progress_of(
            Planned(0.0, "flash-attn", ("a", "b", "c", "s"), ("s",), 2, 8 * GIB),
            Began(0.0, "a"),
            Began(1.0, "b"),
            Memory(1.0, 2 * GIB, 8 * GIB, 9 * GIB, 1),
            Evicted(5.0, "b"),
            Memory(30.0, 7 * GIB, 8 * GIB, 9 * GIB, 1),
            Began(41.0, "b"),
            Ended(60.0, "a", True, 55.0, 4 * GIB),
            Memory(60.0, 1 * GIB, 8 * GIB, 9 * GIB, 0),
            Began(61.0, "c"),
            Ended(100.0, "b", True, 30.0, 4 * GIB),
            Ended(90.0, "c", True, 15.0, 4 * GIB),
            Over(125.0),
        ),
        "20260101-000000-flash-attn",
    )
    assert lines == [
        "flash-attn: built after 2:05",
        "  time     1:40 of CPU time, 0.8 cores on average; 3 kernels compiled, 1 taken from the store",
        "  memory   7.0 GiB at the peak, of 8.0 GiB, 0:30 in",
        "  slowest  a 1:00, b 0:59, c 0:29",
        "  waited   0:40 for memory: b 0:40",
        "  again    stopped once memory got short: b",
        "  report   pybuild report 20260101-000000-flash-attn",
    ]


def test_a_build_of_which_all_was_there() -> None:
    assert summarise(progress_of(Planned(0.0, "p", ("a",), ("a",), 2, GIB), Over(3.0))) == ["p: built after 0:03"]


def wheel(folder: Path) -> Path:
    path = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
    return path


def test_the_wheel_its_size_and_the_line_that_installs_it(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    path = wheel(folder)
    lines = summarise(progress_of(Over(3.0, wheels=(str(path),))))
    assert lines[1:] == [f"  wheel    {path}, 0 KiB", f"  install  pip install '{path}'"]


def test_a_wheel_with_device_code_says_for_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pybuild.wheel
    from pybuild.wheel import Artifact, Fatbins, Library

    library = Library(name="x.so", machine="x86_64", fatbins=(Fatbins(code=("sm_100", "sm_120"), count=3),))
    monkeypatch.setattr(pybuild.wheel, "read_artifact", lambda path: Artifact(path=str(path), libraries=(library,)))
    assert summarise(progress_of(Over(3.0, wheels=(str(wheel(tmp_path)),))))[1].endswith(", for sm_100 sm_120")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"not a wheel")])
def test_a_wheel_that_is_gone_or_damaged_is_said_and_no_traceback(make: object, tmp_path: Path) -> None:
    path = tmp_path / "small-1.0-py3-none-any.whl"
    assert callable(make)
    make(path)
    lines = summarise(progress_of(Over(3.0, wheels=(str(path),))))
    assert len(lines) == 2
    assert str(path) in lines[1]


def test_a_failure_says_what_is_kept() -> None:
    events = (Planned(0.0, "p", ("a", "b", "c"), ("c",), 2, GIB), Began(0.0, "a"), Ended(9.0, "a", True, 1.0, 1))
    assert summarise(progress_of(*events, Over(9.0, error="no")))[0] == (
        "p: failed after 0:09; kernels that are finished and kept: 2 of 3"
    )
    assert summarise(progress_of(*events, Over(9.0, stopped=True)))[0].startswith("p: stopped after 0:09;")
    assert summarise(progress_of(*events))[0].startswith("p: cut short after 0:09;")


# What to type next

WORDS = ["pybuild", "build", "flash-attn", "--cores", "8"]


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "pybuild build flash-attn --cores 4"),
        ("  error: writing to file: No space left on device", "nix-store --gc"),
        ("error: hash mismatch in fixed-output derivation '/nix/store/x.drv'", "pip config list"),
        ("error: unable to download 'x': Could not resolve host: x", "pybuild build flash-attn --cores 8  # when that"),
        ("x.cu(3): error: expected a ;", "pybuild build flash-attn --cores 8  # when that is mended"),
        ("the moon is in the wrong place", "pybuild build flash-attn --cores 8  # when that is mended"),
    ],
)
@pytest.mark.parametrize("where", ["error", "output"])
def test_the_next_command_suits_the_cause(said: str, command: str, where: str) -> None:
    over: list[Event] = [Over(1.0, error=said)] if where == "error" else [Said(0.0, said), Over(1.0, error="it failed")]
    assert next_command(cause_of(progress_of(*over)), WORDS, 8).startswith(command)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pybuild", "build"], "pybuild build --cores 1"),
        (["pybuild", "build", "--cores=3", "--release", "cu130"], "pybuild build --release cu130 --cores 1"),
        (
            ["pybuild", "run", "--", "pip", "wheel", "--cores", "x y"],
            "pybuild run --cores 1 -- pip wheel --cores 'x y'",
        ),
    ],
)
def test_fewer_cores_take_the_place_of_those_that_were_given(words: list[str], expected: str) -> None:
    killed = progress_of(Over(1.0, error="c++: fatal error: Killed signal terminated program cc1plus"))
    assert next_command(cause_of(killed), words, 2) == expected


# All of it


def test_a_failed_build_is_summed_up_recorded_and_raised_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    out = io.StringIO()
    with pytest.raises(BuildError) as raised, watching(head_of("p", WORDS, {}), stream=out) as listener:
        listener(Planned(0.0, "p", ("a",), (), 8, GIB))
        raise BuildError("cicc died due to signal 9", "Too little memory.")
    assert raised.value.remedy == "Too little memory.\nNext: pybuild build flash-attn --cores 4"
    assert "p: failed after 0:00" in out.getvalue()
    assert len(list_builds()) == 1


def test_a_build_that_succeeds_is_summed_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    out = io.StringIO()
    with watching(head_of("p", WORDS, {}), stream=out) as listener:
        for event in simulate(small(), jobs=2, budget=4 * GIB):
            listener(event)
    assert out.getvalue().count("flash-attn: built after") == 1
    assert "3 of 3 done" in out.getvalue()


def test_a_build_that_cannot_be_recorded_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    out = io.StringIO()
    with watching(head_of("p", WORDS, {}), stream=out) as listener:
        listener(Over(1.0))
    assert out.getvalue().splitlines() == ["the build: built after 0:01"]
