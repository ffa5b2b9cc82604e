/*
  One source of an extension, compiled: one derivation, one object in the store.

  Its inputs are the sources it may include, torch's headers and the toolkit, and nothing of pybuild or of the package's
  Python, so a change there compiles nothing again. The command is the one that setup.py's ninja would run, in the same
  folder; extension/compile.py compares them when the wheel takes the object over.
*/
{
  lib,
  stdenv,
  python,
  torch,
  cuda-toolkit,
  pinned,
}:
{
  # Name of the extension's sdist, "flash_attn-2.8.3": ninja compiles below a folder of that name.
  root,
  # The part of the sdist that sources include, a derivation laid out as the sdist is.
  sources,
  # The source, "csrc/flash_attn/src/flash_fwd_hdim64_fp16_sm80.cu".
  source,
  # Include folders inside the sdist.
  includes,
  # Python's name of the extension, "flash_attn_2_cuda".
  module,
  # Flags of setup.py for this kind of source.
  flags,
  # Those of torch's TORCH_CUDA_ARCH_LIST, which counts where the flags name no architecture.
  cudaCapabilities ? [ ],
  # Compiles at most this many architectures at once.
  threads ? 1,
}:

let
  file = baseNameOf source;
  name = lib.head (lib.splitString "." file);
  isCuda = lib.hasSuffix ".cu" file;

  # torch.utils.cpp_extension's own, of torch 2.10 and 2.11 alike: COMMON_NVCC_FLAGS and those of BuildExtension.
  nvccFlags = [
    "-D__CUDA_NO_HALF_OPERATORS__"
    "-D__CUDA_NO_HALF_CONVERSIONS__"
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__"
    "-D__CUDA_NO_HALF2_OPERATORS__"
    "--expt-relaxed-constexpr"
    "--compiler-options"
    "'-fPIC'"
  ]
  ++ flags;
  evenDates = import ./dates.nix { inherit lib; } {
    inherit flags;
    folder = "\"$top\"";
  };
  definitions = [
    "-DTORCH_API_INCLUDE_EXTENSION_H"
    "-DTORCH_EXTENSION_NAME=${module}"
  ];
  # What torch adds at the end where setup.py's flags leave it open (_get_cuda_arch_flags, append_std17_if_no_std_present).
  hasNone = pattern: !lib.any (flag: builtins.match pattern flag != null) flags;
  architectureFlags = lib.optionals (isCuda && hasNone ".*arch.*") (
    lib.sort builtins.lessThan (
      map (
        capability:
        let
          architecture = lib.replaceStrings [ "." ] [ "" ] capability;
        in
        "-gencode=arch=compute_${architecture},code=sm_${architecture}"
      ) cudaCapabilities
    )
  );
  lateFlags = architectureFlags ++ lib.optional (hasNone "-std=.*") "-std=c++17";
in
stdenv.mkDerivation {
  name = "${lib.removeSuffix "-${lib.last (lib.splitString "-" root)}" root}-object-${name}";

  nativeBuildInputs = [
    python
    cuda-toolkit
  ]
  ++ lib.optional (!isCuda) pinned.setuptools;

  dontUnpack = true;
  compile = ./compile.py;

  buildPhase = ''
    runHook preBuild
    top=$NIX_BUILD_TOP/${root}
    build=$top/build/temp.linux-x86_64-cpython-${lib.replaceStrings [ "." ] [ "" ] python.pythonVersion}
    mkdir -p "$top" "$build" "$out"
    cp -r --no-preserve=mode ${sources}/* "$top/"
    ${evenDates}# As ninja does: the folder is in debug information.
    cd "$build"
    mapfile -t python_includes < <(python ${./python_includes.py})
    includes=(
      ${lib.concatMapStringsSep " " (folder: "\"-I$top/${folder}\"") includes}
      "-I${torch.headers}" "-I${torch.headers}/torch/csrc/api/include"
      "-I${cuda-toolkit}/include" "''${python_includes[@]}"
    )
    ${
      if isCuda then
        ''
          command=(nvcc "''${includes[@]}" -c -c "$top/${source}"
            ${lib.escapeShellArgs nvccFlags} --threads ${toString threads} ${
              lib.escapeShellArgs (definitions ++ lateFlags)
            } -ccbin "$CC")
        ''
      else
        ''
          # The host Python's own flags come first, as setuptools has them.
          mapfile -t flags < <(python ${./cxx_flags.py})
          command=("$CXX" "''${flags[@]}" "''${includes[@]}" -c -c "$top/${source}"
            ${lib.escapeShellArgs (flags ++ definitions ++ lateFlags)})
        ''
    }
    python "$compile" record "$out/${name}.o" "$out/${name}.json" -- "''${command[@]}"
    runHook postBuild
  '';

  dontInstall = true;
  dontStrip = true;
  dontPatchELF = true;
}
