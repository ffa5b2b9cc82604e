"""Watch one compile: the resident memory of the compiler and all its children over time, per tool and per phase."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import psutil

from pybuild.errors import BuildError, PybuildError
from pybuild.nixlog import BuildLog
from pybuild.plan import Kernel, Plan
from pybuild.profile import Compile, Phase, Profile, read_profile, write_profile
from pybuild.units import MIB

INTERVAL = 0.2
"""Seconds between two looks at a compile."""

# Lines between the readings that are kept miss no other by more than this part of the peak.
_TOLERANCE = 0.01

# Processes that never hold as much are left out of the tools: shells, nvcc itself.
_LEAST = 20 * MIB

# Compiler drivers, by the names of their processes, which have 15 characters at most.
_DRIVER = re.compile(r"nvcc|(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+)(-[\d.]+)?|x86_64-linux-gn|aarch64-linux-g")

# nix-store's exit status where a second build of a derivation gave other bits: it was built all the same.
_OTHER_BITS = 104


@dataclass(frozen=True)
class Sample:
    """Seconds since the compile's start, bytes that each tool holds, CPU seconds until then."""

    time: float
    tools: dict[str, int]
    cpu: float

    @property
    def memory(self) -> int:
        """Bytes of all tools together."""
        return sum(self.tools.values())


@dataclass
class Watched:
    """A compile as it was seen: its compiler's program, what was read, and its seconds from start to end."""

    driver: Path
    samples: list[Sample] = field(default_factory=list)
    wall: float = 0.0

    @property
    def is_cuda(self) -> bool:
        """Whether it was nvcc's."""
        return self.driver.name == "nvcc"

    def compile(self, kernel: str, archs: Sequence[str], threads: int) -> Compile:
        """What was seen, as a profile has it. Raises BuildError where that was nothing."""
        if not any(sample.memory for sample in self.samples):
            raise BuildError(f"{kernel}: its compiler was over before it could be looked at")
        points = [(sample.time, sample.memory / MIB) for sample in self.samples]
        peaks: dict[str, int] = {}
        for sample in self.samples:
            for tool, held in sample.tools.items():
                peaks[tool] = max(peaks.get(tool, 0), held)
        return Compile(
            kernel=kernel,
            archs=tuple(archs),
            nvcc_threads=threads,
            wall_s=round(self.wall, 1),
            cpu_s=round(self.samples[-1].cpu, 1),
            peak_mib=max(round(held) for _, held in points),
            tool_peak_mib={tool: round(held / MIB) for tool, held in peaks.items() if held >= _LEAST},
            memory_mib=tuple((round(moment, 1), round(held)) for moment, held in thinned(points)),
            phases=tuple(phases(self.samples)),
        )


def phases(samples: Sequence[Sample]) -> list[Phase]:
    """The times in which one tool held most of the memory, one after the other."""
    found: list[tuple[str, float, float, int]] = []
    for sample in samples:
        tool, held = max(sample.tools.items(), key=lambda item: item[1], default=("", 0))
        if held < _LEAST:
            continue
        if found and found[-1][0] == tool:
            _, start, _, most = found.pop()
            found.append((tool, start, sample.time, max(most, held)))
        else:
            found.append((tool, found[-1][2] if found else 0.0, sample.time, held))
    return [
        Phase(tool=tool, start_s=round(start, 1), end_s=round(end, 1), peak_mib=round(most / MIB))
        for tool, start, end, most in found
    ]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of the points between which lines miss no other by more than 1 % of the peak (Douglas and Peucker)."""
    if len(points) < 3:
        return list(points)
    peak = max(range(len(points)), key=lambda index: points[index][1])
    kept = {0, peak, len(points) - 1}
    pending = list(zip(sorted(kept), sorted(kept)[1:], strict=False))
    while pending:
        first, last = pending.pop()
        (t0, m0), (t1, m1) = points[first], points[last]
        slope = (m1 - m0) / (t1 - t0) if t1 > t0 else 0.0
        missed = [abs(held - m0 - slope * (moment - t0)) for moment, held in points[first + 1 : last]]
        if missed and max(missed) > _TOLERANCE * points[peak][1]:
            at = first + 1 + missed.index(max(missed))
            kept.add(at)
            pending += [(first, at), (at, last)]
    return [points[index] for index in sorted(kept)]


def find_driver(source: str) -> psutil.Process | None:
    """The compiler that works on a source of this stem, whoever started it: nix's daemon perhaps."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if _drives(process.info["name"], process.info["cmdline"], source):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                # nvcc calls gcc with the same source.
                above = [parent for parent in process.parents() if _drives(parent.name(), parent.cmdline(), source)]
                return above[-1] if above else process
    return None


def _drives(name: str | None, argv: Sequence[str] | None, source: str) -> bool:
    named = any(Path(word).stem == source and word != source for word in argv or ())
    return named and _DRIVER.fullmatch(name or "") is not None


