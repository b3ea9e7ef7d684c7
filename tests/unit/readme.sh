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

# The files of the repository as they are, and nothing built: a fresh clone of them. Without git, all files but build/.
files() {
    git ls-files -co --exclude-standard 2>/dev/null ||
        { find . \( -path ./build -o -path ./.git \) -prune -o -type f -print && echo build/.gitignore; }
}
clone() { # directory
    mkdir "$1" && files | tar -cf - -T - | tar -xf - -C "$1"
}
clone "$dir/clone" >"$dir/log" 2>&1
check $? "the repository is cloned"
python commands "$dir/clone"

flags="-ffp-contract=off -Wall -Wextra -I."
trains() { # program, ranks
    timeout 60 "$dir/clone/build/dtrun" -n "$2" --no-prefix "$dir/$1" >"$dir/log" 2>&1 &&
        [ "$(grep -c '^trained$' "$dir/log")" -eq "$2" ]
}
python programs "$dir"
${CC:-cc} $flags "$dir/one.c" -o "$dir/one" -lpthread -lm >"$dir/log" 2>&1 &&
    "$dir/one" >"$dir/log" 2>&1 && grep -q '^trained$' "$dir/log"
check $? "README's three steps make a program of one file, which trains on one rank"
${CC:-cc} $flags -c "$dir/implementation.c" -o "$dir/implementation.o" >"$dir/log" 2>&1 &&
    ${CC:-cc} $flags "$dir/caller.c" "$dir/implementation.o" -o "$dir/apart" -lpthread -lm >"$dir/log" 2>&1
check $? "README's three steps make a program whose implementation has its own file"
for program in one apart; do
    for ranks in 1 2 3 5; do
        trains $program $ranks
        check $? "program $program on -n $ranks: 7 examples give the weights of a plain loop"
    done
done

# The blocks of the manual and the headers stand in snippets.c, which tests/unit/test_examples.sh compiles by several compilers.
python snippets
python tables
${CC:-cc} -Ofast -fopenmp -I. tests/unit/snippets.c -o "$dir/snippets" -lpthread -lm >"$dir/log" 2>&1 &&
    timeout 100 "$dir/snippets" "$dir/s" >"$dir/log" 2>&1 && tail -1 "$dir/log" | grep -q '^[1-9][0-9]* passed, 0 failed$'
check $? "the manual's snippets run with -Ofast and OpenMP"

# What must fail does: a wrong output, a command that needs what no clone has, a wrong gradient, a wrong block of each kind,
# a variable that is not listed.
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
fails "a wrong output" commands "$dir" --readme "$dir/wrong.md"
[ "$(grep -c '^FAIL' "$dir/log")" -eq 1 ]
check $? "another figure is no wrong output"
clone "$dir/bare" && rm -r "$dir/bare/build"
sed '/^    \$ make build/d; s/^    \$ cc -O2/    $ cc -O0/' README.md >"$dir/wrong.md"
fails "a command that a fresh clone cannot run" commands "$dir/bare" --readme "$dir/wrong.md"
grep -q '^FAIL README: cc .*-o build/quickstart' "$dir/log" && grep -q '^FAIL README: for .*build/train_gpt' "$dir/log"
check $? "it is found for want of build/, and of a program that README does not build"

mkdir "$dir/wrong"
sed 's/^\(dtrain_comm_destroy(world);\)/...  \/* \1/' README.md >"$dir/wrong.md"
fails "a wrong block of README" programs "$dir/wrong" --readme "$dir/wrong.md"
awk '/^#define DTRAIN_IMPLEMENTATION/ && before !~ /static/ { print "#define DTRAIN_API static" } { print; before = $0 }' \
    README.md >"$dir/wrong.md"
fails "an implementation that no other file can call" programs "$dir/wrong" --readme "$dir/wrong.md"
wrong_gradient() { # what, how sed puts it into README
    sed "$2" README.md >"$dir/wrong.md"
    python3 tests/unit/readme.py programs "$dir/wrong" --readme "$dir/wrong.md" >"$dir/log" &&
        ${CC:-cc} $flags "$dir/wrong/caller.c" "$dir/implementation.o" -o "$dir/wrong/caller" -lpthread -lm >"$dir/log" 2>&1 &&
        trains wrong/caller 1 && ! trains wrong/caller 2 && ! trains wrong/caller 3 && ! trains wrong/caller 5
    check $? "$1 is found on 2, 3 and 5 ranks"
}
sum='dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_'
wrong_gradient "a mean of what is divided by all examples" "s/${sum}SUM/${sum}MEAN/"
wrong_gradient "the mean of the ranks' means" "/^for (size_t i/d; /^    grads\[i\] .= /d
    /$sum/s/^/for (size_t i = 0; i < count; i++) grads[i] \/= (float)mine; /; s/${sum}SUM/${sum}MEAN/"
sed 's/dtrain_comm_ready(world, &ready)/dtrain_comm_ready(world)/' src/manual/manual.h >"$dir/wrong.h"
fails "a wrong block of the manual" snippets --manual "$dir/wrong.h"
sed 's/backward(qkvw, d_qkvw, unit)/backward(unit)/' src/shard/fsdp.h >"$dir/wrong.h"
fails "a wrong block of a header" snippets --header "$dir/wrong.h"
[ "$(grep -c '^FAIL' "$dir/log")" -eq 1 ]
check $? "the header's other blocks are found"
sed 's/DTRAIN_ISA /DTRAIN_ISO /' src/manual/manual.h >"$dir/wrong.h"
fails "a wrong variable of the manual" tables --manual "$dir/wrong.h"
checked
