"""The command line of a build: which package set, and what travels with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pybuild import flake, plan
from pybuild.errors import PybuildError
from pybuild.nix import Nix, Store
from pybuild.spec import BuildSpec


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and a nix that is never run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nix = Nix(("nix",), ("nix-store",), (2, 26), Store("local"), {})
    monkeypatch.setattr(plan, "find_nix", lambda *_, **__: nix)
    return tmp_path


def test_nixpkgs_comes_as_flake_lock_pins_it_with_what_was_asked_for(cache: Path) -> None:
    spec = BuildSpec(capabilities=("9.0", "12.0"), python="3.12", head_dims=(128,))
    made = plan.make_plan(spec, {}, cores=4, package_set="nixpkgs")
    folder = made.overrides["nixpkgs"]
    assert json.loads((folder / "choice.json").read_text()) == {
        "release": "cu128",
        "cudaCapabilities": ["9.0", "12.0"],
        "selection": {"headDims": [128]},
        "python": "3.12",
    }
    assert (folder / "flake.lock").read_text() == (flake.flake_root() / "flake.lock").read_text()
    assert made.pins == ()
    assert "--offline" not in made.argv
    assert made.argv[made.argv.index("--cores") + 1] == "4"


def test_nixpkgs_takes_no_toolkit_of_this_machine(cache: Path) -> None:
    with pytest.raises(PybuildError, match="--cuda-home is for hostpkgs"):
        plan.make_plan(BuildSpec(), {}, cores=1, package_set="nixpkgs", cuda_home=Path("/usr/local/cuda"))


def test_the_same_choice_is_the_same_folder_and_another_choice_another(cache: Path) -> None:
    def folder(spec: BuildSpec) -> Path:
        return plan.make_plan(spec, {}, cores=1, package_set="nixpkgs").overrides["nixpkgs"]

    assert folder(BuildSpec()) == folder(BuildSpec())
    assert folder(BuildSpec()) != folder(BuildSpec(forward_only=True))


def test_a_package_that_there_is_not_is_told_with_those_there_are(cache: Path) -> None:
    with pytest.raises(PybuildError, match="vllm") as raised:
        plan.make_plan(BuildSpec(package="vllm"), {}, cores=1)
    assert "flash-attn" in raised.value.remedy
