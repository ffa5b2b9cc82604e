"""What `--help` says: that it fits, and that its examples work; and what a shell completes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from simulated import simulate, small

import pybuild.cli
from pybuild.cli import COMMANDS, cli
from pybuild.spec import DTYPES, HEAD_DIMS, RELEASES
from pybuild.units import GIB
from pybuild.view.record import head_of, list_builds, recording

LINES = 24
"""Of a terminal that nobody has made larger."""


def environment(folder: Path) -> dict[str, str]:
    """With a `pybuild` on PATH, as an installation has it, and a home of its own."""
    program = folder / "bin/pybuild"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pybuild "$@"\n')
    program.chmod(0o755)
    package = Path(pybuild.cli.__file__).parent.parent.parent
    return {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(package),
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "80",
    }


def subcommand(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def examples(name: str) -> list[str]:
    """The command lines that a command's help ends with, one a line: a line that is broken can't be pasted."""
    text = subcommand(name).get_help(click.Context(subcommand(name), info_name=name))
    match = re.search(r"Examples?:(.*)", text, re.DOTALL)
    assert match, f"pybuild {name} --help has no example"
    return [line.strip() for line in match[1].strip().splitlines()]


def test_help_fits_a_screen_and_names_every_command() -> None:
    text = cli.get_help(click.Context(cli, info_name="pybuild", terminal_width=80))
    assert len(text.splitlines()) <= LINES
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name in COMMANDS for line in examples(name)])
def test_every_example_is_understood(name: str, line: str) -> None:
    # What the shell sees to: variables, pipes and redirections.
    words = shlex.split(re.sub(r"^source <\((.*)\)$", r"\1", line), comments=True)
    words = words[words.index("pybuild") + 1 :]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", ">")), len(words))]
    assert words[0] == name
    # The context checks names and values of all options, and runs nothing.
    subcommand(name).make_context(name, words[1:])


# The others build, download, or ask for nix: tests/test_end_to_end.py runs them.
CHEAP = sorted(set(COMMANDS) - {"build", "command", "fetch", "pin", "profile", "push", "run"})


@pytest.mark.parametrize("name", CHEAP)
def test_examples_work(name: str, tmp_path: Path) -> None:
    environ = environment(tmp_path)
    if name == "report":
        head = head_of("flash-attn", ["pybuild", "build"], {})
        with recording(head, tmp_path / "state/pybuild/builds") as recorder:
            assert recorder is not None
            for event in simulate(small(), jobs=2, budget=4 * GIB):
                recorder(event)
    bash = ["bash", "-c", examples(name)[0]]
    done = subprocess.run(bash, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    # Of predict and doctor, 1 is an answer: no.
    assert done.returncode in ((0, 1) if name in ("predict", "doctor") else (0,)), done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


# Completion


def complete(line: str, environ: dict[str, str]) -> set[str]:
    """What bash would be offered at the end of `line`, by click's protocol."""
    words = line.split(" ")
    asked = {**environ, "_PYBUILD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(["pybuild"], capture_output=True, text=True, env=asked, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return {item.partition(",")[2] for item in done.stdout.split()}


def test_commands_selections_and_releases_complete(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    assert complete("pybuild re", environ) == {"recommend-cores", "report"}
    assert complete("pybuild build flash", environ) == {"flash-attn"}
    assert complete("pybuild build --release ", environ) == set(RELEASES)
    assert complete("pybuild build --head-dim ", environ) == set(map(str, HEAD_DIMS))
    assert complete("pybuild build --head-dim 1", environ) == {"128", "192"}
    assert complete("pybuild command --dtype ", environ) == set(DTYPES)
    assert complete("pybuild build --capability 1", environ) == {"10.0", "12.0"}
    assert "--head-dim" in complete("pybuild build --h", environ)


def test_builds_that_are_kept_complete(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    folder = tmp_path / "state/pybuild/builds"
    with recording(head_of("flash-attn", ["pybuild", "build"], {}), folder):
        pass
    assert complete("pybuild report 2", environ) == set(list_builds(folder))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(shell: str, tmp_path: Path) -> None:
    environ = environment(tmp_path)
    script = subprocess.run(["pybuild", "completion", shell], capture_output=True, text=True, env=environ, check=True)
    assert "_PYBUILD_COMPLETE" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n"], input=script.stdout, text=True, check=True)


def test_bash_completes(tmp_path: Path) -> None:
    line = "source <(pybuild completion bash); COMP_WORDS=(pybuild build --release cu1); COMP_CWORD=3; "
    line += '_pybuild_completion pybuild; echo "${COMPREPLY[@]}"'
    bash = ["bash", "-c", line]
    done = subprocess.run(bash, capture_output=True, text=True, env=environment(tmp_path), check=True)
    assert done.stdout.split() == list(RELEASES)
