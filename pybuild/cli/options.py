"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pybuild.spec import DTYPES, PYTHONS, RELEASES

F = TypeVar("F", bound=Callable[..., Any])


def build_options(function: F) -> F:
    """PACKAGE and the options that select a build, passed on as BuildSpec's fields (None or () where unset)."""
    for decorate in reversed(
        [
            click.argument("package", required=False),
            click.option("--release", type=click.Choice(RELEASES), help="CUDA and torch, a pinned pair."),
            click.option("--capability", "capabilities", multiple=True, help="GPU's, e.g. 10.0. Repeatable."),
            click.option("--python", type=click.Choice(PYTHONS), help="Python that the wheel is for."),
            click.option("--head-dim", "head_dims", type=int, multiple=True, help="Only these. Repeatable."),
            click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Only these."),
            click.option("--forward-only", is_flag=True, default=None, help="No backward kernels."),
        ]
    ):
        function = decorate(function)
    return function
