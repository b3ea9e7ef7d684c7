/* --save of train_gpt and train_gpt_cuda: checkpoints of the model, its optimizer and the losses so far. Any number of
 * ranks can go on from them. If compression, an aggregator or local rounds keep state too, as many ranks must go on.
 * Include dtrain.h, gpt.h, gpt_aggregate.h and gpt_flags.h first. */
#ifndef GPT_SAVE_H
#define GPT_SAVE_H

#include <stdio.h>
#include <string.h>

typedef struct gpt_saver {
    dtrain_checkpoint *ckpt; /* NULL: nothing is saved */
    dtrain_comm *world;
    dtrain_checkpoint_state state;
    dtrain_pieces lists[20]; /* first the program's own, where its model is split further */
    dtrain_piece losses;
    char own[24]; /* begins the names of a model that each rank trains by itself */
} gpt_saver;

/* Lists all state that the same bits depend on and makes the checkpointer. With --resume it loads the newest checkpoint
 * and sets *step. Set what is the program's in saver, the rest to zero. Collective: every rank of world. */
static inline dtrain_status gpt_saver_open(gpt_saver *saver, const gpt_flags *flags, double *losses, gpt *m,
                                           dtrain_comm *world, long *step)
{
    dtrain_checkpoint_desc desc = {flags->save, 2, 0, 0, 0, 0, NULL}; /* the last two stay */
    dtrain_pieces *next = saver->lists + saver->state.list_count;
    int alone = m->local != NULL || m->aggregate != NULL, rank = dtrain_comm_rank(world);
    dtrain_status status = DTRAIN_OK;
    if (flags->save == NULL)
        return DTRAIN_OK;
    if (next == saver->lists)
        *next++ = dtrain_fsdp_pieces(m->fsdp);
    if (m->local != NULL)
        *next++ = dtrain_local_sgd_pieces(m->local);
    if (m->aggregate != NULL && (status = gpt_aggregate_start(m->aggregate, m->fsdp)) == DTRAIN_OK)
        *next++ = dtrain_aggregator_pieces(&m->aggregate->aggregator);
    saver->world = world;
    snprintf(saver->own, sizeof saver->own, "rank-%d/", rank);
    saver->lists[0].name = alone ? saver->own : NULL;
    saver->losses.name = "losses";
    saver->losses.dtype = DTRAIN_F64;
    saver->losses.ndim = saver->losses.per_step = 1;
    saver->losses.shape[0] = (size_t)flags->steps;
    saver->losses.data = losses;
    next->pieces = &saver->losses;
    next->count = 1;
    saver->state.lists = saver->lists;
    saver->state.list_count = (size_t)(next + 1 - saver->lists);
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_create(&saver->ckpt, world, &desc);
    if (status == DTRAIN_OK && flags->resume)
        status = dtrain_checkpoint_load(saver->ckpt, &saver->state, NULL, NULL);
    if (status == DTRAIN_OK && flags->resume && rank == 0 && saver->state.seed != (uint64_t)flags->seed)
        fprintf(stderr, REPORT_PROGRAM ": the checkpoint is of --seed %llu: other examples follow\n",
                (unsigned long long)saver->state.seed);
    *step = (long)saver->state.step;
    return status;
}

/* After `done` steps: writes every so many, while training goes on, and at the end. */
static inline dtrain_status gpt_saver_step(gpt_saver *saver, const gpt_flags *flags, gpt *m, long done, long end)
{
    if (saver->ckpt == NULL || (done % flags->every != 0 && done != end))
        return DTRAIN_OK;
    saver->state.step = (uint64_t)done;
    saver->state.seed = (uint64_t)flags->seed;
    dtrain_status status = dtrain_checkpoint_wait(saver->ckpt); /* the one before */
    if (status == DTRAIN_OK && m->local != NULL)
        status = dtrain_local_sgd_sync(m->local);
    if (status == DTRAIN_OK && m->local != NULL) /* nobody lists what it keeps before all have made its rounds */
        status = dtrain_barrier(saver->world);
    if (status == DTRAIN_OK && m->local != NULL) /* nobody opens a round before all have saved */
        return dtrain_checkpoint_save(saver->ckpt, &saver->state);
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_save_async(saver->ckpt, &saver->state);
    return status == DTRAIN_OK && done == end ? dtrain_checkpoint_wait(saver->ckpt) : status;
}

#endif
