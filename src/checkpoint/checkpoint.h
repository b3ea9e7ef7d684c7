/* ---- >>checkpoint ----
 * Saves the state of a training run to disk, whole or not at all. Any number of ranks can go on from it.
 *
 *     dtrain_checkpoint_desc desc = {0};  desc.directory = "run";  desc.keep_last = 3;
 *     DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));
 *     dtrain_pieces lists[2] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};      see >>pieces
 *     dtrain_checkpoint_state state = {0};  state.lists = lists;  state.list_count = 2;
 *     if (resume) { DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL)); step = state.step; }
 *     ...
 *     state.step = step;
 *     DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));                           or dtrain_checkpoint_save_async
 *
 *     const char *note = dtrain_checkpoint_value(ckpt, "note", NULL);               of the checkpoint loaded last
 *     DTRAIN_CHECK(dtrain_checkpoint_verify("run"));                                checks the newest from end to end
 *     DTRAIN_CHECK(dtrain_checkpoint_export("run", "run.safetensors", 0));          its weights, as one file
 *
 * Every object that has state lists it: FSDP, the sampler, the aggregator, local SGD. Add your own arrays with a list
 * of your own. dtrain_checkpoint_save_async copies the state and returns; a thread writes the copy.
 *
 * A checkpoint is a directory of safetensors files:
 *
 *     run/latest                   the name of the newest checkpoint
 *     run/.lock                    the lock of the job that saves
 *     run/step-50/index.json       every tensor's full shape, and which file holds which range of it
 *     run/step-50/rank-*           two files for each rank that saved: its part of the tensors, and the hashes of it
 *
 * The ranks share the work: data that several ranks hold alike is written once. The index is written last and makes
 * the checkpoint visible. If a job is killed at any moment, the last visible checkpoint is whole and is found again.
 * File names carry the number of the save, so files of two saves of one step never mix.
 *
 * RESUMING. Each rank reads the parts that it needs, and no others, from wherever they lie. The number of ranks, the
 * sharding strategy and the split of layers may differ from the run that saved. With as many ranks, the run ends with
 * the same bits as one that never stopped. Residuals of compression and rounds of local SGD go on as they
 * were, on as many ranks. A load gives up a step that is open. What is saved after a load of an older step is newer
 * than the steps that were given up. build/train_gpt shows all of this: --save run --every 50, then --resume.
 *
 * HASHES. Every 64 KiB of data, every header and the index carry a hash (XXH64), which finds damage by disks and
 * networks. A hash is no signature: it does not stop somebody who changes files on purpose.
 *
 * ONE JOB SAVES. From its first save to dtrain_checkpoint_destroy, the process of rank 0 holds a lock on the file
 * .lock. A second job that saves into the directory gets an error that names the holder. Loading and
 * dtrain_checkpoint_verify need no lock. A job that gets the lock first removes what killed saves have left.
 *
 *     process ends or is killed    its lock is free
 *     process is stopped           it keeps the lock: kill it before other ranks save there
 *     one process, several jobs    the lock does not keep checkpointers of one process apart
 *     no locks on the file system  no job is refused; leftovers go once unchanged for 2 x timeout_ms
 *     NFS                          the server keeps the lock for all hosts
 *     NFS, the host has failed     NFSv4 frees the lock after a while, often 90 s; NFSv3 when the host is back
 *     NFS, nolock or local_lock    the lock works within one host alone: let no two hosts save there
 *
 * WITHOUT A SHARED FILE SYSTEM, set local. Each rank then saves to a disk of its own, in directory/rank-NNNNN, and
 * holds a lock there. To load, the ranks find the newest step that is whole among them, and send each other what they
 * lack. A rank removes a checkpoint only when it knows that all ranks have a newer one. So if ranks are killed at any
 * moment, every rank still has the newest step that all have completed, or the one before it.
 *
 * NAMES. Tensors are named as parameters are. Optimizer state is NAME@adam.m and NAME@adam.v, or NAME@momentum; other
 * names must not end so. */
