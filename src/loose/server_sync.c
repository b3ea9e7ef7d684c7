/* ---- >>server_sync ----
 * The synchronous parameter server. Each piece of the gradients is one message to the server, and its sum one message
 * back, each after a weight. DTRAIN__SERVER_WINDOW messages are under way in each direction. A worker sends at most
 * that many pieces before it gets sums back. The server receives piece p from all workers before it waits for room to
 * send its sum. So server and workers never wait for each other. Where packing has feedback, the workers' weights and
 * their sum are exchanged before, as residuals are scaled by it. Every piece is divided by that sum: what a worker has
 * not sent when it is lost counts as zeros. */
#ifndef DTRAIN__SERVER_SYNC
#define DTRAIN__SERVER_SYNC
#include "server_create.c"

/* Starts to receive a piece, if there is one. */
static dtrain_status dtrain__server_expect(dtrain_server *s, dtrain__server_link *link, size_t piece)
{
    int slot = dtrain__server_slot(piece);
    if (piece >= s->piece_count)
        return DTRAIN_OK;
    return dtrain_recv_async(link->comm, dtrain__server_frame(s, link->in_frames, piece),
                             DTRAIN__SERVER_PREFIX + s->pieces[piece].bytes, DTRAIN_U8, s->serves, &link->in[slot]);
}

/* Starts to send a piece's frame. */
static dtrain_status dtrain__server_send(dtrain_server *s, dtrain__server_link *link, size_t piece)
{
    int slot = dtrain__server_slot(piece);
    size_t bytes = DTRAIN__SERVER_PREFIX + s->pieces[piece].bytes;
    s->stats.sent_bytes += bytes;
    s->dense_bytes += DTRAIN__SERVER_PREFIX + s->pieces[piece].count * sizeof(float);
    return dtrain_send_async(link->comm, dtrain__server_frame(s, s->out_frames, piece), bytes, DTRAIN_U8, s->serves,
                             &link->out[slot]);
}

/* Waits for a piece and reads the weight before it. */
static dtrain_status dtrain__server_receive(dtrain_server *s, dtrain__server_link *link, size_t piece, double *weight)
{
    int slot = dtrain__server_slot(piece);
    dtrain_status status = dtrain__work_settle(&link->in[slot]);
    if (status != DTRAIN_OK)
        return status;
    s->stats.received_bytes += DTRAIN__SERVER_PREFIX + s->pieces[piece].bytes;
    memcpy(weight, dtrain__server_frame(s, link->in_frames, piece), sizeof *weight);
    if (!dtrain__train_finite(*weight) || *weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "aggregate on rank %d: rank %d sent a weight of %g, expected a number of at least 0",
                            s->rank, link->rank, *weight);
    return DTRAIN_OK;
}

/* ---- a worker ---- */

/* Learns the weight of all ranks, which the residual is scaled to before it is packed. */
static dtrain_status dtrain__server_ask_total(dtrain_server *s, double weight, double *total)
{
    dtrain_status status = dtrain_send(s->links[0].comm, &weight, 1, DTRAIN_F64, 0);
    if (status == DTRAIN_OK)
        status = dtrain_recv(s->links[0].comm, total, 1, DTRAIN_F64, 0);
    if (status == DTRAIN_OK && (!dtrain__train_finite(*total) || *total < 0.0))
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "the weight of all ranks is %g, expected a number of at least 0", *total);
    return status;
}

static dtrain_status dtrain__server_give(dtrain_server *s, const dtrain_param *table, size_t piece, double weight)
{
    dtrain__server_link *link = &s->links[0];
    int slot = dtrain__server_slot(piece);
    dtrain_status status = dtrain__work_settle(&link->out[slot]);
    if (status != DTRAIN_OK)
        return status;
    dtrain__server_take(s, table, &s->pieces[piece], 0, s->own);
    memcpy(dtrain__server_frame(s, s->out_frames, piece), &weight, sizeof weight);
    dtrain__server_pack(s, &s->pieces[piece], s->own,
                        dtrain__server_frame(s, s->out_frames, piece) + DTRAIN__SERVER_PREFIX, s->wide);
    return dtrain__server_send(s, link, piece);
}

