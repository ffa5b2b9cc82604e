"""The whole way for real: pins from the index, nix with its sandbox, nvcc, a wheel, a venv with torch.

Cold, on 2 cores, this takes about ten minutes (four CUDA kernels and flash_api.cpp); what was built stays in the store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pybuild.spec import PYTHONS

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SELECTION = [
    *("flash-attn", "--release", "cu130", "--capability", "10.0", "--python", PYTHON),
    *("--head-dim", "64", "--dtype", "fp16", "--forward-only"),
]

pytestmark = [
    pytest.mark.skipif(shutil.which("nix") is None, reason="no nix on PATH"),
    pytest.mark.skipif(PYTHON not in PYTHONS, reason=f"no release has wheels for Python {PYTHON}"),
]


def pybuild(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pybuild", *arguments], stdout=subprocess.PIPE, text=True, check=False, cwd=cwd
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a selected build, as `pybuild build` leaves it."""
    folder = tmp_path_factory.mktemp("build")
    done = pybuild("build", *SELECTION, cwd=folder)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1, "standard output is the wheel's path and nothing else"
    return folder / done.stdout.strip()


def test_the_wheels_name_tells_what_is_in_it(wheel: Path) -> None:
    tag = f"cp{PYTHON.replace('.', '')}"
    assert wheel.name.startswith(f"flash_attn-2.8.3+cu130.torch2.11.sm100.hdim64.fp16.fwd-{tag}-{tag}-manylinux_2_")


def test_the_wheel_has_code_for_sm_100_and_for_nothing_else(wheel: Path) -> None:
    from pybuild.wheel import read_artifact

    assert {str(code) for code in read_artifact(wheel).codes} == {"sm_100"}


def test_a_second_build_takes_all_from_the_store(wheel: Path, tmp_path: Path) -> None:
    done = pybuild("build", *SELECTION, cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / done.stdout.strip()).read_bytes() == wheel.read_bytes()


def without_network(line: str) -> subprocess.CompletedProcess[str]:
    """The line, in a shell that has no network."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    return subprocess.run([*unshare, "sh", "-c", line], stdout=subprocess.PIPE, text=True, check=False)


def test_the_printed_command_finds_all_inputs_in_the_store(wheel: Path) -> None:
    line = pybuild("command", *SELECTION).stdout.strip()
    done = without_network(f"{line} --dry-run")
    assert done.returncode == 0


@pytest.mark.slow
def test_the_printed_command_builds_the_same_wheel_without_network(wheel: Path) -> None:
    line = pybuild("command", *SELECTION).stdout.strip()
    done = without_network(line)
    assert done.returncode == 0
    (built,) = json.loads(done.stdout)
    (other,) = (Path(built["outputs"]["out"]) / "dist").glob("*.whl")
    assert other.name == wheel.name
    assert other.read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an ordinary virtual environment with torch and the wheel."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/pip", "install", "-q", "torch==2.11.0", str(wheel)], check=True)
    return folder / "bin/python"


def test_an_ordinary_venv_imports_the_wheel(python: Path) -> None:
    program = "import flash_attn, flash_attn_2_cuda; print(flash_attn.__version__)"
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "2.8.3"


# A stub is called as run_mha_bwd would call it, with no GPU: it throws before it touches its arguments.
CALL_A_STUB = """
import ctypes, torch, flash_attn_2_cuda
library = ctypes.CDLL(flash_attn_2_cuda.__file__)
library["_ZN5flash{}IN7cutlass6half_tELi{}ELb0EEEvRNS_16{}EP11CUstream_st"](None, None)
"""


@pytest.mark.parametrize(
    ("function", "head_dim", "params", "says"),
    [
        ("12run_mha_bwd_", 64, "Flash_bwd_params", "head dimension 64, fp16, backward"),
        ("12run_mha_fwd_", 128, "Flash_fwd_params", "head dimension 128, fp16, forward"),
    ],
)
def test_a_kernel_that_was_left_out_says_so(python: Path, function: str, head_dim: int, params: str, says: str) -> None:
    program = CALL_A_STUB.format(function, head_dim, params)
    done = subprocess.run([python, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode < 0, "the exception of C++ ends a process that ctypes called it from"
    assert f"built without the kernels for {says}" in done.stderr
    assert f"pybuild build flash-attn --head-dim {head_dim} --dtype fp16" in done.stderr
