from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pybuild.facts.venv import active_python, read_environment

VERSION_PY = """
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.10.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = '449b1768410104d3ed79d3bcfe4ba1d65c7f22c0'
hip: Optional[str] = None
"""  # torch 2.10.0+cu128's, shortened


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def site(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages"))


def install(venv: Path, name: str, version: str) -> None:
    info = site(venv) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_environment_with_torch(venv: Path) -> None:
    install(venv, "torch", "2.10.0")  # as PyPI's wheels have it
    install(venv, "Some_Thing", "1.0")
    (site(venv) / "broken-1.0.dist-info").mkdir()  # what a killed pip leaves behind
    library = site(venv) / "torch/lib"
    library.mkdir(parents=True)
    (library.parent / "version.py").write_text(VERSION_PY)
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so", "libgomp-24e2ab19.so.1", "libshm.so"):
        (library / name).touch()
    found = read_environment({**os.environ, "VIRTUAL_ENV": str(venv)})
    assert found is not None
    assert found.executable == f"{venv}/bin/python"
    assert found.version == ".".join(map(str, sys.version_info[:3]))
    assert found.packages == {"torch": "2.10.0", "some-thing": "1.0"}
    assert (found.torch, found.torch_cuda) == ("2.10.0+cu128", "12.8")
    assert [p.name for p in found.torch_libraries] == ["libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"]
    (library.parent / "version.py").write_text(VERSION_PY.replace("'12.8'", "None"))
    found = read_environment({**os.environ, "VIRTUAL_ENV": str(venv)})
    assert found is not None
    assert (found.torch, found.torch_cuda) == ("2.10.0+cu128", None)
    (library.parent / "version.py").unlink()
    found = read_environment({**os.environ, "VIRTUAL_ENV": str(venv)})
    assert found is not None
    assert found.torch is None


def test_which_python(venv: Path, tmp_path: Path) -> None:
    assert active_python({"VIRTUAL_ENV": str(venv), "CONDA_PREFIX": "/c"}) == f"{venv}/bin/python"
    assert active_python({"CONDA_PREFIX": str(venv), "PATH": ""}) == f"{venv}/bin/python"
    (tmp_path / "python").symlink_to(sys.executable)
    assert active_python({"VIRTUAL_ENV": "/gone", "PATH": str(tmp_path)}) == str(tmp_path / "python")
    assert active_python({"PATH": ""}) is None
    assert read_environment({"PATH": ""}) is None


@pytest.mark.parametrize("script", ["exit 3", "echo nonsense", "echo '{}'"])
def test_a_python_that_does_not_answer(tmp_path: Path, script: str) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert read_environment({"VIRTUAL_ENV": str(tmp_path)}) is None
