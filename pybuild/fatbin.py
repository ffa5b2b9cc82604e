"""The fatbins in a compiled CUDA file: which device code there is, read from headers alone.

A fatbin, as nvcc 11 to 13 write it into the sections .nv_fatbin and __nv_relfatbin, is a header of 16 bytes
(magic, version, header's size, size of all entries), then the entries, each a header and its payload,
compressed or not. NVIDIA documents none of this. It was found by compiling with nvcc 13.0 for sm_80 to sm_120
in all compression modes, and holds against cuobjdump for those and for public wheels made with CUDA 11.8 to
13.2; docs/doctor.md says which.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pybuild.capability import Capability, Code

SECTIONS = (".nv_fatbin", "__nv_relfatbin")

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows it
# kind, version, size of this header, size of the payload; at 0x18 the code's version (minor, major) and the
# architecture (100 for sm_100); at 0x28 the flags. The rest of the header is options and sizes.
_ENTRY = struct.Struct("<HHIQ8xHHI8xQ")
_KINDS: dict[int, Literal["cubin", "ptx", "lto"]] = {1: "ptx", 2: "cubin", 8: "lto"}
_ARCHITECTURE_SPECIFIC = 1 << 20  # sm_90a
_FAMILY_SPECIFIC = 1 << 21  # sm_100f


@dataclass(frozen=True)
class Entry:
    """One piece of device code in a fatbin; `version` is that of its format: PTX ISA 9.0 for CUDA 13.0."""

    code: Code
    version: tuple[int, int]


def read_fatbins(data: bytes | mmap.mmap, start: int = 0, end: int | None = None) -> Iterator[tuple[Entry, ...]]:
    """The entries of each fatbin in `data[start:end]`, one fatbin a compiled source file (or none).

    Raises ValueError where a fatbin is cut short or has a layout that this reader does not know.
    """
    end = len(data) if end is None else end
    at = data.find(_MAGIC, start, end)
    while at >= 0:
        if at + _HEADER.size > end:
            raise ValueError(f"a fatbin at {at:#x} is cut short")
        _, version, header_size, size = _HEADER.unpack_from(data, at)
        if version != 1 or header_size < _HEADER.size:
            raise ValueError(f"a fatbin at {at:#x} has the unknown version {version}")
        begin, stop = at + header_size, at + header_size + size
        if stop > end:
            raise ValueError(f"a fatbin at {at:#x} is cut short")
        yield tuple(_entries(data, begin, stop))
        # After it comes padding, or the next one. A payload is never searched.
        at = data.find(_MAGIC, stop, end)


def _entries(data: bytes | mmap.mmap, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        if at + _ENTRY.size > stop:
            raise ValueError(f"an entry of a fatbin at {at:#x} is cut short")
        kind, _, header_size, payload, minor, major, architecture, flags = _ENTRY.unpack_from(data, at)
        if header_size < _ENTRY.size or at + header_size + payload > stop:
            raise ValueError(f"an entry of a fatbin at {at:#x} reaches beyond it")
        if kind in _KINDS:  # others carry debug information and the like
            suffix: Literal["", "a", "f"] = ""
            if flags & _ARCHITECTURE_SPECIFIC:
                suffix = "a"
            elif flags & _FAMILY_SPECIFIC:
                suffix = "f"
            capability = Capability(*divmod(architecture, 10))
            yield Entry(Code(capability, _KINDS[kind], suffix), (major, minor))
        at += header_size + payload
