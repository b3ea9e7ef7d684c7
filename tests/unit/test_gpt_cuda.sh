#!/bin/sh
# Trains train_gpt_cuda with its GPUs emulated, as C: to the losses of train_gpt, and to the same weights from run to
# run, on any number of ranks, in threads and processes, on one GPU and on two. GPT_CUDA=build/train_gpt_cuda, as nvcc
# has made it: the same on GPUs, as `make test-cuda` does. Stops it and goes on, also from and with train_gpt. Ends with
# "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
make -s build/train_gpt build/dtrun build/tests/libdtrain.a >/dev/null || exit 1
dir=$(mktemp -d build/test_gpt_cuda.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log"
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
small="--layers 2 --width 32 --heads 4 --context 24 --batch 2 --lr 5e-3 --quiet --text examples/gpt.h --svg $dir/svg"

program=${GPT_CUDA:-$dir/emulated} # words of a command
steps=20 limit=60 norms=5e-6
if [ -n "${GPT_CUDA:-}" ]; then
    steps=50 limit=600 norms=5e-5 # cuBLAS adds in other orders, and what differs grows: to 1.1e-5 on an H100
    if ! $program $small --steps 1 --csv /dev/null >"$dir/log" 2>&1 && grep -q 'train_gpt_cuda: GPUs' "$dir/log"; then
        echo "skipped: $(tail -1 "$dir/log")"
        echo "0 passed, 0 failed"
        exit 0
    fi
else
    # By the line in its comment, but that the implementation of dtrain.h, which takes half a minute, is the tests' own.
    sed '/^#define DTRAIN_IMPLEMENTATION$/d' examples/train_gpt_cuda.cu >"$dir/train_gpt_cuda.cu"
    line=$(build_line examples/train_gpt_cuda.cu cc)
    printf '%s\n' "$line" | sed "s|^cc -O2|${CC:-cc} -O1 -D_DEFAULT_SOURCE $warnings -Iexamples|
        s|examples/train_gpt_cuda.cu|$dir/train_gpt_cuda.cu -x none build/tests/libdtrain.a|
        s|build/train_gpt_cuda_emulated|$dir/emulated|" >"$dir/build.sh"
    [ -n "$line" ] && sh "$dir/build.sh" >"$dir/log" 2>&1 && [ -x "$dir/emulated" ]
    check $? train_gpt_cuda_builds_as_C_by_its_own_line_without_a_warning
fi

weights() { sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$1"; }
same_weights() { [ -n "$(weights "$1")" ] && [ "$(weights "$1")" = "$(weights "$2")" ]; }
train() { # out ranks arguments...
    out=$dir/$1 ranks=$2
    shift 2
    timeout $limit $program $small --ranks $ranks --csv "$dir/csv" "$@" >"$out" 2>"$dir/log"
}
near() { # csv csv: the same losses and norms, of steps in which both learn
    paste -d, "$1" "$2" | awk -F, -v steps=$3 -v norms=$norms '
        function far(a, b, most) { return !(a - b <= most && b - a <= most) }
        NR == 2 { first = $2 }
        NR > 1 { n++; bad += $1 != $5 || far($2, $6, 1e-5) || far($4, $8, norms * $4); last = $2 }
        END { exit !(n == steps && bad == 0 && last < first - 0.5) }'
}

build/train_gpt $small --steps $steps --csv "$dir/cpu" >"$dir/cpu_out" 2>"$dir/log"
train one 1 --steps $steps && near "$dir/cpu" "$dir/csv" $steps
check $? "losses and norms of $steps steps are the CPU program's"
val() { sed -n 's/.*val_loss=\([0-9.]*\).*/\1/p' "$1"; }
awk -v a="$(val "$dir/cpu_out")" -v b="$(val "$dir/one")" 'BEGIN { exit !(a > 0 && b > 0 && a - b < 1e-4 && b - a < 1e-4) }'
check $? so_is_the_validation_loss

build/train_gpt $small --steps 4 --lr 1 --optimizer sgd --micro 3 --csv "$dir/cpu" >"$dir/log" 2>&1
train sgd 2 --steps 4 --lr 1 --optimizer sgd --micro 3 && near "$dir/cpu" "$dir/csv" 4
check $? so_are_those_of_SGD_with_three_micro_batches_on_two_ranks

train first 1 --steps 5
train again 1 --steps 5
same_weights "$dir/first" "$dir/again"
check $? two_runs_end_with_the_same_weights
for ranks in 2 4 8; do
    train ranks $ranks --steps 5
    same_weights "$dir/first" "$dir/ranks"
    check $? "$ranks threads end with the same weights"
done
train ranks 4 --steps 5 --gpus 1
same_weights "$dir/first" "$dir/ranks"
check $? four_threads_on_one_GPU_end_with_the_same_weights
for strategy in full grad hybrid; do
    train ranks 4 --steps 5 --strategy $strategy
    same_weights "$dir/first" "$dir/ranks"
    check $? "four threads end with the same weights under --strategy $strategy"
done
train ranks 4 --steps 5 --strategy full --trace "$dir/trace"
same_weights "$dir/first" "$dir/ranks" && grep -q '"name":"stream of cuda:0"' "$dir/trace" &&
    [ "$(grep -c '"backward unit [0-3]".*"tid":9' "$dir/trace")" -eq 40 ] && [ "$(tail -1 "$dir/trace")" = ']}' ]
check $? a_trace_has_the_stream_s_spans_of_two_micro_batches_and_four_units_a_step
for strategy in ddp full; do
    timeout $limit build/dtrun -n 2 $program $small --steps 5 --strategy $strategy --csv "$dir/csv" >"$dir/ranks" 2>"$dir/log"
    same_weights "$dir/first" "$dir/ranks"
    check $? "two processes end with the same weights under --strategy $strategy"
done
# Stopped after 3 steps of 6, and resumed.
going="--steps 6 --save $dir/copy --resume"
copy() { rm -rf "$dir/copy" && cp -r "$1" "$dir/copy"; }
resumed_losses() { # csv of 6 steps: its last 3 losses are those of the run that was resumed
    tail -n +5 "$1" >"$dir/last"
    tail -n +2 "$dir/csv" | paste -d, "$dir/last" - | awk -F, '
        { n++; bad += $1 != $5 || !($2 > 0 && $2 - $6 < 1e-5 && $6 - $2 < 1e-5) }
        END { exit !(n == 3 && bad == 0) }'
}

train whole 2 --steps 6 --strategy full
cp "$dir/csv" "$dir/whole_csv"
train stopped 2 --steps 6 --strategy full --save "$dir/run" --every 2 --until 3
for how in "2 full" "4 hybrid" "1 ddp"; do
    set -- $how
    copy "$dir/run"
    train resumed $1 $going --strategy $2
    same_weights "$dir/whole" "$dir/resumed" && ! same_weights "$dir/whole" "$dir/stopped" &&
        resumed_losses "$dir/whole_csv"
    check $? "resumed on $1 threads under --strategy $2 it ends with the same weights and losses"
done
copy "$dir/run"
timeout $limit build/dtrun -n 2 $program $small $going --strategy grad --csv "$dir/csv" >"$dir/resumed" 2>"$dir/log"
same_weights "$dir/whole" "$dir/resumed"
check $? so_it_does_on_two_processes
! train none 2 --steps 5 --save "$dir/copy" --resume &&
    grep -q 'it is of step 6, and "losses" has room for 5 steps' "$dir/log"
check $? a_run_is_not_shortened

cpu() { build/train_gpt $small --csv "$dir/csv" --steps 6 "$@" 2>"$dir/log"; }
copy "$dir/run"
cpu --ranks 3 --strategy grad --save "$dir/copy" --resume --until 3 >"$dir/resumed"
same_weights "$dir/stopped" "$dir/resumed"
check $? train_gpt_loads_its_weights
cpu --ranks 3 --strategy grad --save "$dir/copy" --resume >"$dir/resumed"
resumed_losses "$dir/whole_csv"
check $? train_gpt_goes_on_from_it_with_the_same_losses

cpu --ranks 1 >"$dir/whole" && cp "$dir/csv" "$dir/whole_csv"
cpu --ranks 4 --strategy full --save "$dir/cpu_run" --until 3 >"$dir/stopped"
copy "$dir/cpu_run"
train resumed 2 $going --strategy ddp --until 3
same_weights "$dir/stopped" "$dir/resumed"
check $? it_loads_the_weights_of_train_gpt
train resumed 2 $going --strategy ddp
resumed_losses "$dir/whole_csv"
check $? it_goes_on_from_train_gpt_with_the_same_losses

for how in "topk:0.05 --optimizer sgd --clip 0" "int8 --strategy hybrid --shard-size 1"; do
    train whole 2 --steps 6 --compress $how
    rm -rf "$dir/copy"
    train stopped 2 --steps 6 --compress $how --save "$dir/copy" --until 3
    timeout $limit build/dtrun -n 2 $program $small $going --compress $how --csv "$dir/csv" >"$dir/resumed" 2>"$dir/log"
    same_weights "$dir/whole" "$dir/resumed" && ! same_weights "$dir/whole" "$dir/stopped"
    check $? "what ranks left unsent is resumed: --compress $how"
done
! train none 2 $going --compress sign && grep -q 'has no kernels for the compressor sign' "$dir/log"
check $? a_compressor_that_GPUs_have_not_is_refused

! train none 1 --mesh dp=1 && grep -q 'train_gpt_cuda: flag' "$dir/log"
check $? flags_of_train_gpt_that_it_has_not_are_refused

checked
