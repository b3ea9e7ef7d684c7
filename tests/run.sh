#!/bin/sh
# Runs every test program of a directory and every tests/test_*.sh; each ends with "N passed, N failed".
# Scripts check builds and programs of their own, so sanitizer runs leave them out.
dir=$1
passed=0
failed=0
log=$dir/log
for test in "$dir"/test_* "$dir"/soak tests/test_*.sh; do
    [ -f "$test" ] || continue
    case $test in
    *.sh) [ "$dir" = build/tests ] || continue; command="sh $test" ;;
    *) command=$test ;;
    esac
    TSAN_OPTIONS="halt_on_error=1 $TSAN_OPTIONS" timeout 280 $command >"$log" 2>&1
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
    printf '%-28s %s passed, %s failed\n' "$(basename "$test")" "$good" "$bad"
    if [ "$bad" -gt 0 ]; then
        [ $status -ne 124 ] || echo "  ran out of time"
        grep -v '^ok ' "$log" | head -60 | sed 's/^/  /'
    fi
    passed=$((passed + good))
    failed=$((failed + bad))
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
