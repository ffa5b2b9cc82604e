# causal-conv1d as upstream's setup.py builds it, for the architectures asked for alone.
{
  lib,
  pinned,
  callPackage,
  config ? { },
  # nixpkgs has none configured unless its user says so.
  cudaCapabilities ?
    if config.cudaCapabilities or [ ] == [ ] then [ "10.0" ] else config.cudaCapabilities,
}:

let
  pin = (builtins.fromJSON (builtins.readFile ../releases/sources.json)).causal-conv1d;
in
callPackage ../extension/package.nix { } {
  src = {
    pname = "causal_conv1d";
    inherit (pin) version sha256;
  };
  inherit cudaCapabilities;
  # setup.py's, without Jetson's, and without those that others' code runs on.
  supported = lib.splitString " " "7.5 8.0 9.0 10.0 12.0";
  runsOn = "7.5, 8.0 (which runs on 8.6 and 8.9 as well), 9.0, 10.0 (and 10.3), 12.0 (and 12.1)";

  folders = [ "csrc" ];
  foldersHash = "sha256-EW37vtvlo0bsdfrUyF3wERsMSp6nIsbC6Dz7Ib38o+c=";
  includes = [ "csrc" ];
  module = "causal_conv1d_cuda";
  cxx = {
    sources = [ "csrc/causal_conv1d.cpp" ];
    flags = [ "-O3" ];
  };
  cuda = {
    sources = map (pass: "csrc/causal_conv1d_${pass}.cu") (lib.splitString " " "fwd bwd update");
    flags = lib.splitString " " (
      "-O3 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_BFLOAT16_OPERATORS__ "
      + "-U__CUDA_NO_BFLOAT16_CONVERSIONS__ -U__CUDA_NO_BFLOAT162_OPERATORS__ -U__CUDA_NO_BFLOAT162_CONVERSIONS__ "
      + "--expt-relaxed-constexpr --expt-extended-lambda --use_fast_math --ptxas-options=-v -lineinfo"
    );
  };

  env = build: {
    CAUSAL_CONV1D_FORCE_BUILD = "TRUE";
    CAUSAL_CONV1D_LOCAL_VERSION = build.localVersion;
    TORCH_CUDA_ARCH_LIST = lib.concatStringsSep ";" cudaCapabilities;
  };
  # setup.py adds nine architectures, whatever it is asked for; without them torch takes TORCH_CUDA_ARCH_LIST.
  postPatch = ''
    sed -i 's/cc_flag.append("\(-gencode\|arch=compute_.*\)")/pass/' setup.py
  '';
  imports = lib.splitString " " "causal_conv1d causal_conv1d_cuda";
  dependencies = lib.attrValues { inherit (pinned) ninja packaging; };

  meta = {
    description = "Causal depthwise convolution in one dimension, in CUDA";
    license = lib.licenses.bsd3;
  };
}
