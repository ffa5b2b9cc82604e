/*
  What flash-attn's kernels include: the part of the sdist below csrc/.

  Fixed by its own hash, so that a new sdist with the same kernels compiles nothing again.
*/
{
  stdenv,
  fetchPypi,

  version,
  src,
}:
stdenv.mkDerivation {
  name = "flash-attn-kernel-sources";
  src = fetchPypi src;

  outputHashMode = "recursive";
  outputHashAlgo = "sha256";
  outputHash = "sha256-+qEcv/UE15O1TjwS1uX8DDrlczFTsAlOJKqq2rWixIU=";

  dontUnpack = true;
  installPhase = ''
    mkdir "$out"
    tar xf "$src" --strip-components=1 -C "$out" --no-same-owner \
      flash_attn-${version}/csrc/flash_attn flash_attn-${version}/csrc/cutlass/include
    chmod -R a=rX,u+w "$out"
  '';
  dontFixup = true;
}
