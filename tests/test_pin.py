from __future__ import annotations

import functools
import io
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from index_server import Fault, IndexServer, make_pin, serve

from pybuild.cli.pin import command
from pybuild.errors import BuildError, PybuildError
from pybuild.index import Index, PipConfig
from pybuild.pin import BUILD_TOOLS, Projects, marker_environment, pin_release, resolve
from pybuild.release import Release

LINUX = "manylinux_2_28_x86_64"
CPYTHONS = ("cp310", "cp311", "cp312", "cp313")


def wheel(project: str, version: str, requires: Iterable[str] = (), python: str = ">=3.8", **members: str) -> bytes:
    """The bytes of a wheel with this metadata, and with `members`, their names' `/` written `__`."""
    name = project.replace("-", "_")
    lines = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}", f"Requires-Python: {python}"]
    metadata = "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), "", "Words."])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, text in members.items():
            archive.writestr(member.replace("__", "/") + ".py", text)
        if members:
            archive.writestr(f"{name}/code", "x" * 2_000_000)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return buffer.getvalue()


def torch_wheel(requires: Iterable[str], version: str = "9.1.0+cu130", cuda: str = "'13.0'") -> bytes:
    version_py = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    return wheel("torch", version.split("+")[0], requires, torch__version=version_py)


TORCH_REQUIRES = [
    "filelock",
    "sympy>=1.13",
    "setuptools<82",
    'tomli; python_version < "3.11"',
    'cuda-toolkit[cublas]==13.0.2; platform_system == "Linux"',
    'cuda-bindings<14; platform_system == "Linux"',
    'triton==3.6.0; platform_system == "Linux"',
    'winonly; sys_platform == "win32"',
    'optree; extra == "optree"',
]


@functools.cache
def index_files() -> dict[str, bytes]:
    """The files of an index with a small torch, whose requirements have the shape of the real one's."""
    any_, nvidia = "py3-none-any", "py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64"
    files: dict[str, bytes] = {}

    def add(project: str, version: str, tag: str = any_, requires: Iterable[str] = (), **more: str) -> None:
        name = project.replace("-", "_")
        files[f"{name}-{version}-{tag}.whl"] = wheel(project, version, requires, **more)

    for cpython in CPYTHONS:
        files[f"torch-9.1.0-{cpython}-{cpython}-{LINUX}.whl"] = torch_wheel(TORCH_REQUIRES)
        add("triton", "3.6.0", f"{cpython}-{cpython}-manylinux_2_27_x86_64.{LINUX}")
        add("cuda-bindings", "13.1", f"{cpython}-{cpython}-{LINUX}", ["cuda-pathfinder"])
    for version in ("13.0.2", "13.1.0"):
        kinds = ("cccl", "crt", "nvcc", "nvvm", "profiler", "cublas")
        wanted = [f"nvidia-{kind}=={version}.*; extra == '{kind}'" for kind in kinds]
        add("cuda-toolkit", version, "py2.py3-none-any", wanted)
        for kind in kinds:
            add(f"nvidia-{kind}", f"{version}.7", nvidia)
    for version in ("12.9.1", "13.2.51", "13.5.0"):
        add("nvidia-cuda-cuobjdump", version, nvidia)
        add("nvidia-cuda-nvdisasm", version, nvidia)
    for project in ("filelock", "mpmath", "tomli", "cuda-pathfinder", "winonly", "optree"):
        add(project, "1.0")
        add(project, "2.0")
        add(project, "3.0rc1")
    add("sympy", "1.14", any_, ["mpmath<2"])
    for project in BUILD_TOOLS:
        if project != "setuptools<82":
            add(project, "1.0")
    for version in ("80.0", "81.0", "82.0", "84.1"):
        add("setuptools", version)
    return files


@functools.cache
def index_metadata() -> dict[str, str]:
    """The metadata that the index gives without the wheel: of all but torch, as large wheels often have none."""
    found = {}
    for name, content in index_files().items():
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (member,) = (m for m in archive.namelist() if m.endswith("/METADATA"))
            found[name] = archive.read(member).decode()
    return {name: text for name, text in found.items() if not name.startswith("torch-")}


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve(IndexServer(files=dict(index_files()), metadata=dict(index_metadata()))) as index:
        yield index


def index_of(server: IndexServer) -> Index:
    return Index(PipConfig(index_urls=(server.url,), timeout=5))


def pinned(server: IndexServer) -> Release:
    return pin_release(index_of(server), "cu130", "9.1.0")


