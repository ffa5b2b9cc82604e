"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from pybuild.spec import DTYPES, HEAD_DIMS, PYTHONS, RELEASES, BuildSpec

if TYPE_CHECKING:
    from pybuild.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_from(values: Callable[[], Iterable[object]]) -> Completer:
    """Completes to these values, for an option or argument whose errors are our own and not click's."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(str(value)) for value in values() if str(value).startswith(incomplete)]

    return complete


def _packages() -> Iterable[str]:
    from pybuild.spec import PACKAGES

    return PACKAGES


def _capabilities() -> Iterable[str]:
    from pybuild.capability import FLASH_ATTN

    return map(str, FLASH_ATTN)


def build_options(function: F) -> F:
    """PACKAGE and the options that select a build, passed on as BuildSpec's fields (None or () where unset)."""
    for decorate in reversed(
        [
            click.argument("package", required=False, shell_complete=complete_from(_packages)),
            click.option("--release", type=click.Choice(RELEASES), help="CUDA and torch, a pinned pair."),
            click.option(
                "--capability",
                "capabilities",
                multiple=True,
                help="GPU's, e.g. 10.0. Repeatable.",
                shell_complete=complete_from(_capabilities),
            ),
            click.option("--python", type=click.Choice(PYTHONS), help="Python that the wheel is for."),
            click.option(
                "--head-dim",
                "head_dims",
                type=int,
                multiple=True,
                help="Only these. Repeatable.",
                shell_complete=complete_from(lambda: HEAD_DIMS),
            ),
            click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Only these."),
            click.option("--forward-only", is_flag=True, default=None, help="No backward kernels."),
        ]
    ):
        function = decorate(function)
    return function


def plan_options(function: F) -> F:
    """Options of the commands that build on this machine: `planned` reads them."""
    for decorate in reversed(
        [
            click.option("--cores", type=click.IntRange(min=1), help="Instead of the recommended number."),
            click.option(
                "--package-set",
                type=click.Choice(["hostpkgs", "nixpkgs"]),
                default="hostpkgs",
                show_default=True,
                help="This machine's compiler and Python, or nixpkgs'.",
            ),
            click.option("--cuda-home", type=click.Path(path_type=Path), help="A toolkit of the release's CUDA."),
            click.option("--nix", help="The nix or nix-portable to use, instead of the one on PATH."),
        ]
    ):
        function = decorate(function)
    return function


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `build_options` out of `options`; those that were given a value, as BuildSpec's fields."""
    given = {name: options.pop(name) for name in BuildSpec.model_fields if name in options}
    return {name: value for name, value in given.items() if value not in (None, ())}


def spec_from(options: dict[str, Any]) -> BuildSpec:
    """The spec for the options of `build_options`, which are taken out of `options`, and the project's settings."""
    from pybuild.config import spec_of

    return spec_of(given_options(options), Path.cwd())[0]


def planned(options: dict[str, Any]) -> Plan:
    """The plan for the options of `build_options` and `plan_options`."""
    from pybuild.plan import make_plan

    spec = spec_from(options)
    cores = options["cores"]
    if cores is None:
        from pybuild.gated import cores_here

        cores = cores_here(spec)
    return make_plan(
        spec,
        os.environ,
        cores=cores,
        package_set=options["package_set"],
        nix=options["nix"],
        cuda_home=options["cuda_home"],
    )
