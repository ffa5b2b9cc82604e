"""Unpack wheels into one site-packages: `unpack_wheels.py SITE_PACKAGES WHEEL...`. Standard library only.

With ONLY in the environment, only what lies below that folder of the wheels; with EXCEPT, all but that.

An installer without a resolver: the wheels are pinned and complete. Differs from `zipfile -e` in keeping modes and in
placing the `.data` folders (scripts go to ../../../bin, as pip's do).
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def destination(name: str, site_packages: Path) -> Path:
    """Where a wheel's member belongs."""
    parts = Path(name).parts
    if parts[0].endswith(".data") and len(parts) > 2:
        prefix = site_packages.parents[2]
        base = {"purelib": site_packages, "platlib": site_packages, "scripts": prefix / "bin", "data": prefix}
        return base[parts[1]].joinpath(*parts[2:])
    return site_packages / name


def is_wanted(name: str) -> bool:
    """Whether the environment's ONLY and EXCEPT let this member through."""
    only, exclude = os.environ.get("ONLY"), os.environ.get("EXCEPT")
    return (not only or name.startswith(f"{only}/")) and not (exclude and name.startswith(f"{exclude}/"))


def unpack(wheel: str, site_packages: Path) -> None:
    """Unpack one wheel. Programs get their executable bit even where the archive lost it (NVIDIA's bin/)."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or not is_wanted(member.filename):
                continue
            target = destination(member.filename, site_packages)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            mode = member.external_attr >> 16
            with target.open("rb") as file:
                is_program = target.parent.name == "bin" and file.read(4) in (b"\x7fELF", b"#!/b", b"#!/u", b"#!py")
            executable = is_program or bool(mode & stat.S_IXUSR)
            target.chmod(0o755 if executable else 0o644)


def main() -> None:
    """Unpack every wheel of the command line, a thread each (zlib lets go of the interpreter's lock)."""
    site_packages = Path(sys.argv[1])
    with ThreadPoolExecutor(int(os.environ.get("NIX_BUILD_CORES") or 1)) as pool:
        list(pool.map(lambda wheel: unpack(wheel, site_packages), sys.argv[2:]))


if __name__ == "__main__":
    main()
