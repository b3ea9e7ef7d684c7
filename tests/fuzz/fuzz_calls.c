/* Fuzz target: what a member that was admitted tells in calls, with real state behind it. The first byte chooses:
 *
 *   0 local    both ranks have half of each tensor on a disk of their own and load all of it; rank 1 lies
 *   1 reduce   an all-reduce by a compressor; rank 1 lies
 *   2 server   a parameter server or its worker, whose other end sends what the input says
 *   3 packed   what is unpacked of bytes alone
 *
 * make fuzz MINUTES=n */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "liars.h"

/* What is left of an input. */
typedef struct input {
    const uint8_t *data;
    size_t bytes;
    unsigned flags;
} input;

/* Copies the next bytes; zeros when there are none. */
static void take(input *in, void *out, size_t bytes)
{
    size_t n = bytes < in->bytes ? bytes : in->bytes;
    memset(out, 0, bytes);
    if (n > 0)
        memcpy(out, in->data, n);
    in->data += n;
    in->bytes -= n;
}

static unsigned take_byte(input *in)
{
    uint8_t byte;
    take(in, &byte, 1);
    return byte;
}

/* ---- disks that are not shared ---- */

static char directory[64];

static void clean(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", directory);
    if (system(command) != 0)
        abort();
}

/* Tensor "a", of which each rank has rows, and "b", of which each has columns. whole: all of both. */
static void local_body(dtrain_comm *world, int whole)
{
    float a[64], b[48];
    dtrain_piece pieces[2];
    dtrain_pieces list;
    dtrain_checkpoint_state state;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    int rank = dtrain_comm_rank(world);
    char path[80];
    memset(&list, 0, sizeof list);
    memset(pieces, 0, sizeof pieces);
    memset(&state, 0, sizeof state);
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < 64; i++)
        a[i] = (float)i;
    for (int i = 0; i < 48; i++)
        b[i] = (float)i;
    for (int i = 0; i < 2; i++) {
        pieces[i].name = i == 0 ? "a" : "b";
        pieces[i].dtype = DTRAIN_F32;
        pieces[i].ndim = 2;
        pieces[i].shape[0] = 8;
        pieces[i].shape[1] = i == 0 ? 8 : 6;
        pieces[i].count = i == 0 ? 64 : 48;
        pieces[i].copies = whole ? 2 : 1;
        pieces[i].copy = whole ? rank : 0;
        pieces[i].data = i == 0 ? a : b;
    }
    if (!whole) {
        pieces[0].begin = (size_t)rank * 32;
        pieces[0].count = 32;
        pieces[1].boxed = 1;
        pieces[1].box_size[0] = 8;
        pieces[1].box_begin[1] = (size_t)rank * 3;
        pieces[1].box_size[1] = 3;
        pieces[1].count = 24;
    }
    list.pieces = pieces;
    list.count = 2;
    state.lists = &list;
    state.list_count = 1;
    state.step = 5;
    snprintf(path, sizeof path, "%s/%d", directory, rank);
    desc.directory = path;
    desc.local = desc.no_sync = 1;
    desc.allocator = dtrain_comm_allocator(world);
    if (dtrain_checkpoint_create(&ckpt, world, &desc) == DTRAIN_OK) {
        if (whole)
            DTRAIN_IGNORE(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));
        else if (dtrain_checkpoint_save(ckpt, &state) != DTRAIN_OK)
            abort();
    }
    dtrain_checkpoint_destroy(ckpt);
}

static void local_save(dtrain_comm *world, void *user)
{
    (void)user;
    local_body(world, 0);
}

static void local_load(dtrain_comm *world, void *user)
{
    (void)user;
    local_body(world, 1);
}

/* ---- compressors ---- */

