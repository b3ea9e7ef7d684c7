/* ---- >>sparse ----
 * Sparse vectors as bytes and back, and into dense ones. Packed: a header of 32 bytes (magic, index form, dtype of
 * the values, count, count of the whole vector, bytes of indices), the indices, the values; in the byte order of the
 * machine, which all ranks of a group share. Unpacking trusts nothing: lengths are compared before memory is asked
 * for, and every index before any is used. */
#ifndef DTRAIN__SPARSE
#define DTRAIN__SPARSE
#include "compress.h"
#include "topk.c"
#include "../tensor/dtype.c"

#define DTRAIN__SPARSE_MAGIC 0x31535444u /* "DTS1" */
#define DTRAIN__SPARSE_HEADER 32
#define DTRAIN__SPARSE_TILE ((size_t)1024)

typedef struct dtrain__sparse_header {
    uint32_t magic;
    uint16_t form, dtype; /* the enums' values, which fit */
    uint64_t count, original_count, index_bytes;
} dtrain__sparse_header;

static dtrain_status dtrain__sparse_check(const dtrain__sparse *sparse, const char *call)
{
    if (sparse == NULL || (sparse->count > 0 && (sparse->indices == NULL || sparse->values == NULL)))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s NULL", call,
                            sparse == NULL ? "sparse is" : "its arrays are");
    if (sparse->count > sparse->original_count || (uint64_t)sparse->original_count > UINT32_MAX)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: sparse has %zu elements of %zu; expected no more than those, and less than 2^32", call,
                            sparse->count, sparse->original_count);
    for (size_t i = 0; i < sparse->count; i++)
        if (sparse->indices[i] >= sparse->original_count || (i > 0 && sparse->indices[i] <= sparse->indices[i - 1]))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: index %zu is %lu of %zu elements%s; expected ascending ones in range", call, i,
                                (unsigned long)sparse->indices[i], sparse->original_count,
                                sparse->indices[i] < sparse->original_count ? ", not above the one before" : "");
    return DTRAIN_OK;
}

static dtrain_status dtrain__sparse_check_dense(const dtrain__sparse *sparse, const float *data, size_t count,
                                                const char *call)
{
    dtrain_status status = dtrain__sparse_check(sparse, call);
    if (status == DTRAIN_OK && (count != sparse->original_count || (count > 0 && data == NULL)))
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: sparse is of %zu elements, data %s %zu", call,
                              sparse->original_count, count > 0 && data == NULL ? "is NULL, count" : "has", count);
    return status;
}

static void dtrain__sparse_write_now(const dtrain__sparse *sparse, float *data)
{
    if (sparse->original_count > 0)
        memset(data, 0, sparse->original_count * sizeof(float));
    for (size_t i = 0; i < sparse->count; i++)
        data[sparse->indices[i]] = sparse->values[i];
}

static dtrain_status dtrain__sparse_write(const dtrain__sparse *sparse, float *data, size_t count)
{
    dtrain_status status = dtrain__sparse_check_dense(sparse, data, count, "sparse_write");
    if (status == DTRAIN_OK)
        dtrain__sparse_write_now(sparse, data);
    return status;
}

/* How many elements were left out before the i-th. */
static uint32_t dtrain__sparse_gap(const dtrain__sparse *sparse, size_t i)
{
    return i == 0 ? sparse->indices[0] : sparse->indices[i] - sparse->indices[i - 1] - 1;
}

/* The bytes of a good vector's indices; SIZE_MAX for a form that cannot be. */
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

/* The shortest form, of equals the first. */
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

/* Settles the form and returns the packed size of a good vector; 0 for what cannot be. */
static size_t dtrain__sparse_size(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form *form)
{
    size_t width = dtrain__sparse_width(values);
    if (width == 0)
        return 0;
    if (*form == DTRAIN_INDEX_AUTO)
        *form = dtrain__sparse_shortest(sparse, width);
    size_t indices = dtrain__sparse_index_bytes(sparse, *form);
    if (indices == SIZE_MAX)
        return 0;
    return DTRAIN__SPARSE_HEADER + indices +
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

/* Every element of the vector, tile by tile. */
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

/* Packs a good vector into as many bytes as dtrain__sparse_size has said. */
static void dtrain__sparse_pack_now(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form form,
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

/* Packs sparse: a header of 32 bytes, the indices, the values.
 *
 *   values     DTRAIN_F32; DTRAIN_BF16 or DTRAIN_F16: rounded to the nearest
 *   out        capacity bytes
 *   bytes      out: how many were written
 *   errors     DTRAIN_ERR_INVALID  another dtype; a form that cannot be; too little capacity; a bad
 *                                  sparse */
static dtrain_status dtrain__sparse_pack(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form form,
                                         void *out, size_t capacity, size_t *bytes)
{
    dtrain_status status = dtrain__sparse_check(sparse, "sparse_pack");
    if (status != DTRAIN_OK)
        return status;
    size_t size = dtrain__sparse_size(sparse, values, &form);
    if (size == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "sparse_pack: values as %s with index form %d of %zu elements; expected F32, BF16 or F16, "
                            "and U16 for at most 65536",
                            dtrain_dtype_name(values), (int)form, sparse->original_count);
    if (out == NULL || bytes == NULL || capacity < size)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sparse_pack: %zu bytes are needed, %s %zu", size,
                            out == NULL || bytes == NULL ? "out or bytes is NULL, capacity" : "there are", capacity);
    dtrain__sparse_pack_now(sparse, values, form, (unsigned char *)out);
    *bytes = size;
    return DTRAIN_OK;
}

/* Says whether the header and the number of bytes fit each other and what was expected; counts are below 2^32 then. */
static dtrain_status dtrain__sparse_check_header(const dtrain__sparse_header *header, size_t bytes,
                                                 size_t original_count)
{
    uint64_t width = dtrain__sparse_width((dtrain_dtype)header->dtype), n = header->count, indices = 4 * n;
    if (header->magic != DTRAIN__SPARSE_MAGIC || width == 0 || header->form < DTRAIN_INDEX_U32 ||
        header->form > DTRAIN_INDEX_NONE)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "sparse_unpack: %zu bytes with magic %08lx, index form %u, dtype %u are no packed vector",
                            bytes, (unsigned long)header->magic, header->form, header->dtype);
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

/* Reads the indices into the private arrays; returns the number of the first bad one, or count. */
static size_t dtrain__sparse_read_indices(dtrain__sparse *sparse, const dtrain__sparse_header *header,
                                          const unsigned char *from)
{
    const unsigned char *end = from + header->index_bytes;
    size_t n = (size_t)header->count;
    uint64_t next = 0; /* the least that the next index may be */
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

/* Unpacks what dtrain__sparse_pack made, of a vector of original_count elements. The bytes may come from anywhere.
 *
 *   errors   DTRAIN_ERR_CORRUPT  the bytes are no packed vector of so many elements: another length, an index out of
 *                                range, out of order or twice. The text says which; sparse has count 0
 *            DTRAIN_ERR_MEMORY */
static dtrain_status dtrain__sparse_unpack(dtrain__sparse *sparse, const void *data, size_t bytes,
                                           size_t original_count)
{
    const unsigned char *from = (const unsigned char *)data;
    dtrain__sparse_header header;
    if (sparse == NULL || data == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sparse_unpack: %s is NULL", data == NULL ? "data" : "sparse");
    sparse->count = 0;
    if (bytes < DTRAIN__SPARSE_HEADER)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "sparse_unpack: %zu bytes came, a header alone has %d", bytes,
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

#endif
