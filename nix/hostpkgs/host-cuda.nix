# The CUDA toolkit installed on this machine, as the cudaPackages of its version.
{
  lib,
  stdenv,
  facts,
}:

let
  inherit (facts.cudaHome) path version nvcc;
in
{
  cudaMajorMinorVersion = version;

  cudatoolkit = stdenv.mkDerivation {
    pname = "cuda-toolkit-host";
    version = nvcc;
    buildCommand = ''
      mkdir "$out"
      ln -s ${path}/* "$out/"
    '';
  };
}
