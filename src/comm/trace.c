/* ---- >>trace ----
 * The recorder as a file that chrome://tracing and Perfetto load and tools/dtrace.c merges: a process for each rank, a
 * thread for each group, an event for each operation. Times are of CLOCK_MONOTONIC. otherData names one moment on it
 * and on CLOCK_REALTIME, which lines up the clocks of hosts. The file is written beside its target and renamed when it
 * is whole.
 *
 * The text is made in memory. The thread that met a failure may have heartbeats to send, so another one writes the
 * file: a file system that hangs holds no rank.
 *
 * Source: Trace Event Format, catapult project, JSON object format. */
#ifndef DTRAIN__TRACE
#define DTRAIN__TRACE
#include "../base/json_writer.c"
#include "op.c"
#include "recorder.c"

#define DTRAIN__TRACE_FORMAT 1

#define DTRAIN__TRACE_STACK_BYTES ((size_t)256 << 10)
#define DTRAIN__TRACE_WAIT_NS 1000000000 /* for the file of a failure */

/* A file to write. Its memory is the system's: if the write hangs, it outlives the group and its allocator. */
typedef struct dtrain__trace_file {
    char *text;
    size_t bytes, room;
    int error; /* errno of the first thing that went wrong; 0: none */
    uint32_t done;
    dtrain__os_thread thread;
    char path[DTRAIN__TRACE_PATH_BYTES + 64];
} dtrain__trace_file;

typedef struct dtrain__trace {
    dtrain_comm *comm;
    dtrain__json_writer json; /* of the event being written, in the recorder's text */
    dtrain__trace_file *file;
    int64_t now;
} dtrain__trace;

static void dtrain__trace_put(dtrain__trace *trace, const void *data, size_t bytes)
{
    dtrain__trace_file *file = trace->file;
    if (file->error == 0 && bytes > file->room - file->bytes) {
        size_t room = 2 * file->room + bytes;
        char *larger = (char *)dtrain__os_alloc(room, 64);
        if (larger == NULL) {
            file->error = ENOMEM;
            return;
        }
        if (file->bytes > 0)
            memcpy(larger, file->text, file->bytes);
        dtrain__os_free(file->text);
        file->text = larger;
        file->room = room;
    }
    if (file->error != 0)
        return;
    memcpy(file->text + file->bytes, data, bytes);
    file->bytes += bytes;
}

static void dtrain__trace_begin(dtrain__trace *trace)
{
    dtrain__json_write_start(&trace->json, trace->comm->recorder->text, DTRAIN__TRACE_TEXT_BYTES);
    dtrain__json_begin(&trace->json, 1);
}

/* Ends the object that dtrain__trace_begin began and writes it, then `after`. */
static void dtrain__trace_end(dtrain__trace *trace, const char *after)
{
    dtrain__json_end(&trace->json);
    if (!dtrain__json_write_finish(&trace->json) && trace->file->error == 0)
        trace->file->error = EOVERFLOW;
    dtrain__trace_put(trace, trace->comm->recorder->text, trace->json.bytes);
    dtrain__trace_put(trace, after, strlen(after));
}

/* Writes a value, or null if there is none. */
static void dtrain__trace_maybe(dtrain__trace *trace, const char *key, int is, uint64_t value)
{
    dtrain__json_member(&trace->json, key);
    if (is)
        dtrain__json_write_u64(&trace->json, value);
    else
        dtrain__json_write_word(&trace->json, "null");
}

/* Begins an event with what all events have; the caller adds its args. */
static void dtrain__trace_event(dtrain__trace *trace, const char *name, const char *phase)
{
    dtrain__trace_begin(trace);
    dtrain__json_member_text(&trace->json, "name", name);
    dtrain__json_member_text(&trace->json, "ph", phase);
    dtrain__json_member_u64(&trace->json, "pid", (uint64_t)trace->comm->rank);
    dtrain__json_member_u64(&trace->json, "tid", trace->comm->group);
}

static void dtrain__trace_args(dtrain__trace *trace)
{
    dtrain__json_member(&trace->json, "args");
    dtrain__json_begin(&trace->json, 1);
}

static void dtrain__trace_title(dtrain__trace *trace, const char *what, const char *title)
{
    dtrain__trace_event(trace, what, "M");
    dtrain__trace_args(trace);
    dtrain__json_member_text(&trace->json, "name", title);
    dtrain__json_end(&trace->json);
    dtrain__trace_end(trace, ",\n");
}

