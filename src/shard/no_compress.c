/* ---- >>no-compress ----
 * Replaces >>fsdp-quantise and >>reducer in a program that defines DTRAIN_NO_COMPRESS. Creating an object fails if the
 * desc asks for either, so the other functions are never called with one. */
#ifndef DTRAIN__NO_COMPRESS
#define DTRAIN__NO_COMPRESS
#include "fsdp.c"
#include "../tensor/pieces.c"

static dtrain_status dtrain__no_compress(const char *what)
{
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "%s: this program was built with DTRAIN_NO_COMPRESS: remove that macro", what);
}

static size_t dtrain__fsdp_code_memory(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    (void)layout, (void)desc;
    return 0;
}

static dtrain_status dtrain__fsdp_code_create(dtrain_fsdp *fsdp)
{
    return fsdp->desc.quantise_gather == 0 && fsdp->desc.quantise_reduce == 0
               ? DTRAIN_OK
               : dtrain__no_compress("quantise_gather and quantise_reduce");
}

static dtrain_status dtrain__fsdp_code_gather(dtrain_fsdp *fsdp, size_t index)
{
    (void)fsdp, (void)index;
    return dtrain__no_compress("quantise_gather");
}

static void dtrain__fsdp_code_gathered(dtrain_fsdp *fsdp, size_t index)
{
    (void)fsdp, (void)index;
}

static dtrain_status dtrain__fsdp_code_reduce(dtrain_fsdp *fsdp, size_t index)
{
    (void)fsdp, (void)index;
    return dtrain__no_compress("quantise_reduce");
}

static void dtrain__fsdp_code_reduced(dtrain_fsdp *fsdp, size_t index, float *sum)
{
    (void)fsdp, (void)index, (void)sum;
}

static dtrain_status dtrain__reducer_create(dtrain__reducer **made, dtrain_comm *comm, int threaded,
                                            const dtrain__layout *layout, const dtrain_compress_desc *desc,
                                            size_t bucket_bytes, dtrain_allocator *memory)
{
    (void)comm, (void)threaded, (void)layout, (void)desc, (void)bucket_bytes, (void)memory;
    *made = NULL;
    return dtrain__no_compress("compress");
}

static dtrain_status dtrain__reducer_take(dtrain_fsdp *fsdp, int lowest, int highest, float *sums)
{
    (void)fsdp, (void)lowest, (void)highest, (void)sums;
    return dtrain__no_compress("compress");
}

static dtrain_status dtrain__reducer_finish(dtrain_fsdp *fsdp, int number)
{
    (void)fsdp, (void)number;
    return dtrain__no_compress("compress");
}

static void dtrain__reducer_end_step(dtrain__reducer *reducer, int applied)
{
    (void)reducer, (void)applied;
}

static void dtrain__reducer_undo(dtrain__reducer *reducer)
{
    (void)reducer;
}

static void dtrain__reducer_loading(dtrain__reducer *reducer)
{
    (void)reducer;
}

static dtrain_status dtrain__reducer_loaded(dtrain__reducer *reducer, const dtrain__lister *lister)
{
    (void)reducer, (void)lister;
    return DTRAIN_OK;
}

static void dtrain__reducer_list(const dtrain__reducer *reducer, const dtrain__layout *layout, int rank,
                                 dtrain__lister *lister)
{
    (void)reducer, (void)layout, (void)rank, (void)lister;
}

static uint64_t dtrain__reducer_bytes(const dtrain__layout *layout, const dtrain_compress_desc *desc, int lowest,
                                      int highest, int copy, size_t *plain)
{
    (void)layout, (void)desc, (void)lowest, (void)highest, (void)copy;
    *plain = 0;
    return 0;
}

static void dtrain__reducer_destroy(dtrain__reducer *reducer, int64_t until_ns)
{
    (void)reducer, (void)until_ns;
}

#endif
