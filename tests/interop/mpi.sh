#!/bin/sh
# Runs dtrain over MPI: one binary under each MPI that has the standard ABI, and builds with the mpi.h of those that do
# not. Packages are installed where they are missing: MPICH 5 by pip, Open MPI by the system's. Says what it skips.
# MPI=all adds Intel MPI, Open MPI 5 and MPICH 4, Slurm where it runs, and has MPI move all bytes in all tests of
# processes. SAMPLE=N tries one of the two MPIs, and a part of what there is to try, which the number N chooses.
#   [MPI=all] [SAMPLE=N] sh tests/interop/mpi.sh
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
unset DTRAIN_TRANSPORT DTRAIN_MPI_LIBRARY DTRAIN_MPI_STAGED DTRAIN_MPI_SHM DTRAIN_ALGORITHM TEST_TRANSPORT TEST_SEALED
here=$PWD/build/mpi
mkdir -p "$here"
logs=$here/log
flags="-O2 -ffp-contract=off -DDTRAIN_MPI"
libs="-lpthread -lm -ldl"

# Builds all programs into a directory, $own, linked with one object of the implementation. Its private functions are open
# to them, as the Makefile opens it for tests.
build() { # directory compiler compiler-with-mpi.h [flag]
    own=build/mpi/$1
    objects=$(echo "$tests property" | sed "s|[^ ][^ ]*|$own/test_&.o|g")
    # shellcheck disable=SC2086
    MAKEFLAGS='' make test_dir=$own CC="$2" test_flags="$flags${4:+ \"$4\"}" $own/dtrain.o $objects >"$logs" 2>&1 || return
    for object in $objects; do
        "$2" $object $own/dtrain.o -o ${object%.o} $libs >>"$logs" 2>&1 || return
    done
    "$2" $flags ${4:+"$4"} -fno-math-errno -I$own/open -I. examples/train_gpt.c $own/dtrain.o -o $own/train_gpt $libs >>"$logs" 2>&1 &&
        "$3" $flags ${4:+"$4"} -I$own/open -I. tests/interop/mpi_beside.c $own/dtrain.o -o $own/beside $libs >>"$logs" 2>&1
}

# Tests of processes that run on ranks of MPI as well: their program, the number of ranks, and the tests. They need no
# killed rank, and no memory that a parent shares with its children. Of checkpoints, 6 and 8 ranks save what others load.
scenes() {
    cat <<'END'
mesh 4 dimensions_that_cannot_be_are_named names_and_worlds_that_do_not_join_are_told_to_all
mesh 8 one_call_measures_a_model_in_parts_and_all_drop_a_step_together
groups 2 a_large_message_that_waits_in_one_group_holds_up_no_other what_was_begun_in_one_group_goes_on_while_its_rank_waits_in_another what_another_thread_begins_while_one_waits_goes_on_too waits_of_no_time_come_to_an_end_as_well
groups 4 threads_of_one_rank_use_different_groups_at_once what_breaks_one_group_leaves_the_others groups_of_one_world_share_its_store
groups 5 a_group_of_listed_ranks_follows_its_list
groups 6 groups_form_by_color_and_key_and_out_of_each_other
fsdp_process 4 processes_give_the_same_bits_over_every_transport ranks_that_start_no_thread_give_them_too
fsdp_uneven 3 processes_with_fewer_add_nothing
local_sgd 3 rounds_are_nesterovs_steps_on_the_mean_difference_on_threads_and_processes
pipeline 2 every_schedule_on_processes_gives_the_bits_of_one_rank
pipeline 4 every_schedule_on_processes_gives_the_bits_of_one_rank
checkpoint_layouts 6 processes_save_under_one_layout_and_load_under_another
checkpoint_layouts 8 processes_save_under_one_layout_and_load_under_another
checkpoint_layouts 3 processes_save_under_one_layout_and_load_under_another
leave 4 a_rank_that_has_left_is_missed_by_calls_that_need_it_and_no_others
lost 2 a_mismatch_quotes_both_calls_on_both_ranks a_rank_that_only_sent_has_the_mismatch_when_it_next_receives
lost 3 a_rank_that_leaves_is_named
lost 4 leaving_right_after_the_last_call_disturbs_nobody
lost 4 settings_that_change_the_steps_are_compared_and_named
survive 2 whole_groups_agree_and_shrink_to_themselves a_vote_without_memory_is_an_error_and_no_answer
survive 3 another_call_after_a_deadline_takes_the_first_ones_vote_back no_memory_for_the_state_on_one_rank_is_an_error_on_all_and_harms_nothing
survive 4 whole_groups_agree_and_shrink_to_themselves resync_copies_the_furthest_state_of_the_lowest_rank_that_has_it
shrink_poll 4 who_leaves_while_it_is_pending_is_not_waited_for a_deadline_runs_from_the_first_call
END
}

