"""Our flake, and the package set it is built with, as folders that nix can be pointed at.

nix reads a flake as a whole folder. A checkout holds virtual environments and wheels as well, and an installed
pybuild no checkout at all: so the flake's own files are copied into the user's cache, to a folder named by their
contents. The same contents are the same folder, and a printed command line stays good.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from pybuild.hostpkgs import Choice, Facts

# The flake's own files: beside the package in a checkout, inside it where it is installed (pyproject.toml).
PARTS = ("flake.nix", "flake.lock", "nix")

# What flake.nix reads of the package: data and programs that derivations use.
PACKAGE_PARTS = ("profiles", "curve.py", "gate.py", "launch.py")


def flake_root() -> Path:
    """Where the flake's files are: in the checkout that this module belongs to, or in the installed package."""
    package = Path(__file__).parent
    return package / "_flake" if (package / "_flake").is_dir() else package.parent


def stage_flake() -> Path:
    """The folder with the flake and nothing else."""
    package = _files(Path(__file__).parent, PACKAGE_PARTS)
    return _stage("flake", _files(flake_root(), PARTS) | {f"pybuild/{path}": file for path, file in package.items()})


def stage_hostpkgs(facts: Facts) -> Path:
    """The folder with nix/hostpkgs and the facts of this machine."""
    files = _files(flake_root() / "nix/hostpkgs", (".",))
    files["facts.json"] = facts.model_dump_json(by_alias=True, exclude={"selection": {"python"}}, indent=2).encode()
    return _stage("hostpkgs", files)


def stage_nixpkgs(choice: Choice) -> Path:
    """The folder with nixpkgs as flake.lock pins it, and what was asked for."""
    files = _files(flake_root() / "nix/asked", (".",))
    files["flake.lock"] = (flake_root() / "flake.lock").read_bytes()
    files["choice.json"] = choice.model_dump_json(by_alias=True, exclude_none=True, indent=2).encode()
    return _stage("nixpkgs", files)


def _files(root: Path, parts: tuple[str, ...]) -> dict[str, bytes]:
    """Contents of all files below these parts of `root`, by relative path."""
    found: dict[str, bytes] = {}
    for part in parts:
        top = root / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[str(path.relative_to(root))] = path.read_bytes()
    return found


def _stage(name: str, files: Mapping[str, bytes]) -> Path:
    """A folder in the user's cache that holds exactly `files`, written whole or not at all."""
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    folder = platformdirs.user_cache_path("pybuild") / f"{name}-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        for path, content in files.items():
            target = draft / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:  # another pybuild was faster
            shutil.rmtree(draft)
    return folder
