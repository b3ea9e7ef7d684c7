/* ---- >>checkpoint ----
 * The state of a training run on disk, whole or not at all, for any number of ranks to go on from.
 *
 *     dtrain_checkpoint_desc desc = {};  desc.directory = "run";  desc.keep_last = 3;
 *     DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));
 *     dtrain_pieces lists[2] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};      see >>pieces
 *     dtrain_checkpoint_state state = {};  state.lists = lists;  state.list_count = 2;
 *     if (resume) { DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL)); step = state.step; }
 *     ...
 *     state.step = step;
 *     DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));                           or dtrain_checkpoint_save_async
 *
 *     const char *note = dtrain_checkpoint_value(ckpt, "note", NULL);               of the one that was loaded
 *     DTRAIN_CHECK(dtrain_checkpoint_verify("run"));                                every rule and hash of the newest
 *     DTRAIN_CHECK(dtrain_checkpoint_export("run", "run.safetensors", 0));          its weights, whole, as one file
 *
 * A checkpoint is a directory: run/step-50/ has one safetensors file a rank, with the parts that this rank writes, a
 * file of hashes beside each, and index.json, which names every tensor's full shape and says which file has which range
 * of it. run/latest holds the name of the newest. What several ranks have alike is written once, its parts dealt to
 * them. Files carry the number of their save, so that two saves of one step never meet; the index makes a save visible,
 * at once, when all ranks have brought theirs to the disk: killed at any moment, the last checkpoint is whole and
 * found.
 *
 * One job at a time saves into a directory. From its first save until dtrain_checkpoint_destroy, the process of rank 0
 * holds a lock there, of the file .lock. With local, each rank holds one of its own directory. A job that gets the lock
 * removes at once what killed saves have left. A save of another job is an error that names the holder. Loading and
 * dtrain_checkpoint_verify need no lock. A lock ends with its process, however that ends. A process that is only
 * stopped, and lost to the others, still holds it: kill it before the survivors save there. The lock does not tell
 * checkpointers of one process apart. Where the file system has no locks, nobody is refused, and what killed saves have
 * left goes when it has not changed for 2 x timeout_ms. On NFS the server keeps the lock for all hosts. That of a host
 * that has failed is free when the server gives up on it (NFSv4, often after 90 s) or when the host is back (NFSv3). A
 * mount with nolock or local_lock locks out jobs of the same host alone: let no two hosts save there.
 *
 * Loading reads what a rank needs, wherever it lies: from any number of ranks, strategy or split onto any other. Every
 * 64 KiB of data, every header and the index carry a hash (XXH64), which finds what disks and networks do to bytes; it
 * is no signature.
 *
 * Tensors are named as parameters are; optimizer state is NAME@adam.m and NAME@adam.v, or NAME@momentum. No other name
 * may end so. With local set, ranks share no file system: see dtrain_checkpoint_desc. */
#ifndef DTRAIN__CHECKPOINT_H
#define DTRAIN__CHECKPOINT_H
#include "../format/safetensors.h"
#include "../comm/comm.h"
#include "../tensor/pieces.h"
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is saved, and where it goes when it is loaded: any number of lists. A name stands for one tensor over all of
 * them and all ranks, of which each may have parts or nothing. Lists that many ranks share come in the same order on
 * each. What lists say beside their pieces (settings of the optimizer, its number of steps, a loss scale, a sampler) is
 * kept once: where several lists or ranks say it, they agree. See dtrain_checkpoint_value. */
typedef struct dtrain_checkpoint_state {
    uint64_t step;              /* the program's count; load sets it */
    const dtrain_pieces *lists; /* of FSDPs between two of their steps, and whatever else has state */
    size_t list_count;
    uint64_t seed, random_index;           /* of the program's random stream; load sets them */
    const dtrain_safetensors_pair *values; /* texts of the program's own, rank 0's, each key once; load: see
                                              dtrain_checkpoint_value */
    size_t value_count;
} dtrain_checkpoint_state;

