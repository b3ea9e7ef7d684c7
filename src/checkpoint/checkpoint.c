/* ---- >>checkpoint-calls ----
 * The checkpointer: create and destroy, blocking and asynchronous saves, loads. All ranks know the number of a save
 * without a message. It is rank 0's random number, which every rank gets at creation, and a count of the calls. Every
 * call raises the count on every rank, even if it fails. */
#ifndef DTRAIN__CHECKPOINT
#define DTRAIN__CHECKPOINT
#include "load.c"
#include "local.c"

/* ---- creation ---- */

/* Makes a directory and its missing parents, and opens it. */
static dtrain_status dtrain__checkpoint_open(dtrain_checkpoint *ckpt, const char *path)
{
    size_t length = strlen(path);
    int error = 0;
    if (length == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_checkpoint_create: directory is empty, expected a path");
    char *part = (char *)dtrain__alloc(ckpt->allocator, length + 1);
    if (part == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_checkpoint_create: no memory for a path of %zu bytes",
                            length);
    for (size_t at = 1; at <= length; at++) { /* the last may exist even if one of these cannot be made */
        if (path[at] != '/' && path[at] != '\0')
            continue;
        memcpy(part, path, at);
        part[at] = '\0';
        error = dtrain__file_sys_mkdir(DTRAIN__FILE_HERE, part) == 0 || errno == EEXIST ? 0 : errno;
    }
    dtrain__free(ckpt->allocator, part);
    dtrain_status status =
        dtrain__file_open_directory(&ckpt->base, DTRAIN__FILE_HERE, path, "dtrain_checkpoint_create");
    if (status != DTRAIN_OK && error != 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_IO,
            "dtrain_checkpoint_create: making directory \"%s\": %s: give a path where this process may make one", path,
            dtrain__os_error_text(error));
    return status;
}

static int dtrain__checkpoint_refuses(int error)
{
    return error == EROFS || error == EACCES || error == EPERM;
}

/* With local, opens this rank's own directory. If it cannot be made, this rank can still load what others have. */
static dtrain_status dtrain__checkpoint_open_own(dtrain_checkpoint *ckpt)
{
    char name[32];
    ckpt->directory = ckpt->base;
    if (!ckpt->local)
        return DTRAIN_OK;
    ckpt->directory = -1;
    snprintf(name, sizeof name, "rank-%05d", ckpt->rank);
    if (dtrain__file_sys_mkdir(ckpt->base, name) != 0 && dtrain__checkpoint_refuses(errno)) {
        ckpt->refused = errno;
        return DTRAIN_OK;
    }
    if (!ckpt->no_sync)
        dtrain__file_sync_directory(ckpt->base); /* if this matters, the first save fails */
    return dtrain__save_open(&ckpt->directory, ckpt->base, name, ckpt->no_sync);
}

/* Rank 0 makes a file for the others to find. */
static dtrain_status dtrain__checkpoint_leave(dtrain_checkpoint *ckpt, const char *name)
{
    int fd = dtrain__file_sys_open(ckpt->base, name, DTRAIN__OS_WRITE | DTRAIN__OS_NEW);
    if (fd < 0 && !dtrain__checkpoint_refuses(errno))
        return dtrain__fail(
            NULL, DTRAIN_ERR_IO,
            "dtrain_checkpoint_create: making a file in directory \"%.200s\": %s: see that its disk has room",
            ckpt->path, dtrain__os_error_text(errno));
    ckpt->refused = fd < 0 ? errno : 0;
    dtrain__file_close(fd);
    return DTRAIN_OK;
}

/* Returns whether this rank sees rank 0's file. It looks for 3 s: a network file system may show a new file late. */
static int dtrain__checkpoint_sees(dtrain_checkpoint *ckpt, const char *name)
{
    for (int attempt = 0; attempt < 60; attempt++) {
        if (dtrain__save_opens(ckpt->base, name))
            return 1;
        dtrain__os_sleep(50000000);
    }
    return 0;
}

/* Finds out whether all ranks see one file system. If rank 0 may not write there, a load will find out. */
static dtrain_status dtrain__checkpoint_compare(dtrain_checkpoint *ckpt)
{
    dtrain__alike_ranks strangers;
    unsigned char sees;
    char name[40];
    int compares = ckpt->ranks > 1 && !ckpt->local;
    snprintf(name, sizeof name, ".shared-%016llx", (unsigned long long)ckpt->id.nonce);
    dtrain_status status = ckpt->rank == 0 && compares ? dtrain__checkpoint_leave(ckpt, name) : DTRAIN_OK;
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    if (status != DTRAIN_OK || !compares)
        return status;
    int32_t refused = ckpt->refused;
    status = dtrain_broadcast(ckpt->comm, &refused, 1, DTRAIN_I32, 0);
    ckpt->refused = refused;
    if (status != DTRAIN_OK || refused != 0)
        return status;
    sees = ckpt->rank == 0 || dtrain__checkpoint_sees(ckpt, name);
    status = dtrain_all_gather(ckpt->comm, &sees, ckpt->seen, (size_t)ckpt->ranks, DTRAIN_U8);
    if (ckpt->rank == 0)
        dtrain__file_sys_unlink(ckpt->base, name, 0);
    if (status != DTRAIN_OK)
        return status;
    dtrain__save_unseen(ckpt, &strangers);
    if (strangers.count == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_IO,
                        "dtrain_checkpoint_create: rank %s does not see the file that rank 0 made in the directory: "
                        "give a directory on a file system that all ranks share, or set local",
                        strangers.text);
}

static dtrain_status dtrain__checkpoint_number(dtrain_checkpoint *ckpt)
{
    uint64_t nonce = 0;
    int error = ckpt->rank == 0 ? dtrain__os_random(&nonce, sizeof nonce) : 0;
    dtrain_status status =
        error == 0 ? DTRAIN_OK
                   : dtrain__fail(NULL, DTRAIN_ERR_IO, "dtrain_checkpoint_create: the system gave no random number: %s",
                                  dtrain__os_error_text(error));
    if (ckpt->ranks > 1) {
        dtrain_status sent = dtrain_broadcast(ckpt->comm, &nonce, 1, DTRAIN_U64, 0);
        status = status == DTRAIN_OK ? sent : status;
    }
    ckpt->id.nonce = nonce;
    return status;
}

static const dtrain__alike_field dtrain__checkpoint_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, directory, OWN), /* each rank has its own path */
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, keep_last, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, local, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, no_verify, OWN), /* affects this rank's loads alone */
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, no_sync, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, timeout_ms, OWN), /* how long this rank waits */
    DTRAIN__ALIKE_FIELD(dtrain_checkpoint_desc, allocator, OWN)};

