#!/bin/sh
# Groups of devices under ThreadSanitizer: collectives in thousands of seeded interleavings, and ranks that die and devices
# that fail in every phase; with RACES=all, as make soak has it, five times as many, and kernels that wait for each
# other, of threads and of processes, works in flight and training as well. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
races=1000
[ "${RACES:-}" != all ] || races=5000
dir=build/tests-thread
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
passed=0
failed=0

run() { # program, tests of it
    DTRAIN_TEST_INTERLEAVINGS=$races TSAN_OPTIONS="halt_on_error=1 $TSAN_OPTIONS" timeout 900 "$dir/$@" >"$log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -1)
    good=${line%% passed*}
    bad=${line##*passed, }
    bad=${bad%% failed*}
    [ $status -eq 0 ] || [ "${bad:-0}" -gt 0 ] || bad=1
    [ "${bad:-0}" -eq 0 ] || { echo "$*:"; grep -v '^ok ' "$log" | head -60 | sed 's/^/  /'; }
    passed=$((passed + ${good:-0}))
    failed=$((failed + ${bad:-0}))
}

# These two have implementations of their own, and need no library.
mkdir -p "$dir"
flags="-O1 -g1 -fsanitize=thread -fno-omit-frame-pointer -w -I. -Itests/support"
${CC:-cc} $flags tests/unit/test_device_group.c -o "$dir/test_device_group" -lpthread -lm >"$log" 2>&1 &
first=$!
${CC:-cc} $flags tests/fault/test_device_group_fail.c -o "$dir/test_device_group_fail" -lpthread -lm >"$log.2" 2>&1
good=$?
wait $first || good=1
cat "$log.2" >>"$log"
rm -f "$log.2"
more="$dir/test_cuda_flags $dir/test_cuda_flags_processes $dir/test_device_async $dir/test_fsdp_device"
[ "${RACES:-}" != all ] || make SAN=thread $more >>"$log" 2>&1 || good=1
if [ $good -ne 0 ]; then
    tail -40 "$log"
    echo "0 passed, 1 failed"
    exit 1
fi
run test_device_group seeded_interleavings_give_the_cpus_bits
run test_device_group_fail
if [ "${RACES:-}" = all ]; then
    run test_cuda_flags kernels_that_begin_at_any_time_give_the_cpus_bits
    run test_cuda_flags_processes
    run test_device_async
    run test_fsdp_device
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
