/* Checkpoints across layouts: what data, pipeline and tensor ranks have saved comes back to the bit under any other
 * layout, and is the same file when it is exported. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

static char base[64];

static void clean_base(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", base);
    CHECK_EQ(system(command), 0);
}

/* A path in a directory of this program's. */
static void own_path(char out[160], const char *name, int number)
{
    if (base[0] == 0 && getenv("TEST_MPI_DIRECTORY") != NULL) {
        snprintf(base, sizeof base, "%s", getenv("TEST_MPI_DIRECTORY"));
    } else if (base[0] == 0) {
        snprintf(base, sizeof base, "/tmp/dtrain-layouts-XXXXXX");
        CHECK(mkdtemp(base) != NULL);
        atexit(clean_base);
    }
    snprintf(out, 160, "%s/%s-%d", base, name, number);
}

/* ---- the model ---- */

enum { LAYERS = 7, MOST_PARAMS = 12, MOST_CHUNKS = 2 };

/* How a parameter of the whole model is held by the ranks of a stage. */
typedef struct kind {
    const char *name;
    dtrain_dtype dtype;
    size_t shape[3];
    int where; /* -1: first stage, 0: every layer, 1: with the last layer, 2: after it */
    int cut;   /* a dimension; -1: copied to all tensor ranks */
    size_t blocks, granule;
} kind;

