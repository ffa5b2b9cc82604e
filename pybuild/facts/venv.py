"""The active Python environment: which packages it has, and which torch, without running any of them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ValidationError

_ASK = """
import json, os, sys, sysconfig
print(json.dumps({
    "executable": sys.executable,
    "version": ".".join(map(str, sys.version_info[:3])),
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "paths": [p for p in sys.path if os.path.isdir(p)],
}))
"""
_ASSIGNED = r"^{}\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]"
_TORCH_LIBRARY = re.compile(r"lib(torch|c10)\w*\.so")


@dataclass(frozen=True)
class Environment:
    """A Python environment.

    `packages` are installed distributions by normalised name, with their versions; None where nobody looked.
    `torch` is torch's full version (`2.10.0+cu128`) and `torch_cuda` the CUDA that it was compiled with, None where
    it is compiled without; `torch_libraries` are the files that an extension is linked with at import.
    """

    executable: str
    version: str
    free_threaded: bool = False
    packages: Mapping[str, str] | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_libraries: tuple[Path, ...] = ()


class _Answer(BaseModel):
    executable: str
    version: str
    free_threaded: bool
    paths: tuple[Path, ...]


def active_python(environ: Mapping[str, str]) -> str | None:
    """The interpreter of the active environment: VIRTUAL_ENV's, conda's, else python3 on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if (folder := environ.get(name)) and os.access(python := f"{folder}/bin/python", os.X_OK):
            return python
    return shutil.which("python3", path=environ.get("PATH")) or shutil.which("python", path=environ.get("PATH"))


def read_environment(environ: Mapping[str, str]) -> Environment | None:
    """The active environment; None where there is no Python, or one that does not answer within ten seconds.

    torch is not imported, which takes seconds: torch/version.py says its version (its metadata leave the `+cu128` out).
    """
    python = active_python(environ)
    if python is None:
        return None
    try:
        asked = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=10, check=True, env=dict(environ)
        )
        answer = _Answer.model_validate_json(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValidationError):
        return None
    # sys.path begins with the current folder's own "", which is no place of packages.
    packages = dict(_packages(answer.paths))
    torch = next((p / "torch" for p in answer.paths if (p / "torch/version.py").is_file()), None)
    text = _text(torch / "version.py") if torch else ""
    return Environment(
        executable=answer.executable,
        version=answer.version,
        free_threaded=answer.free_threaded,
        packages=packages,
        torch=_assigned("__version__", text),
        torch_cuda=_assigned("cuda", text),
        torch_libraries=tuple(_libraries_of(torch)) if torch else (),
    )


def _packages(paths: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """The first of a name wins at import, so it comes last here."""
    found = list(importlib.metadata.distributions(path=[str(path) for path in paths]))
    for distribution in reversed(found):
        # Left-overs of an interrupted pip have no name.
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        if name and version:
            yield canonicalize_name(name), version


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _assigned(name: str, text: str) -> str | None:
    """The string that torch/version.py assigns to a name, `cuda: Optional[str] = '12.8'`; None where it is None."""
    match = re.search(_ASSIGNED.format(re.escape(name)), text, re.MULTILINE)
    return match[1] if match else None


def _libraries_of(torch: Path) -> list[Path]:
    return sorted(p for p in (torch / "lib").glob("lib*.so") if _TORCH_LIBRARY.fullmatch(p.name))
