"""`pip install .`, as the README says it: not editable, in a virtual environment of its own, without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Imports every module, and prints the folder with the flake.
PROGRAM = """
import importlib, pkgutil, pybuild
from pybuild.flake import stage_flake
for module in pkgutil.walk_packages(pybuild.__path__, "pybuild."):
    if not module.name.startswith("pybuild._flake") and module.name != "pybuild.__main__":
        importlib.import_module(module.name)
print(stage_flake())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pybuild, away from the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", ROOT], check=True, cwd=folder)
    return folder / "venv"


def staged(python: Path | str, cache: Path) -> Path:
    """The folder that stage_flake() of this interpreter's pybuild makes."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [python, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True, cwd=cache, env=environment
    )
    return Path(done.stdout.strip())


def test_every_module_is_there_and_the_flake_is_the_checkouts(installed: Path, tmp_path: Path) -> None:
    """The name of the folder is the hash of its contents."""
    from_checkout, from_package = tmp_path / "checkout", tmp_path / "package"
    from_checkout.mkdir()
    from_package.mkdir()
    flake = staged(installed / "bin/python", from_package)
    assert flake.name == staged(sys.executable, from_checkout).name
    assert (flake / "flake.nix").is_file()
    assert (flake / "pybuild/gate.py").is_file()


def test_the_command_runs(installed: Path, tmp_path: Path) -> None:
    argv = [str(installed / "bin/pybuild"), "recommend-cores", "--cores", "64", "--memory", "128GiB"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    assert 1 <= int(done.stdout) <= 64
