# nixpkgs' mkShell: an environment for `nix develop`, and a derivation that can be built as well.
{ lib, stdenv }:
{
  name ? "nix-shell",
  packages ? [ ],
  shellHook ? "",
  ...
}@args:
stdenv.mkDerivation (
  removeAttrs args [ "packages" ]
  // {
    inherit name shellHook;
    nativeBuildInputs = packages ++ args.nativeBuildInputs or [ ];
    buildCommand = ''
      export >"$out"
    '';
  }
)
