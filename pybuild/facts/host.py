"""What a machine has: cores, memory, GPUs, CUDA, Python, nix, disk. Memory is in bytes.

A `Host` is read from a `Machine` (machine.py): this one, a recorded one, or one over ssh.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from pybuild.errors import PybuildError
from pybuild.facts.cgroup import Limit, cpu_quota, memory_limits, natural
from pybuild.facts.gpu import Gpu, read_driver, read_gpus
from pybuild.facts.installed import Nix, Python, Toolkit, read_nix, read_nvcc_on_path, read_python, read_toolkits
from pybuild.facts.machine import Machine, machine_at
from pybuild.units import KIB, format_gib


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Cores(_Facts):
    """`usable` is the smallest of the others, rounded down, and at least 1.

    `online` are the machine's, `affinity` those that this process may run on, `quota` the cgroup's share of CPU time,
    in cores; each None where it says nothing.
    """

    usable: PositiveInt
    online: int | None = None
    affinity: int | None = None
    quota: float | None = None


class Pressure(_Facts):
    """Memory pressure (PSI): per cent of the last 10 s in which some task, or all of them, waited for memory."""

    some_avg10: float
    full_avg10: float


class Memory(_Facts):
    """`available` is what a build can take: the smallest of `mem_available` (the kernel's own estimate) and of what
    each of `limits` leaves; `because` names the one that is smallest. 0 where nothing could be read.

    `total` is the machine's. Swap is reported and never counted; `huge_pages` are set aside and not counted.
    `commit_left` is what may still be promised where `overcommit` (vm.overcommit_memory) is 2. `grows` tells of a
    machine that may get more memory as it uses it, of which only what is there now is counted.
    """

    available: NonNegativeInt
    because: str
    total: NonNegativeInt = 0
    mem_available: int | None = None
    limits: tuple[Limit, ...] = ()
    swap_total: int = 0
    swap_free: int = 0
    huge_pages: int = 0
    overcommit: int | None = None
    commit_left: int | None = None
    grows: bool = False
    pressure: Pressure | None = None


class Disk(_Facts):
    """Bytes free for this user where the store is, or will be: `path` is the nearest folder that exists."""

    path: str
    free: int


class Host(_Facts):
    """A machine. What could not be found out is None or empty.

    `name` is the host name, `system` os-release's PRETTY_NAME, `machine` uname -m.
    """

    name: str = ""
    system: str = ""
    kernel: str = ""
    machine: str = ""
    cores: Cores
    memory: Memory
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    toolkits: tuple[Toolkit, ...] = ()
    nvcc_on_path: str | None = None
    python: Python | None = None
    nix: Nix | None = None
    disk: Disk | None = None


def read_host(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, *, programs: bool = True) -> Host:
    """This machine, or the recorded one in the folder `root`; `environ` says which Python and CUDA are active.

    `programs` False reads cores and memory only, in milliseconds: programs such as nvidia-smi take a second.
    """
    return host_of(machine_at(root, environ), programs=programs)


def load_host(path: Path) -> Host:
    """The host saved in a file by `pybuild host --json`. Raises PybuildError where it is none."""
    try:
        return Host.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PybuildError(f"{path} can't be read: {error.strerror}", "Name a file that exists.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PybuildError(
            f"{path} holds no facts of a machine: {where}: {first['msg']}",
            "Make it on that machine: pybuild host --json >FILE.json",
        ) from error


def host_of(machine: Machine, *, programs: bool = True) -> Host:
    """The host that a machine's files and programs describe. Whatever they hold, there is an answer."""
    host = Host(
        name=_line(machine, "/proc/sys/kernel/hostname"),
        system=_system(machine),
        kernel=_line(machine, "/proc/sys/kernel/osrelease"),
        cores=read_cores(machine),
        memory=read_memory(machine),
    )
    if not programs:
        return host
    return host.model_copy(
        update={
            "machine": (machine.answer("machine") or "").strip(),
            "gpus": read_gpus(machine),
            "driver": read_driver(machine),
            "toolkits": read_toolkits(machine),
            "nvcc_on_path": read_nvcc_on_path(machine),
            "python": read_python(machine),
            "nix": read_nix(machine),
            "disk": _disk(machine),
        }
    )


def _line(machine: Machine, path: str) -> str:
    return (machine.text(path) or "").strip()[:256]


def _system(machine: Machine) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]{0,200})', machine.text("/etc/os-release") or "", re.MULTILINE)
    return match[1] if match else ""


# Cores

_HIGHEST_CPU = 8192
"""CONFIG_NR_CPUS of x86-64 goes this far; a number above it is no CPU's."""


