/* ---- >>server_worker ----
 * A worker of the asynchronous parameter server, and the protocol. A worker speaks, the server answers:
 *
 *   worker    header PUSH, then the gradients
 *   worker    header PULL;     server: header GRANT, then the parameters; or header REFUSE
 *   worker    header LEAVE
 *
 * A worker's header holds the number of gradients pushed before it. The message buffer serves one message at a time: a
 * worker pulls only after its gradients have been sent. */
#ifndef DTRAIN__SERVER_WORKER
#define DTRAIN__SERVER_WORKER
#include "server_sync.c"

enum {
    DTRAIN__SERVER_PUSH = 1,
    DTRAIN__SERVER_PULL,
    DTRAIN__SERVER_LEAVE,
    DTRAIN__SERVER_GRANT,
    DTRAIN__SERVER_REFUSE
};

static void dtrain__server_count_staleness(dtrain_server_stats *stats, uint64_t staleness)
{
    size_t bin = staleness < DTRAIN_STALENESS_BINS ? (size_t)staleness : DTRAIN_STALENESS_BINS - 1;
    stats->staleness_counts[bin]++;
    stats->staleness_sum += staleness;
    stats->largest_staleness = staleness > stats->largest_staleness ? staleness : stats->largest_staleness;
}

/* Checks that a call comes from a worker of an asynchronous server. */
static dtrain_status dtrain__server_check_worker(const dtrain_server *s, const char *call)
{
    if (s == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the server is NULL: create it first", call);
    if (!s->desc.async)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s on rank %d: the server is synchronous; set async in its desc, or aggregate", call,
                            s->rank);
    if (s->serves)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s on rank %d: this rank is the server, and only workers push and pull; call "
                            "dtrain_server_run",
                            call, s->rank);
    return s->broken.status != DTRAIN_OK ? dtrain__report(&s->broken) : DTRAIN_OK;
}

static dtrain_status dtrain__server_check_present(const dtrain_server *s, const char *call)
{
    dtrain_status status = dtrain__server_check_worker(s, call);
    if (status == DTRAIN_OK && s->left)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s on rank %d: this worker has left: push and pull "
                            "before dtrain_server_leave",
                            call, s->rank);
    return status;
}

static dtrain_status dtrain__server_write(dtrain__server_link *link, int slot, uint64_t kind, uint64_t a, uint64_t b,
                                          uint64_t c, int peer)
{
    link->header_out[0] = kind;
    link->header_out[1] = a;
    link->header_out[2] = b;
    link->header_out[3] = c;
    return dtrain_send_async(link->comm, link->header_out, DTRAIN__SERVER_HEADER, DTRAIN_U64, peer, &link->out[slot]);
}

/* Waits until everything has been sent. */
static dtrain_status dtrain__server_flush(dtrain__server_link *link)
{
    dtrain_status status = dtrain__work_settle(&link->out[0]);
    return status == DTRAIN_OK ? dtrain__work_settle(&link->out[1]) : status;
}

static dtrain_status dtrain__server_push(dtrain_server *s, const dtrain_param *table, double weight)
{
    dtrain__server_link *link = &s->links[0];
    uint64_t bits;
    if (!s->fresh)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "server_push on rank %d: no pull since the last push: call dtrain_server_pull in between",
                            s->rank);
    dtrain_status status = dtrain__server_flush(link);
    dtrain__server_open(s, weight); /* the server divides each push by its own weight, and leaves out one of weight 0 */
    for (size_t p = 0; p < s->piece_count && status == DTRAIN_OK; p++) {
        dtrain__server_take(s, table, &s->pieces[p], 0, s->own);
        dtrain__server_pack(s, &s->pieces[p], s->own, link->message + s->pieces[p].at, s->wide);
    }
    memcpy(&bits, &weight, sizeof bits);
    if (status == DTRAIN_OK)
        status = dtrain__server_write(link, 0, DTRAIN__SERVER_PUSH, bits, s->clock, 0, 0);
    if (status == DTRAIN_OK)
        status = dtrain_send_async(link->comm, link->message, s->message_bytes, DTRAIN_U8, 0, &link->out[1]);
    dtrain__versions_end(&s->versions, status == DTRAIN_OK);
    if (status != DTRAIN_OK)
        return dtrain__server_gone(s, "server_push", status);
    s->clock++;
    s->fresh = 0;
    s->stats.steps++;
    s->stats.sent_bytes += s->message_bytes;
    s->dense_bytes += s->total * sizeof(float);
    return DTRAIN_OK;
}

