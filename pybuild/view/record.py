"""Builds as they happened, as JSON lines in the user's state directory: a head with the facts, then every event."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal, get_args

import platformdirs
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from pybuild import __version__
from pybuild.errors import PybuildError
from pybuild.events import Event, Over, Reading, Said, Step
from pybuild.facts.host import Host, read_host
from pybuild.view.progress import TAIL_LINES, Progress

KEPT = 20
"""Builds that are kept; the oldest goes when another begins."""

# Seconds between two readings of one compile that are kept, if its tool is the same: half of what comes.
_READING = 0.9

_EVENTS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Event)}


class Head(BaseModel):
    """The facts of a build: when it began and on which machine, what was typed, and the flags that were in force.

    `flags` are the settings of the build as `pybuild config` names them (release, capabilities, ...), with whatever
    else the command wants to be known of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    pybuild: str
    started: datetime
    command: tuple[str, ...]
    package: str
    flags: dict[str, Any] = {}
    host: Host


@dataclass(frozen=True)
class Build:
    """A recorded build. `name` is what `pybuild report` calls it."""

    name: str
    head: Head
    events: tuple[Event, ...]

    def progress(self) -> Progress:
        """How it stood at the end of the record."""
        progress = Progress()
        for event in self.events:
            progress(event)
        return progress


def builds_folder() -> Path:
    """Where builds are recorded: $XDG_STATE_HOME/pybuild/builds, by default in ~/.local/state."""
    return platformdirs.user_state_path("pybuild") / "builds"


def head_of(package: str, command: list[str], flags: Mapping[str, Any]) -> Head:
    """The head of a build that begins now, on this machine."""
    return Head(
        pybuild=__version__,
        started=datetime.now(timezone.utc),
        command=tuple(command),
        package=package,
        flags=dict(flags),
        # Without the machine's name: reports are shown to others.
        host=read_host(programs=False).model_copy(update={"name": ""}),
    )


class Recorder:
    """A Listener that keeps each event. What can't be written is left out: the build is worth more than its record."""

    def __init__(self, file: IO[str], name: str) -> None:
        self.name = name
        self._file: IO[str] | None = file
        self._last: dict[str, Reading] = {}
        self._said: deque[Said] = deque(maxlen=TAIL_LINES)

    def __call__(self, event: Event) -> None:
        match event:
            case Said():
                # All of a build's output is too much to keep twenty times; its end is kept.
                self._said.append(event)
                return
            case Reading(compile=name, time=time, tool=tool):
                last = self._last.get(name)
                if last is not None and last.tool == tool and time - last.time < _READING:
                    return
                self._last[name] = event
            case Over(error=error) if error:
                for said in self._said:
                    self._write(said)
        self._write(event)

    def _write(self, event: Event) -> None:
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        self.write_line({"event": type(event).__name__, **values})

    def write_line(self, values: Mapping[str, Any]) -> None:
        """Add one line. After the first that fails, no other is tried."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
        except (OSError, ValueError):
            self._file = None


@contextlib.contextmanager
def recording(head: Head, folder: Path | None = None) -> Iterator[Recorder | None]:
    """Record a build in `folder` while the context lasts, and let the oldest records go. None where it can't be."""
    try:
        name, file = _create(folder or builds_folder(), head)
    except OSError:
        yield None
        return
    recorder = Recorder(file, name)
    try:
        recorder.write_line(head.model_dump(mode="json"))
        yield recorder
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _create(folder: Path, head: Head) -> tuple[str, IO[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{head.started.astimezone():%Y%m%d-%H%M%S}-{_file_name(head.package)}"
    for number in range(1, 100):
        name = stem if number == 1 else f"{stem}-{number}"
        with contextlib.suppress(FileExistsError):
            # A line at a time reaches the disk, so that a build which is killed leaves all but its last moment.
            file = (folder / f"{name}.jsonl").open("x", buffering=1, encoding="utf-8")
            for old in _records(folder)[KEPT:]:
                old.unlink(missing_ok=True)
            return name, file
    raise FileExistsError(stem)


def _file_name(package: str) -> str:
    return re.sub(r"[^\w.-]+", "-", package).strip("-.") or "build"


def _records(folder: Path) -> list[Path]:
    """The records, the newest first: their names begin with their time."""
    try:
        return sorted(folder.glob("*.jsonl"), reverse=True)
    except OSError:
        return []


def list_builds(folder: Path | None = None) -> list[str]:
    """The names of the builds that are kept, the newest first."""
    return [path.stem for path in _records(folder or builds_folder())]


def find_build(name: str | None, folder: Path | None = None) -> Path:
    """The record of a build by its name, or the beginning of it, or the path of a record; None is the last build.

    Raises PybuildError where there is none.
    """
    folder = folder or builds_folder()
    if name is not None and name.endswith(".jsonl"):
        return Path(name)
    records = _records(folder)
    if not records:
        raise PybuildError(f"no build is recorded in {folder}", "Build something first: pybuild build flash-attn")
    found = [path for path in records if name is None or path.stem.startswith(name)]
    exact = [path for path in found if path.stem == name]
    if name is not None and len(exact or found) != 1:
        known = "\n".join(f"  {path.stem}" for path in found or records)
        what = "several builds begin with" if found else "no build is called"
        raise PybuildError(f"{what} {name!r}", f"There is:\n{known}")
    return (exact or found)[0]


def last_afterwards(package: str, folder: Path | None = None) -> float | None:
    """Seconds that the steps after the last compile took in the last build of `package` that is kept and succeeded."""
    for path in _records(folder or builds_folder()):
        if not re.fullmatch(rf"\d+-\d+-{re.escape(_file_name(package))}(-\d+)?", path.stem):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            linked = None
            for line in _last_lines(path):
                event = _event(line)
                if isinstance(event, Step):
                    linked = event.time if event.name == "link" else None
                elif isinstance(event, Over) and not event.error and linked is not None:
                    return event.time - linked
    return None


def _last_lines(path: Path, size: int = 4096) -> list[str]:
    """The last whole lines of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()[1:]


def read_build(path: Path) -> Build:
    """The build in a record. Raises PybuildError where it can't be read.

    A last line that was cut short, by a kill or a full disk, is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise PybuildError(
            f"{path} can't be read: {error.strerror}", "`pybuild report --list` has those kept."
        ) from error
    try:
        head = Head.model_validate_json(lines[0] if lines else "")
    except ValidationError as error:
        raise PybuildError(f"{path} is no record of a build: {_fault(error)}", "Another pybuild wrote it?") from error
    events: list[Event] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            events.append(_event(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            fault = _fault(error) if isinstance(error, ValidationError) else "not an event"
            raise PybuildError(
                f"{path}, line {number}: {fault}", "Remove the file; the build can't be shown."
            ) from error
    return Build(path.stem, head, tuple(events))


def _event(line: str) -> Event:
    values = json.loads(line)
    event: Event = _EVENTS[values.pop("event")].validate_python(values)
    return event


def _fault(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'its first line'}: {first['msg']}"
