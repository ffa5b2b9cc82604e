from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybuild.curve import Curve, scale
from pybuild.errors import PybuildError
from pybuild.profile import (
    CAUTIOUS,
    Compile,
    Profile,
    busy_cores,
    highest_peak,
    load_profile,
    read_profile,
    workload,
)
from pybuild.spec import HEAD_DIMS, BuildSpec
from pybuild.units import GIB, MIB

FOUR = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = load_profile("flash-attn")
    assert found is not None
    return found


# The profile that is shipped.


def test_flash_attn_has_its_72_kernels_and_one_cpp_file(profile: Profile) -> None:
    names = [name for name, _ in profile.curves(("sm_100",), 1)]
    assert len(names) == len(set(names)) == 73
    assert [compile_.kernel for compile_ in profile.of_build if not compile_.archs] == ["flash_api"]
    # setup.py's order: the C++ file, then forward, backward, split.
    assert names[:2] == ["flash_api", "flash_fwd_hdim32_fp16_sm80"]
    assert names[-1] == "flash_fwd_split_hdim256_bf16_causal_sm80"


def test_every_kernel_is_the_spike_that_the_design_describes(profile: Profile) -> None:
    curves = [curve for name, curve in profile.curves(("sm_100",), 1) if name != "flash_api"]
    assert 3.2 < min(curve.peak for curve in curves) / GIB < max(curve.peak for curve in curves) / GIB < 6.7
    # The spike is over in the first minute and a bit, and memory is low at the end.
    for curve in curves:
        assert curve.times[curve.memory.index(curve.peak)] < 75
        assert curve.memory[-1] < GIB
    hours = sum(compile_.cpu_s for compile_ in profile.of_build if compile_.archs and not compile_.estimated) / 3600
    assert hours == pytest.approx(2.1, rel=0.01)


def test_peaks_are_those_of_all_samples(profile: Profile) -> None:
    for compile_ in profile.compiles:
        assert compile_.curve().peak >= compile_.peak_mib * MIB
        assert compile_.curve().duration >= compile_.wall_s


# Scaled to other architectures and threads: against what was measured.


def test_four_architectures_are_near_the_measured_ones(profile: Profile) -> None:
    alone = {compile_.kernel: compile_ for compile_ in profile.of_build}
    together = [compile_ for compile_ in profile.compiles if len(compile_.archs) == 4]
    assert len(together) == 4
    for measured in together:
        scaled = scale(alone[measured.kernel].curve(), FOUR, 4)
        assert scaled.peak / MIB == pytest.approx(measured.peak_mib, rel=0.05)
        assert scaled.duration == pytest.approx(measured.wall_s, rel=0.2)
        assert busy_cores(FOUR, 4) == pytest.approx(measured.cpu_s / measured.wall_s, rel=0.15)


def test_other_architectures_alone_are_near_the_measured_ones(profile: Profile) -> None:
    alone = {compile_.kernel: compile_ for compile_ in profile.of_build}
    others = [compile_ for compile_ in profile.compiles if compile_.archs in (("sm_90",), ("sm_120",))]
    assert len(others) == 4
    for measured in others:
        scaled = scale(alone[measured.kernel].curve(), measured.archs, 1)
        assert scaled.peak / MIB == pytest.approx(measured.peak_mib, rel=0.02)
        assert scaled.duration == pytest.approx(measured.wall_s, rel=0.2)


def test_threads_trade_memory_for_time() -> None:
    one = Curve((0.0, 30.0, 100.0), (0.0, 4.0 * GIB, GIB))
    at_once, in_turn = scale(one, FOUR, 4), scale(one, FOUR, 1)
    assert at_once.peak == pytest.approx(3.75 * one.peak)
    assert in_turn.peak == one.peak
    assert at_once.duration < in_turn.duration
    # The processor time is the same.
    assert at_once.duration * busy_cores(FOUR, 4) == pytest.approx(in_turn.duration * busy_cores(FOUR, 1))


def test_more_threads_than_architectures_change_nothing() -> None:
    one = Curve((0.0, 1.0), (0.0, 1.0))
    assert scale(one, ("sm_100",), 8) == one
    assert scale(one, FOUR, 4) == scale(one, FOUR, 99)
    assert busy_cores(("sm_100",), 8) == 1
    # C++ has no architectures.
    assert scale(one, (), 4) == one
    assert busy_cores((), 4) == 1


