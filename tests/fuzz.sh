#!/bin/sh
# Fuzzes the parsers of what comes over a connection with libFuzzer: MINUTES (first argument, default 10), or with
# "replay" only the inputs that are kept in tests/corpus. New inputs stay in build/fuzz until somebody keeps them:
#   build/fuzz/wire -merge=1 tests/corpus/wire build/fuzz/found
set -eu
minutes=${1:-10}
mkdir -p build/fuzz/found tests/corpus/wire
compile() {
    clang -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -I. tests/fuzz_wire.c \
        -o build/fuzz/wire -lpthread -lm 2>build/fuzz/log
}
if ! compile; then
    (apt-get update && apt-get install -y clang libclang-rt-14-dev) >/dev/null 2>&1 || true
    if ! compile; then
        cat build/fuzz/log
        echo "skipped: no clang with libFuzzer, and it cannot be installed"
        echo "0 passed, 0 failed, 1 skipped"
        exit 0
    fi
fi
if [ "$minutes" = replay ]; then
    build/fuzz/wire -runs=0 tests/corpus/wire >build/fuzz/log 2>&1 || { tail -40 build/fuzz/log; exit 1; }
else
    build/fuzz/wire -max_total_time=$((minutes * 60)) -max_len=4096 -use_value_profile=1 -print_final_stats=1 \
        -artifact_prefix=build/fuzz/ build/fuzz/found tests/corpus/wire >build/fuzz/log 2>&1 ||
        { tail -40 build/fuzz/log; exit 1; }
    tail -8 build/fuzz/log
fi
echo "1 passed, 0 failed"
