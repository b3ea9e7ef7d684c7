/* ---- >>save ----
 * Makes a checkpoint of the parts of all ranks. Each rank writes its files, and then a mark that they are on the disk.
 * When rank 0 has seen all marks of this save it writes the index, which makes the checkpoint visible. Then it replaces
 * latest, and then it removes what is old. Each name is synced in its directory before the next step.
 *
 * A rank that fails tells the others by messages: a disk that is full takes no file that could say so. A blocking save
 * ends in agreements of all ranks. In an asynchronous one, the store of the group has the failure.
 *
 * With local, each rank makes its own part visible and removes its own. The newest save that all ranks have must stay
 * on each of them. */
#ifndef DTRAIN__SAVE
#define DTRAIN__SAVE
#include "part.c"
#include "lock.c"
#include "../comm/alike.c"
#include "../base/worker.c"

#define DTRAIN__SAVE_INDEX "index.json"
#define DTRAIN__SAVE_BEFORE "index.before.json" /* local: the index that a later save of the step has replaced */
#define DTRAIN__SAVE_LATEST "latest"
/* Time for network file systems to show what a rank wrote last. */
#define DTRAIN__SAVE_LEFT_NS DTRAIN__TUNED(save_left_ns, 10000000000)
#define DTRAIN__SAVE_WHY 400 /* bytes of the error that a failed rank tells the others */

#define DTRAIN__SAVE_UNKNOWN UINT64_MAX /* in place of a branch */

typedef struct dtrain__save_step {
    uint64_t step, branch;
} dtrain__save_step;

struct dtrain_checkpoint {
    dtrain_allocator own; /* used if the caller gives none */
    dtrain_allocator *allocator;
    dtrain_comm *comm; /* NULL: one rank */
    int rank, ranks;
    int keep_last, local, no_verify, no_sync;
    int64_t timeout_ms;
    char path[400];           /* desc.directory, for texts */
    int base;                 /* desc.directory, open */
    int directory;            /* holds the steps: base, or with local this rank's own in it */
    dtrain__lock lock;        /* of that directory: rank 0's, with local every rank's */
    int refused;              /* errno if it may not be written; 0: it may */
    dtrain__index_save_id id; /* of the last call; part.index.facts has that of the save under way */
    dtrain__index_save_id replaced;
    int replaces;
    dtrain__index_facts last;   /* of the last save whose part this rank has on its disk; counter 0: none */
    dtrain__index_facts common; /* local: of the newest save that every rank is known to have; counter 0: none */
    dtrain__part_writer part;
    dtrain__index whole; /* rank 0: the index of all parts */
    char *text;
    int same_last;            /* in the last agreement all ranks named the same last save */
    int unheard;              /* the last agreement broke off; other ranks may have agreed */
    unsigned char *seen;      /* per rank: its mark was seen */
    dtrain__save_step *steps; /* found in the directory */
    size_t step_count;
    uint64_t branch;       /* of the next save */
    int branches;          /* 1: that is known */
    dtrain__worker worker; /* runs an asynchronous save, until the caller has its result */
    dtrain__worker_job job;
    uint32_t leaving; /* set by destroy: do not wait for other ranks' work */
    int untold;       /* result is an error that no call has returned */
    dtrain__error result, error;
    dtrain__index loaded; /* the index that was loaded last */
};

/* Returns the number of the save under way. */
static DTRAIN__NOINLINE const dtrain__index_save_id *dtrain__save_current(const dtrain_checkpoint *ckpt)
{
    return &ckpt->part.index.facts.id;
}

/* Gives all ranks the status and text of the first rank that failed. Tells them this rank's count of calls and last
 * save. A rank with a lower count takes the highest. */
static dtrain_status dtrain__save_meet(dtrain_checkpoint *ckpt, dtrain_status status, dtrain__alike *alike)
{
    uint64_t last = ckpt->last.id.counter;
    int failed = status != DTRAIN_OK;
    char who[24] = "";
    alike->told = 1;
    alike->most[0] = ckpt->id.counter;
    alike->most[1] = last;
    alike->most[2] = ~last;
    alike->most[3] = ckpt->branch;
    if (ckpt->ranks > 1)
        status = dtrain__alike_meet(ckpt->comm, alike, status);
    ckpt->unheard = alike->unheard;
    ckpt->id.counter = alike->most[0];
    ckpt->branch = alike->most[3];
    ckpt->same_last = alike->most[1] == last && alike->most[2] == ~last;
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    if (alike->unheard && failed) /* that may be why it broke off */
        snprintf(who, sizeof who, "rank %d: ", ckpt->rank);
    return dtrain__fail(&ckpt->error, status, "%s%s", who, dtrain__thread_error.text);
}

/* Gives the one line to compare; `given` NULL: none. */
static int dtrain__save_line(const void *given, size_t index, dtrain__alike_line *line)
{
    if (index > 0 || given == NULL)
        return 0;
    *line = *(const dtrain__alike_line *)given;
    return 1;
}

