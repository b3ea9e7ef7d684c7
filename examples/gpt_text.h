/* What train_gpt learns from: a text, whose last tenth is held out, the sequences of each micro-batch of it, and the
 * learning rate of each step. Include dtrain.h and gpt_flags.h first. */
#ifndef GPT_TEXT_H
#define GPT_TEXT_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPT_VALIDATION 32 /* held-out sequences */

/* Reads --text into memory of malloc's, and says how much of it is to learn. */
static inline int gpt_text_read(const gpt_flags *flags, unsigned char **text, size_t *bytes, size_t *train)
{
    FILE *file = fopen(flags->text, "rb");
    size_t room = 1 << 16, got;
    if (file == NULL)
        return report_complain("text", flags->text, strerror(errno));
    *text = (unsigned char *)malloc(room);
    while (*text != NULL && (got = fread(*text + *bytes, 1, room - *bytes, file)) > 0) {
        *bytes += got;
        if (*bytes == room) {
            unsigned char *larger = (unsigned char *)realloc(*text, room *= 2);
            if (larger == NULL)
                free(*text);
            *text = larger;
        }
    }
    int failed = ferror(file);
    fclose(file);
    if (*text == NULL || failed)
        return report_complain("text", flags->text, failed ? "cannot be read" : "does not fit into memory");
    *train = *bytes / 10 * 9;
    if (*bytes - *train < (size_t)flags->context + 2 || *train < (size_t)flags->context + 2)
        return report_complain("text", flags->text,
                               *bytes == 0 ? "is empty"
                                           : "is too short: a tenth of it must be longer than the context");
    return 0;
}

/* The sequences of micro-batch `micro` of `step`: a function of seed, step and micro alone. */
static inline void gpt_text_draw(const gpt_flags *flags, const unsigned char *text, size_t train, long step, long micro,
                                 unsigned char *tokens, unsigned char *targets)
{
    size_t T = (size_t)flags->context, B = (size_t)flags->batch;
    for (size_t b = 0; b < B; b++) {
        uint64_t index = ((uint64_t)step * (uint64_t)flags->micro + (uint64_t)micro) * B + b;
        uint64_t random = dtrain_random_u64((uint64_t)flags->seed ^ 0x7465787400000000u, index);
        const unsigned char *from = text + random % (train - T);
        memcpy(tokens + b * T, from, T);
        memcpy(targets + b * T, from + 1, T);
    }
}

/* Held-out sequence i of GPT_VALIDATION; room: how many bytes are held out, less the context. */
static inline const unsigned char *gpt_text_held_out(const unsigned char *held_out, size_t room, size_t i)
{
    return held_out + i * (room - 1) / (GPT_VALIDATION - 1);
}

static inline dtrain_schedule gpt_schedule(const gpt_flags *flags)
{
    dtrain_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = DTRAIN_SCHEDULE_COSINE;
    schedule.lr = (float)flags->lr;
    schedule.min_lr = schedule.lr / 10;
    schedule.total_steps = (uint64_t)flags->steps;
    schedule.warmup_steps = (uint64_t)flags->steps / 10;
    return schedule;
}

#endif
