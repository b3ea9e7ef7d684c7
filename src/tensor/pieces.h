/* ---- >>pieces ----
 * A piece is the part of a tensor that one rank holds. Every object that has state gives a list of its pieces, which a
 * checkpoint saves and loads. A program lists arrays of its own:
 *
 *     dtrain_pieces lists[3] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};
 *     lists[2].pieces = own;  lists[2].count = 2;
 *     DTRAIN_CHECK(dtrain_pieces_each(lists, 3, ranks, rank, put, file));            to a file format of your own
 *
 * Other lists are dtrain_ddp_pieces(ddp), dtrain_params_pieces(table, count, optimizer),
 * dtrain_schedule_pieces(&schedule) and dtrain_compressed_pieces(compressed).
 *
 * A list names its object and holds no state itself. Make it once, as soon as the object exists, and use it until the
 * object is destroyed. Every save and load asks the object again. */
#ifndef DTRAIN__PIECES_H
#define DTRAIN__PIECES_H
#include "../base/base.h"
#include "tensor.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one rank holds of one tensor: a range of the elements of a box in it. Zero the fields that do not apply.
 *
 * A program that splits tensors its own way lists its own pieces. The pieces of all ranks together must tile each
 * tensor. Example: column c of a matrix {R, C} has boxed 1, box_begin {0, c}, box_size {R, 1}, begin 0 and count R. */
typedef struct dtrain_piece {
    const char *name;              /* the tensor's, UTF-8 */
    const char *suffix;            /* follows the name, such as "@adam.m"; NULL: none */
    dtrain_dtype dtype;            /* one byte wide or more */
    size_t shape[DTRAIN_MAX_DIMS]; /* of the whole tensor */
    int ndim;                      /* 0: a scalar */
    int boxed;                     /* 1: the box is box_begin and box_size; 0: it is the whole tensor */
    size_t box_begin[DTRAIN_MAX_DIMS], box_size[DTRAIN_MAX_DIMS];
    size_t begin, count;   /* the elements of this piece, counted row by row in the box; count may be 0 */
    int copies;            /* how many ranks hold this same piece; 0: 1 */
    int copy;              /* this rank's number among them, 0 to copies - 1 */
    void *data;            /* count elements, packed */
    int unsaved;           /* 1: the piece is loaded, but not saved: pieces of other ranks hold its elements too. Use
                              it where several ranks hold the same elements, cut differently */
    dtrain_device *device; /* that holds data; NULL: the CPU. Files do not depend on it. A save or load moves the data
                              in chunks of at most 4 MiB, through pinned memory that lives as long as the call */
    int optional; /* 1: a load leaves the data as it is if the checkpoint lacks the tensor; 0: that is an error */
    int per_step; /* 1: a vector with one element per step, such as losses. Rank 0 holds one for each step of
                     the checkpoint, other ranks none. ndim is 1; shape[0] is the room on rank 0 */
} dtrain_piece;

typedef struct dtrain__lister dtrain__lister;
typedef struct dtrain_pieces dtrain_pieces;

/* A list of pieces. It owns nothing; copy it freely.
 *
 * Functions such as dtrain_fsdp_pieces make the list of an object. For an array of your own, set the first two fields
 * and zero the rest. */
struct dtrain_pieces {
    const dtrain_piece *pieces;
    size_t count;
    const char *name; /* put before every name of the list; NULL: nothing. Lists need one, such as "rank-3/", if they
                         hold different things under the same names: models that ranks train separately */
    int copies;       /* for dtrain_params_pieces: how many ranks hold the same state; 0: all of the checkpoint */
    int copy;         /* this rank's number among them, 0 to copies - 1 */
    /* functions such as dtrain_fsdp_pieces set the rest */
    void *object;
    const void *table;
    dtrain_status (*list)(const dtrain_pieces *list, dtrain__lister *lister);
    dtrain_status (*loaded)(const dtrain_pieces *list, const dtrain__lister *lister); /* runs after a load; or NULL */
    dtrain_status (*loading)(const dtrain_pieces *list, int turn); /* runs before a load writes, in two turns: all ranks
                                                                      agree after each; or NULL. With it, loaded also
                                                                      runs after an error in reading */
};

/* Calls visit for each piece of the lists, as a checkpoint sees them on `rank` of `ranks`.
 *
 * Use it for a file format of your own, or to copy state in memory. It never blocks.
 *
 *   lists   count lists
 *   rank    0 <= rank < ranks
 *   visit   may use the piece and its name until it returns, and the data until the object is used or destroyed
 *   errors  DTRAIN_ERR_INVALID  a list's object is NULL; a bad rank; no visit; a bad table of dtrain_params_pieces
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_pieces_each(const dtrain_pieces *lists, size_t count, int ranks, int rank,
                                                 void (*visit)(void *user, const dtrain_piece *piece), void *user);

#ifdef __cplusplus
}
#endif

#endif
