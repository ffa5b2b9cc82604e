"""How far a build is: its events, folded into what views and reports show. Times are seconds, memory is bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pybuild.events import Asked, Began, Ended, Event, Evicted, Memory, Over, Planned, Reading, Said, Step

# Lines of a build's output that are kept for the message of a failure.
TAIL_LINES = 20

State = Literal["waiting", "running", "done", "failed", "stored"]
Status = Literal["running", "done", "failed", "stopped"]


@dataclass
class Compile:
    """One compile, so far.

    `began` and `ended` are those of its last run, if it was stopped for memory and began anew (`evictions` times).
    `phases` are the tools that were seen at work, each with the time from which on; `high` is when it last held more
    than half of its peak. `waited` is how long memory alone kept it from beginning.
    """

    name: str
    state: State = "waiting"
    began: float | None = None
    ended: float | None = None
    tool: str = ""
    memory: int = 0
    peak: int = 0
    cpu: float = 0.0
    waited: float = 0.0
    evictions: int = 0
    phases: list[tuple[float, str]] = field(default_factory=list)
    high: float = 0.0

    def elapsed(self, now: float) -> float:
        """Seconds that it runs, or ran."""
        return 0.0 if self.began is None else (self.ended if self.ended is not None else now) - self.began


@dataclass
class Progress:
    """All that is known of a build after the events that it was fed.

    `planned` says whether all of its compiles are known. `memory` is the course of the build's memory, of which `peak`
    was the highest at `peak_time`.
    """

    package: str = ""
    planned: bool = False
    cores: int = 0
    budget: int = 0
    architectures: tuple[str, ...] = ()
    step: str = ""
    steps: list[tuple[float, str]] = field(default_factory=list)
    now: float = 0.0
    compiles: dict[str, Compile] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    peak: int = 0
    peak_time: float = 0.0
    said: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    over: Over | None = None
    _waiting_since: float | None = field(default=None, repr=False)

    def __call__(self, event: Event) -> None:
        """Take one event in. Events come in the order of their times."""
        self.now = max(self.now, event.time)
        match event:
            case Planned():
                self.package, self.cores, self.budget = event.package, event.cores, event.budget
                self.architectures, self.planned = event.architectures, bool(event.compiles)
                for name in event.compiles:
                    self._compile(name).state = "stored" if name in event.present else "waiting"
            case Step(time=time, name=name):
                self.step = name
                self.steps.append((time, name))
            case Asked(compile=name):
                compile_ = self._compile(name)
                if compile_.state != "running":
                    compile_.state = "waiting"
            case Began(time=time, compile=name):
                self._begin(self._compile(name), time)
            case Reading(time=time, compile=name, tool=tool, memory=memory):
                self._read(self._compile(name), time, tool, memory)
            case Ended():
                compile_ = self._compile(event.compile)
                compile_.state = "done" if event.ok else "failed"
                compile_.ended, compile_.memory = event.time, 0
                compile_.cpu, compile_.peak = event.cpu, max(event.peak, compile_.peak)
            case Evicted(compile=name):
                compile_ = self._compile(name)
                compile_.state, compile_.memory, compile_.tool = "waiting", 0, ""
                compile_.evictions += 1
            case Memory():
                self._note_memory(event)
            case Said(text=text):
                self.said.append(text)
            case Over():
                self.over = event

    def _compile(self, name: str) -> Compile:
        return self.compiles.setdefault(name, Compile(name))

    def _begin(self, compile_: Compile, time: float) -> None:
        compile_.state, compile_.began, compile_.ended, compile_.phases = "running", time, None, []
        # Whoever is let in is the one that the others queued behind: the wait was its own.
        if self._waiting_since is not None:
            compile_.waited += time - self._waiting_since
            self._waiting_since = None

    def _read(self, compile_: Compile, time: float, tool: str, memory: int) -> None:
        if compile_.state != "running":
            return
        compile_.memory, compile_.peak = memory, max(compile_.peak, memory)
        if memory > compile_.peak / 2:
            compile_.high = time
        # Between two tools nothing of note works for a moment; that is no phase.
        if tool and tool != compile_.tool:
            compile_.tool = tool
            compile_.phases.append((time, tool))

    def _note_memory(self, event: Memory) -> None:
        self.memory.append(event)
        self.budget = event.budget
        if event.used > self.peak:
            self.peak, self.peak_time = event.used, event.time
        if not event.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = event.time

    def of(self, *states: State) -> list[Compile]:
        """The compiles in one of these states, in the build's order."""
        return [compile_ for compile_ in self.compiles.values() if compile_.state in states]

    @property
    def noun(self) -> str:
        """What is compiled: pybuild plans kernels; of any other build only the compiles are seen."""
        return "kernels" if self.planned else "files"

    @property
    def used(self) -> int:
        """Bytes that the build's compiles hold now."""
        return self.memory[-1].used if self.memory else sum(c.memory for c in self.compiles.values())

    @property
    def waiting_for_memory(self) -> int:
        """How many compiles would run now if there were more memory."""
        return self.memory[-1].waiting if self.memory else 0

    @property
    def cpu(self) -> float:
        """CPU seconds of the compiles that have ended."""
        return sum(c.cpu for c in self.compiles.values())

    @property
    def status(self) -> Status:
        """Whether it runs, and how it ended."""
        if self.over is None:
            return "running"
        return "stopped" if self.over.stopped else "failed" if self.over.error else "done"
