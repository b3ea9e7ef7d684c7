#!/bin/sh
# What not every machine has is found out by trying, and each thing has a way around it: some tests where DTRAIN_WITHOUT
# turns all of them off, and where the kernel refuses them (tests/fault/without.c). WITHOUT=all runs every concerned
# program whole, as .ci/run does. Takes the programs from build/tests.
set -u
cd "$(dirname "$0")/../.."
. tests/support/check.sh
log=$(mktemp)
logs=$log
trap 'rm -f "$log"' EXIT

both() { # program, tests...
    name=$1
    program=build/tests/$1
    shift
    DTRAIN_WITHOUT=all "$program" "$@" >"$log" 2>&1
    check $? "$name with DTRAIN_WITHOUT=all"
    DTRAIN_WITHOUT=avx512,avx2,pagemap build/tests/without "$program" "$@" >"$log" 2>&1
    status=$?
    if [ $status -eq 77 ]; then
        echo "skipped $name on a kernel that lacks: $(cat "$log")"
    else
        check $status "$name on a kernel that lacks them"
    fi
}

# The ways of macOS and the BSDs: processes do not find each other's files, and some systems have no wait on a word.
elsewhere() { # program, tests...
    name=$1
    shift
    DTRAIN_WITHOUT=futex,proc build/tests/$name "$@" >"$log" 2>&1
    check $? "$name with DTRAIN_WITHOUT=futex,proc"
}
elsewhere test_base
elsewhere test_comm
elsewhere test_shm
elsewhere test_socket unix_sockets_give_the_bits_of_threads_at_2_3_4_and_8_ranks async_work_is_driven_by_the_service_thread
elsewhere test_window groups_and_survivors_use_it_and_it_outlives_them nothing_is_left_behind a_forked_child_shares_it

# Emulated GPUs, ranks of one host with and without shared files, and reserved pages.
both test_pages
both test_cuda_device emulated_memory_is_the_devices_alone copies_go_in_all_directions_at_any_alignment
both test_cuda_processes memory_is_opened_while_a_kernel_runs \
    handles_are_of_allocations_and_open_for_others_alone_while_they_last \
    processes_on_one_gpu_go_by_events_and_give_the_cpus_bits
both test_socket unix_sockets_give_the_bits_of_threads_at_2_3_4_and_8_ranks async_work_is_driven_by_the_service_thread
checked
