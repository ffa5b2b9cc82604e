# The host's Python as nixpkgs' python3: an interpreter with a package scope.
{
  lib,
  stdenv,
  facts,
  pkgs,
}:

let
  inherit (facts.python) path version;
  pythonVersion = lib.versions.majorMinor version;

  interpreter = stdenv.mkDerivation {
    pname = "python-host";
    inherit version;
    # Laid out as a virtual environment: so what is installed for the host's interpreter (dist-packages, pip --user) is
    # out of sight, and only its standard library and headers count.
    buildCommand = ''
      mkdir -p "$out/bin"
      printf '%s\n' "home = $(dirname ${path})" "include-system-site-packages = false" "version = ${version}" >"$out/pyvenv.cfg"
      for name in python python3 python${pythonVersion}; do
        ln -s ${path} "$out/bin/$name"
      done
    '';
  };

  python = interpreter // {
    inherit pythonVersion;
    pkgs = packages;
    sitePackages = "lib/python${pythonVersion}/site-packages";
    interpreter = "${interpreter}/bin/python${pythonVersion}";
    withPackages =
      select:
      pkgs.callPackage ./python-env.nix {
        inherit python;
        packages = select packages;
      };
  };

  packages = lib.fix (
    lib.extends (lib.composeManyExtensions pkgs.pythonPackagesExtensions) (final: {
      inherit python;
      callPackage = lib.callPackageWith (pkgs // final);
      toPythonModule = drv: drv // { pythonModule = python; };
    })
  );
in
python