/* Writes the parameters that have arrived into the table; if they travel packed, adds their change. */
static dtrain_status dtrain__server_adopt(dtrain_server *s, const dtrain_param *table)
{
    for (size_t p = 0; p < s->piece_count; p++) {
        const dtrain__server_piece *piece = &s->pieces[p];
        dtrain_status status = dtrain__server_unpack(s, piece, s->links[0].message + piece->at, s->wide);
        if (status != DTRAIN_OK)
            return status;
        if (piece->packed) {
            dtrain__server_take(s, table, piece, 1, s->own);
            dtrain__fold_sum_f32(s->own, s->wide, piece->count);
        }
        dtrain__server_put(s, table, piece, 1, piece->packed ? s->own : s->wide, 0.0);
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__server_ask(dtrain_server *s)
{
    dtrain__server_link *link = &s->links[0];
    dtrain_status status = dtrain__server_flush(link);
    if (status == DTRAIN_OK)
        status = dtrain__server_write(link, 0, DTRAIN__SERVER_PULL, 0, s->clock, 0, 0);
    if (status == DTRAIN_OK)
        status = dtrain__work_settle(&link->out[0]);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain_recv(link->comm, link->header_in, DTRAIN__SERVER_HEADER, DTRAIN_U64, 0);
    /* The server refuses before this deadline, and says whom it waited for. On a busy host its answer may be late. */
    if (status == DTRAIN_ERR_TIMEOUT && !dtrain__group_is_broken(link->comm))
        status = dtrain_recv(link->comm, link->header_in, DTRAIN__SERVER_HEADER, DTRAIN_U64, 0);
    return status;
}

static dtrain_status dtrain__server_pull(dtrain_server *s, const dtrain_param *table)
{
    dtrain__server_link *link = &s->links[0];
    const uint64_t *header = link->header_in;
    dtrain_status status = dtrain__server_ask(s);
    if (status == DTRAIN_OK && header[0] == DTRAIN__SERVER_REFUSE) {
        s->stats.waits++;
        return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                            "server_pull on rank %d, which has pushed %llu gradients: rank %llu has pushed %llu, and "
                            "staleness allows %d behind; it did not catch up in time. Pull again, or allow more "
                            "staleness",
                            s->rank, (unsigned long long)s->clock, (unsigned long long)header[1],
                            (unsigned long long)header[2], s->desc.staleness);
    }
    if (status == DTRAIN_OK && (header[0] != DTRAIN__SERVER_GRANT || header[2] > (uint64_t)s->desc.staleness))
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "the answer to a pull is message %llu, %llu steps ahead of the slowest; expected message "
                              "%d, at most %d steps ahead",
                              (unsigned long long)header[0], (unsigned long long)header[2], DTRAIN__SERVER_GRANT,
                              s->desc.staleness);
    if (status == DTRAIN_OK)
        status = dtrain_recv(link->comm, link->message, s->message_bytes, DTRAIN_U8, 0);
    if (status == DTRAIN_OK)
        status = dtrain__server_adopt(s, table);
    if (status != DTRAIN_OK)
        return dtrain__server_gone(s, "server_pull", status);
    if (!s->fresh || s->clock == 0) /* a second pull in a row is for the same gradient */
        dtrain__server_count_staleness(&s->stats, header[2]);
    s->fresh = 1;
    s->stats.pulls++;
    s->stats.waits += header[3] != 0;
    s->stats.received_bytes += s->message_bytes;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_server_push(dtrain_server *server, double weight)
{
    dtrain_status status = dtrain__server_check_present(server, "server_push");
    if (status == DTRAIN_OK)
        status = dtrain__aggregator_check(server->table, server->count, weight);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    status = dtrain__server_push(server, server->table, weight);
    dtrain__fpmode_restore(mode);
    return status;
}

DTRAIN_API dtrain_status dtrain_server_pull(dtrain_server *server)
{
    dtrain_status status = dtrain__server_check_present(server, "server_pull");
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    status = dtrain__server_pull(server, server->table);
    dtrain__fpmode_restore(mode);
    return status;
}

DTRAIN_API dtrain_status dtrain_server_leave(dtrain_server *server)
{
    dtrain_status status = dtrain__server_check_worker(server, "server_leave");
    if (status != DTRAIN_OK || server->left)
        return status;
    dtrain__server_link *link = &server->links[0];
    status = dtrain__server_flush(link);
    if (status == DTRAIN_OK)
        status = dtrain__server_write(link, 0, DTRAIN__SERVER_LEAVE, 0, server->clock, 0, 0);
    if (status == DTRAIN_OK)
        status = dtrain__work_settle(&link->out[0]);
    if (status != DTRAIN_OK)
        return dtrain__server_gone(server, "server_leave", status);
    server->left = 1;
    return DTRAIN_OK;
}

#endif
