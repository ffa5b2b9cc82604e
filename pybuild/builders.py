"""Other machines that compile kernels: what they have, whether a build there is one here, and nix's line for them."""

from __future__ import annotations

import difflib
import hashlib
import re
import secrets
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pybuild.errors import BuildError, PybuildError
from pybuild.facts.host import host_of
from pybuild.facts.machine import ask_over_ssh
from pybuild.hostpkgs import Facts
from pybuild.nix import SANDBOX, Nix
from pybuild.recommend import cores_for
from pybuild.spec import BuildSpec

# ssh notices within 15 s that a machine has gone; without these a cut connection hangs for hours.
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"

# What a build depends on, as a build sees it: the text is compared, machine by machine.
_SEEN = r"""
PATH=$hostPath
for program in "$cc" "$cxx"; do
  echo "$program: $("$program" --version 2>&1 | { read -r line; echo "$line"; })"
done
echo "glibc: $(getconf GNU_LIBC_VERSION 2>&1)"
echo "$python: $("$python" -I -c 'import sys; print(sys.version.replace(chr(10), " "), sys.base_prefix)' 2>&1)"
if [ -n "$cuda" ]; then
  echo "$cuda: $("$cuda/bin/nvcc" --version 2>&1 | { while read -r line; do last=$line; done; echo "$last"; })"
fi
"""


@dataclass(frozen=True)
class Builder:
    """A machine that compiles up to `jobs` kernels at once. `line` is what nix's option `builders` takes."""

    url: str
    jobs: int
    line: str


def urls_of(given: Iterable[str]) -> list[str]:
    """The builders named by --builder: ssh-ng://USER@HOST, or @FILE, a machines file of nix (its first column).

    Raises PybuildError for anything else, and for a file that can't be read.
    """
    urls: list[str] = []
    for text in given:
        found = [text]
        if text.startswith("@"):
            try:
                lines = Path(text[1:]).read_text().splitlines()
            except OSError as error:
                raise PybuildError(f"--builder {text}: {error.strerror}", "Name a machines file of nix.") from error
            found = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
        for url in found:
            if not re.fullmatch(r"ssh-ng://([^\s/?@;-][^\s/?@;]*@)?[^\s/?@;-][^\s/?@;]*(\?[^\s;]*)?", url):
                raise PybuildError(f"--builder {text}: {url} is no builder", "Write it as ssh-ng://USER@HOST.")
            urls.append(url)
    return list(dict.fromkeys(urls))


def builder_line(url: str, jobs: int, program: str) -> str:
    """nix's line for a builder that takes `jobs` derivations at once, where `program` is run in nix-daemon's place."""
    return f"{url}{'&' if '?' in url else '?'}remote-program={program} x86_64-linux - {jobs} 1 - -"


def daemon_program(sandbox_paths: Iterable[str]) -> tuple[str, str]:
    """A program for the builder, in the home of the user there, and its text: nix-daemon with our settings.

    ssh-ng hands no settings on, and nix names a lock file after a builder's URL, which 255 letters have to hold (both
    seen with nix 2.8). Where that machine has a daemon that builds, its own nix.conf counts; `survey` tells them apart.
    """
    options = [*SANDBOX, "--option", "sandbox-paths", " ".join(sandbox_paths), "--option", "substitute", "false"]
    text = (
        "#!/bin/sh\n"
        "PATH=$PATH:/nix/var/nix/profiles/default/bin:$HOME/.nix-profile/bin:/run/current-system/sw/bin\n"
        f'set -- {shlex.join(options)} "$@"\n'
        "# As pybuild does here: root without build users builds as root.\n"
        "if [ \"$(id -u)\" = 0 ] && ! getent group nixbld | grep -q ':[^:][^:]*$'; then\n"
        '  set -- --option build-users-group "" "$@"\n'
        "fi\n"
        'exec nix-daemon "$@"\n'
    )
    return f".cache/pybuild/daemon-{hashlib.sha256(text.encode()).hexdigest()[:12]}", text


