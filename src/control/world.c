/* ---- >>world ----
 * Makes a process's end of a new world, and says whether the world has formed. */
#ifndef DTRAIN__WORLD
#define DTRAIN__WORLD
#include "channel.c"
#include "root.c"
#include "rendezvous.c"

/* A turn of the hub on its service thread. After the first, only that thread steps the hub. */
static void dtrain__world_step(dtrain__origin *origin, int64_t deadline_ns)
{
    dtrain__hub *hub = (dtrain__hub *)(void *)origin;
    DTRAIN__ATOMIC_STORE(&hub->serviced, 1, RELEASE);
    if (!dtrain__os_try_lock(&hub->step_mutex)) {
        dtrain__hub_kick(hub);
        dtrain__os_lock(&hub->step_mutex);
    }
    dtrain__hub_step(hub, NULL, 0, deadline_ns);
    dtrain__os_unlock(&hub->step_mutex);
}

static void dtrain__world_kick(dtrain__origin *origin)
{
    dtrain__hub_kick((dtrain__hub *)(void *)origin);
}

static void dtrain__world_describe(dtrain__hub *hub, const dtrain__keys *keys, const dtrain__hub_desc *desc)
{
    hub->keys = *keys;
    hub->rank = keys->rank;
    hub->size = keys->world_size;
    hub->insecure = desc->insecure;
    hub->listen_fd = desc->listen_fd;
    hub->on_address = desc->on_address;
    hub->on_address_user = desc->on_address_user;
    hub->transport = desc->transport;
    hub->polls = desc->polls;
    hub->connections = desc->connections > 0 ? desc->connections : 1;
    hub->heartbeat_ns =
        desc->heartbeat_ms < 0 ? 0 : dtrain__os_ms_to_ns(desc->heartbeat_ms > 0 ? desc->heartbeat_ms : 15000);
    hub->reconnect_ns = desc->reconnect_ms > 0 ? dtrain__os_ms_to_ns(desc->reconnect_ms) : 0;
    hub->patience_ns = dtrain__os_ms_to_ns(desc->timeout_ms < 0 ? INT64_MAX : desc->timeout_ms);
    hub->patience_ns = hub->heartbeat_ns > hub->patience_ns ? hub->heartbeat_ns : hub->patience_ns;
    hub->patience_ns = hub->reconnect_ns > hub->patience_ns ? hub->reconnect_ns : hub->patience_ns;
    hub->period_ns = hub->heartbeat_ns > 0 && hub->heartbeat_ns / 8 < 500000000 ? hub->heartbeat_ns / 8 : 500000000;
    hub->rest_ns = (hub->heartbeat_ns > 0 ? hub->heartbeat_ns : dtrain__os_ms_to_ns(15000)) / 4;
    if (desc->timeout_ms > 0 &&
        dtrain__os_ms_to_ns(desc->timeout_ms) / 16 < hub->rest_ns) /* a deadline's text has news */
        hub->rest_ns = dtrain__os_ms_to_ns(desc->timeout_ms) / 16;
    hub->rest_ns = hub->rest_ns > hub->period_ns ? hub->rest_ns : hub->period_ns;
    hub->kick[0] = hub->kick[1] = -1;
    hub->suspect = -1;
    snprintf(hub->root, sizeof hub->root, "%s", desc->root);
    snprintf(hub->listen_on, sizeof hub->listen_on, "%s", desc->listen_on);
    snprintf(hub->fingerprint, sizeof hub->fingerprint, "%s", desc->fingerprint);
    snprintf(hub->believed, sizeof hub->believed, "%s", desc->believed);
}

/* Returns 0 if there is no memory. */
static int dtrain__world_introduce(dtrain__hub *hub)
{
    dtrain__member *self = &hub->members[hub->rank];
    char host[64] = "?", program[24];
    int told = 0;
    dtrain__os_host_name(host, sizeof host);
    dtrain__os_program(program, sizeof program);
    snprintf(hub->keys.name, sizeof hub->keys.name, "pid %ld%s on %.44s", dtrain__os_self(), program, host);
    int good = dtrain__hub_say(hub, &self->name, hub->keys.name);
    self->host = dtrain__plane_host();
    self->process = (uint64_t)dtrain__os_self();
    self->began = dtrain__os_process_began(dtrain__os_self(), &told) ^ dtrain__os_process_space() << 40;
    self->joined = 1;
    return good;
}

/* Opens the pipe, chooses the run's name, finds the root, and on rank 0 opens the listener. */
static dtrain_status dtrain__world_open(dtrain__hub *hub)
{
    dtrain_status status;
    int error = dtrain__os_pipe(hub->kick);
    if (error == 0 && hub->rank == 0)
        error = dtrain__os_random(hub->keys.run, DTRAIN__RUN_BYTES);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank %d cannot get a pipe or random bytes: %s",
                            hub->rank, dtrain__os_error_text(error));
    status = dtrain__root_find(hub);
    if (status == DTRAIN_OK && hub->rank == 0 && !hub->root_named)
        status = dtrain__root_listen(hub, hub->listen_fd);
    if (status == DTRAIN_OK && hub->listener_count > 0 && hub->on_address != NULL)
        hub->on_address(hub->on_address_user, hub->root);
    return status;
}

