"""nix/tests/expressions.nix, by an evaluator alone: no store, no network, no build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NIX = Path(__file__).parent.parent / "nix"

pytestmark = pytest.mark.skipif(shutil.which("nix-instantiate") is None, reason="no nix on PATH")


def evaluate(expression: str) -> Any:
    """The value of a Nix expression. A store that holds nothing is enough, so this works for any user."""
    argv = ["nix-instantiate", "--store", "dummy://", "--eval", "--strict", "--json", "--expr", expression]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def library(name: str) -> Path:
    """hostpkgs' lib, or that of a nixpkgs tree: the expressions have to mean the same with both."""
    if name == "hostpkgs":
        return NIX / "hostpkgs/lib.nix"
    tree = os.environ.get("PYBUILD_NIXPKGS")
    if not tree:
        pytest.skip("PYBUILD_NIXPKGS names no nixpkgs tree")
    return Path(tree) / "lib"


@pytest.mark.parametrize("name", ["hostpkgs", "nixpkgs"])
def test_every_expression_gives_what_it_should(name: str) -> None:
    results = evaluate(f"import {NIX}/tests/expressions.nix {{ lib = import {library(name)}; }}")
    assert len(results) > 20
    wrong = {test: result for test, result in results.items() if result["expr"] != result["expected"]}
    assert not wrong


def test_a_wrong_expression_is_found() -> None:
    """The derivation that `nix flake check` builds says which test failed, and how."""
    checks = evaluate(f"""
        let
          lib = import {NIX}/hostpkgs/lib.nix // {{ max = a: b: a; }};
          pkgs = {{ inherit lib; config = {{ }}; runCommand = _: environment: _: environment; }};
          python.pkgs.pybuildReleases.cu128 = {{ }};
        in
        (import {NIX}/tests {{ inherit pkgs python; }}).expressions.failures
    """)
    assert "testCoreCap\n  expected []\n  got " in checks
