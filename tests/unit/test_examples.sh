#!/bin/sh
# Builds each example by the build line in its own top comment, runs it, and checks what it prints; the README's
# program and the manual's snippets as well. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
dir=$(mktemp -d build/test_examples.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
. tests/support/check.sh
logs="$dir/log"

# Make builds a program by the line in its comment, so that what runs here is what that line gives, and the line forbids
# contraction, so that it gives the same on every machine.
by_its_line() { # source
    name=$(basename "$1")
    line=$(build_line "$1" cc)
    made=$(CFLAGS=-O2 make -n -B CC=cc "build/${name%.c}" 2>/dev/null | tail -1)
    printf '%s says:  %s\nmake builds it by:   %s\n' "$1" "$line" "$made" >"$dir/log"
    [ "$line" = "$made" ] && echo "$line" | grep -q ' -ffp-contract=off '
}

build_example() { # name; leaves it in $dir
    make -s "build/$1" >"$dir/log" 2>&1 && cp "build/$1" "$dir/" && compile_example "$1"
}

# What the compiler says is asked of the example's own code, at its own flags; tests/unit/matrix.sh asks it of the
# implementation.
compile_example() { # name
    by_its_line examples/$1.c || return 1
    sed '/^#define DTRAIN_IMPLEMENTATION$/d; /^#define DTRAIN_API static$/d' "examples/$1.c" >"$dir/$1.c"
    build_line "examples/$1.c" cc | sed "s|^cc |${CC:-cc} -D_DEFAULT_SOURCE $warnings -Iexamples -c |
        s|examples/$1.c|$dir/$1.c|; s|-o .*|-o $dir/$1.o|" >"$dir/build.sh"
    sh "$dir/build.sh" >"$dir/log" 2>&1
}

run() { # name arguments; its output is in $dir/out
    timeout 60 "$dir/$@" >"$dir/out" 2>"$dir/log" || return 1
    cat "$dir/out" >>"$dir/log"
}

prints_its_comment() {
    bottom_comment "examples/$1".c* | cmp -s - "$dir/out"
}

try() { # what command...; a fact about the last run
    what=$1
    shift
    "$@" >/dev/null
    check $? "$what"
}

for example in ddp zero1 fsdp checkpoint async_loop mesh local_sgd compress custom_transport; do # test_ranks.sh runs them
    compile_example $example
    check $? "$example has the line that make builds it by, and no warning"
done
for example in quickstart train_mlp frame_loop survive robot_swarm parameter_server train_gpt slow_link; do
    build_example $example
    check $? "$example builds by its own line without a warning"
done

for tool in tools/*.c; do
    by_its_line $tool
    check $? "$tool has the line that make builds it by"
done
try "quickstart runs" run quickstart
try "quickstart prints what its last comment says" prints_its_comment quickstart
try "train_mlp runs on 1 rank" run train_mlp 1
cp "$dir/out" "$dir/one"
try "train_mlp learns on 1 rank" awk '/^step/ { last = $4 } END { exit !(NR >= 4 && last < 0.2) }' "$dir/one"
try "train_mlp runs on 3 ranks" run train_mlp 3
try "train_mlp learns on 3 ranks" awk '/^step/ { last = $4 } END { exit !(NR >= 4 && last < 0.2) }' "$dir/out"
try "frame_loop runs" run frame_loop
try "frame_loop completes all-reduces on both ranks" awk '{ for (i = 2; i <= NF; i++) if ($i ~ /^all-reduces/ && $(i - 1) >= 10) good++ } END { exit good != 2 }' "$dir/out"
try "frame_loop: rank 0 trains on after rank 1 has quit" awk '{ for (i = 2; i <= NF; i++) if ($i ~ /^all-reduces/) n[NR] = $(i - 1) } END { exit !(NR == 2 && n[1] >= n[2] + 5) }' "$dir/out"
make -s build/dtrun >/dev/null 2>&1
try "parameter_server runs" run parameter_server
learned() { awk '/synchronous/ { rows++; good += $(NF - 1) <= 4 && $(NF - 2) < 0.15 } END { exit rows != 4 || good != 4 }' "$1"; }
try "parameter_server learns in every form, within its bound" learned "$dir/out"
timeout 60 build/dtrun -n 4 --no-prefix "$dir/parameter_server" >"$dir/out" 2>"$dir/log"
try "parameter_server learns on four processes" learned "$dir/out"
try "robot_swarm: the others go on without the robot that dies" run robot_swarm
try "robot_swarm: a round took the slow robot along, and none waited for it always" \
    awk '/robots ..2/ { with++ } /robots ..-/ { without++ } END { exit !(with > 0 && without > 0) }' "$dir/out"
try "robot_swarm: the survivors end with the same weights" grep -q '^3 robots end with the same weights' "$dir/out"
try "train_gpt runs" run train_gpt --ranks 2 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 \
    --quiet --csv "$dir/gpt.csv" --svg "$dir/gpt.svg"
try "train_gpt prints its result" grep -q '^result weights_sha256=[0-9a-f]\{64\} loss=' "$dir/out"
try "train_gpt writes one CSV line a step" awk 'END { exit NR != 4 }' "$dir/gpt.csv"

run train_gpt --ranks 3 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 6 --steps 7 --local-steps 3 \
    --quiet --csv "$dir/gpt.csv" --svg "$dir/gpt.svg"
try "train_gpt trains locally" grep -q '^3 rounds of 3 steps: ' "$dir/out"
grep -o 'sha256=[0-9a-f]*' "$dir/out" >"$dir/other"
run train_gpt --ranks 3 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 6 --steps 7 --local-steps 3 \
    --aggregator ps --quiet --csv "$dir/gpt.csv" --svg "$dir/gpt.svg"
try "train_gpt trains locally through a server, to the same weights" \
    test "$(grep -o 'sha256=[0-9a-f]*' "$dir/out")" = "$(cat "$dir/other")"
for kind in topk:0.05 topk:0.05:nofeedback int8 powersgd:2; do
    try "train_gpt runs with --compress $kind" run train_gpt --ranks 2 --layers 1 --width 32 --heads 2 --context 16 \
        --batch 2 --micro 4 --steps 3 --csv "$dir/gpt.csv" --svg "$dir/gpt.svg" --compress $kind
    try "train_gpt says what --compress $kind sent" grep -q "^gradients with --compress $kind: .* MiB sent" "$dir/out"
    try "train_gpt writes it into its CSV file" awk -F, 'NR > 1 && $5 > 2 * $6 && $6 > 0 { n++ } END { exit n != 3 }' "$dir/gpt.csv"
done
tiny="--ranks 2 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 --csv $dir/gpt.csv --svg $dir/gpt.svg"
run train_gpt $tiny --compress topk:0.001:stage=1
try "train_gpt's top-k follows its schedule" \
    awk -F, 'NR > 1 { n += NR == 2 ? $6 < $5 : $6 < before / 2; before = $6 } END { exit n != 3 }' "$dir/gpt.csv"
run train_gpt $tiny --compress powersgd:1:dense:start=2
try "train_gpt's PowerSGD starts at its step" awk -F, 'NR > 1 { n += ($6 < $5) == (NR > 3) } END { exit n != 3 }' "$dir/gpt.csv"
sent=$(tail -1 "$dir/gpt.csv" | cut -d, -f6)
run train_gpt $tiny --compress sign:adam:start=1
try "train_gpt sends momenta once v is frozen" awk -F, 'NR > 1 { n += ($6 < $5) == (NR > 2) } END { exit n != 3 }' "$dir/gpt.csv"
run train_gpt $tiny --compress powersgd:1
try "train_gpt sends dense embeddings whole" test "$sent" -gt "$(tail -1 "$dir/gpt.csv" | cut -d, -f6)"
for bad in topk:0.1:stage=0 topk:0.1:start=1x int8:stage=5 topk:0.1:start=5,dense; do
    "$dir/train_gpt" $tiny --compress $bad >"$dir/out" 2>"$dir/log"
    try "train_gpt refuses --compress $bad" grep -q "ends in what is unknown; :nofeedback, :dense, :start=N" "$dir/log"
done
tools/loss_table --layers 1 --width 16 --heads 2 --context 8 --batch 1 --micro 4 --steps 2 >"$dir/out" 2>"$dir/log"
try "the table of losses has thirteen rows" awk '$(NF - 4) > 0 { n++ } END { exit n != 13 }' "$dir/out"
run train_gpt --ranks 2 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 --aggregator ps \
    --compress int8 --csv "$dir/gpt.csv" --svg "$dir/gpt.svg" --trace "$dir/gpt.trace"
try "train_gpt writes what its parameter server sent into its CSV file" \
    awk -F, 'NR > 1 && $5 > 3 * $6 && $6 > 0 { n++ } END { exit n != 3 }' "$dir/gpt.csv"
try "train_gpt writes it into its trace" \
    awk '/reduce all units.*"sent_bytes":[1-9]/ { n++ } END { exit n != 3 }' "$dir/gpt.trace"
run train_gpt --ranks 2 --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 \
    --csv "$dir/gpt.csv" --svg "$dir/gpt.svg" --compress powersgd:2
timeout 60 build/dtrun -n 2 "$dir/train_gpt" --layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 4 --steps 3 \
    --csv "$dir/gpt.csv" --svg "$dir/gpt.svg" --compress powersgd:2 >"$dir/other" 2>"$dir/log"
check $? "train_gpt compresses on processes"
try "train_gpt has the same weights compressed on threads and processes" \
    test "$(grep -o 'sha256=[0-9a-f]*' "$dir/out")" = "$(grep -o 'sha256=[0-9a-f]*' "$dir/other")"
try "slow_link runs" run slow_link --steps 2 --mbit 1000 --ranks 2 --layers 1 --width 32
try "slow_link compares nine ways" awk 'NR > 2 && $2 > 0 && $5 > 0 { n++ } END { exit n != 9 }' "$dir/out"

# The same weights on threads, TCP and unix sockets; and a rank that is killed in mid-run.
small="--layers 1 --width 32 --heads 2 --context 16 --batch 2 --micro 8 --steps 5 --quiet --csv $dir/gpt.csv --svg $dir/gpt.svg"
weights() { sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$1"; }
for ranks in 1 2 3 4 8; do
    run train_gpt --ranks $ranks $small
    weights "$dir/out" >"$dir/threads"
    for wire in "" --unix; do
        timeout 60 build/dtrun -n $ranks $wire "$dir/train_gpt" $small >"$dir/out" 2>"$dir/log"
        weights "$dir/out" >"$dir/processes"
        [ -s "$dir/threads" ] && cmp -s "$dir/threads" "$dir/processes"
        check $? "train_gpt has the same weights on $ranks threads and processes $wire"
    done
done
run train_gpt --ranks 4 $small
weights "$dir/out" >"$dir/threads"
for strategy in full grad "hybrid --shard-size 2"; do
    timeout 60 build/dtrun -n 4 "$dir/train_gpt" $small --strategy $strategy >"$dir/out" 2>"$dir/log"
    weights "$dir/out" >"$dir/processes"
    [ -s "$dir/threads" ] && cmp -s "$dir/threads" "$dir/processes"
    check $? "train_gpt has the same weights under --strategy $strategy on 4 processes"
done
for ranks in 3 10; do # with micro-batches for 8
    run train_gpt --ranks $ranks $small --aggregator all-reduce
    weights "$dir/out" >"$dir/threads"
    run train_gpt --ranks $ranks $small --aggregator ps
    weights "$dir/out" >"$dir/processes"
    [ -s "$dir/threads" ] && cmp -s "$dir/threads" "$dir/processes"
    check $? "train_gpt has the same weights by all-reduce and parameter server on $ranks threads"
done
timeout 60 build/dtrun -n 4 sh -c '[ $DTRAIN_RANK != 2 ] || (sleep 1; kill -9 $$) & exec "$@"' sh "$dir/train_gpt" \
    --layers 1 --width 32 --heads 2 --context 16 --steps 1000000 --quiet --csv "$dir/gpt.csv" --svg "$dir/gpt.svg" \
    >"$dir/out" 2>"$dir/log"
[ $? -eq 137 ] && grep -q 'dtrun: rank 2 (pid [0-9]*) was killed by signal 9 (Killed)' "$dir/log" &&
    [ "$(grep -c 'ERR_PEER_LOST.*rank 2 (\(rank 2 of the world, \)*pid [0-9]* (train_gpt) on .*is lost' "$dir/log")" -eq 3 ] &&
    [ "$(grep -c 'dtrun: rank [013] (pid [0-9]*) exited with status 1' "$dir/log")" -eq 3 ]
check $? "a killed rank of train_gpt is named by the other three, which exit, and by dtrun"

# A rank of survive that is killed between two units, and one when gradients are complete on every rank.
for death in backward barrier; do
    timeout 120 build/dtrun -n 4 --no-prefix --survivors "$dir/survive" $death >"$dir/out" 2>"$dir/log"
    [ $? -eq 137 ] && [ "$(grep -c 'dtrun: rank [012] (pid [0-9]*) exited with status 0' "$dir/log")" -eq 3 ]
    check $? "survive: three of four ranks end well when the fourth is killed in $death"
    cat "$dir/out" >>"$dir/log"
    step=199
    [ $death = backward ] || step=200
    grep -q "^state of step $step: \([0-9a-f]*\), without the loss \1: the same$" "$dir/out" &&
        grep -q '^ERR_PEER_LOST in step 200: 3 of 4 ranks go on$' "$dir/out"
    check $? "survive: after $death the state is that of step $step"
    awk '/^step/ { if (!/on 3 ranks/) before = $NF; else { after = $NF; first = first == "" ? after : first } }
         END { exit !(first < before * 1.05 && after < 0.9 * before) }' "$dir/out"
    check $? "survive: after $death the loss goes on falling from where it was"
done

# Examples for nvcc: make builds each by its line, but for the GPUs that it makes code for. device_reduce as C, its GPU
# emulated, prints what its last comment says; tests/unit/test_gpt_cuda.sh runs the other.
for example in device_reduce train_gpt_cuda; do
    line=$(build_line examples/$example.cu nvcc | sed 's|-arch=[^ ]* ||')
    made=$(make -n -B NVCC=nvcc build/$example 2>/dev/null | tail -1 | sed 's|-gencode=[^ ]* *||g' | tr -s ' ')
    printf 'examples/%s.cu says:  %s\nmake builds it by:   %s\n' $example "$line" "$made" >"$dir/log"
    [ -n "$line" ] && [ "$line" = "$made" ]
    check $? "$example's own line is that of make"
done
make -s build/tests/libdtrain.a >"$dir/log" 2>&1
sed '/^#define DTRAIN_IMPLEMENTATION$/d' examples/device_reduce.cu >"$dir/device_reduce.c"
${CC:-cc} -O1 -D_DEFAULT_SOURCE -DDTRAIN_CUDA_EMULATE -I. "$dir/device_reduce.c" build/tests/libdtrain.a -o "$dir/device_reduce" -lpthread -lm >"$dir/log" 2>&1
check $? "device_reduce builds as C with its GPU emulated"
try "device_reduce runs" run device_reduce
try "device_reduce prints what its last comment says" prints_its_comment device_reduce

sed -n '/^```c$/,/^```$/p' README.md | sed '1d;/^```$/,$d' >"$dir/readme.c"
awk '/^#define DTRAIN_API/ { on = 1 } on && /^\/\*/ { on = 0 } on' examples/quickstart.c | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' >"$dir/quick.c"
[ -s "$dir/readme.c" ] && cmp "$dir/readme.c" "$dir/quick.c" >"$dir/log" 2>&1
check $? "the README's program is examples/quickstart.c"
grep -q "^    \$ $(build_line examples/quickstart.c cc) && build/quickstart\$" README.md
check $? "the README builds it by its own line"

sed '/^#define DTRAIN_IMPLEMENTATION$/d' tests/unit/snippets.c >"$dir/snippets.c"
for compiler in gcc clang; do
    command -v $compiler >/dev/null 2>&1 || continue
    for language in "-std=c99" "-x c++ -std=c++11"; do
        $compiler $language -O0 -D_DEFAULT_SOURCE $warnings -I. "$dir/snippets.c" -x none build/tests/libdtrain.a -o "$dir/snippets" -lpthread -lm >"$dir/log" 2>&1 &&
            run snippets "$dir/s" && rm -rf "$dir"/s.* && tail -1 "$dir/out" | grep -q '^[1-9][0-9]* passed, 0 failed$'
        check $? "the manual's snippets compile and run: $compiler $language"
        $compiler $language -fsyntax-only -D_DEFAULT_SOURCE $warnings -I. -Itests/support tests/unit/test_snippets_parts.c >"$dir/log" 2>&1
        check $? "the snippets of the section manuals compile: $compiler $language"
    done
done
# Lines of code in the manual between two headings, without what stands beside them.
manual() { cat src/manual/manual.h src/manual/guide.h | sed -n "/^ \* $1/,/^ \* $2/p" | sed -n 's/^ \*     *\([^ .].*\)/\1/p' | sed 's/   .*//'; }
stands() { # heading, next heading, the most lines
    manual "$1" "$2" >"$dir/lines"
    sed 's/^ *//' tests/unit/snippets.c >"$dir/stripped"
    [ -s "$dir/lines" ] && [ "$(wc -l <"$dir/lines")" -le "$3" ] || return 1
    while IFS= read -r line; do
        grep -qF -- "$line" "$dir/stripped" || { echo "not in tests/unit/snippets.c: $line" >"$dir/log"; return 1; }
    done <"$dir/lines"
}
stands 'OPTIMIZER STATE SHARDED' 'REDUCED DURING' 11 # and 7: 2 to include it, 3 of the world, rank and ranks, the rank's examples
check $? "the manual shards optimizer state in 18 lines, which the snippets have"
stands 'FULLY SHARDED, ON' 'ON GPUS' 18 # and 4: the names of arrays
check $? "the manual shards arrays of a trainer's in 22 lines, which the snippets have"
timeout 60 build/dtrun -n 3 "$dir/snippets" >"$dir/out" 2>"$dir/log"
check $? "the manual's snippets run on three processes"

checked
