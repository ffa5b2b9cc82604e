"""Compilers that a dead build left behind, which hold memory and cores that the next build counts on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

# What nvcc runs, by the name that the kernel knows a process by (15 characters); nvcc among them.
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "cc1plus"})
# What may stand between a build and its compilers; ninja outlives a killed pip and goes on starting compilers.
_BETWEEN = frozenset({"ninja", "ccache", "sccache", "gcc", "g++", "c++", "cc"})
_SHELLS = frozenset({"sh", "bash", "dash"})
# Programs that take orphans in, and start no compilers themselves.
_ADOPTERS = frozenset(
    {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "containerd-shim"}
)


class Process(BaseModel):
    """One line of the process table. `rss` in bytes, `started` in seconds since boot.

    `one_command` is whether it is a shell that was started for one command (`sh -c`), as nvcc and ninja do; a
    shell that runs a script is a build itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    parent: int
    session: int
    name: str
    rss: int
    started: float
    user: int
    one_command: bool = False


class Leftover(BaseModel):
    """A tree of processes whose build is gone: its topmost process, all of its members, what they hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    top: Process
    members: tuple[Process, ...]

    @property
    def rss(self) -> int:
        """Bytes that its members hold."""
        return sum(p.rss for p in self.members)

    @property
    def compilers(self) -> tuple[Process, ...]:
        """Its members that compile."""
        return tuple(p for p in self.members if p.name in COMPILERS)


def read_processes(root: Path = Path("/")) -> list[Process]:
    """The process table of `root`/proc. Processes that end meanwhile, and lines that make no sense, are left out."""
    page = os.sysconf("SC_PAGE_SIZE")
    tick = os.sysconf("SC_CLK_TCK")
    found = []
    for folder in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            # The name stands in parentheses and may hold any character, parentheses among them: proc(5).
            pid, _, rest = text.partition(" (")
            name, _, fields = rest.rpartition(") ")
            values = fields.split()
            if values[0] in "ZX":  # dead: it holds nothing and no signal reaches it
                continue
            found.append(
                Process(
                    pid=int(pid),
                    parent=int(values[1]),
                    session=int(values[3]),
                    name=name,
                    started=int(values[19]) / tick,
                    rss=max(0, int(values[21])) * page,
                    user=folder.stat().st_uid,
                    one_command=name in _SHELLS and _is_one_command(folder),
                )
            )
    return found


def _is_one_command(folder: Path) -> bool:
    words = (folder / "cmdline").read_bytes().split(b"\0")
    return len(words) > 1 and words[1].startswith(b"-") and words[1].endswith(b"c")


def find_leftovers(processes: Iterable[Process]) -> list[Leftover]:
    """The trees of compilers that no living build waits for, the largest first.

    From each compiler up through what stands between it and its build. Where the next parent is a process that
    takes orphans in, or is gone, the build is dead. Process 1 of a container may itself be the build, or a shell
    that started it: a child of its own session is taken for a living one.
    """
    table: Mapping[int, Process] = {p.pid: p for p in processes}
    tops: dict[int, Process] = {}
    for process in table.values():
        if process.name not in COMPILERS:
            continue
        top, seen = process, {process.pid}
        while (above := table.get(top.parent)) and above.pid not in seen:
            if above.pid == 1 or not (above.name in COMPILERS | _BETWEEN or above.one_command):
                break
            top = above
            seen.add(top.pid)
        if _is_orphan(top, table):
            tops[top.pid] = top
    trees = [Leftover(top=top, members=tuple(_tree(top, table))) for top in tops.values()]
    return sorted(trees, key=lambda tree: (-tree.rss, tree.top.pid))


def _is_orphan(process: Process, table: Mapping[int, Process]) -> bool:
    parent = table.get(process.parent)
    if parent is None:
        # 0 is a parent outside this pid namespace: `docker exec`, alive as far as can be seen from here.
        return process.parent != 0
    if parent.name in _ADOPTERS:
        return True
    return parent.pid == 1 and parent.session != process.session


def _tree(top: Process, table: Mapping[int, Process]) -> list[Process]:
    """`top` and its descendants, parents first."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        if process.pid != process.parent:
            children.setdefault(process.parent, []).append(process)
    members = [top]
    for member in members:
        members += sorted(children.get(member.pid, []), key=lambda p: p.pid)
        if len(members) > len(table):  # a table that was read while it changed may hold a ring
            break
    return members[: len(table)]
