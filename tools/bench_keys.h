/* What tools/bench.c does where its command line says nothing else, and reading its key=value. */
#ifndef BENCH_KEYS_H
#define BENCH_KEYS_H

/* What an operation has where no key says otherwise. */
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

static int bench_number(const char *text, size_t least, size_t most, size_t *value)
{
    char *end;
    unsigned long long number = strtoull(text, &end, 10);
    *value = (size_t)number;
    return end != text && *end == 0 && text[0] != '-' && number >= least && number <= most;
}

/* The place of a value among the names, or -1. */
static int bench_among(const char *value, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (strcmp(value, names[i]) == 0)
            return i;
    return -1;
}

/* Takes the value of a key that is a name or a share; 0 when it is none that is known. */
static int bench_word(bench *b, const char *key, const char *value)
{
    static const char *const against[] = {"limit", "ring"};
    char *end;
    if (strcmp(key, "transport") == 0)
        return (b->transport = bench_among(value, bench_transports, SEALED + 1)) >= 0;
    if (strcmp(key, "strategy") == 0)
        return (b->strategy = bench_among(value, fsdp_strategy_names, 4)) >= 0;
    if (strcmp(key, "against") == 0)
        return (b->against_ring = bench_among(value, against, 2)) >= 0;
    if (strcmp(key, "algorithm") == 0)
        return dtrain__plan_named(value, strlen(value), &b->algorithm);
    if (strcmp(key, "schedule") == 0) {
        int at = bench_among(value, pipeline_names, 4);
        b->schedule = (dtrain_pipeline_schedule)(DTRAIN_PIPELINE_GPIPE + at);
        return at >= 0;
    }
    b->ratio = strtod(value, &end);
    return strcmp(key, "ratio") == 0 && end != value && *end == 0 && b->ratio > 0.0 && b->ratio <= 1.0;
}

/* Reads one key=value; 0 when it is none that is known. */
static int bench_key(bench *b, const char *argument)
{
    const char *value = strchr(argument, '=');
    size_t number;
    char key[16];
    const struct {
        const char *name;
        size_t least, most;
        int *small; /* where it goes: here, or there */
        size_t *large, unit;
    } keys[] = {{"ranks", 1, BENCH_RANKS, &b->ranks, NULL, 1},
                {"runs", 7, BENCH_RUNS, &b->runs, NULL, 1},
                {"huge", 0, 1, &b->huge, NULL, 1},
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
    if (value == NULL || value - argument >= (ptrdiff_t)sizeof key)
        return 0;
    snprintf(key, sizeof key, "%.*s", (int)(value++ - argument), argument);
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        if (strcmp(key, keys[k].name) != 0)
            continue;
        if (!bench_number(value, keys[k].least, keys[k].most, &number))
            return 0;
        if (keys[k].small != NULL)
            *keys[k].small = (int)number;
        else
            *keys[k].large = number * keys[k].unit;
        return 1;
    }
    return bench_word(b, key, value);
}

#endif