/* With 4 tensor ranks the last has no head and nothing of mix; 5 heads of 2 are uneven on 2, 3 and 4. */
static const kind kinds[] = {
    {"wte", DTRAIN_F32, {13, 6, 0}, -1, 0, 0, 0},      {"wpe", DTRAIN_F32, {5, 6, 0}, -1, -1, 0, 0},
    {"mask", DTRAIN_BF16, {7, 0, 0}, -1, -1, 0, 0},    {"norm", DTRAIN_F32, {LAYERS, 6, 0}, 0, -1, 0, 0},
    {"qkv", DTRAIN_F32, {LAYERS, 30, 6}, 0, 1, 3, 2},  {"qkvb", DTRAIN_F32, {LAYERS, 30, 0}, 0, 1, 3, 2},
    {"proj", DTRAIN_F32, {LAYERS, 6, 10}, 0, 2, 1, 2}, {"mix", DTRAIN_F32, {LAYERS, 4, 9}, 0, 2, 3, 0},
    {"lnf", DTRAIN_F32, {6, 0, 0}, 1, -1, 0, 0},       {"head", DTRAIN_F32, {3, 6, 0}, 2, 0, 0, 0},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

typedef struct layout {
    const char *name;
    int pipe, data, tensor, chunks;
    dtrain_strategy strategy; /* 0: a table with an optimizer */
} layout;

static const layout layouts[] = {
    {"one rank", 1, 1, 1, 1, DTRAIN_FULL_SHARD},
    {"dp=8", 1, 8, 1, 1, DTRAIN_FULL_SHARD},
    {"pp=2,tp=4", 2, 1, 4, 1, DTRAIN_FULL_SHARD},
    {"tp=3", 1, 1, 3, 1, DTRAIN_FULL_SHARD},
    {"pp=3,dp=2", 3, 2, 1, 1, DTRAIN_FULL_SHARD},
    {"dp=2,tp=3", 1, 2, 3, 1, DTRAIN_FULL_SHARD},
    {"pp=2,dp=2,tp=2 in two chunks", 2, 2, 2, 2, DTRAIN_SHARD_GRAD_OP},
    {"dp=4,tp=2 of two nodes", 1, 4, 2, 1, DTRAIN_HYBRID_SHARD},
    {"dp=2,tp=2 not sharded", 1, 2, 2, 1, DTRAIN_DDP},
    {"pp=2,dp=2,tp=2 without FSDP", 2, 2, 2, 1, DTRAIN_STRATEGY_DEFAULT},
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };

static int ranks_of(const layout *how)
{
    return how->pipe * how->data * how->tensor;
}

/* What one rank holds. */
typedef struct holder {
    layout how;
    dtrain_mesh *mesh;
    dtrain_param table[MOST_CHUNKS][MOST_PARAMS];
    dtrain_param_part parts[MOST_CHUNKS][MOST_PARAMS];
    size_t count[MOST_CHUNKS];
    dtrain_fsdp *fsdp[MOST_CHUNKS];
    dtrain_pieces lists[MOST_CHUNKS + 1];
    dtrain_optimizer *optimizer;
    void *memory[2 * MOST_PARAMS];
    size_t memory_count;
    uint16_t mask[7];
} holder;

static void *take(holder *h, size_t bytes)
{
    void *memory = calloc(bytes + 1, 1);
    h->memory[h->memory_count++] = memory;
    return memory;
}

/* The part of one parameter that a stage has for a tensor rank; returns 0 where it has none. */
static int describe(holder *h, int chunk, const kind *from, int stage, const int *begins, int stages)
{
    int tensor = dtrain_comm_rank(dtrain_mesh_group(h->mesh, "tensor")), layers = begins[stage + 1] - begins[stage];
    size_t at = h->count[chunk];
    dtrain_param *param = &h->table[chunk][at];
    dtrain_param_part *part = &h->parts[chunk][at];
    int first = stage == 0; /* unit 0 is what comes before the layers */
    if ((from->where < 0 && stage > 0) || (from->where > 0 && stage < stages - 1))
        return 0;
    memset(param, 0, sizeof *param);
    param->name = from->name;
    param->dtype = from->dtype;
    memcpy(param->shape, from->shape, sizeof from->shape);
    param->stacked = from->where == 0;
    param->unit = from->where < 0 ? 0 : first + (from->where == 0 ? 0 : layers - 2 + from->where);
    if (param->stacked)
        CHECK_EQ(dtrain_param_layers(param, part, (size_t)begins[stage], (size_t)layers), DTRAIN_OK);
    if (from->cut < 0)
        dtrain_param_copies(param, part, h->how.tensor, tensor);
    else
        CHECK_EQ(dtrain_param_cut(param, part, from->cut, from->blocks, from->granule, h->how.tensor, tensor),
                 DTRAIN_OK);
    param->frozen = from->dtype == DTRAIN_BF16;
    if (param->frozen)
        param->data = h->mask;
    if (h->how.strategy == 0 && !param->frozen) {
        param->data = take(h, dtrain_param_elements(param) * sizeof(float));
        param->grad = take(h, dtrain_param_elements(param) * sizeof(float));
    }
    h->count[chunk]++;
    return 1;
}

static void holder_create(holder *h, dtrain_comm *world, const layout *how, int momentum)
{
    const dtrain_mesh_dim dims[3] = {{"pipe", how->pipe}, {"data", how->data}, {"tensor", how->tensor}};
    dtrain_fsdp_desc desc;
    int begins[LAYERS + 1], stages = how->pipe * how->chunks;
    memset(h, 0, sizeof *h);
    h->how = *how;
    memset(&desc, 0, sizeof desc);
    desc.strategy = how->strategy;
    desc.shard_size = 2;
    desc.loss_scale = 1024.0f;
    desc.optimizer.kind = momentum ? DTRAIN_SGD : DTRAIN_ADAMW;
    desc.optimizer.momentum = momentum ? 0.9f : 0.0f;
    CHECK_EQ(dtrain_mesh_create(&h->mesh, world, dims, 3), DTRAIN_OK);
    CHECK_EQ(dtrain_split_stages(NULL, LAYERS, stages, begins), DTRAIN_OK);
    for (int chunk = 0; chunk < how->chunks; chunk++) {
        for (int i = 0; i < KINDS; i++)
            describe(h, chunk, &kinds[i], chunk * how->pipe + dtrain_comm_rank(dtrain_mesh_group(h->mesh, "pipe")),
                     begins, stages);
        if (how->strategy != 0)
            CHECK_EQ(dtrain_fsdp_create(&h->fsdp[chunk], dtrain_mesh_group(h->mesh, "data"), h->table[chunk],
                                        h->count[chunk], &desc),
                     DTRAIN_OK);
    }
    if (how->strategy == 0)
        CHECK_EQ(dtrain_optimizer_create(&h->optimizer, h->table[0], h->count[0], &desc.optimizer, NULL), DTRAIN_OK);
}

static void holder_destroy(holder *h)
{
    for (int chunk = 0; chunk < h->how.chunks; chunk++)
        dtrain_fsdp_destroy(h->fsdp[chunk]);
    dtrain_optimizer_destroy(h->optimizer);
    dtrain_mesh_destroy(h->mesh);
    for (size_t i = 0; i < h->memory_count; i++)
        free(h->memory[i]);
}

static dtrain_checkpoint_state state_of(holder *h, uint64_t step)
{
    dtrain_checkpoint_state state;
    memset(&state, 0, sizeof state);
    state.step = step;
    for (int chunk = 0; chunk < h->how.chunks && h->how.strategy != 0; chunk++)
        h->lists[chunk] = dtrain_fsdp_pieces(h->fsdp[chunk]);
    if (h->how.strategy == 0) {
        h->lists[0] = dtrain_params_pieces(h->table[0], h->count[0], h->optimizer);
        h->lists[0].copies = h->how.data;
        h->lists[0].copy = dtrain_comm_rank(dtrain_mesh_group(h->mesh, "data"));
    }
    state.lists = h->lists;
    state.list_count = h->how.strategy != 0 ? (size_t)h->how.chunks : 1;
    return state;
}

/* ---- values that tell where they belong ---- */

typedef struct walk {
    uint64_t salt;
    int writes, states; /* states 0: weights alone */
    size_t elements;    /* float32 seen */
    int same;
} walk;

static float value_of(const char *name, int state, size_t element, uint64_t salt)
{
    uint64_t seed = 0;
    for (; *name != '\0'; name++)
        seed = seed * 131 + (unsigned char)*name;
    return dtrain_random_normal(seed * 4 + (uint64_t)state, element + (size_t)salt * 100000);
}

/* Elements [first, first + count) of a parameter, at `data`. */
static void visit(walk *w, const dtrain_param *param, int state, float *data, size_t first, size_t count)
{
    for (size_t e = 0; e < count; e++) {
        float value = value_of(param->name, state, dtrain_param_whole_index(param, first + e), w->salt);
        if (w->writes)
            data[e] = value;
        else
            w->same = w->same && data[e] == value;
    }
    w->elements += count;
}

static void visit_slices(walk *w, holder *h, int chunk)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_local(h->fsdp[chunk], &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *param = h->table[chunk];
        while (strcmp(param->name, slices[i].name) != 0)
            param++;
        size_t each = dtrain_param_elements(param) / (param->stacked ? param->shape[0] : 1);
        size_t first = (slices[i].layer >= 0 ? (size_t)slices[i].layer * each : 0) + slices[i].begin;
        visit(w, param, 0, slices[i].weights, first, slices[i].count);
        for (int state = 0; state < 2 && w->states && slices[i].state[state] != NULL; state++)
            visit(w, param, 1 + state, slices[i].state[state], first, slices[i].count);
    }
}

