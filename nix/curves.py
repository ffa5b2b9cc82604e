"""Print a profile's curves as the gate reads them: `curves.py PROFILE THREADS sm_90 sm_100`. Standard library only.

They are scaled to these architectures and this many threads of nvcc as pybuild.profile has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pybuild.curve import measured_curve, scale


def main() -> None:
    """Write {name: [[seconds, bytes], ...]} to standard output."""
    profile, threads, architectures = json.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]), sys.argv[3:]
    curves = {}
    for compile_ in profile["compiles"]:
        if compile_["archs"] in ([], ["sm_100"]):
            curve = measured_curve(compile_["memory_mib"], compile_["wall_s"], compile_["peak_mib"])
            if compile_["archs"]:
                curve = scale(curve, architectures, threads)
            curves[compile_["kernel"]] = list(zip(curve.times, curve.memory, strict=True))
    json.dump(curves, sys.stdout)


if __name__ == "__main__":
    main()
