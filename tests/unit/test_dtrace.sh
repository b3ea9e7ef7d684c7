#!/bin/sh
# Merges the traces of real runs, one with a slow rank, one whose ranks call different things, one in which a rank calls
# nothing; then gives dtrace files that are cut, corrupted, of another run or none at all, under sanitizers where the
# compiler has them.
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d "${TMPDIR:-/tmp}/dtrace.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
CC=${CC:-cc}
passed=0
failed=0

verdict() { # what, 0 or not
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $1"
        [ -z "$3" ] || sed 's/^/  /' "$3"
    fi
}

says() { # what, file, extended regular expression
    grep -Eq "$3" "$2"
    verdict "$1: no line is like $3" $? "$2"
}

cat >"$dir/run.c" <<'EOF'
#include "dtrain.h"
#include <stdio.h>
#include <unistd.h>
static const char *mode, *directory;

static dtrain_status train(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    float x[4] = {0};
    char path[300];
    dtrain_status status = DTRAIN_OK;
    (void)user;
    for (int i = 0; i < 10; i++) {
        if (mode[0] == 's' && rank == 1)
            usleep(40000);
        DTRAIN_IGNORE(dtrain_all_reduce(world, x, x, 4, DTRAIN_F32, DTRAIN_MEAN));
    }
    if (mode[0] == 's' && rank == 0)
        DTRAIN_IGNORE(dtrain_send(world, x, 4, DTRAIN_F32, 2));
    if (mode[0] == 's' && rank == 2)
        DTRAIN_IGNORE(dtrain_recv(world, x, 4, DTRAIN_F32, 0));
    if (mode[0] == 'd' && rank == 2)
        status = dtrain_broadcast(world, x, 4, DTRAIN_F32, 1);
    else if (mode[0] != 'm' || rank != 2)
        status = dtrain_all_reduce(world, x, x, 4, DTRAIN_F32, DTRAIN_SUM);
    else
        usleep(1500000);
    if (mode[0] != 's' && rank != 2 && status == DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (mode[0] == 'd')
        return DTRAIN_OK;
    snprintf(path, sizeof path, "%s/%s.rank-%d.json", directory, mode, rank);
    return dtrain_comm_trace(world, path);
}

int main(int argc, char **argv)
{
    dtrain_comm_desc desc = {0};
    if (argc != 3)
        return 2;
    mode = argv[1];
    directory = argv[2];
    desc.timeout_ms = mode[0] == 'm' ? 500 : 5000;
    if (mode[0] == 'd') {
        dtrain_comm *world;
        DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
        int bad = train(world, NULL) != DTRAIN_OK;
        dtrain_comm_destroy(world);
        return bad;
    }
    DTRAIN_CHECK(dtrain_run_threads(3, train, NULL, &desc));
    return 0;
}
EOF
make -s build/dtrun build/dtrace build/tests/libdtrain.a >"$dir/out" 2>&1 &&
    $CC -I. "$dir/run.c" -o "$dir/run" build/tests/libdtrain.a -lpthread -lm >"$dir/out" 2>&1 ||
    { cat "$dir/out"; echo "0 passed, 1 failed"; exit 1; }
$CC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -I. tools/dtrace.c -o "$dir/checked" -lpthread -lm \
    2>/dev/null || cp build/dtrace "$dir/checked"

"$dir/run" slow "$dir" >"$dir/out" 2>&1
verdict "the slow run ends well" $? "$dir/out"
"$dir/checked" -o "$dir/merged.json" "$dir"/slow.rank-*.json >"$dir/out" 2>&1
verdict "three files of a slow run are merged" $? "$dir/out"
says "a slow rank" "$dir/out" '^waited for:  rank 1, 0\.[2-9][0-9]* s in (9|1[0-2]) operations, of 0\.[2-9]'
says "a slow rank" "$dir/out" '^differ:      in none of 11 collectives$'
says "a slow rank" "$dir/out" '^slowest:     all_reduce #[0-9]+ \(mean, f32 x 4\) 0\.[0-9]* s, starts 0\.0[0-9]* s apart, rank 1 last$'
[ "$(grep -c '"ph":"X"' "$dir/merged.json")" -eq 35 ]
verdict "a merged file has every rank's operations" $? "$dir/merged.json"
[ "$(grep '"ph":"X"' "$dir/merged.json" | grep -c '"pid":2,"tid":0,"cat":"collective","ts":[0-9]*\.[0-9]*,"dur":')" -eq 11 ]
verdict "a merged event has its rank, group and time" $?
"$dir/checked" "$dir/merged.json" >"$dir/out" 2>&1
[ $? -eq 1 ] && grep -q 'merged.json: no otherData of a dtrain trace' "$dir/out"
verdict "a merged file is no rank's" $? "$dir/out"

DTRAIN_TRACE="$dir/different" build/dtrun -n 3 "$dir/run" different "$dir" >"$dir/log" 2>&1
verdict "the run with different calls ends well" $? "$dir/log"
"$dir/checked" "$dir"/different.rank-*.json >"$dir/out" 2>&1
verdict "its failure files are merged" $? "$dir/out"
says "different calls" "$dir/out" '^differ:      first in #11 of group 0: rank 0 called all_reduce #11 \(sum, f32 x 4\) by .*, rank 2 broadcast #11 \(f32 x 4, root 1\)'

"$dir/run" missing "$dir" >"$dir/log" 2>&1
verdict "the run with a missing call ends well" $? "$dir/log"
"$dir/checked" "$dir"/missing.rank-*.json >"$dir/out" 2>&1
says "a missing call" "$dir/out" '^in the end:  rank [01] waited for rank 2 in all_reduce #11 \(sum, f32 x 4\) \(ERR_TIMEOUT\)$'
says "a missing call" "$dir/out" '^             rank 2 ended all_reduce #10 \(mean, f32 x 4\) \(OK\) [0-9.]* s (before|after) rank [01] began to wait$'
says "a missing call" "$dir/out" '^waited for:  rank 2, (0\.9|1\.)[0-9]* s in '
says "a missing call" "$dir/out" '^differ:      first in all_reduce #11 \(sum, f32 x 4\), which rank 0 called and rank 2 had not, [0-9.]* s later$'
"$dir/checked" "$dir/missing.rank-0.json" "$dir/missing.rank-1.json" >"$dir/out" 2>&1
says "a rank without a file" "$dir/out" '^             of rank 2 there is no operation here$'

refused() { # what, text that the error must have, files...
    what=$1
    text=$2
    shift 2
    "$dir/checked" "$@" >/dev/null 2>"$dir/err"
    [ $? -eq 1 ] && grep -Fq "$text" "$dir/err"
    verdict "$what: the error should say \"$text\"" $? "$dir/err"
}
one=$dir/slow.rank-0.json
sed 's/"rank":0/"rank":7/' "$one" >"$dir/bad"
refused "a rank beyond its world" "bad: otherData has no rank" "$dir/bad"
sed 's/"dtrain_trace":1/"dtrain_trace":2/' "$one" >"$dir/bad"
refused "another format" "bad: no otherData of a dtrain trace, format 1" "$dir/bad"
sed 's/"number":3,/"number":"x",/' "$one" >"$dir/bad"
refused "a number that is none" ": a number below 2^64 was expected" "$dir/bad"
sed 's/"called_ns":[0-9]*/"called_ns":9000000000000000000/' "$one" >"$dir/bad"
refused "a time that cannot be" ": an operation without number, or with times that cannot be" "$dir/bad"
sed 's/"ended_ns":[0-9]*/"ended_ns":1/' "$one" >"$dir/bad"
refused "an end before the start" ": an operation that ends before it starts" "$dir/bad"
sed 's/"awaited":[0-9nul]*/"awaited":3/' "$one" >"$dir/bad"
refused "a rank that is not there" ": an operation with a rank that the group does not have" "$dir/bad"
printf '{"traceEvents":[]}' >"$dir/bad"
refused "a trace of another program" "bad: no otherData of a dtrain trace" "$dir/bad"
printf '[1,2]' >"$dir/bad"
refused "an array" "bad: byte 1: no object" "$dir/bad"
: >"$dir/bad"
refused "an empty file" "bad: byte 0: the text ends before a value" "$dir/bad"
refused "no file" "nowhere: No such file" "$dir/nowhere"
refused "a directory" "$(basename "$dir"): Is a directory" "$dir"
refused "a file twice" "of rank 0, as is $one" "$one" "$one"
sed 's/"world_size":3/"world_size":4/; s/"rank":0/"rank":3/' "$one" >"$dir/bad"
refused "another world size" "of 4 ranks, and $one of 3" "$one" "$dir/bad"
refused "a merged file that cannot be written" "nowhere/m: No such file" -o "$dir/nowhere/m" "$one"
misused() { # text that the error must have, arguments: status 2, one line that points to --help
    text=$1
    shift
    "$dir/checked" "$@" >"$dir/out" 2>"$dir/err"
    [ $? -eq 2 ] && [ ! -s "$dir/out" ] && [ "$(cat "$dir/err")" = "dtrace: $text; see dtrace --help" ]
    verdict "dtrace $*: the error should say \"$text\"" $? "$dir/err"
}
misused "RANK0.json: a trace for each rank is expected"
misused "RANK0.json: a trace for each rank is expected" -o "$dir/m"
misused "-o: the name of a file is expected after it" -o
misused "-x: there is no such flag" -x "$one"

bytes=$(wc -c <"$one")
bad=0
at=0
while [ $at -lt "$bytes" ]; do # every cut is an error that names a byte, or what is missing
    head -c $at "$one" >"$dir/cut"
    "$dir/checked" "$dir/cut" >/dev/null 2>"$dir/err"
    [ $? -eq 1 ] && grep -q 'cut: byte [0-9]*: ' "$dir/err" || { bad=1; echo "cut at $at:"; cat "$dir/err"; }
    at=$((at + 311))
done
verdict "files cut at any byte are refused with the place" $bad
bad=0
at=3
while [ $at -lt "$bytes" ]; do # a changed byte is an error or not, but nothing worse
    for byte in '"' '9' '\377'; do
        { head -c $at "$one"; printf "$byte"; tail -c +$((at + 2)) "$one"; } >"$dir/changed"
        "$dir/checked" -o "$dir/m" "$dir/changed" "$dir/slow.rank-1.json" >/dev/null 2>"$dir/err"
        [ $? -le 1 ] && ! grep -q 'Sanitizer\|runtime error' "$dir/err" || { bad=1; echo "byte $at:"; cat "$dir/err"; }
    done
    at=$((at + 293))
done
verdict "no changed byte does worse than an error" $bad
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
