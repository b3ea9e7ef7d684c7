/* ---- >>state ----
 * Lists of pieces for checkpoints: a table of parameters with its optimizer, a sampler, a schedule. Parameters that are
 * parts give pieces of the whole model's tensors. */
#ifndef DTRAIN__STATE
#define DTRAIN__STATE
#include "../tensor/pieces.c"
#include "params.c"
#include "optimizer.c"

static const char *dtrain__state_suffix(const dtrain_optimizer_desc *optimizer, int which)
{
    return dtrain__pieces_suffix(optimizer->kind == DTRAIN_ADAMW ? which : 2);
}

/* Returns layer `layer` of a parameter, or with -1 all of it, as a box of the whole model's tensor. A part of several
 * blocks gives the box of all of them, which the caller cuts. */
static dtrain_piece dtrain__state_of(const dtrain_param *param, dtrain_dtype dtype, int layer)
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
    piece.count = dtrain__pieces_product(piece.box_size, 0, piece.ndim);
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

/* Sets the copies of a piece: those given, times those of the parameter's part. */
static void dtrain__state_copies(dtrain_piece *piece, const dtrain_param *param, int copies, int copy)
{
    int parts = param->part != NULL && param->part->copies > 0 ? param->part->copies : 1;
    piece->copies = (copies > 0 ? copies : 1) * parts;
    piece->copy = copy * parts + (param->part != NULL ? param->part->copy : 0);
}

/* Cuts a piece whose box holds several blocks into runs. In the order of elements, each index of the dimensions before
 * the cut one has its share of block 0, then of block 1, and so on. */
static void dtrain__state_put_blocks(dtrain__lister *lister, const dtrain_param *param, const dtrain_piece *all)
{
    int cut = dtrain__params_cut_dim(param);
    size_t blocks = dtrain__params_blocks(param), mine = all->box_size[cut] / blocks, whole = all->shape[cut] / blocks;
    size_t run = mine * dtrain__pieces_product(all->box_size, cut + 1, all->ndim);
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
        dtrain__pieces_put(lister, &piece);
        at += piece.count;
    }
}

/* Puts a range of a parameter's box into the list. An empty one says that the rank knows the tensor. */
static void dtrain__state_put_range(dtrain__lister *lister, const dtrain_param *param, dtrain_piece *piece)
{
    int cut = param->part != NULL ? dtrain__params_cut_dim(param) : -1;
    int blocks = cut >= 0 && param->shape[cut] != param->part->shape[cut] && dtrain__params_blocks(param) > 1;
    if (blocks && piece->count > 0) {
        dtrain__state_put_blocks(lister, param, piece);
        return;
    }
    if (blocks) { /* the box of all blocks may reach beyond the tensor */
        piece->box_size[cut] = 0;
        piece->begin = 0;
    }
    dtrain__pieces_put(lister, piece);
}

/* Lists an optimizer's settings and number of steps. */
static void dtrain__state_tell(dtrain__lister *lister, const dtrain_optimizer_desc *o, uint64_t step)
{
    dtrain__pieces_tell(lister, "optimizer.kind",
                        o->kind == DTRAIN_SGD     ? "sgd"
                        : o->kind == DTRAIN_ADAMW ? "adamw"
                                                  : "none",
                        0);
    dtrain__pieces_tell_u64(lister, "optimizer.step", step, 0);
    dtrain__pieces_tell_f64(lister, "optimizer.beta1", (double)o->beta1, 0);
    dtrain__pieces_tell_f64(lister, "optimizer.beta2", (double)o->beta2, 0);
    dtrain__pieces_tell_f64(lister, "optimizer.eps", (double)o->eps, 0);
    dtrain__pieces_tell_f64(lister, "optimizer.weight_decay", (double)o->weight_decay, 0);
    dtrain__pieces_tell_f64(lister, "optimizer.momentum", (double)o->momentum, 0);
    dtrain__pieces_tell_u64(lister, "optimizer.nesterov", o->nesterov != 0, 0);
    dtrain__pieces_tell_u64(lister, "optimizer.decoupled_decay", o->decoupled_decay != 0, 0);
}

/* Lists the optimizer state of one parameter's ranges. One without elements has empty ones, so that a checkpoint names
 * what each object does that has the parameter. Returns 0 if the optimizer does not have it at this address. */
