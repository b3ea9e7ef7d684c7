#!/bin/sh
# The compile matrix and the amalgamation: what a user's compiler sees, and what an author's mistake meets. Asks cc, or the
# compilers that COMPILERS in the environment names.
#
# Of the sets of parts it compiles three: none of the parts, and two sets that together have every part. SAMPLE=number in
# the environment chooses these two. tests/unit/test_includes.sh proves by names that the other sets compile. MATRIX=all
# adds each part left out alone, and each compiler at -Ofast for this processor; make soak sets it.
set -u
cd "$(dirname "$0")/../.."
. tests/support/check.sh
root=$PWD
work=$(mktemp -d "${TMPDIR:-/tmp}/matrix.XXXXXX")
top=$work
trap 'rm -rf "$top"' EXIT
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"

good() { passed=$((passed + 1)); }
bad() {
    failed=$((failed + 1))
    echo "FAIL $1"
    [ -z "${2:-}" ] || head -8 "$2"
}
holds() { # name, command...
    name=$1
    shift
    if "$@" >"$work/log" 2>&1; then good; else bad "$name" "$work/log"; fi
}
fails_with() { # name, text, command...
    name=$1
    text=$2
    shift 2
    if "$@" >"$work/log" 2>&1; then bad "$name: succeeded"; elif grep -q "$text" "$work/log"; then good; else bad "$name: other text" "$work/log"; fi
}

# Everything that one compiler says. The first standard of each language is compiled to the end, as some warnings come
# from the optimizer only; the others differ in the parser.
compiler() {
    cc=$1
    work=$lane
    command -v $cc >/dev/null 2>&1 || { echo "$cc is not here: its part is skipped"; return; }
    printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$work/impl.c"
    printf '#include "dtrain.h"\nint dtrain_other(void);\nint dtrain_other(void) { return dtrain_comm_size(NULL); }\n' >"$work/plain.c"
    printf '#include "dtrain.h"\nint main(void) { return dtrain_comm_size(NULL) != 1; }\n' >"$work/user.c"
    printf '#define DTRAIN_API static\n#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\nint main(void) { return dtrain_comm_size(NULL) != 1; }\n' >"$work/static.c"
    printf '#include <stdio.h>\n#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$work/late.c"
    for std in c99 c11 c17 c++11 c++17; do
        case $std in c++*) lang="-x c++" ;; *) lang= ;; esac
        case $std in c99 | c++11) end="-c -o $work/$std.o" ;; *) end=-fsyntax-only ;; esac
        case $std in c++*) level=-O1 ;; *) level=-O2 ;; esac
        holds "$cc $std $level" $cc $lang -std=$std $level $warn -I. "$work/impl.c" $end
        holds "$cc $std plain" $cc $lang -std=$std -O2 $warn -I. -c "$work/plain.c" -o "$work/plain.o"
    done
    [ "${MATRIX:-}" != all ] ||
        holds "$cc -Ofast -march=native" $cc -Ofast -march=native $warn -I. -c "$work/impl.c" -o "$work/impl.o"
    for object in c99 c++11; do
        nm -g --defined-only "$work/$object.o" | awk '{ print $NF }' | grep -v '^dtrain_' >"$work/foreign"
        [ -s "$work/foreign" ] && bad "$cc: symbols in $object.o that are not dtrain's" "$work/foreign" || good
    done
    holds "$cc static" $cc -O0 $warn -I. -c "$work/static.c" -o "$work/static.o"
    nm -g --defined-only "$work/static.o" | awk '{ print $NF }' | grep -v '^main$' >"$work/foreign"
    [ -s "$work/foreign" ] && bad "$cc: symbols of a static API" "$work/foreign" || good
    for object in c99 c++11; do
        for lang in c c++; do
            holds "$cc: a unit of $lang uses that of $object" $cc -x $lang "$work/user.c" -I. -x none "$work/$object.o" -o "$work/two" -lpthread -lm
            holds "$cc: a unit of $lang with that of $object runs" "$work/two"
        done
    done
    fails_with "$cc included late" 'include it before any system header' $cc -std=c99 -I. -c "$work/late.c" -o "$work/late.o"
}

printf '%s\n' ${COMPILERS:-cc} >"$work/compilers"
lanes compiler <"$work/compilers"

