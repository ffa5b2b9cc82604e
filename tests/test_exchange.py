"""What was built, pushed and taken: with the real nix, in stores of their own, with derivations of a moment."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from pybuild.errors import BuildError, PybuildError
from pybuild.exchange import destination, own_caches, push, signing_key, take
from pybuild.nix import Nix, Store, find_nix
from pybuild.plan import Kernel, Plan
from pybuild.spec import BuildSpec

HOST_PATHS = [path for path in ("/bin", "/lib", "/lib64", "/usr") if Path(path).exists()]


class Tiny:
    """A plan of two kernels and a wheel that refers to the first: shell scripts, in a store of its own."""

    spec = BuildSpec()

    def __init__(self, nix: Nix, folder: Path) -> None:
        self.nix = nix
        expression = folder / "tiny.nix"
        expression.write_text(
            """
            let
              make = name: script: derivation {
                inherit name;
                system = builtins.currentSystem;
                builder = "/bin/sh";
                args = [ "-c" script ];
              };
            in rec {
              one = make "one" "echo 1 > $out";
              two = make "two" "echo 2 > $out";
              wheel = make "wheel" "echo ${one} > $out";
            }
            """
        )
        argv = [self.nix.nix_store[0].replace("nix-store", "nix-instantiate"), *nix.store.options, str(expression)]
        self.derivations = {}
        for name in ("one", "two", "wheel"):
            drv = nix.run([*argv, "-A", name], doing="instantiating").strip()
            output = nix.run([*nix.nix_store, *nix.store.options, "-q", "--outputs", drv], doing="asking").strip()
            self.derivations[name] = Kernel(name, drv, output)

    def kernels(self) -> list[Kernel]:
        return [self.derivations["one"], self.derivations["two"]]

    def wheel(self) -> str:
        return self.derivations["wheel"].output

    def build(self, *names: str) -> None:
        for name in names:
            drv = self.derivations[name].derivation
            self.nix.run(self.nix.realise_argv(drv, cores=1, sandbox_paths=HOST_PATHS), doing=f"building {name}")

    def has(self, *names: str) -> list[bool]:
        paths = [self.derivations[name].output for name in names]
        valid = self.nix.is_valid(paths)
        return [valid[path] for path in paths]

    def as_plan(self) -> Plan:
        return cast(Plan, self)


Machine = Callable[..., Tiny]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Makes a machine: a store of its own, and a nix.conf with these lines."""
    try:
        nix = find_nix(None, os.environ)
    except PybuildError as error:
        pytest.skip(str(error))
    if nix.store.where == "portable":
        pytest.skip("nix-portable has one store")

    def make(name: str, *conf: str) -> Tiny:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "nix.conf").write_text("\n".join(["experimental-features = nix-command", *conf, ""]))
        environ = {**os.environ, "NIX_USER_CONF_FILES": str(folder / "nix.conf"), "HOME": str(folder)}
        environ.pop("NIX_CONFIG", None)
        environ["XDG_CONFIG_HOME"] = environ["XDG_CACHE_HOME"] = str(folder)
        options = ["--store", str(folder / "store")]
        if os.geteuid() == 0:
            options += ["--option", "build-users-group", ""]
        store = Store("home", folder / "store", tuple(options))
        return Tiny(Nix(nix.nix, nix.nix_store, nix.version, store, environ), folder)

    return make


