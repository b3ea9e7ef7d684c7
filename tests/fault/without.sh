#!/bin/sh
# The tests of what not every machine has, whole, on a machine that is told to have none of it: programs with emulated
# GPUs, vector kernels, reserved pages, unix sockets or IPv6. Takes them from build/tests.
cd "$(dirname "$0")/../.." || exit 1
export DTRAIN_WITHOUT=all
tests=$(grep -lE 'cuda_(device|processes|buffers)\.h|dtrain__(pages|isa|(os_)?without)|scene_has_unix' tests/*/test_*.c |
    sed 's,^tests/.*/\(.*\)\.c$,build/tests/\1,')
# shellcheck disable=SC2086
[ -n "$tests" ] && sh tests/support/run.sh build/tests $tests
