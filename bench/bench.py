"""The same compiles under each policy that decides how many run at once: in virtual time, and for real.

    bench.py virtual                                      many machines, in virtual time
    bench.py real --sources DIR --headers DIR RUN...      this machine, under limits of memory; needs root
    bench.py tables                                       write the tables of README.md anew

The compiles are flash-attn's kernels for one architecture. Results are kept in results/; what is there already is not
run again. `real` needs the standard library, nvcc and cgroups.

A RUN is POLICY@LIMIT, such as gate@32GiB, gate@none, fixed-7@32GiB. Runs joined by + go on at once, each on as many
cores of its own as it has jobs; /SECONDS after them cuts them off.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pybuild.curve import Curve, measured_curve  # noqa: E402
from pybuild.gate import PART, Admission  # noqa: E402
from pybuild.simulate import Trials, simulate  # noqa: E402
from pybuild.units import GIB, parse_size  # noqa: E402

PROFILE = HERE.parent / "pybuild/profiles/flash-attn-2.8.3.json"
RESULTS = HERE / "results"

# The machines of the virtual grid: every pair of these.
CORES = (4, 8, 16, 32, 64, 128)
MEMORY_GIB = (8, 16, 24, 32, 64, 128, 256, 512)

# Of the machine that the sample of the real runs is played on in virtual time.
SAMPLE_CORES = 16
SAMPLE_GIB = (16, 32)

Compiles = list[tuple[str, Curve]]


# ---- the policies


def upstream(cores: int, memory: float) -> int:
    """Jobs by the setup.py of flash-attn 2.8.3 (NinjaBuildExtension): 9 GB each, half of the cores."""
    return max(1, min(cores // 2, int(memory / GIB / 9)))


def upstream_newer(cores: int, memory: float) -> int:
    """Jobs by the setup.py of flash-attn's main branch, 2026: 5 GB for each of nvcc's threads, of which it takes 4."""
    return max(1, min(cores // 2, int(memory / GIB / (5 * 4))))


def nixpkgs(cores: int, memory: float) -> int:
    """Jobs by nixpkgs' python-modules/flash-attn: MAX_JOBS=$NIX_BUILD_CORES."""
    return cores


FORMULAS: dict[str, Callable[[int, float], int]] = {
    "upstream_2_8_3": upstream,
    "upstream_newer": upstream_newer,
    "nixpkgs": nixpkgs,
}


# ---- the compiles


@functools.cache
def kernels() -> Compiles:
    """flash-attn's 72 kernels for sm_100, in the order of its setup.py, as they were measured."""
    rows = json.loads(PROFILE.read_bytes())["compiles"]
    return [
        (row["kernel"], measured_curve(row["memory_mib"], row["wall_s"], row["peak_mib"]))
        for row in rows
        if row["archs"] == ["sm_100"]
    ]


