/*
  CUDA's libraries from pinned wheels: what torch loads at run time, and, where there is no other and the release has
  the compiler's wheels (CUDA 13), a toolkit. One derivation for both, so that 2 GB of libraries are in the store once.
*/
{
  lib,
  wheels,
  release,
  python,
  withToolkit,
}:

let
  inherit (release) groups;
  isRuntime = name: lib.hasPrefix "nvidia-cuda-runtime" name;
in
wheels.unpackWheels {
  pname = "cuda-wheels";
  inherit (release.wheels.${lib.head (lib.filter isRuntime groups.libraries)}) version;
  pins = map (wheels.pick release) (groups.libraries ++ lib.optionals withToolkit groups.toolkit);
  libraries = [ "$out/${python.sitePackages}/nvidia/*/lib" ];

  # What wheels leave out and a toolkit needs: lib64 (nvcc.profile and torch look there), and the names without a
  # version that a linker asks for.
  postInstall = lib.optionalString withToolkit ''
    toolkit=$site/nvidia/cu${lib.versions.major release.cuda}
    ln -s lib "$toolkit/lib64"
    for library in "$toolkit"/lib/*.so.*; do
      plain=''${library%%.so.*}.so
      if [ ! -e "$plain" ]; then
        ln -s "$(basename "$library")" "$plain"
      fi
    done
    for entry in "$toolkit"/*; do
      ln -s "''${entry#$out/}" "$out/$(basename "$entry")"
    done
  '';

  meta.license = lib.licenses.unfreeRedistributable;
}
