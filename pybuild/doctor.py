"""What is wrong with this machine: findings, each with what was seen, why it breaks, and the command that mends it.

Every check is a pure function of a `Case`; what a case holds is read by others (cli/doctor.py puts it together).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict

from pybuild.capability import FLASH_ATTN, Capability, Code, runs_on, to_build_for
from pybuild.cuda import highest_gcc, oldest_driver
from pybuild.errors import PybuildError
from pybuild.facts.caches import CachedTorchWheel
from pybuild.facts.gpu import Gpu
from pybuild.facts.host import Host
from pybuild.facts.installed import Toolkit
from pybuild.facts.leftovers import Leftover
from pybuild.facts.venv import Environment
from pybuild.spec import BuildSpec
from pybuild.units import GIB, format_gib
from pybuild.wheel import other_torch, plain_name

Breaks = Literal["pip install", "pybuild build", "import", "run"]
"""What would fail: upstream's build by pip in the active environment, pybuild's own, `import` of the wheel there, or
the first kernel on a GPU here."""


class Finding(BaseModel):
    """One thing that is wrong. `breaks` is None where nothing fails and it is only worth knowing.

    `seen` and `why` are for people; `mend` is a command, one a line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    breaks: Breaks | None
    seen: str
    why: str
    mend: str


@dataclass(frozen=True)
class Forecast:
    """What a number of jobs would take: their peak in bytes, and how many jobs fit this machine."""

    peak: int
    fit: int


@dataclass(frozen=True)
class Case:
    """What doctor judges: a build, and the machine that is to make or use it.

    `cuda` and `torch` are the release's, `releases` those of all releases. `compilers` maps commands (`g++`,
    `g++-13`) to their versions, the one that builds use first; None where nobody looked. `forecast` tells what
    upstream's build takes, for its architectures (`100`), threads and jobs. `no_nix` is what finding nix said where
    it failed, and the remedy.
    """

    spec: BuildSpec
    host: Host
    cuda: str
    torch: str
    releases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None
    compilers: Mapping[str, str] | None = None
    glibc: str | None = None
    peak_of_one: int = 7 * GIB
    forecast: Callable[[tuple[str, ...], int, int], Forecast] | None = None
    store_needs: int = 0
    no_nix: tuple[str, str] | None = None
    leftovers: tuple[Leftover, ...] = ()
    cached: tuple[CachedTorchWheel, ...] = ()
    user: int = 0


def findings(case: Case) -> list[Finding]:
    """Everything that is wrong, what breaks something first."""
    found = [finding for check in CHECKS for finding in check(case)]
    return sorted(found, key=lambda f: f.breaks is None)


def would_fail(found: list[Finding]) -> bool:
    """Whether any of these breaks something."""
    return any(f.breaks for f in found)


# CUDA toolkit and torch


@dataclass(frozen=True)
class _Chosen:
    """The toolkit that torch would compile with, and why that one."""

    path: str
    because: str
    version: str | None


def _torchs_toolkit(case: Case) -> _Chosen | None:
    """CUDA_HOME, CUDA_PATH, the folder above nvcc on PATH, /usr/local/cuda: torch.utils.cpp_extension's order."""
    versions = _versions(case.host.toolkits)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if path := case.environ.get(name, "").rstrip("/"):
            return _Chosen(path, f"{name}={path}", versions.get(path))
    if case.host.nvcc_on_path:
        path = case.host.nvcc_on_path.rpartition("/")[0].rpartition("/")[0]
        return _Chosen(path, f"{case.host.nvcc_on_path} is on PATH", versions.get(path))
    if "/usr/local/cuda" in versions:
        return _Chosen("/usr/local/cuda", "/usr/local/cuda", versions["/usr/local/cuda"])
    return None


def _versions(toolkits: tuple[Toolkit, ...]) -> dict[str, str]:
    """The toolkits' versions by each of their names."""
    return {path: toolkit.version for toolkit in toolkits for path in (toolkit.path, *toolkit.aliases)}


def _listed(toolkits: tuple[Toolkit, ...]) -> str:
    return ", ".join(f"{t.path} ({t.version})" for t in toolkits) or "none"


