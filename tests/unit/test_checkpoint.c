/* Checkpoints between any two sets of ranks: what was saved comes back, to the bit, and nothing else is read. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"

static __thread uint64_t bytes_read; /* that this thread has asked the system for */

size_t hook_file_limit(const char *call, size_t bytes)
{
    if (strcmp(call, "read") == 0)
        bytes_read += bytes;
    return bytes;
}

typedef struct setting {
    int strategy, shard_size; /* strategy 0: a replicated table */
} setting;

typedef struct trip {
    const char *directory;
    setting how;
    uint64_t step;
    int async, local, momentum;
    dtrain_checkpoint_report reports[16];
} trip;

static dtrain_checkpoint_desc ckpt_desc(const trip *t)
{
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = t->directory;
    desc.local = t->local;
    desc.no_sync = 1;
    desc.timeout_ms = test_ms(20000);
    return desc;
}

static dtrain_status save_body(dtrain_comm *world, void *user)
{
    trip *t = (trip *)user;
    dtrain_checkpoint_desc desc = ckpt_desc(t);
    dtrain_checkpoint *ckpt = NULL;
    dtrain_safetensors_pair value = {"note", 0, "a value with a \"quote\"", 0};
    dtrain_sampler sampler;
    dtrain_sampler_desc sampler_desc = {1000, 5, 0, 4, 2, 0};
    model m;
    model_create(&m, world, t->how.strategy, t->how.shard_size, t->momentum);
    model_each(&m, t->step, 1, dtrain_comm_size(world), dtrain_comm_rank(world));
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &desc);
    dtrain_checkpoint_state state = state_of(&m, t->step);
    CHECK_EQ(dtrain_sampler_init(&sampler, &sampler_desc), DTRAIN_OK);
    state.seed = UINT64_MAX;
    state.random_index = 123456789012345678u;
    state.values = &value;
    state.value_count = 1;
    m.lists[1] = dtrain_sampler_pieces(&sampler);
    state.list_count = 2;
    if (m.fsdp != NULL)
        CHECK_EQ(dtrain_fsdp_set_step(m.fsdp, t->step + 1000), DTRAIN_OK);
    else
        m.optimizer->step = t->step + 1000;
    if (status == DTRAIN_OK)
        status = t->async ? dtrain_checkpoint_save_async(ckpt, &state) : dtrain_checkpoint_save(ckpt, &state);
    if (t->async && status == DTRAIN_OK) {
        model_each(&m, 77, 1, dtrain_comm_size(world), dtrain_comm_rank(world)); /* training goes on */
        status = dtrain_checkpoint_wait(ckpt);
        CHECK_EQ(dtrain__checkpoint_done(ckpt), 1);
    }
    if (status != DTRAIN_OK)
        TEST_FAIL("saving on rank %d: %s", dtrain_comm_rank(world), dtrain_last_error());
    dtrain_checkpoint_destroy(ckpt);
    model_destroy(&m);
    return status;
}

static dtrain_status load_body(dtrain_comm *world, void *user)
{
    trip *t = (trip *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_checkpoint_desc desc = ckpt_desc(t);
    dtrain_checkpoint *ckpt = NULL;
    dtrain_checkpoint_report *report = &t->reports[rank];
    dtrain_sampler sampler;
    dtrain_sampler_desc sampler_desc = {1000, 5, 0, 4, 2, 0};
    model m;
    model_create(&m, world, t->how.strategy, t->how.shard_size, t->momentum);
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &desc);
    dtrain_checkpoint_state state = state_of(&m, 0);
    CHECK_EQ(dtrain_sampler_init(&sampler, &sampler_desc), DTRAIN_OK);
    m.lists[1] = dtrain_sampler_pieces(&sampler);
    state.list_count = 2;
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_load(ckpt, &state, NULL, report);
    if (status != DTRAIN_OK) {
        TEST_FAIL("loading on rank %d: %s", rank, dtrain_last_error());
    } else {
        CHECK(model_each(&m, t->step, 0, ranks, rank));
        CHECK_EQ(state.step, t->step);
        CHECK(state.seed == UINT64_MAX);
        CHECK_EQ(state.random_index, 123456789012345678);
        CHECK_EQ(m.fsdp != NULL ? dtrain_fsdp_get_step(m.fsdp) : m.optimizer->step, t->step + 1000);
        const char *value = dtrain_checkpoint_value(ckpt, "note", NULL);
        CHECK(value != NULL && strcmp(value, "a value with a \"quote\"") == 0);
        CHECK(dtrain_checkpoint_value(ckpt, "other", NULL) == NULL);
        CHECK(strcmp(dtrain_checkpoint_value(ckpt, "optimizer.kind", NULL), t->momentum ? "sgd" : "adamw") == 0);
    }
    dtrain_checkpoint_destroy(ckpt);
    model_destroy(&m);
    return status;
}