static void visit_table(walk *w, holder *h)
{
    for (size_t i = 0; i < h->count[0]; i++) {
        const dtrain_param *param = &h->table[0][i];
        size_t count = dtrain_param_elements(param), layers = param->stacked ? param->shape[0] : 1,
               each = count / layers;
        if (param->frozen)
            continue;
        visit(w, param, 0, (float *)param->data, 0, count);
        for (size_t layer = 0; layer < layers && w->states && each > 0; layer++)
            for (int state = 0; state < 2; state++) {
                float *data = dtrain__optimizer_state(h->optimizer, (float *)param->data + layer * each, state);
                if (data != NULL)
                    visit(w, param, 1 + state, data, layer * each, each);
            }
    }
}

/* Writes, or compares, all that a rank holds. Returns the float32 elements. */
static size_t walk_all(holder *h, uint64_t salt, int writes, int states)
{
    walk w = {salt, writes, states, 0, 1};
    int has_mask = dtrain_comm_rank(dtrain_mesh_group(h->mesh, "pipe")) == 0;
    for (int chunk = 0; chunk < h->how.chunks && h->how.strategy != 0; chunk++)
        visit_slices(&w, h, chunk);
    if (h->how.strategy == 0)
        visit_table(&w, h);
    for (int e = 0; e < 7 && has_mask; e++) {
        uint16_t bits = (uint16_t)(0x3f80 + (int)salt * 16 + e);
        w.same = w.same && (writes || h->mask[e] == bits);
        h->mask[e] = bits;
    }
    CHECK(w.same);
    return w.elements;
}