static dtrain_status make_compressor(dtrain_compressor *made, unsigned which, dtrain_allocator *heap)
{
    dtrain_topk_desc topk;
    memset(&topk, 0, sizeof topk);
    topk.schedule.ratio = 0.1;
    topk.values = which / 8 % 2 != 0 ? DTRAIN_BF16 : DTRAIN_F32;
    topk.exchange = which % 2 != 0 ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_GATHER;
    switch (which % 8) {
    case 3: *made = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64); return DTRAIN_OK;
    case 4: *made = dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64); return DTRAIN_OK;
    case 5: *made = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 64); return DTRAIN_OK;
    case 6: *made = dtrain_compressor_of(DTRAIN_COMPRESS_BF16, 0); return DTRAIN_OK;
    default: return dtrain_compressor_topk(made, &topk, heap);
    }
}

static void reduce(dtrain_comm *world, void *user)
{
    enum { COUNT = 1000 };
    float x[COUNT], y[COUNT];
    dtrain_compressor compressor;
    dtrain_compressed *compressed = NULL;
    dtrain_compressed_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(i * 7919 % 1000 - 500) / 16.0f;
    if (make_compressor(&compressor, *(const unsigned *)user, dtrain_comm_allocator(world)) != DTRAIN_OK)
        abort();
    if (dtrain_compressed_create(&compressed, world, COUNT, &compressor, &desc) == DTRAIN_OK)
        for (int step = 0; step < 2; step++)
            if (dtrain_compressed_all_reduce(compressed, x, y, DTRAIN_MEAN) != DTRAIN_OK)
                break;
    dtrain_compressed_destroy(compressed);
}

static void packed(input *in)
{
    enum { COUNT = 300 };
    float out[COUNT];
    dtrain__sparse sparse;
    dtrain_compressor q;
    long before = -1;
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    memset(&sparse, 0, sizeof sparse);
    size_t bytes = in->bytes;
    uint8_t *exact = (uint8_t *)malloc(bytes > 0 ? bytes : 1); /* no byte more */
    if (exact == NULL)
        abort();
    take(in, exact, bytes);
    if (dtrain__sparse_unpack(&sparse, exact, bytes, COUNT) == DTRAIN_OK)
        dtrain__sparse_write(&sparse, out);
    for (size_t i = 0; i < sparse.count; before = sparse.indices[i++])
        if (sparse.indices[i] >= COUNT || (long)sparse.indices[i] <= before)
            abort();
    dtrain__sparse_destroy(&sparse);
    free(exact);
    for (unsigned which = 3; which < 7; which++) { /* of a quantiser the length follows from the count */
        size_t count = bytes % COUNT;
        if (make_compressor(&q, which, &heap) != DTRAIN_OK)
            abort();
        size_t need = q.bytes(&q, count);
        exact = (uint8_t *)calloc(need + 1, 1);
        if (exact == NULL)
            abort();
        memcpy(exact, in->data - bytes, need < bytes ? need : bytes);
        q.unpack(&q, memmove(exact + 1, exact, need), out, count);
        free(exact);
    }
}

/* ---- the parameter server ---- */

enum { PARAMS = 96, HONEST = 0, LIAR = 1 };

/* The honest end's calls. */
static void honest(dtrain_server *s, dtrain_param *table, int async, int serves)
{
    dtrain_optimizer *optimizer = NULL;
    dtrain_optimizer_desc adam;
    dtrain_serve_desc serve;
    memset(&adam, 0, sizeof adam);
    memset(&serve, 0, sizeof serve);
    adam.kind = DTRAIN_ADAMW;
    dtrain_aggregator aggregator = dtrain_aggregator_server(s);
    if (async && serves) {
        if (dtrain_optimizer_create(&optimizer, table, 1, &adam, NULL) != DTRAIN_OK)
            abort();
        serve.optimizer = optimizer;
        DTRAIN_IGNORE(dtrain_server_run(s, &serve));
        dtrain_optimizer_destroy(optimizer);
    }
    for (int step = 0; step < 3 && !(async && serves); step++) {
        double total;
        dtrain_status status =
            async ? dtrain_server_push(s, 1.0) : aggregator.aggregate(aggregator.self, table, 1, 1.0, &total);
        if (status == DTRAIN_OK && async)
            status = dtrain_server_pull(s);
        if (status != DTRAIN_OK)
            break;
    }
}

