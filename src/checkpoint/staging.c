/* ---- >>staging ----
 * Moves data between a device's memory and files, in chunks through pinned memory, so that the copy of one chunk
 * overlaps the CPU's work on another. It lives for one save or load, as the device may not live longer. The other
 * modules here never read or write a device's addresses. */
#ifndef DTRAIN__STAGING
#define DTRAIN__STAGING
#include "checkpoint.h"
#include "../tensor/device.c"

#define DTRAIN__STAGING_BYTES ((size_t)4 << 20)
#define DTRAIN__STAGING_CHUNK ((size_t)1 << 20)

typedef struct dtrain__staging {
    dtrain_device *device; /* NULL: none so far */
    unsigned char *pinned;
    size_t used; /* bytes that the device may still read */
} dtrain__staging;

/* Waits until what was sent is on the device. */
static dtrain_status dtrain__staging_wait(dtrain__staging *staging)
{
    size_t used = staging->used;
    staging->used = 0;
    return used > 0 ? dtrain_device_wait(staging->device) : DTRAIN_OK;
}

static void dtrain__staging_free(dtrain__staging *staging)
{
    if (staging->device != NULL)
        dtrain_device_free(staging->device, DTRAIN_MEMORY_PINNED, staging->pinned);
    memset(staging, 0, sizeof *staging);
}

/* Changes to a device, which is not NULL. */
static dtrain_status dtrain__staging_begin(dtrain__staging *staging, dtrain_device *device)
{
    void *pinned = NULL;
    if (staging->device == device)
        return DTRAIN_OK;
    dtrain_status status = dtrain__staging_wait(staging);
    dtrain__staging_free(staging);
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_PINNED, DTRAIN__STAGING_BYTES, &pinned);
    if (status != DTRAIN_OK)
        return status;
    staging->device = device;
    staging->pinned = (unsigned char *)pinned;
    return DTRAIN_OK;
}

/* Reads a device's memory: one half of the pinned memory is filled while the other is emptied. */
static dtrain_status dtrain__staging_read(dtrain__staging *staging, dtrain_device *device, void *to, const void *from,
                                          size_t bytes)
{
    const size_t half = DTRAIN__STAGING_BYTES / 2;
    const unsigned char *next = (const unsigned char *)from;
    unsigned char *out = (unsigned char *)to;
    size_t coming = bytes < half ? bytes : half;
    dtrain_status status = bytes > 0 ? dtrain__staging_begin(staging, device) : DTRAIN_OK;
    if (status == DTRAIN_OK && bytes > 0)
        status = dtrain_device_copy(device, staging->pinned, next, coming);
    for (unsigned turn = 0; bytes > 0 && status == DTRAIN_OK; turn ^= 1) {
        size_t here = coming;
        status = dtrain_device_wait(device);
        next += here;
        bytes -= here;
        coming = bytes < half ? bytes : half;
        if (status == DTRAIN_OK && coming > 0)
            status = dtrain_device_copy(device, staging->pinned + (turn ^ 1) * half, next, coming);
        if (status == DTRAIN_OK)
            memcpy(out, staging->pinned + turn * half, here);
        out += here;
    }
    return status;
}

/* Gives room for *have bytes, at most `want`. Fill it, then call dtrain__staging_send. */
static dtrain_status dtrain__staging_room(dtrain__staging *staging, dtrain_device *device, size_t want, void **at,
                                          size_t *have)
{
    dtrain_status status = dtrain__staging_begin(staging, device);
    *have = want < DTRAIN__STAGING_CHUNK ? want : DTRAIN__STAGING_CHUNK;
    if (status == DTRAIN_OK && DTRAIN__STAGING_BYTES - staging->used < *have)
        status = dtrain__staging_wait(staging);
    *at = staging->pinned + staging->used;
    return status;
}

/* Sends `bytes` bytes of the last room to the device, after earlier work there. */
static dtrain_status dtrain__staging_send(dtrain__staging *staging, void *to, size_t bytes)
{
    const unsigned char *from = staging->pinned + staging->used;
    staging->used += (bytes + 63) / 64 * 64;
    return dtrain_device_copy(staging->device, to, from, bytes);
}

#endif
