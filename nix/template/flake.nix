{
  description = "A project that uses flash-attn";

  inputs = {
    # The name that `nix registry add pybuild ...` gave it; or write its address here.
    pybuild.url = "flake:pybuild";
    # The nixpkgs that pybuild is tested with. With another, the overlay still fits, but all is compiled anew.
    nixpkgs.follows = "pybuild/nixpkgs";
  };

  outputs =
    { nixpkgs, pybuild, ... }:
    let
      system = "x86_64-linux";
      pkgs = import nixpkgs {
        inherit system;
        config = {
          # CUDA is unfree.
          allowUnfree = true;
          cudaSupport = true;
          # The GPUs that this project runs on: 8.0 A100, 9.0 H100, 10.0 B200, 12.0 RTX 50 and RTX PRO Blackwell.
          cudaCapabilities = [ "10.0" ];
        };
        overlays = [ pybuild.overlays.default ];
      };

      python = pkgs.python3.withPackages (packages: [
        packages.torch
        packages.flash-attn
      ]);
    in
    {
      packages.${system}.default = python;

      devShells.${system}.default = pkgs.mkShell { packages = [ python ]; };
    };
}
