#!/bin/sh
# The same weights on Intel, AMD and ARM: a small run of train_gpt ends with one hash where matrix products round each term
# once, and with another where they round it twice. DTRAIN_ISA pins the instruction set of the products. With BITS=all in
# the environment, as .ci/run sets it, train_gpt is also built without optimisation, with it and for this processor by
# the compilers that COMPILERS names, and for ARM where its compiler and qemu are here.
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
make -s build/train_gpt build/tests/libdtrain.a >/dev/null || exit 1
dir=$(mktemp -d "${TMPDIR:-/tmp}/weights.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
top=$dir
logs="$dir/log $dir/result"
once=d24e24b981924b1ffa43a5641daf39a59c05b9cb2bab3160d06d8b2bec65f4ad
twice=3664a2fcd5f1b5b92db7b62764e676a0e2c243be96e98c60e4fc8ca6fb348c83

awk 'BEGIN { for (i = 0; i < 500; i++) printf "%d squared is %d, and cubed %d.\n", i, i * i, i * i * i }' >"$dir/text"
printf '#include "dtrain.h"\nint main(void) { puts(dtrain_isa_name()); return 0; }\n' >"$dir/isa.c"
${CC:-cc} -I. "$dir/isa.c" build/tests/libdtrain.a -o "$dir/isa" -lpthread -lm >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }

# The inner sums of 80 and 320 terms are one block of the product and two.
ends_as() { # hash program...
    expected=$1
    shift
    "$@" --ranks 2 --layers 2 --width 80 --heads 5 --context 24 --batch 2 --micro 4 --steps 8 --lr 3e-3 --quiet \
        --text "$top/text" --csv "$dir/csv" --svg "$dir/svg" >"$dir/result" 2>"$dir/log"
    got=$(sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$dir/result")
    [ "$got" = "$expected" ]
}

hash_of() { # instruction set
    case $1 in
    avx2 | avx512 | neon*) echo $once ;;
    *) echo $twice ;;
    esac
}

every_isa() { # what, program: on each instruction set of this machine
    for asked in scalar sse2 neon neon-bf16 avx2 avx512; do
        isa=$(DTRAIN_ISA=$asked "$top/isa")
        [ "$isa" = $asked ] || continue
        DTRAIN_ISA=$asked ends_as "$(hash_of $isa)" "$2"
        check $? "$1: the weights of $isa"
    done
}

by() { # compiler flags...: train_gpt linked with the library of the tests
    dir=$lane
    logs="$dir/log $dir/result"
    command -v $1 >/dev/null 2>&1 || { echo "$1 is not here: its part is skipped"; return; }
    "$@" -ffp-contract=off -D_DEFAULT_SOURCE -w -I. -Iexamples "$top/train_gpt.c" build/tests/libdtrain.a \
        -o "$dir/gpt" -lpthread -lm >"$dir/log" 2>&1 && every_isa "$*" "$dir/gpt"
    check $? "$* builds train_gpt"
}

by_arm() { # compiler flags...: train_gpt whole
    dir=$lane
    logs="$dir/log $dir/result"
    if ! command -v $1 >"$dir/log" || ! command -v qemu-aarch64 >"$dir/log"; then
        echo "there is no $1 with qemu-aarch64: ARM is skipped"
        return
    fi
    "$@" -ffp-contract=off -w -static -I. examples/train_gpt.c -o "$dir/arm" -lpthread -lm >"$dir/log" 2>&1 &&
        ends_as $once qemu-aarch64 "$dir/arm" && ends_as $once qemu-aarch64 "$dir/arm" --strategy full # qemu does not give pages back that were moved
    check $? "$*: the weights of neon, also under --strategy full"
    DTRAIN_ISA=scalar ends_as $twice qemu-aarch64 "$dir/arm"
    check $? "$*: the weights of scalar"
}

every_isa "train_gpt by its own line" build/train_gpt
if [ "${BITS:-}" = all ]; then
    calls examples/train_gpt.c >"$dir/train_gpt.c"
    builds=by_arm+aarch64-linux-gnu-gcc+-O3
    for cc in ${COMPILERS:-cc}; do
        builds="$builds by+$cc+-O0 by+$cc+-O2 by+$cc+-O3+-march=native+-fno-math-errno"
    done
    sample 3 $builds
    printf '%s\n' $chosen | tr + ' ' >"$dir/builds"
    lanes eval <"$dir/builds"
fi
checked
