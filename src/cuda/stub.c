/* ---- >>cuda-stub ----
 * DTRAIN_CUDA_STUB: the implementation for a program that is built without a CUDA Toolkit, by a compiler of C or C++.
 * Stands before the rest of the implementation, and replaces it. */
#ifndef DTRAIN__CUDA_STUB
#define DTRAIN__CUDA_STUB
#include "cuda.h"

#if defined(DTRAIN_CUDA_IMPLEMENTATION) && defined(DTRAIN_CUDA_STUB)
#undef DTRAIN_CUDA_IMPLEMENTATION

static dtrain_status dtrain__cuda_stub(const char *call)
{
    return dtrain_error_set(
        DTRAIN_ERR_UNSUPPORTED,
        "%s: this build has no CUDA (DTRAIN_CUDA_STUB); compile dtrain_cuda.h with nvcc and without "
        "the macro, or go on without a GPU",
        call);
}

DTRAIN_API dtrain_status dtrain_cuda_count(int *count)
{
    if (count != NULL)
        *count = 0;
    return dtrain__cuda_stub("dtrain_cuda_count");
}

DTRAIN_API dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc)
{
    (void)desc;
    if (device != NULL)
        *device = NULL;
    return dtrain__cuda_stub("dtrain_cuda_create");
}

DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device)
{
    (void)device;
}

DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device)
{
    (void)device;
    return NULL;
}
#endif

#endif
