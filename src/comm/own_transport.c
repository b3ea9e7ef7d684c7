/* ---- >>groups_over_own_transport ----
 * A world over a transport of the user's own: its multiplexer is what the group sees. */
#ifndef DTRAIN__OWN_TRANSPORT
#define DTRAIN__OWN_TRANSPORT
#include "own_transport.h"
#include "../transport/mux_plane.c"
#include "create.c"

DTRAIN_API dtrain_status dtrain_comm_from_transport(dtrain_comm **comm, const dtrain_transport *transport,
                                                    const dtrain_comm_desc *desc)
{
    dtrain_transport held;
    dtrain__end end;
    if (comm == NULL || transport == NULL || transport->send == NULL || transport->recv == NULL)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "comm_from_transport: %s is NULL; give an address for the group and a table with send and recv",
            comm == NULL              ? "comm"
            : transport == NULL       ? "transport"
            : transport->send == NULL ? "send"
                                      : "recv");
    *comm = NULL;
    if (transport->size < 1 || transport->size > DTRAIN__MAX_RANKS || transport->rank < 0 ||
        transport->rank >= transport->size)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_transport: rank %d of %d ranks; expected 1 to %d ranks, counted from 0",
                            transport->rank, transport->size, DTRAIN__MAX_RANKS);
    dtrain_status status = dtrain__create_check_desc(&desc);
    if (status != DTRAIN_OK)
        return status;
    if (desc->algorithm == DTRAIN_ALGORITHM_FUSED)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_transport: only dtrain_threads_create makes ranks that share an address space; "
                            "choose another algorithm than FUSED");
    held = *transport;
    held.destroy = NULL;
    held.leave = NULL;
    status = dtrain__mux_plane_create(&end, &held, desc->allocator);
    if (status == DTRAIN_OK)
        status = dtrain__create_end(comm, &end, desc);
    if (status == DTRAIN_OK) { /* on an error the table stays the user's */
        dtrain_transport *table = &((dtrain__mux_lane *)end.transport.self)->mux->table;
        table->destroy = transport->destroy;
        table->leave = transport->leave;
    }
    return status;
}

#endif
