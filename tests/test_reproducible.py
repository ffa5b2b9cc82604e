"""Objects and wheels have the same bits whenever they are built: nix builds them again and compares (--check)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pybuild.errors import PybuildError
from pybuild.plan import Plan, make_plan
from pybuild.spec import PYTHONS, BuildSpec

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nix") is None, reason="no nix on PATH"),
    pytest.mark.skipif(PYTHON not in PYTHONS, reason=f"no release has wheels for Python {PYTHON}"),
]

# What takes the least time of each kind: CUDA, C++, and the wheel made of them; as few of flash-attn's as there are.
PLANS = {
    "causal-conv1d": BuildSpec(package="causal-conv1d", release="cu130", python=PYTHON),
    "flash-attn": BuildSpec(
        package="flash-attn", release="cu130", python=PYTHON, head_dims=(64,), dtypes=("fp16",), forward_only=True
    ),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Plans whose kernels and wheels are in the store."""
    found = {}
    for name, spec in PLANS.items():
        try:
            found[name] = make_plan(spec, os.environ, cores=2)
        except PybuildError as error:
            pytest.skip(str(error))
        argv = [sys.executable, "-m", "pybuild", "build", name, "--release", "cu130", "--python", PYTHON]
        for option, values in (("--head-dim", spec.head_dims), ("--dtype", spec.dtypes)):
            argv += [word for value in values for word in (option, str(value))]
        argv += ["--forward-only"] * spec.forward_only
        subprocess.run(argv, check=True, stdout=subprocess.PIPE, cwd=tmp_path_factory.mktemp("build"))
    return found


def check(plan: Plan, output: str) -> None:
    """Build the derivation of a valid output again; nix fails where it does not come out the same."""
    query = [*plan.nix.nix_store, *plan.nix.store.options, "--query", "--deriver", output]
    deriver = plan.nix.run(query, doing="asking for the derivation").strip()
    plan.nix.run([*plan.realise_argv(deriver), "--check"], doing=f"building {Path(output).name} again")


@pytest.mark.parametrize("kernel", ["causal_conv1d_update", "causal_conv1d"])
def test_an_object_built_again_is_the_same(plans: dict[str, Plan], kernel: str) -> None:
    plan = plans["causal-conv1d"]
    (output,) = [k.output for k in plan.kernels() if k.name == kernel]
    check(plan, output)


def test_flash_attns_smallest_object_built_again_is_the_same(plans: dict[str, Plan]) -> None:
    plan = plans["flash-attn"]
    (output,) = [k.output for k in plan.kernels() if k.name == "flash_api"]
    check(plan, output)


@pytest.mark.parametrize("package", PLANS)
def test_a_wheel_linked_again_is_the_same(plans: dict[str, Plan], package: str) -> None:
    check(plans[package], plans[package].wheel())
