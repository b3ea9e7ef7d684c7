#!/bin/sh
# Changes the number of ranks that each example is written for to 1, 2, 3 and 4, as its reader would, and checks that it
# ends with what does not depend on that number. tests/unit/snippets.c does the same for the manual's snippets. Ends
# with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
dir=$(mktemp -d build/test_ranks.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
make -s build/tests/libdtrain.a build/dtrun >"$dir/log" 2>&1

# The example without an implementation, which is the test library's, and with what sed changes.
build() { # name program sed-script
    sed '/^#define DTRAIN_IMPLEMENTATION$/d; /^#define DTRAIN_API static$/d' "examples/$1.c" >"$dir/plain.c"
    sed "$3" "$dir/plain.c" >"$dir/$2.c"
    if [ -n "$3" ] && [ "$ranks" != "$4" ] && cmp -s "$dir/plain.c" "$dir/$2.c"; then
        echo "examples/$1.c has no line that $3 changes" >"$dir/$2.out"
        return 1
    fi
    ${CC:-cc} -O1 -ffp-contract=off -D_DEFAULT_SOURCE -Wall -Wextra -Werror -I. -Iexamples "$dir/$2.c" build/tests/libdtrain.a \
        -o "$dir/$2" -lpthread -lm >"$dir/$2.out" 2>&1
}

start() { # program command...: in the background; its output and status are $dir/program.out and .status
    program=$1
    shift
    (timeout 60 "$@" >"$dir/$program.out" 2>"$dir/$program.err"; echo $? >"$dir/$program.status") &
}

ladder="ddp zero1 fsdp async_loop mesh local_sgd compress" # they take the number of ranks as their argument
for ranks in 1 2 3 4; do # they sleep more than they compute
    build quickstart quick$ranks "s/run_threads(4,/run_threads($ranks,/" 4 && start quick$ranks "$dir/quick$ranks"
    build custom_transport custom$ranks "s/RANKS = 4/RANKS = $ranks/" 4 && start custom$ranks "$dir/custom$ranks"
    [ $ranks -ne 1 ] || for name in $ladder checkpoint; do build $name $name "" 0 || exit 1; done
    for name in $ladder; do
        start $name$ranks "$dir/$name" $ranks
    done
    start checkpoint$ranks "$dir/checkpoint" $ranks $((ranks == 1 ? 4 : ranks / 2)) "$dir/saved$ranks"
    build frame_loop frame$ranks "s/define RANKS 2/define RANKS $ranks/; s/FRAMES 180/FRAMES 30/" 0 &&
        start frame$ranks "$dir/frame$ranks"
    build robot_swarm robots$ranks "s/ROBOTS = 4/ROBOTS = $ranks/" 4 && start robots$ranks "$dir/robots$ranks"
done
wait
for ranks in 1 2 3 4; do
    logs="$dir/quick$ranks.out $dir/quick$ranks.err"
    [ "$(cat "$dir/quick$ranks.out")" = "$ranks ranks agree: y = 3.000 x + -1.000" ]
    check $? "quickstart finds the line on $ranks ranks"
    logs="$dir/custom$ranks.out $dir/custom$ranks.err"
    [ "$(cat "$dir/custom$ranks.out")" = "$ranks processes agree: y = 3.000 a + -1.000 b" ]
    check $? "custom_transport agrees on the same weights on $ranks ranks"
    logs="$dir/frame$ranks.out $dir/frame$ranks.err"
    [ "$(awk '$5 >= 1' "$dir/frame$ranks.out" | wc -l)" -eq $ranks ] && [ "$(cat "$dir/frame$ranks.status")" -eq 0 ]
    check $? "frame_loop completes all-reduces on each of $ranks ranks"
    logs="$dir/robots$ranks.out $dir/robots$ranks.err"
    left=$((ranks < 4 ? ranks : 3)) # robot 3 dies
    grep -q "^$left robots end with the same weights, loss 0\.0" "$dir/robots$ranks.out" &&
        [ "$(cat "$dir/robots$ranks.status")" -eq 0 ]
    check $? "robot_swarm learns with $ranks robots"
done

# The losses that an example prints; on 3 ranks, whose sums have another order, cut to 4 digits.
losses() {
    grep -o 'loss [0-9.]*' "$1" | if [ $ranks -eq 3 ]; then sed 's/\(\.....\).*/\1/'; else cat; fi
}
for ranks in 1 2 3 4; do
    for name in ddp zero1 fsdp async_loop mesh checkpoint; do
        logs="$dir/$name$ranks.out $dir/$name$ranks.err"
        bottom_comment "examples/$name.c" >"$dir/comment"
        losses "$dir/comment" >"$dir/loss"
        [ -s "$dir/loss" ] && losses "$dir/$name$ranks.out" | cmp -s - "$dir/loss"
        check $? "$name has the losses of its last comment on $ranks ranks"
    done
    logs="$dir/local_sgd$ranks.out $dir/local_sgd$ranks.err"
    grep -q "^$ranks ranks, 21 rounds: loss 0\.0" "$dir/local_sgd$ranks.out"
    check $? "local_sgd learns on $ranks ranks"
    logs="$dir/compress$ranks.out $dir/compress$ranks.err"
    awk '{ good += $NF < 0.05 && (NR == 1 || $(NF - 5) * 2.5 <= dense); dense = NR == 1 ? $(NF - 5) : dense } END { exit good != 5 }' \
        "$dir/compress$ranks.out"
    check $? "compress learns by each way on $ranks ranks"
done
for name in $ladder checkpoint; do
    logs="$dir/${name}4.out $dir/${name}4.err"
    bottom_comment "examples/$name.c" | cmp -s - "$dir/${name}4.out"
    check $? "$name prints on 4 ranks what its last comment says"
    [ $name != checkpoint ] || continue
    build/dtrun -n 3 --no-prefix "$dir/$name" >"$dir/out" 2>"$dir/err"
    cmp -s "$dir/out" "$dir/${name}3.out"
    check $? "$name prints the same on 3 processes and 3 threads"
done

build train_mlp mlp "s/STEPS = 600/STEPS = 200/" 0 && ranks=0 &&
    build parameter_server server 's/run_threads(RANKS,/run_threads(atoi(getenv("RANKS")),/; s/STEPS = 600/STEPS = 200/' 4 &&
    build survive survive "s/STEPS = 400, FATAL_STEP = 200/STEPS = 40, FATAL_STEP = 20/" 0 && build train_gpt gpt "" 0 && build slow_link slow "" 0
logs="$dir/*.out"
check $? "examples that take the number of ranks from outside build"
small="--layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 --quiet --csv $dir/csv --svg $dir/svg"
for ranks in 1 2 3 4; do
    logs="$dir/mlp.out $dir/mlp.err"
    "$dir/mlp" $ranks >"$dir/mlp.out" 2>"$dir/mlp.err"
    awk '/^step 200 / { near = $4 > 0.50 && $4 < 0.53 } END { exit !near }' "$dir/mlp.out"
    check $? "train_mlp has the same losses on $ranks ranks"

    logs="$dir/server.out $dir/server.err"
    RANKS=$ranks "$dir/server" >"$dir/server.out" 2>"$dir/server.err"
    awk -v ranks=$ranks '/^synchronous/ { good += $(NF - 2) > 0.51 && $(NF - 2) < 0.516 }
        /^asynchronous/ { good += $(NF - 1) <= 4 && $(NF - 2) < 0.6 } END { exit good != (ranks > 1 ? 4 : 2) }' "$dir/server.out"
    check $? "parameter_server has the same losses in step, and learns otherwise, on $ranks ranks"

    logs="$dir/gpt.out $dir/gpt.err"
    for strategy in ddp full; do
        "$dir/gpt" --ranks $ranks $small --strategy $strategy >"$dir/gpt.out" 2>"$dir/gpt.err"
        grep -o 'weights_sha256=[0-9a-f]*' "$dir/gpt.out" >"$dir/hash"
        grep -o ' loss=[0-9.]*' "$dir/gpt.out" >"$dir/loss"
        [ $ranks$strategy != 1ddp ] || cp "$dir/hash" "$dir/hash1"
        [ $ranks$strategy != 1ddp ] || cp "$dir/loss" "$dir/loss1"
        # on 3 ranks sums round otherwise: the loss is the same to its last digit but one
        cat "$dir/loss1" "$dir/loss" | tr -d ' ' | awk -F= '{ v[NR] = $2 } END { d = v[1] - v[2]; exit !(NR == 2 && d < 2e-6 && d > -2e-6) }' &&
            { [ $ranks -eq 3 ] || cmp -s "$dir/hash" "$dir/hash1"; }
        check $? "train_gpt has the same loss, and on powers of two the same weights, on $ranks ranks of --strategy $strategy"
    done

    logs="$dir/slow.out $dir/slow.err"
    "$dir/slow" --steps 2 --mbit 1000 --latency-ms 0 --ranks $ranks --layers 1 --width 16 --context 8 --micro 4 >"$dir/slow.out" 2>"$dir/slow.err"
    awk 'NR == 3 { print $5 }' "$dir/slow.out" >"$dir/loss"
    [ $ranks != 1 ] || cp "$dir/loss" "$dir/slow1"
    [ -s "$dir/slow1" ] && cmp -s "$dir/loss" "$dir/slow1" && awk 'NR > 2 && $5 > 0 { n++ } END { exit n != 9 }' "$dir/slow.out"
    check $? "slow_link compares nine ways, with the same dense loss, on $ranks ranks"
done

logs="$dir/survive.out $dir/survive.err"
for ranks in 1 2 3; do
    build/dtrun -n $ranks "$dir/survive" >"$dir/survive.out" 2>"$dir/survive.err"
    grep -q 'survive: needs 4 or 6 processes: .*--survivors' "$dir/survive.err"
    check $? "survive says that $ranks ranks do not hold every slice twice"
done
timeout 120 build/dtrun -n 6 --no-prefix --survivors "$dir/survive" >"$dir/survive.out" 2>"$dir/survive.err"
grep -q '^state of step 19: \([0-9a-f]*\), without the loss \1: the same$' "$dir/survive.out" &&
    grep -q '^ERR_PEER_LOST in step 20: 5 of 6 ranks go on$' "$dir/survive.out" &&
    grep -q '^step 22 on 5 ranks: loss 0\.' "$dir/survive.out"
check $? "survive: five of six ranks, which do not divide the micro-batches, go on"

checked
