/* ---- >>piece ----
 * What a program's state consists of, as pieces: an FSDP's slices, a replicated table with its optimizer, and the
 * program's own. The same list, made by the same calls, says what is saved and where it goes when it is loaded. */
#ifndef DTRAIN__PIECE
#define DTRAIN__PIECE
#include "index.c"
#include "../shard/fsdp_create.c"

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

/* Layer `layer` of a parameter, or with -1 all of it, as a box of the tensor of the whole model: of a part of several
 * blocks the box of all of them, which the caller cuts. */
static dtrain_piece dtrain__piece_of(const dtrain_param *param, dtrain_dtype dtype, int layer)
{
    const dtrain_param_part *part = param->part;
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.name = param->name;
    piece.dtype = dtype;
    piece.ndim = dtrain__params_ndim(param);
    piece.device = param->device;
    piece.boxed = layer >= 0;
    memcpy(piece.shape, part != NULL ? part->shape : param->shape, (size_t)piece.ndim * sizeof *piece.shape);
    memcpy(piece.box_size, param->shape, (size_t)piece.ndim * sizeof *piece.box_size);
    if (layer >= 0) {
        piece.box_begin[0] = (size_t)layer;
        piece.box_size[0] = 1;
    }
    piece.count = dtrain__region_product(piece.box_size, 0, piece.ndim);
    if (part == NULL)
        return piece;
    int cut = dtrain__params_cut_dim(param);
    piece.box_begin[0] += part->first_layer;
    if (cut >= 0)
        piece.box_begin[cut] = part->begin;
    for (int d = 0; d < piece.ndim; d++)
        piece.boxed |= piece.box_size[d] != piece.shape[d];
    return piece;
}

/* Copies that are made of a piece, times those of the parameter's part. */
static void dtrain__piece_copies(dtrain_piece *piece, const dtrain_param *param, int copies, int copy)
{
    int parts = param->part != NULL && param->part->copies > 0 ? param->part->copies : 1;
    piece->copies = (copies > 0 ? copies : 1) * parts;
    piece->copy = copy * parts + (param->part != NULL ? param->part->copy : 0);
}

/* Cuts a piece whose box holds several blocks: in the order of elements a row of the dimensions before the cut one has
 * its share of each block, one after the other. */
static void dtrain__piece_put_blocks(dtrain__piece_list *list, const dtrain_param *param, const dtrain_piece *all)
{
    int cut = dtrain__params_cut_dim(param);
    size_t blocks = dtrain__params_blocks(param), mine = all->box_size[cut] / blocks, whole = all->shape[cut] / blocks;
    size_t run = mine * dtrain__region_product(all->box_size, cut + 1, all->ndim);
    for (size_t at = all->begin, end = all->begin + all->count; at < end;) {
        dtrain_piece piece = *all;
        size_t row = at / run / blocks, left = run - at % run;
        for (int d = cut - 1; d >= 0; d--) {
            piece.box_begin[d] += row % all->box_size[d];
            piece.box_size[d] = 1;
            row /= all->box_size[d];
        }
        piece.box_begin[cut] += at / run % blocks * whole;
        piece.box_size[cut] = mine;
        piece.begin = at % run;
        piece.count = left < end - at ? left : end - at;
        if (all->data != NULL)
            piece.data = (unsigned char *)all->data + (at - all->begin) * (dtrain_dtype_bits(all->dtype) / 8);
        dtrain__piece_put(list, &piece);
        at += piece.count;
    }
}

/* Puts a range of a parameter's box into the list. One of no elements says that the rank knows the tensor. */
static void dtrain__piece_put_range(dtrain__piece_list *list, const dtrain_param *param, dtrain_piece *piece)
{
    int cut = param->part != NULL ? dtrain__params_cut_dim(param) : -1;
    int blocks = cut >= 0 && param->shape[cut] != param->part->shape[cut] && dtrain__params_blocks(param) > 1;
    if (blocks && piece->count > 0) {
        dtrain__piece_put_blocks(list, param, piece);
        return;
    }
    if (blocks) { /* the box of all blocks may reach beyond the tensor */
        piece->box_size[cut] = 0;
        piece->begin = 0;
    }
    dtrain__piece_put(list, piece);
}