static int dtrain__checkpoint_line(const void *desc, size_t index, dtrain__alike_line *line)
{
    return index < sizeof dtrain__checkpoint_fields / sizeof dtrain__checkpoint_fields[0] &&
           dtrain__alike_field_line(line, "desc.", &dtrain__checkpoint_fields[index], desc);
}

static dtrain_status dtrain__checkpoint_init(dtrain_checkpoint *ckpt, const dtrain_checkpoint_desc *desc)
{
    dtrain__alike alike = {
        "dtrain_checkpoint_create", desc, dtrain__checkpoint_line, "give every rank the same", 1, {0}, 0};
    dtrain_status status = DTRAIN_OK;
    if (desc->directory == NULL || desc->keep_last < 0 || desc->timeout_ms < 0)
        status = dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_checkpoint_create: directory is %s, keep_last %d, timeout_ms %lld: expected a path, "
            "and numbers of at least 0",
            desc->directory != NULL ? desc->directory : "NULL", desc->keep_last, (long long)desc->timeout_ms);
    snprintf(ckpt->path, sizeof ckpt->path, "%s", desc->directory != NULL ? desc->directory : "");
    if (status == DTRAIN_OK)
        status = dtrain__checkpoint_open(ckpt, desc->directory);
    if (status == DTRAIN_OK)
        status = dtrain__checkpoint_open_own(ckpt);
    status = dtrain__save_meet(ckpt, status, &alike);
    if (status == DTRAIN_OK)
        status = dtrain__checkpoint_number(ckpt);
    return status == DTRAIN_OK ? dtrain__checkpoint_compare(ckpt) : status;
}

