"""Take kernels out of setup.py's sources: `select_sources.py SETUP_PY STUBS_CPP KERNEL...`. Standard library only.

The first kernel's place is taken by the stubs. Every kernel has to be there exactly once, or upstream's list changed
and this selection would not be what it says.
"""

from __future__ import annotations

import sys
from pathlib import Path


def select(text: str, stubs: str, dropped: list[str]) -> str:
    """setup.py's text without the kernels `dropped`, with `stubs` among its sources."""
    folder = "csrc/flash_attn/src"
    for index, kernel in enumerate(dropped):
        line = f'                "{folder}/{kernel}.cu",\n'
        if text.count(line) != 1:
            raise SystemExit(f"setup.py names {kernel}.cu {text.count(line)} times, not once")
        text = text.replace(line, f'                "{folder}/{stubs}",\n' if index == 0 else "")
    return text


if __name__ == "__main__":
    setup_py = Path(sys.argv[1])
    setup_py.write_text(select(setup_py.read_text(), sys.argv[2], sys.argv[3:]))
