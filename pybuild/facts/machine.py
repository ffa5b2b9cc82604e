"""Where facts of a machine come from: this machine, a recorded one in a folder, or what another sent over ssh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

from pybuild.errors import PybuildError

QUESTIONS = ("machine", "gpus", "toolkits", "python", "nix", "disk")
"""What facts.sh asks programs for; the answers are what `Machine.answer` gives."""

FACTS_SH = Path(__file__).parent / "facts.sh"

_PATIENCE = 10.0
"""Seconds that a program gets to answer: nvidia-smi took 1 to 3 s on machines with 8 GPUs, and hangs on broken ones."""


class Machine(Protocol):
    """A machine, read."""

    def text(self, path: str) -> str | None:
        """A file's text; None where it can't be read."""

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; nothing where it can't be read."""

    def answer(self, question: str) -> str | None:
        """What programs answer to one of QUESTIONS; None where there is no answer."""


class _Files:
    """Files below a root."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root).rstrip("/")

    def text(self, path: str) -> str | None:
        try:
            with open(self._root + path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (half the time)
                return file.read()
        except (OSError, ValueError):
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root + path))  # noqa: PTH208
        except (OSError, ValueError):
            return []


class Recorded(_Files):
    """A machine recorded in a folder: its files at their paths, and in `answers/` those of its programs."""

    def answer(self, question: str) -> str | None:
        return self.text(f"/answers/{question}")


class Here(_Files):
    """This machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(Path("/"))
        self._environ = environ

    @cached_property
    def _answers(self) -> dict[str, str | None]:
        # Imported where programs are asked: recommend-cores asks none, and these take 7 ms of its 100.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            return dict(zip(QUESTIONS, pool.map(self._ask, QUESTIONS), strict=True))

    def _ask(self, question: str) -> str | None:
        import contextlib
        import signal
        import subprocess

        try:
            asked = subprocess.Popen(
                ["/bin/sh", FACTS_SH, question],
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None
        with asked:
            try:
                output, _ = asked.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                # What the shell started as well.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(asked.pid, signal.SIGKILL)
                return None
        return Sent(output.decode(errors="replace")).answer(question)

    def answer(self, question: str) -> str | None:
        return self._answers.get(question)


class Sent:
    """A machine as facts.sh prints it: `>NAME` before each file and answer (`>?NAME`), `|` before each of its lines.

    Anything else, such as what a login prints, is passed over.
    """

    def __init__(self, text: str) -> None:
        parts: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.split("\n"):
            if line.startswith(">"):
                lines = []
                # A cgroup's files come again with every mount that shows it.
                parts.setdefault(line[1:], lines)
            elif line.startswith("|"):
                lines.append(line[1:])
        self._parts = {name: "".join(f"{line}\n" for line in lines) for name, lines in parts.items()}

    @property
    def complete(self) -> bool:
        """Whether the last line of the script was reached."""
        return "?end" in self._parts

    def text(self, path: str) -> str | None:
        return self._parts.get(path)

    def names(self, path: str) -> list[str]:
        prefix = f"{path.rstrip('/')}/"
        return sorted({name[len(prefix) :].partition("/")[0] for name in self._parts if name.startswith(prefix)})

    def answer(self, question: str) -> str | None:
        return self._parts.get(f"?{question}")


def machine_at(root: Path, environ: Mapping[str, str]) -> Machine:
    """This machine where `root` is /, else the recorded one there. Raises PybuildError where there is no folder."""
    if root == Path("/"):
        return Here(environ)
    if not root.is_dir():
        raise PybuildError(f"{root} is no folder", "Name the root folder of a machine.")
    return Recorded(root)


def ask_over_ssh(destination: str, environ: Mapping[str, str]) -> Machine:
    """The machine that ssh reaches as `destination`, which needs a POSIX shell and nothing of ours.

    Raises PybuildError where ssh does not get there, or what answers is no such shell.
    """
    import subprocess

    if destination.startswith("-") or not destination:
        raise PybuildError(f"--host {destination}: not a machine's name", "Write it as ssh takes it: user@machine.")
    remedy = f"Try it by hand: ssh {destination} true"
    try:
        done = subprocess.run(
            ["ssh", "-T", "-o", "ConnectTimeout=15", "--", destination, "sh -s"],
            input=FACTS_SH.read_bytes(),
            stdout=subprocess.PIPE,
            env=dict(environ),
            timeout=120,
            check=False,
        )
    except FileNotFoundError as error:
        raise PybuildError("no ssh on PATH", "Install it: apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise PybuildError(f"--host {destination}: no answer within two minutes", remedy) from error
    sent = Sent(done.stdout.decode(errors="replace"))
    if not sent.complete:
        raise PybuildError(f"--host {destination}: ssh ended with {done.returncode} and no facts", remedy)
    return sent
