/* A model of a few units whose members pull it to different places, for tests of local SGD. */
#ifndef DTRAIN_TEST_LOCAL_SGD_TOY_H
#define DTRAIN_TEST_LOCAL_SGD_TOY_H

enum { UNITS = 5, FROZEN = 7, MOST = 6000 };

/* A table of UNITS units, one of them stacked over two, and a frozen parameter: sizes that nothing divides. */
typedef struct toy {
    size_t count; /* trained elements */
    float *data, *grad, *goals;
    uint64_t seed; /* of the goals, where they are known */
    int member, known;
    float frozen[FROZEN];
    size_t starts[UNITS], sizes[UNITS]; /* of each unit's elements in data */
    dtrain_param table[5];
} toy;

static void toy_begin(toy *t, size_t scale)
{
    static const char *const names[] = {"first", "layers", "third", "last", "frozen"};
    size_t at = 0, sizes[4];
    memset(t, 0, sizeof *t);
    sizes[0] = 3 * scale + 1, sizes[1] = 2 * (5 * scale + 2), sizes[2] = scale, sizes[3] = 7 * scale + 3;
    t->count = sizes[0] + sizes[1] + sizes[2] + sizes[3];
    t->data = (float *)calloc(3 * t->count, sizeof(float));
    t->grad = t->data + t->count;
    t->goals = t->grad + t->count;
    for (int i = 0; i < 5; i++) {
        dtrain_param *p = &t->table[i];
        p->name = names[i];
        p->dtype = DTRAIN_F32;
        p->unit = i < 2 ? i : i == 4 ? 0 : i + 1;
        p->stacked = i == 1;
        p->shape[0] = i == 4 ? FROZEN : i == 1 ? 2 : sizes[i];
        p->shape[1] = i == 1 ? sizes[1] / 2 : 0;
        p->data = i == 4 ? t->frozen : t->data + at;
        p->grad = i == 4 ? NULL : t->grad + at;
        p->frozen = i == 4;
        at += i == 4 ? 0 : sizes[i];
    }
    t->sizes[0] = sizes[0], t->sizes[1] = t->sizes[2] = sizes[1] / 2, t->sizes[3] = sizes[2], t->sizes[4] = sizes[3];
    for (int u = 1; u < UNITS; u++)
        t->starts[u] = t->starts[u - 1] + t->sizes[u - 1];
}

static void toy_end(toy *t)
{
    free(t->data);
}

/* Where member m of a seed wants element i to be. */
static float goal(uint64_t seed, int member, size_t i)
{
    return dtrain_random_normal(seed + 100 + (uint64_t)member, i);
}

/* An inner step of SGD on half the squared distance to the member's goal. */
static void toy_step(toy *t, uint64_t seed, int member, float lr)
{
    for (size_t i = 0; i < t->count && !(t->known && t->seed == seed && t->member == member); i++)
        t->goals[i] = goal(seed, member, i);
    t->known = 1;
    t->seed = seed;
    t->member = member;
    for (size_t i = 0; i < t->count; i++)
        t->grad[i] = t->data[i] - t->goals[i];
    CHECK_EQ(dtrain_device_sgd(NULL, t->data, t->grad, NULL, t->count, NULL, lr, NULL), DTRAIN_OK);
}

#endif
