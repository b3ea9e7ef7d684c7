#!/bin/sh
# Runs dtrain over MPI: one binary under each MPI that has the standard ABI, and builds with the mpi.h of those that do
# not. Packages are installed where they are missing: MPICH 5 (and with MPI=all Intel MPI) by pip, Open MPI by the
# system's. Says what it skips.
#   [MPI=all] sh tests/interop/mpi.sh
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
unset DTRAIN_TRANSPORT DTRAIN_MPI_LIBRARY DTRAIN_MPI_STAGED
here=$PWD/build/mpi
mkdir -p "$here"
logs=$here/log
exact="-O2 -ffp-contract=off -I. -Itests/support -DDTRAIN_MPI"
build() { # suffix compiler flags...
    suffix=$1
    shift
    "$@" $exact tests/unit/test_property.c -o "$here/property$suffix" -lpthread -lm -ldl >"$logs" 2>&1 &&
        "$@" $exact -fno-math-errno examples/train_gpt.c -o "$here/train_gpt$suffix" -lpthread -lm -ldl >>"$logs" 2>&1
}

# Runs everything under one MPI. The launcher is $launch, as in "mpiexec -n".
under() { # name suffix
    name=$1
    suffix=$2
    if ! timeout 60 $launch 2 true >"$logs" 2>&1; then
        echo "skipped: $name (its launcher starts nothing here: $(head -1 "$logs"))"
        return
    fi
    for ranks in 1 2 3 4; do
        DTRAIN_TRANSPORT=mpi timeout 300 $launch $ranks "$here/property$suffix" ranks_of_mpi >"$logs" 2>&1
        check $? "$name: random calls on $ranks ranks have the reference's results"
    done
    DTRAIN_MPI_STAGED=1 DTRAIN_TRANSPORT=mpi timeout 300 $launch 3 "$here/property$suffix" ranks_of_mpi >"$logs" 2>&1
    check $? "$name: so they have where all bytes are staged"
    for flags in "" "--strategy full" "--strategy hybrid" "--mesh dp=2,pp=2" "--mesh dp=2,tp=2"; do
        # shellcheck disable=SC2086
        "$here/train_gpt$suffix" --ranks 4 --steps 3 --quiet $flags 2>"$logs" | grep -o 'weights_sha256=[0-9a-f]*' >"$here/threads"
        # shellcheck disable=SC2086
        DTRAIN_TRANSPORT=mpi timeout 300 $launch 4 "$here/train_gpt$suffix" --steps 3 --quiet $flags 2>>"$logs" |
            grep -o 'weights_sha256=[0-9a-f]*' >"$here/ranks"
        [ -s "$here/ranks" ] && cmp -s "$here/threads" "$here/ranks"
        check $? "$name: train_gpt${flags:+ $flags} has the weights of threads"
    done
    for level in multiple funneled; do
        timeout 300 $launch 4 "$here/beside$suffix" $level >"$logs" 2>&1
        check $? "$name: a program that uses MPI itself, at level $level"
    done
    # launchers end a job when its first rank has gone without MPI_Finalize: at least that rank has said its word
    timeout 60 $launch 4 "$here/beside$suffix" late >"$logs" 2>&1
    [ $? -ne 124 ] && grep -q refused "$logs" && ! grep -q FAIL "$logs"
    check $? "$name: a rank that does not come to make a group is a timeout"
    timeout 60 $launch 4 "$here/beside$suffix" leaves >"$logs" 2>&1
    [ $? -ne 124 ] && grep -q left "$logs" && ! grep -qi 'FAIL\|after.*finalize' "$logs"
    check $? "$name: a program that exits with a world open ends"
}

# A world of one process that must be refused with a text.
refused() { # name text environment...
    what=$1
    text=$2
    shift 2
    env "$@" timeout 60 "$here/property" ranks_of_mpi >"$logs" 2>&1
    grep -q "$text" "$logs"
    check $? "$what is refused with its reason"
}

