/* ---- >>lister ----
 * Objects call these functions to list their state: pieces and settings. A setting is a text with a key, GROUP.KEY or
 * KEY. The settings of a group follow each other. */
#ifndef DTRAIN__LISTER
#define DTRAIN__LISTER
#include "pieces.h"
#include "../base/status.c"
#include "../base/json_writer.c"
DTRAIN__SMALL_BEGIN

/* Returns the suffix of a name of optimizer state: 0 and 1 for AdamW, 2 for SGD, then NULL. No other names end so. */
static const char *dtrain__pieces_suffix(int which)
{
    static const char *const suffixes[] = {"@adam.m", "@adam.v", "@momentum", NULL};
    return suffixes[which];
}

static size_t dtrain__pieces_product(const size_t *sizes, int first, int end)
{
    size_t product = 1;
    for (int d = first; d < end; d++)
        product *= sizes[d];
    return product;
}

/* A walk over lists: who asks, and the current list. */
struct dtrain__lister {
    int ranks, rank;
    const dtrain_pieces *list;
    size_t number; /* of the list, for error texts */
    dtrain_status status;
    void *user, *owner;
    void (*visit)(void *user, const dtrain_piece *piece);
    /* gets settings; NULL: nobody wants them. fixed: a load refuses another value. */
    dtrain_status (*setting)(void *owner, const char *key, const char *value, int fixed);
    /* answers dtrain__pieces_ask from a loaded checkpoint; NULL: none was loaded */
    dtrain_status (*ask)(void *owner, const char *key, uint64_t most, uint64_t *whole, double *real);
    /* whether a load has found the tensor whose elements go to data; NULL: nothing is loaded */
    int (*got)(void *owner, const void *data);
    int failed; /* the load has ended in an error while it was reading */
};

/* Lists a piece, with the list's name before its own. */
static void dtrain__pieces_put(dtrain__lister *lister, const dtrain_piece *piece)
{
    char name[512];
    dtrain_piece named = *piece;
    if (lister->list->name != NULL && piece->name != NULL) {
        int length = snprintf(name, sizeof name, "%s%s", lister->list->name, piece->name);
        if (length >= (int)sizeof name)
            lister->status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                          "list %zu: the name \"%.200s\" has %d bytes, expected fewer than %zu: "
                                          "shorten it or the list's name",
                                          lister->number, name, length, sizeof name);
        named.name = name;
    }
    lister->visit(lister->user, &named);
}

/* The place of a row, for state that each rank has of its own. */
typedef struct dtrain__pieces_row {
    int rank, ranks;
    int shards, shard; /* shards > 1: shards differ in size, and each has rows of its own */
    int number;        /* the end of the name */
} dtrain__pieces_row;

/* Lists a row of NAME.NUMBER. data: the row; NULL: none. If fewer ranks save than have rows, each saves its own row. */
static void dtrain__pieces_put_one(dtrain__lister *lister, const dtrain__pieces_row *row, const char *name,
                                   dtrain_dtype dtype, const void *data, size_t count, dtrain_device *device,
                                   int optional)
{
    char shard[24] = "", numbered[96];
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    if (row->shards > 1)
        snprintf(shard, sizeof shard, "shard-%d/", row->shard);
    snprintf(numbered, sizeof numbered, "%s%.40s.%d", shard, name, row->number);
    piece.name = numbered;
    piece.dtype = dtype;
    piece.ndim = 2;
    piece.boxed = 1;
    piece.shape[0] = (size_t)(row->ranks <= lister->ranks ? row->ranks : lister->ranks);
    piece.box_begin[0] = (size_t)(row->ranks <= lister->ranks ? row->rank : lister->rank);
    piece.box_size[0] = 1;
    piece.shape[1] = piece.box_size[1] = piece.count = count;
    piece.data = (void *)(uintptr_t)data;
    piece.device = device;
    piece.optional = optional;
    if (data != NULL)
        dtrain__pieces_put(lister, &piece);
}

static void dtrain__pieces_put_row(dtrain__lister *lister, const dtrain__pieces_row *row, const char *name,
                                   dtrain_dtype dtype, const void *data, size_t count, dtrain_device *device)
{
    dtrain__pieces_put_one(lister, row, name, dtype, data, count, device, 0);
}

