from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pybuild.capability import Capability
from pybuild.errors import PybuildError
from pybuild.fatbin import read_fatbins
from pybuild.wheel import Fatbins, codes_by_cuobjdump, missing_symbols, read_artifact, wheel_identity

FATBINS = Path(__file__).parent / "fatbins"  # make.sh there makes them
CHECK_FAIL = "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


def codes(path: Path) -> list[str]:
    return [str(code) for code in read_artifact(path).codes]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zstd.o", ["sm_80", "sm_90", "compute_90", "sm_100", "sm_120"]),
        ("suffixes.o", ["sm_90a", "sm_100a", "sm_100f", "compute_120f"]),
        ("lz4.o", ["compute_90"]),
        ("plain.o", ["compute_90"]),
        ("relocatable.o", ["sm_100"]),
        ("lto.o", ["lto_100"]),
        ("extension.so", []),
    ],
)
def test_device_code_of_real_objects(name: str, expected: list[str]) -> None:
    assert codes(FATBINS / name) == expected


def test_source_files_that_run_somewhere() -> None:
    (library,) = read_artifact(FATBINS / "plain.o").libraries
    parts = (Fatbins(code=("sm_80",), count=60), Fatbins(code=("compute_80", "sm_90a"), count=12))
    library = library.model_copy(update={"fatbins": parts})
    assert library.source_files() == 72
    assert library.source_files(Capability(8, 0)) == 72
    assert library.source_files(Capability(10, 0)) == 12
    assert library.source_files(Capability(7, 5)) == 0
    assert [str(c) for c in library.codes] == ["sm_80", "compute_80", "sm_90a"]


def test_ptx_isa_says_which_cuda_made_it() -> None:
    assert read_artifact(FATBINS / "plain.o").libraries[0].ptx_isa == "9.0"  # CUDA 13.0's


def test_what_an_extension_needs() -> None:
    (library,) = read_artifact(FATBINS / "extension.so").libraries
    assert library.machine == "x86_64"
    assert library.rpath == ("/nix/store/lib", "$ORIGIN")
    assert "libc10.so" in library.needed
    assert library.glibc == "2.34"
    assert library.glibcxx == "3.4.21"
    assert library.torch_symbols == ("_ZN3c104warnEi", CHECK_FAIL)
    assert library.cxx11_abi is True


def test_symbols_that_this_torch_does_not_have() -> None:
    (library,) = read_artifact(FATBINS / "extension.so").libraries
    assert missing_symbols(library.torch_symbols, [FATBINS / "libc10.so"]) == ("_ZN3c104warnEi",)
    # What a library only uses, it does not define.
    assert missing_symbols([CHECK_FAIL], [FATBINS / "extension.so"]) == (CHECK_FAIL,)
    assert missing_symbols([], [Path("/nowhere.so")]) == ()
    with pytest.raises(PybuildError, match=r"nowhere\.so: cannot be read"):
        missing_symbols([CHECK_FAIL], [Path("/nowhere.so")])


def make_wheel(folder: Path, name: str, members: dict[str, bytes], requires: str = "torch") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(
            "flash_attn-2.8.3.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\nRequires-Dist: {requires}\n",
        )
    return path


def test_a_wheel(tmp_path: Path) -> None:
    path = make_wheel(
        tmp_path,
        "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl",
        {
            "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so": (FATBINS / "extension.so").read_bytes(),
            "flash_attn/other.so.1": (FATBINS / "zstd.o").read_bytes(),
            "flash_attn/__init__.py": b"",
        },
        "torch==2.10.0",
    )
    artifact = read_artifact(path)
    assert (artifact.name, artifact.version) == ("flash-attn", "2.8.3")
    assert (artifact.python_tags, artifact.abi_tags) == (("cp312",), ("cp312",))
    assert artifact.platform_tags == ("linux_x86_64",)
    assert artifact.torch == "2.10.0"
    assert len(artifact.libraries) == 2
    assert [str(c) for c in artifact.codes] == ["sm_80", "sm_90", "compute_90", "sm_100", "sm_120"]
    assert artifact.manylinux == "manylinux_2_34_x86_64"