# dtrain.h without some of its parts, as C, linked and run, and as C++. At -O1 gcc sees how a stand-in and its caller fit.
parts=$(awk '$1 == "part" { print $2 }' src/order.txt)
without() { # language, parts...
    lang=$1
    work=$lane
    shift
    name="$lang without $*"
    flags=$(printf ' -DDTRAIN_NO_%s' "$@")
    case " $* " in *" MPI "*) ;; *) flags="$flags -DDTRAIN_MPI" ;; esac
    if [ $lang = c++ ]; then
        holds "$name" ${CC:-cc} -x c++ -std=c++11 -O0 $warn $flags -I. -fsyntax-only "$top/sum.c"
    else
        holds "$name" ${CC:-cc} -std=c99 -O1 $warn $flags -I. "$top/sum.c" -o "$work/sum" -lpthread -lm
        holds "$name runs" "$work/sum"
    fi
}
cat >"$top/sum.c" <<'END'
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
static dtrain_status sum(dtrain_comm *world, void *user)
{
    float x = (float)(dtrain_comm_rank(world) + 1);
    dtrain_status status = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM);
    return status == DTRAIN_OK && x == 6.0f && user == NULL ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}
int main(void)
{
    return dtrain_run_threads(3, sum, NULL, NULL) != DTRAIN_OK;
}
END
cat >"$top/refused.c" <<'END'
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
static int refused(dtrain_status status, const char *macro)
{
    return status == DTRAIN_ERR_UNSUPPORTED && strstr(dtrain_last_error(), macro) != NULL;
}
static dtrain_status refuse(dtrain_comm *world, void *user)
{
    float x[1] = {0}, y[1] = {0};
    dtrain_fsdp *fsdp;
    dtrain_aggregator aggregator;
    dtrain_param table[1];
    dtrain_compress_desc compress;
    dtrain_fsdp_desc desc;
    dtrain_device_ops ops;
    dtrain_device device = {&ops, "a device", NULL};
    memset(&ops, 0, sizeof ops), memset(&compress, 0, sizeof compress);
    memset(table, 0, sizeof table), memset(&desc, 0, sizeof desc);
    table[0].name = "x", table[0].dtype = DTRAIN_F32, table[0].shape[0] = 1, table[0].data = x, table[0].grad = y;
    desc.strategy = DTRAIN_DDP;
    desc.compress = &compress;
    int bad = !refused(dtrain_fsdp_create(&fsdp, world, table, 1, &desc), "DTRAIN_NO_COMPRESS") || fsdp != NULL;
    bad |= !refused(dtrain_aggregator_compressed(&aggregator, world, table, 1, NULL), "DTRAIN_NO_COMPRESS");
    desc.compress = NULL;
    table[0].device = &device;
    bad |= !refused(dtrain_fsdp_create(&fsdp, world, table, 1, &desc), "DTRAIN_NO_DEVICE") || fsdp != NULL;
    table[0].device = NULL;
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, 1, &desc));
    dtrain_fsdp_destroy(fsdp);
    return bad || user != NULL ? DTRAIN_ERR_INVALID : DTRAIN_OK;
}
int main(void)
{
    dtrain_comm *world;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    static const char *const roots[] = {"unix:/tmp/nobody", "10.0.0.1:29500", "[::1]:29500"};
    for (int i = 0; i < 3; i++) {
        desc.root = roots[i];
        if (!refused(dtrain_comm_create(&world, &desc), "DTRAIN_NO_SOCKETS"))
            return 1;
    }
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
    dtrain_comm_destroy(world);
    return dtrain_run_threads(2, refuse, NULL, NULL) != DTRAIN_OK;
}
END
holds "what stands in for a part compiles" ${CC:-cc} -std=c99 -O0 $warn -DDTRAIN_NO_COMPRESS -DDTRAIN_NO_DEVICE -DDTRAIN_NO_SOCKETS -I. "$top/refused.c" -o "$work/refused" -lpthread -lm
holds "what stands in for a part names the macro" "$work/refused"
fails_with "dtrain_cuda.h without devices" 'remove that macro' ${CC:-cc} -fsyntax-only -DDTRAIN_NO_DEVICE -DDTRAIN_CUDA_STUB -x c dtrain_cuda.h
sample=${SAMPLE:-3} # one set of 3 has SHARD and TRAIN and leaves out whatever has a stand-in
echo "parts left out at random: SAMPLE=$sample"
awk -v sample=$sample -v whole="${MATRIX:-}" '
    function without(half,    i, names) {
        for (i = 1; i <= n; i++)
            if (!((half, i) in kept)) names = names " " part[i]
        print "c" names; print "c++" names
    }
    function keep(half, i,    k, list, count) {
        kept[half, i]
        count = split(needs[i], list, " ")
        for (k = 1; k <= count; k++) keep(half, place[list[k]])
    }
    $1 == "part" { part[++n] = $2; place[$2] = n; $1 = $2 = $3 = ""; needs[n] = $0 }
    END {
        without("none")
        for (i = n; i > 0; i--) {
            sample = (75 * sample + 74) % 65537 # a generator that every awk has
            keep(sample < 32768, i)
        }
        without(0); without(1)
        for (i = 1; i <= n && whole == "all"; i++) print "c", part[i]
    }' src/order.txt | sort >"$top/combinations" # for each lane as many of C
