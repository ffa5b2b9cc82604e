# stdenv over the host's own compiler: nixpkgs' mkDerivation as far as this project uses it.
{ lib, facts }:

let
  # The facts that change what a build makes. They are in every derivation's inputs through $stdenv, so another
  # compiler, Python or C library gives other store paths.
  environment = {
    system = "x86_64-linux";
    builder = facts.bash;
    args = [ "-e" ];
    hostPath = lib.concatStringsSep ":" facts.path;
    hostCC = facts.cc.path;
    hostCXX = facts.cxx.path;
  };

  stdenvPath = derivation {
    name = "stdenv-host-gcc-${facts.cxx.version}";
    inherit (environment) system builder hostPath;
    args = [
      "-c"
      ''
        PATH=$hostPath
        mkdir "$out"
        cp "$setup" "$out/setup"
        cp "$builderScript" "$out/builder.sh"
        printf '%s\n' "$host" >"$out/host.json"
      ''
    ];
    setup = ./setup.sh;
    builderScript = ./builder.sh;
    host = builtins.toJSON (removeAttrs facts [ "selection" ]);
  };

  stdenv = {
    inherit mkDerivation;
    system = "x86_64-linux";
    hostPlatform = {
      system = "x86_64-linux";
      isLinux = true;
      isx86_64 = true;
    };
    buildPlatform = stdenv.hostPlatform;
    cc = {
      cc = {
        inherit (facts.cxx) version;
      };
      isGNU = true;
    };
    outPath = stdenvPath;
  };

  mkDerivation =
    args:
    let
      fixed = if builtins.isFunction args then lib.fix (self: args self) else args;
      attributes = removeAttrs fixed [
        "env"
        "meta"
        "passthru"
        "pos"
      ];
      drv = derivation (
        (fixed.env or { })
        // attributes
        // environment
        // {
          name = fixed.name or "${fixed.pname}-${fixed.version}";
          args = [
            "-e"
            "${stdenvPath}/builder.sh"
          ];
          stdenv = stdenvPath;
          outputs = fixed.outputs or [ "out" ];
        }
      );
    in
    lib.makeOverridableDerivation mkDerivation fixed (
      drv
      // {
        meta = fixed.meta or { };
        passthru = fixed.passthru or { };
      }
      // fixed.passthru or { }
    );
in
stdenv