/* A header, of which some words are what an honest rank would say. */
static dtrain_status tell(input *in, dtrain_comm *link, uint64_t kind, uint64_t clock)
{
    const double one = 1.0;
    uint64_t header[DTRAIN__SERVER_HEADER];
    unsigned raw = take_byte(in);
    memset(header, 0, sizeof header);
    header[0] = kind;
    memcpy(&header[1], &one, sizeof one);
    header[2] = clock;
    if (raw & 1)
        take(in, &header[0], 8);
    if (raw & 2)
        take(in, &header[1], 8);
    if (raw & 4)
        take(in, &header[2], 24 - 8);
    return dtrain_send(link, header, DTRAIN__SERVER_HEADER, DTRAIN_U64, 1 - dtrain_comm_rank(link));
}

/* A message of so many bytes: as an honest rank packs zeros, or the input's. */
static dtrain_status tell_bytes(input *in, dtrain_comm *link, const dtrain_server *s, size_t prefix, size_t bytes)
{
    uint8_t *message = (uint8_t *)calloc(prefix + bytes + 1, 1);
    const double one = 1.0;
    float zeros[PARAMS];
    if (message == NULL)
        abort();
    memset(zeros, 0, sizeof zeros);
    memcpy(message, &one, prefix > 0 ? sizeof one : 0);
    if (s->pieces[0].packed)
        s->compressor.pack(&s->compressor, zeros, PARAMS, message + prefix);
    for (unsigned edits = take_byte(in) % 8; edits > 0; edits--) {
        size_t at = take_byte(in) | (size_t)take_byte(in) << 8;
        uint8_t word[4];
        take(in, word, sizeof word);
        for (size_t i = 0; i < sizeof word; i++)
            message[(at + i) % (prefix + bytes)] ^= word[i];
    }
    dtrain_status status = dtrain_send(link, message, prefix + bytes, DTRAIN_U8, 1 - dtrain_comm_rank(link));
    free(message);
    return status;
}

static dtrain_status hear(dtrain_comm *link, void *out, size_t bytes)
{
    return dtrain_recv(link, out, bytes, DTRAIN_U8, 1 - dtrain_comm_rank(link));
}

/* A worker of the asynchronous server that lies. */
static void lie_to_server(input *in, dtrain_server *s, dtrain_comm *link)
{
    uint64_t header[DTRAIN__SERVER_HEADER], clock = 0;
    uint8_t *answer = (uint8_t *)malloc(s->message_bytes + 1);
    dtrain_status status = answer != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    while (status == DTRAIN_OK && in->bytes > 0) {
        uint64_t kind = take_byte(in) % 4;
        status = tell(in, link, kind, clock);
        if (status == DTRAIN_OK && kind == DTRAIN__SERVER_PUSH && clock++ < UINT64_MAX)
            status = tell_bytes(in, link, s, 0, s->message_bytes);
        if (status == DTRAIN_OK && kind == DTRAIN__SERVER_PULL) {
            status = dtrain_recv(link, header, DTRAIN__SERVER_HEADER, DTRAIN_U64, 1 - dtrain_comm_rank(link));
            if (status == DTRAIN_OK && header[0] == DTRAIN__SERVER_GRANT)
                status = hear(link, answer, s->message_bytes);
        }
        if (kind == DTRAIN__SERVER_LEAVE)
            break;
    }
    free(answer);
}

