#!/bin/sh
# Trains one GPT on two hosts of two ranks each. The hosts are two network namespaces with addresses of their own,
# joined by a virtual cable; on real hosts the two dtrun lines are typed on one machine each.
#
# sudo sh examples/two_hosts.sh          (make has built build/dtrun and build/train_gpt)
#
# Exits with 77 where namespaces are not permitted, and leaves no namespace behind.
set -eu
a=dtrain-a-$$
b=dtrain-b-$$
gpt="build/train_gpt --layers 2 --width 64 --context 64 --batch 2 --micro 8 --steps 30 --quiet"
work=$(mktemp -d "${TMPDIR:-/tmp}/two_hosts.XXXXXX")
gpt_a="$gpt --csv $work/a.csv --svg $work/a.svg"
gpt_one="$gpt --csv $work/1.csv --svg $work/1.svg"

clean_up() {
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

if ! ip netns add "$a" 2>/dev/null || ! ip netns add "$b" 2>/dev/null; then
    echo "network namespaces are not permitted here: nothing was run"
    exit 77
fi
ip link add va$$ netns "$a" type veth peer name vb$$ netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev va$$
ip -n "$b" addr add 10.77.0.2/24 dev vb$$
ip -n "$a" link set lo up
ip -n "$b" link set lo up
ip -n "$a" link set va$$ up
ip -n "$b" link set vb$$ up

umask 077
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$work/token"

# Host A, address 10.77.0.1, has ranks 0 and 1; host B, 10.77.0.2, ranks 2 and 3.
ip netns exec "$a" build/dtrun -n 2 --node 0/2 --root 10.77.0.1:29500 --token-file "$work/token" $gpt_a >"$work/a" &
host_a=$!
ip netns exec "$b" build/dtrun -n 2 --node 1/2 --root 10.77.0.1:29500 --token-file "$work/token" $gpt_a
wait $host_a
cat "$work/a"
$gpt_one --ranks 1 >"$work/one"

weights() { sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$1"; }
if [ -n "$(weights "$work/a")" ] && [ "$(weights "$work/a")" = "$(weights "$work/one")" ]; then
    echo "two hosts of two ranks each: the weights of one rank alone, bit for bit"
else
    echo "two hosts: other weights than one rank alone"
    exit 1
fi

# Prints, on one host:
#
# [0] result weights_sha256=28e6ec94... loss=4.054881 ...
# two hosts of two ranks each: the weights of one rank alone, bit for bit
