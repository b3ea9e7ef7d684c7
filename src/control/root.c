/* ---- >>root ----
 * Where rank 0 is: its address, which may have to be looked up, and how ranks without a token meet instead. A name is
 * looked up on a thread of its own, until rank 0 listens and the others reach it. The name may not be known yet, or its
 * address may have changed. */
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

#define DTRAIN__ROOT_SOON_NS 50000000 /* what a call that must not block may take */

/* Starts a look-up. Until it ends, the error of rank 0's absence is that there is no answer. */
static void dtrain__root_ask(dtrain__hub *hub, int64_t now)
{
    hub->look_ns = now + 1000000000;
    hub->look_up = dtrain__look_up_start(hub->root);
    if (hub->root_count == 0 && (hub->look_up == NULL || hub->root_error.text[0] == 0))
        dtrain__fail(&hub->root_error, DTRAIN_ERR_PEER_LOST, "the name cannot be looked up: %s",
                     hub->look_up == NULL ? "the system has no memory or thread for it"
                                          : "the system's resolver has not answered; is its name server reachable");
}

/* Takes the addresses that a look-up has found, and chooses among them. */
static dtrain_status dtrain__root_found(dtrain__hub *hub)
{
    memcpy(hub->root_addresses, hub->look_up->found, sizeof hub->root_addresses);
    hub->root_count = hub->look_up->count;
    hub->root_turn = 0;
    return dtrain__root_choose(hub);
}

/* Finds the root's addresses. A name that is not known soon stays to be looked up. Rank 0 waits that long for it: most
 * names of its own host are known at once. What is wrong with those is then an error of this call. */
static dtrain_status dtrain__root_find(dtrain__hub *hub)
{
    dtrain__error cause;
    dtrain_status status = dtrain__net_look_up(hub->root, 1, hub->root_addresses, &hub->root_count);
    hub->root_named = status == DTRAIN_ERR_IO;
    if (status == DTRAIN_OK)
        return dtrain__root_choose(hub);
    if (!hub->root_named) {
        cause = dtrain__thread_error;
        return dtrain__fail(NULL, status, "comm_create: rank %d: the root %.400s", hub->rank, cause.text);
    }
    int64_t now = dtrain__os_now_ns(), until = now + DTRAIN__ROOT_SOON_NS;
    if (hub->rank == 0)
        dtrain__root_ask(hub, now);
    while (hub->look_up != NULL && !DTRAIN__ATOMIC_LOAD(&hub->look_up->done, SEQ_CST) && dtrain__os_now_ns() < until)
        dtrain__os_sleep(200000);
    if (hub->look_up == NULL || !DTRAIN__ATOMIC_LOAD(&hub->look_up->done, SEQ_CST) || hub->look_up->count == 0)
        return DTRAIN_OK;
    status = dtrain__root_found(hub);
    dtrain__look_up_release(hub->look_up);
    hub->look_up = NULL;
    hub->root_named = 0;
    return status;
}

/* ---- the listeners of rank 0 ---- */

/* Whether rank 0 listens on loopback although ranks of other hosts are expected: a host's own name often means
 * loopback, and launchers give rank 0 "localhost" for it. A token says that others are expected. Loopback in numbers is
 * meant as such. */
static int dtrain__hub_more_than_loopback(const dtrain__hub *hub, const dtrain__address *address)
{
    int open = hub->keys.token_bytes > 0 || (hub->insecure && strncmp(hub->root, "localhost:", 10) != 0);
    return open && dtrain__net_is_local(address) && !dtrain__net_is_unix(address) &&
           strncmp(hub->root, "127.", 4) != 0 && strncmp(hub->root, "[::1]", 5) != 0;
}

static int dtrain__hub_never_listens(const dtrain__hub *hub)
{
    return strcmp(hub->listen_on, "none") == 0;
}

/* Uses a copy of the listening socket that the launcher left open, so that the next group can use it too. Returns 0 if
 * the descriptor is not such a socket, or no longer. */
