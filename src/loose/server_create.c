/* ---- >>server_create ----
 * Creation and destruction of a parameter server. Before the first group is made, all ranks compare their tables and
 * descs, and whether each could make its end. So either every rank has its server, or every rank has an error. */
#ifndef DTRAIN__SERVER_CREATE
#define DTRAIN__SERVER_CREATE
#include "server.c"

static dtrain_status dtrain__server_no_memory(size_t bytes)
{
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_server_create: no memory for %zu bytes", bytes);
}

static dtrain_status dtrain__server_check_desc(dtrain_server *s)
{
    const dtrain_compress_desc *c = s->desc.compress;
    if (s->desc.server < 0 || s->desc.server >= s->ranks)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_server_create on rank %d: the server is rank %d, expected 0 to %d" DTRAIN__ZERO_FIRST, s->rank,
            s->desc.server, s->ranks - 1);
    if (c == NULL)
        return DTRAIN_OK;
    if (c->kind == DTRAIN_COMPRESS_POWERSGD ||
        (c->kind == DTRAIN_COMPRESS_OWN && c->own != NULL && c->own->reduce != NULL))
        return dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED,
            "dtrain_server_create on rank %d: compression %d does not pack: use top-k, BF16, F16, INT8, FP8, "
            "SIGN or an OWN without reduce, or dtrain_aggregator_compressed",
            s->rank, (int)c->kind);
    if (c->feedback.momentum != 0.0f || c->feedback.start_step > 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_server_create on rank %d: feedback has momentum %g and start_step %llu; a server has "
            "neither: leave them 0",
            s->rank, (double)c->feedback.momentum, (unsigned long long)c->feedback.start_step);
    dtrain_status status = dtrain__params_no_adam(c, "dtrain_server_create");
    if (status != DTRAIN_OK)
        return status;
    s->packs = 1;
    s->feedback = !c->feedback.no_feedback;
    s->least = c->least_count > 0 ? c->least_count : DTRAIN__COMPRESSION_LEAST;
    if (c->kind == DTRAIN_COMPRESS_DEFAULT || c->kind == DTRAIN_COMPRESS_TOPK)
        return dtrain__server_topk_make(&s->compressor, &c->topk, s->allocator);
    status = dtrain__compression_make(c, 1, 1, s->allocator, &s->compressor);
    return status == DTRAIN_OK ? dtrain__quantise_check_compressor(&s->compressor, "dtrain_server_create") : status;
}

/* Copies the table and cuts it into pieces. */
static dtrain_status dtrain__server_lay_out(dtrain_server *s, const dtrain_param *table, size_t count)
{
    size_t bytes = 0;
    s->table = (dtrain_param *)dtrain__alloc(s->allocator, count * sizeof *table);
    s->elements = (size_t *)dtrain__alloc(s->allocator, count * sizeof *s->elements);
    s->begins = (size_t *)dtrain__alloc(s->allocator, count * sizeof *s->begins);
    s->count = count;
    if (s->table == NULL || s->elements == NULL || s->begins == NULL)
        return dtrain__server_no_memory(count * (sizeof *table + 2 * sizeof(size_t)));
    memcpy(s->table, table, count * sizeof *table);
    for (size_t i = 0; i < count; i++) {
        s->table[i].part = NULL; /* it is the caller's, and a server does not need it */
        s->elements[i] = dtrain__params_gradients(&table[i]);
        s->begins[i] = s->total;
        s->total += s->elements[i]; /* they are in memory, so they add up */
    }
    if (!dtrain__server_cut(s) || !dtrain__mul_size(s->piece_count, sizeof *s->pieces, &bytes))
        return dtrain__server_no_memory(SIZE_MAX);
    s->pieces = (dtrain__server_piece *)dtrain__alloc(s->allocator, bytes);
    if (s->pieces == NULL)
        return dtrain__server_no_memory(bytes);
    dtrain__server_cut(s);
    s->largest = (s->largest + DTRAIN__SERVER_PREFIX + 63) / 64 * 64; /* frames follow each other aligned */
    return DTRAIN_OK;
}

