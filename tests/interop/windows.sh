#!/bin/sh
# Builds dtrain for Windows with MinGW-w64 and runs it under Wine: tests, ranks as threads and as processes over TCP and
# in shared memory, dtrun, and train_gpt, whose weights are those of Linux. With clang it checks the syntax for x86-64
# and ARM64. Packages are installed where they are missing. Says what it skips.
#   [SAMPLE=number] sh tests/interop/windows.sh
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
. tests/support/check.sh
unset DTRAIN_TRANSPORT DTRAIN_ISA DTRAIN_WITHOUT
here=build/windows
cross=x86_64-w64-mingw32
mkdir -p "$here/open" "$here/posix/arpa" "$here/posix/netinet" "$here/posix/sys"
rm -f "$here"/*.exe "$here/dtrain.o" "$here/all.s" "$here/dtrain.dll"
logs=$here/log
export WINEDEBUG=-all WINEPREFIX="$PWD/$here/prefix"
mkdir -p "$WINEPREFIX"

sh tests/support/install.sh windows
if ! command -v $cross-gcc >/dev/null 2>&1; then
    echo "skipped: everything for Windows (there is no $cross-gcc, and none can be installed)"
    checked
    exit
fi
wine=$(PATH=$PATH:/usr/lib/wine command -v wine64)
# Wine has sockets and processes of its own session: a terminal's stop signals must not reach its server.
run() { # seconds program arguments...
    seconds=$1
    shift
    timeout "$seconds" setsid "$wine" "$@" </dev/null
}
weights() { grep -o 'weights_sha256=[0-9a-f]*' "$1" | sort -u; }

# ---- compilers ----
warn="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
exact="-ffp-contract=off -fno-math-errno"
libs="-static -lws2_32 -lpthread"
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$here/all.c"
printf '#define DTRAIN_MPI\n#include "dtrain.h"\n' >"$here/names.c"
with() { # compiler, and mpi or nothing
    command -v $cross-$1 >/dev/null 2>&1 || { echo "skipped: $cross-$1 (not installed)" && return; }
    language=c
    [ $1 = gcc ] || language="c++ -std=c++11"
    # shellcheck disable=SC2086
    $cross-$1 -x $language $warn ${2:+-DDTRAIN_MPI -DDTRAIN_NO_SOCKETS} -I. -fsyntax-only "$here/all.c" >"$logs" 2>&1
    check $? "$cross-$1 -x $language compiles dtrain.h${2:+ without sockets, with MPI,} without a warning"
}
with_clang() { # target
    if ! command -v clang >/dev/null 2>&1 || [ ! -d /usr/$cross/include ]; then
        echo "skipped: clang for $1 (there is no clang, or no headers)"
        return
    fi
    # shellcheck disable=SC2086
    clang --target=$1 -isystem /usr/$cross/include $warn -Wno-ignored-pragmas -I. -fsyntax-only "$here/all.c" >"$logs" 2>&1
    check $? "clang compiles dtrain.h for $1"
}
# What packages install, as assembler text and as a DLL.
package() {
    # shellcheck disable=SC2086
    $cross-gcc -O0 -fvisibility=hidden $warn -I. -S tools/package/dtrain.c -o "$here/all.s" >"$logs" 2>&1
    check $? "$cross-gcc compiles the package's file without a warning"
    [ -s "$here/all.s" ] && ! grep -E 'vmov(dqa[0-9]*|ap[sd])[[:space:]].*\(%r[sb]p.*' "$here/all.s" | grep -E '%[yz]mm' >"$logs"
    check $? "no wide move to or from the stack wants more than the 16 bytes of alignment that Windows keeps"
    $cross-gcc -DDTRAIN_API=dtrain_public -I. -E -P "$here/names.c" 2>"$logs" | tr '\n' ' ' | grep -o 'dtrain_public [^(]*(' |
        sed 's/.*[ *]\([a-z0-9_]*\)($/\1/' | sort >"$here/public"
    $cross-gcc -shared "$here/all.s" -o "$here/dtrain.dll" -lws2_32 >"$logs" 2>&1
    # objdump of before 2.42 writes an index and the name, a later one more between them
    $cross-objdump -p "$here/dtrain.dll" | sed -n '/Ordinal\/Name/,/^$/s/^.*[] ]\(dtrain[a-z0-9_]*\)$/\1/p' | sort >"$here/exported"
    [ "$(wc -l <"$here/public")" -gt 200 ] && diff "$here/public" "$here/exported" >>"$logs"
    check $? "dtrain.dll exports the $(wc -l <"$here/public") public functions, and no other of dtrain"
}
# The library that tests and programs link with, its private functions open to them.
library() {
    for header in arpa/inet netinet/in netinet/tcp sys/socket sys/wait sys/mman sys/resource sys/un poll; do
        : >"$here/posix/$header.h"
    done
    awk -v bodies=0 -f tests/support/open.awk dtrain.h >"$here/open/dtrain.h"
    { echo '#define DTRAIN_IMPLEMENTATION'; awk -v bodies=1 -f tests/support/open.awk dtrain.h; } >"$here/dtrain.c"
    # shellcheck disable=SC2086
    $cross-gcc -O2 -ffp-contract=off $warn -I. -c "$here/dtrain.c" -o "$here/dtrain.o" >"$logs" 2>&1
    check $? "$cross-gcc compiles the library of the tests without a warning"
}
program() { # file; quickstart.c has the library in itself, as a user compiles it
    flags="-O2 $exact -Wall -Wextra -Werror -I$here/open" object=$here/dtrain.o
    [ "$1" != examples/quickstart.c ] || flags="-O0 $warn" object=
    # shellcheck disable=SC2086
    $cross-gcc $flags -I. "$1" $object -o "$here/$(basename "$1" .c).exe" $libs >"$logs" 2>&1
    check $? "$1 compiles"
}
each() { "$@"; }
sample 1 package with/gcc/mpi with/g++ with/g++/mpi with_clang/$cross with_clang/aarch64-w64-mingw32
printf '%s\n' library $chosen | tr / ' ' >"$here/steps"
lanes each <"$here/steps"
echo "skipped: clang for MSVC (Microsoft's headers are not in packages, and MinGW's do not do)"
echo "skipped: examples/checkpoint.c, custom_transport.c and robot_swarm.c (they fork)"
sample 2 $(ls examples/*.c | grep -vE 'checkpoint|custom_transport|robot_swarm|train_gpt') tools/dtrace.c tools/plan.c \
    tools/safetensors.c
printf '%s\n' examples/train_gpt.c tools/dtrun.c $chosen >"$here/steps"
lanes program <"$here/steps"
if [ -z "$wine" ]; then
    echo "skipped: all that runs (there is no wine64, and none can be installed)"
    checked
    exit
fi

# ---- tests ----
test_of() { # file
    name=$1
    $cross-gcc -O1 -w -include tests/support/on_windows.h -I"$here/open" -I. -Itests/support -I"$here/posix" \
        tests/*/"$name".c "$here/dtrain.o" -o "$here/$name.exe" -static -lws2_32 -lpthread >"$logs" 2>&1 &&
        run 300 "$here/$name.exe" >"$logs" 2>&1
    check $? "$name: $(tail -1 "$logs" | tr -d '\r')"
}
test_of test_alike # alone, as Wine makes its prefix
sample 4 test_async test_checkpoint_plan test_chacha test_comm test_ddp test_fsdp test_json test_module test_nn test_norm \
    test_parts test_pieces test_quantise test_safetensors_hostile test_safetensors_rules test_safetensors_write test_tensor \
    test_sampler test_topk test_train
