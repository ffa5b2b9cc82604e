/*
  Tests of this project's Nix functions: name -> { expr, expected }.

  Run by `nix flake check` (default.nix) and by tests/test_nix_expressions.py, which needs nothing but an evaluator.
*/
{ lib }:

let
  kernels = import ../flash-attn/kernels.nix { inherit lib; };
  stubs = import ../flash-attn/stubs.nix { inherit lib; };
  releases = lib.genAttrs [
    "cu128"
    "cu130"
  ] (name: builtins.fromJSON (builtins.readFile (../releases + "/${name}.json")));

  # wheels.nix, over a fetchPypi that gives back what it is asked for.
  wheelsFor =
    pythonVersion:
    import ../wheels.nix {
      inherit lib;
      stdenv = { };
      python = {
        inherit pythonVersion;
        sitePackages = "lib/python${pythonVersion}/site-packages";
      };
      fetchPypi = args: args;
      toPythonModule = drv: drv;
    };
  wheels = wheelsFor "3.12";

  # What nixpkgs' fetchPypi makes of its arguments.
  fileOf =
    {
      pname,
      version,
      python,
      abi,
      platform,
      ...
    }:
    "${pname}-${version}-${python}-${abi}-${platform}.whl";

  allPins = lib.concatMap (
    release: lib.concatMap (wheel: builtins.attrValues wheel.files) (builtins.attrValues release.wheels)
  ) (builtins.attrValues releases);

  parallelism = import ../parallelism.nix { inherit lib; };
  inherit (parallelism) GiB MiB;
  flashAttn = builtins.fromJSON (builtins.readFile ../../pybuild/profiles/flash-attn-2.8.3.json);
  peakOf =
    architectures: threads:
    parallelism.highestPeak {
      compiles = parallelism.ofBuild flashAttn;
      inherit architectures threads;
    };
  needsOf =
    args:
    parallelism.forPackage (
      {
        package = "flash-attn";
        version = "2.8.3";
        architectures = [ "100" ];
        kernels = map (kernel: kernel.name) kernels.all;
      }
      // args
    );

  throws = value: !(builtins.tryEval (builtins.deepSeq value null)).success;

  select =
    args:
    kernels.select (
      {
        inherit (kernels) headDims dtypes;
        backward = true;
      }
      // args
    );
  kept = args: map (kernel: kernel.name) (select args).kept;