/* Weights, or with which 0 or 1 the state, of an FSDP's slices. */
static void dtrain__piece_fsdp(const dtrain_fsdp *fsdp, int which, dtrain__piece_list *list)
{
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain_slice *slice = &fsdp->slices[i];
        const dtrain_param *param = &layout->table[layout->cuts[i].param];
        if (slice->dtype != DTRAIN_F32 || (which >= 0 && !layout->cuts[i].trained))
            continue;
        dtrain_piece piece = dtrain__piece_of(param, DTRAIN_F32, slice->layer);
        piece.suffix = which >= 0 ? dtrain__piece_suffix(&fsdp->optimizer, which) : NULL;
        piece.begin = slice->begin;
        piece.count = slice->count;
        dtrain__piece_copies(&piece, param, layout->copies, dtrain__fsdp_rank(fsdp) / layout->shards);
        if (layout->shards > 1 && piece.copies > layout->copies) {
            /* Slices of a unit depend on the sizes of all its ranges, which differ between these copies. */
            piece.copies = layout->copies;
            piece.copy = dtrain__fsdp_rank(fsdp) / layout->shards;
            piece.unsaved = param->part->copy > 0;
        }
        piece.data = which >= 0 ? slice->state[which] : slice->weights;
        dtrain__piece_put_range(list, param, &piece);
    }
    for (size_t i = 0; i < layout->table_count && which < 0; i++) {
        const dtrain_param *param = &layout->table[i];
        if (param->dtype == DTRAIN_F32) /* others are frozen, and in full on every rank */
            continue;
        dtrain_piece piece = dtrain__piece_of(param, param->dtype, -1);
        dtrain__piece_copies(&piece, param, dtrain_comm_size(fsdp->comm), dtrain__fsdp_rank(fsdp));
        piece.data = param->data;
        dtrain__piece_put_range(list, param, &piece);
    }
}

