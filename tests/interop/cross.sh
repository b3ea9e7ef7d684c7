#!/bin/sh
# Runs dtrain on other processors under qemu's user emulation, and with musl: it compiles without warnings, unit tests
# pass, train_gpt has x86's weights with DTRAIN_ISA=scalar, checkpoints are exchanged, and ranks of several processors
# train together. Cross compilers and qemu are installed where they are missing. Says what it skips.
#   [SAMPLE=number] [CROSS="test_gpt test_job"] sh tests/interop/cross.sh [aarch64 armhf i386 riscv64 s390x musl]
# CROSS=all runs every unit test, without those that qemu cannot: it does not emulate all of Linux.
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
. tests/support/check.sh
here=build/cross
mkdir -p $here
logs=$here/log
# The fastest of those that depend on the processor: numbers, files, sockets, threads.
few="test_base test_norm test_quantise test_train test_safetensors test_safetensors_rules test_safetensors_swap
    test_safetensors_write test_checkpoint test_checkpoint_files test_checkpoint_plan
    test_chacha test_isa test_pages test_plan test_alike"
few=${CROSS:-$few}
[ "$few" != all ] || few=$(basename -a -s .c tests/unit/test_*.c)

# Sets the compiler, its binutils' prefix and the emulator of a system.
system() {
    emulate= prefix= flags= link=
    case $1 in
    aarch64) prefix=aarch64-linux-gnu- emulate="qemu-aarch64 -L /usr/aarch64-linux-gnu" ;;
    armhf) prefix=arm-linux-gnueabihf- emulate="qemu-arm -L /usr/arm-linux-gnueabihf" ;;
    i386) prefix=i686-linux-gnu- flags="-msse2 -mfpmath=sse" link=$i386_link emulate=$i386 ;;
    riscv64) prefix=riscv64-linux-gnu- emulate="qemu-riscv64 -L /usr/riscv64-linux-gnu" ;;
    s390x) prefix=s390x-linux-gnu- emulate="qemu-s390x -L /usr/s390x-linux-gnu" ;;
    windows) prefix=x86_64-w64-mingw32- emulate=$(PATH=$PATH:/usr/lib/wine command -v wine64 || echo wine64) ;;
    musl) cc="musl-gcc -static" && return ;; # it sees no headers of Linux
    esac
    cc=${prefix}gcc
}
here_is() { command -v ${cc%% *} >/dev/null 2>&1 && { [ -z "$emulate" ] || command -v ${emulate%% *} >/dev/null 2>&1; }; }

# Most x86-64 kernels run 32-bit programs, by their own loader. qemu is for the others.
i386="qemu-i386 -L /usr/i686-linux-gnu" i386_link=
loads_i386() {
    own=/usr/i686-linux-gnu/lib
    echo 'int main(void) { return 0; }' >$here/none.c
    i686-linux-gnu-gcc $here/none.c -o $here/none 2>/dev/null && $own/ld-linux.so.2 --library-path $own $here/none 2>/dev/null
}

all="aarch64 armhf i386 riscv64 s390x musl"
# shellcheck disable=SC2086
if [ $# -eq 0 ] && [ -n "${SAMPLE:-}" ]; then
    sample 1 $all aarch64+armhf # two of them also train together
    set -- $(echo $chosen | tr + ' ')
fi
[ $# -gt 0 ] || set -- $all
sh tests/support/install.sh cross clang
loads_i386 && i386= && i386_link="-Wl,--dynamic-linker=$own/ld-linux.so.2 -Wl,-rpath=$own"
export DTRAIN_ISA=scalar
small="--layers 2 --width 32 --heads 2 --context 32 --batch 2 --micro 8 --steps 4 --quiet --text examples/gpt.h"
small="$small --csv $here/csv --svg $here/svg"
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
exact="-ffp-contract=off -fno-math-errno"
weights() { # command...
    timeout 200 "$@" $small 2>$logs | sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p'
}
is() { # name hash: the same as x86's
    equal "$2" "$expected"
    check $? "$1"
}
make -s build/train_gpt build/dtrun >/dev/null || exit 1
expected=$(weights build/train_gpt --ranks 4)
[ -n "$expected" ]
check $? "train_gpt runs here"

# Says why a test has nothing to tell on a system.
beyond() { # name test
    case $1/$2 in
    s390x/test_cuda_* | s390x/test_snippets_parts) echo "CUDA has no big-endian host" ;;
    */test_cuda_flags_processes | */test_cuda_hosts | */test_cuda_processes)
        [ -z "$emulate" ] || echo "qemu makes /proc/self/stat up, so no process recognises another" ;;
    */test_job) [ -z "$emulate" ] || echo "qemu has its own name, and fails where a program with threads forks" ;;
    esac
}

