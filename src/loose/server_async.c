/* ---- >>server_async ----
 * The asynchronous parameter server itself. It serves whichever link has something. It applies each gradient once all
 * of it has arrived, and holds a pull back until the slowest worker is near enough. */
#ifndef DTRAIN__SERVER_ASYNC
#define DTRAIN__SERVER_ASYNC
#include "server_worker.c"

/* What the server waits for on a link. */
enum {
    DTRAIN__SERVER_AWAITS_HEADER = 0,
    DTRAIN__SERVER_AWAITS_GRADIENT,
    DTRAIN__SERVER_AWAITS_OTHERS,  /* nothing: the worker's pull waits for other workers */
    DTRAIN__SERVER_AWAITS_ANSWERED /* until the answer has been sent */
};

#define DTRAIN__SERVER_IDLE_TURNS 64u /* rounds without a message before the server sleeps */
#define DTRAIN__SERVER_SLEEP_NS 500000

/* Returns the worker with the fewest pushes; NULL if none is left. */
static dtrain__server_link *dtrain__server_slowest(const dtrain_server *s)
{
    dtrain__server_link *slowest = NULL;
    for (int i = 0; i < s->link_count; i++)
        if (s->links[i].comm != NULL && (slowest == NULL || s->links[i].clock < slowest->clock))
            slowest = &s->links[i];
    return slowest;
}

static int64_t dtrain__server_timeout_ns(const dtrain_server *s)
{
    return s->comm->desc.timeout_ms < 0 ? INT64_MAX : dtrain__os_ms_to_ns(s->comm->desc.timeout_ms);
}

/* Applies the gradient that is in the table. */
static dtrain_status dtrain__server_update(dtrain_server *s, dtrain__server_link *link, const dtrain_serve_desc *desc)
{
    uint64_t age = s->stats.updates - link->version;
    dtrain_status status = DTRAIN_OK;
    if (desc->max_norm != 0.0f)
        status = dtrain_clip_grad_norm(s->table, s->count, desc->max_norm, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_optimizer_step(desc->optimizer, dtrain_schedule_lr(&desc->schedule, s->stats.updates));
    if (status != DTRAIN_OK)
        return status;
    s->stats.updates++;
    dtrain__server_count_staleness(&s->stats, link->staleness);
    s->stats.age_sum += age;
    s->stats.largest_age = age > s->stats.largest_age ? age : s->stats.largest_age;
    return desc->on_update != NULL ? desc->on_update(desc->user, link->rank, &s->stats) : DTRAIN_OK;
}

/* Puts a whole gradient into the table, divided by its weight. An error ends the link. */
static dtrain_status dtrain__server_accept(dtrain_server *s, dtrain__server_link *link)
{
    dtrain_status status = DTRAIN_OK;
    link->clock++;
    link->fresh = 0;
    link->state = DTRAIN__SERVER_AWAITS_HEADER;
    s->stats.steps++;
    s->stats.received_bytes += s->message_bytes;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t p = 0; p < s->piece_count && status == DTRAIN_OK && link->weight > 0.0; p++) {
        status = dtrain__server_unpack(s, &s->pieces[p], link->message + s->pieces[p].at, s->wide);
        dtrain__server_put(s, s->table, &s->pieces[p], 0, s->wide, link->weight);
    }
    dtrain__fpmode_restore(mode);
    return status;
}

/* Writes the answer to a pull: the parameters or, packed, their change since this worker's last pull. */
static void dtrain__server_copy(dtrain_server *s, dtrain__server_link *link)
{
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t p = 0; p < s->piece_count; p++) {
        const dtrain__server_piece *piece = &s->pieces[p];
        unsigned char *to = link->message + piece->at;
        dtrain__server_take(s, s->table, piece, 1, s->own);
        if (!piece->packed) {
            memcpy(to, s->own, piece->count * sizeof(float));
            continue;
        }
        dtrain__server_minus(s->own, link->view + piece->begin, piece->count);
        s->compressor.pack(&s->compressor, s->own, piece->count, to);
        s->compressor.unpack(&s->compressor, to, s->wide, piece->count);
        dtrain__fold_sum_f32(link->view + piece->begin, s->wide, piece->count);
    }
    dtrain__fpmode_restore(mode);
}

