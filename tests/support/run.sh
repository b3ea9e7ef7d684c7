#!/bin/sh
# Runs every test program of a directory and tests/*/test_*.sh, a few at a time, each of which ends with
# "N passed, N failed"; prints a line a test as it ends, then the output of those that failed, then the sums.
# Scripts check builds and programs of their own, so sanitizer runs leave them out.
dir=$1

one() { # test; its output goes to $dir/NAME.log, its line to $dir/NAME.line
    name=$(basename "$1")
    log=$dir/$name.log
    case $1 in
    *.sh) set -- sh "$1" ;;
    esac
    TSAN_OPTIONS="halt_on_error=1 $TSAN_OPTIONS" timeout "$limit" "$@" >"$log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -1)
    good=${line%% passed*}
    bad=${line##*passed, }
    bad=${bad%% failed*}
    if [ -z "$line" ]; then
        good=0
        bad=1
    fi
    [ $status -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
    [ $status -ne 124 ] || echo "out of time after $limit s" >>"$log"
    printf '%-28s %s passed, %s failed\n' "$name" "$good" "$bad" >"$dir/$name.line"
    cat "$dir/$name.line"
}

tests() { # scripts first: those that compile take longest, and should not be alone at the end
    [ "$dir" != build/tests ] || ls tests/*/test_*.sh
    for test in tests/*/test_*.c tests/fault/soak.c; do
        echo "$dir/$(basename $test .c)"
    done
}

limit=900
[ "$dir" != build/tests ] || limit=280
if [ $# -eq 2 ]; then
    one "$2"
    exit 0
fi
rm -f "$dir"/*.line
processors=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
tests | xargs -n 1 -P $((processors + 2)) sh tests/support/run.sh "$dir" # two more than processors, as many tests sleep
for line in "$dir"/*.line; do
    grep -q ', 0 failed$' "$line" && continue
    name=$(basename "$line" .line)
    echo "$name:"
    grep -v '^ok ' "$dir/$name.log" | head -60 | sed 's/^/  /'
done
sed -n 's/^[a-z].* \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$dir"/*.line |
    awk '{ good += $1; bad += $2 } END { printf "%d passed, %d failed\n", good, bad; exit bad > 0 || good == 0 }'
