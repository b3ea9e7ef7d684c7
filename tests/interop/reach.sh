#!/bin/sh
# Builds dtrain for systems that are not here. zig's C compiler, which brings their headers and libraries, compiles and
# links for macOS, FreeBSD, NetBSD, OpenBSD and Windows on ARM64; nothing of that runs. It compiles for 32-bit RISC-V,
# whose Linux has no time of 32 bits; that runs under qemu. Emscripten compiles for WASM with threads, which runs under
# node, with the weights of Linux. Packages are installed where they are missing. Says what it skips.
#   [SAMPLE=number] sh tests/interop/reach.sh
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
. tests/support/check.sh
here=build/reach
mkdir -p $here/open
logs=$here/log
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
quiet="-Wno-ignored-pragmas -Wno-unused-command-line-argument"
exact="-ffp-contract=off -fno-math-errno"
weights() { grep -o 'weights_sha256=[0-9a-f]*' "$1" | sort -u; }
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >$here/all.c
# The library that programs link with, its private functions open to them.
awk -v bodies=0 -f tests/support/open.awk dtrain.h >$here/open/dtrain.h
{ echo '#define DTRAIN_IMPLEMENTATION'; awk -v bodies=1 -f tests/support/open.awk dtrain.h; } >$here/dtrain.c
sample 1 aarch64-macos x86_64-macos x86_64-freebsd x86_64-netbsd x86_64-openbsd aarch64-windows-gnu riscv32-linux-musl wasm

# ---- systems of which zig has the libraries ----
targets=${chosen%wasm} # the last, or not chosen
export ZIG_LOCAL_CACHE_DIR="$PWD/$here/cache"
ZIG_GLOBAL_CACHE_DIR=$(sh tests/support/install.sh in zig-cache) && export ZIG_GLOBAL_CACHE_DIR # C libraries that it compiled
zig=$(sh tests/support/install.sh in zig)/bin/python
if [ -n "$targets" ] && ! sh tests/support/install.sh zig; then
    echo "skipped: $targets (there is no zig, and the package index cannot be reached)"
    targets=
fi
reach() { # target
    target=$1
    flags="-target $target -fno-sanitize=all"
    libs="-lpthread -lm"
    forks="examples/checkpoint examples/custom_transport examples/robot_swarm"
    case $target in
    *windows*) libs="-lws2_32" forks= ;;
    riscv32*) flags="$flags -static -Wno-atomic-alignment" ;; # it has no 64-bit atomics
    esac
    # shellcheck disable=SC2086
    "$zig" -m ziglang cc $flags $warn $quiet -O0 -I. -c $here/dtrain.c -o "$lane/dtrain.o" >$logs 2>&1
    check $? "$target: zig cc compiles the library without a warning"
    # shellcheck disable=SC2086
    "$zig" -m ziglang c++ -x c++ -std=c++11 $flags $warn $quiet -O0 -I. -c $here/all.c -o "$lane/all.o" >$logs 2>&1
    check $? "$target: zig c++ -x c++ -std=c++11 compiles dtrain.h without a warning"
    # shellcheck disable=SC2086
    "$zig" -m ziglang cc $flags $warn $quiet -O0 -I. examples/quickstart.c -o "$lane/program" $libs >$logs 2>&1
    check $? "$target: examples/quickstart.c compiles without a warning, with dtrain.h in it, and links"
    # shellcheck disable=SC2086
    for program in examples/train_gpt tools/dtrun tools/dtrace tools/safetensors $forks; do
        "$zig" -m ziglang cc $flags -Wall -Wextra -Werror $quiet -O0 $exact -I$here/open -I. $program.c "$lane/dtrain.o" \
            -o "$lane/program" $libs >$logs 2>&1
        check $? "$target: $program.c compiles and links"
    done
    # shellcheck disable=SC2086
    "$zig" -m ziglang cc $flags $warn $quiet -O0 -DDTRAIN_MPI -DDTRAIN_NO_SOCKETS -I. -c $here/all.c -o "$lane/all.o" >$logs 2>&1
    check $? "$target: without sockets, with MPI"
    case $target in riscv32*) under_qemu ;; esac
}
under_qemu() { # a rank's wait ends when a peer wakes it, and at its deadline
    sh tests/support/install.sh qemu || { echo "skipped: $target: what runs (there is no qemu-riscv32)" && return; }
    # shellcheck disable=SC2086
    for test in a_call_that_expires_can_be_made_again messages_go_around_the_ranks; do
        [ -e "$lane/test" ] || "$zig" -m ziglang cc $flags -w -O0 $exact -I$here/open -I. -Itests/support tests/unit/test_comm.c \
            "$lane/dtrain.o" -o "$lane/test" $libs >$logs 2>&1
        timeout 60 qemu-riscv32 "$lane/test" $test >$logs 2>&1
        check $? "$target: $test, under qemu"
    done
}
printf '%s\n' $targets >$here/targets
lanes reach <$here/targets

# ---- WASM ----
if [ "$chosen" = "${chosen%wasm}" ]; then
    checked
    exit
fi
if ! sh tests/support/install.sh wasm; then
    echo "skipped: WASM (there is no Emscripten or no node, and they cannot be installed)"
    checked
    exit
fi
# Emscripten of before node's fetch() would load the program by that, and its optimizer of scripts is not packaged.
node="node"
node --no-experimental-fetch -e 0 2>/dev/null && node="node --no-experimental-fetch"
for program in quickstart train_gpt; do
    # shellcheck disable=SC2086
    emcc -pthread $warn -O2 $exact -I. -DDTRAIN_NO_SOCKETS -c examples/$program.c -o $here/$program.o >$logs 2>&1 &&
        emcc -pthread -O0 -sPROXY_TO_PTHREAD -sEXIT_RUNTIME -sINITIAL_MEMORY=512MB -sNODERAWFS $here/$program.o -o $here/$program.js >>$logs 2>&1
    check $? "WASM: $program.c compiles without a warning"
done
timeout 120 $node $here/quickstart.js 2>$logs | grep -qx '4 ranks agree: y = 3.000 x + -1.000'
check $? "WASM: README's first program: four threads agree"
make -s build/train_gpt >$logs 2>&1
small="--ranks 4 --layers 2 --width 32 --heads 2 --context 32 --batch 2 --micro 8 --steps 4 --quiet"
small="$small --text examples/gpt.h --csv $here/csv --svg $here/svg"
sample 1 --strategy/ddp --strategy/full --mesh/dp=2,pp=2 --mesh/dp=2,tp=2
for layout in $chosen; do
    flags=$(echo $layout | tr / ' ')
    # shellcheck disable=SC2086
    DTRAIN_ISA=scalar build/train_gpt $small $flags >$here/linux 2>$logs
    # shellcheck disable=SC2086
    timeout 120 $node $here/train_gpt.js $small $flags >$here/wasm 2>$logs
    equal "$(weights $here/wasm)" "$(weights $here/linux)"
    check $? "WASM: train_gpt $flags on 4 threads has the weights of Linux"
done
checked
