from __future__ import annotations

import itertools

import pytest
from packaging.version import Version

from pybuild.cuda import cuda_versions, driver_for_ptx, highest_gcc, oldest_driver
from pybuild.hostpkgs import CUDA_OF_RELEASE, GCC_RANGE


def test_the_table_ascends() -> None:
    rows = list(cuda_versions().values())
    assert len(rows) >= 12
    for one, next_one in itertools.pairwise(rows):
        assert Version(one.driver) < Version(next_one.driver)
        assert Version(one.ptx) <= Version(next_one.ptx)
        assert one.gcc <= next_one.gcc


def test_it_knows_every_release_and_agrees_with_hostpkgs() -> None:
    for cuda in CUDA_OF_RELEASE.values():
        assert highest_gcc(cuda) == GCC_RANGE[cuda][1]
        assert cuda in cuda_versions()


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [("12.8", "525.60.13"), ("12", "525.60.13"), ("13.0", "580.65.06"), ("13.7", "580.65.06"), ("9.2", None)],
)
def test_oldest_driver(cuda: str, driver: str | None) -> None:
    assert oldest_driver(cuda) == driver


@pytest.mark.parametrize(
    ("isa", "driver"),
    [("8.7", "570.26"), ("8.6", "570.26"), ("9.0", "580.65.06"), ("7.0", "520.61.05"), ("11.0", None)],
)
def test_driver_for_ptx(isa: str, driver: str | None) -> None:
    assert driver_for_ptx(isa) == driver


@pytest.mark.parametrize(("cuda", "gcc"), [("12.4", 13), ("12.7", 13), ("13.5", 15), ("10.2", 11)])
def test_highest_gcc(cuda: str, gcc: int) -> None:
    assert highest_gcc(cuda) == gcc
