/* ---- >>device_selection ----
 * Top-k and quantisers on a device; with device NULL the CPU's functions run at once. A selection is an object of the
 * library that holds the device's own, so that its sizes and its device can be checked. */
#ifndef DTRAIN__DEVICE_SELECTION
#define DTRAIN__DEVICE_SELECTION
#include "compress.h"
#include "../tensor/device.c"
#include "topk.c"
#include "quantise.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__DEVICE_TILE ((size_t)1024) /* elements unpacked at once before they are added */

/* The caller's dtrain_device_selection points to this. */
typedef struct dtrain__device_selection {
    dtrain_allocator heap;
    dtrain_device *device;
    dtrain_device_selection *made; /* used on a device */
    dtrain__sparse sparse;         /* used on the CPU */
    size_t count, k;
} dtrain__device_selection;

/* Checks that 32-bit indices can name k of count elements. */
static dtrain_status dtrain__device_check_k(const dtrain_device *device, const char *call, size_t k, size_t count)
{
    if (k > count)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s on %s: k is %zu, expected at most the %zu elements", call,
                            dtrain_device_name(device), k, count);
    const uint64_t most = UINT32_MAX; /* a constant would have compilers for 32 bits warn */
    if (count > most)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "%s on %s: %zu elements, an index has 32 bits: cut the vector into pieces below 2^32", call,
                            dtrain_device_name(device), count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_selection_create(dtrain_device *device, size_t count, size_t k,
                                                        dtrain_device_selection **selection)
{
    const char *call = "device_selection_create";
    dtrain_allocator *heap;
    if (selection == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s on %s: selection is NULL, expected a place for it", call,
                            dtrain_device_name(device));
    *selection = NULL;
    dtrain_status status = dtrain__device_check_k(device, call, k, count);
    if (status != DTRAIN_OK)
        return status;
    dtrain__device_selection *mine = (dtrain__device_selection *)dtrain__memory_owner(
        NULL, sizeof *mine, offsetof(dtrain__device_selection, heap), &heap);
    if (mine == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s on %s: no memory for %zu bytes", call,
                            dtrain_device_name(device), sizeof *mine);
    mine->device = device;
    mine->count = count;
    mine->k = k;
    if (device != NULL)
        status = DTRAIN__DEVICE_CALL(device, call, selection_create, (device, count, k, &mine->made));
    else
        status = dtrain__topk_reserve(&mine->sparse, dtrain__topk_room(count, k));
    if (status != DTRAIN_OK) {
        dtrain__free(&mine->heap, mine);
        return status;
    }
    *selection = (dtrain_device_selection *)(void *)mine;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_select(dtrain_device *device, dtrain_device_selection *selection, float *data,
                                              const float *add, uint32_t *indices, float *values)
{
    const char *call = "device_select";
    dtrain__device_selection *mine = (dtrain__device_selection *)(void *)selection;
    if (mine == NULL || mine->device != device)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s on %s: the selection is %s%s, expected one that was created with this device", call,
                            dtrain_device_name(device), mine == NULL ? "NULL" : "of ",
                            mine == NULL ? "" : dtrain_device_name(mine->device));
    dtrain_status status = dtrain__device_pointer(device, call, "data", data, mine->count);
    if (status == DTRAIN_OK)
        status = dtrain__device_pointer(device, call, "indices", indices, mine->k);
    if (status == DTRAIN_OK)
        status = dtrain__device_pointer(device, call, "values", values, mine->k);
    if (status != DTRAIN_OK || mine->count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, call, select, (device, mine->made, data, add, indices, values));
    status = add != NULL ? dtrain__topk_add(data, add, mine->count, mine->k, &mine->sparse)
                         : dtrain__topk_pick(data, mine->count, mine->k, &mine->sparse);
    if (status != DTRAIN_OK || mine->k == 0)
        return status;
    memcpy(indices, mine->sparse.indices, mine->k * sizeof *indices);
    memcpy(values, mine->sparse.values, mine->k * sizeof *values);
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_device_selection_destroy(dtrain_device *device, dtrain_device_selection *selection)
{
    dtrain__device_selection *mine = (dtrain__device_selection *)(void *)selection;
    if (mine == NULL)
        return;
    (void)device; /* the selection knows its device */
    if (mine->device != NULL && mine->device->ops->selection_destroy != NULL)
        mine->device->ops->selection_destroy(mine->device, mine->made);
    dtrain__sparse_destroy(&mine->sparse);
    dtrain__free(&mine->heap, mine);
}

static void dtrain__device_sparse_add_cpu(const uint32_t *indices, const float *values, size_t k, float *data,
                                          size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < k; i++) {
        __builtin_prefetch(data + indices[i + 24 < k ? i + 24 : i], 1);
        if (indices[i] < count)
            data[indices[i]] += values[i];
    }
    dtrain__fpmode_restore(mode);
}