/* What each rank gets when parameters are used: published weights, not slices. */
static void check_published(holder *h, uint64_t salt)
{
    static __thread float value[LAYERS * 30 * 6];
    for (int chunk = 0; chunk < h->how.chunks && h->how.strategy != 0; chunk++)
        for (size_t i = 0; i < h->count[chunk]; i++) {
            const dtrain_param *param = &h->table[chunk][i];
            walk w = {salt, 0, 0, 0, 1};
            if (param->frozen)
                continue;
            CHECK_EQ(dtrain_fsdp_unshard(h->fsdp[chunk]), DTRAIN_OK);
            memcpy(value, dtrain_fsdp_param(h->fsdp[chunk], param->name), dtrain_param_elements(param) * sizeof(float));
            visit(&w, param, 0, value, 0, dtrain_param_elements(param));
            CHECK(w.same);
        }
}

/* ---- trips ---- */

typedef struct trip {
    char directory[160], model[160]; /* model: weights alone are loaded from there */
    const layout *how;
    int momentum, async, local;
} trip;

static dtrain_checkpoint *open_checkpoint(const trip *t, dtrain_comm *world)
{
    dtrain_checkpoint *ckpt = NULL;
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = t->directory;
    desc.no_sync = 1;
    desc.local = t->local;
    desc.timeout_ms = test_ms(60000);
    if (dtrain_checkpoint_create(&ckpt, world, &desc) != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    return ckpt;
}

static dtrain_status save_body(dtrain_comm *world, void *user)
{
    const trip *t = (const trip *)user;
    holder h;
    holder_create(&h, world, t->how, t->momentum);
    walk_all(&h, 1, 1, 1);
    dtrain_checkpoint *ckpt = open_checkpoint(t, world);
    dtrain_checkpoint_state state = state_of(&h, 40);
    state.seed = 5;
    for (int chunk = 0; chunk < t->how->chunks && t->how->strategy != 0; chunk++) {
        CHECK_EQ(dtrain_fsdp_set_step(h.fsdp[chunk], 41), DTRAIN_OK);
        h.fsdp[chunk]->scaling.loss_scale = 512.0f;
        h.fsdp[chunk]->scaling.good_steps = 3;
    }
    if (h.optimizer != NULL)
        h.optimizer->step = 41;
    dtrain_status status = t->async ? dtrain_checkpoint_save_async(ckpt, &state) : dtrain_checkpoint_save(ckpt, &state);
    if (t->async && status == DTRAIN_OK)
        status = dtrain_checkpoint_wait(ckpt);
    if (status != DTRAIN_OK)
        TEST_FAIL("saving under %s: %s", t->how->name, dtrain_last_error());
    dtrain_checkpoint_destroy(ckpt);
    holder_destroy(&h);
    return status;
}

static void check_counters(holder *h, const dtrain_checkpoint_state *state, int scaled)
{
    CHECK_EQ(state->step, 40);
    CHECK_EQ(state->seed, 5);
    for (int chunk = 0; chunk < h->how.chunks && h->how.strategy != 0; chunk++) {
        CHECK_EQ(dtrain_fsdp_get_step(h->fsdp[chunk]), 41);
        CHECK_EQ(dtrain_fsdp_loss_scale(h->fsdp[chunk]), scaled ? 512 : 1024);
        CHECK_EQ(h->fsdp[chunk]->scaling.good_steps, scaled ? 3 : 0);
    }
    if (h->how.strategy == 0)
        CHECK_EQ(h->optimizer->step, 41);
}

/* from: the layout that saved. */
static void load_as(const trip *t, dtrain_comm *world, const layout *from)
{
    holder h;
    dtrain_checkpoint_load_desc desc;
    dtrain_checkpoint_report report;
    memset(&desc, 0, sizeof desc);
    desc.path = t->model[0] != '\0' ? t->model : NULL;
    holder_create(&h, world, t->how, t->momentum);
    walk_all(&h, 2, 1, 1);
    dtrain_checkpoint *ckpt = open_checkpoint(t, world);
    dtrain_checkpoint_state state = state_of(&h, 0);
    dtrain_status status = dtrain_checkpoint_load(ckpt, &state, &desc, &report);
    if (status != DTRAIN_OK)
        TEST_FAIL("what %s saved does not load under %s: %s", from->name, t->how->name, dtrain_last_error());
    int states = desc.path == NULL, has_mask = dtrain_comm_rank(dtrain_mesh_group(h.mesh, "pipe")) == 0;
    size_t floats = walk_all(&h, 1, 0, states);
    CHECK_EQ(report.bytes, floats * sizeof(float) + (has_mask ? 7 * sizeof(uint16_t) : 0));
    CHECK(report.missing == 0 && report.extra == 0 && report.reshaped == 0);
    check_published(&h, 1);
    if (states)
        check_counters(&h, &state, from->strategy != 0);
    else
        CHECK_EQ(state.step, 0);
    dtrain_checkpoint_destroy(ckpt);
    holder_destroy(&h);
}

static const layout *saved_by;

static dtrain_status load_body(dtrain_comm *world, void *user)
{
    load_as((const trip *)user, world, saved_by);
    return DTRAIN_OK;
}

static void set_directory(trip *t, int number)
{
    own_path(t->directory, t->momentum ? "momentum" : "adamw", number);
}

static int same_files(const char *a, const char *b)
{
    char command[400];
    snprintf(command, sizeof command, "cmp '%s' '%s'", a, b);
    return system(command) == 0;
}

TEST(what_any_layout_saved_loads_under_any_other_and_exports_alike)
{
    trip t;
    char first[160], other[160];
    memset(&t, 0, sizeof t);
    own_path(first, "export", 0);
    for (int i = 0; i < LAYOUTS; i++) {
        t.how = &layouts[i];
        t.async = i % 2;
        set_directory(&t, i);
        CHECK_EQ(dtrain_run_threads(ranks_of(t.how), save_body, &t, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_checkpoint_verify(t.directory), DTRAIN_OK);
        own_path(other, "export", i);
        CHECK_EQ(dtrain_checkpoint_export(t.directory, other, 1), DTRAIN_OK);
        CHECK(same_files(first, other));
    }
    for (int from = 0; from < LAYOUTS; from++)
        for (int to = 0; to < LAYOUTS; to++) {
            saved_by = &layouts[from];
            t.how = &layouts[to];
            set_directory(&t, from);
            CHECK_EQ(dtrain_run_threads(ranks_of(t.how), load_body, &t, NULL), DTRAIN_OK);
        }
}

TEST(a_plain_file_of_whole_tensors_loads_under_every_layout)
{
    trip t;
    memset(&t, 0, sizeof t);
    t.momentum = 1;
    t.how = saved_by = &layouts[5];
    set_directory(&t, 0);
    own_path(t.model, "model", 0);
    CHECK_EQ(dtrain_run_threads(ranks_of(t.how), save_body, &t, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_export(t.directory, t.model, 0), DTRAIN_OK);
    for (int to = 0; to < LAYOUTS; to++) {
        t.how = &layouts[to];
        CHECK_EQ(dtrain_run_threads(ranks_of(t.how), load_body, &t, NULL), DTRAIN_OK);
    }
}

TEST(ranks_with_disks_of_their_own_hand_each_other_what_another_layout_saved)
{
    const int from[4] = {5, 2, 7, 9}, to[4] = {2, 5, 9, 3}; /* of layouts */
    for (int i = 0; i < 4; i++) {
        trip t;
        memset(&t, 0, sizeof t);
        t.local = 1;
        t.how = saved_by = &layouts[from[i]];
        set_directory(&t, 50 + i);
        CHECK_EQ(dtrain_run_threads(ranks_of(t.how), save_body, &t, NULL), DTRAIN_OK);
        t.how = &layouts[to[i]];
        CHECK_EQ(dtrain_run_threads(ranks_of(t.how), load_body, &t, NULL), DTRAIN_OK);
    }
}

static int save_process(dtrain_comm *world, scene *s)
{
    return save_body(world, s->user) != DTRAIN_OK;
}

static int load_process(dtrain_comm *world, scene *s)
{
    return load_body(world, s->user) != DTRAIN_OK;
}

TEST(processes_save_under_one_layout_and_load_under_another)
{
    const int from[3] = {4, 5, 2}, to[3] = {3, 2, 6}; /* of layouts */
    for (int i = 0; i < 3; i++) {
        scene s;
        trip t;
        memset(&t, 0, sizeof t);
        t.momentum = 1;
        t.async = i == 1;
        t.how = saved_by = &layouts[from[i]];
        set_directory(&t, 10 + i);
        scene_begin(&s, ranks_of(t.how), i == 2);
        s.user = &t;
        run_ranks(&s, save_process);
        t.how = &layouts[to[i]];
        scene_begin(&s, ranks_of(t.how), 0);
        s.user = &t;
        run_ranks(&s, load_process);
    }
}

/* ---- what does not fit ---- */

/* odd: the last stage asks for a tensor more; 0: for nothing, so that no rank asks for the head. */
typedef struct misfit {
    trip t;
    int odd;
} misfit;

static dtrain_status misfit_body(dtrain_comm *world, void *user)
{
    misfit *m = (misfit *)user;
    float odd = 2.5f;
    holder h;
    dtrain_piece piece;
    dtrain_pieces list;
    dtrain_checkpoint_report report;
    holder_create(&h, world, m->t.how, 0);
    walk_all(&h, 2, 1, 1);
    dtrain_checkpoint *ckpt = open_checkpoint(&m->t, world);
    dtrain_checkpoint_state state = state_of(&h, 0);
    int last = dtrain_comm_rank(dtrain_mesh_group(h.mesh, "pipe")) == m->t.how->pipe - 1;
    memset(&list, 0, sizeof list);
    memset(&piece, 0, sizeof piece);
    piece.name = "odd";
    piece.dtype = DTRAIN_F32;
    piece.count = 1;
    piece.copies = 4;
    piece.copy = dtrain_comm_rank(dtrain_mesh_group(h.mesh, "tensor"));
    piece.data = &odd;
    if (m->odd && last) {
        list.pieces = &piece;
        list.count = 1;
        h.lists[state.list_count++] = list;
    } else if (!m->odd && last) { /* what remains of the last stage is nothing */
        state.list_count = 0;
    }
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, &report), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), m->odd ? "missing: \"odd\"" : "extra: \"head\"");
    CHECK_EQ(report.missing, m->odd && last);
    CHECK_EQ(report.extra, m->odd ? 0 : 6); /* lnf and head, with m and v of each */
    CHECK(odd == 2.5f);
    walk_all(&h, 2, 0, 1); /* nothing was loaded on any rank */
    dtrain_checkpoint_destroy(ckpt);
    holder_destroy(&h);
    return DTRAIN_OK;
}

