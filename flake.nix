{
  description = "CUDA extensions for PyTorch, built within the memory of the machine";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  outputs =
    { self, nixpkgs }:
    let
      system = "x86_64-linux";
      # What `pybuild` was asked for travels with the package set that it passes as this input (nix/hostpkgs).
      asked = nixpkgs.pybuild or { };

      pkgs = import (asked.nixpkgs or nixpkgs) {
        inherit system;
        config = {
          allowUnfree = true;
          cudaSupport = true;
          cudaCapabilities = asked.cudaCapabilities or [ "10.0" ];
          pybuildRelease = asked.release or "cu128";
        };
        overlays = [ self.overlays.default ];
      };

      python = pkgs.python3;
      flash-attn = python.pkgs.flash-attn.override (asked.selection or { });
    in
    {
      overlays.default = import ./nix/overlay.nix;

      packages.${system} = {
        default = flash-attn;
        inherit flash-attn;
        inherit (python.pkgs) torch;
        inherit (python.pkgs.pybuildReleases.${pkgs.config.pybuildRelease}) cuda-toolkit;
      };
    };
}
