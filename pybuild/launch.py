"""Start one compiler when the gate lets it in: `launch.py COMPILER ARGUMENT...`, as with ccache. Standard library only.

The launcher asks the gate whose socket is PYBUILD_GATE, runs the compiler in a process group of its own, and passes
on its output, its exit status and the signals it gets. What does not compile (a link, `--version`) is run at once.

What the two say to each other is lines of words with a tab between them:

    launcher: ask NAME KIND             may NAME (the source's stem) start? KIND is cuda or c++
    launcher: ask NAME KIND alone       the same, with nothing beside it
    gate:     go                        yes
    launcher: runs GROUP                it runs, in this process group
    launcher: ended STATUS              it is over, by itself
    gate:     stop                      memory is short: end the compiler, and ask again

A launcher that closes the connection is done. While its compiler runs it shares a lock on a file beside the socket;
when the gate is gone, whoever has not started yet takes that lock alone, so that one runs at a time.

Between launcher and compiler stands a guard, a fork of the launcher that leads the process group: should the launcher
be killed, the guard ends the whole group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from types import FrameType

CUDA_SUFFIXES = (".cu",)
CXX_SUFFIXES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".c")

# nvcc's and gcc's ways to say that a compile is asked for, and no link.
_COMPILING = frozenset({"-c", "--compile", "-dc", "-dw", "--device-c", "--device-w", "-cubin", "-ptx", "-fatbin"})
# Options with a file that the compiler writes.
_OUTPUTS = frozenset({"-o", "--output-file", "-MF", "--dependency-output"})

# What compilers and shells say of a child that was killed: nvcc, gcc, clang, sh.
_KILLED = (b"signal 9", b"Killed signal", b"Killed\n")

# Seconds that a compiler has to end after a signal, before it is killed.
_GRACE = 1.0

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def source_of(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Name and kind of what is compiled: the stem of the source, and cuda or c++. None where nothing is."""
    if _COMPILING.isdisjoint(arguments):
        return None
    found = [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if argument.endswith(CUDA_SUFFIXES + CXX_SUFFIXES) and not argument.startswith("-") and before not in _OUTPUTS
    ]
    if not found:
        return None
    stem = os.path.basename(found[-1]).rpartition(".")[0]  # noqa: PTH119 (pathlib takes 10 ms to import)
    languages = _values_of(("-x",), arguments)
    cuda = "cu" in languages or "cuda" in languages or found[-1].endswith(CUDA_SUFFIXES)
    return stem, "cuda" if cuda else "c++"


def outputs_of(arguments: Sequence[str]) -> list[str]:
    """The files that the compiler writes, as far as options name them."""
    return _values_of(_OUTPUTS, arguments)


def _values_of(options: Collection[str], arguments: Sequence[str]) -> list[str]:
    return [arguments[at + 1] for at, option in enumerate(arguments[:-1]) if option in options]


def say(text: str) -> None:
    """A line for the user, on standard error in one piece."""
    os.write(2, f"pybuild: {text}\n".encode())


class Gate:
    """The connection to the gate, and what takes its place when it is gone."""

    def __init__(self, path: str) -> None:
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._received = b""
        self.socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(path)
        except OSError:
            self.lose()

    def lose(self) -> None:
        """The gate is gone."""
        if self.socket:
            self.socket.close()
        self.socket = None

    def send(self, *words: str) -> None:
        """Say something to the gate."""
        try:
            if self.socket:
                self.socket.sendall("\t".join(words).encode() + b"\n")
        except OSError:
            self.lose()

    def hear(self) -> str:
        """What the gate says next; '' when it is gone."""
        while self.socket and b"\n" not in self._received:
            try:
                more = self.socket.recv(256)
            except OSError:
                more = b""
            if not more:
                self.lose()
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def enter(self, name: str, *words: str) -> None:
        """Wait until NAME may start."""
        self.send("ask", name, *words)
        heard = self.hear()
        while self.socket and heard != "go":
            heard = self.hear()
        if self.socket:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            say(f"the gate is gone; {name} is compiled when nothing else is")
            fcntl.flock(self._lock, fcntl.LOCK_EX)


