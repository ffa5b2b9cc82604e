/*
  What an extension's sources include: a part of its sdist, laid out as the sdist is.

  Fixed by its own hash, so that a new sdist with the same kernels compiles nothing again.
*/
{ stdenv, fetchPypi }:
{
  # The sdist, as fetchPypi takes it.
  src,
  # Folders of the sdist to take, "csrc".
  folders,
  # The result's hash.
  hash,
}:

let
  root = "${src.pname}-${src.version}";
in
stdenv.mkDerivation {
  name = "${builtins.replaceStrings [ "_" ] [ "-" ] src.pname}-kernel-sources";
  src = fetchPypi src;

  outputHashMode = "recursive";
  outputHashAlgo = "sha256";
  outputHash = hash;

  dontUnpack = true;
  installPhase = ''
    mkdir "$out"
    tar xf "$src" --strip-components=1 -C "$out" --no-same-owner ${
      builtins.concatStringsSep " " (map (folder: "${root}/${folder}") folders)
    }
    chmod -R a=rX,u+w "$out"
  '';
  dontFixup = true;
}
