/* Benchmarks of checkpoints. The operation save_async times how long an asynchronous save holds its caller up, beside
 * one memcpy of the state. The operation reload times a load that checks every hash, beside read() of as many bytes.
 * The state is 64 tensors. The first save makes the staging buffer and is not timed. The directory lies in TMPDIR, or
 * /tmp, and is removed. */
#ifndef BENCH_CHECKPOINT_H
#define BENCH_CHECKPOINT_H

enum { CHECKPOINT_TENSORS = 64 };

typedef struct checkpoint_bench {
    dtrain_checkpoint *ckpt;
    dtrain_checkpoint_state state;
    dtrain_pieces list;
    dtrain_piece pieces[CHECKPOINT_TENSORS];
    char names[CHECKPOINT_TENSORS][8];
    float *data, *copy;
} checkpoint_bench;

static void checkpoint_begin(checkpoint_bench *c, bench *b, const char *path)
{
    dtrain_checkpoint_desc desc;
    size_t each = b->count / CHECKPOINT_TENSORS;
    memset(c, 0, sizeof *c);
    memset(&desc, 0, sizeof desc);
    b->count = each * CHECKPOINT_TENSORS;
    b->bytes = b->count * sizeof(float);
    c->data = (float *)bench_memory(b->bytes, b->huge);
    c->copy = (float *)bench_memory(b->bytes, b->huge);
    for (size_t i = 0; i < CHECKPOINT_TENSORS; i++) {
        dtrain_piece *piece = &c->pieces[i];
        snprintf(c->names[i], sizeof c->names[i], "w%zu", i);
        piece->name = c->names[i];
        piece->dtype = DTRAIN_F32;
        piece->ndim = 1;
        piece->shape[0] = piece->count = each;
        piece->data = c->data + i * each;
        for (size_t e = 0; e < each; e++)
            c->data[i * each + e] = (float)(i + e % 1000);
    }
    desc.directory = path;
    desc.keep_last = 1;
    desc.no_sync = 1;
    c->list.pieces = c->pieces;
    c->list.count = CHECKPOINT_TENSORS;
    c->state.lists = &c->list;
    c->state.list_count = 1;
    DTRAIN_CHECK(dtrain_checkpoint_create(&c->ckpt, NULL, &desc));
    DTRAIN_CHECK(dtrain_checkpoint_save_async(c->ckpt, &c->state));
    DTRAIN_CHECK(dtrain_checkpoint_wait(c->ckpt));
}

static void checkpoint_stall(checkpoint_bench *c, bench *b)
{
    for (int run = 0; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns(), middle;
        memcpy(c->copy, c->data, b->bytes);
        middle = bench_now_ns();
        c->state.step++;
        DTRAIN_CHECK(dtrain_checkpoint_save_async(c->ckpt, &c->state));
        b->us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        b->limit_us[run] = (double)(middle - begin) * 1e-3;
        DTRAIN_CHECK(dtrain_checkpoint_wait(c->ckpt));
    }
}

/* Reads the data file of the only checkpoint from end to end into the same memory. */
static void checkpoint_read_bare(checkpoint_bench *c, bench *b, const char *path)
{
    char command[600], file[600];
    snprintf(command, sizeof command, "ls %s/step-*/rank-*.safetensors | grep -v hashes", path);
    FILE *pipe = popen(command, "r");
    if (pipe == NULL || fgets(file, sizeof file, pipe) == NULL)
        bench_fail("finding the checkpoint's file");
    pclose(pipe);
    file[strcspn(file, "\n")] = 0;
    int fd = open(file, O_RDONLY);
    size_t left = b->bytes;
    for (ssize_t n; left > 0; left -= (size_t)n)
        if ((n = read(fd, (char *)c->data + (b->bytes - left), left)) <= 0)
            bench_fail("reading the checkpoint's file");
    close(fd);
}

static void checkpoint_reload(checkpoint_bench *c, bench *b, const char *path)
{
    for (int run = 0; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns(), middle;
        checkpoint_read_bare(c, b, path);
        middle = bench_now_ns();
        DTRAIN_CHECK(dtrain_checkpoint_load(c->ckpt, &c->state, NULL, NULL));
        b->us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        b->limit_us[run] = (double)(middle - begin) * 1e-3;
    }
}

static int checkpoint_run(bench *b)
{
    checkpoint_bench *c = (checkpoint_bench *)malloc(sizeof *c);
    const char *path = files_path("checkpoint");
    char command[600];
    if (c == NULL)
        bench_fail("memory");
    checkpoint_begin(c, b, path);
    if (b->op == SAVE_ASYNC)
        checkpoint_stall(c, b);
    else
        checkpoint_reload(c, b, path);
    dtrain_checkpoint_destroy(c->ckpt);
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0)
        bench_fail("removing the checkpoint");
    free(c->data);
    free(c->copy);
    free(c);
    bench_print(b);
    return 0;
}

#endif
