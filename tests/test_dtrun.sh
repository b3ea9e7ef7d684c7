#!/bin/sh
# The launcher: what ranks are given, what comes out of them, and how a run ends.
set -u
dtrun=build/dtrun
work=$(mktemp -d "${TMPDIR:-/tmp}/test_dtrun.XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
check() { # name status
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $1"
    else
        failed=$((failed + 1))
        echo "FAIL $1"
        [ ! -f "$work/out" ] || sed 's/^/  /' "$work/out" | head -20
    fi
}
# A process that nobody has waited for is dead all the same.
alive() { kill -0 "$1" 2>/dev/null && ! grep -qs '^[0-9]* ([^)]*) Z' /proc/"$1"/stat; }
same() { [ "$1" = "$2" ]; }
[ -x $dtrun ] || cc -O2 -I. tools/dtrun.c -o $dtrun

$dtrun -n 3 sh -c 'echo $DTRAIN_RANK $DTRAIN_WORLD_SIZE $DTRAIN_LOCAL_RANK $DTRAIN_LOCAL_SIZE ${#DTRAIN_TOKEN} $OMP_NUM_THREADS' \
    >"$work/out" 2>&1
same "$(sort "$work/out" | tr '\n' '|')" "[0] 0 3 0 3 64 1|[1] 1 3 1 3 64 1|[2] 2 3 2 3 64 1|"
check every_rank_is_told_its_place $?

printf 'a secret of more than sixteen bytes\nsecond line\n' >"$work/token"
$dtrun -n 2 --node 1/3 --root far:1234 --token-file "$work/token" --threads 3 sh -c 'echo $DTRAIN_RANK $DTRAIN_WORLD_SIZE $DTRAIN_ROOT "$DTRAIN_TOKEN" $MKL_NUM_THREADS' \
    >"$work/out" 2>&1
same "$(sort "$work/out" | tr '\n' '|')" \
    "[2] 2 6 far:1234 a secret of more than sixteen bytes 3|[3] 3 6 far:1234 a secret of more than sixteen bytes 3|"
check hosts_count_on_from_each_other $?

OMP_NUM_THREADS=7 $dtrun -n 1 sh -c 'echo $OMP_NUM_THREADS' >"$work/out" 2>&1
same "$(cat "$work/out")" "[0] 7"
check the_users_thread_count_stays $?

$dtrun -n 4 sh -c 'i=0; while [ $i -lt 2000 ]; do echo "line of rank $DTRAIN_RANK number $i end"; i=$((i+1)); done; printf "no newline"' \
    >"$work/out" 2>&1
same "$(grep -cE '^\[([0-3])\] line of rank \1 number [0-9]+ end$' "$work/out") $(grep -cE '^\[[0-3]\] no newline$' "$work/out") $(wc -l <"$work/out" | tr -d ' ')" "8000 4 8004"
check lines_come_whole $?

$dtrun -n 1 sh -c 'head -c 200000 /dev/zero | tr "\0" x' >"$work/out" 2>&1
same "$(tr -dc x <"$work/out" | wc -c | tr -d ' ')" 200000
check a_line_longer_than_any_buffer_loses_nothing $?
rm -f "$work/out"

$dtrun -n 2 --no-prefix sh -c 'echo to stderr >&2' >"$work/empty" 2>"$work/out"
same "$(cat "$work/out")$(cat "$work/empty")" "to stderr
to stderr"
check stderr_stays_stderr $?

echo hello | $dtrun -n 2 sh -c 'cat' >"$work/out" 2>&1
same "$(cat "$work/out")" "[0] hello"
check standard_input_goes_to_rank_0 $?

$dtrun -n 3 sh -c '[ $DTRAIN_RANK != 1 ] || exit 42; sleep 30' >"$work/out" 2>&1 &
begin=$(date +%s)
wait $!
same "$?" 42 && [ $(($(date +%s) - begin)) -lt 20 ] && grep -q 'rank 1 (pid [0-9]*) exited with status 42; ending the other 2' "$work/out" &&
    grep -q 'rank 0 was killed by signal 15' "$work/out"
check the_first_failure_is_named_and_its_status_returned $?

$dtrun -n 3 --grace-ms 300 sh -c '[ $DTRAIN_RANK != 2 ] || kill -9 $$; trap "" TERM; while :; do sleep 1; done' >"$work/out" 2>&1
same "$?" 137 && grep -q 'rank 2 (pid [0-9]*) was killed by signal 9 (Killed)' "$work/out"
check a_rank_that_ignores_sigterm_is_killed $?

$dtrun -n 2 --grace-ms 500 sh -c 'trap "echo got usr1" USR1; trap "echo got term; exit 3" TERM; echo ready; while :; do sleep 0.1; done' >"$work/out" 2>&1 &
pid=$!
while [ "$(grep -c ready "$work/out")" != 2 ]; do sleep 0.05; done
kill -USR1 $pid
while [ "$(grep -c usr1 "$work/out")" != 2 ]; do sleep 0.05; done
kill -TERM $pid
wait $pid
same "$? $(grep -c 'got term' "$work/out")" "3 2"
check signals_are_passed_on $?

$dtrun -n 2 sh -c 'sleep 300 & echo $! $$; wait' >"$work/out" 2>&1 &
pid=$!
while [ "$(wc -l <"$work/out")" -lt 2 ]; do sleep 0.05; done
kill -9 $pid
wait $pid 2>/dev/null
sleep 0.5
left=0
for rank in $(awk '{ print $3 }' "$work/out"); do ! alive "$rank" || left=1; done
for grandchild in $(awk '{ print $2 }' "$work/out"); do kill "$grandchild" 2>/dev/null; done
same $left 0
check a_killed_dtrun_leaves_no_rank $?

$dtrun -n 2 --grace-ms 100 sh -c 'sleep 300 & echo $!; [ $DTRAIN_RANK = 0 ] || exit 5; wait' >"$work/out" 2>&1
sleep 0.2
left=0
for grandchild in $(awk '/^\[/ { print $2 }' "$work/out"); do ! alive "$grandchild" || left=1; done
same $left 0
check what_ranks_have_started_ends_with_them $?

TMPDIR=$work $dtrun -n 2 --unix sh -c 'echo $DTRAIN_ROOT; : >"${DTRAIN_ROOT#unix:}"' >"$work/out" 2>&1
grep -q "unix:$work/dtrun-" "$work/out" && [ -z "$(ls -d "$work"/dtrun-* 2>/dev/null)" ]
check the_private_directory_is_removed $?

TMPDIR=$work $dtrun -n 2 --unix sh -c 'echo up; sleep 30' >"$work/out" 2>&1 &
pid=$!
while [ "$(grep -c up "$work/out")" != 2 ]; do sleep 0.05; done
kill -TERM $pid
wait $pid
[ -z "$(ls -d "$work"/dtrun-* 2>/dev/null)" ]
check the_private_directory_is_removed_after_a_signal_too $?

$dtrun -n 4 build/no_such_program >"$work/out" 2>&1
same "$? $(cat "$work/out")" "127 dtrun: build/no_such_program cannot be run: No such file or directory"
check a_program_that_is_not_there_is_one_clear_line $?

bad=0
for flags in "" "-n" "-n 0 true" "-n x true" "-n 2" "-n 2 --node 2/2 true" "-n 2 --node 1 true" "-n 2 --nonsense true" \
    "-n 2 --node 0/2 true" "-n 2 --unix --root a:1 true" "-n 2 --token-file $work/none true" "-n 2000 true"; do
    $dtrun $flags >"$work/out" 2>&1
    [ $? -eq 2 ] && [ "$(wc -l <"$work/out")" -eq 1 ] || { bad=1; echo "flags: $flags"; cat "$work/out"; }
done
same $bad 0
check wrong_flags_are_one_line_and_status_2 $?

printf 'fifteen bytes..\n' >"$work/short"
$dtrun -n 1 --token-file "$work/short" true >"$work/out" 2>&1
same "$? $(grep -c '15 bytes' "$work/out")" "2 1"
check a_short_token_is_refused $?

$dtrun -n 64 sh -c 'echo $DTRAIN_RANK' >"$work/out" 2>&1
same "$(sort -u "$work/out" | wc -l | tr -d ' ')" 64
check sixty_four_ranks $?

(
    $dtrun -n 2 sh -c 'i=0; while [ $i -lt 3000 ]; do echo "a line that nobody reads $i" || exit 9; i=$((i+1)); done; exit 0' 2>"$work/out"
    echo $? >"$work/status"
) | head -1 >/dev/null
same "$(cat "$work/status")" 0
check a_reader_that_goes_away_ends_nobody $?

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
