"""What happens in a build, as small dataclasses: said by build.py, shown by a renderer, kept by the record of builds.

Times are seconds since the build began; memory is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Planned:
    """The compiles of a build are known. `present` are those whose objects the store had already.

    `architectures` are nvcc's names (sm_100); empty where they are not known.
    """

    time: float
    package: str
    compiles: tuple[str, ...]
    present: tuple[str, ...]
    cores: int
    budget: int
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step that is no compile begins: `inputs`, `compile`, `link`."""

    time: float
    name: str


@dataclass(frozen=True)
class Asked:
    """A compile of which no plan told wants to begin."""

    time: float
    compile: str


@dataclass(frozen=True)
class Began:
    """A compile was let in."""

    time: float
    compile: str


@dataclass(frozen=True)
class Reading:
    """A running compile as seen now: the tool that works (cudafe++, cicc, ptxas, cc1plus), and its memory."""

    time: float
    compile: str
    tool: str
    memory: int


@dataclass(frozen=True)
class Ended:
    """A compile is over. `ok` is False where it failed; `cpu` and `peak` are what was seen of it."""

    time: float
    compile: str
    ok: bool
    cpu: float
    peak: int


@dataclass(frozen=True)
class Evicted:
    """A compile was stopped because memory got short; it waits again, and begins anew later."""

    time: float
    compile: str


@dataclass(frozen=True)
class Memory:
    """The machine now: what the build's compiles hold together, the budget, and what waits for memory.

    `busy` is how many cores work, for whatever program; None where nobody looked.
    """

    time: float
    used: int
    budget: int
    available: int
    waiting: int
    busy: float | None = None


@dataclass(frozen=True)
class Said:
    """A line of nix's or of a builder's log."""

    time: float
    text: str


@dataclass(frozen=True)
class Over:
    """The build is over: with these wheels, with what went wrong, or `stopped` by whoever started it."""

    time: float
    wheels: tuple[str, ...] = ()
    error: str = ""
    stopped: bool = False


Event = Planned | Step | Asked | Began | Reading | Ended | Evicted | Memory | Said | Over


class Listener(Protocol):
    """Whoever wants to know: a renderer, a record."""

    def __call__(self, event: Event) -> None: ...
