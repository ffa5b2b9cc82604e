# The host's bash under the name that `nix develop` looks for.
{ stdenv, facts }:
stdenv.mkDerivation {
  name = "bash-host";
  buildCommand = ''
    mkdir -p "$out/bin"
    ln -s ${facts.bash} "$out/bin/bash"
  '';
}