printf '%s\n' $chosen >"$here/names"
lanes test_of <"$here/names"

# ---- programs ----
if [ -e "$here/quickstart.exe" ]; then
    run 60 "$here/quickstart.exe" 2>"$logs" | tr -d '\r' | grep -qx '4 ranks agree: y = 3.000 x + -1.000'
    check $? "README's first program: four threads agree"
fi
make -s build/train_gpt >"$logs" 2>&1
same() { # name flags: what the last command wrote has the weights of Linux
    [ $? -eq 0 ] && build/train_gpt $2 >"$here/linux" 2>"$logs" && equal "$(weights "$here/wine")" "$(weights "$here/linux")"
    check $? "$1 has the weights of Linux"
}
train="--steps 3 --quiet --csv $here/csv --svg $here/svg"
sample 1 "--strategy/ddp" "--strategy/full" "--mesh/dp=2,pp=2" "--mesh/dp=2,tp=2"
for layout in $chosen; do
    flags=$(echo $layout | tr / ' ')
    # shellcheck disable=SC2086
    run 300 "$here/train_gpt.exe" --ranks 4 $train $flags >"$here/wine" 2>"$logs"
    same "train_gpt $flags on 4 threads" "--ranks 4 $train $flags"
done
rm -rf "$here/schön я" "$here/zahlen я.csv"
LC_ALL=C.UTF-8 run 300 "$here/train_gpt.exe" --ranks 2 --steps 1 --quiet --csv "$here/zahlen я.csv" --svg "$here/svg" \
    --save "$here/schön я" >"$logs" 2>&1
