/*
  A torch extension: upstream's sdist built by upstream's setup.py. The output holds the wheel, for any venv, in dist/, and
  beside it the same unpacked, a Python package for Nix.

  With `objects` (derivations of kernel.nix) setup.py gets those instead of compiling; the wheel is the same.
*/
{
  lib,
  stdenv,
  python,
  fetchPypi,
  release,
  torch,
  cuda-toolkit,
  cuda-wheels,
  wheels,
  pinned,
  toPythonModule,
}:
{
  # The sdist's name on the index, its version and hash.
  pname,
  version,
  sha256,
  # What follows the + in the wheel's version.
  localVersion,
  # nvcc's names of what to compile for, "100".
  architectures,
  # Environment that setup.py reads.
  env,
  # Modules to import as a check.
  imports,
  # Python packages that the wheel requires beside torch.
  dependencies ? [ ],
  # parallelism.nix of this package.
  parallelism,
  objects ? [ ],
  postPatch ? "",
  passthru ? { },
  meta ? { },
}:

let
  smNames = lib.concatMapStringsSep " " (architecture: "sm_${architecture}") architectures;
  name = lib.replaceStrings [ "_" ] [ "-" ] pname;
  profile = ../../pybuild/profiles + "/${name}-${version}.json";

  # What holds memory while setup.py compiles: the part of pybuild that needs nothing but Python.
  gate = builtins.path {
    name = "pybuild-gate";
    path = ../..;
    filter =
      path: _:
      lib.elem (baseNameOf path) [
        "pybuild"
        "curve.py"
        "gate.py"
        "launch.py"
      ];
  };
in
toPythonModule (
  stdenv.mkDerivation (
    wheels.patched [
      "${torch}/${python.sitePackages}/torch/lib"
      "${cuda-wheels}/${python.sitePackages}/nvidia/*/lib"
    ]
    // {
      pname = name;
      inherit meta postPatch;
      version = "${version}+${localVersion}";

      src = fetchPypi { inherit pname version sha256; };

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
      ]
      ++ wheels.patchHooks;
      propagatedBuildInputs = [ torch ] ++ dependencies;

      env =
        env
        // {
          CUDA_HOME = "${cuda-toolkit}";
          PYBUILD_OBJECTS = lib.concatMapStringsSep " " toString objects;
        }
        # The wheel is for machines without a store; what is unpacked beside it gets its run path afterwards.
        // lib.optionalAttrs wheels.isPatched { NIX_DONT_SET_RPATH = "1"; };

      inherit (parallelism) peakBytes;
      enableParallelBuilding = true;

      # What setup.py's ninja calls instead of the compilers.
      compile = ./compile.py;

      buildPhase = ''
        runHook preBuild
        python ${./check_versions.py} ${lib.concatStringsSep " " architectures}
        export NVCC_THREADS=$(( ${toString (lib.length architectures)} < NIX_BUILD_CORES ? ${toString (lib.length architectures)} : NIX_BUILD_CORES ))
        echo "memory holds $(python ${../jobs.py} "$NIX_BUILD_CORES" "$peakBytes") of these compiles at their peaks; the gate lets in more as they pass theirs"
        mkdir "$NIX_BUILD_TOP/compilers"
        for compiler in "$(type -P "$CXX")" "$(type -P nvcc)"; do
          wrapper=$NIX_BUILD_TOP/compilers/''${compiler##*/}
          printf '#!%s\nexec %s %s run -- %s "$@"\n' "$(type -P bash)" "$(type -P python)" "$compile" "$compiler" >"$wrapper"
          chmod +x "$wrapper"
        done
        export CXX=$NIX_BUILD_TOP/compilers/''${CXX##*/} PYTORCH_NVCC=$NIX_BUILD_TOP/compilers/nvcc
        ${
          if builtins.pathExists profile then
            ''PYTHONPATH=${gate} python ${../curves.py} ${profile} "$NVCC_THREADS" ${smNames}''
          else
            "echo '{}'"
        } >"$NIX_BUILD_TOP/curves.json"
        PYTHONPATH=${gate}:$PYTHONPATH python -m pybuild.gate --cores "$NIX_BUILD_CORES" --curves "$NIX_BUILD_TOP/curves.json" -- \
          python setup.py bdist_wheel --dist-dir "$NIX_BUILD_TOP/raw-dist"
        runHook postBuild
      '';

      installPhase = ''
        runHook preInstall
        mapfile -t objects < <(find build -name '*.o')
        python ${./check_architectures.py} ${smNames} -- "''${objects[@]}"
        mkdir -p "$out/dist" "$out/${python.sitePackages}"
        python ${./tag_wheel.py} "$NIX_BUILD_TOP"/raw-dist/*.whl "$out/dist"
        python ${../unpack_wheels.py} "$out/${python.sitePackages}" "$out"/dist/*.whl
        runHook postInstall
      '';

      doInstallCheck = true;
      installCheckPhase = ''
        runHook preInstallCheck
        (
          cd /
          export PYTHONPATH=$out/${python.sitePackages}:$PYTHONPATH
          python -c 'import ${lib.concatStringsSep ", " imports}'
        )
        runHook postInstallCheck
      '';

      passthru = {
        inherit
          torch
          cuda-toolkit
          release
          parallelism
          ;
      }
      // passthru;
    }
  )
)
