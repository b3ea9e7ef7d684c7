/* The tests of FSDP again, where small slices travel alone and stay at their addresses in full, as large ones do. */
#include "hooks.h"
const size_t hook_layout_small = 8;
const size_t hook_layout_home = 2;
#include "test_fsdp.c"
