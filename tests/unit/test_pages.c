/* Reserved pages against a plain array: whatever is taken and dropped in whatever order, what users wrote stays until
 * they drop it, gradients are zeros until they are written, and never more is held than was allowed. PAGES_SEED=n
 * repeats a run. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#define PAGE dtrain__os_page_bytes()
#define STRETCHES 12
#define ROUNDS 400

/* Stretches of a stacked tensor: of one size, and like neighbouring layers sharing pages where they meet. */
typedef struct field {
    dtrain_allocator memory;
    dtrain__pages pages;
    size_t each;                 /* floats of a stretch */
    int taken[STRETCHES];        /* by us */
    uint32_t written[STRETCHES]; /* seed of what is there; 0: zeros */
} field;

static float value_of(uint32_t seed, size_t k)
{
    return (float)((seed * 2654435761u + (uint32_t)k * 2246822519u) >> 16) + 1;
}

static float *stretch(field *f, int i)
{
    return (float *)(void *)f->pages.base + (size_t)i * f->each;
}

static void write_stretch(field *f, int i, uint32_t seed)
{
    for (size_t k = 0; k < f->each; k++)
        stretch(f, i)[k] = value_of(seed, k);
    f->written[i] = seed;
}

static int is_as_written(field *f, int i)
{
    for (size_t k = 0; k < f->each; k++)
        if (stretch(f, i)[k] != (f->written[i] ? value_of(f->written[i], k) : 0.0f))
            return 0;
    return 1;
}

static size_t use(field *f, int i, int take)
{
    size_t begin = (size_t)i * f->each * sizeof(float), bytes = f->each * sizeof(float);
    f->taken[i] = take;
    if (take)
        dtrain__pages_take(&f->pages, begin, bytes);
    else
        dtrain__pages_drop(&f->pages, begin, bytes);
    return bytes;
}

static void open_field(field *f, size_t each, int zeros, size_t most)
{
    memset(f, 0, sizeof *f);
    f->each = each;
    CHECK_EQ(dtrain__pages_create(&f->pages, STRETCHES * each * sizeof(float), most, zeros, &f->memory), DTRAIN_OK);
}

static void close_field(field *f)
{
    dtrain__pages_destroy(&f->pages);
    CHECK_EQ(f->memory.bytes, 0);
}

static void play(size_t each, int zeros, uint64_t seed)
{
    field f;
    size_t most = 2 * (each * sizeof(float) + 2 * PAGE);
    open_field(&f, each, zeros, most);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        int i = (int)(dtrain_random_u64(seed, round) % STRETCHES), users = 0;
        for (int k = 0; k < STRETCHES; k++)
            users += f.taken[k];
        if (f.taken[i]) {
            use(&f, i, 0);
            f.written[i] = 0;
        } else if (users < 2) {
            if (zeros && round % 5 == 0 && each * sizeof(float) % PAGE == 0)
                write_stretch(&f, i, round); /* before it is taken; no page of it is anybody else's */
            use(&f, i, 1);
            CHECK(!zeros || is_as_written(&f, i));
            write_stretch(&f, i, round + 1000000);
        }
        for (int k = 0; k < STRETCHES; k++) /* to look at the others would bring their pages */
            CHECK(!(f.taken[k] || (zeros && round == ROUNDS)) || is_as_written(&f, k));
        CHECK(f.memory.bytes <= most + f.pages.bytes / PAGE * sizeof(uint16_t));
    }
    close_field(&f);
}

TEST(what_is_written_stays_and_the_rest_is_zeros)
{
    const char *given = getenv("PAGES_SEED");
    uint64_t seed = given != NULL ? (uint64_t)strtoull(given, NULL, 10) : (uint64_t)(unsigned)getpid();
    static const size_t sizes[] = {32 * 1024, 32 * 1024 + 256, 40000, 17 * 1024 + 3, 5000, 100};
    printf("PAGES_SEED=%llu\n", (unsigned long long)seed);
    for (int i = 0; i < 6; i++)
        for (int zeros = 0; zeros < 2; zeros++)
            play(sizes[i], zeros, seed + (uint64_t)i);
}

