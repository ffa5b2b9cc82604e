/*
  A torch extension as a package: an object a derivation (`objects`), what those are made of (`inputs`), the wheel by
  upstream's setup.py alone (the package itself), and the same wheel made of the objects (`fromObjects`).
*/
{
  lib,
  release,
  callPackage,
}:
{
  # The sdist, as fetchPypi takes it: { pname, version, sha256 }.
  src,
  # What to compile for, what there is code for, and what else that runs on, for people.
  cudaCapabilities,
  supported,
  runsOn,
  # What sources include: `folders` of the sdist, and the hash of these.
  folders,
  foldersHash,
  # Include folders inside the sdist.
  includes,
  # Python's name of the extension.
  module,
  # Sources of setup.py, and setup.py's flags for each kind: { sources, flags }.
  cxx,
  cuda,
  # Environment that setup.py reads: { architectures, localVersion } -> AttrSet.
  env,
  # What the wheel's version says beside release, torch and architectures.
  tags ? [ ],
  # See wheel.nix.
  imports,
  dependencies,
  postPatch ? "",
  passthru ? { },
  meta,
}:

let
  name = lib.replaceStrings [ "_" ] [ "-" ] src.pname;
  # 10.0 -> 100, as nvcc writes it.
  architecturesOf = map (lib.replaceStrings [ "." ] [ "" ]);
  architectures = architecturesOf cudaCapabilities;
  unsupported = lib.subtractLists supported cudaCapabilities;

  localVersion = lib.concatStringsSep "." (
    [
      release.name
      "torch${lib.versions.majorMinor release.torch}"
    ]
    ++ map (architecture: "sm${architecture}") architectures
    ++ tags
  );

  sources = callPackage ./sources.nix { } {
    inherit src folders;
    hash = foldersHash;
  };

  objectsOf =
    { sources, flags }:
    lib.listToAttrs (
      map (
        source:
        lib.nameValuePair (lib.head (lib.splitString "." (baseNameOf source))) (compileObject source flags)
      ) sources
    );
  compileObject =
    source: flags:
    callPackage ./kernel.nix { } {
      inherit
        source
        sources
        includes
        module
        flags
        cudaCapabilities
        ;
      root = "${src.pname}-${src.version}";
      threads = lib.length architectures;
    };
  objects = objectsOf cxx // objectsOf cuda;

  wheel =
    objects':
    callPackage ./wheel.nix { } (
      src
      // {
        inherit
          architectures
          localVersion
          imports
          dependencies
          meta
          ;
        postPatch =
          postPatch
          + import ./dates.nix { inherit lib; } {
            inherit (cuda) flags;
            folder = ".";
          };
        env = env { inherit architectures localVersion; };
        objects = objects';
        parallelism = (import ../parallelism.nix { inherit lib; }).forPackage {
          package = name;
          inherit (src) version;
          inherit architectures;
          kernels = builtins.attrNames objects;
        };
        passthru = {
          inherit cudaCapabilities objects;
          inputs = callPackage ./inputs.nix { } { inherit name sources; };
          fromObjects = wheel (builtins.attrValues objects);
        }
        // passthru;
      }
    );
in

assert
  unsupported == [ ]
  || throw "${name} ${src.version} has no code for the architectures ${lib.concatStringsSep ", " (architecturesOf unsupported)}; its setup.py knows ${lib.concatStringsSep ", " (architecturesOf supported)}. Choose cudaCapabilities among ${runsOn}";

wheel [ ]
