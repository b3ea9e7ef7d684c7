/* ---- >>piece ----
 * Asks the lists of a state for their pieces, one list after the other, and checks and copies what they list. The same
 * lists, made by the same calls, say what is saved and where it goes in a load. */
#ifndef DTRAIN__PIECE
#define DTRAIN__PIECE
#include "index.c"
#include "../tensor/pieces.c"

/* Pieces, and their names one after the other, in memory that grows. */
typedef struct dtrain__piece_list {
    dtrain_allocator *allocator;
    dtrain_piece *pieces;
    char *names;
    size_t count, bytes;
    int failed; /* there was no memory */
} dtrain__piece_list;

static void dtrain__piece_free(dtrain__piece_list *list)
{
    dtrain__free(list->allocator, list->pieces);
    dtrain__free(list->allocator, list->names);
}

static void dtrain__piece_visit(void *user, const dtrain_piece *piece)
{
    dtrain__piece_list *list = (dtrain__piece_list *)user;
    const char *name = piece->name != NULL ? piece->name : "";
    size_t bytes = strlen(name) + 1;
    void *pieces = dtrain__memory_grow(list->allocator, list->pieces, sizeof *piece, list->count, 1);
    void *names = dtrain__memory_grow(list->allocator, list->names, 1, list->bytes, bytes);
    list->pieces = pieces != NULL ? (dtrain_piece *)pieces : list->pieces;
    list->names = names != NULL ? (char *)names : list->names;
    list->failed |= pieces == NULL || names == NULL;
    if (list->failed)
        return;
    memcpy(list->names + list->bytes, name, bytes);
    list->pieces[list->count++] = *piece;
    list->bytes += bytes;
}

/* Returns whether a name ends as names of optimizer state do. */
static int dtrain__piece_is_state(const char *name, size_t length)
{
    const char *suffix;
    for (int i = 0; (suffix = dtrain__pieces_suffix(i)) != NULL; i++) {
        size_t bytes = strlen(suffix);
        if (length >= bytes && memcmp(name + length - bytes, suffix, bytes) == 0)
            return 1;
    }
    return 0;
}

/* Returns what is wrong with a name, or NULL. */
static const char *dtrain__piece_bad_name(const dtrain_piece *piece)
{
    size_t length = strlen(piece->name);
    if (piece->suffix == NULL && dtrain__piece_is_state(piece->name, length))
        return "ends as names of optimizer state do: give it another";
    return dtrain__safetensors_is_utf8(piece->name, length) ? NULL : "is not UTF-8";
}

/* Checks a piece. One with an element a step gets its size. */
static dtrain_status dtrain__piece_settle(dtrain_piece *piece, size_t index, uint64_t step, int rank)
{
    dtrain__region region;
    if (piece->per_step && piece->ndim == 1) {
        if (rank == 0 && step > piece->shape[0])
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "checkpoint: it is of step %llu, and \"%.200s\" has room for %zu steps: make it larger",
                                (unsigned long long)step, piece->name, piece->shape[0]);
        piece->shape[0] = (size_t)step;
        piece->count = rank == 0 ? (size_t)step : 0;
    }
    dtrain_status status = dtrain__region_check(&region, piece, index, "checkpoint");
    const char *bad = status == DTRAIN_OK ? dtrain__piece_bad_name(piece) : NULL;
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: the name \"%.200s\" %s", piece->name, bad);
    if (status == DTRAIN_OK && piece->count > 0 && piece->data == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "checkpoint: a piece of \"%.200s\" has no data: give the address of its elements",
                            piece->name);
    return status;
}

/* Lists and checks all pieces of a state at a step. lister: who asks, without where pieces go. */
static dtrain_status dtrain__piece_collect(dtrain__piece_list *list, dtrain__lister lister,
                                           const dtrain_checkpoint_state *state, uint64_t step,
                                           dtrain_allocator *allocator)
{
    lister.user = list;
    lister.visit = dtrain__piece_visit;
    list->allocator = allocator;
    list->count = list->bytes = 0;
    dtrain_status status = dtrain__pieces_walk(state->lists, state->list_count, &lister);
    if (status == DTRAIN_OK && list->failed)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of %zu pieces", list->count);
    list->failed = 0;
    const char *name = list->names;
    for (size_t i = 0; i < list->count && status == DTRAIN_OK; i++) {
        list->pieces[i].name = name;
        name += strlen(name) + 1;
        status = dtrain__piece_settle(&list->pieces[i], i, step, lister.rank);
    }
    return status;
}

#endif
