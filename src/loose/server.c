/* ---- >>server_core ----
 * What both forms of the parameter server share: the cut of all trained parameters into pieces, packing, top-k as a
 * packing, and the links. A link is a group of two: the server is its rank 0, the worker its rank 1. Messages are sent
 * from and received into buffers of the object. Destroying a group ends its messages; the buffers are freed after that.
 */
#ifndef DTRAIN__SERVER
#define DTRAIN__SERVER
#include "server.h"
#include "../tensor/pieces.c"
#include "../train/params.c"
#include "../train/train_kernels.c"
#include "../train/aggregator.c"
#include "../train/compression.c"
#include "../compress/topk.c"
#include "../compress/sparse.c"

/* ---- top-k ----
 * Top-k as a compressor that packs. It selects the k elements of largest magnitude in each piece. k, and so the number
 * of packed bytes, depends on the length of the piece alone. Packed bytes are checked in full before they are used. */

typedef struct dtrain__server_topk {
    dtrain_allocator *allocator;
    double ratio;
    dtrain_dtype values;
    dtrain__sparse sparse;
    dtrain_status status; /* of the last unpacking */
} dtrain__server_topk;

/* Returns the form of a piece's indices: none if that is shorter. */
static dtrain_index_form dtrain__server_topk_form(const dtrain__server_topk *topk, size_t count, size_t k)
{
    size_t width = dtrain__sparse_width(topk->values), index = count <= 65536 ? 2 : 4;
    if (k * (index + width) >= count * width)
        return DTRAIN_INDEX_NONE;
    return index == 2 ? DTRAIN_INDEX_U16 : DTRAIN_INDEX_U32;
}

static size_t dtrain__server_topk_bytes(const dtrain_compressor *compressor, size_t count)
{
    const dtrain__server_topk *topk = (const dtrain__server_topk *)compressor->self;
    size_t k = dtrain_topk_count(count, topk->ratio), width = dtrain__sparse_width(topk->values);
    dtrain_index_form form = dtrain__server_topk_form(topk, count, k);
    if (form == DTRAIN_INDEX_NONE)
        return DTRAIN__SPARSE_HEADER + count * width;
    return DTRAIN__SPARSE_HEADER + k * (width + (form == DTRAIN_INDEX_U16 ? 2 : 4));
}

/* Without memory it packs zeros, which no rank accepts as a selection, so that the failure shows. */
static void dtrain__server_topk_pack(const dtrain_compressor *compressor, const float *in, size_t count, void *out)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)compressor->self;
    size_t k = dtrain_topk_count(count, topk->ratio);
    if (dtrain__topk_pick(in, count, k, &topk->sparse) == DTRAIN_OK)
        dtrain__sparse_pack(&topk->sparse, topk->values, dtrain__server_topk_form(topk, count, k),
                            (unsigned char *)out);
    else
        memset(out, 0, dtrain__server_topk_bytes(compressor, count));
}

static void dtrain__server_topk_unpack(const dtrain_compressor *compressor, const void *in, float *out, size_t count)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)compressor->self;
    topk->status = dtrain__sparse_unpack(&topk->sparse, in, dtrain__server_topk_bytes(compressor, count), count);
    if (topk->status == DTRAIN_OK)
        dtrain__sparse_write(&topk->sparse, out);
    else
        memset(out, 0, count * sizeof(float));
}

static void dtrain__server_topk_destroy(void *self)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)self;
    dtrain__sparse_destroy(&topk->sparse);
    dtrain__free(topk->allocator, topk);
}

