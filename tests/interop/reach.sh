#!/bin/sh
# Builds dtrain for systems that are not here. zig's C compiler, which brings their headers and libraries, compiles and
# links for macOS, FreeBSD, NetBSD, OpenBSD and Windows on ARM64; nothing of that runs. Emscripten compiles for WASM with
# threads, which runs under node, with the weights of Linux. Packages are installed where they are missing. Says what it
# skips.
#   sh tests/interop/reach.sh
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
here=build/reach
mkdir -p $here
logs=$here/log
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
quiet="-Wno-ignored-pragmas -Wno-unused-command-line-argument"
exact="-ffp-contract=off -fno-math-errno -I."
weights() { grep -o 'weights_sha256=[0-9a-f]*' "$1" | sort -u; }
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >$here/all.c

# ---- systems of which zig has the libraries ----
export ZIG_GLOBAL_CACHE_DIR="$PWD/$here/cache" ZIG_LOCAL_CACHE_DIR="$PWD/$here/cache"
zig=$here/zig/bin/python
[ -x "$zig" ] && "$zig" -m ziglang version >/dev/null 2>&1 || {
    python3 -m venv $here/zig && timeout 600 "$zig" -m pip install -q 'ziglang>=0.15,<1'
} >$logs 2>&1
targets="aarch64-macos x86_64-macos x86_64-freebsd x86_64-netbsd x86_64-openbsd aarch64-windows-gnu"
if ! "$zig" -m ziglang version >/dev/null 2>&1; then
    echo "skipped: $targets (there is no zig, and the package index cannot be reached)"
    targets=
fi
reach() { # target
    target=$1
    flags="-target $target -fno-sanitize=all"
    libs="-lpthread -lm"
    forks="examples/checkpoint examples/custom_transport examples/robot_swarm"
    case $target in *windows*) libs="-lws2_32" forks= ;; esac
    # shellcheck disable=SC2086
    for language in "cc -x c" "c++ -x c++ -std=c++11"; do
        "$zig" -m ziglang $language $flags $warn $quiet -O0 -I. -c $here/all.c -o "$lane/all.o" >$logs 2>&1
        check $? "$target: zig $language compiles dtrain.h without a warning"
    done
    # shellcheck disable=SC2086
    for program in examples/quickstart examples/train_gpt tools/dtrun tools/dtrace tools/safetensors $forks; do
        "$zig" -m ziglang cc $flags -Wall -Wextra -Werror $quiet -O0 $exact $program.c -o "$lane/program" $libs >$logs 2>&1
        check $? "$target: $program.c compiles and links"
    done
    # shellcheck disable=SC2086
    "$zig" -m ziglang cc $flags $warn $quiet -O0 -DDTRAIN_MPI -DDTRAIN_NO_SOCKETS -I. -c $here/all.c -o "$lane/all.o" >$logs 2>&1
    check $? "$target: without sockets, with MPI"
}
printf '%s\n' $targets >$here/targets
lanes reach <$here/targets

# ---- WASM ----
command -v emcc >/dev/null 2>&1 && command -v node >/dev/null 2>&1 ||
    (apt-get update && apt-get install -y --no-install-recommends emscripten; command -v node || apt-get install -y --no-install-recommends nodejs) >$logs 2>&1
if ! command -v emcc >/dev/null 2>&1 || ! command -v node >/dev/null 2>&1; then
    echo "skipped: WASM (there is no Emscripten or no node, and they cannot be installed)"
    checked
    exit
fi
# Emscripten of before node's fetch() would load the program by that, and its optimizer of scripts is not packaged.
node="node"
node --no-experimental-fetch -e 0 2>/dev/null && node="node --no-experimental-fetch"
for program in quickstart train_gpt; do
    # shellcheck disable=SC2086
    emcc -pthread $warn -O2 $exact -DDTRAIN_NO_SOCKETS -c examples/$program.c -o $here/$program.o >$logs 2>&1 &&
        emcc -pthread -O0 -sPROXY_TO_PTHREAD -sEXIT_RUNTIME -sINITIAL_MEMORY=512MB -sNODERAWFS $here/$program.o -o $here/$program.js >>$logs 2>&1
    check $? "WASM: $program.c compiles without a warning"
done
timeout 120 $node $here/quickstart.js 2>$logs | grep -qx '4 ranks agree: y = 3.000 x + -1.000'
check $? "WASM: README's first program: four threads agree"
# shellcheck disable=SC2086
${CC:-cc} -O2 $exact examples/train_gpt.c -o $here/train_gpt -lpthread -lm >$logs 2>&1
small="--ranks 4 --layers 2 --width 32 --heads 2 --context 32 --batch 2 --micro 8 --steps 4 --quiet"
small="$small --text examples/gpt.h --csv $here/csv --svg $here/svg"
for flags in "" "--strategy full" "--mesh dp=2,pp=2" "--mesh dp=2,tp=2"; do
    # shellcheck disable=SC2086
    DTRAIN_ISA=scalar $here/train_gpt $small $flags >$here/linux 2>$logs
    # shellcheck disable=SC2086
    timeout 120 $node $here/train_gpt.js $small $flags >$here/wasm 2>$logs
    [ -n "$(weights $here/wasm)" ] && [ "$(weights $here/wasm)" = "$(weights $here/linux)" ]
    check $? "WASM: train_gpt${flags:+ $flags} on 4 threads has the weights of Linux"
done
checked
