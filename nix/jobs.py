"""Print how many compiles may run at once: `jobs.py CORES PEAK_BYTES`. Standard library only, runs inside the build.

The smaller of the cores and what MemAvailable, less a reserve, holds at the peak of one compile; never less than 1. The
same formula as parallelism.nix and pybuild/recommend.py, over the machine that the build runs on.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

GIB = 1024**3


def core_cap(cores: int, available: int, peak: int) -> int:
    """Compiles of `peak` bytes that `available` bytes and `cores` allow. The reserve: max(2 GiB, 10 %)."""
    budget = available - max(2 * GIB, available // 10)
    return max(1, min(cores, budget // peak))


def mem_available(meminfo: str) -> int:
    """MemAvailable of /proc/meminfo, in bytes."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    if not match:
        raise SystemExit("/proc/meminfo has no MemAvailable")
    return int(match[1]) * 1024


if __name__ == "__main__":
    print(core_cap(int(sys.argv[1]), mem_available(Path("/proc/meminfo").read_text()), int(sys.argv[2])))
