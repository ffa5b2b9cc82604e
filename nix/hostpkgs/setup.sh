# What nixpkgs' stdenv sets up, over the host's own programs: inputs on PATH and PYTHONPATH, phases with hooks.
# Sourced by builder.sh, and by `nix develop`.

export PATH=$hostPath
export CC=$hostCC CXX=$hostCXX CUDAHOSTCXX=$hostCXX
export LC_ALL=C.UTF-8 TZ=UTC
# The oldest date that a zip archive can hold, so that a wheel's bits do not depend on the day.
export SOURCE_DATE_EPOCH=315532800
# Headers and tools are the host's; Python must take nothing from a user's site-packages.
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
: "${NIX_BUILD_CORES:=1}" "${NIX_BUILD_TOP:=$PWD}" "${TMPDIR:=/tmp}"
if [ "$NIX_BUILD_CORES" -le 0 ]; then
    NIX_BUILD_CORES=$(nproc)
fi
export NIX_BUILD_CORES

_seen=" "

# Make one package usable: its bin on PATH, its modules on PYTHONPATH, its setup hook, and all that it propagates.
_addInput() {
    local pkg=$1 dir
    case $_seen in *" $pkg "*) return ;; esac
    _seen+="$pkg "
    if [ -d "$pkg/bin" ]; then
        PATH=$pkg/bin:$PATH
    fi
    for dir in "$pkg"/lib/python3.*/site-packages; do
        if [ -d "$dir" ]; then
            export PYTHONPATH=$dir${PYTHONPATH:+:$PYTHONPATH}
        fi
    done
    if [ -e "$pkg/nix-support/setup-hook" ]; then
        source "$pkg/nix-support/setup-hook"
    fi
    if [ -e "$pkg/nix-support/propagated-build-inputs" ]; then
        for dir in $(<"$pkg/nix-support/propagated-build-inputs"); do
            _addInput "$dir"
        done
    fi
}

for _pkg in ${nativeBuildInputs:-} ${buildInputs:-} ${propagatedBuildInputs:-}; do
    _addInput "$_pkg"
done
unset _pkg
export PATH

runHook() {
    local hook=$1
    if declare -F "$hook" >/dev/null; then
        "$hook"
    elif [ -n "${!hook:-}" ]; then
        eval "${!hook}"
    fi
}

runPhase() {
    echo "Running phase: $1"
    if [ -n "${!1:-}" ]; then
        eval "${!1}"
    else
        "$1"
    fi
}

unpackPhase() {
    runHook preUnpack
    tar xf "$src" --no-same-owner
    local entries=(*/)
    if [ "${#entries[@]}" -ne 1 ]; then
        echo "the archive $src holds ${#entries[@]} folders, not one" >&2
        exit 1
    fi
    sourceRoot=${entries[0]%/}
    cd "$sourceRoot"
    runHook postUnpack
}

patchPhase() {
    runHook prePatch
    runHook postPatch
}

buildPhase() {
    runHook preBuild
    runHook postBuild
}

installPhase() {
    runHook preInstall
    runHook postInstall
}

installCheckPhase() {
    runHook preInstallCheck
    runHook postInstallCheck
}

fixupPhase() {
    if [ -n "${propagatedBuildInputs:-}" ]; then
        mkdir -p "$out/nix-support"
        echo "$propagatedBuildInputs" >"$out/nix-support/propagated-build-inputs"
    fi
    if [ -n "${setupHook:-}" ]; then
        mkdir -p "$out/nix-support"
        cp "$setupHook" "$out/nix-support/setup-hook"
    fi
    runHook postFixup
}

genericBuild() {
    if [ -z "${dontUnpack:-}" ]; then
        runPhase unpackPhase
    fi
    runPhase patchPhase
    runPhase buildPhase
    if [ -z "${dontInstall:-}" ]; then
        runPhase installPhase
    fi
    if [ -z "${dontFixup:-}" ]; then
        runPhase fixupPhase
    fi
    if [ -n "${doInstallCheck:-}" ]; then
        runPhase installCheckPhase
    fi
}