@pytest.mark.parametrize(
    "url", ["", "/mnt/cache", "file://", "file://cache", "https://cache.example", "ssh-ng://", "file:/mnt"]
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(PybuildError, match="not a store to push to") as raised:
        destination(url)
    assert raised.value.exit_status == 2 and "file:///" in raised.value.remedy


def test_a_folder_is_compressed_fast_unless_the_url_says_how() -> None:
    assert destination("file:///c") == "file:///c?compression=zstd"
    assert destination("file:///c?want-mass-query=true") == "file:///c?want-mass-query=true&compression=zstd"
    assert destination("file:///c?compression=none") == "file:///c?compression=none"
    assert destination("ssh-ng://me@there") == "ssh-ng://me@there"


def test_a_key_is_made_once_for_its_owner_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine("here")
    monkeypatch.setenv("XDG_CONFIG_HOME", here.nix.environ["XDG_CONFIG_HOME"])
    key = signing_key(here.nix)
    assert stat.S_IMODE(key.secret.stat().st_mode) == 0o600
    assert signing_key(here.nix) == key
    assert key.public.count(":") == 1 and len(key.public) < len(key.secret.read_text())


def test_a_file_that_is_no_key_is_refused(machine: Machine, tmp_path: Path) -> None:
    nix = machine("here").nix
    (tmp_path / "not").write_text("ssh-ed25519 AAAA")
    for path in (tmp_path / "not", tmp_path / "missing", tmp_path):
        with pytest.raises(PybuildError, match="--key") as raised:
            signing_key(nix, path)
        assert raised.value.exit_status == 2


def test_nothing_built_is_nothing_to_push(machine: Machine, tmp_path: Path) -> None:
    here = machine("here")
    key = signing_key(here.nix, make_key(here.nix, tmp_path))
    with pytest.raises(BuildError, match="nothing of this build"):
        push(here.as_plan(), f"file://{tmp_path}/cache", key)
    assert not (tmp_path / "cache").exists()


def make_key(nix: Nix, folder: Path) -> Path:
    text = nix.run(nix.command("key", "generate-secret", "--key-name", "test-1"), doing="making a key")
    (folder / "key").write_text(text)
    return folder / "key"


def test_another_machine_takes_kernels_from_the_cache_and_compiles_none(machine: Machine, tmp_path: Path) -> None:
    here, cache = machine("here"), f"file://{tmp_path}/cache"
    key = signing_key(here.nix, make_key(here.nix, tmp_path))
    here.build("one", "two")
    assert push(here.as_plan(), cache, key) == [kernel.output for kernel in here.kernels()]

    there = machine("there", f"substituters = {cache}", f"trusted-public-keys = {key.public}")
    assert own_caches(there.nix) == [cache]
    assert there.has("one", "two", "wheel") == [False, False, False]
    assert take(there.as_plan()) is None
    assert there.has("one", "two", "wheel") == [True, True, False]
    assert there.nix.real_path(there.kernels()[0].output).read_text() == "1\n"


def test_a_wheel_in_the_cache_needs_no_kernels(machine: Machine, tmp_path: Path) -> None:
    here, cache = machine("here"), f"file://{tmp_path}/cache"
    key = signing_key(here.nix, make_key(here.nix, tmp_path))
    here.build("wheel", "two")
    push(here.as_plan(), cache, key)
    there = machine("there", f"substituters = {cache}", f"trusted-public-keys = {key.public}")
    assert take(there.as_plan()) is None
    # The first comes with the wheel, which refers to it.
    assert there.has("wheel", "one", "two") == [True, True, False]


def test_what_a_cache_does_not_have_is_no_error(machine: Machine, tmp_path: Path) -> None:
    here, cache = machine("here"), f"file://{tmp_path}/cache"
    here.build("one")
    key = signing_key(here.nix, make_key(here.nix, tmp_path))
    assert len(push(here.as_plan(), cache, key)) == 1
    there = machine("there", f"substituters = {cache}", f"trusted-public-keys = {key.public}")
    assert take(there.as_plan()) is None
    assert there.has("one", "two", "wheel") == [True, False, False]


def test_what_is_signed_by_a_stranger_is_not_taken(machine: Machine, tmp_path: Path) -> None:
    here, cache = machine("here"), f"file://{tmp_path}/cache"
    here.build("one", "two")
    push(here.as_plan(), cache, signing_key(here.nix, make_key(here.nix, tmp_path)))
    there = machine("there", f"substituters = {cache}")
    said = take(there.as_plan())
    assert said and "is not signed by a key" in said
    assert there.has("one", "two") == [False, False]


def test_without_a_cache_of_the_users_own_nobody_is_asked(machine: Machine) -> None:
    there = machine("there")
    assert own_caches(there.nix) == []
    assert take(there.as_plan()) is None


def test_a_cache_that_is_gone_is_said_and_ends_nothing(machine: Machine, tmp_path: Path) -> None:
    there = machine("there", "substituters = ssh-ng://nobody@machine.invalid")
    said = take(there.as_plan())
    # Without ssh on this machine nix says so.
    assert said is None or "machine.invalid" in said or "ssh" in said
    assert there.has("one") == [False]


def test_a_store_on_another_machine_is_pushed_to_over_ssh(machine: Machine, tmp_path: Path) -> None:
    """ssh-ng with a stand-in for ssh, which runs here what it is told to run there."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    here = machine("here")
    here.build("one", "two")
    key = signing_key(here.nix, make_key(here.nix, tmp_path))
    there = machine("there", f"trusted-public-keys = {key.public}")
    # The command is the last of its arguments, for a shell.
    conf = there.nix.environ["NIX_USER_CONF_FILES"]
    ssh.write_text(
        f"#!/bin/sh\nexport NIX_USER_CONF_FILES='{conf}'\n"
        # Newer nix wants to see that ssh has logged in, by a LocalCommand.
        'case "$*" in *"echo started"*) echo started ;; esac\n'
        'while [ "${1#nix}" = "$1" ]; do shift; done\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    environ = {**here.nix.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    nix = Nix(here.nix.nix, here.nix.nix_store, here.nix.version, here.nix.store, environ)
    here.nix = nix
    push(here.as_plan(), f"ssh-ng://me@there?remote-store={there.nix.store.root}", key)
    assert there.has("one", "two") == [True, True]


def test_the_command_line_refuses_a_wrong_url_before_anything_else(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    argv = [shutil.which(sys.executable) or sys.executable, "-m", "pybuild", "push", "cache"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 2 and "not a store to push to: cache" in done.stderr and done.stdout == ""
