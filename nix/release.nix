/*
  One release in one Python's package set: { cuda-toolkit, torch, flash-attn, ... }.

  Where the set has what a build needs (nixpkgs: CUDA, setuptools, ninja), that is used; where it does not (hostpkgs),
  the release's pinned wheels take its place.
*/
{
  final,
  pyFinal,
  release,
}:

let
  inherit (final) lib;
  inherit (release) groups;

  cudaPackagesName = "cudaPackages_${lib.replaceStrings [ "." ] [ "_" ] release.cuda}";
  hasCuda = final ? ${cudaPackagesName};

  scope = lib.fix (self: {
    inherit release;
    callPackage = lib.callPackageWith (final // pyFinal // self);

    cudaPackages = if hasCuda then final.${cudaPackagesName} else { };
    # With a compiler that this CUDA's nvcc takes.
    stdenv = self.cudaPackages.backendStdenv or final.stdenv;

    # Not with that one: what is loaded into Python has to share its C++ library with all that Python loads.
    wheels = self.callPackage ./wheels.nix { inherit (final) stdenv; };
    cuda-wheels = self.callPackage ./cuda-wheels.nix {
      withToolkit = !hasCuda && groups.toolkit != [ ];
    };

    cuda-toolkit =
      if self.cudaPackages ? cuda_nvcc then
        self.callPackage ./cuda-toolkit.nix { }
      else if hasCuda then
        self.cudaPackages.cudatoolkit
      else if groups.toolkit != [ ] then
        self.cuda-wheels
      else
        throw ''
          release ${release.name} needs a CUDA ${release.cuda} toolkit, and this package set has none.
          Three ways out: build with nixpkgs (the default package set, which fetches it); install the toolkit on this
          machine (/usr/local/cuda-${release.cuda}, or name it with --cuda-home); or take a release whose compiler
          comes from wheels: --release cu130.'';

    fromWheel =
      name:
      self.wheels.unpackWheels {
        pname = name;
        inherit (release.wheels.${name}) version;
        pins = [ (self.wheels.pick release name) ];
      };

    # setuptools, ninja, sympy, ...: pinned, where the set has no package of that name.
    pinned = lib.genAttrs (groups.python ++ groups.build) (
      name: pyFinal.${name} or (self.fromWheel name)
    );

    # What torch's metadata requires of an exact version and torch.compile uses: triton. Not on hostpkgs, whose torch
    # only builds extensions.
    runtimePackages = lib.optionalAttrs self.wheels.isPatched (
      lib.genAttrs groups.runtime self.fromWheel
    );
    runtime =
      builtins.attrValues self.runtimePackages
      ++ lib.optional self.wheels.isPatched self.pinned.setuptools;

    torch = self.callPackage ./torch.nix { };
    flash-attn = self.callPackage ./flash-attn { };
    causal-conv1d = self.callPackage ./causal-conv1d { };
  });
in
scope
