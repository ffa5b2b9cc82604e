import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pybuild import capability
from pybuild.capability import Capability, Code, of_gpu, runs_on, to_build_for
from pybuild.errors import PybuildError

capabilities = st.builds(Capability, st.integers(5, 13), st.integers(0, 9))


@pytest.mark.parametrize(
    ("code", "gpu", "runs"),
    [
        ("sm_80", "8.0", True),
        ("sm_80", "8.6", True),
        ("sm_80", "8.9", True),
        ("sm_86", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_100", "10.0", True),
        ("sm_100", "10.3", True),
        ("sm_103", "10.0", False),
        ("sm_100", "12.0", False),  # the RTX PRO 6000 with a B200's wheel
        ("sm_120", "12.1", True),
        ("sm_120", "10.0", False),
        ("compute_90", "9.0", True),
        ("compute_90", "10.0", True),
        ("compute_90", "12.1", True),
        ("compute_90", "8.9", False),
        ("sm_90a", "9.0", True),
        ("sm_100a", "10.0", True),
        ("sm_100a", "10.3", False),
        ("compute_90a", "9.0", True),
        ("compute_90a", "10.0", False),
        ("sm_100f", "10.3", True),
        ("sm_100f", "12.0", False),
        ("sm_103f", "10.0", False),
        ("compute_120f", "12.1", True),
        ("compute_100f", "12.0", False),
        ("lto_100", "10.0", False),
    ],
)
def test_what_runs_where(code: str, gpu: str, runs: bool) -> None:
    assert runs_on(Code.parse(code), Capability.parse(gpu)) is runs


# On a machine that others use as well, an example may take long.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(capabilities, capabilities)
def test_a_cubin_never_runs_on_another_major(code: Capability, gpu: Capability) -> None:
    if code.major != gpu.major:
        assert not runs_on(Code(code), gpu)


@patient
@given(capabilities, capabilities)
def test_ptx_runs_wherever_the_cubin_does(code: Capability, gpu: Capability) -> None:
    if runs_on(Code(code), gpu):
        assert runs_on(Code(code, "ptx"), gpu)


@patient
@given(st.builds(Code, capabilities, st.sampled_from(["cubin", "ptx", "lto"]), st.sampled_from(["", "a", "f"])))
def test_names_are_read_back(code: Code) -> None:
    assert Code.parse(str(code)) == code


@pytest.mark.parametrize("text", ["", "10", "sm_100", "10.00", "100.0", "\u0663.\u0660", "8.x"])
def test_no_capability(text: str) -> None:
    with pytest.raises(PybuildError, match="not a compute capability"):
        Capability.parse(text)


@pytest.mark.parametrize("text", ["", "100", "sm_", "sm_1", "sm_100b", "SM_100"])
def test_no_architecture(text: str) -> None:
    with pytest.raises(PybuildError, match="not an architecture"):
        Code.parse(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [(name, row.capability) for row in capability.gpu_table() for name in row.names],
)
def test_every_name_in_the_table_finds_its_own_row(name: str, expected: str) -> None:
    assert str(of_gpu(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0"),
        ("NVIDIA GeForce RTX 5090", "12.0"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA GB200", "10.0"),
        ("NVIDIA B300 SXM6 AC", "10.3"),
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("NVIDIA L40S", "8.9"),
        # four cards whose names have "6000" in them, of four generations
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA RTX A6000", "8.6"),
        ("Quadro RTX 6000", "7.5"),
    ],
)
def test_gpus_that_people_have(name: str, expected: str) -> None:
    assert str(of_gpu(name)) == expected


@pytest.mark.parametrize("name", ["", "AMD Instinct MI300X", "NVIDIA Graphics Device", "NVIDIA GeForce GT 710"])
def test_an_unknown_gpu_is_not_guessed(name: str) -> None:
    assert of_gpu(name) is None


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [("8.0", "8.0"), ("8.6", "8.0"), ("8.9", "8.0"), ("9.0", "9.0"), ("10.0", "10.0"), ("10.3", "10.0"),
     ("12.0", "12.0"), ("12.1", "12.0"), ("7.5", None), ("11.0", None)],
)  # fmt: skip
def test_what_to_build_for_a_gpu(gpu: str, expected: str | None) -> None:
    assert to_build_for(Capability.parse(gpu)) == expected
