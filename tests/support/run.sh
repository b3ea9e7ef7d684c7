#!/bin/sh
# Runs tests, a few at a time, each of which ends with "N passed, N failed": programs of a directory and scripts. Prints a
# line a test as it ends, then the output of those that failed, then how to run each of them again, then the sums.
#   sh tests/support/run.sh DIR [TEST...]    without tests: all programs of tests/ and, for build/tests, tests/*/test_*.sh
# T=NAME in the environment takes the tests whose name contains it, LEAVE_OUT=FILE those that the file does not list.
#
# A test fails late if nothing but a deadline ended it: its limit, LIMIT seconds, or what "N by a deadline" right before its
# sums counts. Up to TRIES tests (3) that failed late run once more, alone, at the end. If more did, "N by a deadline" stands
# before the sums here as well. Deadlines grow with the machine's load.
dir=$1
processors=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
most=$((processors + 2)) # at a time, as many tests sleep

# Its output goes to $dir/NAME.log, its line to $dir/NAME.line, and if it failed late, what it said first to $dir/NAME.late.
one() { # test
    name=$(basename "$1")
    log=$dir/$name.log
    rm -f "$dir/$name.late"
    load=$(LC_ALL=C uptime | sed 's/.*load average[s]*: *\([0-9]*\).*/\1/')
    slow=$((1 + ${load:-0} / (2 * most)))
    [ $slow -gt "${TEST_SLOW:-1}" ] || slow=${TEST_SLOW:-1}
    limit=$((${LIMIT:-900} * slow))
    case $1 in
    *.sh) set -- sh "$1" ;;
    esac
    begun=$(date +%s)
    TEST_SLOW=$slow TSAN_OPTIONS="halt_on_error=1 $TSAN_OPTIONS" timeout $limit "$@" >"$log" 2>&1
    status=$?
    seconds=$(($(date +%s) - begun))
    line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -1)
    good=${line%% passed*}
    bad=${line##*passed, }
    bad=${bad%% failed*}
    if [ -z "$line" ]; then
        good=0
        bad=1
    fi
    [ $status -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
    why=
    if [ $status -eq 124 ]; then
        why=", out of time at load $load"
        echo "out of time after $limit s at load $load" >>"$log"
        grep -aqE '^FAIL|Sanitizer|runtime error' "$log" || tail -1 "$log" >"$dir/$name.late"
    elif [ $status -eq 1 ] && [ "$bad" -gt 0 ] && tail -2 "$log" | grep -aqx "$bad by a deadline"; then
        grep -av '^ok ' "$log" | head -1 >"$dir/$name.late"
    fi
    printf '%-28s %s passed, %s failed, %s s%s\n' "$name" "$good" "$bad" "$seconds" "$why" >"$dir/$name.line"
    cat "$dir/$name.line"
}

tests() { # scripts first: those that compile take longest, and should not be alone at the end
    {
        [ "$dir" != build/tests ] || ls tests/*/test_*.sh
        for test in tests/*/test_*.c tests/fault/soak.c; do
            echo "$dir/$(basename $test .c)"
        done
    } | grep "${T:-}[^/]*$" | grep -vwFf "${LEAVE_OUT:-/dev/null}"
}

if [ "$dir" = --one ]; then
    dir=$2
    one "$3"
    exit 0
fi
[ "$dir" != build/tests ] || export LIMIT="${LIMIT:-280}"
shift
rm -f "$dir"/*.line "$dir"/*.late
if [ $# -gt 0 ]; then printf '%s\n' "$@"; else tests; fi >"$dir/list"
[ ! -s "$dir/list" ] || xargs -n 1 -P $most sh tests/support/run.sh --one "$dir" <"$dir/list"

while read -r test; do # one that was killed has no line
    name=$(basename "$test")
    [ -s "$dir/$name.line" ] || printf '%-28s 0 passed, 1 failed, ended without a word\n' "$name" | tee "$dir/$name.line"
done <"$dir/list"
failed() { # a line each: name, number of failed checks
    sed -n 's/^\([^ ]*\) .* passed, \([1-9][0-9]*\) failed.*/\1 \2/p' "$dir"/*.line 2>/dev/null
}
: >"$dir/tries"
if [ -n "$(ls "$dir"/*.late 2>/dev/null)" ] && [ "$(ls "$dir"/*.late | wc -l)" -le "${TRIES:-3}" ]; then
    for late in "$dir"/*.late; do
        name=$(basename "$late" .late)
        said=$(cat "$late")
        one "$(grep "/$name$" "$dir/list")"
        grep -q ', 0 failed' "$dir/$name.line" && rm -f "$late" && echo "second try: $name ($said)" >>"$dir/tries"
    done
fi
failed | while read -r name bad; do
    echo "$name:"
    grep -av '^ok ' "$dir/$name.log" | head -60 | sed 's/^/  /'
done
failed | while read -r name bad; do
    test=$(grep "/$name$" "$dir/list")
    case $test in
    *.sh) echo "$bad failed; again: sh $test" ;;
    *) echo "$bad failed; again: $test$(sed -n 's/^FAIL/ /p' "$dir/$name.log" | tr -s '\n ' ' ' | sed 's/ $//')" ;;
    esac
done
cat "$dir/tries"
if [ "$(failed | wc -l)" -eq "$(ls "$dir"/*.late 2>/dev/null | wc -l)" ]; then
    failed | awk '{ bad += $2 } END { if (bad > 0) print bad " by a deadline" }'
fi
cat "$dir"/*.line 2>/dev/null | sed 's/.* \([0-9]*\) passed, \([0-9]*\) failed.*/\1 \2/' |
    awk '{ good += $1; bad += $2 } END { printf "%d passed, %d failed\n", good, bad; exit bad > 0 || good == 0 }'
