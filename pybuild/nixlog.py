"""nix's `--log-format internal-json` lines, as small dataclasses."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

# Lines of a builder's log that are kept for the message of a failure.
TAIL_LINES = 20

_PREFIX = "@nix "
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\r")

# nix 2.8: "builder for 'X.drv' failed with exit code 1"; 2.30: "Cannot build 'X.drv'. Reason: ...".
_FAILED = re.compile(
    r"(?:builder for '(?P<old>[^']+\.drv)' (?P<how>failed[^;\n]*)"
    r"|Cannot build '(?P<new>[^']+\.drv)'\.\s*Reason: (?P<why>builder failed[^\n]*))"
)


class Activity(IntEnum):
    """What an activity is; the numbers are nix's (src/libutil/logging.hh, the same from 2.8 to 2.31)."""

    UNKNOWN = 0
    COPY_PATH = 100
    FILE_TRANSFER = 101
    REALISE = 102
    COPY_PATHS = 103
    BUILDS = 104
    BUILD = 105
    OPTIMISE_STORE = 106
    VERIFY_PATHS = 107
    SUBSTITUTE = 108
    QUERY_PATH_INFO = 109
    POST_BUILD_HOOK = 110
    BUILD_WAITING = 111
    FETCH_TREE = 112


# Kinds of result (the same file of nix) that are read here.
_LOG_LINE = 101
_SET_PHASE = 104
_PROGRESS = 105


@dataclass(frozen=True)
class Started:
    """An activity begins. `derivation` is the path of the .drv where it is a build."""

    id: int
    activity: Activity
    text: str
    derivation: str | None = None


@dataclass(frozen=True)
class Stopped:
    """The activity `id` is over, well or badly."""

    id: int


@dataclass(frozen=True)
class LogLine:
    """One line that the builder of activity `id` printed, without terminal colours."""

    id: int
    text: str


@dataclass(frozen=True)
class Phase:
    """The builder of activity `id` entered a phase (unpackPhase, buildPhase, ...)."""

    id: int
    name: str


@dataclass(frozen=True)
class Progress:
    """How far activity `id` is: for Activity.BUILDS these are derivations, for a FILE_TRANSFER bytes."""

    id: int
    done: int
    expected: int
    running: int
    failed: int


@dataclass(frozen=True)
class Message:
    """What nix says itself. `level` 0 is an error, 1 a warning, 3 and more are information.

    `text` of an error is its cause alone, without the trace that led there; `where` is the file and line of
    the expression that it is about, or empty.
    """

    level: int
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.text} (at {self.where})" if self.where else self.text


Event = Started | Stopped | LogLine | Phase | Progress | Message


def strip_ansi(text: str) -> str:
    """`text` without terminal colours, window titles and carriage returns."""
    return _ANSI.sub("", text)


def parse(line: str) -> Event | None:
    """The event in one line of nix's standard error; None for one that pybuild has no use for.

    A line without nix's mark (of nix-portable, or of nix before it knows the format) is a Message: an error or
    a warning where it begins with that word, else of level 3.
    """
    line = line.rstrip("\n")
    if not line.startswith(_PREFIX):
        text = strip_ansi(line).strip()
        return _message({"level": 3, "msg": text}) if text else None
    try:
        data = json.loads(line[len(_PREFIX) :])
        return _event(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        # Cut short by the end of nix, or an event that a later nix has changed: the build matters more.
        return None


def _event(data: dict[str, Any]) -> Event | None:
    match data["action"]:
        case "start":
            kind = int(data["type"])
            activity = Activity(kind) if kind in Activity._value2member_map_ else Activity.UNKNOWN
            derivation = str(data["fields"][0]) if activity is Activity.BUILD else None
            return Started(int(data["id"]), activity, strip_ansi(str(data["text"])), derivation)
        case "stop":
            return Stopped(int(data["id"]))
        case "msg":
            return _message(data)
        case "result":
            return _result(int(data["id"]), int(data["type"]), data["fields"])
    return None


def _message(data: dict[str, Any]) -> Message:
    level = int(data["level"])
    text = strip_ansi(str(data.get("raw_msg") or data["msg"]))
    for word, its_level in (("error: ", 0), ("warning: ", 1)):
        if text.startswith(word):
            level, text = its_level, text[len(word) :]
    where = ""
    if data.get("line"):
        # "file" is a path in 2.8, and has ":LINE:COLUMN" after it in 2.26; the flake's own are in the store.
        file = re.sub(r"(:\d+)+$|^/nix/store/[^/]+/", "", str(data["file"]))
        where = f"{file}:{data['line']}"
    return Message(level, text, where)


def _result(activity: int, kind: int, fields: list[Any]) -> Event | None:
    if kind == _LOG_LINE:
        return LogLine(activity, strip_ansi(str(fields[0])))
    if kind == _SET_PHASE:
        return Phase(activity, str(fields[0]))
    if kind == _PROGRESS:
        done, expected, running, failed = (int(value) for value in fields[:4])
        return Progress(activity, done, expected, running, failed)
    return None


@dataclass(frozen=True)
class Failure:
    """A derivation whose builder failed: its path, and how, in nix's words (`failed with exit code 1`)."""

    derivation: str
    how: str


@dataclass
class BuildLog:
    """What a nix with `--log-format internal-json` has said so far; `feed` it each line of its standard error.

    `building` maps the activities of builds that run now to their derivations; `tails` holds the last
    TAIL_LINES lines of each derivation's log; `failures` the derivations that failed, the first one first.
    """

    building: dict[int, str] = field(default_factory=dict)
    tails: dict[str, deque[str]] = field(default_factory=dict)
    errors: list[Message] = field(default_factory=list)
    warnings: list[Message] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def feed(self, line: str) -> Event | None:
        """Take one line in, and give back its event for whoever shows it."""
        event = parse(line)
        match event:
            case Started(id=id_, derivation=str(derivation)):
                self.building[id_] = derivation
                self.tails[derivation] = deque(maxlen=TAIL_LINES)
            case Stopped(id=id_):
                self.building.pop(id_, None)
            case LogLine(id=id_, text=text) if id_ in self.building:
                self.tails[self.building[id_]].append(text)
            case Message(level=0):
                self._error(event)
            case Message(level=1):
                self.warnings.append(event)
        return event

    def _error(self, error: Message) -> None:
        # nix says this after an error that stands for itself.
        if not error.text.startswith("(use '--show-trace'"):
            self.errors.append(error)
        for match in _FAILED.finditer(error.text):
            failure = Failure(match["old"] or match["new"], match["how"] or match["why"])
            if failure.derivation not in {known.derivation for known in self.failures}:
                self.failures.append(failure)