/* An asynchronous server that lies. */
static void lie_to_worker(input *in, dtrain_server *s, dtrain_comm *link)
{
    uint64_t header[DTRAIN__SERVER_HEADER];
    uint8_t *message = (uint8_t *)malloc(s->message_bytes + 1);
    dtrain_status status = message != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    while (status == DTRAIN_OK && in->bytes > 0) {
        status = dtrain_recv(link, header, DTRAIN__SERVER_HEADER, DTRAIN_U64, 1 - dtrain_comm_rank(link));
        if (status == DTRAIN_OK && header[0] == DTRAIN__SERVER_PUSH)
            status = hear(link, message, s->message_bytes);
        if (status == DTRAIN_OK && header[0] == DTRAIN__SERVER_PULL) {
            status = tell(in, link, DTRAIN__SERVER_GRANT, 0);
            if (status == DTRAIN_OK)
                status = tell_bytes(in, link, s, 0, s->message_bytes);
        }
    }
    free(message);
}

/* Either end of the synchronous server, which lies. */
static void lie_in_turn(input *in, dtrain_server *s, dtrain_comm *link)
{
    size_t bytes = s->pieces[0].bytes;
    uint8_t *frame = (uint8_t *)malloc(DTRAIN__SERVER_PREFIX + bytes + 1);
    dtrain_status status = frame != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    while (status == DTRAIN_OK && in->bytes > 0) {
        if (!s->serves)
            status = tell_bytes(in, link, s, DTRAIN__SERVER_PREFIX, bytes);
        if (status == DTRAIN_OK)
            status = hear(link, frame, DTRAIN__SERVER_PREFIX + bytes);
        if (status == DTRAIN_OK && s->serves)
            status = tell_bytes(in, link, s, DTRAIN__SERVER_PREFIX, bytes);
    }
    free(frame);
}

static dtrain_status server(dtrain_comm *world, void *user)
{
    input in = *(const input *)user;
    float data[PARAMS], grad[PARAMS];
    dtrain_param table;
    dtrain_server_desc desc;
    dtrain_compress_desc compress;
    dtrain_server *s = NULL;
    int rank = dtrain_comm_rank(world);
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    for (int i = 0; i < PARAMS; i++)
        data[i] = grad[i] = (float)i;
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = PARAMS;
    table.data = data;
    table.grad = grad;
    compress.kind = in.flags & 8 ? DTRAIN_COMPRESS_INT8 : DTRAIN_COMPRESS_TOPK;
    compress.topk.schedule.ratio = 0.1;
    compress.least_count = 1;
    desc.async = in.flags & 1;
    desc.server = in.flags & 2 ? HONEST : LIAR;
    desc.compress = in.flags & 4 ? &compress : NULL;
    if (dtrain_server_create(&s, world, &table, 1, &desc) != DTRAIN_OK)
        abort();
    if (rank == HONEST)
        honest(s, &table, desc.async, desc.server == HONEST);
    else if (!desc.async)
        lie_in_turn(&in, s, s->links[0].comm);
    else if (desc.server == HONEST)
        lie_to_server(&in, s, s->links[0].comm);
    else
        lie_to_worker(&in, s, s->links[0].comm);
    dtrain_server_destroy(s);
    return DTRAIN_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    input in = {data, bytes, 0};
    dtrain_comm_desc desc;
    if (directory[0] == 0) {
        dtrain_set_log(liars_quiet, NULL);
        snprintf(directory, sizeof directory, "%s/fuzz_calls-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (mkdtemp(directory) == NULL)
            abort();
        atexit(clean);
        liars_run(local_save, NULL, NULL, 0, SIZE_MAX);
    }
    unsigned which = take_byte(&in) % 4;
    if (which != 0)
        in.flags = take_byte(&in);
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 5000;
    switch (which) {
    case 0: liars_run(local_load, NULL, in.data, in.bytes, (size_t)600 << 20); break;
    case 1: liars_run(reduce, &in.flags, in.data, in.bytes, (size_t)1 << 20); break;
    case 2: DTRAIN_IGNORE(dtrain_run_threads(2, server, &in, &desc)); break;
    default: packed(&in);
    }
    return 0;
}