check $? "train_gpt takes names that the system's code page lacks"
[ -f "$here/schön я/latest" ] && [ -s "$here/zahlen я.csv" ]
check $? "and its checkpoint and curve have those names"
sample 1 tcp shm
for transport in $chosen; do
    # shellcheck disable=SC2086
    DTRAIN_TRANSPORT=$transport run 300 "$here/dtrun.exe" -n 2 "$here/train_gpt.exe" $train >"$here/wine" 2>"$logs"
    same "dtrun -n 2 train_gpt over $transport" "--ranks 2 $train"
done

# ---- dtrun ----
cat >"$here/rank.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>
int main(int argc, char **argv)
{
    int rank = atoi(getenv("DTRAIN_RANK"));
    for (int i = 2; strcmp(argv[1], "say") == 0 && i < argc; i++)
        printf("<%s>\n", argv[i]);
    if (strcmp(argv[1], "say") != 0 && (rank != 1 || strcmp(argv[1], "fail") != 0))
        Sleep(60000);
    return strcmp(argv[1], "fail") == 0 && rank == 1 ? 7 : 0;
}
END
$cross-gcc -O1 "$here/rank.c" -o "$here/rank.exe" >"$logs" 2>&1
run 60 "$here/dtrun.exe" -n 2 "$here/rank.exe" say 'a b' 'c"d' 'e\' '*.c' 2>"$logs" | tr -d '\r' | sort >"$here/said"
printf '[0] <*.c>\n[0] <a b>\n[0] <c"d>\n[0] <e\\>\n[1] <*.c>\n[1] <a b>\n[1] <c"d>\n[1] <e\\>\n' | LC_ALL=C sort >"$here/expected"
LC_ALL=C sort "$here/said" | cmp -s - "$here/expected"
check $? "dtrun passes arguments on as they are, and prefixes lines"
begun=$(date +%s)
run 50 "$here/dtrun.exe" -n 3 --grace-ms 500 "$here/rank.exe" fail >"$logs" 2>&1
[ $? -eq 7 ] && [ $(($(date +%s) - begun)) -lt 40 ] && grep -q 'rank 1 .*status 7, the first to fail' "$logs"
check $? "dtrun ends the ranks when one has failed, with its status"
run 50 "$here/dtrun.exe" -n 1 "$here/none.exe" >"$logs" 2>&1
[ $? -eq 127 ]
check $? "dtrun says 127 where there is no such program"
mark=wait-$$
setsid "$wine" "$here/dtrun.exe" -n 2 "$here/rank.exe" $mark </dev/null >"$logs" 2>&1 &
dtrun=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do
    sleep 1
    [ "$(pgrep -fc "rank.exe.*$mark")" -lt 3 ] || break # dtrun and two ranks
done
[ "$(pgrep -fc "rank.exe.*$mark")" -ge 3 ]
check $? "dtrun and its ranks run"
kill -9 $dtrun
for _ in 1 2 3 4 5 6 7 8 9 10; do
    pgrep -f "rank.exe.*$mark" >/dev/null || break
    sleep 1
done
! pgrep -af "rank.exe.*$mark" >"$logs"
check $? "the ranks end when dtrun is killed"
checked
