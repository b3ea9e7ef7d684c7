/* ---- >>sparse ----
 * Sparse vectors as bytes and back, and into dense ones. The packed form has the byte order of the machine, which all
 * ranks of a group share:
 *
 *   header    32 bytes: magic, index form, dtype of the values, count, count of the whole vector, bytes of indices
 *   indices   see dtrain_index_form
 *   values
 *
 * Unpacking trusts nothing. It compares lengths before it allocates, and checks all indices before it uses any. */
#ifndef DTRAIN__SPARSE
#define DTRAIN__SPARSE
#include "compress.h"
#include "topk.c"
#include "../tensor/dtype.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SPARSE_MAGIC 0x31535444u /* "DTS1" */
#define DTRAIN__SPARSE_HEADER 32
#define DTRAIN__SPARSE_TILE ((size_t)1024)

typedef struct dtrain__sparse_header {
    uint32_t magic;
    uint16_t form, dtype; /* the enums' values, which fit */
    uint64_t count, original_count, index_bytes;
} dtrain__sparse_header;

static void dtrain__sparse_write(const dtrain__sparse *sparse, float *data)
{
    if (sparse->original_count > 0)
        memset(data, 0, sparse->original_count * sizeof(float));
    for (size_t i = 0; i < sparse->count; i++)
        data[sparse->indices[i]] = sparse->values[i];
}

/* Returns how many elements are skipped before the i-th. */
static uint32_t dtrain__sparse_gap(const dtrain__sparse *sparse, size_t i)
{
    return i == 0 ? sparse->indices[0] : sparse->indices[i] - sparse->indices[i - 1] - 1;
}

/* Returns the bytes of a vector's indices; SIZE_MAX if the form does not fit. */
static size_t dtrain__sparse_index_bytes(const dtrain__sparse *sparse, dtrain_index_form form)
{
    size_t bytes = sparse->count;
    switch (form) {
    case DTRAIN_INDEX_U32: return 4 * sparse->count;
    case DTRAIN_INDEX_U16: return sparse->original_count <= 65536 ? 2 * sparse->count : SIZE_MAX;
    case DTRAIN_INDEX_NONE: return 0;
    case DTRAIN_INDEX_DELTA:
        for (size_t i = 0; i < sparse->count; i++) {
            uint32_t gap = dtrain__sparse_gap(sparse, i);
            bytes += (size_t)(gap >> 7 != 0) + (gap >> 14 != 0) + (gap >> 21 != 0) + (gap >> 28 != 0);
        }
        return bytes;
    default: return SIZE_MAX;
    }
}

/* Returns the shortest form; of equally short ones the first. */
static dtrain_index_form dtrain__sparse_shortest(const dtrain__sparse *sparse, size_t width)
{
    dtrain_index_form best = DTRAIN_INDEX_U32;
    size_t least = SIZE_MAX;
    for (int form = DTRAIN_INDEX_U32; form <= DTRAIN_INDEX_NONE; form++) {
        size_t bytes = dtrain__sparse_index_bytes(sparse, (dtrain_index_form)form);
        if (form == DTRAIN_INDEX_NONE)
            bytes = (sparse->original_count - sparse->count) * width;
        if (bytes < least) {
            least = bytes;
            best = (dtrain_index_form)form;
        }
    }
    return best;
}

static size_t dtrain__sparse_width(dtrain_dtype values)
{
    return values == DTRAIN_F32 ? 4 : values == DTRAIN_BF16 || values == DTRAIN_F16 ? 2 : 0;
}

/* Chooses the form if it is AUTO, and returns the packed size. */
static size_t dtrain__sparse_size(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form *form)
{
    size_t width = dtrain__sparse_width(values);
    if (*form == DTRAIN_INDEX_AUTO)
        *form = dtrain__sparse_shortest(sparse, width);
    return DTRAIN__SPARSE_HEADER + dtrain__sparse_index_bytes(sparse, *form) +
           width * (*form == DTRAIN_INDEX_NONE ? sparse->original_count : sparse->count);
}

