/*
  A shell to use flash-attn in, and to build any other torch extension in: nvcc of torch's CUDA first on PATH, a C++
  compiler that it takes, torch, and the architectures that extensions ask for by environment.
*/
{
  lib,
  mkShell,
  python,
  flash-attn,
  # null where the package set has none.
  pybuild ? null,
}:

let
  inherit (flash-attn) torch cuda-toolkit cudaCapabilities;
  inherit (python.pkgs.pybuildReleases.${torch.release.name}) stdenv pinned;

  environment = python.withPackages (
    packages:
    [
      torch
      flash-attn
      pinned.ninja
      pinned.packaging
      pinned.psutil
      pinned.setuptools
      pinned.wheel
    ]
    # torch works without, and warns.
    ++ lib.optional (packages ? numpy) packages.numpy
  );
in
(mkShell.override { inherit stdenv; }) {
  name = "pybuild-shell";

  packages = [
    cuda-toolkit
    environment
    pinned.ninja
  ]
  ++ lib.optional (pybuild != null) pybuild;

  CUDA_HOME = "${cuda-toolkit}";
  CUDAToolkit_ROOT = "${cuda-toolkit}";
  # What torch.utils.cpp_extension compiles for; flash-attn's setup.py asks for its own variable.
  TORCH_CUDA_ARCH_LIST = lib.concatStringsSep ";" cudaCapabilities;
  FLASH_ATTN_CUDA_ARCHS = lib.concatMapStringsSep ";" (lib.replaceStrings
    [ "." ]
    [ "" ]
  ) cudaCapabilities;

  # Before what the user's own PATH may have; torch's extensions compile C++ with CXX, and nvcc's host part with CC.
  shellHook = ''
    export PATH=$CUDA_HOME/bin:$PATH
    export CUDAHOSTCXX=$(type -P "$CXX")
  '';

  passthru = { inherit environment; };
}
