# Builds a derivation of hostpkgs: nixpkgs' default-builder, in as many lines.
set -eu -o pipefail
shopt -s nullglob
source "$stdenv/setup"
if [ -n "${buildCommand:-}" ]; then
    eval "$buildCommand"
else
    genericBuild
fi