static int dtrain__root_inherit(dtrain__hub *hub, int inherited)
{
    int named = hub->transport == DTRAIN__TRANSPORT_UNIX; /* others look for a unix socket alone */
    int fd = dtrain__os_inherit(inherited);
    if (fd < 0)
        return 0;
    if (dtrain__net_end(fd, 0, &hub->listening) != 0 || (named && !dtrain__net_is_unix(&hub->listening)) ||
        dtrain__net_port(&hub->listening) != dtrain__root_port(hub) || dtrain__os_manners(fd) != 0) {
        dtrain__os_hang_up(fd);
        return 0;
    }
    dtrain__os_manners(inherited); /* programs that this one starts do not get it */
    dtrain__os_plain(fd);
    hub->listeners[hub->listener_count++] = fd;
    return 1;
}

/* Lists where rank 0 listens: at each address of its name, as nobody knows which of them a rank can reach. If it was
 * given an interface, it listens there. any: on all interfaces.
 *
 *   out   DTRAIN__MAX_ADDRESSES */
static dtrain_status dtrain__root_doors(const dtrain__hub *hub, int any, dtrain__address *out, int *count)
{
    int given = hub->listen_on[0] != 0 && !dtrain__net_is_unix(&hub->root_addresses[0]), loopback = !given;
    int all = dtrain__net_is_unix(&hub->root_addresses[0]) ? 1 : hub->root_count; /* the second is in its stead */
    *count = 0;
    for (int i = 0; i < all; i++)
        loopback = loopback && dtrain__hub_more_than_loopback(hub, &hub->root_addresses[i]);
    for (int i = 0; i < all; i++) {
        dtrain__address next = hub->root_addresses[i];
        dtrain_status status = DTRAIN_OK;
        int known = 0, port = dtrain__net_port(&next);
        if (any || loopback)
            dtrain__net_set_any(&next);
        else if (given)
            status = dtrain__net_interface(hub->listen_on, next.at.any.sa_family, &next);
        if (status != DTRAIN_OK)
            return status;
        dtrain__net_set_port(&next, port);
        for (int k = 0; k < *count; k++)
            known |= memcmp(&next.at, &out[k].at, sizeof next.at) == 0;
        if (!known)
            out[(*count)++] = next;
    }
    return DTRAIN_OK;
}

/* Listens at all of these, at one port. An address that this host does not have is left out, unless it has none of
 * them. *failed: the address that it cannot have. Returns 0 or an errno. */
static int dtrain__root_listen_at(dtrain__hub *hub, const dtrain__address *doors, int count, dtrain__address *failed)
{
    int missing = 0;
    *failed = doors[0];
    for (int i = 0; i < count; i++) {
        dtrain__address at = doors[i];
        if (hub->listener_count > 0)
            dtrain__net_set_port(&at, dtrain__net_port(&hub->listening));
        int error = dtrain__hub_listen(hub, &at, count > 1);
        if (error == 0)
            continue;
        *failed = doors[i];
        missing = error;
        if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT && error != EINVAL) {
            dtrain__hub_stop_listening(hub);
            return error;
        }
    }
    return hub->listener_count > 0 ? 0 : missing;
}

/* Says at once that rank 0's host has no address of the root, as the other ranks may wait in vain. It is no error: what
 * has the address may pass connections on. */
static void dtrain__root_tell_elsewhere(dtrain__hub *hub)
{
    char own[400];
    int here = 0, port = dtrain__net_port(&hub->listening);
    for (int i = 0; i < hub->root_count; i++)
        here |= dtrain__net_is_unix(&hub->root_addresses[i]) || dtrain__net_is_here(&hub->root_addresses[i]);
    hub->elsewhere = !here;
    if (here)
        return;
    dtrain__net_own_addresses(port, own, sizeof own);
    dtrain__log(
        DTRAIN_LOG_WARN,
        "comm_create: rank 0 is on a host that does not have the address of the root %.120s (%s), and has %s. Give "
        "every rank a root that rank 0's host has, or start rank 0 on the root's host. Rank 0 listens at %s: "
        "other ranks reach it only if the root's host passes connections on (NAT, port forwarding)",
        hub->root, dtrain__net_text(&hub->root_addresses[0]).text, own, dtrain__net_text(&hub->listening).text);
}