chosen_scenes() { # those of $chosen, which has programs and ranks, or programs alone
    scenes | awk -v chosen=" $chosen " 'index(chosen, " " $1 "/" $2 " ") || index(chosen, " " $1 " ")'
}

# Runs these scenes. Each rank says which of them it has run.
play() { # what
    shared=$(mktemp -d) || exit 1
    while read -r program ranks names; do
        head -c 4096 /dev/zero >"$shared/board"
        # shellcheck disable=SC2086
        TEST_TRANSPORT=mpi TEST_MPI_RANKS=$ranks TEST_MPI_DIRECTORY=$shared timeout 300 $launch $ranks \
            "$own/test_$program" $names >"$logs" 2>&1 </dev/null && [ "$(grep -c "ran $ranks ranks of MPI" "$logs")" -ge $ranks ]
        check $? "$name: $program on $ranks ranks$1"
    done
    rm -rf "$shared"
}

# Stops train_gpt on 4 ranks, and goes on with 2 and on threads.
resume() {
    shared=$(mktemp -d) || exit 1
    small="--layers 2 --width 32 --heads 2 --context 32 --batch 2 --micro 8 --steps 8 --quiet --text examples/gpt.h"
    small="$small --csv $here/csv --svg $here/svg"
    DTRAIN_TRANSPORT=mpi timeout 300 $launch 4 $own/train_gpt $small --strategy full --save "$shared/run" --every 2 --until 4 >"$logs" 2>&1
    cp -r "$shared/run" "$shared/copy"
    $own/train_gpt $small --ranks 1 2>>"$logs" | grep -o 'weights_sha256=[0-9a-f]*' >"$here/straight"
    DTRAIN_TRANSPORT=mpi timeout 300 $launch 2 $own/train_gpt $small --strategy grad --save "$shared/run" --resume 2>>"$logs" |
        grep -o 'weights_sha256=[0-9a-f]*' >"$here/ranks"
    $own/train_gpt $small --ranks 2 --save "$shared/copy" --resume 2>>"$logs" | grep -o 'weights_sha256=[0-9a-f]*' >"$here/threads"
    equal "$(cat "$here/ranks")" "$(cat "$here/straight")" && equal "$(cat "$here/threads")" "$(cat "$here/straight")"
    check $? "$name: train_gpt stopped on 4 ranks goes on with 2, and on threads, with the same bits"
    rm -rf "$shared"
}

