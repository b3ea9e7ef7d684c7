#!/bin/sh
# What dtrain_cuda.h is to compilers: the newest nvcc at hand, and C and C++ where there is none; with NVCCS=all in the
# environment, as make soak has it, every nvcc, one of CUDA 12 among them. Needs no GPU and sees none. Compilers and tools
# that are not here come from PyPI and Debian, into build/; what cannot be had is skipped, with the reason. .ci/run runs
# this, make test does not. The number SAMPLE chooses two of three kinds of GPU to make code for.
set -u
cd "$(dirname "$0")/../.."
. tests/support/check.sh
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
root=$PWD
mkdir -p build
top=$(mktemp -d "${TMPDIR:-/tmp}/cuda_build.XXXXXX")
trap 'rm -rf "$top"' EXIT
trap 'exit 1' HUP INT TERM
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
CUDA_VISIBLE_DEVICES=
export CUDA_VISIBLE_DEVICES

# Kernels that move 16 bytes at once: name without dtrain__cuda_, and how many such loads and stores it has at least,
# which is arrays times groups held at once; 0 stores where what goes out is narrower or scattered.
vectors='
fill_all 0 1
narrow_bf16 4 0
narrow_f16 4 0
widen_bf16 0 4
widen_f16 0 4
sum_f32_1 4 4
sum_f32_2 8 4
sum_f32_4 8 2
sum_f32_8 8 1
sum_f16_1 4 4
sum_f16_2 8 4
sum_f16_4 8 2
sum_f16_8 8 1
sum_bf16_1 4 4
sum_bf16_2 8 4
sum_bf16_4 8 2
sum_bf16_8 8 1
tree_f64 15 1
tree_f32 15 1
tree_f16 15 1
tree_bf16 15 1
row_f64 4 1
row_f32 4 1
row_f16 4 1
row_bf16 4 1
row_u8 4 1
row_u32 4 1
row_u64 4 1
sum_f32_1_flags 5 5
sum_f32_2_flags 10 5
sum_f32_4_flags 12 3
sum_f32_8_flags 16 2
sum_f16_1_flags 5 5
sum_f16_2_flags 10 5
sum_f16_4_flags 12 3
sum_f16_8_flags 16 2
sum_bf16_1_flags 5 5
sum_bf16_2_flags 10 5
sum_bf16_4_flags 12 3
sum_bf16_8_flags 16 2
tree_f64_flags 30 2
tree_f32_flags 30 2
tree_f16_flags 30 2
tree_bf16_flags 30 2
row_f64_flags 8 2
row_f32_flags 8 2
row_f16_flags 8 2
row_bf16_flags 8 2
row_u8_flags 8 2
row_u32_flags 8 2
row_u64_flags 8 2
scale_f64 4 4
scale_f32 4 4
scale_f16 4 4
scale_bf16 4 4
axpy_f64 8 4
axpy_f32 8 4
axpy_f16 8 4
axpy_bf16 8 4
overflow_any 4 0
adamw_all 8 6
sgd_all 6 4
squares_run 4 0
clip_run 4 4
topk_collect 16 8
topk_bins 1 0
topk_count 1 0
topk_fill 1 0
int8_pack 8 0
int8_long 16 0
int8_unpack 8 4
fp8_pack 8 0
fp8_long 16 0
fp8_unpack 8 4
sparse_kernel 2 0
generic 1 1
'
# That which goes by elements: a table of counts that one block reads.
elements='topk_aim'

good() {
    passed=$((passed + 1))
    echo "ok $1"
}
bad() { # name, log
    failed=$((failed + 1))
    echo "not ok $1"
    [ -z "${2:-}" ] || head -12 "$2" | cut -c1-200
}
skip() { echo "skipped: $1"; }
holds() { # name, command...
    name=$1
    shift
    if "$@" >"$top/log" 2>&1; then good "$name"; else bad "$name" "$top/log"; fi
}
has_none() { # name, pattern, file
    if grep -nE "$2" "$3" >"$top/log"; then bad "$1" "$top/log"; else good "$1"; fi
}
from_pypi() { # directory below build, packages...; does nothing where it is already
    target=build/$1
    shift
    [ ! -e "$target/done" ] || return 0
    python3 -m pip install -q --root-user-action=ignore --target "$target" "$@" >"$top/pip.log" 2>&1 && : >"$target/done"
}

