/* ---- >>store_calls ----
 * The store's public calls; the group's control plane answers them. */
#ifndef DTRAIN__STORE_CALLS
#define DTRAIN__STORE_CALLS
#include "op.c"
#include "work.c"

static dtrain_status dtrain__store_do(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                      size_t *bytes)
{
    size_t length = key != NULL ? strlen(key) : 0;
    dtrain__store_call call = {what, key, value,     capacity, bytes, comm != NULL ? &comm->error : NULL,
                               0,    0,   DTRAIN_OK, ""};
    int64_t deadline_ns;
    if (comm == NULL || length == 0 || length >= DTRAIN__STORE_KEY_BYTES || (value == NULL && capacity > 0) ||
        (bytes == NULL && what != DTRAIN__STORE_SET) ||
        (what == DTRAIN__STORE_SET && capacity > DTRAIN__STORE_VALUE_BYTES))
        return dtrain__fail(
            comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
            "%s: needs a group, a key of 1 to 255 characters (got %zu), a value of at most %zu bytes and "
            "places for what comes back",
            dtrain__store_names[what], length, DTRAIN__STORE_VALUE_BYTES);
    dtrain_status status = dtrain__group_alive(comm, dtrain__store_names[what]);
    if (status != DTRAIN_OK)
        return status;
    deadline_ns =
        comm->desc.timeout_ms < 0 ? INT64_MAX : dtrain__os_now_ns() + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    if (!comm->plane->in_process)
        status = dtrain__work_usable(comm, dtrain__store_names[what]);
    return status == DTRAIN_OK ? comm->plane->store(comm->transport.self, &call, deadline_ns) : status;
}

DTRAIN_API dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes)
{
    void *data;
    memcpy(&data, &value, sizeof data); /* it is only read */
    return dtrain__store_do(comm, DTRAIN__STORE_SET, key, data, bytes, NULL);
}

DTRAIN_API dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                          size_t *bytes)
{
    return dtrain__store_do(comm, DTRAIN__STORE_GET, key, value, capacity, bytes);
}

DTRAIN_API dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                           size_t *bytes)
{
    int64_t began = dtrain__os_now_ns();
    dtrain_status status = dtrain__store_do(comm, DTRAIN__STORE_WAIT, key, value, capacity, bytes);
    if (comm != NULL && __atomic_load_n(&comm->mark, __ATOMIC_RELAXED) == DTRAIN__COMM_MARK)
        dtrain__work_blocked_in(comm, began);
    return status;
}

#endif
