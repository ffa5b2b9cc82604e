"""Each message of docs/troubleshooting.md is produced here: by the tool itself where it is at hand, else by pybuild."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import test_doctor
import test_verdict

from pybuild.doctor import findings
from pybuild.errors import PybuildError
from pybuild.facts.venv import Environment
from pybuild.hostpkgs import find_cuda, read_facts
from pybuild.nix import find_nix, known_cause
from pybuild.nixlog import BuildLog
from pybuild.spec import BuildSpec
from pybuild.verdict import wheel_findings
from pybuild.view.record import read_build
from pybuild.wheel import Fatbins

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs/troubleshooting.md").read_text()
HEADINGS = [match[2] for match in re.finditer(r"^### (`+)(.*)\1$", PAGE, re.MULTILINE)]
COMMANDS = [match[0].strip() for match in re.finditer(r"^    pybuild .*$", PAGE, re.MULTILINE)]

# A source that takes a compiler a while.
SLOW = "template<int N> struct F { static int f(int x) { return F<N-1>::f(x * N + 1); } };\n"
SLOW += "template<> struct F<0> { static int f(int x) { return x; } };\n"
SLOW += "".join(f"int g{n}(int x) {{ return F<{800 + n}>::f(x); }}\n" for n in range(60))


def needs(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} here")
    return found


def said(argv: list[str], folder: Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


def killed(argv: list[str], below: str, folder: Path) -> str:
    """What `argv` says when its child of this name gets the signal that the kernel sends for want of memory."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder) as process:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    if child.name() == below:
                        child.kill()
                        return process.communicate()[0]
            time.sleep(0.005)
        pytest.fail(f"{below} was never seen")


# Produced by the tools themselves


def killed_cc1plus(folder: Path) -> str:
    (folder / "slow.cpp").write_text(SLOW)
    return killed([needs("g++"), "-O2", "-ftemplate-depth=5000", "-c", "slow.cpp"], "cc1plus", folder)


def killed_cicc(folder: Path) -> str:
    (folder / "slow.cu").write_text(
        SLOW.replace("static int", "__device__ static int").replace("int g", "__device__ int g")
    )
    return killed([needs("nvcc"), "-ftemplate-depth=5000", "-c", "slow.cu"], "cicc", folder)


def failed_ninja(folder: Path) -> str:
    (folder / "build.ninja").write_text("rule fail\n  command = false\nbuild a.o: fail\n")
    return said([needs("ninja")], folder)


def missing_header(folder: Path) -> str:
    (folder / "x.cpp").write_text("#include <Python.h>\n")
    return said([needs("g++"), "-c", "x.cpp"], folder)


def isolated_python(folder: Path) -> str:
    return said([sys.executable, "-I", "-S", "-c", "import torch"], folder)


def full_disk(folder: Path) -> str:
    with pytest.raises(OSError) as raised, Path("/dev/full").open("w", buffering=1) as file:
        file.write("x" * 100_000)
    return str(raised.value)


def refused_memory(folder: Path) -> str:
    program = "import mmap, resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); mmap.mmap(-1, 2**40)"
    return said([sys.executable, "-c", program], folder)


def undefined_symbol(folder: Path) -> str:
    source = "namespace c10 { class Warning; void warn(const Warning&); }\n"
    source += "void use(const c10::Warning& w) { c10::warn(w); }\n"
    (folder / "x.cpp").write_text(source)
    subprocess.run([needs("g++"), "-shared", "-fPIC", "x.cpp", "-o", "x.so"], cwd=folder, check=True)
    with pytest.raises(OSError) as raised:
        ctypes.CDLL(str(folder / "x.so"), mode=os.RTLD_NOW)
    return str(raised.value)


def left_out_kernel(folder: Path) -> str:
    # tests/test_end_to_end.py calls such a kernel; here, what the wheel would say.
    text = (HERE.parent / "nix/flash-attn/stubs.nix").read_text()
    start = re.search(r'std::string\("([^"]+)"\) \+ what', text)
    assert start is not None
    return f"{start[1]}head dimension 128"


# Produced by nix


def nix_said(name: str) -> Callable[[Path], str]:
    def produce(folder: Path) -> str:
        log = BuildLog()
        text = (HERE / f"fakes/nix-logs/{name}").read_text()
        for line in text.splitlines():
            log.feed(line)
        assert known_cause(text.splitlines()) is not None
        return "\n".join(f"error: {error.text}" for error in log.errors)

    return produce


def no_network(folder: Path) -> str:
    return "\n".join(read_build(HERE / "fakes/builds/network.jsonl").progress().said)


def known(text: str) -> Callable[[Path], str]:
    """For what only another machine's tools say: that pybuild knows it."""

    def produce(folder: Path) -> str:
        assert known_cause([text]) is not None
        return text

    return produce


# Produced by pybuild


def no_nix(folder: Path) -> str:
    with pytest.raises(PybuildError) as raised:
        find_nix(None, {"PATH": str(folder)})
    return raised.value.what


def no_toolkit(folder: Path) -> str:
    environ = {**os.environ, "CUDA_HOME": "", "PATH": os.environ.get("PATH", "")}
    if find_cuda("12.8", environ, None) is not None:
        pytest.skip("CUDA 12.8 is on this machine")
    with pytest.raises(PybuildError) as raised:
        read_facts(BuildSpec(release="cu128"), environ)
    return raised.value.what


