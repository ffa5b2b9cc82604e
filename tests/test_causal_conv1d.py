"""A second package through the same functions: causal-conv1d, as its setup.py has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from pybuild.config import spec_of
from pybuild.errors import PybuildError
from pybuild.fetch import fetch_files
from pybuild.flake import flake_root
from pybuild.nix import find_nix
from pybuild.plan import Plan, make_plan
from pybuild.profile import load_profile
from pybuild.release import load_source
from pybuild.spec import PYTHONS, BuildSpec
from pybuild.wheel import read_artifact

PACKAGE = "causal-conv1d"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_it_takes_less_than_sixty_lines_of_nix() -> None:
    files = sorted((flake_root() / "nix" / PACKAGE).iterdir())
    assert [file.name for file in files] == ["default.nix"]
    assert len(files[0].read_text().splitlines()) < 60


def test_no_profile_exists_for_it() -> None:
    assert load_profile(PACKAGE) is None


@pytest.mark.parametrize(
    "selection", [{"head_dims": (64,)}, {"dtypes": ("fp16",)}, {"forward_only": True}], ids=lambda s: str(*s)
)
def test_selections_of_flash_attns_kernels_are_refused(selection: dict[str, object]) -> None:
    with pytest.raises(PybuildError, match="only flash-attn has a selection of kernels"):
        BuildSpec.model_validate({"package": PACKAGE, **selection})


def test_its_capabilities_are_its_own() -> None:
    assert BuildSpec(package=PACKAGE, capabilities=("10.0", "7.5")).capabilities == ("7.5", "10.0")
    with pytest.raises(PybuildError, match=r"causal-conv1d has no code for it") as raised:
        BuildSpec(package=PACKAGE, capabilities=("10.3",))
    assert "7.5, 8.0, 9.0, 10.0, 12.0" in raised.value.remedy
    with pytest.raises(PybuildError, match=r"flash-attn has no code for it"):
        BuildSpec(capabilities=("7.5",))


def test_a_projects_file_is_checked_for_the_package_it_counts_for(tmp_path: Path) -> None:
    (tmp_path / "pybuild.toml").write_text('package = "causal-conv1d"\ncapabilities = ["7.5"]\n')
    assert spec_of({}, tmp_path)[0].capabilities == ("7.5",)
    with pytest.raises(PybuildError, match="flash-attn has no code for it"):
        spec_of({"package": "flash-attn"}, tmp_path)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan of a build on this machine, its pins in the store."""
    if shutil.which("nix") is None or PYTHON not in PYTHONS:
        pytest.skip("no nix on PATH, or no release for this Python")
    spec = BuildSpec(package=PACKAGE, release="cu130", python=PYTHON)
    try:
        return make_plan(spec, os.environ, cores=2)
    except PybuildError as error:
        pytest.skip(str(error))


def test_its_kernels_are_those_of_its_setup_py(plan: Plan) -> None:
    nix = find_nix(None, os.environ)
    (sdist,) = fetch_files([load_source(PACKAGE)], nix)
    with tarfile.open(nix.real_path(sdist)) as archive:
        member = archive.extractfile(f"causal_conv1d-{load_source(PACKAGE).version}/setup.py")
        assert member
        listed = re.findall(r'"csrc/(\w+)\.(?:cpp|cu)"', member.read().decode())
    assert sorted(listed) == sorted(kernel.name for kernel in plan.kernels())
    assert len(listed) == 4


@pytest.mark.slow
def test_an_ordinary_venv_imports_its_wheel(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pybuild", "build", PACKAGE, "--release", "cu130", "--python", PYTHON]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0
    wheel = tmp_path / done.stdout.strip()
    tag = f"cp{PYTHON.replace('.', '')}"
    assert wheel.name.startswith(f"causal_conv1d-1.7.0+cu130.torch2.11.sm100-{tag}-{tag}-manylinux_2_")
    assert {str(code) for code in read_artifact(wheel).codes} == {"sm_100"}
    venv.create(tmp_path / "venv", with_pip=True)
    pip: list[str | Path] = [tmp_path / "venv/bin/pip", "install", "-q", "torch==2.11.0", "setuptools<82", str(wheel)]
    subprocess.run(pip, check=True)
    program = "import causal_conv1d, causal_conv1d_cuda; print(causal_conv1d.__version__)"
    printed = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    assert printed.stdout.strip() == "1.7.0"