DTRAIN_API dtrain_status dtrain_fsdp_pieces(dtrain_fsdp *fsdp, dtrain_piece *pieces, size_t capacity, size_t *count)
{
    dtrain__piece_list list = {pieces, capacity, 0};
    if (fsdp == NULL || count == NULL || (pieces == NULL && capacity > 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_pieces: fsdp, count, and room for capacity pieces are needed, got NULL");
    int floats = (int)dtrain__fsdp_plan_state_floats(&fsdp->optimizer);
    for (int which = -1; which < floats; which++)
        dtrain__piece_fsdp(fsdp, which, &list);
    *count = list.count;
    return DTRAIN_OK;
}

/* The state of one parameter's ranges. Returns 0 where the optimizer does not know the parameter, there. */
static int dtrain__piece_state(const dtrain_param *param, const dtrain_optimizer *optimizer, int copies, int copy,
                               int which, dtrain__piece_list *list)
{
    size_t layers = dtrain__params_layers(param), each = layers > 0 ? dtrain_param_elements(param) / layers : 0;
    if (optimizer->device != param->device)
        return 0;
    for (size_t layer = 0; layer < layers && each > 0; layer++) {
        dtrain_piece piece = dtrain__piece_of(param, DTRAIN_F32, param->stacked ? (int)layer : -1);
        piece.suffix = dtrain__piece_suffix(&optimizer->desc, which);
        dtrain__piece_copies(&piece, param, copies, copy);
        piece.data = dtrain_optimizer_state(optimizer, (const float *)param->data + layer * each, which);
        if (piece.data == NULL)
            return 0;
        dtrain__piece_put_range(list, param, &piece);
    }
    return 1;
}

DTRAIN_API dtrain_status dtrain_params_pieces(const dtrain_param *table, size_t table_count,
                                              const dtrain_optimizer *optimizer, int copies, int copy,
                                              dtrain_piece *pieces, size_t capacity, size_t *count)
{
    dtrain__piece_list list = {pieces, capacity, 0};
    int states = 0;
    dtrain_status status = dtrain__params_check(table, table_count);
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
            dtrain_piece piece = dtrain__piece_of(&table[i], table[i].dtype, -1);
            dtrain__piece_copies(&piece, &table[i], copies, copy);
            piece.data = table[i].data;
            if (which < 0)
                dtrain__piece_put_range(&list, &table[i], &piece);
            else if (dtrain__params_trained(&table[i]) &&
                     !dtrain__piece_state(&table[i], optimizer, copies, copy, which, &list))
                return dtrain__fail(
                    NULL, DTRAIN_ERR_INVALID,
                    "checkpoint: the optimizer knows no parameter at \"%s\"'s data on %s: give the table that "
                    "it was made from",
                    table[i].name, dtrain_device_name(table[i].device));
        }
    *count = list.count;
    return DTRAIN_OK;
}

/* A state's FSDPs: fsdp, where there is one, and fsdps. */
static size_t dtrain__piece_fsdp_count(const dtrain_checkpoint_state *state)
{
    return (state->fsdp != NULL) + state->fsdp_count;
}

static dtrain_fsdp *dtrain__piece_fsdp_at(const dtrain_checkpoint_state *state, size_t i)
{
    if (state->fsdp != NULL && i == 0)
        return state->fsdp;
    return state->fsdps != NULL ? state->fsdps[i - (state->fsdp != NULL)] : NULL;
}

/* What is left of a list's memory, for calls that list more. */
static dtrain_piece *dtrain__piece_room(const dtrain__piece_list *list, size_t *room)
{
    *room = list->capacity > list->count ? list->capacity - list->count : 0;
    return *room > 0 ? list->pieces + list->count : NULL;
}

/* Lists all pieces of a state. */
static dtrain_status dtrain__piece_list_state(dtrain__piece_list *list, const dtrain_checkpoint_state *state, int ranks,
                                              int rank)
{
    size_t count = 0, room, fsdps = dtrain__piece_fsdp_count(state);
    for (size_t i = 0; i < fsdps; i++) {
        dtrain_fsdp *fsdp = dtrain__piece_fsdp_at(state, i);
        if (fsdp == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "checkpoint: %zu fsdps are promised, but number %zu is NULL: give each, or count fewer",
                                fsdps, i);
        dtrain_piece *pieces = dtrain__piece_room(list, &room);
        dtrain_status status = dtrain_fsdp_pieces(fsdp, pieces, room, &count);
        if (status != DTRAIN_OK)
            return status;
        list->count += count;
    }
    if (state->table_count > 0) {
        int all = state->table_copies <= 0;
        dtrain_piece *pieces = dtrain__piece_room(list, &room);
        dtrain_status status =
            dtrain_params_pieces(state->table, state->table_count, state->optimizer, all ? ranks : state->table_copies,
                                 all ? rank : state->table_copy, pieces, room, &count);
        if (status != DTRAIN_OK)
            return status;
        list->count += count;
    }
    if (state->piece_count > 0 && state->pieces == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: %zu pieces are promised, but pieces is NULL",
                            state->piece_count);
    for (size_t i = 0; i < state->piece_count; i++)
        dtrain__piece_put(list, &state->pieces[i]);
    return DTRAIN_OK;
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
        step = dtrain__utf8((const unsigned char *)piece->name + at, length - at);
        if (step == 0)
            return "is not UTF-8";
    }
    return NULL;
}

/* Lists and checks all pieces of a state, in memory that grows. */
static dtrain_status dtrain__piece_collect(dtrain_piece **pieces, size_t *count, const dtrain_checkpoint_state *state,
                                           int ranks, int rank, dtrain_allocator *allocator)
{
    dtrain__piece_list list = {NULL, 0, 0};
    dtrain__region region;
    dtrain_status status = dtrain__piece_list_state(&list, state, ranks, rank);
    if (status != DTRAIN_OK)
        return status;
    dtrain_piece *larger = (dtrain_piece *)dtrain__memory_grow(allocator, *pieces, sizeof **pieces, 0, list.count);
    if (larger == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of %zu pieces", list.count);
    *pieces = list.pieces = larger;
    list.capacity = dtrain__memory_bytes(larger) / sizeof *larger;
    *count = list.count;
    list.count = 0;
    status = dtrain__piece_list_state(&list, state, ranks, rank);
    for (size_t i = 0; i < *count && status == DTRAIN_OK; i++) {
        status = dtrain__region_check(&region, &list.pieces[i], i, "checkpoint");
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