static int dtrain__state_put_moments(const dtrain_param *param, const dtrain_optimizer *optimizer, int copies, int copy,
                                     int which, dtrain__lister *lister)
{
    size_t all = dtrain_param_elements(param), layers = all > 0 ? dtrain__params_layers(param) : 1, each = all / layers;
    if (optimizer->device != param->device)
        return 0;
    for (size_t layer = 0; layer < layers; layer++) {
        dtrain_piece piece = dtrain__state_of(param, DTRAIN_F32, param->stacked && all > 0 ? (int)layer : -1);
        piece.suffix = dtrain__state_suffix(&optimizer->desc, which);
        dtrain__state_copies(&piece, param, copies, copy);
        piece.data = dtrain__optimizer_state(optimizer, (const float *)param->data + layer * each, which);
        if (piece.data == NULL && each > 0)
            return 0;
        dtrain__state_put_range(lister, param, &piece);
    }
    return 1;
}

static dtrain_status dtrain__state_list_params(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_param *table = (const dtrain_param *)list->table;
    const dtrain_optimizer *optimizer = (const dtrain_optimizer *)list->object;
    int copies = list->copies != 0 ? list->copies : lister->ranks, states = 0;
    int copy = list->copies != 0 ? list->copy : lister->rank;
    dtrain_status status = dtrain__params_check(table, list->count);
    if (status != DTRAIN_OK)
        return status;
    if (copy < 0 || copy >= copies)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_params_pieces: copy is %d of %d copies, expected 0 to copies - 1", copy, copies);
    if (optimizer != NULL)
        states = optimizer->desc.kind == DTRAIN_ADAMW ? 2 : optimizer->desc.momentum != 0.0f;
    for (int which = -1; which < states; which++)
        for (size_t i = 0; i < list->count; i++) {
            dtrain_piece piece = dtrain__state_of(&table[i], table[i].dtype, -1);
            dtrain__state_copies(&piece, &table[i], copies, copy);
            piece.data = table[i].data;
            if (which < 0)
                dtrain__state_put_range(lister, &table[i], &piece);
            else if (dtrain__params_trained(&table[i]) &&
                     !dtrain__state_put_moments(&table[i], optimizer, copies, copy, which, lister))
                return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                    "dtrain_params_pieces: the optimizer knows no parameter at \"%s\"'s data on %s: "
                                    "give the table that "
                                    "it was made from",
                                    table[i].name, dtrain_device_name(table[i].device));
        }
    if (optimizer != NULL)
        dtrain__state_tell(lister, &optimizer->desc, optimizer->step);
    return DTRAIN_OK;
}

static dtrain_status dtrain__state_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    dtrain_optimizer *optimizer = (dtrain_optimizer *)list->object;
    if (optimizer == NULL)
        return DTRAIN_OK;
    return dtrain__pieces_ask(lister, "optimizer.step", UINT64_MAX, &optimizer->step, NULL);
}

DTRAIN_API dtrain_pieces dtrain_params_pieces(const dtrain_param *table, size_t count, dtrain_optimizer *optimizer)
{
    dtrain_pieces list = dtrain__pieces_make(optimizer, dtrain__state_list_params, dtrain__state_loaded);
    list.table = table;
    list.count = count;
    return list;
}

static dtrain_status dtrain__state_list_sampler(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_sampler_desc *desc = &((const dtrain_sampler *)list->object)->desc;
    dtrain__pieces_tell_u64(lister, "sampler.count", desc->count, 1);
    dtrain__pieces_tell_u64(lister, "sampler.seed", desc->seed, 1);
    dtrain__pieces_tell_u64(lister, "sampler.no_shuffle", desc->no_shuffle != 0, 1);
    dtrain__pieces_tell_u64(lister, "sampler.batch", desc->batch, 1);
    dtrain__pieces_tell_u64(lister, "sampler.micro_batches", (uint64_t)desc->micro_batches, 1);
    dtrain__pieces_tell_u64(lister, "sampler.strided", desc->strided != 0, 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_sampler_pieces(const dtrain_sampler *sampler)
{
    return dtrain__pieces_make(sampler, dtrain__state_list_sampler, NULL);
}

static dtrain_status dtrain__state_list_schedule(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_schedule *schedule = (const dtrain_schedule *)list->object;
    dtrain__pieces_tell(lister, "schedule.kind",
                        schedule->kind == DTRAIN_SCHEDULE_LINEAR   ? "linear"
                        : schedule->kind == DTRAIN_SCHEDULE_COSINE ? "cosine"
                                                                   : "constant",
                        1);
    dtrain__pieces_tell_f64(lister, "schedule.lr", (double)schedule->lr, 1);
    dtrain__pieces_tell_f64(lister, "schedule.min_lr", (double)schedule->min_lr, 1);
    dtrain__pieces_tell_u64(lister, "schedule.warmup_steps", schedule->warmup_steps, 1);
    dtrain__pieces_tell_u64(lister, "schedule.total_steps", schedule->total_steps, 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_schedule_pieces(const dtrain_schedule *schedule)
{
    return dtrain__pieces_make(schedule, dtrain__state_list_schedule, NULL);
}

#endif
