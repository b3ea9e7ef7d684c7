/* ---- >>selections ----
 * The all-reduce of selections. In form GATHER every rank gets every selection and merges them by the tree. In form
 * SPLIT each rank merges its part of the vector, and all get the merged parts. A merge adds elements that both have and
 * copies those that one has. So sums have the bits of the dense tree with zeros for absent elements; at the end -0
 * becomes 0. Lengths are exchanged before data. A device selects from its own vector and gets the sums as a list; the
 * CPU merges in either case. */
#ifndef DTRAIN__SELECTIONS
#define DTRAIN__SELECTIONS
#include "compress.h"
#include "topk.c"
#include "sparse.c"
#include "feedback.c"
#include "device_vector.c"
#include "../comm/collectives.c"
DTRAIN__FAST_BEGIN

typedef struct dtrain__selections_state {
    dtrain_allocator heap, *allocator;
    dtrain_topk_desc desc;
    float step[2]; /* see >>feedback */
    int ranks;
    dtrain__sparse chosen;
    dtrain__sparse *pieces;  /* 2 * ranks: one level of the tree, and the next */
    uint64_t *sizes;         /* 2 * ranks: bytes to each rank, from each rank */
    size_t *numbers;         /* 5 * ranks + 1: the same bytes as counts and offsets, then the bounds of parts */
    unsigned char *out, *in; /* packed selections that are sent and received; they grow */
} dtrain__selections_state;

/* The arguments of one call. */
typedef struct dtrain__selections {
    dtrain__selections_state *state;
    dtrain__device_vector *v;
    uint64_t *sent;
    int rank, ranks;
} dtrain__selections;

static void dtrain__selections_free(dtrain__selections_state *state)
{
    size_t n = (size_t)state->ranks;
    for (size_t i = 0; state->pieces != NULL && i < 2 * n; i++)
        dtrain__sparse_destroy(&state->pieces[i]);
    dtrain__free(state->allocator, state->pieces);
    dtrain__free(state->allocator, state->sizes);
    dtrain__free(state->allocator, state->numbers);
    state->pieces = NULL;
    state->sizes = NULL;
    state->numbers = NULL;
    state->ranks = 0;
}

/* Allocates for a group of so many ranks. */
static dtrain_status dtrain__selections_open(dtrain__selections_state *state, int ranks)
{
    size_t n = (size_t)ranks;
    if (state->ranks == ranks)
        return DTRAIN_OK;
    dtrain__selections_free(state);
    state->ranks = ranks;
    state->pieces = (dtrain__sparse *)dtrain__alloc(state->allocator, 2 * n * sizeof(dtrain__sparse));
    state->sizes = (uint64_t *)dtrain__alloc(state->allocator, 2 * n * sizeof(uint64_t));
    state->numbers = (size_t *)dtrain__alloc(state->allocator, (5 * n + 1) * sizeof(size_t));
    if (state->pieces == NULL || state->sizes == NULL || state->numbers == NULL) {
        dtrain__selections_free(state);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "topk: no memory for the pieces of %d ranks", ranks);
    }
    for (size_t i = 0; i < 2 * n; i++)
        state->pieces[i].allocator = state->allocator;
    return DTRAIN_OK;
}

/* out = a + b; an element that only one has is copied. */
static dtrain_status dtrain__selections_merge(const dtrain__sparse *a, const dtrain__sparse *b, dtrain__sparse *out)
{
    dtrain_status status = dtrain__topk_reserve(out, a->count + b->count);
    size_t i = 0, j = 0, n = 0;
    if (status != DTRAIN_OK)
        return status;
    while (i < a->count && j < b->count) {
        uint32_t left = a->indices[i], right = b->indices[j];
        out->indices[n] = left < right ? left : right;
        out->values[n++] = left == right ? a->values[i] + b->values[j] : left < right ? a->values[i] : b->values[j];
        i += left <= right;
        j += right <= left;
    }
    const dtrain__sparse *rest = i < a->count ? a : b;
    size_t from = i < a->count ? i : j, more = rest->count - from;
    if (more > 0) {
        memcpy(out->indices + n, rest->indices + from, more * sizeof(uint32_t));
        memcpy(out->values + n, rest->values + from, more * sizeof(float));
    }
    out->count = n + more;
    out->original_count = a->original_count;
    return DTRAIN_OK;
}

