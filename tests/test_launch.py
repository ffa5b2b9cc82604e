"""The launcher and the gate's server, with real processes and small scripts as compilers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pybuild.launch
from pybuild.gate import available
from pybuild.launch import outputs_of, source_of

LAUNCH = [sys.executable, "-I", "-S", pybuild.launch.__file__]
MIB = 1024**2

# The server alone, as gated() starts it, so that it can be killed alone.
SERVER = """
import json, socket, sys
from pybuild.curve import Curve
from pybuild.gate import Server
path, cores, budget, curves, log = json.loads(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen(100)
print("ready", flush=True)
file = open(log, "a", buffering=1)
curves = {name: Curve(tuple(t for t, _ in c), tuple(m for _, m in c)) for name, c in curves.items()}
Server(listener, curves, cores, budget=budget, log=lambda line: file.write(line + "\\n")).serve()
"""


class Workshop:
    """A folder with compilers, a gate, and what was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "gate"
        self.log = folder / "log"
        self.started: list[subprocess.Popen[str]] = []
        self.enter: list[str] = []

    def gate(
        self, cores: int, curves: dict[str, list[tuple[float, float]]], budget: int | None
    ) -> subprocess.Popen[str]:
        argument = json.dumps([str(self.socket), cores, budget, curves, str(self.log)])
        server = self.start([sys.executable, "-c", SERVER, argument], stdout=subprocess.PIPE)
        assert server.stdout and server.stdout.readline() == "ready\n"
        return server

    def compiler(self, script: str) -> str:
        """An executable shell script; `$out` is the file that it is to write."""
        path = self.folder / f"cc{len(list(self.folder.glob('cc*')))}"
        path.write_text(f'#!/bin/sh\nfor out; do :; done\ncd "{self.folder}"\n{script}\n')
        path.chmod(0o755)
        return str(path)

    def launch(self, name: str, compiler: str, **environ: str) -> subprocess.Popen[str]:
        command = [*LAUNCH, compiler, "-c", f"src/{name}.cu", "-o", str(self.folder / f"{name}.o")]
        environ = {"PYBUILD_GATE": str(self.socket), "TMPDIR": str(self.folder), **environ}
        return self.start(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def start(self, command: list[str], **options: object) -> subprocess.Popen[str]:
        command = [*self.enter, *command]
        process = subprocess.Popen(command, text=True, start_new_session=True, **options)  # type: ignore[call-overload]
        assert isinstance(process, subprocess.Popen)
        self.started.append(process)
        return process

    def events(self) -> list[list[str]]:
        """What the gate did: go, stop or end, and of which compile."""
        return [line.split("\t")[:2] for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path)
    yield shop
    for process in shop.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def number_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("-c a/b/flash_fwd.cu -o flash_fwd.o", ("flash_fwd", "cuda")),
        ("-MD -MF x.d -c -c api.cpp -o api.o", ("api", "c++")),
        ("-x cu -c kernel.cpp -o k.o", ("kernel", "cuda")),
        ("-dc a.cu", ("a", "cuda")),
        ("-c -MF weird.cpp one.cc", ("one", "c++")),
        ("-shared a.o b.o -o lib.so", None),
        ("--version", None),
        ("-E a.cpp", None),
        ("-c", None),
    ],
)
def test_what_is_compiled(arguments: str, found: tuple[str, str] | None) -> None:
    assert source_of(arguments.split()) == found


def test_the_files_that_are_written() -> None:
    assert outputs_of(["-MF", "a.d", "-c", "a.cu", "-o", "a.o"]) == ["a.d", "a.o"]


def test_output_and_status_are_passed_on(workshop: Workshop) -> None:
    workshop.gate(1, {}, 1 << 40)
    run = workshop.launch("k", workshop.compiler("echo out; echo err >&2; exit 3"))
    assert run.communicate() == ("out\n", "err\n")
    assert run.returncode == 3
    until(lambda: ["end", "k"] in workshop.events())
    assert workshop.events() == [["go", "k"], ["end", "k"]]
    crashing = workshop.launch("k", workshop.compiler("kill -SEGV $$"))
    crashing.communicate()
    assert crashing.returncode == 128 + signal.SIGSEGV


def test_nothing_is_asked_for_what_is_no_compile(workshop: Workshop) -> None:
    compiler = workshop.compiler('echo "$@"')
    run = subprocess.run(
        [*LAUNCH, compiler, "--version"], env={**os.environ, "PYBUILD_GATE": "/none"}, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "--version\n", "")


def test_no_compiler(workshop: Workshop) -> None:
    workshop.gate(1, {}, 1 << 40)
    run = workshop.launch("k", "/no/such/compiler")
    assert run.communicate() == ("", "pybuild: /no/such/compiler can't be started: No such file or directory\n")
    assert run.returncode == 127