lanes without <"$top/combinations"

holds "amalgamate --check" tools/amalgamate --check
mkdir "$work/tree"
cp -R src tools dtrain.h "$work/tree/"
cd "$work/tree"
tool=tools/amalgamate
holds "a second run changes nothing" sh -c "$tool && cmp dtrain.h '$root/dtrain.h'"
sed 's/and the number of ranks, 1 for NULL/and how many ranks there are, 1 for NULL/' dtrain.h >edited && mv edited dtrain.h
fails_with "--check names the line" 'comm/comm.h:' $tool --check
holds "--absorb" $tool --absorb
holds "absorbed" grep -q 'how many ranks there are' src/comm/comm.h
holds "--check after --absorb" $tool --check
holds "only that file" sh -c "[ \"\$(diff -rq src '$root/src' | wc -l)\" -eq 1 ]"
cp "$root/dtrain.h" . && cp -R "$root/src" .
awk '{ print } /^#define DTRAIN__STATUS$/ { print "#include \"../comm/queue.c\"" }' src/base/status.c >edited && mv edited src/base/status.c
fails_with "a later include" 'includes comm/queue.c, which stands later' $tool
holds "nothing written" cmp dtrain.h "$root/dtrain.h"
cp "$root/src/base/status.c" src/base/status.c
echo '#include "../train/train.h"' >>src/tensor/region.c
fails_with "a header of a higher floor" 'includes train/train.h, which stands on a higher floor' $tool
cp "$root/src/tensor/region.c" src/tensor/region.c
sed '/^wire\/net.c$/d; s|^transport/socket.c$|&\nwire/net.c|' "$root/src/order.txt" >src/order.txt
fails_with "a folder in two places" 'lists the folder wire twice: wire/net.c' $tool
cp "$root/src/order.txt" src/order.txt
seam() { # name, line, what the tool says
    echo "$2" >>src/comm/queue.c
    fails_with "$1" "src/comm/queue.c:[0-9]*: $3" $tool
    cp "$root/src/comm/queue.c" src/comm/queue.c
}
seam "a header of the system above base/" '#include <unistd.h>' 'a header of the system'
seam "a call of the system" 'static const char *home(void) { return getenv("HOME"); }' 'calls getenv'
seam "an atomic of the compiler" 'static int look(int *at) { return __atomic_load_n(at, 0); }' 'calls __atomic_load_n'
seam "a variable of the process" 'static int count;' 'a variable that changes'
echo 'int x;' >src/base/stray.c
fails_with "an unlisted file" 'src/base/stray.c is not listed' $tool
rm src/base/stray.c
echo 'base/nowhere.c' >>src/order.txt
fails_with "a missing file" 'base/nowhere.c, which does not exist' $tool
cp "$root/src/order.txt" src/order.txt
some=$(echo $parts | tr ' ' ,)
holds "--parts with all is the whole" sh -c "$tool --parts $some | cmp - dtrain.h"
$tool --parts shard >sharded.h
sed 's/dtrain.h/sharded.h/' "$top/sum.c" >sum.c
holds "--parts SHARD" ${CC:-cc} -std=c99 -O0 $warn -I. sum.c -o sum -lpthread -lm
holds "--parts SHARD runs" ./sum
holds "--parts SHARD has what it needs" grep -q dtrain__params_check sharded.h
holds "--parts SHARD has nothing else" sh -c "! grep -q '^DTRAIN_API.*dtrain_checkpoint' sharded.h"
fails_with "two lists of parts" 'commas between' $tool --parts SHARD DEVICE
fails_with "an unknown part" 'there is no part WHEEL' $tool --parts WHEEL
echo 'part WHEEL needs CART' >>src/order.txt
fails_with "a part that needs an unknown one" 'part WHEEL needs CART, which is not declared' $tool
cp "$root/src/order.txt" src/order.txt
awk '{ print } /^#define DTRAIN__SERVER$/ { print "#include \"../shard/layout.c\"" }' src/loose/server.c >edited && mv edited src/loose/server.c
fails_with "an include of a part that is not needed" 'includes shard/layout.c, which needs SHARD' $tool
cp "$root/src/loose/server.c" src/loose/server.c
if command -v busybox >/dev/null 2>&1; then
    holds "busybox" busybox sh $tool --check
fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
