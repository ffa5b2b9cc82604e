"""Every finding: a case in which it is made, and the nearest one in which it is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pybuild import checkup, doctor
from pybuild.doctor import Case, Finding, Forecast, findings, upstream_jobs, would_fail
from pybuild.facts.caches import CachedTorchWheel, CachedWheel
from pybuild.facts.cgroup import Limit
from pybuild.facts.gpu import Gpu
from pybuild.facts.host import Cores, Disk, Host, Memory, read_host
from pybuild.facts.installed import Toolkit
from pybuild.facts.leftovers import Leftover, Process
from pybuild.facts.venv import Environment
from pybuild.spec import BuildSpec
from pybuild.units import GIB
from pybuild.wheel import wheel_identity

TOOLS = {"packaging": "26.0", "wheel": "0.45", "ninja": "1.13", "psutil": "7.0", "setuptools": "80.0"}


def gpu(name: str, capability: str | None) -> Gpu:
    return Gpu(name=name, capability=capability)


def toolkit(version: str, path: str = "", *aliases: str) -> Toolkit:
    return Toolkit(path=path or f"/usr/local/cuda-{version}", version=version, nvcc=f"{version}.1", aliases=aliases)


B200 = gpu("NVIDIA B200", "10.0")
PRO_6000 = gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0")
CUDA_128 = toolkit("12.8", "", "/usr/local/cuda")
CUDA_130 = toolkit("13.0")
CUDA_131 = toolkit("13.1")
CUDA_124 = toolkit("12.4")

VENV = Environment("/venv/bin/python", "3.12.3", packages=TOOLS, torch="2.10.0+cu128", torch_cuda="12.8")


def memory(available: int = 288 * GIB, swap: int = 8 * GIB, **others: object) -> Memory:
    return Memory.model_validate({"because": "MemAvailable", **others, "available": available, "swap_total": swap})


# A machine on which nothing is wrong.
HOST = Host(
    machine="x86_64",
    cores=Cores(usable=128, online=128),
    memory=memory(),
    gpus=(B200, B200),
    driver="570.133.20",
    toolkits=(CUDA_128,),
    disk=Disk(path="/nix/store", free=100 * GIB),
)
SOUND = Case(
    spec=BuildSpec(),
    host=HOST,
    cuda="12.8",
    torch="2.10.0",
    releases={"cu128": ("12.8", "2.10.0"), "cu130": ("13.0", "2.11.0")},
    compilers={"g++": "13.3.0", "g++-12": "12.2.0"},
    environment=VENV,
    glibc="2.39",
    forecast=lambda archs, threads, jobs: Forecast(peak=jobs * 9 * GIB, fit=8),
    store_needs=20 * GIB,
)


def but(case: Case, **changes: object) -> Case:
    """The case with these changes: of the host, where they name a fact of it, else of the case."""
    facts = {name: value for name, value in changes.items() if name in Host.model_fields}
    others: dict[str, Any] = {name: value for name, value in changes.items() if name not in facts}
    return replace(case, host=case.host.model_copy(update=facts), **others)


def found(case: Case, code: str) -> Finding:
    """The one finding of this code; each that is made must be whole."""
    all_of_them = findings(case)
    for finding in all_of_them:
        assert finding.seen and finding.why and finding.mend
        assert "None" not in f"{finding.seen} {finding.mend}"
    (one,) = [f for f in all_of_them if f.code == code]
    return one


def codes(case: Case) -> list[str]:
    return [f.code for f in findings(case)]


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(SOUND) == []
    assert not would_fail(findings(SOUND))


def test_an_empty_case_has_no_findings() -> None:
    assert findings(Case(BuildSpec(), Host(cores=Cores(usable=1), memory=memory()), cuda="12.8", torch="2.10.0")) == []


def test_what_breaks_comes_first() -> None:
    case = but(SOUND, toolkits=(), memory=memory(swap=0), forecast=None, disk=Disk(path="/", free=0))
    assert codes(case) == ["nvcc-missing", "disk", "no-swap"]
    assert would_fail(findings(case))


# CUDA toolkit and torch


def test_cuda_of_another_major_version() -> None:
    case = but(SOUND, toolkits=(CUDA_131, CUDA_128), environ={"CUDA_HOME": "/usr/local/cuda-13.1"})
    finding = found(case, "cuda-major")
    assert finding.breaks == "pip install"
    # torch's own message, so that whoever has it on the screen finds this.
    assert (
        "The detected CUDA version (13.1) mismatches the version that was used to compile PyTorch (12.8)" in finding.why
    )
    assert "/usr/local/cuda-13.1 (13.1), /usr/local/cuda-12.8 (12.8)" in finding.seen
    assert finding.mend == "export CUDA_HOME=/usr/local/cuda-12.8 PATH=/usr/local/cuda-12.8/bin:$PATH"


def test_cuda_of_another_major_version_and_no_toolkit_that_fits() -> None:
    case = but(SOUND, toolkits=(CUDA_130,), nvcc_on_path="/usr/local/cuda-13.0/bin/nvcc")
    finding = found(case, "cuda-major")
    assert "/usr/local/cuda-13.0/bin/nvcc is on PATH" in finding.seen
    assert finding.mend == "pybuild build flash-attn --release cu128"


def test_cuda_of_another_minor_version_is_a_warning() -> None:
    case = but(SOUND, toolkits=(CUDA_124, CUDA_128), environ={"CUDA_HOME": "/usr/local/cuda-12.4/"}, gpus=())
    finding = found(case, "cuda-minor")
    assert finding.breaks is None
    assert "minor version mismatch" in finding.why
    assert "CUDA_HOME=/usr/local/cuda-12.8" in finding.mend
    assert found(but(case, toolkits=(CUDA_124,)), "cuda-minor").mend.startswith("pybuild build")


def test_the_toolkit_that_torch_takes() -> None:
    """CUDA_HOME, then CUDA_PATH, then nvcc on PATH, then /usr/local/cuda."""
    both = but(SOUND, toolkits=(CUDA_128, CUDA_130))
    assert "cuda-major" not in codes(both)
    assert "cuda-major" in codes(but(both, nvcc_on_path="/usr/local/cuda-13.0/bin/nvcc"))
    path = {"CUDA_PATH": "/usr/local/cuda-12.8"}
    assert "cuda-major" not in codes(but(both, nvcc_on_path="/usr/local/cuda-13.0/bin/nvcc", environ=path))
    assert "cuda-major" in codes(but(both, environ={**path, "CUDA_HOME": "/usr/local/cuda-13.0"}))


def test_no_nvcc() -> None:
    finding = found(but(SOUND, toolkits=()), "nvcc-missing")
    assert finding.breaks == "pip install"
    assert finding.mend == "pybuild build flash-attn --release cu128"
    # One that is installed where nothing looks.
    elsewhere = toolkit("12.8", "/opt/cuda-12.8")
    assert "CUDA_HOME=/opt/cuda-12.8" in found(but(SOUND, toolkits=(elsewhere,)), "nvcc-missing").mend
    # Without torch in the environment, nobody builds there.
    assert codes(but(SOUND, toolkits=(), environment=None)) == []


def test_cuda_home_that_is_no_toolkit() -> None:
    finding = found(but(SOUND, environ={"CUDA_HOME": "/usr/local/cuda-12.6"}), "cuda-home-wrong")
    assert "CUDA_HOME=/usr/local/cuda-12.6" in finding.seen
    assert "CUDA_HOME=/usr/local/cuda-12.8" in finding.mend
    # A script called nvcc in /usr/local/bin makes torch take /usr/local for the toolkit.
    finding = found(but(SOUND, nvcc_on_path="/usr/local/bin/nvcc"), "cuda-home-wrong")
    assert "so torch takes /usr/local for the CUDA toolkit" in finding.seen


def test_nvcc_on_path_is_not_cuda_homes() -> None:
    case = but(
        SOUND,
        toolkits=(CUDA_128, CUDA_130),
        environ={"CUDA_HOME": "/usr/local/cuda-12.8"},
        nvcc_on_path="/usr/local/cuda-13.0/bin/nvcc",
    )
    finding = found(case, "two-nvcc")
    assert finding.mend == "export PATH=/usr/local/cuda-12.8/bin:$PATH"
    assert "two-nvcc" not in codes(but(case, nvcc_on_path="/usr/local/cuda/bin/nvcc"))


def test_torch_without_cuda() -> None:
    venv = replace(VENV, torch="2.10.0+cpu", torch_cuda=None)
    finding = found(but(SOUND, environment=venv), "torch-without-cuda")
    assert finding.breaks == "pip install"
    assert "--torch-backend=cu128 torch==2.10.0" in finding.mend


def test_torch_is_not_the_releases() -> None:
    venv = replace(VENV, torch="2.9.1+cu128")
    finding = found(but(SOUND, environment=venv), "torch-not-the-releases")
    assert finding.breaks == "import"
    assert "torch 2.9.1+cu128" in finding.seen
    assert finding.mend == "uv pip install --python /venv/bin/python --torch-backend=cu128 torch==2.10.0"
    # Another release has it.
    venv = replace(VENV, torch="2.11.0+cu130", torch_cuda="13.0")
    finding = found(but(SOUND, environment=venv), "torch-not-the-releases")
    assert finding.mend == "pybuild build flash-attn --release cu130"


# GPUs


@pytest.mark.parametrize(
    ("name", "capability", "fitting"),
    [("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", "12.0"), ("NVIDIA GeForce RTX 5090", "12.0", "12.0"),
     ("NVIDIA GB10", "12.1", "12.0"), ("NVIDIA H200", "9.0", "9.0"), ("NVIDIA L40S", "8.9", "8.0")],
)  # fmt: skip
def test_a_gpu_that_the_default_build_has_no_code_for(name: str, capability: str, fitting: str) -> None:
    case = but(SOUND, gpus=(gpu(name, capability),))
    finding = found(case, "gpu-without-code")
    assert finding.breaks == "run"
    assert f"{name} is {capability}; the build is for 10.0" in finding.seen
    assert "no kernel image is available" in finding.why
    assert finding.mend == f"pybuild build flash-attn --capability {fitting}"
    useless = found(case, "capability-without-gpu")
    assert useless.breaks is None
    assert useless.mend == finding.mend


def test_10_0_runs_on_10_3() -> None:
    assert codes(but(SOUND, gpus=(gpu("NVIDIA B300 SXM6 AC", "10.3"),))) == []


def test_two_kinds_of_gpu() -> None:
    case = but(SOUND, gpus=(B200, PRO_6000, PRO_6000))
    assert codes(case) == ["gpu-without-code"]
    both = but(case, spec=BuildSpec(capabilities=("10.0", "12.0")))
    assert codes(both) == []


def test_a_capability_that_no_gpu_here_runs() -> None:
    case = but(SOUND, spec=BuildSpec(capabilities=("8.0", "10.0")))
    finding = found(case, "capability-without-gpu")
    assert "8.0" in finding.seen
    assert finding.mend == "pybuild build flash-attn --capability 10.0"
    # A machine without GPUs builds for others.
    assert codes(but(case, gpus=(), driver=None)) == []


def test_a_gpu_that_flash_attn_has_no_code_for_at_all() -> None:
    finding = found(but(SOUND, gpus=(gpu("Tesla T4", "7.5"),)), "gpu-without-code")
    assert "scaled_dot_product_attention" in finding.mend


def test_a_gpu_of_unknown_capability() -> None:
    case = but(SOUND, gpus=(gpu("NVIDIA Graphics Device", None),))
    assert codes(case) == ["gpu-unknown"]
    assert "compute_cap" in found(case, "gpu-unknown").mend


def test_torch_cuda_arch_list_is_ignored_by_flash_attn() -> None:
    case = but(SOUND, environ={"TORCH_CUDA_ARCH_LIST": "10.0"})
    finding = found(case, "arch-list-ignored")
    assert "TORCH_CUDA_ARCH_LIST=10.0" in finding.seen
    assert finding.mend == "export FLASH_ATTN_CUDA_ARCHS='100'"
    assert found(but(case, gpus=(PRO_6000,)), "arch-list-ignored").mend == "export FLASH_ATTN_CUDA_ARCHS='120'"
    assert codes(but(case, environ={"TORCH_CUDA_ARCH_LIST": "10.0", "FLASH_ATTN_CUDA_ARCHS": "100"})) == []
    assert codes(but(case, spec=BuildSpec(package="other"))) == []


@pytest.mark.parametrize(("value", "breaks"), [("10.0", "run"), ("sm_100", "run"), ("80,100", "run"), ("100;89", None)])
def test_flash_attn_cuda_archs_that_it_drops(value: str, breaks: str | None) -> None:
    finding = found(but(SOUND, environ={"FLASH_ATTN_CUDA_ARCHS": value}), "arch-unknown")
    assert finding.breaks == breaks
    assert finding.mend == "export FLASH_ATTN_CUDA_ARCHS='100'"


def test_a_toolkit_that_cannot_compile_for_the_gpu() -> None:
    case = but(SOUND, toolkits=(CUDA_124,), nvcc_on_path="/usr/local/cuda-12.4/bin/nvcc")
    finding = found(case, "toolkit-too-old")
    assert finding.breaks == "run"
    assert "CUDA 12.4, which can't compile for 10.0" in finding.seen
    assert finding.mend == "pybuild build flash-attn --release cu128"
    assert "CUDA_HOME=/usr/local/cuda-12.8" in found(
        but(case, toolkits=(CUDA_124, CUDA_128)), "toolkit-too-old"
    ).mend  # fmt: skip
    hopper = but(case, gpus=(gpu("NVIDIA H100", "9.0"),), spec=BuildSpec(capabilities=("9.0",)))
    assert "toolkit-too-old" not in codes(hopper)


@pytest.mark.parametrize(
    ("driver", "cuda", "release", "too_old"),
    [("570.133.20", "12.8", "cu128", False), ("525.60.13", "12.8", "cu128", False),
     ("520.61.05", "12.8", "cu128", True), ("570.133.20", "13.0", "cu130", True),
     ("580.65.06", "13.0", "cu130", False), ("595.1", "13.0", "cu130", False),
     ("[N/A]", "12.8", "cu128", False)],
)  # fmt: skip
def test_driver(driver: str, cuda: str, release: str, too_old: bool) -> None:
    case = but(SOUND, driver=driver, cuda=cuda, spec=BuildSpec.model_validate({"release": release}))
    assert ("driver-too-old" in codes(case)) is too_old


def test_a_driver_that_is_too_old_for_cu130_runs_cu128() -> None:
    case = but(SOUND, cuda="13.0", spec=BuildSpec(release="cu130"))
    finding = found(case, "driver-too-old")
    assert finding.breaks == "run"
    assert finding.mend.startswith("pybuild build flash-attn --release cu128")
    assert "nvidia-driver-580" in finding.mend


# Compiler, packages


def test_a_host_compiler_that_nvcc_refuses() -> None:
    case = but(SOUND, compilers={"g++": "15.1.0"})
    finding = found(case, "compiler-range")
    assert finding.breaks == "pip install"
    assert "gcc versions later than 14 are not supported" in finding.why
    assert finding.mend.startswith("sudo apt-get install g++-13\n")
    there = found(but(case, compilers={"g++": "15.1.0", "g++-12": "12.2.0"}), "compiler-range")
    assert there.mend == "export CC=gcc-12 CXX=g++-12 NVCC_PREPEND_FLAGS='-ccbin g++-12'"
    # The range is that of the nvcc in use: 13.0 takes gcc 15.
    venv = replace(VENV, torch="2.11.0+cu130", torch_cuda="13.0")
    newer = but(case, environment=venv, toolkits=(CUDA_130,), environ={"CUDA_HOME": CUDA_130.path})
    assert "compiler-range" not in codes(newer)


def test_a_host_compiler_that_is_too_old_or_missing() -> None:
    assert "C++17" in found(but(SOUND, compilers={"g++": "8.5.0"}), "compiler-range").why
    assert found(but(SOUND, compilers={}), "compiler-missing").mend == "sudo apt-get install g++"
    # One that is there and does not say its version; nobody looked.
    assert codes(but(SOUND, compilers={"g++": ""})) == []
    assert codes(but(SOUND, compilers=None)) == []


@pytest.mark.parametrize("name", doctor.BUILD_TOOLS)
def test_a_package_that_a_build_without_isolation_needs(name: str) -> None:
    packages = {k: v for k, v in TOOLS.items() if k != name}
    finding = found(but(SOUND, environment=replace(VENV, packages=packages)), "build-tools-missing")
    assert finding.breaks == (None if name == "ninja" else "pip install")
    assert ("one file at a time" in finding.why) is (name == "ninja")
    assert finding.mend == f"uv pip install --python /venv/bin/python {name}"


def test_packages_are_installed_with_what_the_environment_has() -> None:
    venv = replace(VENV, packages={"pip": "25.0"}, executable="/my venv/bin/python")
    finding = found(but(SOUND, environment=venv), "build-tools-missing")
    assert finding.mend == "'/my venv/bin/python' -m pip install packaging wheel ninja psutil setuptools"
    assert "No module named 'packaging'" in finding.why
    assert "one file at a time" in finding.why


# Memory


def test_max_jobs_that_does_not_fit() -> None:
    asked: list[tuple[tuple[str, ...], int, int]] = []

    def forecast(archs: tuple[str, ...], threads: int, jobs: int) -> Forecast:
        asked.append((archs, threads, jobs))
        return Forecast(peak=jobs * 11 * GIB, fit=8 if len(archs) == 4 else 24)

    case = but(SOUND, environ={"MAX_JOBS": "32"}, forecast=forecast)
    finding = found(case, "max-jobs")
    assert finding.breaks == "pip install"
    assert "MAX_JOBS=32, for architectures 80;90;100;120 with NVCC_THREADS=4" in finding.seen
    assert "352.0 GiB at the peak, and 288.0 GiB are available; 8 would fit" in finding.seen
    assert "export FLASH_ATTN_CUDA_ARCHS='100' NVCC_THREADS=1 MAX_JOBS=24\n" in finding.mend
    assert "pybuild run -- pip install --no-build-isolation flash-attn" in finding.mend
    assert asked == [(("80", "90", "100", "120"), 4, 32), (("100",), 1, 32)]
    one = but(case, environ={"MAX_JOBS": "1"}, memory=memory(8 * GIB))
    assert "not even one would fit" in found(one, "max-jobs").seen
    assert "max-jobs" not in codes(but(case, environ={"MAX_JOBS": "8"}))
    codes(but(case, environ={"MAX_JOBS": "9", "FLASH_ATTN_CUDA_ARCHS": "100", "NVCC_THREADS": "1"}))
    assert asked[-1] == (("100",), 1, 9)


def test_the_jobs_that_upstream_chooses_do_not_fit() -> None:
    """32 on 128 cores and 288 GiB, which ran out of memory (DESIGN.md)."""
    assert upstream_jobs(128, 288 * GIB) == 32
    assert upstream_jobs(16, 288 * GIB) == 8
    assert upstream_jobs(1, 1 * GIB) == 1
    case = but(SOUND, forecast=lambda archs, threads, jobs: Forecast(peak=368 * GIB, fit=8))
    assert "MAX_JOBS is not set; flash-attn's setup.py takes 32 on this machine" in found(case, "max-jobs").seen
    # Without torch here, nobody builds by hand.
    assert "max-jobs" not in codes(but(case, environment=None))


@pytest.mark.parametrize(
    ("jobs", "gib", "cores", "fits"),
    [("128", 288, 128, False), ("64", 288, 128, False), ("32", 288, 128, False), ("", 288, 128, False),
     ("8", 288, 128, True), ("48", 432, 128, False), ("20", 432, 128, True)],
)  # fmt: skip
def test_what_happened_to_real_people(jobs: str, gib: int, cores: int, fits: bool) -> None:
    """DESIGN.md's table, with upstream's four architectures and threads, and the profile that pybuild ships."""
    host = HOST.model_copy(update={"memory": memory(gib * GIB), "cores": Cores(usable=cores, online=cores)})
    case = but(SOUND, environ={"MAX_JOBS": jobs} if jobs else {}, forecast=partial(checkup.forecast, host))
    case = replace(case, host=host)
    assert ("max-jobs" not in codes(case)) is fits


def test_max_jobs_that_is_no_number() -> None:
    assert found(but(SOUND, environ={"MAX_JOBS": "all"}), "max-jobs-not-a-number").mend == "unset MAX_JOBS"


def test_less_memory_than_one_compile_takes() -> None:
    small = but(SOUND, memory=memory(3 * GIB), forecast=None)
    finding = found(small, "memory")
    assert finding.breaks == "pybuild build"
    assert "3.0 GiB of memory are available (MemAvailable); one compile takes up to 7.0 GiB" in finding.seen
    assert "swapon" in finding.mend
    limit = Limit(path="/sys/fs/cgroup/memory.max", limit=4 * GIB, used=GIB)
    because = "/sys/fs/cgroup/memory.max is 4294967296, of which 1073741824 are used"
    limited = but(small, memory=memory(3 * GIB, limits=[limit], because=because))
    assert "Raise the limit /sys/fs/cgroup/memory.max." in found(limited, "memory").mend
    assert codes(but(small, memory=memory(7 * GIB))) == []
    # A machine that gets memory as it uses it.
    assert codes(but(small, memory=memory(3 * GIB, grows=True))) == []


def test_no_swap() -> None:
    no_swap = but(SOUND, memory=memory(swap=0))
    finding = found(no_swap, "no-swap")
    assert finding.breaks is None
    assert "swapon" in finding.mend
    # In a container with a limit, the limit ends the build and nothing freezes.
    assert codes(but(no_swap, memory=memory(swap=0, limits=[Limit(path="/docker/1", limit=300 * GIB, used=GIB)]))) == []


def test_overcommit() -> None:
    always = but(SOUND, memory=memory(swap=0, overcommit=1))
    assert codes(always) == ["overcommit-always"]
    strict = memory(overcommit=2, commit_left=3 * GIB)
    finding = found(but(SOUND, memory=strict), "overcommit-strict")
    assert finding.breaks == "pybuild build"
    assert "3.0 GiB may still be promised" in finding.seen
    assert finding.mend == "sudo sysctl vm.overcommit_memory=0"
    assert codes(but(SOUND, memory=memory(overcommit=2, commit_left=80 * GIB))) == []


def process(pid: int, name: str, rss: float, user: int = 1000) -> Process:
    return Process(pid=pid, parent=1, session=9, name=name, rss=int(rss * GIB), started=1.0, user=user)


def test_leftover_compilers() -> None:
    ninja, cicc = process(20, "ninja", 0.1), process(31, "cicc", 6.5)
    ptxas = process(40, "ptxas", 0.5)
    left = (Leftover(top=ninja, members=(ninja, cicc)), Leftover(top=ptxas, members=(ptxas,)))
    finding = found(but(SOUND, leftovers=left, user=1000), "leftover-compilers")
    assert finding.breaks is None
    assert "2 compiler processes (cicc, ptxas)" in finding.seen
    assert "hold 7.1 GiB" in finding.seen
    assert "cicc 31, 6.5 GiB" in finding.seen
    assert finding.mend == "kill 20 31 40"
    others = (Leftover(top=ptxas, members=(ptxas,)),)
    assert found(but(SOUND, leftovers=others, user=1001), "leftover-compilers").mend == "sudo kill 40"
    assert found(but(SOUND, leftovers=others, user=0), "leftover-compilers").mend == "kill 40"


# Disk, nix, caches


def test_disk() -> None:
    finding = found(but(SOUND, disk=Disk(path="/home", free=19 * GIB)), "disk")
    assert finding.breaks == "pybuild build"
    assert finding.seen == "19.0 GiB free where the store is (/home); a build needs 20.0 GiB"
    assert codes(but(SOUND, disk=Disk(path="/home", free=20 * GIB))) == []


def test_nix() -> None:
    finding = found(but(SOUND, no_nix=("nix is version 2.3; pybuild needs 2.8", "apt install nix-bin")), "nix")
    assert finding.breaks == "pybuild build"
    assert finding.mend == "apt install nix-bin"


def cached(
    file_name: str,
    tool: str = "pip",
    missing: tuple[str, ...] | None = (),
    older: bool = False,
    requires: tuple[str, ...] = (),
) -> CachedTorchWheel:
    wheel = CachedWheel("pip" if tool == "pip" else "uv", Path("/cache") / file_name, file_name)
    return CachedTorchWheel(wheel, wheel_identity(file_name, requires), missing, older)


PLAIN = "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"


def test_a_cached_wheel_whose_symbols_torch_does_not_have() -> None:
    symbol = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
    finding = found(but(SOUND, cached=(cached(PLAIN, missing=(symbol,)),)), "cached-wheel")
    assert finding.breaks == "import"
    assert symbol in finding.seen
    assert "c10::Error" in finding.seen
    assert "/cache" in finding.seen
    assert finding.mend == "pip cache remove flash_attn"
    assert codes(but(SOUND, cached=(cached(PLAIN),))) == []


def test_a_cached_wheel_that_says_it_is_for_another_torch() -> None:
    name = "flash_attn-2.8.3+cu12torch2.7cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
    finding = found(but(SOUND, cached=(cached(name, tool="uv"),)), "cached-wheel")
    assert "it is for torch 2.7, and here is torch 2.10.0+cu128" in finding.seen
    assert finding.breaks is None  # its symbols are all there
    assert found(but(SOUND, cached=(cached(name, missing=None),)), "cached-wheel").breaks == "import"
    assert finding.mend == "uv cache clean flash-attn"
    pinned = cached(PLAIN, requires=("torch==2.9.1",))
    assert "torch 2.9.1" in found(but(SOUND, cached=(pinned,)), "cached-wheel").seen
    cu13 = cached("flash_attn-2.8.3+cu130torch2.10-cp312-cp312-linux_x86_64.whl")
    assert "for CUDA 13.0" in found(but(SOUND, cached=(cu13,)), "cached-wheel").seen
    assert codes(but(SOUND, cached=(cached(name.replace("2.7", "2.10")),))) == []


def test_a_cached_wheel_too_large_to_look_into() -> None:
    older = but(SOUND, cached=(cached(PLAIN, missing=None, older=True),))
    finding = found(older, "cached-wheel")
    assert finding.breaks is None
    assert "older than the installation of torch" in finding.seen
    assert codes(but(SOUND, cached=(cached(PLAIN, missing=None),))) == []
    # Compared and found fitting: its age does not matter.
    assert codes(but(SOUND, cached=(cached(PLAIN, missing=(), older=True),))) == []


# Recorded machines, and anything that a machine may say.


@pytest.mark.parametrize(
    "root", sorted((Path(__file__).parent / "machines").iterdir()), ids=lambda root: str(root.name)
)
def test_recorded_machines(root: Path) -> None:
    host = read_host(root, {})
    found = findings(checkup.examine_host(BuildSpec(), host))
    for finding in found:
        assert finding.seen and finding.why and finding.mend
    # The default build is for 10.0.
    others = {gpu.name for gpu in host.gpus if gpu.capability not in ("10.0", "10.3")}
    assert {f.seen.split(" is ")[0] for f in found if f.code == "gpu-without-code"} == others
    assert ("nix" in {f.code for f in found}) is (host.nix is None)


texts = st.text(max_size=12)
versions = st.sampled_from(["12.8", "13.0", "13.1", "11.8", "12.4"])
hosts = st.builds(
    Host,
    cores=st.just(Cores(usable=8)),
    memory=st.builds(memory, st.integers(0), st.integers(0), overcommit=st.none() | st.integers(0, 3),
                     commit_left=st.none() | st.integers()),
    gpus=st.lists(st.builds(gpu, texts, st.none() | texts | st.from_regex(r"[0-9]{1,2}\.[0-9]", fullmatch=True))).map(
        tuple
    ),
    driver=st.none() | texts,
    toolkits=st.lists(st.builds(toolkit, versions, texts)).map(tuple),
    nvcc_on_path=st.none() | texts,
    disk=st.none() | st.builds(Disk, path=texts, free=st.integers()),
)  # fmt: skip
cases = st.builds(
    Case,
    spec=st.sampled_from([BuildSpec(), BuildSpec(capabilities=("8.0", "12.0"), release="cu130")]),
    host=hosts,
    cuda=versions,
    torch=st.just("2.10.0"),
    environ=st.dictionaries(
        st.sampled_from(["CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "NVCC_THREADS", "FLASH_ATTN_CUDA_ARCHS",
                         "TORCH_CUDA_ARCH_LIST"]), texts,
    ),
    compilers=st.dictionaries(texts, texts | st.just("12.2.0")),
    environment=st.none() | st.builds(Environment, texts, st.just("3.12.1"), torch=st.none() | texts,
                                      torch_cuda=st.none() | versions),
    forecast=st.just(lambda archs, threads, jobs: Forecast(peak=3 * GIB, fit=3)),
)  # fmt: skip


# On a machine that others use as well, an example may take long.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(cases)
def test_any_case_has_an_answer(case: Case) -> None:
    for finding in findings(case):
        assert finding.seen and finding.why and finding.mend
