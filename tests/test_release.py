from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from pydantic import ValidationError

from pybuild.errors import PybuildError
from pybuild.pin import RANKS, TOOLKIT
from pybuild.release import Release, dump, load_release, load_source
from pybuild.spec import PYTHONS, RELEASES

DATA = Path(__file__).parent.parent / "nix/releases"

# Of the METADATA in torch's wheels: what a Linux x86_64 machine needs, without extras.
TORCH_REQUIRES = {
    "cu128": """
        filelock
        typing-extensions>=4.10.0
        setuptools; python_version >= "3.12"
        sympy>=1.13.3
        networkx>=2.5.1
        jinja2
        fsspec>=0.8.5
        cuda-bindings==12.9.4
        nvidia-cuda-nvrtc-cu12==12.8.93
        nvidia-cuda-runtime-cu12==12.8.90
        nvidia-cuda-cupti-cu12==12.8.90
        nvidia-cudnn-cu12==9.10.2.21
        nvidia-cublas-cu12==12.8.4.1
        nvidia-cufft-cu12==11.3.3.83
        nvidia-curand-cu12==10.3.9.90
        nvidia-cusolver-cu12==11.7.3.90
        nvidia-cusparse-cu12==12.5.8.93
        nvidia-cusparselt-cu12==0.7.1
        nvidia-nccl-cu12==2.27.5
        nvidia-nvshmem-cu12==3.4.5
        nvidia-nvtx-cu12==12.8.90
        nvidia-nvjitlink-cu12==12.8.93
        nvidia-cufile-cu12==1.13.1.3
        triton==3.6.0
    """,
    # The last nine but three are cuda-toolkit 13.0.2's [cublas,cudart,cufft,cufile,cupti,curand,...].
    "cu130": """
        filelock
        typing-extensions>=4.10.0
        setuptools<82
        sympy>=1.13.3
        networkx>=2.5.1
        jinja2
        fsspec>=0.8.5
        cuda-toolkit==13.0.2
        cuda-bindings<14,>=13.0.3
        nvidia-cudnn-cu13==9.19.0.56
        nvidia-cusparselt-cu13==0.8.0
        nvidia-nccl-cu13==2.28.9
        nvidia-nvshmem-cu13==3.4.5
        triton==3.6.0
        nvidia-cublas==13.1.0.3.*
        nvidia-cuda-runtime==13.0.96.*
        nvidia-cufft==12.0.0.61.*
        nvidia-cufile==1.15.1.6.*
        nvidia-cuda-cupti==13.0.85.*
        nvidia-curand==10.4.0.35.*
        nvidia-cusolver==12.0.4.66.*
        nvidia-cusparse==12.6.3.3.*
        nvidia-nvjitlink==13.0.88.*
        nvidia-cuda-nvrtc==13.0.88.*
        nvidia-nvtx==13.0.85.*
    """,
}


@pytest.mark.parametrize("name", RELEASES)
def test_a_shipped_release_is_valid_and_in_canonical_form(name: str) -> None:
    release = load_release(name)
    assert release.name == name == f"cu{release.cuda.replace('.', '')}"
    assert release.torchVersion == f"{release.torch}+{name}"
    assert dump(release) == (DATA / f"{name}.json").read_text()


@pytest.mark.parametrize("name", RELEASES)
def test_a_shipped_release_has_what_torch_requires(name: str) -> None:
    release = load_release(name)
    required = {}
    for line in filter(None, map(str.strip, TORCH_REQUIRES[name].splitlines())):
        requirement = Requirement(line)
        required[requirement.name] = requirement
        assert requirement.specifier.contains(release.wheels[requirement.name].version), line
    nvidia = {r for r in required if r.startswith("nvidia-")}
    assert set(release.groups["libraries"]) == nvidia


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("python", PYTHONS)
def test_a_shipped_release_installs_on_each_python(name: str, python: str) -> None:
    release = load_release(name)
    pins = release.pins(python, release.groups)
    assert len(pins) == len(release.wheels)
    for pin in pins:
        _, _, _, tags = parse_wheel_filename(pin.file)
        assert set(RANKS[python]) & tags, pin.file
        assert Tag("cp39", "cp39", "linux_x86_64") not in tags


