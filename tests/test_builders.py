"""Other machines that compile: who is one, what nix is told of them, and what happens where one goes away."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from fixed import Fixed

from pybuild.builders import Builder, builder_line, daemon_program, look, urls_of, with_ssh_options
from pybuild.errors import PybuildError
from pybuild.events import Began, Ended, Event, Evicted, Said
from pybuild.hostpkgs import Facts, read_facts
from pybuild.nix import Nix, Store, find_nix
from pybuild.plan import Kernel, Plan
from pybuild.schedule import realise
from pybuild.spec import BuildSpec

THERE = Builder("ssh-ng://me@there", 2, "there")
ELSEWHERE = Builder("ssh-ng://me@elsewhere", 1, "elsewhere")


def test_builders_are_named_by_url_or_by_nixs_machines_file(tmp_path: Path) -> None:
    machines = tmp_path / "machines"
    machines.write_text("# ours\nssh-ng://a x86_64-linux - 4 1 - -\n\nssh-ng://me@b?compress=true\n")
    urls = urls_of(["ssh-ng://me@here", f"@{machines}", "ssh-ng://a"])
    assert urls == ["ssh-ng://me@here", "ssh-ng://a", "ssh-ng://me@b?compress=true"]


@pytest.mark.parametrize(
    "given",
    ["there", "ssh://there", "ssh-ng://", "ssh-ng://-oProxyCommand=x", "ssh-ng://a b", "ssh-ng://a;b", "@/none"],
)
def test_what_is_no_builder_is_refused(given: str) -> None:
    with pytest.raises(PybuildError, match="--builder") as raised:
        urls_of([given])
    assert raised.value.exit_status == 2 and raised.value.remedy


def test_nixs_line_for_a_builder_fits_the_name_of_a_lock_file() -> None:
    program, text = daemon_program(["/usr", "/opt/it's"])
    line = builder_line("ssh-ng://me@there?compress=true", 7, program)
    url, system, key, jobs, *_ = line.split()
    assert (system, key, jobs) == ("x86_64-linux", "-", "7")
    assert url == f"ssh-ng://me@there?compress=true&remote-program={program}"
    assert len(url) < 250
    assert program != daemon_program(["/usr"])[0], "another program has another name"
    shown = subprocess.run(
        ["sh", "-s", "words"], input=text.replace("nix-daemon", "printf '%s\\n' --"), text=True, stdout=subprocess.PIPE
    )
    words = shown.stdout.splitlines()
    assert words[words.index("sandbox-paths") + 1] == "/usr /opt/it's" and words[-1] == "words"


def test_ssh_never_asks_and_the_users_options_come_first() -> None:
    options = with_ssh_options({"NIX_SSHOPTS": "-p 2222"})["NIX_SSHOPTS"]
    assert options.startswith("-p 2222 ") and "BatchMode=yes" in options and "ServerAliveInterval" in options


class Scripts:
    """A plan whose derivations are shell scripts, which see where they run as $WHERE."""

    def __init__(self) -> None:
        self.cores = 1
        self.nix = Nix(("nix",), ("nix-store",), (2, 8), Store("local"), dict(os.environ))

    def realise_argv(self, derivation: str, builder: Builder | None = None) -> list[str]:
        return ["env", f"WHERE={builder.line if builder else 'here'}", "sh", "-c", derivation]


def play(scripts: Mapping[str, str], builders: Sequence[Builder], jobs: int = 1) -> tuple[list[str], list[Event]]:
    """Names of the kernels that failed, and the events."""
    events: list[Event] = []
    kernels = [Kernel(name, script, f"/nix/store/{name}") for name, script in scripts.items()]
    plan = cast(Plan, Scripts())
    failed = realise(plan, kernels, Fixed(jobs), lambda event: events.append(event), builders=builders, interval=0.02)
    return [f.kernel.name for f in failed], events


def test_builders_compile_beside_this_machine_and_no_more_than_their_jobs(tmp_path: Path) -> None:
    count = f"set -- {tmp_path}/running-$WHERE.*; echo $# >> {tmp_path}/seen-$WHERE"
    script = f"touch {tmp_path}/running-$WHERE.$$; {count}; sleep 0.3; rm {tmp_path}/running-$WHERE.$$"
    failed, events = play({f"k{n}": script for n in range(12)}, [THERE, ELSEWHERE])
    assert failed == []
    assert sum(isinstance(event, Ended) for event in events) == 12
    for name, jobs in (("here", 1), ("there", 2), ("elsewhere", 1)):
        seen = [int(line) for line in (tmp_path / f"seen-{name}").read_text().split()]
        assert seen and max(seen) <= jobs
    said = [event.text for event in events if isinstance(event, Said)]
    assert any("on ssh-ng://me@there" in text for text in said)


def test_what_a_builder_had_that_went_away_is_compiled_elsewhere(tmp_path: Path) -> None:
    # As nix 2.8 says it where the connection is cut.
    words = "error: unexpected end-of-file\nerror: builder for '/nix/store/x.drv' failed with exit code 1"
    lost = f'echo "{words}" >&2; exit 1'
    script = f"echo $WHERE >> {tmp_path}/tried; [ $WHERE != there ] || {{ {lost}; }}"
    failed, events = play({f"k{n}": f"{script}; sleep 0.1; touch {tmp_path}/k{n}" for n in range(6)}, [THERE])
    assert failed == []
    assert len(list(tmp_path.glob("k*"))) == 6
    assert (tmp_path / "tried").read_text().split().count("there") == 2, "it gets no more after the first failure"
    assert sum(isinstance(event, Evicted) for event in events) == 2
    told = [event.text for event in events if isinstance(event, Said) and "gets no more kernels" in event.text]
    assert len(told) == 1 and "unexpected end-of-file" in told[0]


def test_a_kernel_that_does_not_compile_on_a_builder_fails_and_the_builder_goes_on(tmp_path: Path) -> None:
    words = "build of '/x.drv' on 'ssh-ng://me@there' failed: builder for '/x.drv' failed with exit code 1;"
    bad = f'sleep 0.2; [ $WHERE = here ] || {{ echo "{words}" >&2; exit 1; }}'
    good = f"echo $WHERE >> {tmp_path}/where; sleep 0.05"
    failed, events = play({"first": "sleep 1.5", "bad": bad, **{f"k{n}": good for n in range(6)}}, [THERE])
    assert failed == ["bad"]
    assert not any(isinstance(event, Evicted) for event in events)
    assert (tmp_path / "where").read_text().split().count("there") == 6
    assert len({event.compile for event in events if isinstance(event, Began)}) == 8


@pytest.fixture(scope="module")
def here() -> tuple[Nix, Facts]:
    try:
        return find_nix(None, os.environ), read_facts(BuildSpec(release="cu130"), os.environ)
    except PybuildError as error:
        pytest.skip(str(error))


def test_a_look_shows_compiler_python_and_glibc_as_a_build_sees_them(here: tuple[Nix, Facts]) -> None:
    nix, facts = here
    seen = look(nix, facts, None).splitlines()
    assert len(seen) == 4
    assert str(facts.cxx.path) in seen[1] and facts.cxx.version in seen[1]
    assert seen[2] == f"glibc: {facts.glibc}"
    assert facts.python.version in seen[3] and str(facts.python.prefix) in seen[3]