printf '#define DTRAIN_CUDA_IMPLEMENTATION\n#include "dtrain_cuda.h"\n' >"$top/kernels.cu"
printf '#include "dtrain_cuda.h"\nint other(void);\nint other(void) { return dtrain_cuda_stream(NULL) != NULL; }\n' >"$top/other.c"
cat >"$top/user.c" <<'END'
#include "dtrain_cuda.h"
#include <string.h>
int main(int argc, char **argv)
{
    dtrain_device *device = (dtrain_device *)(void *)&argc;
    int count = 5;
    if (dtrain_cuda_count(&count) != DTRAIN_ERR_UNSUPPORTED || count != 0 || argc != 2 ||
        strstr(dtrain_last_error(), argv[1]) == NULL)
        return 1;
    if (dtrain_cuda_create(&device, NULL) != DTRAIN_ERR_UNSUPPORTED || device != NULL ||
        strstr(dtrain_last_error(), argv[1]) == NULL)
        return 2;
    puts(dtrain_last_error());
    dtrain_cuda_destroy(NULL);
    return dtrain_cuda_stream(NULL) != NULL;
}
END
# Where a sum may be joined with its product, the host's compiler does it; between the marks of dtrain.h it must not.
cat >"$top/exact.cu" <<'END'
#include "dtrain.h"
extern "C" float loose(float a, float b, float c) { return a * b + c; }
DTRAIN__EXACT_BEGIN
extern "C" float exact(float a, float b, float c) { return a * b + c; }
DTRAIN__EXACT_END
END

# Counts the kernels of each name in PTX, and their 16-byte loads and stores.
vectors_of() { # file -> name kernels loads stores
    awk '/\.entry _Z/ {
            sub(/.*\.entry _Z/, "")
            name = substr($0, length($0 + 0) + 1, $0 + 0)
            sub(/^dtrain__cuda_/, "", name)
            found[name]++
        }
        /ld\.global[a-z0-9_:.]*\.(v4\.[a-z]32|v2\.[a-z]64|b128)/ { loads[name]++ }
        /st\.global[a-z0-9_:.]*\.(v4\.[a-z]32|v2\.[a-z]64|b128)/ { stores[name]++ }
        END { for (name in found) print name, found[name], loads[name] + 0, stores[name] + 0 }' "$1" | sort
}

check_vectors() { # name, file
    echo "$vectors" | grep . | sort >"$top/vectors"
    vectors_of "$2" >"$top/found"
    cut -d' ' -f1 "$top/found" >"$top/named"
    { cut -d' ' -f1 "$top/vectors"; printf '%s\n' $elements; } | sort | diff - "$top/named" >"$top/log" 2>&1
    if [ $? -eq 0 ]; then good "$1: the table has every kernel"; else bad "$1: the table has every kernel" "$top/log"; fi
    join -a 1 "$top/vectors" "$top/found" >"$top/joined"
    while read -r kernel loads stores found got_loads got_stores; do
        if [ "${found:-0}" -eq 1 ] && [ "$got_loads" -ge "$loads" ] && [ "$got_stores" -ge "$stores" ]; then
            good "$1: $kernel loads and stores 16 bytes at once"
        else
            bad "$1: $kernel: ${found:-0} kernels with ${got_loads:-0} loads and ${got_stores:-0} stores of 16 bytes; 1 with $loads and $stores are due"
        fi
    done <"$top/joined"
}

check_ptx() { # name, file
    has_none "$1: nothing contracted, flushed or approximated" 'fma\.|mad\.r[nzmp]|\.ftz|\.approx|\.full' "$2"
    check_vectors "$1" "$2"
}

# Everything that one nvcc compiles, side by side, as that takes most of the time: for every GPU with the flags of today,
# for one with those that change arithmetic, and the two implementations in one file, the benchmark, whose kernels are
# not looked at, and whose host code is only checked. So it ends at PTX, which -G writes without optimisation.
compile() { # nvcc, directory
    strict="-std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -I$root"
    assembler="-Xptxas -Werror,-warn-spills,-warn-lmem-usage"
    sample 1 sm_80 $("$1" --list-gpu-code | grep '^sm_100$')
    codes="-gencode=arch=compute_90,code=[sm_90,compute_90]"
    for code in $chosen; do
        codes="$codes -gencode=arch=compute_${code#sm_},code=$code"
    done
    echo "$codes" >"$2/plain.codes"
    echo "-gencode=arch=compute_90,code=sm_90" >"$2/fast.codes"
    for name in plain fast; do
        flags=
        [ $name = plain ] || flags="--use_fast_math --fmad=true"
        mkdir "$2/keep-$name"
        (
            "$1" -O2 -t 2 $strict $assembler $(cat "$2/$name.codes") $flags --keep --keep-dir "$2/keep-$name" \
                -c "$top/kernels.cu" -o "$2/$name.o" >"$2/$name.log" 2>&1
            echo $? >"$2/$name"
            cat "$(grep -l '\.target sm_90' "$2/keep-$name/"*.ptx | head -1)" >"$2/$name.ptx"
        ) &
    done
    "$1" -O0 -G -gencode=arch=compute_90,code=compute_90 $strict -Xcompiler -fsyntax-only -c tools/bench_cuda.cu -o "$2/both.o" >"$2/both.log" 2>&1
    echo $? >"$2/both"
    wait
}