static void dtrain__sparse_pack_indices(const dtrain__sparse *sparse, dtrain_index_form form, unsigned char *out)
{
    if (form == DTRAIN_INDEX_U32 && sparse->count > 0)
        memcpy(out, sparse->indices, 4 * sparse->count);
    for (size_t i = 0; form == DTRAIN_INDEX_U16 && i < sparse->count; i++) {
        uint16_t index = (uint16_t)sparse->indices[i];
        memcpy(out + 2 * i, &index, 2);
    }
    for (size_t i = 0; form == DTRAIN_INDEX_DELTA && i < sparse->count; i++) {
        uint32_t gap = dtrain__sparse_gap(sparse, i);
        for (; gap >> 7 != 0; gap >>= 7)
            *out++ = (unsigned char)(gap | 128);
        *out++ = (unsigned char)gap;
    }
}

/* Packs every element of the vector, tile by tile. */
static void dtrain__sparse_pack_dense(const dtrain__sparse *sparse, dtrain_dtype values, unsigned char *out)
{
    float tile[DTRAIN__SPARSE_TILE];
    size_t next = 0, width = dtrain__sparse_width(values);
    for (size_t at = 0; at < sparse->original_count; at += DTRAIN__SPARSE_TILE) {
        size_t n =
            sparse->original_count - at < DTRAIN__SPARSE_TILE ? sparse->original_count - at : DTRAIN__SPARSE_TILE;
        memset(tile, 0, sizeof tile);
        for (; next < sparse->count && sparse->indices[next] < at + n; next++)
            tile[sparse->indices[next] - at] = sparse->values[next];
        dtrain__dtype_convert(tile, DTRAIN_F32, out + at * width, values, n);
    }
}

/* Packs a vector into as many bytes as dtrain__sparse_size returned. Values are rounded to the nearest. */
static void dtrain__sparse_pack(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form form,
                                unsigned char *out)
{
    dtrain__sparse_header header;
    uint64_t mode = dtrain__fpmode_enter();
    header.magic = DTRAIN__SPARSE_MAGIC;
    header.form = (uint16_t)form;
    header.dtype = (uint16_t)values;
    header.count = form == DTRAIN_INDEX_NONE ? sparse->original_count : sparse->count;
    header.original_count = sparse->original_count;
    header.index_bytes = dtrain__sparse_index_bytes(sparse, form);
    memcpy(out, &header, DTRAIN__SPARSE_HEADER);
    dtrain__sparse_pack_indices(sparse, form, out + DTRAIN__SPARSE_HEADER);
    out += DTRAIN__SPARSE_HEADER + (size_t)header.index_bytes;
    if (form == DTRAIN_INDEX_NONE)
        dtrain__sparse_pack_dense(sparse, values, out);
    else
        dtrain__dtype_convert(sparse->values, DTRAIN_F32, out, values, sparse->count);
    dtrain__fpmode_restore(mode);
}

/* Checks the header against the number of bytes and the expected count. Counts are below 2^32 afterwards. */
static dtrain_status dtrain__sparse_check_header(const dtrain__sparse_header *header, size_t bytes,
                                                 size_t original_count)
{
    uint64_t width = dtrain__sparse_width((dtrain_dtype)header->dtype), n = header->count, indices = 4 * n;
    if (header->magic != DTRAIN__SPARSE_MAGIC || width == 0 || header->form < DTRAIN_INDEX_U32 ||
        header->form > DTRAIN_INDEX_NONE)
        return dtrain__fail(
            NULL, DTRAIN_ERR_CORRUPT,
            "sparse_unpack: %zu bytes with magic %08lx, index form %u, dtype %u are not a packed vector", bytes,
            (unsigned long)header->magic, header->form, header->dtype);
    if (header->original_count != original_count || header->original_count > UINT32_MAX || n > header->original_count)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "sparse_unpack: %llu elements of %llu came, expected a part of %zu", (unsigned long long)n,
                            (unsigned long long)header->original_count, original_count);
    if (header->form == DTRAIN_INDEX_U16)
        indices = header->original_count <= 65536 ? 2 * n : UINT64_MAX;
    else if (header->form == DTRAIN_INDEX_NONE)
        indices = n == header->original_count ? 0 : UINT64_MAX;
    else if (header->form == DTRAIN_INDEX_DELTA)
        indices = header->index_bytes >= n && header->index_bytes <= 5 * n ? header->index_bytes : UINT64_MAX;
    if (header->index_bytes != indices || bytes - DTRAIN__SPARSE_HEADER != indices + n * width)
        return dtrain__fail(
            NULL, DTRAIN_ERR_CORRUPT,
            "sparse_unpack: %zu bytes came for %llu elements, %llu bytes of indices among them; another "
            "length was expected",
            bytes, (unsigned long long)n, (unsigned long long)header->index_bytes);
    return DTRAIN_OK;
}

