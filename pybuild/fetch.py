"""Pinned files into nix's store, through the index that the user's pip is configured with."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import platformdirs
import requests
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pybuild.errors import BuildError
from pybuild.index import REMEDY, Index, explain, safe_url, user_index
from pybuild.nix import fixed_path
from pybuild.release import Pin
from pybuild.units import KIB, MIB, format_gib

JOBS = 6
"""Downloads at once. An index's own speed, not their number, is what limits from a few on."""

CHUNK = 64 * KIB
"""Bytes received at a time, and lost where the connection ends in the middle of them."""

BACKOFF = 0.1
"""Seconds before the second connection for a file; twice as long before each further one."""

MARGIN = 64 * MIB
"""Bytes left free on a disk beyond what the files take: nix's database and rounding to blocks."""


class Store(Protocol):
    """What fetching needs of nix's store; pybuild.nix.Nix is one."""

    def is_valid(self, paths: Iterable[str]) -> Mapping[str, bool]:
        """Whether the store has each of these store paths."""

    def add_fixed(self, path: Path) -> str:
        """Adds a file by its hash and name; its store path."""

    def real_path(self, store_path: str) -> Path:
        """Where a store path lies in this file system."""


def store_path(pin: Pin) -> str:
    """Where a store keeps `pin`, which its name and hash alone decide."""
    return fixed_path(pin.file, pin.sha256)


class Reporter(Protocol):
    """Is told how the downloads go, from several threads."""

    def started(self, pin: Pin, have: int) -> None:
        """A download begins; `have` bytes are there from an earlier try."""

    def advanced(self, pin: Pin, have: int) -> None:
        """`have` bytes of the file are there now."""

    def finished(self, pin: Pin) -> None:
        """The file is in the store."""


