#!/bin/sh
# Stops train_gpt and resumes it: after some steps, and by SIGKILL; on as many ranks, on others, on processes, under
# another strategy. Compares with the run that never stopped. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
make -s build/train_gpt build/dtrun >/dev/null || exit 1
dir=$(mktemp -d build/test_ckpt_gpt.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log"
small="--layers 2 --width 32 --heads 2 --context 32 --batch 2 --micro 8 --steps 24 --quiet --text examples/gpt.h"
small="$small --csv $dir/csv --svg $dir/svg"

field() { sed -n "s/.*$1=\([^ ]*\).*/\1/p" "$2"; }

same_weights() { [ -n "$(field weights_sha256 "$1")" ] && [ "$(field weights_sha256 "$1")" = "$(field weights_sha256 "$2")" ]; }
same_loss() {
    awk -v a="$(field ' loss' "$1")" -v b="$(field ' loss' "$2")" \
        'BEGIN { d = (a - b) / a; exit !(a > 0 && b > 0 && d < 1e-5 && d > -1e-5) }'
}

build/train_gpt $small --ranks 1 >"$dir/straight" 2>"$dir/log"
build/train_gpt $small --ranks 4 --strategy full --save "$dir/run" --every 4 --until 10 >"$dir/first" 2>"$dir/log"
! same_weights "$dir/straight" "$dir/first"
check $? the_first_stretch_ends_elsewhere
for how in "4 full" "2 ddp" "4 hybrid"; do
    set -- $how
    rm -rf "$dir/copy" && cp -r "$dir/run" "$dir/copy"
    build/train_gpt $small --ranks $1 --strategy $2 --save "$dir/copy" --resume >"$dir/out" 2>"$dir/log"
    same_weights "$dir/straight" "$dir/out"
    check $? "resumed_on_$1_ranks_under_$2_with_the_same_bits"
done
build/dtrun -n 3 build/train_gpt $small --strategy grad --save "$dir/run" --resume >"$dir/out" 2>"$dir/log"
same_loss "$dir/straight" "$dir/out"
check $? resumed_on_3_processes_with_the_same_loss

rm -rf "$dir/run"
build/train_gpt $small --steps 24 --ranks 2 --strategy full --save "$dir/run" --every 1 >"$dir/killed" 2>"$dir/log" &
pid=$!
for turn in $(seq 400); do
    [ ! -f "$dir/run/latest" ] || break
    sleep 0.01
done
kill -9 $pid 2>/dev/null
wait $pid 2>/dev/null
build/train_gpt $small --ranks 2 --strategy full --save "$dir/run" --resume >"$dir/out" 2>"$dir/log"
same_weights "$dir/straight" "$dir/out"
check $? killed_and_resumed_with_the_same_bits

# What each rank keeps of its own goes on as well: residuals, velocities, warm starts, rounds half made.
for how in "--compress topk:0.05:stage=5 --optimizer sgd" "--compress topk:0.05:dense --optimizer sgd" \
    "--compress powersgd:2:dense:start=8" "--aggregator ps --compress int8" \
    "--compress topk:0.05:dense:adam:start=5" "--aggregator all-reduce --compress topk:0.05" "--local-steps 4 --outer-warmup 2" "--local-steps 4 --aggregator ps --compress int8"; do
    build/train_gpt $small --steps 12 --ranks 3 $how >"$dir/whole" 2>"$dir/log"
    rm -rf "$dir/own"
    build/train_gpt $small --steps 12 --ranks 3 $how --save "$dir/own" --every 3 --until 7 >"$dir/first" 2>"$dir/log"
    build/dtrun -n 3 --no-prefix build/train_gpt $small --steps 12 $how --save "$dir/own" --resume >"$dir/out" 2>"$dir/log"
    same_weights "$dir/whole" "$dir/out" && ! same_weights "$dir/whole" "$dir/first"
    check $? "stopped_and_resumed_with_the_same_bits: $how"
done
build/train_gpt $small --steps 12 --ranks 2 $how --save "$dir/own" --resume >"$dir/out" 2>"$dir/log"
[ $? -ne 0 ] && grep -q "of 3 ranks and the program's state differ" "$dir/log"
check $? rounds_are_not_resumed_on_other_ranks

build/train_gpt $small --ranks 2 --resume --save "$dir/run" --steps 26 >"$dir/out" 2>"$dir/log" &&
    [ "$(awk 'END { print NR }' "$dir/csv")" -eq 3 ]
check $? a_run_is_lengthened
build/train_gpt $small --ranks 2 --resume --save "$dir/run" --steps 25 >"$dir/out" 2>"$dir/log"
[ $? -ne 0 ] && grep -q 'it is of step 26, and "losses" has room for 25 steps' "$dir/log"
check $? a_run_is_not_shortened
build/train_gpt $small --resume >"$dir/out" 2>"$dir/log"
[ $? -ne 0 ] && grep -q "needs --save" "$dir/log"
check $? resuming_from_nowhere_is_refused
build/train_gpt $small --resume --save "$dir/empty" >"$dir/out" 2>"$dir/log"
[ $? -ne 0 ] && grep -q "holds no checkpoint that is whole" "$dir/log"
check $? resuming_from_an_empty_directory_is_refused
build/train_gpt $small --steps 26 --width 64 --ranks 2 --resume --save "$dir/run" >"$dir/out" 2>"$dir/log"
[ $? -ne 0 ] && grep -q "of another shape" "$dir/log"
check $? resuming_another_model_is_refused
checked