abi() { # name directory
    PATH="$2/bin:$PATH" LD_LIBRARY_PATH="$2/lib:$2/lib/libfabric" FI_PROVIDER_PATH="$2/lib/libfabric/prov" \
        DTRAIN_MPI_LIBRARY="$2/lib/libmpi_abi.so.1"
    export PATH LD_LIBRARY_PATH FI_PROVIDER_PATH DTRAIN_MPI_LIBRARY
    launch="$2/bin/mpiexec -n"
    under "$1" ""
}

package() { # directory package
    [ -e "$here/$1/lib/libmpi_abi.so.1" ] && return 0
    python3 -m venv "$here/$1" >"$logs" 2>&1 && timeout 600 "$here/$1/bin/python" -m pip install -q "$2" >>"$logs" 2>&1 &&
        [ -e "$here/$1/lib/libmpi_abi.so.1" ] && return 0
    echo "skipped: $2 (there is no python3, or the package index cannot be reached)"
    return 1
}

if package mpich 'mpich>=5,<6'; then
    build "" "${CC:-cc}" && "$here/mpich/bin/mpicc_abi" $exact tests/interop/mpi_beside.c -o "$here/beside" -lpthread -lm -ldl >>"$logs" 2>&1
    check $? "the programs compile without an mpi.h"
    (abi "MPICH 5" "$here/mpich"; echo "$passed $failed" >"$here/sums")
    read -r passed failed <"$here/sums"
    if [ "${MPI:-}" = all ] && package impi 'impi-rt==2021.18.1'; then
        (export FI_PROVIDER=tcp; abi "Intel MPI" "$here/impi"; echo "$passed $failed" >"$here/sums")
        read -r passed failed <"$here/sums"
    fi
    refused "a library that does not exist" "no/such.so" DTRAIN_TRANSPORT=mpi DTRAIN_MPI_LIBRARY=/no/such.so
    refused "a library with another ABI" "does not have the standard ABI" DTRAIN_TRANSPORT=mpi \
        DTRAIN_MPI_LIBRARY="$here/mpich/lib/libmpi.so.12" LD_LIBRARY_PATH="$here/mpich/lib"
    refused "the library of another launcher" "is not of the launcher's MPI" DTRAIN_TRANSPORT=mpi PMI_SIZE=2 \
        DTRAIN_MPI_LIBRARY="$here/mpich/lib/libmpi_abi.so.1" LD_LIBRARY_PATH="$here/mpich/lib"
fi
make build/train_gpt >/dev/null 2>&1
DTRAIN_TRANSPORT=mpi build/train_gpt --steps 1 --quiet >"$logs" 2>&1
grep -q "built without DTRAIN_MPI" "$logs"
check $? "a program without DTRAIN_MPI names the macro"

command -v mpirun >/dev/null 2>&1 && command -v mpicc >/dev/null 2>&1 ||
    (apt-get update && apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev) >"$logs" 2>&1
if command -v mpirun >/dev/null 2>&1 && command -v mpicc >/dev/null 2>&1; then
    root=
    [ "$(id -u)" -ne 0 ] || root=--allow-run-as-root
    build _header mpicc "-DDTRAIN_MPI_HEADER=<mpi.h>" &&
        mpicc $exact "-DDTRAIN_MPI_HEADER=<mpi.h>" tests/interop/mpi_beside.c -o "$here/beside_header" -lpthread -lm >>"$logs" 2>&1
    check $? "the programs compile with the installation's mpi.h"
    launch="mpirun $root --oversubscribe -n"
    under "the system's MPI" _header
    if mpirun --version 2>/dev/null | grep -q 'Open MPI' && $launch 2 true >/dev/null 2>&1; then
        timeout 120 $launch 4 --enable-recovery "$here/beside_header" dies >"$logs" 2>&1
        [ "$(grep -c survived "$logs")" -eq 3 ]
        check $? "Open MPI with --enable-recovery: survivors of a killed rank go on"
    fi
else
    echo "skipped: an MPI with its mpi.h (no mpicc and mpirun, and none can be installed)"
fi
checked