/* Does the same; a number must also be equal on all ranks, unless `compared`, its name, is NULL. */
static DTRAIN__NOINLINE dtrain_status dtrain__save_agree(dtrain_checkpoint *ckpt, dtrain_status status, uint64_t number,
                                                         const char *compared)
{
    dtrain__alike_line given;
    dtrain__alike alike = {
        "checkpoint", compared != NULL ? &given : NULL, dtrain__save_line, "give every rank the same", 1, {0}, 0};
    dtrain__alike_text(&given, compared != NULL ? compared : "", "");
    snprintf(given.value, sizeof given.value, "%llu", (unsigned long long)number);
    return dtrain__save_meet(ckpt, status, &alike);
}

/* Agrees on how writing went. A disk may take longer than the group's deadline, so that of the save is added. */
static dtrain_status dtrain__save_agree_written(dtrain_checkpoint *ckpt, dtrain_status status)
{
    int64_t before = ckpt->ranks > 1 ? ckpt->comm->desc.timeout_ms : -1;
    if (before >= 0)
        dtrain__group_set_timeout(ckpt->comm, before < INT64_MAX / 4 ? before + ckpt->timeout_ms : before);
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    if (before >= 0)
        dtrain__group_set_timeout(ckpt->comm, before);
    return status;
}

/* ---- saves that all ranks have, with local ----
 * Every save begins with an agreement in the caller's thread, when no rank has a save under way. Each rank names the
 * last save that it has ended. If all name the same one, it is the newest common save. It stays, beside this rank's
 * newest keep_last. If a save of the same step replaces the index of a common one, the old index is kept under another
 * name until a later save is common. */

/* Returns whether a save may be the only one that all ranks have. */
static int dtrain__save_is_common(const dtrain_checkpoint *ckpt, const dtrain__index_save_id *id)
{
    return ckpt->common.id.counter == 0 || dtrain__index_same_save(id, &ckpt->common.id);
}

/* ---- directories ---- */

/* Makes a directory if it does not exist, brings its name to the disk, and opens it. */
static dtrain_status dtrain__save_open(int *fd, int parent, const char *name, int no_sync)
{
    if (dtrain__file_sys_mkdir(parent, name) == 0) {
        int error = no_sync ? 0 : dtrain__file_sync_directory(parent);
        if (error != 0)
            return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: bringing directory \"%s\" to the disk: %s", name,
                                dtrain__os_error_text(error));
    } else if (errno != EEXIST) {
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: making directory \"%s\": %s", name,
                            dtrain__os_error_text(errno));
    }
    return dtrain__file_open_directory(fd, parent, name, "checkpoint");
}

/* Ends an error with its cause, if that is that an open directory has no name any more. Only an error is looked at:
 * some file systems say it of all directories. */
static dtrain_status dtrain__save_explain(const dtrain_checkpoint *ckpt, int directory, dtrain_status status)
{
    dtrain__os_facts facts;
    if (status != DTRAIN_ERR_IO || directory < 0 || dtrain__file_sys_stat(directory, &facts) != 0 || !facts.removed)
        return status;
    return dtrain__fail(
        NULL, DTRAIN_ERR_IO,
        "checkpoint: the directory \"%s\" was removed after the checkpointer had opened it; one that was "
        "made there since is another: create the checkpointer again",
        ckpt->path);
}

/* Returns whether a file exists and can be read. */
static int dtrain__save_opens(int directory, const char *name)
{
    int fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_READ);
    dtrain__file_close(fd);
    return fd >= 0;
}

/* Returns when a file changed last, in nanoseconds. If the system does not say, or the time does not fit, returns
 * INT64_MAX, newer than all. */
static int64_t dtrain__save_changed(int directory, const char *name)
{
    dtrain__os_facts facts;
    int fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_NO_LINK);
    int64_t when = INT64_MAX;
    if (fd >= 0 && dtrain__file_sys_stat(fd, &facts) == 0 && facts.changed_s < INT64_MAX / 1000000000)
        when = facts.changed_s > 0 ? facts.changed_s * 1000000000 : 0;
    dtrain__file_close(fd);
    return when;
}

/* Reads which save an index is of. Returns 0 if there is no readable index. */
static int dtrain__save_read_id(dtrain_checkpoint *ckpt, int directory, const char *name, dtrain__index_save_id *id)
{
    dtrain__error before = dtrain__thread_error;
    dtrain__index index;
    uint64_t ignored = 0;
    dtrain__index_begin(&index, ckpt->allocator);
    dtrain_status status = dtrain__index_read_file(&index, directory, name, DTRAIN__INDEX_BYTES, &ignored);
    *id = index.facts.id;
    dtrain__index_free(&index);
    dtrain__thread_error = before;
    return status == DTRAIN_OK;
}

/* ---- this rank's part ---- */

/* Removes this rank's files of the last save. Call it only if no index can list them. */
static void dtrain__save_discard(dtrain_checkpoint *ckpt, int directory)
{
    static const char *const tails[] = {"done", "safetensors", "hashes.safetensors"};
    char name[DTRAIN__PART_NAME];
    for (int i = 0; i < 3; i++) {
        dtrain__part_name(name, ckpt->rank, dtrain__save_current(ckpt), tails[i]);
        dtrain__file_sys_unlink(directory, name, 0);
    }
}

