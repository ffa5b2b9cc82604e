/*
  The package set with our releases in it: the one place where nixpkgs, or hostpkgs, is changed.

  Adds to every Python's packages `pybuildReleases.<name>` (cuda-toolkit, torch and the extensions of one release), and
  makes `torch`, `flash-attn`, `causal-conv1d` and what that torch requires of an exact version (triton) those of
  `config.pybuildRelease` (default cu128). Adds `pybuild` itself.
*/
final: prev:

let
  inherit (final) lib;

  releases = lib.genAttrs [ "cu128" "cu130" ] (
    name: builtins.fromJSON (builtins.readFile (./releases + "/${name}.json"))
  );
  chosen = final.config.pybuildRelease or "cu128";

  extension =
    pyFinal: pyPrev:
    {
      pybuildReleases = builtins.mapAttrs (
        _: release: import ./release.nix { inherit final pyFinal release; }
      ) releases;

      inherit (pyFinal.pybuildReleases.${chosen}) torch flash-attn causal-conv1d;
    }
    // lib.genAttrs releases.${chosen}.groups.runtime (
      name: pyFinal.pybuildReleases.${chosen}.runtimePackages.${name} or pyPrev.${name}
    );
in
{
  pythonPackagesExtensions = prev.pythonPackagesExtensions ++ [ extension ];

  pybuild = final.callPackage ./pybuild.nix { };
}