def _use(toolkit: Toolkit) -> str:
    return f"export CUDA_HOME={toolkit.path} PATH={toolkit.path}/bin:$PATH"


def _build_with_pybuild(case: Case) -> str:
    """pybuild's own build, whose compiler is that of the release: the one of torch's CUDA, where there is one."""
    here = case.environment.torch_cuda if case.environment else None
    fitting = [name for name, (cuda, _) in case.releases.items() if cuda == here]
    return f"pybuild build {case.spec.package} --release {(fitting or [case.spec.release])[0]}"


def _best_toolkit(case: Case, cuda: str) -> Toolkit | None:
    """The toolkit here that fits torch's CUDA best: the same version, else the nearest of the same major."""
    major = [t for t in case.host.toolkits if t.version.split(".")[0] == cuda.split(".")[0]]
    return min(major, key=lambda t: abs(Version(t.version).minor - Version(cuda).minor), default=None)


def toolkit(case: Case) -> Iterator[Finding]:
    """The toolkit that torch would compile with: missing, not the one that is named, or of another CUDA."""
    environment = case.environment
    if environment is None or environment.torch is None:
        return
    if environment.torch_cuda is None:
        yield Finding(
            code="torch-without-cuda",
            breaks="pip install",
            seen=f"torch {environment.torch} in {environment.executable} is built without CUDA",
            why="flash-attn's setup.py asks torch for its CUDA version, and fails on None.",
            mend=f"uv pip install --reinstall --torch-backend={case.spec.release} torch=={case.torch}",
        )
        return
    chosen = _torchs_toolkit(case)
    best = _best_toolkit(case, environment.torch_cuda)
    mend = _use(best) if best else _build_with_pybuild(case)
    if chosen is None:
        yield Finding(
            code="nvcc-missing",
            breaks="pip install",
            seen=f"no nvcc: CUDA_HOME is not set, none is on PATH, none in /usr/local/cuda; toolkits found: "
            f"{_listed(case.host.toolkits)}",
            why="torch compiles .cu files with the nvcc of a CUDA toolkit; the wheels that torch brings have none.",
            mend=mend,
        )
    elif chosen.version is None:
        yield Finding(
            code="cuda-home-wrong",
            breaks="pip install",
            seen=f"{chosen.because}, so torch takes {chosen.path} for the CUDA toolkit; there is none in it; "
            f"toolkits found: {_listed(case.host.toolkits)}",
            why="torch runs CUDA_HOME/bin/nvcc and includes CUDA_HOME/include; it ends with "
            "'No such file or directory' or 'cuda_runtime.h: No such file or directory'.",
            mend=mend,
        )
    elif chosen.version.split(".")[0] != environment.torch_cuda.split(".")[0]:
        yield Finding(
            code="cuda-major",
            breaks="pip install",
            seen=f"{chosen.because} is CUDA {chosen.version}; torch {environment.torch} was compiled with CUDA "
            f"{environment.torch_cuda}; toolkits found: {_listed(case.host.toolkits)}",
            why=f"torch refuses: RuntimeError: The detected CUDA version ({chosen.version}) mismatches the version "
            f"that was used to compile PyTorch ({environment.torch_cuda}).",
            mend=mend,
        )
    elif chosen.version != environment.torch_cuda:
        exact = best is not None and best.version == environment.torch_cuda
        yield Finding(
            code="cuda-minor",
            breaks=None,
            seen=f"{chosen.because} is CUDA {chosen.version}; torch {environment.torch} was compiled with CUDA "
            f"{environment.torch_cuda}; toolkits found: {_listed(case.host.toolkits)}",
            why=f"torch warns and goes on: The detected CUDA version ({chosen.version}) has a minor version mismatch "
            f"with the version that was used to compile PyTorch ({environment.torch_cuda}).",
            mend=_use(best) if best and exact else _build_with_pybuild(case),
        )