def test_a_release_has_all_that_torch_needs_by_purpose(server: IndexServer) -> None:
    release = pinned(server)
    assert (release.cuda, release.torch, release.torchVersion) == ("13.0", "9.1.0", "9.1.0+cu130")
    assert {group: list(names) for group, names in release.groups.items()} == {
        "torch": ["torch"],
        "libraries": ["nvidia-cublas"],
        "toolkit": [
            "nvidia-cccl",
            "nvidia-crt",
            "nvidia-cuda-cuobjdump",
            "nvidia-cuda-nvdisasm",
            "nvidia-nvcc",
            "nvidia-nvvm",
            "nvidia-profiler",
        ],
        "python": ["filelock", "mpmath", "sympy", "tomli"],
        "runtime": ["cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "triton"],
        "build": sorted(tool.removesuffix("<82") for tool in BUILD_TOOLS),
    }


def test_versions_are_the_newest_that_everything_allows(server: IndexServer) -> None:
    versions = {name: wheel.version for name, wheel in pinned(server).wheels.items()}
    assert versions["filelock"] == "2.0"  # no release candidate
    assert versions["mpmath"] == "1.0"  # sympy's bound
    assert versions["setuptools"] == "81.0"  # torch's
    assert versions["nvidia-nvcc"] == "13.0.2.7"  # cuda-toolkit's, at the version torch names
    assert versions["nvidia-cuda-cuobjdump"] == "13.2.51"  # the oldest of this CUDA or newer


def test_files_are_pinned_with_hash_and_size(server: IndexServer) -> None:
    release = pinned(server)
    for wheel_ in release.wheels.values():
        for pin in wheel_.files.values():
            assert pin == make_pin(pin.file, server.files[pin.file])
    assert set(release.wheels["torch"].files) == set(CPYTHONS)
    assert set(release.wheels["sympy"].files) == {"any"}


def test_no_wheel_is_downloaded(server: IndexServer) -> None:
    pinned(server)
    assert server.sent < sum(map(len, server.files.values())) / 3
    for name, wanted in server.requests:
        assert wanted is not None or not name.endswith(".whl")


def test_metadata_beside_the_wheel_is_preferred(server: IndexServer) -> None:
    file = f"torch-9.1.0-cp310-cp310-{LINUX}.whl"
    server.metadata[file] = "Metadata-Version: 2.1\nRequires-Dist: winonly\n\n"
    assert "winonly" in pinned(server).wheels


def test_an_index_of_plain_pages_gives_the_same(server: IndexServer) -> None:
    expected = pinned(server)
    server.html = True
    server.metadata.clear()
    assert pinned(server) == expected


def test_the_highest_build_of_a_version_is_taken(server: IndexServer) -> None:
    for cpython in CPYTHONS:
        for build in ("2", "10"):
            name = f"torch-9.1.0-{build}-{cpython}-{cpython}-{LINUX}.whl"
            server.files[name] = torch_wheel([*TORCH_REQUIRES, f"tomli=={'2.0' if build == '10' else '1.0'}"])
    release = pinned(server)
    assert release.wheels["torch"].files["cp312"].file == f"torch-9.1.0-10-cp312-cp312-{LINUX}.whl"
    assert release.wheels["tomli"].version == "2.0"


@pytest.mark.parametrize(
    "tag",
    [
        "py3-none-manylinux_2_31_x86_64",  # a newer glibc than torch's
        "py3-none-musllinux_1_2_x86_64",
        "py3-none-manylinux_2_28_aarch64",
        "py3-none-win_amd64",
        "cp314-cp314-manylinux_2_28_x86_64",
        "cp313-cp313t-manylinux_2_28_x86_64",
        "cp311-abi3-manylinux_2_28_x86_64",  # none for 3.10
    ],
)
def test_a_version_without_a_wheel_for_each_python_is_passed_over(server: IndexServer, tag: str) -> None:
    server.files[f"filelock-2.5-{tag}.whl"] = wheel("filelock", "2.5")
    assert pinned(server).wheels["filelock"].version == "2.0"


def test_a_wheel_for_the_platform_is_preferred_to_one_for_any(server: IndexServer) -> None:
    tag = "cp38-abi3-manylinux_2_12_x86_64.manylinux2010_x86_64"
    server.files[f"filelock-2.0-{tag}.whl"] = wheel("filelock", "2.0")
    (pin,) = pinned(server).wheels["filelock"].files.values()
    assert pin.file == f"filelock-2.0-{tag}.whl"


@pytest.mark.parametrize("by_index", [True, False])
def test_a_version_that_drops_a_python_is_passed_over(server: IndexServer, by_index: bool) -> None:
    name = "filelock-2.5-py3-none-any.whl"
    server.files[name] = wheel("filelock", "2.5", python=">=3.11")
    if by_index:
        server.requires_python[name] = ">=3.11"
    assert pinned(server).wheels["filelock"].version == "2.0"


def test_a_yanked_version_is_taken_only_by_name(server: IndexServer) -> None:
    server.yanked |= {"filelock-2.0-py3-none-any.whl", "cuda_toolkit-13.0.2-py2.py3-none-any.whl"}
    wheels = pinned(server).wheels
    assert (wheels["filelock"].version, wheels["cuda-toolkit"].version) == ("1.0", "13.0.2")


def test_a_torch_without_a_compiler_of_its_own(server: IndexServer) -> None:
    for cpython in CPYTHONS:
        server.files[f"torch-9.1.0-{cpython}-{cpython}-{LINUX}.whl"] = torch_wheel(
            ["filelock", "nvidia-cublas==13.0.2.7"], "9.1.0+cu128", "'12.8'"
        )
    release = pin_release(index_of(server), "cu128", "9.1.0")
    assert release.groups["toolkit"] == ()
    assert release.groups["libraries"] == ("nvidia-cublas",)


# Errors


def test_a_release_of_another_cuda(server: IndexServer) -> None:
    with pytest.raises(PybuildError, match=r"built with CUDA 13\.0: not a cu128") as caught:
        pin_release(index_of(server), "cu128", "9.1.0")
    assert "cu130" in caught.value.remedy


def test_a_torch_for_the_cpu(server: IndexServer) -> None:
    for cpython in CPYTHONS:
        name = f"torch-9.1.0-{cpython}-{cpython}-{LINUX}.whl"
        server.files[name] = torch_wheel(["filelock"], "9.1.0+cpu", "None")
    with pytest.raises(PybuildError, match="built with CUDA nothing"):
        pinned(server)


def test_a_version_that_the_index_lacks(server: IndexServer) -> None:
    with pytest.raises(BuildError, match=r"torch==9\.9\.9: no wheels .*\n  it has no version"):
        pin_release(index_of(server), "cu130", "9.9.9")


def test_a_version_that_is_none(server: IndexServer) -> None:
    with pytest.raises(PybuildError, match="not a version: 'newest'"):
        pin_release(index_of(server), "cu130", "newest")


def test_a_requirement_that_nothing_satisfies(server: IndexServer) -> None:
    with pytest.raises(BuildError, match=r"filelock(<1,>1\.5|>1\.5,<1): no wheels"):
        resolve(Projects(index_of(server)), ["filelock>1.5", "filelock<1"])


def test_requirements_that_chase_each_other(server: IndexServer) -> None:
    # Whichever version of `hunter` is chosen, what it requires rules that version out.
    server.files["hunter-1-py3-none-any.whl"] = wheel("hunter", "1", ["prey"])
    server.files["hunter-2-py3-none-any.whl"] = wheel("hunter", "2", ["hunter<2"])
    server.files["prey-1-py3-none-any.whl"] = wheel("prey", "1")
    with pytest.raises(BuildError, match="come to no end"):
        resolve(Projects(index_of(server)), ["hunter"])


def test_an_index_without_hashes(server: IndexServer) -> None:
    server.declared = dict.fromkeys(server.files)
    with pytest.raises(BuildError, match="the index gives no sha256"):
        pinned(server)


def test_a_wheel_that_is_none(server: IndexServer) -> None:
    del server.metadata["filelock-2.0-py3-none-any.whl"]
    server.files["filelock-2.0-py3-none-any.whl"] = b"not a zip"
    with pytest.raises(BuildError, match=r"filelock-2\.0-py3-none-any\.whl: not a wheel with a METADATA"):
        pinned(server)


def test_a_wheel_that_cannot_be_read(server: IndexServer) -> None:
    del server.metadata["filelock-2.0-py3-none-any.whl"]
    server.faults["filelock-2.0-py3-none-any.whl"] = itertools.repeat(Fault(status=403))
    with pytest.raises(BuildError, match=r"filelock-2\.0-py3-none-any\.whl: HTTP 403"):
        pinned(server)


def test_metadata_that_is_not_valid(server: IndexServer) -> None:
    del server.metadata["filelock-2.0-py3-none-any.whl"]
    server.files["filelock-2.0-py3-none-any.whl"] = wheel("filelock", "2.0", ["=="])
    with pytest.raises(BuildError, match="its metadata is not valid"):
        pinned(server)


def test_markers_are_those_of_the_target_not_of_this_machine() -> None:
    environment = marker_environment("3.10", "x")
    assert (environment["python_full_version"], environment["extra"]) == ("3.10.0", "x")
    assert environment["platform_machine"] == "x86_64"


# Command


@pytest.fixture
def pip_uses(server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", server.url)


@pytest.mark.usefixtures("pip_uses")
def test_the_command_prints_the_file_and_nothing_else(server: IndexServer) -> None:
    done = CliRunner().invoke(command, ["cu130", "--torch", "9.1.0"], catch_exceptions=False)
    assert Release.model_validate(json.loads(done.stdout)) == pinned(server)
    assert "127.0.0.1" not in done.stdout


@pytest.mark.usefixtures("pip_uses")
def test_the_command_writes_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "cu130.json"
    done = CliRunner().invoke(command, ["cu130", "--torch", "9.1.0", "--output", str(output)])
    assert (done.exit_code, done.stdout) == (0, "")
    before = output.read_text()
    done = CliRunner().invoke(command, ["cu128", "--torch", "9.1.0", "--output", str(output)])
    assert isinstance(done.exception, PybuildError)
    assert output.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["cu130.json"]


@pytest.mark.usefixtures("pip_uses")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    output = tmp_path / "absent/cu130.json"
    done = CliRunner().invoke(command, ["cu130", "--torch", "9.1.0", "--output", str(output)])
    assert isinstance(done.exception, PybuildError)
    assert str(output) in str(done.exception)
