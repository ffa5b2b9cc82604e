"""Reads from this machine what doctor judges. Everything that takes time is asked at the same time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybuild.capability import FLASH_ATTN
from pybuild.doctor import Case, Forecast
from pybuild.errors import PybuildError
from pybuild.facts.caches import CachedTorchWheel, cached_wheels, torch_wheels
from pybuild.facts.host import Host, read_host
from pybuild.facts.leftovers import find_leftovers, read_processes
from pybuild.facts.venv import Environment, read_environment
from pybuild.nix import FREE_NEEDED, GET_NIX, OLDEST, find_nix
from pybuild.profile import workload
from pybuild.recommend import nvcc_threads, recommend, reserve_of
from pybuild.release import load_release
from pybuild.simulate import simulate
from pybuild.spec import RELEASES, BuildSpec
from pybuild.wheel import Artifact, missing_symbols

_PATIENCE = 10.0
"""Seconds that a program gets to answer. It answers in 0.02; on a machine that swaps, waiting beats a wrong finding."""


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
        host = pool.submit(_host, environ)
        environment = pool.submit(read_environment, environ)
        nix = pool.submit(_no_nix, environ) if for_build else None
        compilers = pool.submit(_compilers, environ) if for_build else None
        cached = pool.submit(_cached, environ, environment.result()) if for_build else None
        return Case(
            spec=spec,
            host=host.result(),
            cuda=releases[spec.release].cuda,
            torch=releases[spec.release].torch,
            releases={name: (release.cuda, release.torch) for name, release in releases.items()},
            environ=environ,
            environment=environment.result(),
            compilers=compilers.result() if compilers else None,
            glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None,
            store_needs=FREE_NEEDED,
            peak_of_one=_peak_of_one(spec),
            forecast=lambda archs, threads, jobs: forecast(host.result(), archs, threads, jobs),
            no_nix=nix.result() if nix else None,
            leftovers=tuple(find_leftovers(read_processes())) if for_build else (),
            cached=cached.result() if cached else (),
            user=os.geteuid(),
        )


def examine_host(spec: BuildSpec, host: Host) -> Case:
    """The case of another machine, or a saved one, as far as a `Host` tells.

    Its environment variables, packages, compilers, processes and caches are not known, and not judged.
    """
    releases = {name: load_release(name) for name in RELEASES}
    python = host.python
    too_old = host.nix and _version(host.nix.version) < OLDEST
    return Case(
        spec=spec,
        host=host,
        cuda=releases[spec.release].cuda,
        torch=releases[spec.release].torch,
        releases={name: (release.cuda, release.torch) for name, release in releases.items()},
        environment=Environment(
            executable=python.executable, version=python.version, torch=python.torch, torch_cuda=python.torch_cuda
        )
        if python
        else None,
        store_needs=FREE_NEEDED,
        peak_of_one=_peak_of_one(spec),
        forecast=lambda archs, threads, jobs: forecast(host, archs, threads, jobs),
        no_nix=(f"nix is version {host.nix.version if host.nix else ''}; pybuild needs 2.8 or newer", GET_NIX)
        if too_old
        else None
        if host.nix
        else ("nix is not on PATH there", GET_NIX),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,6}", text)[:2])


def forecast(host: Host, archs: tuple[str, ...], threads: int, jobs: int) -> Forecast:
    """What upstream's build takes on `host`: the peak of `jobs` at once, and how many pybuild would recommend.

    Architectures that upstream drops count for nothing; with none left it compiles for one of nvcc's own choice.
    """
    known = [c for c in FLASH_ATTN if c.replace(".", "") in archs]
    work = workload(BuildSpec(capabilities=tuple(known or ["10.0"])), threads)
    cores, available = host.cores.usable, host.memory.available
    peak = simulate(work.curves, min(jobs, len(work.curves)), cores=cores, threads=work.busy).peak
    return Forecast(peak=int(peak), fit=recommend(work.curves, cores, available - reserve_of(available)))


def _peak_of_one(spec: BuildSpec) -> int:
    """Bytes of the largest compile of a build."""
    return int(max(curve.peak for curve in workload(spec, nvcc_threads(spec)).curves))


def _host(environ: Mapping[str, str]) -> Host:
    """This machine, without the toolkits that are only a script called nvcc: torch includes CUDA_HOME/include."""
    host = read_host(Path("/"), environ)
    whole = tuple(t for t in host.toolkits if (Path(t.path) / "include/cuda_runtime.h").exists())
    return host.model_copy(update={"toolkits": whole})


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True)
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
    """Versions of g++ by command, the one that builds take first: CXX's, else g++, else one with a version's name.

    Empty for one that is there and does not say its version.
    """
    names = [environ.get("CXX") or "g++", "g++", *(f"g++-{major}" for major in range(16, 8, -1))]
    here = [name for name in dict.fromkeys(names) if shutil.which(name, path=environ.get("PATH"))]
    return {name: _output(name, "-dumpfullversion").strip() for name in here}


def _cached(environ: Mapping[str, str], environment: Environment | None) -> tuple[CachedTorchWheel, ...]:
    if environment is None or environment.torch is None:
        return ()
    major, minor = environment.version.split(".")[:2]
    return tuple(torch_wheels(cached_wheels(environ), f"cp{major}{minor}", environment.torch_libraries))
