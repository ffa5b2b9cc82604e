"""bench/: its policies, what it measures, and that README.md says what its results say."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pybuild.units import GIB

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))
bench: ModuleType = importlib.import_module("bench")


@pytest.fixture(scope="module")
def virtual() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bench.RESULTS / "virtual.json").read_text())
    return found


# The policies.


@pytest.mark.parametrize(
    ("cores", "gib", "upstream", "newer"),
    [(128, 288, 32, 14), (16, 32, 3, 1), (16, 16, 1, 1), (4, 512, 2, 2), (1, 1, 1, 1)],
)
def test_formulas_are_those_of_setup_py(cores: int, gib: int, upstream: int, newer: int) -> None:
    assert bench.upstream(cores, gib * GIB) == upstream
    assert bench.upstream_newer(cores, gib * GIB) == newer
    assert bench.nixpkgs(cores, gib * GIB) == cores


def test_the_sample_has_every_family() -> None:
    names = [name for name, _ in bench.sample()]
    assert len(names) == 24 and len(bench.kernels()) == 72
    parts = [re.fullmatch(r"flash_(\w+?)_hdim(\d+)_(fp16|bf16)(_causal)?_sm80", name) for name in names]
    families = {(part[1], part[2]) for part in parts if part}
    assert len(families) == 18
    backward = {(part[2], part[4]) for part in parts if part and part[1] == "bwd"}
    assert len(backward) == 12
    assert [name for name, _ in bench.kernels() if name in names] == names, "in the order of setup.py"


def test_a_machine_with_room_for_all_makes_policies_equal_but_for_their_jobs() -> None:
    row = bench.machine_row(bench.sample(), 4, 512 * GIB)
    assert row["hindsight"] == row["safe"] == row["at_peaks"] == row["nixpkgs"]
    assert row["hindsight"]["jobs"] == 4
    assert row["upstream_2_8_3"]["jobs"] == 2
    assert row["lower_bound"] <= row["gate"]["seconds"] <= 1.05 * row["hindsight"]["seconds"]


# The results that are kept.


def test_the_gate_keeps_its_budget_on_every_machine_and_is_near_the_lower_bound(virtual: dict[str, Any]) -> None:
    assert {(row["cores"], row["memory"] // GIB) for row in virtual["machines"]} == {
        (cores, gib) for cores in bench.CORES for gib in bench.MEMORY_GIB
    }
    for row in virtual["machines"]:
        assert row["gate"]["peak"] <= row["budget"]
        assert row["gate"]["seconds"] <= 1.02 * row["hindsight"]["seconds"]
    assert statistics.median(row["gate"]["seconds"] / row["lower_bound"] for row in virtual["machines"]) <= 1.12


def test_readme_has_the_tables_of_the_results() -> None:
    text = (bench.HERE / "README.md").read_text()
    assert bench.with_tables(text) == text, "bench/bench.py tables"
    assert "<!-- virtual -->" in text


def test_results_name_machine_commit_and_command() -> None:
    for path in bench.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        for result in found if isinstance(found, list) else [found]:
            assert result["machine"]["cores"] and result["command"].startswith("bench/bench.py")
            assert re.fullmatch(r"[0-9a-f]{7,}", result["commit"]), f"{path.name}: of a tree with changes"


def test_a_run_that_was_cut_off_is_thought_to_its_end() -> None:
    name, curve = bench.sample()[0]
    cut = {"kernels": 2, "compiles": [["x", 0.0, 7.0, 0]], "decisions": [[1.0, "go", "x"], [3.0, "go", name]]}
    assert bench.to_the_end(cut, [(name, curve), ("x", curve)]) == 3.0 + curve.duration
    assert bench.to_the_end({**cut, "kernels": 3}, [(name, curve), ("x", curve)]) is None, "one never started"


# For real, with a compiler that holds memory and waits.


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The command line of real runs of two kernels, each 100 MiB for a second."""
    try:
        with bench.Cgroup(f"pybuild-test-{os.getpid()}", GIB):
            pass
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        f"#!{sys.executable} -IS\nimport sys, time\nheld = b'1' * (100 << 20)\ntime.sleep(1)\n"
        "open(sys.argv[sys.argv.index('-o') + 1], 'w').write('object')\n"
    )
    nvcc.chmod(0o755)
    folders = ["--sources", str(tmp_path), "--headers", str(tmp_path), "--work", str(tmp_path / "work")]
    output = ["--output", str(tmp_path / "real.json"), "--nvcc", str(nvcc), "--every", "12", "--cores", "2"]
    return [sys.executable, str(ROOT / "bench/bench.py"), "real", *folders, *output]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {result["run"]: result for result in json.loads((folder / "real.json").read_text())}


def test_real_runs_are_measured_kept_and_not_repeated(command: list[str], tmp_path: Path) -> None:
    runs = ["gate@none", "fixed-2@0.15GiB", "fixed-1@1GiB+fixed-1@2GiB"]
    subprocess.run([*command, *runs[:2]], check=True, timeout=60)
    gate, killed = results(tmp_path).values()
    assert gate["over"] and not gate["cut_off"] and gate["oom_kills"] == 0
    assert gate["objects"] == len(gate["compiles"]) == gate["kernels"] == 2
    assert 100 * 2**20 < gate["held_peak"] < GIB
    assert [said[1] for said in gate["decisions"]].count("go") == 2
    assert killed["out_of_memory"] is not None and killed["oom_kills"] >= 1
    # Resumed: what is over is not run again, what is cut off in the middle is kept as that.
    before = results(tmp_path)
    subprocess.run([*command, *runs[:2], f"{runs[2]}/1"], check=True, timeout=60)
    after = results(tmp_path)
    assert {run: after[run] for run in before} == before
    assert [after[run]["beside"] for run in ("fixed-1@1GiB", "fixed-1@2GiB")] == [["fixed-1@2GiB"], ["fixed-1@1GiB"]]
    assert all(after[run]["cut_off"] for run in ("fixed-1@1GiB", "fixed-1@2GiB"))


def test_a_benchmark_that_is_stopped_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen([*command, "fixed-1@1GiB"])
    deadline = time.monotonic() + 30
    log = tmp_path / "work/fixed-1@1GiB/spec.json"
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    for top in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        assert not list(top.glob(f"pybuild-bench-{process.pid}-*"))