/* Merges the pieces of all ranks by the tree: neighbours first; a piece without a neighbour goes up as it is. */
static dtrain_status dtrain__selections_fold(dtrain__selections *x, dtrain__sparse **merged)
{
    dtrain__sparse *from = x->state->pieces, *to = from + x->ranks, nothing;
    dtrain_status status = DTRAIN_OK;
    memset(&nothing, 0, sizeof nothing);
    for (int n = x->ranks; status == DTRAIN_OK && n > 1; n = (n + 1) / 2) {
        for (int i = 0; status == DTRAIN_OK && i < n; i += 2)
            status = dtrain__selections_merge(&from[i], i + 1 < n ? &from[i + 1] : &nothing, &to[i / 2]);
        dtrain__sparse *next = to;
        to = from;
        from = next;
    }
    *merged = &from[0];
    return status == DTRAIN_OK ? status : dtrain__feedback_broken(x->v->comm, status, x->rank);
}

/* Rounds values to the dtype in which they are sent. */
static void dtrain__selections_round(const dtrain__selections_state *state, dtrain__sparse *sparse)
{
    unsigned char tile[2 * DTRAIN__SPARSE_TILE];
    dtrain_dtype wire = state->desc.values;
    for (size_t at = 0; wire != DTRAIN_F32 && at < sparse->count; at += DTRAIN__SPARSE_TILE) {
        size_t n = sparse->count - at < DTRAIN__SPARSE_TILE ? sparse->count - at : DTRAIN__SPARSE_TILE;
        dtrain__dtype_convert(sparse->values + at, DTRAIN_F32, tile, wire, n);
        dtrain__dtype_convert(tile, wire, sparse->values + at, DTRAIN_F32, n);
    }
}

