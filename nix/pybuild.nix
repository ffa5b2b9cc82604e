# pybuild itself, from this checkout, with nixpkgs' Python packages.
{
  lib,
  python3,
  fetchPypi,
}:

let
  inherit (python3) pkgs;
  inherit (lib.importTOML ../pyproject.toml) project;

  # Those that nixpkgs has not, from their wheels.
  ours = {
    mailbits = pkgs.buildPythonPackage {
      pname = "mailbits";
      version = "0.2.3";
      format = "wheel";
      src = fetchPypi {
        pname = "mailbits";
        version = "0.2.3";
        format = "wheel";
        dist = "py3";
        python = "py3";
        sha256 = "75082106ed1b9a19fdd86f73aee268b3662a42df5aa024a06018b1d1bedac7dc";
      };
      dependencies = [ pkgs.attrs ];
      pythonImportsCheck = [ "mailbits" ];
    };
    pypi-simple = pkgs.buildPythonPackage {
      pname = "pypi-simple";
      version = "1.8.0";
      format = "wheel";
      src = fetchPypi {
        pname = "pypi_simple";
        version = "1.8.0";
        format = "wheel";
        dist = "py3";
        python = "py3";
        sha256 = "85f56420ab1d8e7ef5e55daabcee20c73e714f2bfee5505d811b075cc72d9ecc";
      };
      dependencies = [
        ours.mailbits
        pkgs.beautifulsoup4
        pkgs.packaging
        pkgs.pydantic
        pkgs.requests
      ];
      pythonImportsCheck = [ "pypi_simple" ];
    };
  };

  # "click>=8.1" -> click
  nameOf = requirement: lib.head (builtins.match "([A-Za-z0-9._-]+).*" requirement);
  required = map (
    requirement: pkgs.${nameOf requirement} or ours.${nameOf requirement}
  ) project.dependencies;
in
pkgs.buildPythonApplication {
  pname = "pybuild";
  inherit (project) version;
  pyproject = true;

  src = lib.fileset.toSource {
    root = ../.;
    fileset = lib.fileset.unions [
      ../flake.lock
      ../flake.nix
      ../nix
      ../pybuild
      ../pyproject.toml
      (lib.fileset.maybeMissing ../LICENSE)
      (lib.fileset.maybeMissing ../README.md)
    ];
  };

  build-system = [ pkgs.hatchling ];
  dependencies = required;
  pythonImportsCheck = [
    "pybuild.cli"
    "pybuild.plan"
  ];

  meta = {
    inherit (project) description;
    license = lib.licenses.mit;
    mainProgram = "pybuild";
    platforms = [ "x86_64-linux" ];
  };
}