class Compiler:
    """The running compiler: a guard, its process group, and what it says on standard error."""

    def __init__(self, command: Sequence[str], tmpdir: str | None) -> None:
        self.said = b""
        self.signalled = 0
        # What the user wants ignored (nohup) stays ignored.
        self._passed = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        ended, ended_here = os.pipe()
        alive, alive_here = os.pipe()
        # Standard error goes through us, since compilers say there that a child of theirs was killed. A terminal is
        # left to the compiler: it shows colours there.
        self._errors, errors = (-1, 2) if os.isatty(2) else os.pipe()
        # A signal between the two would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        self.group = os.fork()
        if not self.group:
            os.close(ended)
            os.close(alive_here)
            _guard(command, tmpdir, alive, errors, self._passed)
        os.close(ended_here)
        os.close(alive)
        if errors != 2:
            os.close(errors)
        with contextlib.suppress(OSError):  # the guard was faster, or is over
            os.setpgid(self.group, self.group)
        self._ended, self._alive = ended, alive_here
        for number in self._passed:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self.kill)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number
        self._send(number)
        signal.setitimer(signal.ITIMER_REAL, _GRACE)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def kill(self, *_: object) -> None:
        """End the whole group at once."""
        self._send(signal.SIGKILL)

    def wait(self, gate: Gate) -> bool:
        """Until the compiler has ended, or the gate wants it to stop: then False."""
        watched = [self._ended, *[self._errors] * (self._errors >= 0)]
        while True:
            connection = [gate.socket.fileno()] if gate.socket else []
            ready, _, _ = select.select([*watched, *connection], [], [])
            if self._errors in ready and not self._copy_errors():
                watched.remove(self._errors)
            if self._ended in ready:
                return True
            if connection and connection[0] in ready and gate.hear() == "stop":
                return False

    def _copy_errors(self) -> bool:
        """Pass on what is there; whether there may be more."""
        text = os.read(self._errors, 65536)
        self.said = (self.said + text)[-4096:]
        there = bool(text)
        while text:
            text = text[os.write(2, text) :]
        return there

    def close(self) -> int:
        """End what is left of the group; the exit status, 128 + n after signal n."""
        _, status = os.waitpid(self.group, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in self._passed:
            signal.signal(number, signal.SIG_DFL)
        if status:
            # What was killed may still be about to write its output.
            for _ in range(50):
                try:
                    os.killpg(self.group, signal.SIGKILL)
                except ProcessLookupError:
                    break
                time.sleep(0.01)
        if self._errors >= 0:
            # Somebody in the background may hold it open.
            os.set_blocking(self._errors, False)
            with contextlib.suppress(BlockingIOError):
                while self._copy_errors():
                    pass
            os.close(self._errors)
        os.close(self._ended)
        os.close(self._alive)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def _guard(command: Sequence[str], tmpdir: str | None, alive: int, errors: int, passed: Sequence[int]) -> None:
    """Lead the group: start the compiler, and end all of it when the launcher is gone. Does not return."""
    try:
        os.setpgid(0, 0)
        # The signals that the launcher passes on are for the compiler.
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        compiler = os.fork()
        if not compiler:
            # Python ignores SIGPIPE, which a compiler must not inherit.
            for passed_on in (*passed, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(passed_on, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            os.environ["PYBUILD_ADMITTED"] = "1"
            if tmpdir:
                os.environ["TMPDIR"] = tmpdir
            os.dup2(errors, 2)
            try:
                os.execvp(command[0], [*command])
            except OSError as error:
                say(f"{command[0]} can't be started: {error.strerror}")
                os._exit(127)
        if errors != 2:
            os.close(errors)
        while True:
            ready, _, _ = select.select([woken, alive], [], [])
            if alive in ready:
                # The launcher was killed. SIGTERM is ignored here, and ends what we are about to clear up after.
                os.killpg(0, signal.SIGTERM)
                time.sleep(0.1)
                _remove_tmpdir(tmpdir)
                os.killpg(0, signal.SIGKILL)
            os.read(woken, 512)
            ended, status = os.waitpid(compiler, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    finally:
        os._exit(70)


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line[9:])
    return 0


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _private_tmpdir() -> str | None:
    """A folder for the compiler's temporary files: they are gone with it, whatever ends it. None where none can be."""
    top = os.environ.get("TMPDIR") or "/tmp"
    for number in range(100):
        path = f"{top}/pybuild-{os.getpid()}-{number}"
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102
            return path
        except FileExistsError:
            continue
        except OSError:
            break
    return None


def _remove_tmpdir(path: str | None) -> None:
    try:
        if path:
            os.rmdir(path)  # noqa: PTH106
    except OSError:
        import shutil

        shutil.rmtree(str(path), ignore_errors=True)


def launch(gate: Gate, command: Sequence[str], name: str, kind: str) -> int:
    """Run the compiler, again where the gate or the kernel stopped it; its exit status."""
    alone = False
    while True:
        gate.enter(name, kind, *["alone"] * alone)
        kills = _oom_kills()
        tmpdir = _private_tmpdir()
        compiler = Compiler(command, tmpdir)
        gate.send("runs", str(compiler.group))
        stopped = not compiler.wait(gate)
        if stopped:
            compiler.kill()
        status = compiler.close()
        _remove_tmpdir(tmpdir)
        if compiler.signalled:
            _remove(outputs_of(command))
            os.kill(os.getpid(), compiler.signalled)
        if status == 0:
            gate.send("ended", "0")
            return 0
        if stopped:
            _remove(outputs_of(command))
            say(f"memory is short: {name} was stopped, and is compiled again later")
            continue
        killed = status == 137 or any(word in compiler.said for word in _KILLED)
        if not killed and _oom_kills() == kills:
            gate.send("ended", str(status))
            return status
        _remove(outputs_of(command))
        if alone:
            import resource

            held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
            say(
                f"{name} was killed for lack of memory, with no other compile beside it; it held {held:.1f} GiB.\n"
                "Give the machine or its container more memory or swap, end other programs, or compile for fewer "
                "architectures at once (NVCC_THREADS=1)."
            )
            return status
        say(f"{name} was killed, most likely for lack of memory; it is compiled once more, alone")
        alone = True


def main() -> int:
    """Do what the command line says; the exit status."""
    command = sys.argv[1:]
    if not command:
        sys.stderr.write("usage: launch.py COMPILER ARGUMENT...\n")
        return 2
    path = os.environ.get("PYBUILD_GATE", "")
    source = source_of(command[1:])
    # A compiler's own calls of a compiler (nvcc's host compiler) belong to what was admitted.
    if not path or not source or "PYBUILD_ADMITTED" in os.environ:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            say(f"{command[0]} can't be started: {error.strerror}")
            return 127
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return launch(Gate(path), command, *source)


if __name__ == "__main__":
    sys.exit(main())
