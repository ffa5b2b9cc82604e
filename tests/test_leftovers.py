from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pybuild.facts.leftovers import Process, find_leftovers, read_processes
from pybuild.units import GIB


def process(pid: int, parent: int, name: str, *, rss: float = 0, session: int = 900, shell: bool = False) -> Process:
    return Process(
        pid=pid,
        parent=parent,
        session=session,
        name=name,
        rss=int(rss * GIB),
        started=100.0,
        user=1000,
        one_command=shell,
    )


INIT = process(1, 0, "systemd", session=1)


def build(top_parent: int) -> list[Process]:
    """pip, ninja and two compiles, as a build of flash-attn looks in the process table; pip's parent given."""
    return [
        INIT,
        process(10, top_parent, "pip"),
        process(20, 10, "ninja"),
        process(30, 20, "sh", shell=True),
        process(31, 30, "nvcc", rss=0.01),
        process(32, 31, "sh", shell=True),
        process(33, 32, "cicc", rss=6),
        process(40, 20, "nvcc", rss=0.01),
        process(41, 40, "ptxas", rss=0.5),
    ]


def test_a_living_build_is_left_alone() -> None:
    assert find_leftovers([*build(5), process(5, 1, "bash")]) == []


def test_a_build_that_was_started_with_nohup_is_alive() -> None:
    assert find_leftovers(build(1)) == []


def test_pip_was_killed_and_ninja_goes_on() -> None:
    table = [p for p in build(5) if p.name != "pip"]
    table = [p.model_copy(update={"parent": 1}) if p.name == "ninja" else p for p in table]
    (left,) = find_leftovers(table)
    assert left.top.name == "ninja"
    assert [p.pid for p in left.members] == [20, 30, 40, 31, 41, 32, 33]
    assert [p.pid for p in left.compilers] == [40, 31, 41, 33]
    assert round(left.rss / GIB, 2) == 6.52


def test_each_orphan_by_itself_the_largest_first() -> None:
    table = [INIT, process(41, 1, "ptxas", rss=0.5), process(33, 1, "cicc", rss=6), process(50, 1, "nginx")]
    assert [left.top.pid for left in find_leftovers(table)] == [33, 41]


def test_a_systemd_of_the_user_takes_orphans_in_as_well() -> None:
    table = [INIT, process(700, 1, "systemd"), process(33, 700, "cicc", rss=6)]
    assert [left.top.pid for left in find_leftovers(table)] == [33]


def test_a_parent_that_is_gone() -> None:
    assert [left.top.pid for left in find_leftovers([process(33, 32, "cicc")])] == [33]


def test_a_container_whose_first_process_is_the_build() -> None:
    # docker run IMAGE pip install flash-attn
    table = [process(1, 0, "pip", session=1), process(2, 1, "ninja", session=1), process(3, 2, "nvcc", session=1)]
    assert find_leftovers(table) == []
    # docker run IMAGE make
    table = [process(1, 0, "make", session=1), process(3, 1, "nvcc", session=1)]
    assert find_leftovers(table) == []


def test_a_container_whose_first_process_is_a_shell() -> None:
    # docker exec BUILD pip install ..., and that was killed: its ninja falls to process 1, of another session.
    shell = process(1, 0, "bash", session=1)
    assert [left.top.pid for left in find_leftovers([shell, process(3, 1, "ninja", session=7),
                                                     process(4, 3, "nvcc", session=7)])] == [3]  # fmt: skip
    # docker exec BUILD nvcc ...: its parent is outside.
    assert find_leftovers([shell, process(4, 0, "nvcc", session=4)]) == []


def test_a_script_that_compiles_is_a_build() -> None:
    assert find_leftovers([INIT, process(3, 1, "bash"), process(4, 3, "nvcc")]) == []


processes = st.builds(
    process, st.integers(0, 12), st.integers(0, 12), st.sampled_from(["nvcc", "sh", "ninja", "systemd", "pip"]),
    shell=st.booleans(),
)  # fmt: skip


# On a machine that others use as well, an example may take long.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(st.lists(processes))
def test_any_table_has_an_answer(table: list[Process]) -> None:
    for left in find_leftovers(table):
        assert left.top in left.members
        assert len({p.pid for p in left.members}) <= len(table)
        assert left.compilers


# Reading


def write_process(root: Path, pid: int, stat: str, command: bytes = b"") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(stat)
    (folder / "cmdline").write_bytes(command)


def stat_line(pid: int, name: str, parent: int, state: str = "R", rss_pages: int = 100) -> str:
    fields = [state, parent, pid, 77, *[0] * 15, 4242, 0, rss_pages, *[0] * 28]
    return f"{pid} ({name}) {' '.join(map(str, fields))}"


def test_reading_a_recorded_proc(tmp_path: Path) -> None:
    write_process(tmp_path, 5, stat_line(5, "cicc", 1))
    write_process(tmp_path, 6, stat_line(6, "a) R 1 (b", 5))  # a name can hold anything
    write_process(tmp_path, 7, stat_line(7, "sh", 5), b"/bin/sh\0-c\0cicc\0")
    write_process(tmp_path, 8, stat_line(8, "bash", 5), b"bash\0build.sh\0")
    write_process(tmp_path, 9, stat_line(9, "nvcc", 1, state="Z"))
    write_process(tmp_path, 10, "10 (cut")
    write_process(tmp_path, 11, "")
    table = {p.pid: p for p in read_processes(tmp_path)}
    assert sorted(table) == [5, 6, 7, 8]
    assert table[5].rss == 100 * os.sysconf("SC_PAGE_SIZE")
    assert table[5].started == 4242 / os.sysconf("SC_CLK_TCK")
    assert table[6].name == "a) R 1 (b"
    assert (table[5].parent, table[6].parent, table[5].session) == (1, 5, 77)
    assert table[7].one_command
    assert not table[8].one_command


def test_no_proc_at_all(tmp_path: Path) -> None:
    assert read_processes(tmp_path) == []


@patient
@given(st.text(max_size=60))
def test_any_stat_is_read_or_left_out(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = tmp_path_factory.mktemp("proc")
    write_process(root, 5, text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    read_processes(root)


def test_a_real_orphan(tmp_path: Path) -> None:
    """A process called cicc whose parent ends at once."""
    fake = tmp_path / "cicc"
    fake.symlink_to("/bin/sleep")
    starter = f"import subprocess; print(subprocess.Popen([{str(fake)!r}, '60'], stdout=-3, stderr=-3).pid)"
    run = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=True)
    pid = int(run.stdout)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            table = {p.pid: p for p in read_processes()}
            if table[pid].name == "cicc" and table[pid].parent != os.getpid():
                break
        assert table[pid].name == "cicc"
        assert table[pid].rss > 0
        # Who takes it in differs: systemd, process 1, a subreaper such as a CI runner's shell.
        if table[pid].parent == 1 and table[1].session != table[pid].session:
            assert pid in [left.top.pid for left in find_leftovers(table.values())]
    finally:
        os.kill(pid, signal.SIGKILL)
