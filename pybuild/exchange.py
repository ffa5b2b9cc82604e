"""What was built, between machines: into a store that others read, and from those that this user's nix reads."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from pybuild.errors import BuildError, PybuildError
from pybuild.nix import NETWORK, Nix
from pybuild.plan import Plan


@dataclass(frozen=True)
class Key:
    """A key that store paths are signed with: the file of its secret half, and its public half, `name:base64`."""

    secret: Path
    public: str


def signing_key(nix: Nix, explicit: Path | None = None) -> Key:
    """The key in the file `explicit`, else this user's own, which is made where there is none.

    Raises PybuildError for a file that is no secret key of nix.
    """
    path = explicit or platformdirs.user_config_path("pybuild") / "signing-key"
    if explicit is None and not path.exists():
        name = f"{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node()) or 'machine'}-pybuild-1"
        text = nix.run(nix.command("key", "generate-secret", "--key-name", name), doing="making a key to sign with")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PybuildError(f"--key {path}: {reason}", "Make one: nix key generate-secret --key-name NAME") from error
    # name:base64 of 64 bytes, of which the second half is the public key (Ed25519, as libsodium writes it).
    if not re.fullmatch(r"[^\s:]+:[A-Za-z0-9+/]{86}==", secret):
        raise PybuildError(
            f"--key {path}: not a secret key of nix", "Make one: nix key generate-secret --key-name NAME"
        )
    public = nix.run(nix.command("key", "convert-secret-to-public"), doing="reading the key", given=secret)
    return Key(path, public.strip())


def destination(url: str) -> str:
    """The store that nix is told for `url`: file://FOLDER or ssh-ng://USER@HOST. Raises PybuildError for others.

    In a folder, files are compressed with zstd where the URL says nothing else: nix's own choice, xz, takes minutes for
    a toolkit.
    """
    kind, separator, rest = url.partition("://")
    if not separator or not rest or kind not in ("file", "ssh-ng"):
        raise PybuildError(
            f"not a store to push to: {url}",
            "Write file:///FOLDER for a folder that others read, or ssh-ng://USER@HOST for a machine with nix.",
        )
    if kind == "file" and not rest.startswith("/"):
        raise PybuildError(f"not a store to push to: {url}", "Name the folder from the root: file:///mnt/cache.")
    if kind == "file" and "compression=" not in rest:
        return f"{url}{'&' if '?' in rest else '?'}compression=zstd"
    return url


def push(plan: Plan, url: str, key: Key) -> list[str]:
    """Copy the plan's kernels and wheel, as far as the store has them, signed, to the store at `url`; their paths.

    With them goes what they refer to, the toolkit among it. Raises BuildError where there is nothing to push, or nix
    fails; PybuildError for a `url` that is not one.
    """
    target = destination(url)
    valid = plan.nix.is_valid([plan.wheel(), *(kernel.output for kernel in plan.kernels())])
    paths = [path for path, is_valid in valid.items() if is_valid]
    if not paths:
        raise BuildError(
            f"nothing of this build of {plan.spec.package} is in the store yet",
            "Build it first: pybuild build, with the same options.",
        )
    sign = plan.nix.command("store", "sign", "--key-file", str(key.secret), "--recursive", *paths)
    plan.nix.run(sign, doing="signing")
    plan.nix.run(plan.nix.command("copy", "--to", target, *paths), doing=f"copying to {url}")
    return paths


def own_caches(nix: Nix) -> list[str]:
    """The caches that this user's nix reads, beside nix's default: that one has nothing of a machine's own compiler."""
    # `nix config show` from 2.20 on, which still knows the old name.
    shown = json.loads(nix.run(nix.command("show-config", "--json"), doing="reading nix's settings"))
    setting = shown["substituters"]
    return [url for url in setting["value"] if url not in setting["defaultValue"]]


def take(plan: Plan) -> str | None:
    """Bring the plan's wheel, else its kernels, from the user's caches into the store, as far as they have them.

    Why not all that they have came, in nix's words, and what to do; None where nothing failed. Nobody is asked where
    nix.conf names no cache of the user's own, or where the store has the wheel.
    """
    caches = own_caches(plan.nix)
    kernels = [kernel.output for kernel in plan.kernels()] if caches else []
    for wanted in ([plan.wheel()], kernels) if caches else ():
        valid = plan.nix.is_valid([plan.wheel(), *wanted])
        missing = [path for path in wanted if not valid[path]]
        if valid[plan.wheel()] or not missing:
            break
        # --ignore-unknown: what no cache has is no error. Nothing is built: these are paths, not derivations.
        argv = [*plan.nix.nix_store, *plan.nix.store.options, "--realise", "--ignore-unknown", *missing]
        options = ["--option", "substituters", " ".join(caches), "--option", "substitute", "true"]
        try:
            plan.nix.run([*argv, *options, *NETWORK], doing="taking from the caches")
        except BuildError as error:
            return str(error)
    return None
