/* ---- >>no-sockets ----
 * Stand-ins for worlds of processes in a program that defines DTRAIN_NO_SOCKETS. A world of one forms as usual. A
 * larger world is refused, whether its root is given or would have to be found. */
#ifndef DTRAIN__NO_SOCKETS
#define DTRAIN__NO_SOCKETS
#include "plane.c"

static dtrain_status dtrain__no_sockets(void)
{
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "comm_create: this program was built with DTRAIN_NO_SOCKETS and has no worlds of several "
                        "processes: remove that macro");
}

static dtrain_status dtrain__socket_plane_create(dtrain__end *end, const dtrain__keys *keys,
                                                 const dtrain__hub_desc *desc, dtrain_allocator *allocator)
{
    (void)keys, (void)desc, (void)allocator;
    memset(end, 0, sizeof *end); /* gcc does not see that no caller uses it after an error */
    return dtrain__no_sockets();
}

static int dtrain__net_has(int family)
{
    (void)family;
    return 1;
}

static dtrain_status dtrain__net_private(char *out, size_t capacity, const char *last)
{
    (void)out, (void)capacity, (void)last;
    return dtrain__no_sockets();
}

/* Accepts any root, so that the error names the macro. */
static int dtrain__net_split(const char *text, char host[DTRAIN__ADDRESS_BYTES], char port[8])
{
    (void)text;
    memcpy(host, "any", 4), memcpy(port, "1", 2);
    return 1;
}

#endif
