/*
  One release in one Python's package set: { cuda-toolkit, torch, flash-attn }.

  Where the set has what a build needs (nixpkgs: CUDA, setuptools, ninja), that is used; where it does not (hostpkgs),
  the release's pinned wheels take its place.
*/
{
  final,
  pyFinal,
  pyPrev,
  release,
}:

let
  inherit (final) lib;
  inherit (release) groups;

  cudaPackagesName = "cudaPackages_${lib.replaceStrings [ "." ] [ "_" ] release.cuda}";

  scope = lib.fix (self: {
    inherit release;
    callPackage = lib.callPackageWith (final // pyFinal // self);

    wheels = self.callPackage ./wheels.nix { };
    cuda-wheels = self.callPackage ./cuda-wheels.nix { };

    cuda-toolkit =
      if final ? ${cudaPackagesName} then
        self.callPackage ./cuda-toolkit.nix { cudaPackages = final.${cudaPackagesName}; }
      else if groups.toolkit or [ ] != [ ] then
        self.cuda-wheels
      else
        throw ''
          release ${release.name} needs a CUDA ${release.cuda} toolkit, and this package set has none.
          Three ways out: build with nixpkgs (the default package set, which fetches it); install the CUDA ${release.cuda}
          toolkit on this machine (/usr/local/cuda-${release.cuda}, or name it with --cuda-home); or take a release whose
          compiler comes from wheels: --release cu130.'';

    # setuptools, ninja, sympy, ...: pinned, where the set has no package of that name.
    pinned = lib.genAttrs (groups.python ++ groups.build) (
      name:
      pyPrev.${name} or (self.wheels.unpackWheels {
        pname = name;
        inherit (release.wheels.${name}) version;
        pins = [ (self.wheels.pick release name) ];
      })
    );

    torch = self.callPackage ./torch.nix { };
    flash-attn = self.callPackage ./flash-attn { };
  });
in
scope
