"""The host's facts for nix/hostpkgs: which compiler, which Python, and the paths that the sandbox gets.

What is found here becomes part of the derivations, so another compiler or Python gives other store paths.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from pybuild.errors import PybuildError
from pybuild.spec import DTYPES, HEAD_DIMS, PYTHONS, BuildSpec

# Host compilers that nvcc takes, lowest and highest major version of gcc: the table "Host Compiler Support Policy" of
# NVIDIA's CUDA installation guides for 12.8 and 13.0. The lowest is torch's: its headers need C++17.
GCC_RANGE = {"12.8": (9, 14), "13.0": (9, 15)}
CUDA_OF_RELEASE = {"cu128": "12.8", "cu130": "13.0"}

# The system's programs and libraries. On a merged-usr system all but the first are links into it.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Program(_Facts):
    """A program of the host: where it is, and the version that it prints."""

    path: Path
    version: str


class Python(Program):
    """An interpreter: the real one behind links and virtual environments. `prefix` is its installation."""

    prefix: Path


class Cuda(_Facts):
    """A toolkit: its folder, its release (`12.8`), and nvcc's full version (`12.8.93`)."""

    path: Path
    version: str
    nvcc: str


class Choice(_Facts):
    """What the user asked for: read by flake.nix as the attribute `pybuild` of the package set.

    `selection` holds the arguments of nix/flash-attn/default.nix that differ from its defaults, `python` a version
    (`3.12`) where one was asked for: hostpkgs has one Python, and needs no telling.
    """

    release: str
    cuda_capabilities: tuple[str, ...]
    selection: dict[str, object]
    python: str | None = None


class Facts(_Facts):
    """facts.json of nix/hostpkgs.

    `path` is PATH inside a build, `glibc` the C library's version, `sandbox_paths` all of this machine that a build
    sees.
    """

    bash: Path
    path: tuple[Path, ...]
    cc: Program
    cxx: Program
    glibc: str
    python: Python
    cuda_home: Cuda | None
    sandbox_paths: tuple[Path, ...]
    selection: Choice


def choice_of(spec: BuildSpec) -> Choice:
    """The spec as flake.nix reads it."""
    selection: dict[str, object] = {}
    if set(spec.head_dims) not in (set(), set(HEAD_DIMS)):
        selection["headDims"] = spec.head_dims
    if set(spec.dtypes) not in (set(), set(DTYPES)):
        selection["dtypes"] = spec.dtypes
    if spec.forward_only:
        selection["backward"] = False
    return Choice(release=spec.release, cuda_capabilities=spec.capabilities, selection=selection, python=spec.python)


def read_facts(spec: BuildSpec, environ: Mapping[str, str], *, cuda_home: Path | None = None) -> Facts:
    """The facts of this machine for `spec`. Raises PybuildError for what is missing or does not fit."""
    cuda = CUDA_OF_RELEASE[spec.release]
    bash = _program("bash", environ)
    if bash is None:
        raise PybuildError("no bash on PATH", "Install it: apt-get install bash")
    python = find_python(spec.python, environ)
    cc, cxx = find_compiler(cuda, environ)
    toolkit = find_cuda(cuda, environ, cuda_home)
    if spec.release == "cu128" and toolkit is None:
        raise PybuildError(
            "release cu128 needs the CUDA 12.8 toolkit, and this machine has none: NVIDIA publishes no nvcc 12.8 as a "
            "wheel",
            "Three ways out: --package-set nixpkgs, which fetches it; install the CUDA 12.8 toolkit "
            "(/usr/local/cuda-12.8, or name it with --cuda-home); or --release cu130, whose compiler is a wheel.",
        )
    roots = [*map(Path, _SYSTEM), python.prefix, cc.path.parent.parent, cxx.path.parent.parent]
    if toolkit:
        roots.append(toolkit.path)
    return Facts(
        bash=bash,
        path=tuple(dict.fromkeys([cxx.path.parent, cc.path.parent, Path("/usr/bin"), Path("/bin")])),
        cc=cc,
        cxx=cxx,
        glibc=os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
        python=python,
        cuda_home=toolkit if spec.release == "cu128" else None,
        sandbox_paths=tuple(_outermost(path for path in roots if path.exists())),
        selection=choice_of(spec).model_copy(update={"python": None}),
    )


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths without those that lie inside another of them, in order."""
    wanted = list(dict.fromkeys(paths))
    return [p for p in wanted if not any(p != q and p.is_relative_to(q) for q in wanted)]


def _program(name: str, environ: Mapping[str, str]) -> Path | None:
    found = shutil.which(name, path=environ.get("PATH"))
    return Path(found) if found else None


def _output(*argv: str | Path) -> str:
    """Standard output of a short command; empty where it can't be run or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# Python


_ASK_PYTHON = """
import json, os, sys, sysconfig
include = sysconfig.get_path("include", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
print(json.dumps({
    "path": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "version": ".".join(map(str, sys.version_info[:3])),
    "prefix": sys.base_prefix,
    "headers": os.path.exists(os.path.join(include, "Python.h")),
}))
"""


