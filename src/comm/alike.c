/* ---- >>alike ----
 * A collective create, load or save ends well on all ranks or on none. Ranks tell each other whether they can continue,
 * and compare what they were given. If all is well, that takes one small all-reduce. Otherwise they exchange more,
 * until each can say who failed and why, or who differs in what. They compare lines of text: whatever is compared has a
 * name for the error. */
#ifndef DTRAIN__ALIKE
#define DTRAIN__ALIKE
#include "collectives.c"
#include "../base/json_writer.c"
#include "../base/sha256.c"
#include "../base/xxh64.c"

#define DTRAIN__ALIKE_WORDS 9 /* the first rank that cannot continue and why, a digest, and its complement */
#define DTRAIN__ALIKE_MOST 4
#define DTRAIN__ALIKE_PIECE 64
#define DTRAIN__ALIKE_VALUES 3 /* most values that an error text quotes */

/* One thing that must be the same on every rank: what it is, and its value. Earlier lines say how many lines there are.
 */
typedef struct dtrain__alike_line {
    char what[160], value[192];
} dtrain__alike_line;

typedef struct dtrain__alike {
    const char *call; /* the user's */
    const void *given;
    int (*line)(const void *given, size_t index, dtrain__alike_line *line); /* 0: there are no more */
    const char *advice;
    int told;                          /* 1: every rank gets the error of the first rank that has one */
    uint64_t most[DTRAIN__ALIKE_MOST]; /* in: this rank's; out: the largest of all ranks, unless unheard */
    int unheard;                       /* out: the exchange broke off; other ranks may have a verdict */
} dtrain__alike;

/* ---- lines ---- */

static DTRAIN__NOINLINE int dtrain__alike_text(dtrain__alike_line *line, const char *what, const char *value)
{
    snprintf(line->what, sizeof line->what, "%s", what);
    snprintf(line->value, sizeof line->value, "%s", value);
    return 1;
}

/* Writes the shortest text that reads back as the value; narrow: as a float32. */
static int dtrain__alike_number(dtrain__alike_line *line, const char *what, double value, int narrow)
{
    int digits = 5, same = 0;
    snprintf(line->what, sizeof line->what, "%s", what);
    while (!same && ++digits <= 17) {
        snprintf(line->value, sizeof line->value, "%.*g", digits, value);
        double read = strtod(line->value, NULL);
        same = narrow ? (float)read == (float)value : read == value;
    }
    dtrain__json_full_stop(line->value);
    return 1;
}

/* Writes a name; a long one becomes its beginning and a hash. */
static int dtrain__alike_name(dtrain__alike_line *line, const char *what, const char *name)
{
    snprintf(line->what, sizeof line->what, "%s", what);
    snprintf(line->value, sizeof line->value, "\"%.100s\"", name);
    if (strlen(name) > 100)
        snprintf(line->value, sizeof line->value, "\"%.60s...\" (%zu bytes, hash %016llx)", name, strlen(name),
                 (unsigned long long)dtrain__xxh64_of(name, strlen(name), 0));
    return 1;
}

/* How a field of a desc is compared. */
enum {
    DTRAIN__ALIKE_OWN, /* it is not compared: it is each rank's own, affects no other rank, or is compared elsewhere */
    DTRAIN__ALIKE_NUMBER,
    DTRAIN__ALIKE_FLOAT,
    DTRAIN__ALIKE_FLAG,  /* 0 or not */
    DTRAIN__ALIKE_NAME,  /* a text */
    DTRAIN__ALIKE_GIVEN, /* an address: NULL or not */
};

/* A field of a desc. A test proves that a desc's table has every field. */
typedef struct dtrain__alike_field {
    const char *name;
    size_t offset, bytes;
    int kind;
    const char *(*constant)(int value); /* the names of an enum, NULL for other values; NULL: no enum */
} dtrain__alike_field;

#define DTRAIN__ALIKE_CONSTANT(desc, member, constant) \
    { \
#member, offsetof(desc, member), sizeof(((desc *)0)->member), DTRAIN__ALIKE_NUMBER, constant \
    }
#define DTRAIN__ALIKE_FIELD(desc, member, kind) \
    { \
#member, offsetof(desc, member), sizeof(((desc *)0)->member), DTRAIN__ALIKE_##kind, NULL \
    }

