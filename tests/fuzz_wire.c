/* Fuzz target: what comes over a connection, before the proof and after it. The first byte chooses the parser.
 *
 * make fuzz MINUTES=n */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static void quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

/* A door of either side, fed message by message; every so often the MAC is made right, so that more is reached. */
static void fuzz_door(const uint8_t *data, size_t bytes, int initiator)
{
    dtrain__keys keys;
    dtrain__door door;
    memset(&keys, 0, sizeof keys);
    memset(&door, 0, sizeof door);
    keys.world_size = 4;
    door.fd = -1;
    door.purpose = DTRAIN__PURPOSE_DATA;
    door.state = DTRAIN__DOOR_HELLO;
    if (initiator)
        dtrain__door_knock(&door, &keys);
    for (size_t wants; (wants = dtrain__door_wants(&door)) > 0 && bytes >= wants; data += wants, bytes -= wants) {
        memcpy(door.in, data, wants);
        if (door.state == DTRAIN__DOOR_PROOF && data[0] % 2)
            dtrain__door_mac(&keys, &door, "dtrain initiator", 0, door.in + 32, 8, door.in);
        if (door.state == DTRAIN__DOOR_VERDICT && data[16] % 2)
            dtrain__door_mac(&keys, &door, "dtrain acceptor", sizeof door.proof, door.in, 16 + DTRAIN__VERDICT_TEXT,
                             door.in + 16 + DTRAIN__VERDICT_TEXT);
        dtrain__door_take(&door, &keys);
        if (door.state == DTRAIN__DOOR_PROVED)
            dtrain__door_answer(&door, &keys, DTRAIN_OK, "");
        if (door.out_bytes > sizeof door.out)
            abort();
    }
}

/* Control frames from a rank that has proved itself. */
static void fuzz_frames(const uint8_t *data, size_t bytes, int rank)
{
    static dtrain_allocator heap;
    dtrain__hub hub;
    dtrain__member members[3];
    dtrain__channel *world = NULL;
    memset(&hub, 0, sizeof hub);
    memset(members, 0, sizeof members);
    hub.allocator = &heap;
    hub.rank = rank;
    hub.size = 3;
    hub.connections = 1;
    hub.members = members;
    hub.formed = bytes > 0 && data[0] % 2;
    for (int i = 0; i < 3; i++) {
        members[i].control.fd = -1;
        members[i].joined = hub.formed;
    }
    if (dtrain__channel_create(&world, &hub, 0, NULL, 3, rank) != DTRAIN_OK)
        abort();
    hub.world = world;
    dtrain__member *from = &members[rank == 0 ? 1 : 0];
    if (bytes > 1 && dtrain__bytes_room(&heap, &from->in, bytes - 1)) {
        memcpy(from->in.data, data + 1, bytes - 1);
        from->in.bytes = bytes - 1;
        dtrain__hub_frames(&hub, rank == 0 ? 1 : 0);
    }
    for (int i = 0; i < 3; i++) {
        dtrain__store_forget(&hub, i, DTRAIN__EVERY_CHANNEL);
        dtrain__bytes_free(&heap, &members[i].in);
        dtrain__bytes_free(&heap, &members[i].out);
    }
    dtrain__store_free(&hub.store, &heap);
    while (hub.consents != NULL)
        dtrain__consent_drop(&hub, &hub.consents);
    dtrain__channel_free(world);
    if (heap.bytes != 0)
        abort();
}

typedef struct tape {
    const uint8_t *data;
    size_t bytes;
} tape;

static dtrain_status tape_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    (void)self;
    (void)peer;
    (void)data;
    (void)deadline_ns;
    *moved = bytes;
    return DTRAIN_OK;
}

static dtrain_status tape_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    tape *t = (tape *)self;
    dtrain__message_header header;
    (void)peer;
    (void)deadline_ns;
    *moved = bytes < t->bytes ? bytes : t->bytes;
    memcpy(data, t->data, *moved);
    if (*moved >= sizeof header) {
        memcpy(&header, data, sizeof header);
        header.magic = header.tag % 8 == 7 ? header.magic : DTRAIN__MESSAGE_MAGIC;
        header.check = header.tag % 8 == 6 ? header.check : dtrain__message_header_sum(&header);
        memcpy(data, &header, sizeof header);
    }
    t->data += *moved;
    t->bytes -= *moved;
    return *moved == bytes ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST;
}

/* Messages of collectives; their headers are made to look undamaged, but for some, so that what is in them counts. */
static void fuzz_messages(const uint8_t *data, size_t bytes)
{
    float x[64] = {0};
    tape t = {data + 1, bytes > 0 ? bytes - 1 : 0};
    dtrain_transport transport;
    dtrain_comm *comm;
    memset(&transport, 0, sizeof transport);
    transport.self = &t;
    transport.rank = bytes > 0 ? data[0] % 2 : 0;
    transport.size = 2;
    transport.send = tape_send;
    transport.recv = tape_recv;
    if (dtrain_comm_from_transport(&comm, &transport, NULL) != DTRAIN_OK)
        abort();
    for (int call = 0; call < 4; call++) {
        dtrain_status status = call % 2 == 0 ? dtrain_all_reduce(comm, x, x, 64, DTRAIN_F32, DTRAIN_SUM)
                                             : dtrain_broadcast(comm, x, 64, DTRAIN_F32, 0);
        if (status != DTRAIN_OK)
            break;
    }
    dtrain_comm_destroy(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dtrain_set_log(quiet, NULL);
    if (bytes == 0)
        return 0;
    switch (data[0] % 5) {
    case 0: fuzz_door(data + 1, bytes - 1, 0); break;
    case 1: fuzz_door(data + 1, bytes - 1, 1); break;
    case 2: fuzz_frames(data + 1, bytes - 1, 0); break;
    case 3: fuzz_frames(data + 1, bytes - 1, 1); break;
    default: fuzz_messages(data + 1, bytes - 1); break;
    }
    return 0;
}
