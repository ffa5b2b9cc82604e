"""Wheels of torch extensions in the caches of pip and uv, which both install again without asking torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from pybuild.errors import PybuildError
from pybuild.units import MIB
from pybuild.wheel import Artifact, missing_symbols, read_artifact, read_header, read_unpacked, read_unpacked_header

# More than anybody's cache holds of compiled wheels; a bound on the time that doctor takes.
_MOST = 500
_PLATFORM_WHEEL = re.compile(r"-(cp\d+|py\d[\d.py]*)-\w+-(?!any)[\w.]+$")


@dataclass(frozen=True)
class CachedWheel:
    """A compiled wheel in a cache. `path` is the file, or the folder that uv unpacked it into."""

    tool: Literal["pip", "uv"]
    path: Path
    file_name: str


def cached_wheels(environ: Mapping[str, str], root: Path = Path("/")) -> list[CachedWheel]:
    """The compiled wheels (not for `any` platform) that pip and uv keep for this user, at most 500.

    Where they are is what `pip cache dir` and `uv cache dir` print: PIP_CACHE_DIR and UV_CACHE_DIR, else below
    XDG_CACHE_HOME or ~/.cache. Under `root`, for recorded machines. pip's cache of downloads is left out: its
    files have no names.
    """
    home = environ.get("HOME", "/root")
    base = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    found = []
    for wheel in _all(
        _below(root, environ.get("PIP_CACHE_DIR") or f"{base}/pip"),
        _below(root, environ.get("UV_CACHE_DIR") or f"{base}/uv"),
    ):
        if _PLATFORM_WHEEL.search(wheel.file_name.removesuffix(".whl")):
            found.append(wheel)
        if len(found) == _MOST:
            break
    return found


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _all(pip: Path, uv: Path) -> Iterator[CachedWheel]:
    # Built here by pip: wheels/ab/cd/ef/HASH/NAME.whl.
    for path in pip.glob("wheels/*/*/*/*/*.whl"):
        yield CachedWheel("pip", path, path.name)
    # Built here by uv: sdists-v11/{path,url,git}/HASH/REVISION/NAME.whl, and pypi/NAME/VERSION/REVISION/NAME.whl,
    # and index/HASH/NAME/VERSION/REVISION/NAME.whl. Not "**": unpacked sources lie beside them.
    for folders in ("*/*/*", "pypi/*/*/*", "index/*/*/*/*"):
        for path in uv.glob(f"sdists-v*/{folders}/*.whl"):
            yield CachedWheel("uv", path, path.name)
    # Downloaded by uv and unpacked: wheels-v8/{pypi,index/HASH,url/HASH}/NAME/VERSION-TAGS, a link into archive-v0.
    for path in [*uv.glob("wheels-v*/pypi/*/*-*-*-*"), *uv.glob("wheels-v*/[iu]*/*/*/*-*-*-*")]:
        if path.is_dir():
            yield CachedWheel("uv", path, f"{path.parent.name.replace('-', '_')}-{path.name}.whl")


@dataclass(frozen=True)
class CachedTorchWheel:
    """A cached wheel that needs torch.

    `missing` are the symbols that it needs and torch here lacks; None where there was no time to compare, and then
    `older_than_torch` says whether it was there before torch was installed.
    """

    wheel: CachedWheel
    artifact: Artifact
    missing: tuple[str, ...] | None
    older_than_torch: bool


def torch_wheels(
    wheels: Iterable[CachedWheel],
    python_tag: str,
    torch_libraries: Sequence[Path],
    *,
    budget: int = 400 * MIB,
) -> list[CachedTorchWheel]:
    """Those of `wheels` that require torch and are for this Python (`cp312`), compared with torch's libraries.

    At most `budget` bytes are unpacked (they come out at some 300 MiB a second); of wheels beyond that `missing` is
    None. A wheel that is damaged is left out: pip says so itself.
    """
    installed = max((path.stat().st_mtime for path in torch_libraries), default=0.0)
    found = []
    for wheel in wheels:
        try:
            unpacked = wheel.path.is_dir()
            artifact, requires, size = (
                read_unpacked_header(wheel.path, wheel.file_name) if unpacked else read_header(wheel.path)
            )
            if not _requires_torch(requires) or not _for_python(artifact, python_tag):
                continue
            missing = None
            if torch_libraries and size <= budget:
                # What lies unpacked is read where its tables are, not as a whole.
                budget -= 0 if unpacked else size
                whole = read_unpacked(wheel.path, wheel.file_name) if unpacked else read_artifact(wheel.path)
                symbols = {symbol for library in whole.libraries for symbol in library.torch_symbols}
                missing = missing_symbols(symbols, torch_libraries)
            older = bool(installed) and wheel.path.stat().st_mtime < installed
        except (PybuildError, OSError):
            continue
        found.append(CachedTorchWheel(wheel, artifact, missing, older))
    return found


def _requires_torch(requires: Iterable[str]) -> bool:
    for line in requires:
        try:
            if Requirement(line).name.lower() == "torch":
                return True
        except InvalidRequirement:
            continue
    return False


def _for_python(artifact: Artifact, python_tag: str) -> bool:
    return python_tag in artifact.python_tags or "abi3" in artifact.abi_tags or "none" in artifact.abi_tags
