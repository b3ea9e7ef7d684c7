#!/bin/sh
# Two hosts as two network namespaces: examples/two_hosts.sh, where namespaces are permitted.
set -u
output=$(sh examples/two_hosts.sh 2>&1)
status=$?
case $status in
0) echo "1 passed, 0 failed" ;;
77) echo "$output"; echo "1 passed, 0 failed, 1 skipped" ;;
*) printf '%s\n' "$output"; echo "0 passed, 1 failed"; exit 1 ;;
esac
