"""Hosts read from recorded machines (tests/machines), from arbitrary contents, over ssh, and from real cgroups."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pybuild.cli import cli
from pybuild.errors import PybuildError
from pybuild.facts.cgroup import natural
from pybuild.facts.gpu import Gpu
from pybuild.facts.host import Host, cpu_list, host_of, load_host, meminfo, read_host
from pybuild.facts.installed import Toolkit
from pybuild.facts.machine import FACTS_SH, Sent, ask_over_ssh
from pybuild.units import GIB, KIB, MIB

# h200-vm and hybrid-v1 are recordings, made there with facts.sh; the others are written by hand, in the formats that
# the kernels and programs of such machines use.
MACHINES = Path(__file__).parent / "machines"
NAMES = sorted(path.name for path in MACHINES.iterdir())


def recorded(name: str) -> Host:
    return read_host(MACHINES / name, {})


# Recorded machines


@pytest.mark.parametrize(
    ("name", "cores", "available", "because"),
    [
        ("bare-metal", 128, 294649856 * KIB, "MemAvailable"),
        ("docker-v1", 4, 14 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        ("docker-v2", 6, 30 * GIB, "/sys/fs/cgroup/memory.max"),
        ("h200-vm", 16, 131505792 * KIB, "MemAvailable"),
        ("hybrid-v1", 2, 8 * GIB - 253952, "/sys/fs/cgroup/memory/pybuild-recording/memory.limit_in_bytes"),
        ("kubernetes-v2", 24, 96 * GIB - 33285996544 + 2 * 268435456, "/sys/fs/cgroup/memory.max"),
        # The limit is the pod's, whose cgroup the container does not see.
        ("kubernetes", 8, 20 * GIB, "hierarchical_memory_limit"),
        # The smallest is a limit that throttles (memory.high), three cgroups up.
        ("systemd-slice", 6, 12 * GIB, "/sys/fs/cgroup/user.slice/user-1000.slice/memory.high"),
        ("lxc", 4, 7340032 * KIB, "MemAvailable"),
        ("wsl2", 16, 15204352 * KIB, "MemAvailable"),
        # The cgroup would allow 64 GiB; what is there now is 3.5.
        ("growing", 16, 3670016 * KIB, "MemAvailable"),
        # Used by the whole job, not by this task of it alone.
        ("slurm-hybrid", 16, 90 * GIB, "/sys/fs/cgroup/memory/slurm/uid_1000/job_42/memory.limit_in_bytes"),
    ],
)
def test_cores_and_memory_of_recorded_machines(name: str, cores: int, available: int, because: str) -> None:
    host = recorded(name)
    assert host.cores.usable == cores
    assert host.memory.available == available
    assert because in host.memory.because


def test_every_recorded_machine_is_tested() -> None:
    cases = test_cores_and_memory_of_recorded_machines.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert sorted(case[0] for case in cases) == NAMES


def test_what_is_installed_on_a_machine() -> None:
    host = recorded("bare-metal")
    assert host.gpus == (Gpu(name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition", capability="12.0"),) * 2
    assert host.driver == "580.65.06"
    assert host.toolkits == (
        Toolkit(path="/usr/local/cuda-13.1", version="13.1", nvcc="13.1.80", aliases=("/usr/local/cuda",)),
        Toolkit(path="/usr/local/cuda-12.8", version="12.8", nvcc="12.8.93"),
    )
    assert host.nvcc_on_path == "/usr/local/cuda-13.1/bin/nvcc"
    assert host.python and (host.python.version, host.python.torch, host.python.torch_cuda) == (
        "3.12.3",
        "2.10.0+cu128",
        "12.8",
    )
    assert host.nix and (host.nix.version, host.nix.daemon, host.nix.cores, host.nix.max_jobs) == (
        "2.26.3",
        True,
        0,
        "auto",
    )
    assert host.disk and (host.disk.path, host.disk.free) == ("/nix/store", 1411756114 * KIB)
    assert (host.name, host.system, host.machine) == ("workstation", "Ubuntu 24.04.3 LTS", "x86_64")


def test_huge_pages_and_swap_are_told_and_not_counted() -> None:
    memory = recorded("bare-metal").memory
    assert memory.huge_pages == GIB
    assert memory.swap_total == 8388604 * KIB
    assert memory.available <= memory.total - memory.huge_pages


def test_gpus_without_nvidia_smi() -> None:
    host = recorded("kubernetes")
    assert host.gpus == (Gpu(name="NVIDIA A100-SXM4-40GB", capability="8.0"),)
    assert host.driver == "535.230.02"


def test_an_nvidia_smi_that_knows_no_capability() -> None:
    host = recorded("slurm-hybrid")
    assert host.gpus == (Gpu(name="NVIDIA B200", capability="10.0"),) * 8


def test_memory_that_grows_is_told() -> None:
    assert [name for name in NAMES if recorded(name).memory.grows] == ["growing"]


def test_memory_pressure() -> None:
    pressure = recorded("systemd-slice").memory.pressure
    assert pressure and (pressure.some_avg10, pressure.full_avg10) == (12.5, 4.25)
    assert recorded("docker-v1").memory.pressure is None


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    host = recorded(name)
    saved = tmp_path / "facts.json"
    saved.write_text(host.model_dump_json())
    assert load_host(saved) == host


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shell", ["sh", "dash", "bash --posix", "busybox sh"])
def test_what_the_script_sends_gives_the_same_host(name: str, shell: str) -> None:
    """Over ssh a machine is what facts.sh prints: cgroup walks, GPUs and all come out the same."""
    argv = shell.split()
    if shutil.which(argv[0]) is None:
        pytest.skip(f"no {argv[0]} here")
    # The shell alone: no other program is needed for the files.
    environ = {"PYBUILD_ROOT": str(MACHINES / name), "PATH": "/nonexistent"}
    done = subprocess.run(
        [shutil.which(argv[0]) or "", *argv[1:], FACTS_SH], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert host_of(Sent(done.stdout)) == recorded(name)


# One rule at a time


@dataclass
class Made:
    """A machine made of texts."""

    files: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> list[str]:
        return sorted({p[len(path) + 1 :].partition("/")[0] for p in self.files if p.startswith(f"{path}/")})

    def answer(self, question: str) -> str | None:
        return self.answers.get(question)


V2 = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def machine(gib: int = 64, **files: str) -> Made:
    """A machine with `gib` GiB, all free; keyword arguments are files of its cgroup, whose path is /a."""
    total = gib * GIB // KIB
    return Made(
        {
            "/proc/meminfo": f"MemTotal: {total} kB\nMemFree: {total} kB\nMemAvailable: {total} kB\n",
            "/proc/self/cgroup": "0::/a\n",
            "/proc/self/mountinfo": V2,
            **{f"/sys/fs/cgroup/a/{name.replace('_', '.', 1)}": text for name, text in files.items()},
        }
    )


def available(made: Made) -> int:
    return host_of(made).memory.available


def test_usage_counts_against_a_limit() -> None:
    assert available(machine(memory_max=f"{16 * GIB}\n", memory_current=f"{6 * GIB}\n")) == 10 * GIB


def test_page_cache_that_can_be_dropped_does_not() -> None:
    stat = f"inactive_file {3 * GIB}\nactive_file {GIB}\nfile_mapped 0\nfile_dirty {GIB}\nfile_writeback 0\n"
    made = machine(memory_max=f"{16 * GIB}\n", memory_current=f"{6 * GIB}\n", memory_stat=stat)
    assert available(made) == 13 * GIB


def test_more_cache_than_usage_is_not_believed() -> None:
    stat = f"inactive_file {900 * GIB}\nactive_file 0\nfile_mapped 0\nfile_dirty 0\nfile_writeback 0\n"
    made = machine(memory_max=f"{16 * GIB}", memory_current=f"{GIB}", memory_stat=stat)
    assert available(made) == 16 * GIB


def test_a_limit_without_usage_is_charged_with_all_that_is_used() -> None:
    made = machine(gib=64, memory_max=f"{16 * GIB}\n", memory_current="unreadable\n")
    made.files["/proc/meminfo"] = f"MemTotal: {64 * MIB} kB\nMemAvailable: {60 * MIB} kB\n"
    assert available(made) == 12 * GIB


def test_a_limit_that_cannot_be_understood_leaves_nothing() -> None:
    assert available(machine(memory_max="-5\n", memory_current="0\n")) == 0


def test_no_limit() -> None:
    assert available(machine(memory_max="max\n", memory_high="max\n", memory_current="0\n")) == 64 * GIB


def test_a_limit_that_is_used_up_leaves_nothing() -> None:
    assert available(machine(memory_max=f"{2 * GIB}\n", memory_current=f"{3 * GIB}\n")) == 0


def test_high_counts_as_a_limit() -> None:
    made = machine(memory_max=f"{32 * GIB}\n", memory_high=f"{8 * GIB}\n", memory_current="0\n")
    assert available(made) == 8 * GIB
    assert host_of(made).memory.because.startswith("/sys/fs/cgroup/a/memory.high")


def test_a_limit_above_this_cgroup_counts() -> None:
    made = machine(memory_max="max\n", memory_current="0\n")
    made.files["/sys/fs/cgroup/memory.max"] = f"{4 * GIB}\n"
    made.files["/sys/fs/cgroup/memory.current"] = f"{GIB}\n"
    assert available(made) == 3 * GIB


def test_strict_overcommit_is_a_limit() -> None:
    made = machine()
    made.files["/proc/sys/vm/overcommit_memory"] = "2\n"
    made.files["/proc/meminfo"] += f"CommitLimit: {20 * MIB} kB\nCommitted_AS: {15 * MIB} kB\n"
    assert available(made) == 5 * GIB


def test_a_kernel_without_mem_available_has_what_is_free() -> None:
    assert available(Made({"/proc/meminfo": f"MemTotal: {8 * MIB} kB\nMemFree: {3 * MIB} kB\n"})) == 3 * GIB


def test_no_meminfo_is_no_memory() -> None:
    host = host_of(Made())
    assert (host.memory.available, host.memory.because, host.cores.usable) == (0, "", 1)


def test_the_smallest_number_of_cores_counts() -> None:
    made = machine(cpu_max="250000 100000\n")
    made.files["/sys/devices/system/cpu/online"] = "0-15\n"
    made.files["/proc/self/status"] = "Cpus_allowed:\tff\nCpus_allowed_list:\t0-7\n"
    assert host_of(made).cores.model_dump() == {"usable": 2, "online": 16, "affinity": 8, "quota": 2.5}


def test_less_than_a_core_is_one() -> None:
    assert host_of(machine(cpu_max="50000 100000\n")).cores.usable == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-3,8\n", 5), ("0", 1), ("", None), ("3-1", None), ("0-99999", None), ("a", None), ("-1", None), ("0-3,2", 4)],
)
def test_lists_of_cpus(text: str, count: int | None) -> None:
    assert cpu_list(text) == count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42\n", 42),
        ("max\n", None),
        ("-1\n", None),
        ("9223372036854771712", None),
        ("1e9", None),
        ("٣", None),
        ("", None),
    ],
)
def test_numbers_of_the_kernel(text: str, number: int | None) -> None:
    assert natural(text) == number


def test_a_mount_point_with_a_space() -> None:
    made = machine()
    made.files["/proc/self/mountinfo"] = "29 23 0:26 / /odd\\040place rw - cgroup2 cgroup2 rw\n"
    made.files["/odd place/a/memory.max"] = f"{GIB}\n"
    made.files["/odd place/a/memory.current"] = "0\n"
    assert available(made) == GIB


def test_a_path_that_leads_out_of_the_namespace() -> None:
    made = machine()
    made.files["/proc/self/cgroup"] = "0::/../../other\n"
    made.files["/sys/fs/cgroup/memory.max"] = f"{2 * GIB}\n"
    made.files["/sys/fs/cgroup/memory.current"] = "0\n"
    assert available(made) == 2 * GIB


def test_a_broken_driver_is_no_gpu() -> None:
    made = machine()
    made.answers["gpus"] = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert host_of(made).gpus == () and host_of(made).driver is None


# Arbitrary contents

_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["max", "", "-1", "0", "1e30", "0x10", "nan", "9223372036854771712", "1" * 5000]),
    st.text(max_size=12),
)
_KNOBS = [
    *("memory.max", "memory.high", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    *("memory.stat", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
]


def _rows(names: list[str], separator: str) -> st.SearchStrategy[str]:
    row = st.tuples(st.sampled_from(names), _NUMBERS, st.sampled_from(["", " kB", " MB", " kB kB"]))
    return st.lists(row.map(lambda r: f"{r[0]}{separator}{r[1]}{r[2]}"), max_size=12).map("\n".join)


def _cut(text: str) -> st.SearchStrategy[str]:
    """The beginning of a text: a file that was truncated."""
    return st.integers(0, len(text)).map(lambda length: text[:length])


_MEMINFO = st.one_of(
    st.text(max_size=200),
    _cut((MACHINES / "bare-metal/proc/meminfo").read_text()),
    _rows(["MemTotal", "MemFree", "MemAvailable", "HugePages_Total", "Hugepagesize", "CommitLimit", "SwapTotal"], ": "),
)
_CGROUP = st.one_of(
    st.text(max_size=80), st.sampled_from(["0::/a/b\n", "4:memory,cpu:/a/b\n0::/\n", "0::/../x\n", "::::\n"])
)
_MOUNTS = st.one_of(
    st.text(max_size=120),
    _cut(V2),
    st.sampled_from([V2, "1 2 3 /a /sys/fs/cgroup rw - cgroup c rw,memory,cpu\n", "1 2 3 / \\777 rw - cgroup2 c rw\n"]),
)


@st.composite
def _machines(draw: st.DrawFn) -> Made:
    files = {
        "/proc/meminfo": draw(_MEMINFO),
        "/proc/self/cgroup": draw(_CGROUP),
        "/proc/self/mountinfo": draw(_MOUNTS),
        "/proc/self/status": draw(st.one_of(st.text(max_size=60), _NUMBERS.map("Cpus_allowed_list:\t{}\n".format))),
        "/proc/sys/vm/overcommit_memory": draw(_NUMBERS),
        "/proc/pressure/memory": draw(st.one_of(st.text(max_size=40), _NUMBERS.map("some avg10={} avg60=1\n".format))),
        "/proc/driver/nvidia/version": draw(st.text(max_size=40)),
        "/sys/devices/system/cpu/online": draw(_NUMBERS),
    }
    for folder in ("", "/a", "/a/b"):
        for knob in draw(st.lists(st.sampled_from(_KNOBS), unique=True)):
            rows = _rows(["inactive_file", "total_inactive_file", "active_file", "hierarchical_memory_limit"], " ")
            text = draw(rows if knob == "memory.stat" else st.one_of(_NUMBERS, _NUMBERS.map("{} 100000".format)))
            files[f"/sys/fs/cgroup{folder}/{knob}"] = text
    kept = draw(st.lists(st.sampled_from(sorted(files)), unique=True))
    questions = st.sampled_from(["gpus", "toolkits", "python", "nix", "disk", "machine"])
    answers = draw(st.dictionaries(questions, st.text(max_size=80)))
    return Made({path: files[path] for path in kept}, answers)


@given(_machines())
@settings(max_examples=120, deadline=None)
def test_whatever_the_files_hold(made: Made) -> None:
    """There is an answer, it can be saved and read, and it is never more than any file that can be read allows."""
    host = host_of(made)
    assert Host.model_validate_json(host.model_dump_json()) == host
    assert host.cores.usable >= 1
    memory = host.memory
    assert memory.available >= 0
    rows = meminfo(made.files.get("/proc/meminfo", ""))
    assert memory.available <= rows.get("MemTotal", 0)
    assert memory.available <= rows.get("MemAvailable", rows.get("MemFree", 0))
    assert all(memory.available <= limit.limit for limit in memory.limits)


@given(st.integers(0, 512), st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), min_size=1, max_size=3))
@settings(deadline=None)
def test_the_tightest_of_all_levels_counts(gib: int, levels: list[tuple[int, int]]) -> None:
    made = machine(gib)
    path = "".join(f"/{n}" for n in range(len(levels)))
    made.files["/proc/self/cgroup"] = f"0::{path}\n"
    for number, (limit, used) in enumerate(levels):
        folder = "/sys/fs/cgroup" + "".join(f"/{n}" for n in range(number + 1))
        made.files[f"{folder}/memory.max"] = f"{limit * GIB}\n"
        made.files[f"{folder}/memory.current"] = f"{used * GIB}\n"
    assert available(made) == min(gib, *(max(0, limit - used) for limit, used in levels)) * GIB


# ssh, saved facts, the command


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ssh: says what a login says, then runs the command on the machine `docker-v2`."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >{tmp_path}/asked\n'
        'while [ "$1" != -- ]; do shift; done\n'
        'case $2 in *nowhere*) echo "ssh: Could not resolve hostname nowhere" >&2; exit 255 ;; esac\n'
        'echo "Welcome! > not a fact"\n'
        f'export PYBUILD_ROOT="{MACHINES}/docker-v2"\n'
        'exec sh -c "$3"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_another_machine_over_ssh(ssh: Path) -> None:
    done = CliRunner().invoke(cli, ["host", "--json", "--host", "ada@server"], catch_exceptions=False)
    assert Host.model_validate_json(done.stdout) == recorded("docker-v2")
    assert (ssh / "asked").read_text().split()[-4:] == ["--", "ada@server", "sh", "-s"]


def test_a_machine_that_ssh_does_not_reach(ssh: Path) -> None:
    with pytest.raises(PybuildError, match="ssh ended with 255") as error:
        ask_over_ssh("ada@nowhere", os.environ)
    assert "ssh ada@nowhere" in error.value.remedy


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", ""])
def test_a_machine_that_would_be_an_option(name: str) -> None:
    with pytest.raises(PybuildError, match="not a machine's name"):
        ask_over_ssh(name, os.environ)


def test_no_ssh(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="no ssh on PATH"):
        ask_over_ssh("ada@server", {"PATH": str(tmp_path)})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cores": {"usable": 4}}', '{"cores": {"usable": 0}, "memory": {}}'])
def test_saved_facts_that_are_none(text: str, tmp_path: Path) -> None:
    saved = tmp_path / "facts.json"
    saved.write_text(text)
    with pytest.raises(PybuildError, match=r"facts\.json holds no facts"):
        load_host(saved)
    with pytest.raises(PybuildError, match="can't be read"):
        load_host(tmp_path / "missing.json")


def test_this_machine() -> None:
    """The same numbers that the kernel gives other programs."""
    host = read_host()
    assert host.cores.usable <= len(os.sched_getaffinity(0))
    assert 0 < host.memory.available <= host.memory.total
    assert host.name == os.uname().nodename
    assert host.machine == os.uname().machine
    assert host.disk and host.disk.free > 0
    assert host.python and host.python.version


def test_cores_and_memory_alone_take_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    started = time.perf_counter()
    host = read_host(programs=False)
    assert time.perf_counter() - started < 0.5
    assert host.memory.available > 0


# Real cgroups


@contextmanager
def _cgroup(limit: int) -> Iterator[tuple[Path, str]]:
    """A cgroup of this test's own with a limit of memory, and the file that holds the limit."""
    for parent, file in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/unified"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        folder = parent / f"pybuild-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / file).exists():
                (folder / file).write_text(str(limit))
                yield folder, file
                return
        except OSError as error:
            pytest.skip(f"{folder / file} can't be set: {error.strerror}")
        finally:
            # What was started in it has ended, but the kernel may take a moment.
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)
    pytest.skip("no cgroup can be made here")