/* Returns x, or 0 for -0. */
static float dtrain__selections_unsigned(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits == 0x80000000u ? 0 : bits;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Breaks the group if this rank has no memory for its part of the exchange. */
static dtrain_status dtrain__selections_broken(const dtrain__selections *x, dtrain_status status)
{
    return dtrain__device_vector_broken(x->v->comm, x->v->device, status);
}

/* Counts a step. Returns how many elements it selects. */
static size_t dtrain__selections_next(dtrain__selections *x)
{
    dtrain__selections_state *state = x->state;
    uint64_t step = dtrain__feedback_steps(state->step);
    dtrain__feedback_set_steps(state->step, step + 1);
    return dtrain_topk_count(x->v->count, dtrain__topk_ratio(&state->desc.schedule, step));
}

/* Selects on the device, rounds, and updates residual and velocity there. */
static dtrain_status dtrain__selections_select_there(dtrain__selections *x, const float *in)
{
    dtrain__sparse *chosen = &x->state->chosen;
    size_t k = dtrain__selections_next(x);
    dtrain_status status = dtrain__topk_reserve(chosen, k);
    if (status != DTRAIN_OK)
        return dtrain__selections_broken(x, status);
    status = dtrain__device_vector_select(x->v, in, k);
    if (status != DTRAIN_OK)
        return status;
    if (k > 0) {
        memcpy(chosen->indices, x->v->chosen.indices, k * sizeof(uint32_t));
        memcpy(chosen->values, x->v->chosen.values, k * sizeof(float));
    }
    chosen->count = k;
    chosen->original_count = x->v->count;
    dtrain__selections_round(x->state, chosen);
    return dtrain__device_vector_leave(x->v, chosen->values);
}

/* Selects and rounds on the CPU. The rest stays in the residual; the velocity of what is sent becomes 0. NaN and
 * infinity are chosen first, so only then may more of them be left. */
static dtrain_status dtrain__selections_select(dtrain__selections *x, const float *in)
{
    const dtrain__device_vector *v = x->v;
    dtrain__sparse *chosen = &x->state->chosen;
    size_t k = dtrain__selections_next(x);
    dtrain_status status = v->residual != NULL ? dtrain__topk_add(v->residual, in, v->count, k, chosen)
                                               : dtrain__topk_pick(in, v->count, k, chosen);
    if (status != DTRAIN_OK)
        return dtrain__selections_broken(x, status);
    if (dtrain__device_unbounded(DTRAIN_F32, chosen->values, chosen->count)) {
        dtrain__feedback_finite(v->residual, v->count);
        dtrain__feedback_finite(v->velocity, v->count);
    }
    dtrain__selections_round(x->state, chosen);
    for (size_t i = 0; v->residual != NULL && i < chosen->count; i++)
        v->residual[chosen->indices[i]] = dtrain__feedback_bounded(v->residual[chosen->indices[i]] - chosen->values[i]);
    for (size_t i = 0; v->velocity != NULL && v->masks && i < chosen->count; i++)
        v->velocity[chosen->indices[i]] = 0.0f;
    return DTRAIN_OK;
}

/* Turns announced sizes into counts and offsets. Each is of a selection from at most `most` elements. */
static dtrain_status dtrain__selections_place(dtrain__selections *x, const uint64_t *sizes, size_t most, size_t *counts,
                                              size_t *offsets, size_t *total)
{
    *total = 0;
    for (int r = 0; r < x->ranks; r++) {
        if (sizes[r] > DTRAIN__SPARSE_HEADER + 9 * (uint64_t)most) {
            dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                         "it announces %llu bytes, more than a selection of %zu elements can have",
                         (unsigned long long)sizes[r], most);
            return dtrain__feedback_broken(x->v->comm, DTRAIN_ERR_CORRUPT, r);
        }
        counts[r] = (size_t)sizes[r];
        offsets[r] = *total;
        *total += counts[r];
    }
    return DTRAIN_OK;
}

/* Unpacks a piece. If it is corrupt, or there is no memory, the exchange ends for all ranks. */
static dtrain_status dtrain__selections_unpack(dtrain__selections *x, int from, size_t at, size_t bytes, size_t count,
                                               dtrain__sparse *piece)
{
    dtrain_status status = dtrain__sparse_unpack(piece, x->state->in + at, bytes, count);
    return status == DTRAIN_OK ? status : dtrain__feedback_broken(x->v->comm, status, from);
}

/* Begins a result with at most `most` elements that are not 0. */
static dtrain_status dtrain__selections_begin(dtrain__selections *x, size_t most)
{
    if (x->v->device != NULL)
        return dtrain__device_vector_begin(x->v, &x->v->sums, most);
    if (x->v->count > 0)
        memset(x->v->out, 0, x->v->count * sizeof(float));
    return DTRAIN_OK;
}

/* Writes elements of the part of the result that begins at `begin`. */
static void dtrain__selections_write(dtrain__selections *x, const dtrain__sparse *sparse, size_t begin)
{
    dtrain__device_elements *list = x->v->device != NULL ? &x->v->sums : NULL;
    for (size_t i = 0; list != NULL && i < sparse->count; i++) {
        list->indices[list->count] = (uint32_t)(begin + sparse->indices[i]);
        list->values[list->count++] = sparse->values[i];
    }
    for (size_t i = 0; list == NULL && i < sparse->count; i++)
        x->v->out[begin + sparse->indices[i]] = dtrain__selections_unsigned(sparse->values[i]);
}

static dtrain_status dtrain__selections_end(dtrain__selections *x)
{
    return x->v->device != NULL ? dtrain__device_vector_end(x->v) : DTRAIN_OK;
}