/* Writes an event for each rank that this one has a connection to: what carries the bytes. */
static void dtrain__trace_ways(dtrain__trace *trace)
{
    dtrain_comm *comm = trace->comm;
    for (int rank = 0; comm->plane->way != NULL && rank < comm->size; rank++) {
        char way[160] = "";
        if (rank != comm->rank)
            comm->plane->way(comm->transport.self, rank, way, sizeof way);
        if (way[0] == 0)
            continue;
        dtrain__trace_event(trace, "transport", "i");
        dtrain__json_member_us(&trace->json, "ts", (uint64_t)trace->now);
        dtrain__trace_args(trace);
        dtrain__json_member_u64(&trace->json, "peer", (uint64_t)rank);
        dtrain__json_member_text(&trace->json, "way", way);
        dtrain__json_end(&trace->json);
        dtrain__trace_end(trace, ",\n");
    }
}

static void dtrain__trace_head(dtrain__trace *trace)
{
    static const char open[] = "{\"displayTimeUnit\":\"ms\",\"otherData\":", events[] = ",\n\"traceEvents\":[\n";
    dtrain_comm *comm = trace->comm;
    dtrain__recorder *recorder = comm->recorder;
    char host[64] = "?", title[128];
    dtrain__os_host_name(host, sizeof host);
    dtrain__status_clean(host);
    dtrain__trace_put(trace, open, sizeof open - 1);
    dtrain__trace_begin(trace);
    dtrain__json_member_u64(&trace->json, "dtrain_trace", DTRAIN__TRACE_FORMAT);
    dtrain__json_member_u64(&trace->json, "rank", (uint64_t)comm->rank);
    dtrain__json_member_u64(&trace->json, "world_size", (uint64_t)comm->size);
    dtrain__json_member_u64(&trace->json, "group", comm->group);
    dtrain__json_member_text(&trace->json, "host", host);
    dtrain__json_member_u64(&trace->json, "process", (uint64_t)comm->use.process);
    dtrain__json_member_u64(&trace->json, "monotonic_ns", (uint64_t)recorder->monotonic_ns);
    dtrain__json_member_u64(&trace->json, "realtime_ns", (uint64_t)recorder->realtime_ns);
    dtrain__json_member_u64(&trace->json, "written_ns", (uint64_t)trace->now);
    dtrain__json_member_u64(&trace->json, "operations", DTRAIN__ATOMIC_LOAD(&recorder->begun, ACQUIRE));
    dtrain__json_member_u64(&trace->json, "queued", DTRAIN__ATOMIC_LOAD(&comm->queue.pending, SEQ_CST));
    dtrain__trace_end(trace, events);
    snprintf(title, sizeof title, "rank %d of %d (pid %ld on %s)", comm->rank, comm->size, comm->use.process, host);
    dtrain__trace_title(trace, "process_name", title);
    snprintf(title, sizeof title, "group %llu", (unsigned long long)comm->group);
    dtrain__trace_title(trace, "thread_name", title);
    dtrain__trace_ways(trace);
}

/* Writes the call of an operation, and how it ended. */
static void dtrain__trace_call(dtrain__trace *trace, uint64_t serial, const dtrain__record *record)
{
    const dtrain__call *call = &record->call;
    int message = dtrain__op_kind_is_message(call->kind), typed = call->kind != DTRAIN__BARRIER;
    unsigned bits = dtrain_dtype_bits((dtrain_dtype)call->dtype);
    dtrain__trace_args(trace);
    dtrain__json_member_text(&trace->json, "call", dtrain__op_kind_name(call->kind));
    dtrain__json_member_u64(&trace->json, "number", call->number);
    dtrain__json_member_text(&trace->json, "text", dtrain__op_call_text(call).text);
    dtrain__json_member_text(&trace->json, "dtype", typed ? dtrain_dtype_name((dtrain_dtype)call->dtype) : "");
    dtrain__json_member_u64(&trace->json, "count", call->count);
    dtrain__json_member_u64(&trace->json, "bytes", call->count * (bits / 8));
    dtrain__json_member_text(&trace->json, "op", call->op != 0 ? dtrain__op_name(call->op) : "");
    dtrain__trace_maybe(trace, "root", !message, call->root);
    dtrain__trace_maybe(trace, "peer", message, call->root);
    dtrain__json_member_text(&trace->json, "algorithm", dtrain__op_algorithm_name(call->algorithm));
    dtrain__json_member(&trace->json, "async");
    dtrain__json_write_word(&trace->json, record->async != 0 ? "true" : "false");
    dtrain__trace_maybe(trace, "awaited", record->awaited > 0, record->awaited - 1);
    dtrain__json_member_u64(&trace->json, "serial", serial);
    dtrain__json_member_u64(&trace->json, "called_ns", record->called_ns);
    dtrain__json_member_u64(&trace->json, "started_ns", record->started_ns);
    dtrain__trace_maybe(trace, "moved_ns", record->moved_ns != 0, record->moved_ns);
    dtrain__trace_maybe(trace, "ended_ns", record->ended_ns != 0, record->ended_ns);
    dtrain__json_member_text(&trace->json, "status",
                             record->ended_ns != 0 ? dtrain_status_name((dtrain_status)record->status) : "under way");
    if (serial == trace->comm->recorder->shown_failed)
        dtrain__json_member_text(&trace->json, "error", trace->comm->recorder->shown.text);
    dtrain__json_end(&trace->json);
}

