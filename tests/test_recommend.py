from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from pybuild.cli import cli
from pybuild.curve import Curve
from pybuild.errors import PybuildError
from pybuild.facts.host import Cores, Host, Memory
from pybuild.gated import cores_here, gated_cores, gated_time
from pybuild.profile import workload
from pybuild.recommend import core_cap, cores_for, recommend, reserve_of
from pybuild.simulate import Trials
from pybuild.spec import BuildSpec
from pybuild.units import GIB, MIB

ROOT = Path(__file__).parent.parent
FLASH = workload(BuildSpec(), 1).curves

VECTORS: list[dict[str, Any]] = json.loads((ROOT / "nix/cap-vectors.json").read_text())


def jobs_py() -> Any:
    found = importlib.util.spec_from_file_location("jobs", ROOT / "nix/jobs.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# core_cap


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["case"] for vector in VECTORS])
def test_cap_is_the_same_in_the_build_and_here(vector: dict[str, Any]) -> None:
    given = (vector["cores"], vector["available"], vector["peak"])
    assert core_cap(*given) == vector["cap"]
    assert jobs_py().core_cap(*given) == vector["cap"]


@given(st.integers(1, 1024), st.integers(0, 2**46), st.integers(1, 2**38))
def test_cap_fits_and_one_more_does_not(cores: int, available: int, peak: int) -> None:
    cap = core_cap(cores, available, peak)
    assert 1 <= cap <= cores
    budget = available - max(2 * GIB, available // 10)
    assert cap == 1 or cap * peak <= budget
    assert cap == cores or (cap + 1) * peak > budget


def test_cap_with_a_reserve_of_the_users() -> None:
    assert core_cap(64, 32 * GIB, GIB, reserve=0) == 32
    assert core_cap(64, 32 * GIB, GIB, reserve=33 * GIB) == 1


# recommend


def budget_of(available: int) -> int:
    return available - reserve_of(available)


def fits(trials: Trials, jobs: int, budget: int) -> bool:
    return all(peak <= budget for peak in trials.peaks(jobs))


@st.composite
def builds(draw: st.DrawFn) -> list[Curve]:
    """A few kinds of compile, each a spike and a tail, many times over."""
    kinds = draw(st.lists(st.tuples(st.integers(5, 60), st.integers(100, 9000), st.integers(1, 120)), min_size=1))
    count = draw(st.integers(1, 12))
    return [
        Curve((0.0, up, up + 2.0, up + 2.0 + tail), (0.0, high * MIB, high * MIB / 8, high * MIB / 8))
        for up, high, tail in (kinds[i % len(kinds)] for i in range(count))
    ]


@settings(max_examples=40, deadline=None)
@given(builds(), st.integers(1, 16), st.integers(0, 40))
def test_it_is_the_largest_number_that_passes_every_run(build: list[Curve], cores: int, gib: int) -> None:
    trials = Trials(build)
    passing = [jobs for jobs in range(1, cores + 1) if fits(trials, jobs, gib * GIB)]
    assert recommend(build, cores, gib * GIB) == max(passing, default=1)


@pytest.mark.parametrize("gib", [16, 24, 48, 128, 256])
def test_flash_attn_gets_the_largest_number_that_passes_every_run(gib: int) -> None:
    budget, trials = budget_of(gib * GIB), Trials(FLASH)
    jobs = recommend(FLASH, 128, budget)
    assert fits(trials, jobs, budget)
    assert not any(fits(trials, more, budget) for more in range(jobs + 1, len(FLASH)))


def test_more_memory_never_gives_fewer() -> None:
    numbers = [recommend(FLASH, 128, budget_of(gib * GIB)) for gib in (1, 4, 8, 16, 32, 64, 128, 256, 300, 1024)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert numbers[-1] == 128


def test_it_beats_counting_every_compile_at_its_peak() -> None:
    # That is what a fixed number that is safe in the worst case does: 4 on 32 GiB.
    peak = int(max(curve.peak for curve in FLASH))
    for gib in (32, 64, 128, 256):
        assert recommend(FLASH, 128, budget_of(gib * GIB)) >= 1.5 * core_cap(128, gib * GIB, peak)


def test_cores_bind_where_memory_is_plenty() -> None:
    assert recommend(FLASH, 16, 1024 * GIB) == 16
    assert recommend(FLASH, 1000, 1024 * GIB) == 1000


def test_no_memory_at_all_is_one() -> None:
    assert recommend(FLASH, 16, 0) == recommend(FLASH, 16, -5 * GIB) == 1


def test_four_architectures_leave_fewer() -> None:
    four = workload(BuildSpec(capabilities=("8.0", "9.0", "10.0", "12.0")), 4).curves
    one_after_another = workload(BuildSpec(capabilities=("8.0", "9.0", "10.0", "12.0")), 1).curves
    budget = budget_of(288 * GIB)
    assert recommend(four, 128, budget) < 25
    # As high a spike as for one architecture, for longer.
    assert recommend(one_after_another, 128, budget) > 60


def test_a_package_without_a_profile_is_counted_at_the_cautious_default() -> None:
    unknown = workload(BuildSpec(package="some-extension"), 1).curves
    assert recommend(unknown, 64, budget_of(64 * GIB)) == core_cap(64, 64 * GIB, 8 * GIB) == 7


def test_a_host_without_a_gate() -> None:
    host = Host(cores=Cores(usable=16), memory=Memory(available=32 * GIB, because="a test"))
    assert cores_for(BuildSpec(), host) == recommend(FLASH, 16, budget_of(32 * GIB))
    # Forward kernels of one head dimension are smaller.
    assert cores_for(BuildSpec(head_dims=(64,), forward_only=True), host) > cores_for(BuildSpec(), host)


def test_it_is_quick() -> None:
    # 0.1 s is for the whole command; this is processor time, so that a busy machine does not fail it.
    began = time.process_time()
    for gib in (16, 24, 32, 48, 64, 96, 128, 192, 256):
        recommend(FLASH, 128, budget_of(gib * GIB))
    assert (time.process_time() - began) / 9 < 0.1


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["recommend-cores", *arguments])


MACHINE = ("--cores", "16", "--memory", "32GiB")
UNGATED = ("--ungated", *MACHINE)


def test_standard_output_is_the_number_alone() -> None:
    result = run(*UNGATED, "--explain")
    assert result.exit_code == 0
    assert result.stdout == f"{recommend(FLASH, 16, budget_of(32 * GIB))}\n"
    assert run(*UNGATED).output == result.stdout


def test_explain_names_limit_profile_and_one_more() -> None:
    said = run(*UNGATED, "--explain").stderr
    assert "Memory binds" in said
    assert "profile of flash-attn 2.8.3" in said
    assert "one core more: 7 at once hold up to" in said
    assert "28.8 GiB for the build" in said
    plenty = run("--ungated", "--cores", "4", "--memory", "288GiB", "--explain").stderr
    assert "The cores bind" in plenty
    assert "which fits as well" in plenty


def test_json() -> None:
    report = json.loads(run(*UNGATED, "--json").stdout)
    assert report["cores"] == recommend(FLASH, 16, budget_of(32 * GIB))
    assert report["limit"] == "memory"
    assert report["budget_bytes"] == budget_of(32 * GIB)
    assert report["peak_bytes"] <= report["budget_bytes"] < report["one_more"]["peak_bytes"]
    assert report["one_more"]["runs_over_budget"] > 0
    assert report["safe_at_peak"] == 4


def test_reserve_and_selection_change_the_answer() -> None:
    most = int(run(*UNGATED, "--reserve", "0").stdout)
    assert int(run(*UNGATED, "--reserve", "20GiB").stdout) < int(run(*UNGATED).stdout) <= most
    assert int(run(*UNGATED, "--head-dim", "32", "--forward-only").stdout) > int(run(*UNGATED).stdout)
    assert int(run(*UNGATED, "--capability", "9.0", "--capability", "10.0").stdout) < int(run(*UNGATED).stdout)


def test_a_guess_is_said_to_be_one() -> None:
    result = run("some-extension", *UNGATED)
    assert result.stdout == "3\n"
    assert "no profile of some-extension" in result.stderr
    assert "8.0 GiB" in result.stderr


def test_a_machine_too_small_for_one_is_told() -> None:
    result = run("--ungated", "--cores", "4", "--memory", "6GiB")
    assert result.stdout == "1\n"
    assert "one compile alone takes up to 6.6 GiB, more than the 4.0 GiB" in result.stderr


def test_a_saved_machine(tmp_path: Path) -> None:
    host = Host(cores=Cores(usable=16), memory=Memory(available=32 * GIB, because="MemAvailable of /proc/meminfo"))
    facts = tmp_path / "facts.json"
    facts.write_text(host.model_dump_json())
    assert run("--ungated", "--facts", str(facts)).stdout == run(*UNGATED).stdout
    # An option stands above what was read.
    assert run("--ungated", "--facts", str(facts), "--memory", "1TiB").stdout == "16\n"


def test_under_the_gate_no_core_is_left_idle_for_memory() -> None:
    budget = budget_of(32 * GIB)
    assert gated_cores(FLASH, 16, budget) == 16
    best = gated_time(FLASH, 64, budget)
    cores = gated_cores(FLASH, 64, budget)
    assert 16 < cores < 64, "memory binds: more cores than these change nothing"
    assert gated_time(FLASH, cores, budget) <= 1.04 * best
    assert gated_time(FLASH, cores * 3 // 4, budget) > 1.04 * best
    # 3.3 minutes is the longest kernel.
    assert gated_cores(FLASH, 128, 1024 * GIB) < 60
    assert gated_cores(FLASH, 4, 0) == 1


def test_the_gated_number_is_quick() -> None:
    began = time.process_time()
    for gib in (8, 16, 32, 64, 256):
        gated_cores(FLASH, 128, budget_of(gib * GIB))
    assert (time.process_time() - began) / 5 < 0.1


def test_the_command_answers_for_gated_builds() -> None:
    result = run(*MACHINE, "--explain")
    assert result.stdout == run(*MACHINE).output == "16\n"
    # The table has 10.1 minutes for this machine.
    assert re.search(r"under the gate 16 at once take 10\.[01] minutes", result.stderr)
    assert "without it (--ungated) 6 at once are safe, which take 25.1 minutes" in result.stderr
    report = json.loads(run(*MACHINE, "--json").stdout)
    assert (report["cores"], report["ungated"]["cores"]) == (16, 6)
    assert 590 < report["seconds"] < 620
    host = Host(cores=Cores(usable=16), memory=Memory(available=32 * GIB, because="a test"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pybuild.gated.read_host", lambda programs: host)
        assert cores_here(BuildSpec()) == 16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--memory", "lots"), "--memory: not a size: 'lots'"),
        (("--reserve", "-1"), "--reserve: not a size"),
        (("--facts", "nowhere.json"), "nowhere.json can't be read"),
        (("--capability", "10.5"), "no code for it"),
        (("../../etc/passwd",), "not a package's name"),
        (("*",), "not a package's name"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, PybuildError)
    assert result.exception.exit_status == 2
    assert says in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("--cores", "0"), ("--nvcc-threads", "0"), ("--cores", "many")])
def test_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