def test_an_unknown_architecture_is_taken_to_be_the_slowest() -> None:
    one = Curve((0.0, 1.0), (0.0, 1.0))
    assert scale(one, ("sm_999",), 1).duration == scale(one, ("sm_80",), 1).duration


def test_highest_peak_covers_every_curve(profile: Profile) -> None:
    for architectures, threads in ((("sm_100",), 1), (FOUR, 4), (FOUR, 2), (FOUR, 1)):
        highest = highest_peak(profile, len(architectures), threads)
        assert highest >= max(curve.peak for _, curve in profile.curves(architectures, threads)) - 1
        assert highest <= 1.01 * max(curve.peak for _, curve in profile.curves(architectures, threads))


def test_cautious_is_more_than_any_measured(profile: Profile) -> None:
    curves = [curve for _, curve in profile.curves(("sm_100",), 1)]
    assert CAUTIOUS.peak > max(curve.peak for curve in curves)
    assert CAUTIOUS.duration > max(curve.duration for curve in curves)
    for compile_ in profile.compiles:
        if len(compile_.archs) == 4:
            assert scale(CAUTIOUS, FOUR, 4).peak > compile_.peak_mib * MIB


# A selection of kernels.


def test_selections_name_their_kernels() -> None:
    def names(**selection: Any) -> list[str]:
        return [name for name, _ in workload(BuildSpec(**selection), 1).compiles]

    # Four kernels and the C++ file, as nix's selection has it (issue 2's first wheel).
    assert names(head_dims=(64,), dtypes=("fp16",), forward_only=True) == [
        "flash_api",
        "flash_fwd_hdim64_fp16_sm80",
        "flash_fwd_hdim64_fp16_causal_sm80",
        "flash_fwd_split_hdim64_fp16_sm80",
        "flash_fwd_split_hdim64_fp16_causal_sm80",
    ]
    assert len(names(forward_only=True)) == 1 + 48
    assert len(names(dtypes=("bf16",))) == 1 + 36
    assert sum(len(names(head_dims=(dim,))) - 1 for dim in HEAD_DIMS) == 72


def test_of_an_unknown_package_every_compile_is_a_guess() -> None:
    work = workload(BuildSpec(package="some-extension"), 1)
    assert work.profile is None
    assert set(work.curves) == {CAUTIOUS}


# Files.


SMALL: dict[str, Any] = {
    "package": "small",
    "version": "1",
    "source": "",
    "compiler": "",
    "machine": "",
    "sampled": "",
    "compiles": [
        {
            "kernel": "a",
            "archs": ["sm_100"],
            "wall_s": 9,
            "cpu_s": 9,
            "peak_mib": 10,
            "tool_peak_mib": {"cicc": 10},
            "memory_mib": [[0, 1], [4, 8], [4, 9], [8, 2]],
        }
    ],
}


def test_a_curve_has_its_true_peak_and_ascending_times() -> None:
    curve = Compile.model_validate(SMALL["compiles"][0]).curve()
    assert curve == Curve((0.0, 4.0, 8.0, 9.0), (0.0, 10.0 * MIB, 2.0 * MIB, 2.0 * MIB))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="can't be read: No such file"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"compiles": []}, "compiles"),
        ({"surplus": 1}, "surplus"),
        ({"compiles": [SMALL["compiles"][0] | {"wall_s": -1}]}, "compiles.0.wall_s"),
        ({"compiles": [SMALL["compiles"][0] | {"peak_mib": 1e300}]}, "compiles.0.peak_mib"),
        ({"compiles": [SMALL["compiles"][0] | {"memory_mib": [[0]]}]}, "compiles.0.memory_mib.0"),
    ],
)
def test_a_bad_profile_names_the_place(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(SMALL | change))
    with pytest.raises(PybuildError) as raised:
        read_profile(path)
    assert f"{path} is no profile: {where}" in raised.value.what


@given(st.text())
def test_any_other_text_is_no_profile(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(PybuildError, match="is no profile"):
        read_profile(path)


def test_readings_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    path.write_text(json.dumps(SMALL).replace('"peak_mib": 10', '"peak_mib": NaN'))
    with pytest.raises(PybuildError, match="peak_mib"):
        read_profile(path)


@pytest.mark.parametrize("name", ["", "*", "../flash-attn", "flash-attn/", "-x", "a b", "flash\n"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(PybuildError, match="not a package's name"):
        load_profile(name)