check_nvcc() { # nvcc, name, directory
    compile "$1" "$3"
    for flags in plain fast; do
        holds "$2, $flags: $(sed 's/-gencode=arch=[a-z0-9_]*,code=//g' "$3/$flags.codes"), no spill, no local memory" \
            sh -c "cat '$3/$flags.log'; exit $(cat "$3/$flags")"
        if grep -q '\.target sm_90' "$3/$flags.ptx"; then
            check_ptx "$2, $flags" "$3/$flags.ptx"
        else
            bad "$2, $flags: PTX" "$3/$flags.log"
        fi
    done
    holds "$2: both implementations in tools/bench_cuda.cu" sh -c "cat '$3/both.log'; exit $(cat "$3/both")"
    check_exact "$1" "$2" "$3"
    check_sass "$1" "$2" "$3"
    check_programs "$1" "$2" "$3"
    compile_example "$1" "$2" "$3" device_reduce
    check_train "$1" "$2" "$3"
}

check_exact() { # nvcc, name, directory
    [ "$(uname -m)" = x86_64 ] || { skip "$2: the host's exact regions, as this is no x86-64"; return; }
    "$1" -O2 -arch=sm_90 -I. -Xcompiler -Ofast,-mfma -c "$top/exact.cu" -o "$3/exact.o" >"$3/exact.log" 2>&1
    objdump -d "$3/exact.o" >"$3/exact.txt" 2>>"$3/exact.log"
    joined=$(awk '/^[0-9a-f]+ </ { name = $2 } /vfmadd/ { printf "%s", name }' "$3/exact.txt")
    if [ "$joined" = "<loose>:" ]; then
        good "$2: the host's compiler keeps to the marks of dtrain.h"
    else
        echo "contracted: $joined; <loose>: is due" >>"$3/exact.log"
        bad "$2: the host's compiler keeps to the marks of dtrain.h" "$3/exact.log"
    fi
}

check_sass() { # nvcc, name, directory
    dump=$(dirname "$(readlink -f "$1")")/cuobjdump
    if [ ! -x "$dump" ]; then
        from_pypi cuda-dump nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
        dump=$root/build/cuda-dump/nvidia/cu13/bin/cuobjdump
    fi
    [ -x "$dump" ] || { skip "$2: machine code, as cuobjdump cannot be had"; return; }
    for flags in plain fast; do
        PATH=$(dirname "$dump"):$PATH "$dump" -sass "$3/$flags.o" >"$3/$flags.sass" 2>"$3/sass.log"
        if ! grep -q 'Function : .*dtrain__cuda_' "$3/$flags.sass"; then
            bad "$2, $flags: machine code" "$3/sass.log"
        else
            has_none "$2, $flags: no local memory in machine code" '[[:space:]](STL|LDL)[.[:space:]]' "$3/$flags.sass"
        fi
    done
}

check_programs() { # nvcc, name, directory
    if ! "$1" "$3/fast.o" "$top/user.o" build/tests/dtrain.o -o "$3/user" -lpthread -lm >"$3/link.log" 2>&1 &&
        grep -q 'cannot find -lcuda' "$3/link.log"; then
        skip "$2: programs, as it comes without a runtime to link with"
        return
    fi
    holds "$2: C units beside the implementation link" "$1" "$3/fast.o" "$top/user.o" "$top/other.o" build/tests/dtrain.o \
        -o "$3/user" -lpthread -lm
    ldd "$3/user" >"$3/ldd" 2>&1
    has_none "$2: neither the driver nor the runtime is linked with" 'libcuda|not found|No such file|not a dynamic' "$3/ldd"
    holds "$2: without a driver or a GPU calls say so" "$3/user" "on CUDA: "
    "$1" -Xcompiler -fsanitize=address "$3/fast.o" "$top/user.o" build/tests/dtrain.o -o "$3/asan" -lpthread -lm
    holds "$2: and leak nothing" env ASAN_OPTIONS=protect_shadow_gap=0:detect_leaks=1 "$3/asan" "on CUDA: "
}

# Compiles an example without its implementations, which are compiled above.
compile_example() { # nvcc, name, directory, example
    sed '/^#define DTRAIN_\(CUDA_\)*IMPLEMENTATION$/d' "examples/$4.cu" >"$3/$4.cu"
    # shellcheck disable=SC2086
    holds "$2: examples/$4.cu, no warning, no spill, no local memory" \
        "$1" -O2 -arch=sm_90 $strict $assembler -Iexamples -c "$3/$4.cu" -o "$3/$4.o"
}

