"""Load NVIDIA's driver libraries from where this system has them. Standard library only; torch calls it first.

Programs from the Nix store don't look at the system's libraries, so they find the driver on NixOS only
(/run/opengl-driver). Elsewhere it lies with all other libraries, none of which may get into the process: so these few
are loaded by their full paths. Whoever asks for one of them by name afterwards (CUDA's runtime, NCCL, torch) gets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

# The driver, its compiler for PTX, and what reads clocks and topology.
LIBRARIES = ("libcuda.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ml.so.1")

# NixOS; WSL; Debian and Ubuntu; Fedora, RHEL and SUSE; Arch; containers on Kubernetes.
FOLDERS = (
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
)


def load_driver(folders: Sequence[str] = FOLDERS) -> str | None:
    """Load the driver's libraries from the first of the folders that has libcuda; that folder.

    None where the loader finds the driver by itself (LD_LIBRARY_PATH), or no folder has one that loads.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARIES[0])
        return None
    for folder in folders:
        try:
            ctypes.CDLL(str(Path(folder) / LIBRARIES[0]))
        except OSError:
            continue
        for library in LIBRARIES[1:]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(folder) / library))
        return folder
    return None


def provide_driver(folders: Sequence[str] = FOLDERS) -> None:
    """Load the driver, and tell triton where it is."""
    if found := load_driver(folders):
        # triton links what it compiles with the driver, and would ask ldconfig, which NixOS does not have.
        os.environ.setdefault("TRITON_LIBCUDA_PATH", found)
