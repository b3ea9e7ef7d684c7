#!/bin/sh
# Two hosts as two network namespaces: examples/two_hosts.sh, where namespaces are permitted. Their connections are sealed
# by themselves, and DTRAIN_SECURE=0 turns that off.
set -u
said="connections are sealed (ChaCha20-Poly1305), as they leave the host"
output=$(sh examples/two_hosts.sh 2>&1)
status=$?
if [ $status -eq 0 ] && echo "$output" | grep -qF "$said"; then
    output=$(DTRAIN_SECURE=0 sh examples/two_hosts.sh 2>&1)
    status=$?
    echo "$output" | grep -qF "$said" && status=1
elif [ $status -eq 0 ]; then
    status=1
fi
case $status in
0) echo "1 passed, 0 failed" ;;
77) echo "$output"; echo "1 passed, 0 failed, 1 skipped" ;;
*) printf '%s\n' "$output"; echo "0 passed, 1 failed"; exit 1 ;;
esac
