"""What a wheel, or a compiled extension, needs of the machine: GPUs, torch, Python, CUDA and glibc."""

from __future__ import annotations

import contextlib
import mmap
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Literal

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.hash import GNUHashSection
from elftools.elf.sections import SymbolTableSection
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from pybuild.capability import Capability, Code, runs_on
from pybuild.errors import PybuildError
from pybuild.fatbin import SECTIONS, Entry, read_fatbins

_SHARED_OBJECT = re.compile(r"\.so(\.[0-9.]+)?$")
# Functions and objects of torch's own namespaces, and what libtorch_python.so gives away in C.
_OF_TORCH = re.compile(r"_Z(?:T[A-Z])?N?[KVRO]*(?:3c10|2at|5torch|6caffe2)\d|THP[A-Z]")
_VERSION_NEED = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)+)")
# flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE, flash_attn-2.8.3+pt2.10.0cu128, foo-1.0+torch2.7.cu126
_LOCAL_TORCH = re.compile(r"(?:torch|pt)(\d+\.\d+(?:\.\d+)?)")
_LOCAL_CUDA = re.compile(r"cu(\d+)")
_LOCAL_ABI = re.compile(r"cxx11abi(true|false)")
_CUDART = re.compile(r"libcudart(?:[.-][0-9a-f]+)?\.so\.(\d+)(?:\.\d+)*")
_MAX_VERSION_NEEDS = 4096


class Fatbins(BaseModel):
    """Fatbins with the same code in them, and how many there are: one for each CUDA source file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: tuple[str, ...]
    count: int


class Library(BaseModel):
    """One ELF file: a shared library of a wheel, or an object file.

    `fatbins` are its device code; those without any are left out. `ptx_isa` is the highest version of its PTX.
    `glibc`, `glibcxx` and `cxxabi` are the highest symbol versions it needs; `torch_symbols` those that it expects
    torch's libraries to define.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    machine: str
    fatbins: tuple[Fatbins, ...] = ()
    ptx_isa: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    glibc: str | None = None
    glibcxx: str | None = None
    cxxabi: str | None = None
    torch_symbols: tuple[str, ...] = ()
    cuobjdump: Literal["agrees", "differs", "failed", "not asked"] = "not asked"
    cuobjdump_code: tuple[str, ...] = ()

    @property
    def codes(self) -> tuple[Code, ...]:
        """The kinds of device code in it."""
        return tuple(sorted({Code.parse(code) for fatbins in self.fatbins for code in fatbins.code}))

    def source_files(self, gpu: Capability | None = None) -> int:
        """How many CUDA source files it was made of; with `gpu`, how many of them have code that runs there."""
        return sum(
            fatbins.count
            for fatbins in self.fatbins
            if gpu is None or any(runs_on(Code.parse(code), gpu) for code in fatbins.code)
        )

    @property
    def cxx11_abi(self) -> bool | None:
        """Whether it calls torch with libstdc++'s new strings; None where no symbol tells.

        torch's wheels use the new ones from 2.6 (cu126) and 2.7 (all) on.
        """
        if any("__cxx11" in s for s in self.torch_symbols):
            return True
        # std::string of the old ABI is mangled as Ss.
        return False if any(re.search(r"[KREPv]Ss", s) for s in self.torch_symbols) else None

    @property
    def cuda_major(self) -> int | None:
        """Major version of the CUDA runtime that it is linked with."""
        return next((int(m[1]) for n in self.needed if (m := _CUDART.fullmatch(n))), None)


