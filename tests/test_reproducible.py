"""Objects and wheels have the same bits whenever they are built: nix builds them again and compares (--check)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
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


@functools.cache
def built(package: str) -> Plan:
    """The plan, its kernels and wheel in the store."""
    spec = PLANS[package]
    try:
        plan = make_plan(spec, os.environ, cores=2)
    except PybuildError as error:
        pytest.skip(str(error))
    argv = [sys.executable, "-m", "pybuild", "build", package, "--release", "cu130", "--python", PYTHON]
    for option, values in (("--head-dim", spec.head_dims), ("--dtype", spec.dtypes)):
        argv += [word for value in values for word in (option, str(value))]
    argv += ["--forward-only"] * spec.forward_only
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(argv, check=True, stdout=subprocess.PIPE, cwd=folder)
    return plan


def check(plan: Plan, output: str) -> None:
    """Build the derivation of a valid output again; nix fails where it does not come out the same."""
    query = [*plan.nix.nix_store, *plan.nix.store.options, "--query", "--deriver", output]
    deriver = plan.nix.run(query, doing="asking for the derivation").strip()
    plan.nix.run([*plan.realise_argv(deriver), "--check"], doing=f"building {Path(output).name} again")


@pytest.mark.parametrize(
    ("package", "kernel"),
    [("causal-conv1d", "causal_conv1d_update"), ("causal-conv1d", "causal_conv1d"), ("flash-attn", "flash_api")],
)
def test_an_object_built_again_is_the_same(package: str, kernel: str) -> None:
    plan = built(package)
    (output,) = [k.output for k in plan.kernels() if k.name == kernel]
    check(plan, output)


@pytest.mark.parametrize("package", PLANS)
def test_a_wheel_linked_again_is_the_same(package: str) -> None:
    check(built(package), built(package).wheel())
