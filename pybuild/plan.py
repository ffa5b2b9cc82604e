"""From what was asked for and what this machine has to one nix command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pybuild.errors import PybuildError
from pybuild.fetch import store_path
from pybuild.flake import stage_flake, stage_hostpkgs
from pybuild.hostpkgs import Facts, read_facts
from pybuild.nix import Nix, find_nix
from pybuild.release import Group, Pin, load_release, load_source
from pybuild.spec import BuildSpec

PACKAGES = ("flash-attn",)


@dataclass(frozen=True)
class Plan:
    """One build: the nix that does it, the pinned files it needs in the store, and its command line.

    `argv` is what `pybuild command` prints and `pybuild build` runs.
    """

    spec: BuildSpec
    nix: Nix
    pins: tuple[Pin, ...]
    argv: tuple[str, ...]

    def missing(self) -> list[Pin]:
        """The pins that the store does not have yet."""
        valid = self.nix.is_valid(store_path(pin) for pin in self.pins)
        return [pin for pin in self.pins if not valid[store_path(pin)]]


def make_plan(
    spec: BuildSpec,
    environ: Mapping[str, str],
    *,
    cores: int,
    nix: str | None = None,
    cuda_home: Path | None = None,
) -> Plan:
    """The plan for `spec` on this machine, with `cores` for the build. Raises PybuildError for what is missing."""
    if spec.package not in PACKAGES:
        raise PybuildError(f"no package {spec.package!r}", f"pybuild builds: {', '.join(PACKAGES)}.")
    facts = read_facts(spec, environ, cuda_home=cuda_home)
    found = find_nix(nix, environ)
    argv = found.build_argv(
        f"path:{stage_flake()}",
        spec.package,
        cores=cores,
        max_jobs=1,
        overrides={"nixpkgs": stage_hostpkgs(facts)},
        sandbox_paths=[str(path) for path in facts.sandbox_paths],
        extra=["--print-build-logs"],
    )
    return Plan(spec, found, pins_of(spec, facts), tuple(argv))


def pins_of(spec: BuildSpec, facts: Facts) -> tuple[Pin, ...]:
    """The files that a build with hostpkgs takes from the store."""
    groups: list[Group] = ["torch", "libraries", "python", "build"]
    if facts.cuda_home is None:
        groups.append("toolkit")
    python = facts.python.version.rpartition(".")[0]
    return (*load_release(spec.release).pins(python, groups), load_source(spec.package))
