/* ---- >>no-net ----
 * Stand-ins for addresses in a program that defines DTRAIN_NO_SOCKETS. */
#ifndef DTRAIN__NO_NET
#define DTRAIN__NO_NET
#include "../base/status.c"
#include "keys.c"

static dtrain_status dtrain__no_sockets(void)
{
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "comm_create: this program was built with DTRAIN_NO_SOCKETS and has no worlds of several "
                        "processes: remove that macro");
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