static const char *dtrain__alike_dtype(int value)
{
    return dtrain_dtype_bits((dtrain_dtype)value) > 0 ? dtrain_dtype_name((dtrain_dtype)value) : NULL;
}

/* Writes a field of a desc, which may be NULL. prefix goes before the field's name. */
static int dtrain__alike_field_line(dtrain__alike_line *line, const char *prefix, const dtrain__alike_field *field,
                                    const void *desc)
{
    const void *at = desc != NULL ? (const unsigned char *)desc + field->offset : NULL, *address = NULL;
    int narrow = field->bytes == sizeof(int); /* else it has 64 bits */
    char what[sizeof line->what];
    snprintf(what, sizeof what, "%s%s", prefix, field->name);
    if (desc == NULL || field->kind == DTRAIN__ALIKE_OWN)
        return dtrain__alike_text(line, what, desc == NULL ? "none" : "own");
    if (field->kind == DTRAIN__ALIKE_FLOAT)
        return dtrain__alike_number(line, what, narrow ? (double)*(const float *)at : *(const double *)at, narrow);
    if (field->kind == DTRAIN__ALIKE_NAME || field->kind == DTRAIN__ALIKE_GIVEN) {
        memcpy(&address, at, sizeof address);
        return field->kind == DTRAIN__ALIKE_NAME ? dtrain__alike_name(line, what, (const char *)address)
                                                 : dtrain__alike_text(line, what, address != NULL ? "given" : "NULL");
    }
    int64_t value = narrow ? *(const int *)at : *(const int64_t *)at;
    const char *constant = field->constant != NULL ? field->constant((int)value) : NULL;
    if (constant != NULL)
        return dtrain__alike_text(line, what, constant);
    dtrain__alike_text(line, what, "");
    snprintf(line->value, sizeof line->value, "%lld",
             (long long)(field->kind == DTRAIN__ALIKE_FLAG ? value != 0 : value));
    return 1;
}

/* ---- ranks in a text ---- */

/* Ranks in rising order, as "2, 4 to 7". */
typedef struct dtrain__alike_ranks {
    char text[72];
    int count, first, last; /* first to last: the run that is not yet in the text */
} dtrain__alike_ranks;

static void dtrain__alike_flush(dtrain__alike_ranks *ranks)
{
    char run[32];
    size_t used = strlen(ranks->text), last = sizeof ranks->text - sizeof ", ...";
    snprintf(run, sizeof run,
             ranks->first == ranks->last       ? "%d"
             : ranks->last - ranks->first == 1 ? "%d, %d"
                                               : "%d to %d",
             ranks->first, ranks->last);
    if (ranks->count == 0 || (used >= 3 && strcmp(ranks->text + used - 3, "...") == 0))
        return;
    snprintf(ranks->text + used, sizeof ranks->text - used, "%s%s", used > 0 ? ", " : "",
             used + 2 + strlen(run) < last ? run : "...");
}

static void dtrain__alike_add(dtrain__alike_ranks *ranks, int rank)
{
    if (ranks->count > 0 && rank != ranks->last + 1)
        dtrain__alike_flush(ranks);
    if (ranks->count == 0 || rank != ranks->last + 1)
        ranks->first = rank;
    ranks->last = rank;
    ranks->count++;
}

/* ---- meeting ---- */

/* Finds the first index at which a rank's hash is not that of rank 0 of `alike`; SIZE_MAX: there is none. All ranks of
 * `all` find the same. hash returns 0 beyond the last index. That index is the same on all ranks of `all`, or no ranks
 * are compared. */
