"""Finding nix, its stores and command lines: with stand-ins for every machine, and with the real nix here."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybuild import nix as nix_module
from pybuild.errors import BuildError, PybuildError
from pybuild.nix import (
    OLDEST,
    Nix,
    Store,
    derivation_name,
    explain_refusal,
    find_nix,
    fixed_path,
    outputs,
    shell_line,
)
from pybuild.nixlog import BuildLog
from pybuild.units import GIB

FAKES = Path(__file__).parent / "fakes"
LOGS = FAKES / "nix-logs"
HOST_PATHS = [path for path in ("/bin", "/lib", "/lib64", "/usr") if Path(path).exists()]

# Never built: the store that command lines are made for.
LOCAL = Nix(("nix",), ("nix-store",), (2, 8, 0), Store("local", options=("--store", "local")), {})

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


# Command lines


def test_a_build_with_paths_of_this_machine_needs_no_network_and_no_other_machine() -> None:
    argv = LOCAL.build_argv(
        "path:/p", "flash-attn", cores=8, overrides={"nixpkgs": Path("/h")}, sandbox_paths=["/usr", "/lib"]
    )
    assert argv[:3] == ["nix", "build", "path:/p#flash-attn"]
    line = shell_line(argv)
    for words in (
        "--extra-experimental-features 'nix-command flakes'",
        "--store local",
        "--no-write-lock-file",
        "--override-input nixpkgs path:/h",
        "--option sandbox true",
        "--option sandbox-fallback false",
        "--option sandbox-paths '/usr /lib'",
        "--option builders ''",
        "--offline",
        "--max-jobs 1 --cores 8",
        "--json",
        "--no-link",
    ):
        assert f" {words}" in line


def test_a_build_from_nixpkgs_may_use_caches_and_waits_for_none() -> None:
    line = shell_line(LOCAL.build_argv("path:/p", "flash-attn", cores=8, max_jobs=2, out_link=Path("/o")))
    assert "--option connect-timeout 3 --option download-attempts 3" in line
    assert "--option sandbox true" in line
    assert "--out-link /o" in line
    assert not re.search(r"--offline|sandbox-paths|builders|--no-link", line)


def test_the_end_of_a_line_is_the_callers() -> None:
    argv = LOCAL.flake_argv("develop", "path:/p#default", sandbox_paths=["/usr"], extra=["-c", "nvcc", "--version"])
    assert argv[1:3] == ["develop", "path:/p#default"]
    assert argv[-3:] == ["-c", "nvcc", "--version"]


@pytest.mark.parametrize("path", ["/home/a b/python", "/opt/x=y", "/opt/really?", "/opt/two\nlines"])
def test_a_path_that_the_sandboxs_setting_cannot_hold(path: str) -> None:
    with pytest.raises(PybuildError, match="sandbox can't be given") as caught:
        LOCAL.build_argv("path:/p", "flash-attn", cores=1, sandbox_paths=["/usr", path])
    assert repr(path) in caught.value.what and caught.value.exit_status == 2


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_a_line_reads_back_as_its_words(words: list[str]) -> None:
    assert shlex.split(shell_line(words)) == words


def test_a_shell_reads_a_line_as_its_words() -> None:
    words = ["printf", "%s\\n", "a b", "", "$HOME", "'", '"', "`id`", "!x", "~", "*", "a\\b", "#c"]
    printed = subprocess.run(["sh", "-c", shell_line(words)], capture_output=True, text=True, check=True).stdout
    assert printed.split("\n") == [*words[2:], ""]


def test_outputs_of_nix_2_8_and_2_26() -> None:
    old = '[{"drvPath":"/nix/store/x.drv","outputs":{"out":"/nix/store/x","dist":"/nix/store/y"}}]\n'
    new = '[{"drvPath":"/nix/store/x.drv","outputs":{"out":"/nix/store/x"},"startTime":1,"stopTime":2}]'
    assert outputs(old) == {"out": "/nix/store/x", "dist": "/nix/store/y"}
    assert outputs(new) == {"out": "/nix/store/x"}


def test_derivation_name() -> None:
    path = "/nix/store/f0136g06ipxs1k93ini0axq5v0218655-flash-attn-2.8.3.drv"
    assert derivation_name(path) == "flash-attn-2.8.3"


def test_the_store_path_of_a_file() -> None:
    # printf 'x\n' > x.txt; nix-store --add-fixed sha256 x.txt, with nix 2.8.0.
    digest = "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    assert fixed_path("x.txt", digest) == "/nix/store/pna4wpymj8pkzlhr0yi5bv5ga6ijh7sg-x.txt"


# Finding nix, with stand-ins


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_nix(folder: Path, *, version: str = "nix (Nix) 2.8.0", works: str = "*", says: str = "no") -> Path:
    """A nix that builds in a store whose --store matches the shell pattern `works`, and says `says` in others."""
    script(folder, "nix-store", "exit 0")
    error = json.dumps({"action": "msg", "level": 0, "msg": f"error: {says}", "raw_msg": says})
    return script(
        folder,
        "nix",
        f"""
        if [ "$1" = --version ]; then echo '{version}'; exit; fi
        case " $* " in *" --store "{works}" "*) exit 0;; esac
        printf '%s\\n' {shlex.quote("@nix " + error)} >&2
        exit 1
        """,
    )


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing on PATH, a home of its own, and no daemon."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    return {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path / "home"),
        "NIX_DAEMON_SOCKET_PATH": str(tmp_path / "no-daemon"),
    }


@pytest.fixture
def with_daemon(bare: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same, and a socket that takes connections."""
    # A socket's path has at most 107 bytes: not in tmp_path, whose length is not ours.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        yield {**bare, "NIX_DAEMON_SOCKET_PATH": f"{folder}/socket"}


