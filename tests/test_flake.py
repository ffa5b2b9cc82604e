"""The flake: its lock, its outputs over hostpkgs, and over a real nixpkgs tree where PYBUILD_NIXPKGS names one.

What builds takes the real toolkit and is `nix flake check`'s (nix/tests); here all is evaluated only, except where a
test is marked slow.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pybuild.errors import PybuildError
from pybuild.flake import stage_flake, stage_hostpkgs
from pybuild.hostpkgs import Choice, Facts, Program, Python
from pybuild.nix import SANDBOX, Nix, find_nix, host_options
from pybuild.release import load_release

ROOT = Path(__file__).parent.parent


def test_the_lock_pins_nixpkgs() -> None:
    lock = json.loads((ROOT / "flake.lock").read_text())
    nixpkgs = lock["nodes"]["nixpkgs"]
    assert lock["version"] == 7
    assert nixpkgs["locked"] == {
        "lastModified": 1783703440,
        "narHash": "sha256-O3/YajjWo001VUIgD8BwaRdSNLUFe7nZ1qV5TwhRBcw=",
        "owner": "NixOS",
        "repo": "nixpkgs",
        "rev": "8f0500b9660505dc3cb647775fe9a978a74b5283",
        "type": "github",
    }
    original = nixpkgs["original"]
    url = f"{original['type']}:{original['owner']}/{original['repo']}/{original['ref']}"
    assert f'inputs.nixpkgs.url = "{url}";' in (ROOT / "flake.nix").read_text()


# hostpkgs


@dataclass(frozen=True)
class Flake:
    """The flake over hostpkgs, as pybuild lays it out."""

    nix: Nix
    folder: Path
    hostpkgs: Path

    def run(self, *arguments: str, end: tuple[str, ...] = (), expect: int = 0) -> subprocess.CompletedProcess[str]:
        """`nix ARGUMENTS` with hostpkgs as the package set and no network; `@` in an argument is the flake."""
        words = [word.replace("@", f"path:{self.folder}") for word in arguments]
        override = ["--no-write-lock-file", "--override-input", "nixpkgs", f"path:{self.hostpkgs}", "--offline"]
        argv = [*self.nix.command(*words), *override, *end]
        done = subprocess.run(argv, capture_output=True, text=True, env=dict(self.nix.environ), check=False)
        assert done.returncode == expect, done.stderr
        return done

    def eval(self, attribute: str, apply: str) -> Any:
        return json.loads(self.run("eval", "--json", f"@#{attribute}", "--apply", apply).stdout)


def facts(release: str, selection: dict[str, object] | None = None) -> Facts:
    """A machine on paper: nothing is built on it."""
    gcc = Program(path=Path("/usr/bin/gcc"), version="12.2.0")
    return Facts(
        bash=Path("/bin/bash"),
        path=(Path("/usr/bin"), Path("/bin")),
        cc=gcc,
        cxx=gcc,
        glibc="glibc 2.36",
        python=Python(path=Path("/usr/bin/python3.12"), version="3.12.4", prefix=Path("/usr")),
        cuda_home=None,
        sandbox_paths=(Path("/usr"),),
        selection=Choice(release=release, cuda_capabilities=("9.0", "10.0"), selection=selection or {}),
    )


@pytest.fixture(scope="module")
def nix() -> Nix:
    try:
        return find_nix(None, os.environ)
    except PybuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for what is staged, instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def cu130(nix: Nix, cache: None) -> Flake:
    selection: dict[str, object] = {"headDims": [64], "dtypes": ["fp16"]}
    return Flake(nix, stage_flake(), stage_hostpkgs(facts("cu130", selection)))


def test_flake_show_over_hostpkgs_is_whole_and_quick(cu130: Flake) -> None:
    before = os.times()
    shown = cu130.run("flake", "show", "@", "--json")
    after = os.times()
    # Of processor time: the machine may be busy with something else.
    assert after.children_user - before.children_user + after.children_system - before.children_system < 3
    assert "error" not in shown.stderr
    outputs = json.loads(shown.stdout)
    assert set(outputs["packages"]["x86_64-linux"]) == {
        *("default", "flash-attn", "flash-attn-sm90", "flash-attn-sm120", "flash-attn-all", "causal-conv1d", "torch"),
        "cuda-toolkit",
    }
    assert set(outputs["checks"]["x86_64-linux"]) == {"expressions", "compile", "early-failures"}
    assert set(outputs["devShells"]["x86_64-linux"]) == {"default"}
    assert set(outputs["overlays"]) == set(outputs["templates"]) == {"default"}


def test_flake_check_over_hostpkgs_evaluates(cu130: Flake) -> None:
    cu130.run("flake", "check", "@", "--no-build")


def test_what_was_asked_for_reaches_the_build(cu130: Flake) -> None:
    built = cu130.eval("flash-attn", "p: { inherit (p) name FLASH_ATTN_CUDA_ARCHS FLASH_ATTN_LOCAL_VERSION; }")
    assert built == {
        "name": "flash-attn-2.8.3+cu130.torch2.11.sm90.sm100.hdim64.fp16",
        "FLASH_ATTN_CUDA_ARCHS": "90;100",
        "FLASH_ATTN_LOCAL_VERSION": "cu130.torch2.11.sm90.sm100.hdim64.fp16",
    }


def test_parallelism_says_how_many_compiles_fit_and_why(cu130: Flake) -> None:
    needs = json.loads(cu130.run("eval", "--json", "@#flash-attn.passthru.parallelism").stdout)
    assert needs["profile"].startswith("flash-attn 2.8.3: nvcc")
    assert needs["cap"]["32GiB"] == (32 * 1024**3 - 32 * 1024**3 // 10) // needs["peakBytes"]
    assert "sm_90, sm_100" in needs["reason"]


def test_a_capability_that_flash_attn_has_no_code_for_is_refused(cu130: Flake) -> None:
    failed = cu130.run(
        "eval", "@#flash-attn", "--apply", 'p: (p.override { cudaCapabilities = [ "8.9" ]; }).drvPath', expect=1
    )
    assert "no code for the architectures 89" in failed.stderr
    assert "8.0 (which runs on 8.6 and 8.9 as well)" in failed.stderr


def test_cu128_without_a_toolkit_names_three_ways_out(nix: Nix, cache: None) -> None:
    flake = Flake(nix, stage_flake(), stage_hostpkgs(facts("cu128")))
    failed = flake.run("eval", "@#flash-attn.drvPath", expect=1)
    assert "needs a CUDA 12.8 toolkit" in failed.stderr
    for way in ("nixpkgs", "--cuda-home", "--release cu130"):
        assert way in failed.stderr


@pytest.mark.slow
def test_flake_check_and_develop_over_this_machine(nix: Nix, cache: None) -> None:
    """`nix flake check` compiles with the real nvcc; `nix develop` has it first on PATH, and torch and flash-attn.

    Needs the pins of cu130 in the store and a selected build of flash-attn, so it runs after test_end_to_end.py.
    """
    from pybuild.plan import make_plan
    from pybuild.spec import BuildSpec

    spec = BuildSpec(release="cu130", head_dims=(64,), dtypes=("fp16",), forward_only=True)
    plan = make_plan(spec, os.environ, cores=1)
    if plan.missing():
        pytest.skip("the pins of cu130 are not in the store: run `pybuild fetch --release cu130`")
    flake = Flake(nix, plan.flake, plan.overrides["nixpkgs"])
    sandbox = [*SANDBOX, *host_options(plan.sandbox_paths)]
    flake.run("flake", "check", "@", *sandbox)
    script = """
        set -e
        test "$(type -P nvcc)" = "$CUDA_HOME/bin/nvcc"
        nvcc --version | grep -q 'release 13.0'
        type -P ninja
        test "$TORCH_CUDA_ARCH_LIST" = 10.0
        python -c 'import torch, flash_attn; print(torch.__version__, flash_attn.__version__)'
    """
    shown = flake.run("develop", "@", *sandbox, end=("--command", "bash", "-c", script)).stdout
    assert shown.splitlines()[-1].startswith("2.11.0+cu130 2.8.3")


# nixpkgs


@pytest.fixture(scope="module")
def tree() -> Path:
    """The nixpkgs tree that PYBUILD_NIXPKGS names, with a nix on PATH that it takes."""
    named = os.environ.get("PYBUILD_NIXPKGS")
    if not named:
        pytest.skip("PYBUILD_NIXPKGS names no nixpkgs tree: the flake was not evaluated against nixpkgs")
    if shutil.which("nix-instantiate") is None:
        pytest.skip("no nix on PATH")
    expression = f'(import "{named}" {{ system = "x86_64-linux"; config = {{ }}; overlays = [ ]; }}).lib.version'
    argv = ["nix-instantiate", "--eval", "--expr", expression]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "requires an implementation of Nix" in done.stderr:
        pytest.skip(f"the nix on PATH is too old for {named}")
    assert done.returncode == 0, done.stderr
    return Path(named)


def over_nixpkgs(tree: Path, expression: str, expect: int = 0) -> Any:
    """The value of an expression in which `flake` holds the flake's outputs over the tree, `pkgs` its package set."""
    full = f"""
        let
          nixpkgs.outPath = "{tree}";
          flake = (import {ROOT}/flake.nix).outputs {{ self = flake; inherit nixpkgs; }};
          packages = flake.packages.x86_64-linux;
          import' = config: import "{tree}" {{
            system = "x86_64-linux";
            config = {{ allowUnfree = true; cudaSupport = true; }} // config;
            overlays = [ flake.overlays.default ];
          }};
        in
        {expression}
    """
    argv = ["nix-instantiate", "--eval", "--strict", "--json", "--expr", full]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout) if expect == 0 else done.stderr