typedef struct dtrain_checkpoint_desc {
    const char *directory;       /* made where it is not there */
    int keep_last;               /* checkpoints that stay: the newest and those before it; 0: all. Later ones, of a run
                                    that was turned back, stay until they are saved again. local: 0 is 2, 1 is 2 */
    int local;                   /* 1: each rank keeps its own on a disk of its own, in directory/rank-NNNNN; copies are
                                    kept by all that hold them. To load, the ranks find the newest step that is whole
                                    among them, and hand each other what they lack. A rank removes a checkpoint only
                                    when it knows that all ranks have a newer one. Killed at any moment, the newest step
                                    that all ranks have, or the one before it, stays on all of them. A rank's disk holds
                                    at most keep_last + 2, with the one that it writes. A job that has loaded nothing
                                    removes none before its second save */
    int no_verify;               /* 1: loading trusts the disk, and checks no hash but the index's */
    int no_sync;                 /* 1: leaves it to the system when files reach the disk; a power failure may then cost
                                    the newest checkpoint, never a kill */
    int64_t timeout_ms;          /* that ranks wait for the slowest to write its part; 0: 300,000 */
    dtrain_allocator *allocator; /* NULL: the C library; must outlive the object, and serve
                                    the thread that writes as well */
} dtrain_checkpoint_desc;

typedef struct dtrain_checkpoint dtrain_checkpoint;

/* Makes a checkpointer, and finds out whether the ranks share the directory's file system. Where rank 0 may not write
 * there, it can still load.
 *
 *   comm     must outlive it; NULL: a program that is alone
 *   desc     read by the call; the same on every rank but for directory, which may have another path on each host
 *   errors   the same on every rank:
 *            DTRAIN_ERR_INVALID   no directory, or a bad field
 *            DTRAIN_ERR_IO        the directory cannot be made or opened; or ranks do not share it: the text lists them
 *            DTRAIN_ERR_MISMATCH  descs differ
 *            DTRAIN_ERR_MEMORY; those of dtrain_all_gather
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms of comm */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_create(dtrain_checkpoint **ckpt, dtrain_comm *comm,
                                                       const dtrain_checkpoint_desc *desc);

/* Frees it, and lets other jobs save; NULL is legal. Waits for a save under way: for its own part; rank 0 until it is
 * visible or has failed.
 *
 * one thread per object */
DTRAIN_API void dtrain_checkpoint_destroy(dtrain_checkpoint *ckpt);

/* Saves, and returns when the checkpoint is visible and on the disk. A checkpoint of the same step is replaced.
 *
 *   errors   the same on every rank; what was there before is untouched, and the next call may succeed:
 *            DTRAIN_ERR_INVALID   a bad list; a bad or doubled piece or value; pieces do not tile their tensor; an
 *                                 asynchronous save is under way
 *            DTRAIN_ERR_MISMATCH  steps differ, or shapes or dtypes of one tensor, or settings
 *            DTRAIN_ERR_IO        a file could not be written; the text has the rank and the file. Or another job saves
 *                                 into the directory: the text has its process and host. Or a device failed
 *            DTRAIN_ERR_TIMEOUT   the text lists the ranks whose part did not come
 *            DTRAIN_ERR_MEMORY; those of dtrain_all_gather
 *            that of the last asynchronous save, where it has failed and no wait has told; this one was not begun
 *
 * Under DTRAIN_PROGRESS_POLL, files that take longer than heartbeat_ms to write need dtrain_checkpoint_save_async.
 *
 * collective: every rank of comm, same order; blocks while files are written, and up to timeout_ms for other ranks;
 * with local, up to timeout_ms of comm */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_save(dtrain_checkpoint *ckpt, const dtrain_checkpoint_state *state);

/* Copies what this rank writes to a buffer that stays for later saves, and returns; a thread writes it. The ranks tell
 * each other through files that they are done: nothing is sent.
 *
 * With local, the calls of all ranks first agree, by one small message each, on how the save before this one went. No
 * rank begins a save while another still writes the last one.
 *
 *   errors   on this rank alone, with local on every rank: bad pieces; no memory; the one before is under way (see
 *            dtrain_checkpoint_wait) or has failed and no wait has told. Then no rank's save becomes visible. Others
 *            from dtrain_checkpoint_wait
 *            with local also DTRAIN_ERR_MISMATCH, steps differ; those of dtrain_all_gather
 *
 * every rank of comm, same order as the other saves; never waits for a disk, only for the copies of a device, and so
 * for what its queue has before them. It waits for no rank; with local, up to timeout_ms of comm for the calls of all
 */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_save_async(dtrain_checkpoint *ckpt,
                                                           const dtrain_checkpoint_state *state);

/* Waits until the last asynchronous save is visible, and returns how it went, also where it could not begin; again when
 * called again, until the next save. DTRAIN_OK where there was none. With local, this rank's part alone.
 *
 * one thread per object; blocks up to timeout_ms beyond the writing */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_wait(dtrain_checkpoint *ckpt);

