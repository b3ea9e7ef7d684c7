#!/bin/sh
# tests/support/run.sh with tests made up here: what gets a second try, and what it says of those that fail.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
dir=$(mktemp -d "${TMPDIR:-/tmp}/run.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
logs=$dir/out
unset T LEAVE_OUT LIMIT TRIES

made() { # name: a test, whose body comes from standard input
    { echo '#!/bin/sh' && cat; } >"$dir/$1"
    chmod +x "$dir/$1"
}
late() { # name: fails by a deadline, and passes when it runs again
    made "$1" <<END
[ -e "$dir/$1.ran" ] && echo "1 passed, 0 failed" && exit
: >"$dir/$1.ran"
echo "$1 waited for rank 1"
echo "FAIL waits"
echo "1 by a deadline"
echo "0 passed, 1 failed"
exit 1
END
}
run() { # names: leaves the output, and the status
    rm -f "$dir"/*.ran
    # shellcheck disable=SC2046
    sh tests/support/run.sh "$dir" $([ $# -eq 0 ] || printf "$dir/%s\n" "$@") >"$dir/out" 2>&1
    status=$?
}
ends() { # status, last line
    [ $status -eq "$1" ] && [ "$(tail -1 "$dir/out")" = "$2" ]
}
tried() { # how many second tries were right
    [ "$(grep -c '^second try: ' "$dir/out")" -eq "$1" ]
}

made good <<'END'
echo "2 passed, 0 failed"
END
made wrong <<'END'
echo "FAIL adds"
echo "1 by a deadline"
echo "0 passed, 2 failed"
exit 1
END
made crashes <<'END'
echo "1 passed, 0 failed"
kill -SEGV $$
END
made hangs <<'END'
exec sleep 60
END
made wrong_and_hangs <<'END'
echo "FAIL adds"
exec sleep 60
END
made leaks <<'END'
echo "1 by a deadline"
echo "0 passed, 1 failed"
exit 23
END
made quotes <<'END'
echo "FAIL ranks"
echo "1 by a deadline"
echo "more of a rank's log"
echo "0 passed, 1 failed"
exit 1
END
made kills_its_runner <<'END'
kill -KILL $(ps -o ppid= -p $PPID)
END
for n in 1 2 3 4; do late late$n; done

run good
ends 0 "2 passed, 0 failed" && tried 0
check $? "what passes is counted"
run good late1
ends 0 "3 passed, 0 failed" && tried 1 && grep -qx "second try: late1 (late1 waited for rank 1)" "$dir/out"
check $? "a test that a deadline ended runs again, and what it said first is shown"
run late1 late2 late3
ends 0 "3 passed, 0 failed" && tried 3
check $? "three tests run again"
run late1 late2 late3 late4
ends 1 "0 passed, 4 failed" && tried 0 && tail -2 "$dir/out" | grep -qx "4 by a deadline"
check $? "four do not, and the sums say so"
TRIES=1 run late1 late2
ends 1 "0 passed, 2 failed" && tried 0
check $? "TRIES says how many may"
run good wrong
ends 1 "2 passed, 2 failed" && tried 0 && grep -qx "2 failed; again: $dir/wrong adds" "$dir/out"
check $? "a wrong value beside a deadline gets no second try; how to run it again is shown"
run crashes
ends 1 "1 passed, 1 failed" && tried 0
check $? "neither does a crash"
run leaks quotes
ends 1 "0 passed, 2 failed" && tried 0
check $? "neither does an exit status of a sanitizer's, or a deadline that a rank's log speaks of"
LIMIT=1 run wrong_and_hangs
ends 1 "0 passed, 1 failed" && tried 0
check $? "neither does a wrong value before a hang"
run kills_its_runner
ends 1 "0 passed, 1 failed" && grep -q "^kills_its_runner .*ended without a word" "$dir/out"
check $? "a test that has no sums has failed"
LIMIT=1 run hangs
ends 1 "0 passed, 1 failed" && grep -q "^hangs .*out of time at load [0-9]" "$dir/out"
check $? "a test that hangs is out of time, and its line says the load"
T=no-such-test run
ends 1 "0 passed, 0 failed"
check $? "no test is no success"
checked