static void there_and_back(int from, setting saved, int to, setting loaded, int momentum, int async)
{
    static uint64_t step;
    int before = test_failures;
    trip t;
    memset(&t, 0, sizeof t);
    t.directory = fresh("trip");
    t.step = step++;
    t.momentum = momentum;
    t.async = async;
    t.how = saved;
    CHECK_EQ(dtrain_run_threads(from, save_body, &t, NULL), DTRAIN_OK);
    if (test_failures == before) {
        t.how = loaded;
        CHECK_EQ(dtrain_run_threads(to, load_body, &t, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_checkpoint_verify(t.directory), DTRAIN_OK);
    }
    if (test_failures != before)
        TEST_FAIL("from %d ranks of strategy %d to %d of %d, momentum %d, async %d: %s", from, saved.strategy, to,
                  loaded.strategy, momentum, async, dtrain_last_error());
}

TEST(a_checkpoint_of_one_split_loads_onto_any_other)
{
    const setting full = {DTRAIN_FULL_SHARD, 0}, none = {DTRAIN_DDP, 0}, grad = {DTRAIN_SHARD_GRAD_OP, 0},
                  hybrid = {DTRAIN_HYBRID_SHARD, 2}, table = {0, 0};
    const struct {
        int from, to;
    } sizes[] = {{1, 1}, {1, 2}, {2, 4}, {4, 2}, {3, 2}, {4, 3}, {8, 5}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        there_and_back(sizes[i].from, full, sizes[i].to, full, 0, 0);
        there_and_back(sizes[i].from, full, sizes[i].to, table, 1, (int)i % 2);
        there_and_back(sizes[i].from, table, sizes[i].to, full, 0, 0);
        there_and_back(sizes[i].from, none, sizes[i].to, grad, 1, 1);
    }
    there_and_back(4, hybrid, 3, full, 0, 0);
    there_and_back(4, hybrid, 2, table, 1, 1);
    there_and_back(3, full, 4, hybrid, 0, 1);
    there_and_back(5, table, 5, table, 0, 0);
}

/* ---- pieces of the program's own ---- */

enum { ROWS = 1031, COLUMNS = 517 };

typedef struct grid {
    const char *directory;
    int columns, rows; /* ranks side by side, and one below the other; ranks beyond them hold nothing */
    int verify;
    uint64_t step;
    int ranges[16];
    dtrain_checkpoint_report reports[16];
} grid;

/* The box of a rank; earlier ones are larger. */
static dtrain_piece box_of(const grid *g, int rank)
{
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.name = "grid";
    piece.dtype = DTRAIN_F32;
    piece.ndim = 2;
    piece.shape[0] = ROWS;
    piece.shape[1] = COLUMNS;
    piece.boxed = 1;
    if (rank >= g->columns * g->rows)
        return piece;
    piece.box_size[0] = cut_of(ROWS, g->rows, rank / g->columns, &piece.box_begin[0]);
    piece.box_size[1] = cut_of(COLUMNS, g->columns, rank % g->columns, &piece.box_begin[1]);
    piece.count = piece.box_size[0] * piece.box_size[1];
    return piece;
}

static float cell(const dtrain_piece *p, size_t e)
{
    size_t row = p->box_begin[0] + e / p->box_size[1], column = p->box_begin[1] + e % p->box_size[1];
    return (float)(row * COLUMNS + column);
}

static dtrain_checkpoint_desc grid_desc(const grid *g)
{
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = g->directory;
    desc.no_sync = 1;
    desc.no_verify = !g->verify;
    desc.timeout_ms = test_ms(20000);
    return desc;
}

static dtrain_status save_grid(dtrain_comm *world, void *user)
{
    grid *g = (grid *)user;
    dtrain_checkpoint_desc desc = grid_desc(g);
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_piece piece = box_of(g, dtrain_comm_rank(world));
    dtrain_pieces list;
    float *data = (float *)malloc(piece.count * sizeof(float) + 1);
    for (size_t e = 0; e < piece.count; e++)
        data[e] = cell(&piece, e);
    piece.data = data;
    memset(&list, 0, sizeof list);
    memset(&state, 0, sizeof state);
    state.step = g->step;
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    dtrain_status status = dtrain_checkpoint_save(ckpt, &state);
    dtrain_checkpoint_destroy(ckpt);
    free(data);
    return status;
}

static dtrain_status load_grid(dtrain_comm *world, void *user)
{
    grid *g = (grid *)user;
    int rank = dtrain_comm_rank(world), same = 1;
    dtrain_checkpoint_desc desc = grid_desc(g);
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_piece piece = box_of(g, rank);
    dtrain_pieces list;
    float *data = (float *)calloc(piece.count + 1, sizeof(float));
    piece.data = data;
    memset(&list, 0, sizeof list);
    memset(&state, 0, sizeof state);
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    bytes_read = 0;
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, &g->reports[rank]), DTRAIN_OK);
    CHECK(bytes_read >= g->reports[rank].bytes);
    CHECK(bytes_read <= g->reports[rank].bytes_read + 64); /* the newest's name */
    g->reports[rank].bytes_read = bytes_read;
    for (size_t e = 0; e < piece.count; e++)
        same = same && data[e] == cell(&piece, e);
    CHECK(same);
    CHECK_EQ(g->reports[rank].bytes, piece.count * sizeof(float));
    dtrain_checkpoint_destroy(ckpt);
    free(data);
    return DTRAIN_OK;
}

