"""What is to be built: package, release, capabilities, Python, and a selection of kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from pybuild.errors import PybuildError

RELEASES = ("cu128", "cu130")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
DTYPES = ("fp16", "bf16")

# What each package's setup.py has code for. flash-attn 2.8.3's drops any other silently; causal-conv1d 1.7.0's has
# Jetson's as well (8.7, 11.0), and 10.3 and 12.1, where code for 10.0 and 12.0 runs.
CAPABILITIES = {
    "flash-attn": ("8.0", "9.0", "10.0", "12.0"),
    "causal-conv1d": ("7.5", "8.0", "9.0", "10.0", "12.0"),
}
PACKAGES = tuple(CAPABILITIES)

Release = Literal["cu128", "cu130"]
Dtype = Literal["fp16", "bf16"]


class BuildSpec(BaseModel):
    """The options that select a build, the same for every command.

    Empty `head_dims` or `dtypes` mean all of them; `python` None means the one the package set prefers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str = "flash-attn"
    release: Release = "cu128"
    capabilities: tuple[str, ...] = ("10.0",)
    python: str | None = None
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    forward_only: bool = False

    @field_validator("capabilities")
    @classmethod
    def _known_capabilities(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        package = info.data.get("package", "")
        # Of a package that pybuild does not build itself nothing is known.
        known = CAPABILITIES.get(package) or tuple(sorted(set().union(*CAPABILITIES.values()), key=float))
        for capability in value:
            if capability not in known:
                raise PybuildError(
                    f"--capability {capability}: {package} has no code for it",
                    f"Choose from {', '.join(known)}. 8.0 runs on 8.6 and 8.9 as well, 10.0 on 10.3, 12.0 on 12.1.",
                )
        if not value:
            raise PybuildError("no capability to build for", f"Choose from {', '.join(known)}.")
        return tuple(sorted(set(value), key=float))

    @field_validator("head_dims")
    @classmethod
    def _known_head_dims(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for dim in value:
            if dim not in HEAD_DIMS:
                raise PybuildError(
                    f"--head-dim {dim}: flash-attn 2.8.3 has no such kernels",
                    f"Choose from {', '.join(map(str, HEAD_DIMS))}; "
                    "a model's head dimension is rounded up to the next of them.",
                )
        return tuple(sorted(set(value)))

    @field_validator("dtypes")
    @classmethod
    def _sorted_dtypes(cls, value: tuple[Dtype, ...]) -> tuple[Dtype, ...]:
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _selection_of_flash_attn(self) -> BuildSpec:
        chosen = {"--head-dim": self.head_dims, "--dtype": self.dtypes, "--forward-only": self.forward_only}
        options = [option for option, value in chosen.items() if value]
        if options and self.package != "flash-attn":
            raise PybuildError(
                f"{', '.join(options)}: {self.package} is built whole; only flash-attn has a selection of kernels",
                "Leave it out, on the command line and in pybuild.toml.",
            )
        return self

    @property
    def is_full(self) -> bool:
        """Whether every kernel is built."""
        return not self.forward_only and set(self.head_dims) in (set(), set(HEAD_DIMS)) and len(self.dtypes) != 1

    @property
    def architectures(self) -> tuple[str, ...]:
        """nvcc's names of the capabilities: `sm_100` for 10.0."""
        return tuple(f"sm_{c.replace('.', '')}" for c in self.capabilities)