def test_the_toolkit_of_cu130_is_nvidias() -> None:
    release = load_release("cu130")
    extras = Requirement(TOOLKIT).extras
    assert extras == {"cccl", "crt", "nvcc", "nvvm", "profiler"}
    versions = {name: release.wheels[name].version for name in release.groups["toolkit"]}
    assert versions == {
        "nvidia-cuda-cccl": "13.0.85",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-cuda-cuobjdump": "13.2.51",
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-cuda-nvdisasm": "13.2.51",
        "nvidia-cuda-profiler-api": "13.0.85",
        "nvidia-nvvm": "13.0.88",
    }


def test_the_toolkit_of_cu128_is_not_from_wheels() -> None:
    assert load_release("cu128").groups["toolkit"] == ()


def test_torch_of_cu128_is_the_build_that_pip_takes() -> None:
    # 2.10.0 was uploaded twice; the second build has the tag 3.
    wheel = load_release("cu128").wheels["torch"]
    assert {parse_wheel_filename(pin.file)[2] for pin in wheel.files.values()} == {(3, "")}


def test_flash_attn_is_upstreams_sdist() -> None:
    source = load_source("flash-attn")
    assert (source.version, source.file, source.project) == ("2.8.3", "flash_attn-2.8.3.tar.gz", "flash-attn")


def test_no_data_file_names_a_host() -> None:
    files = sorted(DATA.glob("*.json"))
    assert len(files) >= 3
    for file in files:
        assert not re.search(r"://|\.(org|com|io|net)\b", file.read_text()), file.name


def test_a_build_downloads_no_more_than_it_has_to() -> None:
    release = load_release("cu130")
    pins = release.pins("3.12", ["torch", "libraries", "toolkit", "python", "build"])
    assert sum(pin.size for pin in pins) < 2.7e9
    assert "triton" in release.groups["runtime"]


# Data that is not valid

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["wheels"]["jinja2"]["files"]["any"].update(sha256="0" * 63), "sha256"),
        (lambda d: d["wheels"]["jinja2"]["files"]["any"].update(size=0), "size"),
        (lambda d: d["wheels"]["jinja2"]["files"]["any"].update(url="x"), "url"),
        (lambda d: d["wheels"]["jinja2"]["files"]["any"].update(file="../jinja2-3.1.6-py3-none-any.whl"), "file"),
        (lambda d: d["wheels"]["jinja2"]["files"]["any"].update(file="jinja2-3.1.6.whl"), "wheel"),
        (lambda d: d["wheels"]["jinja2"].update(version="3.1.5"), "jinja2 3.1.5"),
        (lambda d: d["wheels"]["torch"]["files"].pop("cp311"), "need 'any', or each of"),
        (lambda d: d["wheels"]["torch"]["files"].update(cp314={}), "cp314"),
        (lambda d: d["wheels"].pop("jinja2"), "groups"),
        (lambda d: d["groups"]["build"].append("jinja2"), "groups"),
        (lambda d: d["groups"].update(more=[]), "more"),
        (lambda d: d.update(cuda="13"), "cuda"),
        (lambda d: d.pop("torchVersion"), "torchVersion"),
    ],
)
def test_a_fault_in_a_release_is_named(tmp_path: Path, change: Change, complaint: str) -> None:
    data = json.loads(dump(load_release("cu130")))
    change(data)
    with pytest.raises(ValidationError, match=complaint):
        Release.model_validate(data)
    (tmp_path / "cu130.json").write_text(json.dumps(data))
    with pytest.raises(PybuildError, match=complaint) as caught:
        load_release("cu130", tmp_path)
    assert str(tmp_path / "cu130.json") in str(caught.value)


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(PybuildError, match="No such file"):
        load_release("cu130", tmp_path)
    (tmp_path / "cu130.json").write_text("{")
    with pytest.raises(PybuildError, match="JSON"):
        load_release("cu130", tmp_path)


def test_an_unknown_package_names_the_known_ones() -> None:
    with pytest.raises(PybuildError, match="flash-attn"):
        load_source("flash-attention")
