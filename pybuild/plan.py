"""From what was asked for and what this machine has to nix's command lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pybuild.builders import Builder
from pybuild.errors import PybuildError
from pybuild.fetch import store_path
from pybuild.flake import stage_flake, stage_hostpkgs, stage_nixpkgs
from pybuild.hostpkgs import Facts, choice_of, read_facts
from pybuild.nix import Nix, find_nix
from pybuild.release import Group, Pin, load_release, load_source
from pybuild.spec import PACKAGES, BuildSpec


@dataclass(frozen=True)
class Kernel:
    """One source of a package: its derivation, and the store path of its object."""

    name: str
    derivation: str
    output: str


@dataclass(frozen=True)
class Plan:
    """One build: the nix that does it, the pinned files it needs in the store, and how nix is called for it.

    `cores` is how many kernels are compiled at once at most; `facts` are those of hostpkgs, None with nixpkgs.
    """

    spec: BuildSpec
    nix: Nix
    pins: tuple[Pin, ...]
    cores: int
    flake: Path
    overrides: Mapping[str, Path]
    sandbox_paths: tuple[str, ...]
    facts: Facts | None

    @property
    def argv(self) -> list[str]:
        """The command line that builds the package as one derivation, inside which the gate holds memory.

        What `pybuild command` prints: it needs nothing of pybuild.
        """
        return self._build(self.spec.package, cores=self.cores, max_jobs=1)

    @property
    def link_argv(self) -> list[str]:
        """The command line that makes the wheel of objects from the store, by upstream's setup.py."""
        return self._build(f"{self.spec.package}.fromObjects", cores=len(self.spec.architectures), max_jobs=1)

    @property
    def inputs_argv(self) -> list[str]:
        """The command line that builds what every kernel needs: the toolkit, torch, the sources."""
        return self._build(f"{self.spec.package}.inputs", cores=1, max_jobs=self.cores)

    def _build(self, attr: str, *, cores: int, max_jobs: int) -> list[str]:
        return self.nix.build_argv(
            f"path:{self.flake}",
            attr,
            cores=cores,
            max_jobs=max_jobs,
            overrides=self.overrides,
            sandbox_paths=self.sandbox_paths,
            extra=["--print-build-logs"],
        )

    def missing(self) -> list[Pin]:
        """The pins that the store does not have yet."""
        valid = self.nix.is_valid(store_path(pin) for pin in self.pins)
        return [pin for pin in self.pins if not valid[store_path(pin)]]

    @cached_property
    def _evaluated(self) -> dict[str, dict[str, dict[str, str]]]:
        paths = "d: { derivation = d.drvPath; output = d.outPath; }"
        argv = self.nix.flake_argv(
            "eval",
            f"path:{self.flake}#{self.spec.package}",
            overrides=self.overrides,
            sandbox_paths=self.sandbox_paths,
            extra=[
                "--json",
                "--apply",
                f"p: builtins.mapAttrs (_: builtins.mapAttrs (_: {paths})) "
                "{ inherit (p) objects; whole = { inherit (p) fromObjects; }; }",
            ],
        )
        found: dict[str, dict[str, dict[str, str]]] = json.loads(
            self.nix.run(argv, doing=f"evaluating {self.spec.package}")
        )
        return found

    def kernels(self) -> list[Kernel]:
        """The kernels of the build, as nix evaluates them. Raises BuildError where it can't."""
        return [Kernel(name, **paths) for name, paths in sorted(self._evaluated["objects"].items())]

    def wheel(self) -> str:
        """The store path of the wheel that is made of the kernels. Raises BuildError as `kernels` does."""
        return self._evaluated["whole"]["fromObjects"]["output"]

    def realise_argv(self, derivation: str, builder: Builder | None = None) -> list[str]:
        """The command line that builds one derivation, with as many cores as there are architectures."""
        cores = len(self.spec.architectures)
        line = builder.line if builder else None
        return self.nix.realise_argv(derivation, cores=cores, sandbox_paths=self.sandbox_paths, builder=line)


def make_plan(
    spec: BuildSpec,
    environ: Mapping[str, str],
    *,
    cores: int,
    package_set: str = "hostpkgs",
    nix: str | None = None,
    cuda_home: Path | None = None,
) -> Plan:
    """The plan for `spec` on this machine, with `cores` for the build. Raises PybuildError for what is missing.

    `package_set` is `hostpkgs` or `nixpkgs` (docs/hostpkgs.md). nix fetches all that nixpkgs needs by itself.
    """
    if spec.package not in PACKAGES:
        raise PybuildError(f"no package {spec.package!r}", f"pybuild builds: {', '.join(PACKAGES)}.")
    if package_set == "nixpkgs":
        if cuda_home is not None:
            raise PybuildError("--cuda-home is for hostpkgs", "nixpkgs brings its own CUDA: leave one of them out.")
        return Plan(
            spec=spec,
            nix=find_nix(nix, environ, host_paths=False),
            pins=(),
            cores=cores,
            flake=stage_flake(),
            overrides={"nixpkgs": stage_nixpkgs(choice_of(spec))},
            sandbox_paths=(),
            facts=None,
        )
    facts = read_facts(spec, environ, cuda_home=cuda_home)
    return Plan(
        spec=spec,
        nix=find_nix(nix, environ),
        pins=pins_of(spec, facts),
        cores=cores,
        flake=stage_flake(),
        overrides={"nixpkgs": stage_hostpkgs(facts)},
        sandbox_paths=tuple(str(path) for path in facts.sandbox_paths),
        facts=facts,
    )


def pins_of(spec: BuildSpec, facts: Facts) -> tuple[Pin, ...]:
    """The files that a build with hostpkgs takes from the store."""
    groups: list[Group] = ["torch", "libraries", "python", "build"]
    if facts.cuda_home is None:
        groups.append("toolkit")
    python = facts.python.version.rpartition(".")[0]
    return (*load_release(spec.release).pins(python, groups), load_source(spec.package))
