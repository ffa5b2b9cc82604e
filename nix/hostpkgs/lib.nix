# The part of nixpkgs' lib that this project's expressions use, with the same names and meanings.
let
  inherit (builtins)
    attrNames
    attrValues
    concatMap
    concatStringsSep
    elem
    filter
    foldl'
    functionArgs
    hasAttr
    intersectAttrs
    isAttrs
    isFunction
    length
    listToAttrs
    map
    mapAttrs
    replaceStrings
    ;
in
rec {
  inherit (builtins)
    all
    any
    attrNames
    attrValues
    compareVersions
    concatMap
    concatStringsSep
    elem
    elemAt
    filter
    genList
    head
    isString
    length
    listToAttrs
    map
    mapAttrs
    match
    removeAttrs
    replaceStrings
    sort
    splitVersion
    stringLength
    substring
    tail
    toJSON
    ;

  fix =
    f:
    let
      x = f x;
    in
    x;

  extends =
    overlay: f: final:
    let
      prev = f final;
    in
    prev // overlay final prev;

  composeManyExtensions =
    overlays: final: prev:
    foldl' (acc: overlay: acc // overlay final (prev // acc)) { } overlays;

  functionArgsOf =
    f: if f ? __functor then f.__functionArgs or (functionArgs (f.__functor f)) else functionArgs f;

  /*
    Call a function with the arguments it asks for, taken from `autoArgs` unless given, and let the
    result be asked for again with other arguments (`.override`).
  */
  callPackageWith =
    autoArgs: fn: args:
    let
      f = if isFunction fn then fn else import fn;
    in
    makeOverridable f (intersectAttrs (functionArgsOf f) autoArgs // args);

  makeOverridable =
    f: args:
    let
      result = f args;
      overrideWith = new: args // (if isFunction new then new args else new);
    in
    if isAttrs result then
      result
      // {
        override = new: makeOverridable f (overrideWith new);
      }
    else if isFunction result then
      {
        __functor = _: result;
        override = new: makeOverridable f (overrideWith new);
      }
    else
      result;

  /*
    The result of `mkDerivation attributes`, which can be asked for again with some of them changed
    (`.overrideAttrs`).
  */
  makeOverridableDerivation =
    mkDerivation: attributes: drv:
    drv
    // {
      overrideAttrs =
        change: mkDerivation (attributes // (if isFunction change then change attributes else change));
    };

  optional = condition: value: if condition then [ value ] else [ ];
  optionals = condition: values: if condition then values else [ ];
  optionalString = condition: string: if condition then string else "";
  optionalAttrs = condition: attrs: if condition then attrs else { };

  flatten = xs: if builtins.isList xs then concatMap flatten xs else [ xs ];
  unique = foldl' (acc: x: if elem x acc then acc else acc ++ [ x ]) [ ];
  subtractLists = drop: filter (x: !(elem x drop));
  last = xs: builtins.elemAt xs (length xs - 1);
  range = from: to: if from > to then [ ] else builtins.genList (n: from + n) (to - from + 1);
  toInt = builtins.fromJSON;
  min = a: b: if a < b then a else b;
  max = a: b: if a > b then a else b;

  concatMapStringsSep =
    separator: f: xs:
    concatStringsSep separator (map f xs);
  concatStrings = concatStringsSep "";
  concatMapStrings = concatMapStringsSep "";
  concatLines = concatMapStrings (line: line + "\n");
  splitString =
    separator: string: filter builtins.isString (builtins.split (escapeRegex separator) string);
  escapeRegex =
    let
      special = [
        "\\"
        "["
        "{"
        "("
        ")"
        "^"
        "$"
        "?"
        "*"
        "+"
        "|"
        "."
      ];
    in
    replaceStrings special (map (character: "\\${character}") special);
  removeSuffix =
    suffix: string:
    let
      n = builtins.stringLength string - builtins.stringLength suffix;
    in
    if n >= 0 && builtins.substring n (-1) string == suffix then
      builtins.substring 0 n string
    else
      string;
  hasSuffix =
    suffix: string:
    let
      n = builtins.stringLength string - builtins.stringLength suffix;
    in
    n >= 0 && builtins.substring n (-1) string == suffix;
  hasPrefix = prefix: string: builtins.substring 0 (builtins.stringLength prefix) string == prefix;
  escapeShellArg = string: "'${replaceStrings [ "'" ] [ "'\\''" ] (toString string)}'";
  escapeShellArgs = concatMapStringsSep " " escapeShellArg;

  versionOlder = a: b: builtins.compareVersions b a == 1;
  versionAtLeast = a: b: !versionOlder a b;
  versions = {
    major = v: builtins.elemAt (builtins.splitVersion v) 0;
    majorMinor =
      v: "${builtins.elemAt (builtins.splitVersion v) 0}.${builtins.elemAt (builtins.splitVersion v) 1}";
  };

  nameValuePair = name: value: { inherit name value; };
  genAttrs = names: f: listToAttrs (map (name: nameValuePair name (f name)) names);
  filterAttrs =
    predicate: attrs:
    listToAttrs (
      concatMap (name: optional (predicate name attrs.${name}) (nameValuePair name attrs.${name})) (
        attrNames attrs
      )
    );
  mapAttrsToList = f: attrs: attrValues (mapAttrs f attrs);
  recurseIntoAttrs = attrs: attrs // { recurseForDerivations = true; };
  hasAttrs = names: attrs: builtins.all (name: hasAttr name attrs) names;

  getOutput = output: pkg: pkg.${output} or pkg;
  getBin = getOutput "bin";
  getDev = getOutput "dev";
  getLib = getOutput "lib";
  getExe' = pkg: name: "${getBin pkg}/bin/${name}";
  makeSearchPath = sub: pkgs: concatMapStringsSep ":" (pkg: "${pkg}/${sub}") pkgs;

  licenses = genAttrs [ "bsd3" "mit" "unfreeRedistributable" "nvidiaCudaRedist" ] (name: {
    shortName = name;
  });
  sourceTypes = genAttrs [ "binaryNativeCode" "fromSource" ] (name: {
    shortName = name;
  });
}
