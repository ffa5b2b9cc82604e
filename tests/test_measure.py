"""Watching compiles: real processes that hold what they say, and the profiles that are made of what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pybuild.cli.profile
from pybuild.cli.profile import choose, command
from pybuild.errors import BuildError, PybuildError
from pybuild.gated import admission_for, place_for
from pybuild.learn import recall
from pybuild.measure import Sample, Watched, compiler_version, find_driver, keep, measure_kernel, phases, thinned, watch
from pybuild.nix import Nix, Store
from pybuild.plan import Kernel, Plan
from pybuild.profile import Compile, read_profile
from pybuild.spec import BuildSpec
from pybuild.units import MIB

# What is measured.


class Compiler:
    """A folder with an `nvcc` whose tools hold memory: cicc 120 MiB, then ptxas 40 MiB, half a second each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for tool in ("cicc", "ptxas"):
            (folder / tool).symlink_to(sys.executable)
        hold = "import time; held = b'1' * ({} << 20); time.sleep(0.5)"
        tools = "\n".join(
            f'{folder}/{tool} -IS -c "{hold.format(mib)}"' for tool, mib in (("cicc", 120), ("ptxas", 40))
        )
        version = 'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; fi'
        self.write("nvcc", f"{version}\n{tools}\necho object >$2\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}")
        (self.folder / name).chmod(0o755)

    def line(self, source: str, target: Path) -> str:
        return f"{self.folder}/nvcc -o {target} -c {self.folder}/{source}.cu"


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path / "bin")


