{
  lib,
  package,
  version,
  architectures,
}:
{
  peakBytes = 7 * 1024 * 1024 * 1024;
}
