#!/bin/sh
# The same bits under any flags: builds tests/unit/bits.c with each compiler and set of flags, runs it on every
# instruction set that the processor has, with and without subnormals flushed by the caller, and asks for one hash of
# kernels, casts, folds and random numbers over all of it, and one hash of matrix products for the instruction sets that
# round a term of a product once, and one for those that round it twice.
#   [BITS=all] [SAMPLE=N] sh tests/unit/bits.sh
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
dir=$(mktemp -d "${TMPDIR:-/tmp}/bits.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM

# One build a line: its name, then the compiler and flags. gcc contracts by default, clang where it is told to. With
# BITS=all in the environment also those that have never differed from the others, of which the number SAMPLE
# chooses one. Asks cc, or the compilers that COMPILERS names, as .ci/run does.
[ "${BITS:-}" != all ] || sample 1 O0 c99 gnu17 cxx
builds() {
    for cc in ${COMPILERS:-cc}; do
        command -v $cc >/dev/null 2>&1 || continue
        case $cc in clang) cxx=clang++ ;; gcc) cxx=g++ ;; *) cxx=c++ ;; esac
        echo "$cc-O2 $cc -O2"
        echo "$cc-Ofast $cc -Ofast -march=native"
        [ $cc != clang ] || echo "$cc-contract $cc -O3 -march=native -ffp-contract=fast"
        for name in ${chosen:-}; do
            case $name in
            O0) echo "$cc-O0 $cc -O0" ;;
            c99) echo "$cc-c99 $cc -std=c99 -O1" ;;
            gnu17) echo "$cc-gnu17 $cc -std=gnu17 -O3" ;;
            cxx) ! command -v $cxx >/dev/null 2>&1 || echo "$cc-cxx $cxx -x c++ -std=c++11 -O2" ;;
            esac
        done
    done
}

build_and_run() { # name, compiler and flags: leaves an output for each instruction set and mode
    name=$1
    shift
    "$@" -w -I. tests/unit/bits.c -o "$dir/$name" -lpthread -lm >"$dir/$name.log" 2>&1 || return
    for isa in $isas; do
        for mode in kept ftz; do
            DTRAIN_ISA=$isa "$dir/$name" $mode >"$dir/$name.$isa.$mode" 2>&1
        done
    done
}

case $(uname -m) in
aarch64 | arm64) isas="scalar neon neon-bf16" ;;
*) isas="scalar sse2 avx2 avx512" ;;
esac
builds >"$dir/builds"
[ -s "$dir/builds" ] || { echo "there is no ${COMPILERS:-cc}"; echo "0 passed, 1 failed"; exit 1; }
awk 'NR % 2' "$dir/builds" | while read -r line; do build_and_run $line; done & # two at a time
awk 'NR % 2 == 0' "$dir/builds" | while read -r line; do build_and_run $line; done
wait

bits=
verdict() { # what, got, expected
    if [ -n "$2" ] && [ "$2" = "$3" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $1: hash ${2:-none}, expected $3"
    fi
}

while read -r name flags; do
    if [ ! -x "$dir/$name" ]; then
        failed=$((failed + 1))
        echo "FAIL $flags: does not compile"
        head -5 "$dir/$name.log"
        continue
    fi
    for isa in $isas; do
        for mode in kept ftz; do
            line=$(cat "$dir/$name.$isa.$mode")
            [ "${line%% *}" = $isa ] || { [ -n "$line" ] && continue; } # the processor has no such instructions
            all=${line#* }
            product=${all#* }
            all=${all% *}
            [ -n "$bits" ] || bits=$all
            verdict "$flags, $isa, subnormals $mode" "$all" "$bits"
            case $isa in
            avx2 | avx512 | neon*) rounds=once ;;
            *) rounds=twice ;;
            esac
            eval "first=\${product_$rounds:-}"
            [ -n "$first" ] || { first=$product; eval "product_$rounds=$product"; }
            verdict "$flags, $isa, subnormals $mode, products" "$product" "$first"
        done
    done
done <"$dir/builds"
checked