#ifndef DTRAIN__CHECKPOINT_H
#define DTRAIN__CHECKPOINT_H
#include "../format/safetensors.h"
#include "../comm/comm.h"
#include "../tensor/pieces.h"
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Says what is saved and, for a load, where it goes.
 *
 * A name stands for one tensor over all lists and ranks; each rank may hold parts of it or none. Give lists that ranks
 * share in the same order on each. Lists also tell settings: the optimizer's, its number of steps, a loss scale, a
 * sampler. A checkpoint keeps one value of each setting, so lists and ranks that tell it must agree. Read settings
 * with dtrain_checkpoint_value. */
typedef struct dtrain_checkpoint_state {
    uint64_t step;                         /* your count of steps; a load sets it */
    const dtrain_pieces *lists;            /* of all that has state; of an FSDP between two of its steps */
    size_t list_count;                     /* may be 0 */
    uint64_t seed, random_index;           /* of your random stream; a load sets them */
    const dtrain_safetensors_pair *values; /* texts of your own, each key once; those of rank 0 are saved. A load does
                                              not set them: see dtrain_checkpoint_value */
    size_t value_count;
} dtrain_checkpoint_state;

typedef struct dtrain_checkpoint_desc {
    const char *directory; /* is made if it does not exist */
    int keep_last;         /* how many checkpoints stay: the newest, and those before it; 0: all. With local, 0 and 1
                              mean 2. Steps of jobs before, and of a run that was turned back, are older than those
                              saved since. Higher ones stay until a save passes them */
    int local;             /* 1: each rank saves to a disk of its own; see above. Besides higher steps of jobs before, a
                              disk holds at most keep_last + 2 checkpoints, with the one being written. A job that has
                              loaded nothing removes none before its second save */
    int no_verify;         /* 1: a load checks no hash but the index's */
    int no_sync;           /* 1: does not wait until files are on the disk. A power failure may then cost the newest
                              checkpoint; a killed process costs none */
    int64_t timeout_ms;    /* how long ranks wait for the slowest to write its part; 0: 300,000 */
    dtrain_allocator *allocator; /* NULL: the C library; must outlive the object, and serve its writing thread too */
} dtrain_checkpoint_desc;

typedef struct dtrain_checkpoint dtrain_checkpoint;

/* Creates a checkpointer for a directory.
 *
 * Checks that all ranks see one file system there, unless local is set. If rank 0 may not write to the directory, the
 * checkpointer can load and not save.
 *
 *   ckpt     out: the checkpointer; NULL on an error
 *   comm     must outlive it; NULL: a program of one rank
 *   desc     read by the call. keep_last, local and no_sync are the same on every rank; directory may be another
 *            path on each host
 *   errors   the same on every rank:
 *            DTRAIN_ERR_INVALID   no directory, or a bad field
 *            DTRAIN_ERR_IO        the directory cannot be made or opened; or ranks do not share it: the text lists them
 *            DTRAIN_ERR_MISMATCH  descs differ
 *            DTRAIN_ERR_MEMORY    no memory
 *            and those of dtrain_all_gather
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms of comm */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_create(dtrain_checkpoint **ckpt, dtrain_comm *comm,
                                                       const dtrain_checkpoint_desc *desc);

/* Frees the checkpointer and its lock; NULL is legal.
 *
 * Waits for an asynchronous save under way: rank 0 until it is visible or has failed, other ranks for their own part.
 *
 * one thread per object */
DTRAIN_API void dtrain_checkpoint_destroy(dtrain_checkpoint *ckpt);

