"""`pybuild host` for people, the options that name another machine, and limits that can't be understood."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pybuild.cli.host import command, describe, host_from_options
from pybuild.errors import PybuildError
from pybuild.facts.host import host_of, read_host
from pybuild.facts.installed import read_nvcc_on_path
from pybuild.facts.machine import Sent, machine_at

MACHINES = Path(__file__).parent / "machines"


def shown(name: str) -> dict[str, str]:
    """What is printed of a recorded machine, by the first word; of several lines of one name, the last."""
    lines = describe(read_host(MACHINES / name, {})).splitlines()
    return {line.split()[0]: line for line in lines if not line.startswith(" ")}


def test_people_read_what_binds() -> None:
    text = describe(read_host(MACHINES / "docker-v2", {}))
    assert "30.0 GiB available" in text
    assert "/sys/fs/cgroup/memory.max: " in text
    assert "6 (" in shown("docker-v2")["cores"]


def test_people_read_of_a_machine_that_grows() -> None:
    assert "may get more memory" in describe(read_host(MACHINES / "growing", {}))
    assert "may get more memory" not in describe(read_host(MACHINES / "wsl2", {}))


def test_equal_gpus_are_counted() -> None:
    assert "8 x NVIDIA B200, capability 10.0" in shown("slurm-hybrid")["GPU"]
    assert "none found" in shown("lxc")["GPU"]


def test_what_is_there_and_what_is_not() -> None:
    rows = shown("bare-metal")
    assert "2.10.0+cu128 (CUDA 12.8)" in rows["torch"]
    assert "daemon" in rows["nix"] and "max-jobs = auto" in rows["nix"]
    assert "set aside; never counted" in rows["huge"]
    nothing = describe(host_of(Sent("")))
    assert "unknown" in nothing and "nothing could be read" in nothing


def test_saved_facts_are_shown_again(tmp_path: Path) -> None:
    host = read_host(MACHINES / "systemd-slice", {})
    saved = tmp_path / "facts.json"
    saved.write_text(host.model_dump_json())
    done = CliRunner().invoke(command, ["--facts", str(saved)], catch_exceptions=False)
    assert done.stdout == describe(host) + "\n"


def test_two_machines_are_named(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="two machines"):
        host_from_options("ada@server", tmp_path)


def with_limit(text: str) -> int:
    """Memory available on a machine of 64 GiB, all free, whose cgroup has this for memory.max; without mountinfo."""
    return host_of(
        Sent(
            ">/proc/meminfo\n|MemTotal: 67108864 kB\n|MemAvailable: 67108864 kB\n>/proc/self/cgroup\n|0::/job\n"
            f">/sys/fs/cgroup/job/memory.max\n|{text}\n>/sys/fs/cgroup/job/memory.current\n|0\n"
        )
    ).memory.available


@pytest.mark.parametrize("text", ["", "-4096", "0x100000000", "4G", "17179869184 kB", "nan"])
def test_a_limit_that_is_no_number_leaves_nothing(text: str) -> None:
    assert with_limit(text) == 0


@pytest.mark.parametrize("text", ["max", "-1", "9223372036854771712", "9" * 30])
def test_no_limit(text: str) -> None:
    assert with_limit(text) == 64 * 2**30


def test_without_mountinfo_the_usual_places_are_read() -> None:
    assert with_limit("17179869184") == 16 * 2**30


def test_a_users_own_root_is_left_alone() -> None:
    """Some set ROOT (CERN's, a build's): it must not be taken for a recorded machine."""
    with_root = read_host(environ={**os.environ, "ROOT": "/nonexistent"})
    assert with_root.machine == os.uname().machine
    assert with_root.disk is not None


def test_an_nvcc_that_the_users_path_lacks_is_not_on_it(tmp_path: Path) -> None:
    """The script looks in more places for programs than torch does for nvcc."""
    nvcc = tmp_path / ".nix-profile/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    assert read_nvcc_on_path(machine_at(Path("/"), environ)) != str(nvcc)
    environ["PATH"] = f"{nvcc.parent}:/usr/bin:/bin"
    assert read_nvcc_on_path(machine_at(Path("/"), environ)) == str(nvcc)
