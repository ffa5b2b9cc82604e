"""What a compile needs: memory over time, measured, and scaled to other architectures and threads.

The files in profiles/ have the format that `pybuild profile` writes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pybuild.curve import Curve, measured_curve, rounds, scale
from pybuild.errors import PybuildError
from pybuild.spec import BuildSpec
from pybuild.units import GIB, MIB

# A year, and a TiB: what is above that is no reading of a compile.
_Seconds = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]
_Mib = Annotated[float, Field(ge=0, le=1024**2, allow_inf_nan=False)]


class Phase(BaseModel):
    """A part of a compile in which one tool held most of the memory: from when to when, and the most that it held."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str
    start_s: _Seconds
    end_s: _Seconds
    peak_mib: _Mib


class Compile(BaseModel):
    """One source, compiled once and watched.

    `archs` are nvcc's names (sm_100), none for C++; `memory_mib` holds [seconds since the start, MiB] of the compiler
    and all its children; `peak_mib` is the highest of all samples, of which `memory_mib` may keep a part. `estimated`
    says from what, where the compile was not measured itself, and `measured` when, where and by which compiler, where
    that is not what the profile says of all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    archs: tuple[str, ...]
    nvcc_threads: int = 1
    wall_s: _Seconds
    cpu_s: _Seconds
    peak_mib: _Mib
    tool_peak_mib: dict[str, _Mib]
    memory_mib: tuple[tuple[_Seconds, _Mib], ...]
    object_bytes: int | None = None
    estimated: str | None = None
    measured: str | None = None
    phases: tuple[Phase, ...] = ()

    @property
    def key(self) -> tuple[str, tuple[str, ...], int]:
        """What was compiled: two compiles of one key are the same, measured twice."""
        return self.kernel, self.archs, self.nvcc_threads

    def curve(self) -> Curve:
        """The curve of this compile, with its true peak."""
        return measured_curve(self.memory_mib, self.wall_s, self.peak_mib)


class Profile(BaseModel):
    """The compiles of a package, in the order in which its build starts them, and where they were measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    source: str
    compiler: str
    machine: str
    sampled: str
    missing: str = ""
    order: str = ""
    compiles: tuple[Compile, ...] = Field(min_length=1)

    @property
    def name(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version}"

    @property
    def of_build(self) -> list[Compile]:
        """The compiles of a build for one architecture, in its order; from the others the factors of `scale` come."""
        return [compile_ for compile_ in self.compiles if compile_.archs in ((), ("sm_100",))]

    def curves(
        self, architectures: Collection[str], threads: int, kernels: Collection[str] | None = None
    ) -> list[tuple[str, Curve]]:
        """Name and curve of each compile of a build for `architectures` (sm_100, ...), in the build's order.

        `threads` is nvcc's --threads: how many architectures one compile works on at once. `kernels` selects some by
        name; None means all. A compile of C++ is the same for all architectures.
        """
        return [
            (compile_.kernel, scale(compile_.curve(), architectures, threads) if compile_.archs else compile_.curve())
            for compile_ in self.of_build
            if kernels is None or compile_.kernel in kernels
        ]


def busy_cores(architectures: Collection[str], threads: int) -> float:
    """How many cores one compile keeps busy, on average: CPU time by wall time.

    2.9 for four architectures with four threads; the measured compiles had 2.6 to 2.9.
    """
    found = rounds(architectures, threads)
    return sum(map(sum, found)) / sum(map(max, found)) if found else 1.0


def highest_peak(profile: Profile, architectures: int, threads: int) -> int:
    """Bytes that the hungriest compile of a build takes. In whole numbers, as nix/parallelism.nix has it."""
    at_once = max(1, min(architectures, threads))
    one = max(int(compile_.peak_mib) for compile_ in profile.of_build) * MIB
    return one * (12 + 11 * (at_once - 1)) // 12


CAUTIOUS = Curve((0.0, 10.0, 240.0), (0.0, 8 * GIB, 8 * GIB))
"""A compile of which nothing is known: 8 GiB for four minutes. More than any of one architecture that was measured."""


@functools.cache
def load_profile(package: str) -> Profile | None:
    """The profile that pybuild ships for a package; None where it has none. Raises PybuildError for one that is bad."""
    # A package's name (PEP 508), which is no pattern and no path.
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise PybuildError(f"not a package's name: {package!r}", "Write it as flash-attn.")
    folder = Path(__file__).parent / "profiles"
    paths = sorted(folder.glob(f"{package}-[0-9]*.json"))
    return read_profile(paths[-1]) if paths else None


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises PybuildError where it can't be read or is not one."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PybuildError(f"{path} can't be read: {error.strerror}", "Name a profile that exists.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PybuildError(f"{path} is no profile: {where}: {first['msg']}", "Make one: `pybuild profile`.") from error


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile, a compile a line, whole or not at all. Raises PybuildError where that can't be."""
    rows = [compile_.model_dump(mode="json", exclude_defaults=True) for compile_ in profile.compiles]
    head = json.dumps(profile.model_dump(mode="json", exclude={"compiles"}, exclude_defaults=True), indent=1)
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    draft = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(f'{head[:-2]},\n "compiles": [\n{lines}\n ]\n}}\n')
        draft.replace(path)
    except OSError as error:
        raise PybuildError(f"{path} can't be written: {error.strerror}", "Name a file that can be.") from error


@dataclass(frozen=True)
class Workload:
    """What a build compiles: name and curve of each compile, in the build's order.

    `busy` is how many cores each keeps busy. Without a `profile` their number and curves are a guess on the safe side.
    """

    package: str
    architectures: tuple[str, ...]
    threads: int
    busy: float
    profile: Profile | None
    compiles: tuple[tuple[str, Curve], ...]

    @property
    def curves(self) -> list[Curve]:
        """The curves alone."""
        return [curve for _, curve in self.compiles]


UNKNOWN_COMPILES = 100
"""How many compiles a package is taken to have of which nothing is known: more than flash-attn's 73."""


def workload(spec: BuildSpec, threads: int) -> Workload:
    """What a build of `spec` compiles, with nvcc's --threads."""
    profile = load_profile(spec.package)
    if profile is None:
        cautious = scale(CAUTIOUS, spec.architectures, threads)
        compiles = [(f"compile {number + 1}", cautious) for number in range(UNKNOWN_COMPILES)]
    else:
        wanted = _selected(spec)
        names = [compile_.kernel for compile_ in profile.of_build if wanted(compile_.kernel)]
        compiles = profile.curves(spec.architectures, threads, names)
    return Workload(
        package=spec.package,
        architectures=spec.architectures,
        threads=threads,
        busy=busy_cores(spec.architectures, threads),
        profile=profile,
        compiles=tuple(compiles),
    )


def _selected(spec: BuildSpec) -> Callable[[str], bool]:
    """Whether a selection has a compile, by flash-attn's names; what is no kernel is always compiled."""

    def wanted(name: str) -> bool:
        match = re.match(r"flash_(fwd|fwd_split|bwd)_hdim(\d+)_(fp16|bf16)", name)
        if not match:
            return True
        return (
            not (spec.forward_only and match[1] == "bwd")
            and (not spec.head_dims or int(match[2]) in spec.head_dims)
            and (not spec.dtypes or match[3] in spec.dtypes)
        )

    return wanted