/* All-reduces the whole vectors, because the selections are longer. */
static dtrain_status dtrain__selections_dense(dtrain__selections *x)
{
    dtrain__device_vector *v = x->v;
    float *out = v->out;
    dtrain_status status = DTRAIN_OK;
    if (v->device != NULL) {
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_WHOLE, v->count * sizeof(float));
        out = dtrain__device_vector_floats(v, DTRAIN__DEVICE_WHOLE);
    }
    if (status != DTRAIN_OK)
        return dtrain__device_vector_broken(v->comm, v->device, status);
    dtrain__sparse_write(&x->state->chosen, out);
    *x->sent += dtrain__plan_sent_bytes(v->count, x->ranks);
    status = dtrain_all_reduce(v->comm, out, out, v->count, DTRAIN_F32, DTRAIN_SUM);
    for (size_t i = 0; status == DTRAIN_OK && i < v->count; i++)
        out[i] = dtrain__selections_unsigned(out[i]);
    if (status != DTRAIN_OK || v->device == NULL)
        return status;
    status = dtrain_device_copy(v->device, v->out, out, v->count * sizeof(float));
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Announces the size of what this rank gives to all. Finds where the selections of all ranks arrive; *total: bytes. */
static dtrain_status dtrain__selections_announce(dtrain__selections *x, const dtrain__sparse *mine,
                                                 dtrain_index_form *form, size_t *total)
{
    dtrain__selections_state *state = x->state;
    *form = state->desc.indices;
    uint64_t bytes = dtrain__sparse_size(mine, state->desc.values, form);
    dtrain_status status = dtrain_all_gather(x->v->comm, &bytes, state->sizes, (size_t)x->ranks, DTRAIN_U64);
    *x->sent += 8 * (uint64_t)(x->ranks - 1);
    return status == DTRAIN_OK ? dtrain__selections_place(x, state->sizes, x->v->count, state->numbers,
                                                          state->numbers + x->ranks, total)
                               : status;
}

/* Gathers the packed selections of all ranks. */
static dtrain_status dtrain__selections_exchange(dtrain__selections *x, const dtrain__sparse *mine,
                                                 dtrain_index_form form, size_t total)
{
    dtrain__selections_state *state = x->state;
    size_t *counts = state->numbers, *offsets = counts + x->ranks;
    dtrain_status status = dtrain__feedback_reserve(&state->in, state->allocator, total);
    if (status != DTRAIN_OK)
        return dtrain__selections_broken(x, status);
    dtrain__sparse_pack(mine, state->desc.values, form, state->in + offsets[x->rank]);
    *x->sent += counts[x->rank] * (uint64_t)(x->ranks - 1);
    return dtrain_all_gather_v(x->v->comm, state->in + offsets[x->rank], state->in, counts, offsets, DTRAIN_U8);
}

static dtrain_status dtrain__selections_gather(dtrain__selections *x)
{
    dtrain__selections_state *state = x->state;
    const size_t *counts = state->numbers, *offsets = counts + x->ranks;
    dtrain_index_form form;
    size_t total = 0;
    dtrain__sparse *merged = NULL;
    dtrain_status status = dtrain__selections_announce(x, &state->chosen, &form, &total);
    if (status == DTRAIN_OK && x->ranks > 1 && (uint64_t)total > 8 * (uint64_t)x->v->count)
        return dtrain__selections_dense(x);
    if (status == DTRAIN_OK)
        status = dtrain__selections_exchange(x, &state->chosen, form, total);
    for (int r = 0; status == DTRAIN_OK && r < x->ranks; r++)
        status = dtrain__selections_unpack(x, r, offsets[r], counts[r], x->v->count, &state->pieces[r]);
    if (status == DTRAIN_OK)
        status = dtrain__selections_fold(x, &merged);
    if (status == DTRAIN_OK)
        status = dtrain__selections_begin(x, merged->count);
    if (status != DTRAIN_OK)
        return status;
    dtrain__selections_write(x, merged, 0);
    return dtrain__selections_end(x);
}