/* Returns whether the index may list the files of this save: it is in place before its directory is synced. */
static int dtrain__save_listed(dtrain_checkpoint *ckpt, int directory)
{
    dtrain__index_save_id id;
    return dtrain__save_read_id(ckpt, directory, DTRAIN__SAVE_INDEX, &id)
               ? dtrain__index_same_save(&id, dtrain__save_current(ckpt))
               : dtrain__file_is_there(directory, DTRAIN__SAVE_INDEX);
}

/* With local: keeps the index that this save will replace, if it may be the newest that all ranks have. */
static dtrain_status dtrain__save_keep_before(dtrain_checkpoint *ckpt, int directory)
{
    void *text = NULL;
    size_t bytes = 0;
    if (!ckpt->local || !ckpt->replaces || !dtrain__save_is_common(ckpt, &ckpt->replaced))
        return DTRAIN_OK;
    dtrain_status status = dtrain__file_read_all(directory, DTRAIN__SAVE_INDEX, DTRAIN__INDEX_BYTES, ckpt->allocator,
                                                 &text, &bytes, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__file_put(directory, DTRAIN__SAVE_BEFORE, text, bytes, ckpt->no_sync, "checkpoint");
    dtrain__free(ckpt->allocator, text);
    return status;
}

/* Opens the step's directory and writes this rank's files, the mark last; with local, an index of its own instead. If
 * the mark is in place, other ranks may have seen it, even if syncing failed: then the files stay. */
static dtrain_status dtrain__save_write(dtrain_checkpoint *ckpt, int *opened)
{
    dtrain__part_writer *part = &ckpt->part;
    char step[32], mark[DTRAIN__PART_NAME];
    size_t bytes = 0;
    if (ckpt->refused != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "checkpoint: the directory could not be written when the checkpointer was created: %s: "
                            "allow it, and create another",
                            dtrain__os_error_text(ckpt->refused));
    dtrain__part_step_name(step, part->index.facts.step);
    dtrain_status status = dtrain__save_open(opened, ckpt->directory, step, ckpt->no_sync);
    if (status != DTRAIN_OK)
        return dtrain__save_explain(ckpt, ckpt->directory, status);
    int directory = *opened;
    dtrain__part_name(mark, ckpt->rank, dtrain__save_current(ckpt), "done");
    ckpt->replaces =
        (ckpt->local || ckpt->rank == 0) && dtrain__save_read_id(ckpt, directory, DTRAIN__SAVE_INDEX, &ckpt->replaced);
    status = dtrain__part_write(part, directory, &bytes);
    if (status == DTRAIN_OK)
        status = dtrain__save_keep_before(ckpt, directory);
    if (status == DTRAIN_OK)
        status = dtrain__file_put(directory, ckpt->local ? DTRAIN__SAVE_INDEX : mark, part->text, bytes, ckpt->no_sync,
                                  "checkpoint");
    if (status != DTRAIN_OK &&
        !(ckpt->local ? dtrain__save_listed(ckpt, directory) : dtrain__file_is_there(directory, mark)))
        dtrain__save_discard(ckpt, directory);
    return status;
}

/* ---- waiting for the others ---- */

typedef struct dtrain__save_marks {
    dtrain_checkpoint *ckpt;
    int count;   /* marks seen */
    int failed;  /* a rank that tells it failed; -1: none */
    int visible; /* rank 0 has written the index */
} dtrain__save_marks;

static int dtrain__save_see_mark(void *user, const char *name)
{
    dtrain__save_marks *marks = (dtrain__save_marks *)user;
    dtrain_checkpoint *ckpt = marks->ckpt;
    dtrain__index_save_id id;
    int rank;
    const char *tail = *name != '.' ? dtrain__part_parse(name, &rank, &id) : NULL;
    if (tail == NULL || !dtrain__index_same_save(&id, dtrain__save_current(ckpt)) || rank >= ckpt->ranks)
        return 0;
    if (strcmp(tail, "failed") == 0)
        marks->failed = rank;
    else if (strcmp(tail, "visible") == 0)
        marks->visible = 1;
    else if (strcmp(tail, "done") == 0 && !ckpt->seen[rank]) {
        ckpt->seen[rank] = 1;
        marks->count++;
    }
    return 0;
}

#define DTRAIN__SAVE_ANSWER 200000000 /* ns that the store may take to answer */

static void dtrain__save_key(char key[64], const dtrain__index_save_id *id)
{
    snprintf(key, 64, "dtrain checkpoint %016llx %llu", (unsigned long long)id->nonce, (unsigned long long)id->counter);
}

/* Looks in the store for a rank that has failed; -1: none. why has DTRAIN__SAVE_WHY bytes. */
static int dtrain__save_told(dtrain_checkpoint *ckpt, const dtrain__index_save_id *id, char *why)
{
    char key[64], value[4 + DTRAIN__SAVE_WHY];
    size_t bytes = DTRAIN_STORE_ABSENT;
    dtrain__save_key(key, id);
    if (ckpt->ranks == 1 ||
        !dtrain__store_own(ckpt->comm, DTRAIN__STORE_GET, key, value, sizeof value, &bytes, DTRAIN__SAVE_ANSWER) ||
        bytes == DTRAIN_STORE_ABSENT || bytes < 4 || bytes >= sizeof value)
        return -1;
    memcpy(why, value + 4, bytes - 4);
    why[bytes - 4] = 0;
    return (int)dtrain__get_le((const unsigned char *)value, 4);
}

static dtrain_status dtrain__save_failed(const dtrain_checkpoint *ckpt, int rank, const char *why)
{
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint of step %llu: rank %d has failed: %s",
                        (unsigned long long)ckpt->part.index.facts.step, rank, why);
}

/* Reads why a rank has failed from its file. */
static void dtrain__save_read_why(dtrain_checkpoint *ckpt, int directory, int rank, char *why)
{
    char name[DTRAIN__PART_NAME];
    void *text = NULL;
    size_t bytes = 0;
    dtrain__part_name(name, rank, dtrain__save_current(ckpt), "failed");
    dtrain__file_read_all(directory, name, DTRAIN__SAVE_WHY - 1, ckpt->allocator, &text, &bytes, "checkpoint");
    snprintf(why, DTRAIN__SAVE_WHY, "%.*s", (int)bytes, bytes > 0 ? (const char *)text : "");
    dtrain__free(ckpt->allocator, text);
}

/* Returns a rank that has left without its mark, or -1. for_index: looks at rank 0 alone. */
static int dtrain__save_left(const dtrain_checkpoint *ckpt, int for_index)
{
    for (int rank = 0; rank < (for_index ? 1 : ckpt->ranks); rank++)
        if ((for_index || !ckpt->seen[rank]) && rank != ckpt->rank && dtrain__group_has_left(ckpt->comm, rank))
            return rank;
    return -1;
}

/* Lists the ranks whose marks were not seen. */
static void dtrain__save_unseen(const dtrain_checkpoint *ckpt, dtrain__alike_ranks *ranks)
{
    memset(ranks, 0, sizeof *ranks);
    for (int rank = 0; rank < ckpt->ranks; rank++)
        if (!ckpt->seen[rank])
            dtrain__alike_add(ranks, rank);
    dtrain__alike_flush(ranks);
}

static dtrain_status dtrain__save_late(dtrain_checkpoint *ckpt, int for_index, int left)
{
    unsigned long long step = ckpt->part.index.facts.step;
    dtrain__alike_ranks ranks;
    dtrain__save_unseen(ckpt, &ranks);
    if (left >= 0)
        return dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST,
                            "checkpoint of step %llu: rank %d has left the group before %s: the checkpoint before this "
                            "one is the newest",
                            step, left, for_index ? "it wrote the index" : "its part was written");
    return for_index
               ? dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                              "checkpoint of step %llu: rank %d has waited %lld ms for rank 0 to write the index: give "
                              "a longer timeout_ms",
                              step, ckpt->rank, (long long)(2 * ckpt->timeout_ms))
               : dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                              "checkpoint of step %llu: nothing has come from rank %s for %lld ms: see that every "
                              "rank saves, or give a longer timeout_ms",
                              step, ranks.text, (long long)ckpt->timeout_ms);
}

/* Waits for all marks; for_index: until rank 0 has written the index. Every turn lists the directory anew, which makes
 * network file systems look. If a rank has left, waits a while for what it wrote last. */
static dtrain_status dtrain__save_await(dtrain_checkpoint *ckpt, int directory, int for_index)
{
    dtrain__save_marks marks = {ckpt, 0, -1, 0};
    int64_t span = dtrain__os_ms_to_ns(for_index ? 2 * ckpt->timeout_ms : ckpt->timeout_ms);
    int64_t until = dtrain__os_now_ns() + span, pause = 500000, longest = 20000000 + (int64_t)ckpt->ranks * 1000000;
    int64_t left_until = INT64_MAX, ask_ns = dtrain__os_now_ns() + longest;
    char why[DTRAIN__SAVE_WHY] = "";
    memset(ckpt->seen, 0, (size_t)ckpt->ranks);
    for (;;) {
        int before = marks.count, left = dtrain__save_left(ckpt, for_index), told = -1;
        if (dtrain__os_now_ns() >= ask_ns) { /* before the list, which may then be the last */
            told = dtrain__save_told(ckpt, dtrain__save_current(ckpt), why);
            ask_ns = dtrain__os_now_ns() + 2 * longest;
        }
        int error = dtrain__file_list(directory, dtrain__save_see_mark, &marks);
        if (error != 0 && error != EINTR)
            return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint of step %llu: listing its directory: %s",
                                (unsigned long long)ckpt->part.index.facts.step, dtrain__os_error_text(error));
        if (told >= 0)
            marks.failed = told;
        else if (marks.failed >= 0)
            dtrain__save_read_why(ckpt, directory, marks.failed, why);
        if (marks.failed >= 0)
            return dtrain__save_failed(ckpt, marks.failed, why);
        if (for_index ? marks.visible || DTRAIN__ATOMIC_LOAD(&ckpt->leaving, ACQUIRE) : marks.count == ckpt->ranks)
            return DTRAIN_OK;
        int64_t now = dtrain__os_now_ns();
        if (marks.count > before)
            until = now + span;
        if (left < 0)
            left_until = INT64_MAX;
        else if (left_until == INT64_MAX)
            left_until = now + DTRAIN__SAVE_LEFT_NS;
        if (now >= until || now >= left_until)
            return dtrain__save_late(ckpt, for_index, now >= left_until ? left : -1);
        dtrain__os_sleep(pause);
        pause = pause < longest ? pause * 2 : pause;
    }
}

