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
      inherit (pkgs) lib;

      python =
        if asked ? python then
          pkgs."python${lib.replaceStrings [ "." ] [ "" ] asked.python}"
        else
          pkgs.python3;
      flash-attn = python.pkgs.flash-attn.override (asked.selection or { });
      flash-attn-for = cudaCapabilities: flash-attn.override { inherit cudaCapabilities; };

      # Not in hostpkgs, which is for people who have pybuild already, nor in the copy of this flake that pybuild makes.
      hasPybuild = python.pkgs ? buildPythonApplication && builtins.pathExists ./pyproject.toml;
    in
    {
      overlays.default = import ./nix/overlay.nix;

      packages.${system} = {
        default = flash-attn;
        inherit flash-attn;
        flash-attn-sm90 = flash-attn-for [ "9.0" ];
        flash-attn-sm120 = flash-attn-for [ "12.0" ];
        flash-attn-all = flash-attn-for [
          "8.0"
          "9.0"
          "10.0"
          "12.0"
        ];
        inherit (python.pkgs) causal-conv1d torch;
        inherit (python.pkgs.pybuildReleases.${pkgs.config.pybuildRelease}) cuda-toolkit;
      }
      // lib.optionalAttrs hasPybuild { inherit (pkgs) pybuild; };

      # All of the package set with the releases in it, as in `nix build .#python312Packages.flash-attn`.
      legacyPackages.${system} = pkgs;

      devShells.${system}.default = pkgs.callPackage ./nix/shell.nix {
        inherit python;
        # What `pybuild build` makes is of an object a derivation; for plain nix, one derivation keeps to its memory.
        flash-attn = if asked == { } then flash-attn else flash-attn.fromObjects;
        pybuild = if hasPybuild then pkgs.pybuild else null;
      };

      apps.${system} = lib.optionalAttrs hasPybuild rec {
        pybuild = {
          type = "app";
          program = lib.getExe pkgs.pybuild;
          meta.description = "Build CUDA extensions without running the machine out of memory";
        };
        default = pybuild;
      };

      checks.${system} = import ./nix/tests { inherit pkgs python; };

      formatter = lib.optionalAttrs (pkgs ? nixfmt-tree) { ${system} = pkgs.nixfmt-tree; };

      templates.default = {
        path = ./nix/template;
        description = "A project whose Python has torch and flash-attn, for the GPUs that it names";
      };
    };
}
