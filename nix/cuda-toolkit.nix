/*
  The CUDA toolkit as one folder, for what asks for CUDA_HOME: nvcc with the headers and libraries that torch's headers
  include and that torch's extensions link, from nixpkgs' cudaPackages_x_y.

  nixpkgs' own `cudatoolkit` has more (debugger, image libraries) and an nvcc that finds no header by itself.
*/
{
  lib,
  symlinkJoin,
  makeBinaryWrapper,
  cudaPackages,
}:

let
  parts = [
    "cccl"
    "cuda_cudart"
    "cuda_cuobjdump"
    "cuda_cupti"
    "cuda_nvcc"
    "cuda_nvdisasm"
    "cuda_nvml_dev"
    "cuda_nvrtc"
    "cuda_nvtx"
    "cuda_profiler_api"
    "libcublas"
    "libcufft"
    "libcurand"
    "libcusolver"
    "libcusparse"
    "libnvjitlink"
  ]
  # From CUDA 13.0 apart from nvcc.
  ++ lib.optional (lib.versionAtLeast cudaPackages.cudaMajorMinorVersion "13.0") "cuda_crt";

  # Without the archives of static libraries, which are larger than all the rest, and examples.
  outputsOf =
    part: map (output: part.${output}) (lib.subtractLists [ "sample" "static" ] part.outputs);
in
symlinkJoin {
  pname = "cuda-toolkit";
  inherit (cudaPackages.cuda_nvcc) version;

  paths = lib.concatMap (name: outputsOf cudaPackages.${name}) parts;
  nativeBuildInputs = [ makeBinaryWrapper ];

  # nixpkgs' nvcc looks for headers and libraries beside itself, where it is alone. The flags come last, so that an
  # extension's own include folders win. The hooks of the parts would set flags for compilers that nobody asked for.
  postBuild = ''
    rm -rf "$out/nix-support"
    if [ ! -e "$out/lib64" ]; then
      ln -s lib "$out/lib64"
    fi
    rm "$out/bin/nvcc"
    makeWrapper ${lib.getExe cudaPackages.cuda_nvcc} "$out/bin/nvcc" \
      --append-flags "-I$out/include -L$out/lib -L$out/lib/stubs"
  '';

  passthru = { inherit cudaPackages; };
  meta = {
    description = "CUDA ${cudaPackages.cudaMajorMinorVersion} as torch's extensions need it, in one folder";
    inherit (cudaPackages.cuda_nvcc.meta) license;
    platforms = [ "x86_64-linux" ];
    mainProgram = "nvcc";
  };
}
