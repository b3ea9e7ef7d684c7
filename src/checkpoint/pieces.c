/* ---- >>pieces ----
 * What a program's state consists of, as pieces: an FSDP's slices, a replicated table with its optimizer, and the
 * program's own. The same list, made by the same calls, says what is saved and where it goes when it is loaded. */
#ifndef DTRAIN__PIECES
#define DTRAIN__PIECES
#include "index.c"
#include "../train/fsdp_create.c"

/* Names of optimizer state end so, and no others. */
static const char *const dtrain__piece_suffixes[] = {"@adam.m", "@adam.v", "@momentum"};

/* Where pieces are listed: those beyond capacity are counted. */
typedef struct dtrain__piece_list {
    dtrain_piece *pieces;
    size_t capacity, count;
} dtrain__piece_list;

static void dtrain__piece_put(dtrain__piece_list *list, const dtrain_piece *piece)
{
    if (list->count < list->capacity)
        list->pieces[list->count] = *piece;
    list->count++;
}

static const char *dtrain__piece_suffix(const dtrain_optimizer_desc *optimizer, int which)
{
    return dtrain__piece_suffixes[optimizer->kind == DTRAIN_ADAMW ? which : 2];
}

/* Layer `layer` of a tensor, or with -1 all of it. */
static dtrain_piece dtrain__piece_of(const char *name, dtrain_dtype dtype, const size_t *shape, int ndim, int layer)
{
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.name = name;
    piece.dtype = dtype;
    piece.ndim = ndim;
    memcpy(piece.shape, shape, (size_t)ndim * sizeof *shape);
    if (layer >= 0) {
        piece.boxed = 1;
        memcpy(piece.box_size, shape, (size_t)ndim * sizeof *shape);
        piece.box_begin[0] = (size_t)layer;
        piece.box_size[0] = 1;
    }
    piece.count = dtrain__region_product(layer >= 0 ? piece.box_size : piece.shape, 0, ndim);
    return piece;
}

/* Weights, or with which 0 or 1 the state, of an FSDP's slices. */
static void dtrain__piece_fsdp(const dtrain_fsdp *fsdp, int which, dtrain__piece_list *list)
{
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain_slice *slice = &fsdp->slices[i];
        if (slice->dtype != DTRAIN_F32 || (which >= 0 && !layout->cuts[i].trained))
            continue;
        dtrain_piece piece = dtrain__piece_of(slice->name, DTRAIN_F32, slice->shape, slice->ndim, slice->layer);
        piece.suffix = which >= 0 ? dtrain__piece_suffix(&fsdp->optimizer, which) : NULL;
        piece.begin = slice->begin;
        piece.count = slice->count;
        piece.copies = layout->copies;
        piece.copy = dtrain__fsdp_rank(fsdp) / layout->shards;
        piece.data = which >= 0 ? slice->state[which] : slice->weights;
        dtrain__piece_put(list, &piece);
    }
    for (size_t i = 0; i < layout->table_count && which < 0; i++) {
        const dtrain_param *param = &layout->table[i];
        if (param->dtype == DTRAIN_F32) /* others are frozen, and in full on every rank */
            continue;
        dtrain_piece piece = dtrain__piece_of(param->name, param->dtype, param->shape, dtrain__params_ndim(param), -1);
        piece.copies = dtrain_comm_size(fsdp->comm);
        piece.copy = dtrain__fsdp_rank(fsdp);
        piece.data = param->data;
        dtrain__piece_put(list, &piece);
    }
}

