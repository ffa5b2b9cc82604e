/*
  flash-attn 2.8.3's 72 CUDA kernels as data, in the order of upstream's setup.py, and the selections of them.

  A kernel: { name; pass = "fwd" | "fwd_split" | "bwd"; headDim; dtype = "fp16" | "bf16"; causal; }.
*/
{ lib }:

rec {
  passes = [
    "fwd"
    "bwd"
    "fwd_split"
  ];
  headDims = [
    32
    64
    96
    128
    192
    256
  ];
  dtypes = [
    "fp16"
    "bf16"
  ];

  all = lib.concatMap (
    pass:
    lib.concatMap
      (
        causal:
        lib.concatMap (
          headDim:
          map (dtype: {
            name = "flash_${pass}_hdim${toString headDim}_${dtype}${lib.optionalString causal "_causal"}_sm80";
            inherit
              pass
              headDim
              dtype
              causal
              ;
          }) dtypes
        ) headDims
      )
      [
        false
        true
      ]
  ) passes;

  /*
    select :: { headDims, dtypes, backward } -> { kept :: [Kernel]; dropped :: [Kernel]; }

    Both causal and not, both fwd and fwd_split (the KV cache uses the split ones): a model needs them together.
    Throws for a selection that is empty or names what there is not.
  */
  select =
    choice:
    let
      check =
        what: valid: chosen:
        let
          unknown = lib.subtractLists valid chosen;
          list = lib.concatMapStringsSep ", " toString;
        in
        if chosen == [ ] then
          throw "flash-attn: the selection of ${what} is empty; choose from ${list valid}"
        else if unknown != [ ] then
          throw "flash-attn: unknown ${what} ${list unknown}; choose from ${list valid}"
        else
          chosen;
      dims = check "head dimensions" headDims choice.headDims;
      types = check "dtypes" dtypes choice.dtypes;
      isKept =
        kernel:
        lib.elem kernel.headDim dims
        && lib.elem kernel.dtype types
        && (choice.backward || kernel.pass != "bwd");
    in
    {
      kept = lib.filter isKept all;
      dropped = lib.filter (kernel: !isKept kernel) all;
    };
}
