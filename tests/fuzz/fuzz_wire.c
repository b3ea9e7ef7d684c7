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

/* A handshake of either side, fed message by message; every so often the MAC is made right, so that more is reached. */
static void fuzz_handshake(const uint8_t *data, size_t bytes, int initiator)
{
    dtrain__keys keys;
    dtrain__handshake handshake;
    memset(&keys, 0, sizeof keys);
    memset(&handshake, 0, sizeof handshake);
    keys.world_size = 4;
    handshake.fd = -1;
    handshake.purpose = DTRAIN__PURPOSE_DATA;
    handshake.state = DTRAIN__HANDSHAKE_HELLO;
    if (initiator)
        dtrain__handshake_begin(&handshake, &keys);
    for (size_t wants; (wants = dtrain__handshake_wants(&handshake)) > 0 && bytes >= wants;
         data += wants, bytes -= wants) {
        memcpy(handshake.in, data, wants);
        if (handshake.state == DTRAIN__HANDSHAKE_PROOF && data[0] % 2)
            dtrain__handshake_mac(&keys, &handshake, "dtrain initiator", 0, handshake.in + 32, DTRAIN__PROOF_BYTES - 32,
                                  handshake.in);
        if (handshake.state == DTRAIN__HANDSHAKE_VERDICT && data[16] % 2)
            dtrain__handshake_mac(&keys, &handshake, "dtrain acceptor", sizeof handshake.proof, handshake.in,
                                  16 + DTRAIN__VERDICT_TEXT, handshake.in + 16 + DTRAIN__VERDICT_TEXT);
        dtrain__handshake_take(&handshake, &keys);
        if (handshake.state == DTRAIN__HANDSHAKE_PROVED)
            dtrain__handshake_answer(&handshake, &keys, DTRAIN_OK, "");
        if (handshake.out_bytes > sizeof handshake.out)
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
    for (int i = 0; i < 3; i++)
        dtrain__hub_expect(&hub, &members[i]);
    if (!dtrain__hub_convene(&hub) || dtrain__channel_create(&world, &hub, 0, NULL, 3, rank) != DTRAIN_OK)
        abort();
    if (bytes > 0 && data[0] % 2)
        dtrain__hub_formed(&hub);
    dtrain__member *from = &members[rank == 0 ? 1 : 0];
    if (bytes > 1 && dtrain__bytes_room(&heap, &from->in, bytes - 1)) {
        memcpy(from->in.data, data + 1, bytes - 1);
        from->in.bytes = bytes - 1;
        dtrain__hub_frames(&hub, rank == 0 ? 1 : 0);
    }
    for (int i = 0; i < 3; i++)
        dtrain__hub_forget(&hub, &members[i]);
    dtrain__council_free(&hub.council);
    dtrain__channel_free(world);
    if (heap.bytes != 0)
        abort();
}

/* What a peer sends: bytes of the input, in frames and with headers that fit the last ones that this rank sent, or do
 * not. */
typedef struct tape {
    const uint8_t *data;
    size_t bytes;
    uint64_t lane; /* that this rank sent in */
    dtrain__message_header sent;
} tape;

static dtrain_status tape_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    tape *t = (tape *)self;
    const unsigned char *frame = (const unsigned char *)data;
    (void)peer;
    (void)deadline_ns;
    if (bytes >= DTRAIN__MUX_HEADER + sizeof t->sent && dtrain__get_le(frame + 8, 4) == DTRAIN__MUX_DATA &&
        dtrain__get_le(frame + 16, 8) == dtrain__xxh64_of(frame, 16, 0)) {
        t->lane = dtrain__get_le(frame, 8);
        memcpy(&t->sent, frame + DTRAIN__MUX_HEADER, sizeof t->sent);
    }
    *moved = bytes;
    return DTRAIN_OK;
}

/* A frame's header: of data that this rank waits for, or of whatever the input says; most are whole. */
static void tape_frame(tape *t, unsigned char *out)
{
    uint64_t fits = t->data[0], kind = t->data[1] % 16, bytes = dtrain__get_le(t->data + 2, 2);
    if (fits < 220 && t->sent.magic == DTRAIN__MESSAGE_MAGIC)
        dtrain__mux_frame(out, t->lane, DTRAIN__MUX_DATA, NULL, sizeof t->sent + (size_t)t->sent.bytes);
    else
        dtrain__mux_frame(
            out, fits % 4 == 0 ? t->lane : t->data[4], (int)kind,
            kind != DTRAIN__MUX_DATA ? t->data + DTRAIN__MUX_HEADER : NULL,
            kind != DTRAIN__MUX_DATA && bytes > t->bytes - DTRAIN__MUX_HEADER ? t->bytes - DTRAIN__MUX_HEADER : bytes);
    out[fits % DTRAIN__MUX_HEADER] ^= fits > 250 ? 1 : 0;
}