/* Answers a pull if the worker need not wait. *moved: whether it did. */
static dtrain_status dtrain__server_answer(dtrain_server *s, dtrain__server_link *link, int *moved)
{
    const dtrain__server_link *slowest = dtrain__server_slowest(s);
    uint64_t behind = link->clock - slowest->clock;
    int64_t limit = dtrain__server_timeout_ns(s), now = dtrain__os_now_ns();
    dtrain_status status;
    *moved = 1;
    if (behind <= (uint64_t)s->desc.staleness) {
        dtrain__server_copy(s, link);
        status = dtrain__server_write(link, 0, DTRAIN__SERVER_GRANT, s->stats.updates, behind,
                                      (uint64_t)(link->held_ns != 0), 1);
        if (status == DTRAIN_OK)
            status = dtrain_send_async(link->comm, link->message, s->message_bytes, DTRAIN_U8, 1, &link->out[1]);
        link->fresh = 1;
        link->version = s->stats.updates;
        link->staleness = behind;
        s->stats.pulls++;
        s->stats.waits += link->held_ns != 0;
        s->stats.sent_bytes += s->message_bytes;
        s->dense_bytes += s->total * sizeof(float);
    } else if (link->held_ns != 0 && now - link->held_ns >= limit - limit / 8) {
        /* before the worker's own deadline: the worker cannot know whom it waits for */
        status = dtrain__server_write(link, 0, DTRAIN__SERVER_REFUSE, (uint64_t)slowest->rank, slowest->clock, 0, 1);
        s->stats.waits++;
    } else {
        link->held_ns = link->held_ns != 0 ? link->held_ns : now;
        *moved = 0;
        return DTRAIN_OK;
    }
    link->held_ns = 0;
    link->state = DTRAIN__SERVER_AWAITS_ANSWERED;
    return status;
}

/* Handles a header that has arrived. */
static dtrain_status dtrain__server_read(dtrain_server *s, dtrain__server_link *link)
{
    const uint64_t *header = link->header_in;
    memcpy(&link->weight, &header[1], sizeof link->weight);
    if (header[2] == link->clock && header[0] == DTRAIN__SERVER_PULL) {
        link->state = DTRAIN__SERVER_AWAITS_OTHERS;
        return DTRAIN_OK;
    }
    if (header[2] == link->clock && header[0] == DTRAIN__SERVER_LEAVE) {
        dtrain__server_close(link);
        s->stats.left++;
        s->stats.workers--;
        return DTRAIN_OK;
    }
    if (header[2] != link->clock || header[0] != DTRAIN__SERVER_PUSH || !link->fresh ||
        !dtrain__train_finite(link->weight) || link->weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "rank %d sent message %llu with weight %g, after %llu gradients of which %llu arrived: no "
                            "worker sends that",
                            link->rank, (unsigned long long)header[0], link->weight, (unsigned long long)header[2],
                            (unsigned long long)link->clock);
    link->state = DTRAIN__SERVER_AWAITS_GRADIENT;
    return dtrain_recv_async(link->comm, link->message, s->message_bytes, DTRAIN_U8, 1, &link->in[0]);
}

/* Returns the message that a link waits for. */
static dtrain_work **dtrain__server_pending(dtrain__server_link *link)
{
    if (link->state == DTRAIN__SERVER_AWAITS_ANSWERED)
        return link->out[0] != NULL ? &link->out[0] : &link->out[1];
    return &link->in[0];
}

/* Drives a link's message until until_ns. Returns 1 if it has ended, and its status. */
static int dtrain__server_ended(dtrain__server_link *link, int64_t until_ns, dtrain_status *status)
{
    dtrain_work **work = dtrain__server_pending(link);
    int ended = 1;
    *status = DTRAIN_OK;
    if (*work != NULL)
        *status = dtrain__work_end(*work, until_ns, &ended);
    if (ended)
        *work = NULL;
    return ended;
}

