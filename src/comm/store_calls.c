/* ---- >>store_calls ----
 * The store's public calls. Rank 0 serves itself; the others ask it over their control connection and wait for
 * the answer. Ranks of one address space share a store on their board. */
#ifndef DTRAIN__STORE_CALLS
#define DTRAIN__STORE_CALLS
#include "op.c"
#include "comm.c"

static const char *const dtrain__store_names[] = {"store_set", "store_get", "store_wait"};

static void dtrain__store_copy(void *value, size_t capacity, size_t *bytes, const void *data, size_t n)
{
    if (n > 0 && capacity > 0)
        memcpy(value, data, n < capacity ? n : capacity);
    *bytes = n;
}

typedef struct dtrain__store_wait {
    dtrain_comm *comm;
    const char *key;
    void *value;
    size_t capacity, *bytes;
} dtrain__store_wait;

static int dtrain__store_look(void *pointer)
{
    dtrain__store_wait *wait = (dtrain__store_wait *)pointer;
    dtrain__board *board = wait->comm->transport.board;
    pthread_mutex_lock(&board->mutex);
    dtrain__entry *entry = *dtrain__store_place(&board->store, wait->key, strlen(wait->key));
    if (entry != NULL)
        dtrain__store_copy(wait->value, wait->capacity, wait->bytes, dtrain__entry_value(entry), entry->bytes);
    pthread_mutex_unlock(&board->mutex);
    return entry != NULL || dtrain__board_broken(board);
}

static dtrain_status dtrain__store_on_board(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                            size_t *bytes, int64_t deadline_ns)
{
    dtrain__board *board = comm->transport.board;
    dtrain__store_wait wait = {comm, key, value, capacity, bytes};
    dtrain_status status;
    if (what == DTRAIN__STORE_SET) {
        pthread_mutex_lock(&board->mutex);
        status = dtrain__store_put(&board->store, board->allocator, key, strlen(key), value, capacity);
        pthread_mutex_unlock(&board->mutex);
        dtrain__bell_ring(&board->bell);
        return status;
    }
    *bytes = DTRAIN_STORE_ABSENT;
    for (unsigned turn = 0; !dtrain__store_look(&wait) && what == DTRAIN__STORE_WAIT; turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return dtrain__fail(&comm->error, DTRAIN_ERR_TIMEOUT, "store_wait on rank %d: nobody has set \"%s\"",
                                comm->rank, key);
        dtrain__bell_wait(comm->bell, turn, deadline_ns, dtrain__store_look, &wait);
    }
    if (*bytes == DTRAIN_STORE_ABSENT && what == DTRAIN__STORE_WAIT)
        return dtrain__report(dtrain__board_cause(board));
    return DTRAIN_OK;
}

/* Sends the request, or on rank 0 serves it; 0 when there is no memory. The caller holds the hub's mutex. */
static uint32_t dtrain__store_ask(dtrain__hub *hub, int what, const char *key, const void *value, size_t bytes)
{
    dtrain__member *root = &hub->members[0];
    uint32_t id = ++hub->store_id != 0 ? hub->store_id : ++hub->store_id;
    if (hub->rank == 0) {
        dtrain__store_serve(hub, 0, id, what, key, value, bytes);
        return id;
    }
    size_t begin = dtrain__frame_open(hub, root, DTRAIN__FRAME_ASK);
    dtrain__give(hub, &root->out, id, 4);
    dtrain__give(hub, &root->out, (uint64_t)what, 1);
    dtrain__give_text(hub, &root->out, 2, key);
    dtrain__give_bytes(hub, &root->out, value, bytes);
    if (!dtrain__frame_close(root, begin))
        return 0;
    dtrain__hub_flush(hub, 0);
    return id;
}