class LineReporter:
    """One line an event, for logs."""

    def __init__(self, pins: list[Pin], console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._left = len(pins)
        self._say(f"downloading {len(pins)} files, {format_gib(sum(p.size for p in pins))}")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def started(self, pin: Pin, have: int) -> None:
        if have:
            self._say(f"resuming {pin.file} at {format_gib(have)}")

    def advanced(self, pin: Pin, have: int) -> None:
        pass

    def finished(self, pin: Pin) -> None:
        seconds = time.monotonic() - self._start
        with self._lock:
            self._left -= 1
            self._say(f"fetched {pin.file} ({format_gib(pin.size)}), {self._left} left, {seconds:.0f} s")


class BarReporter:
    """A bar for the whole, and one for each large file on its way."""

    LARGE = 16 * MIB

    def __init__(self, pins: list[Pin], progress: Progress) -> None:
        self._progress = progress
        self._have: dict[Pin, int] = {}
        self._bars: dict[Pin, TaskID] = {}
        self._total = progress.add_task(f"{len(pins)} files", total=sum(p.size for p in pins))

    def started(self, pin: Pin, have: int) -> None:
        if pin.size >= self.LARGE and pin not in self._bars:
            self._bars[pin] = self._progress.add_task(pin.file.split("-")[0], total=pin.size, completed=have)
        self.advanced(pin, have)

    def advanced(self, pin: Pin, have: int) -> None:
        self._progress.advance(self._total, have - self._have.get(pin, 0))
        self._have[pin] = have
        if pin in self._bars:
            self._progress.update(self._bars[pin], completed=have)

    def finished(self, pin: Pin) -> None:
        if pin in self._bars:
            self._progress.remove_task(self._bars.pop(pin))


@contextmanager
def reporter(pins: list[Pin]) -> Iterator[Reporter]:
    """Bars on standard error where it is a terminal, else lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LineReporter(pins, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield BarReporter(pins, progress)


def cache_folder() -> Path:
    """Where partial downloads and the garbage collector's links are: pybuild's folder in the user's cache."""
    return platformdirs.user_cache_path("pybuild")


def fetch_files(
    pins: Iterable[Pin],
    store: Store,
    *,
    index: Callable[[], Index] = user_index,
    report: Callable[[list[Pin]], AbstractContextManager[Reporter]] = reporter,
    cache: Path | None = None,
    jobs: int = JOBS,
) -> list[str]:
    """Brings every pin into the store; returns their store paths, in the order of `pins`.

    What the store holds already is not downloaded, and where it holds all, no index is asked. Raises
    BuildError for the first file that fails: nothing of that file is in the store then, and the part of it
    that arrived waits in `cache` for the next try, unless its hash was wrong or the disk was full.
    """
    wanted = {pin: store_path(pin) for pin in pins}
    valid = store.is_valid(wanted.values())
    missing = [pin for pin, path in wanted.items() if not valid[path]]
    if missing:
        folder = (cache or cache_folder()) / "downloads"
        _check_space(missing, folder, store, jobs)
        places = index()
        with report(missing) as progress:
            _fetch_all(missing, _Fetcher(store, places, folder, progress), jobs)
    return list(wanted.values())


def _fetch_all(pins: list[Pin], fetcher: _Fetcher, jobs: int) -> None:
    """Runs `fetcher` over `pins`, the largest first, `jobs` at once; raises the first error."""
    todo: queue.SimpleQueue[Pin] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for pin in sorted(pins, key=lambda p: -p.size):
        todo.put(pin)

    def work() -> None:
        while not fetcher.stop.is_set():
            try:
                pin = todo.get_nowait()
            except queue.Empty:
                return
            try:
                fetcher.fetch(pin)
                done.put(None)
            except BaseException as error:
                done.put(error)

    # Daemons, because Ctrl-C must not wait for a silent server: a download may be cut anywhere.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(pins)))]
    for thread in threads:
        thread.start()
    try:
        for _ in pins:
            if error := done.get():
                raise error
    finally:
        fetcher.stop.set()
        deadline = time.monotonic() + 2
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Stopped(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class _Failed(Exception):
    """One address did not give the file; why, in a line."""


class _WrongFile(_Failed):
    """One address gave another file than the pinned one."""


class _Part:
    """What there is of a file, and its hash so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        file.seek(0)
        while chunk := file.read(CHUNK):
            self._hash.update(chunk)
            self.size += len(chunk)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0


class _Fetcher:
    """Downloads single files into `folder`, checks them, and adds them to the store."""

    ATTEMPTS = 4
    """Connections in a row that bring nothing before an address is given up."""

    def __init__(self, store: Store, index: Index, folder: Path, progress: Reporter) -> None:
        self.stop = threading.Event()
        self._store = store
        self._index = index
        self._folder = folder
        self._progress = progress

    def fetch(self, pin: Pin) -> None:
        """Brings `pin` into the store. Raises BuildError; leaves at most a partial download."""
        # nix names a store path after the file, so what keeps two pins of one name apart is the folder.
        folder = self._folder / pin.sha256[:16]
        path = store_path(pin)
        try:
            with _locked(folder, self.stop) as waited:
                # Where another pybuild held the lock, it has most likely brought the file.
                if not (waited and self._store.is_valid([path])[path]):
                    self._download(pin, folder / pin.file)
                    added = self._store.add_fixed(folder / pin.file)
                    if added != path:
                        raise BuildError(
                            f"{pin.file}: the store has it as {added}, not as {path}",
                            "Something changed the file while it was added. Run it again.",
                        )
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                shutil.rmtree(folder, ignore_errors=True)
                raise _no_space(pin.file, self._folder) from error
            raise BuildError(
                f"{error.filename or folder}: {error.strerror}", "Downloads go through this folder."
            ) from error
        self._progress.finished(pin)

    def _download(self, pin: Pin, file: Path) -> None:
        """Leaves all of `pin` in `file`, from the first address that has it."""
        urls = self._addresses(pin)
        failures: list[str] = []
        remedy = f"Run it again: it goes on where it was. {REMEDY}"
        with file.open("a+b") as handle:
            part = _Part(handle)
            for url in urls:
                try:
                    self._download_from(url, pin, part)
                    return
                except _Failed as failure:
                    failures.append(f"  {safe_url(url)}: {failure}")
                    if isinstance(failure, _WrongFile):
                        remedy = f"Nothing of it was kept. {REMEDY}"
        raise BuildError("\n".join([f"{pin.file}: download failed", *failures]), remedy)

    def _addresses(self, pin: Pin) -> list[str]:
        """Where the index says that the pinned file is. Raises BuildError where it knows of none."""
        listing = self._index.listing(pin.project)
        named = {p.url: p.digests.get("sha256") for p in listing.files if p.filename == pin.file}
        if urls := [url for url, sha256 in named.items() if sha256 in (pin.sha256, None)]:
            return urls
        if named:
            others = [f"  {safe_url(url)}: sha256 {sha256}" for url, sha256 in named.items()]
            what = f"{pin.file}: the index has another file of this name; pinned is sha256 {pin.sha256}"
            raise BuildError("\n".join([what, *others]), f"Nothing of it was downloaded. {REMEDY}")
        if listing.failures:
            failures = [f"  {failure}" for failure in listing.failures]
            raise BuildError("\n".join([f"{pin.file}: no index that answers has it", *failures]), REMEDY)
        asked = [f"  {location}" for location in self._index.locations]
        raise BuildError("\n".join([f"{pin.file}: no index has it; asked were", *asked]), REMEDY)

    def _download_from(self, url: str, pin: Pin, part: _Part) -> None:
        """Completes `part`, going on after cut connections. Raises _Failed."""
        inherited = part.size > 0
        attempt = 0
        while True:
            before = part.size
            self._progress.started(pin, before)
            reason = self._receive(url, pin, part) if before < pin.size else None
            if reason is None:
                if part.sha256 == pin.sha256:
                    return
                found = f"not the pinned file: sha256 {part.sha256}, pinned {pin.sha256}"
                part.clear()
                if not inherited:
                    raise _WrongFile(found)
                # The wrong bytes may be those of an earlier try: once more, all of it.
                inherited = False
                continue
            # A connection that brought something is worth another.
            attempt = 1 if part.size > before else attempt + 1
            if attempt == self.ATTEMPTS:
                raise _Failed(reason)
            if self.stop.wait(BACKOFF * 2**attempt):
                raise _Stopped

    def _receive(self, url: str, pin: Pin, part: _Part) -> str | None:
        """Appends what `url` has from there on; None at its end, else why it stopped short of that."""
        try:
            with self._index.open(url, start=part.size) as response:
                if response.status_code != 206:
                    part.clear()
                for chunk in response.iter_content(CHUNK):
                    if self.stop.is_set():
                        raise _Stopped
                    part.append(chunk)
                    self._progress.advanced(pin, part.size)
                    if part.size > pin.size:
                        return None
        except requests.HTTPError as error:
            if part.size and error.response is not None and error.response.status_code == 416:
                return None
            raise _Failed(explain(error)) from error
        except requests.RequestException as error:
            return explain(error)
        return None if part.size == pin.size else f"ended after {part.size} of {pin.size} bytes"


@contextmanager
def _locked(folder: Path, stop: threading.Event) -> Iterator[bool]:
    """Makes `folder` and holds it against other pybuilds; yields whether it had to wait for one.

    The folder may be removed inside.
    """
    waited = False
    while True:
        handle = _try_lock(folder)
        if handle:
            with handle:
                yield waited
            return
        waited = True
        if stop.wait(0.1):
            raise _Stopped


def _try_lock(folder: Path) -> BinaryIO | None:
    """An open file that locks `folder` until it is closed; None where another process has it."""
    # Who has the lock may remove the folder at any moment, and with it the file that this is a lock on.
    with suppress(FileNotFoundError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        handle = lock.open("wb")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle.fileno()).st_ino == lock.stat().st_ino:
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        handle.close()
    return None


def _check_space(pins: list[Pin], folder: Path, store: Store, jobs: int) -> None:
    """Raises BuildError where the files can't fit.

    The store takes all of them, `folder` those that are on their way at one time.
    """
    passing = sum(sorted((pin.size for pin in pins), reverse=True)[:jobs])
    needs = [
        (_existing(store.real_path(store_path(pins[0])).parent), sum(pin.size for pin in pins)),
        (_existing(folder), passing),
    ]
    disks: dict[int, tuple[Path, int]] = {}
    for path, size in needs:
        first, so_far = disks.get(path.stat().st_dev, (path, MARGIN))
        disks[path.stat().st_dev] = (first, so_far + size)
    for path, size in disks.values():
        free = shutil.disk_usage(path).free
        if free < size:
            raise BuildError(
                f"{path}: {format_gib(free)} free, and the downloads need {format_gib(size)}",
                "Nothing was downloaded. `nix-collect-garbage` frees what no build needs; XDG_CACHE_HOME "
                "says where partial downloads are.",
            )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _no_space(file: str, folder: Path) -> BuildError:
    return BuildError(
        f"{file}: no space left in {folder}",
        "The part that had arrived was thrown away. Free some space, or set XDG_CACHE_HOME to a larger disk.",
    )
