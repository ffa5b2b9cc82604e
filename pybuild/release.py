"""A release: a pinned pair of CUDA and torch, as one data file of wheels by name and hash."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from pybuild.errors import PybuildError
from pybuild.flake import flake_root
from pybuild.spec import PYTHONS

PythonTag = Literal["any", "cp310", "cp311", "cp312", "cp313"]
PYTHON_TAGS: dict[str, PythonTag] = {"3.10": "cp310", "3.11": "cp311", "3.12": "cp312", "3.13": "cp313"}
assert tuple(PYTHON_TAGS) == PYTHONS

Group = Literal["build", "libraries", "python", "runtime", "toolkit", "torch"]
M = TypeVar("M", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pin(_Model):
    """One file of an index: its name, its SHA-256 in hexadecimal and its size in bytes."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(gt=0)]

    @property
    def project(self) -> str:
        """The normalised name of the project that the file belongs to, as an index lists it."""
        return str(_parse(self.file)[0])


class Wheel(_Model):
    """One version of a project, and its wheel for each Python: one for `any` of them, or one for each."""

    version: str
    files: dict[PythonTag, Pin]

    @model_validator(mode="after")
    def _complete(self) -> Wheel:
        if set(self.files) not in ({"any"}, set(PYTHON_TAGS.values())):
            raise ValueError(f"wheels for {sorted(self.files)}: need 'any', or each of {', '.join(PYTHONS)}")
        return self

    def pin(self, python: str) -> Pin:
        """The wheel for `python`, such as `3.12`."""
        return self.files.get("any") or self.files[PYTHON_TAGS[python]]


class Source(Pin):
    """The sdist of a package that pybuild builds."""

    version: str

    @model_validator(mode="after")
    def _consistent(self) -> Source:
        if _parse(self.file)[1] != self.version:
            raise ValueError(f"{self.file} is not version {self.version}")
        return self


class Sources(RootModel[dict[str, Source]]):
    """The sdists, by package."""


class Release(_Model):
    """A pinned pair of CUDA and torch.

    `groups` says what each wheel is for; no wheel is in two of them:
    `torch`, torch itself; `libraries`, the CUDA libraries that torch's metadata requires, with their headers;
    `toolkit`, what the compiler needs beyond those; `python`, what `import torch` needs besides;
    `runtime`, what torch's metadata requires and neither importing nor building needs (triton);
    `build`, what builds an extension.
    """

    name: str
    cuda: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    torch: str
    torchVersion: str
    groups: dict[Group, tuple[str, ...]]
    wheels: dict[str, Wheel]

    @model_validator(mode="after")
    def _consistent(self) -> Release:
        grouped = [name for names in self.groups.values() for name in names]
        if sorted(grouped) != sorted(self.wheels):
            raise ValueError("the groups must hold each of the wheels once, and nothing else")
        for name, wheel in self.wheels.items():
            for pin in wheel.files.values():
                project, version = _parse(pin.file)
                if (project, version) != (name, wheel.version):
                    raise ValueError(f"{name} {wheel.version}: {pin.file} is {project} {version}")
        return self

    def pins(self, python: str, groups: Iterable[Group]) -> list[Pin]:
        """The files of these groups for `python`, such as `3.12`, in the order of their projects."""
        names = {name for group in groups for name in self.groups.get(group, ())}
        return [self.wheels[name].pin(python) for name in sorted(names)]


def _parse(file: str) -> tuple[str, str]:
    """Normalised project and version of a wheel or sdist; ValueError where the name is neither."""
    try:
        if file.endswith(".whl"):
            name, version, _, _ = parse_wheel_filename(file)
        else:
            name, version = parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise ValueError(str(error)) from error
    return canonicalize_name(name), str(version)


def dump(release: Release) -> str:
    """The data file's text: sorted, so that two runs of `pybuild pin` differ only where the pins do."""
    return json.dumps(release.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def load_release(name: str, folder: Path | None = None) -> Release:
    """The release `name`. Raises PybuildError where `folder` has none of that name, or it is not valid."""
    return _load(Release, (folder or flake_root() / "nix/releases") / f"{name}.json")


def load_source(package: str, folder: Path | None = None) -> Source:
    """The sdist of `package`. Raises PybuildError where pybuild has none."""
    sources = _load(Sources, (folder or flake_root() / "nix/releases") / "sources.json").root
    if package not in sources:
        raise PybuildError(f"no package {package!r}", f"There is {', '.join(sorted(sources))}.")
    return sources[package]


def _load(model: type[M], path: Path) -> M:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PybuildError(f"{path}: {error.strerror}", "Install pybuild again.") from error
    except ValidationError as error:
        faults = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        what = "\n".join([f"{path} is not valid:", *faults])
        raise PybuildError(what, "`pybuild pin` makes a release's file.") from error
