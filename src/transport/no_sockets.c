/* ---- >>no-sockets ----
 * Stand-ins for worlds of processes in a program that defines DTRAIN_NO_SOCKETS. A world of one forms as usual. A
 * larger world is refused, whether its root is given or would have to be found. */
#ifndef DTRAIN__NO_SOCKETS
#define DTRAIN__NO_SOCKETS
#include "../control/plane.c"
#include "../wire/no_net.c"

static dtrain_status dtrain__socket_plane_create(dtrain__end *end, const dtrain__keys *keys,
                                                 const dtrain__hub_desc *desc, dtrain_allocator *allocator)
{
    (void)keys, (void)desc, (void)allocator;
    memset(end, 0, sizeof *end); /* gcc does not see that no caller uses it after an error */
    return dtrain__no_sockets();
}

#endif
