"""Sizes: bytes inside, GiB for people."""

import math
import re

from pybuild.errors import PybuildError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a SIZE such as `288GiB`, `32G`, `500M` or `1073741824`.

    G and GiB both mean 1024**3, as in systemd and Docker. Raises PybuildError for anything else.
    """
    match = _SIZE.fullmatch(text)
    value = float(match[1]) * _FACTORS[(match[2] or "").upper()] if match else math.inf
    if value >= 2**63:
        raise PybuildError(f"not a size: {text!r}", "Write it as 288GiB, 32G or 500M.")
    return int(value)


def format_gib(size: float) -> str:
    """`size` in bytes as people read it: `14.5 GiB`, below 10 MiB with the unit that fits."""
    if abs(size) >= 0.05 * GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if abs(size) >= MIB else f"{size / KIB:.0f} KiB"


def format_time(seconds: float) -> str:
    """`seconds` as people read a clock: `0:07`, `4:12`, `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
