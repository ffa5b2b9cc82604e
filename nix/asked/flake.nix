{
  description = "nixpkgs as flake.lock pins it, with what the person who runs pybuild asked for";

  # pybuild copies this folder, with our flake.lock and its choice.json beside it, and passes the copy as the input
  # nixpkgs of the flake.
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  outputs =
    { self, nixpkgs }:
    {
      inherit (nixpkgs) lib legacyPackages;
      pybuild = builtins.fromJSON (builtins.readFile ./choice.json) // {
        inherit nixpkgs;
      };
    };
}