static void dtrain__trace_operations(dtrain__trace *trace)
{
    dtrain__recorder *recorder = trace->comm->recorder;
    uint64_t last = DTRAIN__ATOMIC_LOAD(&recorder->begun, ACQUIRE);
    uint64_t serial = last > DTRAIN__RECORDS ? last - DTRAIN__RECORDS + 1 : 1;
    for (; serial <= last; serial++) {
        dtrain__record record;
        char name[64];
        if (!dtrain__recorder_read(recorder, serial, &record))
            continue;
        if (record.ended_ns == 0 && serial == last)
            record.awaited = DTRAIN__ATOMIC_LOAD(&recorder->awaited, RELAXED);
        uint64_t ended = record.ended_ns != 0 ? record.ended_ns : (uint64_t)trace->now;
        snprintf(name, sizeof name, "%s #%llu", dtrain__op_kind_name(record.call.kind),
                 (unsigned long long)record.call.number);
        dtrain__trace_event(trace, name, "X");
        dtrain__json_member_text(&trace->json, "cat",
                                 dtrain__op_kind_is_message(record.call.kind) ? "message" : "collective");
        dtrain__json_member_us(&trace->json, "ts", record.started_ns);
        dtrain__json_member_us(&trace->json, "dur", ended > record.started_ns ? ended - record.started_ns : 0);
        dtrain__trace_call(trace, serial, &record);
        dtrain__trace_end(trace, ",\n");
    }
    dtrain__trace_event(trace, "written", "i");
    dtrain__json_member_us(&trace->json, "ts", (uint64_t)trace->now);
    dtrain__trace_end(trace, "\n]}\n");
}

/* Makes the text. Returns NULL without memory. */
static dtrain__trace_file *dtrain__trace_make(dtrain_comm *comm, const char *path)
{
    dtrain__recorder *recorder = comm->recorder;
    dtrain__trace trace;
    memset(&trace, 0, sizeof trace);
    trace.comm = comm;
    trace.now = dtrain__os_now_ns();
    trace.file = (dtrain__trace_file *)dtrain__os_alloc(sizeof *trace.file, 64);
    if (trace.file == NULL)
        return NULL;
    memset(trace.file, 0, sizeof *trace.file);
    snprintf(trace.file->path, sizeof trace.file->path, "%s", path);
    dtrain__os_lock(&recorder->mutex);
    dtrain__os_lock(&recorder->error_mutex);
    recorder->shown = recorder->error;
    recorder->shown_failed = recorder->failed;
    dtrain__os_unlock(&recorder->error_mutex);
    dtrain__trace_head(&trace);
    dtrain__trace_operations(&trace);
    dtrain__os_unlock(&recorder->mutex);
    return trace.file;
}

static void dtrain__trace_write(void *pointer)
{
    dtrain__trace_file *file = (dtrain__trace_file *)pointer;
    if (file->error == 0)
        file->error = dtrain__os_replace_file(file->path, file->text, file->bytes);
    DTRAIN__ATOMIC_STORE(&file->done, 1u, RELEASE);
}

/* Waits for a file that another thread writes, for a bounded time. Returns whether it is done. */
static int dtrain__trace_wait(const dtrain__trace_file *file)
{
    int64_t until = dtrain__os_now_ns() + DTRAIN__TRACE_WAIT_NS;
    while (!DTRAIN__ATOMIC_LOAD(&file->done, ACQUIRE) && dtrain__os_now_ns() < until)
        dtrain__os_sleep(500000);
    return DTRAIN__ATOMIC_LOAD(&file->done, ACQUIRE) != 0;
}

static void dtrain__trace_free(dtrain__trace_file *file)
{
    dtrain__os_free(file->text);
    dtrain__os_free(file);
}

