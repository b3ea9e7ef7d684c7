/* Fuzz target: the index of a checkpoint, whole or in two parts. The hash that ends a text is made right, so that what
 * it guards is reached; what is accepted is printed and read again.
 *
 * make fuzz MINUTES=n */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static dtrain_allocator heap;

static void must(int fact)
{
    if (!fact)
        abort();
}

/* Reads a text with the tail that it should have. */
static dtrain_status read_part(dtrain__index *index, const uint8_t *data, size_t bytes)
{
    char *text = (char *)malloc(bytes + DTRAIN__INDEX_TAIL + 1);
    if (bytes > 0)
        memcpy(text, data, bytes);
    snprintf(text + bytes, DTRAIN__INDEX_TAIL + 1, ",\"hash\":\"%016llx\"}",
             (unsigned long long)dtrain__xxh64_of(text, bytes, 0));
    dtrain_status status = dtrain__index_read(index, "fuzz", text, bytes + DTRAIN__INDEX_TAIL);
    free(text);
    return status;
}

/* Walks what a load would: every piece is inside its tensor. */
static void walk(const dtrain__index *index)
{
    for (size_t i = 0; i < index->tensor_count; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[i];
        must(dtrain__index_find(index, dtrain__index_name(index, tensor), NULL) == tensor);
        for (size_t k = tensor->first; k < tensor->first + tensor->count + tensor->spares; k++) {
            dtrain__region region, whole;
            dtrain__region_overlap overlap;
            dtrain__region_overlap_run run;
            dtrain__index_region(index, tensor, &index->pieces[k], &region);
            dtrain__index_region(index, tensor, NULL, &whole);
            must(index->pieces[k].file < index->file_count && index->pieces[k].tensor == i);
            if (!dtrain__region_overlap_begin(&overlap, &region, &whole))
                continue;
            must(dtrain__region_overlap_count(&overlap) == region.count);
            for (int turn = 0; turn < 4 && dtrain__region_overlap_next(&overlap, &run); turn++)
                must(run.from_begin + run.count <= region.count && run.to_begin + run.count <= whole.count);
        }
    }
}

static void again(const dtrain__index *index, int tiled)
{
    dtrain__index second;
    char *text = NULL, *more = NULL;
    size_t bytes = 0, more_bytes = 0;
    dtrain__index_begin(&second, &heap);
    if (dtrain__index_print(index, &text, &bytes) == DTRAIN_OK) {
        must(dtrain__index_read(&second, "printed", text, bytes) == DTRAIN_OK);
        must(dtrain__index_settle(&second, tiled) == DTRAIN_OK);
        must(dtrain__index_print(&second, &more, &more_bytes) == DTRAIN_OK);
        must(more_bytes == bytes && memcmp(text, more, bytes) == 0);
    }
    dtrain__free(&heap, text);
    dtrain__free(&heap, more);
    dtrain__index_free(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dtrain__index index;
    if (bytes < 1)
        return 0;
    int tiled = data[0] & 1, parts = data[0] >> 1 & 1, bare = data[0] >> 2 & 1;
    size_t first = parts ? (bytes - 1) / 2 : bytes - 1;
    memset(&heap, 0, sizeof heap);
    dtrain__index_begin(&index, &heap);
    dtrain_status status = bare ? dtrain__index_read(&index, "fuzz", (const char *)data + 1, bytes - 1)
                                : read_part(&index, data + 1, first);
    if (status == DTRAIN_OK && parts && !bare)
        status = read_part(&index, data + 1 + first, bytes - 1 - first);
    if (status == DTRAIN_OK)
        status = dtrain__index_settle(&index, tiled);
    if (status == DTRAIN_OK) {
        walk(&index);
        if (!parts)
            again(&index, tiled);
    }
    must(heap.peak_bytes <= 100 * bytes + 65536);
    dtrain__index_free(&index);
    must(heap.bytes == 0);
    return 0;
}
