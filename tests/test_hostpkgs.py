"""The host's facts: stand-ins for compilers, nvcc and interpreters on a PATH of the test's own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pybuild.errors import PybuildError
from pybuild.hostpkgs import choice_of, find_compiler, find_cuda, find_python, read_facts
from pybuild.spec import BuildSpec


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def gcc(folder: Path, version: str, suffix: str = "") -> None:
    for name in ("gcc", "g++"):
        program(
            folder / f"{name}{suffix}",
            f'case $1 in -dumpfullversion) echo {version};; *) echo "{name} (Debian {version}-1) {version}";; esac',
        )


def nvcc(home: Path, release: str, version: str) -> Path:
    program(home / "bin/nvcc", f'echo "Cuda compilation tools, release {release}, V{version}"')
    return home


def interpreter(path: Path, version: str, *, headers: bool = True) -> None:
    answer = {"path": str(path), "version": version, "prefix": str(path.parent.parent), "headers": headers}
    program(path, f"echo '{json.dumps(answer)}'")


def on_path(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder)}


def test_the_first_compiler_on_path_is_taken_with_the_distributions_revision(tmp_path: Path) -> None:
    gcc(tmp_path, "12.2.0")
    cc, cxx = find_compiler("13.0", on_path(tmp_path))
    assert (cc.path, cxx.path) == (tmp_path / "gcc", tmp_path / "g++")
    assert cxx.version == "12.2.0-1"


def test_a_compiler_that_is_too_new_gives_way_to_one_with_its_version_in_the_name(tmp_path: Path) -> None:
    gcc(tmp_path, "15.1.0")
    gcc(tmp_path, "14.2.0", "-14")
    gcc(tmp_path, "12.2.0", "-12")
    assert find_compiler("12.8", on_path(tmp_path))[1].path == tmp_path / "g++-14"
    assert find_compiler("13.0", on_path(tmp_path))[1].path == tmp_path / "g++"


def test_no_compiler_that_cuda_takes_names_what_was_found_and_the_range(tmp_path: Path) -> None:
    gcc(tmp_path, "16.0.1")
    with pytest.raises(PybuildError) as raised:
        find_compiler("13.0", on_path(tmp_path))
    assert f"{tmp_path / 'g++'} is 16.0.1" in raised.value.what
    assert "gcc 9 to 15" in raised.value.remedy


def test_no_compiler_at_all_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="no C\\+\\+ compiler"):
        find_compiler("13.0", on_path(tmp_path))


def test_a_toolkit_is_known_by_what_its_nvcc_prints_not_by_its_folder(tmp_path: Path) -> None:
    liar = nvcc(tmp_path / "cuda-12.8", "13.1", "13.1.80")
    honest = nvcc(tmp_path / "toolkit", "12.8", "12.8.93")
    assert find_cuda("12.8", {"CUDA_HOME": str(liar)}) is None
    found = find_cuda("12.8", {"CUDA_HOME": str(honest)})
    assert found is not None
    assert (found.path, found.nvcc) == (honest, "12.8.93")


def test_a_toolkit_that_is_named_has_to_fit(tmp_path: Path) -> None:
    wrong = nvcc(tmp_path / "cuda", "12.9", "12.9.41")
    with pytest.raises(PybuildError, match=r"has nvcc 12\.9\.41, and CUDA 12\.8 is needed"):
        find_cuda("12.8", {}, wrong)
    with pytest.raises(PybuildError, match="has no nvcc that runs"):
        find_cuda("12.8", {}, tmp_path)


def test_cu128_without_its_toolkit_names_three_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc(tmp_path, "12.2.0")
    program(tmp_path / "bash", ":")
    interpreter(tmp_path / "python3", "3.12.3")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    if Path("/usr/local/cuda-12.8").exists():
        pytest.skip("this machine has a CUDA 12.8 toolkit")
    with pytest.raises(PybuildError) as raised:
        read_facts(BuildSpec(release="cu128"), on_path(tmp_path))
    assert all(way in raised.value.remedy for way in ("nixpkgs", "--cuda-home", "--release cu130"))


def test_cu128_with_its_toolkit_gives_it_to_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc(tmp_path / "bin", "12.2.0")
    program(tmp_path / "bin/bash", ":")
    interpreter(tmp_path / "python/bin/python3", "3.12.3")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python/bin/python3"))
    home = nvcc(tmp_path / "cuda", "12.8", "12.8.93")
    facts = read_facts(BuildSpec(release="cu128"), on_path(tmp_path / "bin"), cuda_home=home)
    assert facts.cuda_home is not None
    assert facts.cuda_home.nvcc == "12.8.93"
    # The compiler's folder, the interpreter's and the toolkit's lie below one another or beside /usr: each once.
    assert tmp_path in facts.sandbox_paths
    assert not any(path != tmp_path and path.is_relative_to(tmp_path) for path in facts.sandbox_paths)


@pytest.mark.parametrize("where", [".pyenv/versions/3.12.1/bin/python3", ".local/share/uv/python"])
def test_a_python_of_pyenv_or_uv_is_found_in_the_home(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / where
    if where.endswith("uv/python"):
        path = path / "cpython-3.12.1-linux-x86_64-gnu/bin/python3"
    interpreter(path, "3.12.1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    found = find_python("3.12", {"HOME": str(tmp_path), "PATH": ""})
    assert found.path == path


def test_a_python_without_headers_is_refused_with_the_package_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    interpreter(tmp_path / "python3.13", "3.13.1", headers=False)
    with pytest.raises(PybuildError, match=r"no headers \(Python\.h\)") as raised:
        find_python("3.13", on_path(tmp_path))
    assert "python3.13-dev" in raised.value.remedy


def test_the_active_environments_python_comes_first(tmp_path: Path) -> None:
    interpreter(tmp_path / "venv/bin/python", "3.10.9")
    environ = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": os.environ["PATH"]}
    assert find_python(None, environ).version == "3.10.9"


def test_no_python_of_the_version_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    interpreter(tmp_path / "python3", "3.9.2")
    with pytest.raises(PybuildError, match=r"no Python 3\.10 found"):
        find_python("3.10", on_path(tmp_path))


def test_what_was_asked_for_is_left_out_where_it_is_all() -> None:
    everything = BuildSpec(head_dims=(32, 64, 96, 128, 192, 256), dtypes=("fp16", "bf16"))
    assert choice_of(everything).selection == {}
    some = BuildSpec(head_dims=(128,), dtypes=("bf16",), forward_only=True)
    assert choice_of(some).selection == {"headDims": (128,), "dtypes": ("bf16",), "backward": False}