@pytest.fixture(scope="module")
def over(tree: Path) -> Any:
    """One evaluation for what the tests below look at."""
    return over_nixpkgs(
        tree,
        """{
          paths = builtins.mapAttrs (_: package: package.drvPath) packages;
          shell = flake.devShells.x86_64-linux.default.drvPath;
          app = flake.apps.x86_64-linux.pybuild.program;
          checks = builtins.mapAttrs (_: check: check.drvPath) (
            builtins.removeAttrs flake.checks.x86_64-linux [ "formatting" ]
          );
          environment = flake.devShells.x86_64-linux.default.passthru.environment.drvPath;
          shellVariables = {
            inherit (flake.devShells.x86_64-linux.default) CUDA_HOME TORCH_CUDA_ARCH_LIST;
          };
          flashAttn = {
            inherit (packages.flash-attn) name FLASH_ATTN_CUDA_ARCHS NIX_DONT_SET_RPATH CUDA_HOME;
            gcc = packages.flash-attn.stdenv.cc.version;
          };
          toolkit = packages.cuda-toolkit.version;
          toolkitPath = packages.cuda-toolkit.outPath;
          torch = map (file: { inherit (file) name outputHash; }) packages.torch.wheels;
          libraries = map (file: { inherit (file) name outputHash; })
            flake.legacyPackages.x86_64-linux.python3Packages.pybuildReleases.cu128.cuda-wheels.wheels;
          runtime = map (package: package.name) packages.torch.propagatedBuildInputs;
        }""",
    )