def test_as_many_as_cores(workshop: Workshop) -> None:
    workshop.gate(2, {"*.cu": [(0, 0), (5, MIB)]}, 1 << 40)
    compiler = workshop.compiler("sleep 0.2")
    for run in [workshop.launch(f"k{n}", compiler) for n in range(5)]:
        assert run.wait() == 0
    until(lambda: len(workshop.events()) == 10)
    running = most = 0
    for event, _ in workshop.events():
        running += 1 if event == "go" else -1
        most = max(most, running)
    assert most == 2


def test_as_many_as_memory_holds(workshop: Workshop) -> None:
    workshop.gate(8, {"*.cu": [(0, 0), (5, 900 * MIB), (60, 900 * MIB)]}, 1000 * MIB)
    compiler = workshop.compiler("sleep 0.1")
    for run in [workshop.launch(f"k{n}", compiler) for n in range(3)]:
        assert run.wait() == 0
    until(lambda: len(workshop.events()) == 6)
    assert [event for event, _ in workshop.events()] == ["go", "end"] * 3


def test_a_compilers_own_compiler_does_not_wait(workshop: Workshop) -> None:
    workshop.gate(1, {}, 1 << 40)
    inner = workshop.compiler("echo inner")
    outer = workshop.compiler(f"{' '.join(LAUNCH)} {inner} -c host.cpp -o h.o")
    run = workshop.launch("k", outer)
    assert run.communicate(timeout=20) == ("inner\n", "")


def test_a_killed_launcher_takes_its_compiler_with_it(workshop: Workshop) -> None:
    workshop.gate(1, {}, 1 << 40)
    killed = workshop.launch("k", workshop.compiler("sleep 100 & echo $! >child; echo $$ >compiler; wait"))
    compiler, child = number_in(workshop.folder / "compiler"), number_in(workshop.folder / "child")
    after = workshop.launch("after", workshop.compiler("exit 0"))
    killed.kill()
    until(lambda: not alive(compiler) and not alive(child), 2)
    assert after.wait(20) == 0
    until(lambda: not list(workshop.folder.glob("pybuild-*")), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(workshop: Workshop, number: signal.Signals) -> None:
    workshop.gate(1, {}, 1 << 40)
    run = workshop.launch("k", workshop.compiler("sleep 100 & echo $! >child; echo x >$out; wait"))
    child = number_in(workshop.folder / "child")
    run.send_signal(number)
    assert run.wait(3) == -number
    assert not alive(child)
    assert not (workshop.folder / "k.o").exists()
    assert not list(workshop.folder.glob("pybuild-*")), "temporary files are left"


def test_a_compiler_that_ignores_signals_is_killed(workshop: Workshop) -> None:
    workshop.gate(1, {}, 1 << 40)
    run = workshop.launch("k", workshop.compiler("trap '' TERM; echo $$ >compiler; sleep 100; sleep 100"))
    compiler = number_in(workshop.folder / "compiler")
    run.terminate()
    assert run.wait(5) == -signal.SIGTERM
    assert not alive(compiler)


HOG = f"exec {sys.executable} -S -c 'import sys, time; b = b\"x\" * int(sys.argv[1]); time.sleep(float(sys.argv[2]))'"


def test_over_the_budget_the_youngest_is_stopped_and_asked_for_again(workshop: Workshop) -> None:
    workshop.gate(2, {"*.cu": [(0, 0), (5, 20 * MIB), (60, 20 * MIB)]}, 300 * MIB)
    old = workshop.launch("old", workshop.compiler(f"{HOG} {200 * MIB} 3"))
    until(lambda: ["go", "old"] in workshop.events())
    script = f"echo >>runs; [ -e young.o ] && echo kept; echo part >young.o; {HOG} {200 * MIB} 3"
    young = workshop.launch("young", workshop.compiler(script))
    out, err = young.communicate(timeout=60)
    assert (young.returncode, old.wait(), out) == (0, 0, "")
    assert err == "pybuild: memory is short: young was stopped, and is compiled again later\n"
    assert (workshop.folder / "runs").read_text() == "\n\n"
    until(lambda: len(workshop.events()) == 6)
    events = [" ".join(event) for event in workshop.events()]
    assert events == ["go old", "go young", "stop young", "end old", "go young", "end young"]


@pytest.mark.parametrize(
    "death",
    ["kill -KILL $$", "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9"],
)
def test_a_killed_compile_is_done_again_alone(workshop: Workshop, death: str) -> None:
    workshop.gate(2, {}, 1 << 40)
    beside = workshop.launch("beside", workshop.compiler("sleep 1; echo beside >>order"))
    until(lambda: ["go", "beside"] in workshop.events())
    script = f"[ -e once ] && {{ echo again >>order; exit 0; }}; echo >once; echo x >$out; {death}"
    run = workshop.launch("k", workshop.compiler(script))
    _, err = run.communicate(timeout=20)
    assert (run.returncode, beside.wait()) == (0, 0)
    assert err.endswith("pybuild: k was killed, most likely for lack of memory; it is compiled once more, alone\n")
    assert (workshop.folder / "order").read_text() == "beside\nagain\n"
    assert not (workshop.folder / "k.o").exists()


def test_killed_alone_it_is_reported(workshop: Workshop) -> None:
    workshop.gate(2, {}, 1 << 40)
    run = workshop.launch("k", workshop.compiler("echo >>runs; kill -KILL $$"))
    _, err = run.communicate(timeout=20)
    assert run.returncode == 137
    assert (workshop.folder / "runs").read_text() == "\n\n"
    assert "k was killed for lack of memory, with no other compile beside it; it held 0.0 GiB" in err
    assert "NVCC_THREADS=1" in err


def test_an_ordinary_failure_is_not_repeated(workshop: Workshop) -> None:
    workshop.gate(2, {}, 1 << 40)
    run = workshop.launch("k", workshop.compiler("echo >>runs; echo \"error: 'Killed' was not declared\" >&2; exit 1"))
    run.communicate(timeout=20)
    assert run.returncode == 1
    assert (workshop.folder / "runs").read_text() == "\n"


def test_without_the_gate_one_runs_at_a_time(workshop: Workshop) -> None:
    server = workshop.gate(2, {}, 1 << 40)
    compiler = workshop.compiler("echo + >>order; sleep 0.5; echo - >>order")
    admitted = [workshop.launch(f"in{n}", compiler) for n in range(2)]
    until(lambda: len(workshop.events()) == 2)
    waiting = [workshop.launch(f"out{n}", compiler) for n in range(2)]
    server.kill()
    server.wait()
    late = workshop.launch("late", compiler)
    assert all(run.wait(30) == 0 for run in [*admitted, *waiting, late])
    # Those that ran go on; then one at a time.
    assert (workshop.folder / "order").read_text().split() == ["+", "+", "-", "-", *["+", "-"] * 3]
    assert late.stderr
    assert late.stderr.read() == "pybuild: the gate is gone; late is compiled when nothing else is\n"


GATE = [sys.executable, "-m", "pybuild.gate"]


def gated(tmp_path: Path, script: str, *options: str, cores: int = 2) -> subprocess.Popen[str]:
    curves = tmp_path / "curves.json"
    curves.write_text('{"*.cu": [[0, 0], [5, 1000000]]}')
    command = [*GATE, f"--cores={cores}", f"--curves={curves}", *options, "--", "sh", "-c", script]
    pipe = subprocess.PIPE
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, start_new_session=True, env=environ)