def nvcc_of_cuda_home(case: Case) -> Iterator[Finding]:
    """Two compilers: the nvcc on PATH is not CUDA_HOME's."""
    versions = _versions(case.host.toolkits)
    home = (case.environ.get("CUDA_HOME") or case.environ.get("CUDA_PATH") or "").rstrip("/")
    if not home or home not in versions or not case.host.nvcc_on_path:
        return
    there = case.host.nvcc_on_path.rpartition("/")[0].rpartition("/")[0]
    if there in versions and versions[there] != versions[home]:
        yield Finding(
            code="two-nvcc",
            breaks=None,
            seen=f"CUDA_HOME={home} is CUDA {versions[home]}; {case.host.nvcc_on_path} on PATH is CUDA "
            f"{versions[there]}",
            why="torch compiles with CUDA_HOME's, CMake and you (nvcc --version) with PATH's.",
            mend=f"export PATH={home}/bin:$PATH",
        )


# GPUs


def _archs(case: Case) -> tuple[str, ...]:
    """FLASH_ATTN_CUDA_ARCHS as upstream's setup.py reads it: `80`, `100`."""
    return tuple((case.environ.get("FLASH_ATTN_CUDA_ARCHS") or "80;90;100;120").split(";"))


def _dotless(capability: str) -> str:
    return capability.replace(".", "")


def capability_of(gpu: Gpu) -> Capability | None:
    """A GPU's capability; None where it is not known, or no capability."""
    try:
        return Capability.parse(gpu.capability) if gpu.capability else None
    except PybuildError:
        return None


def _wanted(case: Case) -> list[str]:
    """What to build for the GPUs here; where there are none, what the build says."""
    here = [to_build_for(capability) for gpu in case.host.gpus if (capability := capability_of(gpu))]
    return sorted({c for c in here if c} or set(case.spec.capabilities), key=float)


def arch_list(case: Case) -> Iterator[Finding]:
    """TORCH_CUDA_ARCH_LIST, which flash-attn ignores; FLASH_ATTN_CUDA_ARCHS with what it drops."""
    if case.spec.package != "flash-attn":
        return
    flash = case.environ.get("FLASH_ATTN_CUDA_ARCHS")
    mend = f"export FLASH_ATTN_CUDA_ARCHS='{';'.join(map(_dotless, _wanted(case)))}'"
    if (ignored := case.environ.get("TORCH_CUDA_ARCH_LIST")) and not flash:
        yield Finding(
            code="arch-list-ignored",
            breaks=None,
            seen=f"TORCH_CUDA_ARCH_LIST={ignored}; FLASH_ATTN_CUDA_ARCHS is not set",
            why="flash-attn's setup.py never reads TORCH_CUDA_ARCH_LIST: it compiles for 80;90;100;120, which takes 5 "
            "to 8 times the CPU time, and 15 to 26 GiB a kernel.",
            mend=mend,
        )
    if flash is not None:
        unknown = [a for a in flash.split(";") if a not in map(_dotless, FLASH_ATTN)]
        if unknown:
            nothing = len(unknown) == len(flash.split(";"))
            yield Finding(
                code="arch-unknown",
                breaks="run" if nothing else None,
                seen=f"FLASH_ATTN_CUDA_ARCHS={flash}: {', '.join(map(repr, unknown))} is none of 80, 90, 100, 120",
                why="flash-attn's setup.py drops what it does not know without a word"
                + (
                    ", and then names no architecture at all: nvcc compiles for its own default, on which no kernel of "
                    "flash-attn runs."
                    if nothing
                    else "."
                ),
                mend=mend,
            )


