"""nix: finding it, the store it can use here, its command lines, and its failures.

docs/nix.md says why the command lines are as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import hashlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

import psutil

from pybuild.errors import BuildError, PybuildError
from pybuild.nixlog import TAIL_LINES, BuildLog, strip_ansi
from pybuild.units import GIB, format_gib

OLDEST = (2, 8)

# Free space that a build needs where the store is: the wheels of a release, packed and unpacked, and the
# objects of the build (issue 2 of this project sets the figure).
FREE_NEEDED = 20 * GIB

FEATURES = ("--extra-experimental-features", "nix-command flakes")
INTERNAL_JSON = ("--log-format", "internal-json")
SANDBOX = ("--option", "sandbox", "true", "--option", "sandbox-fallback", "false")

# The user's caches are used, but one that doesn't answer is not waited for. nix's own connect-timeout leaves it
# to curl (300 s), with five attempts for each cache; docs/nix.md has what was measured.
NETWORK = ("--option", "connect-timeout", "3", "--option", "download-attempts", "3")

GET_NIX = (
    "Install the distribution's package (Debian, Ubuntu: apt install nix-bin), or put nix-portable on PATH, "
    "or name either of them with --nix PATH."
)

Where = Literal["local", "daemon", "home", "portable"]


@dataclass(frozen=True)
class Store:
    """A nix store that this user may build in.

    `where`: "local" is /nix/store, written by nix itself; "daemon" is /nix/store, written by nix's daemon;
    "home" a store of the user's own; "portable" that of nix-portable. `root` is the folder under which
    nix/store lies in this file system. `options` go on every command line of nix.
    """

    where: Where
    root: Path = Path("/")
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a store can't be used, and which setting would change that."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Nix:
    """A nix that works here. `nix` and `nix_store` are the words that start the two programs."""

    nix: tuple[str, ...]
    nix_store: tuple[str, ...]
    version: tuple[int, ...]
    store: Store
    environ: Mapping[str, str]

    # Command lines

    def command(self, *args: str) -> list[str]:
        """The command line of `nix ARGS...` on this store; ARGS begin with the subcommand."""
        return [*self.nix, *args, *FEATURES, *self.store.options]

    def flake_argv(
        self,
        verb: str,
        installable: str,
        *,
        overrides: Mapping[str, Path] | None = None,
        sandbox_paths: Sequence[str] = (),
        extra: Sequence[str] = (),
    ) -> list[str]:
        """The command line of `nix VERB` (build, develop, eval, run) on an output of a flake.

        `overrides` maps inputs of the flake to folders that take their place. `sandbox_paths` are paths of
        this machine that the sandbox gets; a build that has any is made here and from what the store has: no
        other machine has those paths, and no cache its outputs. `extra` is the line's end. Raises PybuildError
        for a sandbox path that nix's setting can't hold.
        """
        for unfit in (path for path in sandbox_paths if re.search(r"[\s=]|\?$", path)):
            raise PybuildError(
                f"nix's sandbox can't be given {unfit!r}: its setting holds no path with a blank, = or ? in it",
                "Move it, or use one that lies elsewhere.",
            )
        argv = [*self.command(verb, installable), "--no-write-lock-file"]
        for name, path in (overrides or {}).items():
            argv += ["--override-input", name, f"path:{path}"]
        argv += SANDBOX
        argv += [*host_options(sandbox_paths), "--offline"] if sandbox_paths else NETWORK
        return [*argv, *extra]

    def build_argv(
        self,
        flake_ref: str,
        attr: str,
        *,
        cores: int,
        max_jobs: int = 1,
        overrides: Mapping[str, Path] | None = None,
        sandbox_paths: Sequence[str] = (),
        out_link: Path | None = None,
        extra: Sequence[str] = (),
    ) -> list[str]:
        """The command line that builds `attr` of `flake_ref`; it prints JSON, which `outputs` reads.

        `cores` is what each builder may use, `max_jobs` how many builders run at once; for the others see
        `flake_argv`.
        """
        return self.flake_argv(
            "build",
            f"{flake_ref}#{attr}",
            overrides=overrides,
            sandbox_paths=sandbox_paths,
            extra=[
                *("--max-jobs", str(max_jobs), "--cores", str(cores)),
                "--json",  # nix 2.8 doesn't know --print-out-paths
                *(("--out-link", str(out_link)) if out_link else ("--no-link",)),
                *extra,
            ],
        )

    def realise_argv(
        self, derivation: str, *, cores: int, sandbox_paths: Sequence[str] = (), builder: str | None = None
    ) -> list[str]:
        """The command line that builds one derivation of the store; for the arguments see `flake_argv`.

        With `builder`, a line of nix's option `builders`, it is built there and not here.
        """
        argv = [*self.nix_store, *self.store.options, "--realise", derivation, "--cores", str(cores)]
        argv += ["--max-jobs", "0" if builder else "1", *SANDBOX]
        # nix-store has no --offline.
        argv += [*host_options(sandbox_paths, builder), "--option", "substitute", "false"] if sandbox_paths else NETWORK
        return argv

    # Store

    def run(self, argv: Sequence[str], *, doing: str, given: str = "") -> str:
        """Standard output of a short nix command, to which `given` is standard input.

        Raises BuildError with nix's own words, naming `doing`.
        """
        status, stdout, log = self._run(argv, given)
        if status != 0:
            raise self.explain_failure(log, doing=doing)
        return stdout

    def _run(self, argv: Sequence[str], given: str = "") -> tuple[int, str, BuildLog]:
        """Exit status, standard output and log of a short nix command."""
        argv = [*argv, *INTERNAL_JSON]
        done = subprocess.run(argv, input=given, capture_output=True, text=True, env=dict(self.environ), check=False)
        log = BuildLog()
        for line in done.stderr.splitlines():
            log.feed(line)
        return done.returncode, done.stdout, log

    def add_fixed(self, path: Path) -> str:
        """Add the file `path` to the store by its sha256 and its name; the store path. Raises BuildError."""
        argv = [*self.nix_store, *self.store.options, "--add-fixed", "sha256", str(path)]
        return self.run(argv, doing=f"adding {path.name} to the store").strip()

    def is_valid(self, paths: Iterable[str]) -> dict[str, bool]:
        """Whether the store has each of these store paths, whole and registered."""
        wanted = list(paths)
        if not wanted:
            return {}
        argv = [*self.nix_store, *self.store.options, "--check-validity", "--print-invalid", *wanted]
        invalid = set(self.run(argv, doing="asking the store what it has").split())
        return {path: path not in invalid for path in wanted}

    def real_path(self, store_path: str) -> Path:
        """Where the file of a store path lies in this file system."""
        return self.store.root / store_path.lstrip("/")

    def store_free_bytes(self) -> int:
        """Bytes that this user may still write where the store is."""
        return shutil.disk_usage(_nearest(self.store.root / "nix/store")).free

    def require_free(self, needed: int = FREE_NEEDED) -> None:
        """Raise PybuildError where the store's disk has less than `needed` bytes free."""
        free = self.store_free_bytes()
        if free < needed:
            raise PybuildError(
                f"only {format_gib(free)} free for the store {self.store.root / 'nix/store'}; "
                f"a build needs {format_gib(needed)}",
                f"Free some space; what no build needs any more goes with: "
                f"{shell_line([*self.nix_store, *self.store.options, '--gc'])}",
            )

    # Probe

    def probe(self) -> Refusal | None:
        """Build something tiny in this store, with the sandbox on and a path of this machine in it.

        None where that works. The answer to "does the daemon trust this user", "are user namespaces allowed"
        and "may this user write the store" is in no single setting, so nix is asked to do it. The
        derivation's key has what the answer depends on: the store remembers a success until the next boot.
        """
        key = f"{_read('/proc/sys/kernel/random/boot_id')} {self.version} {self.store.where} {os.geteuid()}"
        builder = "test -d /pybuild-probe && echo ok > $out"
        expression = (
            'derivation { name = "pybuild-probe"; system = builtins.currentSystem; builder = "/bin/sh"; '
            f'args = [ "-c" "{builder}" ]; key = "{key}"; }}'
        )
        # /bin/sh is the host's where that is a program with libraries; on NixOS nix gives the sandbox one.
        host = [] if os.path.realpath("/bin/sh").startswith("/nix/") else ["/bin", "/lib", "/lib64", "/usr"]
        paths = [path for path in host if Path(path).exists()]
        argv = [
            *self.command("build", "--impure", "--expr", expression, "--no-link", "--max-jobs", "1"),
            *SANDBOX,
            *host_options([*paths, "/pybuild-probe=/usr"]),
        ]
        status, _, log = self._run(argv)
        return None if status == 0 else explain_refusal(self.store, log)

    # Failures

    def explain_failure(self, log: BuildLog, *, doing: str = "nix build") -> BuildError:
        """The error to raise after a nix that said `log` and failed while `doing`.

        Its message has the cause where it is a known one, the last TAIL_LINES lines of the log of the
        derivation that failed first, and the command that shows all of that log.
        """
        if not log.failures:
            said = [message.text for message in (*log.errors, *log.warnings)]
            return BuildError(f"{doing}: {first_error(log)}", _remedy(said))
        failure = log.failures[0]
        # `nix log` asks the caches before the store that has it, and --offline doesn't keep it from that.
        show = self.command("log", failure.derivation, "--option", "substituters", "")
        tail = list(log.tails.get(failure.derivation, ()))
        if not tail:
            shown = subprocess.run(show, capture_output=True, text=True, env=dict(self.environ), check=False)
            # nix's own builders (fetchurl) log in its format for programs.
            lines = [strip_ansi(text) for text in shown.stdout.splitlines() if not text.startswith("@nix ")]
            tail = lines[-TAIL_LINES:]
        cause = _remedy([failure.how, *tail, *(warning.text for warning in log.warnings)])
        what = [f"{derivation_name(failure.derivation)}: {failure.how}"]
        if tail:
            what += ["The end of its log:", *(f"  {line}" for line in tail)]
        remedy = [cause] if cause else []
        return BuildError("\n".join(what), "\n".join([*remedy, f"All of its log: {shell_line(show)}"]))

    # Processes

    @contextlib.contextmanager
    def popen(
        self,
        argv: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run `argv` in a process group of its own; when the block is left, everything it started has ended.

        In a group of its own, so that the terminal's Ctrl-C reaches pybuild alone, which ends nix in order.
        If pybuild itself is killed, the kernel sends nix SIGTERM; so start it from a thread that lives as
        long as the build (prctl(2), PR_SET_PDEATHSIG). Whatever else this process starts in a session of
        its own has to be started through here as well: at the end it is taken for an orphan of nix.
        """
        _subreaper(True)
        # setpriv (util-linux), since a preexec_fn isn't safe in a process that has threads.
        setpriv = shutil.which("setpriv", path=self.environ.get("PATH"))
        guard = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
        process = subprocess.Popen(
            [*guard, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(self.environ),
            start_new_session=True,
        )
        _running.add(process.pid)
        try:
            yield process
        finally:
            _running.discard(process.pid)
            _end(process)
            if not _running:
                _subreaper(False)


def shell_line(argv: Sequence[str]) -> str:
    """`argv` as a line that a shell reads as these very words."""
    return shlex.join(argv)


def host_options(sandbox_paths: Sequence[str], builder: str | None = None) -> list[str]:
    """Options of a build with these paths of this machine in the sandbox, or on a builder that has them too."""
    return [
        # Not extra-sandbox-paths: Debian 13's nix puts a /bin/sh of its own into the sandbox, which fails where
        # /bin is asked for as well.
        *("--option", "sandbox-paths", " ".join(sandbox_paths)),
        # No machine but those that pybuild has asked has these paths.
        *("--option", "builders", builder or ""),
    ]


def outputs(stdout: str) -> dict[str, str]:
    """Output names and store paths of the one thing that a command line of `build_argv` built."""
    (built,) = json.loads(stdout)
    return dict(built["outputs"])


def derivation_name(path: str) -> str:
    """`flash-attn-2.8.3` of `/nix/store/<hash>-flash-attn-2.8.3.drv`."""
    return re.sub(r"^.*/[0-9a-z]{32}-|\.drv$", "", path)


_BASE32 = "0123456789abcdfghijklmnpqrsvwxyz"


def fixed_path(name: str, sha256: str) -> str:
    """The store path of the file `name` with the hash `sha256` (64 hex digits): what `add_fixed` gives.

    The formula is that of nix's manual, "Store Path Specification": a fixed output, flat, sha256.
    """
    inner = hashlib.sha256(f"fixed:out:sha256:{sha256}:".encode()).hexdigest()
    digest = hashlib.sha256(f"output:out:sha256:{inner}:/nix/store:{name}".encode()).digest()
    folded = bytearray(20)
    for index, byte in enumerate(digest):
        folded[index % 20] ^= byte
    # nix's base 32: 5 bits a letter, the last letter first.
    number = int.from_bytes(folded, "little")
    letters = "".join(_BASE32[(number >> (5 * n)) & 31] for n in reversed(range(32)))
    return f"/nix/store/{letters}-{name}"


# Finding nix


def find_nix(explicit: str | None, environ: Mapping[str, str], *, host_paths: bool = True) -> Nix:
    """The nix to use: `explicit` (--nix), else `nix` on PATH, else `nix-portable` on PATH, with a store.

    Tries the stores that there are, and takes the first in which a sandboxed build works. `host_paths`
    False is for builds that need none of this machine's paths in the sandbox (nixpkgs): they need no trust of
    the daemon. Raises PybuildError: no nix, a nix older than OLDEST, no store that works.
    """
    nix, nix_store, portable = _programs(explicit, environ)
    version = _version(nix, environ)
    if version < OLDEST:
        have = ".".join(map(str, version))
        raise PybuildError(f"{shell_line(nix)} is version {have}; pybuild needs 2.8 or newer", GET_NIX)
    refusals = []
    for store in [_portable_store(environ)] if portable else _stores(environ):
        if isinstance(store, Refusal):
            refusals.append(store)
            continue
        candidate = Nix(nix, nix_store, version, store, environ)
        if store.where == "daemon" and not host_paths:
            return candidate
        refusal = candidate.probe()
        if refusal is None:
            return candidate
        refusals.append(refusal)
    raise PybuildError(
        "nix finds no store here that it can build in:\n" + "\n".join(f"  {r.what}" for r in refusals),
        "Any one of these helps:\n" + "\n".join(f"  {remedy}" for remedy in dict.fromkeys(r.remedy for r in refusals)),
    )


def _programs(explicit: str | None, environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The words that start nix and nix-store, and whether nix-portable does."""
    path = environ.get("PATH", os.defpath)
    found = explicit or next((name for name in ("nix", "nix-portable") if shutil.which(name, path=path)), None)
    if found is None:
        raise PybuildError("neither nix nor nix-portable is on PATH", GET_NIX)
    real = shutil.which(found, path=path)
    if real is None:
        raise PybuildError(f"--nix {found}: no such program", GET_NIX)
    if "/" in found:
        found = str(Path(found).absolute())
    if Path(found).name.startswith("nix-portable"):
        words = (*_portable_environment(environ), found)
        return (*words, "nix"), (*words, "nix-store"), True
    beside = [Path(found).with_name("nix-store"), Path(real).resolve().with_name("nix-store")]
    near = next((str(p) for p in beside if "/" in found and os.access(p, os.X_OK)), None)
    nix_store = near or ("nix-store" if shutil.which("nix-store", path=path) else None)
    if nix_store is None:
        raise PybuildError(f"{found} has no nix-store beside it", GET_NIX)
    return (found,), (nix_store,), False


def _version(nix: tuple[str, ...], environ: Mapping[str, str]) -> tuple[int, ...]:
    argv = [*nix, "--version"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=dict(environ), check=False)
    except OSError as error:
        raise PybuildError(f"{shell_line(nix)} can't be run: {error.strerror}", GET_NIX) from error
    # "nix (Nix) 2.8.0", "nix (Nix) 2.30.0pre20250521", "nix (Lix, like Nix) 2.91.1"
    match = re.search(r"^nix \(.*\) (\d+(?:\.\d+)+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        what = f"{shell_line(argv)} failed: {strip_ansi(said[-1]) if said else 'it said nothing'}"
        raise PybuildError(what, "pybuild needs a nix that runs. " + GET_NIX)
    return tuple(int(part) for part in match[1].split("."))


def _portable_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Words before nix-portable. Left alone, it first installs a git of its own from the network, and says so
    on standard output; a flake that is a folder needs no git."""
    if environ.get("NP_GIT"):
        return ()
    git = shutil.which("git", path=environ.get("PATH", os.defpath)) or "/usr/bin/git"
    return ("env", f"NP_GIT={git}")


def _portable_store(environ: Mapping[str, str]) -> Store:
    # nix-portable's own rule: NP_LOCATION or HOME, links resolved; the same for all of its runtimes.
    location = environ.get("NP_LOCATION") or environ.get("HOME") or "/"
    return Store("portable", Path(location).resolve() / ".nix-portable")


def _stores(environ: Mapping[str, str]) -> Iterator[Store | Refusal]:
    """Stores that may work for this user, the best first; a Refusal for one that clearly won't."""
    root = os.geteuid() == 0
    # Root without build users builds as root; nix's default is a group that has to have members.
    group = ("--option", "build-users-group", "") if root and not _members("nixbld") else ()
    state = Path("/nix/var/nix")
    nearest = _nearest(state)
    if root or (nearest != Path("/") and os.access(nearest, os.W_OK)):
        yield Store("local", options=("--store", "local", *group))
    yield from _daemon_store(environ)
    # The specification of XDG_DATA_HOME: a path that isn't absolute counts as unset.
    data = Path(environ.get("XDG_DATA_HOME", ""))
    if not data.is_absolute():
        data = Path(environ.get("HOME", "")) / ".local/share"
    folder = data / "pybuild/nix"
    if re.search(r"[?%]", str(folder)):
        yield Refusal(
            f"a store in {folder}: nix reads ? and % in a store's name as more than a path",
            "Set XDG_DATA_HOME to a folder without them.",
        )
    elif folder.is_absolute():
        yield Store("home", folder, options=("--store", str(folder), *group))
    else:
        yield Refusal("a store in your home: HOME is not set", "Set HOME to a folder that you may write.")


def _daemon_store(environ: Mapping[str, str]) -> Iterator[Store | Refusal]:
    """The store of nix's daemon, if there is a daemon."""
    address = environ.get("NIX_DAEMON_SOCKET_PATH") or "/nix/var/nix/daemon-socket/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        try:
            client.connect(address)
        except PermissionError:
            # Debian lets only the members of a group in.
            with contextlib.suppress(OSError, KeyError):
                group = grp.getgrgid(Path(address).parent.stat().st_gid).gr_name
                yield Refusal(
                    f"nix's daemon: {_user()} may not use {address}",
                    f"Add yourself to the group {group} (sudo usermod -aG {group} {_user()}, and log in again) "
                    f"and to trusted-users in /etc/nix/nix.conf.",
                )
        except OSError:
            if os.geteuid() != 0:  # root needs none
                yield Refusal(
                    f"nix's daemon: none answers at {address}",
                    "Start nix-daemon (Debian, Ubuntu: apt install nix-setup-systemd, and add yourself to the "
                    f"group nix-users), with the line 'trusted-users = root {_user()}' in /etc/nix/nix.conf.",
                )
        else:
            yield Store("daemon", options=("--store", "daemon"))


def _members(group: str) -> list[str]:
    try:
        return grp.getgrnam(group).gr_mem
    except KeyError:
        return []


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _nearest(path: Path) -> Path:
    """`path`, or the nearest folder above it that this user can see."""
    return next(folder for folder in (path, *path.parents) if os.access(folder, os.F_OK))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def explain_refusal(store: Store, log: BuildLog) -> Refusal:
    """Why a probe of `store` failed with `log`, and the setting that would change it."""
    said = _in_short(log)
    name = {
        "local": "the store /nix/store",
        "daemon": "nix's daemon",
        "home": f"a store in {store.root}",
        "portable": f"nix-portable's store in {store.root}",
    }[store.where]
    if any(re.search(_NO_NAMESPACES, error.text) for error in log.errors):
        return Refusal(f"{name}: no sandbox ({said})", _namespaces_remedy())
    if store.where == "daemon":
        return Refusal(
            f"{name}: it doesn't trust {_user()} with paths of this machine ({said})",
            f"Add the line 'trusted-users = root {_user()}' to /etc/nix/nix.conf and restart nix-daemon.",
        )
    return Refusal(f"{name}: {said}", f"Make sure that {_user()} may write {store.root / 'nix'}.")


_NO_NAMESPACES = (
    r"user namespaces are not enabled|cloning builder process|unable to start build process"
    r"|kernel namespaces|setting up a private mount namespace|unsharing|setgroups failed"
)


def _namespaces_remedy() -> str:
    """The setting that keeps user namespaces from this user, as far as the kernel says."""
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        setting = "kernel.apparmor_restrict_unprivileged_userns=0"
    elif _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        setting = "kernel.unprivileged_userns_clone=1"
    elif _read("/proc/sys/user/max_user_namespaces") == "0":
        setting = "user.max_user_namespaces=10000"
    else:
        return "Allow user namespaces, which nix's sandbox is made of; in a container: docker run --privileged."
    return f"Allow user namespaces, which nix's sandbox is made of: sudo sysctl -w {setting}"


# Failures


class Cause(NamedTuple):
    """A known cause of failed builds: what nix, a compiler or a linker `says` (a regular expression), the remedy."""

    name: Literal["disk", "memory", "hash", "trust", "signature", "namespaces", "network", "header", "compiler"]
    says: str
    remedy: str


# The first that matches counts.
_CAUSES = (
    Cause(
        "disk",
        # The last is what SQLite says where nix's database finds no room.
        r"No space left on device|database or disk is full|Disk quota exceeded|disk I/O error",
        "The disk is full: free space where the store is, and where TMPDIR is (/tmp), in which nix builds.",
    ),
    Cause(
        "memory",
        r"failed due to signal 9|died due to signal 9|Killed signal terminated program|: Killed\b|^Killed$"
        r"|Cannot allocate memory|std::bad_alloc|virtual memory exhausted|out of memory allocating",
        "Something killed a process, most likely the kernel for want of memory: fewer --cores, "
        "as many as `pybuild recommend-cores` says.",
    ),
    Cause(
        "hash",
        r"hash mismatch in fixed-output derivation",
        "A file is not the one that was pinned: the index that served it has another one, or something on "
        "the way changed it. Nothing of it was kept.",
    ),
    Cause(
        "trust",
        r"ignoring the \S+ setting 'sandbox-paths'",
        "nix's daemon doesn't trust this user: add it to trusted-users in /etc/nix/nix.conf and restart nix-daemon.",
    ),
    Cause(
        "signature",
        r"not signed by any of the keys|lacks a (?:valid )?signature|(?:lacks|without) a signature by a trusted key",
        "It is not signed by a key that the receiving machine's nix.conf trusts: add the line for trusted-public-keys "
        "that `pybuild push` prints.",
    ),
    Cause("namespaces", _NO_NAMESPACES, ""),
    Cause(
        "network",
        r"unable to download|Could(?:n't| not) resolve host|Failed to connect|Network is unreachable",
        "The network, or a cache that nix.conf names, doesn't answer.",
    ),
    Cause(
        "header",
        r"fatal error: \S+: No such file or directory",
        "A header is missing: it is of a package that is not among the build's inputs, or of a newer version of one.",
    ),
    Cause(
        "compiler",
        r"^\S+[(:]\d+[):].*\berror\b|^\S*(?:ptxas|nvcc|cicc) (?:fatal|error)\b|^(?:cc1plus|collect2|ld): .*error",
        "The compiler refuses this source: the first line with `error` in it says why, those after it follow from it.",
    ),
)


def first_error(log: BuildLog) -> str:
    """The error that nix ended with, in its own words."""
    return str(log.errors[0]) if log.errors else "it ended without a word"


def _in_short(log: BuildLog) -> str:
    # Without the log of the probe, and without nix's advice to turn the sandbox off.
    return re.split(r"[;\n]", first_error(log))[0]


def known_cause(texts: Iterable[str]) -> Cause | None:
    """The first known cause that these texts of a failed build name; its remedy is that for this machine."""
    joined = "\n".join(texts)
    for cause in _CAUSES:
        if re.search(cause.says, joined, re.MULTILINE):
            return cause if cause.remedy else cause._replace(remedy=_namespaces_remedy())
    return None


def _remedy(texts: Iterable[str]) -> str:
    cause = known_cause(texts)
    return cause.remedy if cause else ""


# Ending

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

# Leaders of the groups that `Nix.popen` started and has not ended.
_running: set[int] = set()


def _end(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """End `process` and all that it started.

    nix ends its builders itself on SIGINT and SIGTERM, and needs a moment for it. Where nix itself is killed
    (`kill -9`, or the kernel for want of memory) its builders live on, in sessions of their own; as this
    process is their subreaper, they are its children then.
    """
    # Where this process ignores SIGINT (a shell's background job), what it started does so too.
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    for sign in (signal.SIGTERM if ignored else signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        _signal_group(process.pid, sign)
        # A further Ctrl-C is impatience: on to the next signal.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(grace)
    # Nothing of the group outlives its leader, however that ended.
    _signal_group(process.pid, signal.SIGKILL)
    # Again, because what a killed one had started becomes a child of this process in turn.
    for _ in range(3):
        orphans = _orphans()
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=grace)


def _subreaper(on: bool) -> None:
    """Whether orphans among this process's descendants become its children; see prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _orphans() -> list[psutil.Process]:
    """Children of this process that it did not start: those in a session which is neither its own nor one of
    `Nix.popen`'s."""
    mine = {os.getsid(0), *_running}
    orphans = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) not in mine:
                orphans.append(child)
    return orphans


def _signal_group(pid: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, sign)
