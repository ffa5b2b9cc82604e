# nixpkgs' python.withPackages: an interpreter that finds the packages given, by a wrapper that sets PYTHONPATH.
{
  lib,
  stdenv,
  python,
  packages,
}:
stdenv.mkDerivation {
  pname = "python-host-env";
  inherit (python) version;
  propagatedBuildInputs = packages;
  buildCommand = ''
    mkdir -p "$out/bin"
    {
      echo "#!$(type -P bash)"
      echo "export PYTHONPATH=$PYTHONPATH\''${PYTHONPATH:+:\$PYTHONPATH}"
      echo 'exec ${python.interpreter} "$@"'
    } >"$out/bin/python"
    chmod +x "$out/bin/python"
    ln -s python "$out/bin/python3"
  '';
}