/* Allocates a buffer, or frees it if `frees`. A buffer of 0 elements stays NULL. Returns 0 if there is no memory. */
static int dtrain__server_buffer(dtrain_server *s, int frees, void *place, size_t count, size_t width)
{
    size_t bytes;
    void *memory = NULL;
    if (frees) {
        memcpy(&memory, place, sizeof memory);
        dtrain__free(s->allocator, memory);
        return 1;
    }
    if (dtrain__mul_size(count, width, &bytes) && bytes > 0)
        memory = dtrain__alloc(s->allocator, bytes);
    memcpy(place, &memory, sizeof memory);
    return memory != NULL || count == 0;
}

static int dtrain__server_buffers(dtrain_server *s, int frees)
{
    int sync = !s->desc.async, folds = sync && s->serves, sends = !sync && s->serves, good = 1;
    size_t piece = s->total < DTRAIN__SERVER_PIECE ? s->total : DTRAIN__SERVER_PIECE, n = (size_t)s->link_count + 1;
    size_t frames = sync ? DTRAIN__SERVER_WINDOW : 0;
    for (int i = 0; i < 2; i++)
        good &= dtrain__server_buffer(s, frees, &s->residual[i], s->feedback && !sends ? s->total : 0, sizeof(float));
    good &= dtrain__server_buffer(s, frees, &s->own, piece, sizeof(float));
    good &= dtrain__server_buffer(s, frees, &s->wide, piece, sizeof(float));
    good &= dtrain__server_buffer(s, frees, &s->inputs, folds ? n : 0, sizeof *s->inputs);
    good &= dtrain__server_buffer(s, frees, &s->weights, folds ? n : 0, sizeof *s->weights);
    good &= dtrain__server_buffer(s, frees, &s->out_frames, frames, s->largest);
    for (int i = 0; s->links != NULL && i < s->link_count; i++) {
        dtrain__server_link *link = &s->links[i];
        good &= dtrain__server_buffer(s, frees, &link->in_frames, frames, s->largest);
        good &= dtrain__server_buffer(s, frees, &link->wide, folds && s->packs ? piece : 0, sizeof(float));
        good &= dtrain__server_buffer(s, frees, &link->message, sync ? 0 : s->message_bytes, 1);
        good &= dtrain__server_buffer(s, frees, &link->view, sends && s->packs ? s->total : 0, sizeof(float));
    }
    return good;
}

static dtrain_status dtrain__server_prepare(dtrain_server *s, const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_cpu_grads(table, count, "dtrain_server_create");
    if (status == DTRAIN_OK)
        status = dtrain__server_check_desc(s);
    if (status == DTRAIN_OK)
        status = dtrain__server_lay_out(s, table, count);
    if (status != DTRAIN_OK)
        return status;
    s->serves = s->rank == s->desc.server;
    s->link_count = s->serves ? s->ranks - 1 : 1;
    s->links = (dtrain__server_link *)dtrain__alloc(s->allocator, (size_t)s->link_count * sizeof *s->links);
    if (s->links == NULL || !dtrain__server_buffers(s, 0))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "dtrain_server_create on rank %d: no memory for %zu trained elements", s->rank, s->total);
    return DTRAIN_OK;
}

static const dtrain__alike_field dtrain__server_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_server_desc, server, NUMBER), DTRAIN__ALIKE_FIELD(dtrain_server_desc, async, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_server_desc, staleness, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_server_desc, no_broadcast, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_server_desc, compress, OWN) /* by its own table */};

enum { DTRAIN__SERVER_FIELDS = sizeof dtrain__server_fields / sizeof dtrain__server_fields[0] };

