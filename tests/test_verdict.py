"""Every finding about a wheel: a case in which it is made, and the nearest one in which it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybuild.doctor import Case, Finding
from pybuild.facts.gpu import Gpu
from pybuild.facts.host import Cores, Host, Memory
from pybuild.facts.venv import Environment
from pybuild.spec import BuildSpec
from pybuild.verdict import wheel_findings
from pybuild.wheel import Artifact, Fatbins, Library, read_artifact, wheel_identity

FATBINS = Path(__file__).parent / "fatbins"
B200 = Gpu(name="NVIDIA B200", capability="10.0")
PRO_6000 = Gpu(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", capability="12.0")
VENV = Environment("/venv/bin/python", "3.12.3", torch="2.10.0+cu128", torch_cuda="12.8")
SOUND = Case(
    spec=BuildSpec(),
    host=Host(
        machine="x86_64",
        cores=Cores(usable=8),
        memory=Memory(available=2**34, because="MemAvailable"),
        gpus=(B200,),
        driver="570.133.20",
    ),
    cuda="12.8",
    torch="2.10.0",
    environment=VENV,
    glibc="2.39",
)


def but(case: Case, **changes: object) -> Case:
    """The case with these changes: of the host, where they name a fact of it, else of the case."""
    facts = {name: value for name, value in changes.items() if name in Host.model_fields}
    others: dict[str, Any] = {name: value for name, value in changes.items() if name not in facts}
    return replace(case, host=case.host.model_copy(update=facts), **others)


LIBRARY = Library(
    name="flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so",
    machine="x86_64",
    fatbins=(Fatbins(code=("sm_100",), count=72),),
    needed=("libc10.so", "libtorch_cpu.so", "libcudart.so.12", "libc.so.6"),
    glibc="2.32",
    torch_symbols=("_ZN3c104warnEi",),
)
NAME = "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"


def wheel(name: str = NAME, **changes: object) -> Artifact:
    return wheel_identity(name).model_copy(
        update={"path": f"dist/{name}", "libraries": (LIBRARY.model_copy(update=changes),)}
    )


def found(case: Case, artifact: Artifact, code: str, missing: tuple[str, ...] | None = ()) -> Finding:
    (one,) = [f for f in wheel_findings(case, artifact, missing) if f.code == code]
    assert one.seen and one.why and one.mend
    return one


def codes(case: Case, artifact: Artifact, missing: tuple[str, ...] | None = ()) -> list[str]:
    return [f.code for f in wheel_findings(case, artifact, missing)]


def test_a_wheel_that_runs_here() -> None:
    assert codes(SOUND, wheel()) == []
    assert codes(SOUND, wheel(), None) == []


# GPUs


def test_an_sm_100_wheel_on_an_rtx_pro_6000() -> None:
    finding = found(but(SOUND, gpus=(PRO_6000,)), wheel(), "gpu-without-code")
    assert finding.breaks == "run"
    assert finding.seen == "NVIDIA RTX PRO 6000 Blackwell Server Edition is 12.0; the wheel has sm_100"
    assert "no kernel image is available" in finding.why
    assert finding.mend == "pybuild build flash-attn --capability 12.0"


@pytest.mark.parametrize(
    ("code", "gpu", "runs"),
    [("sm_100", "10.3", True), ("sm_100", "12.0", False), ("compute_90", "12.0", True), ("sm_80", "8.9", True),
     ("sm_90a", "10.0", False), ("sm_120", "12.1", True)],
)  # fmt: skip
def test_what_runs_where(code: str, gpu: str, runs: bool) -> None:
    case = but(SOUND, gpus=(Gpu(name="a GPU", capability=gpu),), driver="590.44.01")
    artifact = wheel(fatbins=(Fatbins(code=(code,), count=72),), ptx_isa="8.7" if "compute" in code else None)
    assert codes(case, artifact) == ([] if runs else ["gpu-without-code"])


def test_some_of_the_source_files_have_no_code() -> None:
    artifact = wheel(fatbins=(Fatbins(code=("sm_80",), count=3), Fatbins(code=("sm_80", "sm_100"), count=69)))
    finding = found(SOUND, artifact, "gpu-in-part")
    assert finding.breaks is None
    assert "3 of 72 source files have no code for NVIDIA B200 (10.0)" in finding.seen


def test_a_wheel_without_device_code_or_a_machine_without_gpus() -> None:
    assert codes(SOUND, wheel(fatbins=())) == []
    assert codes(but(SOUND, gpus=(PRO_6000,)), wheel(fatbins=())) == []
    assert codes(but(SOUND, gpus=()), wheel()) == []
    assert codes(but(SOUND, gpus=(Gpu(name="?", capability=None),)), wheel()) == []


def test_another_package_is_built_for_this_gpu_by_pip() -> None:
    case = but(SOUND, gpus=(PRO_6000,))
    artifact = wheel("causal_conv1d-1.5.2-cp312-cp312-linux_x86_64.whl")
    assert found(case, artifact, "gpu-without-code").mend == (
        "TORCH_CUDA_ARCH_LIST=12.0 pybuild run -- pip install --force-reinstall --no-deps --no-cache-dir "
        "--no-build-isolation --no-binary causal-conv1d causal-conv1d"
    )


def test_a_library_of_no_package() -> None:
    artifact = Artifact(path="build/scale.so", libraries=wheel().libraries)
    case = but(SOUND, gpus=(PRO_6000,), glibc="2.28")
    assert found(case, artifact, "gpu-without-code").mend.endswith("-gencode arch=compute_120,code=sm_120")
    assert found(case, artifact, "glibc").mend.startswith("Compile it again here")
    ours = artifact.model_copy(update={"path": "build/flash_attn_2_cuda.so"})
    assert found(case, ours, "gpu-without-code").mend == "pybuild build flash-attn --capability 12.0"


def test_a_gpu_that_flash_attn_has_no_code_for() -> None:
    case = but(SOUND, gpus=(Gpu(name="Tesla T4", capability="7.5"),))
    assert "scaled_dot_product_attention" in found(case, wheel(), "gpu-without-code").mend


def test_driver() -> None:
    finding = found(but(SOUND, driver="520.61.05"), wheel(), "driver-too-old")
    assert finding.breaks == "run"
    assert "its CUDA 12 needs 525.60.13" in finding.seen
    assert codes(but(SOUND, driver="525.60.13"), wheel()) == []
    cuda_13 = wheel(needed=("libcudart.so.13",))
    assert "driver-too-old" in codes(SOUND, cuda_13)
    assert "driver-too-old" not in codes(but(SOUND, gpus=()), cuda_13)


def test_ptx_that_the_driver_cannot_compile() -> None:
    ptx = wheel(fatbins=(Fatbins(code=("compute_90", "sm_90"), count=72),), ptx_isa="8.8")
    finding = found(SOUND, ptx, "driver-too-old-for-ptx")  # CUDA 12.9's PTX, 12.8's driver
    assert finding.breaks == "run"
    assert "unsupported toolchain" in finding.why
    assert "575.51.03" in finding.seen
    assert codes(but(SOUND, driver="575.51.03"), ptx) == []
    hopper = but(SOUND, gpus=(Gpu(name="NVIDIA H100", capability="9.0"),))
    assert codes(hopper, ptx) == []  # its cubin runs


# torch


def test_a_wheel_for_another_torch_by_its_name() -> None:
    artifact = wheel("flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    finding = found(SOUND, artifact, "torch", ("_ZN3c104warnEi",))
    assert finding.breaks == "import"
    assert found(SOUND, artifact, "torch", None).breaks == "import"
    lucky = found(SOUND, artifact, "torch", ())
    assert lucky.breaks is None
    assert "all the symbols" in lucky.seen
    assert "it is for torch 2.8, and here is torch 2.10.0+cu128" in finding.seen
    assert codes(but(SOUND, environment=replace(VENV, torch="2.8.0+cu128")), artifact) == []


def test_a_wheel_for_another_torch_by_its_symbols() -> None:
    symbol = "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
    finding = found(SOUND, wheel(), "torch-symbols", (symbol,))
    assert finding.breaks == "import"
    assert "c10::detail::torchCheckFail" in finding.seen
    assert f"undefined symbol: {symbol}" in finding.why
    assert "the other C++ ABI" in finding.why
    assert "ABI" not in found(SOUND, wheel(), "torch-symbols", ("_ZN3c104warnEi",)).why


def test_no_torch_at_all() -> None:
    bare = but(SOUND, environment=Environment("/venv/bin/python", "3.12.3"))
    finding = found(bare, wheel(), "no-torch", None)
    assert finding.mend == "uv pip install --python /venv/bin/python --torch-backend=cu128 torch==2.10.0"
    assert codes(bare, wheel(needed=("libc.so.6",)), None) == []


def test_another_major_version_of_cuda() -> None:
    finding = found(but(SOUND, driver="580.65.06"), wheel(needed=("libc10.so", "libcudart.so.13")), "cuda-runtime")
    assert "linked with CUDA 13; torch 2.10.0+cu128 here brings CUDA 12.8" in finding.seen
    assert "libcudart.so.13: cannot open shared object file" in finding.why


# Python, glibc, machine


@pytest.mark.parametrize(
    ("tags", "python", "free_threaded", "fits"),
    [
        ("cp312-cp312", "3.12.3", False, True),
        ("cp312-cp312", "3.11.9", False, False),
        ("cp39-abi3", "3.12.3", False, True),
        ("cp313-abi3", "3.12.3", False, False),
        ("py3-none", "3.12.3", False, True),
        ("py39-none", "3.12.3", False, True),
        ("py2.py3-none", "3.10.1", False, True),
        ("pp310-pypy310_pp73", "3.10.1", False, False),
        ("cp313-cp313", "3.13.1", True, False),
        ("cp313-cp313t", "3.13.1", True, True),
    ],
)
def test_python(tags: str, python: str, free_threaded: bool, fits: bool) -> None:
    case = but(SOUND, environment=replace(VENV, version=python, free_threaded=free_threaded))
    artifact = wheel(f"flash_attn-2.8.3-{tags}-linux_x86_64.whl")
    assert codes(case, artifact) == ([] if fits else ["python"])
    if not fits:
        finding = found(case, artifact, "python")
        assert "is not a supported wheel on this platform" in finding.why
        assert finding.mend == f"pybuild build flash-attn --python {python.rpartition('.')[0]}"


def test_glibc() -> None:
    finding = found(but(SOUND, glibc="2.31"), wheel(), "glibc")
    assert finding.breaks == "import"
    assert "it needs glibc 2.32; this machine has 2.31" in finding.seen
    assert codes(but(SOUND, glibc="2.32"), wheel()) == []
    assert codes(but(SOUND, glibc=None), wheel()) == []


def test_a_name_that_promises_an_older_glibc() -> None:
    promised = wheel("flash_attn-2.8.3-cp312-cp312-manylinux_2_28_x86_64.whl")
    finding = found(SOUND, promised, "manylinux")
    assert finding.breaks is None
    assert "promises glibc 2.28, and it needs 2.32" in finding.seen
    assert "--platform-tag manylinux_2_32_x86_64" in finding.mend
    assert codes(SOUND, wheel("flash_attn-2.8.3-cp312-cp312-manylinux_2_34_x86_64.whl")) == []


def test_another_kind_of_machine() -> None:
    finding = found(but(SOUND, machine="aarch64"), wheel(), "machine")
    assert finding.breaks == "import"
    assert finding.seen == "it is compiled for x86_64; this machine is aarch64"


# What is only worth knowing


def test_rpath() -> None:
    finding = found(SOUND, wheel(rpath=("/nix/store/abc-torch/lib", "$ORIGIN")), "rpath")
    assert finding.breaks is None
    assert "/nix/store/abc-torch/lib" in finding.seen
    assert codes(SOUND, wheel(rpath=("$ORIGIN/../lib",))) == []


def test_cuobjdump_disagrees() -> None:
    artifact = wheel(cuobjdump="differs", cuobjdump_code=("sm_90",))
    finding = found(SOUND, artifact, "cuobjdump-differs")
    assert "headers say sm_100, cuobjdump says sm_90" in finding.seen
    assert codes(SOUND, wheel(cuobjdump="failed")) == []


def test_a_real_library() -> None:
    artifact = read_artifact(FATBINS / "extension.so")
    assert codes(SOUND, artifact) == ["rpath"]
    assert codes(but(SOUND, glibc="2.31"), artifact) == ["glibc", "rpath"]
