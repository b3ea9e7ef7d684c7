#!/bin/sh
# Programs that make no mistake train on the same bits with DTRAIN_DEBUG=1. Takes the programs from build/tests.
set -u
cd "$(dirname "$0")/../.."
. tests/support/check.sh
log=$(mktemp)
logs=$log
trap 'rm -f "$log"' EXIT

watched() { # program, tests...
    name=$1
    program=build/tests/$1
    shift
    DTRAIN_DEBUG=1 "$program" "$@" >"$log" 2>&1
    check $? "$name with DTRAIN_DEBUG=1"
}

watched test_module
watched test_module_halves
watched test_fsdp full_grad_and_none_give_the_weights_of_the_reference_bit_for_bit \
    memory_of_the_callers_takes_rank_0s_first_values units_that_a_rank_leaves_out_add_nothing \
    ranks_without_a_micro_batch_join unshard_and_destroy_leave_full_parameters_to_the_caller \
    a_tied_parameters_gradient_comes_from_both_ends_of_the_pass
watched test_fsdp_home full_grad_and_none_give_the_weights_of_the_reference_bit_for_bit
watched test_ddp
checked
