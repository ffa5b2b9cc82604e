#!/bin/sh
# Install from the distribution what `make wheel` and `make test` need and this machine lacks: nix, a C++ compiler, Python
# with venv and headers. Asks for nothing where all is there, so it needs root (or sudo) once at most.
set -eu

python=${PYTHON:-python3}
packages=

need() { packages="$packages $1"; }

command -v nix >/dev/null || command -v nix-portable >/dev/null || need nix-bin
command -v g++ >/dev/null || need g++
command -v git >/dev/null || need git
if ! command -v "$python" >/dev/null; then
    need python3
    need python3-venv
    need python3-dev
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
    "$python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || need python3-dev
fi

[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "these packages are missing, and this is no Debian or Ubuntu: install by hand:$packages" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "these packages are missing; install them as root: apt-get install$packages" >&2
        exit 1
    fi
    sudo=sudo
fi
echo "installing$packages" >&2
$sudo env DEBIAN_FRONTEND=noninteractive apt-get update -q
# Without what is only recommended: nix's daemon is not needed.
# shellcheck disable=SC2086
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages
