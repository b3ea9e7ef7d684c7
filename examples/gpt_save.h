/* --save of train_gpt and train_gpt_cuda: the model, its optimizer and the losses so far, in checkpoints that any
 * number of ranks goes on from; and what compression, an aggregator or rounds keep besides, which as many ranks go on
 * from. Include dtrain.h, gpt.h, gpt_aggregate.h and gpt_flags.h first. */
#ifndef GPT_SAVE_H
#define GPT_SAVE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gpt_saver {
    dtrain_checkpoint *ckpt;       /* NULL: nothing is saved */
    dtrain_checkpoint_state state; /* fsdps and fsdp_count are the program's: of a model that is split further */
    /* What is saved beside the model: first the losses, which rank 0 has. */
    dtrain_piece *pieces;
    char (*names)[48];
    size_t count, room;
    int apart; /* each rank has weights or an FSDP of its own, and so a checkpoint: in rank-N of the directory */
    char directory[400];           /* of these */
    dtrain_safetensors_pair ranks; /* how many there are */
    char ranks_text[16];
} gpt_saver;

/* Adds something that each rank has of its own, on the CPU; returns whether there was memory. */
static inline int gpt_saver_add(gpt_saver *saver, dtrain_comm *world, const char *name, int number, void *data,
                                dtrain_dtype dtype, size_t count)
{
    if (saver->count == saver->room) {
        size_t room = 2 * saver->room + 16;
        dtrain_piece *pieces = (dtrain_piece *)realloc(saver->pieces, room * sizeof *pieces);
        saver->pieces = pieces != NULL ? pieces : saver->pieces;
        char(*names)[48] = pieces != NULL ? (char(*)[48])realloc(saver->names, room * sizeof *names) : NULL;
        if (names == NULL)
            return 0;
        saver->names = names;
        saver->room = room;
    }
    dtrain_piece *piece = &saver->pieces[saver->count];
    memset(piece, 0, sizeof *piece);
    snprintf(saver->names[saver->count++], sizeof *saver->names, "%.20s.%d", name, number);
    piece->dtype = dtype;
    piece->ndim = 2;
    piece->boxed = 1;
    piece->shape[0] = saver->apart ? 1 : (size_t)dtrain_comm_size(world);
    piece->box_begin[0] = saver->apart ? 0 : (size_t)dtrain_comm_rank(world);
    piece->box_size[0] = 1;
    piece->shape[1] = piece->box_size[1] = piece->count = count;
    piece->data = data;
    return 1;
}

/* Adds what a state of compression keeps: on a device the step and the velocity of what is not compressed are the
 * CPU's. */
static inline int gpt_saver_add_compressed(gpt_saver *saver, dtrain_comm *world, dtrain_compressed *compressed,
                                           dtrain_device *device, int number)
{
    const char *name;
    float *data;
    size_t count;
    int good = 1;
    for (int i = 0; good && dtrain_compressed_state(compressed, i, &name, &data, &count); i++) {
        good = gpt_saver_add(saver, world, name, number, data, DTRAIN_F32, count);
        if (good && strcmp(name, "step") != 0 && strcmp(name, "plain_velocity") != 0)
            saver->pieces[saver->count - 1].device = device;
    }
    return good;
}

/* Lists all that must go on as it was for the same bits. */
static inline int gpt_saver_collect(gpt_saver *saver, gpt *m, dtrain_comm *world)
{
    const gpt_aggregate *a = m->aggregate;
    dtrain_compressed *compressed;
    const char *name;
    void *data;
    dtrain_dtype dtype;
    size_t count = 0;
    int good = 1;
    for (int i = 0; good && (compressed = dtrain_fsdp_compression(m->fsdp, (size_t)i)) != NULL; i++)
        good = gpt_saver_add_compressed(saver, world, compressed, m->table[0].device, i);
    for (int i = 0;
         good && a != NULL && (compressed = dtrain_aggregator_compression(&a->aggregator, (size_t)i)) != NULL; i++)
        good = gpt_saver_add_compressed(saver, world, compressed, NULL, i);
    float *residual = a != NULL ? dtrain_server_residual(a->server, &count) : NULL;
    if (good && residual != NULL)
        good = gpt_saver_add(saver, world, "residual", 0, residual, DTRAIN_F32, count);
    for (int i = 0; good && dtrain_local_sgd_state(m->local, i, &name, &data, &dtype, &count); i++)
        good = gpt_saver_add(saver, world, name, i, data, dtype, count);
    return good;
}

/* There are as many losses as steps. */
static inline void gpt_saver_resize(gpt_saver *saver, dtrain_comm *world, size_t steps)
{
    int root = dtrain_comm_rank(world) == 0;
    saver->pieces[0].shape[0] = steps;
    saver->pieces[0].count = root ? steps : 0;
    saver->state.pieces = saver->pieces + (saver->apart && !root); /* a rank's own checkpoint has none without losses */
    saver->state.piece_count = saver->count - (saver->apart && !root);
}

/* Finds the newest step that every rank has. Collective. mine: how this rank fared. */
static inline dtrain_status gpt_saver_agree(dtrain_comm *world, dtrain_status mine, uint64_t *step)
{
    uint64_t after = mine == DTRAIN_OK ? *step + 1 : 0;
    dtrain_status status = dtrain_all_reduce(world, &after, &after, 1, DTRAIN_U64, DTRAIN_MIN);
    *step = after - 1;
    if (status == DTRAIN_OK && mine == DTRAIN_OK && after == 0) {
        fprintf(stderr, REPORT_PROGRAM ": another rank has no checkpoint to go on from\n");
        return DTRAIN_ERR_INVALID;
    }
    return mine != DTRAIN_OK ? mine : status;
}

/* What was loaded must be of this run. */
static inline dtrain_status gpt_saver_check(const gpt_saver *saver, const gpt_flags *flags)
{
    const char *ranks = dtrain_checkpoint_value(saver->ckpt, "ranks", NULL);
    if (ranks != NULL && strcmp(ranks, saver->ranks_text) != 0) {
        fprintf(stderr, REPORT_PROGRAM ": the checkpoint is of %s ranks, and goes on with as many\n", ranks);
        return DTRAIN_ERR_INVALID;
    }
    if (saver->state.seed != (uint64_t)flags->seed)
        fprintf(stderr, REPORT_PROGRAM ": the checkpoint is of --seed %llu: other examples follow\n",
                (unsigned long long)saver->state.seed);
    return DTRAIN_OK;
}

/* Loads the newest checkpoint, in two turns: the first, which asks for the model alone and so loads nothing where
 * there is more, says of which step it is, and so how many losses are in it. */
static inline dtrain_status gpt_saver_resume(gpt_saver *saver, const gpt_flags *flags, dtrain_comm *world)
{
    dtrain_checkpoint_load_desc exact;
    dtrain_checkpoint_report report;
    memset(&exact, 0, sizeof exact);
    saver->state.pieces = NULL;
    saver->state.piece_count = 0;
    dtrain_status status = dtrain_checkpoint_load(saver->ckpt, &saver->state, NULL, &report);
    exact.exact = 1;
    exact.step = report.step;
    status = gpt_saver_agree(world, status == DTRAIN_ERR_MISMATCH ? DTRAIN_OK : status, &exact.step);
    if (status != DTRAIN_OK)
        return status;
    if (exact.step > (uint64_t)flags->steps) {
        fprintf(stderr, REPORT_PROGRAM ": the checkpoint is of step %llu: --steps %ld is fewer\n",
                (unsigned long long)exact.step, flags->steps);
        return DTRAIN_ERR_INVALID;
    }
    gpt_saver_resize(saver, world, (size_t)exact.step);
    status = dtrain_checkpoint_load(saver->ckpt, &saver->state, &exact, NULL);
    return status == DTRAIN_OK ? gpt_saver_check(saver, flags) : status;
}

/* Collective. Makes the checkpointer, and with --resume goes on from the newest checkpoint; *step: where. saver: zeroes
 * but what is the program's. */
static inline dtrain_status gpt_saver_open(gpt_saver *saver, const gpt_flags *flags, double *losses, gpt *m,
                                           dtrain_comm *world, long *step)
{
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    if (flags->save == NULL)
        return DTRAIN_OK;
    dtrain_status status = m->aggregate != NULL ? gpt_aggregate_start(m->aggregate, m->fsdp) : DTRAIN_OK;
    dtrain_comm *owners = m->local != NULL ? m->alone : m->aggregate != NULL ? m->aggregate->alone : world;
    saver->apart = owners != world;
    int length =
        snprintf(saver->directory, sizeof saver->directory, "%s/rank-%d", flags->save, dtrain_comm_rank(world));
    if (saver->apart && length >= (int)sizeof saver->directory) {
        fprintf(stderr, REPORT_PROGRAM ": --save %.100s...: its path is too long\n", flags->save);
        return DTRAIN_ERR_INVALID;
    }
    snprintf(saver->ranks_text, sizeof saver->ranks_text, "%d", dtrain_comm_size(world));
    saver->ranks.key = "ranks";
    saver->ranks.value = saver->ranks_text;
    desc.directory = saver->apart ? saver->directory : flags->save;
    desc.keep_last = 2;
    if (status == DTRAIN_OK && !gpt_saver_add(saver, world, "losses", 0, losses, DTRAIN_F64, 0))
        status = DTRAIN_ERR_MEMORY;
    if (status != DTRAIN_OK)
        return status;
    snprintf(saver->names[0], sizeof *saver->names, "losses");
    saver->pieces[0].ndim = 1;
    saver->pieces[0].boxed = 0;
    if (!gpt_saver_collect(saver, m, world))
        return DTRAIN_ERR_MEMORY;
    for (size_t i = 0; i < saver->count; i++)
        saver->pieces[i].name = saver->names[i];
    saver->state.fsdp = saver->state.fsdp_count == 0 ? m->fsdp : NULL;
    saver->state.values = &saver->ranks;
    saver->state.value_count = (size_t)saver->apart;
    status = dtrain_checkpoint_create(&saver->ckpt, owners, &desc);
    if (status == DTRAIN_OK && flags->resume)
        status = gpt_saver_resume(saver, flags, world);
    *step = (long)saver->state.step;
    return status;
}

/* After `done` steps: writes every so many, while training goes on, and at the end. */
static inline dtrain_status gpt_saver_step(gpt_saver *saver, const gpt_flags *flags, gpt *m, dtrain_comm *world,
                                           long done, long end)
{
    if (saver->ckpt == NULL || (done % flags->every != 0 && done != end))
        return DTRAIN_OK;
    saver->state.step = (uint64_t)done;
    saver->state.seed = (uint64_t)flags->seed;
    dtrain_status status = dtrain_checkpoint_wait(saver->ckpt); /* the one before */
    gpt_saver_resize(saver, world, (size_t)done);
    if (status == DTRAIN_OK && m->local != NULL)
        status = dtrain_local_sgd_sync(m->local);
    if (status == DTRAIN_OK && saver->apart) /* all have the one before, and no round is under way */
        status = dtrain_barrier(world);
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_save_async(saver->ckpt, &saver->state);
    if (status == DTRAIN_OK && m->local != NULL) /* nobody opens a round before all have copied */
        status = dtrain_barrier(world);
    return status == DTRAIN_OK && done == end ? dtrain_checkpoint_wait(saver->ckpt) : status;
}

static inline void gpt_saver_close(gpt_saver *saver)
{
    dtrain_checkpoint_destroy(saver->ckpt);
    free(saver->pieces);
    free(saver->names);
    memset(saver, 0, sizeof *saver);
}

#endif
