/*
  The package set with our releases in it: the one place where nixpkgs, or hostpkgs, is changed.

  Adds to every Python's packages `pybuildReleases.<name>` (cuda-toolkit, torch and flash-attn of one release), and
  makes `torch` and `flash-attn` those of `config.pybuildRelease` (default cu128).
*/
final: prev:

let
  inherit (final) lib;

  releases = lib.genAttrs [ "cu128" "cu130" ] (
    name: builtins.fromJSON (builtins.readFile (./releases + "/${name}.json"))
  );

  extension = pyFinal: pyPrev: {
    pybuildReleases = builtins.mapAttrs (
      _: release: import ./release.nix { inherit final pyFinal pyPrev release; }
    ) releases;

    inherit (pyFinal.pybuildReleases.${final.config.pybuildRelease or "cu128"}) torch flash-attn;
  };
in
{
  pythonPackagesExtensions = prev.pythonPackagesExtensions ++ [ extension ];
}