/* Returns the elements of the selection in a rank's part of the vector, by the bounds of parts. */
static dtrain__sparse dtrain__selections_part(const dtrain__selections *x, int rank)
{
    const size_t *bounds = x->state->numbers + 4 * (size_t)x->ranks;
    dtrain__sparse part;
    memset(&part, 0, sizeof part);
    part.original_count = dtrain__split(x->v->count, x->ranks, rank, NULL);
    part.indices = x->state->chosen.indices + bounds[rank];
    part.values = x->state->chosen.values + bounds[rank];
    part.count = bounds[rank + 1] - bounds[rank];
    return part;
}

/* Finds the bounds of parts. Indices count from the begin of their part afterwards. */
static void dtrain__selections_cut(dtrain__selections *x)
{
    const dtrain__sparse *chosen = &x->state->chosen;
    size_t *bounds = x->state->numbers + 4 * (size_t)x->ranks, next = 0;
    for (int r = 0; r < x->ranks; r++) {
        size_t begin, count = dtrain__split(x->v->count, x->ranks, r, &begin);
        bounds[r] = next;
        while (next < chosen->count && chosen->indices[next] < begin + count)
            chosen->indices[next++] -= (uint32_t)begin;
    }
    bounds[x->ranks] = next;
}

/* Packs each rank's part of the selection. */
static dtrain_status dtrain__selections_pack_parts(dtrain__selections *x, size_t *counts, size_t *offsets)
{
    dtrain__selections_state *state = x->state;
    dtrain_status status = DTRAIN_OK;
    size_t at = 0;
    dtrain__selections_cut(x);
    for (int pass = 0; status == DTRAIN_OK && pass < 2; pass++) {
        for (int r = 0; r < x->ranks; r++) {
            dtrain_index_form form = state->desc.indices;
            dtrain__sparse part = dtrain__selections_part(x, r);
            counts[r] = dtrain__sparse_size(&part, state->desc.values, &form);
            state->sizes[r] = counts[r];
            if (pass == 1) {
                dtrain__sparse_pack(&part, state->desc.values, form, state->out + offsets[r]);
                *x->sent += r != x->rank ? 8 + counts[r] : 0;
                continue;
            }
            offsets[r] = at;
            at += counts[r];
        }
        status = dtrain__feedback_reserve(&state->out, state->allocator, at);
    }
    return dtrain__selections_broken(x, status);
}

/* Sends each rank its part of the selection, and unpacks what arrives for this rank's part. */
static dtrain_status dtrain__selections_scatter(dtrain__selections *x, size_t part)
{
    dtrain__selections_state *state = x->state;
    size_t n = (size_t)x->ranks, total = 0;
    size_t *counts = state->numbers, *offsets = counts + n, *in_counts = counts + 2 * n, *in_offsets = counts + 3 * n;
    dtrain_status status = dtrain__selections_pack_parts(x, counts, offsets);
    if (status == DTRAIN_OK)
        status = dtrain_all_to_all(x->v->comm, state->sizes, state->sizes + n, n, DTRAIN_U64);
    if (status == DTRAIN_OK)
        status = dtrain__selections_place(x, state->sizes + n, part, in_counts, in_offsets, &total);
    if (status == DTRAIN_OK)
        status = dtrain__selections_broken(x, dtrain__feedback_reserve(&state->in, state->allocator, total));
    if (status == DTRAIN_OK)
        status =
            dtrain_all_to_all_v(x->v->comm, state->out, counts, offsets, state->in, in_counts, in_offsets, DTRAIN_U8);
    for (int r = 0; status == DTRAIN_OK && r < x->ranks; r++)
        status = dtrain__selections_unpack(x, r, in_offsets[r], in_counts[r], part, &state->pieces[r]);
    return status;
}

