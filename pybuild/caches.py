"""Wheels of torch extensions in the caches of pip and uv, which both install again without asking torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