class Artifact(BaseModel):
    """A wheel, or a single .so or .o, which then has no name, tags or version.

    `torch`, `cuda` and `cxx11_abi` are what the wheel's own name or metadata says it was built for (`cuda`
    as written there: "12", "12.8"); None where they say nothing. `python_tags`, `abi_tags` and
    `platform_tags` are those of the file name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    name: str | None = None
    version: str | None = None
    python_tags: tuple[str, ...] = ()
    abi_tags: tuple[str, ...] = ()
    platform_tags: tuple[str, ...] = ()
    torch: str | None = None
    cuda: str | None = None
    cxx11_abi: bool | None = None
    libraries: tuple[Library, ...] = ()

    @property
    def codes(self) -> tuple[Code, ...]:
        """The kinds of device code in all its libraries."""
        return tuple(sorted({code for library in self.libraries for code in library.codes}))

    @property
    def glibc(self) -> str | None:
        """The highest glibc symbol version that any of its libraries needs."""
        return _highest(library.glibc for library in self.libraries)

    @property
    def manylinux(self) -> str | None:
        """The lowest manylinux tag that its glibc symbols allow; None where it needs no glibc.

        No tag is below manylinux1's glibc 2.5 (PEP 513), nor on aarch64 below 2.17, its first.
        """
        if not self.glibc:
            return None
        machine = self.libraries[0].machine
        needed = max(Version(self.glibc), Version("2.17" if machine == "aarch64" else "2.5"))
        return f"manylinux_{needed.major}_{needed.minor}_{machine}"


def read_artifact(path: Path, cuobjdump: Path | None = None) -> Artifact:
    """Read a .whl, .so or .o. With `cuobjdump`, device code is read by that as well, and compared.

    Raises PybuildError where the file is missing, damaged, or none of the three.
    """
    try:
        if path.suffix == ".whl":
            return _read_wheel(path, cuobjdump)
        if path.suffix == ".o" or _SHARED_OBJECT.search(path.name):
            with path.open("rb") as file:
                library = read_library(file, path.name, path if cuobjdump else None, cuobjdump)
            return Artifact(path=str(path), libraries=(library,))
    except OSError as error:
        raise PybuildError(f"{path}: cannot be read: {error.strerror}", "Give the path of a wheel.") from error
    raise PybuildError(f"{path}: not a wheel", "Give a .whl, or a compiled extension (.so, .o).")


def read_unpacked(folder: Path, file_name: str) -> Artifact:
    """A wheel that uv unpacked into its cache: `folder`, and the file name that the wheel had.

    Raises PybuildError where a library in it is damaged or cannot be read.
    """
    artifact, _, _ = read_unpacked_header(folder, file_name)
    with _cache_errors(folder):
        libraries = []
        for path in _libraries_below(folder):
            with path.open("rb") as file:
                libraries.append(read_library(file, str(path.relative_to(folder))))
    return artifact.model_copy(update={"libraries": tuple(libraries)})


def read_unpacked_header(folder: Path, file_name: str) -> tuple[Artifact, list[str], int]:
    """Of such a folder what `read_header` says of a wheel."""
    with _cache_errors(folder):
        metadata = next(folder.glob("*.dist-info/METADATA"), None)
        requires = _requires(metadata.read_bytes()) if metadata else []
        size = sum(path.stat().st_size for path in _libraries_below(folder))
    return wheel_identity(file_name, requires).model_copy(update={"path": str(folder)}), requires, size


def _libraries_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.so*") if _SHARED_OBJECT.search(p.name) and p.is_file())


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PybuildError(f"{folder}: cannot be read: {error.strerror}", "Clear uv's cache: uv cache clean") from error


def _requires(metadata: bytes) -> list[str]:
    return list(parse_email(metadata)[0].get("requires_dist", []))


def wheel_identity(file_name: str, requires: Iterable[str] = ()) -> Artifact:
    """What the file name of a wheel says, and its metadata's Requires-Dist lines, without its contents.

    Raises PybuildError for a name that is not a wheel's.
    """
    try:
        name, version, _, tags = parse_wheel_filename(file_name)
    except InvalidWheelFilename as error:
        raise PybuildError(
            f"{file_name}: not a wheel's file name",
            "pip wants NAME-VERSION-PYTHON-ABI-PLATFORM.whl; give the file its own name back.",
        ) from error
    local = (version.local or "").lower()
    torch = _LOCAL_TORCH.search(local)
    cuda = _LOCAL_CUDA.search(local)
    abi = _LOCAL_ABI.search(local)
    return Artifact(
        path=file_name,
        name=name,
        version=str(version),
        python_tags=tuple(sorted({t.interpreter for t in tags})),
        abi_tags=tuple(sorted({t.abi for t in tags})),
        platform_tags=tuple(sorted({t.platform for t in tags})),
        torch=torch[1] if torch else _pinned_torch(requires),
        cuda=_dotted_cuda(cuda[1]) if cuda else None,
        cxx11_abi=(abi[1] == "true") if abi else None,
    )


def _dotted_cuda(digits: str) -> str:
    """cu12 is 12, cu128 is 12.8."""
    return digits if len(digits) < 3 else f"{digits[:-1]}.{digits[-1]}"


def _pinned_torch(requires: Iterable[str]) -> str | None:
    """The version in a Requires-Dist such as `torch==2.10.0`; None where torch is not pinned."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == "torch":
            for specifier in requirement.specifier:
                if specifier.operator in ("==", "==="):
                    return specifier.version.removesuffix(".*")
    return None


def read_header(path: Path) -> tuple[Artifact, list[str], int]:
    """Of a wheel: what its name and metadata say, its Requires-Dist lines, and the bytes of its libraries unpacked.

    Raises PybuildError where it is damaged, and reads no library.
    """
    with _zip_errors(path), zipfile.ZipFile(path) as wheel:
        artifact, requires = _identity(path, wheel)
        size = sum(m.file_size for m in wheel.infolist() if _SHARED_OBJECT.search(m.filename))
    return artifact, requires, size