# Runs everything under one MPI. The launcher is $launch, as in "mpiexec -n".
under() { # name
    name=$1
    if ! timeout 60 $launch 2 true >"$logs" 2>&1; then
        echo "skipped: $name (its launcher starts nothing here: $(head -1 "$logs"))"
        return
    fi
    for ranks in $counts; do
        DTRAIN_TRANSPORT=mpi timeout 300 $launch $ranks $own/test_property ranks_of_mpi >"$logs" 2>&1
        check $? "$name: random calls on $ranks ranks have the reference's results"
        DTRAIN_MPI_SHM=0 DTRAIN_TRANSPORT=mpi timeout 300 $launch $ranks $own/test_property ranks_of_mpi >"$logs" 2>&1
        check $? "$name: so they have where MPI moves all bytes"
    done
    DTRAIN_MPI_SHM=0 DTRAIN_MPI_STAGED=1 DTRAIN_TRANSPORT=mpi timeout 300 $launch 3 $own/test_property ranks_of_mpi >"$logs" 2>&1
    check $? "$name: so they have where all bytes are staged"
    for layout in $layouts; do
        layout="--${layout%%=*} ${layout#*=}"
        # shellcheck disable=SC2086
        $own/train_gpt --ranks 4 --steps 3 --quiet $layout 2>"$logs" | grep -o 'weights_sha256=[0-9a-f]*' >"$here/threads"
        for shm in 1 0; do
            # shellcheck disable=SC2086
            DTRAIN_MPI_SHM=$shm DTRAIN_TRANSPORT=mpi timeout 300 $launch 4 $own/train_gpt --steps 3 --quiet $layout 2>>"$logs" |
                grep -o 'weights_sha256=[0-9a-f]*' >"$here/ranks"
            equal "$(cat "$here/ranks")" "$(cat "$here/threads")"
            check $? "$name: train_gpt $layout with DTRAIN_MPI_SHM=$shm has the weights of threads"
        done
    done
    resume
    play "" <"$here/scenes"
    DTRAIN_MPI_SHM=0
    export DTRAIN_MPI_SHM
    play ", where MPI moves all bytes" <"$here/moved"
    unset DTRAIN_MPI_SHM
    for level in multiple funneled; do
        timeout 300 $launch 4 $own/beside $level >"$logs" 2>&1
        check $? "$name: a program that uses MPI itself, at level $level"
        DTRAIN_MPI_SHM=0 timeout 60 $launch 4 $own/beside ends $level >"$logs" 2>&1 && [ "$(grep -o ended "$logs" | wc -l)" -eq 4 ]
        check $? "$name: calls after MPI_Finalize are errors, at level $level"
    done
    # launchers end a job when its first rank has gone without MPI_Finalize: at least that rank has said its word
    timeout 60 $launch 4 $own/beside late >"$logs" 2>&1
    [ $? -ne 124 ] && grep -q refused "$logs" && ! grep -q FAIL "$logs"
    check $? "$name: a rank that does not come to make a group is a timeout"
    timeout 60 $launch 4 $own/beside leaves >"$logs" 2>&1
    [ $? -ne 124 ] && grep -q left "$logs" && ! grep -qi 'FAIL\|after.*finalize' "$logs"
    check $? "$name: a program that exits with a world open ends"
}

# A world of one process that must be refused with a text.
refused() { # name text environment...
    what=$1
    text=$2
    shift 2
    env "$@" timeout 60 $own/test_property ranks_of_mpi >"$logs" 2>&1
    grep -q "$text" "$logs"
    check $? "$what is refused with its reason"
}

abi() { # name directory [launcher]
    PATH="$2/bin:$PATH" LD_LIBRARY_PATH="$2/lib:$2/lib/libfabric" FI_PROVIDER_PATH="$2/lib/libfabric/prov" \
        DTRAIN_MPI_LIBRARY="$2/lib/libmpi_abi.so.1"
    export PATH LD_LIBRARY_PATH FI_PROVIDER_PATH DTRAIN_MPI_LIBRARY
    launch="${3:-$2/bin/mpiexec -n}"
    under "$1"
}

package() { # name; leaves its directory in $home
    home=$(sh tests/support/install.sh in $1)
    sh tests/support/install.sh $1 && return
    echo "skipped: $1 (there is no python3, or the package index cannot be reached)"
    return 1
}

# Builds with the mpi.h of an installation and runs under it.
header() { # name directory directory-of-programs launcher...
    what=$1
    compiler=$3mpicc
    build $2 $compiler $compiler "-DDTRAIN_MPI_HEADER=<mpi.h>"
    check $? "the programs compile with the mpi.h of $what"
    shift 3
    launch=$*
    under "$what"
    if "${compiler%mpicc}mpirun" --version 2>/dev/null | grep -q 'Open MPI' && $launch 2 true >/dev/null 2>&1; then
        # shellcheck disable=SC2086
        timeout 120 $launch 4 --enable-recovery $own/beside dies >"$logs" 2>&1
        [ "$(grep -c survived "$logs")" -eq 3 ]
        check $? "$what with --enable-recovery: survivors of a killed rank go on"
    fi
}

