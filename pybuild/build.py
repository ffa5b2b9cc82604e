"""Run a planned build: watch it, stop it, bring the wheel to where the user wants it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pybuild.builders import Builder
from pybuild.errors import BuildError
from pybuild.events import Listener, Over, Planned, Said, Step
from pybuild.fetch import fetch_files
from pybuild.gated import admission_for
from pybuild.nix import Nix, derivation_name, outputs
from pybuild.nixlog import BuildLog
from pybuild.plan import Plan
from pybuild.schedule import Failed, realise


def fetch_inputs(plan: Plan) -> list[str]:
    """Bring the plan's pinned files into the store; their store paths. Checks first that the disk has room."""
    if plan.missing():
        plan.nix.require_free()
    return fetch_files(plan.pins, plan.nix)


def run_build(
    plan: Plan,
    dist: Path,
    listener: Listener,
    *,
    budget: Callable[[float], int],
    builders: Sequence[Builder] = (),
) -> list[Path]:
    """Build the plan's kernels, each a derivation, then its wheel; copy the wheels into `dist`; their paths there.

    `listener` is told what happens, with times from this moment; `budget` gives the bytes that compiles may hold
    together, from those they hold now; `builders` are other machines that compile. Raises BuildError, with the end of
    the log of what failed. However it ends, no process is left, and what was compiled stays in the store.
    """
    start = time.monotonic()

    def now() -> float:
        return time.monotonic() - start

    kernels = plan.kernels()
    valid = plan.nix.is_valid([plan.wheel(), *(kernel.output for kernel in kernels)])
    # A wheel that came from a cache needs no kernels.
    missing = [kernel for kernel in kernels if not valid[kernel.output] and not valid[plan.wheel()]]
    names = tuple(kernel.name for kernel in kernels)
    present = tuple(kernel.name for kernel in kernels if kernel not in missing)
    listener(Planned(now(), plan.spec.package, names, present, plan.cores, budget(0), plan.spec.architectures))
    if missing:
        listener(Step(now(), "inputs"))
        _run(plan, plan.inputs_argv, listener, now, doing="preparing the toolkit and torch")
        listener(Step(now(), "compile"))
        admission = admission_for(plan.spec, plan.cores, budget)
        failed = realise(plan, missing, admission, listener, builders=builders, budget=budget, clock=now)
        if failed:
            raise _explain(plan, failed, len(kernels))
    listener(Step(now(), "link"))
    built = _run(plan, plan.link_argv, listener, now, doing=f"building {plan.spec.package}")
    wheels = copy_wheels(plan.nix, outputs(built)["out"], dist)
    listener(Over(now(), wheels=tuple(str(wheel) for wheel in wheels)))
    return wheels


def _run(plan: Plan, argv: Sequence[str], listener: Listener, now: Callable[[], float], *, doing: str) -> str:
    """Standard output of one nix, whose every line the listener is told."""
    record = BuildLog()
    with plan.nix.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            record.feed(line)
            listener(Said(now(), line))
        printed = process.stdout.read().decode()
        status = process.wait()
    if status != 0:
        raise plan.nix.explain_failure(record, doing=doing)
    return printed


def _explain(plan: Plan, failed: Sequence[Failed], of: int) -> BuildError:
    """One error for all kernels that failed: each with the end of its log, and what to do."""
    errors = []
    for failure in failed:
        record = BuildLog()
        for line in failure.said.splitlines():
            record.feed(line)
        errors.append(plan.nix.explain_failure(record, doing=f"compiling {failure.kernel.name}"))
    names = ", ".join(failure.kernel.name for failure in failed)
    what = "\n".join(error.what for error in errors)
    remedies = list(dict.fromkeys(error.remedy for error in errors if error.remedy))
    again = "The others are in the store; the same command again compiles only what failed."
    return BuildError(f"{len(failed)} of {of} kernels failed: {names}\n{what}", "\n".join([*remedies, again]))


def copy_wheels(nix: Nix, store_path: str, dist: Path) -> list[Path]:
    """Copy the wheels in a store path's dist/ into `dist` as ordinary files: the store may not be visible to pip."""
    dist.mkdir(parents=True, exist_ok=True)
    copied = []
    for wheel in sorted((nix.real_path(store_path) / "dist").glob("*.whl")):
        draft = dist / f".{wheel.name}.part"
        shutil.copyfile(wheel, draft)
        copied.append(draft.replace(dist / wheel.name))
    if not copied:
        raise BuildError(
            f"{derivation_name(store_path)} holds no wheel", "Please report this: the build said that it succeeded."
        )
    return copied