def _read_wheel(path: Path, cuobjdump: Path | None) -> Artifact:
    with _zip_errors(path), zipfile.ZipFile(path) as wheel:
        artifact, _ = _identity(path, wheel)
        libraries = tuple(
            _read_member(wheel, member, cuobjdump)
            for member in wheel.infolist()
            if _SHARED_OBJECT.search(member.filename)
        )
    return artifact.model_copy(update={"libraries": libraries})


def _identity(path: Path, wheel: zipfile.ZipFile) -> tuple[Artifact, list[str]]:
    metadata = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    requires = _requires(wheel.read(metadata[0])) if metadata else []
    return wheel_identity(path.name, requires).model_copy(update={"path": str(path)}), requires


@contextlib.contextmanager
def _zip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PybuildError(
            f"{path}: a damaged wheel: {error}", "Download or build it again; `unzip -t` says the same."
        ) from error
    except OSError as error:
        raise PybuildError(f"{path}: cannot be read: {error.strerror}", "Give the path of a wheel.") from error


def _read_member(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, cuobjdump: Path | None) -> Library:
    # On disk, not in memory: a flash-attn for four architectures unpacks to most of a gigabyte.
    with wheel.open(member) as packed, tempfile.NamedTemporaryFile(suffix=".so") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
        unpacked.flush()
        return read_library(unpacked.file, member.filename, Path(unpacked.name), cuobjdump)


@contextlib.contextmanager
def _elf_errors(name: str) -> Iterator[None]:
    """Turns whatever pyelftools raises for a damaged file into one error of ours."""
    try:
        yield
    except (
        ELFError,
        struct.error,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise PybuildError(f"{name}: not a readable ELF file: {reason}", "Build it again.") from error


def read_library(file: IO[bytes], name: str, path: Path | None = None, cuobjdump: Path | None = None) -> Library:
    """Read one ELF file. `name` is what errors call it; `path`, where it lies, is for `cuobjdump` alone.

    Raises PybuildError where it is damaged.
    """
    with _elf_errors(name):
        elf = ELFFile(file)
        entries = list(_fatbins(file, elf))
        counts = Counter(tuple(sorted({e.code for e in fatbin})) for fatbin in entries if fatbin)
        isas = [e.version for fatbin in entries for e in fatbin if e.code.kind == "ptx"]
        dynamic = _dynamic(elf)
        versions = _version_needs(elf)
        library = Library(
            name=name,
            machine={"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"], str(elf["e_machine"])),
            fatbins=tuple(Fatbins(code=tuple(map(str, codes)), count=count) for codes, count in sorted(counts.items())),
            ptx_isa="{}.{}".format(*max(isas)) if isas else None,
            needed=dynamic["DT_NEEDED"],
            rpath=tuple(p for key in ("DT_RPATH", "DT_RUNPATH") for v in dynamic[key] for p in v.split(":")),
            glibc=_highest(versions["GLIBC"]),
            glibcxx=_highest(versions["GLIBCXX"]),
            cxxabi=_highest(versions["CXXABI"]),
            torch_symbols=tuple(sorted(_undefined_of_torch(elf))),
        )
    if cuobjdump is None or path is None or not library.fatbins:
        return library
    theirs = codes_by_cuobjdump(path, cuobjdump)
    if theirs is None:
        return library.model_copy(update={"cuobjdump": "failed"})
    agrees = theirs == tuple(map(str, library.codes))
    return library.model_copy(update={"cuobjdump": "agrees" if agrees else "differs", "cuobjdump_code": theirs})


def _fatbins(file: IO[bytes], elf: ELFFile) -> Iterator[tuple[Entry, ...]]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for section_name in SECTIONS:
            section = elf.get_section_by_name(section_name)
            if section is None:
                continue
            start, size = section["sh_offset"], section["sh_size"]
            if start + size > len(data):
                raise ValueError(f"its section {section_name} ends beyond the file")
            yield from read_fatbins(data, start, start + size)


def _dynamic(elf: ELFFile) -> dict[str, tuple[str, ...]]:
    """DT_NEEDED, DT_RPATH and DT_RUNPATH; empty for an object file."""
    found: dict[str, list[str]] = {"DT_NEEDED": [], "DT_RPATH": [], "DT_RUNPATH": []}
    attributes = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
    section = elf.get_section_by_name(".dynamic")
    if isinstance(section, DynamicSection):
        for tag in section.iter_tags():
            if tag.entry.d_tag in found:
                found[tag.entry.d_tag].append(getattr(tag, attributes[tag.entry.d_tag]))
    return {tag: tuple(values) for tag, values in found.items()}


