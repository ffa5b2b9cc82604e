/*
  What `nix flake check` builds: all of it in a minute or two, none of it needs a GPU.

  `expressions`: the functions of nix/, each with what it has to give.
  `compile`: one CUDA source through the same code as flash-attn's kernels, by the release's real nvcc.
  `early-failures`: builds that would not do what they say end before the first compile, with a message that says so.
  `formatting`: where the package set has nixfmt.
*/
{ pkgs, python }:

let
  inherit (pkgs) config lib runCommand;

  release = python.pkgs.pybuildReleases.${config.pybuildRelease or "cu128"};

  failures = lib.filter (test: test.expr != test.expected) (
    lib.mapAttrsToList (name: test: test // { inherit name; }) (
      import ./expressions.nix { inherit lib; }
    )
  );
  report =
    test:
    "${test.name}\n  expected ${builtins.toJSON test.expected}\n  got      ${builtins.toJSON test.expr}\n";

  objectFor =
    architectures:
    release.callPackage ../extension/kernel.nix { } {
      root = "pybuild_test-1";
      sources = ./extension;
      source = "csrc/scale.cu";
      includes = [ "csrc" ];
      module = "pybuild_test";
      threads = lib.length architectures;
      flags = [
        "-std=c++17"
      ]
      ++ lib.concatMap (architecture: [
        "-gencode"
        "arch=compute_${architecture},code=sm_${architecture}"
      ]) architectures;
    };

  # Run in a build where the toolkit and torch are at hand.
  withToolkit =
    name: script:
    runCommand name {
      nativeBuildInputs = [
        python
        release.cuda-toolkit
        release.torch
      ];
      CUDA_HOME = "${release.cuda-toolkit}";
    } script;

  checkArchitectures = "python ${../extension/check_architectures.py}";
  checkVersions = "python ${../extension/check_versions.py}";
in
{
  expressions =
    runCommand "pybuild-expressions" { failures = lib.concatMapStrings report failures; }
      ''
        if [ -n "$failures" ]; then
          printf '%s' "$failures" >&2
          exit 1
        fi
        touch "$out"
      '';

  compile = withToolkit "pybuild-compile" ''
    ${checkArchitectures} sm_100 -- ${objectFor [ "100" ]}/scale.o
    ${checkArchitectures} sm_90 sm_120 -- ${
      objectFor [
        "90"
        "120"
      ]
    }/scale.o
    touch "$out"
  '';

  early-failures = withToolkit "pybuild-early-failures" ''
    # Runs a command that has to fail with a message in which all of these occur.
    fails() {
      local message=$1 status=0
      shift
      "$@" 2>stderr || status=$?
      cat stderr >&2
      if [ "$status" -eq 0 ]; then
        echo "this should have failed: $*" >&2
        exit 1
      fi
      grep -qF -- "$message" stderr
    }

    # A capability that this nvcc doesn't know, and one that it does.
    fails "nvcc ${release.release.cuda} does not know sm_42" ${checkVersions} 100 42
    ${checkVersions} 90 100 120

    # A toolkit of another CUDA than torch's.
    mkdir -p other/bin
    printf '#!%s\necho "Cuda compilation tools, release 12.4, V12.4.131"\n' "$(type -P bash)" >other/bin/nvcc
    chmod +x other/bin/nvcc
    fails "has nvcc 12.4, but torch ${release.release.torchVersion} was built with CUDA ${release.release.cuda}" \
      env CUDA_HOME="$PWD/other" ${checkVersions} 100

    # An object with code for less, or more, than was asked for; and none at all.
    object=${objectFor [ "100" ]}/scale.o
    fails "scale.o has code for sm_100, asked for was sm_100, sm_90" ${checkArchitectures} sm_90 sm_100 -- "$object"
    fails "scale.o has code for sm_100, asked for was sm_90" ${checkArchitectures} sm_90 -- "$object"
    echo 'int main() {}' >empty.cpp
    nvcc -c empty.cpp -o empty.o
    fails "none of the 1 objects" ${checkArchitectures} sm_100 -- empty.o
    touch "$out"
  '';
}
// lib.optionalAttrs (pkgs ? nixfmt) {
  formatting = runCommand "pybuild-formatting" { nativeBuildInputs = [ pkgs.nixfmt ]; } ''
    find ${../.} ${../../flake.nix} -name '*.nix' -print0 | xargs -0 nixfmt --check
    touch "$out"
  '';
}