/* Reads a gap of at most 5 bytes; returns where it ends, or NULL. */
static const unsigned char *dtrain__sparse_read_gap(const unsigned char *from, const unsigned char *end, uint64_t *gap)
{
    *gap = 0;
    for (int shift = 0; shift < 35 && from < end; shift += 7) {
        *gap |= (uint64_t)(*from & 127) << shift;
        if ((*from++ & 128) == 0)
            return from;
    }
    return NULL;
}

/* Reads the indices. Returns the number of the first bad one, or count. */
static size_t dtrain__sparse_read_indices(dtrain__sparse *sparse, const dtrain__sparse_header *header,
                                          const unsigned char *from)
{
    const unsigned char *end = from + header->index_bytes;
    size_t n = (size_t)header->count;
    uint64_t next = 0; /* least value of the next index */
    for (size_t i = 0; i < n; i++) {
        uint64_t index = i;
        uint16_t narrow;
        uint32_t wide;
        if (header->form == DTRAIN_INDEX_DELTA) {
            from = dtrain__sparse_read_gap(from, end, &index);
            if (from == NULL)
                return i;
            index += next;
        } else if (header->form == DTRAIN_INDEX_U16) {
            memcpy(&narrow, from + 2 * i, 2);
            index = narrow;
        } else if (header->form == DTRAIN_INDEX_U32) {
            memcpy(&wide, from + 4 * i, 4);
            index = wide;
        }
        if (index < next || index >= header->original_count)
            return i;
        sparse->indices[i] = (uint32_t)index;
        next = index + 1;
    }
    return header->form != DTRAIN_INDEX_DELTA || from == end ? n : 0;
}

/* Unpacks what dtrain__sparse_pack made from a vector of original_count elements. The bytes may come from anywhere.
 *
 *   errors   DTRAIN_ERR_CORRUPT  the bytes are not a packed vector of so many elements: another length, or an index out
 *                                of range, out of order or twice. The text says which; sparse has count 0
 *            DTRAIN_ERR_MEMORY */
static dtrain_status dtrain__sparse_unpack(dtrain__sparse *sparse, const void *data, size_t bytes,
                                           size_t original_count)
{
    const unsigned char *from = (const unsigned char *)data;
    dtrain__sparse_header header;
    sparse->count = 0;
    if (bytes < DTRAIN__SPARSE_HEADER)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "sparse_unpack: %zu bytes came, expected at least the %d of a header", bytes,
                            DTRAIN__SPARSE_HEADER);
    memcpy(&header, from, DTRAIN__SPARSE_HEADER);
    dtrain_status status = dtrain__sparse_check_header(&header, bytes, original_count);
    if (status == DTRAIN_OK)
        status = dtrain__topk_reserve(sparse, (size_t)header.count);
    if (status != DTRAIN_OK)
        return status;
    size_t good = dtrain__sparse_read_indices(sparse, &header, from + DTRAIN__SPARSE_HEADER);
    if (good != (size_t)header.count)
        return dtrain__fail(
            NULL, DTRAIN_ERR_CORRUPT,
            "sparse_unpack: index %zu of %zu is out of range, out of order, or not as long as announced", good,
            (size_t)header.count);
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__dtype_convert(from + DTRAIN__SPARSE_HEADER + header.index_bytes, (dtrain_dtype)header.dtype, sparse->values,
                          DTRAIN_F32, good);
    dtrain__fpmode_restore(mode);
    sparse->count = good;
    sparse->original_count = original_count;
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
