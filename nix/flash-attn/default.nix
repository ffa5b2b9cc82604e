# flash-attn as upstream's setup.py builds it, or the part of its kernels that a model needs.
{
  lib,
  release,
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
  version = "2.8.3";
  root = "flash_attn-${version}";

  selection = kernelData.select { inherit headDims dtypes backward; };
  isFull = selection.dropped == [ ];

  # 10.0 -> 100, as setup.py and nvcc write it.
  architectures = map (lib.replaceStrings [ "." ] [ "" ]) cudaCapabilities;
  # setup.py passes over any other without a word, and the wheel would lack the code.
  supported = [
    "80"
    "90"
    "100"
    "120"
  ];
  unsupported = lib.subtractLists supported architectures;

  buildWheel = callPackage ../extension/wheel.nix { };
  compileObject = callPackage ../extension/kernel.nix { };

  # setup.py's flags, which the wheel's build compares with what it asks for.
  flags = {
    cxx = [
      "-O3"
      "-std=c++17"
    ];
    cuda = [
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
    ++ lib.concatMap (architecture: [
      "-gencode"
      "arch=compute_${architecture},code=sm_${architecture}"
    ]) (lib.filter (architecture: lib.elem architecture architectures) supported);
  };

  sources = callPackage ./sources.nix { inherit version src; };

  objectOf =
    source: flags:
    compileObject {
      inherit root source flags;
      inherit sources;
      includes = [
        "csrc/flash_attn"
        "csrc/flash_attn/src"
        "csrc/cutlass/include"
      ];
      module = "flash_attn_2_cuda";
      threads = lib.length architectures;
    };

  src = {
    pname = "flash_attn";
    inherit version;
    sha256 = "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d";
  };

  # One derivation for each source: name -> object.
  objects = {
    flash_api = objectOf "csrc/flash_attn/flash_api.cpp" flags.cxx;
  }
  // lib.listToAttrs (
    map (
      kernel: lib.nameValuePair kernel.name (objectOf "csrc/flash_attn/src/${kernel.name}.cu" flags.cuda)
    ) selection.kept
  );

  localVersion = lib.concatStringsSep "." (
    [
      release.name
      "torch${lib.versions.majorMinor release.torch}"
    ]
    ++ map (architecture: "sm${architecture}") architectures
    ++ lib.optionals (headDims != kernelData.headDims) (map (dim: "hdim${toString dim}") headDims)
    ++ lib.optionals (dtypes != kernelData.dtypes) dtypes
    ++ lib.optional (!backward) "fwd"
  );

  stubs = import ./stubs.nix { inherit lib; } {
    inherit (selection) dropped;
    wheelHas = lib.concatStringsSep "; " [
      "head dimensions ${lib.concatMapStringsSep ", " toString headDims}"
      (lib.concatStringsSep ", " dtypes)
      (if backward then "forward and backward" else "forward only")
    ];
  };

  wheel =
    objects':
    buildWheel (
      src
      // {
        inherit architectures localVersion;
        env = {
          FLASH_ATTENTION_FORCE_BUILD = "TRUE";
          FLASH_ATTN_CUDA_ARCHS = lib.concatStringsSep ";" architectures;
          FLASH_ATTN_LOCAL_VERSION = localVersion;
        };
        imports = [
          "flash_attn"
          "flash_attn_2_cuda"
        ];
        dependencies = [ pinned.einops ];
        objects = objects';
        parallelism = (import ../parallelism.nix { inherit lib; }).forPackage {
          package = "flash-attn";
          inherit version architectures;
          kernels = [ "flash_api" ] ++ map (kernel: kernel.name) selection.kept;
        };

        # A selection takes the other kernels out of setup.py's list of sources, and puts stubs in their place.
        postPatch = lib.optionalString (!isFull) ''
          cat >csrc/flash_attn/src/pybuild_stubs.cpp <<'EOF'
          ${stubs}
          EOF
          python ${./select_sources.py} setup.py pybuild_stubs.cpp ${
            lib.concatMapStringsSep " " (kernel: kernel.name) selection.dropped
          }
        '';

        passthru = {
          inherit cudaCapabilities selection objects;
          inputs = callPackage ../extension/inputs.nix { } {
            name = "flash-attn";
            inherit sources;
          };
          # The same wheel, made of an object a derivation.
          fromObjects = wheel (builtins.attrValues objects);
        };
        meta = {
          description = "Exact attention on GPUs, fast and in little memory";
          license = lib.licenses.bsd3;
        };
      }
    );
in

assert
  unsupported == [ ]
  || throw "flash-attn ${version} has no code for the architectures ${lib.concatStringsSep ", " unsupported}; its setup.py knows ${lib.concatStringsSep ", " supported}. Choose cudaCapabilities among 8.0 (which runs on 8.6 and 8.9 as well), 9.0, 10.0 (and 10.3), 12.0 (and 12.1)";

wheel [ ]
