#!/bin/sh
# Builds every example by the build line at its top and runs it; then what train_gpt says to bad flags, bad text and
# outputs that cannot be written. Ends with "N passed, N failed".
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0

check() { # check NAME STATUS
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $1"
    else
        failed=$((failed + 1))
        echo "FAIL $1"
        sed 's/^/  /' "$dir/out" "$dir/err" 2>/dev/null | head -20
    fi
}

# The compiler call of an example's build line, its output moved into $dir.
build() {
    line=$(sed -n 's|^[/ ]*\*  *\(cc -.*\)|\1|p' "examples/$1.c" | head -1 | sed 's| *\*/ *$||; s| *&&.*||')
    case $line in
    *"examples/$1.c -o build/$1 "*) ;;
    *) echo "the build line is missing or names other files: $line" >"$dir/err"; return 1 ;;
    esac
    line=$(echo "$line" | sed "s|-o build/|-o $dir/|; s|^cc |$CC |")
    (eval "$line") >"$dir/out" 2>"$dir/err"
}

# Whether the example's comment at the end of its file holds what it prints. Numbers that depend on time or on the
# instruction set are left out of the comparison.
prints_its_end() {
    sed 's/weights_sha256=[^ ]*/H/; s/[0-9][0-9.e+-]*/N/g' "$dir/out" | tr -s ' ' | grep -v '^$' >"$dir/printed"
    sed -n '$p' "$dir/printed" | cut -c1-40 >"$dir/last"
    [ -s "$dir/last" ] || return 1
    tail -12 "examples/$1.c" | sed 's/weights_sha256=[^ ]*/H/; s/[0-9][0-9.e+-]*/N/g' | tr -s ' ' | grep -qFf "$dir/last"
}

runs() { # runs NAME ARGS...
    name=$1
    shift
    build "$name" && "$dir/$name" "$@" >"$dir/out" 2>"$dir/err" && [ ! -s "$dir/err" ] && prints_its_end "$name"
    check "$name builds by its line and prints what it shows" $?
}

runs quickstart
runs train_mlp 3
runs frame_loop
[ ! -f examples/custom_transport.c ] || runs custom_transport

tiny="--layers 1 --heads 2 --width 16 --context 16 --batch 1 --micro 2 --steps 4 --csv $dir/a.csv --svg $dir/a.svg"
runs train_gpt $tiny --ranks 2

train() { "$dir/train_gpt" $tiny "$@" >"$dir/out" 2>"$dir/err"; }

# One line of complaint that contains a text, nothing on stdout, a non-zero exit, and no output left behind.
refuses() { # refuses TEXT ARGS...
    text=$1
    shift
    rm -f "$dir"/a.*
    train "$@"
    status=$?
    [ $status -ne 0 ] && [ $status -lt 128 ] && [ ! -s "$dir/out" ] && [ "$(wc -l <"$dir/err")" -eq 1 ] &&
        grep -qF -e "$text" "$dir/err" && [ -z "$(ls "$dir" | grep '^a\.')" ]
    check "refuses $*" $?
}

: >"$dir/empty"
echo "a few words" >"$dir/short"
refuses "flag --colour" --colour blue
refuses "flag --steps" --steps
refuses "flag --steps" --steps many
refuses "flag --steps" --steps 0
refuses "flag --steps" --steps 1.5
refuses "flag --steps" --steps -3
refuses "flag --ranks" --ranks 0
refuses "flag --lr" --lr nan
refuses "flag --lr" --lr
refuses "flag --text" --text
refuses "multiple of --heads" --heads 3
refuses "optimizer lion" --optimizer lion
refuses "GB of memory" --layers 1000 --width 65536 --heads 512 --context 65536 --batch 65536 --ranks 1000
refuses "flag --svg" --svg "$dir/a.csv"
refuses "$dir/none" --text "$dir/none"
refuses "is empty" --text "$dir/empty"
refuses "too short" --text "$dir/short"
refuses "cannot be read" --text "$dir"
refuses "$dir/none/loss.csv" --csv "$dir/none/loss.csv"
refuses "$dir/none/loss.svg" --svg "$dir/none/loss.svg"
refuses "output $dir" --csv "$dir"
[ ! -w /dev/full ] || refuses "output /dev/full" --csv /dev/full
[ ! -w /dev/full ] || refuses "output /dev/full" --svg /dev/full

train --quiet && [ "$(wc -l <"$dir/out")" -eq 1 ] && grep -qE '^result weights_sha256=[0-9a-f]{64} loss=[0-9.]+ val_loss=[0-9.]+ tokens_per_s=[0-9]+ comm_share=[0-9.]+ peak_bytes=[0-9]+$' "$dir/out"
check "quiet training prints the result line alone" $?
kept=$(cut -d ' ' -f 2-4 "$dir/out")
[ "$(wc -l <"$dir/a.csv")" -eq 5 ] && [ "$(head -1 "$dir/a.csv")" = "step,loss,lr,norm" ] && [ ! -e "$dir/a.csv.new" ]
check "the CSV has a head and a line a step" $?
grep -q '^<svg ' "$dir/a.svg" && grep -q '^<polyline\|<polyline' "$dir/a.svg" && [ "$(tail -1 "$dir/a.svg" | grep -c '</svg>')" -eq 1 ]
check "the SVG is whole" $?
train --quiet && [ "$(cut -d ' ' -f 2-4 "$dir/out")" = "$kept" ]
check "two runs of one command end with the same bits" $?
train --quiet --seed 2 && [ "$(cut -d ' ' -f 2-4 "$dir/out")" != "$kept" ]
check "another seed gives other weights" $?
train --ranks 3 && [ "$(grep -c '^step ' "$dir/out")" -eq 4 ] && [ "$(grep -c '^result ' "$dir/out")" -eq 1 ] &&
    ! tr '\r' '#' <"$dir/out" | grep -q '#\['
check "in a pipe progress comes as plain lines, from rank 0 alone" $?
train --quiet --csv /dev/null --svg /dev/null && [ -c /dev/null ]
check "a device is written to, not replaced" $?
train --quiet --optimizer sgd --lr 1000 --steps 40
[ $? -eq 1 ] && grep -q 'step [0-9]* is not finite' "$dir/err" && [ ! -s "$dir/out" ]
check "a run that diverges says at which step and fails" $?

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
