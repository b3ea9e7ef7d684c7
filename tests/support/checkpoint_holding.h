/* For tests of checkpoints: state of which every element tells its step. Include dtrain.h first. */
#ifndef DTRAIN_TEST_CHECKPOINT_HOLDING_H
#define DTRAIN_TEST_CHECKPOINT_HOLDING_H

enum { MANY = 30000 };

/* One tensor, dealt to the ranks, and one that all have. */
typedef struct holding {
    float mine[MANY], all[500];
    dtrain_piece pieces[2];
    dtrain_pieces list;
    dtrain_checkpoint_state state;
} holding;

static void holding_begin(holding *h, int ranks, int rank)
{
    memset(h, 0, sizeof *h);
    h->pieces[0].name = "dealt";
    h->pieces[0].dtype = h->pieces[1].dtype = DTRAIN_F32;
    h->pieces[0].ndim = h->pieces[1].ndim = 1;
    h->pieces[0].shape[0] = MANY;
    h->pieces[0].count = cut_of(MANY, ranks, rank, &h->pieces[0].begin);
    h->pieces[0].data = h->mine;
    h->pieces[1].name = "all";
    h->pieces[1].shape[0] = h->pieces[1].count = 500;
    h->pieces[1].copies = ranks;
    h->pieces[1].copy = rank;
    h->pieces[1].data = h->all;
    h->list.pieces = h->pieces;
    h->list.count = 2;
    h->state.lists = &h->list;
    h->state.list_count = 1;
}

static float of_step(uint64_t step, size_t element)
{
    return (float)((step * 1013 + element * 7) % 65521);
}

static void holding_fill(holding *h, uint64_t step)
{
    h->state.step = step;
    h->state.random_index = step * 3;
    for (size_t i = 0; i < h->pieces[0].count; i++)
        h->mine[i] = of_step(step, h->pieces[0].begin + i);
    for (size_t i = 0; i < 500; i++)
        h->all[i] = of_step(step, MANY + i);
}

static int holding_is(const holding *h, uint64_t step)
{
    for (size_t i = 0; i < h->pieces[0].count; i++)
        if (h->mine[i] != of_step(step, h->pieces[0].begin + i))
            return 0;
    for (size_t i = 0; i < 500; i++)
        if (h->all[i] != of_step(step, MANY + i))
            return 0;
    return h->state.step == step && h->state.random_index == step * 3;
}

#endif