def _version_needs(elf: ELFFile) -> dict[str, list[str]]:
    """The versions of glibc's and libstdc++'s symbols that it needs, by prefix."""
    needs: dict[str, list[str]] = {"GLIBC": [], "GLIBCXX": [], "CXXABI": []}
    section = elf.get_section_by_name(".gnu.version_r")
    if isinstance(section, GNUVerNeedSection):
        # A damaged count would make this four thousand million turns.
        for _, auxiliaries in islice(section.iter_versions(), _MAX_VERSION_NEEDS):
            for auxiliary in islice(auxiliaries, _MAX_VERSION_NEEDS):
                if match := _VERSION_NEED.fullmatch(auxiliary.name):
                    needs[match[1]].append(match[2])
    return needs


def _undefined_of_torch(elf: ELFFile) -> Iterator[str]:
    section = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
    if isinstance(section, SymbolTableSection):
        for symbol in section.iter_symbols():
            # A weak one may stay undefined.
            if (
                symbol.entry.st_shndx == "SHN_UNDEF"
                and symbol.entry.st_info.bind == "STB_GLOBAL"
                and _OF_TORCH.match(symbol.name)
            ):
                yield symbol.name


def missing_symbols(symbols: Iterable[str], libraries: Iterable[Path]) -> tuple[str, ...]:
    """Those of `symbols` that none of `libraries` defines, as the dynamic linker will find out at import.

    Looked up in the libraries' hash tables, so that libtorch_cuda.so's hundred thousand names are not read.
    Raises PybuildError where a library is damaged or cannot be read.
    """
    missing = set(symbols)
    for path in libraries:
        if not missing:
            break
        try:
            with path.open("rb") as file, _elf_errors(str(path)):
                table = ELFFile(file).get_section_by_name(".gnu.hash")
                if isinstance(table, GNUHashSection):
                    missing = {name for name in missing if not _defines(table, name)}
        except OSError as error:
            raise PybuildError(f"{path}: cannot be read: {error.strerror}", "Install torch again.") from error
    return tuple(sorted(missing))


def _defines(table: GNUHashSection, name: str) -> bool:
    symbol = table.get_symbol(name)
    return symbol is not None and symbol.entry.st_shndx != "SHN_UNDEF"


def codes_by_cuobjdump(path: Path, cuobjdump: Path) -> tuple[str, ...] | None:
    """The kinds of device code in a file, as cuobjdump prints them: sorted, each once.

    Its listing (--list-elf) drops the "f" of sm_100f, so the headers that it prints without that are read.
    None where it fails (13.2's refuses one library of bitsandbytes 0.50.2 that the driver loads), or takes
    more than two minutes.
    """
    try:
        # -all: relocatable code next to linked code, which the driver links for a GPU newer than the latter.
        run = subprocess.run(
            [cuobjdump, "-all", path],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    kinds = {"elf": "sm", "ptx": "compute", "nvvm": "lto"}
    found = re.findall(r"^Fatbin (elf|ptx|nvvm) code:\n=+\narch = sm_(\w+)$", run.stdout, re.MULTILINE)
    codes = {Code.parse(f"{kinds[kind]}_{architecture}") for kind, architecture in found}
    return tuple(str(code) for code in sorted(codes))


def _highest(versions: Iterable[str | None]) -> str | None:
    return max((v for v in versions if v), key=lambda v: [int(n) for n in v.split(".")], default=None)


def other_torch(artifact: Artifact, torch: str, torch_cuda: str | None) -> str | None:
    """What a wheel's name or metadata say that its torch or CUDA is, where that does not go with `torch`.

    A wheel for 2.8 or 2.8.0 goes with 2.8.1+cu128: torch keeps no ABI between minor versions, and keeps it between
    their patches. Of CUDA the major version counts, as it names the libraries.
    """
    if artifact.torch and artifact.torch.split(".")[:2] != torch.split("+")[0].split(".")[:2]:
        return f"it is for torch {artifact.torch}, and here is torch {torch}"
    if artifact.cuda and torch_cuda and artifact.cuda.split(".")[0] != torch_cuda.split(".")[0]:
        return f"it is for CUDA {artifact.cuda}, and torch {torch} here is for CUDA {torch_cuda}"
    return None


def plain_name(symbol: str) -> str:
    """`c10::detail::torchCheckFail (_ZN3c106...)`: a mangled name with those of its parts that are plain."""
    rest = re.sub(r"^_ZN?K?", "", symbol)
    names = []
    while match := re.match(r"[1-9]\d*", rest):
        end = match.end() + int(match[0])
        names.append(rest[match.end() : end])
        rest = rest[end:]
    return f"{'::'.join(names)} ({symbol})" if names else symbol