static dtrain_status dtrain__server_get(dtrain_server *s, const dtrain_param *table, size_t piece, double *total)
{
    dtrain__server_link *link = &s->links[0];
    const unsigned char *frame = dtrain__server_frame(s, link->in_frames, piece);
    dtrain_status status = dtrain__server_receive(s, link, piece, total);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__server_unpack(s, &s->pieces[piece], frame + DTRAIN__SERVER_PREFIX, s->wide);
    if (status != DTRAIN_OK)
        return status;
    dtrain__server_put(s, table, &s->pieces[piece], 0, s->wide, *total);
    return dtrain__server_expect(s, link, piece + DTRAIN__SERVER_WINDOW);
}

static dtrain_status dtrain__server_work(dtrain_server *s, const dtrain_param *table, double weight, double *total)
{
    dtrain__server_link *link = &s->links[0];
    double unit = 1.0;
    dtrain_status status = s->feedback ? dtrain__server_ask_total(s, weight, &unit) : DTRAIN_OK;
    dtrain__server_open(s, unit);
    for (size_t p = 0; p < DTRAIN__SERVER_WINDOW && status == DTRAIN_OK; p++)
        status = dtrain__server_expect(s, link, p);
    for (size_t p = 0; p < s->piece_count + DTRAIN__SERVER_WINDOW && status == DTRAIN_OK; p++) {
        size_t back = p - DTRAIN__SERVER_WINDOW;
        if (p >= DTRAIN__SERVER_WINDOW && back < s->piece_count)
            status = dtrain__server_get(s, table, back, total);
        if (status == DTRAIN_OK && p < s->piece_count)
            status = dtrain__server_give(s, table, p, weight);
    }
    for (int slot = 0; slot < DTRAIN__SERVER_WINDOW && status == DTRAIN_OK; slot++)
        status = dtrain__work_settle(&link->out[slot]);
    return status == DTRAIN_OK ? DTRAIN_OK : dtrain__server_gone(s, "aggregate", status);
}

/* ---- the server ---- */

/* Handles an error of a link. The server goes on without a lost worker; any other error ends the call. */
static dtrain_status dtrain__server_judge(dtrain_server *s, dtrain__server_link *link, dtrain_status status)
{
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    if (status == DTRAIN_ERR_PEER_LOST) {
        dtrain__server_drop(s, link);
        return DTRAIN_OK;
    }
    dtrain__fail(NULL, status, "aggregate on rank %d, the parameter server, with rank %d: %.500s", s->rank, link->rank,
                 dtrain__thread_error.text);
    return dtrain__server_break(s);
}

/* Adds an input of the fold. */
static void dtrain__server_input(dtrain_server *s, int *n, const void *values, double weight)
{
    s->inputs[*n] = values;
    s->weights[(*n)++] = weight;
}

/* Tells every worker the weight of all ranks. */
static dtrain_status dtrain__server_tell_total(dtrain_server *s, double weight, double *total)
{
    dtrain_status status = DTRAIN_OK;
    *total = weight;
    for (int i = 0; i < s->link_count && status == DTRAIN_OK; i++) {
        dtrain__server_link *link = &s->links[i];
        double theirs = 0.0;
        if (link->comm == NULL)
            continue;
        status = dtrain_recv(link->comm, &theirs, 1, DTRAIN_F64, 1);
        if (status == DTRAIN_OK && (!dtrain__train_finite(theirs) || theirs < 0.0))
            status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                  "it announced a weight of %g, expected a number of at least 0", theirs);
        status = dtrain__server_judge(s, link, status);
        *total += link->comm != NULL ? theirs : 0.0;
    }
    for (int i = 0; i < s->link_count && status == DTRAIN_OK; i++)
        if (s->links[i].comm != NULL)
            status = dtrain__server_judge(s, &s->links[i], dtrain_send(s->links[i].comm, total, 1, DTRAIN_F64, 1));
    return status;
}

/* Collects a piece from every worker that is left and from this rank, in the order of ranks. *n: how many there are. */
static dtrain_status dtrain__server_collect(dtrain_server *s, const dtrain_param *table, size_t p, double weight,
                                            int *n)
{
    const dtrain__server_piece *piece = &s->pieces[p];
    dtrain_status status = DTRAIN_OK;
    *n = 0;
    dtrain__server_take(s, table, piece, 0, s->own);
    for (int i = 0; i <= s->link_count && status == DTRAIN_OK; i++) {
        double theirs = 0.0;
        if (i == s->rank) /* links go to the ranks before this one, then to those after it */
            dtrain__server_input(s, n, s->own, weight);
        if (i == s->link_count || s->links[i].comm == NULL)
            continue;
        dtrain__server_link *link = &s->links[i];
        const unsigned char *data = dtrain__server_frame(s, link->in_frames, p) + DTRAIN__SERVER_PREFIX;
        status = dtrain__server_receive(s, link, p, &theirs);
        if (status == DTRAIN_OK && piece->packed)
            status = dtrain__server_unpack(s, piece, data, link->wide);
        status = dtrain__server_judge(s, link, status);
        if (status != DTRAIN_OK || link->comm == NULL)
            continue;
        dtrain__server_input(s, n, piece->packed ? (const void *)link->wide : data, theirs);
    }
    return status;
}