def cpu_list(text: str) -> int | None:
    """How many CPUs a list such as `0-3,8` names; None where it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip(), re.ASCII)
        if not match or (last := int(match[2] or match[1])) >= _HIGHEST_CPU or last < int(match[1]):
            return None
        found.update(range(int(match[1]), last + 1))
    return len(found)


def read_cores(machine: Machine) -> Cores:
    """Cores from what is online, this process's affinity, and the cgroups' CPU quotas."""
    online = cpu_list(machine.text("/sys/devices/system/cpu/online") or "")
    match = re.search(r"^Cpus_allowed_list:(.*)$", machine.text("/proc/self/status") or "", re.MULTILINE)
    affinity = cpu_list(match[1]) if match else None
    quota = cpu_quota(machine)
    known = [n for n in (online, affinity, quota) if n is not None]
    return Cores(usable=max(1, int(min(known, default=1))), online=online, affinity=affinity, quota=quota)


# Memory


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo's rows, in bytes where it has a unit. Rows that hold no number are left out."""
    rows: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        value = natural(words[0]) if words else None
        if value is not None and words[1:] in ([], ["kB"]):
            rows.setdefault(name, value * KIB if words[1:] else value)
    return rows


def read_memory(machine: Machine) -> Memory:
    """Memory from /proc/meminfo and every cgroup limit above this process."""
    rows = meminfo(machine.text("/proc/meminfo") or "")
    total = rows.get("MemTotal", 0)
    huge = min(total, rows.get("HugePages_Total", 0) * rows.get("Hugepagesize", 0))
    available = rows.get("MemAvailable")
    if available is None and "MemFree" in rows:
        # Linux before 3.14, and some lxcfs. Its free memory is there for certain.
        available = rows["MemFree"]
    if available is not None:
        # A container's /proc/meminfo may be put together from different sources.
        available = min(available, total - huge)
    limits = memory_limits(machine, in_use=total - (available or 0))
    choices = [
        (limit.left, f"{limit.path}: {format_gib(limit.limit)}, {format_gib(limit.used)} of them used")
        for limit in limits
    ]
    overcommit = natural(machine.text("/proc/sys/vm/overcommit_memory") or "")
    commit_left = None
    if overcommit == 2:
        commit_left = max(0, rows.get("CommitLimit", 0) - rows.get("Committed_AS", 0))
        choices.append((commit_left, "vm.overcommit_memory is 2, CommitLimit less Committed_AS"))
    # What the machine has can't be told without its MemTotal, whatever a cgroup allows.
    choices.append((available or 0, "MemAvailable of /proc/meminfo" if available is not None else ""))
    smallest, because = min(choices, key=lambda choice: choice[0])
    return Memory(
        available=max(0, smallest),
        because=because,
        total=total,
        mem_available=available,
        limits=limits,
        swap_total=rows.get("SwapTotal", 0),
        swap_free=rows.get("SwapFree", 0),
        huge_pages=huge,
        overcommit=overcommit,
        commit_left=commit_left,
        grows=_grows(machine),
        pressure=_pressure(machine.text("/proc/pressure/memory") or ""),
    )


def _grows(machine: Machine) -> bool:
    """Whether the machine is one that may get memory as it uses it.

    gVisor (its /proc/version is fixed: pkg/sentry/kernel/version.go) shows 2 GiB and more once they are used;
    virtio-mem and Hyper-V's balloon plug memory into a running guest. How much will come none of them tells the guest.
    WSL2 has that balloon too, and all of its memory from the start.
    """
    if "microsoft-standard" in (machine.text("/proc/sys/kernel/osrelease") or ""):
        return False
    if "#1 SMP Sun Jan 10 15:06:54 PST 2016" in (machine.text("/proc/version") or ""):
        return True
    devices = ("/sys/bus/virtio/drivers/virtio_mem", "/sys/bus/vmbus/drivers/hv_balloon")
    return any(re.match(r"virtio\d|[0-9a-f]{8}-", name) for path in devices for name in machine.names(path))


def _pressure(text: str) -> Pressure | None:
    shares = {m[1]: float(m[2]) for m in re.finditer(r"^(some|full) avg10=([0-9]{1,3}\.[0-9]{2}) ", text, re.MULTILINE)}
    if "some" not in shares:
        return None
    return Pressure(some_avg10=shares["some"], full_avg10=shares.get("full", 0.0))


# Disk


def _disk(machine: Machine) -> Disk | None:
    """Of `df -Pk`, after a line with the folder that was asked about."""
    path, _, table = (machine.answer("disk") or "").partition("\n")
    rows = [line.split() for line in table.splitlines()]
    # A mount point may hold spaces; the numbers stand before it.
    for row in rows[1:]:
        if len(row) >= 6 and (free := natural(row[3])) is not None:
            return Disk(path=path, free=free * KIB)
    return None
