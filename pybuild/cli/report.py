"""`pybuild report`."""

from __future__ import annotations

from pathlib import Path

import click

from pybuild.cli.options import complete_from
from pybuild.errors import PybuildError


def _builds() -> list[str]:
    from pybuild.view.record import list_builds

    return list_builds()


@click.command(epilog="Example: pybuild report --output report.html")
@click.argument("build", required=False, shell_complete=complete_from(_builds))
@click.option("--list", "as_list", is_flag=True, help="Print the builds that are kept, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures, for programs, in place of a file.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The HTML file.  [default: pybuild-BUILD.html]",
)
def command(build: str | None, as_list: bool, as_json: bool, output: Path | None) -> None:
    """Write what a BUILD took, as one HTML file, and print its path.

    Memory over time, the kernels over time, a table, and the facts of machine and release. BUILD is one of --list, or
    a record (.jsonl); without it, the last build. The last 20 are kept.
    """
    from pybuild.view.record import find_build, list_builds, read_build
    from pybuild.view.report import render_html, report_of

    if as_list:
        for name in list_builds():
            click.echo(name)
        return
    report = report_of(read_build(find_build(build)))
    if as_json:
        click.echo(report.model_dump_json(indent=2))
        return
    target = output or Path(f"pybuild-{report.name}.html")
    try:
        target.write_text(render_html(report), encoding="utf-8")
    except OSError as error:
        raise PybuildError(
            f"{target} can't be written: {error.strerror}", "Name another file with --output."
        ) from error
    click.echo(target)
