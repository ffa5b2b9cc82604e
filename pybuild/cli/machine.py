"""Options of the commands that ask what fits a machine: this one, another, or one that is only imagined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pybuild.cli.host import host_from_options, host_options
from pybuild.errors import PybuildError
from pybuild.recommend import reserve_of
from pybuild.units import format_gib, parse_size

F = TypeVar("F", bound=Callable[..., Any])


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except PybuildError as error:
        raise PybuildError(f"{option.opts[0]}: {error.what}", error.remedy) from error


def machine_options(function: F) -> F:
    """--cores, --memory, --reserve, --host and --facts, which `machine_from` takes; --nvcc-threads and --json."""
    for decorate in reversed(
        [
            click.option("--cores", type=click.IntRange(min=1), help="Of a machine you don't sit at."),
            click.option("--memory", metavar="SIZE", callback=_size, help="Available there, e.g. 288GiB."),
            click.option(
                "--reserve",
                metavar="SIZE",
                callback=_size,
                help="Memory left to others.  [default: 10 %, at least 2GiB]",
            ),
            host_options,
            click.option(
                "--nvcc-threads",
                type=click.IntRange(min=1),
                help="Architectures that one nvcc compiles at once.  [default: all]",
            ),
            click.option("--json", "as_json", is_flag=True, help="For programs; bytes and seconds."),
        ]
    ):
        function = decorate(function)
    return function


@dataclass(frozen=True)
class Asked:
    """The machine that a command is asked about: cores, bytes available and what says so, and bytes in reserve."""

    cores: int
    available: int
    because: str
    reserve: int

    @property
    def budget(self) -> int:
        """Bytes for the build: 0 where the reserve is all there is."""
        return max(0, self.available - self.reserve)

    def __str__(self) -> str:
        because = f" ({self.because})" if self.because else ""
        return (
            f"{self.cores} core{'s'[: self.cores != 1]}; {format_gib(self.available)} of memory available{because}, "
            f"{format_gib(self.reserve)} in reserve, {format_gib(self.budget)} for the build"
        )


def machine_from(options: dict[str, Any]) -> Asked:
    """The machine of `machine_options`, whose options are taken out of `options`. Nothing is read that was given.

    Raises PybuildError for a machine that can't be read.
    """
    cores: int | None = options.pop("cores")
    available: int | None = options.pop("memory")
    reserve: int | None = options.pop("reserve")
    host: str | None = options.pop("host")
    facts: Path | None = options.pop("facts")
    because = "--memory"
    if cores is None or available is None or host or facts:
        read = host_from_options(host, facts, programs=False)
        cores = read.cores.usable if cores is None else cores
        if available is None:
            available, because = read.memory.available, read.memory.because
    return Asked(cores, available, because, reserve_of(available) if reserve is None else reserve)