def begin(line: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", f"{line}; true"])


def test_a_compile_is_watched_by_tool_and_phase(compiler: Compiler, tmp_path: Path) -> None:
    with begin(compiler.line("some_kernel", tmp_path / "k.o")) as process:
        watched = watch("some_kernel", process, 0.05)
    assert watched is not None
    seen = watched.compile("some_kernel", ("sm_100",), 1)
    assert 120 < seen.tool_peak_mib["cicc"] < 160
    assert 40 < seen.tool_peak_mib["ptxas"] < 80
    assert seen.tool_peak_mib["cicc"] <= seen.peak_mib < 180
    assert [phase.tool for phase in seen.phases] == ["cicc", "ptxas"]
    first, second = seen.phases
    assert first.end_s == second.start_s < second.end_s <= seen.wall_s
    assert 1.0 <= seen.wall_s < 10
    assert 0 < seen.cpu_s < seen.wall_s + 1
    assert seen.curve().peak == seen.peak_mib * MIB


def test_a_compile_ends_when_its_compiler_does_and_not_with_what_started_it(compiler: Compiler, tmp_path: Path) -> None:
    with begin(compiler.line("some_kernel", tmp_path / "k.o") + "; sleep 2") as process:
        watched = watch("some_kernel", process, 0.05)
        assert process.poll() is None
        process.kill()
    assert watched is not None and watched.wall < 10


def test_another_source_is_not_watched(compiler: Compiler, tmp_path: Path) -> None:
    with begin(compiler.line("some_kernel_causal", tmp_path / "k.o")) as process:
        assert watch("some_kernel", process, 0.05) is None


def test_the_compiler_is_the_topmost_process_with_the_source(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    compiler = Compiler(folder)
    compiler.write("gcc", "sleep 5; true")
    compiler.write("nvcc", f"{folder}/gcc -c -E {folder}/k.cu; true")
    with begin(compiler.line("k", tmp_path / "k.o")) as process:
        found = None
        while process.poll() is None and (found is None or len(found.children()) == 0):
            found = find_driver("k")
        assert found is not None and found.name() == "nvcc"
        for ended in (found, *found.children(recursive=True)):
            ended.kill()


def test_a_compile_that_is_too_short_to_be_seen_is_an_error() -> None:
    with pytest.raises(BuildError, match="k: its compiler was over"):
        Watched(Path("nvcc")).compile("k", ("sm_100",), 1)


def test_small_processes_make_no_phases() -> None:
    def sample(time: float, **tools: int) -> Sample:
        return Sample(time, {tool: mib * MIB for tool, mib in tools.items()}, 0.0)

    seen = [sample(0.2, nvcc=5), sample(0.4, nvcc=5, cicc=100), sample(0.6, cicc=300), sample(0.8, ptxas=30, sh=3)]
    assert [(p.tool, p.start_s, p.end_s, p.peak_mib) for p in phases(seen)] == [
        ("cicc", 0.0, 0.6, 300),
        ("ptxas", 0.6, 0.8, 30),
    ]
    assert phases(seen[:1]) == []


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60))
def test_thinned_readings_are_within_one_per_cent_of_all(memory: list[int]) -> None:
    points = [(index * 0.2, float(mib)) for index, mib in enumerate(memory)]
    kept = thinned(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert max(mib for _, mib in kept) == max(memory)
    for moment, mib in points:
        before = max(point for point in kept if point[0] <= moment)
        after = min(point for point in kept if point[0] >= moment)
        share = (moment - before[0]) / (after[0] - before[0]) if after != before else 0.0
        assert abs(before[1] + share * (after[1] - before[1]) - mib) <= 0.01 * max(memory) + 1e-6


def test_a_line_needs_two_readings() -> None:
    line = [(index * 0.2, 10.0 * index) for index in range(400)]
    assert thinned(line) == [line[0], line[-1]]


def test_a_compiler_says_its_version(compiler: Compiler, tmp_path: Path) -> None:
    assert compiler_version(compiler.folder / "nvcc") == "nvcc V13.0.88"
    assert compiler_version(tmp_path / "missing/nvcc") == "nvcc"


# By a derivation.


class FakeNix(Nix):
    """A nix whose derivations are shell scripts; `valid` are the outputs that its store has."""

    valid: frozenset[str] = frozenset()

    def is_valid(self, paths: Iterable[str]) -> dict[str, bool]:
        return {path: path in self.valid for path in paths}

    def run(self, argv: Sequence[str], *, doing: str, given: str = "") -> str:
        return ""


class FakePlan:
    """A plan over FakeNix."""

    def __init__(self, root: Path, kernels: list[Kernel]) -> None:
        self.spec = BuildSpec(release="cu130")
        self.nix = FakeNix(("nix",), ("nix-store",), (2, 8), Store("local", root), dict(os.environ))
        self.inputs_argv: list[str] = []
        self._kernels = kernels

    def kernels(self) -> list[Kernel]:
        return self._kernels

    def realise_argv(self, derivation: str) -> list[str]:
        return ["sh", "-c", derivation, "nix-store"]


def kernel_of(compiler: Compiler, root: Path, name: str = "some_kernel", then: str = "exit 0") -> Kernel:
    output = root / "nix/store" / name
    output.mkdir(parents=True)
    line = compiler.line(name, output / f"{name}.o")
    return Kernel(name, f"{line}; {then}", f"/nix/store/{name}")


def test_a_kernel_is_measured_by_its_derivation(compiler: Compiler, tmp_path: Path) -> None:
    kernel = kernel_of(compiler, tmp_path)
    seen = measure_kernel(cast(Plan, FakePlan(tmp_path, [kernel])), kernel, "a test's machine")
    assert (seen.kernel, seen.archs, seen.nvcc_threads) == ("some_kernel", ("sm_100",), 1)
    assert seen.object_bytes == len("object\n")
    assert seen.measured and seen.measured.endswith("a test's machine")
    assert seen.peak_mib > 120


def test_a_kernel_that_the_store_has_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    # 104: other bits than in the store, which do not matter here.
    kernel = kernel_of(compiler, tmp_path, then='[ "$1" = --check ] && exit 104; exit 1')
    plan = FakePlan(tmp_path, [kernel])
    object.__setattr__(plan.nix, "valid", frozenset([kernel.output]))
    assert measure_kernel(cast(Plan, plan), kernel, "").peak_mib > 120


def test_a_kernel_that_fails_ends_with_what_nix_said(compiler: Compiler, tmp_path: Path) -> None:
    kernel = kernel_of(compiler, tmp_path, then="echo 'error: it is broken' >&2; exit 1")
    with pytest.raises(BuildError, match=r"compiling some_kernel: .*it is broken"):
        measure_kernel(cast(Plan, FakePlan(tmp_path, [kernel])), kernel, "")


def test_a_kernel_whose_compiler_is_hidden_is_an_error(tmp_path: Path) -> None:
    kernel = Kernel("some_kernel", "true", "/nix/store/none")
    with pytest.raises(BuildError, match="could not be seen") as error:
        measure_kernel(cast(Plan, FakePlan(tmp_path, [kernel])), kernel, "")
    assert "hidepid" in error.value.remedy


# What is kept.

FACTS = {"package": "p", "version": "1", "source": "s", "compiler": "c", "machine": "m", "sampled": "each second"}


def row(name: str, wall: float = 10.0, archs: tuple[str, ...] = ("sm_100",)) -> Compile:
    return Compile(
        kernel=name,
        archs=archs,
        wall_s=wall,
        cpu_s=wall,
        peak_mib=100,
        tool_peak_mib={"cicc": 100},
        memory_mib=((1.0, 100.0), (9.0, 20.0)),
    )


def test_what_is_measured_takes_the_place_of_what_was(tmp_path: Path) -> None:
    path = tmp_path / "new/profile.json"
    for compile_ in (row("b"), row("a"), row("a", archs=("sm_90", "sm_100")), row("b", wall=20.0)):
        keep(path, FACTS, compile_, ["b", "a"])
    found = read_profile(path)
    assert [(c.kernel, len(c.archs), c.wall_s) for c in found.compiles] == [("b", 1, 20), ("a", 1, 10), ("a", 2, 10)]
    assert found.machine == "m"
    # A compile a line, so that two profiles can be compared.
    assert len(path.read_text().splitlines()) == 1 + len(FACTS) + 1 + 3 + 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["profile.json"]


def test_a_profile_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    keep(path, FACTS, row("a"), [])
    before = path.read_bytes()
    with pytest.raises(PybuildError, match="a profile of p 1, not of p 2"):
        keep(path, {**FACTS, "version": "2"}, row("a"), [])
    assert path.read_bytes() == before
    path.write_text("{}")
    with pytest.raises(PybuildError, match="is no profile"):
        keep(path, FACTS, row("a"), [])


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PybuildError, match="can't be written"):
        keep(tmp_path / "file/profile.json", FACTS, row("a"), [])