/* The same on the CPU, where older checkpoints have no such row. */
static void dtrain__pieces_put_optional(dtrain__lister *lister, const dtrain__pieces_row *row, const char *name,
                                        dtrain_dtype dtype, const void *data, size_t count)
{
    dtrain__pieces_put_one(lister, row, name, dtype, data, count, NULL, 1);
}

static void dtrain__pieces_tell(dtrain__lister *lister, const char *key, const char *value, int fixed)
{
    dtrain_status status = lister->setting != NULL ? lister->setting(lister->owner, key, value, fixed) : DTRAIN_OK;
    lister->status = lister->status == DTRAIN_OK ? status : lister->status;
}

static void dtrain__pieces_tell_u64(dtrain__lister *lister, const char *key, uint64_t value, int fixed)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    dtrain__pieces_tell(lister, key, text, fixed);
}

static void dtrain__pieces_tell_f64(dtrain__lister *lister, const char *key, double value, int fixed)
{
    char text[64];
    dtrain__json_writer json;
    dtrain__json_write_start(&json, text, sizeof text - 1);
    dtrain__json_write_double(&json, value);
    text[json.bytes] = '\0';
    if (json.broken)
        lister->status =
            dtrain__fail(NULL, DTRAIN_ERR_INVALID, "list %zu: the setting %s is %g, expected a finite number",
                         lister->number, key, value);
    else
        dtrain__pieces_tell(lister, key, text, fixed);
}

/* Reads a setting of the loaded checkpoint, if it has it: a whole number up to `most`, or any number if real is set. */
static dtrain_status dtrain__pieces_ask(const dtrain__lister *lister, const char *key, uint64_t most, uint64_t *whole,
                                        double *real)
{
    return lister->ask != NULL ? lister->ask(lister->owner, key, most, whole, real) : DTRAIN_OK;
}

/* After a load: whether the data of a piece was loaded, all of it. */
static int dtrain__pieces_got(const dtrain__lister *lister, const void *data)
{
    return !lister->failed && lister->got != NULL && lister->got(lister->owner, data);
}

static dtrain_pieces dtrain__pieces_make(const void *object,
                                         dtrain_status (*list)(const dtrain_pieces *, dtrain__lister *),
                                         dtrain_status (*loaded)(const dtrain_pieces *, const dtrain__lister *))
{
    dtrain_pieces made = {NULL, 0, NULL, 0, 0, (void *)(uintptr_t)object, NULL, list, loaded, NULL};
    return made;
}

/* Asks each list in turn. */
static dtrain_status dtrain__pieces_walk(const dtrain_pieces *lists, size_t count, dtrain__lister *lister)
{
    if (lists == NULL && count > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "pieces: lists is NULL, expected %zu lists", count);
    for (size_t i = 0; i < count; i++) {
        const dtrain_pieces *list = &lists[i];
        int given =
            list->list != NULL ? list->object != NULL || list->table != NULL : list->count == 0 || list->pieces != NULL;
        if (!given)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "list %zu of %zu is of an object that is NULL: create it first, or leave the list out",
                                i, count);
        lister->list = list;
        lister->number = i;
        lister->status = DTRAIN_OK;
        dtrain_status status = list->list != NULL ? list->list(list, lister) : DTRAIN_OK;
        for (size_t k = 0; list->list == NULL && k < list->count; k++)
            dtrain__pieces_put(lister, &list->pieces[k]);
        if (status != DTRAIN_OK || lister->status != DTRAIN_OK)
            return status != DTRAIN_OK ? status : lister->status;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_pieces_each(const dtrain_pieces *lists, size_t count, int ranks, int rank,
                                            void (*visit)(void *user, const dtrain_piece *piece), void *user)
{
    dtrain__lister lister = {ranks, rank, NULL, 0, DTRAIN_OK, user, NULL, visit, NULL, NULL, NULL, 0};
    if (visit == NULL || rank < 0 || rank >= ranks)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "pieces_each: rank is %d of %d ranks, visit is %s; expected a rank from 0 to ranks - 1 and a function",
            rank, ranks, visit == NULL ? "NULL" : "given");
    return dtrain__pieces_walk(lists, count, &lister);
}

#endif
