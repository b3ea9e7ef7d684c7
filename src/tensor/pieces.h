/* ---- >>pieces ----
 * State as lists of pieces: what a checkpoint saves, and where it goes when it is loaded. Every object that has state
 * gives a list of it, and a program lists arrays of its own:
 *
 *     dtrain_pieces lists[3] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};
 *     lists[2].pieces = own;  lists[2].count = 2;
 *     DTRAIN_CHECK(dtrain_pieces_each(lists, 3, ranks, rank, put, file));            to a file format of your own
 *
 * Others are dtrain_ddp_pieces(ddp), dtrain_params_pieces(table, count, optimizer), dtrain_schedule_pieces(&schedule)
 * and dtrain_compressed_pieces(compressed).
 *
 * A list names its object and holds no state itself. It is asked again for every save and load, so that it is made
 * once, as soon as the object is there, and used until the object is destroyed. */
#ifndef DTRAIN__PIECES_H
#define DTRAIN__PIECES_H
#include "../base/base.h"
#include "tensor.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one rank holds of one tensor: a range of a box of it. Zero what does not apply.
 *
 * A program that splits tensors its own way lists its pieces; together those of all ranks must tile each tensor. A
 * column of a matrix {R, C} is boxed, with box_begin {0, c} and box_size {R, 1}, begin 0 and count R. */
typedef struct dtrain_piece {
    const char *name;              /* of the tensor, UTF-8 */
    const char *suffix;            /* follows the name: "@adam.m"; NULL: nothing does */
    dtrain_dtype dtype;            /* of a byte or more */
    size_t shape[DTRAIN_MAX_DIMS]; /* of the tensor in full */
    int ndim;                      /* 0: a scalar */
    int boxed;                     /* 1: the box is box_begin and box_size; 0: it is the whole tensor */
    size_t box_begin[DTRAIN_MAX_DIMS], box_size[DTRAIN_MAX_DIMS];
    size_t begin, count;   /* elements of the box, counted row by row, that this piece has; count may be 0 */
    int copies;            /* ranks that hold the very same piece; 0: 1 */
    int copy;              /* which of them this is: 0 to copies - 1 */
    void *data;            /* count elements, packed */
    int unsaved;           /* 1: other pieces, of other ranks, have these elements too, and are saved; this one is only
                              loaded: for what several ranks have alike, but cut otherwise */
    dtrain_device *device; /* whose memory data is; NULL: the CPU's. What is saved is the same, and either is loaded
                              into the other: a save or load passes it on in chunks of at most 4 MiB, through memory
                              pinned for as long as the call lasts */
    int per_step;          /* 1: a vector of one element a step, as of losses: rank 0 has as many as the checkpoint has
                              steps, other ranks none. ndim is 1, shape[0] says for how many rank 0 has room */
} dtrain_piece;

typedef struct dtrain__lister dtrain__lister;
typedef struct dtrain_pieces dtrain_pieces;

/* A list: an object's, made by dtrain_fsdp_pieces and its like, or with the first two fields alone an array of yours.
 * It owns nothing; copy it freely. */
struct dtrain_pieces {
    const dtrain_piece *pieces;
    size_t count;
    const char *name; /* begins every name of the list; NULL: nothing does. Give lists one, as "rank-3/", that hold
                         different things under the same names: models that ranks train by themselves */
    int copies;       /* of dtrain_params_pieces: ranks that hold the very same; 0: all of the checkpoint */
    int copy;         /* which of them this is: 0 to copies - 1 */
    /* set by the object's function */
    void *object;
    const void *table;
    dtrain_status (*list)(const dtrain_pieces *list, dtrain__lister *lister);
    dtrain_status (*loaded)(const dtrain_pieces *list, const dtrain__lister *lister); /* NULL: nothing is to be done */
};

/* Calls visit for each piece of some lists, as a checkpoint would see them on `rank` of `ranks`: for a file format of
 * your own, or to copy state in memory. The piece and its name are gone when visit returns; its data stays.
 *
 *   errors   DTRAIN_ERR_INVALID  an object is NULL; those of dtrain_params_pieces
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_pieces_each(const dtrain_pieces *lists, size_t count, int ranks, int rank,
                                                 void (*visit)(void *user, const dtrain_piece *piece), void *user);

#ifdef __cplusplus
}
#endif

#endif
