/*
  A nixpkgs-shaped package set over the machine it runs on: its compiler, its C library, its Python.

  `facts` describes that machine (pybuild/hostpkgs.py writes it and documents each field). What the set lacks of
  nixpkgs is not here on purpose: CUDA, torch and the build tools come from pinned wheels, by the overlay.
*/
{
  system ? "x86_64-linux",
  config ? { },
  overlays ? [ ],
  facts ? builtins.fromJSON (builtins.readFile ./facts.json),
}:

assert system == "x86_64-linux" || throw "hostpkgs: ${system} is not supported, only x86_64-linux";

let
  lib = import ./lib.nix;

  base =
    pkgs:
    let
      callPackage = lib.callPackageWith pkgs;
    in
    {
      inherit
        callPackage
        config
        facts
        lib
        pkgs
        system
        ;

      stdenv = import ./stdenv.nix { inherit lib facts; };
      fetchPypi = import ./fetch-pypi.nix { inherit facts; };

      pythonPackagesExtensions = [ ];
      python3 = callPackage ./python.nix { };
      ${"python" + lib.replaceStrings [ "." ] [ "" ] (lib.versions.majorMinor facts.python.version)} =
        pkgs.python3;
      python3Packages = pkgs.python3.pkgs;

      # `nix develop` asks a set named nixpkgs for its shell.
      bashInteractive = callPackage ./bash.nix { };
      mkShell = callPackage ./mk-shell.nix { };

      runCommand =
        name: env: buildCommand:
        pkgs.stdenv.mkDerivation (env // { inherit name buildCommand; });
    }
    // lib.optionalAttrs (facts.cudaHome != null) {
      ${"cudaPackages_" + lib.replaceStrings [ "." ] [ "_" ] facts.cudaHome.version} =
        callPackage ./host-cuda.nix
          { };
    };
in
lib.fix (lib.extends (lib.composeManyExtensions overlays) base)