def hashes_of(files: list[dict[str, str]]) -> dict[str, str]:
    """File name -> SHA-256 in hexadecimal, from what nixpkgs' fetchPypi makes of a pin."""
    return {file["name"]: file["outputHash"] for file in files}


def test_every_output_evaluates_against_nixpkgs(over: Any) -> None:
    assert set(over["paths"]) >= {
        *("default", "flash-attn", "flash-attn-sm90", "flash-attn-sm120", "flash-attn-all"),
        *("torch", "cuda-toolkit", "pybuild"),
    }
    everything = [*over["paths"].values(), over["shell"], over["environment"], *over["checks"].values()]
    assert all(re.fullmatch(r"/nix/store/[a-z0-9]{32}-\S+\.drv", path) for path in everything)
    assert over["app"].endswith("/bin/pybuild")


def test_the_default_is_cuda_12_8_for_10_0(over: Any) -> None:
    assert over["flashAttn"]["name"] == "flash-attn-2.8.3+cu128.torch2.10.sm100"
    assert over["flashAttn"]["FLASH_ATTN_CUDA_ARCHS"] == "100"
    assert over["toolkit"] == "12.8.93"
    assert over["flashAttn"]["CUDA_HOME"] == over["toolkitPath"] == over["shellVariables"]["CUDA_HOME"]
    assert over["shellVariables"]["TORCH_CUDA_ARCH_LIST"] == "10.0"


def test_the_host_compiler_is_one_that_nvcc_12_8_takes(over: Any) -> None:
    from pybuild.hostpkgs import GCC_RANGE

    lowest, highest = GCC_RANGE["12.8"]
    assert lowest <= int(over["flashAttn"]["gcc"].partition(".")[0]) <= highest


def test_the_wheel_for_others_gets_no_run_path(over: Any) -> None:
    assert over["flashAttn"]["NIX_DONT_SET_RPATH"] == "1"