def find_python(version: str | None, environ: Mapping[str, str]) -> Python:
    """The host's Python `version` (`3.12`), with its headers.

    Without a version: the active virtual environment's, else the one that runs pybuild, else python3 on PATH. Raises
    PybuildError where there is none, or none with Python.h.
    """
    without_headers = None
    for candidate in _pythons(version, environ):
        answer = _output(candidate, "-I", "-c", _ASK_PYTHON)
        if not answer:
            continue
        found = json.loads(answer)
        major_minor = found["version"].rpartition(".")[0]
        if major_minor not in PYTHONS or version not in (None, major_minor):
            continue
        if not found.pop("headers"):
            without_headers = without_headers or found
            continue
        return Python(**found)
    if without_headers:
        major_minor = without_headers["version"].rpartition(".")[0]
        raise PybuildError(
            f"{without_headers['path']} has no headers (Python.h), which an extension is compiled with",
            f"Install them: apt-get install python{major_minor}-dev",
        )
    raise PybuildError(
        f"no Python {version or ' or '.join(PYTHONS)} found on this machine",
        "Looked on PATH and among pyenv's and uv's. Install it (apt-get install python3-dev, or uv python install "
        f"{version or PYTHONS[-1]}), or choose another with --python.",
    )


def _pythons(version: str | None, environ: Mapping[str, str]) -> Iterator[Path]:
    """Interpreters worth asking, best first."""
    if venv := environ.get("VIRTUAL_ENV"):
        yield Path(venv) / "bin/python"
    yield Path(sys.executable)
    names = [f"python{version}", "python3"] if version else ["python3", *(f"python{v}" for v in reversed(PYTHONS))]
    for name in names:
        for folder in environ.get("PATH", "").split(os.pathsep):
            if (candidate := Path(folder) / name).is_file():
                yield candidate
    home = Path(environ.get("HOME", "/nonexistent"))
    wanted = f"{version}.*" if version else "3.*"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local/share")
    for root, pattern in [
        (Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions", f"{wanted}/bin/python3"),
        (data / "uv/python", f"cpython-{wanted}-linux-x86_64-gnu/bin/python3"),
    ]:
        yield from sorted(root.glob(pattern), reverse=True)


# C++ compiler


def find_compiler(cuda: str, environ: Mapping[str, str]) -> tuple[Program, Program]:
    """gcc and g++ of one version that nvcc of CUDA `cuda` takes: PATH's own first, then those with a version's name.

    Raises PybuildError where there is none, naming what was found and the range accepted.
    """
    lowest, highest = GCC_RANGE[cuda]
    seen: list[str] = []
    for suffix in ["", *(f"-{major}" for major in range(highest, lowest - 1, -1))]:
        cxx = _program(f"g++{suffix}", environ)
        cc = _program(f"gcc{suffix}", environ)
        if not cxx or not cc or "ccache" in (cxx.resolve().name, cc.resolve().name):
            continue
        version = _output(cxx, "-dumpfullversion") or "0"
        seen.append(f"{cxx} is {version}")
        if lowest <= int(version.partition(".")[0]) <= highest and _output(cc, "-dumpfullversion") == version:
            return Program(path=cc, version=_build_of(cc)), Program(path=cxx, version=_build_of(cxx))
    accepted = f"CUDA {cuda} takes gcc {lowest} to {highest}"
    if not seen:
        raise PybuildError(f"no C++ compiler (g++) on PATH; {accepted}", "Install one: apt-get install g++")
    raise PybuildError(
        f"no C++ compiler that CUDA {cuda} takes: {'; '.join(seen)}",
        f"{accepted}. Install one of them beside it: apt-get install g++-{highest - 1}",
    )


def _build_of(compiler: Path) -> str:
    """The version with the distribution's revision, as `12.2.0-14+deb12u1`: two builds of one version differ."""
    first = _output(compiler, "--version").partition("\n")[0]
    match = re.search(r"\(\w+ (\d[\w.+~-]*)\)", first) or re.search(r"(\d+\.\d+\.\d+)", first)
    return match[1] if match else first


# CUDA toolkit


@functools.cache
def nvcc_version(nvcc: Path) -> tuple[str, str] | None:
    """What `nvcc` prints as its release and its version, such as `("12.8", "12.8.93")`; None if it prints none."""
    match = re.search(r"release (\d+\.\d+), V(\d+\.\d+\.\d+)", _output(nvcc, "--version"))
    return (match[1], match[2]) if match else None


def find_cuda(cuda: str, environ: Mapping[str, str], explicit: Path | None = None) -> Cuda | None:
    """A toolkit whose nvcc says that it is exactly CUDA `cuda`; None where there is none.

    Looks at --cuda-home, which has to fit, then at CUDA_HOME and /usr/local. nvcc is asked: a name proves nothing.
    """
    if explicit is not None:
        found = nvcc_version(explicit / "bin/nvcc")
        if found is None or found[0] != cuda:
            is_what = f"has nvcc {found[1]}" if found else "has no nvcc that runs"
            raise PybuildError(
                f"--cuda-home {explicit}: {is_what}, and CUDA {cuda} is needed",
                f"Name the folder of a CUDA {cuda} toolkit, the one whose bin/nvcc --version says {cuda}.",
            )
        return Cuda(path=explicit.resolve(), version=cuda, nvcc=found[1])
    candidates = [Path(environ["CUDA_HOME"])] if environ.get("CUDA_HOME") else []
    candidates += [Path(f"/usr/local/cuda-{cuda}"), Path("/usr/local/cuda")]
    for folder in candidates:
        if (found := nvcc_version(folder / "bin/nvcc")) and found[0] == cuda:
            return Cuda(path=folder.resolve(), version=cuda, nvcc=found[1])
    return None
