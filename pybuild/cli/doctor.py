"""`pybuild doctor`: what is wrong with this machine, or whether a wheel will run on it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from pybuild.capability import Capability, runs_on
from pybuild.checkup import examine, examine_host, missing_for
from pybuild.cli.host import host_from_options, host_options
from pybuild.cli.options import build_options, spec_from
from pybuild.doctor import Case, Finding, findings, would_fail
from pybuild.verdict import wheel_findings
from pybuild.wheel import Artifact, read_artifact


@click.command("doctor", epilog="Example: pybuild doctor --release cu130")
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON.")
@host_options
@build_options
def command(as_json: bool, host: str | None, facts: Path | None, **options: Any) -> None:
    """Find what would make a build, an import or a run fail here, with the command that mends each.

    PACKAGE may be the path of a wheel (.whl), or of a compiled extension (.so, .o): then it is read instead, and
    judged. Exit status 1 where something would fail.
    """
    named = options["package"] or ""
    artifact = None
    if named.endswith((".whl", ".o")) or ".so" in Path(named).name:
        artifact = read_artifact(Path(named), _cuobjdump())
        options["package"] = None
    spec = spec_from(options)
    if host is None and facts is None:
        case = examine(spec, os.environ, for_build=artifact is None)
    else:
        case = examine_host(spec, host_from_options(host, facts))
    if artifact is None:
        found = findings(case)
    else:
        found = wheel_findings(case, artifact, missing_for(artifact, case.environment))
    if as_json:
        report: dict[str, object] = {
            "fails": would_fail(found),
            "findings": [finding.model_dump(mode="json") for finding in found],
        }
        if artifact is not None:
            report["wheel"] = artifact.model_dump(mode="json")
        click.echo(json.dumps(report, indent=2))
    else:
        if artifact is not None:
            click.echo(describe(artifact, case))
        for finding in found:
            click.echo(show(finding))
        if not found:
            click.echo("It will run here." if artifact else "Nothing wrong found.")
    if would_fail(found):
        sys.exit(1)


def _cuobjdump() -> Path | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("cuobjdump") or shutil.which(f"{home}/bin/cuobjdump")
    return Path(found) if found else None


def show(finding: Finding) -> str:
    """A finding as people read it: the headline, why, and the commands, each on a line that can be pasted."""
    head = f"✗ breaks {finding.breaks}" if finding.breaks else "! worth knowing"
    lines = [f"{head} [{finding.code}]", f"  {finding.seen}", f"  {finding.why}"]
    return "\n".join([*lines, *(f"    {line}" for line in finding.mend.splitlines()), ""])


def describe(artifact: Artifact, case: Case) -> str:
    """What a wheel is for, one property a line."""
    rows: list[tuple[str, str]] = []
    for library in artifact.libraries:
        if library.fatbins:
            parts = [f"{', '.join(f.code)} ({f.count} source file{'s'[: f.count != 1]})" for f in library.fatbins]
            agreed = {"agrees": "; cuobjdump agrees", "failed": "; cuobjdump fails on it"}.get(library.cuobjdump, "")
            rows.append(("device code", f"{library.name}: {'; '.join(parts)}{agreed}"))
    if not any(library.fatbins for library in artifact.libraries):
        rows.append(("device code", "none"))
    if artifact.codes:
        every = [Capability(*c) for c in _KNOWN if any(runs_on(code, Capability(*c)) for code in artifact.codes)]
        rows.append(("runs on", ", ".join(map(str, every))))
    abis = {library.cxx11_abi for library in artifact.libraries} - {None}
    needs_torch = any(library.torch_symbols for library in artifact.libraries)
    if artifact.torch or needs_torch:
        abi = f", C++11 ABI {'new' if abis == {True} else 'old'}" if len(abis) == 1 else ""
        named = artifact.torch or "not named in the wheel; its symbols are compared with the torch here"
        rows.append(("torch", f"{named}{abi}"))
    majors = sorted({m for library in artifact.libraries if (m := library.cuda_major)})
    if artifact.cuda or majors:
        rows.append(("CUDA", artifact.cuda or ", ".join(map(str, majors))))
    if artifact.python_tags:
        rows.append(("Python", f"{'.'.join(artifact.python_tags)}-{'.'.join(artifact.abi_tags)}"))
    if artifact.glibc:
        rows.append(("glibc", f"{artifact.glibc} ({artifact.manylinux})"))
    rpaths = sorted({path for library in artifact.libraries for path in library.rpath})
    rows.append(("RPATH", ", ".join(rpaths) or "none"))
    here = case.environment
    if here:
        rows.append(("here", f"{here.executable} is {here.version}, torch {here.torch or 'none'}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([artifact.path, *(f"  {name:{width}}  {text}" for name, text in rows), ""])


# Every capability that a GPU has which CUDA 12 or 13 compiles for.
_KNOWN = [(7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
