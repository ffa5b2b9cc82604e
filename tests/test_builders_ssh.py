"""Two builders with sshd, nix and a network of their own, one of which is cut off half-way: for real, as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from fixed import Fixed

from pybuild.builders import Builder, survey, with_ssh_options
from pybuild.errors import PybuildError
from pybuild.events import Ended, Event, Said
from pybuild.hostpkgs import Facts, read_facts
from pybuild.nix import Nix, Store, find_nix
from pybuild.plan import Kernel, Plan
from pybuild.schedule import realise
from pybuild.spec import BuildSpec

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SPEC = BuildSpec(release="cu130")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks"),
    pytest.mark.skipif(not Path(SSHD).exists() or not shutil.which("ip"), reason="no sshd, or no ip (iproute2)"),
]


def run(*argv: str | Path) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@dataclass
class Machine:
    """A network namespace with an address, in which sshd runs over a /nix of its own."""

    name: str
    address: str
    nix: Path

    @property
    def url(self) -> str:
        return f"ssh-ng://root@{self.address}"

    def cut(self) -> None:
        """As where somebody pulls the cable: no connection is closed."""
        run("ip", "link", "set", f"{self.name}-h", "down")


@contextlib.contextmanager
def machine(name: str, number: int, folder: Path) -> Iterator[Machine]:
    here, address = f"10.213.{number}.1", f"10.213.{number}.2"
    root = folder / name
    (root / "nix").mkdir(parents=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / "host")
    conf = root / "sshd.conf"
    conf.write_text(
        f"Port 22\nListenAddress {address}\nHostKey {root}/host\nPidFile none\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin yes\nAuthorizedKeysFile {folder}/key.pub\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)  # noqa: PTH103
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", f"{name}-h", "type", "veth", "peer", "name", f"{name}-g", "netns", name)
        run("ip", "addr", "add", f"{here}/24", "dev", f"{name}-h")
        run("ip", "link", "set", f"{name}-h", "up")
        for words in (["addr", "add", f"{address}/24", "dev", f"{name}-g"], ["link", "set", f"{name}-g", "up"]):
            run("ip", "-n", name, *words)
        run("ip", "-n", name, "link", "set", "lo", "up")
        script = f"mount --bind {root}/nix /nix && exec {SSHD} -D -e -f {conf}"
        argv = ["ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (root / "sshd.log").open("w") as log, subprocess.Popen([*argv, "sh", "-c", script], stderr=log) as sshd:
            try:
                yield Machine(name, address, root / "nix")
            finally:
                sshd.kill()  # unshare passes on no other signal
    finally:
        # With the link first: the kernel takes its time for a namespace.
        subprocess.run(["ip", "link", "del", f"{name}-h"], check=False, capture_output=True)
        run("ip", "netns", "del", name)


class Sleepers:
    """A plan whose kernels take some seconds each, in a store of its own."""

    cores = 1

    def __init__(self, nix: Nix, facts: Facts, folder: Path, count: int) -> None:
        self.nix = nix
        self.paths = [str(path) for path in facts.sandbox_paths]
        self.kernels = []
        for number in range(count):
            expression = (
                f'derivation {{ name = "sleeper-{number}"; system = "x86_64-linux"; builder = "{facts.bash}"; '
                'PATH = "/usr/bin:/bin"; args = [ "-c" "sleep 3; echo done > $out" ]; }'
            )
            paths = [
                nix.run(
                    nix.command("eval", "--raw", "--impure", "--expr", f"({expression}).{what}"), doing="evaluating"
                )
                for what in ("drvPath", "outPath")
            ]
            self.kernels.append(Kernel(f"sleeper-{number}", *paths))

    def realise_argv(self, derivation: str, builder: Builder | None = None) -> list[str]:
        line = builder.line if builder else None
        return self.nix.realise_argv(derivation, cores=1, sandbox_paths=self.paths, builder=line)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    with machine(f"pb{os.getpid()}a", 1, tmp_path) as one, machine(f"pb{os.getpid()}b", 2, tmp_path) as two:
        time.sleep(1)
        yield one, two


def test_a_builder_that_is_cut_off_loses_nothing(tmp_path: Path, machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    options = f"-i {tmp_path}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    ssh.chmod(0o755)
    environ = with_ssh_options({**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    try:
        found, facts = find_nix(None, environ), read_facts(SPEC, environ)
    except PybuildError as error:
        pytest.skip(str(error))
    store = Store("home", tmp_path / "here", ("--store", str(tmp_path / "here"), "--option", "build-users-group", ""))
    nix = replace(found, store=store)

    builders = [replace(survey(m.url, SPEC, nix, facts), jobs=2) for m in machines]
    plan = Sleepers(nix, facts, tmp_path, 12)
    events: list[Event] = []
    cut_at: list[float] = []

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, Said) and event.text.endswith(f"on {two.url}") and not cut_at:
            cut_at.append(event.time)
        # Half-way through what it was given: its builds have begun there.
        if cut_at and event.time > cut_at[0] + 2.5 and len(cut_at) == 1:
            cut_at.append(event.time)
            two.cut()

    start = time.monotonic()
    failed = realise(cast(Plan, plan), plan.kernels, Fixed(1), listener, builders=builders)
    assert failed == [], "\n".join(failure.said for failure in failed)
    assert all(nix.is_valid(kernel.output for kernel in plan.kernels).values())
    assert len(cut_at) == 2, "the builder was never cut off"
    said = [event.text for event in events if isinstance(event, Said)]
    assert any("gets no more kernels" in text and text.startswith(two.url) for text in said)
    on_one = [text for text in said if text.endswith(f"on {one.url}")]
    built_there = [path for path in (one.nix / "store").glob("*-sleeper-*") if path.suffix == ""]
    assert on_one and len(built_there) >= len(on_one)
    assert sum(isinstance(event, Ended) and event.ok for event in events) == 12
    # 15 s until ssh notices; without it this hangs for hours.
    assert time.monotonic() - start < 90