DTRAIN_API dtrain_status dtrain_checkpoint_create(dtrain_checkpoint **ckpt, dtrain_comm *comm,
                                                  const dtrain_checkpoint_desc *desc)
{
    if (ckpt == NULL || desc == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_create: %s is NULL, expected the address of %s",
                            ckpt == NULL ? "ckpt" : "desc", ckpt == NULL ? "the checkpointer" : "a desc");
    *ckpt = NULL;
    dtrain_allocator *allocator = desc->allocator;
    dtrain_checkpoint *made = (dtrain_checkpoint *)dtrain__memory_owner(allocator, sizeof *made,
                                                                        offsetof(dtrain_checkpoint, own), &allocator);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_checkpoint_create: no memory for %zu bytes", sizeof *made);
    made->allocator = allocator;
    made->comm = comm;
    made->rank = comm != NULL ? dtrain_comm_rank(comm) : 0;
    made->ranks = comm != NULL ? dtrain_comm_size(comm) : 1;
    made->local = desc->local != 0;
    made->keep_last = made->local && desc->keep_last < 2 ? 2 : desc->keep_last;
    made->no_verify = desc->no_verify;
    made->no_sync = desc->no_sync;
    made->timeout_ms = desc->timeout_ms > 0 ? desc->timeout_ms : 300000;
    if (made->timeout_ms > INT64_MAX / 4) /* it is doubled later */
        made->timeout_ms = INT64_MAX / 4;
    made->base = made->directory = made->lock.fd = -1;
    made->part.allocator = made->allocator;
    made->part.rank = made->rank;
    made->part.local = made->local;
    made->part.no_sync = made->no_sync;
    dtrain__index_begin(&made->part.index, made->allocator);
    dtrain__index_begin(&made->whole, made->allocator);
    dtrain__index_begin(&made->loaded, made->allocator);
    made->seen = (unsigned char *)dtrain__alloc(made->allocator, (size_t)made->ranks);
    dtrain_status status =
        made->seen != NULL
            ? dtrain__checkpoint_init(made, desc)
            : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_checkpoint_create: no memory for %d bytes", made->ranks);
    if (status != DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain_checkpoint_destroy(made);
        return dtrain__report(&cause);
    }
    *ckpt = made;
    return DTRAIN_OK;
}

/* ---- saving ---- */

/* Ends the thread of an asynchronous save, waits for it first, and takes its result. */
static void dtrain__checkpoint_join(dtrain_checkpoint *ckpt)
{
    if (!dtrain__worker_runs(&ckpt->worker))
        return;
    dtrain__worker_wait(&ckpt->worker, ckpt->worker.posted, INT64_MAX);
    dtrain__worker_end(&ckpt->worker);
    ckpt->untold = ckpt->result.status != DTRAIN_OK;
    if (!ckpt->untold)
        ckpt->last = ckpt->part.index.facts;
}

DTRAIN_API void dtrain_checkpoint_destroy(dtrain_checkpoint *ckpt)
{
    if (ckpt == NULL)
        return;
    DTRAIN__ATOMIC_STORE(&ckpt->leaving, 1, RELEASE);
    dtrain__checkpoint_join(ckpt);
    dtrain__lock_release(&ckpt->lock);
    if (ckpt->directory != ckpt->base)
        dtrain__file_close(ckpt->directory);
    dtrain__file_close(ckpt->base);
    dtrain__part_free(&ckpt->part);
    dtrain__index_free(&ckpt->whole);
    dtrain__index_free(&ckpt->loaded);
    dtrain__free(ckpt->allocator, ckpt->text);
    dtrain__free(ckpt->allocator, ckpt->seen);
    dtrain__free(ckpt->allocator, ckpt->steps);
    dtrain__free(ckpt->allocator, ckpt);
}

/* Returns whether no asynchronous save is under way on this rank. */
static int dtrain__checkpoint_done(dtrain_checkpoint *ckpt)
{
    return dtrain__worker_is_done(&ckpt->worker, ckpt->worker.posted);
}

/* Begins a save: checks that one may begin, and lists what this rank writes. stages: copies that, so that the program
 * may change its data. */
