"""What nix says while it works, as small dataclasses: its `--log-format internal-json`, or what people read."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

# Lines of a builder's log that are kept for the message of a failure.
TAIL_LINES = 20

_PREFIX = "@nix "
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\r")

# Numbers of nix's (src/libutil/logging.hh), the same in 2.8 and 2.26: the activity and the result that are read.
_BUILD = 105
_LOG_LINE = 101

# nix 2.8: "builder for 'X.drv' failed with exit code 1"; 2.30: "Cannot build 'X.drv'. Reason: ...".
_FAILED = re.compile(
    r"(?:builder for '(?P<old>[^']+\.drv)' (?P<how>failed[^;\n]*)"
    r"|Cannot build '(?P<new>[^']+\.drv)'\.\s*Reason: (?P<why>builder failed[^\n]*))"
)

# Where the cause of an error ends, in what people read: the place, its source, a trace, the builder's log.
_AFTER_CAUSE = re.compile(r"\n\s*(?:at \S+:\d+|… |\d+\||\(use '--show-trace'|last \d+ log lines)")
_AT = re.compile(r"^\s*at (\S+?):(\d+)(?::\d+)?:", re.MULTILINE)


@dataclass(frozen=True)
class Started:
    """An activity begins. `derivation` is the path of the .drv where it is a build."""

    id: int
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


Event = Started | Stopped | LogLine | Message


def strip_ansi(text: str) -> str:
    """`text` without terminal colours, window titles and carriage returns."""
    return _ANSI.sub("", text)


def parse(line: str) -> Event | None:
    """The event in one line of nix's standard error; None for one that pybuild has no use for.

    A line without the mark of internal-json is a Message, as far as one line tells: BuildLog puts together the
    errors that go over several.
    """
    line = line.rstrip("\n")
    if not line.startswith(_PREFIX):
        text = strip_ansi(line)
        level = 0 if text.startswith("error:") else 1 if text.startswith("warning:") else 3
        return Message(level, text.strip()) if text.strip() else None
    try:
        return _event(json.loads(line[len(_PREFIX) :]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        # Cut short by the end of nix, or changed by a later nix: the build matters more.
        return None


def _event(data: dict[str, Any]) -> Event | None:
    match data["action"]:
        case "start":
            derivation = str(data["fields"][0]) if data["type"] == _BUILD else None
            return Started(int(data["id"]), strip_ansi(str(data["text"])), derivation)
        case "stop":
            return Stopped(int(data["id"]))
        case "result" if data["type"] == _LOG_LINE:
            return LogLine(int(data["id"]), strip_ansi(str(data["fields"][0])))
        case "msg":
            return _message(data)
    return None


def _message(data: dict[str, Any]) -> Message:
    level = int(data["level"])
    # An error's raw_msg is the cause alone.
    text = strip_ansi(str(data.get("raw_msg") or data["msg"]))
    # In 2.8 "file" is a path, in 2.26 it has ":LINE:COLUMN" after it.
    file = re.sub(r"(:\d+)+$", "", str(data["file"])) if data.get("line") else ""
    return Message(level, text, _place(file, data.get("line")))


def _place(file: str, line: object) -> str:
    """`nix/wheels.nix:12` for a file of the flake, which nix reads in the store."""
    return f"{re.sub(r'^/nix/store/[^/]+/', '', file)}:{line}" if file else ""


def _read_error(block: str) -> Message:
    """The error in what nix prints for people: "error:" and the lines that belong to it.

    nix 2.8 prints the cause first. Newer nix prints the trace first, and the cause behind the last "error:".
    """
    cause = re.split(r"^\s*error:", block, flags=re.MULTILINE)[-1]
    text = _AFTER_CAUSE.split("\n" + cause, maxsplit=1)[0]
    # nix indents the further lines of an error by the width of "error: ".
    text = re.sub(r"^ {1,7}", "", text, flags=re.MULTILINE).strip()
    at = _AT.search(cause)
    return Message(0, text, _place(at[1], at[2]) if at else "")


@dataclass(frozen=True)
class Failure:
    """A derivation whose builder failed: its path, and how, in nix's words (`failed with exit code 1`)."""

    derivation: str
    how: str


@dataclass
class BuildLog:
    """What a nix has said so far; `feed` it each line of its standard error, in either format.

    `building` maps the activities of builds that run now to their derivations, and `tails` holds the last
    TAIL_LINES lines of each derivation's log: both only with internal-json. `failures` are the derivations
    whose builder failed, the first one first.
    """

    building: dict[int, str] = field(default_factory=dict)
    tails: dict[str, deque[str]] = field(default_factory=dict)
    errors: list[Message] = field(default_factory=list)
    warnings: list[Message] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    _block: str = field(default="", repr=False)  # the error that the lines so far belong to

    def feed(self, line: str) -> Event | None:
        """Take one line in, and give back its event for whoever shows it."""
        event = parse(line)
        marked = line.startswith(_PREFIX)
        if not marked and self._block and (not line.strip() or line.startswith(" ")):
            self._block += "\n" + strip_ansi(line.rstrip("\n"))
            self.errors[-1] = _read_error(self._block)
            self._note_failures()
            return event
        self._block = ""
        match event:
            case Started(id=id_, derivation=str(derivation)):
                self.building[id_] = derivation
                self.tails[derivation] = deque(maxlen=TAIL_LINES)
            case Stopped(id=id_):
                self.building.pop(id_, None)
            case LogLine(id=id_, text=text) if id_ in self.building:
                self.tails[self.building[id_]].append(text)
            case Message(level=0, text=text) if not text.startswith("(use '--show-trace'"):
                self._block = "" if marked else text
                self.errors.append(event if marked else _read_error(text))
                self._note_failures()
            case Message(level=1):
                self.warnings.append(event)
        return event

    def _note_failures(self) -> None:
        for match in _FAILED.finditer(self.errors[-1].text):
            failure = Failure(match["old"] or match["new"], match["how"] or match["why"])
            if failure.derivation not in {known.derivation for known in self.failures}:
                self.failures.append(failure)
