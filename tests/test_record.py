"""Recorded builds: what is kept, what is read back, what a damaged record does."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from simulated import simulate, small

from pybuild.errors import PybuildError
from pybuild.events import Began, Ended, Event, Memory, Over, Planned, Reading, Said, Step
from pybuild.units import GIB
from pybuild.view.record import (
    KEPT,
    Head,
    Recorder,
    builds_folder,
    find_build,
    head_of,
    last_afterwards,
    list_builds,
    read_build,
    recording,
)


def head(package: str = "flash-attn") -> Head:
    return head_of(package, ["pybuild", "build", package], {"release": "cu130", "capabilities": ("10.0",)})


def record(folder: Path, events: Sequence[Event], package: str = "flash-attn") -> Path:
    with recording(head(package), folder) as recorder:
        assert recorder is not None
        for event in events:
            recorder(event)
    return folder / f"{recorder.name}.jsonl"


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    events: list[Event] = [
        Planned(0.0, "flash-attn", ("a", "b"), ("b",), 2, 4 * GIB, ("sm_100",)),
        Step(0.1, "compile"),
        Began(0.2, "a"),
        Reading(1.0, "a", "cicc", 3 * GIB),
        Memory(1.0, 3 * GIB, 4 * GIB, 9 * GIB, 1, 1.5),
        Ended(9.0, "a", True, 8.5, 3 * GIB),
        Over(10.0, wheels=("dist/a.whl",)),
    ]
    build = read_build(record(tmp_path, events))
    assert list(build.events) == events
    assert build.head.flags == {"release": "cu130", "capabilities": ["10.0"]}
    assert build.head.host.memory.total > 0


def test_readings_of_one_tool_are_thinned_and_the_rest_is_not(tmp_path: Path) -> None:
    events = list(simulate(small(), jobs=2, budget=4 * GIB, tick=0.25))
    kept = read_build(record(tmp_path, events)).events
    assert [event for event in kept if not isinstance(event, Reading)] == [
        event for event in events if not isinstance(event, Reading)
    ]
    changes = [(e.compile, e.tool) for e in events if isinstance(e, Reading)]
    assert len([e for e in kept if isinstance(e, Reading)]) < len(changes) / 2
    assert {(e.compile, e.tool) for e in kept if isinstance(e, Reading)} == set(changes)


def test_of_the_output_the_end_is_kept_where_the_build_failed(tmp_path: Path) -> None:
    said: list[Event] = [Said(float(n), f"line {n}") for n in range(1000)]
    failed = read_build(record(tmp_path, [*said, Over(1000.0, error="no")], "failed")).progress()
    assert list(failed.said) == [f"line {n}" for n in range(980, 1000)]
    assert failed.status == "failed"
    done = read_build(record(tmp_path, [*said, Over(1000.0)], "done")).progress()
    assert not done.said


def test_the_last_twenty_are_kept(tmp_path: Path) -> None:
    names = [record(tmp_path, [], f"p{number}").stem for number in range(KEPT + 5)]
    assert set(list_builds(tmp_path)) <= set(names)
    assert len(list_builds(tmp_path)) == KEPT


def test_two_builds_of_one_second_have_two_names(tmp_path: Path) -> None:
    first = head()
    for _ in range(2):
        with recording(first, tmp_path):
            pass
    assert len(list_builds(tmp_path)) == 2


def test_a_name_can_be_shortened_as_long_as_it_is_the_only_one(tmp_path: Path) -> None:
    for name in ("20260101-000000-a", "20260102-000000-b", "20260102-000001-b"):
        (tmp_path / f"{name}.jsonl").write_text("")
    assert find_build("20260101", tmp_path).stem == "20260101-000000-a"
    assert find_build(None, tmp_path).stem == "20260102-000001-b"
    with pytest.raises(PybuildError, match="several builds begin with") as several:
        find_build("20260102", tmp_path)
    assert "20260102-000000-b" in several.value.remedy
    with pytest.raises(PybuildError, match="no build is called 'x'"):
        find_build("x", tmp_path)


def test_no_build_at_all(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="no build is recorded"):
        find_build(None, tmp_path / "none")


def test_a_build_that_was_killed_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = record(tmp_path, list(simulate(small(), jobs=2, budget=4 * GIB)))
    whole = read_build(path)
    text = path.read_text()
    path.write_text(text[: len(text) - 10])
    assert read_build(path).events == whole.events[:-1]
    assert read_build(path).progress().status == "running"


@pytest.mark.parametrize(
    ("line", "text", "says"),
    [
        (0, "", "is no record of a build"),
        (0, "{}", "is no record of a build: pybuild"),
        (0, "\x00\xff", "is no record of a build"),
        (2, "nonsense", "line 3: not an event"),
        (2, '{"event":"Began","time":"soon","compile":"a"}', "line 3: time"),
        (2, '{"event":"Nothing"}', "line 3: not an event"),
    ],
)
def test_what_is_no_record_is_one_clear_error(line: int, text: str, says: str, tmp_path: Path) -> None:
    path = record(tmp_path, list(simulate(small(), jobs=2, budget=4 * GIB)))
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(PybuildError) as raised:
        read_build(path)
    assert str(path) in raised.value.what
    assert says in raised.value.what


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="can't be read: No such file"):
        read_build(tmp_path / "x.jsonl")


def test_a_folder_that_cannot_be_made_costs_the_record_and_not_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with recording(head(), tmp_path / "file" / "builds") as recorder:
        assert recorder is None


class FullDisk:
    """A file on a disk without room."""

    def __init__(self) -> None:
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_record_and_not_the_build() -> None:
    disk = FullDisk()
    recorder = Recorder(disk, "x")  # type: ignore[arg-type]
    for event in simulate(small(), jobs=2, budget=4 * GIB):
        recorder(event)
    assert disk.tries == 1


def test_the_folder_is_the_users_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert builds_folder() == tmp_path / "pybuild/builds"


def test_how_long_the_link_takes_is_known_from_the_last_build_that_succeeded(tmp_path: Path) -> None:
    assert last_afterwards("flash-attn", tmp_path) is None
    record(tmp_path, list(simulate(small(), jobs=2, budget=4 * GIB, link=42.0)))
    record(tmp_path, list(simulate(small(), jobs=2, budget=4 * GIB, link=7.0)), "attn")
    record(tmp_path, [Step(0.0, "link"), Over(9.0, error="no")])
    record(tmp_path, [Over(9.0)])
    assert last_afterwards("flash-attn", tmp_path) == pytest.approx(42.0)
    assert last_afterwards("attn", tmp_path) == pytest.approx(7.0)
    assert last_afterwards("other", tmp_path) is None