static dtrain_status dtrain__checkpoint_begin(dtrain_checkpoint *ckpt, const dtrain_checkpoint_state *state, int stages)
{
    ckpt->id.counter++;
    if (dtrain__checkpoint_done(ckpt))
        dtrain__checkpoint_join(ckpt);
    if (ckpt->worker.threaded)
        return dtrain__fail(
            &ckpt->error, DTRAIN_ERR_INVALID,
            "checkpoint: rank %d still writes its part of step %llu: call dtrain_checkpoint_wait before "
            "the next save",
            ckpt->rank, (unsigned long long)ckpt->part.index.facts.step);
    if (ckpt->untold) {
        ckpt->untold = 0;
        return dtrain__fail(&ckpt->error, ckpt->result.status,
                            "checkpoint: this save was not begun, as the save before it failed: %.560s",
                            ckpt->result.text);
    }
    memset(&ckpt->result, 0, sizeof ckpt->result);
    if (state == NULL)
        return dtrain__fail(&ckpt->error, DTRAIN_ERR_INVALID, "checkpoint: state is NULL, expected what to save");
    dtrain_status status = dtrain__save_branch(ckpt);
    if (status == DTRAIN_OK)
        status = dtrain__part_prepare(&ckpt->part, state, &ckpt->id, ckpt->ranks);
    ckpt->part.index.facts.branch = ckpt->branch;
    if (status == DTRAIN_OK && stages)
        status = dtrain__part_stage(&ckpt->part);
    return status == DTRAIN_OK ? status : dtrain__fail(&ckpt->error, status, "%s", dtrain__thread_error.text);
}

/* Agrees among the ranks whether a save begins. A rank that skipped an asynchronous save has a lower count of calls;
 * here it takes the highest. */
static dtrain_status dtrain__checkpoint_agree(dtrain_checkpoint *ckpt, dtrain_status status,
                                              const dtrain_checkpoint_state *state)
{
    status = dtrain__save_agree(ckpt, status, state != NULL ? state->step : 0, "step");
    if (!ckpt->worker.threaded) {
        ckpt->part.index.facts.id.counter = ckpt->id.counter;
        ckpt->part.index.facts.branch = ckpt->branch;
    }
    if (status == DTRAIN_OK && ckpt->last.id.counter > 0 && ckpt->same_last) /* no rank has a save under way */
        ckpt->common = ckpt->last;
    return status;
}

