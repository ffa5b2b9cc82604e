/*
  Pinned wheels as derivations.

  A pin is `{ file, sha256 }` from nix/releases/*.json: its file name says all that fetchPypi needs.
*/
{
  lib,
  stdenv,
  python,
  fetchPypi,
  toPythonModule,
  # What nixpkgs patches binaries with. hostpkgs has none of them: there a manylinux wheel finds what it looks for.
  autoPatchelfHook ? null,
  autoAddDriverRunpath ? null,
  zlib ? null,
}:

rec {
  # Whether binaries are patched to load from the store.
  isPatched = autoPatchelfHook != null;

  # What no wheel brings along: the driver, and plug-ins' libraries for networks (InfiniBand, MPI, ...), which CUDA's
  # libraries load only where they are. All of them, for cu128: found by running nixpkgs' auto-patchelf on its wheels.
  notInWheels = [
    "libcuda.so.1"
    "libfabric.so.1"
    "libibverbs.so.1"
    "libmlx5.so.1"
    "libmpi.so.40"
    "liboshmem.so.40"
    "libpmix.so.2"
    "librdmacm.so.1"
    "libucp.so.0"
    "libucs.so.0"
  ];

  # Hooks for the nativeBuildInputs of a derivation that `patched` goes into.
  patchHooks = lib.optionals isPatched [
    autoPatchelfHook
    autoAddDriverRunpath
  ];

  /*
    patched :: [String] -> AttrSet

    Attributes that make a derivation's binaries load from the store: the C++ library, and the folders named, which are
    bash globs. They look for NVIDIA's driver at /run/opengl-driver first, which is NixOS' place for it.
  */
  patched =
    libraries:
    lib.optionalAttrs isPatched {
      buildInputs = [
        stdenv.cc.cc.lib
        zlib
      ];
      autoPatchelfIgnoreMissingDeps = notInWheels;
      # Both for what is linked and for what is loaded by name while running (cuDNN's parts, nvrtc's built-ins).
      preFixup = ''
        shopt -s nullglob
        for folder in ${lib.concatStringsSep " " libraries}; do
          addAutoPatchelfSearchPath "$folder"
          appendRunpaths+=("$folder")
        done
        shopt -u nullglob
      '';
    };

  # fetchWheel :: { file :: String; sha256 :: String; } -> Derivation
  fetchWheel =
    { file, sha256, ... }:
    let
      fields = builtins.match "([^-]+)-([^-]+(-[0-9][^-]*)?)-([^-]+)-([^-]+)-([^-]+)[.]whl" file;
      field = builtins.elemAt fields;
    in
    fetchPypi {
      format = "wheel";
      pname = field 0;
      version = field 1;
      python = field 3;
      dist = field 3;
      abi = field 4;
      platform = field 5;
      inherit sha256;
    };

  /*
    pick :: Release -> String -> Pin

    The file of one wheel of a release for this Python.
  */
  pick =
    release: name:
    let
      inherit (release.wheels.${name}) files;
      tag = "cp${lib.replaceStrings [ "." ] [ "" ] python.pythonVersion}";
    in
    files.any or files.${tag}
      or (throw "release ${release.name} has no ${name} for Python ${python.pythonVersion}");

  /*
    unpackWheels :: { pname, version, pins :: [Pin], libraries :: [String], ... } -> Derivation

    All of the wheels in its site-packages. `libraries` are folders that their binaries load from, as bash globs.
  */
  unpackWheels =
    {
      pins,
      libraries ? [ ],
      postInstall ? "",
      ...
    }@args:
    toPythonModule (
      stdenv.mkDerivation (
        removeAttrs args [
          "pins"
          "libraries"
        ]
        // {
          wheels = map fetchWheel pins;
          nativeBuildInputs = [ python ] ++ patchHooks ++ args.nativeBuildInputs or [ ];
          dontUnpack = true;
          dontStrip = true;
          unpacker = ./unpack_wheels.py;
          installPhase = ''
            runHook preInstall
            site=$out/${python.sitePackages}
            mkdir -p "$site"
            python "$unpacker" "$site" $wheels
            runHook postInstall
          '';
          inherit postInstall;
        }
        // patched libraries
      )
    );
}