static dtrain_status dtrain__world_start(dtrain__hub *hub, dtrain__channel **out, const dtrain__keys *keys,
                                         const dtrain__hub_desc *desc)
{
    dtrain__world_describe(hub, keys, desc);
    size_t size = (size_t)hub->size;
    if (!dtrain__memory_fits(hub->size, sizeof(dtrain__member) + sizeof(dtrain__peer) + sizeof(dtrain__departure)))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "comm_create: no memory for a world of %zu ranks: is its size right?", size);
    hub->fds = (struct pollfd *)dtrain__alloc(hub->allocator, 64 * sizeof(struct pollfd));
    hub->members = (dtrain__member *)dtrain__alloc(hub->allocator, size * sizeof(dtrain__member));
    for (int rank = 0; hub->members != NULL && rank < hub->size; rank++)
        dtrain__hub_expect(hub, &hub->members[rank]);
    if (hub->members == NULL || hub->fds == NULL || !dtrain__hub_convene(hub) || !dtrain__world_introduce(hub))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d of %zu", hub->rank, size);
    dtrain_status status = dtrain__channel_create(out, hub, 0, NULL, hub->size, hub->rank);
    return status == DTRAIN_OK ? dtrain__world_open(hub) : status;
}

/* Makes one rank's end. Rank 0 then listens; others will connect to it. dtrain__hub_step does the rest. */
static dtrain_status dtrain__world_create(dtrain__channel **out, const dtrain__keys *keys, const dtrain__hub_desc *desc,
                                          dtrain_allocator *allocator)
{
    dtrain__hub *hub =
        (dtrain__hub *)dtrain__memory_owner(allocator, sizeof *hub, offsetof(dtrain__hub, own), &allocator);
    *out = NULL;
    if (hub == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d", keys->rank);
    hub->allocator = allocator;
    dtrain__os_mutex_init(&hub->mutex);
    dtrain__os_mutex_init(&hub->step_mutex);
    dtrain__os_mutex_init(&hub->origin.mutex);
    hub->origin.step = dtrain__world_step;
    hub->origin.kick = dtrain__world_kick;
    dtrain_status status = dtrain__world_start(hub, out, keys, desc);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    dtrain__error kept = dtrain__thread_error;
    if (*out != NULL)
        dtrain__channel_destroy(*out);
    else
        dtrain__hub_free(hub, 0);
    *out = NULL;
    return dtrain__report(&kept);
}

/* Reports why a group has not formed: which ranks came, which did not, which were refused. */
static dtrain_status dtrain__world_unformed(dtrain__hub *hub, double seconds)
{
    char missing[160] = "";
    size_t used = 0;
    for (int rank = 0; rank < hub->size && hub->rank == 0; rank++)
        if (!hub->members[rank].joined && used < sizeof missing - 32)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d%s", used > 0 ? ", " : "", rank,
                                     hub->members[rank].name[0] != 0 ? " (came and left)" : "");
    if (hub->rank == 0 && hub->listener_count == 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_TIMEOUT,
            "comm_create: rank 0 of %d could not listen at %.120s within %.1f s: %.300s; believed: %.180s", hub->size,
            hub->root, seconds, hub->root_error.text, hub->believed);
    if (hub->rank == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                            "comm_create: rank 0 of %d waited %.1f s at %.120s%s for rank %s; believed: %.180s%s%.200s",
                            hub->size, seconds, hub->root, hub->elsewhere ? " (which is no address of its host)" : "",
                            missing, hub->believed, hub->refused[0] != 0 ? "; came and was refused: " : "",
                            hub->refused);
    if (hub->members[0].control.fd >= 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_TIMEOUT,
            "comm_create: rank %d of %d has met rank 0 at %.120s and waited %.1f s for other ranks, which "
            "have not come; believed: %.200s",
            hub->rank, hub->size, hub->root, seconds, hub->believed);
    return dtrain__fail(
        NULL, dtrain__hub_root_denied(hub) ? hub->root_error.status : DTRAIN_ERR_TIMEOUT,
        "comm_create: rank %d of %d waited %.1f s for rank 0 at %.120s (%.260s); believed: %.180s; is rank "
        "0 started%s?",
        hub->rank, hub->size, seconds, hub->root, hub->root_error.text[0] != 0 ? hub->root_error.text : "no answer",
        hub->believed,
        dtrain__root_port(hub) > 0 && dtrain__net_is_unix(&hub->root_addresses[0])
            ? ", by this user and with the same TMPDIR (or set DTRAIN_TOKEN on every rank)"
            : ", and can it be reached from here");
}

/* Checks whether the group has formed, or never will. */
static dtrain_status dtrain__world_formed(dtrain__channel *world, int *formed, int64_t started_ns, int64_t deadline_ns)
{
    dtrain__hub *hub = world->hub;
    dtrain_status status = DTRAIN_OK;
    dtrain__os_lock(&hub->mutex);
    const dtrain__error *cause = dtrain__membership_cause(world->seat.members);
    *formed = hub->formed && cause == NULL;
    if (cause != NULL)
        status = dtrain__fail(NULL, cause->status, "comm_create: rank %d of %d: %.400s; believed: %.180s", hub->rank,
                              hub->size, cause->text, hub->believed);
    else if (!hub->formed && hub->rank != 0 && hub->members[0].gone != DTRAIN__PRESENT)
        status = dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "comm_create: rank %d of %d: rank 0 has left%s%.300s",
                              hub->rank, hub->size, hub->members[0].why[0] != 0 ? ": " : "", hub->members[0].why);
    else if (!hub->formed && dtrain__os_now_ns() >= deadline_ns)
        status = dtrain__world_unformed(hub, (double)(dtrain__os_now_ns() - started_ns) * 1e-9);
    dtrain__os_unlock(&hub->mutex);
    return status;
}

#endif