def _ask(*args: str) -> str:
    """What pybuild prints."""
    return subprocess.run([sys.executable, "-m", "pybuild", *args], capture_output=True, text=True, check=True).stdout


def _ask_inside(folder: Path, *args: str) -> str:
    """What pybuild prints, run in a cgroup."""
    # The shell enters the cgroup and becomes pybuild.
    script = f'echo $$ >"{folder}/cgroup.procs" && exec "$0" -m pybuild "$@"'
    done = subprocess.run(["sh", "-c", script, sys.executable, *args], capture_output=True, text=True, check=False)
    if "cgroup.procs" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_answer_follows_a_real_cgroup() -> None:
    here = read_host(programs=False).memory.available
    for limit in (256 * MIB, 1 * GIB):
        if limit > here:
            pytest.skip("too little memory on this machine")
        with _cgroup(limit) as (folder, file):
            memory = json.loads(_ask_inside(folder, "host", "--json"))["memory"]
            assert str(folder / file) in memory["because"]
            # Less what Python itself uses.
            assert limit - 200 * MIB <= memory["available"] <= limit


def test_the_recommendation_follows_a_real_cgroup() -> None:
    """As `recommend-cores --memory` says for that limit, on a machine that itself has more."""
    limits = (8 * GIB, 16 * GIB)
    if read_host(programs=False).memory.available < max(limits):
        pytest.skip("too little memory on this machine")
    answers = []
    for limit in limits:
        with _cgroup(limit) as (folder, _):
            answers.append(_ask_inside(folder, "recommend-cores", "--ungated", "--cores", "16"))
        given = _ask("recommend-cores", "--ungated", "--cores", "16", "--memory", f"{limit // MIB - 100}M")
        assert answers[-1] == given
    assert answers[0] < answers[1]