/* Serves a link. An error that it returns ends the link. A status of on_update in *ends ends dtrain_server_run. */
static dtrain_status dtrain__server_turn(dtrain_server *s, dtrain__server_link *link, const dtrain_serve_desc *desc,
                                         int *moved, dtrain_status *ends)
{
    dtrain_status status = DTRAIN_OK;
    if (link->state == DTRAIN__SERVER_AWAITS_HEADER && link->in[0] == NULL)
        status = dtrain_recv_async(link->comm, link->header_in, DTRAIN__SERVER_HEADER, DTRAIN_U64, 1, &link->in[0]);
    if (status != DTRAIN_OK)
        return status;
    if (link->state == DTRAIN__SERVER_AWAITS_OTHERS)
        return dtrain__server_answer(s, link, moved);
    if (!dtrain__server_ended(link, dtrain__os_now_ns(), &status))
        return DTRAIN_OK;
    if (status == DTRAIN_ERR_TIMEOUT && link->state == DTRAIN__SERVER_AWAITS_HEADER &&
        !dtrain__group_is_broken(link->comm))
        return DTRAIN_OK; /* the worker is computing: wait for its header again */
    *moved = 1;
    if (status != DTRAIN_OK)
        return status;
    if (link->state == DTRAIN__SERVER_AWAITS_HEADER)
        return dtrain__server_read(s, link);
    if (link->state == DTRAIN__SERVER_AWAITS_GRADIENT) {
        status = dtrain__server_accept(s, link);
        if (status == DTRAIN_OK && link->weight > 0.0)
            *ends = dtrain__server_update(s, link, desc);
    } else if (link->out[0] == NULL && link->out[1] == NULL)
        link->state = DTRAIN__SERVER_AWAITS_HEADER;
    return status;
}

/* Serves each link once. */
static dtrain_status dtrain__server_round(dtrain_server *s, const dtrain_serve_desc *desc, int *moved)
{
    dtrain_status ends = DTRAIN_OK;
    *moved = 0;
    for (int i = 0; i < s->link_count && ends == DTRAIN_OK; i++) {
        dtrain__server_link *link = &s->links[i];
        if (link->comm != NULL && dtrain__server_turn(s, link, desc, moved, &ends) != DTRAIN_OK) {
            dtrain__server_drop(s, link);
            *moved = 1;
        }
    }
    return ends;
}

/* Sleeps for a short time, or until one of the links, taken in turn, has something. */
static void dtrain__server_sleep(dtrain_server *s)
{
    int64_t until = dtrain__os_now_ns() + DTRAIN__SERVER_SLEEP_NS;
    for (int i = 0; i < s->link_count; i++) {
        dtrain__server_link *link = &s->links[s->turn++ % s->link_count];
        s->turn %= s->link_count;
        if (link->comm == NULL || link->state == DTRAIN__SERVER_AWAITS_OTHERS || *dtrain__server_pending(link) == NULL)
            continue;
        dtrain__work_help(*dtrain__server_pending(link), until); /* the next round sees its end */
        return;
    }
}

static dtrain_status dtrain__server_silent(const dtrain_server *s)
{
    const dtrain__server_link *slowest = dtrain__server_slowest(s);
    return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                        "server_run on rank %d: none of %d workers has sent anything for %lld ms; the slowest is rank "
                        "%d, with %llu gradients. Call it again to go on waiting",
                        s->rank, s->stats.workers, (long long)s->comm->desc.timeout_ms, slowest->rank,
                        (unsigned long long)slowest->clock);
}

static dtrain_status dtrain__server_check_run(const dtrain_server *s, const dtrain_serve_desc *desc)
{
    if (s == NULL || desc == NULL || desc->optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "server_run: %s is NULL, expected a server, and a desc with an optimizer",
                            s == NULL      ? "the server"
                            : desc == NULL ? "the desc"
                                           : "the optimizer");
    if (!s->desc.async || !s->serves)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "server_run on rank %d: %s", s->rank,
                            !s->desc.async ? "the server is synchronous; set async in its desc, or aggregate"
                                           : "this rank is a worker; push and pull");
    if (!dtrain__train_finite((double)desc->max_norm) || desc->max_norm < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "server_run: max_norm is %g, expected a number of at least 0",
                            (double)desc->max_norm);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_server_run(dtrain_server *server, const dtrain_serve_desc *desc)
{
    dtrain_server *s = server;
    unsigned idle = 0;
    dtrain_status status = dtrain__server_check_run(s, desc);
    if (status != DTRAIN_OK)
        return status;
    int64_t limit = dtrain__server_timeout_ns(s), heard_ns = dtrain__os_now_ns(); /* when something last arrived */
    while (s->stats.workers > 0 && status == DTRAIN_OK) {
        int moved;
        status = dtrain__server_round(s, desc, &moved);
        idle = moved ? 0 : idle + 1;
        if (moved) {
            heard_ns = dtrain__os_now_ns();
        } else if (status == DTRAIN_OK && dtrain__os_now_ns() - heard_ns >= limit) {
            status = dtrain__server_silent(s);
        } else if (idle < DTRAIN__SERVER_IDLE_TURNS) {
            dtrain__os_yield();
        } else {
            dtrain__server_sleep(s);
        }
    }
    return status;
}