def gpus(case: Case) -> Iterator[Finding]:
    """GPUs here that the build has no code for, and code that no GPU here runs."""
    if not case.host.gpus:
        return
    built = [Code(Capability.parse(c)) for c in case.spec.capabilities]
    names = ", ".join(case.spec.capabilities)
    for gpu in dict.fromkeys(case.host.gpus):
        capability = capability_of(gpu)
        if capability is None:
            yield Finding(
                code="gpu-unknown",
                breaks=None,
                seen=f"{gpu.name}: its compute capability is not known",
                why="Whether the build runs on it can't be told.",
                mend="nvidia-smi --query-gpu=name,compute_cap --format=csv",
            )
        elif not any(runs_on(code, capability) for code in built):
            fitting = to_build_for(capability)
            yield Finding(
                code="gpu-without-code",
                breaks="run",
                seen=f"{gpu.name} is {capability}; the build is for {names}",
                why=f"Code for {names} does not run on {capability} (a cubin runs on its own major version only): "
                "CUDA error: no kernel image is available for execution on the device."
                if fitting
                else "flash-attn 2 has code for 8.0 and newer, and none for this one.",
                mend=f"pybuild build {case.spec.package} --capability {fitting}"
                if fitting
                else "Use torch.nn.functional.scaled_dot_product_attention on it.",
            )
    known = [capability for gpu in case.host.gpus if (capability := capability_of(gpu))]
    for code in built:
        # With a GPU of unknown capability here, nothing can be said.
        if len(known) == len(case.host.gpus) and not any(runs_on(code, gpu) for gpu in known):
            have = ", ".join(sorted({f"{g.name} ({g.capability})" for g in case.host.gpus}))
            yield Finding(
                code="capability-without-gpu",
                breaks=None,
                seen=f"the build is for {code.capability}, which no GPU here runs; here: {have}",
                why="Its kernels take their share of time and memory, and serve other machines only.",
                mend=f"pybuild build {case.spec.package} " + " ".join(f"--capability {c}" for c in _wanted(case)),
            )


def toolkit_for_gpu(case: Case) -> Iterator[Finding]:
    """A toolkit that is too old for what is to be compiled: flash-attn leaves those architectures out silently."""
    chosen = _torchs_toolkit(case)
    if case.environment is None or case.environment.torch is None or chosen is None or chosen.version is None:
        return
    # setup.py of flash-attn 2.8.3: sm_90 from CUDA 11.8, sm_100 and sm_120 from 12.8.
    needs = {"8.0": "11.0", "9.0": "11.8", "10.0": "12.8", "12.0": "12.8"}
    dropped = [c for c in _wanted(case) if Version(chosen.version) < Version(needs[c])]
    if dropped and case.spec.package == "flash-attn":
        newer = [t for t in case.host.toolkits if Version(t.version) >= Version("12.8")]
        fitting = [t for t in newer if t.version.split(".")[0] == (case.environment.torch_cuda or "").split(".")[0]]
        yield Finding(
            code="toolkit-too-old",
            breaks="run",
            seen=f"{chosen.because} is CUDA {chosen.version}, which can't compile for {', '.join(dropped)}",
            why="flash-attn's setup.py leaves such an architecture out without a word; the wheel ends with "
            "'no kernel image is available for execution on the device'.",
            mend=_use(fitting[0]) if fitting else _build_with_pybuild(case),
        )


def driver(case: Case) -> Iterator[Finding]:
    """A driver that is too old for the release."""
    if not case.host.gpus or case.host.driver is None:
        return
    oldest = oldest_driver(case.cuda)
    if oldest is None or not is_older(case.host.driver, oldest):
        return
    other = (
        "cu128" if case.cuda.startswith("13.") and not is_older(case.host.driver, oldest_driver("12.8") or "") else None
    )
    branch = oldest.split(".")[0]
    yield Finding(
        code="driver-too-old",
        breaks="run",
        seen=f"driver {case.host.driver}; CUDA {case.cuda} (release {case.spec.release}) needs {oldest} or newer",
        why="CUDA error: CUDA driver version is insufficient for CUDA runtime version.",
        mend=(
            f"pybuild build {case.spec.package} --release {other}  # which this driver runs; or a newer driver:\n"
            if other
            else ""
        )
        + f"sudo apt-get install nvidia-driver-{branch}  # and reboot",
    )


def is_older(version: str, than: str) -> bool:
    """Whether a driver's version is below `than`; False where either is no version."""
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


# Host compiler, Python environment


