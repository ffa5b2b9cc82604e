"""Settings of a project: which count, and what is said of those that can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybuild.config import spec_of
from pybuild.errors import PybuildError


def origins(folder: Path, **given: object) -> dict[str, str]:
    return {setting.key: setting.origin for setting in spec_of(given, folder)[1]}


def test_without_a_file_all_is_default(tmp_path: Path) -> None:
    assert set(origins(tmp_path).values()) == {"default"}


def test_the_command_line_counts_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    (tmp_path / "pybuild.toml").write_text('release = "cu130"\ncapabilities = ["9.0"]\n')
    spec, _ = spec_of({"capabilities": ("12.0",)}, tmp_path)
    assert (spec.release, spec.capabilities, spec.package) == ("cu130", ("12.0",), "flash-attn")
    found = origins(tmp_path, capabilities=("12.0",))
    assert found["release"] == "pybuild.toml"
    assert found["capabilities"] == "command line"
    assert found["package"] == "default"


def test_pyprojects_table_counts_as_well(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.pybuild]\nhead-dims = [128]\n')
    assert spec_of({}, tmp_path)[0].head_dims == (128,)


@pytest.mark.parametrize(
    ("text", "says", "remedy"),
    [
        ('relase = "cu130"', "unknown key 'relase'", "release"),
        ('release = "cu126"', "release = 'cu126'", "cu128, cu130"),
        ('capabilities = "10.0"', "capabilities = '10.0'", '["9.0", "10.0"]'),
        ('capabilities = ["11.0"]', "11.0", "8.0, 9.0, 10.0, 12.0"),
        ("head-dims = [65]", "65", "32, 64, 96, 128, 192, 256"),
        ("head-dims = []", "nothing is selected", "32, 64, 96, 128, 192, 256"),
        ("forward-only = 3", "forward-only = 3", "true or false"),
        ("release = ", "is not TOML", ""),
    ],
)
def test_a_bad_file_is_told_with_its_name_its_key_and_what_is_valid(
    text: str, says: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "pybuild.toml").write_text(text)
    with pytest.raises(PybuildError) as raised:
        spec_of({}, tmp_path)
    assert str(tmp_path / "pybuild.toml") in raised.value.what
    assert says in raised.value.what
    assert remedy in raised.value.remedy


def test_two_files_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "pybuild.toml").write_text("")
    (tmp_path / "pyproject.toml").write_text("[tool.pybuild]\n")
    with pytest.raises(PybuildError, match="both set values"):
        spec_of({}, tmp_path)