in
{
  testThereAre72Kernels = {
    expr = lib.length kernels.all;
    expected = 72;
  };

  testNoKernelIsThereTwice = {
    expr = lib.length (lib.unique (map (kernel: kernel.name) kernels.all));
    expected = 72;
  };

  testAFullSelectionDropsNothing = {
    expr = (select { }).dropped;
    expected = [ ];
  };

  testASelectionKeepsForwardBothWaysCausalAndNot = {
    expr = kept {
      headDims = [ 64 ];
      dtypes = [ "fp16" ];
      backward = false;
    };
    expected = [
      "flash_fwd_hdim64_fp16_sm80"
      "flash_fwd_hdim64_fp16_causal_sm80"
      "flash_fwd_split_hdim64_fp16_sm80"
      "flash_fwd_split_hdim64_fp16_causal_sm80"
    ];
  };

  testKeptAndDroppedAreAll = {
    expr =
      let
        part = select {
          headDims = [
            64
            128
          ];
          dtypes = [ "bf16" ];
        };
      in
      {
        kept = lib.length part.kept;
        dropped = lib.length part.dropped;
      };
    expected = {
      kept = 12;
      dropped = 60;
    };
  };

  testAnUnknownHeadDimensionIsRefused = {
    expr = throws (select {
      headDims = [ 80 ];
    });
    expected = true;
  };

  testAnUnknownDtypeIsRefused = {
    expr = throws (select {
      dtypes = [ "fp32" ];
    });
    expected = true;
  };

  testAnEmptySelectionIsRefused = {
    expr = throws (select {
      headDims = [ ];
    });
    expected = true;
  };

  testAStubSaysWhatIsMissingAndHowToGetIt = {
    expr =
      let
        text = stubs {
          dropped = [
            {
              name = "flash_bwd_hdim256_bf16_causal_sm80";
              pass = "bwd";
              headDim = 256;
              dtype = "bf16";
              causal = true;
            }
          ];
          wheelHas = "head dimensions 64";
        };
      in
      map (part: lib.length (lib.splitString part text) - 1) [
        "template <> void run_mha_bwd_<cutlass::bfloat16_t, 256, true>(Flash_bwd_params &, cudaStream_t)"
        "head dimension 256, bf16, backward"
        "--head-dim 256 --dtype bf16 (without --forward-only)"
        "head dimensions 64"
      ];
    expected = [
      1
      1
      1
      1
    ];
  };

  # Every file name of both releases survives the way through fetchPypi's arguments: so nixpkgs asks the index for the
  # very file, and hostpkgs finds the store path that `pybuild fetch` made.
  testFileNamesSurviveFetchPypi = {
    expr = lib.filter (pin: fileOf (wheels.fetchWheel pin) != pin.file) allPins;
    expected = [ ];
  };

  testAWheelWithABuildNumber = {
    expr = wheels.fetchWheel {
      file = "torch-2.10.0-3-cp312-cp312-manylinux_2_28_x86_64.whl";
      sha256 = "98c01b";
    };
    expected = {
      format = "wheel";
      pname = "torch";
      version = "2.10.0-3";
      python = "cp312";
      dist = "cp312";
      abi = "cp312";
      platform = "manylinux_2_28_x86_64";
      sha256 = "98c01b";
    };
  };

  testAWheelIsPickedForThisPython = {
    expr = map (version: ((wheelsFor version).pick releases.cu128 "torch").file) [
      "3.10"
      "3.13"
    ];
    expected = [
      "torch-2.10.0-3-cp310-cp310-manylinux_2_28_x86_64.whl"
      "torch-2.10.0-3-cp313-cp313-manylinux_2_28_x86_64.whl"
    ];
  };

  testAWheelForAnyPythonIsPickedForAll = {
    expr = (wheels.pick releases.cu128 "einops").file;
    expected = "einops-0.8.2-py3-none-any.whl";
  };

  testAPythonWithoutAWheelIsAnError = {
    expr = throws ((wheelsFor "3.14").pick releases.cu128 "torch");
    expected = true;
  };

  testNothingIsPatchedWithoutTheHook = {
    expr = {
      inherit (wheels) isPatched patchHooks;
      attributes = wheels.patched [ "/nowhere" ];
    };
    expected = {
      isPatched = false;
      patchHooks = [ ];
      attributes = { };
    };
  };

  # The vectors that pybuild/recommend.py and jobs.py have to pass as well.
  testCoreCap = {
    expr = lib.filter (
      vector:
      vector.cap != parallelism.coreCap {
        inherit (vector) cores peak;
        memory = vector.available;
      }
    ) (builtins.fromJSON (builtins.readFile ../cap-vectors.json));
    expected = [ ];
  };

  # profiles/flash-attn-2.8.3.json: 6755 MiB for flash_bwd_hdim256; four at once add 11/12 of that each.
  testTheHungriestCompile = {
    expr = [
      (peakOf 1 1)
      (peakOf 4 1)
      (peakOf 1 4)
      (peakOf 4 4)
    ];
    expected = [
      (6755 * MiB)
      (6755 * MiB)
      (6755 * MiB)
      (6755 * MiB * 45 / 12)
    ];
  };

  testEveryKernelHasAProfile = {
    expr = lib.subtractLists (map (compile: compile.kernel) (parallelism.ofBuild flashAttn)) (
      map (kernel: kernel.name) kernels.all
    );
    expected = [ ];
  };

  testASelectionNeedsLess = {
    expr =
      (needsOf { kernels = [ "flash_fwd_hdim32_fp16_sm80" ]; }).peakBytes < (needsOf { }).peakBytes;
    expected = true;
  };

  testWhatADerivationSaysOfItsNeeds = {
    expr = {
      inherit (needsOf { }) cap reason;
    };
    expected = {
      cap = {
        "8GiB" = 1;
        "16GiB" = 2;
        "32GiB" = 4;
        "64GiB" = 8;
        "128GiB" = 17;
        "288GiB" = 39;
        "512GiB" = 69;
      };
      reason = "a compile for sm_100 takes up to 6755 MiB; so many of them as fit into the available memory less 10 % (at least 2 GiB), and no more than the cores. The gate in the build lets in more as they pass their peaks";
    };
  };

  testAPackageWithoutAProfileIsSaidToHaveNone = {
    expr = needsOf {
      package = "other";
      architectures = [
        "90"
        "100"
      ];
    };
    expected = {
      peakBytes = 16 * GiB;
      cap = {
        "8GiB" = 1;
        "16GiB" = 1;
        "32GiB" = 1;
        "64GiB" = 3;
        "128GiB" = 7;
        "288GiB" = 16;
        "512GiB" = 28;
      };
      profile = "none for other 2.8.3: 8 GiB for each architecture";
      reason = "a compile for sm_90, sm_100 takes up to 16384 MiB; so many of them as fit into the available memory less 10 % (at least 2 GiB), and no more than the cores. The gate in the build lets in more as they pass their peaks";
    };
  };

  # Each release pins CUDA libraries of its own CUDA, and torch for it.
  testReleasesArePairs = {
    expr = builtins.mapAttrs (_: release: [
      release.cuda
      release.torchVersion
    ]) releases;
    expected = {
      cu128 = [
        "12.8"
        "2.10.0+cu128"
      ];
      cu130 = [
        "13.0"
        "2.11.0+cu130"
      ];
    };
  };

  # hostpkgs' lib stands in for nixpkgs': both have to pass these.
  testLib = {
    expr = {
      versions = [
        (lib.versions.major "12.8.93")
        (lib.versions.majorMinor "12.8.93")
      ];
      subtract =
        lib.subtractLists
          [ "a" ]
          [
            "a"
            "b"
            "a"
          ];
      split = lib.splitString "-" "a-b--c";
      suffix = [
        (lib.removeSuffix ".cu" "x.cu")
        (lib.removeSuffix ".cu" "x.cpp")
        (lib.hasSuffix ".cu" "cu")
      ];
      unique = lib.unique [
        3
        1
        3
      ];
      flatten = lib.flatten [
        1
        [
          2
          [ 3 ]
        ]
      ];
      range = lib.range 2 4;
      older = map (lib.versionOlder "2.10") [
        "2.9"
        "2.10"
        "2.11"
      ];
      lines = lib.concatLines [
        "a"
        "b"
      ];
      attrs = lib.filterAttrs (name: value: name != "a" && value) {
        a = true;
        b = true;
        c = false;
      };
      toInt = lib.toInt "12";
    };
    expected = {
      versions = [
        "12"
        "12.8"
      ];
      subtract = [ "b" ];
      split = [
        "a"
        "b"
        ""
        "c"
      ];
      suffix = [
        "x"
        "x.cpp"
        false
      ];
      unique = [
        3
        1
      ];
      flatten = [
        1
        2
        3
      ];
      range = [
        2
        3
        4
      ];
      older = [
        false
        false
        true
      ];
      lines = "a\nb\n";
      attrs.b = true;
      toInt = 12;
    };
  };
}
