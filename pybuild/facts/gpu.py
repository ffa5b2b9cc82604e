"""The GPUs of a machine and their driver, from nvidia-smi, or from /proc/driver/nvidia where it is missing."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

from pybuild.facts.machine import Machine


class Gpu(BaseModel):
    """A GPU: the driver's name of it, and its compute capability (`12.0`) where that is known."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    capability: str | None


def _rows(machine: Machine) -> list[list[str]]:
    """nvidia-smi's table: name, capability (not from an old one), driver. Its error messages have no commas."""
    rows = [[cell.strip() for cell in line.split(",")] for line in (machine.answer("gpus") or "").splitlines()]
    return [row for row in rows if len(row) in (2, 3) and re.fullmatch(r"\d{3}(\.\d{1,4}){1,2}", row[-1], re.ASCII)]


def read_gpus(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs, in the driver's order; the capability from their name where nvidia-smi does not say it."""
    if rows := _rows(machine):
        return tuple(_gpu(row[0], row[1] if len(row) == 3 else "") for row in rows)
    folder = "/proc/driver/nvidia/gpus"
    models = [
        re.search(r"^Model:[ \t]*(\S.*)$", machine.text(f"{folder}/{name}/information") or "", re.MULTILINE)
        for name in machine.names(folder)
    ]
    return tuple(_gpu(model[1].strip(), "") for model in models if model)


def _gpu(name: str, capability: str) -> Gpu:
    # Imported here: recommend-cores never asks for GPUs.
    from pybuild.capability import of_gpu

    if not re.fullmatch(r"\d{1,2}\.\d", capability, re.ASCII):
        known = of_gpu(name)
        return Gpu(name=name, capability=str(known) if known else None)
    return Gpu(name=name, capability=capability)


def read_driver(machine: Machine) -> str | None:
    """The driver's version, such as `570.86.15`; None where no driver is loaded."""
    if rows := _rows(machine):
        return rows[0][-1]
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build ..."
    match = re.search(
        r"^NVRM version:.*?\s(\d{3}(?:\.\d{1,4}){1,2})\s", machine.text("/proc/driver/nvidia/version") or ""
    )
    return match[1] if match else None
