"""Fail before the first compile where torch and nvcc do not belong together, or nvcc lacks an architecture.

`check_versions.py 90 100`, with the toolkit at CUDA_HOME. torch itself refuses another major version only, and
setup.py drops architectures that it does not know for this nvcc without a word.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys


def nvcc_says(*arguments: str) -> str:
    """Standard output of the toolkit's nvcc."""
    nvcc = f"{os.environ['CUDA_HOME']}/bin/nvcc"
    return subprocess.run([nvcc, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Exit with a message for the first thing that does not fit."""
    import torch

    release = re.search(r"release (\d+\.\d+)", nvcc_says("--version"))
    nvcc_version = release[1] if release else "unknown"
    if nvcc_version != torch.version.cuda:
        sys.exit(
            f"CUDA_HOME={os.environ['CUDA_HOME']} has nvcc {nvcc_version}, but torch {torch.__version__} "
            f"was built with CUDA {torch.version.cuda}: take the toolkit and torch of one release"
        )
    known = set(re.findall(r"sm_(\w+)", nvcc_says("--list-gpu-code")))
    for architecture in sys.argv[1:]:
        if architecture not in known:
            sys.exit(
                f"nvcc {nvcc_version} does not know sm_{architecture} (it knows "
                f"{', '.join(sorted(known, key=lambda a: int(re.sub(r'[^0-9]', '', a))))}): "
                "choose other cudaCapabilities, or a release with another CUDA"
            )


if __name__ == "__main__":
    main()