@pytest.mark.parametrize(
    ("machine", "glibc", "tag"),
    [("x86_64", "2.2.5", "manylinux_2_5_x86_64"), ("x86_64", "2.32", "manylinux_2_32_x86_64"),
     ("aarch64", "2.4", "manylinux_2_17_aarch64"), ("x86_64", None, None)],
)  # fmt: skip
def test_manylinux(machine: str, glibc: str | None, tag: str | None) -> None:
    artifact = read_artifact(FATBINS / "extension.so")
    library = artifact.libraries[0].model_copy(update={"machine": machine, "glibc": glibc})
    assert artifact.model_copy(update={"libraries": (library,)}).manylinux == tag


@pytest.mark.parametrize(
    ("file_name", "requires", "torch", "cuda", "abi"),
    [
        ("flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl", [], "2.8", "12", True),
        ("flash_attn-2.7.4+cu12torch2.5cxx11abiFALSE-cp310-cp310-linux_x86_64.whl", [], "2.5", "12", False),
        ("vision-0.1+pt2.10.0cu128-cp312-cp312-linux_x86_64.whl", [], "2.10.0", "12.8", None),
        ("vision-0.1+cu130-cp39-abi3-linux_x86_64.whl", ["torch==2.11.0 ; sys_platform == 'linux'"], "2.11.0",
         "13.0", None),
        ("vision-0.1-cp312-cp312-linux_x86_64.whl", ["numpy==2.0", "torch>=2.4", "not a requirement!"], None,
         None, None),
    ],
)  # fmt: skip
def test_what_a_wheels_name_tells(
    file_name: str, requires: list[str], torch: str | None, cuda: str | None, abi: bool | None
) -> None:
    artifact = wheel_identity(file_name, requires)
    assert (artifact.torch, artifact.cuda, artifact.cxx11_abi) == (torch, cuda, abi)


def test_the_old_abi_is_seen_in_a_symbol() -> None:
    (library,) = read_artifact(FATBINS / "extension.so").libraries
    old = library.model_copy(update={"torch_symbols": ("_ZN3c106detail14torchCheckFailEPKcS2_jRKSs",)})  # torch 2.4
    assert old.cxx11_abi is False
    assert library.model_copy(update={"torch_symbols": ("_ZN3c104warnEi",)}).cxx11_abi is None


@pytest.mark.parametrize(
    ("needed", "major"),
    [("libcudart.so.12", 12), ("libcudart.so.11.0", 11), ("libcudart.7ec1eba6.so.12", 12), ("libc.so.6", None)],
)
def test_cuda_runtime_it_is_linked_with(needed: str, major: int | None) -> None:
    (library,) = read_artifact(FATBINS / "extension.so").libraries
    assert library.model_copy(update={"needed": (needed,)}).cuda_major == major


# Bad input: one clear error each.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.whl", None, "cannot be read: No such file"),
        ("x.txt", b"", "not a wheel"),
        ("flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl", b"", "damaged wheel"),
        ("flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl", b"PK\x03\x04", "damaged wheel"),
        ("x.so", b"", "not a readable ELF"),
        ("x.so", b"\x7fELF", "not a readable ELF"),
        ("x.o", b"!<thin>\n", "not a readable ELF"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PybuildError, match=message):
        read_artifact(path)


def test_a_folder_is_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "a.so").mkdir()
    with pytest.raises(PybuildError, match="cannot be read"):
        read_artifact(tmp_path / "a.so")


def test_a_renamed_wheel(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "mine.whl", {})
    with pytest.raises(PybuildError, match="not a wheel's file name"):
        read_artifact(path)


def test_a_wheel_with_a_damaged_member(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "a-1-cp312-cp312-linux_x86_64.whl", {"a.so": bytes(10_000)})
    raw = bytearray(path.read_bytes())
    raw[40:44] = b"\xff\xff\xff\xff"  # the beginning of a.so's deflated bytes
    path.write_bytes(raw)
    with pytest.raises(PybuildError, match="damaged wheel"):
        read_artifact(path)


