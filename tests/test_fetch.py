from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from index_server import Fault, IndexServer, make_pin, serve
from rich.console import Console
from rich.progress import Progress

import pybuild.fetch
from pybuild.errors import BuildError
from pybuild.fetch import BarReporter, LineReporter, Reporter, fetch_files, store_path
from pybuild.index import Index, PipConfig, user_index
from pybuild.nix import Nix, fixed_path
from pybuild.nix import Store as NixStore
from pybuild.release import Pin

ROOT = Path(__file__).parent.parent
WHEEL = "demo_pkg-1.0-py3-none-any.whl"
CONTENT = random.Random(7).randbytes(3_000_000)
OTHER = random.Random(8).randbytes(3_000_000)
PIN = make_pin(WHEEL, CONTENT)
BLOCK = pybuild.fetch.CHUNK


class FakeStore:
    """A store in a folder, with nix's paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.added: list[str] = []

    def is_valid(self, paths: Iterable[str]) -> Mapping[str, bool]:
        return {path: (self.folder / Path(path).name).exists() for path in paths}

    def add_fixed(self, path: Path) -> str:
        content = path.read_bytes()
        added = fixed_path(path.name, hashlib.sha256(content).hexdigest())
        (self.folder / Path(added).name).write_bytes(content)
        self.added.append(path.name)
        return added

    def real_path(self, store_path: str) -> Path:
        return self.folder / Path(store_path).name


class Recorder:
    """Keeps what it is told, by file."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.finishes: list[str] = []

    def started(self, pin: Pin, have: int) -> None:
        self.starts.append(have)

    def advanced(self, pin: Pin, have: int) -> None:
        assert have <= pin.size or pin.file == WHEEL

    def finished(self, pin: Pin) -> None:
        self.finishes.append(pin.file)


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path / "store")


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with serve(IndexServer(files={WHEEL: CONTENT})) as index:
        yield index


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are tried again at once."""
    monkeypatch.setattr(pybuild.fetch, "BACKOFF", 0.001)


def fetch(store: FakeStore, *urls: str, pins: Iterable[Pin] = (PIN,), find_links: tuple[str, ...] = ()) -> Recorder:
    """Fetches `pins` from the indexes at `urls` into `store`, with the cache beside it."""
    recorder = Recorder()
    report: Reporter = recorder
    config = PipConfig(index_urls=urls, find_links=find_links, timeout=5)
    paths = fetch_files(
        pins,
        store,
        index=lambda: Index(config),
        report=lambda _: nullcontext(report),
        cache=store.folder.parent / "cache",
    )
    assert paths == [store_path(pin) for pin in pins]
    return recorder


def leftovers(store: FakeStore) -> dict[str, int]:
    """Names and sizes of what is in the cache, but for locks."""
    files = (store.folder.parent / "cache").rglob("*")
    return {file.name: file.stat().st_size for file in files if file.is_file() and file.name != "lock"}


@pytest.mark.parametrize("html", [False, True])
def test_every_pin_ends_in_the_store_and_nothing_in_the_cache(
    store: FakeStore, server: IndexServer, html: bool
) -> None:
    server.html = html
    names = [WHEEL, *(f"part{n}-{n}.0.tar.gz" for n in range(20))]
    server.files |= {name: name.encode() * 1000 for name in names[1:]}
    pins = [make_pin(name, server.files[name]) for name in names]
    recorder = fetch(store, server.url, pins=pins)
    assert {f.name: f.read_bytes() for f in store.folder.iterdir()} == {
        Path(store_path(pin)).name: server.files[pin.file] for pin in pins
    }
    assert sorted(recorder.finishes) == sorted(names)
    assert leftovers(store) == {}


def test_what_the_store_has_is_not_downloaded(store: FakeStore, server: IndexServer) -> None:
    fetch(store, server.url)
    server.files["new-1.tar.gz"] = b"new"
    server.requests.clear()
    fetch(store, server.url, pins=[PIN, make_pin("new-1.tar.gz", b"new")])
    assert [name for name, _ in server.requests] == ["new", "new-1.tar.gz"]


def test_no_index_is_needed_where_the_store_has_everything(store: FakeStore, server: IndexServer) -> None:
    fetch(store, server.url)

    def broken() -> Index:
        raise AssertionError("the index was asked for")

    assert fetch_files([PIN], store, index=broken) == [store_path(PIN)]


def test_another_file_than_the_pinned_one_is_refused(store: FakeStore, server: IndexServer) -> None:
    server.files[WHEEL] = OTHER
    server.declared[WHEEL] = PIN.sha256
    with pytest.raises(BuildError) as caught:
        fetch(store, server.url)
    message = str(caught.value)
    assert WHEEL in message
    assert PIN.sha256 in message
    assert hashlib.sha256(OTHER).hexdigest() in message
    assert "Nothing of it was kept" in message
    assert store.added == []
    assert set(leftovers(store).values()) <= {0}


def test_a_file_longer_than_pinned_is_cut_short(store: FakeStore, server: IndexServer) -> None:
    server.files[WHEEL] = CONTENT * 20
    server.declared[WHEEL] = None
    with pytest.raises(BuildError, match="not the pinned file"):
        fetch(store, server.url)
    assert server.sent < len(CONTENT) * 15
    assert store.added == []


def test_a_file_shorter_than_pinned_is_refused(store: FakeStore, server: IndexServer) -> None:
    server.files[WHEEL] = CONTENT[:1000]
    server.declared[WHEEL] = None
    with pytest.raises(BuildError, match="not the pinned file"):
        fetch(store, server.url)
    assert store.added == []


def test_an_index_that_declares_another_hash_is_not_downloaded_from(store: FakeStore, server: IndexServer) -> None:
    server.files[WHEEL] = OTHER
    with pytest.raises(BuildError, match="another file of this name") as caught:
        fetch(store, server.url)
    assert PIN.sha256 in str(caught.value)
    assert hashlib.sha256(OTHER).hexdigest() in str(caught.value)
    assert server.asked(WHEEL) == []


def test_a_project_that_no_index_has(store: FakeStore, server: IndexServer) -> None:
    with pytest.raises(BuildError, match=r"absent-1\.tar\.gz: no index has it") as caught:
        fetch(store, server.url, pins=[make_pin("absent-1.tar.gz", b"x")])
    assert f"127.0.0.1:{server.port}" in str(caught.value)


def test_a_version_that_the_index_lacks(store: FakeStore, server: IndexServer) -> None:
    with pytest.raises(BuildError, match="no index has it"):
        fetch(store, server.url, pins=[make_pin("demo_pkg-2.0-py3-none-any.whl", b"x")])


def test_a_file_that_its_page_promises_and_the_server_lacks(store: FakeStore, server: IndexServer) -> None:
    server.faults[WHEEL] = itertools.repeat(Fault(status=404))
    with pytest.raises(BuildError, match=rf"{WHEEL}: download failed\n  .*: HTTP 404 Not Found"):
        fetch(store, server.url)
    assert len(server.asked(WHEEL)) == 1


def test_a_server_in_trouble_is_asked_again(store: FakeStore, server: IndexServer) -> None:
    server.faults[WHEEL] = iter([Fault(status=503), Fault(status=500)])
    fetch(store, server.url)
    assert len(server.asked(WHEEL)) == 3


def test_a_refused_connection(store: FakeStore) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening, so it refuses
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/simple/"
        with pytest.raises(BuildError) as caught:
            fetch(store, url)
    message = str(caught.value)
    assert message.startswith(f"{WHEEL}: no index that answers has it\n  {url}: Connection refused")
    assert "PIP_INDEX_URL" in message
    assert "Traceback" not in message
    assert "\n\n" not in message


def test_a_second_index_stands_in_for_one_that_is_down(store: FakeStore, server: IndexServer) -> None:
    with serve(IndexServer(files={WHEEL: OTHER})) as wrong, serve(IndexServer()) as broken:
        broken.faults["demo-pkg"] = itertools.repeat(Fault(status=403))
        fetch(store, wrong.url, broken.url, server.url)
    assert store.added == [WHEEL]


def test_a_second_index_stands_in_for_one_with_a_wrong_file(store: FakeStore, server: IndexServer) -> None:
    with serve(IndexServer(files={WHEEL: OTHER}, declared={WHEEL: None})) as wrong:
        fetch(store, wrong.url, server.url)
    assert store.added == [WHEEL]


def test_a_cut_connection_goes_on_where_it_was(store: FakeStore, server: IndexServer) -> None:
    server.faults[WHEEL] = iter([Fault(cut_after=BLOCK * 15), Fault(cut_after=BLOCK * 5, no_length=True)])
    recorder = fetch(store, server.url)
    assert server.asked(WHEEL) == [None, f"bytes={BLOCK * 15}-", f"bytes={BLOCK * 20}-"]
    assert recorder.starts == [0, BLOCK * 15, BLOCK * 20]
    assert server.sent == len(CONTENT)


def test_the_next_run_goes_on_where_the_last_one_was(store: FakeStore, server: IndexServer) -> None:
    server.faults[WHEEL] = itertools.chain([Fault(cut_after=BLOCK * 15)], itertools.repeat(Fault(cut_after=0), 4))
    with pytest.raises(BuildError, match="download failed") as caught:
        fetch(store, server.url)
    assert "Run it again" in str(caught.value)
    assert store.added == []
    assert leftovers(store) == {WHEEL: BLOCK * 15}
    fetch(store, server.url)
    assert server.asked(WHEEL)[-1] == f"bytes={BLOCK * 15}-"
    assert leftovers(store) == {}


def test_a_server_that_cannot_resume_sends_all_again(store: FakeStore, server: IndexServer) -> None:
    server.faults[WHEEL] = iter([Fault(cut_after=BLOCK * 15), Fault(ignore_range=True)])
    fetch(store, server.url)
    assert server.sent == BLOCK * 15 + len(CONTENT)


@pytest.mark.parametrize("kept", [OTHER[:1000], OTHER, OTHER + CONTENT])
def test_a_wrong_part_of_an_earlier_run_is_thrown_away(store: FakeStore, server: IndexServer, kept: bytes) -> None:
    folder = store.folder.parent / "cache/downloads" / PIN.sha256[:16]
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(kept)
    fetch(store, server.url)
    assert server.asked(WHEEL)[-1] is None


def test_a_whole_download_of_an_earlier_run_needs_no_server(store: FakeStore, server: IndexServer) -> None:
    folder = store.folder.parent / "cache/downloads" / PIN.sha256[:16]
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(CONTENT)
    fetch(store, server.url)
    assert server.asked(WHEEL) == []


def test_one_failure_stops_the_other_downloads(store: FakeStore, server: IndexServer) -> None:
    server.files |= {f"slow{n}-1.tar.gz": b"slow" for n in range(4)}
    server.faults |= {f"slow{n}-1.tar.gz": itertools.repeat(Fault(silent=True)) for n in range(4)}
    pins = [make_pin(f"slow{n}-1.tar.gz", b"slow") for n in range(4)]
    started = time.monotonic()
    with pytest.raises(BuildError, match="absent"):
        fetch(store, server.url, pins=[*pins, make_pin("absent-1.tar.gz", b"x" * 9)])
    assert time.monotonic() - started < 10  # the server is silent for 30


def test_a_store_that_refuses_keeps_the_download(store: FakeStore, server: IndexServer) -> None:
    class Full(FakeStore):
        def add_fixed(self, path: Path) -> str:
            raise BuildError("adding to the store: No space left on device")

    full = Full(store.folder.parent / "full")
    with pytest.raises(BuildError, match="No space left on device"):
        fetch(full, server.url)
    assert leftovers(store) == {WHEEL: len(CONTENT)}


def test_two_at_once_download_each_file_once(store: FakeStore, server: IndexServer) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            fetch(store, server.url)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.added == [WHEEL]
    assert server.asked(WHEEL) == [None]


# Disks


def test_too_small_a_disk_is_named_before_anything_is_asked(store: FakeStore, server: IndexServer) -> None:
    with pytest.raises(BuildError, match=r"GiB free, and the downloads need \d{7}\.") as caught:
        fetch(store, server.url, pins=[PIN, Pin(file="huge-1.tar.gz", sha256="0" * 64, size=2**50)])
    assert str(store.folder) in str(caught.value)
    assert server.requests == []


def test_a_disk_that_fills_up(store: FakeStore, tmp_path: Path) -> None:
    # A file system of 2 MiB for the cache, in a mount namespace: for root, or where user namespaces are allowed.
    small = tmp_path / "small"
    small.mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / WHEEL).write_bytes(CONTENT)
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import pybuild.fetch, test_fetch
from pathlib import Path
pybuild.fetch._check_space = lambda *a: None
store = test_fetch.FakeStore(Path({str(small / "store")!r}))
try:
    test_fetch.fetch(store, find_links=({(tmp_path / "links").as_uri()!r},))
except test_fetch.BuildError as error:
    print(error)
print(test_fetch.leftovers(store), store.added)
"""
    mount = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*unshare, "sh", "-c", mount, str(small), "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system is not allowed here")
    done = subprocess.run(
        [*unshare, "sh", "-c", mount, str(small), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{WHEEL}: no space left in {small}/cache")
    assert done.stdout.endswith("{} []\n")


def test_a_cache_that_cannot_be_written_is_named(store: FakeStore, server: IndexServer) -> None:
    (store.folder.parent / "cache").write_text("in the way")
    with pytest.raises(BuildError, match="cache"):
        fetch(store, server.url)


# Other locations


def test_a_folder_of_files_is_an_index_too(store: FakeStore, tmp_path: Path) -> None:
    links = tmp_path / "with space"
    links.mkdir()
    (links / WHEEL).write_bytes(CONTENT)
    fetch(store, find_links=(links.as_uri(),))
    assert store.added == [WHEEL]


def test_a_wrong_file_in_a_folder(store: FakeStore, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(OTHER)
    with pytest.raises(BuildError, match="not the pinned file"):
        fetch(store, find_links=(tmp_path.as_uri(),))
    assert store.added == []


@pytest.mark.parametrize("fragment", ["", f"#sha256={PIN.sha256}"])
def test_an_index_on_disk(store: FakeStore, tmp_path: Path, fragment: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / WHEEL).write_bytes(CONTENT)
    (tmp_path / "simple/demo-pkg").mkdir(parents=True)
    (tmp_path / "simple/demo-pkg/index.html").write_text(
        f'<!DOCTYPE html><a href="../../files/{WHEEL}{fragment}">{WHEEL}</a>'
    )
    folder = store.folder.parent / "cache/downloads" / PIN.sha256[:16]
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(CONTENT[:100_000])  # resumed, as over HTTP
    fetch(store, (tmp_path / "simple").as_uri())
    assert store.added == [WHEEL]


def test_a_page_of_links(store: FakeStore, tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(CONTENT)
    (tmp_path / "links.html").write_text(f'<a href="{WHEEL}">x</a><a href="other-1.tar.gz">y</a>')
    fetch(store, find_links=((tmp_path / "links.html").as_uri(),))
    assert store.added == [WHEEL]


def test_a_folder_that_is_not_there_is_named(store: FakeStore, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"absent: HTTP 404 No such file"):
        fetch(store, find_links=((tmp_path / "absent").as_uri(),))


# Credentials


def test_a_password_is_used_and_never_shown(store: FakeStore, server: IndexServer) -> None:
    server.user = "me:s3cret"
    fetch(store, server.url)
    assert store.added == [WHEEL]
    shutil.rmtree(store.folder)
    store.folder.mkdir()
    server.faults[WHEEL] = itertools.repeat(Fault(status=404))
    with pytest.raises(BuildError) as caught:
        fetch(store, server.url)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(BuildError) as caught:
        fetch(store, server.url, pins=[make_pin("absent-1.tar.gz", b"x")])
    assert "s3cret" not in str(caught.value)


def test_a_missing_password_is_explained(store: FakeStore, server: IndexServer) -> None:
    server.user = "me:s3cret"
    with pytest.raises(BuildError, match="HTTP 401 Unauthorized: it wants a user and password"):
        fetch(store, f"http://127.0.0.1:{server.port}/simple/")


def test_a_password_in_netrc(
    store: FakeStore, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.user = "me:s3cret"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    fetch(store, f"http://127.0.0.1:{server.port}/simple/")
    assert store.added == [WHEEL]


def test_a_password_is_not_sent_to_another_host(store: FakeStore, server: IndexServer) -> None:
    with serve(IndexServer(files={WHEEL: CONTENT}, user="me:s3cret")) as front:
        front.faults[WHEEL] = itertools.repeat(Fault(redirect=f"http://127.0.0.1:{server.port}/files/{WHEEL}"))
        fetch(store, front.url)
    assert store.added == [WHEEL]
    assert server.authorizations == [None]


def test_the_index_is_the_one_of_pips_environment(
    store: FakeStore, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch_files([PIN], store, index=user_index) == [store_path(PIN)]
    assert server.asked(WHEEL) == [None]


# What people see


def test_without_a_terminal_there_is_a_line_for_each_file(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LineReporter([PIN], Console(stderr=True, force_terminal=False))
    reporter.started(PIN, 0)
    reporter.advanced(PIN, 1_048_576)
    reporter.started(PIN, 1_048_576)
    reporter.finished(PIN)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "downloading 1 files, 2.9 MiB",
        f"resuming {WHEEL} at 1.0 MiB",
        f"fetched {WHEEL} (2.9 MiB), 0 left, 0 s",
    ]


def test_bars_add_up_over_restarts() -> None:
    large = Pin(file="large-1.tar.gz", sha256="0" * 64, size=100 * 2**20)
    with Progress(console=Console(file=open(os.devnull, "w"))) as progress:  # noqa: PTH123
        reporter = BarReporter([large, PIN], progress)
        reporter.started(large, 10 * 2**20)
        reporter.advanced(large, 50 * 2**20)
        reporter.started(large, 0)  # all of it again
        reporter.advanced(large, 20 * 2**20)
        reporter.advanced(PIN, PIN.size)
        whole, bar = progress.tasks
        assert (whole.completed, whole.total) == (20 * 2**20 + PIN.size, large.size + PIN.size)
        assert (bar.completed, bar.total) == (20 * 2**20, large.size)
        reporter.finished(large)
        assert len(progress.tasks) == 1


def test_an_interrupt_ends_it_at_once_whatever_the_server_does(tmp_path: Path, server: IndexServer) -> None:
    server.faults[WHEEL] = itertools.repeat(Fault(silent=True))
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import test_fetch
from pathlib import Path
test_fetch.fetch(test_fetch.FakeStore(Path({str(tmp_path / "store")!r})), {server.url!r})
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not server.asked(WHEEL) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 10  # the server is silent for 30
    assert err.decode().rstrip().endswith("KeyboardInterrupt")


# The real store


@pytest.fixture
def real_store(tmp_path: Path) -> Nix:
    if not shutil.which("nix-store"):
        pytest.skip("no nix-store here")
    root = tmp_path / "root"
    options = ("--store", str(root), "--option", "build-users-group", "")
    nix = Nix(("nix",), ("nix-store",), (2, 8), NixStore("home", root, options), os.environ)
    try:
        nix.is_valid([store_path(PIN)])
    except BuildError as error:
        pytest.skip(f"no store in a folder here: {error.what}")
    return nix


def test_the_real_store_has_the_file_under_the_pins_path(real_store: Nix, server: IndexServer, tmp_path: Path) -> None:
    config = PipConfig(index_urls=(server.url,))
    (path,) = fetch_files([PIN], real_store, index=lambda: Index(config), cache=tmp_path / "cache")
    assert real_store.real_path(path).read_bytes() == CONTENT
    assert real_store.is_valid([path]) == {path: True}
    printed = subprocess.run(
        ["nix-store", "--print-fixed-path", "sha256", PIN.sha256, WHEEL], capture_output=True, text=True
    )
    assert printed.stdout.strip() == path


def test_a_fixed_output_derivation_of_the_pin_is_valid_already(
    real_store: Nix, server: IndexServer, tmp_path: Path
) -> None:
    config = PipConfig(index_urls=(server.url,))
    (path,) = fetch_files([PIN], real_store, index=lambda: Index(config), cache=tmp_path / "cache")
    expression = (
        f'derivation {{ name = "{WHEEL}"; system = builtins.currentSystem; builder = "/absent"; '
        f'outputHash = "{PIN.sha256}"; outputHashAlgo = "sha256"; outputHashMode = "flat"; }}'
    )
    argv = [*real_store.command("build", "--impure", "--offline", "--json", "--no-link", "--expr", expression)]
    assert path in real_store.run(argv, doing="building")


def test_the_real_store_stays_empty_after_a_wrong_file(real_store: Nix, server: IndexServer, tmp_path: Path) -> None:
    server.files[WHEEL] = OTHER
    server.declared[WHEEL] = None
    config = PipConfig(index_urls=(server.url,))
    with pytest.raises(BuildError):
        fetch_files([PIN], real_store, index=lambda: Index(config), cache=tmp_path / "cache")
    wrong = fixed_path(WHEEL, hashlib.sha256(OTHER).hexdigest())
    paths = [store_path(PIN), wrong]
    assert real_store.is_valid(paths) == dict.fromkeys(paths, False)
    assert not any(real_store.real_path(path).exists() for path in paths)