/* Saves a state; returns when the checkpoint is visible and on the disk.
 *
 * A checkpoint of the same step is replaced. On an error the older checkpoints are untouched, and the next save may
 * succeed. With DTRAIN_PROGRESS_POLL, use dtrain_checkpoint_save_async if writing takes longer than heartbeat_ms.
 *
 *   state    what to save; the same step on every rank
 *   errors   the same on every rank:
 *            DTRAIN_ERR_INVALID   a bad list, piece or value, or one given twice; pieces do not tile their tensor; an
 *                                 asynchronous save is under way
 *            DTRAIN_ERR_MISMATCH  ranks differ in the step, a tensor's shape or dtype, or a setting
 *            DTRAIN_ERR_IO        a file could not be written: the text has the rank and the file. Or another job holds
 *                                 the lock: the text has its process and host. Or a device failed
 *            DTRAIN_ERR_TIMEOUT   a rank's part did not come: the text lists the ranks
 *            DTRAIN_ERR_MEMORY    no memory
 *            and those of dtrain_all_gather. If the last asynchronous save failed and no dtrain_checkpoint_wait has
 *            returned its error, this call returns it and saves nothing
 *
 * collective: every rank of comm, same order; blocks while files are written, and for other ranks up to timeout_ms
 * beyond that of comm */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_save(dtrain_checkpoint *ckpt, const dtrain_checkpoint_state *state);

/* Copies this rank's part of a state and returns; a thread writes the copy.
 *
 * The buffer of the copy stays for later saves. The ranks tell each other through files that their parts are written. A
 * rank that fails tells the others by a small message. In a group that is polled only a file tells, if the disk takes
 * it. With local, the calls of all ranks first agree, by one small message each, on how the previous save ended. No rank
 * begins a save while another still writes the previous one.
 *
 *   state    as in dtrain_checkpoint_save; you may change the data after the call
 *   errors   on this rank alone, with local on every rank. This save then becomes visible on no rank. Other errors
 *            are dtrain_checkpoint_wait's
 *            DTRAIN_ERR_INVALID   a bad list, piece or value; or the previous save is under way: call
 *                                 dtrain_checkpoint_wait first
 *            DTRAIN_ERR_MISMATCH  with local: steps differ
 *            DTRAIN_ERR_MEMORY    no memory for the copy
 *            and the error of the previous save, if no wait has returned it; with local those of dtrain_all_gather
 *
 * every rank of comm, same order as the other saves; waits for copies from devices, and so for what their queues hold,
 * and never for a disk. Waits for no rank; with local, up to timeout_ms of comm for the calls of all */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_save_async(dtrain_checkpoint *ckpt,
                                                           const dtrain_checkpoint_state *state);

/* Waits until the last asynchronous save is visible, and returns its result.
 *
 * Repeated calls return the same result until the next save. A save that could not begin returns its error here too.
 * Without an asynchronous save it returns DTRAIN_OK. With local it waits for this rank's part alone.
 *
 *   errors   those of dtrain_checkpoint_save, on this rank alone
 *
 * one thread per object; blocks up to timeout_ms beyond the writing */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_wait(dtrain_checkpoint *ckpt);

typedef struct dtrain_checkpoint_load_desc {
    const char *path; /* a safetensors file or Hugging Face model that every rank can read (see
                         dtrain_safetensors_model_open): loads weights alone, and leaves optimizer state, step, seed and
                         random_index as they are. NULL: a checkpoint */
    int exact;        /* 1: loads the checkpoint of `step`; 0: the newest */
    uint64_t step;
    int lenient;   /* 1: loads what fits, and reports the rest. 0: a tensor that is missing, extra or of another shape
                      is an error, and nothing is loaded */
    int no_verify; /* 1: as in dtrain_checkpoint_desc */
} dtrain_checkpoint_load_desc;

