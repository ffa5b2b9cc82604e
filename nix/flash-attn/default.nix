# flash-attn as upstream's setup.py builds it, or the part of its kernels that a model needs.
{
  lib,
  pinned,
  callPackage,
  config ? { },

  # nixpkgs has none configured unless its user says so.
  cudaCapabilities ?
    if config.cudaCapabilities or [ ] == [ ] then [ "10.0" ] else config.cudaCapabilities,
  headDims ? kernelData.headDims,
  dtypes ? kernelData.dtypes,
  backward ? true,
  kernelData ? import ./kernels.nix { inherit lib; },
}:

let
  selection = kernelData.select { inherit headDims dtypes backward; };
  isFull = selection.dropped == [ ];

  # setup.py passes over any other without a word, and the wheel would lack the code.
  supported = [
    "8.0"
    "9.0"
    "10.0"
    "12.0"
  ];

  stubs = import ./stubs.nix { inherit lib; } {
    inherit (selection) dropped;
    wheelHas = lib.concatStringsSep "; " [
      "head dimensions ${lib.concatMapStringsSep ", " toString headDims}"
      (lib.concatStringsSep ", " dtypes)
      (if backward then "forward and backward" else "forward only")
    ];
  };
in

callPackage ../extension/package.nix { } {
  src = {
    pname = "flash_attn";
    version = "2.8.3";
    sha256 = "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d";
  };
  inherit cudaCapabilities supported;
  runsOn = "8.0 (which runs on 8.6 and 8.9 as well), 9.0, 10.0 (and 10.3), 12.0 (and 12.1)";

  folders = [
    "csrc/flash_attn"
    "csrc/cutlass/include"
  ];
  foldersHash = "sha256-+qEcv/UE15O1TjwS1uX8DDrlczFTsAlOJKqq2rWixIU=";
  includes = [
    "csrc/flash_attn"
    "csrc/flash_attn/src"
    "csrc/cutlass/include"
  ];
  module = "flash_attn_2_cuda";

  # setup.py's flags, which the wheel's build compares with what it asks for.
  cxx = {
    sources = [ "csrc/flash_attn/flash_api.cpp" ];
    flags = [
      "-O3"
      "-std=c++17"
    ];
  };
  cuda = {
    sources = map (kernel: "csrc/flash_attn/src/${kernel.name}.cu") selection.kept;
    flags = [
      "-O3"
      "-std=c++17"
      "-U__CUDA_NO_HALF_OPERATORS__"
      "-U__CUDA_NO_HALF_CONVERSIONS__"
      "-U__CUDA_NO_HALF2_OPERATORS__"
      "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"
      "--expt-relaxed-constexpr"
      "--expt-extended-lambda"
      "--use_fast_math"
    ]
    ++ lib.concatMap (
      capability:
      let
        architecture = lib.replaceStrings [ "." ] [ "" ] capability;
      in
      [
        "-gencode"
        "arch=compute_${architecture},code=sm_${architecture}"
      ]
    ) (lib.filter (capability: lib.elem capability cudaCapabilities) supported);
  };

  env =
    { architectures, localVersion }:
    {
      FLASH_ATTENTION_FORCE_BUILD = "TRUE";
      FLASH_ATTN_CUDA_ARCHS = lib.concatStringsSep ";" architectures;
      FLASH_ATTN_LOCAL_VERSION = localVersion;
    };
  tags =
    lib.optionals (headDims != kernelData.headDims) (map (dim: "hdim${toString dim}") headDims)
    ++ lib.optionals (dtypes != kernelData.dtypes) dtypes
    ++ lib.optional (!backward) "fwd";
  imports = [
    "flash_attn"
    "flash_attn_2_cuda"
  ];
  dependencies = [ pinned.einops ];

  # A selection takes the other kernels out of setup.py's list of sources, and puts stubs in their place.
  postPatch = lib.optionalString (!isFull) ''
    cat >csrc/flash_attn/src/pybuild_stubs.cpp <<'EOF'
    ${stubs}
    EOF
    python ${./select_sources.py} setup.py pybuild_stubs.cpp ${
      lib.concatMapStringsSep " " (kernel: kernel.name) selection.dropped
    }
  '';

  passthru = { inherit selection; };
  meta = {
    description = "Exact attention on GPUs, fast and in little memory";
    license = lib.licenses.bsd3;
  };
}
