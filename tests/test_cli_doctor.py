"""The command, from its arguments to its exit status, on an environment made for it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from pybuild.cli import main
from pybuild.cli.doctor import show
from pybuild.doctor import Finding

FATBINS = Path(__file__).parent / "fatbins"
PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"

NVIDIA_SMI = """#!/bin/sh
echo 'NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.95.05'
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with one RTX PRO 6000 and a venv with torch 2.10.0 for CUDA 12.8."""
    tmp_path = tmp_path_factory.mktemp("machine")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "torch-2.10.0+cu128.dist-info").mkdir()
    (site / "torch-2.10.0+cu128.dist-info/METADATA").write_text("Name: torch\nVersion: 2.10.0+cu128\n")
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/version.py").write_text("__version__ = '2.10.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    (site / "torch/lib/libc10.so").write_bytes((FATBINS / "libc10.so").read_bytes())
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    # The rest of the machine is that of whoever runs the tests.
    return {
        **{k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")},
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "VIRTUAL_ENV": str(venv),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def run(environ: dict[str, str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process, which has imported it already."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", ["pybuild", "doctor", *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def wheel(folder: Path, library: str = "zstd.o", python: str = PYTHON) -> Path:
    path = folder / f"flash_attn-2.8.3-{python}-{python}-linux_x86_64.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("flash_attn_2_cuda.so", (FATBINS / library).read_bytes())
        file.writestr("flash_attn-2.8.3.dist-info/METADATA", "Name: flash-attn\nVersion: 2.8.3\nRequires-Dist: torch\n")
    return path


def test_a_wheel_that_runs(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, wheel(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "sm_80, sm_90, compute_90, sm_100, sm_120 (1 source file)" in done.stdout
    assert "runs on" in done.stdout
    assert "It will run here." in done.stdout


def test_a_wheel_without_code_for_this_gpu(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, wheel(tmp_path, "relocatable.o"))
    assert done.returncode == 1
    assert "✗ breaks run [gpu-without-code]" in done.stdout
    assert "Server Edition is 12.0; the wheel has sm_100" in done.stdout
    assert "    pybuild build flash-attn --capability 12.0\n" in done.stdout


def test_a_wheel_for_another_python_and_another_torch(machine: dict[str, str], tmp_path: Path) -> None:
    done = run(machine, "--json", wheel(tmp_path, "extension.so", python="cp37"))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["fails"] is True
    assert report["wheel"]["python_tags"] == ["cp37"]
    # The libc10.so of this machine has torchCheckFail, and no warn.
    symbols = next(f for f in report["findings"] if f["code"] == "torch-symbols")
    assert "_ZN3c104warnEi" in symbols["why"]
    assert {"python", "torch-symbols", "rpath"} <= {f["code"] for f in report["findings"]}


def test_a_library_alone(machine: dict[str, str]) -> None:
    done = run(machine, "--json", FATBINS / "zstd.o")
    assert done.returncode == 0
    (library,) = json.loads(done.stdout)["wheel"]["libraries"]
    assert library["fatbins"] == [{"code": ["sm_80", "sm_90", "compute_90", "sm_100", "sm_120"], "count": 1}]


@pytest.mark.parametrize("name", ["none.whl", "none.so"])
def test_a_file_that_is_not_there(machine: dict[str, str], tmp_path: Path, name: str) -> None:
    done = run(machine, tmp_path / name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "cannot be read: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_wheel(machine: dict[str, str], tmp_path: Path) -> None:
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:900])
    done = run(machine, path)
    assert done.returncode == 2
    assert "damaged wheel" in done.stderr


def test_this_machine(machine: dict[str, str], tmp_path: Path) -> None:
    cached = wheel(tmp_path / "pip/wheels/01/23/45/6789", "extension.so")
    environ = {
        **machine,
        "XDG_CACHE_HOME": str(tmp_path),
        "TORCH_CUDA_ARCH_LIST": "12.0",
        "CUDA_HOME": "/opt/no-cuda",
    }
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pybuild", "doctor", "--json"], env=environ, capture_output=True, text=True
    )
    took = time.monotonic() - started
    assert (done.returncode, done.stderr) == (1, "")
    found = {f["code"]: f for f in json.loads(done.stdout)["findings"]}
    assert "CUDA_HOME=/opt/no-cuda" in found["cuda-home-wrong"]["seen"]
    assert found["arch-list-ignored"]["mend"] == "export FLASH_ATTN_CUDA_ARCHS='120'"
    assert found["gpu-without-code"]["mend"] == "pybuild build flash-attn --capability 12.0"
    assert found["build-tools-missing"]["breaks"] == "pip install"
    assert str(cached) in found["cached-wheel"]["seen"]
    assert "_ZN3c104warnEi" in found["cached-wheel"]["seen"]
    # Two seconds are promised; on a machine that others use as well, it may wait for its turn.
    assert took < 20
    fits = run(environ, "--json", "--capability", "12.0")
    assert "gpu-without-code" not in {f["code"] for f in json.loads(fits.stdout)["findings"]}


SAVED = {
    "name": "gpu-box",
    "machine": "x86_64",
    "cores": {"usable": 128, "online": 128},
    "memory": {"available": 288 << 30, "because": "MemAvailable", "swap_total": 1 << 33},
    "gpus": [{"name": "NVIDIA H200", "capability": "9.0"}],
    "driver": "570.133.20",
    "python": {"executable": "/venv/bin/python", "version": "3.12.3", "torch": "2.9.1+cu128", "torch_cuda": "12.8"},
    "nix": {"version": "2.3.16", "daemon": True},
    "disk": {"path": "/nix/store", "free": 5 << 30},
}


def test_a_saved_machine(machine: dict[str, str], tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(SAVED))
    # What is active here says nothing about the machine there.
    done = run({**machine, "MAX_JOBS": "4", "TORCH_CUDA_ARCH_LIST": "9.0"}, "--json", "--facts", facts)
    assert (done.returncode, done.stderr) == (1, "")
    found = {f["code"]: f for f in json.loads(done.stdout)["findings"]}
    assert set(found) == {
        *("nvcc-missing", "gpu-without-code", "capability-without-gpu", "torch-not-the-releases"),
        *("max-jobs", "disk", "nix"),
    }
    assert "takes 32 on this machine" in found["max-jobs"]["seen"]
    assert "nix is version 2.3.16" in found["nix"]["seen"]
    done = run(machine, "--json", "--facts", facts, wheel(tmp_path, "relocatable.o", python="cp312"))
    assert {f["code"] for f in json.loads(done.stdout)["findings"]} == {"gpu-without-code"}
    (tmp_path / "bad.json").write_text("{}")
    assert run(machine, "--facts", tmp_path / "bad.json").returncode == 2


def test_bad_options(machine: dict[str, str]) -> None:
    done = run(machine, "--capability", "11.1")
    assert done.returncode == 2
    assert "11.1" in done.stderr


def test_a_finding_is_shown_so_that_its_commands_can_be_pasted() -> None:
    finding = Finding(code="x", breaks=None, seen="Seen.", why="Why.", mend="one\ntwo")
    assert show(finding) == "! worth knowing [x]\n  Seen.\n  Why.\n    one\n    two\n"