def host_compiler(case: Case) -> Iterator[Finding]:
    """A C++ compiler outside the range of the nvcc that would call it."""
    environment = case.environment
    chosen = _torchs_toolkit(case)
    cuda = chosen.version if chosen and chosen.version else case.cuda
    if environment is None or environment.torch is None or case.compilers is None:
        return
    highest = highest_gcc(cuda)
    versions = {command: int(m[0]) for command, v in case.compilers.items() if (m := re.match(r"[0-9]{1,3}", v))}
    if case.compilers and not versions:
        return
    if not versions:
        yield Finding(
            code="compiler-missing",
            breaks="pip install",
            seen="no C++ compiler (g++) on PATH",
            why="nvcc gives the host's part of every file to g++.",
            mend="sudo apt-get install g++",
        )
        return
    command, version = next(iter(versions.items()))
    if 9 <= version <= highest:
        return
    fitting = [c for c, v in versions.items() if 9 <= v <= highest]
    if fitting:
        cxx = fitting[0]
        mend = f"export CC={cxx.replace('g++', 'gcc')} CXX={cxx} NVCC_PREPEND_FLAGS='-ccbin {cxx}'"
    else:
        mend = (
            f"sudo apt-get install g++-{highest - 1}\n"
            f"export CC=gcc-{highest - 1} CXX=g++-{highest - 1} NVCC_PREPEND_FLAGS='-ccbin g++-{highest - 1}'"
        )
    yield Finding(
        code="compiler-range",
        breaks="pip install",
        seen=f"{command} is gcc {case.compilers[command]}; nvcc of CUDA {cuda} takes gcc 9 to {highest}",
        why=f"nvcc refuses: #error -- unsupported GNU version! gcc versions later than {highest} are not supported!"
        if version > highest
        else "torch's headers need C++17 as gcc 9 and newer compile it.",
        mend=mend,
    )


BUILD_TOOLS = ("packaging", "wheel", "ninja", "psutil", "setuptools")
"""What setup.py of flash-attn 2.8.3 imports (psutil where MAX_JOBS is not set), and ninja, which torch runs."""


def build_tools(case: Case) -> Iterator[Finding]:
    """Packages that an environment needs which is to build without isolation."""
    environment = case.environment
    if environment is None or environment.torch is None or environment.packages is None:
        return
    missing = [name for name in BUILD_TOOLS if name not in environment.packages]
    if not missing:
        return
    hard = [name for name in missing if name != "ninja"]
    without_ninja = "without ninja torch compiles one file at a time, all 73 of them, on one core"
    yield Finding(
        code="build-tools-missing",
        breaks="pip install" if hard else None,
        seen=f"{environment.executable} has torch and no {', '.join(missing)}",
        why=(
            f"pip install --no-build-isolation fails: ModuleNotFoundError: No module named '{hard[0]}'"
            + (f"; {without_ninja}." if "ninja" in missing else ".")
            if hard
            else f"{without_ninja[0].upper()}{without_ninja[1:]}."
        ),
        mend=f"{_installer(environment)} {' '.join(missing)}",
    )


def _installer(environment: Environment) -> str:
    """How packages get into it: venvs that uv made have no pip."""
    if "pip" in (environment.packages or ()):
        return f"{shlex.quote(environment.executable)} -m pip install"
    return f"uv pip install --python {shlex.quote(environment.executable)}"


def torch_of_release(case: Case) -> Iterator[Finding]:
    """The wheel that pybuild would build is for another torch than the one that it is to be used with."""
    environment = case.environment
    if environment is None or environment.torch is None or environment.torch_cuda is None:
        return
    here = (environment.torch_cuda, environment.torch.split("+")[0])
    if here == (case.cuda, case.torch):
        return
    fitting = [name for name, release in case.releases.items() if release == here]
    yield Finding(
        code="torch-not-the-releases",
        breaks="import",
        seen=f"{environment.executable} has torch {environment.torch} (CUDA {environment.torch_cuda}); "
        f"release {case.spec.release} is torch {case.torch} with CUDA {case.cuda}",
        why="An extension runs with the torch that it was compiled for: with another it ends in "
        "'undefined symbol' at import, or worse, later.",
        mend=f"pybuild build {case.spec.package} --release {fitting[0]}"
        if fitting
        else f"uv pip install --python {shlex.quote(environment.executable)} --torch-backend={case.spec.release} "
        f"torch=={case.torch}",
    )


# Memory


def _threads(case: Case) -> int | None:
    """nvcc's threads in upstream's build; None where NVCC_THREADS is no number, which nvcc refuses itself."""
    text = case.environ.get("NVCC_THREADS") or "4"
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,3}", text, re.ASCII) else None


