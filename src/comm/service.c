/* ---- >>service ----
 * Who drives the queues of groups beside their callers. One thread serves all groups of a world that this process has.
 * With progress by poll a service has no thread and the groups of one rank. */
#ifndef DTRAIN__SERVICE
#define DTRAIN__SERVICE
#include "queue.c"

/* Advances all groups without waiting for a peer. Returns for how long there is nothing to do unless
 * something comes. */
static int64_t dtrain__service_drive(dtrain__service *service)
{
    int64_t span = 1000000000;
    pthread_mutex_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        int64_t most = 50000000; /* deadlines are looked at */
        comm->plane->rest(comm->transport.self);
        if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) == 0)
            continue;
        if (pthread_mutex_trylock(&comm->drive_mutex) != 0) {
            most = 1000000; /* whoever drives it may leave work behind */
        } else {
            if (dtrain__queue_drive_within(comm, dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS))
                most = 0;
            pthread_mutex_unlock(&comm->drive_mutex);
        }
        span = most < span ? most : span;
    }
    pthread_mutex_unlock(&service->mutex);
    return span;
}

/* Whether anything moved, or it is to stop. */
static int dtrain__service_round(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    return __atomic_load_n(&service->stop, __ATOMIC_SEQ_CST) != 0 || dtrain__service_drive(service) == 0;
}

static void dtrain__service_main(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    dtrain__origin *origin = service->origin;
    for (unsigned turn = 0; !__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST); turn++) {
        int64_t span = dtrain__service_drive(service);
        turn = span > 0 ? turn : 0;
        if (origin->step != NULL)
            origin->step(origin, span > 0 ? dtrain__os_now_ns() + span : 0);
        else /* yields a little, then sleeps */
            dtrain__bell_wait(service->bell, service->bell->spins + DTRAIN__BELL_YIELDS - 10 + turn, INT64_MAX,
                              dtrain__service_round, service);
    }
}

static void dtrain__service_free(dtrain__service *service)
{
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(service->allocator, service);
}

static void dtrain__service_stop(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    __atomic_store_n(&service->stop, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(service->bell);
    if (service->origin->kick != NULL)
        service->origin->kick(service->origin);
    dtrain__os_thread_join(&service->thread);
    dtrain__service_free(service);
}

/* One without its thread. */
static dtrain_status dtrain__service_new(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__service *service = (dtrain__service *)dtrain__alloc(comm->allocator, sizeof *service);
    *out = service;
    if (service == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for %zu bytes that serve its groups",
                            comm->rank, sizeof *service);
    service->allocator = comm->allocator;
    pthread_mutex_init(&service->mutex, NULL);
    return DTRAIN_OK;
}

static void dtrain__service_add(dtrain__service *service, dtrain_comm *comm)
{
    pthread_mutex_lock(&service->mutex);
    comm->next_served = service->comms;
    __atomic_store_n(&service->comms, comm, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    comm->service = service;
}

/* Starts the service thread of the group's origin, whose mutex the caller holds. */
static dtrain_status dtrain__service_start(dtrain_comm *comm)
{
    dtrain__origin *origin = comm->origin;
    dtrain__service *service;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status != DTRAIN_OK)
        return status;
    service->origin = origin;
    service->bell = origin->bell;
    int error = dtrain__os_thread_start(&service->thread, dtrain__service_main, service, (size_t)1 << 20);
    if (error != 0) {
        dtrain__service_free(service);
        return dtrain__fail(&comm->error, DTRAIN_ERR_IO,
                            "rank %d: the system refused a service thread (%s); set progress to DTRAIN_PROGRESS_POLL "
                            "to do without",
                            comm->rank, strerror(error));
    }
    origin->service = service;
    origin->last_gone = dtrain__service_stop;
    return DTRAIN_OK;
}

/* Puts the group under the service thread of its origin, at the first asynchronous call. */
static dtrain_status dtrain__service_join(dtrain_comm *comm)
{
    dtrain__origin *origin = comm->origin;
    pthread_mutex_lock(&origin->mutex);
    dtrain_status status = origin->service == NULL ? dtrain__service_start(comm) : DTRAIN_OK;
    pthread_mutex_unlock(&origin->mutex);
    if (status == DTRAIN_OK)
        dtrain__service_add((dtrain__service *)origin->service, comm);
    return status;
}

/* With progress by poll, before a group is made out of this one: has a service that both can share. */
static dtrain_status dtrain__service_share(dtrain_comm *comm)
{
    dtrain__service *service;
    if (comm->desc.progress != DTRAIN_PROGRESS_POLL || comm->service != NULL)
        return DTRAIN_OK;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status == DTRAIN_OK)
        dtrain__service_add(service, comm);
    return status;
}

/* A forked child has neither a service thread nor a right to the lock, but is alone with its copy of the list. */
static void dtrain__service_leave(dtrain_comm *comm, int forked)
{
    dtrain__service *service = comm->service;
    dtrain_comm **at;
    if (service == NULL || (forked && comm->desc.progress != DTRAIN_PROGRESS_POLL))
        return;
    if (!forked)
        pthread_mutex_lock(&service->mutex);
    for (at = &service->comms; *at != comm;)
        at = &(*at)->next_served;
    __atomic_store_n(at, comm->next_served, __ATOMIC_SEQ_CST);
    int last = service->comms == NULL;
    if (!forked)
        pthread_mutex_unlock(&service->mutex);
    if (comm->desc.progress == DTRAIN_PROGRESS_POLL && last)
        dtrain__service_free(service);
}

#endif