/* Tells the others that this rank's part will not come: by the store, and by a file for ranks that do not look there.
 * If both fail, they find out by their deadline. */
static void dtrain__save_tell_failed(dtrain_checkpoint *ckpt, uint64_t step, const dtrain__index_save_id *id)
{
    dtrain__error kept = dtrain__thread_error;
    char name[DTRAIN__PART_NAME], directory[32], key[64], why[DTRAIN__SAVE_WHY];
    unsigned char value[4 + DTRAIN__SAVE_WHY];
    size_t bytes = strlen(kept.text);
    int fd = -1;
    if (ckpt->local || ckpt->ranks == 1)
        return;
    bytes = bytes < DTRAIN__SAVE_WHY ? bytes : DTRAIN__SAVE_WHY - 1;
    dtrain__save_key(key, id);
    dtrain__put_le(value, (uint64_t)ckpt->rank, 4);
    memcpy(value + 4, kept.text, bytes);
    if (ckpt->rank != 0 || dtrain__save_told(ckpt, id, why) < 0) /* else rank 0 has failed because that rank has */
        dtrain__store_own(ckpt->comm, DTRAIN__STORE_SET, key, value, 4 + bytes, NULL, 0); /* needs no answer */
    dtrain__part_name(name, ckpt->rank, id, "failed");
    dtrain__part_step_name(directory, step);
    if (ckpt->refused == 0 && dtrain__save_open(&fd, ckpt->directory, directory, 1) == DTRAIN_OK) {
        dtrain__file_put(fd, name, kept.text, bytes, 1, "checkpoint");
        dtrain__file_close(fd);
    }
    dtrain__thread_error = kept;
}

/* ---- making it visible ---- */

/* Reads all marks, and writes the index. */
static dtrain_status dtrain__save_index(dtrain_checkpoint *ckpt, int directory)
{
    dtrain_status status = DTRAIN_OK;
    uint64_t ignored = 0;
    size_t bytes = 0;
    dtrain__index_clear(&ckpt->whole);
    for (int rank = 0; rank < ckpt->ranks && status == DTRAIN_OK; rank++) {
        char name[DTRAIN__PART_NAME];
        dtrain__part_name(name, rank, dtrain__save_current(ckpt), "done");
        status = dtrain__index_read_file(&ckpt->whole, directory, name, DTRAIN__INDEX_BYTES, &ignored);
    }
    if (status == DTRAIN_OK)
        status = dtrain__index_settle(&ckpt->whole, 1);
    if (status == DTRAIN_ERR_CORRUPT) /* the program's pieces do not fit together */
        status = DTRAIN_ERR_INVALID;
    if (status == DTRAIN_OK)
        status = dtrain__index_print(&ckpt->whole, &ckpt->text, &bytes);
    return status == DTRAIN_OK
               ? dtrain__file_put(directory, DTRAIN__SAVE_INDEX, ckpt->text, bytes, ckpt->no_sync, "checkpoint")
               : status;
}

static dtrain_status dtrain__save_latest(dtrain_checkpoint *ckpt)
{
    char name[34];
    dtrain__part_step_name(name, ckpt->part.index.facts.step);
    strcat(name, "\n");
    return dtrain__file_put(ckpt->directory, DTRAIN__SAVE_LATEST, name, strlen(name), ckpt->no_sync, "checkpoint");
}

/* ---- removing what is old ----
 * Rank 0 alone removes, and only after its own save is visible. It removes checkpoints before the newest keep_last,
 * files that the new index has replaced, and leftovers of interrupted saves. A checkpoint of a higher step is of a run
 * that was turned back, or of a job before. It stays until a save passes it. The number in a file's name says whose it
 * is:
 *
 *   an earlier save of this checkpointer   dead: all its ranks have written a mark of a later save
 *   a later save of this checkpointer      in use: another rank is ahead
 *   another checkpointer                   maybe in use by a save that still runs
 *
 * In the last case there are two ways to know. A saving job holds the lock of the directory (>>lock) from its first
 * save on. When a job gets the lock, no other saves there, and all that no index lists is dead. Later, or without
 * locks, time tells. A save gives up when no new mark comes for timeout_ms. So files that have not changed for twice as
 * long, by the clock of the file system, are dead. */

