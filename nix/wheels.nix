/*
  Pinned wheels as derivations.

  A pin is `{ file, sha256 }` from nix/releases/*.json: its file name says all that fetchPypi needs.
*/
{
  lib,
  stdenv,
  python,
  fetchPypi,
}:

rec {
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

  # unpackWheels :: { pname, version, pins :: [Pin], ... } -> Derivation with all of them in its site-packages
  unpackWheels =
    { pins, postInstall ? "", ... }@args:
    stdenv.mkDerivation (
      removeAttrs args [ "pins" ]
      // {
        wheels = map fetchWheel pins;
        nativeBuildInputs = [ python ] ++ args.nativeBuildInputs or [ ];
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
    );
}
