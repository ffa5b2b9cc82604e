# What every object of an extension is made from: built first, so that kernels wait for memory and for nothing else.
{
  stdenv,
  python,
  torch,
  cuda-toolkit,
  pinned,
}:
{ name, sources }:

stdenv.mkDerivation {
  name = "${name}-inputs";
  paths = [
    sources
    torch.headers
    torch
    cuda-toolkit
    python
    pinned.setuptools
  ];
  buildCommand = ''
    printf '%s\n' $paths >"$out"
  '';
}