def upstream_jobs(cores: int, available: int) -> int:
    """The jobs that setup.py of flash-attn 2.8.3 takes where MAX_JOBS is not set; `available` in bytes."""
    return max(1, min(max(1, cores // 2), int(available / GIB / 9)))


def max_jobs(case: Case) -> Iterator[Finding]:
    """MAX_JOBS, or upstream's own choice where it is not set, higher than what fits."""
    environment, host, threads = case.environment, case.host, _threads(case)
    if case.forecast is None or threads is None or case.spec.package != "flash-attn":
        return
    text = case.environ.get("MAX_JOBS", "")
    if not text and (environment is None or environment.torch is None):
        return
    if text and not re.fullmatch(r"[1-9][0-9]{0,5}", text, re.ASCII):
        yield Finding(
            code="max-jobs-not-a-number",
            breaks="pip install",
            seen=f"MAX_JOBS={text}",
            why="torch passes it to ninja -j as it is.",
            mend="unset MAX_JOBS",
        )
        return
    archs = _archs(case)
    free = host.memory.available if host.memory.mem_available is None else host.memory.mem_available
    jobs = int(text) if text else upstream_jobs(host.cores.online or host.cores.usable, free)
    forecast = case.forecast(archs, threads, jobs)
    if forecast.peak <= host.memory.available:
        return
    which = f"MAX_JOBS={jobs}" if text else f"MAX_JOBS is not set; flash-attn's setup.py takes {jobs} on this machine"
    wanted = tuple(map(_dotless, _wanted(case)))
    narrow = case.forecast(wanted, 1, jobs)
    yield Finding(
        code="max-jobs",
        breaks="pip install",
        seen=f"{which}, for architectures {';'.join(archs)} with NVCC_THREADS={threads}: {format_gib(forecast.peak)} "
        f"at the peak, and {format_gib(host.memory.available)} are available; "
        f"{forecast.fit if forecast.fit < jobs else 'not even one'} would fit",
        why="The jobs' spikes of memory come together; the kernel kills a compiler, and the build ends with it.",
        mend=f"export FLASH_ATTN_CUDA_ARCHS='{';'.join(wanted)}' NVCC_THREADS=1 MAX_JOBS={narrow.fit}\n"
        f"pybuild run -- pip install --no-build-isolation {case.spec.package}  # with or without that, never too many",
    )


_ADD_SWAP = (
    "sudo fallocate -l 16G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"
)


def memory(case: Case) -> Iterator[Finding]:
    """Settings that turn a spike into a freeze, or into a refusal."""
    memory = case.host.memory
    if memory.available < case.peak_of_one and not memory.grows and memory.overcommit != 2:
        yield Finding(
            code="memory",
            breaks="pybuild build",
            seen=f"{format_gib(memory.available)} of memory are available ({memory.because or 'no /proc/meminfo'}); "
            f"one compile takes up to {format_gib(case.peak_of_one)}",
            why="The kernel kills the compiler, even if it runs alone.",
            mend=f"pybuild build {case.spec.package} --head-dim 64 --forward-only  # the smaller kernels, if they do\n"
            + (f"Raise the limit {memory.because.split(' is ')[0]}." if memory.limits else _ADD_SWAP),
        )
    if memory.overcommit == 2 and memory.commit_left is not None and memory.commit_left < case.peak_of_one:
        yield Finding(
            code="overcommit-strict",
            breaks="pybuild build",
            seen=f"vm.overcommit_memory is 2, and {format_gib(memory.commit_left)} may still be promised; "
            f"one compile takes {format_gib(case.peak_of_one)}",
            why="The kernel refuses memory that is free: 'Cannot allocate memory', 'std::bad_alloc' in cicc.",
            mend="sudo sysctl vm.overcommit_memory=0",
        )
    if memory.overcommit == 1 and memory.swap_total == 0 and not memory.limits:
        yield Finding(
            code="overcommit-always",
            breaks=None,
            seen="vm.overcommit_memory is 1 and there is no swap",
            why="Every allocation is granted; a spike ends in the OOM killer, which may choose your desktop or sshd.",
            mend="sudo sysctl vm.overcommit_memory=0",
        )
    elif memory.swap_total == 0 and not memory.limits:
        yield Finding(
            code="no-swap",
            breaks=None,
            seen="there is no swap, and no memory limit on this session",
            why="A build that runs out first drops the pages of every running program and reads them again from disk: "
            "the machine freezes for minutes before the OOM killer comes. pybuild keeps a reserve; pip does not.",
            mend=_ADD_SWAP,
        )


def leftovers(case: Case) -> Iterator[Finding]:
    """Compilers that a dead build left behind."""
    if not case.leftovers:
        return
    members = [p for left in case.leftovers for p in left.members]
    compilers = [p for left in case.leftovers for p in left.compilers]
    held = format_gib(sum(p.rss for p in members))
    others = any(p.user != case.user for p in members)
    names = sorted({p.name for p in compilers})
    # Parents first: ninja would start the next compile.
    pids = " ".join(str(p.pid) for p in members)
    largest = max(compilers, key=lambda p: p.rss)
    yield Finding(
        code="leftover-compilers",
        breaks=None,
        seen=f"{len(compilers)} compiler processes ({', '.join(names)}) whose build is gone hold {held}; "
        f"the largest, {largest.name} {largest.pid}, {format_gib(largest.rss)}",
        why="They take the memory and the cores that the next build counts on. Their parent has ended: nobody waits "
        "for what they compile.",
        mend=f"{'sudo ' if others and case.user else ''}kill {pids}",
    )


# Disk and nix


def disk(case: Case) -> Iterator[Finding]:
    """Too little space where the store is."""
    disk = case.host.disk
    if disk is not None and disk.free < case.store_needs:
        yield Finding(
            code="disk",
            breaks="pybuild build",
            seen=f"{format_gib(disk.free)} free where the store is ({disk.path}); a build needs "
            f"{format_gib(case.store_needs)}",
            why="The pinned wheels, packed and unpacked, and the objects: No space left on device.",
            mend="nix-store --gc",
        )


def nix(case: Case) -> Iterator[Finding]:
    """No nix, a nix that is too old, or one that cannot build here."""
    if case.no_nix:
        what, remedy = case.no_nix
        yield Finding(
            code="nix",
            breaks="pybuild build",
            seen=what,
            why="pybuild builds with nix, in a sandbox.",
            mend=remedy,
        )


# Wheels


def cached_wheels(case: Case) -> Iterator[Finding]:
    """A wheel in pip's or uv's cache that was built for another torch than the one here."""
    environment = case.environment
    if environment is None or environment.torch is None:
        return
    for cached in case.cached:
        reason, breaks = _stale(cached, environment.torch, environment.torch_cuda)
        if not reason:
            continue
        name = canonicalize_name(cached.artifact.name or "")
        pip = cached.wheel.tool == "pip"
        yield Finding(
            code="cached-wheel",
            breaks="import" if breaks else None,
            seen=f"{cached.wheel.tool} has {cached.wheel.file_name} in its cache ({cached.wheel.path}); {reason}",
            why=f"`{'pip' if pip else 'uv pip'} install {name}` takes it from there, by name and version alone, and "
            "the import ends with 'undefined symbol'.",
            mend=f"pip cache remove {name.replace('-', '_')}" if pip else f"uv cache clean {name}",
        )


def _stale(cached: CachedTorchWheel, torch: str, torch_cuda: str | None) -> tuple[str, bool]:
    """Why a cached wheel is for another torch than the one here (empty: it is not), and whether it is sure to fail."""
    if cached.missing:
        return f"it needs {plain_name(cached.missing[0])}, which torch {torch} here does not have", True
    if said := other_torch(cached.artifact, torch, torch_cuda):
        return said, cached.missing is None
    if cached.missing is None and cached.older_than_torch:
        return f"it is older than the installation of torch {torch} here", False
    return "", False


CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    toolkit,
    nvcc_of_cuda_home,
    toolkit_for_gpu,
    arch_list,
    gpus,
    driver,
    host_compiler,
    build_tools,
    torch_of_release,
    max_jobs,
    leftovers,
    memory,
    disk,
    nix,
    cached_wheels,
)