/* Resident pages of this process among a range's, by the system's own account. */
static size_t resident(const unsigned char *range, size_t bytes)
{
    size_t count = 0;
    unsigned char *in_core = (unsigned char *)malloc(bytes / PAGE);
    CHECK_EQ(mincore((void *)(uintptr_t)range, bytes, in_core), 0);
    for (size_t i = 0; i < bytes / PAGE; i++)
        count += in_core[i] & 1;
    free(in_core);
    return count * PAGE;
}

TEST(a_pass_over_stretches_holds_two_of_them_and_the_system_agrees)
{
    for (int zeros = 0; zeros < 2; zeros++) {
        field f;
        size_t bytes = 32 * PAGE;
        open_field(&f, bytes / sizeof(float), zeros, 2 * bytes);
        for (int i = 0; i < 3 * STRETCHES; i++) {
            use(&f, i % STRETCHES, 1);
            memset(stretch(&f, i % STRETCHES), 1, bytes);
            if (i > 0)
                use(&f, (i - 1) % STRETCHES, 0);
            CHECK_EQ(f.pages.held * PAGE, i > 0 ? 2 * bytes : bytes);
            CHECK_EQ(resident(f.pages.base, f.pages.reserved), i > 0 ? 2 * bytes : bytes);
        }
        close_field(&f);
    }
}

static int system_moves_pages(void)
{
    if (!dtrain__os_moves()) /* an emulator may move pages and lose those that they leave */
        return 0;
    unsigned char *two = (unsigned char *)dtrain__os_reserve(2 * PAGE);
    *two = 1;
    int moves = dtrain__os_move(two, two + PAGE, PAGE) == 0;
    CHECK(*two == !moves && two[PAGE] == moves); /* there, or as it was */
    dtrain__os_unreserve(two, 2 * PAGE);
    return moves;
}

TEST(pages_that_go_come_again_elsewhere_without_new_ones)
{
    int moves = system_moves_pages();
    if (!moves)
        printf("skipped: that pages keep what they were, as this system does not move pages\n");
    for (int zeros = 0; zeros < 2; zeros++) {
        field f;
        size_t bytes = 32 * PAGE;
        open_field(&f, bytes / sizeof(float), zeros, bytes);
        use(&f, 0, 1);
        memset(stretch(&f, 0), 1, bytes);
        use(&f, 0, 0);
        use(&f, 7, 1);
        CHECK_EQ(f.pages.held, 32);
        if (moves && !zeros) /* these show what they were */
            CHECK_EQ(*(unsigned char *)stretch(&f, 7), 1);
        CHECK_EQ(*(unsigned char *)stretch(&f, 0), 0);
        close_field(&f);
    }
}

TEST(what_was_never_made_is_destroyed)
{
    dtrain__pages none;
    memset(&none, 0, sizeof none);
    dtrain__pages_destroy(&none);
    CHECK(none.base == NULL);
}

TEST(more_than_allowed_in_use_is_not_parked)
{
    field f;
    size_t bytes = 32 * PAGE;
    open_field(&f, bytes / sizeof(float), 0, bytes);
    for (int i = 0; i < STRETCHES; i++)
        use(&f, i, 1);
    CHECK_EQ(f.pages.held, 32 * STRETCHES);
    for (int i = 0; i < STRETCHES; i++)
        use(&f, i, 0);
    CHECK(f.pages.held <= 32);
    close_field(&f);
}

/* A stack whose layers have many pages in one range and few numbers in two others, which travel together, below a
 * parameter that the head uses as well. All numbers are such that 16 bits hold them. */
#define LAYERS 5
#define WIDE 40001
#define TIED 30003
#define SMALL 37
#define TINY 3

static const size_t stacked_counts[3] = {WIDE, SMALL, TINY};

static void all_are(dtrain_fsdp *fsdp, const char *name, size_t count, float expected)
{
    float *value = (float *)malloc(count * sizeof *value);
    size_t other = 0;
    CHECK_EQ(dtrain_fsdp_get(fsdp, name, value, -1), DTRAIN_OK);
    while (other < count && value[other] == expected)
        other++;
    if (other < count)
        TEST_FAIL("%s[%zu] is %g, expected %g", name, other, (double)value[other], (double)expected);
    free(value);
}

