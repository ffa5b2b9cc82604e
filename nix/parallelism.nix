/*
  How many compiles may run at once: from the profile of a package, as data that a derivation carries.

  The same numbers as pybuild/recommend.py (core_cap) and pybuild/profile.py (highest_peak) give, in whole numbers; the
  build itself says what jobs.py makes of the machine that it runs on, and lets its gate hold the memory.
  tests/test_parallelism.py holds the three to each other.
*/
{ lib }:

rec {
  MiB = 1024 * 1024;
  GiB = 1024 * MiB;

  /*
    coreCap :: { cores :: Int; memory :: Int; peak :: Int; } -> Int

    Compiles of `peak` bytes that so many cores and bytes of available memory allow, at least 1. What is left to the
    rest of the machine: 10 %, at least 2 GiB.
  */
  coreCap =
    {
      cores,
      memory,
      peak,
    }:
    let
      reserve = lib.max (2 * GiB) (memory / 10);
    in
    lib.max 1 (lib.min cores ((memory - reserve) / peak));

  # The compiles of a build for one architecture, among all that a profile has (pybuild/profile.py, of_build).
  ofBuild =
    profile:
    lib.filter (compile: compile.archs == [ ] || compile.archs == [ "sm_100" ]) profile.compiles;

  /*
    highestPeak :: { compiles :: [Compile]; architectures :: Int; threads :: Int; } -> Int

    Bytes that the hungriest of the compiles takes where `threads` architectures are compiled at once: each further one
    adds 11/12 of the memory of one (measured: pybuild/curve.py, _OVERLAP).
  */
  highestPeak =
    {
      compiles,
      architectures,
      threads,
    }:
    let
      atOnce = lib.max 1 (lib.min architectures threads);
      one = MiB * builtins.foldl' lib.max 0 (map (compile: builtins.floor compile.peak_mib) compiles);
    in
    one * (12 + 11 * (atOnce - 1)) / 12;

  /*
    forPackage :: { package, version, architectures :: [String], kernels :: [String] } -> AttrSet

    What a derivation says of its own needs: `peakBytes` of the hungriest of the `kernels`, each compiled for all of the
    architectures at once; `cap`, how many of them some sizes of memory hold, if there are as many cores; `profile` and
    `reason`, where the numbers come from.
  */
  forPackage =
    {
      package,
      version,
      architectures,
      kernels,
    }:
    let
      file = ../pybuild/profiles + "/${package}-${version}.json";
      profile = builtins.fromJSON (builtins.readFile file);
      selected = lib.filter (compile: lib.elem compile.kernel kernels) (ofBuild profile);
      hasProfile = builtins.pathExists file && selected != [ ];
      count = lib.length architectures;

      # 8 GiB is more than any compile of one architecture that was measured (pybuild/profile.py, CAUTIOUS).
      peakBytes =
        if hasProfile then
          highestPeak {
            compiles = selected;
            architectures = count;
            threads = count;
          }
        else
          8 * GiB * count;
    in
    {
      inherit peakBytes;
      profile =
        if hasProfile then
          "${package} ${version}: ${profile.compiler}; ${profile.machine}"
        else
          "none for ${package} ${version}: 8 GiB for each architecture";
      cap = lib.listToAttrs (
        map
          (
            size:
            lib.nameValuePair "${toString size}GiB" (coreCap {
              cores = 65536;
              memory = size * GiB;
              peak = peakBytes;
            })
          )
          [
            8
            16
            32
            64
            128
            288
            512
          ]
      );
      reason = "a compile for ${
        lib.concatMapStringsSep ", " (a: "sm_${a}") architectures
      } takes up to ${toString (peakBytes / MiB)} MiB; so many of them as fit into the available memory less 10 % (at least 2 GiB), and no more than the cores. The gate in the build lets in more as they pass their peaks";
    };
}
