#!/bin/sh
# Runs every test program of a directory and, beside them, every tests/test_*.sh; each ends with "N passed, N failed".
# Scripts check builds and programs of their own, so sanitizer runs leave them out.
dir=$1

run() { # test command...; prints its line and, when it failed, its output
    name=$(basename "$1")
    log=$dir/$name.log
    TSAN_OPTIONS="halt_on_error=1 $TSAN_OPTIONS" timeout 280 "$@" >"$log" 2>&1
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
    printf '%-28s %s passed, %s failed\n' "$name" "$good" "$bad"
    if [ "$bad" -gt 0 ]; then
        [ $status -ne 124 ] || echo "  ran out of time"
        grep -v '^ok ' "$log" | head -60 | sed 's/^/  /'
    fi
}

scripts() {
    [ "$dir" = build/tests ] || return 0
    for test in tests/test_*.sh; do
        run "$test"
    done
}

scripts >"$dir/scripts" &
for test in "$dir"/test_* "$dir"/soak; do
    case $test in
    *.log) ;;
    *) run "$test" ;;
    esac
done | tee "$dir/programs"
wait
cat "$dir/scripts"
sed -n 's/^[a-z].* \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$dir/programs" "$dir/scripts" |
    awk '{ good += $1; bad += $2 } END { printf "%d passed, %d failed\n", good, bad; exit bad > 0 || good == 0 }'