/* Waits until every worker has taken what was sent from a slot, or is lost. */
static dtrain_status dtrain__server_free_slot(dtrain_server *s, int slot)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < s->link_count && status == DTRAIN_OK; i++)
        if (s->links[i].comm != NULL)
            status = dtrain__server_judge(s, &s->links[i], dtrain__work_settle(&s->links[i].out[slot]));
    return status;
}

/* Adds up a piece, sends the sum to every worker, and writes the mean to this rank's gradients. */
static dtrain_status dtrain__server_return(dtrain_server *s, const dtrain_param *table, size_t p, int n, double *total)
{
    const dtrain__server_piece *piece = &s->pieces[p];
    unsigned char *frame = dtrain__server_frame(s, s->out_frames, p);
    void *out[1];
    dtrain_status status = DTRAIN_OK;
    out[0] = s->wide;
    if (piece->count > 0)
        dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1.0, s->inputs, n, out, 1, 0, piece->count);
    for (int i = 0; i < n; i++)
        s->inputs[i] = &s->weights[i];
    out[0] = total;
    dtrain__fold(DTRAIN_F64, DTRAIN_SUM, 1.0, s->inputs, n, out, 1, 0, 1);
    if (s->feedback) /* residuals are scaled to this one, also if a worker was lost since */
        *total = s->unit[!s->versions.now];
    memcpy(frame, total, sizeof *total);
    const float *sum = dtrain__server_pack(s, piece, s->wide, frame + DTRAIN__SERVER_PREFIX, s->own);
    dtrain__server_put(s, table, piece, 0, sum, *total);
    for (int i = 0; i < s->link_count && status == DTRAIN_OK; i++) {
        if (s->links[i].comm == NULL)
            continue;
        status = dtrain__server_judge(s, &s->links[i], dtrain__server_send(s, &s->links[i], p));
        if (status == DTRAIN_OK && s->links[i].comm != NULL)
            status = dtrain__server_judge(s, &s->links[i],
                                          dtrain__server_expect(s, &s->links[i], p + DTRAIN__SERVER_WINDOW));
    }
    return status;
}

static dtrain_status dtrain__server_fold_all(dtrain_server *s, const dtrain_param *table, double weight, double *total)
{
    double unit = 1.0;
    dtrain_status status = s->feedback ? dtrain__server_tell_total(s, weight, &unit) : DTRAIN_OK;
    dtrain__server_open(s, unit);
    for (int i = 0; i < s->link_count; i++)
        for (size_t p = 0; p < DTRAIN__SERVER_WINDOW && status == DTRAIN_OK && s->links[i].comm != NULL; p++)
            status = dtrain__server_judge(s, &s->links[i], dtrain__server_expect(s, &s->links[i], p));
    for (size_t p = 0; p < s->piece_count && status == DTRAIN_OK; p++) {
        int n;
        status = dtrain__server_collect(s, table, p, weight, &n);
        if (status == DTRAIN_OK)
            status = dtrain__server_free_slot(s, dtrain__server_slot(p));
        if (status == DTRAIN_OK)
            status = dtrain__server_return(s, table, p, n, total);
    }
    for (int slot = 0; slot < DTRAIN__SERVER_WINDOW && status == DTRAIN_OK; slot++)
        status = dtrain__server_free_slot(s, slot);
    return status;
}

/* ---- the aggregator ---- */

static dtrain_status dtrain__server_sync(dtrain_server *s, const dtrain_param *table, double weight, double *total)
{
    dtrain_status status;
    if (s->broken.status != DTRAIN_OK)
        return dtrain__report(&s->broken);
    uint64_t mode = dtrain__fpmode_enter();
    status =
        s->serves ? dtrain__server_fold_all(s, table, weight, total) : dtrain__server_work(s, table, weight, total);
    dtrain__fpmode_restore(mode);
    dtrain__versions_end(&s->versions, status == DTRAIN_OK);
    s->stats.steps += status == DTRAIN_OK;
    return status;
}

#endif
