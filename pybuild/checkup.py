"""Reads from this machine what doctor judges. Everything that takes time is asked at the same time."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybuild.caches import CachedTorchWheel, cached_wheels, torch_wheels
from pybuild.capability import Capability, of_gpu
from pybuild.doctor import Case, Gpu, Toolkit
from pybuild.errors import PybuildError
from pybuild.hostpkgs import nvcc_version
from pybuild.leftovers import find_leftovers, read_processes
from pybuild.nix import FREE_NEEDED, find_nix
from pybuild.release import load_release
from pybuild.spec import RELEASES, BuildSpec
from pybuild.venv import Environment, read_environment
from pybuild.wheel import Artifact, missing_symbols


def missing_for(artifact: Artifact, environment: Environment | None) -> tuple[str, ...] | None:
    """The symbols of torch that a wheel needs and the torch of `environment` lacks; None where there is no torch."""
    if environment is None or not environment.torch_libraries:
        return None
    symbols = {symbol for library in artifact.libraries for symbol in library.torch_symbols}
    return missing_symbols(symbols, environment.torch_libraries)


def examine(spec: BuildSpec, environ: Mapping[str, str], *, for_build: bool = True) -> Case:
    """The case of a build of `spec` here; with `for_build` False only what the judgement of a wheel needs.

    Raises PybuildError where the release has no data.
    """
    releases = {name: load_release(name) for name in RELEASES}
    with ThreadPoolExecutor() as pool:
        gpus = pool.submit(_gpus, environ)
        environment = pool.submit(read_environment, environ)
        nix = pool.submit(_no_nix, environ) if for_build else None
        toolkits = pool.submit(_toolkits, environ) if for_build else None
        compilers = pool.submit(_compilers, environ) if for_build else None
        cached = pool.submit(_cached, environ, environment.result()) if for_build else None
        found, driver = gpus.result()
        return Case(
            spec=spec,
            cuda=releases[spec.release].cuda,
            torch=releases[spec.release].torch,
            releases={name: (release.cuda, release.torch) for name, release in releases.items()},
            environ=environ,
            gpus=found,
            driver=driver,
            environment=environment.result(),
            glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None,
            machine=platform.machine(),
            user=os.geteuid(),
            toolkits=toolkits.result() if toolkits else (),
            nvcc_on_path=shutil.which("nvcc", path=environ.get("PATH")),
            compilers=compilers.result() if compilers else {},
            no_nix=nix.result() if nix else None,
            cached=cached.result() if cached else (),
            leftovers=tuple(find_leftovers(read_processes())) if for_build else (),
            store_needs=FREE_NEEDED,
        )


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=1.5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _no_nix(environ: Mapping[str, str]) -> tuple[str, str] | None:
    try:
        find_nix(None, environ)
    except PybuildError as error:
        return error.what, error.remedy
    return None


def _compilers(environ: Mapping[str, str]) -> dict[str, str]:
    """Versions of g++ by command, the one that builds take first: CXX's, else g++, else one with a version's name."""
    names = [environ.get("CXX") or "g++", "g++", *(f"g++-{major}" for major in range(16, 8, -1))]
    found = {}
    for name in dict.fromkeys(names):
        if shutil.which(name, path=environ.get("PATH")) and (version := _output(name, "-dumpfullversion").strip()):
            found[name] = version
    return found


def _cached(environ: Mapping[str, str], environment: Environment | None) -> tuple[CachedTorchWheel, ...]:
    if environment is None or environment.torch is None:
        return ()
    major, minor = environment.version.split(".")[:2]
    return tuple(torch_wheels(cached_wheels(environ), f"cp{major}{minor}", environment.torch_libraries))


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    text = _output("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    gpus, driver = [], None
    for line in text.splitlines():
        name, capability, driver = (part.strip() for part in line.split(","))
        known = re.fullmatch(r"\d+\.\d", capability)
        gpus.append(Gpu(name, Capability.parse(capability) if known else of_gpu(name)))
    return tuple(gpus), driver


def _toolkits(environ: Mapping[str, str]) -> tuple[Toolkit, ...]:
    named = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    candidates = [*named, *([Path(on_path).parent.parent] if on_path else []), *Path("/usr/local").glob("cuda*")]
    found: dict[Path, Toolkit] = {}
    for folder in candidates:
        if not (folder / "include/cuda_runtime.h").exists() or not (version := nvcc_version(folder / "bin/nvcc")):
            continue
        real = folder.resolve()
        aliases = found[real].aliases if real in found else ()
        if folder != real:
            aliases = (*aliases, str(folder))
        found[real] = Toolkit(str(real), version[0], tuple(dict.fromkeys(aliases)))
    return tuple(found.values())