# What is tried: all, or where SAMPLE is set a part.
sample 1 MPICH system
mpis=$chosen
sample 2 1 2 3 4
counts=$chosen
sample 2 strategy=ddp strategy=full strategy=hybrid mesh=dp=2,pp=2 mesh=dp=2,tp=2
layouts=$chosen
# shellcheck disable=SC2046
sample 4 $(scenes | awk '{ print $1 == "checkpoint_layouts" ? $1 : $1 "/" $2 }' | uniq) # whose ranks load what others saved
chosen_scenes >"$here/scenes"
if [ "${MPI:-}" = all ]; then
    cp "$here/scenes" "$here/moved"
else
    sample 1 mesh/4 groups/4 fsdp_process/4
    chosen_scenes >"$here/moved"
fi
tests=$(cat "$here/scenes" "$here/moved" | sed 's/ .*//' | sort -u)

if [ "${mpis#*MPICH}" != "$mpis" ] && package mpich; then
    mpich=$home
    build abi "${CC:-cc}" "$mpich/bin/mpicc_abi"
    check $? "the programs compile without an mpi.h"
    (abi "MPICH 5" "$mpich"; echo "$passed $failed $late" >"$here/sums")
    read -r passed failed late <"$here/sums"
    if [ "${MPI:-}" = all ] && package impi; then
        (export FI_PROVIDER=tcp; abi "Intel MPI" "$home"; echo "$passed $failed $late" >"$here/sums")
        read -r passed failed late <"$here/sums"
    fi
    if [ "${MPI:-}" = all ]; then
        (abi "MPICH 5 under Slurm" "$mpich" "srun --overcommit --mpi=pmi2 -n"; echo "$passed $failed $late" >"$here/sums")
        read -r passed failed late <"$here/sums"
    fi
    refused "a library that does not exist" "no/such.so" DTRAIN_TRANSPORT=mpi DTRAIN_MPI_LIBRARY=/no/such.so
    refused "a library with another ABI" "does not have the standard ABI" DTRAIN_TRANSPORT=mpi \
        DTRAIN_MPI_LIBRARY="$mpich/lib/libmpi.so.12" LD_LIBRARY_PATH="$mpich/lib"
    refused "the library of another launcher" "is not of the launcher's MPI" DTRAIN_TRANSPORT=mpi PMI_SIZE=2 \
        DTRAIN_MPI_LIBRARY="$mpich/lib/libmpi_abi.so.1" LD_LIBRARY_PATH="$mpich/lib"
    refused "srun that speaks no protocol of MPI" "or give srun --mpi=pmi2" DTRAIN_TRANSPORT=mpi SLURM_STEP_NUM_TASKS=2 \
        DTRAIN_MPI_LIBRARY="$mpich/lib/libmpi_abi.so.1" LD_LIBRARY_PATH="$mpich/lib"
fi
make build/train_gpt >/dev/null 2>&1
DTRAIN_TRANSPORT=mpi build/train_gpt --steps 1 --quiet >"$logs" 2>&1
grep -q "built without DTRAIN_MPI" "$logs"
check $? "a program without DTRAIN_MPI names the macro"

root=
[ "$(id -u)" -ne 0 ] || root=--allow-run-as-root
if [ "${mpis#*system}" = "$mpis" ]; then
    :
elif sh tests/support/install.sh openmpi; then
    header "the system's MPI" header "" mpirun $root --oversubscribe -n
else
    echo "skipped: an MPI with its mpi.h (no mpicc and mpirun, and none can be installed)"
fi
if [ "${MPI:-}" = all ]; then
    package ompi5 && header "Open MPI 5" ompi5 "$home/bin/" "$home/bin/mpirun" $root --oversubscribe -n
    package mpich4 && header "MPICH 4" mpich4 "$home/bin/" "$home/bin/mpiexec" -n
fi
checked
