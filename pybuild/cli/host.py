"""`pybuild host`: what a machine has; and the options with which other commands ask about another machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from pybuild.errors import PybuildError
from pybuild.facts.host import Host, host_of, load_host, read_host
from pybuild.units import GIB, format_gib

F = TypeVar("F", bound=Callable[..., Any])


def host_options(function: F) -> F:
    """--host and --facts, passed on as `host` and `facts`: `host_from_options` takes both."""
    for decorate in reversed(
        [
            click.option("--host", metavar="USER@MACHINE", help="Another machine, asked over ssh; installs nothing."),
            click.option(
                "--facts",
                type=click.Path(path_type=Path),
                help="A machine saved by `pybuild host --json`.",
            ),
        ]
    ):
        function = decorate(function)
    return function


def host_from_options(host: str | None, facts: Path | None, *, programs: bool = True) -> Host:
    """The machine that --host or --facts names, else this one. For `programs` see `read_host`.

    Raises PybuildError where both are given, and for a machine that can't be read.
    """
    if host is not None and facts is not None:
        raise PybuildError("--host and --facts name two machines", "Give one of them.")
    if facts is not None:
        return load_host(facts)
    if host is not None:
        from pybuild.facts.machine import ask_over_ssh

        return host_of(ask_over_ssh(host, os.environ), programs=programs)
    return read_host(programs=programs)


@click.command("host", epilog="Example: pybuild host --json > here.json")
@click.option("--json", "as_json", is_flag=True, help="As JSON, which --facts reads.")
@host_options
def command(as_json: bool, host: str | None, facts: Path | None) -> None:
    """Print what this machine has: cores, memory under every limit, GPUs, CUDA, torch, nix, disk."""
    found = host_from_options(host, facts)
    click.echo(found.model_dump_json(indent=2) if as_json else describe(found))


def describe(host: Host) -> str:
    """A host as people read it, one fact a line."""
    rows = list(_rows(host))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _rows(host: Host) -> Iterator[tuple[str, str]]:
    about = [host.name, host.system, f"Linux {host.kernel}" if host.kernel else "", host.machine]
    yield "machine", ", ".join(filter(None, about)) or "unknown"
    cores, memory = host.cores, host.memory
    yield (
        "cores",
        f"{cores.usable}"
        + _because(
            f"{cores.online} online" if cores.online is not None else "",
            f"{cores.affinity} this process may run on" if cores.affinity is not None else "",
            f"CPU quota of {cores.quota:g}" if cores.quota is not None else "",
        ),
    )
    yield "memory", f"{format_gib(memory.available)} available of {format_gib(memory.total)}"
    yield "", memory.because or "nothing could be read: no /proc/meminfo"
    for limit in memory.limits:
        yield "limit", f"{format_gib(limit.limit)}, {format_gib(limit.left)} left ({limit.path})"
    if memory.grows:
        yield "", "this machine may get more memory as it is used; only what is there now is counted"
    yield "swap", f"{format_gib(memory.swap_total)}, {format_gib(memory.swap_free)} free; never counted"
    if memory.huge_pages:
        yield "huge pages", f"{format_gib(memory.huge_pages)} set aside; never counted"
    if memory.pressure:
        some, full = memory.pressure.some_avg10, memory.pressure.full_avg10
        yield "pressure", f"{some:g} % of the last 10 s some task waited for memory, {full:g} % all of them"
    for name in dict.fromkeys((gpu.name, gpu.capability) for gpu in host.gpus):
        count = sum((gpu.name, gpu.capability) == name for gpu in host.gpus)
        yield "GPU", f"{count} x {name[0]}, capability {name[1] or 'unknown'}"
    if not host.gpus:
        yield "GPU", "none found"
    yield "driver", host.driver or "none found"
    for toolkit in host.toolkits:
        yield "CUDA", f"{toolkit.nvcc}, {toolkit.path}{_because(*toolkit.aliases)}"
    if not host.toolkits:
        yield "CUDA", "no toolkit found"
    if host.nvcc_on_path:
        yield "nvcc", host.nvcc_on_path
    python = host.python
    yield "Python", f"{python.version}, {python.executable}" if python else "none found"
    if python and python.torch:
        yield "torch", f"{python.torch}{_because(f'CUDA {python.torch_cuda}' if python.torch_cuda else 'no CUDA')}"
    else:
        yield "torch", "none in the active environment"
    nix = host.nix
    if nix:
        settings = [f"cores = {nix.cores}" if nix.cores is not None else "", f"max-jobs = {nix.max_jobs}"]
        yield "nix", f"{nix.version}, {'daemon' if nix.daemon else 'no daemon'}{_because(*settings)}"
    else:
        yield "nix", "none found"
    if host.disk:
        yield "disk", f"{host.disk.free / GIB:.0f} GiB free where the store is ({host.disk.path})"


def _because(*parts: str) -> str:
    return f" ({', '.join(filter(None, parts))})" if any(parts) else ""