/* A step's directory that is being searched. */
typedef struct dtrain__save_tidy {
    dtrain_checkpoint *ckpt;
    int directory;
    int64_t now;                     /* by the file system's clock */
    int alone;                       /* no other job saves: files of other checkpointers are dead at any age */
    int has_index, has_files, mixed; /* mixed: files of more than one save */
    int has_before;
    dtrain__index_save_id visible; /* of the index; without one, or if not mixed, of the first file */
    dtrain__index_save_id before;
    int prunes;
} dtrain__save_tidy;

static int dtrain__save_look(void *user, const char *name)
{
    dtrain__save_tidy *tidy = (dtrain__save_tidy *)user;
    dtrain__index_save_id id;
    int rank;
    if (strcmp(name, DTRAIN__SAVE_INDEX) == 0)
        tidy->has_index = 1;
    tidy->has_before |= strcmp(name, DTRAIN__SAVE_BEFORE) == 0;
    if (dtrain__part_parse(name, &rank, &id) == NULL)
        return 0;
    if (!tidy->has_files)
        tidy->visible = id;
    tidy->mixed |= !dtrain__index_same_save(&id, &tidy->visible);
    tidy->has_files = 1;
    return 0;
}

/* Returns whether a file has not changed for so long that its writer has given up. */
static int dtrain__save_old(const dtrain__save_tidy *tidy, int directory, const char *name)
{
    int64_t when = tidy->alone ? 0 : dtrain__save_changed(directory, name);
    return tidy->alone ||
           (when < tidy->now && tidy->now - when > dtrain__os_ms_to_ns(2 * tidy->ckpt->timeout_ms) + 2000000000);
}

/* Removes one file if it is dead. */
static int dtrain__save_sweep(void *user, const char *name)
{
    dtrain__save_tidy *tidy = (dtrain__save_tidy *)user;
    const dtrain_checkpoint *ckpt = tidy->ckpt;
    size_t length = strlen(name);
    int temporary = *name == '.' && length > 4 && strcmp(name + length - 4, ".tmp") == 0, rank, dead;
    dtrain__index_save_id id;
    const char *tail = dtrain__part_parse(name, &rank, &id);
    if (tail == NULL) {
        if (temporary && strncmp(name, ".index.", 7) == 0 && dtrain__save_old(tidy, tidy->directory, name))
            dtrain__file_sys_unlink(tidy->directory, name, 0);
        return 0;
    }
    int data = !temporary && strstr(tail, "safetensors") != NULL;
    if (data && ((tidy->has_index && !tidy->prunes && dtrain__index_same_save(&id, &tidy->visible)) ||
                 (tidy->has_before && dtrain__index_same_save(&id, &tidy->before))))
        return 0;
    if (id.nonce == dtrain__save_current(ckpt)->nonce)
        dead = id.counter < dtrain__save_current(ckpt)->counter;
    else
        dead = (ckpt->replaces && dtrain__index_same_save(&id, &ckpt->replaced)) ||
               (tidy->prunes && dtrain__index_same_save(&id, &tidy->visible)) ||
               dtrain__save_old(tidy, tidy->directory, name);
    if (dead)
        dtrain__file_sys_unlink(tidy->directory, name, 0);
    return 0;
}

/* Removes the indexes that are no longer needed: of a replaced save, and with prunes of the checkpoint. They go before
 * their files. */
static void dtrain__save_unlist(dtrain__save_tidy *tidy)
{
    dtrain_checkpoint *ckpt = tidy->ckpt;
    int needed = tidy->has_before && !tidy->prunes &&
                 dtrain__save_read_id(ckpt, tidy->directory, DTRAIN__SAVE_BEFORE, &tidy->before) &&
                 dtrain__save_is_common(ckpt, &tidy->before);
    int unlisted = tidy->has_before && !needed && dtrain__file_sys_unlink(tidy->directory, DTRAIN__SAVE_BEFORE, 0) == 0;
    tidy->has_before &= !unlisted;
    if (tidy->prunes)
        dtrain__file_sys_unlink(tidy->directory, DTRAIN__SAVE_INDEX, 0);
    if ((tidy->prunes || unlisted) && !ckpt->no_sync)
        dtrain__file_sync_directory(tidy->directory);
}

