"""pybuild run: what it sets, and builds under it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pybuild.curve import Curve
from pybuild.learn import Memory, place_of
from pybuild.run import architectures_of, package_of, prepare, wrapper


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pybuild"


def tools(tmp_path: Path, *names: str) -> str:
    """A PATH with programs of these names, which print their name and arguments."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("uv pip install flash-attn --no-build-isolation", ("flash-attn", "")),
        ("pip install flash_attn==2.8.3", ("flash-attn", "2.8.3")),
        ("python -m pip install --no-deps vllm[audio]==0.9", ("vllm", "0.9")),
        ("make -j8", (Path.cwd().name, "")),
        ("env A=b python3.11 setup.py", (Path.cwd().name, "")),
    ],
)
def test_the_package_is_read_from_the_command(command: str, package: tuple[str, str]) -> None:
    assert package_of(command.split()) == package


def test_architectures() -> None:
    assert architectures_of({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a 10.0+PTX"}, ["12.0"])[0] == ("80", "90", "100")
    # flash-attn knows no 8.6, and leaves it out without a word.
    assert architectures_of({"TORCH_CUDA_ARCH_LIST": "8.6"}, []) == (("80",), "as TORCH_CUDA_ARCH_LIST says")
    assert architectures_of({}, ["8.6", "8.9"]) == (("80",), "this machine's GPU")
    assert architectures_of({}, []) == ((), "")


def test_what_is_set_and_said(tmp_path: Path) -> None:
    path = tools(tmp_path, "nvcc", "c++")
    prepared = prepare(["pip", "install", "flash-attn==2.8.3"], {"PATH": path}, 16, ["9.0"])
    environ = prepared.environ
    assert (environ["MAX_JOBS"], environ["NVCC_THREADS"], environ["FLASH_ATTN_CUDA_ARCHS"]) == ("16", "1", "90")
    assert environ["CMAKE_BUILD_PARALLEL_LEVEL"] == "16"
    for name, tool in [("PYTORCH_NVCC", "nvcc"), ("CXX", "c++")]:
        assert Path(environ[name]).name == tool
        assert subprocess.run([environ[name], "-V"], capture_output=True, text=True).stdout == f"{tool} -V\n"
    said = "\n".join(prepared.said)
    assert all(name in said for name in environ.keys() - {"PATH"})
    assert "FLASH_ATTN_CUDA_ARCHS=90: this machine's GPU" in said
    # sm_90 takes twice the time of sm_100.
    assert prepared.curves["flash_bwd_hdim256_fp16_sm80"].duration > 200


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    given = {
        "PATH": tools(tmp_path, "my-nvcc", "my-c++"),
        "MAX_JOBS": "3",
        "NVCC_THREADS": "2",
        "FLASH_ATTN_CUDA_ARCHS": "80;90",
        "CXX": "my-c++",
        "PYTORCH_NVCC": "my-nvcc",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CMAKE_BUILD_PARALLEL_LEVEL": "5",
    }
    prepared = prepare(["make"], given, 16, ["12.0"])
    assert prepared.cores == 3
    for name in ("MAX_JOBS", "NVCC_THREADS", "FLASH_ATTN_CUDA_ARCHS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        assert prepared.environ[name] == given[name]
    assert prepared.environ["CMAKE_CXX_COMPILER_LAUNCHER"].endswith("launch.py;ccache")
    ran = subprocess.run([prepared.environ["CXX"], "-v"], env=given, capture_output=True, text=True)
    assert ran.stdout == "my-c++ -v\n"
    assert len(prepared.said) == 1


def test_a_wrapper_survives_odd_paths(tmp_path: Path) -> None:
    odd = tmp_path / "a b"
    odd.mkdir()
    (odd / "g++").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (odd / "g++").chmod(0o755)
    made = wrapper(f"'{odd}/g++' -m64")
    assert made == wrapper(f"'{odd}/g++' -m64")
    ran = subprocess.run([made, "-DX=a b", "-v"], capture_output=True, text=True)
    assert ran.stdout == "-m64|-DX=a b|-v|"


def test_what_was_learned_is_kept(cache: Path) -> None:
    place = place_of("flash-attn", "2.8.3", ["90"], "nvcc13.0")
    assert place == cache / "learned/flash-attn-2.8.3-90-nvcc13.0.json"
    Memory(place).learn("k", Curve((0.0, 10.0), (0.0, 1000.0)))
    Memory(place).learn("k", Curve((0.0, 20.0), (0.0, 500.0)))
    assert Memory(place).curves == {"k": Curve((0.0, 20.0), (0.0, 900.0))}, "the largest that was seen, decayed"
    place.write_text("{")
    assert Memory(place).curves == {}


def pybuild_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pybuild", "run", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environ)


def test_status_and_errors(tmp_path: Path) -> None:
    assert pybuild_run("--", "sh", "-c", "exit 7", cwd=tmp_path).returncode == 7
    missing = pybuild_run("--", "no-such-command", cwd=tmp_path)
    assert missing.returncode == 2
    assert "pybuild: no-such-command can't be started: No such file or directory\n" in missing.stderr
    assert pybuild_run("--memory", "much", "--", "true", cwd=tmp_path).returncode == 2


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs CMake and a C++ compiler")
def test_a_cmake_project(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p LANGUAGES CXX)\nadd_library(p STATIC one.cpp two.cpp)\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text(f"#include <string>\nstd::string {name}() {{ return {{}}; }}\n")
    ran = pybuild_run("--", "sh", "-c", "cmake -S . -B build && cmake --build build", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    (learned,) = (cache / "learned").iterdir()
    assert {"one", "two"} <= Memory(learned).curves.keys()
    # The folder works without pybuild as well.
    (tmp_path / "one.cpp").touch()
    again = subprocess.run(["cmake", "--build", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr + again.stdout


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pybuild", "run", "--", "sh", "-c", "setsid sleep 100 & echo $!; wait"]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert build.stdout
    child = Path(f"/proc/{int(build.stdout.readline())}")
    start = time.monotonic()
    os.killpg(build.pid, signal.SIGINT)
    assert build.wait(5) == 130
    assert time.monotonic() - start < 2
    assert not child.exists()
    build.stdout.close()