# One system alone, and with the files of this one.
alone() { # name
    system $1
    dir=$here/$1
    small="$small --csv $dir/csv --svg $dir/svg"
    mkdir -p "$dir"
    $cc $link -O0 $warn -I. examples/quickstart.c -o "$dir/quickstart" -lpthread -lm >$logs 2>&1
    check $? "$1: README's first program compiles with dtrain.h in it, without warnings"
    timeout 60 $emulate "$dir/quickstart" 2>$logs | grep -qx '4 ranks agree: y = 3.000 x + -1.000'
    check $? "$1: README's first program: four threads agree"
    rm -f "$dir/dtrain.o"
    make -s test_dir="$dir" CC=true "$dir/dtrain.o" >$logs 2>&1 # writes dtrain.c
    $cc $flags -O2 -D_FILE_OFFSET_BITS=64 -D_TIME_BITS=64 $warn -I. -c "$dir/dtrain.c" -o "$dir/dtrain.o" >$logs 2>&1
    check $? "$1: the library of the tests compiles without warnings"
    programs=
    for test in $few; do programs="$programs $dir/$test"; done
    make -k test_dir="$dir" CC="$cc $flags $link" AR="${prefix}ar" $programs >$logs 2>&1
    check $? "$1: the tests compile"
    for test in $few; do
        why=$(beyond $1 $test)
        [ -z "$why" ] || { echo "skipped: $1: $test ($why)" && continue; }
        timeout 1200 $emulate "$dir/$test" >"$dir/log" 2>&1
        status=$?
        grep -v '^ok' "$dir/log" >$logs
        check $status "$1: $test"
        grep '^skipped' "$dir/log"
    done
    $cc $flags $link -O2 $exact -I"$dir/open" -I. examples/train_gpt.c "$dir/dtrain.o" -o "$dir/train_gpt" -lpthread -lm >$logs 2>&1
    check $? "$1: train_gpt compiles"
    is "$1: the weights of x86, on threads" "$(weights $emulate "$dir/train_gpt" --ranks 4)"
    is "$1: the weights of x86, on processes" "$(weights build/dtrun -n 4 --no-prefix $emulate "$dir/train_gpt")"
    for way in from to; do
        first=build/train_gpt second="$emulate $dir/train_gpt"
        [ $way = from ] || { first=$second second=build/train_gpt; }
        rm -rf "$dir/run"
        weights $first --ranks 2 --strategy full --save "$dir/run" --every 2 --until 2 >/dev/null
        is "$1: goes on with the weights of x86, a checkpoint $way x86" \
            "$(weights $second --ranks 4 --strategy full --save "$dir/run" --resume)"
    done
    rm -rf "$dir/run"
    case $1 in armhf) flags=-mfpu=neon-vfpv4 ;; aarch64) flags= ;; *) return ;; esac
    command -v clang >/dev/null 2>&1 || { echo "skipped: $1: the bits of clang (clang is not here)" && return; }
    cc -O1 -w -I. tests/unit/bits.c -o "$dir/bits-here" -lpthread -lm >$logs 2>&1 &&
        clang --target=${prefix%-} $flags -O2 $warn -I. tests/unit/bits.c -o "$dir/bits" -lpthread -lm >$logs 2>&1
    check $? "$1: clang compiles without warnings"
    equal "$($emulate "$dir/bits" kept 2>$logs)" "$("$dir/bits-here" kept)"
    check $? "$1: the bits of clang, with fused products and NEON at hand, are those of x86"
}

