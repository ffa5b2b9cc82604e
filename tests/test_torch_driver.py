"""What torch does first where binaries are patched for the store: nix/torch_driver.py finds the system's driver.

The driver is a stand-in, made here: two libraries by the driver's names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parent.parent / "nix/torch_driver.py"

# Does what torch's __init__ does, then asks for a library by name as CUDA's runtime does.
PROGRAM = """
import ctypes, os, runpy, sys
runpy.run_path(sys.argv[1])["provide_driver"](sys.argv[3:])
try:
    print(ctypes.CDLL(sys.argv[2]).which())
except (OSError, AttributeError):
    print("none")
print(os.environ.get("TRITON_LIBCUDA_PATH"))
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `first` and `second` with a driver each, that says which it is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in for the driver with")
    real = [sys.executable, "-I", "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    if subprocess.run(real, capture_output=True, check=False, env={}).returncode == 0:
        pytest.skip("this machine's loader finds a real driver by itself, which no stand-in can hide")
    root = tmp_path_factory.mktemp("drivers")
    for number, folder in enumerate(["first", "second"], 1):
        (root / folder).mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            source = root / "source.c"
            source.write_text(f"int which(void) {{ return {number}; }}\n")
            argv = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", str(root / folder / name)]
            subprocess.run(argv, check=True)
    return root


def ask(library: str, *folders: Path, environ: dict[str, str] | None = None) -> list[str]:
    argv = [sys.executable, "-I", "-c", PROGRAM, str(DRIVER), library, *map(str, folders)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environ or {})
    return done.stdout.split()


def test_the_first_folder_with_a_driver_is_taken(drivers: Path, tmp_path: Path) -> None:
    found = ask("libcuda.so.1", tmp_path, drivers / "first", drivers / "second")
    assert found == ["1", str(drivers / "first")]


def test_the_drivers_other_libraries_come_from_the_same_folder(drivers: Path) -> None:
    assert ask("libnvidia-ml.so.1", drivers / "second", drivers / "first")[0] == "2"


def test_a_driver_that_the_loader_finds_is_left_alone(drivers: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(drivers / "second")}
    assert ask("libcuda.so.1", drivers / "first", environ=environ) == ["2", "None"]


def test_the_users_own_choice_for_triton_stays(drivers: Path) -> None:
    assert ask("libcuda.so.1", drivers / "first", environ={"TRITON_LIBCUDA_PATH": "/mine"}) == ["1", "/mine"]


def test_a_file_that_is_no_library_is_passed_over(drivers: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert ask("libcuda.so.1", tmp_path, drivers / "first")[0] == "1"


def test_without_a_driver_torch_still_loads(tmp_path: Path) -> None:
    assert ask("libcuda.so.1", tmp_path) == ["none", "None"]