/* Removes dead files from a step's directory; with prunes, the checkpoint and the directory too. */
static void dtrain__save_tidy_step(const dtrain__save_tidy *base, uint64_t step, int prunes)
{
    dtrain_checkpoint *ckpt = base->ckpt;
    dtrain__save_tidy tidy = *base;
    char name[32];
    tidy.prunes = prunes;
    dtrain__part_step_name(name, step);
    tidy.directory = dtrain__file_sys_open(ckpt->directory, name, DTRAIN__OS_DIRECTORY | DTRAIN__OS_NO_LINK);
    if (tidy.directory < 0)
        return;
    int old = dtrain__save_old(&tidy, ckpt->directory, name);
    dtrain__file_list(tidy.directory, dtrain__save_look, &tidy);
    if (tidy.has_index && tidy.mixed &&
        !dtrain__save_read_id(ckpt, tidy.directory, DTRAIN__SAVE_INDEX, &tidy.visible)) {
        dtrain__file_close(tidy.directory); /* cannot tell the saves apart: leaves them to a person */
        return;
    }
    dtrain__save_unlist(&tidy);
    dtrain__file_list(tidy.directory, dtrain__save_sweep, &tidy);
    dtrain__file_close(tidy.directory);
    int used = tidy.alone && step == ckpt->part.index.facts.step;        /* by ranks that have begun this save */
    if (prunes || (old && !tidy.has_index && !tidy.has_before && !used)) /* fails unless it is empty */
        dtrain__file_sys_unlink(ckpt->directory, name, 1);
}

static int dtrain__save_find_step(void *user, const char *name)
{
    dtrain_checkpoint *ckpt = (dtrain_checkpoint *)user;
    uint64_t step;
    if (!dtrain__part_is_step(name, &step))
        return 0;
    dtrain__save_step found = {step, 0};
    return DTRAIN__INDEX_ADD(ckpt->allocator, ckpt->steps, ckpt->step_count, found) == DTRAIN_OK ? 0 : ENOMEM;
}

static int dtrain__save_newer(const void *left, const void *right)
{
    const dtrain__save_step *a = (const dtrain__save_step *)left, *b = (const dtrain__save_step *)right;
    if (a->branch != b->branch)
        return a->branch > b->branch ? -1 : 1;
    return a->step > b->step ? -1 : a->step < b->step;
}

static const char *dtrain__save_index_name(char name[64], uint64_t step)
{
    snprintf(name, 64, "step-%llu/" DTRAIN__SAVE_INDEX, (unsigned long long)step);
    return name;
}

/* Lists the steps that have a directory, the newest first. Returns 0 or an errno. One whose index cannot be read may be
 * the newest, and counts as that. */
static int dtrain__save_list_steps(dtrain_checkpoint *ckpt, int directory)
{
    char name[64];
    ckpt->step_count = 0;
    int error = dtrain__file_list(directory, dtrain__save_find_step, ckpt);
    for (size_t i = 0; i < ckpt->step_count; i++) {
        dtrain__save_step *step = &ckpt->steps[i];
        if (!dtrain__index_read_branch(directory, dtrain__save_index_name(name, step->step), &step->branch))
            step->branch = DTRAIN__SAVE_UNKNOWN;
    }
    if (ckpt->step_count > 0)
        qsort(ckpt->steps, ckpt->step_count, sizeof *ckpt->steps, dtrain__save_newer);
    return error;
}

static int dtrain__save_has_index(int directory, uint64_t step)
{
    char name[64];
    return dtrain__save_opens(directory, dtrain__save_index_name(name, step));
}

/* Finds the newest step that has an index; NULL: there is none. */
static const dtrain__save_step *dtrain__save_newest(dtrain_checkpoint *ckpt)
{
    dtrain__save_list_steps(ckpt, ckpt->directory);
    for (size_t i = 0; i < ckpt->step_count; i++)
        if (dtrain__save_has_index(ckpt->directory, ckpt->steps[i].step))
            return &ckpt->steps[i];
    return NULL;
}

/* Before the first save since a load, or of all: chooses the branch, on ranks that see a directory of steps. */
static dtrain_status dtrain__save_branch(dtrain_checkpoint *ckpt)
{
    const dtrain__index_facts *loaded = ckpt->loaded.parts > 0 ? &ckpt->loaded.facts : NULL; /* what it goes on from */
    if (ckpt->branches || (ckpt->rank > 0 && !ckpt->local))
        return DTRAIN_OK;
    const dtrain__save_step *newest = dtrain__save_newest(ckpt);
    if (newest != NULL && newest->branch == DTRAIN__SAVE_UNKNOWN)
        return dtrain__fail(
            NULL, DTRAIN_ERR_IO,
            "checkpoint: the index of step %llu in \"%.300s\" cannot be read, so it is not known which step "
            "is the newest",
            (unsigned long long)newest->step, ckpt->path);
    int same = loaded != NULL && (newest == NULL || (newest->step == loaded->step && newest->branch == loaded->branch));
    ckpt->branch = same ? loaded->branch : newest != NULL ? newest->branch + 1 : 0;
    ckpt->branches = 1;
    return DTRAIN_OK;
}

/* Removes leftovers of killed saves and creates beside the steps. */
static int dtrain__save_sweep_base(void *user, const char *name)
{
    dtrain__save_tidy *tidy = (dtrain__save_tidy *)user;
    int latest = strncmp(name, ".latest.", 8) == 0;
    int shared = strncmp(name, ".shared-", 8) == 0 && !tidy->alone; /* jobs that only read leave it too, and hold no
                                                                       lock */
    if ((latest || shared) && dtrain__save_old(tidy, tidy->directory, name))
        dtrain__file_sys_unlink(tidy->directory, name, 0);
    return 0;
}

