{
  description = "A small nixpkgs-shaped package set over the machine's own C++ compiler and Python";

  outputs =
    { self }:
    let
      # Written by pybuild into its copy of this folder; the folder as it stands in the repository has none.
      facts = builtins.fromJSON (builtins.readFile ./facts.json);
    in
    {
      lib = import ./lib.nix;
      legacyPackages.x86_64-linux = import ./. { };

      # What the person who runs pybuild asked for: read by the top-level flake.nix.
      pybuild = facts.selection;
    };
}