TEST(a_tensor_that_one_stage_lacks_or_none_asks_for_is_an_error_of_all)
{
    misfit m;
    memset(&m, 0, sizeof m);
    m.t.how = &layouts[4];
    set_directory(&m.t, 20);
    CHECK_EQ(dtrain_run_threads(6, save_body, &m.t, NULL), DTRAIN_OK);
    m.t.how = &layouts[2];
    for (m.odd = 0; m.odd < 2; m.odd++)
        CHECK_EQ(dtrain_run_threads(8, misfit_body, &m, NULL), DTRAIN_OK);
}

/* which: 0: chunks of a rank differ in steps, 1: stages in steps, 2: in loss scale, 3: one fsdp is NULL. */
typedef struct disagreement {
    trip t;
    int which;
} disagreement;

static dtrain_status disagree_body(dtrain_comm *world, void *user)
{
    disagreement *d = (disagreement *)user;
    static const char *const texts[4] = {"a list of this rank has optimizer.step 3, and an earlier list or part has 0",
                                         " has optimizer.step 3, and an earlier list or part has 0",
                                         " has loss_scale 2, and", "list 1 of 2 is of an object that is NULL"};
    holder h;
    holder_create(&h, world, d->t.how, 0);
    dtrain_checkpoint *ckpt = open_checkpoint(&d->t, world);
    dtrain_checkpoint_state state = state_of(&h, 1);
    int last = dtrain_comm_rank(dtrain_mesh_group(h.mesh, "pipe")) == 1;
    if (d->which == 0)
        CHECK_EQ(dtrain_fsdp_set_step(h.fsdp[1], 3), DTRAIN_OK);
    for (int chunk = 0; chunk < 2 && last; chunk++) {
        if (d->which == 1)
            CHECK_EQ(dtrain_fsdp_set_step(h.fsdp[chunk], 3), DTRAIN_OK);
        if (d->which == 2)
            h.fsdp[chunk]->scaling.loss_scale = 2.0f;
    }
    if (d->which == 3 && last)
        h.lists[1] = dtrain_fsdp_pieces(NULL);
    dtrain_status expected = d->which == 0 || d->which == 3 ? DTRAIN_ERR_INVALID : DTRAIN_ERR_MISMATCH;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), expected);
    CHECK_CONTAINS(dtrain_last_error(), texts[d->which]);
    dtrain_checkpoint_destroy(ckpt);
    holder_destroy(&h);
    return DTRAIN_OK;
}