def test_no_nix(bare: dict[str, str]) -> None:
    with pytest.raises(PybuildError, match="neither nix nor nix-portable is on PATH") as caught:
        find_nix(None, bare)
    assert caught.value.exit_status == 2
    assert "nix-bin" in caught.value.remedy and "nix-portable" in caught.value.remedy


def test_a_nix_that_is_not_there(bare: dict[str, str]) -> None:
    with pytest.raises(PybuildError, match="--nix /nowhere/nix: no such program"):
        find_nix("/nowhere/nix", bare)


@pytest.mark.parametrize("version", ["nix (Nix) 2.3.16", "nix (Nix) 2.7.0", "nix (Nix) 1.11.16"])
def test_a_nix_that_is_too_old(bare: dict[str, str], tmp_path: Path, version: str) -> None:
    fake_nix(tmp_path / "bin", version=version)
    with pytest.raises(PybuildError, match=rf"version {version.split()[-1]}; pybuild needs 2\.8"):
        find_nix(None, bare)


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("nix (Nix) 2.8.0", (2, 8, 0)),
        ("nix (Nix) 2.18.1", (2, 18, 1)),
        ("nix (Nix) 2.30.0pre20250521_76a4d4c", (2, 30, 0)),
        ("nix (Lix, like Nix) 2.91.1", (2, 91, 1)),
        ("nix (Determinate Nix 3.6.2) 2.29.0", (2, 29, 0)),
    ],
)
def test_versions_that_nix_prints(bare: dict[str, str], tmp_path: Path, printed: str, version: tuple[int, ...]) -> None:
    fake_nix(tmp_path / "bin", version=printed)
    assert find_nix(None, bare).version == version > OLDEST


def test_a_nix_that_does_not_run(bare: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path / "bin", "nix-store", "exit 0")
    script(tmp_path / "bin", "nix", "echo 'nix: libboost.so.1: no such file' >&2; exit 127")
    with pytest.raises(PybuildError, match=r"nix --version failed: nix: libboost\.so\.1: no such file"):
        find_nix(None, bare)


def test_a_nix_that_is_no_program(bare: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path / "bin", "nix-store", "exit 0")
    (tmp_path / "bin/nix").write_bytes(b"\x7fELF not really")
    (tmp_path / "bin/nix").chmod(0o755)
    with pytest.raises(PybuildError, match="nix can't be run: Exec format error"):
        find_nix(None, bare)


