"""What the gate has learned of compiles, kept for the next build of the same package."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from pybuild.curve import Curve
from pybuild.gate import read_curves

# What an earlier build of the same took counts this much with the next: the largest that was seen, decayed.
_DECAY = 0.9


def place_of(package: str, version: str, architectures: Sequence[str], compiler: str) -> Path:
    """The file, in the user's cache, of what was learned of one package, version, architecture and compiler."""
    words = [package or "unknown", version, *sorted(architectures), compiler]
    name = "-".join(re.sub(r"[^A-Za-z0-9._+-]+", "_", word) for word in words if word)
    return platformdirs.user_cache_path("pybuild") / "learned" / f"{name[:200]}.json"


def recall(path: Path) -> dict[str, Curve]:
    """The curves that were learned; none where nothing was, or where the file is damaged."""
    try:
        return read_curves(str(path))
    except ValueError:
        return {}


class Memory:
    """Keeps each curve as it is learned: a build that is stopped has taught what it finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves = recall(path)

    def learn(self, name: str, curve: Curve) -> None:
        """Keep a curve. It never counts less than nine tenths of what the last one took."""
        known = self.curves.get(name)
        if known and curve.peak:
            curve = curve.scaled(memory=max(1.0, _DECAY * known.peak / curve.peak))
        self.curves[name] = curve
        points = {
            name: [[round(time, 4), round(memory)] for time, memory in zip(curve.times, curve.memory, strict=True)]
            for name, curve in self.curves.items()
        }
        # A cache that can't be written ends no build.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=self.path.parent, prefix=".")
            with os.fdopen(descriptor, "w") as file:
                json.dump(points, file)
            Path(draft).replace(self.path)
