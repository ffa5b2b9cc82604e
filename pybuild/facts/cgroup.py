"""What the cgroups above a process allow it: memory and CPU time, in v1, v2 and both at once (hybrid)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from pybuild.facts.machine import Machine

# v1 writes "no limit" as the highest multiple of the page size in a long; no machine has an exbibyte.
_UNLIMITED = 2**60


def natural(text: str) -> int | None:
    """A number as the kernel writes it in a file; None for anything else, such as `max`, and beyond any machine's."""
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        return None
    return value if (value := int(text)) < _UNLIMITED else None


class Limit(BaseModel):
    """A limit of memory: the file that says it, its bytes, and those of them that are used.

    `used` leaves out the page cache that the kernel can take back at once, see `_reclaimable`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    path: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        """Bytes until the limit."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class _Mount:
    """A cgroup hierarchy: `root` is the cgroup that is seen at `point`. `controllers` are empty for v2."""

    version: int
    root: str
    point: str
    controllers: frozenset[str]


def _unescaped(text: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset[str]()
        yield _Mount(1 if kind[0] == "cgroup" else 2, _unescaped(fields[3]), _unescaped(fields[4]), controllers)


def _groups(cgroup: str, controller: str) -> Iterator[tuple[int, str]]:
    """This process's cgroups that may hold `controller`, as version and path."""
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def levels(machine: Machine, controller: str) -> Iterator[tuple[int, str]]:
    """The folders of this process's cgroups with `controller`, each with its version, from its own up to the topmost
    that is seen.
    """
    mounts = list(_mounts(machine.text("/proc/self/mountinfo") or "")) or [
        # Where systemd and Docker put them.
        _Mount(2, "/", "/sys/fs/cgroup", frozenset()),
        _Mount(1, "/", f"/sys/fs/cgroup/{controller}", frozenset([controller])),
    ]
    paths = dict(_groups(machine.text("/proc/self/cgroup") or "", controller))
    for version in (1, 2):
        for mount in mounts:
            if mount.version == version and (version == 2 or controller in mount.controllers):
                yield from ((version, folder) for folder in _upwards(machine, mount, paths.get(version, "/")))
                # Further mounts of the same hierarchy (a chroot's, say) show the same cgroups.
                break


def _upwards(machine: Machine, mount: _Mount, path: str) -> Iterator[str]:
    top = mount.point.rstrip("/")
    root = mount.root.rstrip("/")
    # In a container the mount may show its own cgroup only, and the path be that on the host, or lead outside (..).
    below = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
    parts = [part for part in below.split("/") if part]
    if ".." in parts:
        parts = []
    while parts:
        folder = f"{top}/{'/'.join(parts)}"
        if machine.names(folder):
            yield folder
        parts.pop()
    yield top


# Usage and the limits.
_FILES = {
    1: ("memory.usage_in_bytes", ("memory.limit_in_bytes",)),
    2: ("memory.current", ("memory.max", "memory.high")),
}


def memory_limits(machine: Machine, in_use: int) -> tuple[Limit, ...]:
    """Every limit of memory above this process, from its own cgroup upwards.

    `in_use` is what the whole machine uses: a cgroup whose own usage can't be read is charged with all of it. A limit
    that is there and can't be understood leaves nothing.
    """
    found: list[Limit] = []
    for version, folder in levels(machine, "memory"):
        stat = _stat(machine.text(f"{folder}/memory.stat") or "")
        used, names = _FILES[version]
        charged = natural(machine.text(f"{folder}/{used}") or "")
        held = in_use if charged is None else charged - min(charged, _reclaimable(version, stat))
        for name in names:
            text = machine.text(f"{folder}/{name}")
            if text is None or _is_unlimited(text):
                continue
            limit = natural(text)
            if limit is not None:
                found.append(Limit(path=f"{folder}/{name}", limit=limit, used=held))
            else:
                found.append(Limit(path=f"{folder}/{name}, which says {text.strip()[:40]!r}", limit=0, used=held))
        # v1 says here what cgroups above the topmost that is seen allow.
        above = stat.get("hierarchical_memory_limit") if version == 1 else None
        if above is not None and all(above < limit.limit for limit in found):
            found.append(Limit(path=f"{folder}/memory.stat's hierarchical_memory_limit", limit=above, used=held))
    return tuple(found)


def _is_unlimited(text: str) -> bool:
    text = text.strip()
    return text in ("max", "-1") or (re.fullmatch(r"[0-9]{1,40}", text, re.ASCII) is not None and natural(text) is None)


def _reclaimable(version: int, stat: dict[str, int]) -> int:
    """Bytes of page cache that the kernel takes back before it kills anything: what is neither mapped by a program,
    nor dirty, nor being written.

    The pages that were read twice (active_file) are among them, as they are in MemAvailable. Measured on Linux 6.18 in
    a v1 cgroup limited to 3 GiB with 1.46 GiB of active_file: a process got 2.94 GiB before it was killed. Kubernetes'
    working set counts them as used, so a build after a big unpack would get half of the cores that fit.
    """
    names = {
        1: ("total_active_file", "total_inactive_file", "total_mapped_file", "total_dirty", "total_writeback"),
        2: ("active_file", "inactive_file", "file_mapped", "file_dirty", "file_writeback"),
    }[version]
    active, inactive, *kept = (stat.get(name, 0) for name in names)
    return max(0, active + inactive - sum(kept))


def _stat(text: str) -> dict[str, int]:
    rows: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if (number := natural(value)) is not None:
            rows[name] = number
    return rows


def cpu_quota(machine: Machine) -> float | None:
    """Cores' worth of CPU time that the cgroups above this process allow it; None where they set no limit."""
    quotas = []
    for version, folder in levels(machine, "cpu"):
        if version == 2:
            quota, _, period = (machine.text(f"{folder}/cpu.max") or "").strip().partition(" ")
        else:
            quota = machine.text(f"{folder}/cpu.cfs_quota_us") or ""
            period = machine.text(f"{folder}/cpu.cfs_period_us") or ""
        allowed, each = natural(quota), natural(period)
        if allowed and each:
            quotas.append(allowed / each)
    return min(quotas, default=None)
