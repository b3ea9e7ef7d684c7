#!/bin/sh
# README.md, the manual and the headers: their sentences are short, their code compiles and runs, README's commands print
# what it says. Needs Python. Commands that README marks "not run here" are skipped, and named.
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
if ! command -v python3 >/dev/null 2>&1; then
    echo "there is no python3: README and the manual are skipped"
    echo "0 passed, 0 failed"
    exit 0
fi
mkdir -p build
dir=$(mktemp -d build/readme.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log"
make -s build/dtrun build/train_gpt >"$dir/log" 2>&1
check $? "the programs that README runs are built"

python3 tests/unit/prose.py >"$dir/log"
check $? "README, manual and comments have short sentences"

python() { # arguments; adds its checks to the sums
    python3 tests/unit/readme.py "$@" >"$dir/out" 2>&1
    grep -v '^ok \|^[0-9]* passed' "$dir/out"
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$dir/out" || echo "0 passed, 1 failed")
    passed=$((passed + ${line%% passed*}))
    line=${line##*passed, }
    failed=$((failed + ${line%% failed*}))
}
python programs "$dir"
${CC:-cc} -O2 -ffp-contract=off -Wall -Wextra -I. "$dir/parts.c" -o "$dir/parts" -lpthread -lm >"$dir/log" 2>&1 &&
    "$dir/parts" >"$dir/log" 2>&1 && grep -q '^trained$' "$dir/log"
check $? "README's three steps make a program that trains on one rank"
timeout 60 build/dtrun -n 4 --no-prefix "$dir/parts" >"$dir/log" 2>&1 && [ "$(grep -c '^trained$' "$dir/log")" -eq 4 ]
check $? "README's three steps make a program that trains on four processes"
python commands

# The blocks of the manual and the headers stand in snippets.c, which tests/unit/test_examples.sh compiles by several compilers.
python snippets
python tables
${CC:-cc} -Ofast -fopenmp -I. tests/unit/snippets.c -o "$dir/snippets" -lpthread -lm >"$dir/log" 2>&1 &&
    timeout 100 "$dir/snippets" "$dir/s" >"$dir/log" 2>&1 && tail -1 "$dir/log" | grep -q '^[1-9][0-9]* passed, 0 failed$'
check $? "the manual's snippets run with -Ofast and OpenMP"

# What must fail does: a wrong output, a wrong block of each kind, a variable that is not listed.
fails() { # what, arguments
    what=$1
    shift
    if python3 tests/unit/readme.py "$@" >"$dir/log" 2>&1; then false; else grep -q '^FAIL' "$dir/log"; fi
    check $? "$what is found"
}
cat >"$dir/wrong.md" <<'END'
    $ echo "one 1.5"
    one 2
    $ echo "two 2"
    tow 2
    $ true
    $ true
    $ true
END
for words in 30 31; do
    awk -v n=$words 'BEGIN { print "/* One"; for (i = 1; i < n; i++) print " * more"; print " * . */" }' >"$dir/long-$words.c"
done
python3 tests/unit/prose.py "$dir/long-30.c" >"$dir/log" && ! python3 tests/unit/prose.py "$dir/long-31.c" >"$dir/log"
check $? "a sentence of 31 words is found, one of 30 passes"
fails "a wrong output" commands --readme "$dir/wrong.md"
[ "$(grep -c '^FAIL' "$dir/log")" -eq 1 ]
check $? "another figure is no wrong output"
sed 's/^\(dtrain_comm_destroy(world);\)/...  \/* \1/' README.md >"$dir/wrong.md"
fails "a wrong block of README" programs "$dir" --readme "$dir/wrong.md"
sed 's/dtrain_comm_ready(world, &ready)/dtrain_comm_ready(world)/' src/manual.h >"$dir/wrong.h"
fails "a wrong block of the manual" snippets --manual "$dir/wrong.h"
sed 's/backward(qkvw, d_qkvw, unit)/backward(unit)/' src/shard/fsdp.h >"$dir/wrong.h"
fails "a wrong block of a header" snippets --header "$dir/wrong.h"
[ "$(grep -c '^FAIL' "$dir/log")" -eq 1 ]
check $? "the header's other blocks are found"
sed 's/DTRAIN_ISA /DTRAIN_ISO /' src/manual.h >"$dir/wrong.h"
fails "a wrong variable of the manual" tables --manual "$dir/wrong.h"
checked
