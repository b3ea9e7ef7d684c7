/* For tests of checkpoints: a directory of the test's own, and a model with odd shapes, each of whose elements has a
 * value that tells where it belongs. Include dtrain.h, test.h and processes.h first. */
#ifndef DTRAIN_TEST_CHECKPOINT_MODEL_H
#define DTRAIN_TEST_CHECKPOINT_MODEL_H

/* ---- a directory of this test's own ---- */

static char base[64];

static void remove_all(const char *path)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    CHECK_EQ(system(command), 0);
}

static void clean_base(void)
{
    remove_all(base);
}

/* An empty directory; the same for one name. */
static const char *fresh(const char *name)
{
    static char path[160];
    if (base[0] == 0) {
        snprintf(base, sizeof base, "/tmp/dtrain-ckpt-XXXXXX");
        CHECK(mkdtemp(base) != NULL);
        atexit(clean_base);
    }
    snprintf(path, sizeof path, "%s/%s", base, name);
    remove_all(path);
    return path;
}

static inline int exists(const char *directory, const char *name)
{
    char path[400];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return stat(path, &status) == 0;
}

/* ---- a model with odd shapes, and values that tell where an element belongs ---- */

enum { WIDE, TINY, STACK, FROZEN, HALF, LAST, PARAMS };

static void describe(dtrain_param *table)
{
    dtrain_param params[PARAMS] = {
        {"wide", DTRAIN_F32, {37, 301}, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"tiny", DTRAIN_F32, {3}, 0, 0, 0, 1, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"stack", DTRAIN_F32, {3, 7, 111}, 0, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"frozen", DTRAIN_F32, {9, 2}, 0, 0, 2, 0, 1, 0, NULL, NULL, NULL, NULL, 0},
        {"half", DTRAIN_BF16, {501}, 0, 0, 3, 0, 1, 0, NULL, NULL, NULL, NULL, 0},
        {"last", DTRAIN_F32, {20011}, 0, 0, 4, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    };
    memcpy(table, params, sizeof params);
}

static float value_of(const char *name, int state, size_t element)
{
    uint64_t seed = (uint64_t)(unsigned char)name[0] * 256 + (unsigned char)name[1];
    return dtrain_random_normal(seed * 8 + (uint64_t)state, element);
}

/* One rank of a model: an FSDP, or a replicated table with an optimizer. */
typedef struct model {
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp;
    dtrain_optimizer *optimizer;
    uint16_t half[501];
    float *data[PARAMS], *grad[PARAMS];
    dtrain_pieces lists[2];
} model;

static dtrain_fsdp_desc desc_of(dtrain_strategy strategy, int shard_size, int momentum)
{
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.strategy = strategy;
    desc.shard_size = shard_size;
    desc.optimizer.kind = momentum ? DTRAIN_SGD : DTRAIN_ADAMW;
    desc.optimizer.momentum = momentum ? 0.9f : 0.0f;
    return desc;
}

/* strategy 0: no FSDP */
static inline void model_create(model *m, dtrain_comm *world, int strategy, int shard_size, int momentum)
{
    dtrain_fsdp_desc desc = desc_of((dtrain_strategy)strategy, shard_size, momentum);
    memset(m, 0, sizeof *m);
    describe(m->table);
    m->table[HALF].data = m->half;
    if (strategy != 0) {
        CHECK_EQ(dtrain_fsdp_create(&m->fsdp, world, m->table, PARAMS, &desc), DTRAIN_OK);
        return;
    }
    for (int i = 0; i < PARAMS; i++) {
        size_t count = dtrain_param_elements(&m->table[i]);
        m->data[i] = (float *)calloc(count, sizeof(float));
        m->grad[i] = (float *)calloc(count, sizeof(float));
        m->table[i].data = i == HALF ? (void *)m->half : m->data[i];
        m->table[i].grad = m->table[i].frozen ? NULL : m->grad[i];
    }
    CHECK_EQ(dtrain_optimizer_create(&m->optimizer, m->table, PARAMS, &desc.optimizer, NULL), DTRAIN_OK);
}

static inline void model_destroy(model *m)
{
    dtrain_fsdp_destroy(m->fsdp);
    dtrain_optimizer_destroy(m->optimizer);
    for (int i = 0; i < PARAMS; i++) {
        free(m->data[i]);
        free(m->grad[i]);
    }
}

static inline dtrain_checkpoint_state state_of(model *m, uint64_t step)
{
    dtrain_checkpoint_state state;
    memset(&state, 0, sizeof state);
    state.step = step;
    m->lists[0] = m->fsdp != NULL ? dtrain_fsdp_pieces(m->fsdp) : dtrain_params_pieces(m->table, PARAMS, m->optimizer);
    state.lists = m->lists;
    state.list_count = 1;
    return state;
}

/* Where an element of a piece is in its whole tensor. */
static inline size_t place_of(const dtrain_piece *p, size_t element)
{
    size_t at = p->begin + element, place = 0, stride = 1;
    for (int d = p->ndim - 1; d >= 0; d--) {
        size_t size = p->boxed ? p->box_size[d] : p->shape[d];
        place += ((p->boxed ? p->box_begin[d] : 0) + at % size) * stride;
        at /= size;
        stride *= p->shape[d];
    }
    return place;
}

typedef struct model_walk {
    uint64_t salt;
    int writes, same;
} model_walk;

static inline void model_visit(void *user, const dtrain_piece *p)
{
    model_walk *w = (model_walk *)user;
    int state = p->suffix == NULL ? 0 : p->suffix[strlen(p->suffix) - 1];
    for (size_t e = 0; e < p->count; e++) {
        float expected = value_of(p->name, state, place_of(p, e) + (size_t)w->salt * 100000);
        if (p->dtype == DTRAIN_BF16) {
            uint16_t bits;
            CHECK_EQ(dtrain_convert(&expected, DTRAIN_F32, &bits, DTRAIN_BF16, 1), DTRAIN_OK);
            if (w->writes)
                ((uint16_t *)p->data)[e] = bits;
            else
                w->same = w->same && ((uint16_t *)p->data)[e] == bits;
        } else if (w->writes) {
            ((float *)p->data)[e] = expected;
        } else {
            w->same = w->same && ((float *)p->data)[e] == expected;
        }
    }
}

/* Writes, or compares, every element that this rank holds with what belongs there. */
static inline int model_each(model *m, uint64_t salt, int writes, int ranks, int rank)
{
    model_walk walk = {salt, writes, 1};
    dtrain_checkpoint_state state = state_of(m, 0);
    CHECK_EQ(dtrain_pieces_each(state.lists, 1, ranks, rank, model_visit, &walk), DTRAIN_OK);
    return walk.same;
}

/* ---- looking at directories ---- */

__attribute__((unused)) static long count_files(const char *directory, const char *pattern)
{
    char command[400];
    long count = -1;
    snprintf(command, sizeof command, "find %s -name '%s' | wc -l", directory, pattern);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL && fscanf(pipe, "%ld", &count) == 1);
    pclose(pipe);
    return count;
}

__attribute__((unused)) static void shell(const char *format, const char *directory)
{
    char command[600];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(command, sizeof command, format, directory);
#pragma GCC diagnostic pop
    CHECK_EQ(system(command), 0);
}

#endif
