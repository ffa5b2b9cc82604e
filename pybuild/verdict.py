"""Whether a given wheel will run here: what stands against it, each with the command that mends it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from packaging.version import Version

from pybuild.capability import Capability, runs_on, to_build_for
from pybuild.cuda import driver_for_ptx, oldest_driver
from pybuild.doctor import Case, Finding, capability_of, is_older
from pybuild.wheel import Artifact, other_torch, plain_name


def wheel_findings(case: Case, artifact: Artifact, missing: tuple[str, ...] | None) -> list[Finding]:
    """Whether a wheel or a library will run here: what stands against it.

    `missing` are the symbols of torch that it needs and torch here lacks; None where they were not compared.
    """
    found = [
        *_tags(case, artifact),
        *_torch(case, artifact, missing),
        *_glibc(case, artifact),
        *_gpus(case, artifact),
        *_driver(case, artifact),
        *_paths(artifact),
        *_readings(artifact),
    ]
    return sorted(found, key=lambda f: f.breaks is None)


def _rebuild(case: Case, artifact: Artifact, gpu: Capability | None = None) -> str:
    """The command that makes this wheel anew, for this machine and for `gpu`."""
    if artifact.name is None and "flash_attn" not in artifact.path:
        if gpu is None:
            return "Compile it again here, with the torch and the CUDA of this environment."
        number = f"{gpu.major}{gpu.minor}"
        return f"Compile it with: -gencode arch=compute_{number},code=sm_{number}"
    capability = to_build_for(gpu) if gpu else None
    if artifact.name in (None, case.spec.package):
        if gpu and not capability:
            return "Use torch.nn.functional.scaled_dot_product_attention on it."
        return f"pybuild build {case.spec.package}" + (f" --capability {capability}" if capability else "")
    arch = f"TORCH_CUDA_ARCH_LIST={gpu} " if gpu else ""
    return (
        f"{arch}pybuild run -- pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation "
        f"--no-binary {artifact.name} {artifact.name}"
    )


def _tags(case: Case, artifact: Artifact) -> Iterator[Finding]:
    environment = case.environment
    machines = sorted({library.machine for library in artifact.libraries})
    if machines and case.host.machine and case.host.machine not in machines:
        yield Finding(
            code="machine",
            breaks="import",
            seen=f"it is compiled for {', '.join(machines)}; this machine is {case.host.machine}",
            why="The dynamic linker refuses it: cannot open shared object file, or: wrong ELF class.",
            mend=_rebuild(case, artifact),
        )
    if environment is None or not artifact.python_tags:
        return
    major, minor = environment.version.split(".")[:2]
    fits = any(_runs_python(tag, artifact.abi_tags, int(major), int(minor)) for tag in artifact.python_tags)
    threads = f"cp{major}{minor}t"
    if environment.free_threaded and "none" not in artifact.abi_tags:
        fits = threads in artifact.abi_tags
    if not fits:
        here = f"{environment.version}{' (free-threaded)' if environment.free_threaded else ''}"
        yield Finding(
            code="python",
            breaks="import",
            seen=f"it is for Python {'.'.join(artifact.python_tags)}-{'.'.join(artifact.abi_tags)}; "
            f"{environment.executable} is {here}",
            why=f"pip refuses: {artifact.path.rpartition('/')[2]} is not a supported wheel on this platform.",
            mend=f"{_rebuild(case, artifact)} --python {major}.{minor}"
            if artifact.name == case.spec.package
            else _rebuild(case, artifact),
        )


def _runs_python(tag: str, abis: tuple[str, ...], major: int, minor: int) -> bool:
    """Whether a wheel of this interpreter tag and these ABI tags is for CPython major.minor (PEP 425, PEP 384)."""
    match = re.fullmatch(r"(cp|py)(\d)(\d*)", tag)
    if not match or int(match[2]) != major:
        return False
    if match[3] == "":
        return True
    if match[1] == "py" or "abi3" in abis:
        return int(match[3]) <= minor
    return int(match[3]) == minor


def _torch(case: Case, artifact: Artifact, missing: tuple[str, ...] | None) -> Iterator[Finding]:
    environment = case.environment
    needs_torch = any(n.startswith(("libtorch", "libc10")) for library in artifact.libraries for n in library.needed)
    if environment is None or not (needs_torch or artifact.torch):
        return
    rebuild = _rebuild(case, artifact)
    if environment.torch is None:
        yield Finding(
            code="no-torch",
            breaks="import",
            seen=f"it needs torch, and {environment.executable} has none",
            why="ImportError: libc10.so: cannot open shared object file: No such file or directory.",
            mend=f"uv pip install --python {shlex.quote(environment.executable)} --torch-backend={case.spec.release} "
            f"torch=={artifact.torch or case.torch}",
        )
        return
    if reason := other_torch(artifact, environment.torch, environment.torch_cuda):
        # Every symbol may be there by luck, as for torchvision 0.25 (torch 2.10) under torch 2.11.
        imports = missing == ()
        yield Finding(
            code="torch",
            breaks=None if imports else "import",
            seen=reason + ("; torch here has all the symbols that it needs" if imports else ""),
            why="It can be imported, but torch keeps no ABI between minor versions: what changed in a class is seen as "
            "a crash or a wrong result."
            if imports
            else "The import ends with 'undefined symbol': torch keeps no ABI between minor versions.",
            mend=rebuild,
        )
    elif missing:
        yield Finding(
            code="torch-symbols",
            breaks="import",
            seen=f"it needs {len(missing)} symbols that torch {environment.torch} here does not have, such as "
            f"{plain_name(missing[0])}",
            why=f"The import ends with: undefined symbol: {missing[0]}. It was built for another torch"
            + (", or with the other C++ ABI." if any("__cxx11" in m or "RKSs" in m for m in missing) else "."),
            mend=rebuild,
        )
    majors = sorted({m for library in artifact.libraries if (m := library.cuda_major)})
    cuda = environment.torch_cuda
    if cuda and majors and int(cuda.split(".")[0]) not in majors and not artifact.cuda:
        yield Finding(
            code="cuda-runtime",
            breaks="import",
            seen=f"it is linked with CUDA {'/'.join(map(str, majors))}; torch {environment.torch} here brings CUDA "
            f"{cuda}",
            why=f"ImportError: libcudart.so.{majors[0]}: cannot open shared object file: No such file or directory.",
            mend=rebuild,
        )


def _glibc(case: Case, artifact: Artifact) -> Iterator[Finding]:
    needed = artifact.glibc
    if not needed:
        return
    if case.glibc and Version(needed) > Version(case.glibc):
        yield Finding(
            code="glibc",
            breaks="import",
            seen=f"it needs glibc {needed}; this machine has {case.glibc}",
            why=f"ImportError: version `GLIBC_{needed}' not found.",
            mend=f"{_rebuild(case, artifact)}  # on this machine, or on one with glibc {case.glibc} or older",
        )
    promised = [
        (int(m[1]), int(m[2])) for tag in artifact.platform_tags if (m := re.match(r"manylinux_(\d+)_(\d+)_", tag))
    ]
    if promised and Version(needed) > Version("{}.{}".format(*min(promised))):
        yield Finding(
            code="manylinux",
            breaks=None,
            seen=f"its name promises glibc {'{}.{}'.format(*min(promised))}, and it needs {needed}",
            why="pip installs it on machines where it then fails to import.",
            mend=f"python -m wheel tags --platform-tag {artifact.manylinux} {shlex.quote(artifact.path)}",
        )


def _gpus(case: Case, artifact: Artifact) -> Iterator[Finding]:
    libraries = [library for library in artifact.libraries if library.fatbins]
    for gpu in dict.fromkeys(case.host.gpus):
        capability = capability_of(gpu)
        if capability is None or not libraries:
            continue
        if not any(library.source_files(capability) for library in libraries):
            yield Finding(
                code="gpu-without-code",
                breaks="run",
                seen=f"{gpu.name} is {capability}; the wheel has {', '.join(map(str, artifact.codes))}",
                why="CUDA error: no kernel image is available for execution on the device. A cubin runs on its own "
                "major version with the same or a higher minor; PTX (compute_NN) on anything newer.",
                mend=_rebuild(case, artifact, capability),
            )
            continue
        for library in libraries:
            without = library.source_files() - library.source_files(capability)
            if without:
                yield Finding(
                    code="gpu-in-part",
                    breaks=None,
                    seen=f"{library.name}: {without} of {library.source_files()} source files have no code for "
                    f"{gpu.name} ({capability})",
                    why="A kernel of those ends in 'no kernel image', unless the library never calls it on this GPU.",
                    mend=_rebuild(case, artifact, capability),
                )


def _driver(case: Case, artifact: Artifact) -> Iterator[Finding]:
    if case.host.driver is None or not case.host.gpus:
        return
    majors = [m for library in artifact.libraries if (m := library.cuda_major)]
    oldest = oldest_driver(f"{max(majors)}.0") if majors else None
    if oldest and is_older(case.host.driver, oldest):
        yield Finding(
            code="driver-too-old",
            breaks="run",
            seen=f"driver {case.host.driver}; its CUDA {max(majors)} needs {oldest} or newer",
            why="CUDA error: CUDA driver version is insufficient for CUDA runtime version.",
            mend=f"sudo apt-get install nvidia-driver-{oldest.split('.')[0]}  # and reboot",
        )
        return
    cubins = [code for code in artifact.codes if code.kind == "cubin"]
    for gpu in dict.fromkeys(case.host.gpus):
        capability = capability_of(gpu)
        if capability is None or any(runs_on(code, capability) for code in cubins):
            continue
        isas = [
            library.ptx_isa
            for library in artifact.libraries
            if library.ptx_isa and any(runs_on(code, capability) for code in library.codes)
        ]
        for isa in dict.fromkeys(isas):
            needed = driver_for_ptx(isa)
            if needed is None or is_older(case.host.driver, needed):
                yield Finding(
                    code="driver-too-old-for-ptx",
                    breaks="run",
                    seen=f"for {gpu.name} ({capability}) it has PTX {isa} alone, which driver {case.host.driver} can't "
                    f"compile: it takes {needed or 'a newer one'}",
                    why="CUDA error: the provided PTX was compiled with an unsupported toolchain.",
                    mend=_rebuild(case, artifact, capability),
                )


def _paths(artifact: Artifact) -> Iterator[Finding]:
    for library in artifact.libraries:
        foreign = [path for path in library.rpath if path.startswith("/")]
        if foreign:
            yield Finding(
                code="rpath",
                breaks=None,
                seen=f"{library.name} looks for libraries in {', '.join(foreign)} (RPATH)",
                why="Those are folders of the machine that built it. Where they exist here, it takes their libraries "
                "before torch's own.",
                mend=f"patchelf --remove-rpath {shlex.quote(library.name)}  # in the unpacked wheel",
            )


def _readings(artifact: Artifact) -> Iterator[Finding]:
    for library in artifact.libraries:
        if library.cuobjdump == "differs":
            yield Finding(
                code="cuobjdump-differs",
                breaks=None,
                seen=f"{library.name}: its headers say {', '.join(map(str, library.codes))}, cuobjdump says "
                f"{', '.join(library.cuobjdump_code) or 'nothing'}",
                why="One of the two reads this file wrongly, and pybuild has trusted the headers.",
                mend=f"cuobjdump -all {shlex.quote(library.name)}  # and report what it prints to pybuild",
            )