/* Adds to the residual what is not passed on of an element in this rank's part. */
static void dtrain__selections_keep(dtrain__selections *x, size_t index, float left)
{
    dtrain__device_elements *kept = &x->v->kept;
    if (x->v->residual == NULL)
        return;
    if (x->v->device == NULL) {
        x->v->residual[index] = dtrain__feedback_bounded(x->v->residual[index] + left);
    } else {
        kept->indices[kept->count] = (uint32_t)index;
        kept->values[kept->count++] = left;
    }
}

/* Rounds the sums of the part to the dtype in which they are sent. What that loses goes to the residual. */
static void dtrain__selections_settle(dtrain__selections *x, dtrain__sparse *merged, size_t begin)
{
    float whole[DTRAIN__SPARSE_TILE];
    for (size_t at = 0; x->state->desc.values != DTRAIN_F32 && at < merged->count; at += DTRAIN__SPARSE_TILE) {
        size_t n = merged->count - at < DTRAIN__SPARSE_TILE ? merged->count - at : DTRAIN__SPARSE_TILE;
        dtrain__sparse tile = *merged;
        tile.count = n;
        tile.indices = merged->indices + at;
        tile.values = merged->values + at;
        memcpy(whole, tile.values, n * sizeof(float));
        dtrain__selections_round(x->state, &tile);
        for (size_t i = 0; i < n; i++)
            dtrain__selections_keep(x, begin + tile.indices[i], dtrain__feedback_bounded(whole[i] - tile.values[i]));
    }
}

/* Gathers every rank's sums, and unpacks each into its part of the result. */
static dtrain_status dtrain__selections_spread(dtrain__selections *x, const dtrain__sparse *merged)
{
    dtrain__selections_state *state = x->state;
    const size_t *counts = state->numbers, *offsets = counts + x->ranks;
    dtrain_index_form form;
    size_t total = 0, count = x->v->count;
    dtrain_status status = dtrain__selections_announce(x, merged, &form, &total);
    if (status == DTRAIN_OK)
        status = dtrain__selections_exchange(x, merged, form, total);
    if (status == DTRAIN_OK) /* every value has at least 2 bytes */
        status = dtrain__selections_begin(x, total / 2 < count ? total / 2 : count);
    for (int r = 0; status == DTRAIN_OK && r < x->ranks; r++) {
        size_t begin, part = dtrain__split(count, x->ranks, r, &begin);
        status = dtrain__selections_unpack(x, r, offsets[r], counts[r], part, &state->pieces[0]);
        if (status == DTRAIN_OK)
            dtrain__selections_write(x, &state->pieces[0], begin);
    }
    return status == DTRAIN_OK ? dtrain__selections_end(x) : status;
}

static dtrain_status dtrain__selections_split(dtrain__selections *x)
{
    dtrain__device_vector *v = x->v;
    size_t begin, part = dtrain__split(v->count, x->ranks, x->rank, &begin);
    dtrain__sparse *merged = NULL;
    dtrain_status status = dtrain__selections_scatter(x, part);
    if (status == DTRAIN_OK)
        status = dtrain__selections_fold(x, &merged);
    if (status == DTRAIN_OK && v->device != NULL)
        status = dtrain__device_vector_begin(v, &v->kept, merged->count);
    if (status == DTRAIN_OK)
        dtrain__selections_settle(x, merged, begin);
    if (status == DTRAIN_OK && v->device != NULL)
        status = dtrain__device_vector_keep(v);
    return status == DTRAIN_OK ? dtrain__selections_spread(x, merged) : status;
}