def test_a_fatbin_that_is_cut_short() -> None:
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 100)
    with pytest.raises(ValueError, match="cut short"):
        list(read_fatbins(whole))
    with pytest.raises(ValueError, match="cut short"):
        list(read_fatbins(whole[:10]))
    with pytest.raises(ValueError, match="unknown version 7"):
        list(read_fatbins(struct.pack("<IHHQ", 0xBA55ED50, 7, 16, 0)))


def test_an_entry_of_no_size_ends() -> None:
    entry = struct.pack("<HHIQ8xHHI8xQ", 2, 0x101, 0, 0, 8, 1, 100, 0)
    with pytest.raises(ValueError, match="reaches beyond"):
        list(read_fatbins(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["zstd.o", "extension.so", "libc10.so"]))
    content = bytearray((FATBINS / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 8))
        content[at : at + 4] = data.draw(
            st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\0\0\0"]) | st.binary(min_size=4, max_size=4)
        )
    length = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(content[:length])
    try:
        read_artifact(path)
        missing_symbols([CHECK_FAIL], [path])
    except PybuildError:
        pass


# Against NVIDIA's own tools, where there are any.

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
CUOBJDUMP = shutil.which("cuobjdump")


@nvcc
@pytest.mark.parametrize("mode", ["speed", "size"])  # LZ4, Zstandard
def test_what_nvcc_was_told_is_what_is_read(tmp_path: Path, mode: str) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float *p) { p[threadIdx.x] *= 2; }")
    out = tmp_path / "k.o"
    gencode = [
        f"-gencode=arch=compute_{n},code={kind}_{n}"
        for kind, n in [("sm", "80"), ("sm", "100a"), ("sm", "120"), ("compute", "90")]
    ]
    run = subprocess.run(
        ["nvcc", "-c", source, "-o", out, f"--compress-mode={mode}", *gencode],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        pytest.skip(f"this nvcc cannot: {run.stderr.splitlines()[0]}")
    assert codes(out) == ["sm_80", "compute_90", "sm_100a", "sm_120"]


@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump here")
@pytest.mark.parametrize("name", ["zstd.o", "suffixes.o", "lz4.o", "plain.o", "relocatable.o", "lto.o"])
def test_cuobjdump_reads_the_same(name: str) -> None:
    assert CUOBJDUMP
    (library,) = read_artifact(FATBINS / name, Path(CUOBJDUMP)).libraries
    assert library.cuobjdump == "agrees", library.cuobjdump_code


def fake_cuobjdump(folder: Path, script: str) -> Path:
    path = folder / "cuobjdump"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return path


# Printed by cuobjdump 13.2.78 -all for suffixes.o, shortened.
PRINTED = """
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

Fatbin elf code:
================
arch = sm_100a
code version = [1,8]

Fatbin elf code:
================
arch = sm_100f
code version = [1,8]

Fatbin ptx code:
================
arch = sm_120f
code version = [9,0]
ptxasOptions =
"""


def test_cuobjdump_is_compared(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path, f"print({PRINTED!r})")
    assert read_artifact(FATBINS / "suffixes.o", tool).libraries[0].cuobjdump == "agrees"
    (other,) = read_artifact(FATBINS / "zstd.o", tool).libraries
    assert other.cuobjdump == "differs"
    assert other.cuobjdump_code == ("sm_90a", "sm_100a", "sm_100f", "compute_120f")
    assert read_artifact(FATBINS / "extension.so", tool).libraries[0].cuobjdump == "not asked"


def test_a_cuobjdump_that_fails_is_no_judge(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path, "import sys; sys.exit('cuobjdump fatal   : Invalid ELF')")
    (library,) = read_artifact(FATBINS / "zstd.o", tool).libraries
    assert library.cuobjdump == "failed"
    assert [str(c) for c in library.codes] == ["sm_80", "sm_90", "compute_90", "sm_100", "sm_120"]
    assert codes_by_cuobjdump(FATBINS / "zstd.o", tmp_path / "none") is None