# The command.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """`pybuild profile` over a plan: what it wrote to standard output and to standard error."""

    def invoke(plan: FakePlan, *words: str) -> tuple[str, str]:
        monkeypatch.setattr(pybuild.cli.profile, "planned", lambda options: plan)
        monkeypatch.setattr(pybuild.cli.profile, "fetch_inputs", lambda plan: None)
        command.main(["flash-attn", *words], standalone_mode=False)
        return capsys.readouterr()

    return invoke


def test_profile_measures_and_later_builds_know(
    compiler: Compiler, tmp_path: Path, cache: Path, profile: Callable[..., tuple[str, str]]
) -> None:
    names = ("flash_bwd_hdim32_fp16_sm80", "flash_fwd_hdim64_fp16_sm80")
    plan = FakePlan(tmp_path, [kernel_of(compiler, tmp_path, name) for name in names])
    file = tmp_path / "here.json"
    assert profile(plan, "-o", str(file))[0] == f"{file}\n"
    found = read_profile(file)
    # In the build's order, forward first.
    assert [c.kernel for c in found.compiles] == list(reversed(names))
    assert (found.package, found.version) == ("flash-attn", "2.8.3")
    place = place_for(plan.spec)
    assert place.is_relative_to(cache)
    curves = recall(place)
    assert sorted(curves) == sorted(names)
    assert curves[names[0]].peak < 200 * MIB, "gigabytes in the profile that is shipped"
    assert admission_for(plan.spec, 2, lambda held: 0).curve_of(names[0]) == curves[names[0]]
    assert admission_for(plan.spec, 2, lambda held: 0).curve_of("flash_fwd_hdim64_bf16_sm80").peak > 1000 * MIB


def test_profile_prints_what_it_measured_as_json(
    compiler: Compiler, tmp_path: Path, cache: Path, profile: Callable[..., tuple[str, str]]
) -> None:
    plan = FakePlan(tmp_path, [kernel_of(compiler, tmp_path, "one"), kernel_of(compiler, tmp_path, "two")])
    printed, said = profile(plan, "t*", "--json")
    assert [Compile.model_validate(found).kernel for found in json.loads(printed)] == ["two"]
    assert "1 of 1, two" in said


def test_profile_refuses_a_wrong_kernel_and_a_wrong_file_before_it_compiles(
    tmp_path: Path, cache: Path, profile: Callable[..., tuple[str, str]]
) -> None:
    plan = FakePlan(tmp_path, [Kernel("one", "exit 1", "/nix/store/one")])
    with pytest.raises(PybuildError, match="'oen'") as error:
        profile(plan, "one", "oen")
    assert error.value.exit_status == 2 and "  one" in error.value.remedy
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(PybuildError, match="is no profile"):
        profile(plan, "one", "-o", str(tmp_path / "other.json"))
    assert not cache.exists()


def test_patterns_choose_kernels_in_the_builds_order() -> None:
    kernels = [Kernel(name, "", "") for name in ("a_1", "a_2", "b_1", "c")]
    assert [k.name for k in choose(kernels, ["c", "*_1", "a_?"], ["b_1", "a_2"])] == ["b_1", "a_2", "a_1", "c"]
    assert choose(kernels, [], []) == kernels