static void add_to(float *grad, size_t count, float what)
{
    for (size_t i = 0; i < count; i++)
        grad[i] += what;
}

static dtrain_status train_tied(dtrain_comm *world, void *user)
{
    static const char *const stacked[3] = {"wide", "small", "tiny"};
    dtrain_param table[4] = {{"small", DTRAIN_F32, {LAYERS, SMALL}, 0, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
                             {"wide", DTRAIN_F32, {LAYERS, WIDE}, 0, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
                             {"tiny", DTRAIN_F32, {LAYERS, TINY}, 0, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
                             {"tied", DTRAIN_F32, {TIED}, 0, 0, 0, 0, 0, 1, NULL, NULL, NULL, NULL, 0}};
    float rank = (float)dtrain_comm_rank(world), *grads[3];
    dtrain_fsdp_desc desc = *(const dtrain_fsdp_desc *)user;
    dtrain_fsdp_plan_result plan;
    dtrain_fsdp *fsdp;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 4, &desc), DTRAIN_OK);
    float *tied = dtrain_fsdp_grad(fsdp, "tied");
    for (int k = 0; k < 3; k++)
        grads[k] = dtrain_fsdp_grad(fsdp, stacked[k]);
    for (int step = 1; step <= 4; step++) {
        for (int u = 0; u <= LAYERS; u++) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            for (int k = 0; k < 3 && u > 0; k++) /* what a step before has left */
                CHECK(dtrain_fsdp_param(fsdp, stacked[k])[(size_t)u * stacked_counts[k] - 1] ==
                      (float)(1 - step) * ((float)u + 0.5f));
            CHECK_EQ(dtrain_fsdp_release(fsdp, u), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK); /* the head, forward and backward */
        add_to(tied, TIED, rank);
        CHECK_EQ(dtrain_fsdp_release(fsdp, 0), DTRAIN_OK);
        for (int u = LAYERS; u >= 0; u--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            for (int k = 0; k < 3 && u > 0; k++)
                add_to(grads[k] + (size_t)(u - 1) * stacked_counts[k], stacked_counts[k], (float)u + rank);
            add_to(tied, u == 0 ? TIED : 0, 2.0f);
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, u), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
        /* gradients are gone, but for one page with all of small, and one with all of tiny */
        CHECK_EQ(resident(fsdp->state.pages[1].base, fsdp->state.pages[1].bytes), 2 * dtrain__os_page_bytes());
        for (int k = 1; k < 3; k++)
            for (size_t i = 0; i < LAYERS * stacked_counts[k]; i++)
                CHECK(grads[k][i] == 0.0f);
        all_are(fsdp, "tied", TIED, -2.5f * (float)step); /* ranks 0 and 1 give 0 and 1 in the mean 1/2 */
    }
    for (int k = 0; k < 3; k++) {
        float *value = (float *)malloc(LAYERS * stacked_counts[k] * sizeof *value);
        CHECK_EQ(dtrain_fsdp_get(fsdp, stacked[k], value, -1), DTRAIN_OK);
        for (size_t i = 0; i < LAYERS * stacked_counts[k]; i++)
            if (value[i] != -4.0f * ((float)(i / stacked_counts[k]) + 1.5f)) {
                TEST_FAIL("%s[%zu] is %g", stacked[k], i, (double)value[i]);
                break;
            }
        free(value);
    }
    CHECK_EQ(dtrain_fsdp_plan(table, 4, &desc, 2, (int)rank, &plan), DTRAIN_OK);
    CHECK(dtrain_fsdp_get_stats(fsdp).peak_bytes <= plan.peak + 65536);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(layers_of_many_pages_and_small_ranges_train_and_a_tied_gradient_written_early_counts)
{
    static const dtrain_dtype dtypes[3] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    for (int i = 0; i < 9; i++) {
        dtrain_fsdp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.strategy = (dtrain_strategy)(DTRAIN_FULL_SHARD + i % 3);
        desc.gather_dtype = desc.reduce_dtype = dtypes[i / 3];
        desc.optimizer.kind = DTRAIN_SGD;
        CHECK_EQ(dtrain_run_threads(2, train_tied, &desc, NULL), DTRAIN_OK);
    }
}
