/* The tests of FSDP again, where small slices travel alone and stay at their addresses in full, as large ones do. */
#define DTRAIN__LAYOUT_SMALL ((size_t)8)
#define DTRAIN__LAYOUT_HOME ((size_t)2)
#include "test_fsdp.c"
