#!/bin/sh
# The tests of what not every machine has, whole, on a machine that is told to have none of it: programs with emulated
# GPUs, vector kernels, reserved pages, unix sockets or IPv6. Takes them from build/tests.
cd "$(dirname "$0")/../.." || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DTRAIN_WITHOUT=all
grep -lE 'cuda_(device|processes|buffers)\.h|dtrain__(pages|isa|(os_)?without)|scene_has_unix' tests/*/test_*.c |
    sed 's,^tests/.*/\(.*\)\.c$,build/tests/\1,' |
    xargs -n 1 -P "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" sh tests/support/run.sh build/tests >"$log"
while read -r name sums; do
    case $sums in
    *" 0 failed") ;;
    *) echo "$name: $sums"; grep -v '^ok ' "build/tests/$name.log" | head -20 ;;
    esac
done <"$log"
awk '{ good += $2; bad += $4 } END { printf "%d passed, %d failed\n", good, bad; exit bad > 0 || good == 0 }' "$log"