def doctor_says(**changes: object) -> Callable[[Path], str]:
    def produce(folder: Path) -> str:
        return "\n".join(finding.why for finding in findings(test_doctor.but(test_doctor.SOUND, **changes)))

    return produce


def verdict_says(name: str = test_verdict.NAME, *, case: dict[str, object], **changes: object) -> Callable[[Path], str]:
    def produce(folder: Path) -> str:
        artifact = test_verdict.wheel(name, **changes)
        here = test_verdict.but(test_verdict.SOUND, **case)
        return "\n".join(finding.why for finding in wheel_findings(here, artifact, ()))

    return produce


UNTRUSTED = (
    "ignoring the client-specified setting 'sandbox-paths', because it is a restricted setting and you are not a "
    "trusted user"
)
PTX_ALONE = (Fatbins(code=("compute_90",), count=1),)
TORCH_211 = Environment("/venv/bin/python", "3.12.3", torch="2.11.0+cu130", torch_cuda="13.0")

PRODUCERS: dict[str, Callable[[Path], str]] = {
    "RuntimeError: The detected CUDA version (13.1) mismatches the version that was used to compile PyTorch (12.8).": (
        doctor_says(toolkits=(test_doctor.CUDA_131,), environ={"CUDA_HOME": "/usr/local/cuda-13.1"})
    ),
    "Killed signal terminated program cc1plus": killed_cc1plus,
    # As nvcc says it where /bin/sh is bash; with dash, which Debian has, the shell says "Killed".
    "nvcc error : 'cicc' died due to signal 9 (Kill signal)": (
        known("nvcc error   : 'cicc' died due to signal 9 (Kill signal)")
    ),
    "ninja: build stopped: subcommand failed.": failed_ninja,
    "fatal error: Python.h: No such file or directory": missing_header,
    "#error -- unsupported GNU version! gcc versions later than 14 are not supported!": (
        doctor_says(compilers={"g++": "15.1.0"})
    ),
    "ModuleNotFoundError: No module named 'torch'": isolated_python,
    "No space left on device": full_disk,
    "Cannot allocate memory": refused_memory,
    "neither nix nor nix-portable is on PATH": no_nix,
    "error: cloning builder process: Operation not permitted": (
        known("error: cloning builder process: Operation not permitted")
    ),
    f"warning: {UNTRUSTED}": known(f"warning: {UNTRUSTED}"),
    "error: hash mismatch in fixed-output derivation": nix_said("2.8-hash-mismatch.json"),
    "error: unable to download": no_network,
    "release cu128 needs the CUDA 12.8 toolkit": no_toolkit,
    "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl is not a supported wheel on this platform.": verdict_says(
        case={"environment": Environment("/venv/bin/python", "3.11.9")}
    ),
    "undefined symbol: _ZN3c104warnERKNS_7WarningE": undefined_symbol,
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory": verdict_says(
        case={"environment": Environment("/v/bin/python", "3.12.3", torch="2.11.0+cu130", torch_cuda="13.0")}
    ),
    "ImportError: version `GLIBC_2.38' not found": verdict_says(case={"glibc": "2.31"}, glibc="2.38"),
    "this flash-attn wheel was built without the kernels for head dimension 128": left_out_kernel,
    "CUDA error: no kernel image is available for execution on the device": (
        verdict_says(case={"gpus": (test_verdict.PRO_6000,)})
    ),
    "CUDA driver version is insufficient for CUDA runtime version": verdict_says(case={"driver": "470.10"}),
    "CUDA error: the provided PTX was compiled with an unsupported toolchain.": (
        verdict_says(case={"driver": "570.133.20", "gpus": (test_verdict.B200,)}, fatbins=PTX_ALONE, ptx_isa="9.0")
    ),
}


def words(text: str) -> str:
    """`text` with blanks evened out: nvcc writes `nvcc error   :`."""
    return re.sub(r"\s+", " ", text)


def test_every_entry_has_a_test_and_every_test_an_entry() -> None:
    assert sorted(HEADINGS) == sorted(PRODUCERS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_of_each_entry_is_produced(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE"):
        monkeypatch.setenv(name, "C")
    assert heading in words(PRODUCERS[heading](tmp_path))


@pytest.mark.parametrize(
    ("produce", "cause"),
    [(killed_cc1plus, "memory"), (killed_cicc, "memory"), (full_disk, "disk"), (missing_header, "header")],
)
def test_what_the_tools_say_is_known_for_what_it_is(
    produce: Callable[[Path], str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    found = known_cause(produce(tmp_path).splitlines())
    assert found is not None
    assert found.name == cause


@pytest.mark.parametrize("line", dict.fromkeys(COMMANDS))
def test_the_commands_of_the_page_are_understood(line: str) -> None:
    import shlex

    import click

    from pybuild.cli import COMMANDS as KNOWN
    from pybuild.cli import cli

    _, name, *rest = shlex.split(line, comments=True)
    if name not in KNOWN:
        pytest.skip(f"pybuild {name} is not there yet")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, rest)