# Ranks of these systems in one group over TCP, each with its output in $here/rank-N; x86 is rank 0.
together() { # name...
    rank=0
    for name in x86 "$@"; do
        command=build/train_gpt
        [ $name = x86 ] || { system $name && command="$emulate $(ls $here/$name/train_gpt*)"; }
        DTRAIN_RANK=$rank DTRAIN_WORLD_SIZE=$(($# + 1)) DTRAIN_ROOT=127.0.0.1:$port DTRAIN_TRANSPORT=tcp \
            DTRAIN_TOKEN=$$-processors-in-one-group timeout 200 $command $small >$here/rank-$rank 2>&1 </dev/null &
        rank=$((rank + 1))
    done
    wait
    port=$((port + 1))
}

# Ranks with words of so many bits in one group of this host; fails if one of them does.
words() { # bits...
    rank=0 ended=
    for bits; do
        DTRAIN_RANK=$rank DTRAIN_WORLD_SIZE=$# DTRAIN_ROOT=127.0.0.1:$port timeout 200 $here/words-$bits </dev/null &
        ended="$ended $!"
        rank=$((rank + 1))
    done
    bad=0
    for process in $ended; do wait $process || bad=1; done
    port=$((port + 1))
    return $bad
}

ran=
for name; do
    system $name
    if here_is; then
        ran="$ran $name "
    else
        echo "skipped: $name (${cc%% *} or ${emulate%% *} is not here and cannot be installed)"
    fi
done
printf '%s\n' $ran >$here/systems
lanes alone <$here/systems
port=$((20000 + $$ % 10000))
case $ran in
*" aarch64 "*" armhf "*)
    others="aarch64 armhf aarch64" windows=
    sh tests/support/install.sh windows
    system windows
    if here_is; then
        export WINEDEBUG=-all WINEPREFIX="$PWD/$here/prefix"
        mkdir -p $here/windows $WINEPREFIX
        $cc -O0 $exact -I. examples/train_gpt.c -o $here/windows/train_gpt.exe -static -lws2_32 -lpthread >$logs 2>&1
        others="windows aarch64 armhf" windows=", Windows"
    else
        echo "skipped: a rank on Windows (${cc%% *} or wine64 is not here and cannot be installed)"
    fi
    together $others
    cat $here/rank-* >$logs
    is "ranks on x86-64$windows, aarch64 and armhf in one group have the weights of x86" \
        "$(sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' $here/rank-0)"
    ;;
*) echo "skipped: ranks of several processors (they take aarch64 and armhf)" ;;
esac
case $ran in
*" i386 "*)
    if [ -z "$i386" ]; then
        system i386
        make -s build/tests/libdtrain.a >$logs 2>&1
        cc -O1 $warn -I. tests/interop/words.c build/tests/libdtrain.a -o $here/words-64 -lpthread -lm >>$logs 2>&1 &&
            $cc $flags $link -O1 $warn -I. tests/interop/words.c $here/i386/dtrain.o -o $here/words-32 -lpthread -lm >>$logs 2>&1
        check $? "a program for ranks with words of 32 and of 64 bits compiles"
        for first in 64 32; do
            DTRAIN_TOKEN=$$-words-of-two-lengths words $first $((96 - first)) $first $((96 - first)) >$logs 2>&1
            check $? "four ranks with words of 32 and of 64 bits sum and train in shared memory, rank 0 with $first"
        done
    else
        echo "skipped: ranks with words of 32 and of 64 bits (this kernel runs no 32-bit programs itself)"
    fi
    ;;
*) echo "skipped: ranks with words of 32 and of 64 bits (they take i386)" ;;
esac
case $ran in
*" s390x "*)
    export DTRAIN_TIMEOUT_MS=20000 # so long rank 0 waits for another
    together s390x
    cat $here/rank-* >$logs
    grep -q "ranks of one group need one byte order" $here/rank-*
    check $? "a rank on s390x is refused by one on x86, with the reason"
    ;;
*) echo "skipped: ranks of another byte order (they take s390x)" ;;
esac
checked
