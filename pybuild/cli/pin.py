"""`pybuild pin`."""

from __future__ import annotations

from pathlib import Path

import click

from pybuild.errors import PybuildError
from pybuild.index import user_index
from pybuild.pin import pin_release
from pybuild.release import dump


@click.command(epilog="Example: pybuild pin cu130 --torch 2.11.0 --output nix/releases/cu130.json")
@click.argument("release")
@click.option("--torch", required=True, help="torch's version, such as 2.11.0.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Instead of standard output.")
def command(release: str, torch: str, output: Path | None) -> None:
    """Make the data file of RELEASE, such as cu130, from what this torch requires.

    It asks pip's index for names, versions and hashes, and downloads no wheel.
    """
    text = dump(pin_release(user_index(), release, torch))
    if output is None:
        click.echo(text, nl=False)
        return
    draft = output.with_name(f".{output.name}.part")
    try:
        draft.write_text(text)
        draft.replace(output)
    except OSError as error:
        raise PybuildError(f"--output {output}: {error.strerror}", "Name a file that can be written.") from error
