"""What is installed on a machine: CUDA toolkits, the active environment's Python with torch, nix."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

from pybuild.facts.machine import Machine


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Toolkit(_Facts):
    """A CUDA toolkit: its folder without links, what its nvcc says it is (`12.8`, `12.8.93`), and links to it."""

    path: str
    version: str
    nvcc: str
    aliases: tuple[str, ...] = ()


class Python(_Facts):
    """An interpreter; torch's full version (`2.10.0+cu128`) and the CUDA that it was compiled with, if it is there."""

    executable: str
    version: str
    torch: str | None = None
    torch_cuda: str | None = None


class Nix(_Facts):
    """nix: whether a daemon builds, and what is configured. `cores` 0 means all; `max_jobs` may be `auto`."""

    version: str
    daemon: bool
    cores: int | None = None
    max_jobs: str | None = None


def read_toolkits(machine: Machine) -> tuple[Toolkit, ...]:
    """The CUDA toolkits whose nvcc says its version, the one that CUDA_HOME names first."""
    versions: dict[str, tuple[str, str]] = {}
    names: dict[str, list[str]] = {}
    path = real = ""
    for line in (machine.answer("toolkits") or "").splitlines():
        if line.startswith("PATH="):
            path = line[5:]
        elif line.startswith("REAL="):
            real = line[5:]
            names.setdefault(real, []).append(path)
        elif match := re.search(r"release (\d+\.\d+), V(\d+\.\d+\.\d+)", line, re.ASCII):
            versions.setdefault(real, (match[1], match[2]))
    return tuple(
        Toolkit(
            path=real,
            version=versions[real][0],
            nvcc=versions[real][1],
            aliases=tuple(name for name in dict.fromkeys(aliases) if name != real),
        )
        for real, aliases in names.items()
        if real in versions
    )


def read_nvcc_on_path(machine: Machine) -> str | None:
    """Where PATH's nvcc is; None where there is none."""
    first = (machine.answer("toolkits") or "").partition("\n")[0]
    return first[5:] if first.startswith("NVCC=") else None


def read_python(machine: Machine) -> Python | None:
    """The active environment's Python; None where there is none, or it does not answer."""
    executable, _, rest = (machine.answer("python") or "").partition("\n")
    version, _, torch = rest.partition("\n")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version, re.ASCII):
        return None
    # torch/version.py, whose lines may have annotations: "cuda: Optional[str] = '12.8'".
    of_torch = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"\n]{1,80})['\"]", torch, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]{1,10})['\"]", torch, re.MULTILINE)
    return Python(
        executable=executable,
        version=version,
        torch=of_torch[1] if of_torch else None,
        torch_cuda=cuda[1] if of_torch and cuda else None,
    )


def read_nix(machine: Machine) -> Nix | None:
    """nix and its configuration; None where there is none."""
    answer = machine.answer("nix") or ""
    version = re.match(r"nix \(.*\) (\d\S{0,40})", answer)
    if not version:
        return None
    settings = {m[1]: m[2].strip() for m in re.finditer(r"^([a-z-]+) = (.*)$", answer, re.MULTILINE)}
    cores = settings.get("cores", "")
    return Nix(
        version=version[1],
        daemon="daemon-socket" in settings,
        cores=int(cores) if re.fullmatch(r"[0-9]{1,6}", cores, re.ASCII) else None,
        max_jobs=settings.get("max-jobs"),
    )