# The program that trains, where the toolkit has cuBLAS.
check_train() { # nvcc, name, directory
    home=$(dirname "$(readlink -f "$1")")/..
    if [ ! -e "$home/include/cublas_v2.h" ]; then
        skip "$2: examples/train_gpt_cuda.cu, as it comes without cuBLAS"
        return
    fi
    compile_example "$1" "$2" "$3" train_gpt_cuda
    if ! "$1" "$3/train_gpt_cuda.o" "$3/plain.o" build/tests/dtrain.o -o "$3/train" -lcublas -lpthread -lm >"$3/link.log" 2>&1 &&
        grep -q 'cannot find -lcublas' "$3/link.log"; then
        skip "$2: train_gpt_cuda's link, as the toolkit has no libcublas"
        return
    fi
    LD_LIBRARY_PATH=$home/lib64 "$3/train" --steps 1 >"$3/train.log" 2>&1
    cat "$3/train.log" >>"$3/link.log"
    if grep -q '^train_gpt_cuda: GPUs of this machine: ' "$3/train.log"; then
        good "$2: train_gpt_cuda links, and says that there is no GPU"
    else
        bad "$2: train_gpt_cuda links, and says that there is no GPU" "$3/link.log"
    fi
}

check_without_nvcc() {
    printf '#define DTRAIN_CUDA_STUB\n#define DTRAIN_CUDA_IMPLEMENTATION\n#include "dtrain_cuda.h"\n' >"$top/stub.c"
    printf '#define DTRAIN_CUDA_EMULATE\n#define DTRAIN_CUDA_IMPLEMENTATION\n#include "dtrain_cuda.h"\n' >"$top/emulated.c"
    for cc in ${COMPILERS:-cc}; do
        command -v "$cc" >/dev/null 2>&1 || { skip "$cc is not here"; continue; }
        for std in c99 c++11; do
            lang="-x c"
            [ $std = c99 ] || lang="-x c++"
            holds "$cc $std: the stub" "$cc" $lang -std=$std -O1 $warn -I. -c "$top/stub.c" -o "$top/stub.o"
            holds "$cc $std: the stub and a second unit link" "$cc" "$top/stub.o" "$top/user.o" "$top/other.o" \
                build/tests/dtrain.o -o "$top/stubbed" -lpthread -lm
            holds "$cc $std: the stub answers" "$top/stubbed" "this build has no CUDA"
        done
        holds "$cc c99: the emulation" "$cc" -std=c99 -O1 $warn -I. -c "$top/emulated.c" -o "$top/emulated.o"
        if "$cc" -I. -c -x c "$top/kernels.cu" -o "$top/none.o" >"$top/log" 2>&1; then
            bad "$cc: neither nvcc nor stub is an error"
        elif grep -q 'stands in a .cu file' "$top/log"; then
            good "$cc: neither nvcc nor stub is an error"
        else
            bad "$cc: neither nvcc nor stub is an error" "$top/log"
        fi
    done
}

# The nvccs here, one of each version; PyPI's where there is none.
find_nvccs() {
    ls "${NVCC:-/nowhere}" "$(command -v nvcc)" /usr/local/cuda*/bin/nvcc /usr/lib/nvidia-cuda-toolkit/bin/nvcc \
        build/cuda-12/bin/nvcc build/cuda-13/nvidia/cu13/bin/nvcc 2>/dev/null |
        while read -r path; do
            release=$("$path" --version 2>/dev/null | sed -n 's/.*release [0-9.]*, V\([0-9.]*\).*/\1/p')
            [ -z "$release" ] || echo "$release $path"
        done | sort -k1,1 -u
}

cc=${CC:-cc}
make -s CC="$cc" build/tests/dtrain.o || exit 1 # what counts is that it links and answers
for unit in user other; do
    $cc -O0 -I. -c "$top/$unit.c" -o "$top/$unit.o" || exit 1
done
check_without_nvcc
find_nvccs >"$top/nvccs"
if [ ! -s "$top/nvccs" ]; then
    from_pypi cuda-13 'nvidia-cuda-nvcc<14' 'nvidia-cuda-runtime<14' 'nvidia-cuda-cccl<14'
    find_nvccs >"$top/nvccs"
    [ -s "$top/nvccs" ] || skip "no nvcc is here, and PyPI gives none: $(tail -1 "$top/pip.log")"
fi
if [ "${NVCCS:-}" = all ]; then
    if ! grep -q '^12\.' "$top/nvccs"; then
        sh tests/support/nvcc12.sh build/cuda-12 2>"$top/log" || skip "$(tail -1 "$top/log")"
        find_nvccs >"$top/nvccs"
    fi
else
    tail -1 "$top/nvccs" >"$top/newest" && mv "$top/newest" "$top/nvccs"
fi
while read -r release path; do
    mkdir "$top/$release"
    check_nvcc "$path" "nvcc $release" "$top/$release" </dev/null
done <"$top/nvccs"
checked