/* Makes the groups of the server and each worker, one after the other. */
static dtrain_status dtrain__server_connect(dtrain_server *s)
{
    dtrain_status status = DTRAIN_OK;
    int links = 0, server = s->desc.server, me = s->comm->rank;
    for (int worker = 0; worker < s->ranks && status == DTRAIN_OK; worker++) {
        dtrain_comm *group = NULL;
        if (worker == server)
            continue;
        status = dtrain_comm_split(s->comm, me == worker || me == server ? 0 : -1, me != server, &group);
        if (status != DTRAIN_OK || group == NULL)
            continue;
        s->links[links].comm = group;
        s->links[links].fresh = 1;
        s->links[links++].rank = s->serves ? worker : server;
    }
    s->stats.workers = s->serves ? links : 0;
    return status;
}

static dtrain_status dtrain__server_init(dtrain_server *s, const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__server_prepare(s, table, count);
    dtrain__params_given given = {s->table,        s->count, 0, &s->desc, dtrain__server_fields, DTRAIN__SERVER_FIELDS,
                                  s->desc.compress};
    status = dtrain__compression_meet(s->comm, "dtrain_server_create", "give all ranks the same table and desc", given,
                                      status);
    if (status == DTRAIN_OK)
        status = dtrain__server_connect(s);
    for (size_t i = 0; status == DTRAIN_OK && i < count && !s->desc.no_broadcast; i++)
        status =
            dtrain_broadcast(s->comm, table[i].data, dtrain_param_elements(&table[i]), table[i].dtype, s->desc.server);
    for (int l = 0; status == DTRAIN_OK && l < s->link_count && s->links[l].view != NULL; l++)
        for (size_t p = 0; p < s->piece_count; p++)
            dtrain__server_take(s, table, &s->pieces[p], 1, s->links[l].view + s->pieces[p].begin);
    s->fresh = 1;
    s->desc.compress = NULL; /* it is the caller's */
    return status;
}

DTRAIN_API dtrain_status dtrain_server_create(dtrain_server **server, dtrain_comm *comm, const dtrain_param *table,
                                              size_t count, const dtrain_server_desc *desc)
{
    if (server == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_server_create: %s is NULL, expected %s",
                            server == NULL ? "server" : "comm", server == NULL ? "a place for it" : "a group");
    *server = NULL;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_server *s = (dtrain_server *)dtrain__alloc(allocator, sizeof *s);
    if (s == NULL)
        return dtrain__server_no_memory(sizeof *s);
    s->comm = comm;
    s->allocator = allocator;
    s->rank = dtrain_comm_rank(comm);
    s->ranks = dtrain_comm_size(comm);
    if (desc != NULL)
        s->desc = *desc;
    s->desc.staleness = s->desc.staleness == 0 ? 4 : s->desc.staleness < 0 ? 0 : s->desc.staleness;
    dtrain_status status = dtrain__server_init(s, table, count);
    if (status == DTRAIN_OK) {
        *server = s;
        return DTRAIN_OK;
    }
    dtrain__error cause = dtrain__thread_error;
    dtrain_server_destroy(s);
    return dtrain__report(&cause);
}

DTRAIN_API void dtrain_server_destroy(dtrain_server *server)
{
    dtrain_server *s = server;
    if (s == NULL)
        return;
    dtrain_allocator *allocator = s->allocator;
    for (int i = 0; s->links != NULL && i < s->link_count; i++)
        dtrain__server_close(&s->links[i]);
    dtrain__server_buffers(s, 1);
    dtrain__quantise_destroy(&s->compressor);
    dtrain__free(allocator, s->links);
    dtrain__free(allocator, s->pieces);
    dtrain__free(allocator, s->begins);
    dtrain__free(allocator, s->elements);
    dtrain__free(allocator, s->table);
    dtrain__free(allocator, s);
}

DTRAIN_API dtrain_server_stats dtrain_server_get_stats(const dtrain_server *server)
{
    dtrain_server_stats none;
    memset(&none, 0, sizeof none);
    return server != NULL ? server->stats : none;
}

#endif
