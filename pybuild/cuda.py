"""Versions of CUDA: the driver that each needs, the PTX that it writes, the host compilers that it takes."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, TypeAdapter


class CudaVersion(BaseModel):
    """One row of cuda.json.

    `driver` is the driver that came with it, `ptx` the version of the PTX that it writes, `gcc` the highest
    major version of gcc that it takes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str
    ptx: str
    gcc: int


@cache
def cuda_versions() -> dict[str, CudaVersion]:
    """cuda.json, by version (`12.8`), ascending."""
    text = resources.files("pybuild").joinpath("cuda.json").read_text(encoding="utf-8")
    rows = TypeAdapter(dict[str, CudaVersion]).validate_json(json.dumps(json.loads(text)["versions"]))
    return dict(sorted(rows.items(), key=lambda row: Version(row[0])))


def oldest_driver(cuda: str) -> str | None:
    """The oldest driver that runs code made with CUDA `cuda`; None where its major version is unknown.

    That of the first release of the same major version: 525.60.13 for all of 12.x ("CUDA minor version
    compatibility" in NVIDIA's CUDA Compatibility). PTX is excluded from that, see `driver_for_ptx`.
    """
    major = cuda.partition(".")[0]
    return next((row.driver for name, row in cuda_versions().items() if name.startswith(f"{major}.")), None)


def driver_for_ptx(isa: str) -> str | None:
    """The oldest driver that compiles PTX of version `isa` (`8.7`); None where that is newer than cuda.json."""
    rows = cuda_versions().values()
    return next((row.driver for row in rows if Version(row.ptx) >= Version(isa)), None)


def highest_gcc(cuda: str) -> int:
    """The highest major version of gcc that nvcc of CUDA `cuda` takes.

    Of a version that is not in cuda.json, that of the newest before it: a newer nvcc never took fewer.
    """
    older = [row.gcc for name, row in cuda_versions().items() if Version(name) <= Version(cuda)]
    return older[-1] if older else next(iter(cuda_versions().values())).gcc