/* Looks for the answer to `id`; 0 while there is none. */
static int dtrain__store_answered(dtrain_comm *comm, uint32_t id, int what, void *value, size_t capacity, size_t *bytes,
                                  dtrain_status *status)
{
    dtrain__hub *hub = &comm->socket->hub;
    int done = 1;
    pthread_mutex_lock(&hub->mutex);
    if (hub->store_answered == id) {
        *status = hub->store_status;
        if (*status != DTRAIN_OK && hub->store_value.bytes == 0)
            dtrain__fail(&comm->error, *status, "%s on rank %d: no memory for the answer, here or on rank 0",
                         dtrain__store_names[what], comm->rank);
        else if (*status != DTRAIN_OK)
            dtrain__fail(&comm->error, *status, "%s on rank %d: rank 0 says: %.*s", dtrain__store_names[what],
                         comm->rank, (int)(hub->store_value.bytes < 300 ? hub->store_value.bytes : 300),
                         (const char *)hub->store_value.data);
        else if (what != DTRAIN__STORE_SET)
            dtrain__store_copy(value, capacity, bytes, hub->store_value.data, hub->store_value.bytes);
        if (*status == DTRAIN_OK && what == DTRAIN__STORE_GET && !hub->store_found)
            *bytes = DTRAIN_STORE_ABSENT;
    } else if (hub->broken) {
        dtrain__error cause = hub->cause;
        *status = dtrain__fail(&comm->error, cause.status, "%s on rank %d: %.480s", dtrain__store_names[what],
                               comm->rank, cause.text);
    } else if (hub->rank != 0 && hub->members[0].left) {
        *status = dtrain__fail(&comm->error, DTRAIN_ERR_PEER_LOST,
                               "%s on rank %d: rank 0, which keeps the store, has left the group",
                               dtrain__store_names[what], comm->rank);
    } else
        done = 0;
    pthread_mutex_unlock(&hub->mutex);
    return done;
}

static dtrain_status dtrain__store_over_sockets(dtrain_comm *comm, int what, const char *key, void *value,
                                                size_t capacity, size_t *bytes, int64_t deadline_ns)
{
    dtrain__hub *hub = &comm->socket->hub;
    struct pollfd none[1];
    dtrain_status status = dtrain__comm_usable(comm, dtrain__store_names[what]);
    if (status != DTRAIN_OK)
        return status;
    pthread_mutex_lock(&hub->mutex);
    uint32_t id = dtrain__store_ask(hub, what, key, value, what == DTRAIN__STORE_SET ? capacity : 0);
    pthread_mutex_unlock(&hub->mutex);
    if (id == 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "%s on rank %d (\"%s\"): no memory for the request",
                            dtrain__store_names[what], comm->rank, key);
    dtrain__hub_kick(hub);
    for (;;) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        if (dtrain__store_answered(comm, id, what, value, capacity, bytes, &status))
            return status;
        if (dtrain__os_now_ns() >= deadline_ns)
            break;
        dtrain__hub_wait(hub, none, 0, deadline_ns, seen);
    }
    return dtrain__fail(&comm->error, DTRAIN_ERR_TIMEOUT,
                        what == DTRAIN__STORE_WAIT
                            ? "%s on rank %d: nobody has set \"%s\" within timeout_ms"
                            : "%s on rank %d (\"%s\"): rank 0 has not answered within timeout_ms",
                        dtrain__store_names[what], comm->rank, key);
}

static dtrain_status dtrain__store_call(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                        size_t *bytes)
{
    size_t length = key != NULL ? strlen(key) : 0;
    int64_t deadline_ns;
    if (comm == NULL || length == 0 || length >= DTRAIN__STORE_KEY_BYTES || (value == NULL && capacity > 0) ||
        (bytes == NULL && what != DTRAIN__STORE_SET) ||
        (what == DTRAIN__STORE_SET && capacity > DTRAIN__STORE_VALUE_BYTES))
        return dtrain__fail(
            comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
            "%s: needs a group, a key of 1 to 255 characters (got %zu), a value of at most %zu bytes and "
            "places for what comes back",
            dtrain__store_names[what], length, DTRAIN__STORE_VALUE_BYTES);
    deadline_ns = comm->desc.timeout_ms < 0 ? INT64_MAX
                                            : dtrain__os_now_ns() + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    if (comm->transport.board != NULL)
        return dtrain__store_on_board(comm, what, key, value, capacity, bytes, deadline_ns);
    if (comm->socket != NULL)
        return dtrain__store_over_sockets(comm, what, key, value, capacity, bytes, deadline_ns);
    return dtrain__fail(&comm->error, DTRAIN_ERR_UNSUPPORTED, "%s: a transport of your own has no store",
                        dtrain__store_names[what]);
}

DTRAIN_API dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes)
{
    void *data;
    memcpy(&data, &value, sizeof data); /* it is only read */
    return dtrain__store_call(comm, DTRAIN__STORE_SET, key, data, bytes, NULL);
}

DTRAIN_API dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                          size_t *bytes)
{
    return dtrain__store_call(comm, DTRAIN__STORE_GET, key, value, capacity, bytes);
}

DTRAIN_API dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                           size_t *bytes)
{
    return dtrain__store_call(comm, DTRAIN__STORE_WAIT, key, value, capacity, bytes);
}

#endif
