"""A project's settings: `pybuild.toml`, or `[tool.pybuild]` in pyproject.toml, in the current directory.

The keys are the fields of BuildSpec with dashes: what the options of the command line set, set for a project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli
from pydantic import ValidationError

from pybuild.errors import PybuildError
from pybuild.spec import HEAD_DIMS, BuildSpec


@dataclass(frozen=True)
class Setting:
    """A value in force, and where it comes from: `default`, `command line`, or a file's name."""

    key: str
    value: Any
    origin: str


def spec_of(given: Mapping[str, Any], folder: Path) -> tuple[BuildSpec, list[Setting]]:
    """The spec of a command: what was given on its command line, else the project's file, else the default.

    `given` has BuildSpec's fields, those without a value left out. Raises PybuildError that names file, key and the
    valid values.
    """
    path, values = read_project(folder)
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {}
    package = given.get("package", values.get("package", BuildSpec().package))
    for key, value in values.items():
        name = _field(key, path)
        merged[name] = _checked(name, key, value, path, package)
        origins[name] = path.name
    for name, value in given.items():
        merged[name] = value
        origins[name] = "command line"
    spec = BuildSpec(**merged)
    settings = [
        Setting(_key(name), getattr(spec, name), origins.get(name, "default")) for name in BuildSpec.model_fields
    ]
    return spec, settings


def read_project(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that sets a project's values, and the values. Both files at once are an error: which one counts?"""
    own, shared = folder / "pybuild.toml", folder / "pyproject.toml"
    tables = {path: table for path, table in _tables(own, shared) if table is not None}
    if len(tables) == 2:
        raise PybuildError(
            f"{own} and [tool.pybuild] in {shared} both set values",
            "Keep one of them, so that it is plain which counts.",
        )
    return next(iter(tables.items()), (own, {}))


def _tables(own: Path, shared: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    yield own, _load(own)
    tool = (_load(shared) or {}).get("tool")
    table = tool.get("pybuild") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise PybuildError(f"{shared}: tool.pybuild is not a table", "Write [tool.pybuild] and a line for each key.")
    yield shared, table


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return tomli.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PybuildError(f"{path} is not TOML: {error}", "Mend that line.") from error
    except OSError as error:
        raise PybuildError(f"{path} can't be read: {error.strerror}", "Mend its permissions.") from error


def _key(name: str) -> str:
    return name.replace("_", "-")


def _field(key: str, path: Path) -> str:
    """The field that a key of the file sets."""
    by_key = {_key(name): name for name in BuildSpec.model_fields}
    if key not in by_key:
        raise PybuildError(f"{path}: unknown key {key!r}", f"The keys are: {', '.join(by_key)}.")
    return by_key[key]


def _checked(name: str, key: str, value: Any, path: Path, package: Any) -> Any:
    """The value, where it is one that the field takes for this package."""
    value = tuple(value) if isinstance(value, list) else value
    if value == ():
        raise PybuildError(f"{path}: {key} = []: nothing is selected", f"{_valid(name)} Leave the key out for all.")
    try:
        BuildSpec(**{"package": package if isinstance(package, str) else BuildSpec().package, name: value})
    except ValidationError as error:
        problem = error.errors()[0]
        raise PybuildError(f"{path}: {key} = {value!r}: {problem['msg']}", _valid(name)) from error
    except PybuildError as error:
        raise PybuildError(f"{path}: {key}: {error.what}", error.remedy) from error
    return value


def _valid(name: str) -> str:
    """What the field takes, in words."""
    kind = BuildSpec.model_fields[name].annotation
    choices = get_args(kind)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"It is one of: {', '.join(choices)}."
    examples = {
        "capabilities": 'a list such as ["9.0", "10.0"]',
        "python": 'a version such as "3.12"',
        "head_dims": f"a list of {', '.join(map(str, HEAD_DIMS))}",
        "dtypes": 'a list of "fp16" and "bf16"',
        "forward_only": "true or false",
        "package": 'a name such as "flash-attn"',
    }
    return f"It is {examples[name]}."