def test_nix_comes_before_nix_portable_and_the_users_word_before_both(bare: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin")
    script(tmp_path / "bin", "nix-portable", "exit 1")
    mine = fake_nix(tmp_path / "opt/bin")
    assert find_nix(None, bare).nix == ("nix",)
    found = find_nix(str(mine), bare)
    assert (found.nix, found.nix_store) == ((str(mine),), (str(mine.with_name("nix-store")),))


def test_a_relative_nix_stays_the_same_one_elsewhere(
    bare: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nix(tmp_path / "opt")
    monkeypatch.chdir(tmp_path)
    assert find_nix("opt/nix", bare).nix == (str(tmp_path / "opt/nix"),)


def test_no_rights_and_no_daemon_is_a_store_at_home(bare: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin", works="/*")
    store = find_nix(None, bare).store
    assert (store.where, store.root) == ("home", tmp_path / "home/.local/share/pybuild/nix")
    assert store.options[:2] == ("--store", str(store.root))
    store = find_nix(None, {**bare, "XDG_DATA_HOME": str(tmp_path / "data")}).store
    assert store.root == tmp_path / "data/pybuild/nix"
    store = find_nix(None, {**bare, "XDG_DATA_HOME": "relative"}).store
    assert store.root == tmp_path / "home/.local/share/pybuild/nix"


def test_a_daemon_that_trusts_comes_before_home(with_daemon: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin", works="[d/]*")
    assert find_nix(None, with_daemon).store == Store("daemon", options=("--store", "daemon"))


def test_a_daemon_that_does_not_trust_serves_nixpkgs(with_daemon: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin", works="/*")
    assert find_nix(None, with_daemon).store.where == "home"
    assert find_nix(None, with_daemon, host_paths=False).store.where == "daemon"


def test_no_store_at_all_names_every_setting(with_daemon: dict[str, str], tmp_path: Path) -> None:
    said = "cannot perform a sandboxed build because user namespaces are not enabled; check /proc/x"
    fake_nix(tmp_path / "bin", works="nothing", says=said)
    with pytest.raises(PybuildError, match="no store here that it can build in") as caught:
        find_nix(None, with_daemon)
    assert caught.value.exit_status == 2
    assert "nix's daemon: " in caught.value.what
    assert f"a store in {tmp_path}/home/.local/share/pybuild/nix: no sandbox (cannot" in caught.value.what
    assert "Allow user namespaces" in caught.value.remedy


def test_no_home(bare: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin", works="nothing")
    del bare["HOME"]
    with pytest.raises(PybuildError, match="HOME is not set"):
        find_nix(None, bare)


def test_a_home_whose_name_nix_would_misread(bare: dict[str, str], tmp_path: Path) -> None:
    fake_nix(tmp_path / "bin", works="/*")
    with pytest.raises(PybuildError, match="Set XDG_DATA_HOME to a folder without them"):
        find_nix(None, {**bare, "HOME": "/nowhere/really?"})


HOME_STORE = Store("home", Path("/h"))


def refusal(store: Store, error: str) -> nix_module.Refusal:
    log = BuildLog()
    log.feed(f"error: {error}")
    return explain_refusal(store, log)


@pytest.mark.parametrize(
    "error",
    [
        # nix 2.8 as root, 2.8 as a user, 2.26, where user.max_user_namespaces is 0; 2.8 without CAP_SETGID.
        "cannot perform a sandboxed build because user namespaces are not enabled; check /proc/sys/user/...",
        "cloning builder process: Operation not permitted",
        "this system does not support the kernel namespaces that are required for sandboxing; use '--no-sandbox'",
        "setgroups failed: Operation not permitted",
    ],
)
@pytest.mark.parametrize(
    ("file", "value", "setting"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("none", "", "--privileged"),
    ],
)
def test_the_setting_that_keeps_the_sandbox_away(
    monkeypatch: pytest.MonkeyPatch, error: str, file: str, value: str, setting: str
) -> None:
    monkeypatch.setattr(nix_module, "_read", lambda path: value if path == f"/proc/sys/{file}" else "")
    found = refusal(HOME_STORE, error)
    assert found.what.startswith("a store in /h: no sandbox (")
    assert setting in found.remedy
    assert "--no-sandbox" not in found.what


def test_what_a_daemon_without_trust_is_told() -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    found = refusal(Store("daemon"), "builder for '/nix/store/x-pybuild-probe.drv' failed with exit code 1;")
    assert f"doesn't trust {user}" in found.what
    assert f"'trusted-users = root {user}'" in found.remedy and "/etc/nix/nix.conf" in found.remedy


def test_a_store_that_cannot_be_written() -> None:
    found = refusal(HOME_STORE, "creating directory '/h/nix/store': Permission denied")
    assert found.what == "a store in /h: creating directory '/h/nix/store': Permission denied"
    assert "may write /h/nix" in found.remedy


# Failures


def failure(what: str) -> BuildError:
    log = BuildLog()
    for line in (LOGS / what).read_text().splitlines():
        log.feed(line)
    return LOCAL.explain_failure(log, doing="building flash-attn")


@pytest.mark.parametrize("version", ["2.8", "2.26"])
@pytest.mark.parametrize(
    ("what", "message", "remedy"),
    [
        ("throw", "g++ 15.1 is newer than CUDA 13.0 accepts", ""),
        ("attribute", "attribute 'nothing' missing (at sub/default.nix:9)", ""),
        ("hash-mismatch", "got:    sha256-mOpuTyFvL7S2n/", "not the one that was pinned"),
        ("compiler-killed", "  nvcc error   : 'cicc' died due to signal 9", "recommend-cores"),
        ("builder-killed", "slow-1: failed due to signal 9 (Killed)", "recommend-cores"),
        ("no-network", "unable to download 'http://127.0.0.1:9/x.whl'", "network"),
    ],
)
def test_failures_are_readable(version: str, what: str, message: str, remedy: str) -> None:
    error = failure(f"{version}-{what}.json")
    assert error.exit_status == 1
    assert message in error.what
    assert remedy in error.remedy
    assert "@nix" not in str(error) and "\x1b" not in str(error)


@pytest.mark.parametrize("version", ["2.8", "2.26"])
def test_a_failing_builder_comes_with_the_line_that_shows_all_of_its_log(version: str) -> None:
    remedy = failure(f"{version}-compiler-killed.json").remedy
    line = remedy.partition("All of its log: ")[2]
    drv = "/nix/store/f0136g06ipxs1k93ini0axq5v0218655-oom.drv"
    assert shlex.split(line)[:3] == ["nix", "log", drv]
    # The caches are asked first, else, and waited for.
    assert "--option substituters ''" in line


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("error: writing to file: No space left on device", "disk is full"),
        ("error: executing SQLite statement 'pragma synchronous = normal': disk I/O error", "disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "recommend-cores"),
        ("virtual memory exhausted: Cannot allocate memory", "recommend-cores"),
        ("error: cloning builder process: Operation not permitted", "user namespaces"),
        ("error: unable to download 'https://x/y': Could not resolve host: x", "network"),
        ("flash.h:12:10: fatal error: cutlass/cutlass.h: No such file or directory", "header is missing"),
        ('flash_fwd.cu(48): error: identifier "x" is undefined', "refuses this source"),
        ("ptxas fatal   : Value 'sm_999' is not defined for option 'gpu-name'", "refuses this source"),
    ],
)
def test_known_causes(said: str, remedy: str) -> None:
    log = BuildLog()
    log.feed('@nix {"action":"start","fields":["/nix/store/x.drv","",1,1],"id":7,"level":3,"text":"","type":105}')
    log.feed("@nix " + json.dumps({"action": "result", "fields": [said], "id": 7, "type": 101}))
    log.feed("error: builder for '/nix/store/x.drv' failed with exit code 1")
    assert remedy in LOCAL.explain_failure(log).remedy


def test_ignored_sandbox_paths_are_a_matter_of_trust() -> None:
    log = BuildLog()
    log.feed(
        "warning: ignoring the client-specified setting 'sandbox-paths', because it is a restricted setting "
        "and you are not a trusted user"
    )
    log.feed("error: executing '/bin/sh': No such file or directory")
    assert "trusted-users in /etc/nix/nix.conf" in LOCAL.explain_failure(log).remedy


def test_an_unknown_failure_has_no_made_up_cause() -> None:
    log = BuildLog()
    log.feed('@nix {"action":"start","fields":["/nix/store/x.drv","",1,1],"id":7,"level":3,"text":"","type":105}')
    log.feed('@nix {"action":"result","fields":["the moon is in the wrong place"],"id":7,"type":101}')
    log.feed("error: builder for '/nix/store/x.drv' failed with exit code 1")
    assert LOCAL.explain_failure(log).remedy.splitlines()[0].startswith("All of its log: ")


def test_a_nix_that_ends_without_a_word() -> None:
    assert str(LOCAL.explain_failure(BuildLog(), doing="building x")) == "building x: it ended without a word"


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Nix(("nix",), ("nix-store",), (2, 8), Store("home", tmp_path / "not/yet"), {})
    usage = shutil.disk_usage(tmp_path)
    assert abs(here.store_free_bytes() - usage.free) < GIB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(19.5 * GIB)))
    with pytest.raises(PybuildError, match=r"only 19\.5 GiB free for the store .* needs 20\.0 GiB") as caught:
        here.require_free()
    assert caught.value.exit_status == 2 and "nix-store --gc" in caught.value.remedy
    here.require_free(19 * GIB)


# The real nix

# How long the builders that are to be ended would sleep: a number that no other process has.
SECONDS = f"4321.{os.getpid()}"

FLAKE = """
{
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";
  outputs = { self, nixpkgs }: {
    packages.x86_64-linux =
      let
        run = name: text: derivation {
          inherit name;
          system = "x86_64-linux";
          builder = "/bin/sh";
          args = [ "-c" text ];
          PATH = "/usr/bin:/bin";
        };
      in
      {
        hello = run "hello" "echo ${nixpkgs.greeting} > $out";
        failing = run "failing" "i=0; while [ $i -lt 30 ]; do i=$((i+1)); echo line $i; done; exit 3";
        slow = run "slow" "sleep @SECONDS@ & echo sleeping; sleep @SECONDS@";
        looks = run "looks" ''
          {
            if [ -e /etc/hostname ]; then echo host; else echo sandbox; fi
            cat /proc/net/dev | grep -c :
          } > $out
        '';
      };
  };
}
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A flake, and beside it a package set that takes nixpkgs' place; readable for other users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part, text in (
            ("project", FLAKE),
            ("hostpkgs", '{ outputs = { self }: { greeting = "hello"; }; }'),
        ):
            (folder / part).mkdir(mode=0o755)
            (folder / part / "flake.nix").write_text(text.replace("@SECONDS@", SECONDS))
        yield folder


def build_argv(nix: Nix, project: Path, attr: str) -> list[str]:
    return nix.build_argv(
        f"path:{project / 'project'}",
        attr,
        cores=1,
        overrides={"nixpkgs": project / "hostpkgs"},
        sandbox_paths=HOST_PATHS,
    )


def build(nix: Nix, project: Path, attr: str) -> str:
    """What is in the output."""
    log = BuildLog()
    with nix.popen(build_argv(nix, project, attr), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        for line in process.stderr:
            log.feed(line.decode())
        printed = process.stdout.read().decode()
        status = process.wait()
    if status != 0:
        raise nix.explain_failure(log, doing=f"building {attr}")
    return nix.real_path(outputs(printed)["out"]).read_text()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nix]:
    """The nix of this machine, on a store of its own."""
    if shutil.which("nix") is None:
        pytest.skip("no nix here")
    root = tmp_path_factory.mktemp("store")
    options = ["--store", str(root)]
    if os.geteuid() == 0:
        options += ["--option", "build-users-group", ""]
    # TMPDIR is where nix builds.
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("HOME", "TMPDIR")}
    environ = {**os.environ, **folders}
    version = nix_module._version(("nix",), environ)
    nix = Nix(("nix",), ("nix-store",), version, Store("home", root, tuple(options)), environ)
    if (refused := nix.probe()) is not None:
        pytest.skip(f"nix can't build here: {refused.what}")
    yield nix
    # Store paths are read-only folders.
    subprocess.run(["chmod", "-R", "u+w", root], check=True)


def test_the_probe_is_remembered(real: Nix) -> None:
    before = sorted(real.real_path("/nix/store").iterdir())
    assert [path for path in before if path.name.endswith("-pybuild-probe")]
    assert real.probe() is None
    assert sorted(real.real_path("/nix/store").iterdir()) == before


def test_a_file_in_the_store(real: Nix, tmp_path: Path) -> None:
    (tmp_path / "a+b-1.0.whl").write_bytes(b"x\n")
    digest = "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    expected = fixed_path("a+b-1.0.whl", digest)
    absent = fixed_path("a+b-1.1.whl", digest)
    assert real.is_valid([expected, absent]) == {expected: False, absent: False}
    assert real.add_fixed(tmp_path / "a+b-1.0.whl") == expected
    assert real.is_valid([absent, expected]) == {expected: True, absent: False}
    assert real.is_valid([]) == {}
    assert real.real_path(expected).read_bytes() == b"x\n"


@settings(max_examples=5, deadline=None)
@given(st.from_regex(r"[a-zA-Z0-9+_?=][a-zA-Z0-9+._?=-]{0,40}", fullmatch=True), st.binary(max_size=32))
def test_the_store_path_of_any_file(real: Nix, name: str, seed: bytes) -> None:
    digest = (seed.hex() + 64 * "0")[:64]
    printed = real.run(
        [*real.nix_store, *real.store.options, "--print-fixed-path", "sha256", digest, name], doing="asking"
    )
    assert printed.strip() == fixed_path(name, digest)


def test_adding_a_file_that_is_not_there(real: Nix, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"adding x to the store: .*(No such file|does not exist)"):
        real.add_fixed(tmp_path / "x")


def test_a_real_build(real: Nix, project: Path) -> None:
    assert build(real, project, "hello") == "hello\n"
    assert not (project / "project/flake.lock").exists()


def test_the_sandbox_is_on(real: Nix, project: Path) -> None:
    # Without it the builder sees the host's files; and it has the loopback interface only.
    assert build(real, project, "looks") == "sandbox\n1\n"


def test_a_pasted_line_is_the_same_build(real: Nix, project: Path) -> None:
    line = shell_line(build_argv(real, project, "hello"))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=dict(real.environ), check=True)
    assert real.real_path(outputs(done.stdout)["out"]).read_text() == "hello\n"


@as_root
def test_a_build_without_network(real: Nix, project: Path) -> None:
    argv = ["unshare", "--net", *build_argv(real, project, "hello")]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, env=dict(real.environ), check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 5


def test_a_real_failure(real: Nix, project: Path) -> None:
    with pytest.raises(BuildError) as caught:
        build(real, project, "failing")
    expected = ["failing: failed with exit code 3", "The end of its log:", *(f"  line {n}" for n in range(11, 31))]
    assert caught.value.what.splitlines() == expected
    line = caught.value.remedy.partition("All of its log: ")[2]
    shown = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=dict(real.environ), check=True)
    assert shown.stdout.splitlines() == [f"line {n}" for n in range(1, 31)]


def test_a_real_evaluation_error(real: Nix, project: Path) -> None:
    with pytest.raises(BuildError, match=r"building nope: flake '.*' does not provide attribute"):
        build(real, project, "nope")


# Ends


def sleepers() -> list[psutil.Process]:
    """The builders of the derivation `slow` that run now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-1:] == [SECONDS] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("sign", [None, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_nix_ends_its_builders(real: Nix, project: Path, sign: signal.Signals | None) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        real.popen(build_argv(real, project, "slow"), stderr=subprocess.DEVNULL) as process,
    ):
        wait_for(lambda: sleepers())
        if sign is not None:
            process.send_signal(sign)
            process.wait()
        raise KeyboardInterrupt
    assert process.poll() is not None
    assert not sleepers()
    folders = list(Path(real.environ["TMPDIR"]).glob("nix-build-slow*"))
    assert len(folders) == (1 if sign == signal.SIGKILL else 0)
    for folder in folders:
        shutil.rmtree(folder)


def test_a_killed_pybuild_leaves_nothing(real: Nix, project: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    pid = os.fork()
    if pid == 0:
        with real.popen(build_argv(real, project, "slow"), stderr=subprocess.DEVNULL):
            time.sleep(60)
        os._exit(0)
    wait_for(lambda: sleepers())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not sleepers())


def test_one_that_ignores_signals_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = nix_module._end
    monkeypatch.setattr(nix_module, "_end", lambda process: original(process, grace=0.2))
    stubborn = script(tmp_path, "stubborn", f"trap '' INT TERM; sleep {SECONDS} & while :; do sleep 0.1; done")
    nix = Nix((str(stubborn),), (), (2, 8), Store("local"), dict(os.environ))
    with nix.popen([str(stubborn)]) as process:
        wait_for(lambda: sleepers())
    assert process.returncode == -signal.SIGKILL
    assert not sleepers()


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    stubborn = script(tmp_path, "stubborn", f"trap '' INT; trap 'exit 5' TERM; sleep {SECONDS} & wait; wait")
    nix = Nix((str(stubborn),), (), (2, 8), Store("local"), dict(os.environ))
    started = time.monotonic()
    with nix.popen([str(stubborn)]) as process:
        wait_for(sleepers)
        # As if it were pressed while the context manager waits: its grace is 10 s.
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    assert process.returncode == 5
    assert time.monotonic() - started < 5
    assert not sleepers()


def test_what_ends_by_itself_keeps_its_status(tmp_path: Path) -> None:
    nix = Nix(("sh",), (), (2, 8), Store("local"), dict(os.environ))
    with nix.popen(["sh", "-c", "echo out; exit 3"], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read() == b"out\n"
        assert process.wait() == 3


# nix-portable


@pytest.fixture
def portable(real: Nix, tmp_path: Path) -> dict[str, str]:
    """An environment with the stand-in for nix-portable and no nix on PATH."""
    found = shutil.which("nix")
    assert found is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nix-portable").symlink_to(FAKES / "nix-portable")
    # The tools that the stand-in and the sandbox's test use, without the folder that nix may be in.
    for tool in ("sh", "env", "readlink", "mkdir", "cat", "setpriv"):
        if (path := shutil.which(tool)) is not None:
            (folder / tool).symlink_to(path)
    home = tmp_path / "home"
    home.mkdir()
    return {
        "PATH": str(folder),
        "HOME": str(home),
        "NIX_DAEMON_SOCKET_PATH": str(tmp_path / "no-daemon"),
        "REAL_NIX_BIN": str(Path(found).parent),
    }


def test_nix_portable_builds_and_its_outputs_are_real_files(
    portable: dict[str, str], project: Path, tmp_path: Path
) -> None:
    nix = find_nix(None, portable)
    assert nix.nix[-2:] == ("nix-portable", "nix")
    assert nix.store == Store("portable", tmp_path / "home/.nix-portable")
    (tmp_path / "x.whl").write_text(str(tmp_path))
    added = nix.add_fixed(tmp_path / "x.whl")
    assert nix.is_valid([added]) == {added: True}
    assert not Path(added).exists()
    assert nix.real_path(added).read_text() == str(tmp_path)
    assert build(nix, project, "hello") == "hello\n"
    subprocess.run(["chmod", "-R", "u+w", tmp_path / "home"], check=True)


def test_nix_portable_elsewhere_by_name(portable: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    moved = tmp_path / "nix-portable-v012"
    (tmp_path / "bin/nix-portable").rename(moved)
    nix = find_nix(str(moved), {**portable, "NP_LOCATION": str(tmp_path / "link"), "NP_GIT": "/usr/bin/git"})
    assert nix.nix == (str(moved), "nix")
    assert nix.store.root == tmp_path / "disk/.nix-portable"
    (tmp_path / "y").write_text("y")
    assert nix.real_path(nix.add_fixed(tmp_path / "y")).read_text() == "y"
    subprocess.run(["chmod", "-R", "u+w", tmp_path / "disk"], check=True)


# Other users, and /nix as other machines have it


def in_a_child(function: Callable[[], Any], *, user: str | None = None, nix_folder: Path | None = None) -> Any:
    """What `function` returns (JSON) in a process of `user`, with `nix_folder` in the place of /nix for it alone."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            if nix_folder is not None:
                private_nix(nix_folder)
            if user is not None:
                entry = pwd.getpwnam(user)
                os.setgroups([])
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
            with os.fdopen(write_end, "w") as pipe:
                json.dump(function(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(answer)


def private_nix(folder: Path) -> None:
    import ctypes

    clone_newns = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns) != 0:
        raise OSError("no mount namespaces")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", folder, "/nix"], check=True)


@pytest.fixture
def machine(real: Nix) -> Iterator[Path]:
    """A folder with `nix` (to be put in the place of /nix) and a `home`, which belong to nobody; root only."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "nix/var/nix").mkdir(parents=True)
        (folder / "home").mkdir()
        shutil.chown(folder / "home", "nobody")
        if not Path("/nix").is_dir():
            pytest.skip("no /nix here to mount over")
        try:
            in_a_child(lambda: "mounted", nix_folder=folder / "nix")
        except AssertionError:
            pytest.skip("no mount namespaces here")
        yield folder
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def found_and_built(machine: Path, project: Path, **variables: str) -> Callable[[], dict[str, str]]:
    def run() -> dict[str, str]:
        environ = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(machine / "home"),
            **variables,
        }
        try:
            nix = find_nix(None, environ)
        except PybuildError as error:
            return {"error": str(error)}
        return {"where": nix.store.where, "built": build(nix, project, "hello")}

    return run


@as_root
def test_root_alone(machine: Path, project: Path) -> None:
    found = in_a_child(found_and_built(machine, project), nix_folder=machine / "nix")
    assert found == {"where": "local", "built": "hello\n"}


@as_root
def test_a_user_who_owns_nix(machine: Path, project: Path) -> None:
    subprocess.run(["chown", "-R", "nobody", machine / "nix"], check=True)
    found = in_a_child(found_and_built(machine, project), user="nobody", nix_folder=machine / "nix")
    assert found == {"where": "local", "built": "hello\n"}


@as_root
def test_a_user_without_rights(machine: Path, project: Path) -> None:
    found = in_a_child(found_and_built(machine, project), user="nobody", nix_folder=machine / "nix")
    assert found == {"where": "home", "built": "hello\n"}
    assert list((machine / "home/.local/share/pybuild/nix/nix/store").glob("*-hello"))


@as_root
def test_what_a_user_may_not_even_see(machine: Path, project: Path) -> None:
    (machine / "nix/var").chmod(0o700)
    (machine / "home").chmod(0o700)
    shutil.chown(machine / "home", "root")

    def look() -> dict[str, Any]:
        store = Store("home", machine / "home/below")
        free = Nix(("nix",), ("nix-store",), (2, 8), store, {}).store_free_bytes()
        return {**found_and_built(machine, project)(), "free": free}

    found = in_a_child(look, user="nobody", nix_folder=machine / "nix")
    assert "HOME" in found["error"] or "Permission denied" in found["error"]
    assert found["free"] > 0


@as_root
@pytest.mark.parametrize(("trusted", "where"), [("nobody", "daemon"), ("", "home")])
def test_a_daemon(machine: Path, project: Path, trusted: str, where: str) -> None:
    (machine / "conf").mkdir()
    conf = f"build-users-group =\ntrusted-users = root {trusted}\n"
    (machine / "conf/nix.conf").write_text(conf)
    daemon = shutil.which("nix-daemon")
    if daemon is None:
        pytest.skip("no nix-daemon here")
    variables = {"NIX_CONF_DIR": str(machine / "conf")}
    address = machine / "nix/var/nix/daemon-socket/socket"

    def serve() -> None:
        private_nix(machine / "nix")
        os.execve(daemon, [daemon], {**os.environ, **variables})

    server = os.fork()
    if server == 0:
        os.setsid()
        try:
            serve()
        finally:
            os._exit(1)
    try:
        wait_for(address.exists)
        found = in_a_child(found_and_built(machine, project, **variables), user="nobody", nix_folder=machine / "nix")
    finally:
        os.killpg(server, signal.SIGKILL)
        os.waitpid(server, 0)
    assert found == {"where": where, "built": "hello\n"}


@as_root
def test_a_daemon_that_lets_only_a_group_in(machine: Path, project: Path) -> None:
    folder = machine / "nix/var/nix/daemon-socket"
    folder.mkdir(mode=0o750)
    shutil.rmtree(machine / "home")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        found = in_a_child(found_and_built(machine, project), user="nobody", nix_folder=machine / "nix")
    assert "nobody may not use /nix/var/nix/daemon-socket/socket" in found["error"]
    assert "usermod -aG root nobody" in found["error"]
