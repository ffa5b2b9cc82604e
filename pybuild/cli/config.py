"""`pybuild config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pybuild.cli.options import build_options, given_options
from pybuild.config import spec_of


@click.command(epilog="Example: pybuild config --json")
@build_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(as_json: bool, **options: Any) -> None:
    """Print the settings in force, and where each comes from.

    They are set by options, by pybuild.toml, or by [tool.pybuild] in pyproject.toml of the current directory.
    """
    _, settings = spec_of(given_options(options), Path.cwd())
    if as_json:
        click.echo(json.dumps({s.key: {"value": s.value, "origin": s.origin} for s in settings}, indent=2))
        return
    for setting in settings:
        click.echo(f"{setting.key:14} {_shown(setting.value):24} {setting.origin}")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "all"
    return {None: "-", True: "true", False: "false"}.get(value, str(value))
