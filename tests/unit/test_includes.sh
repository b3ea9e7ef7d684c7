#!/bin/sh
# Which combinations of parts compile follows from names and include lines; no compiler is asked. Each module includes,
# itself or through others, what defines the names with dtrain's prefix and the fields of structs that it uses. Each such
# name is defined in every set of parts that the using module is in: by a module of the set, or by its stand-in.
# tools/amalgamate proves the rest: include lines name modules that stand earlier, in parts that the module's own needs.
#
# Not seen are types, and of which struct a field is. Compilers see these in tests/unit/matrix.sh.
# A module may declare a function of a later one which includes it: then no order is right for both.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
. tests/support/check.sh
logs="$dir/log"

# Leaves in $dir/faults what is wrong with the tree in this directory.
look() {
    awk '!/^(\[|part |#|$)/ { print (FILENAME ~ /cuda/ ? "src/cuda/" : "src/") $1 }' src/order.txt src/cuda/order.txt |
        xargs awk -f "$root/tests/unit/includes.awk" src/order.txt src/cuda/order.txt >"$dir/faults"
}
none() { # kind, what holds
    ! grep "^$1 " "$dir/faults" >"$dir/log"
    check $? "$2"
}
edit() { # file of src/, program for sed
    sed "$2" "src/$1" >"$dir/edited" && cp "$dir/edited" "src/$1"
}
add() { # file of src/, line
    echo "$2" >>"src/$1"
}
found() { # what a line of the faults must have
    cp "$dir/faults" "$dir/log"
    grep -q "^$1$" "$dir/faults"
    check $? "found: $(echo "$1" | sed "s|:\[0-9\]\*||")"
}

look
awk 'END { exit !($1 > 200 && $3 > 10000 && $8 > 500) }' "$dir/faults"
check $? "there are modules, names and sets of parts: $(tail -1 "$dir/faults")"
none include "each module includes what it uses"
none part "what it uses is defined whatever else is left out"
none declared "so is what it declares"
none forward "it declares only functions of modules that include it"
none twice "a stand-in defines nothing that another module of its set defines"
none variable "each variable has a user whatever else is left out"
none undefined "each name that several modules use is one that a module defines"
none condition "no module but of MPI asks whether a part is left out, and none within a function"

# The same for a tree with a fault of each kind
mkdir "$dir/faulty" && cp -R src "$dir/faulty/" && cd "$dir/faulty" || exit 1
edit comm/halving.c '/^#include "step.c"/d'
edit loose/server.c 's|^#define DTRAIN__SERVER$|&\
#include "../shard/layout.c"|'
add loose/server.c 'int dtrain__layout_bytes = sizeof(dtrain__layout_unit);'
edit wire/no_net.c 's/int dtrain__net_has(/int dtrain__net_had(/'
add transport/no_sockets.c 'static int dtrain__membership_open(void) {}'
edit base/os_files.c '/^#include "os_windows_files.c"/d'
add base/random.c 'int dtrain__random_field(struct dtrain_comm *comm) { return comm->next_served; }'
add base/os.c 'static int dtrain__os_nowhere(void);'
add comm/step.c 'static int dtrain__recorder_start(void);'
add wire/net.c 'static int dtrain__net_alone;'
add wire/stream.c 'int dtrain__net_number = dtrain__net_alone + dtrain__net_ten;'
add base/worker.c 'static int dtrain__worker_pages; /* "/* */'
add shard/pages.c 'int dtrain__pages_own = sizeof dtrain__worker_pages + dtrain__net_ten;'
edit base/xxh64.c '$s/$/\
static int dtrain__xxh64_part(void) {\
#ifdef DTRAIN_NO_MPI\
}/'
look
found 'include src/comm/halving.c:[0-9]*: uses dtrain__step_levels of comm/step.c, which it does not include'
found 'include src/base/random.c:[0-9]*: uses .next_served of comm/group.c, which it does not include'
found 'part src/loose/server.c:[0-9]*: uses dtrain__layout_unit of shard/layout.c: undefined without SHARD PARALLEL'
found 'part src/comm/place.c:[0-9]*: uses dtrain__net_has of wire/net.c: undefined without SOCKETS'
found 'part src/base/os_files.c:[0-9]*: uses dtrain__os_open of base/os_posix_files.c base/os_windows_files.c: undefined without POSIX'
found 'twice src/transport/no_sockets.c:[0-9]*: defines dtrain__membership_open beside control/plane.c'
found 'declared src/base/os.c:[0-9]*: declares dtrain__os_nowhere, undefined with every part'
found 'forward src/comm/step.c:[0-9]*: declares dtrain__recorder_start of comm/recorder.c, which does not include it'
found 'variable src/base/worker.c:[0-9]*: dtrain__worker_pages is unused without SHARD PARALLEL'
found 'undefined src/shard/pages.c:[0-9]*: uses dtrain__net_ten, which no module defines: wire/stream.c shard/pages.c'
found 'condition src/base/xxh64.c:[0-9]*: asks in a module which parts are left out'
! grep dtrain__net_alone "$dir/faults" >"$dir/log"
check $? "a variable that another module of its part uses is none"
checked