def test_torch_and_its_libraries_are_the_pinned_wheels(over: Any) -> None:
    release = load_release("cu128")
    python = "3.13" if "cp313" in over["torch"][0]["name"] else "3.12"
    assert hashes_of(over["torch"]) == {pin.file: pin.sha256 for pin in release.pins(python, ["torch"])}
    assert hashes_of(over["libraries"]) == {pin.file: pin.sha256 for pin in release.pins(python, ["libraries"])}
    assert f"triton-{release.wheels['triton'].version}" in over["runtime"]


def test_capabilities_follow_the_users_configuration(tree: Path) -> None:
    architectures = over_nixpkgs(
        tree,
        """
        let archs = pkgs: pkgs.python3Packages.flash-attn.FLASH_ATTN_CUDA_ARCHS; in {
          configured = archs (import' { cudaCapabilities = [ "9.0" "12.0" ]; });
          unset = archs (import' { });
          overridden = (packages.flash-attn.override { cudaCapabilities = [ "8.0" ]; }).FLASH_ATTN_CUDA_ARCHS;
          ninety = packages.flash-attn-sm90.FLASH_ATTN_CUDA_ARCHS;
          all = packages.flash-attn-all.FLASH_ATTN_CUDA_ARCHS;
        }
        """,
    )
    assert architectures == {
        "configured": "90;120",
        "unset": "100",
        "overridden": "80",
        "ninety": "90",
        "all": "80;90;100;120",
    }


def test_other_pythons_selections_and_releases(tree: Path) -> None:
    found = over_nixpkgs(
        tree,
        """
        let
          pkgs = import' { cudaCapabilities = [ "10.0" ]; };
          cu130 = (import' { cudaCapabilities = [ "10.0" ]; pybuildRelease = "cu130"; }).python3Packages.flash-attn;
        in {
          selected = (pkgs.python3Packages.flash-attn.override { headDims = [ 128 ]; dtypes = [ "bf16" ]; }).name;
          cu130 = cu130.name;
          nvcc = cu130.cuda-toolkit.version;
          torch = (builtins.head pkgs.python312Packages.torch.wheels).name;
          cli = (builtins.head flake.legacyPackages.x86_64-linux.python312Packages.torch.wheels).name;
        }
        """,
    )
    assert found["selected"] == "flash-attn-2.8.3+cu128.torch2.10.sm100.hdim128.bf16"
    assert found["cu130"] == "flash-attn-2.8.3+cu130.torch2.11.sm100"
    assert found["nvcc"].startswith("13.0.")
    assert "-cp312-" in found["torch"]
    assert found["cli"] == found["torch"]


def test_an_environment_with_torch_and_flash_attn(tree: Path) -> None:
    """`python3.withPackages` finds both, and all that they need, as Python packages of this Python."""
    found = over_nixpkgs(
        tree,
        """
        let
          pkgs = import' { cudaCapabilities = [ "10.0" ]; };
          chosen = packages: [ packages.torch packages.flash-attn ];
        in {
          drv = (pkgs.python3.withPackages chosen).drvPath;
          modules = map (package: package.pname or package.name)
            (pkgs.python3Packages.requiredPythonModules (chosen pkgs.python3Packages));
        }
        """,
    )
    assert {"torch", "flash-attn", "einops", "sympy", "triton"} <= set(found["modules"])
    assert found["modules"].count("torch") == 1


def test_the_template_evaluates(tree: Path) -> None:
    found = over_nixpkgs(
        tree,
        f"""
        let made = (import {ROOT}/nix/template/flake.nix).outputs {{
          inherit nixpkgs;
          pybuild = flake;
        }}; in {{
          package = made.packages.x86_64-linux.default.drvPath;
          shell = made.devShells.x86_64-linux.default.drvPath;
        }}
        """,
    )
    assert all(path.endswith(".drv") for path in found.values())


def test_the_formatting_is_checked(tree: Path) -> None:
    lacks = "pkgs/development/haskell-modules/hackage-packages.nix"
    if not (tree / lacks).exists():
        pytest.skip(f"{tree} is cut: it lacks {lacks}, which nixfmt is made from")
    drv = over_nixpkgs(tree, "flake.checks.x86_64-linux.formatting.drvPath")
    assert drv.endswith("-pybuild-formatting.drv")


def test_an_unknown_capability_is_refused_over_nixpkgs_too(tree: Path) -> None:
    message = over_nixpkgs(
        tree, '(import\' { cudaCapabilities = [ "8.6" ]; }).python3Packages.flash-attn.drvPath', expect=1
    )
    assert "no code for the architectures 86" in message