DTRAIN_API dtrain_status dtrain_checkpoint_save(dtrain_checkpoint *ckpt, const dtrain_checkpoint_state *state)
{
    int directory = -1, visible = 0;
    if (ckpt == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_save: the checkpointer is NULL: create it first");
    dtrain_status status = dtrain__checkpoint_begin(ckpt, state, 0);
    if (status == DTRAIN_OK)
        status = dtrain__save_lock(ckpt);
    status = dtrain__checkpoint_agree(ckpt, status, state);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__save_write(ckpt, &directory);
    int agrees = status == DTRAIN_OK;
    status = dtrain__save_agree_written(ckpt, status);
    if (status != DTRAIN_OK) {
        /* once rank 0 has heard all, it lists the files of a rank that agreed, even if that rank has heard nothing */
        int listed = agrees && ckpt->unheard && ckpt->rank > 0;
        if (directory >= 0 && !ckpt->local && !listed)
            dtrain__save_discard(ckpt, directory);
        if (directory >= 0 && ckpt->local) /* repeated failures then leave no more behind than one */
            dtrain__save_clear(ckpt, 0);
        dtrain__file_close(directory);
        return status;
    }
    ckpt->last = ckpt->part.index.facts;
    ckpt->common = ckpt->last;           /* every rank has its part on the disk */
    if (ckpt->rank == 0 && !ckpt->local) /* a network file system may show the marks of the others later */
        status = dtrain__save_await(ckpt, directory, 0);
    if (status == DTRAIN_OK && (ckpt->rank == 0 || ckpt->local))
        status = dtrain__save_commit(ckpt, directory, 0, &visible);
    if (status != DTRAIN_OK && !visible && !ckpt->local)
        dtrain__save_discard(ckpt, directory);
    dtrain__file_close(directory);
    return dtrain__save_agree_written(ckpt, status);
}

static void dtrain__checkpoint_work(void *owner, dtrain__worker_job *job)
{
    dtrain_checkpoint *ckpt = (dtrain_checkpoint *)owner;
    (void)job;
    dtrain_status status = dtrain__save_alone_now(ckpt);
    if (status != DTRAIN_OK)
        dtrain__fail(&ckpt->result, status, "rank %d: %.600s", ckpt->rank, dtrain__thread_error.text);
}

DTRAIN_API dtrain_status dtrain_checkpoint_save_async(dtrain_checkpoint *ckpt, const dtrain_checkpoint_state *state)
{
    if (ckpt == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_save_async: the checkpointer is NULL: create it first");
    dtrain_status status = dtrain__checkpoint_begin(ckpt, state, 1);
    if (ckpt->local)
        status = dtrain__checkpoint_agree(ckpt, status, state);
    if (status == DTRAIN_OK) {
        ckpt->worker.owner = ckpt;
        ckpt->worker.perform = dtrain__checkpoint_work;
        int error = dtrain__worker_start(&ckpt->worker);
        if (error == 0)
            dtrain__worker_post(&ckpt->worker, &ckpt->job);
        else
            status = dtrain__fail(&ckpt->error, DTRAIN_ERR_IO,
                                  "checkpoint: the system refused rank %d a thread (%s; see ulimit -u and pids.max): "
                                  "use dtrain_checkpoint_save, which needs none",
                                  ckpt->rank, dtrain__os_error_text(error));
    }
    if (status != DTRAIN_OK && state != NULL)
        dtrain__save_tell_failed(ckpt, state->step, &ckpt->id);
    if (status != DTRAIN_OK && !ckpt->worker.threaded && ckpt->result.status == DTRAIN_OK)
        ckpt->result = ckpt->error; /* a wait returns it again */
    return status;
}

DTRAIN_API dtrain_status dtrain_checkpoint_wait(dtrain_checkpoint *ckpt)
{
    if (ckpt == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_wait: the checkpointer is NULL: create it first");
    dtrain__checkpoint_join(ckpt);
    if (ckpt->worker.threaded)
        return dtrain__fail(&ckpt->error, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_wait on rank %d: process %ld began the save, and this is its forked "
                            "child %ld: wait in the parent",
                            ckpt->rank, ckpt->worker.process, dtrain__os_self());
    ckpt->untold = 0;
    if (ckpt->result.status != DTRAIN_OK)
        ckpt->error = ckpt->result;
    return dtrain__report(&ckpt->result);
}

/* ---- loading ---- */

/* Lists what the program has room for, sorted by name. */
static dtrain_status dtrain__checkpoint_collect(dtrain__load *load, const dtrain_checkpoint_state *state)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status =
        dtrain__piece_collect(&load->list, dtrain__load_lister(load), state, load->index.facts.step, ckpt->allocator);
    if (status == DTRAIN_OK && load->list.count > 0)
        qsort(load->list.pieces, load->list.count, sizeof *load->list.pieces, dtrain__region_compare_names);
    return dtrain__save_agree(ckpt, status, 0, NULL);
}

static dtrain_status dtrain__checkpoint_load(dtrain__load *load, dtrain_checkpoint_state *state)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status = load->desc.path != NULL ? dtrain__load_open_model(load)
                           : ckpt->local           ? dtrain__local_open(load)
                                                   : dtrain__load_open(load);
    if (status != DTRAIN_OK)
        return status;
    load->report.step = load->index.facts.step;
    load->report.world_size = (int)load->index.facts.world_size;
    load->opened = 1;
    status = dtrain__checkpoint_collect(load, state);
    if (status == DTRAIN_OK)
        status = dtrain__load_compare(load);
    if (status == DTRAIN_OK)
        status = dtrain__save_agree(ckpt, dtrain__load_plan(load), 0, NULL);
    for (int turn = 0; status == DTRAIN_OK && turn < DTRAIN__LOAD_DONE; turn++)
        status = dtrain__load_tell(load, state, turn);
    if (status == DTRAIN_OK) /* a step or round that has ended meanwhile may have moved what it keeps */
        status = dtrain__checkpoint_collect(load, state);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__load_read(load);
    if (ckpt->local && load->model == NULL)
        status = dtrain__local_fetch(load, status);
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    return status == DTRAIN_OK ? dtrain__load_finish(load, state) : dtrain__load_lost(load, state);
}

/* Makes one attempt at a load. chosen: out, the step's name. *moved: the step may have been replaced or removed
 * meanwhile. */
static dtrain_status dtrain__checkpoint_attempt(dtrain_checkpoint *ckpt, dtrain_checkpoint_state *state,
                                                const dtrain_checkpoint_load_desc *desc,
                                                dtrain_checkpoint_report *report, char chosen[32], int *moved)
{
    dtrain__load load;
    memset(&load, 0, sizeof load);
    load.ckpt = ckpt;
    load.directory = -1;
    if (desc != NULL)
        load.desc = *desc;
    dtrain__index_begin(&load.index, ckpt->allocator);
    dtrain__verify_begin(&load.reader, &load.index, !ckpt->no_verify && !load.desc.no_verify, ckpt->allocator);
    dtrain_status status = dtrain__checkpoint_load(&load, state);
    int chose = load.step_name[0] != '\0' && (!ckpt->local || load.wants != NULL);
    if ((status == DTRAIN_ERR_IO || status == DTRAIN_ERR_CORRUPT) && chose &&
        strstr(dtrain__thread_error.text, load.step_name) == NULL) /* file names do not tell their step */
        dtrain__fail(&ckpt->error, status, "%.560s (in %s)", dtrain__thread_error.text, load.step_name);
    dtrain__error cause = dtrain__thread_error;
    *moved = load.desc.path == NULL && !ckpt->local && load.step_name[0] != '\0' &&
             (status == DTRAIN_ERR_IO || (status == DTRAIN_ERR_MISMATCH && !load.opened));
    memcpy(chosen, load.step_name, sizeof load.step_name);
    load.report.bytes_read = load.reader.bytes_read;
    if (report != NULL)
        *report = load.report;
    if (status == DTRAIN_OK && load.model == NULL) { /* for dtrain_checkpoint_value */
        dtrain__index kept = ckpt->loaded;
        ckpt->loaded = load.index;
        load.index = kept;
        ckpt->last.id.counter = 0; /* what is loaded is whole, whichever rank has its parts */
        ckpt->common = ckpt->loaded.facts;
        ckpt->branches = ckpt->local; /* else the next save finds it */
        ckpt->branch = load.branch;
    }
    dtrain__load_end(&load);
    return status == DTRAIN_OK ? status : dtrain__report(&cause);
}

DTRAIN_API dtrain_status dtrain_checkpoint_load(dtrain_checkpoint *ckpt, dtrain_checkpoint_state *state,
                                                const dtrain_checkpoint_load_desc *desc,
                                                dtrain_checkpoint_report *report)
{
    dtrain_status status = DTRAIN_OK;
    char chosen[32] = "", before[32];
    int moved = 1;
    if (ckpt == NULL || state == NULL)
        return dtrain__fail(ckpt != NULL ? &ckpt->error : NULL, DTRAIN_ERR_INVALID,
                            "dtrain_checkpoint_load: %s is NULL, expected %s", ckpt == NULL ? "ckpt" : "state",
                            ckpt == NULL ? "a checkpointer" : "where to load to");
    dtrain__checkpoint_join(ckpt); /* the load may want what is being written */
    /* A job that saves into the directory may remove the chosen step: choose again. */
    for (int attempt = 0, same = 0; attempt < DTRAIN__LOAD_ATTEMPTS && same < DTRAIN__LOAD_SAME && moved; attempt++) {
        memcpy(before, chosen, sizeof before);
        status = dtrain__checkpoint_attempt(ckpt, state, desc, report, chosen, &moved);
        same = strcmp(before, chosen) == 0 ? same + 1 : 0;
    }
    return status;
}

DTRAIN_API const char *dtrain_checkpoint_value(const dtrain_checkpoint *ckpt, const char *key, size_t *length)
{
    size_t bytes = key != NULL ? strlen(key) : 0, values = ckpt != NULL ? ckpt->loaded.value_count : 0;
    size_t settings = ckpt != NULL ? ckpt->loaded.setting_count : 0;
    for (size_t i = 0; key != NULL && i < values + settings; i++) {
        const dtrain__index_value *value = i < values ? &ckpt->loaded.values[i] : &ckpt->loaded.settings[i - values];
        if (value->key_length != bytes || memcmp(ckpt->loaded.texts + value->key, key, bytes) != 0)
            continue;
        if (length != NULL)
            *length = value->value_length;
        return ckpt->loaded.texts + value->value;
    }
    return NULL;
}

#endif