static dtrain_status dtrain__alike_first(dtrain_comm *alike, dtrain_comm *all, uint64_t (*hash)(const void *, size_t),
                                         const void *given, size_t *found)
{
    uint64_t piece[DTRAIN__ALIKE_PIECE], first = UINT64_MAX;
    int ended = 0;
    dtrain_status status = DTRAIN_OK;
    for (size_t at = 0; status == DTRAIN_OK && !ended && first == UINT64_MAX; at += DTRAIN__ALIKE_PIECE) {
        for (size_t i = 0; i < DTRAIN__ALIKE_PIECE && dtrain_comm_rank(alike) == 0; i++)
            piece[i] = hash(given, at + i);
        status = dtrain_broadcast(alike, piece, DTRAIN__ALIKE_PIECE, DTRAIN_U64, 0);
        for (size_t i = 0; status == DTRAIN_OK && i < DTRAIN__ALIKE_PIECE && first == UINT64_MAX; i++)
            if (hash(given, at + i) != piece[i])
                first = at + i;
        ended = piece[DTRAIN__ALIKE_PIECE - 1] == 0;
        if (status == DTRAIN_OK)
            status = dtrain_all_reduce(all, &first, &first, 1, DTRAIN_U64, DTRAIN_MIN);
    }
    *found = first < SIZE_MAX ? (size_t)first : SIZE_MAX;
    return status;
}

static uint64_t dtrain__alike_hash(const void *given, size_t index)
{
    const dtrain__alike *alike = (const dtrain__alike *)given;
    dtrain__alike_line line;
    if (!alike->line(alike->given, index, &line))
        return 0;
    uint64_t hash = dtrain__xxh64_of(line.value, strlen(line.value), 0);
    return hash != 0 ? hash : 1;
}

static void dtrain__alike_digest(const dtrain__alike *alike, uint64_t words[4])
{
    dtrain__sha256 sha;
    dtrain__alike_line line;
    unsigned char digest[32];
    dtrain__sha256_start(&sha);
    for (size_t i = 0; alike->line(alike->given, i, &line); i++)
        dtrain__sha256_add(&sha, line.value, strlen(line.value) + 1);
    dtrain__sha256_finish(&sha, digest);
    for (int i = 0; i < 4; i++)
        words[i] = dtrain__load_le64(digest + 8 * i);
}

typedef struct dtrain__alike_values {
    char value[192];
    dtrain__alike_ranks ranks;
} dtrain__alike_values;

/* Collects every rank's value of one line and makes the error that says who gave which. */
static dtrain_status dtrain__alike_quote(dtrain_comm *comm, const dtrain__alike *alike, size_t index)
{
    dtrain__alike_values values[DTRAIN__ALIKE_VALUES];
    dtrain__alike_line mine, line;
    char text[DTRAIN__ERROR_BYTES];
    size_t used = 0;
    dtrain_status status = DTRAIN_OK;
    memset(values, 0, sizeof values);
    memset(&mine, 0, sizeof mine);
    if (!alike->line(alike->given, index, &mine))
        dtrain__alike_text(&mine, "the parameter table or desc:", "another");
    for (int rank = 0; status == DTRAIN_OK && rank < dtrain_comm_size(comm); rank++) {
        line = mine;
        status = dtrain_broadcast(comm, line.value, sizeof line.value, DTRAIN_U8, rank);
        line.value[sizeof line.value - 1] = 0;
        int k = 0;
        while (k < DTRAIN__ALIKE_VALUES && values[k].ranks.count > 0 && strcmp(values[k].value, line.value) != 0)
            k++;
        if (k == DTRAIN__ALIKE_VALUES)
            continue;
        memcpy(values[k].value, line.value, sizeof line.value);
        dtrain__alike_add(&values[k].ranks, rank);
    }
    if (status != DTRAIN_OK)
        return status;
    for (int k = 0; k < DTRAIN__ALIKE_VALUES && values[k].ranks.count > 0 && used < sizeof text; k++) {
        dtrain__alike_flush(&values[k].ranks);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%.100s on rank%s %s",
                                 k == 0   ? ""
                                 : k == 1 ? ", but "
                                          : ", and ",
                                 values[k].value, values[k].ranks.count > 1 ? "s" : "", values[k].ranks.text);
    }
    return dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH, "%s: %s %.400s; %s", alike->call, mine.what, text,
                        alike->advice);
}

