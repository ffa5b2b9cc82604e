/*
  CUDA's compiler, headers and libraries from pinned wheels: what torch loads at run time, and, where the release has
  the compiler's wheels (CUDA 13), a toolkit. One derivation for both, so that 2 GB of libraries are in the store once.
*/
{
  lib,
  wheels,
  release,
}:

let
  inherit (release) groups;
  # The wheels of CUDA 13 share one tree; those of CUDA 12 have one each and no compiler.
  root = "nvidia/cu${lib.versions.major release.cuda}";
in
wheels.unpackWheels {
  pname = "cuda-wheels";
  version = release.wheels."nvidia-cuda-runtime${release.suffix or ""}".version;
  pins = map (wheels.pick release) (groups.libraries ++ groups.toolkit or [ ]);

  # What wheels leave out and a toolkit needs: lib64 (nvcc.profile and torch look there), and the names without a version
  # that a linker asks for.
  postInstall = lib.optionalString (groups.toolkit or [ ] != [ ]) ''
    toolkit=$site/${root}
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