typedef struct dtrain_checkpoint_load_desc {
    const char *path; /* a safetensors file or Hugging Face model (see dtrain_safetensors_model_open), which every rank
                         can read: weights alone; state, step and random numbers stay as they are. NULL: a checkpoint */
    int exact;        /* 1: the checkpoint of `step`; 0: the newest */
    uint64_t step;
    int lenient;   /* 1: loads what fits, and reports the rest; 0: anything that is missing, extra or of another
                      shape is an error, and nothing is loaded */
    int no_verify; /* 1: as in dtrain_checkpoint_desc */
} dtrain_checkpoint_load_desc;

typedef struct dtrain_checkpoint_report {
    uint64_t step;
    int world_size;      /* of the ranks that saved it; 0: a file or model */
    size_t loaded;       /* tensors of which this rank got what it asked for */
    size_t missing;      /* tensors that this rank asked for and are not there */
    size_t extra;        /* that are there, and no rank asked for. Optimizer state is none where no rank has a place
                            for any */
    size_t reshaped;     /* of another shape, or a dtype that does not convert */
    char text[1024];     /* lists them; empty: none */
    uint64_t bytes;      /* that this rank needed, as stored */
    uint64_t bytes_read; /* that it read of files for them: index, headers and hashes included */
} dtrain_checkpoint_report;

/* Loads a checkpoint into what the lists name, converting floats where dtypes differ; then sets the counters of their
 * objects and publishes the weights of FSDPs. Each rank reads what it needs. Hashes are checked unless no_verify says
 * otherwise. An asynchronous save of this checkpointer is waited for first.
 *
 *   state    as of a save; step, seed and random_index are set
 *   desc     NULL: the newest checkpoint, strictly
 *   report   out; may be NULL. Filled also on DTRAIN_ERR_MISMATCH
 *   errors   the same on every rank; after one but DTRAIN_ERR_MISMATCH what was to be loaded is undefined:
 *            DTRAIN_ERR_INVALID   a bad list or piece, or one without room for so many steps, and nothing is loaded; or
 *                                 a piece's memory is not of its device
 *            DTRAIN_ERR_IO        there is no checkpoint, or it cannot be read. Or a device failed
 *            DTRAIN_ERR_MISMATCH  one text lists what is missing, extra, and of another shape (of the first rank that
 *                                 has any: ranks may ask for different tensors), and of a sampler or
 *                                 schedule what is another than it was
 *            DTRAIN_ERR_CORRUPT   a hash or a rule is broken; the text names the file and where. Or step-N holds the
 *                                 save of another step, as after a copy; with local such a part is passed over
 *            DTRAIN_ERR_UNSUPPORTED  the index is of another version; a FIFO, a directory or a device is in the place
 *                                 of a file
 *            DTRAIN_ERR_MEMORY; those of dtrain_all_gather and dtrain_fsdp_publish
 *
 * collective: every rank of comm, same order; blocks while files are read, and up to timeout_ms of comm for other ranks
 */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_load(dtrain_checkpoint *ckpt, dtrain_checkpoint_state *state,
                                                     const dtrain_checkpoint_load_desc *desc,
                                                     dtrain_checkpoint_report *report);

/* Returns the value of a key, saved with the checkpoint that was loaded last; NULL for none. It ends with a zero byte.
 * Keys are those of state.values, and of what lists have said: "optimizer.kind", "optimizer.step", "loss_scale", ...
 *
 *   length   out: its bytes; may be NULL
 *
 * one thread per object; until the next load */
DTRAIN_API const char *dtrain_checkpoint_value(const dtrain_checkpoint *ckpt, const char *key, size_t *length);

/* Checks a checkpoint from end to end: that its index is whole, its pieces tile their tensors, its files keep the rules
 * of safetensors, and that every hash is right.
 *
 *   path     of a checkpoint's directory, "run/step-50", which must hold the save of that step; or under any name of
 *            another form; or "run", for the newest in it
 *   errors   DTRAIN_ERR_CORRUPT  the text names the file and the place; DTRAIN_ERR_IO, DTRAIN_ERR_UNSUPPORTED,
 *            DTRAIN_ERR_MEMORY, as dtrain_checkpoint_load
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_verify(const char *path);

/* Writes a checkpoint as one safetensors file, tensors whole, for others to read.
 *
 *   path             as dtrain_checkpoint_verify
 *   file             to be written
 *   with_optimizer   1: optimizer state too
 *   errors           as dtrain_checkpoint_verify and dtrain_safetensors_save
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_export(const char *path, const char *file, int with_optimizer);

#ifdef __cplusplus
}
#endif

#endif
