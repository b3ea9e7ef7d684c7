/* ---- >>no-sockets ----
 * Stand-ins for worlds of processes in a program that defines DTRAIN_NO_SOCKETS. A world of one forms as usual. A
 * larger world is refused, whether its root is given or would have to be found. */
#ifndef DTRAIN__NO_SOCKETS
#define DTRAIN__NO_SOCKETS
#include "council.c"

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

/* Without pipes between processes they share no memory. */
typedef struct dtrain__arena {
    int none;
} dtrain__arena;

static void dtrain__arena_free(const dtrain__arena *arena)
{
    (void)arena;
}

static int dtrain__arena_offer(dtrain__arena **out, const dtrain__seat *seat, int doorbell, unsigned char *offer)
{
    (void)out, (void)seat, (void)doorbell, (void)offer;
    return 0;
}

static void dtrain__arena_open(dtrain__arena *arena, const dtrain__seat *seat, unsigned char *records)
{
    (void)arena, (void)seat, (void)records;
}

static struct dtrain__shared *dtrain__arena_keep(dtrain__arena **out, const dtrain__seat *seat, int crowded,
                                                 const unsigned char *verdicts)
{
    (void)out, (void)seat, (void)crowded, (void)verdicts;
    return NULL;
}

static int dtrain__net_pipe(int ends[2])
{
    (void)ends;
    return ENOSYS;
}

static void dtrain__net_rest(int fd, int64_t until_ns)
{
    (void)fd, (void)until_ns;
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