static uint64_t size_of(const char *directory, const char *pattern)
{
    char command[400];
    unsigned long long bytes = 0;
    snprintf(command, sizeof command, "cat %s/step-*/%s 2>/dev/null | wc -c", directory, pattern);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL && fscanf(pipe, "%llu", &bytes) == 1);
    pclose(pipe);
    return bytes;
}

TEST(boxes_cut_along_either_dimension_load_onto_others_and_read_no_more_than_they_need)
{
    const struct {
        int columns, rows, to_columns, to_rows, ranks, to_ranks;
    } cases[] = {{1, 4, 1, 3, 4, 3}, {4, 1, 3, 1, 4, 3}, {1, 3, 4, 1, 3, 4}, {2, 2, 3, 2, 4, 6},
                 {8, 1, 1, 5, 8, 5}, {1, 1, 2, 1, 3, 2}, {1, 2, 1, 1, 2, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int verify = 0; verify < 2; verify++) {
            grid g;
            memset(&g, 0, sizeof g);
            g.directory = fresh("grid");
            g.verify = verify;
            g.columns = cases[i].columns;
            g.rows = cases[i].rows;
            CHECK_EQ(dtrain_run_threads(cases[i].ranks, save_grid, &g, NULL), DTRAIN_OK);
            g.columns = cases[i].to_columns;
            g.rows = cases[i].to_rows;
            CHECK_EQ(dtrain_run_threads(cases[i].to_ranks, load_grid, &g, NULL), DTRAIN_OK);
            uint64_t index = size_of(g.directory, "index.json"), hashes = size_of(g.directory, "*.hashes.safetensors");
            uint64_t headers = size_of(g.directory, "*.safetensors") - (uint64_t)ROWS * COLUMNS * 4 - hashes;
            for (int rank = 0; rank < cases[i].to_ranks; rank++) {
                dtrain_piece piece = box_of(&g, rank);
                /* ranges: rows that lie together in both; a rank meets no more stored boxes than there are */
                uint64_t boxes = (uint64_t)cases[i].rows * (uint64_t)cases[i].columns;
                uint64_t most = index + 2 * (headers + hashes) + 64, ranges = boxes;
                if (cases[i].columns > 1 || cases[i].to_columns > 1)
                    ranges = 2 * boxes + (uint64_t)piece.box_size[0] * (uint64_t)cases[i].columns;
                most += g.reports[rank].bytes + 2 * 65536 * ranges;
                CHECK(g.reports[rank].bytes_read <= most);
                /* and each block at most once */
                CHECK(g.reports[rank].bytes_read <= (uint64_t)ROWS * COLUMNS * 4 + index + 2 * (headers + hashes) + 64);
            }
        }
}

TEST(a_row_of_many_costs_its_block_and_no_file_that_it_is_not_in)
{
    grid g;
    memset(&g, 0, sizeof g);
    g.directory = fresh("row");
    g.verify = 1;
    g.columns = 1;
    g.rows = 4;
    CHECK_EQ(dtrain_run_threads(4, save_grid, &g, NULL), DTRAIN_OK);
    g.rows = ROWS; /* rank 0 gets one row, 2,068 bytes at the beginning of the first file */
    CHECK_EQ(dtrain_run_threads(1, load_grid, &g, NULL), DTRAIN_OK);
    uint64_t index = size_of(g.directory, "index.json");
    CHECK(g.reports[0].bytes_read <= index + 64 + 65536 + 2 * 1000 + 9 * 8);
}

/* A model with an empty tensor, an empty stack, and a stack of empty layers; how it is saved or loaded. */
typedef struct hollow {
    const char *directory;
    int fsdp, load, momentum;
} hollow;

static dtrain_status hollow_body(dtrain_comm *world, void *user)
{
    hollow *h = (hollow *)user;
    float w[4] = {1, 2, 3, 4}, zeros[4] = {0}, nothing[3];
    dtrain_param table[4] = {
        {"w", DTRAIN_F32, {4}, 0, 0, 0, 0, 0, 0, w, zeros, NULL, NULL, 0},
        {"empty", DTRAIN_F32, {0}, 1, 0, 0, 0, 0, 0, nothing, nothing, NULL, NULL, 0},
        {"layers", DTRAIN_F32, {0, 5}, 2, 1, 1, 0, 0, 0, nothing + 1, nothing + 1, NULL, NULL, 0},
        {"inner", DTRAIN_F32, {2, 0}, 2, 1, 1, 0, 0, 0, nothing + 2, nothing + 2, NULL, NULL, 0},
    };
    dtrain_fsdp_desc desc = desc_of(DTRAIN_FULL_SHARD, 0, h->momentum);
    dtrain_fsdp *fsdp = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_checkpoint_desc where;
    dtrain_checkpoint_state state;
    dtrain_pieces list;
    memset(&where, 0, sizeof where), memset(&state, 0, sizeof state);
    where.directory = h->directory;
    where.no_sync = 1;
    if (h->fsdp)
        CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 4, &desc), DTRAIN_OK);
    else
        CHECK_EQ(dtrain_optimizer_create(&optimizer, table, 4, &desc.optimizer, NULL), DTRAIN_OK);
    list = h->fsdp ? dtrain_fsdp_pieces(fsdp) : dtrain_params_pieces(table, 4, optimizer);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &where), DTRAIN_OK);
    state.lists = &list;
    state.list_count = 1;
    state.step = 1;
    dtrain_status status =
        h->load ? dtrain_checkpoint_load(ckpt, &state, NULL, NULL) : dtrain_checkpoint_save(ckpt, &state);
    if (status != DTRAIN_OK)
        TEST_FAIL("%s %s: %s", h->load ? "load into" : "save of", h->fsdp ? "FSDP" : "a table", dtrain_last_error());
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    dtrain_optimizer_destroy(optimizer);
    return status;
}

TEST(parameters_without_elements_go_between_a_table_and_fsdp)
{
    for (int way = 0; way < 8; way++) {
        hollow h = {fresh("hollow"), way & 1, 0, way >> 2};
        CHECK_EQ(dtrain_run_threads(2, hollow_body, &h, NULL), DTRAIN_OK);
        h.load = 1;
        h.fsdp = way >> 1 & 1;
        CHECK_EQ(dtrain_run_threads(3, hollow_body, &h, NULL), DTRAIN_OK);
    }
}