def in_sample(name: str) -> bool:
    """Whether a kernel is one of the 24 of the real runs.

    Of each pass and head dimension one, in turn not causal and causal, and of the backward pass, which takes the most
    memory, both. fp16 and bf16, which are alike, take turns.
    """
    match = re.fullmatch(r"flash_(fwd|bwd|fwd_split)_hdim(\d+)_(fp16|bf16)(_causal)?_sm80", name)
    assert match, name
    place = (32, 64, 96, 128, 192, 256).index(int(match[2]))
    usual = bool(match[4]) == bool(place % 2)
    dtype = ("fp16", "bf16")[(place // 2 + ("fwd", "bwd", "fwd_split").index(match[1])) % 2]
    return match[3] == dtype if usual else match[1] == "bwd" and match[3] != dtype


def sample() -> Compiles:
    """The compiles of the real runs."""
    return [(name, curve) for name, curve in kernels() if in_sample(name)]


# ---- in virtual time


def fixed(compiles: Compiles, jobs: int, cores: int) -> dict[str, Any]:
    """A build with so many at once."""
    played = simulate([curve for _, curve in compiles], jobs, cores=cores)
    return {"jobs": jobs, "seconds": played.time, "peak": played.peak}


def gated(compiles: Compiles, cores: int, budget: float, expected: Callable[[str], Curve] | None) -> dict[str, Any]:
    """A build under the gate."""
    # Not above: it needs more than the standard library.
    from pybuild.virtual import play

    played = play(compiles, Admission(expected or dict(compiles).__getitem__, lambda held: budget, cores))
    return {"jobs": cores, "seconds": played.time, "peak": played.peak, "stopped": played.stopped}


def safest(compiles: Compiles, cores: int, budget: float) -> int:
    """The largest number that stays within the budget in each of 200 runs with uneven durations; at least 1.

    The same question as pybuild.recommend answers, which needs more than the standard library.
    """
    trials = Trials([curve for _, curve in compiles])
    return next((jobs for jobs in range(cores, 1, -1) if all(peak <= budget for peak in trials.peaks(jobs))), 1)


def machine_row(
    compiles: Compiles, cores: int, memory: float, expected: Callable[[str], Curve] | None = None
) -> dict[str, Any]:
    """Every policy on one machine. Seconds and bytes.

    The gate and the best fixed numbers get 90 % of the memory, as the gate has it; the formulas all of it. `expected`
    is what the gate knows, if that is not what the compiles do.
    """
    from pybuild.virtual import lower_bound

    budget = PART * memory
    everything = [fixed(compiles, jobs, cores) for jobs in range(1, cores + 1)]
    within = [run for run in everything if run["peak"] <= budget] or everything[:1]
    return {
        "cores": cores,
        "memory": memory,
        "budget": budget,
        "lower_bound": lower_bound(compiles, cores, budget),
        "unlimited": gated(compiles, cores, 1e18, expected),
        "gate": gated(compiles, cores, budget, expected),
        "hindsight": min(within, key=lambda run: (run["seconds"], run["jobs"])),
        "safe": everything[safest(compiles, cores, budget) - 1],
        "at_peaks": everything[max(1, min(cores, int(budget / max(curve.peak for _, curve in compiles)))) - 1],
        **{name: everything[jobs_of(cores, memory) - 1] for name, jobs_of in FORMULAS.items()},
    }


def run_virtual(output: Path) -> None:
    """Every machine of the grid, and the sample of the real runs; writes `output`."""
    rows = []
    for cores in CORES:
        for memory in MEMORY_GIB:
            rows.append(machine_row(kernels(), cores, memory * GIB))
            say(f"{cores} cores, {memory} GiB: {rows[-1]['gate']['seconds'] / 60:.2f} min")
    sampled = [machine_row(sample(), SAMPLE_CORES, memory * GIB) for memory in SAMPLE_GIB]
    seen = {}
    for path in sorted(RESULTS.glob("real-*.json")):
        compiles = as_seen(json.loads(path.read_text()))
        if len(compiles) == len(sample()):
            known = dict(kernels())
            seen[path.stem] = [
                machine_row(compiles, SAMPLE_CORES, memory * GIB, known.__getitem__) for memory in SAMPLE_GIB
            ]
    found = {"kernels": len(kernels()), "machines": rows, "sample": sampled, "as_seen": seen}
    write(output, {**facts(), **found})


# ---- for real

FLAGS = [
    # setup.py's and torch.utils.cpp_extension's, as nix/extension/kernel.nix has them.
    *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__"),
    *("-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr", "--compiler-options", "-fPIC"),
    *("-O3", "-std=c++17", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"),
    *("-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr"),
    *("--expt-extended-lambda", "--use_fast_math", "-gencode", "arch=compute_100,code=sm_100", "--threads", "1"),
    *("-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=flash_attn_2_cuda"),
]


class Cgroup:
    """A cgroup with a limit of memory, of v1 or v2. What is in it when the context ends is killed."""

    def __init__(self, name: str, limit: int | None) -> None:
        self._v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        top = Path("/sys/fs/cgroup") if self._v2 else Path("/sys/fs/cgroup/memory")
        if self._v2 and "memory" not in (top / "cgroup.subtree_control").read_text().split():
            (top / "cgroup.subtree_control").write_text("+memory")
        self.folder = top / name
        self.folder.mkdir()
        self.procs = self.folder / "cgroup.procs"
        if limit is not None:
            (self.folder / ("memory.max" if self._v2 else "memory.limit_in_bytes")).write_text(str(limit))
            swap, most = ("memory.swap.max", 0) if self._v2 else ("memory.memsw.limit_in_bytes", limit)
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (self.folder / swap).write_text(str(most))

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(200):
            for pid in self.procs.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
            # Processes that are about to end still hold it.
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
        raise OSError(f"{self.folder} is still in use")

    def _rows(self, name: str) -> dict[str, int]:
        rows = map(str.split, (self.folder / name).read_text().splitlines())
        return {words[0]: int(words[1]) for words in rows}

    def held(self) -> int:
        """Bytes of the processes and of files in memory, without the page cache."""
        rows = self._rows("memory.stat")
        return rows["anon"] + rows["shmem"] if self._v2 else rows["total_rss"] + rows.get("total_shmem", 0)

    def charged(self) -> int | None:
        """The most bytes that were ever charged, page cache included; None where the kernel does not say."""
        try:
            return int((self.folder / ("memory.peak" if self._v2 else "memory.max_usage_in_bytes")).read_text())
        except OSError:
            return None

    def oom_kills(self) -> int:
        """Processes that the kernel killed for lack of memory."""
        return self._rows("memory.events" if self._v2 else "memory.oom_control")["oom_kill"]

    def cpu_seconds(self) -> float | None:
        """CPU time of all that ever ran in it; None in v1, which has it elsewhere."""
        return self._rows("cpu.stat")["usage_usec"] / 1e6 if self._v2 else None


def compile_all(spec: Path, log: Path, jobs: int) -> int:
    """Run the commands of `spec`, [[name, argv], ...], so many at once; a line in `log` for each. Stops at a failure.

    This stands for ninja, inside the cgroup and under the gate, if there is one.
    """
    commands: Iterator[tuple[str, list[str]]] = iter(json.loads(spec.read_text()))
    launcher = os.environ.get("PYBUILD_LAUNCHER", "").split()
    lock = threading.Lock()
    failed: list[str] = []

    def work() -> None:
        while not failed:
            with lock:
                name, argv = next(commands, ("", []))
            if not argv:
                return
            began = time.monotonic()
            with log.with_name(f"{log.stem}-{name}.err").open("wb") as errors:
                status = subprocess.run([*launcher, *argv], stderr=errors, check=False).returncode
            with lock, log.open("a") as file:
                file.write(json.dumps([name, began, time.monotonic(), status]) + "\n")
            if status:
                failed.append(name)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


# Set when this program shall end: the runs are in threads, which see no signal.
_stop = threading.Event()


def run_real(
    run: str,
    commands: Sequence[tuple[str, list[str]]],
    folder: Path,
    keep: Callable[[dict[str, Any]], None],
    **how: Any,
) -> None:
    """One RUN of these commands. `keep` gets its result, also while it goes on, should the machine go away.

    `how`: `machine_cores`, as many as the gate may use; `cores`, those that it may run on, all where there are none;
    `cut`, seconds or None; `beside`, the other runs at the same time.
    """
    policy, _, size = run.partition("@")
    limit = None if size == "none" else parse_size(size)
    log, spec, decisions = folder / "log", folder / "spec.json", folder / "gate.log"
    spec.write_text(json.dumps(commands))
    jobs = how["machine_cores"] if policy == "gate" else int(policy.removeprefix("fixed-"))
    command = [sys.executable, str(HERE / "bench.py"), "compile", str(spec), str(log)]
    if policy == "gate":
        curves = folder / "curves.json"
        known = {name: list(zip(curve.times, curve.memory, strict=True)) for name, curve in kernels()}
        curves.write_text(json.dumps(known))
        # Without a limit the gate holds nothing back, and has the order alone.
        budget = ["--budget", str(1 << 50)] if limit is None else []
        gate = [sys.executable, "-m", "pybuild.gate", "--cores", str(jobs), "--curves", str(curves), *budget]
        command = [*gate, "--log", str(decisions), "--", *command]
    else:
        command += ["--jobs", str(jobs)]
    if how["cores"]:
        command = ["taskset", "--cpu-list", ",".join(map(str, how["cores"])), *command]
    result: dict[str, Any] = {**facts(), "run": run, "policy": policy, "jobs": jobs, "limit": limit, **how}
    result |= {"kernels": len(commands), "over": False, "cut_off": True, "out_of_memory": None}
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent), "TMPDIR": str(folder)}
    held: list[tuple[float, int]] = []
    with Cgroup(f"pybuild-bench-{os.getpid()}-{run}", limit) as cgroup:
        enter = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(cgroup.procs)]
        began, epoch = time.monotonic(), time.time()

        def seen() -> dict[str, Any]:
            lines = log.read_text().splitlines() if log.exists() else []
            compiles = [json.loads(line) for line in lines]
            words = [line.split("\t") for line in decisions.read_text().splitlines()] if decisions.exists() else []
            return {
                "seconds": time.monotonic() - began,
                "oom_kills": cgroup.oom_kills(),
                "held_peak": max((memory for _, memory in held), default=0),
                "charged_peak": cgroup.charged(),
                "cpu_seconds": cgroup.cpu_seconds(),
                # Name, seconds when it was asked for and when it ended, exit status.
                "compiles": [
                    [name, round(t0 - began, 2), round(t1 - began, 2), code] for name, t0, t1, code in compiles
                ],
                # What the gate did: seconds, go, stop or end, name; at an end the seconds it took and the most bytes.
                "decisions": [[round(float(t) - epoch, 2), *said[:4]] for t, *said in words],
                "held": [[t, round(memory / GIB, 2)] for t, memory in held[::8]],
            }

        process = subprocess.Popen([*enter, *command], env=environ, cwd=folder, start_new_session=True)
        while process.poll() is None:
            now = time.monotonic() - began
            held.append((round(now, 1), cgroup.held()))
            # ninja ends a build of which a compile was killed; under the gate it goes on.
            if policy != "gate" and cgroup.oom_kills():
                result["out_of_memory"] = now
                break
            if _stop.is_set() or (how["cut"] and now >= how["cut"]):
                break
            if len(held) % 40 == 0:
                keep(result | seen())
            time.sleep(0.25)
        result |= {**seen(), "over": True, "cut_off": process.poll() is None and result["out_of_memory"] is None}
    process.wait()
    failures = [name for name, _, _, status in result["compiles"] if status]
    if failures and not result["oom_kills"]:
        said = log.with_name(f"{log.stem}-{failures[0]}.err").read_text()[-2000:]
        raise SystemExit(f"{run}: {failures[0]} failed:\n{said}")
    keep(result | {"objects": sum(1 for path in folder.glob("*.o") if path.stat().st_size)})