/* Sums over ranks what each sends of `in` and its residual into v->out. */
static dtrain_status dtrain__selections_run(const dtrain_compressor *compressor, dtrain__device_vector *v,
                                            const float *in, uint64_t *sent)
{
    dtrain__selections x = {(dtrain__selections_state *)compressor->self, v, sent, dtrain_comm_rank(v->comm),
                            dtrain_comm_size(v->comm)};
    dtrain_sparse_exchange way = x.state->desc.exchange;
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_status status = dtrain__selections_broken(&x, dtrain__selections_open(x.state, x.ranks));
    if (status == DTRAIN_OK)
        status = (v->device != NULL ? dtrain__selections_select_there : dtrain__selections_select)(&x, in);
    if (status == DTRAIN_OK) {
        int gathers = way == DTRAIN_EXCHANGE_GATHER || (way == DTRAIN_EXCHANGE_AUTO && x.ranks <= 8);
        status = (gathers ? dtrain__selections_gather : dtrain__selections_split)(&x);
    }
    dtrain__fpmode_restore(mode);
    return status;
}

static dtrain_status dtrain__selections_reduce(const dtrain_compressor *compressor, dtrain_comm *comm, const float *in,
                                               float *residual, float *out, size_t count, uint64_t *sent)
{
    dtrain__device_vector v;
    memset(&v, 0, sizeof v);
    v.comm = comm;
    v.count = count;
    v.residual = residual;
    v.out = out;
    return dtrain__selections_run(compressor, &v, in, sent);
}

static void dtrain__selections_destroy(void *self)
{
    dtrain__selections_state *state = (dtrain__selections_state *)self;
    dtrain_allocator *allocator = state->allocator;
    dtrain__selections_free(state);
    dtrain__sparse_destroy(&state->chosen);
    dtrain__free(allocator, state->out);
    dtrain__free(allocator, state->in);
    dtrain__free(allocator, state);
}

static dtrain_status dtrain__selections_check_desc(const dtrain_topk_desc *desc)
{
    if (!(desc->schedule.ratio > 0.0 && desc->schedule.ratio <= 1.0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressor_topk: the ratio is %g, expected one above 0 and at most 1",
                            desc->schedule.ratio);
    if (dtrain__sparse_width(desc->values) == 0 ||
        (desc->indices != DTRAIN_INDEX_AUTO && desc->indices != DTRAIN_INDEX_U32 &&
         desc->indices != DTRAIN_INDEX_DELTA) ||
        (desc->exchange != DTRAIN_EXCHANGE_AUTO &&
         (desc->exchange < DTRAIN_EXCHANGE_GATHER || desc->exchange > DTRAIN_EXCHANGE_SPLIT)))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressor_topk: values %s, index form %d, exchange %d; expected F32, BF16 or F16, AUTO, "
                            "U32 or DELTA, and one of dtrain_sparse_exchange" DTRAIN__ZERO_FIRST,
                            dtrain_dtype_name(desc->values), (int)desc->indices, (int)desc->exchange);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_compressor_topk(dtrain_compressor *compressor, const dtrain_topk_desc *desc,
                                                dtrain_allocator *allocator)
{
    dtrain_topk_desc full;
    if (compressor == NULL || desc == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "compressor_topk: %s is NULL, expected %s",
                            compressor == NULL ? "compressor" : "desc",
                            compressor == NULL ? "a place for it" : "a ratio");
    memset(compressor, 0, sizeof *compressor);
    full = *desc;
    full.values = full.values == 0 ? DTRAIN_F32 : full.values;
    dtrain_status status = dtrain__selections_check_desc(&full);
    if (status != DTRAIN_OK)
        return status;
    dtrain__selections_state *state = (dtrain__selections_state *)dtrain__memory_owner(
        allocator, sizeof *state, offsetof(dtrain__selections_state, heap), &allocator);
    if (state == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressor_topk: no memory for %zu bytes", sizeof *state);
    state->desc = full;
    state->allocator = allocator;
    state->chosen.allocator = state->allocator;
    compressor->name = "topk";
    compressor->self = state;
    compressor->reduce = dtrain__selections_reduce;
    compressor->destroy = dtrain__selections_destroy;
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