DTRAIN_API dtrain_status dtrain_device_sparse_add(dtrain_device *device, const uint32_t *indices, const float *values,
                                                  size_t k, float *data, size_t count)
{
    const char *call = "device_sparse_add";
    const dtrain__device_argument pointers[] = {{"indices", indices}, {"values", values}, {"data", data}, {NULL, NULL}};
    dtrain_status status = dtrain__device_check_k(device, call, k, count);
    if (status == DTRAIN_OK)
        status = dtrain__device_pointers(device, call, k, pointers);
    if (status != DTRAIN_OK || k == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, call, sparse_add, (device, indices, values, k, data, count));
    dtrain__device_sparse_add_cpu(indices, values, k, data, count);
    return DTRAIN_OK;
}

/* ---- quantisers ---- */

/* Checks a call's code, block and pointers. A block of 0 becomes the default. */
static dtrain_status dtrain__device_check_code(const dtrain_device *device, const char *call, dtrain_dtype code,
                                               size_t *block, const void *in, const void *out, size_t count)
{
    const dtrain__device_argument pointers[] = {{"in", in}, {"out", out}, {NULL, NULL}};
    *block = *block > 0 ? *block : 256;
    if (code != DTRAIN_I8 && code != DTRAIN_F8_E4M3)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s on %s: code is %d (%s), expected I8 or F8_E4M3", call,
                            dtrain_device_name(device), (int)code, dtrain_dtype_name(code));
    if (*block % 8 != 0 || *block > 65536)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s on %s: block is %zu elements, expected a multiple of 8 up to 65536", call,
                            dtrain_device_name(device), *block);
    return dtrain__device_pointers(device, call, count, pointers);
}

static dtrain_compressor dtrain__device_compressor(dtrain_dtype code, size_t block)
{
    return dtrain_compressor_of(code == DTRAIN_I8 ? DTRAIN_COMPRESS_INT8 : DTRAIN_COMPRESS_FP8, block);
}

DTRAIN_API dtrain_status dtrain_device_pack(dtrain_device *device, dtrain_dtype code, size_t block, const float *in,
                                            size_t count, void *out)
{
    dtrain_status status = dtrain__device_check_code(device, "device_pack", code, &block, in, out, count);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_pack", pack, (device, code, block, in, count, out));
    dtrain_compressor compressor = dtrain__device_compressor(code, block);
    compressor.pack(&compressor, in, count, out);
    return DTRAIN_OK;
}

/* Adds the unpacked numbers in tiles. The scale of a block followed by a tile of its codes is a packed vector, too. */
static void dtrain__device_unpack_add(const dtrain_compressor *compressor, const unsigned char *in, float *out,
                                      size_t count)
{
    unsigned char packed[4 + DTRAIN__DEVICE_TILE];
    float tile[DTRAIN__DEVICE_TILE];
    size_t block = compressor->block;
    uint64_t mode = dtrain__fpmode_enter();
    const unsigned char *codes = in + 4 * dtrain__quantise_blocks(count, block);
    for (size_t at = 0; at < count;) {
        size_t left = block - at % block < count - at ? block - at % block : count - at, n;
        n = left < DTRAIN__DEVICE_TILE ? left : DTRAIN__DEVICE_TILE;
        memcpy(packed, in + 4 * (at / block), 4);
        memcpy(packed + 4, codes + at, n);
        compressor->unpack(compressor, packed, tile, n);
        dtrain__fold_sum_f32(out + at, tile, n);
        at += n;
    }
    dtrain__fpmode_restore(mode);
}

DTRAIN_API dtrain_status dtrain_device_unpack(dtrain_device *device, dtrain_dtype code, size_t block, const void *in,
                                              float *out, size_t count, int add)
{
    dtrain_status status = dtrain__device_check_code(device, "device_unpack", code, &block, in, out, count);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_unpack", unpack, (device, code, block, in, out, count, add));
    dtrain_compressor compressor = dtrain__device_compressor(code, block);
    if (add)
        dtrain__device_unpack_add(&compressor, (const unsigned char *)in, out, count);
    else
        compressor.unpack(&compressor, in, out, count);
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