/* ---- the aggregator of both forms ---- */

static dtrain_status dtrain__server_aggregate(void *self, const dtrain_param *table, size_t count, double weight,
                                              double *total_weight)
{
    dtrain_server *s = (dtrain_server *)self;
    dtrain_status status = DTRAIN_OK;
    if (s == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "aggregate: the server is NULL: create it first");
    *total_weight = 0.0;
    dtrain__versions_end(&s->versions, 0); /* the step before can no longer be taken back, even after an error */
    if (s->desc.async)
        status = dtrain__server_check_present(s, "aggregate");
    if (status == DTRAIN_OK)
        status = dtrain__aggregator_check_made(table, count, weight, s->count, s->elements);
    if (status == DTRAIN_OK && !s->desc.async)
        status = dtrain__server_sync(s, table, weight, total_weight);
    if (status != DTRAIN_OK || !s->desc.async)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    status = dtrain__server_push(s, table, weight);
    if (status == DTRAIN_OK)
        status = dtrain__server_pull(s, table);
    dtrain__fpmode_restore(mode);
    return status;
}

static dtrain_compressed_stats dtrain__server_counters(const void *self)
{
    dtrain_compressed_stats stats = {0, 0, 0};
    const dtrain_server *s = (const dtrain_server *)self;
    if (s == NULL)
        return stats;
    stats.steps = s->stats.steps;
    stats.dense_bytes = s->dense_bytes;
    stats.sent_bytes = s->stats.sent_bytes;
    return stats;
}

/* Lists the residuals of packing. An asynchronous server has none. */
static dtrain_status dtrain__server_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_server *s = (const dtrain_server *)list->object;
    dtrain__pieces_row row = {s->rank, s->ranks, 1, 0, 0};
    row.ranks -= s->desc.async != 0;
    row.rank -= s->desc.async && s->rank > s->desc.server;
    dtrain__pieces_put_row(lister, &row, "residual", DTRAIN_F32, s->residual[s->versions.now], s->total, NULL);
    if (s->residual[0] != NULL)
        dtrain__pieces_put_optional(lister, &row, "unit", DTRAIN_F64, &s->unit[s->versions.now], 1);
    return DTRAIN_OK;
}

static dtrain_status dtrain__server_loading(const dtrain_pieces *list, int turn)
{
    dtrain_server *s = (dtrain_server *)list->object;
    if (turn == 0)
        dtrain__versions_end(&s->versions, 0);
    return DTRAIN_OK;
}

static dtrain_status dtrain__server_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    dtrain_server *s = (dtrain_server *)list->object;
    float *residual = s->residual[s->versions.now];
    double *unit = &s->unit[s->versions.now];
    if (residual == NULL || (dtrain__compression_known(unit, lister) && dtrain__pieces_got(lister, residual)))
        return DTRAIN_OK;
    *unit = 0.0;
    memset(residual, 0, s->total * sizeof(float));
    dtrain__compression_say_forgotten(s->rank, lister);
    return DTRAIN_OK;
}

static dtrain_pieces dtrain__server_pieces(void *self)
{
    dtrain_pieces made = dtrain__pieces_make(self, dtrain__server_list, dtrain__server_loaded);
    made.loading = dtrain__server_loading;
    return made;
}

/* Takes the last step of a synchronous server back. An asynchronous one has applied what a worker pushed. */
static void dtrain__server_drop_step(void *self)
{
    dtrain_server *s = (dtrain_server *)self;
    if (s != NULL && !s->desc.async)
        dtrain__versions_undo(&s->versions);
}

DTRAIN_API dtrain_aggregator dtrain_aggregator_server(dtrain_server *server)
{
    dtrain_aggregator aggregator = {server,
                                    dtrain__server_aggregate,
                                    NULL,
                                    dtrain__server_counters,
                                    dtrain__server_pieces,
                                    dtrain__server_drop_step};
    return aggregator;
}

#endif