def run_steps(options: argparse.Namespace) -> None:
    """The runs that `options.output` does not have yet, one step after the other."""
    known: dict[str, dict[str, Any]] = {}
    if options.output.exists():
        known = {result["run"]: result for result in json.loads(options.output.read_text())}
    lock = threading.Lock()

    def keep(result: dict[str, Any]) -> None:
        with lock:
            known[result["run"]] = result
            write(options.output, list(known.values()))
        if result["over"]:
            say(f"{result['run']}: {result['seconds']:.0f} s, {len(result['compiles'])} compiles")

    names = [name for name, _ in sample()][:: options.every]
    includes = [options.sources / part for part in ("csrc/flash_attn", "csrc/flash_attn/src", "csrc/cutlass/include")]
    includes += [options.headers, options.headers / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    compiler = [options.nvcc, *(f"-I{path}" for path in includes), "-c", "-c"]
    sources = options.sources / "csrc/flash_attn/src"
    for step in options.steps:
        joined, _, cut = step.partition("/")
        runs = joined.split("+")
        if all(known.get(run, {}).get("over") for run in runs):
            continue
        say(f"{step} ...")
        free = iter(range(os.cpu_count() or 1))
        with ThreadPoolExecutor(len(runs)) as pool:
            found = []
            for run in runs:
                folder = options.work / run
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                commands = [
                    (name, [*compiler, str(sources / f"{name}.cu"), "-o", str(folder / f"{name}.o"), *FLAGS])
                    for name in names
                ]
                jobs = int(run.partition("@")[0].removeprefix("fixed-")) if len(runs) > 1 else 0
                how = {
                    "machine_cores": options.cores,
                    "cores": [next(free) for _ in range(jobs)],
                    "cut": int(cut) if cut else None,
                    "beside": [other for other in runs if other != run],
                }
                found.append(pool.submit(run_real, run, commands, folder, keep, **how))
            try:
                for one in found:
                    one.result()
            except BaseException:
                _stop.set()
                raise


# ---- tables

FIXED_HEAD = ("best fixed, in hindsight", "safe fixed", "upstream 2.8.3", "upstream, newer", "nixpkgs")


def minutes(seconds: float) -> str:
    """Minutes, as the tables have them."""
    return f"{seconds / 60:.1f}"


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(run: dict[str, Any], memory: float) -> str:
    """Minutes and jobs of a fixed number, or what it wanted."""
    if run["peak"] > memory:
        return f"out of memory: {run['peak'] / GIB:.0f} GiB ({run['jobs']})"
    return f"{minutes(run['seconds'])} ({run['jobs']})"


def virtual_table(results: dict[str, Any]) -> str:
    """Every machine, and every policy on it."""
    policies = ("hindsight", "safe", *FORMULAS)
    head = ["cores", "GiB", "lower bound", "no limit", "gate", *FIXED_HEAD]
    rows = [
        [str(row["cores"]), f"{row['memory'] / GIB:.0f}", minutes(row["lower_bound"])]
        + [minutes(row["unlimited"]["seconds"]), f"**{minutes(row['gate']['seconds'])}**"]
        + [cell(row[policy], row["memory"]) for policy in policies]
        for row in results["machines"]
    ]
    return rows_of(head, rows)


def virtual_summary(results: dict[str, Any]) -> str:
    """What the table of machines comes to."""
    rows = results["machines"]
    ratios = sorted(row["gate"]["seconds"] / row["lower_bound"] for row in rows)
    over = sum(row["gate"]["peak"] > row["budget"] for row in rows)
    lines = [
        f"{len(rows)} machines, {results['kernels']} kernels. The gate takes {statistics.median(ratios):.2f} times the "
        f"lower bound (median; {ratios[0]:.2f} to {ratios[-1]:.2f}), and is over its budget on {over} of the machines."
    ]
    for policy, name in (("upstream_2_8_3", "upstream 2.8.3"), ("upstream_newer", "the newer formula")):
        slower = statistics.median(row[policy]["seconds"] / row["gate"]["seconds"] for row in rows)
        out = sum(row[policy]["peak"] > row["memory"] for row in rows)
        lines.append(f"{name} takes {slower:.1f} times as long as the gate (median), and runs out of memory on {out};")
    out = sum(row["nixpkgs"]["peak"] > row["memory"] for row in rows)
    lines.append(f"nixpkgs' settings run out of memory on {out}.")
    return "\n".join(lines)


def took(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds that each compile of a run took, and the most bytes it held (0 where nobody looked)."""
    if result["policy"] != "gate":
        return {name: (t1 - t0, 0.0) for name, t0, t1, status in result["compiles"] if not status}
    done = {name for name, _, _, status in result["compiles"] if not status}
    ends = [said for said in result["decisions"] if said[1] == "end" and said[2] in done]
    return {name: (float(seconds), float(peak)) for _, _, name, seconds, peak in ends}


def as_seen(results: Sequence[dict[str, Any]]) -> Compiles:
    """The curves of the compiles on the machine of these runs.

    Each is the recorded one, stretched to what was seen here: to the shortest time, which is what the kernel takes
    where others disturb it least, and to the highest peak.
    """
    seen: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for name, values in took(result).items():
            seen.setdefault(name, []).append(values)
    found = []
    for name, curve in sample():
        if name in seen:
            shortest = min(seconds for seconds, _ in seen[name])
            highest = max(peak for _, peak in seen[name]) or curve.peak
            found.append((name, curve.scaled(time=shortest / curve.duration, memory=highest / curve.peak)))
    return found


def to_the_end(result: dict[str, Any], compiles: Compiles) -> float | None:
    """Seconds that a run would have taken that was cut off when all of its compiles had started; None for others."""
    started: dict[str, float] = {name: t for t, word, name, *_ in result["decisions"] if word == "go"}
    ended: dict[str, float] = {name: t1 for name, _, t1, _ in result["compiles"]}
    curves = dict(compiles)
    if len(started) < result["kernels"] or not all(name in curves for name in started):
        return None
    return max(ended.get(name, t + curves[name].duration) for name, t in started.items())


def real_row(result: dict[str, Any], compiles: Compiles) -> list[str]:
    """A run for real."""
    size = f"{result['limit'] / GIB:.0f} GiB" if result["limit"] else "no limit"
    time_ = minutes(result["seconds"])
    if result["out_of_memory"] is not None:
        time_ = f"out of memory after {time_}"
    elif result["cut_off"]:
        whole = to_the_end(result, compiles)
        time_ = f"cut off at {time_}" + (f", would have been {minutes(whole)}" if whole else "")
    peak = f"{result['held_peak'] / GIB:.1f} GiB" if result["held_peak"] is not None else "not read"
    kills = str(result["oom_kills"]) if result["oom_kills"] is not None else "not read"
    stops = sum(said[1] == "stop" for said in result["decisions"])
    done = sum(not status for *_, status in result["compiles"])
    policy = "gate" if result["policy"] == "gate" else f"fixed, {result['jobs']}"
    recorded = dict(kernels())
    ratios = [seconds / recorded[name].duration for name, (seconds, _) in took(result).items()]
    slower = f"{statistics.median(ratios):.2f}" if ratios else ""
    return [size, policy, time_, f"{done} of {result['kernels']}", slower, peak, kills, str(stops)]


def real_tables(results: list[dict[str, Any]], computed: Sequence[dict[str, Any]]) -> str:
    """What was run for real on one machine, and what its times make of the policies that were not."""
    machine, first = results[0]["machine"], results[0]
    compiles = as_seen(results)
    head = ["memory", "policy", "minutes", "compiled", "one, to the recorded time", "peak", "OOM kills", "stops"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / GIB:.0f} GiB, Linux {machine['kernel']}, "
        f"nvcc {machine['nvcc'].removeprefix('V')}; commit {first['commit']}, {first['date']}",
        f"\n    {first['command']}\n",
        rows_of(head, [real_row(result, compiles) for result in results]),
    ]
    if computed:
        rows = [
            [f"{row['memory'] / GIB:.0f} GiB", minutes(row["lower_bound"]), minutes(row["gate"]["seconds"])]
            + [cell(row[name], row["memory"]) for name in ("hindsight", "safe", *FORMULAS)]
            for row in computed
        ]
        lines += [
            "\nNot run but computed from the times and peaks seen there; the gate knows the recorded ones:\n",
            rows_of(["memory", "lower bound", "gate", *FIXED_HEAD], rows),
        ]
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The tables of README.md, by name."""
    virtual = json.loads((RESULTS / "virtual.json").read_text())
    found = {"virtual": virtual_table(virtual), "summary": virtual_summary(virtual)}
    found["how"] = f"`{virtual['command']}`, commit {virtual['commit']}, {virtual['date']}, {PROFILE.name}"
    for path in sorted(RESULTS.glob("real-*.json")):
        found[path.stem] = real_tables(json.loads(path.read_text()), virtual["as_seen"].get(path.stem, ()))
    return found


def with_tables(text: str) -> str:
    """README.md with its tables made anew, between <!-- NAME --> and <!-- end -->."""
    found = tables()

    def anew(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{found[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", anew, text, flags=re.DOTALL)


# ---- results


def say(text: str) -> None:
    """For who is waiting, on standard error."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def write(path: Path, result: object) -> None:
    """The result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    path.with_suffix(".new").replace(path)


def _said(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()
    except OSError:
        return ""


def facts() -> dict[str, Any]:
    """Machine, commit and command, with names for paths. PYBUILD_COMMIT says the commit where there is no git."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    nvcc = re.search(r"V[\d.]+", _said("nvcc", "--version"))
    return {
        "commit": os.environ.get("PYBUILD_COMMIT") or _said("git", "describe", "--always", "--dirty", "--exclude", "*"),
        "command": shlex.join(["bench/bench.py", *words]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": {
            "cpu": model[1] if model else platform.machine(),
            "cores": os.cpu_count(),
            "memory": int(total[1]) * 1024 if total else 0,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "nvcc": nvcc[0] if nvcc else "",
        },
    }


def main() -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    virtual = commands.add_parser("virtual")
    virtual.add_argument("--output", type=Path, default=RESULTS / "virtual.json")
    real = commands.add_parser("real")
    real.add_argument("--sources", type=Path, required=True, help="flash-attn's sdist, unpacked")
    real.add_argument("--headers", type=Path, required=True, help="torch/include")
    real.add_argument("--nvcc", default="nvcc")
    real.add_argument("--work", type=Path, required=True, help="a folder for objects and temporary files")
    real.add_argument("--output", type=Path, default=RESULTS / "real.json")
    real.add_argument("--cores", type=int, default=os.cpu_count(), help="of the gate; all without it")
    real.add_argument("--every", type=int, default=1, help="of the 24 kernels every Nth")
    real.add_argument("steps", nargs="+", metavar="RUN")
    inner = commands.add_parser("compile")
    inner.add_argument("spec", type=Path)
    inner.add_argument("log", type=Path)
    inner.add_argument("--jobs", type=int, default=int(os.environ.get("MAX_JOBS", "1")))
    commands.add_parser("tables")
    options = parser.parse_args()
    if options.what == "virtual":
        run_virtual(options.output)
    elif options.what == "real":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        run_steps(options)
    elif options.what == "compile":
        return compile_all(options.spec, options.log, options.jobs)
    else:
        readme = HERE / "README.md"
        readme.write_text(with_tables(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
