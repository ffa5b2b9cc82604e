"""What a shell gets from `pybuild`: run as a program, since click treats statuses otherwise in its own test runner."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        ("--help", 0),
        ("recommend-cores --cores 4 --memory 64GiB", 0),
        # The answer is no.
        ("predict --jobs 32 --cores 128 --memory 28GiB", 1),
        ("predict --jobs 0", 2),
        ("recommend-cores --memory 1x", 2),
        ("recommend-cores --facts missing.json", 2),
        ("no-such-command", 2),
    ],
)
def test_exit_status(argv: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-m", "pybuild", *argv.split()], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    # What scripts read comes alone, and nothing of it where there is no answer.
    assert (done.stdout == "") == (status == 2)
