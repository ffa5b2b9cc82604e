"""Recorded logs of nix 2.8.0 (Debian 12) and 2.26.3 (Debian 13), in both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybuild.nixlog import TAIL_LINES, BuildLog, LogLine, Message, Started, Stopped, parse, strip_ansi

LOGS = Path(__file__).parent / "fakes/nix-logs"
VERSIONS = ("2.8", "2.26")
FORMATS = ("json", "text")

each_version = pytest.mark.parametrize("version", VERSIONS)
each_format = pytest.mark.parametrize("form", FORMATS)


def read(version: str, what: str, form: str) -> BuildLog:
    log = BuildLog()
    for line in (LOGS / f"{version}-{what}.{form}").read_text().splitlines(keepends=True):
        log.feed(line)
    return log


@each_format
@each_version
@pytest.mark.parametrize(
    ("what", "text", "where"),
    [
        (
            "throw",
            "the C++ compiler g++ 15.1 is newer than CUDA 13.0 accepts\nUse g++ 6 to 15.0: --cxx /usr/bin/g++-14",
            "",
        ),
        ("attribute", "attribute 'nothing' missing", "sub/default.nix:9"),
        ("attribute-in-trace", "attribute 'nope' missing", "sub/default.nix:10"),
    ],
)
def test_an_evaluation_error_is_its_cause_and_its_place(
    version: str, form: str, what: str, text: str, where: str
) -> None:
    log = read(version, what, form)
    assert log.errors == [Message(0, text, where)]
    assert log.failures == []


@each_format
@pytest.mark.parametrize(("version", "line"), [("2.8", 1), ("2.26", 2)])
def test_a_syntax_error_is_located(version: str, line: int, form: str) -> None:
    (error,) = read(version, "syntax", form).errors
    assert str(error) == f"syntax error, unexpected end of file, expecting ';' (at sub/syntax.nix:{line})"


@each_format
@each_version
def test_a_failing_builder_is_named_once(version: str, form: str) -> None:
    (failure,) = read(version, "compiler-killed", form).failures
    assert failure.derivation == "/nix/store/f0136g06ipxs1k93ini0axq5v0218655-oom.drv"
    assert failure.how == "failed with exit code 2"


@each_format
@each_version
def test_a_killed_builder(version: str, form: str) -> None:
    (failure,) = read(version, "builder-killed", form).failures
    assert failure.how == "failed due to signal 9 (Killed)"


@each_format
@each_version
def test_a_hash_mismatch_keeps_both_hashes(version: str, form: str) -> None:
    (error,) = read(version, "hash-mismatch", form).errors
    assert "specified: sha256-c8s4WKaHqElMozIwUwFigvPa051Cz2LKTnndoqrH2aw=" in error.text
    assert "got:    sha256-mOpuTyFvL7S2n/+bOkSELDhobKaF8/VdxIxdP7EQe+Q=" in error.text


@each_format
@each_version
def test_a_success_has_no_errors(version: str, form: str) -> None:
    log = read(version, "success", form)
    assert (log.errors, log.failures, log.building) == ([], [], {})
    assert [w.text.splitlines()[0] for w in log.warnings if "lock file" in w.text]


@each_version
def test_builds_begin_and_end_and_their_lines_are_theirs(version: str) -> None:
    log = BuildLog()
    seen: list[str] = []
    build = -1
    for line in (LOGS / f"{version}-compiler-killed.json").read_text().splitlines():
        match log.feed(line):
            case Started(id=build, derivation=str(derivation)):
                assert log.building == {build: derivation}
                seen.append("started")
            case LogLine(id=id_, text=text):
                assert id_ == build
                seen.append(text)
            case Stopped(id=id_) if id_ == build:
                assert log.building == {}
                seen.append("stopped")
    assert seen == ["started", "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "stopped"]
    (tail,) = log.tails.values()
    assert list(tail) == ["nvcc error   : 'cicc' died due to signal 9 (Kill signal)"]


def test_only_the_end_of_a_log_is_kept() -> None:
    log = BuildLog()
    log.feed('@nix {"action":"start","fields":["/nix/store/x.drv","",1,1],"id":7,"level":3,"text":"","type":105}')
    for number in range(TAIL_LINES + 5):
        log.feed("@nix " + json.dumps({"action": "result", "fields": [f"line {number}"], "id": 7, "type": 101}))
    assert list(log.tails["/nix/store/x.drv"]) == [f"line {n}" for n in range(5, TAIL_LINES + 5)]


def test_the_words_of_nix_2_30_for_a_failing_builder() -> None:
    log = BuildLog()
    for line in (
        "error: Cannot build '/nix/store/abc-flash-attn.drv'.",
        "       Reason: builder failed with exit code 2.",
        "       Output paths:",
    ):
        log.feed(line)
    assert [f.derivation for f in log.failures] == ["/nix/store/abc-flash-attn.drv"]
    assert log.failures[0].how == "builder failed with exit code 2."


def test_the_first_failure_comes_first_and_dependents_are_none() -> None:
    log = BuildLog()
    log.feed("error: builder for '/nix/store/a-one.drv' failed with exit code 1;")
    log.feed("       last 1 log lines:")
    log.feed("       > error: builder for '/nix/store/z-other.drv' failed with exit code 9")
    log.feed("error: builder for '/nix/store/b-two.drv' failed with exit code 1")
    log.feed("error: 1 dependencies of derivation '/nix/store/c-three.drv' failed to build")
    assert [f.derivation for f in log.failures] == ["/nix/store/a-one.drv", "/nix/store/b-two.drv"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   \n",
        '@nix {"action":"start","id":1',
        '@nix {"action":"start"}',
        '@nix {"action":"start","id":1,"level":0,"text":"","type":105}',
        '@nix {"action":"result","id":1,"type":101,"fields":[]}',
        '@nix {"action":"something new","id":1}',
        "@nix []",
        "@nix 3",
    ],
)
def test_what_is_cut_short_or_unknown_is_passed_over(line: str) -> None:
    assert BuildLog().feed(line) is None


def test_lines_of_no_format_are_messages() -> None:
    assert parse("warning: \x1b[1mcareful\x1b[0m\n") == Message(1, "warning: careful")
    assert parse("Installing git.\n") == Message(3, "Installing git.")


def test_strip_ansi() -> None:
    assert strip_ansi("\x1b[31;1merror:\x1b[0m a\x1b]0;title\x07b\r") == "error: ab"


@given(st.lists(st.text(max_size=40), max_size=20))
def test_no_line_makes_the_reader_fail(lines: list[str]) -> None:
    log = BuildLog()
    for line in lines:
        for prefix in ("", "@nix ", "error: ", "       "):
            log.feed(prefix + line)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_no_json_makes_the_reader_fail(value: object) -> None:
    log = BuildLog()
    for action in ("start", "stop", "msg", "result"):
        data = {"action": action, "id": value, "type": 105, "fields": value, "level": value, "msg": value}
        log.feed("@nix " + json.dumps(data))
        log.feed("@nix " + json.dumps({**data, "type": 101, "id": 1}))