TEST(fsdps_that_are_not_stepped_alike_make_no_checkpoint)
{
    disagreement d;
    memset(&d, 0, sizeof d);
    d.t.how = &layouts[6];
    set_directory(&d.t, 30);
    for (d.which = 0; d.which < 4; d.which++)
        CHECK_EQ(dtrain_run_threads(8, disagree_body, &d, NULL), DTRAIN_OK);
    CHECK(dtrain_checkpoint_verify(d.t.directory) != DTRAIN_OK); /* none was begun */
}

/* A model stores tied tensors once; each stage asks for its own name. */
static dtrain_status tied_body(dtrain_comm *world, void *user)
{
    const trip *t = (const trip *)user;
    float row[3] = {0, 0, 0};
    int last = dtrain_comm_rank(world);
    dtrain_piece piece;
    dtrain_pieces list;
    dtrain_checkpoint_state state;
    dtrain_checkpoint_load_desc desc;
    dtrain_checkpoint_report report;
    memset(&list, 0, sizeof list);
    memset(&piece, 0, sizeof piece);
    memset(&state, 0, sizeof state);
    memset(&desc, 0, sizeof desc);
    piece.name = last ? "wte" : "head";
    piece.dtype = DTRAIN_F32;
    piece.ndim = 2;
    piece.shape[0] = 2;
    piece.shape[1] = 3;
    piece.begin = last ? 3 : 0;
    piece.count = 3;
    piece.data = row;
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    desc.path = t->model;
    dtrain_checkpoint *ckpt = open_checkpoint(t, world);
    if (dtrain_checkpoint_load(ckpt, &state, &desc, &report) != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    CHECK_EQ(report.loaded, 1);
    CHECK(row[0] == (last ? 4.0f : 1.0f) && row[2] == (last ? 6.0f : 3.0f));
    dtrain_checkpoint_destroy(ckpt);
    return DTRAIN_OK;
}

TEST(stages_find_a_models_tied_tensor_by_the_name_that_each_has_for_it)
{
    static const float data[6] = {1, 2, 3, 4, 5, 6};
    const size_t shape[2] = {2, 3};
    dtrain_safetensors_source sources[2];
    trip t;
    memset(&t, 0, sizeof t);
    memset(sources, 0, sizeof sources);
    for (int i = 0; i < 2; i++) {
        sources[i].name = i == 0 ? "wte" : "head";
        sources[i].dtype = DTRAIN_F32;
        sources[i].ndim = 2;
        sources[i].shape = shape;
        sources[i].data = data;
    }
    set_directory(&t, 40);
    own_path(t.model, "tied", 0);
    CHECK_EQ(dtrain_safetensors_model_save(t.model, sources, 2, 400, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(2, tied_body, &t, NULL), DTRAIN_OK);
}