/* Gets from the first rank that cannot continue the reason why. told: that rank's status. */
static dtrain_status dtrain__alike_refused(dtrain_comm *comm, dtrain__alike *alike, int rank, uint64_t told,
                                           const dtrain__error *cause)
{
    char why[DTRAIN__ERROR_BYTES];
    size_t prefix = strlen(alike->call);
    int own =
        !alike->told && strncmp(cause->text, alike->call, prefix) == 0 && strncmp(cause->text + prefix, ": ", 2) == 0;
    memset(why, 0, sizeof why);
    snprintf(why, sizeof why, "%s", cause->text + (own ? prefix + 2 : 0));
    dtrain_status status = dtrain_broadcast(comm, why, sizeof why, DTRAIN_U8, rank);
    alike->unheard = status != DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    why[sizeof why - 1] = 0;
    if (alike->told)
        return dtrain__fail(&comm->error, dtrain__status_told(told), "rank %d: %.600s", rank, why);
    return dtrain__fail(&comm->error, DTRAIN_ERR_ABORTED,
                        "%s: rank %d of %d could not make its part: %.*s; nothing was made on any rank", alike->call,
                        rank, dtrain_comm_size(comm), DTRAIN__STATUS_CAUSE_BYTES - 1, why);
}

/* Ends well on all ranks, or on none.
 *
 * A rank that has lost another counts before all others that cannot continue: its loss is why they cannot.
 *
 *   mine     whether this rank can continue; if not, its lines are not read
 *   errors   mine; DTRAIN_ERR_ABORTED: another rank cannot continue, with its text (alike->told: that rank's error);
 *            DTRAIN_ERR_MISMATCH; DTRAIN_ERR_INVALID: the group is fusing; those of dtrain_all_reduce */
static dtrain_status dtrain__alike_meet(dtrain_comm *comm, dtrain__alike *alike, dtrain_status mine)
{
    dtrain__error cause = dtrain__thread_error;
    uint64_t said[DTRAIN__ALIKE_WORDS + DTRAIN__ALIKE_MOST], ranks = (uint64_t)dtrain_comm_size(comm);
    size_t index, words = alike->told ? DTRAIN__ALIKE_WORDS + DTRAIN__ALIKE_MOST : DTRAIN__ALIKE_WORDS;
    int differ = 0;
    alike->unheard = ranks > 1;
    if (dtrain__group_whole(comm, alike->call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (ranks == 1)
        return mine;
    memset(said, 0, sizeof said);
    if (mine == DTRAIN_OK)
        dtrain__alike_digest(alike, said + 1);
    else
        said[0] = (uint64_t)(mine == DTRAIN_ERR_PEER_LOST) << 40 | (ranks - (uint64_t)comm->rank) << 8 | (uint64_t)mine;
    for (int i = 1; i <= 4; i++)
        said[4 + i] = ~said[i];
    memcpy(said + DTRAIN__ALIKE_WORDS, alike->most, sizeof alike->most);
    dtrain_status status = dtrain_all_reduce(comm, said, said, words, DTRAIN_U64, DTRAIN_MAX);
    uint64_t refuses = said[0] >> 8 & UINT32_MAX;
    for (int i = 1; i <= 4; i++)
        differ |= said[i] != ~said[4 + i];
    alike->unheard = status != DTRAIN_OK;
    if (alike->unheard)
        dtrain__fail(&comm->error, status, "%s: %.560s", alike->call, dtrain__thread_error.text);
    else
        memcpy(alike->most, said + DTRAIN__ALIKE_WORDS, sizeof alike->most);
    if (status == DTRAIN_OK && refuses > 0 && refuses <= ranks)
        status = dtrain__alike_refused(comm, alike, (int)(ranks - refuses), said[0] & 0xff, &cause);
    else if (status == DTRAIN_OK && differ) {
        status = dtrain__alike_first(comm, comm, dtrain__alike_hash, alike, &index);
        if (status == DTRAIN_OK)
            status = dtrain__alike_quote(comm, alike, index);
    }
    return mine != DTRAIN_OK && (!alike->told || alike->unheard) ? dtrain__report(&cause) : status;
}

static int dtrain__alike_nothing(const void *given, size_t index, dtrain__alike_line *line)
{
    (void)given, (void)index, (void)line;
    return 0;
}

/* As dtrain__alike_meet, with nothing to compare. */
static dtrain_status dtrain__alike_agree(dtrain_comm *comm, const char *call, int told, dtrain_status mine)
{
    dtrain__alike alike = {call, NULL, dtrain__alike_nothing, "", told, {0}, 0};
    return dtrain__alike_meet(comm, &alike, mine);
}

#endif