static dtrain_status dtrain__trace_result(const dtrain_comm *comm, const char *path, int error)
{
    return error == 0 ? DTRAIN_OK
                      : dtrain__fail(NULL, error == ENOMEM ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_IO,
                                     "comm_trace on rank %d: cannot write %.400s: %s; the old file is unchanged",
                                     comm->rank, path, dtrain__os_error_text(error));
}

DTRAIN_API dtrain_status dtrain_comm_trace(dtrain_comm *comm, const char *path)
{
    size_t bytes = path != NULL ? strlen(path) : 0;
    if (comm == NULL || bytes == 0 || bytes >= DTRAIN__TRACE_PATH_BYTES)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_trace: needs a group and a path of 1 to %d bytes (got %zu)",
                            DTRAIN__TRACE_PATH_BYTES - 1, bytes);
    if (dtrain__group_alive(comm, "comm_trace") != DTRAIN_OK ||
        dtrain__group_ours(comm, NULL, "comm_trace") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    dtrain__trace_file *file = dtrain__trace_make(comm, path);
    if (file == NULL)
        return dtrain__trace_result(comm, path, ENOMEM);
    dtrain__trace_write(file);
    dtrain_status status = dtrain__trace_result(comm, path, file->error);
    dtrain__trace_free(file);
    return status;
}

/* Keeps the prefix of the failure file: the desc's, or the environment's. */
static dtrain_status dtrain__trace_prefix(dtrain_comm *comm, const char *prefix)
{
    const char *from = prefix != NULL ? "desc.trace_on_failure" : "DTRAIN_TRACE";
    if (prefix == NULL)
        prefix = dtrain__os_getenv("DTRAIN_TRACE");
    if (prefix == NULL)
        prefix = "";
    if (strlen(prefix) >= sizeof comm->recorder->prefix)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "rank %d: %s has %zu bytes; expected at most %d", comm->rank,
                            from, strlen(prefix), DTRAIN__TRACE_PATH_BYTES - 1);
    snprintf(comm->recorder->prefix, sizeof comm->recorder->prefix, "%s", prefix);
    comm->desc.trace_on_failure = comm->recorder->prefix;
    return DTRAIN_OK;
}

/* Writes the failure file, unless the error is a deadline after which the operation can be called again. */
static void dtrain__trace_failure(dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__recorder *recorder = comm->recorder;
    dtrain__error kept = dtrain__thread_error;
    char group[40] = "", path[DTRAIN__TRACE_PATH_BYTES + 64];
    uint32_t nobody = 0;
    if (recorder->prefix[0] == 0 || (op->error.status == DTRAIN_ERR_TIMEOUT && !op->touched) ||
        !DTRAIN__ATOMIC_COMPARE_EXCHANGE(&recorder->written, &nobody, 1u, SEQ_CST))
        return;
    if (comm->group != 0)
        snprintf(group, sizeof group, ".group-%llu", (unsigned long long)comm->group);
    snprintf(path, sizeof path, "%s%s.rank-%d.json", recorder->prefix, group, comm->rank);
    dtrain__trace_file *file = dtrain__trace_make(comm, path);
    if (file != NULL &&
        dtrain__os_thread_start(&file->thread, dtrain__trace_write, file, DTRAIN__TRACE_STACK_BYTES) != 0) {
        dtrain__trace_free(file);
        file = NULL;
    }
    comm->recorder->file = file;
    if (file != NULL && !dtrain__trace_wait(file))
        dtrain__log(DTRAIN_LOG_WARN,
                    "rank %d: its last operations are not in %s after 1 s: its file system is slow or hangs",
                    comm->rank, path);
    else if (dtrain__trace_result(comm, path, file != NULL ? file->error : ENOMEM) != DTRAIN_OK)
        dtrain__log(DTRAIN_LOG_WARN, "%s", dtrain__thread_error.text);
    else
        dtrain__log(DTRAIN_LOG_INFO, "rank %d: its last operations are in %s", comm->rank, path);
    dtrain__thread_error = kept;
}

/* Ends with the file of a failure. If writing it hangs, its thread and memory are left behind. */
static void dtrain__trace_end_failure(const dtrain_comm *comm)
{
    dtrain__trace_file *file = comm->recorder != NULL ? comm->recorder->file : NULL;
    if (file == NULL || comm->use.process != dtrain__os_pid() || !dtrain__trace_wait(file))
        return;
    dtrain__os_thread_join(&file->thread);
    dtrain__trace_free(file);
}

#endif
