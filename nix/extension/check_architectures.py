"""Check that objects hold code for exactly these architectures: `check_architectures.py sm_90 sm_100 -- OBJECT...`.

Objects of C++ have no GPU code and are passed over; one object at least has to have some. Asks cuobjdump of the toolkit
at CUDA_HOME.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def architectures(path: str) -> set[str]:
    """The architectures that an object has machine code for, as in `sm_100`."""
    cuobjdump = f"{os.environ['CUDA_HOME']}/bin/cuobjdump"
    listing = subprocess.run([cuobjdump, "--list-elf", path], check=False, capture_output=True, text=True)
    if listing.returncode != 0 and "does not contain device code" not in listing.stdout + listing.stderr:
        sys.exit(f"cuobjdump {path} failed: {listing.stderr.strip()}")
    return set(re.findall(r"\bsm_\d+[a-z]?\b", listing.stdout))


def main() -> None:
    """Exit with a message that names the first object that has more or less than it should."""
    split = sys.argv.index("--")
    wanted, objects = set(sys.argv[1:split]), sys.argv[split + 1 :]
    names = ", ".join(sorted(wanted))
    checked = 0
    for path in objects:
        found = architectures(path)
        if found and found != wanted:
            sys.exit(f"{Path(path).name} has code for {', '.join(sorted(found))}, asked for was {names}")
        checked += bool(found)
    if not checked:
        sys.exit(f"none of the {len(objects)} objects that setup.py left has GPU code; asked for was {names}")
    print(f"{checked} objects have code for {names}, and for nothing else")


if __name__ == "__main__":
    main()
