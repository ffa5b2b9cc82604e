"""One formula in three places (pybuild, the build's own jobs.py, Nix), held to the same vectors and to each other."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pybuild.profile import highest_peak, load_profile
from pybuild.recommend import core_cap
from pybuild.units import GIB, MIB

NIX = Path(__file__).parent.parent / "nix"
VECTORS: list[dict[str, Any]] = json.loads((NIX / "cap-vectors.json").read_text())


@pytest.fixture(scope="module")
def jobs() -> ModuleType:
    """nix/jobs.py, which runs inside builds and is no part of the package."""
    spec = importlib.util.spec_from_file_location("jobs", NIX / "jobs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["case"])
def test_pybuild_and_the_build_pass_the_vectors(vector: dict[str, Any], jobs: ModuleType) -> None:
    arguments = vector["cores"], vector["available"], vector["peak"]
    assert core_cap(*arguments) == vector["cap"]
    assert jobs.core_cap(*arguments) == vector["cap"]


@pytest.mark.skipif(shutil.which("nix-instantiate") is None, reason="no nix on PATH")
def test_nix_counts_the_peak_as_pybuild_does() -> None:
    profile = load_profile("flash-attn")
    assert profile is not None
    expression = f"""
        let
          p = import {NIX}/parallelism.nix {{ lib = import {NIX}/hostpkgs/lib.nix; }};
          profile = builtins.fromJSON (builtins.readFile {NIX.parent}/pybuild/profiles/flash-attn-2.8.3.json);
          peak = architectures: threads: p.highestPeak {{
            inherit architectures threads;
            compiles = p.ofBuild profile;
          }};
        in
        map (n: map (peak n) [ 1 2 3 4 5 ]) [ 1 2 3 4 ]
    """
    argv = ["nix-instantiate", "--store", "dummy://", "--eval", "--strict", "--json", "--expr", expression]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    expected = [[highest_peak(profile, n, threads) for threads in range(1, 6)] for n in range(1, 5)]
    assert json.loads(done.stdout) == expected


def test_the_builds_memory_is_what_the_kernel_says_is_available(jobs: ModuleType) -> None:
    meminfo = "MemTotal:       24684084 kB\nMemFree:         1000 kB\nMemAvailable:   16777216 kB\n"
    assert jobs.mem_available(meminfo) == 16 * GIB
    with pytest.raises(SystemExit, match="no MemAvailable"):
        jobs.mem_available("MemTotal: 1 kB\n")


def test_the_builds_program_prints_one_number() -> None:
    """A peak of one MiB leaves the cores as the limit, one of 2**60 bytes leaves 1."""
    for peak, expected in [(MIB, "3\n"), (2**60, "1\n")]:
        argv = [sys.executable, str(NIX / "jobs.py"), "3", str(peak)]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == expected
