/*
  flash-attn: upstream's sdist built by upstream's setup.py, as a wheel for any venv (`dist`) and as a Python package for
  Nix (`out`).

  With the default arguments setup.py runs as it is. A selection of kernels takes the others out of its list of sources
  and puts stubs.nix in their place.
*/
{
  lib,
  stdenv,
  python,
  fetchPypi,
  release,
  torch,
  cuda-toolkit,
  pinned,
  callPackage,
  toPythonModule,
  config ? { },

  cudaCapabilities ? config.cudaCapabilities or [ "10.0" ],
  headDims ? kernelData.headDims,
  dtypes ? kernelData.dtypes,
  backward ? true,
  kernelData ? import ./kernels.nix { inherit lib; },
}:

let
  version = "2.8.3";

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

  localVersion = lib.concatStringsSep "." (
    [
      release.name
      "torch${lib.versions.majorMinor release.torch}"
    ]
    ++ map (architecture: "sm${architecture}") architectures
    ++ lib.optionals (!isFull) (
      map (dim: "hdim${toString dim}") (lib.optionals (headDims != kernelData.headDims) headDims)
      ++ lib.optionals (dtypes != kernelData.dtypes) dtypes
      ++ lib.optional (!backward) "fwd"
    )
  );

  parallelism = callPackage ../parallelism.nix {
    package = "flash-attn";
    inherit version architectures;
  };
in

assert
  unsupported == [ ]
  || throw "flash-attn ${version} has no code for the architectures ${lib.concatStringsSep ", " unsupported}; its setup.py knows ${lib.concatStringsSep ", " supported}";

toPythonModule (
  stdenv.mkDerivation {
    pname = "flash-attn";
    version = "${version}+${localVersion}";

    src = fetchPypi {
      pname = "flash_attn";
      inherit version;
      sha256 = "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d";
    };

    outputs = [
      "out"
      "dist"
    ];

    nativeBuildInputs = [
      python
      cuda-toolkit
      pinned.auditwheel
      pinned.ninja
      pinned.packaging
      pinned.psutil
      pinned.pyelftools
      pinned.setuptools
      pinned.wheel
    ];
    propagatedBuildInputs = [
      torch
      pinned.einops
    ];

    env = {
      CUDA_HOME = "${cuda-toolkit}";
      FLASH_ATTENTION_FORCE_BUILD = "TRUE";
      FLASH_ATTN_CUDA_ARCHS = lib.concatStringsSep ";" architectures;
      FLASH_ATTN_LOCAL_VERSION = localVersion;
    };

    inherit (parallelism) peakBytes;
    enableParallelBuilding = true;

    checkVersions = ./check_versions.py;
    checkArchitectures = ./check_architectures.py;
    tagWheel = ./tag_wheel.py;
    jobsScript = ../jobs.py;
    unpacker = ../unpack_wheels.py;
    stubs = lib.optionalString (!isFull) (
      import ./stubs.nix { inherit lib; } {
        inherit (selection) dropped;
        wheelHas = lib.concatStringsSep "; " [
          "head dimensions ${lib.concatMapStringsSep ", " toString headDims}"
          (lib.concatStringsSep ", " dtypes)
          (if backward then "forward and backward" else "forward only")
        ];
      }
    );
    droppedKernels = map (kernel: kernel.name) selection.dropped;
    passAsFile = [
      "stubs"
      "droppedKernels"
    ];

    postPatch = lib.optionalString (!isFull) ''
      cp "$stubsPath" csrc/flash_attn/src/pybuild_stubs.cpp
      python ${./select_sources.py} setup.py pybuild_stubs.cpp $(<"$droppedKernelsPath")
    '';

    buildPhase = ''
      runHook preBuild
      python "$checkVersions"
      export NVCC_THREADS=$(( ${toString (lib.length architectures)} < NIX_BUILD_CORES ? ${toString (lib.length architectures)} : NIX_BUILD_CORES ))
      export MAX_JOBS=$(python "$jobsScript" "$NIX_BUILD_CORES" "$peakBytes")
      python setup.py bdist_wheel --dist-dir raw-dist
      runHook postBuild
    '';

    installPhase = ''
      runHook preInstall
      for object in build/temp.*/csrc/flash_attn/src/flash_*.o; do
        objects="''${objects:-} $object"
      done
      python "$checkArchitectures" "$FLASH_ATTN_CUDA_ARCHS" $objects
      mkdir -p "$dist" "$out/${python.sitePackages}"
      python "$tagWheel" raw-dist/*.whl "$dist"
      python "$unpacker" "$out/${python.sitePackages}" "$dist"/*.whl
      runHook postInstall
    '';

    doInstallCheck = true;
    installCheckPhase = ''
      runHook preInstallCheck
      (cd / && PYTHONPATH=$out/${python.sitePackages}:$PYTHONPATH python -c 'import flash_attn, flash_attn_2_cuda')
      runHook postInstallCheck
    '';

    passthru = {
      inherit
        torch
        cuda-toolkit
        release
        cudaCapabilities
        selection
        parallelism
        ;
    };

    meta = {
      description = "Exact attention on GPUs, fast and in little memory";
      license = lib.licenses.bsd3;
    };
  }
)
