#!/bin/sh
# The compile matrix and the amalgamation: what a user's compiler sees, and what an author's mistake meets. Asks cc, or the
# compilers that COMPILERS in the environment names; with MATRIX=all there, also what takes long and has seldom found
# anything. .ci/run names compilers, make soak sets both.
set -u
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d "${TMPDIR:-/tmp}/matrix.XXXXXX")
top=$work
trap 'rm -rf "$top"' EXIT
passed=0
failed=0
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"

good() { passed=$((passed + 1)); }
bad() {
    failed=$((failed + 1))
    echo "FAIL $1"
    [ -z "${2:-}" ] || head -8 "$2"
}
holds() { # name, command...
    name=$1
    shift
    if "$@" >"$work/log" 2>&1; then good; else bad "$name" "$work/log"; fi
}
fails_with() { # name, text, command...
    name=$1
    text=$2
    shift 2
    if "$@" >"$work/log" 2>&1; then bad "$name: succeeded"; elif grep -q "$text" "$work/log"; then good; else bad "$name: other text" "$work/log"; fi
}

# Everything that one compiler says; in a directory of its own, so that two compilers run at once. The first standard of
# each language is compiled to the end, as some warnings come from the optimizer only; the others differ in the parser.
compiler() {
    cc=$1
    command -v $cc >/dev/null 2>&1 || { echo "$cc is not here: its part is skipped"; return; }
    for std in c99 c11 c17 c++11 c++17; do
        case $std in c++*) lang="-x c++" ;; *) lang= ;; esac
        case $std in c99 | c++11) end="-c -o $work/$std.o" ;; *) end=-fsyntax-only ;; esac
        case $std in c++*) level=-O1 ;; *) level=-O2 ;; esac
        holds "$cc $std $level" $cc $lang -std=$std $level $warn -I. "$work/impl.c" $end
        holds "$cc $std plain" $cc $lang -std=$std -O2 $warn -I. -c "$work/plain.c" -o "$work/plain.o"
    done
    [ "${MATRIX:-}" != all ] ||
        holds "$cc -Ofast -march=native" $cc -Ofast -march=native $warn -I. -c "$work/impl.c" -o "$work/impl.o"
    for object in c99 c++11; do
        nm -g --defined-only "$work/$object.o" | awk '{ print $NF }' | grep -v '^dtrain_' >"$work/foreign"
        [ -s "$work/foreign" ] && bad "$cc: symbols in $object.o that are not dtrain's" "$work/foreign" || good
    done
    holds "$cc static" $cc -O0 $warn -I. -c "$work/static.c" -o "$work/static.o"
    nm -g --defined-only "$work/static.o" | awk '{ print $NF }' | grep -v '^main$' >"$work/foreign"
    [ -s "$work/foreign" ] && bad "$cc: symbols of a static API" "$work/foreign" || good
    for object in c99 c++11; do
        for lang in c c++; do
            holds "$cc: a unit of $lang uses that of $object" $cc -x $lang "$work/user.c" -I. -x none "$work/$object.o" -o "$work/two" -lpthread -lm
            holds "$cc: a unit of $lang with that of $object runs" "$work/two"
        done
    done
    fails_with "$cc included late" 'include it before any system header' $cc -std=c99 -I. -c "$work/late.c" -o "$work/late.o"
}

for cc in ${COMPILERS:-cc}; do
    mkdir "$work/$cc"
    (
        work=$work/$cc
        printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$work/impl.c"
        printf '#include "dtrain.h"\nint dtrain_other(void);\nint dtrain_other(void) { return dtrain_comm_size(NULL); }\n' >"$work/plain.c"
        printf '#include "dtrain.h"\nint main(void) { return dtrain_comm_size(NULL) != 1; }\n' >"$work/user.c"
        printf '#define DTRAIN_API static\n#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\nint main(void) { return dtrain_comm_size(NULL) != 1; }\n' >"$work/static.c"
        printf '#include <stdio.h>\n#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$work/late.c"
        compiler $cc >"$work/out"
        echo "$passed $failed" >"$work/counts"
    ) &
done
wait
for cc in ${COMPILERS:-cc}; do
    cat "$work/$cc/out"
    read -r good_ones bad_ones <"$work/$cc/counts"
    passed=$((passed + good_ones))
    failed=$((failed + bad_ones))
done

# Every module alone, half of them at a time: what it lacks is what one that it calls should have been included for.
alone() { # 0: every second module from the second on; 1: from the first on
    for file in $(grep -v '\[' src/order.txt | awk -v first=$1 'NR % 2 == first'); do
        holds "src/$file alone" ${CC:-cc} -x c -std=gnu99 -Wall -Wextra -Wno-unused-function -Wno-unused-variable \
            -Wno-unused-const-variable -fsyntax-only "src/$file"
    done
    echo "$passed $failed" >"$work/counts"
}
for half in 0 1; do
    mkdir "$work/$half"
    (passed=0 failed=0 work=$work/$half; alone $half >"$work/out") &
done
wait
for half in 0 1; do
    cat "$work/$half/out"
    read -r good_ones bad_ones <"$work/$half/counts"
    passed=$((passed + good_ones))
    failed=$((failed + bad_ones))
done

holds "amalgamate --check" tools/amalgamate --check
mkdir "$work/tree"
cp -R src tools dtrain.h "$work/tree/"
cd "$work/tree"
tool=tools/amalgamate
holds "a second run changes nothing" sh -c "$tool && cmp dtrain.h '$root/dtrain.h'"
sed 's/Returns the number of ranks; 1 for NULL/Returns how many ranks there are; 1 for NULL/' dtrain.h >edited && mv edited dtrain.h
fails_with "--check names the line" 'comm/comm.h:' $tool --check
holds "--absorb" $tool --absorb
holds "absorbed" grep -q 'how many ranks there are' src/comm/comm.h
holds "--check after --absorb" $tool --check
holds "only that file" sh -c "[ \"\$(diff -rq src '$root/src' | wc -l)\" -eq 1 ]"
cp "$root/dtrain.h" . && cp -R "$root/src" .
awk '{ print } /^#define DTRAIN__STATUS$/ { print "#include \"../comm/comm.c\"" }' src/base/status.c >edited && mv edited src/base/status.c
fails_with "a later include" 'includes comm/comm.c, which stands later' $tool
holds "nothing written" cmp dtrain.h "$root/dtrain.h"
cp "$root/src/base/status.c" src/base/status.c
echo 'int x;' >src/base/stray.c
fails_with "an unlisted file" 'src/base/stray.c is not listed' $tool
rm src/base/stray.c
echo 'base/nowhere.c' >>src/order.txt
fails_with "a missing file" 'base/nowhere.c, which does not exist' $tool
cp "$root/src/order.txt" src/order.txt
if command -v busybox >/dev/null 2>&1; then
    holds "busybox" busybox sh $tool --check
fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
