/*
  torch from its wheel, with the CUDA libraries that the same release pins.

  The wheel finds them by RPATHs relative to itself ($ORIGIN/../../nvidia/...), so a link named nvidia beside it is all
  that is needed.
*/
{
  lib,
  wheels,
  release,
  python,
  pinned,
  cuda-wheels,
}:

let
  pins = [ (wheels.pick release "torch") ];

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
  propagatedBuildInputs = map (name: pinned.${name}) release.groups.python;

  postInstall = ''
    ln -s ${cuda-wheels}/${python.sitePackages}/nvidia "$site/nvidia"
    ln -s ${headers}/${python.sitePackages}/torch/include "$site/torch/include"
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
    inherit release;
    headers = "${headers}/${python.sitePackages}/torch/include";
    cudaVersion = release.cuda;
  };

  meta = {
    description = "PyTorch ${release.torchVersion} as its authors built it";
    license = lib.licenses.bsd3;
    sourceProvenance = [ lib.sourceTypes.binaryNativeCode ];
  };
}
