"""Compute capabilities: which GPU has which, and which code runs on it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from pybuild.errors import PybuildError

_TEXT = re.compile(r"(\d{1,2})\.(\d)", re.ASCII)
_ARCHITECTURE = re.compile(r"(sm|compute|lto)_(\d{1,2})(\d)([af]?)", re.ASCII)

# Upstream's setup.py of flash-attn 2.8.3 knows these four (FLASH_ATTN_CUDA_ARCHS) and drops any other.
FLASH_ATTN = ("8.0", "9.0", "10.0", "12.0")


class Capability(NamedTuple):
    """A compute capability, such as 10.0; ordered as NVIDIA orders them."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def architecture(self) -> str:
        """nvcc's name of it: `sm_100`."""
        return f"sm_{self.major}{self.minor}"

    @classmethod
    def parse(cls, text: str) -> Capability:
        """Of `10.0`. Raises PybuildError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise PybuildError(f"not a compute capability: {text!r}", "Write it as 10.0.")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, order=True)
class Code:
    """One piece of device code: a cubin for an architecture, PTX, or LTO intermediate code.

    `suffix` is "a" for code that uses one architecture's own instructions (sm_90a), "f" for a family's
    (sm_100f), else empty.
    """

    capability: Capability
    kind: Literal["cubin", "ptx", "lto"] = "cubin"
    suffix: Literal["", "a", "f"] = ""

    def __str__(self) -> str:
        prefix = {"cubin": "sm", "ptx": "compute", "lto": "lto"}[self.kind]
        return f"{prefix}_{self.capability.major}{self.capability.minor}{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> Code:
        """Of nvcc's names: `sm_100`, `compute_90`, `sm_90a`. Raises PybuildError for anything else."""
        match = _ARCHITECTURE.fullmatch(text)
        if not match:
            raise PybuildError(f"not an architecture: {text!r}", "Write it as sm_100 or compute_90.")
        kind: Literal["cubin", "ptx", "lto"] = "cubin"
        if match[1] != "sm":
            kind = "ptx" if match[1] == "compute" else "lto"
        suffix: Literal["", "a", "f"] = ""
        if match[4]:
            suffix = "a" if match[4] == "a" else "f"
        return cls(Capability(int(match[2]), int(match[3])), kind, suffix)


def runs_on(code: Code, gpu: Capability) -> bool:
    """Whether the driver can run `code` on a GPU of capability `gpu`.

    A cubin runs on its own major version with the same or a higher minor; PTX is compiled by the driver for
    anything newer (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility"). With suffix "a",
    cubin and PTX run on exactly their own capability; with "f", both on their family, which is the cubin rule
    (same guide, "Family-Specific Features"). LTO code runs nowhere before it is linked.
    """
    if code.kind == "lto":
        return False
    if code.suffix == "a":
        return gpu == code.capability
    if code.kind == "ptx" and code.suffix == "":
        return gpu >= code.capability
    return gpu.major == code.capability.major and gpu.minor >= code.capability.minor


def to_build_for(gpu: Capability, offered: tuple[str, ...] = FLASH_ATTN) -> str | None:
    """The capability among `offered` to build for so that `gpu` runs it: 8.0 for an 8.9, 12.0 for a 12.1.

    None where no offered one runs there.
    """
    fitting = [c for c in map(Capability.parse, offered) if runs_on(Code(c), gpu)]
    return str(max(fitting)) if fitting else None


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    capability: str
    pattern: str
    names: tuple[str, ...]


@cache
def gpu_table() -> tuple[_Row, ...]:
    """gpus.json: the first row whose pattern is found in a GPU's name says its capability."""
    text = resources.files("pybuild").joinpath("gpus.json").read_text(encoding="utf-8")
    return TypeAdapter(tuple[_Row, ...]).validate_json(json.dumps(json.loads(text)["gpus"]))


def of_gpu(name: str) -> Capability | None:
    """Capability of a GPU by its name, as nvidia-smi or /proc/driver/nvidia give it; None where unknown."""
    for row in gpu_table():
        if re.search(row.pattern, name, re.IGNORECASE):
            return Capability.parse(row.capability)
    return None
