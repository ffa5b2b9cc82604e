"""One compile of an extension, the same bits however it is asked for. Standard library only, runs inside builds.

    compile.py record OBJECT JSON -- COMPILER ARGUMENT...    a kernel's derivation: compile, and note the command
    compile.py run -- COMPILER ARGUMENT...                   what setup.py's ninja calls instead of the compiler

`run` looks into the folders of PYBUILD_OBJECTS first: where a kernel's derivation has compiled this source already, its
object is taken over, if the flags are the same; if they are not, that is an error that shows the difference. Otherwise
it compiles, under PYBUILD_LAUNCHER (pybuild's gate) where that is set.

What made two compiles of one source differ, and is evened out here (nvcc 13.0): nvcc names its temporary files after
its process id, and the name is in the object, so it gets --keep and a folder of the object's own; names of internal
symbols hold the process id and the source's date, so it gets --frandom-seed; and headers are named by the way that they
were found, so store paths behind links are resolved.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Options with a value that do not change the object: where the dependencies go, where the object goes, how many
# architectures are compiled at once, and the name of the host compiler (which is in the derivation by other ways).
_VALUE_IGNORED = {"-MF", "-MT", "-o", "--threads", "-ccbin"}
_IGNORED = {"-MD", "-MMD", "--generate-dependencies-with-compile"}


def resolved(arguments: list[str]) -> list[str]:
    """The arguments with include folders in the store named by their real paths."""
    return [f"-I{os.path.realpath(a[2:])}" if a.startswith("-I/nix/store/") else a for a in arguments]


def essence(arguments: list[str]) -> list[str]:
    """Those of the arguments that the object depends on, in order."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in _VALUE_IGNORED:
            skip = True
        elif argument not in _IGNORED:
            kept.append(argument)
    return kept


def value_of(option: str, arguments: list[str]) -> str | None:
    """The value that follows `option`."""
    return arguments[arguments.index(option) + 1] if option in arguments[:-1] else None


def sources(arguments: list[str]) -> list[str]:
    """The files to be compiled."""
    return [a for a in essence(arguments) if a.endswith((".cu", ".cpp", ".cc", ".c")) and not a.startswith("-")]


def compile_once(compiler: str, arguments: list[str]) -> int:
    """Compile, with what makes two compiles differ evened out; the compiler's exit status."""
    command = [compiler, *resolved(arguments)]
    keep = None
    if Path(compiler).name == "nvcc":
        name = Path(value_of("-o", arguments) or "a.out").name
        keep = Path(os.environ["NIX_BUILD_TOP"]) / "nvcc-keep" / name
        keep.mkdir(parents=True, exist_ok=True)
        command += ["--keep", "--keep-dir", str(keep), "--frandom-seed", name]
    launcher = os.environ.get("PYBUILD_LAUNCHER", "").split()
    status = subprocess.run([*launcher, *command], check=False).returncode
    if keep:
        shutil.rmtree(keep)
    return status


def difference(asked: list[str], stored: list[str]) -> str:
    """The two lists' differences, a line each."""
    lines = [f"  only in what setup.py asks for: {a}" for a in asked if a not in stored]
    lines += [f"  only in what the object was compiled with: {a}" for a in stored if a not in asked]
    return "\n".join(lines or ["  the same flags in another order"])


def take_over(arguments: list[str]) -> bool:
    """Copy the object from a kernel's derivation, if there is one for this source. Exits where the flags differ."""
    found = sources(arguments)
    target = value_of("-o", arguments)
    if len(found) != 1 or target is None:
        return False
    name = Path(found[0]).stem
    for folder in os.environ.get("PYBUILD_OBJECTS", "").split():
        if not (Path(folder) / f"{name}.o").exists():
            continue
        stored = json.loads((Path(folder) / f"{name}.json").read_text())
        asked = essence(resolved(arguments))
        if asked != stored:
            what = "the object in the store has other flags than setup.py asks for"
            sys.exit(f"{name}: {what}:\n{difference(asked, stored)}")
        shutil.copyfile(Path(folder) / f"{name}.o", target)
        if depfile := value_of("-MF", arguments):
            Path(depfile).write_text(f"{target}: {found[0]}\n")
        return True
    return False


def main() -> int:
    """Do what the command line says; the exit status."""
    split = sys.argv.index("--")
    mode, (compiler, *arguments) = sys.argv[1:split], sys.argv[split + 1 :]
    if mode[0] == "record":
        status = compile_once(compiler, ["-o", mode[1], *arguments])
        Path(mode[2]).write_text(json.dumps(essence(resolved(arguments)), indent=1) + "\n")
        return status
    if "-c" not in arguments:  # linking, or a question such as --version
        os.execvp(compiler, [compiler, *arguments])
    return 0 if take_over(arguments) else compile_once(compiler, arguments)


if __name__ == "__main__":
    sys.exit(main())
