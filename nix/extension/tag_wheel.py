"""Give a wheel the manylinux tag that its symbols allow: `tag_wheel.py WHEEL DIST`.

torch's and CUDA's libraries are not grafted into the wheel: whoever installs it has them from torch's own wheel. Fails
where a symbol needs more than manylinux_2_39 (Ubuntu 24.04's glibc), or where an RPATH leads into the Nix store.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

NEWEST_GLIBC = (2, 39)
# What the torch wheel brings along.
EXCLUDED = frozenset({"libtorch*.so*", "libc10*.so*", "libcudart.so*", "libcuda.so*", "libcu*.so*", "libnv*.so*"})


def run_paths(wheel: Path) -> list[str]:
    """Every RPATH and RUNPATH entry in the wheel's shared objects."""
    paths: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            for section in ELFFile(BytesIO(archive.read(name))).iter_sections():
                if isinstance(section, DynamicSection):
                    paths += [t.rpath for t in section.iter_tags("DT_RPATH")]
                    paths += [t.runpath for t in section.iter_tags("DT_RUNPATH")]
    return [part for path in paths for part in path.split(":")]


def main() -> None:
    """Tag the wheel into the folder, or exit with a message that names what stands against it."""
    wheel, dist = Path(sys.argv[1]), Path(sys.argv[2])
    inside = [path for path in run_paths(wheel) if not path.startswith("$ORIGIN")]
    if inside:
        sys.exit(f"{wheel.name} has a run path that only this machine has: {', '.join(inside)}")

    abi = analyze_wheel_abi(
        Libc.GLIBC, Architecture.x86_64, wheel, EXCLUDED, disable_isa_ext_check=True, allow_graft=False
    )
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", abi.overall_policy.name)
    if not match or (int(match[1]), int(match[2])) > NEWEST_GLIBC:
        libraries = ", ".join(sorted(abi.external_refs[abi.overall_policy.name].libs))
        symbols = [f"{symbol}_{version}" for symbol, vs in abi.versioned_symbols.items() for version in sorted(vs)]
        sys.exit(
            f"{wheel.name} fits {abi.overall_policy.name}, which is more than manylinux_2_{NEWEST_GLIBC[1]}; "
            f"it needs the symbol versions {', '.join(sorted(symbols))} "
            f"and the libraries {libraries or 'of glibc alone'}"
        )
    tagged = dist / wheel.name.replace("linux_x86_64", abi.overall_policy.name)
    tags = ["--remove", "--platform-tag", abi.overall_policy.name]
    subprocess.run([sys.executable, "-m", "wheel", "tags", *tags, str(wheel)], check=True, stdout=subprocess.DEVNULL)
    shutil.move(wheel.parent / tagged.name, tagged)
    print(f"{tagged.name}: symbols up to glibc {match[1]}.{match[2]}")


if __name__ == "__main__":
    main()