typedef struct dtrain_checkpoint_report {
    uint64_t step;
    int world_size;      /* number of ranks that saved it; 0: a file or model */
    size_t loaded;       /* tensors that this rank asked for and got */
    size_t missing;      /* tensors that this rank asked for and the checkpoint lacks */
    size_t extra;        /* tensors that no rank asked for; optimizer state counts if a rank has a place for any */
    size_t reshaped;     /* tensors of another shape, or of a dtype that does not convert */
    char text[1024];     /* lists the missing, extra and reshaped ones; empty if there are none */
    uint64_t bytes;      /* that this rank needed, as stored */
    uint64_t bytes_read; /* that it read from files for them, with index, headers and hashes */
} dtrain_checkpoint_report;

/* Loads a checkpoint or a model into the memory that the lists name.
 *
 * Each rank reads what it needs. Floats are converted if dtypes differ. Then the counters of the lists' objects are set
 * and FSDPs publish their weights. Hashes are checked unless no_verify is set. The call first waits for an asynchronous
 * save of this checkpointer. An error in reading drops what compression has left unsent; one before leaves it.
 *
 *   state    as for a save; the call sets step, seed and random_index
 *   desc     NULL: the newest checkpoint, strictly
 *   report   out; may be NULL. Also filled on DTRAIN_ERR_MISMATCH
 *   errors   the same on every rank. Nothing is loaded on DTRAIN_ERR_MISMATCH; on others the memory is undefined:
 *            DTRAIN_ERR_INVALID   a bad list or piece, or a piece without room for so many steps: nothing is loaded.
 *                                 Or a piece's memory is not of its device
 *            DTRAIN_ERR_IO        there is no checkpoint, or it cannot be read; or a device failed
 *            DTRAIN_ERR_MISMATCH  tensors are missing, extra or of another shape, or a sampler or schedule differs. The
 *                                 text lists them for the first rank that has any; ranks may ask for different ones
 *            DTRAIN_ERR_CORRUPT   a hash or a rule is broken: the text names the file and the place. Or step-N holds
 *                                 the save of another step, as after a copy; with local such a part is skipped
 *            DTRAIN_ERR_UNSUPPORTED  the index has another version; or a FIFO, a directory or a device stands in the
 *                                 place of a file
 *            DTRAIN_ERR_MEMORY    no memory
 *            and those of dtrain_all_gather, dtrain_fsdp_publish and dtrain_local_sgd_publish
 *
 * collective: every rank of comm, same order; blocks while files are read, and up to timeout_ms of comm for other ranks
 */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_load(dtrain_checkpoint *ckpt, dtrain_checkpoint_state *state,
                                                     const dtrain_checkpoint_load_desc *desc,
                                                     dtrain_checkpoint_report *report);

/* Returns the value of a key of the checkpoint that was loaded last, or NULL.
 *
 * Keys are those of state.values, and of the settings of lists: "optimizer.kind", "optimizer.step", "loss_scale", ...
 *
 *   key      ends with a zero byte, as the returned text does
 *   length   out: bytes of the text; may be NULL
 *
 * one thread per object; the text is valid until the next load */
DTRAIN_API const char *dtrain_checkpoint_value(const dtrain_checkpoint *ckpt, const char *key, size_t *length);

/* Checks a checkpoint from end to end: every rule and every hash of its index and files.
 *
 *   path     a checkpoint's directory, "run/step-50", or "run" for the newest in it. A directory named step-N must hold
 *            the save of step N; a directory of another name may hold any
 *   errors   DTRAIN_ERR_CORRUPT  the text names the file and the place
 *            DTRAIN_ERR_IO, DTRAIN_ERR_UNSUPPORTED, DTRAIN_ERR_MEMORY  as dtrain_checkpoint_load
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_verify(const char *path);

/* Writes a checkpoint's tensors, whole, to one safetensors file.
 *
 *   path             as dtrain_checkpoint_verify
 *   file             path of the file to write
 *   with_optimizer   1: writes optimizer state too; 0: the other tensors alone
 *   errors           those of dtrain_checkpoint_verify and dtrain_safetensors_save
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_checkpoint_export(const char *path, const char *file, int with_optimizer);

#ifdef __cplusplus
}
#endif

#endif