static dtrain_status dtrain__piece_list_done(const dtrain__piece_list *list, size_t *count)
{
    *count = list->count;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_pieces(dtrain_fsdp *fsdp, dtrain_piece *pieces, size_t capacity, size_t *count)
{
    dtrain__piece_list list = {pieces, capacity, 0};
    if (fsdp == NULL || count == NULL || (pieces == NULL && capacity > 0))
        return dtrain__fail(fsdp != NULL ? &fsdp->error : NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_pieces: fsdp, count, and room for capacity pieces are needed, got NULL");
    int floats = (int)dtrain__plan_state_floats(&fsdp->optimizer);
    for (int which = -1; which < floats; which++)
        dtrain__piece_fsdp(fsdp, which, &list);
    return dtrain__piece_list_done(&list, count);
}

/* The state of one parameter's ranges. Returns 0 where the optimizer does not know the parameter. */
static int dtrain__piece_state(const dtrain_param *param, const dtrain_optimizer *optimizer, dtrain_piece *whole,
                               int which, dtrain__piece_list *list)
{
    size_t layers = dtrain__params_layers(param), each = layers > 0 ? whole->count / layers : 0;
    for (size_t layer = 0; layer < layers && each > 0; layer++) {
        dtrain_piece piece =
            dtrain__piece_of(param->name, DTRAIN_F32, whole->shape, whole->ndim, param->stacked ? (int)layer : -1);
        piece.suffix = dtrain__piece_suffix(&optimizer->desc, which);
        piece.copies = whole->copies;
        piece.copy = whole->copy;
        piece.data = dtrain_optimizer_state(optimizer, (const float *)param->data + layer * each, which);
        if (piece.data == NULL)
            return 0;
        dtrain__piece_put(list, &piece);
    }
    return 1;
}

DTRAIN_API dtrain_status dtrain_params_pieces(const dtrain_param *table, size_t table_count,
                                              const dtrain_optimizer *optimizer, int copies, int copy,
                                              dtrain_piece *pieces, size_t capacity, size_t *count)
{
    dtrain__piece_list list = {pieces, capacity, 0};
    int states = 0;
    dtrain_status status = dtrain_params_check(table, table_count);
    if (status != DTRAIN_OK)
        return status;
    if (count == NULL || (pieces == NULL && capacity > 0) || copies < 0 || copy < 0 ||
        copy >= (copies > 0 ? copies : 1))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_params_pieces: copy is %d of %d, count %s NULL: expected 0 to copies - 1, and room",
                            copy, copies, count == NULL ? "is" : "is not");
    if (optimizer != NULL)
        states = optimizer->desc.kind == DTRAIN_ADAMW ? 2 : optimizer->desc.momentum != 0.0f;
    for (int which = -1; which < states; which++)
        for (size_t i = 0; i < table_count; i++) {
            dtrain_piece piece =
                dtrain__piece_of(table[i].name, table[i].dtype, table[i].shape, dtrain__params_ndim(&table[i]), -1);
            piece.copies = copies;
            piece.copy = copy;
            piece.data = table[i].data;
            if (which < 0)
                dtrain__piece_put(&list, &piece);
            else if (dtrain__params_trained(&table[i]) &&
                     !dtrain__piece_state(&table[i], optimizer, &piece, which, &list))
                return dtrain__fail(
                    NULL, DTRAIN_ERR_INVALID,
                    "checkpoint: the optimizer knows no parameter at \"%s\"'s data: give the table that "
                    "it was made from",
                    table[i].name);
        }
    return dtrain__piece_list_done(&list, count);
}

/* Lists all pieces of a state. */
static dtrain_status dtrain__piece_list_state(dtrain__piece_list *list, const dtrain_checkpoint_state *state, int ranks,
                                              int rank)
{
    dtrain_status status = DTRAIN_OK;
    size_t count = 0, room;
    if (state->fsdp != NULL) {
        room = list->capacity > list->count ? list->capacity - list->count : 0;
        status = dtrain_fsdp_pieces(state->fsdp, room > 0 ? list->pieces + list->count : NULL, room, &count);
        list->count += status == DTRAIN_OK ? count : 0;
    }
    if (status == DTRAIN_OK && state->table_count > 0) {
        room = list->capacity > list->count ? list->capacity - list->count : 0;
        status = dtrain_params_pieces(state->table, state->table_count, state->optimizer, ranks, rank,
                                      room > 0 ? list->pieces + list->count : NULL, room, &count);
        list->count += status == DTRAIN_OK ? count : 0;
    }
    if (status == DTRAIN_OK && state->piece_count > 0 && state->pieces == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: %zu pieces are promised, but pieces is NULL",
                            state->piece_count);
    for (size_t i = 0; i < state->piece_count && status == DTRAIN_OK; i++)
        dtrain__piece_put(list, &state->pieces[i]);
    return status;
}

/* Whether a name that the program has given is one of optimizer state, or no UTF-8. */
static const char *dtrain__piece_bad_name(const dtrain_piece *piece)
{
    size_t length = strlen(piece->name);
    for (int i = 0; i < 3 && piece->suffix == NULL; i++) {
        size_t bytes = strlen(dtrain__piece_suffixes[i]);
        if (length >= bytes && strcmp(piece->name + length - bytes, dtrain__piece_suffixes[i]) == 0)
            return "ends as names of optimizer state do: give it another";
    }
    for (size_t at = 0, step; at < length; at += step) {
        step = dtrain__json_utf8((const unsigned char *)piece->name + at, length - at);
        if (step == 0)
            return "is not UTF-8";
    }
    return NULL;
}

/* Lists and checks all pieces of a state, in memory that grows. */
static dtrain_status dtrain__pieces_collect(dtrain_piece **pieces, size_t *room, size_t *count,
                                            const dtrain_checkpoint_state *state, int ranks, int rank,
                                            dtrain_allocator *allocator)
{
    dtrain__piece_list list = {NULL, 0, 0};
    dtrain__region region;
    dtrain_status status = dtrain__piece_list_state(&list, state, ranks, rank);
    if (status != DTRAIN_OK)
        return status;
    dtrain_piece *larger = (dtrain_piece *)dtrain__index_grow(allocator, *pieces, sizeof **pieces, 0, list.count, room);
    if (larger == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of %zu pieces", list.count);
    *pieces = list.pieces = larger;
    list.capacity = *room;
    *count = list.count;
    list.count = 0;
    status = dtrain__piece_list_state(&list, state, ranks, rank);
    for (size_t i = 0; i < *count && status == DTRAIN_OK; i++) {
        status = dtrain__piece_check(&region, &list.pieces[i], i, "checkpoint");
        const char *bad = status == DTRAIN_OK ? dtrain__piece_bad_name(&list.pieces[i]) : NULL;
        if (bad != NULL)
            status =
                dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: the name \"%.200s\" %s", list.pieces[i].name, bad);
        if (status == DTRAIN_OK && list.pieces[i].count > 0 && list.pieces[i].data == NULL)
            status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: a piece of \"%.200s\" has no data",
                                  list.pieces[i].name);
    }
    return status;
}

#endif
