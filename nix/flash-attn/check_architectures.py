"""Check that objects hold code for exactly these architectures: `check_architectures.py "90;100" OBJECT...`.

Asks cuobjdump of the toolkit at CUDA_HOME.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys


def architectures(path: str) -> set[str]:
    """The architectures that an object has machine code for, as in `sm_100`."""
    cuobjdump = os.path.join(os.environ["CUDA_HOME"], "bin", "cuobjdump")
    listing = subprocess.run([cuobjdump, "--list-elf", path], check=True, capture_output=True, text=True)
    return set(re.findall(r"\bsm_\d+[a-z]?\b", listing.stdout))


def main() -> None:
    """Exit with a message that names the first object that has more or less than it should."""
    wanted = {f"sm_{architecture}" for architecture in sys.argv[1].split(";")}
    if not sys.argv[2:]:
        sys.exit("no objects to check: setup.py left none where they are looked for")
    for path in sys.argv[2:]:
        found = architectures(path)
        if found != wanted:
            sys.exit(
                f"{os.path.basename(path)} has code for {', '.join(sorted(found)) or 'no architecture'}, "
                f"asked for was {', '.join(sorted(wanted))}"
            )
    print(f"{len(sys.argv) - 2} objects have code for {', '.join(sorted(wanted))}, and for nothing else")


if __name__ == "__main__":
    main()
