/* train_gpt --save: the model, its optimizer and the losses so far, in checkpoints that any number of ranks goes on
 * from. Include dtrain.h, gpt.h and gpt_flags.h first. */
#ifndef GPT_SAVE_H
#define GPT_SAVE_H

#include <stdio.h>
#include <string.h>

/* What is saved beside the model: the losses so far, which rank 0 has. */
typedef struct gpt_saver {
    dtrain_checkpoint *ckpt; /* NULL: nothing is saved */
    dtrain_checkpoint_state state;
    dtrain_piece losses;
} gpt_saver;

/* There are as many losses as steps. */
static inline void gpt_saver_resize(gpt_saver *saver, dtrain_comm *world, size_t steps)
{
    saver->losses.shape[0] = steps;
    saver->losses.count = dtrain_comm_rank(world) == 0 ? steps : 0;
}

/* Loads the newest checkpoint, in two turns: the first, which asks for no losses and so loads nothing, says how many
 * there are. */
static inline dtrain_status gpt_saver_resume(gpt_saver *saver, const gpt_flags *flags, dtrain_comm *world)
{
    dtrain_checkpoint_report report;
    saver->state.piece_count = 0;
    dtrain_status status = dtrain_checkpoint_load(saver->ckpt, &saver->state, NULL, &report);
    saver->state.piece_count = 1;
    if (status != DTRAIN_ERR_MISMATCH)
        return status == DTRAIN_OK ? DTRAIN_ERR_CORRUPT : status;
    if (report.step > (uint64_t)flags->steps) {
        fprintf(stderr, "train_gpt: the checkpoint is of step %llu: --steps %ld is fewer\n",
                (unsigned long long)report.step, flags->steps);
        return DTRAIN_ERR_INVALID;
    }
    gpt_saver_resize(saver, world, (size_t)report.step);
    status = dtrain_checkpoint_load(saver->ckpt, &saver->state, NULL, NULL);
    if (status == DTRAIN_OK && saver->state.seed != (uint64_t)flags->seed)
        fprintf(stderr, "train_gpt: the checkpoint is of --seed %llu: other examples follow\n",
                (unsigned long long)saver->state.seed);
    return status;
}

/* Collective. Makes the checkpointer, and with --resume goes on from the newest checkpoint; *step: where. */
static inline dtrain_status gpt_saver_open(gpt_saver *saver, const gpt_flags *flags, double *losses, gpt *m,
                                           dtrain_comm *world, long *step)
{
    dtrain_checkpoint_desc desc;
    memset(saver, 0, sizeof *saver);
    memset(&desc, 0, sizeof desc);
    if (flags->save == NULL)
        return DTRAIN_OK;
    desc.directory = flags->save;
    desc.keep_last = 2;
    saver->losses.name = "losses";
    saver->losses.dtype = DTRAIN_F64;
    saver->losses.ndim = 1;
    saver->losses.data = losses;
    saver->state.fsdp = m->fsdp;
    saver->state.pieces = &saver->losses;
    saver->state.piece_count = 1;
    dtrain_status status = dtrain_checkpoint_create(&saver->ckpt, world, &desc);
    if (status == DTRAIN_OK && flags->resume)
        status = gpt_saver_resume(saver, flags, world);
    *step = (long)saver->state.step;
    return status;
}

/* After `done` steps: writes every so many, while training goes on, and at the end. */
static inline dtrain_status gpt_saver_step(gpt_saver *saver, const gpt_flags *flags, dtrain_comm *world, long done,
                                           long end)
{
    if (saver->ckpt == NULL || (done % flags->every != 0 && done != end))
        return DTRAIN_OK;
    saver->state.step = (uint64_t)done;
    saver->state.seed = (uint64_t)flags->seed;
    dtrain_status status = dtrain_checkpoint_wait(saver->ckpt); /* the one before */
    gpt_saver_resize(saver, world, (size_t)done);
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_save_async(saver->ckpt, &saver->state);
    return status == DTRAIN_OK && done == end ? dtrain_checkpoint_wait(saver->ckpt) : status;
}

#endif
