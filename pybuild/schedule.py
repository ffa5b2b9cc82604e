"""Build a derivation for each kernel, as many at once as memory allows."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

import psutil

from pybuild.builders import Builder
from pybuild.events import Began, Ended, Evicted, Listener, Memory, Reading, Said
from pybuild.nixlog import strip_ansi
from pybuild.plan import Kernel, Plan

# Seconds between two looks at what runs.
INTERVAL = 0.5

# What compiles, by the name of the process; of several at once, the one with the most memory counts.
_TOOLS = {"cicc", "ptxas", "cudafe++", "cc1plus", "fatbinary", "nvlink"}


# What nix (2.8) says where the compiler failed on a builder. All else is taken for a builder that failed as a machine:
# the kernel is compiled elsewhere, and where that was wrong, it fails there.
_COMPILE_FAILED = r"build of '[^']*' on '[^']*' failed: builder for '[^']*' failed with exit code"


class Admission(Protocol):
    """Who may start now, and who has to stop."""

    def admit(self, now: float, running: Mapping[str, Reading], waiting: Sequence[str]) -> list[str]:
        """Those of `waiting` that start now. With nothing running, at least one."""

    def evict(self, now: float, running: Mapping[str, Reading]) -> list[str]:
        """Those of `running` that are to be stopped and asked for again later, since memory gets short."""


@dataclass(frozen=True)
class Failed:
    """A kernel whose derivation failed, and what nix said."""

    kernel: Kernel
    said: str


@dataclass
class _Running:
    """A kernel's nix, and what was seen of the processes below it; `builder` compiles it, or this machine."""

    kernel: Kernel
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    stack: contextlib.ExitStack
    builder: Builder | None = None
    cpu: dict[int, float] = field(default_factory=dict)
    peak: int = 0

    def look(self, now: float, processes: Mapping[int, list[psutil.Process]]) -> Reading:
        """Memory and tool now, from the machine's processes by parent.

        Nothing is seen of the builders of a nix daemon, which are not below us.
        """
        memory, tool, largest = 0, "", 0
        pending = [self.process.pid]
        while pending:
            for child in processes.get(pending.pop(), ()):
                rss, name, cpu = child.info["memory_info"].rss, child.info["name"], child.info["cpu_times"]
                pending.append(child.pid)
                memory += rss
                self.cpu[child.pid] = cpu.user + cpu.system
                if name in _TOOLS and rss > largest:
                    tool, largest = name, rss
        self.peak = max(self.peak, memory)
        return Reading(now, self.kernel.name, tool, memory)


def _by_parent() -> dict[int, list[psutil.Process]]:
    """Every process of the machine that can be looked at, by its parent: once a round, since it takes milliseconds."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid", "name", "memory_info", "cpu_times"]):
        if process.info["memory_info"] and process.info["cpu_times"]:
            found.setdefault(process.info["ppid"], []).append(process)
    return found


def realise(
    plan: Plan,
    kernels: Sequence[Kernel],
    admission: Admission,
    listener: Listener,
    *,
    builders: Sequence[Builder] = (),
    budget: Callable[[float], int] = lambda held: 0,
    clock: Callable[[], float] = time.monotonic,
    interval: float = INTERVAL,
) -> list[Failed]:
    """Build the kernels' derivations, each by a nix of its own; those that failed.

    What `admission` lets in is compiled here; of what waits, each of the `builders` gets as many as it has jobs. One
    that goes away gets no more, and what it had is compiled elsewhere. `budget` is only told to the listener: the bytes
    that compiles may hold together, from those they hold now.

    A failure ends no other kernel. Whatever ends this function (Ctrl-C, an error), every nix it started and all below
    them have ended when it returns; what was built until then stays in the store.
    """
    waiting = {kernel.name: kernel for kernel in kernels}
    running: dict[str, _Running] = {}
    failed: list[Failed] = []
    usable = list(builders)
    with contextlib.ExitStack() as everything:
        while waiting or running:
            now = clock()
            for name in [name for name, run in running.items() if run.process.poll() is not None]:
                run = running.pop(name)
                ok = run.process.returncode == 0
                said = _read(run.output)
                run.stack.close()
                if not ok and run.builder and not re.search(_COMPILE_FAILED, said):
                    waiting[name] = run.kernel
                    listener(Evicted(now, name))
                    if run.builder in usable:
                        usable.remove(run.builder)
                        listener(Said(now, f"{run.builder.url} gets no more kernels: {said.strip()}"))
                    continue
                if not ok:
                    failed.append(Failed(run.kernel, said))
                for line in [*_command(plan, run.kernel), *strip_ansi(said).splitlines()]:
                    listener(Said(now, f"{name}> {line}"))
                listener(Ended(now, name, ok, sum(run.cpu.values()), run.peak))
            processes = _by_parent() if running else {}
            readings = {name: run.look(now, processes) for name, run in running.items() if run.builder is None}
            for reading in readings.values():
                listener(reading)
            for name in admission.evict(now, readings):
                waiting[name] = running[name].kernel
                running.pop(name).stack.close()
                readings.pop(name)
                listener(Evicted(now, name))
            for name in admission.admit(now, readings, list(waiting)):
                running[name] = _start(plan, waiting.pop(name), everything)
                listener(Began(now, name))
            here = sum(run.builder is None for run in running.values())
            for builder in usable:
                free = builder.jobs - sum(run.builder == builder for run in running.values())
                for name in list(waiting)[: max(0, free)]:
                    running[name] = _start(plan, waiting.pop(name), everything, builder)
                    listener(Began(now, name))
                    listener(Said(now, f"{name}> on {builder.url}"))
            listener(_memory(now, readings.values(), budget, min(plan.cores - here, len(waiting))))
            if running:
                time.sleep(interval)
    return failed


def _memory(now: float, readings: Iterable[Reading], budget: Callable[[float], int], waiting: int) -> Memory:
    """The machine now. Those that wait though there are cores for them wait for memory."""
    used = sum(reading.memory for reading in readings)
    busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    return Memory(now, used, budget(used), psutil.virtual_memory().available, max(0, waiting), round(busy, 2))


def _start(plan: Plan, kernel: Kernel, everything: contextlib.ExitStack, builder: Builder | None = None) -> _Running:
    stack = everything.enter_context(contextlib.ExitStack())
    output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
    argv = plan.realise_argv(kernel.derivation, builder) if builder else plan.realise_argv(kernel.derivation)
    process = stack.enter_context(plan.nix.popen(argv, stdout=subprocess.DEVNULL, stderr=output))
    return _Running(kernel, process, output, stack, builder)


def _command(plan: Plan, kernel: Kernel) -> list[str]:
    """The compiler's arguments, as nix/extension/compile.py keeps them beside the object; empty where it has none."""
    try:
        arguments = json.loads((plan.nix.real_path(kernel.output) / f"{kernel.name}.json").read_bytes())
    except (OSError, ValueError):
        return []
    return [shlex.join(map(str, arguments))]


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")