/* Opens the listeners to which all other ranks connect. inherited: a descriptor that the launcher left, or -1. */
static dtrain_status dtrain__root_listen(dtrain__hub *hub, int inherited)
{
    const dtrain__address chosen = hub->root_addresses[0];
    dtrain__address doors[DTRAIN__MAX_ADDRESSES], failed;
    char text[DTRAIN__ADDRESS_BYTES + 64];
    int error = EADDRINUSE, count, port = dtrain__net_port(&chosen), lock = -1;
    if (dtrain__hub_never_listens(hub))
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "comm_create: rank 0 has listen_on or DTRAIN_INTERFACE \"none\", and all other ranks "
            "connect to it: make a rank that can listen rank 0, or give rank 0 an interface or address");
    if (inherited >= 0 && dtrain__root_inherit(hub, inherited)) {
        snprintf(text, sizeof text, "DTRAIN_LISTEN_FD listens at %s", dtrain__net_text(&hub->listening).text);
        return dtrain__hub_allows(hub, &hub->listening) ? DTRAIN_OK : dtrain__root_closed(hub, text);
    }
    dtrain_status status = dtrain__root_doors(hub, 0, doors, &count);
    if (status != DTRAIN_OK)
        return status;
    if (dtrain__net_is_unix(&chosen) && !dtrain__net_is_abstract(&chosen))
        lock = dtrain__os_lock_beside(chosen.at.local.sun_path);
    /* a port that the system chose for the first address may be in use at the next */
    for (int tries = port == 0 ? 16 : 1; error == EADDRINUSE && tries > 0; tries--)
        error = dtrain__root_listen_at(hub, doors, count, &failed);
    if (lock >= 0)
        dtrain__os_close(lock);
    if (error != 0 && hub->root_count > 1 && dtrain__net_is_abstract(&chosen) && !dtrain__net_is_held(&chosen)) {
        hub->root_addresses[0] = hub->root_addresses[1]; /* another user holds the name */
        hub->root_count = 1;
        status = dtrain__net_make_directory();
        return status == DTRAIN_OK ? dtrain__root_listen(hub, -1) : status;
    }
    if (error == EADDRNOTAVAIL && dtrain__root_doors(hub, 1, doors, &count) == DTRAIN_OK)
        error = dtrain__root_listen_at(hub, doors, count, &failed); /* the name means this host, by another address */
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank 0 cannot listen on %.200s (%.120s): %s%s%.*s%s",
                            hub->root, dtrain__net_text(&failed).text, dtrain__os_error_text(error),
                            error == EADDRINUSE
                                ? "; another group, an earlier one, or a process that a rank of it started, uses it: "
                                  "choose another address, or end that; or another process is rank 0 too: is "
                                : "",
                            error == EADDRINUSE ? (int)strcspn(hub->believed, " ") : 0, hub->believed,
                            error == EADDRINUSE ? " given twice?" : "");
    if (port == 0 && !dtrain__net_is_unix(&hub->listening))
        dtrain__root_set_port(hub, dtrain__net_port(&hub->listening));
    dtrain__root_tell_elsewhere(hub);
    return DTRAIN_OK;
}

/* ---- looking up a name ---- */

/* Takes the answer of the look-up. If it has none, the addresses before it stay. */
static void dtrain__root_take(dtrain__hub *hub)
{
    const dtrain__look_up *look_up = hub->look_up;
    dtrain__error cause = look_up->error;
    if (look_up->count > 0) {
        dtrain_status status = dtrain__root_found(hub);
        if (status == DTRAIN_OK && hub->rank == 0)
            status = dtrain__root_listen(hub, hub->listen_fd);
        hub->notes.address = status == DTRAIN_OK && hub->rank == 0;
        if (status != DTRAIN_OK) {
            cause = dtrain__thread_error;
            dtrain__seat_break(dtrain__council_seat(&hub->council, 0), &cause);
            dtrain__hub_tell(hub);
        }
        hub->root_named = hub->rank != 0 && !dtrain__net_is_unix(&hub->root_addresses[0]);
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
    if (hub->look_up != NULL && DTRAIN__ATOMIC_LOAD(&hub->look_up->done, SEQ_CST))
        dtrain__root_take(hub);
    if (!hub->root_named || hub->formed || hub->look_up != NULL || now < hub->look_ns ||
        hub->root_turn < hub->root_count)
        return;
    dtrain__root_ask(hub, now);
}

/* Returns when the look-up is due; an answer calls nobody. */
static int64_t dtrain__root_due(const dtrain__hub *hub, int64_t now)
{
    if (hub->look_up != NULL)
        return now + 10000000;
    return hub->root_named && !hub->formed && hub->root_turn >= hub->root_count ? hub->look_ns : INT64_MAX;
}

#endif