/* Returns whether the checkpoint of a step is old, when `kept` exist from it on. The newest common one is not. */
static int dtrain__save_prunes(const dtrain_checkpoint *ckpt, uint64_t step, int kept)
{
    return ckpt->keep_last > 0 && kept > ckpt->keep_last &&
           (!ckpt->local || (ckpt->common.id.counter > 0 && step != ckpt->common.step));
}

/* Removes what is old. A failure costs disk space, no checkpoint; the next save tries again. alone: before the first
 * save, when no other job saves. */
static void dtrain__save_clear(dtrain_checkpoint *ckpt, int alone)
{
    uint64_t step = ckpt->part.index.facts.step;
    char name[64];
    int kept = !alone; /* the save just made */
    dtrain__error before = dtrain__thread_error;
    dtrain__save_tidy base;
    memset(&base, 0, sizeof base);
    base.ckpt = ckpt;
    base.directory = ckpt->directory;
    base.alone = alone;
    base.now = alone ? 0 : dtrain__save_changed(ckpt->directory, dtrain__save_index_name(name, step));
    if (base.now == INT64_MAX)
        return;
    dtrain__save_list_steps(ckpt, ckpt->directory);
    for (size_t i = 0; i < ckpt->step_count; i++) {
        uint64_t other = ckpt->steps[i].step;
        int whole = other < step && dtrain__save_has_index(ckpt->directory, other);
        int may = ckpt->local || !alone; /* otherwise latest may name one older than the newest keep_last */
        kept += whole;
        may = may && ckpt->steps[0].branch != DTRAIN__SAVE_UNKNOWN;
        dtrain__save_tidy_step(&base, other, whole && may && dtrain__save_prunes(ckpt, other, kept));
    }
    dtrain__file_list(ckpt->directory, dtrain__save_sweep_base, &base);
    dtrain__thread_error = before;
}

/* Takes the lock on ranks that remove what is old. The first time it also removes leftovers of killed saves. */
static dtrain_status dtrain__save_lock(dtrain_checkpoint *ckpt)
{
    if ((ckpt->rank > 0 && !ckpt->local) || ckpt->refused != 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain__lock_take(&ckpt->lock, ckpt->directory, ckpt->path);
    if (status == DTRAIN_OK && ckpt->lock.fd >= 0 && ckpt->lock.is_alone)
        dtrain__save_clear(ckpt, 1);
    ckpt->lock.is_alone = 0;
    return status;
}

/* Makes a save visible. Rank 0 does so when all marks are there; with local every rank does it for its own. Sets
 * *visible if the index is in place, even after a later error. tells: leaves a mark that the others wait for. */
static dtrain_status dtrain__save_commit(dtrain_checkpoint *ckpt, int directory, int tells, int *visible)
{
    char mark[DTRAIN__PART_NAME], shown[DTRAIN__PART_NAME];
    dtrain_status status = ckpt->local ? DTRAIN_OK : dtrain__save_index(ckpt, directory);
    *visible = status == DTRAIN_OK || (!ckpt->local && dtrain__save_listed(ckpt, directory));
    if (status == DTRAIN_OK && !ckpt->local)
        status = dtrain__save_latest(ckpt);
    if (status != DTRAIN_OK)
        return status;
    for (int rank = 0; rank < ckpt->ranks && !ckpt->local; rank++) {
        dtrain__part_name(mark, rank, dtrain__save_current(ckpt), "done");
        dtrain__part_name(shown, rank, dtrain__save_current(ckpt), "visible");
        if (rank == 0 && tells && ckpt->ranks > 1) /* a rename needs no disk space */
            dtrain__file_sys_rename(directory, mark, directory, shown);
        else
            dtrain__file_sys_unlink(directory, mark, 0);
    }
    dtrain__save_clear(ckpt, 0);
    return DTRAIN_OK;
}

/* Does all of an asynchronous save except the copy. */
static dtrain_status dtrain__save_alone_now(dtrain_checkpoint *ckpt)
{
    int directory = -1, visible = 0, marked;
    dtrain_status status = dtrain__save_lock(ckpt);
    if (status == DTRAIN_OK)
        status = dtrain__save_write(ckpt, &directory);
    marked = status == DTRAIN_OK;
    if (status == DTRAIN_OK && ckpt->rank == 0 && !ckpt->local)
        status = dtrain__save_await(ckpt, directory, 0);
    if (status == DTRAIN_OK && (ckpt->rank == 0 || ckpt->local))
        status = dtrain__save_commit(ckpt, directory, 1, &visible);
    if (status != DTRAIN_OK && (!marked || ckpt->rank == 0)) {
        dtrain__save_tell_failed(ckpt, ckpt->part.index.facts.step, dtrain__save_current(ckpt));
        if (directory >= 0 && !visible && marked)
            dtrain__save_discard(ckpt, directory);
    }
    if (status == DTRAIN_OK && ckpt->rank > 0 && !ckpt->local)
        status = dtrain__save_await(ckpt, directory, 1);
    dtrain__file_close(directory);
    return status;
}

#endif
