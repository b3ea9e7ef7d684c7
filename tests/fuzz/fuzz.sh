#!/bin/sh
# Fuzzes the parsers of what comes from outside with libFuzzer, one target a tests/fuzz/fuzz_*.c: MINUTES each (first
# argument, default 10), or with "replay" only the inputs that are kept in tests/fuzz/corpus. A second argument names
# the targets. New inputs stay in build/fuzz until somebody keeps them:
#   build/fuzz/wire -merge=1 tests/fuzz/corpus/wire build/fuzz/found-wire
set -eu
cd "$(dirname "$0")/../.."
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
minutes=${1:-10}
targets=${2:-$(ls tests/fuzz/fuzz_*.c | sed 's|tests/fuzz/fuzz_\(.*\)\.c|\1|')}
passed=0
failed=0
if ! sh tests/support/install.sh fuzzer; then
    echo "skipped: no clang with libFuzzer, and it cannot be installed"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
# The targets link with one object of the parts that they call. Its private functions are open to them, as to tests.
flags="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -DDTRAIN_NO_DEVICE -DDTRAIN_NO_SHARD -DDTRAIN_NO_PARALLEL"
make -s test_dir=build/fuzz CC=clang test_flags="$flags -fsanitize=fuzzer-no-link" build/fuzz/dtrain.o build/fuzz/open/dtrain.h
for target in $targets; do
    log=build/fuzz/log-$target
    mkdir -p build/fuzz/found-$target tests/fuzz/corpus/$target
    words=
    [ ! -f tests/fuzz/corpus/$target.dict ] || words=-dict=tests/fuzz/corpus/$target.dict
    if [ "$minutes" = replay ]; then
        set -- -runs=0 tests/fuzz/corpus/$target
    else
        set -- -max_total_time=$((minutes * 60)) -max_len=4096 -use_value_profile=1 -print_final_stats=1 $words \
            -artifact_prefix=build/fuzz/ build/fuzz/found-$target tests/fuzz/corpus/$target
    fi
    if clang $flags -fsanitize=fuzzer -Ibuild/fuzz/open -I. -Itests/support tests/fuzz/fuzz_$target.c build/fuzz/dtrain.o \
        -o build/fuzz/$target -lpthread -lm >$log 2>&1 && build/fuzz/$target "$@" >$log 2>&1; then
        passed=$((passed + 1))
        [ "$minutes" = replay ] || tail -8 $log
    else
        failed=$((failed + 1))
        tail -40 $log
    fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
