#!/bin/sh
# What all programs of tools/ share: a help of one screen, status 2 for a wrong command line, and a progress line that
# only a terminal gets. Each tool's own test checks its own flags. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL BENCH_FILE # a make of its own, also below make
dir=$(mktemp -d "${TMPDIR:-/tmp}/test_tools.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/out $dir/err"
tools="bench dtrace dtrun plan safetensors"

# `make test` does not build bench and plan: here -O0 is enough for them.
for tool in $tools; do
    if make -q "build/$tool" 2>"$dir/err"; then
        ln -s "$PWD/build/$tool" "$dir/$tool"
    else
        ${CC:-cc} -O0 -I. "tools/$tool.c" -o "$dir/$tool" -lpthread -lm >"$dir/$tool.log" 2>&1 &
    fi
done
wait
cat "$dir"/*.log >"$dir/out" 2>/dev/null
cd "$dir" || exit 1

for tool in $tools; do
    for flag in --help -h; do
        ./$tool $flag >out 2>err
        [ "$? $(wc -c <err)" = "0 0" ]
        check $? "$tool $flag is status 0 and silent on standard error"
        [ "$(awk 'length > 80 || NR > 24 || /\t/ { bad = 1 } END { print (NR > 3 && !bad) }' out)" = 1 ]
        check $? "$tool $flag fits 24 lines of 80 columns"
        grep -q "^usage: $tool " out && grep -q "^  [A-Z_= a-z]*$tool [^ ]* [^ ]" out && grep -q 'Exit status\|127: ' out
        check $? "$tool $flag shows the usage, an example and the exit status"
    done
done
./bench gemm --help >out && ./safetensors ls a --help >err && ./plan --ranks 2 --help >results
[ $? -eq 0 ] && grep -q '^usage: bench' out && grep -q '^usage: safetensors' err && grep -q '^usage: plan' results
check $? "--help may follow other arguments"
ops=$(sed -n '/bench_names\[BENCH_OPS\]/,/};/p' "$OLDPWD/tools/bench.c" | grep -o '"[a-z0-9_]*"' | tr -d '"')
./bench --help >out
bad=
for word in $ops ranks runs huge bytes size count chunk pin layers width work steps sleep micro chunks transport strategy \
    against algorithm schedule ratio; do
    grep -qw "$word" out || bad="$bad $word"
done
[ -z "$bad" ] && [ "$(echo $ops | wc -w)" -ge 30 ]
check $? "bench --help lists every operation and key$bad"
for flag in --node --root --unix --token-file --grace-ms --threads --no-prefix --survivors; do
    ./dtrun --help | grep -q "^  $flag"
    check $? "dtrun --help lists $flag"
done
for command in ls cat diff verify merge split convert export --size --dtype --saturate --optimizer; do
    ./safetensors --help | grep -q "^  $command "
    check $? "safetensors --help lists $command"
done
# The options of a text, without those of the example that starts a program, and the commands that it lists.
words_of() { grep -v train_gpt | grep -oE '(^|[ ([])-(n|o|-([a-z][a-z-]*)?)($|[] ,.;:])' | tr -d '][(,.;: ' | sort -u; }
commands_of() { sed -n '/^Exit status/q; s/^  \([a-z][a-z]*\) [A-Z].*/\1/p' | sort; }
for tool in dtrun dtrace safetensors; do
    page=$OLDPWD/tools/$tool.1
    ./$tool --help | words_of >out
    sed -n '/^\.SH OPTIONS/,/^\.SH EXIT/s/\\-/-/gp' "$page" | sed -n 's/^\.BI* \(-[^ ]*\).*/\1/p' | sort -u >err
    sed '/^\.SH OPTIONS/,/^\.SH EXIT/d; s/\\-/-/g' "$page" | words_of | comm -13 err - >more
    [ "$(wc -l <out)" -ge 3 ] && diff out err && [ ! -s more ]
    check $? "$tool's man page has the options of its help and no other"
    ./$tool --help | grep -q 'Exit status' && grep -q '^\.SH EXIT STATUS' "$page" && grep -q "^$tool .-" "$page"
    check $? "it has a name, and the exit status"
done
./safetensors --help | commands_of >out
sed -n '/^\.SH COMMANDS/,/^\.SH OPTIONS/s/^\.BI \([a-z]*\) .*/\1/p' "$OLDPWD/tools/safetensors.1" | sort >err
[ "$(wc -l <out)" -ge 8 ] && diff out err
check $? "the man page of safetensors has the commands of its help"
for tool in dtrun dtrace safetensors; do
    if command -v groff >/dev/null 2>&1; then
        groff -man -Tascii -ww "$OLDPWD/tools/$tool.1" >out 2>err
        [ "$? $(wc -c <err)" = "0 0" ]
        check $? "groff finds no fault in the man page of $tool"
    else
        echo "skipped: whether groff takes the man page of $tool (there is no groff)"
    fi
done
flags=$(grep -o '"--[a-z]*"' "$OLDPWD/tools/plan_flags.h" | tr -d '"' | sort -u)
./plan --help >out
bad=
for flag in $flags; do
    grep -q -e "$flag " out || bad="$bad $flag"
done
[ -z "$bad" ] && [ "$(echo $flags | wc -w)" -ge 18 ]
check $? "plan --help lists every flag$bad"

refused() { # what the error says, command line
    text=$1
    shift
    "./$@" >out 2>err </dev/null
    [ $? -eq 2 ] && [ ! -s out ] && [ "$(cat err)" = "$1: $text; see $1 --help" ]
    check $? "$* is refused with: $text"
}
refused "OPERATION: an operation is expected" bench
refused "--frob: there is no such operation" bench --frob
refused "allreduce: there is no such operation" bench allreduce
refused "ranks: key=value is expected" bench gemm ranks
refused "rank=2: there is no such key" bench gemm rank=2
refused "a_key_that_is_far_too_long=2: there is no such key" bench gemm a_key_that_is_far_too_long=2
for value in 0 65 2x "" -1 +1 0x2 99999999999999999999; do
    refused "ranks=$value: a whole number from 1 to 64 is expected" bench gemm "ranks=$value"
done
refused "runs=6: a whole number from 7 to 1001 is expected" bench gemm runs=6
for value in 0 1.1 nan 0.1x ""; do
    refused "ratio=$value: a share above 0, and at most 1, is expected" bench topk "ratio=$value"
done
refused "transport=udp: threads, tcp, unix, shm, sealed or slow is expected" bench all_reduce transport=udp
refused "transport=slow: only fsdp has it" bench all_reduce transport=slow
refused "algorithm=best: a name of DTRAIN_ALGORITHM is expected" bench all_reduce algorithm=best
refused "against=all: limit or ring is expected" bench all_reduce against=all
refused "strategy=none: full, grad, ddp or hybrid is expected" bench fsdp strategy=none
refused "schedule=zb: gpipe, 1f1b, interleaved or zb_h1 is expected" bench pipeline_bubble schedule=zb
refused "file_load: BENCH_FILE in the environment must name a safetensors file" bench file_load
refused "--ranks 0: a whole number from 1 to 1024 is expected" plan --ranks 0
refused "--ranks 12x: a whole number from 1 to 1024 is expected" plan --ranks 12x
refused "--rank: there is no such flag" plan --rank 4
refused "8: there is no such flag" plan 8
refused "-n 2x: a whole number from 1 to 4096 is expected" dtrun -n 2x true
refused "--frob: there is no such flag" dtrace --frob run.rank-0.json
refused "ls: one PATH is expected" safetensors ls a b

# ---- the progress line: each command takes longer than the line's delay

# 512 MiB of bytes in a hole, which diff compares one by one
header='{"w":{"dtype":"U8","shape":[536870912],"data_offsets":[0,536870912]}}'
printf "\\$(printf %o ${#header})\\000\\000\\000\\000\\000\\000\\000%s" "$header" >hole.safetensors
dd if=/dev/null of=hole.safetensors bs=1 seek=$((8 + ${#header} + 536870912)) 2>err
# receives without a send: each is searched for among all events of the other rank of its pair
for rank in 0 1 2 3 4 5 6 7; do
    awk -v rank=$rank 'BEGIN {
        printf "{\"otherData\":{\"dtrain_trace\":1,\"rank\":%d,\"world_size\":8,\"group\":0,\"monotonic_ns\":1,", rank
        printf "\"realtime_ns\":1,\"written_ns\":100000000,\"operations\":9000,\"host\":\"a\"},\"traceEvents\":["
        for (i = 0; i < 9000; i++)
            printf "%s{\"name\":\"recv\",\"ph\":\"X\",\"cat\":\"point\",\"args\":{\"call\":\"recv\",\"text\":\"recv\"," \
                "\"algorithm\":\"none\",\"status\":\"OK\",\"number\":%d,\"peer\":%d,\"called_ns\":%d,\"started_ns\":%d," \
                "\"ended_ns\":%d}}\n", i ? "," : "", i, rank % 2 ? rank - 1 : rank + 1, i, i, i + 1
        print "]}"
    }' >run.rank-$rank.json
done

seen() { # tool, pattern of the line, command: on a terminal it is drawn and erased, and the results stand alone
    tool=$1
    pattern=$2
    shift 2
    "./$tool" "$@" >out 2>err
    status=$?
    [ $status -le 1 ] && [ ! -s err ] && ! grep -q "$(printf '\r')" out
    check $? "$tool $* draws no progress line into a file"
    if ! script -qec true /dev/null >/dev/null 2>&1; then
        echo "skipped: no script(1) of util-linux here: the progress line of $tool is not looked at"
        return
    fi
    script -qec "./$tool $* >results" typescript >out 2>&1 </dev/null
    tr '\r' '\n' <out >err
    grep -q "^$tool: $pattern" err
    check $? "$tool $* draws its progress line on a terminal"
    ! grep -v "^$tool: \|^ *\$" err && tail -n 1 err | grep -q '^  *$' && [ "$(awk 'length > 79' err)" = "" ]
    check $? "$tool $* erases it at the end"
    ! grep -q "$tool: $pattern" results
    check $? "$tool $* keeps it out of the results"
}
seen bench 'gemm, run [0-9]* of 7' gemm size=512 runs=7
seen bench 'all_reduce, run [0-9]* of 7' all_reduce transport=unix runs=7
seen plan 'measuring copies, 1 of 6' --measure
seen safetensors 'compared [0-9]* % of 536.9 MB' diff hole.safetensors hole.safetensors
seen dtrace 'matching messages, file [1-8] of 8' run.rank-0.json run.rank-1.json run.rank-2.json run.rank-3.json \
    run.rank-4.json run.rank-5.json run.rank-6.json run.rank-7.json

checked