static dtrain_status dtrain__server_topk_make(dtrain_compressor *made, const dtrain_topk_desc *desc,
                                              dtrain_allocator *allocator)
{
    double ratio = desc->schedule.ratio != 0.0 ? desc->schedule.ratio : 0.01;
    dtrain_dtype values = desc->values != 0 ? desc->values : DTRAIN_F32;
    if (desc->schedule.stage_steps != 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED,
            "dtrain_server_create: top-k with a warm-up; a server selects by one ratio in all steps: set "
            "schedule.ratio alone");
    if (!(ratio > 0.0 && ratio <= 1.0) || dtrain__sparse_width(values) == 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_server_create: top-k with a ratio of %g and values %s; expected a ratio above 0 and at most 1, "
            "and F32, BF16 or F16",
            ratio, dtrain_dtype_name(values));
    dtrain__server_topk *topk = (dtrain__server_topk *)dtrain__alloc(allocator, sizeof *topk);
    if (topk == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_server_create: no memory for %zu bytes", sizeof *topk);
    topk->allocator = topk->sparse.allocator = allocator;
    topk->ratio = ratio;
    topk->values = values;
    made->name = "topk";
    made->self = topk;
    made->bytes = dtrain__server_topk_bytes;
    made->pack = dtrain__server_topk_pack;
    made->unpack = dtrain__server_topk_unpack;
    made->destroy = dtrain__server_topk_destroy;
    return DTRAIN_OK;
}

/* ---- both forms ---- */

#define DTRAIN__SERVER_PIECE DTRAIN__TUNED(server_piece, (size_t)65536) /* elements at most */
#define DTRAIN__SERVER_WINDOW 4                                         /* pieces under way in one direction */
#define DTRAIN__SERVER_PREFIX sizeof(double)
#define DTRAIN__SERVER_HEADER 4 /* words */

/* A piece of all trained parameters in a row: part of one packed parameter, or of several that are not packed. */
typedef struct dtrain__server_piece {
    size_t begin, count; /* elements */
    size_t param;        /* the parameter that it begins in */
    size_t at, bytes;    /* place in a message of all pieces */
    int packed;
} dtrain__server_piece;

typedef struct dtrain__server_link {
    dtrain_comm *comm; /* NULL: the other end has left or is lost */
    int rank;          /* of the other end, in the server's group */
    dtrain_work *in[DTRAIN__SERVER_WINDOW], *out[DTRAIN__SERVER_WINDOW];
    unsigned char *in_frames; /* of the synchronous form; see dtrain__server_frame */
    float *wide;              /* synchronous server: what an incoming piece unpacks to */
    /* on the asynchronous server */
    int state, fresh; /* fresh: the worker has pulled since it pushed */
    uint64_t clock;   /* gradients that have arrived from it */
    uint64_t version; /* updates when it pulled */
    uint64_t staleness;
    int64_t held_ns; /* since when its pull waits; 0: no pull waits */
    double weight;   /* of the gradient that is arriving */
    uint64_t header_in[DTRAIN__SERVER_HEADER], header_out[DTRAIN__SERVER_HEADER];
    unsigned char *message;
    float *view; /* the parameters as the worker has them; NULL if they do not travel packed */
} dtrain__server_link;

struct dtrain_server {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    dtrain_server_desc desc;
    dtrain_compressor compressor; /* used if packs */
    int packs, feedback;
    size_t least; /* smaller parameters are not packed */
    int rank, ranks, serves;
    dtrain_param *table;
    size_t count, *elements, *begins; /* for each parameter: trained elements, and trained elements before it */
    size_t total;
    dtrain__server_piece *pieces;
    size_t piece_count, largest, message_bytes; /* largest: most bytes of a piece with its prefix */
    dtrain__server_link *links;
    int link_count;
    float *residual[2]; /* a worker's from its gradients, or the synchronous server's from its sums; in two versions */
    double unit[2];     /* weight of the sums that each is of; 0: none yet. A worker's of its own pushes if async */
    dtrain__versions versions;
    float *own, *wide;
    unsigned char *out_frames;
    const void **inputs; /* of a fold; weights has theirs */
    double *weights;
    uint64_t clock; /* a worker's pushes */
    int fresh, left;
    int turn; /* the link that an idle server waits on next */
    dtrain_server_stats stats;
    uint64_t dense_bytes; /* what sent_bytes would be without packing */
    dtrain__error broken;
};

DTRAIN__EXACT_BEGIN
DTRAIN__FOLD_PAIR(dtrain__server_minus, dtrain__f32, a[i] - b[i])
DTRAIN__EXACT_END

static int dtrain__server_slot(size_t piece)
{
    return (int)(piece % DTRAIN__SERVER_WINDOW);
}

/* Returns the frame of a piece: its weight, then the piece. */
static unsigned char *dtrain__server_frame(const dtrain_server *s, unsigned char *frames, size_t piece)
{
    return frames + piece % DTRAIN__SERVER_WINDOW * s->largest;
}

/* Leaves a link and ends its messages. */
static void dtrain__server_close(dtrain__server_link *link)
{
    dtrain__group_close(link->comm);
    link->comm = NULL;
    memset(link->in, 0, sizeof link->in);
    memset(link->out, 0, sizeof link->out);
}

/* Goes on without a worker; the thread's last error says why. */
static void dtrain__server_drop(dtrain_server *s, dtrain__server_link *link)
{
    dtrain__error cause = dtrain__thread_error;
    dtrain__server_close(link);
    s->stats.lost++;
    s->stats.workers--;
    dtrain__log(DTRAIN_LOG_WARN, "parameter server on rank %d goes on without rank %d, with %d workers: %.500s",
                s->rank, link->rank, s->stats.workers, cause.text);
}

/* Breaks the server, and tells every other end why. Returns the cause, the thread's last error. */
static dtrain_status dtrain__server_break(dtrain_server *s)
{
    s->broken = dtrain__thread_error;
    for (int i = 0; i < s->link_count; i++) {
        if (s->links[i].comm != NULL && s->serves)
            DTRAIN_IGNORE(dtrain_comm_abort(s->links[i].comm, s->broken.text));
        dtrain__server_close(&s->links[i]);
    }
    return dtrain__report(&s->broken);
}

/* Breaks a worker whose link has failed; the thread's last error says why. */
static dtrain_status dtrain__server_gone(dtrain_server *s, const char *call, dtrain_status status)
{
    dtrain__fail(NULL, status, "%s on rank %d, with rank %d, the parameter server: %.500s", call, s->rank,
                 s->desc.server, dtrain__thread_error.text);
    return dtrain__server_break(s);
}

/* ---- pieces ---- */

/* Finds the next run of a piece's elements that lies in one parameter, and returns its length.
 *
 *   param   in: the parameter of the run before; out: that of this run
 *   from    out: where in it the run begins */
static size_t dtrain__server_next(const dtrain_server *s, const dtrain__server_piece *piece, size_t done, size_t *param,
                                  size_t *from)
{
    size_t at = piece->begin + done, n;
    while (at - s->begins[*param] >= s->elements[*param])
        ++*param;
    *from = at - s->begins[*param];
    n = s->elements[*param] - *from;
    return n < piece->count - done ? n : piece->count - done;
}

/* Copies a piece of the gradients, or with `data` of the parameters, to one place. */
static void dtrain__server_take(const dtrain_server *s, const dtrain_param *table, const dtrain__server_piece *piece,
                                int data, float *to)
{
    size_t param = piece->param, from, n;
    for (size_t done = 0; done < piece->count; done += n) {
        n = dtrain__server_next(s, piece, done, &param, &from);
        memcpy(to + done, (const float *)(data ? table[param].data : table[param].grad) + from, n * sizeof(float));
    }
}

/* Copies a piece from one place to the gradients, or with `data` to the parameters. Divides by a divisor above 0. */
static void dtrain__server_put(const dtrain_server *s, const dtrain_param *table, const dtrain__server_piece *piece,
                               int data, const float *values, double divisor)
{
    size_t param = piece->param, from, n;
    for (size_t done = 0; done < piece->count; done += n) {
        n = dtrain__server_next(s, piece, done, &param, &from);
        float *to = (float *)(data ? table[param].data : table[param].grad) + from;
        memcpy(to, values + done, n * sizeof(float));
        if (divisor > 0.0)
            dtrain__fold_divide_f32(to, divisor, n);
    }
}

/* Begins to pack the pieces of a step whose sums have weight `unit`; see >>feedback. With 0 they leave the residual. */
static void dtrain__server_open(dtrain_server *s, double unit)
{
    s->unit[!s->versions.now] = unit;
    s->versions.other = unit > 0.0 ? DTRAIN__VERSION_AFTER : DTRAIN__VERSION_NONE;
}

/* Packs a piece plus its residual, and keeps the new residual. Returns what the other end will have: from, or back. */
static const float *dtrain__server_pack(dtrain_server *s, const dtrain__server_piece *piece, const float *from,
                                        unsigned char *to, float *back)
{
    const dtrain_compressor *q = &s->compressor;
    int now = s->versions.now;
    float *residual = s->residual[0] != NULL && s->unit[!now] > 0.0 ? s->residual[!now] + piece->begin : NULL;
    if (!piece->packed) {
        memcpy(to, from, piece->count * sizeof(float));
        return from;
    }
    if (residual != NULL) {
        float factor = dtrain__feedback_ratio(s->unit[!now], s->unit[now]);
        dtrain__fold_weigh_f32(s->residual[now] + piece->begin, (double)factor, residual, piece->count);
        dtrain__fold_sum_f32(residual, from, piece->count);
        from = residual;
    }
    q->pack(q, from, piece->count, to);
    q->unpack(q, to, back, piece->count);
    if (residual != NULL)
        dtrain__feedback_left(residual, back, piece->count);
    return back;
}

/* Unpacks a piece that has arrived. Only packed top-k can be invalid. */
static dtrain_status dtrain__server_unpack(const dtrain_server *s, const dtrain__server_piece *piece,
                                           const unsigned char *from, float *to)
{
    if (!piece->packed) {
        memcpy(to, from, piece->count * sizeof(float));
        return DTRAIN_OK;
    }
    s->compressor.unpack(&s->compressor, from, to, piece->count);
    return s->compressor.unpack == dtrain__server_topk_unpack
               ? ((const dtrain__server_topk *)s->compressor.self)->status
               : DTRAIN_OK;
}

/* Cuts the parameters into pieces; with s->pieces NULL it only counts them. Returns 0 on an overflow. */
static int dtrain__server_cut(dtrain_server *s)
{
    dtrain__server_piece piece;
    size_t used = 0, n;
    int good = 1;
    memset(&piece, 0, sizeof piece);
    s->message_bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        int packed = s->packs && s->elements[i] >= s->least && !s->table[i].dense;
        for (size_t at = 0; at < s->elements[i]; at += n) {
            int joins = used > 0 && !packed && !piece.packed && piece.count < DTRAIN__SERVER_PIECE;
            size_t room = joins ? DTRAIN__SERVER_PIECE - piece.count : DTRAIN__SERVER_PIECE;
            n = s->elements[i] - at < room ? s->elements[i] - at : room;
            s->message_bytes -= joins ? piece.bytes : 0;
            used += !joins;
            if (!joins) {
                piece.begin = s->begins[i] + at;
                piece.param = i;
                piece.count = 0;
            }
            piece.count += n;
            piece.packed = packed;
            piece.at = s->message_bytes;
            piece.bytes = packed ? s->compressor.bytes(&s->compressor, piece.count) : piece.count * sizeof(float);
            good = good && dtrain__add_size(s->message_bytes, piece.bytes, &s->message_bytes) &&
                   piece.bytes <= SIZE_MAX / 2;
            s->largest = piece.bytes > s->largest ? piece.bytes : s->largest;
            if (s->pieces != NULL)
                s->pieces[used - 1] = piece;
        }
    }
    s->piece_count = used > 0 ? used : 1; /* an empty piece carries the weights */
    return good;
}

#endif