def test_a_build_under_the_gate(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho compiled\n")
    compiler.chmod(0o755)
    script = f"echo $MAX_JOBS; $PYBUILD_LAUNCHER {compiler} -c k.cu; exit 5"
    build = gated(tmp_path, script, f"--log={log}")
    out, err = build.communicate(timeout=30)
    assert (out, err, build.returncode) == ("8\ncompiled\n", "", 5)
    assert log.read_text().splitlines()[0].split("\t")[1:] == ["go", "k"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cc", "curves.json", "log"]


def test_signals_are_as_a_command_expects_them(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    # Without those above 28: glibc's own, which its posix_spawn ignores.
    compiler.write_text("#!/bin/sh\ngrep -E 'Sig(Blk|Ign)' /proc/self/status | grep -oE '.{7}$'\n")
    compiler.chmod(0o755)
    usual = subprocess.run([compiler], capture_output=True, text=True).stdout
    script = f"{compiler}; $PYBUILD_LAUNCHER {compiler} --version; $PYBUILD_LAUNCHER {compiler} -c k.cu"
    assert gated(tmp_path, script).communicate(timeout=30) == (usual * 3, "")


@pytest.mark.parametrize("victim", ["outer", "guard"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_all_is_gone_two_seconds_after_the_end(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    # A stubborn compiler, one that has left its parents, and one that waits to be let in.
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\ntrap '' TERM INT HUP\ncd {tmp_path}\necho $$ >$2.pid\nsleep 100\nsleep 100\n")
    compiler.chmod(0o755)
    launch = f"$PYBUILD_LAUNCHER {compiler} -c"
    script = f"{launch} a.cu & setsid {launch} b.cu & sleep 0.5; {launch} c.cu & echo $! >{tmp_path}/c; wait"
    build = gated(tmp_path, script)
    try:
        pids = [number_in(tmp_path / name) for name in ("a.cu.pid", "b.cu.pid", "c")]
        (guard,) = map(int, Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split())
        start = time.monotonic()
        os.kill(build.pid if victim == "outer" else guard, number)
        until(lambda: not any(alive(pid) for pid in [*pids, build.pid, guard]), 5)
        assert time.monotonic() - start < 2
    finally:
        build.terminate()
        build.communicate()
    assert build.returncode in (128 + number, -number)


def test_what_can_not_be_used_is_said(tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        run = subprocess.run([*GATE, *arguments], capture_output=True, text=True)
        assert run.returncode == 2
        return run.stderr.splitlines()[-1]

    bad = tmp_path / "bad.json"
    bad.write_text('{"k": [[5, 1]]}')
    good = tmp_path / "good.json"
    good.write_text("{}")
    name = "python -m pybuild.gate: error:"
    assert error("--cores=0", f"--curves={good}", "--", "true") == f"{name} --cores: at least 1"
    assert error("--cores=1", f"--curves={bad}", "--", "true").startswith(f"{name} {bad} holds no curves")
    assert error("--cores=1", f"--curves={tmp_path}/no", "--", "true").endswith(
        "can't be read: No such file or directory"
    )
    missing = error("--cores=1", f"--curves={good}", "--", "/no/such/command")
    assert missing == f"{name} /no/such/command can't be started: No such file or directory"


KERNEL = """
#include <cub/cub.cuh>
template <int N> __global__ void sort(float* x) {
  using Sort = cub::BlockRadixSort<float, 64, N>;
  __shared__ typename Sort::TempStorage storage;
  float keys[N];
  for (int i = 0; i < N; i++) keys[i] = x[threadIdx.x * N + i];
  Sort(storage).Sort(keys);
  for (int i = 0; i < N; i++) x[threadIdx.x * N + i] = keys[i];
}
template __global__ void sort<%d>(float*);
"""


GROWING = """
import sys, time
held = []
while len(held) < int(sys.argv[1]):
    held.append(b"x" * 1024**2)
    if len(held) % 64 == 0:
        time.sleep(0.1)
time.sleep(20)
"""


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[tuple[Path, Callable[[], int]]]:
    """A new cgroup with a limit of memory, and how often the kernel has killed for it. Skips where none can be made."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory") / f"pybuild-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")

    def kills() -> int:
        text = (folder / ("memory.events" if v2 else "memory.oom_control")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    try:
        yield folder, kills
    finally:
        while pids := (folder / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        folder.rmdir()


def test_a_cgroups_limit_is_seen() -> None:
    if available() < 512 * MIB:
        pytest.skip("too little memory on this machine")
    with memory_cgroup(256 * MIB) as (cgroup, _):
        script = f'echo $$ >{cgroup}/cgroup.procs; exec "$@"'
        ask = [sys.executable, "-c", "from pybuild.gate import available; print(available())"]
        said = subprocess.run(["sh", "-c", script, "sh", *ask], capture_output=True, text=True)
        assert 150 * MIB < int(said.stdout) < 256 * MIB, said.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_two_dozen_compiles_survive_a_hog_a_dead_launcher_and_a_dead_gate(workshop: Workshop) -> None:
    folder = workshop.folder
    names = [f"sort{n}" for n in range(24)]
    for number, name in enumerate(names):
        (folder / f"{name}.cu").write_text(KERNEL % (number + 1))
    with memory_cgroup(8 * 1024 * MIB) as (cgroup, kills):
        # Each takes 0.6 GiB; nothing is known of them, so that the gate learns it.
        workshop.enter = ["sh", "-c", f'echo $$ >{cgroup}/cgroup.procs; exec "$@"', "sh"]
        gate = workshop.gate(6, {}, None)

        def start(name: str) -> subprocess.Popen[str]:
            (folder / name).mkdir()
            compiler = workshop.compiler(f'exec nvcc -arch=sm_90 -c {name}.cu -o "$out"')
            return workshop.launch(name, compiler)

        def ended() -> int:
            return sum(event == "end" for event, _ in workshop.events())

        runs = {name: start(name) for name in names}
        until(lambda: ended() >= 4, 600)
        victim = next(name for name, run in runs.items() if run.poll() is None and ["go", name] in workshop.events())
        runs[victim].kill()
        runs[victim].communicate()
        (folder / victim).rmdir()
        runs[victim] = start(victim)
        until(lambda: ended() >= 8, 600)
        # It leaves room for two, and takes it in ten seconds.
        hog = workshop.start([sys.executable, "-c", GROWING, str(6 * 1024)])
        hog.wait()
        assert hog.returncode == 0
        assert "stop" in [event for event, _ in workshop.events()]
        until(lambda: ended() >= 14, 600)
        gate.kill()
        assert all(run.wait(600) == 0 for run in runs.values()), [run.communicate()[1] for run in runs.values()]
        assert kills() == 0
        assert all((folder / f"{name}.o").stat().st_size for name in names)
        assert not list(folder.glob("pybuild-*")), "temporary files are left"
