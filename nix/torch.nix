/*
  torch from its wheel, with the CUDA libraries that the same release pins.

  The wheel finds them by RPATHs relative to itself ($ORIGIN/../../nvidia/...), so a link named nvidia beside it is all
  that is needed. Where binaries are patched for the store (nixpkgs), it finds them there, and NVIDIA's driver wherever
  the system has it: see torch_driver.py.
*/
{
  lib,
  stdenv,
  wheels,
  release,
  python,
  pinned,
  runtime,
  cuda-wheels,
  config ? { },
  # nixpkgs' packages for torch ask it for these.
  cudaPackages,
}:

let
  pins = [ (wheels.pick release "torch") ];
  cudaLibraries = "${cuda-wheels}/${python.sitePackages}/nvidia";

  # By themselves, since they are all of torch that compiling a kernel needs.
  headers = wheels.unpackWheels {
    pname = "torch-headers";
    version = release.torch;
    inherit pins;
    env.ONLY = "torch/include";
  };
in
wheels.unpackWheels {
  pname = "torch";
  version = release.torch;
  inherit pins;
  env.EXCEPT = "torch/include";
  propagatedBuildInputs = map (name: pinned.${name}) release.groups.python ++ runtime;
  libraries = [
    "$out/${python.sitePackages}/torch/lib"
    "${cudaLibraries}/*/lib"
  ];

  postInstall = ''
    ln -s ${cudaLibraries} "$site/nvidia"
    ln -s ${headers}/${python.sitePackages}/torch/include "$site/torch/include"
  ''
  + lib.optionalString wheels.isPatched ''
    cp ${./torch_driver.py} "$site/torch/_pybuild_driver.py"
    # Before anything that loads CUDA.
    sed -i '0,/^import builtins$/s//from torch._pybuild_driver import provide_driver as _provide_driver\n_provide_driver()\n&/' \
      "$site/torch/__init__.py"
    grep -qx '_provide_driver()' "$site/torch/__init__.py"
  '';

  # The whole of it has to load in the sandbox, without a GPU, and be the pair of versions that the release says.
  doInstallCheck = true;
  installCheckPhase = ''
    runHook preInstallCheck
    PYTHONPATH=$out/${python.sitePackages}:$PYTHONPATH python - <<'EOF'
    import torch
    found = torch.__version__, torch.version.cuda
    expected = "${release.torchVersion}", "${release.cuda}"
    assert found == expected, f"torch and its CUDA are {found}, the release says {expected}"
    EOF
    runHook postInstallCheck
  '';

  passthru = {
    inherit release stdenv cudaPackages;
    headers = "${headers}/${python.sitePackages}/torch/include";
    cudaVersion = release.cuda;
    cudaSupport = true;
    cudaCapabilities = config.cudaCapabilities or [ ];
    rocmSupport = false;
    cxxdev = headers;
  };

  meta = {
    description = "PyTorch ${release.torchVersion} as its authors built it";
    license = lib.licenses.bsd3;
    sourceProvenance = [ lib.sourceTypes.binaryNativeCode ];
  };
}
