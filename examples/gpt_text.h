/* What train_gpt learns from: a text, whose last tenth is held out, the sequences of each micro-batch of it, and the
 * learning rate of each step. Include dtrain.h and gpt_flags.h first. */
#ifndef GPT_TEXT_H
#define GPT_TEXT_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPT_VALIDATION 32 /* held-out sequences */

/* Reads a file into memory of malloc's, with a zero byte after it. */
static inline int gpt_file_read(const char *what, const char *path, unsigned char **data, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    size_t room = 1 << 16, got;
    if (file == NULL)
        return report_complain(what, path, strerror(errno));
    *bytes = 0;
    *data = (unsigned char *)malloc(room);
    while (*data != NULL && (got = fread(*data + *bytes, 1, room - 1 - *bytes, file)) > 0) {
        *bytes += got;
        if (*bytes == room - 1) {
            unsigned char *larger = (unsigned char *)realloc(*data, room *= 2);
            if (larger == NULL)
                free(*data);
            *data = larger;
        }
    }
    int failed = ferror(file);
    fclose(file);
    if (*data == NULL || failed)
        return report_complain(what, path, failed ? "cannot be read" : "does not fit into memory");
    (*data)[*bytes] = 0;
    return 0;
}

/* Token i of a text. */
static inline int32_t gpt_text_token(const gpt_flags *flags, const unsigned char *text, size_t i)
{
    const unsigned char *at = text + i * (size_t)flags->token_bytes;
    if (flags->token_bytes == 1)
        return at[0];
    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 |
                     (flags->token_bytes == 4 ? (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24 : 0));
}

/* Writes tokens from, from + 1, ... */
static inline void gpt_text_copy(const gpt_flags *flags, const unsigned char *text, size_t from, size_t count,
                                 int32_t *tokens)
{
    for (size_t i = 0; i < count; i++)
        tokens[i] = gpt_text_token(flags, text, from + i);
}

/* Reads --tokens, or --text, whose bytes are tokens, and says how much of it is to learn. Every token is one of the
 * vocabulary's. */
static inline int gpt_text_read(const gpt_flags *flags, unsigned char **text, size_t *tokens, size_t *train)
{
    const char *what = flags->tokens != NULL ? "tokens" : "text",
               *path = flags->tokens != NULL ? flags->tokens : flags->text;
    size_t bytes = 0, each = (size_t)flags->token_bytes;
    if (gpt_file_read(what, path, text, &bytes) != 0)
        return 1;
    if (bytes % each != 0)
        return report_complain(what, path, "ends inside a token: its size is no multiple of --token-bits / 8");
    *tokens = bytes / each;
    *train = *tokens / 10 * 9;
    if (*tokens - *train < (size_t)flags->context + 2 || *train < (size_t)flags->context + 2)
        return report_complain(what, path,
                               bytes == 0 ? "is empty" : "is too short: a tenth of it must be longer than the context");
    for (size_t i = 0; i < *tokens; i++) {
        int32_t token = gpt_text_token(flags, *text, i);
        if (token >= 0 && token < flags->vocab)
            continue;
        fprintf(stderr, REPORT_PROGRAM ": %s %s: token %zu is %lld, and the vocabulary has %ld\n", what, path, i,
                (long long)(uint32_t)token, flags->vocab);
        return 1;
    }
    return 0;
}

/* The sequences of micro-batch `micro` of `step`: a function of seed, step and micro alone. */
static inline void gpt_text_draw(const gpt_flags *flags, const unsigned char *text, size_t train, long step, long micro,
                                 int32_t *tokens, int32_t *targets)
{
    size_t T = (size_t)flags->context, B = (size_t)flags->batch;
    for (size_t b = 0; b < B; b++) {
        uint64_t index = ((uint64_t)step * (uint64_t)flags->micro + (uint64_t)micro) * B + b;
        uint64_t random = dtrain_random_u64((uint64_t)flags->seed ^ 0x7465787400000000u, index);
        size_t from = (size_t)(random % (train - T));
        gpt_text_copy(flags, text, from, T, tokens + b * T);
        gpt_text_copy(flags, text, from + 1, T, targets + b * T);
    }
}

/* Where held-out sequence i of GPT_VALIDATION begins; room: how many tokens are held out, less the context. */
static inline size_t gpt_text_held_out(size_t room, size_t i)
{
    return i * (room - 1) / (GPT_VALIDATION - 1);
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