def _program(driver: psutil.Process) -> Path:
    """The program of the process' name: a binary, or a script; the name alone where others may not know more."""
    name, words = driver.name(), driver.cmdline()
    with contextlib.suppress(psutil.AccessDenied):
        words = [driver.exe(), *words]
    return next((Path(word) for word in words if Path(word).name == name), Path(name))


def look(driver: psutil.Process, start: float) -> Sample | None:
    """The compiler, which began at `start` (seconds since the epoch), and all below it now; None when it is over."""
    tools: dict[str, int] = {}
    cpu = 0.0
    try:
        processes = [driver, *driver.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    now = time.time()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            name, held, used = process.name(), process.memory_info().rss, process.cpu_times()
            tools[name] = tools.get(name, 0) + held
            # The times of a process that is over are in its parent's.
            cpu += used.user + used.system + used.children_user + used.children_system
    return Sample(max(0.0, now - start), tools, cpu) if tools else None


def watch(source: str, process: subprocess.Popen[bytes], interval: float = INTERVAL) -> Watched | None:
    """Watch the compiler of a source until it ends, or `process`, which starts it somewhere; None if it never ran."""
    while process.poll() is None:
        driver = find_driver(source)
        with contextlib.suppress(psutil.NoSuchProcess):
            if driver is not None:
                watched = Watched(_program(driver))
                _follow(driver, watched, interval)
                return watched
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(interval)
    return None


def _follow(driver: psutil.Process, watched: Watched, interval: float) -> None:
    start = driver.create_time()
    while (sample := look(driver, start)) is not None:
        watched.samples.append(sample)
        with contextlib.suppress(psutil.TimeoutExpired):
            driver.wait(interval)
            break
    watched.wall = time.time() - start


def compiler_version(driver: Path) -> str:
    """Name and version of a compiler, as it says itself; its name where it says nothing."""
    try:
        done = subprocess.run([driver, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return driver.name
    version = re.search(r"\bV\d[\d.]+", done.stdout)
    return f"{driver.name} {version[0]}" if version else (done.stdout.splitlines() or [driver.name])[0]


def measure_kernel(plan: Plan, kernel: Kernel, machine: str) -> Compile:
    """Compile one kernel by its derivation, anew if the store has it, and watch; `machine` says where that is.

    What the derivation is made from should be in the store. Raises BuildError where the compile fails or can't be seen.
    """
    there = plan.nix.is_valid([kernel.output])[kernel.output]
    argv = [*plan.realise_argv(kernel.derivation), *["--check"] * there]
    with tempfile.TemporaryFile() as output:
        with plan.nix.popen(argv, stdout=subprocess.DEVNULL, stderr=output) as process:
            watched = watch(kernel.name, process)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode not in (0, _OTHER_BITS):
        log = BuildLog()
        for line in said.splitlines():
            log.feed(line)
        raise plan.nix.explain_failure(log, doing=f"compiling {kernel.name}")
    if watched is None:
        raise BuildError(
            f"{kernel.name}: its compiler could not be seen",
            "Other users' processes may be hidden here (hidepid), or nix builds on another machine.",
        )
    archs = plan.spec.architectures if watched.is_cuda else ()
    found = plan.nix.real_path(kernel.output) / f"{kernel.name}.o"
    version = compiler_version(plan.nix.real_path(str(watched.driver)))
    return watched.compile(kernel.name, archs, max(1, len(archs))).model_copy(
        update={
            "object_bytes": found.stat().st_size if found.exists() else None,
            "measured": f"{date.today()}, {version}, {machine}",
        }
    )


def kept(path: Path, package: str, version: str) -> tuple[Compile, ...]:
    """The compiles that a profile has so far; none where there is no file. Raises PybuildError for anything else."""
    if not path.exists():
        return ()
    found = read_profile(path)
    if (found.package, found.version) != (package, version):
        raise PybuildError(f"{path} is a profile of {found.name}, not of {package} {version}", "Name another file.")
    return found.compiles


def keep(path: Path, facts: Mapping[str, str], compile_: Compile, order: Sequence[str]) -> None:
    """Write a compile into the profile at `path`, in place of an older one of its kind.

    `facts` are what the profile says of itself, `order` the build's compiles in their order. Raises PybuildError for a
    file that is something else, or can't be written.
    """
    rows = {row.key: row for row in (*kept(path, facts["package"], facts["version"]), compile_)}
    places = {name: place for place, name in enumerate(order)}
    # Those for one architecture first, as a build has them.
    compiles = sorted(rows.values(), key=lambda row: (len(row.archs) > 1, places.get(row.kernel, len(order)), row.key))
    write_profile(path, Profile(**facts, compiles=tuple(compiles)))