def _bring(destination: str, program: str, text: str, environ: Mapping[str, str]) -> None:
    """Write `program` on the machine that ssh reaches as `destination`. Raises PybuildError."""
    folder, draft = shlex.quote(str(Path(program).parent)), shlex.quote(f"{program}.part")
    script = f"mkdir -p {folder} && cat >{draft} && chmod 755 {draft} && mv {draft} {shlex.quote(program)}"
    argv = ["ssh", "-T", *shlex.split(environ.get("NIX_SSHOPTS", "")), "--", destination, script]
    done = subprocess.run(argv, input=text.encode(), capture_output=True, env=dict(environ), check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise PybuildError(f"--builder {destination}: {program} can't be written there: {said}", "It takes 1 KiB.")


def with_ssh_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which nix's ssh never asks, and notices a machine that has gone. The user's options win."""
    return {**environ, "NIX_SSHOPTS": f"{environ.get('NIX_SSHOPTS', '')} {_SSH_OPTIONS}".strip()}


def survey(url: str, spec: BuildSpec, nix: Nix, facts: Facts | None) -> Builder:
    """Ask the machine at `url` what it has, and build something tiny there that looks at compiler and Python.

    Its jobs come from its cores and memory as those of this machine do. Raises PybuildError where it can't be reached,
    can't build, or sees another compiler, Python or C library than a build here.
    """
    if facts is None:
        raise PybuildError("--builder is for hostpkgs", "With nixpkgs, nix's own setting `builders` counts: use that.")
    destination = url.removeprefix("ssh-ng://").partition("?")[0]
    jobs = cores_for(spec, host_of(ask_over_ssh(destination, nix.environ), programs=False))
    paths = [str(path) for path in facts.sandbox_paths]
    program, text = daemon_program(paths)
    _bring(destination, program, text, nix.environ)
    builder = Builder(url, jobs, builder_line(url, jobs, program))
    here = look(nix, facts, None)
    try:
        there = look(nix, facts, builder)
    except BuildError as error:
        raise PybuildError(
            f"--builder {url}: it can't build what is built here: {error.what}",
            "It needs nix, its user has to be root or to have its own store there, and these paths: "
            f"{' '.join(paths)}. Where its nix-daemon builds, its nix.conf needs the line:\n"
            f"extra-sandbox-paths = {' '.join(paths)}",
        ) from error
    if here != there:
        lines = difflib.ndiff(there.splitlines(), here.splitlines())
        named = [line.replace("- ", "  there: ", 1).replace("+ ", "  here:  ", 1) for line in lines if line[0] in "-+"]
        raise PybuildError(
            "\n".join([f"--builder {url}: a build there would not be the one here:", *named]),
            "Bring both machines to the same versions, or build without that one.",
        )
    return builder


def look(nix: Nix, facts: Facts, builder: Builder | None) -> str:
    """What a build on `builder` (None: here) sees of the tools in `facts`. Raises BuildError where there is none."""
    values = {
        "hostPath": ":".join(map(str, facts.path)),
        "cc": str(facts.cc.path),
        "cxx": str(facts.cxx.path),
        "python": str(facts.python.path),
        "cuda": str(facts.cuda_home.path) if facts.cuda_home else "",
        # So that no store has it already.
        "nonce": secrets.token_hex(16),
        "script": f"exec > $out\n{_SEEN}",
    }
    attributes = " ".join(f"{name} = {_string(value)};" for name, value in values.items())
    expression = (
        f'derivation {{ name = "pybuild-look"; system = "x86_64-linux"; builder = {_string(str(facts.bash))}; '
        f'args = [ "-c" "eval \\"$script\\"" ]; {attributes} }}'
    )
    instantiate = nix.command("eval", "--impure", "--raw", "--expr", f"({expression}).drvPath")
    derivation = nix.run(instantiate, doing="preparing a look at a builder")
    paths = [str(path) for path in facts.sandbox_paths]
    argv = nix.realise_argv(derivation, cores=1, sandbox_paths=paths, builder=builder.line if builder else None)
    return nix.real_path(nix.run(argv, doing="a look at the tools").strip()).read_text()


def _string(text: str) -> str:
    """`text` as a string of the Nix language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${") + '"'
