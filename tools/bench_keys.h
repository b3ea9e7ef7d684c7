/* The command line of tools/bench.c: its help, the defaults of each operation, and reading key=value. */
#ifndef BENCH_KEYS_H
#define BENCH_KEYS_H

static const char bench_help[] =
    "usage: bench OPERATION [key=value ...]\n"
    "Times an operation against its limit, in turns, and prints the medians.\n"
    "ranks        all_reduce reduce_scatter all_gather broadcast reduce all_to_all\n"
    "             scan barrier fused ring ddp fsdp tp_overlap pipeline_bubble\n"
    "one thread   gemm adamw seal topk topk_add sparse_add int8_pack int8_unpack\n"
    "slow links   link_topk link_int8\n"
    "files        file_open file_header file_read file_save file_load\n"
    "checkpoints  save_async reload\n"
    "  ranks=2 runs=11      1 to 64 ranks (4 for pipeline and links); 7 to 1001 runs\n"
    "  bytes=N, count=N     a rank's buffer in bytes, or in floats; 1 MiB for most\n"
    "  transport=threads    or processes: tcp, unix, shm, sealed; fsdp has slow\n"
    "  algorithm=auto       a name that DTRAIN_ALGORITHM takes\n"
    "  against=limit        or ring; chunk=262144 bytes of the ring under way at once\n"
    "  pin=0 huge=0 alloc=0 1: a processor for each rank; huge pages; comm_alloc\n"
    "  fill=0               1: each rank writes its buffer before each call\n"
    "  size=1024            gemm: rows, columns; file_open, file_header: tensors\n"
    "  ratio=0.01           topk: share of the elements that is selected\n"
    "  strategy=full        fsdp: or grad, ddp, hybrid; layers=8 width=512 steps=1\n"
    "  work=100 sleep=0     fsdp: computation in % of communication; 1: it sleeps\n"
    "  schedule=1f1b        or gpipe, interleaved (chunks=2), zb_h1; chunks=1 micro=8\n"
    "Files lie in $TMPDIR; file_load reads $BENCH_FILE. tools/bench.c says what the\n"
    "figures mean. Exit status: 0; 1 for an error; 2 for a wrong command line.\n"
    "  bench all_reduce transport=tcp ranks=4 bytes=67108864\n"
    "  bench fsdp strategy=grad work=50\n";

/* Sets what an operation has by default. */
static void bench_defaults(bench *b)
{
    bench_op op = b->op;
    b->ranks = op == LINK_TOPK || op == LINK_INT8 || op == PIPELINE_BUBBLE ? 4 : op >= ADAMW ? 1 : 2;
    b->runs = 11;
    b->ratio = 0.01;
    b->bytes = op >= SAVE_ASYNC  ? (size_t)256 << 20
               : op == FILE_OPEN ? (size_t)10000000000
               : op >= FILE_READ ? (size_t)1 << 30
               : op >= ADAMW     ? 100000000
               : op == FUSED     ? BENCH_FUSED * (size_t)4096
                                 : (size_t)1 << 20;
    b->size = op == FILE_OPEN ? 1000 : op == FILE_HEADER ? 100000 : 1024;
    b->chunk = (size_t)256 << 10;
    b->repeats[0] = b->repeats[1] = 1;
    b->layers = 8;
    b->width = 512;
    b->work = 100;
    b->steps = 1;
    b->micro = 8;
    b->schedule = DTRAIN_PIPELINE_1F1B;
}

/* Returns the place of a value among names, or -1. */
static int bench_among(const char *value, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (strcmp(value, names[i]) == 0)
            return i;
    return -1;
}

/* Takes the value of a key that is one of several names; returns what is expected, or NULL. */
static const char *bench_word(bench *b, const char *key, const char *value)
{
    static const char *const against[] = {"limit", "ring"};
    int at;
    if (strcmp(key, "transport") == 0)
        return (b->transport = bench_among(value, bench_transports, SEALED + 1)) >= 0
                   ? NULL
                   : "threads, tcp, unix, shm, sealed or slow is expected";
    if (strcmp(key, "strategy") == 0)
        return (b->strategy = bench_among(value, fsdp_strategy_names, 4)) >= 0
                   ? NULL
                   : "full, grad, ddp or hybrid is expected";
    if (strcmp(key, "against") == 0)
        return (b->against_ring = bench_among(value, against, 2)) >= 0 ? NULL : "limit or ring is expected";
    if (strcmp(key, "algorithm") == 0)
        return dtrain__plan_named(value, strlen(value), &b->algorithm) ? NULL
                                                                       : "a name of DTRAIN_ALGORITHM is expected";
    if (strcmp(key, "ratio") == 0)
        return tool_real(value, 0, 1, &b->ratio) && b->ratio > 0 ? NULL : "a share above 0, and at most 1, is expected";
    if (strcmp(key, "schedule") != 0)
        return "there is no such key";
    at = bench_among(value, pipeline_names, 4);
    b->schedule = (dtrain_pipeline_schedule)(DTRAIN_PIPELINE_GPIPE + at);
    return at >= 0 ? NULL : "gpipe, 1f1b, interleaved or zb_h1 is expected";
}

/* Reads one key=value; returns 0, or TOOL_WRONG after an error text. */
static int bench_key(bench *b, const char *argument)
{
    const char *value = strchr(argument, '='), *why;
    uint64_t number;
    char key[16];
    const struct {
        const char *name;
        size_t least, most;
        int *small; /* where the number goes; NULL: large */
        size_t *large, unit;
    } keys[] = {{"ranks", 1, BENCH_RANKS, &b->ranks, NULL, 1},
                {"runs", 7, BENCH_RUNS, &b->runs, NULL, 1},
                {"huge", 0, 1, &b->huge, NULL, 1},
                {"alloc", 0, 1, &b->alloc, NULL, 1},
                {"fill", 0, 1, &b->fill, NULL, 1},
                {"bytes", 0, (size_t)1 << 40, NULL, &b->bytes, 1},
                {"size", 1, 1000000, NULL, &b->size, 1},
                {"count", 0, (size_t)1 << 38, NULL, &b->bytes, sizeof(float)},
                {"chunk", 1024, (size_t)1 << 30, NULL, &b->chunk, 1},
                {"pin", 0, 1, &b->pin, NULL, 1},
                {"layers", 2, 1000, NULL, &b->layers, 1},
                {"width", 1, 32768, NULL, &b->width, 1},
                {"work", 0, 10000, NULL, &b->work, 1},
                {"steps", 1, 10000, NULL, &b->steps, 1},
                {"sleep", 0, 1, &b->sleep, NULL, 1},
                {"micro", 1, BENCH_RANKS, &b->micro, NULL, 1},
                {"chunks", 0, PIPELINE_CHUNKS, &b->chunks, NULL, 1}};
    if (value == NULL)
        return tool_wrong("bench", argument, NULL, "key=value is expected");
    snprintf(key, sizeof key, "%.*s", (int)(value - argument < 16 ? value - argument : 15), argument);
    value++;
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        if (strcmp(key, keys[k].name) != 0)
            continue;
        if (!tool_whole(value, keys[k].least, keys[k].most, &number))
            return tool_wrong("bench", argument, NULL, "a whole number from %zu to %zu is expected", keys[k].least,
                              keys[k].most);
        if (keys[k].small != NULL)
            *keys[k].small = (int)number;
        else
            *keys[k].large = (size_t)number * keys[k].unit;
        return 0;
    }
    why = bench_word(b, key, value);
    return why == NULL ? 0 : tool_wrong("bench", argument, NULL, "%s", why);
}

#endif
