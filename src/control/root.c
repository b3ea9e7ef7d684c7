/* ---- >>root ----
 * Where rank 0 is: its address, which may have to be looked up, and how ranks without a token meet instead. Ranks other
 * than 0 look up a name on a thread of its own, until they reach rank 0. The name may not be known yet, or its address
 * may have changed. */
#ifndef DTRAIN__ROOT
#define DTRAIN__ROOT
#include "admit.c"

/* Reports that TCP needs a token. what: the text that says why TCP would be used. */
static dtrain_status dtrain__root_closed(dtrain__hub *hub, const char *what)
{
    return dtrain__fail(NULL, DTRAIN_ERR_DENIED,
                        "comm_create: rank %d: %.300s and there is no token: set DTRAIN_TOKEN to one secret of 16 "
                        "bytes or more on every rank, or start the ranks with dtrun, which makes one (or set "
                        "DTRAIN_INSECURE=1, where nobody else can come)",
                        hub->rank, what);
}

/* Returns the port of a root; 0 for a unix socket. */
static int dtrain__root_port(const dtrain__hub *hub)
{
    return strncmp(hub->root, "unix:", 5) == 0 ? 0 : atoi(strrchr(hub->root, ':') + 1);
}

/* Replaces port 0 of the root by the actual port. */
static void dtrain__root_set_port(dtrain__hub *hub, int port)
{
    size_t host = (size_t)(strrchr(hub->root, ':') - hub->root);
    snprintf(hub->root + host, sizeof hub->root - host, ":%d", port);
}

/* Without a token: ranks with a root on loopback use a unix socket instead. It ends in the root's port: see
 * dtrain__net_private. */
static dtrain_status dtrain__root_privately(dtrain__hub *hub)
{
    char address[110], last[16], text[DTRAIN__ADDRESS_BYTES + 64];
    dtrain_status status = DTRAIN_OK;
    int port = dtrain__root_port(hub), drawn = port, taken = 1;
    if (!dtrain__net_has(AF_UNIX)) {
        snprintf(text, sizeof text, "%.200s is TCP, as this system has no unix sockets,", hub->root);
        return dtrain__root_closed(hub, text);
    }
    for (int tries = 0; status == DTRAIN_OK && taken && tries < 100; tries++) {
        uint16_t dice = 0;
        if (port == 0 && dtrain__os_random(&dice, sizeof dice) == 0) /* any port that is not in use */
            drawn = 49152 + dice % 16384;
        snprintf(last, sizeof last, "%d", drawn);
        status = dtrain__net_private(address, sizeof address, last);
        if (status == DTRAIN_OK)
            status = dtrain__net_unix_address(&hub->root_addresses[0], address + 5);
        taken = status == DTRAIN_OK && port == 0 && dtrain__net_is_held(&hub->root_addresses[0]);
    }
    if (port == 0)
        dtrain__root_set_port(hub, drawn);
    hub->root_count = 1 + dtrain__net_private_path(&hub->root_addresses[0], &hub->root_addresses[1]);
    return status;
}

/* Chooses how this rank may reach the root at the addresses that were found. */
static dtrain_status dtrain__root_choose(dtrain__hub *hub)
{
    char text[DTRAIN__ADDRESS_BYTES + 64];
    int tcp = hub->transport == DTRAIN__TRANSPORT_TCP, local = dtrain__net_is_unix(&hub->root_addresses[0]);
    if (tcp && local)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: rank %d: the transport is tcp and the root is %.200s; give a host and port",
                            hub->rank, hub->root);
    if (local)
        hub->root_count += dtrain__net_private_path(&hub->root_addresses[0], &hub->root_addresses[1]);
    if (dtrain__hub_allows(hub, &hub->root_addresses[0]) && (local || hub->transport != DTRAIN__TRANSPORT_UNIX))
        return DTRAIN_OK;
    for (int i = 0; i < hub->root_count && !tcp; i++)
        if (dtrain__net_is_local(&hub->root_addresses[i]))
            return dtrain__root_privately(hub);
    snprintf(text, sizeof text, tcp ? "the transport is tcp" : "%.200s is beyond this host", hub->root);
    return dtrain__root_closed(hub, text);
}

/* Finds the root's addresses. A name stays to be looked up on ranks other than 0. Rank 0 waits for it: it cannot listen
 * before. */
static dtrain_status dtrain__root_find(dtrain__hub *hub)
{
    dtrain__error cause;
    dtrain_status status = dtrain__net_look_up(hub->root, AI_NUMERICHOST, hub->root_addresses, &hub->root_count);
    hub->root_named = status == DTRAIN_ERR_IO && hub->rank != 0;
    if (hub->root_named)
        return DTRAIN_OK;
    status = dtrain__net_look_up(hub->root, 0, hub->root_addresses, &hub->root_count);
    if (status == DTRAIN_OK)
        return dtrain__root_choose(hub);
    cause = dtrain__thread_error;
    return dtrain__fail(NULL, status, "comm_create: rank %d: the root %.400s", hub->rank, cause.text);
}

/* Takes the answer of the look-up. If it has none, the addresses before it stay. */
static void dtrain__root_take(dtrain__hub *hub)
{
    const dtrain__look_up *look_up = hub->look_up;
    dtrain__error cause = look_up->error;
    if (look_up->count > 0) {
        memcpy(hub->root_addresses, look_up->found, sizeof hub->root_addresses);
        hub->root_count = look_up->count;
        hub->root_turn = 0;
        if (dtrain__root_choose(hub) != DTRAIN_OK) {
            cause = dtrain__thread_error;
            dtrain__seat_break(dtrain__council_seat(&hub->council, 0), &cause);
            dtrain__hub_tell(hub);
        }
        hub->root_named = !dtrain__net_is_unix(&hub->root_addresses[0]);
    } else if (hub->root_count == 0) {
        if (strcmp(hub->root_error.text, cause.text) != 0)
            dtrain__hub_note(hub, "rank %d tries again until its deadline: %.600s", hub->rank, cause.text);
        hub->root_error = cause;
    }
    dtrain__look_up_release(hub->look_up);
    hub->look_up = NULL;
}

/* Looks up the name, at most once a second: at first, and when no address of it has led to rank 0. */
static void dtrain__root_step(dtrain__hub *hub, int64_t now)
{
    if (hub->look_up != NULL && __atomic_load_n(&hub->look_up->done, __ATOMIC_SEQ_CST))
        dtrain__root_take(hub);
    if (!hub->root_named || hub->formed || hub->look_up != NULL || now < hub->look_ns ||
        hub->root_turn < hub->root_count)
        return;
    hub->look_ns = now + 1000000000;
    hub->look_up = dtrain__look_up_start(hub->root);
    if (hub->root_count == 0 && (hub->look_up == NULL || hub->root_error.text[0] == 0))
        dtrain__fail(&hub->root_error, DTRAIN_ERR_PEER_LOST, "the name cannot be looked up: %s",
                     hub->look_up == NULL ? "the system has no memory or thread for it"
                                          : "the system's resolver has not answered; is its name server reachable");
}

/* Returns when the look-up is due; an answer calls nobody. */
static int64_t dtrain__root_due(const dtrain__hub *hub, int64_t now)
{
    if (hub->look_up != NULL)
        return now + 10000000;
    return hub->root_named && !hub->formed && hub->root_turn >= hub->root_count ? hub->look_ns : INT64_MAX;
}

#endif
