/*
  evenDates :: { flags :: [String]; folder :: String; } -> String

  Shell that gives the files in a folder one date, where nvcc (13.0) writes dates into objects: with -lineinfo.
*/
{ lib }:
{ flags, folder }:
lib.optionalString (lib.elem "-lineinfo" flags) ''
  find ${folder} -type f -exec touch --date=@315532800 {} +
''
