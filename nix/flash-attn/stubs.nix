/*
  C++ that stands in for the kernels that a selection leaves out: each raises an error that names what is missing.

  stubs :: { dropped :: [Kernel]; wheelHas :: String; } -> String
*/
{ lib }:
{ dropped, wheelHas }:

let
  cType = {
    fp16 = "cutlass::half_t";
    bf16 = "cutlass::bfloat16_t";
  };

  stub =
    kernel:
    let
      function = {
        fwd = "run_mha_fwd_";
        fwd_split = "run_mha_fwd_splitkv_dispatch";
        bwd = "run_mha_bwd_";
      };
      params = if kernel.pass == "bwd" then "Flash_bwd_params" else "Flash_fwd_params";
      pass = if kernel.pass == "bwd" then "backward" else "forward";
      remedy =
        "pybuild build flash-attn --head-dim ${toString kernel.headDim} --dtype ${kernel.dtype}"
        + lib.optionalString (kernel.pass == "bwd") " (without --forward-only)";
    in
    ''
      template <> void ${function.${kernel.pass}}<${cType.${kernel.dtype}}, ${toString kernel.headDim}, ${
        if kernel.causal then "true" else "false"
      }>(${params} &, cudaStream_t) {
        missing("head dimension ${toString kernel.headDim}, ${kernel.dtype}, ${pass}", "${remedy}");
      }
    '';
in
''
  // Written by pybuild (nix/flash-attn/stubs.nix) for the kernels that this selection leaves out.
  #include <stdexcept>
  #include <string>
  #include "namespace_config.h"
  #include <cutlass/numeric_types.h>
  #include "flash.h"

  namespace {
  [[noreturn]] void missing(const char *what, const char *remedy) {
    throw std::runtime_error(std::string("this flash-attn wheel was built without the kernels for ") + what +
                             ". It has: ${wheelHas}. Build one that has them: " + remedy +
                             ", with the other options as before, or leave the selection out for a full build.");
  }
  }  // namespace

  namespace FLASH_NAMESPACE {
  ${lib.concatMapStringsSep "\n" stub dropped}
  }  // namespace FLASH_NAMESPACE
''
