#!/bin/sh
# Makes the compiled files that tests/test_wheel.py reads, with nvcc (13.0 made these) and g++, into this folder.
# Only the sections under test are kept, so no path of the machine that made them is in them.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
cat > "$work/k.cu" <<'EOF'
extern "C" __global__ void k(float *p) { p[threadIdx.x] *= 2; }
EOF
cuda() { # NAME NVCC-OPTIONS...
    name=$1
    shift
    nvcc -c "$work/k.cu" -o "$work/$name" "$@"
    objcopy -j .nv_fatbin -j __nv_relfatbin "$work/$name" "$name"
}
gencode() { echo "-gencode arch=compute_$1,code=$2_$1"; }
# shellcheck disable=SC2046 # each prints two words
cuda zstd.o --compress-mode=size $(gencode 80 sm) $(gencode 90 sm) $(gencode 100 sm) $(gencode 120 sm) \
    $(gencode 90 compute)
# shellcheck disable=SC2046
cuda suffixes.o --compress-mode=size $(gencode 90a sm) $(gencode 100a sm) $(gencode 100f sm) $(gencode 120f compute)
# shellcheck disable=SC2046
cuda lz4.o --compress-mode=speed $(gencode 90 compute)
# shellcheck disable=SC2046
cuda plain.o --compress-mode=none $(gencode 90 compute)
# shellcheck disable=SC2046
cuda relocatable.o -rdc=true $(gencode 100 sm)
cuda lto.o -rdc=true -gencode arch=compute_100,code=lto_100

# An extension as torch's look from outside: new strings in a symbol of c10, an RPATH, symbols of glibc 2.34 (dlsym).
cat > "$work/e.cpp" <<'EOF'
#include <dlfcn.h>
#include <string>
namespace c10 { namespace detail { void torchCheckFail(const char *, const char *, unsigned, const std::string &); }
                void warn(int); }
extern "C" void *init() { c10::detail::torchCheckFail("", "", 1, "x"); c10::warn(1); return dlsym(nullptr, "x"); }
EOF
cat > "$work/c10.cpp" <<'EOF'
#include <string>
namespace c10 { namespace detail { void torchCheckFail(const char *, const char *, unsigned, const std::string &) {} } }
EOF
options="-shared -fPIC -Os -s -Wl,-z,noseparate-code -Wl,-z,max-page-size=4096 -nostartfiles"
# shellcheck disable=SC2086
g++ $options "$work/c10.cpp" -o libc10.so
# shellcheck disable=SC2086
g++ $options "$work/e.cpp" -o extension.so -Wl,-rpath,/nix/store/lib:'$ORIGIN' -Wl,--no-as-needed -L. -lc10
