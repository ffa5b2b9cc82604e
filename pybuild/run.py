"""Any build that is not Nix's, under the gate: pip, uv, CMake, torch's JIT."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

import pybuild.launch
from pybuild.curve import Curve
from pybuild.errors import PybuildError
from pybuild.follow import following
from pybuild.gate import gated
from pybuild.learn import Memory, place_of
from pybuild.profile import load_profile

# flash-attn 2.8.3's setup.py: what it compiles for unless FLASH_ATTN_CUDA_ARCHS says otherwise.
_FLASH_ATTN_DEFAULT = ("80", "90", "100", "120")

# pip install, uv add, pip wheel: a requirement's name and version after one of these words.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*?)(?:\[[^\]]*\])?(?:==([A-Za-z0-9.+!]+))?")
_VERBS = frozenset({"install", "wheel", "add", "download"})


@dataclass(frozen=True)
class Prepared:
    """A command with the environment it is to have; `said` are what was set and why, a line each."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: int
    curves: Mapping[str, Curve]
    memory: Memory
    said: tuple[str, ...]


def package_of(command: Sequence[str]) -> tuple[str, str]:
    """Name and version of the package that a command installs, as far as its words tell; else the folder's name."""
    verb = next((at for at, word in enumerate(command) if word in _VERBS), len(command))
    for word in command[verb + 1 :]:
        match = _REQUIREMENT.fullmatch(word)
        if match and not Path(word).exists():
            return match[1].lower().replace("_", "-"), match[2] or ""
    return Path.cwd().name, ""


def architectures_of(environ: Mapping[str, str], gpus: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """What to compile for, as flash-attn writes it (`90`), and what says so; empty where nothing does.

    TORCH_CUDA_ARCH_LIST is what people set, and flash-attn does not read it. `gpus` are capabilities, `9.0`.
    """
    from pybuild.capability import Capability, to_build_for

    asked = re.findall(r"(\d+\.\d)[af]?(?:\+PTX)?", environ.get("TORCH_CUDA_ARCH_LIST", ""))
    offered = [to_build_for(Capability.parse(text)) for text in asked or gpus]
    found = tuple(dict.fromkeys(capability.replace(".", "") for capability in offered if capability))
    if not found:
        return (), ""
    return found, "as TORCH_CUDA_ARCH_LIST says" if asked else "this machine's GPU"


def wrapper(compiler: str) -> Path:
    """A program of the compiler's name that starts it through the launcher.

    It stays where it is: a build folder that CMake made with it works without pybuild as well, since the launcher runs
    the compiler at once where there is no gate. Raises PybuildError where it can't be written.
    """
    command = [sys.executable, "-I", "-S", str(Path(pybuild.launch.__file__).absolute()), *shlex.split(compiler)]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    folder = platformdirs.user_cache_path("pybuild") / "compilers" / hashlib.sha256(text.encode()).hexdigest()[:16]
    path = folder / Path(shlex.split(compiler)[-1]).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{os.getpid()}"
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(path)
    except OSError as error:
        raise PybuildError(
            f"{path} can't be written: {error.strerror}", "Set XDG_CACHE_HOME to a folder of yours."
        ) from (error)
    return path


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """The nvcc that torch takes: PYTORCH_NVCC, or that of CUDA_HOME or CUDA_PATH, on PATH, or in /usr/local/cuda."""
    if given := environ.get("PYTORCH_NVCC"):
        return given
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        return f"{home}/bin/nvcc"
    return shutil.which("nvcc", path=environ.get("PATH")) or shutil.which("/usr/local/cuda/bin/nvcc")


def nvcc_version(nvcc: str | None) -> str:
    """`nvcc13.0` of what nvcc --version says; empty where there is none."""
    try:
        said = subprocess.run([*shlex.split(nvcc), "--version"], capture_output=True, text=True).stdout if nvcc else ""
    except OSError:
        said = ""
    match = re.search(r"release (\d+\.\d+)", said)
    return f"nvcc{match[1]}" if match else ""


def prepare(command: Sequence[str], environ: Mapping[str, str], cores: int, gpus: Sequence[str]) -> Prepared:
    """Set what puts a command's compilers under the gate, and the knobs of packages that are known.

    What the user has set stays: MAX_JOBS bounds the compiles at once, compilers and launchers are wrapped.
    """
    added: dict[str, str] = {}
    said = []
    jobs = environ.get("MAX_JOBS", "")
    if jobs.isdecimal() and int(jobs):
        cores = min(cores, int(jobs))
    nvcc = find_nvcc(environ)
    added["MAX_JOBS"] = str(cores)
    if nvcc:
        added["PYTORCH_NVCC"] = str(wrapper(nvcc))
    cxx = environ.get("CXX") or shutil.which("c++", path=environ.get("PATH"))
    if cxx:
        added["CXX"] = str(wrapper(cxx))
    # A list, as CMake writes it; it goes into the build folder, where it works without pybuild as well.
    launcher = ";".join([sys.executable, "-I", "-S", str(Path(pybuild.launch.__file__).absolute())])
    for name in ("CMAKE_CUDA_COMPILER_LAUNCHER", "CMAKE_CXX_COMPILER_LAUNCHER"):
        added[name] = f"{launcher};{environ[name]}" if environ.get(name) else launcher
    if not environ.get("CMAKE_BUILD_PARALLEL_LEVEL"):
        added["CMAKE_BUILD_PARALLEL_LEVEL"] = str(cores)
    said.append(f"{cores} compiles at once at most, and no more than memory holds; {', '.join(sorted(added))} set")

    if not environ.get("NVCC_THREADS"):
        added["NVCC_THREADS"] = "1"
        said.append("NVCC_THREADS=1: an architecture at a time in each compile, since the gate fills the cores")
    architectures = tuple(environ.get("FLASH_ATTN_CUDA_ARCHS", "").split(";"))
    if architectures == ("",):
        architectures, because = architectures_of(environ, gpus)
        if architectures:
            added["FLASH_ATTN_CUDA_ARCHS"] = ";".join(architectures)
            said.append(f"FLASH_ATTN_CUDA_ARCHS={';'.join(architectures)}: {because}")
    package, version = package_of(command)
    memory = Memory(place_of(package, version, architectures, nvcc_version(nvcc)))
    threads = added.get("NVCC_THREADS") or environ["NVCC_THREADS"]
    profile = load_profile("flash-attn")
    curves: dict[str, Curve] = {}
    if profile:
        names = [f"sm_{a}" for a in architectures or _FLASH_ATTN_DEFAULT]
        curves.update(profile.curves(names, int(threads) if threads.isdecimal() else 1))
    return Prepared(
        command=tuple(command),
        environ={**environ, **added},
        cores=cores,
        curves={**curves, **memory.curves},
        memory=memory,
        said=tuple(said),
    )


def run(prepared: Prepared, *, budget: int | None = None) -> int:
    """Run it under the gate, shown and recorded; its exit status. Raises PybuildError where it can't be started."""
    package, _ = package_of(prepared.command)
    try:
        with following(package, ["pybuild", *sys.argv[1:]], prepared.cores) as tell:
            status = gated(
                prepared.command,
                prepared.environ,
                prepared.curves,
                prepared.cores,
                budget=budget,
                learn=prepared.memory.learn,
                tell=tell,
            )
            tell("over", status)
            return status
    except OSError as error:
        what = f"{prepared.command[0]} can't be started: {error.strerror}"
        raise PybuildError(what, "Check its name, and that it is on PATH.") from error