static dtrain_status tape_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    tape *t = (tape *)self;
    dtrain__message_header header;
    (void)peer;
    (void)deadline_ns;
    *moved = bytes < t->bytes ? bytes : t->bytes;
    memcpy(data, t->data, *moved);
    if (bytes == DTRAIN__MUX_HEADER && *moved == bytes) {
        tape_frame(t, (unsigned char *)data);
    } else if (*moved >= sizeof header) {
        uint64_t fits = ((const unsigned char *)data)[0];
        memcpy(&header, data, sizeof header);
        if (fits < 200 && t->sent.magic == DTRAIN__MESSAGE_MAGIC) {
            header = t->sent;
            header.bytes = fits < 180 ? bytes - sizeof header : header.bytes;
            header.data_check = 0;
        }
        header.magic = header.tag % 8 == 7 ? header.magic : DTRAIN__MESSAGE_MAGIC;
        header.check = header.tag % 8 == 6 ? header.check : dtrain__message_header_sum(&header);
        memcpy(data, &header, sizeof header);
    }
    t->data += *moved;
    t->bytes -= *moved;
    return *moved == bytes ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST;
}

/* One call of a rank; `call` counts them. */
static dtrain_status a_call(dtrain_comm *comm, int kind, int call)
{
    static const dtrain_mesh_dim dims[] = {{"data", 2}, {"model", 1}};
    float x[64] = {0}, y[64];
    void *buffers[] = {x};
    size_t sizes[] = {sizeof x};
    uint64_t step = 7;
    dtrain_comm *group = NULL;
    dtrain_mesh *mesh = NULL;
    dtrain_status status;
    switch (kind) {
    case 1: status = dtrain_comm_split(comm, 0, call, &group); break;
    case 2: return dtrain_resync(comm, 3, buffers, sizes, 1, &step);
    case 3: return dtrain_all_to_all(comm, x, y, 64, DTRAIN_F32);
    case 4: status = dtrain_mesh_create(&mesh, comm, dims, 2); break;
    case 5: return dtrain_all_reduce(comm, x, y, 64, DTRAIN_BF16, DTRAIN_MEAN);
    case 6: return dtrain_exchange(comm, x, 64, 1 - comm->rank, y, 32, 1 - comm->rank, DTRAIN_F32);
    case 7:
        return call % 3 == 0   ? dtrain_comm_agree(comm, &step)
               : call % 3 == 1 ? dtrain_store_wait(comm, "key", x, sizeof x, sizes)
                               : dtrain_store_set(comm, "key", x, sizeof x);
    default:
        return call % 2 == 0 ? dtrain_all_reduce(comm, x, x, 64, DTRAIN_F32, DTRAIN_SUM)
                             : dtrain_broadcast(comm, x, 64, DTRAIN_F32, 0);
    }
    dtrain_mesh_destroy(mesh);
    dtrain_comm_destroy(group);
    return status;
}

/* Messages of collectives; their headers are made to look undamaged, but for some, so that what is in them counts. */
static void fuzz_messages(const uint8_t *data, size_t bytes)
{
    tape t = {data + 1, bytes > 0 ? bytes - 1 : 0, 0, {0}};
    dtrain_transport transport;
    dtrain_comm_desc desc;
    dtrain_comm *comm;
    memset(&transport, 0, sizeof transport);
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL; /* no thread but this one reads the tape */
    desc.timeout_ms = 20;                 /* of a wait for a key, when the peer has left */
    transport.self = &t;
    transport.rank = bytes > 0 ? data[0] % 2 : 0;
    transport.size = 2;
    transport.send = tape_send;
    transport.recv = tape_recv;
    if (dtrain_comm_from_transport(&comm, &transport, &desc) != DTRAIN_OK)
        abort();
    for (int call = 0; call < 4; call++)
        if (a_call(comm, bytes > 0 ? data[0] / 2 % 8 : 0, call) != DTRAIN_OK)
            break;
    dtrain_comm_destroy(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dtrain_set_log(quiet, NULL);
    if (bytes == 0)
        return 0;
    switch (data[0] % 5) {
    case 0: fuzz_handshake(data + 1, bytes - 1, 0); break;
    case 1: fuzz_handshake(data + 1, bytes - 1, 1); break;
    case 2: fuzz_frames(data + 1, bytes - 1, 0); break;
    case 3: fuzz_frames(data + 1, bytes - 1, 1); break;
    default: fuzz_messages(data + 1, bytes - 1); break;
    }
    return 0;
}
