/* Compares the ranks' traces: which rank the others waited for, and where the ranks' calls first differ.
 * `build/dtrace --help` says how to call it and what it prints.
 *
 * cc -O2 -ffp-contract=off -I. tools/dtrace.c -o build/dtrace -lpthread -lm
 *
 * The files are those of dtrain_comm_trace, or PREFIX.rank-N.json of DTRAIN_TRACE=PREFIX. Times of one host are
 * compared by its monotonic clock. Times of different hosts are compared by their real-time clocks. */
#define DTRAIN_API static /* functions that are not called cost no time to compile */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tool.h"

#define TRACE_BYTES ((size_t)64 << 20)
#define TRACE_RANKS 1000000
#define TRACE_NS ((uint64_t)1 << 61) /* sums and differences of two times fit an int64_t */
#define TRACE_EVENTS 10000
#define TRACE_SLOWEST 5
#define TRACE_CHAIN 16
#define NONE UINT64_MAX /* a number that is null or missing */

typedef struct range {
    size_t begin, end; /* offsets in the file's text; both 0: missing */
} range;

typedef struct event {
    struct file *file;
    range name, phase, cat, args, call, text, algorithm, status;
    uint64_t number, peer, awaited, called_ns, started_ns, ended_ns;
    int64_t start, end; /* on the common clock; an operation under way ends when its file was written */
} event;

typedef struct file {
    const char *path;
    char *text;
    size_t bytes;
    uint64_t format, rank, world_size, group, monotonic_ns, realtime_ns, written_ns, operations;
    range host;
    int64_t shift; /* from the host's clock to the common clock */
    event *events;
    size_t count, room;
} file;

/* The ranks' events of one collective. */
typedef struct meeting {
    event **events;
    size_t count;
    event *last; /* the event that started last */
    int64_t first, end;
} meeting;

static file *files;
static size_t file_count;

static const char help_text[] =
    "usage: dtrace [-o MERGED.json] RANK0.json RANK1.json ...\n"
    "Compares the traces of the ranks of a run, one file for each rank and group.\n"
    "DTRAIN_TRACE=PREFIX makes the ranks write such files: PREFIX.rank-N.json.\n"
    "  -o MERGED.json  also writes one file for chrome://tracing or Perfetto\n"
    "  --help          prints this text\n"
    "  --              ends the flags: what follows are files\n"
    "It prints\n"
    "  waited for  the rank that came last to collectives or sent late, and how many\n"
    "              seconds the other ranks waited for it\n"
    "  in the end  who waited for whom when a rank stopped in an operation\n"
    "  differ      the first operation of a group that two ranks called differently,\n"
    "              or that a rank did not call\n"
    "  slowest     the longest operations, from the first rank's start to the last\n"
    "              rank's end, and the time between the first and the last start\n"
    "Exit status: 0; 1 for a file that is cut, is not a trace or cannot be read or\n"
    "written; 2 for a wrong command line.\n"
    "  DTRAIN_TRACE=run dtrun -n 4 build/train_gpt --steps 10\n"
    "  dtrace -o merged.json run.rank-*.json\n";

static int complain(const char *path, const char *what)
{
    progress_clear();
    fprintf(stderr, "dtrace: %s: %s\n", path, what);
    return 0;
}

static int complain_at(const file *f, size_t at, const char *what)
{
    progress_clear();
    fprintf(stderr, "dtrace: %s: byte %zu: %s\n", f->path, at, what);
    return 0;
}

static void *grow(void *block, size_t bytes)
{
    void *grown = realloc(block, bytes);
    if (grown == NULL) {
        complain("dtrace", "out of memory");
        exit(1);
    }
    return grown;
}

static int load(file *f)
{
    FILE *in = fopen(f->path, "rb");
    size_t room = 0, n = 1;
    if (in == NULL)
        return complain(f->path, strerror(errno));
    while (n > 0 && f->bytes <= TRACE_BYTES) {
        if (f->bytes == room)
            f->text = (char *)grow(f->text, room = room > 0 ? 2 * room : 65536);
        n = fread(f->text + f->bytes, 1, room - f->bytes, in);
        f->bytes += n;
    }
    int bad = ferror(in);
    fclose(in);
    if (bad)
        return complain(f->path, strerror(errno));
    return f->bytes <= TRACE_BYTES ? 1 : complain(f->path, "larger than 64 MiB; no trace of a rank is");
}

static int is(const file *f, range r, const char *text)
{
    return r.end - r.begin == strlen(text) && memcmp(f->text + r.begin, text, r.end - r.begin) == 0;
}

static int same(const event *a, range ra, const event *b, range rb)
{
    return ra.end - ra.begin == rb.end - rb.begin &&
           memcmp(a->file->text + ra.begin, b->file->text + rb.begin, ra.end - ra.begin) == 0;
}

/* A member to read if the object has it: a number (text NULL) or the bytes of a string. */
typedef struct field {
    const char *key;
    uint64_t *number;
    range *text;
} field;

static int take(dtrain__json_reader *reader, const dtrain__json_token *key, const dtrain__json_token *value,
                const field *fields, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!dtrain__json_is(reader, key, fields[i].key))
            continue;
        if (fields[i].text != NULL && value->kind == DTRAIN__JSON_STRING) {
            fields[i].text->begin = value->begin;
            fields[i].text->end = value->end;
        } else if (fields[i].number != NULL && value->kind == DTRAIN__JSON_NULL) {
            *fields[i].number = NONE;
        } else if (fields[i].number == NULL || !dtrain__json_u64(reader, value, fields[i].number)) {
            reader->offset = value->begin;
            reader->error = fields[i].text != NULL ? "a text was expected" : "a number below 2^64 was expected";
            return 0;
        }
    }
    return dtrain__json_skip(reader, value);
}

/* Reads the members of the object that has just begun. */
static int members(dtrain__json_reader *reader, const field *fields, size_t count)
{
    dtrain__json_token key, value;
    while (dtrain__json_next(reader, &key) == DTRAIN__JSON_KEY)
        if (dtrain__json_next(reader, &value) == DTRAIN__JSON_ERROR || !take(reader, &key, &value, fields, count))
            return 0;
    return key.kind == DTRAIN__JSON_OBJECT_END;
}

static int read_args(dtrain__json_reader *reader, const dtrain__json_token *value, event *e)
{
    field fields[] = {
        {"call", NULL, &e->call},        {"text", NULL, &e->text},           {"algorithm", NULL, &e->algorithm},
        {"status", NULL, &e->status},    {"number", &e->number, NULL},       {"peer", &e->peer, NULL},
        {"awaited", &e->awaited, NULL},  {"called_ns", &e->called_ns, NULL}, {"started_ns", &e->started_ns, NULL},
        {"ended_ns", &e->ended_ns, NULL}};
    e->args.begin = value->begin;
    if (value->kind != DTRAIN__JSON_OBJECT || !members(reader, fields, sizeof fields / sizeof fields[0]))
        return 0;
    e->args.end = reader->offset;
    return 1;
}

static int read_event(dtrain__json_reader *reader, event *e)
{
    dtrain__json_token key, value;
    field fields[] = {{"name", NULL, &e->name}, {"ph", NULL, &e->phase}, {"cat", NULL, &e->cat}};
    while (dtrain__json_next(reader, &key) == DTRAIN__JSON_KEY) {
        if (dtrain__json_next(reader, &value) == DTRAIN__JSON_ERROR)
            return 0;
        if (!(dtrain__json_is(reader, &key, "args") ? read_args(reader, &value, e)
                                                    : take(reader, &key, &value, fields, 3)))
            return 0;
    }
    return key.kind == DTRAIN__JSON_OBJECT_END;
}

/* Returns whether a time is present and in range. */
static int is_time(uint64_t ns)
{
    return ns < TRACE_NS;
}

/* Returns what is wrong with an event, or NULL. */
static const char *event_fault(const event *e)
{
    const file *f = e->file;
    if (e->phase.end == 0 || e->name.end == 0)
        return "an event without name or ph";
    if (!is(f, e->phase, "X"))
        return NULL;
    if (e->cat.end == 0 || e->args.end == 0 || e->text.end == 0 || e->status.end == 0 || e->algorithm.end == 0)
        return "an operation without cat, args, text, status or algorithm";
    if (e->number == NONE || !is_time(e->called_ns) || !is_time(e->started_ns) ||
        (e->ended_ns != NONE && !is_time(e->ended_ns)))
        return "an operation without number, or with times that cannot be";
    if (e->called_ns > e->started_ns || (e->ended_ns != NONE && e->ended_ns < e->started_ns) ||
        (e->ended_ns == NONE && f->written_ns < e->started_ns))
        return "an operation that ends before it starts";
    if ((e->awaited != NONE && e->awaited >= f->world_size) || (e->peer != NONE && e->peer >= f->world_size))
        return "an operation with a rank that the group does not have";
    return NULL;
}

static int read_events(file *f, dtrain__json_reader *reader)
{
    dtrain__json_token token;
    while (dtrain__json_next(reader, &token) == DTRAIN__JSON_OBJECT) {
        event e;
        const char *fault;
        memset(&e, 0, sizeof e);
        e.file = f;
        e.number = e.peer = e.awaited = e.called_ns = e.started_ns = e.ended_ns = NONE;
        if (!read_event(reader, &e))
            return 0;
        fault = event_fault(&e);
        if (fault != NULL)
            return complain_at(f, token.begin, fault);
        if (is(f, e.phase, "i"))
            continue;
        if (f->count == TRACE_EVENTS)
            return complain_at(f, token.begin, "more events than a rank keeps");
        if (f->count == f->room)
            f->events = (event *)grow(f->events, (f->room = f->room > 0 ? 2 * f->room : 512) * sizeof(event));
        f->events[f->count++] = e;
    }
    if (token.kind == DTRAIN__JSON_ARRAY_END)
        return 1;
    return reader->error == NULL ? complain_at(f, token.begin, "an event was expected") : 0;
}

static int head_fault(const file *f)
{
    if (f->format != DTRAIN__TRACE_FORMAT)
        return complain(f->path, "no otherData of a dtrain trace, format 1, before its events");
    if (f->world_size == 0 || f->world_size > TRACE_RANKS || f->rank >= f->world_size || f->group == NONE ||
        !is_time(f->monotonic_ns) || !is_time(f->realtime_ns) || !is_time(f->written_ns) || f->operations == NONE)
        return complain(f->path, "otherData has no rank, world_size, group, operations or clocks that can be");
    return 1;
}

/* Reads a file: an object with otherData, which names the rank and its group, and then traceEvents. */
static int read_file(file *f)
{
    dtrain__json_reader reader;
    dtrain__json_token key, value;
    field head[] = {{"dtrain_trace", &f->format, NULL},
                    {"rank", &f->rank, NULL},
                    {"world_size", &f->world_size, NULL},
                    {"group", &f->group, NULL},
                    {"monotonic_ns", &f->monotonic_ns, NULL},
                    {"realtime_ns", &f->realtime_ns, NULL},
                    {"written_ns", &f->written_ns, NULL},
                    {"operations", &f->operations, NULL},
                    {"host", NULL, &f->host}};
    int events = 0, good = 1;
    f->rank = f->group = f->monotonic_ns = f->realtime_ns = f->written_ns = f->operations = NONE;
    if (!load(f))
        return 0;
    dtrain__json_open(&reader, f->text, f->bytes);
    if (dtrain__json_next(&reader, &value) != DTRAIN__JSON_OBJECT)
        return complain_at(f, reader.offset, reader.error != NULL ? reader.error : "no object, so no trace");
    while (good && dtrain__json_next(&reader, &key) == DTRAIN__JSON_KEY &&
           dtrain__json_next(&reader, &value) != DTRAIN__JSON_ERROR) {
        if (dtrain__json_is(&reader, &key, "otherData") && value.kind == DTRAIN__JSON_OBJECT && f->format == 0)
            good = members(&reader, head, sizeof head / sizeof head[0]);
        else if (dtrain__json_is(&reader, &key, "traceEvents") && value.kind == DTRAIN__JSON_ARRAY && !events++) {
            if (!head_fault(f))
                return 0;
            good = read_events(f, &reader);
        } else
            good = dtrain__json_skip(&reader, &value);
    }
    if (good && reader.error == NULL && events && dtrain__json_next(&reader, &value) == DTRAIN__JSON_END)
        return 1;
    if (reader.error != NULL)
        return complain_at(f, reader.offset, reader.error);
    return good ? complain(f->path, "holds no traceEvents") : 0;
}

/* Brings all times to one clock. Files of one host and boot share its monotonic clock. Others are shifted by the
 * difference of their real-time clocks. */
static void set_clocks(void)
{
    int64_t base = INT64_MAX;
    for (size_t i = 0; i < file_count; i++) {
        file *f = &files[i];
        f->shift = (int64_t)f->realtime_ns - (int64_t)f->monotonic_ns;
        for (size_t k = 0; k < i; k++) {
            int64_t apart = files[k].shift - f->shift;
            size_t bytes = f->host.end - f->host.begin;
            if (bytes == files[k].host.end - files[k].host.begin && apart < 1000000000 && apart > -1000000000 &&
                memcmp(files[k].text + files[k].host.begin, f->text + f->host.begin, bytes) == 0) {
                f->shift = files[k].shift;
                break;
            }
        }
        for (size_t k = 0; k < f->count; k++)
            if (f->events[k].started_ns != NONE && (int64_t)f->events[k].started_ns + f->shift < base)
                base = (int64_t)f->events[k].started_ns + f->shift;
    }
    for (size_t i = 0; i < file_count; i++) {
        file *f = &files[i];
        f->shift -= base != INT64_MAX ? base : 0;
        for (size_t k = 0; k < f->count; k++) {
            event *e = &f->events[k];
            e->start = e->started_ns != NONE ? (int64_t)e->started_ns + f->shift : 0;
            e->end = (int64_t)(e->ended_ns != NONE ? e->ended_ns : f->written_ns) + f->shift;
        }
    }
}

static int check_set(void)
{
    for (size_t i = 0; i < file_count; i++)
        for (size_t k = 0; k < i; k++) {
            char what[200];
            if (files[i].group != files[k].group)
                continue;
            if (files[i].rank == files[k].rank)
                snprintf(what, sizeof what, "of rank %llu, as is %.120s; give one file a rank",
                         (unsigned long long)files[i].rank, files[k].path);
            else if (files[i].world_size != files[k].world_size)
                snprintf(what, sizeof what, "of %llu ranks, and %.120s of %llu; give the files of one run",
                         (unsigned long long)files[i].world_size, files[k].path,
                         (unsigned long long)files[k].world_size);
            else
                continue;
            return complain(files[i].path, what);
        }
    return 1;
}

static int is_operation(const event *e)
{
    return is(e->file, e->phase, "X");
}

static int is_collective(const event *e)
{
    return is_operation(e) && is(e->file, e->cat, "collective");
}

static int is_good(const event *e)
{
    return is(e->file, e->status, "OK");
}

/* Returns whether a rank stopped in an operation while it waited for another rank. */
static int is_stuck(const event *e)
{
    return e != NULL && !is_good(e) && e->awaited != NONE;
}

static int by_meeting(const void *left, const void *right)
{
    const event *a = *(event *const *)left, *b = *(event *const *)right;
    if (a->file->group != b->file->group)
        return a->file->group < b->file->group ? -1 : 1;
    if (a->number != b->number)
        return a->number < b->number ? -1 : 1;
    return a->file->rank < b->file->rank ? -1 : a->file->rank > b->file->rank;
}

/* Returns every collective, sorted by group, number and rank. A call that was repeated after a timeout has its number
 * twice: the later one is kept. */
static event **collect(size_t *count)
{
    size_t all = 0, kept = 0;
    for (size_t i = 0; i < file_count; i++)
        all += files[i].count;
    event **sorted = (event **)grow(NULL, (all + 1) * sizeof(event *));
    all = 0;
    for (size_t i = 0; i < file_count; i++)
        for (size_t k = 0; k < files[i].count; k++)
            if (is_collective(&files[i].events[k]))
                sorted[all++] = &files[i].events[k];
    qsort(sorted, all, sizeof(event *), by_meeting);
    for (size_t i = 0; i < all; i++) {
        event *before = kept > 0 ? sorted[kept - 1] : NULL;
        if (before == NULL || by_meeting(&before, &sorted[i]) != 0)
            sorted[kept++] = sorted[i];
        else if (is(before->file, before->status, "ERR_TIMEOUT") && sorted[i]->start > before->start)
            sorted[kept - 1] = sorted[i];
    }
    *count = kept;
    return sorted;
}

/* Collects the events with the group and number of events[0], which stand next to each other. */
static meeting meet(event **events, size_t count)
{
    meeting m = {events, 0, events[0], events[0]->start, events[0]->end};
    while (m.count < count && events[m.count]->number == events[0]->number &&
           events[m.count]->file->group == events[0]->file->group) {
        event *e = events[m.count++];
        m.last = e->start > m.last->start ? e : m.last;
        m.first = e->start < m.first ? e->start : m.first;
        m.end = e->end > m.end ? e->end : m.end;
    }
    return m;
}

/* Prints bytes of a file, with ? for control characters. */
static void show(const event *e, range r)
{
    for (size_t i = r.begin; i < r.end; i++) {
        unsigned char byte = (unsigned char)e->file->text[i];
        putchar(byte < 0x20 || byte == 0x7f ? '?' : byte);
    }
}

static void show_call(const event *e)
{
    show(e, e->text);
    if (e->file->group != 0)
        printf(" of group %llu", (unsigned long long)e->file->group);
}

static double seconds(int64_t ns)
{
    return (double)ns * 1e-9;
}

/* Returns whether the file would hold this call if its rank had made it. A file keeps only its rank's last calls. */
static int covers(const file *f, const event *call)
{
    uint64_t lowest = NONE, operations = 0;
    for (size_t i = 0; i < f->count; i++) {
        operations += is_operation(&f->events[i]) != 0;
        if (is_collective(&f->events[i]) && f->events[i].number < lowest)
            lowest = f->events[i].number;
    }
    return f->group == call->file->group && (int64_t)f->written_ns + f->shift >= call->start &&
           (operations == f->operations || lowest <= call->number);
}

/* Prints how the ranks of a meeting differ; returns 0 if they do not. */
static int differs(const meeting *m)
{
    const event *first = m->events[0];
    for (size_t i = 1; i < m->count; i++) {
        const event *other = m->events[i];
        if (same(first, first->text, other, other->text) && same(first, first->algorithm, other, other->algorithm))
            continue;
        progress_end();
        printf("differ:      first in #%llu of group %llu: rank %llu called ", (unsigned long long)first->number,
               (unsigned long long)first->file->group, (unsigned long long)first->file->rank);
        show(first, first->text);
        printf(" by ");
        show(first, first->algorithm);
        printf(", rank %llu ", (unsigned long long)other->file->rank);
        show(other, other->text);
        printf(" by ");
        show(other, other->algorithm);
        printf("\n");
        return 1;
    }
    for (size_t i = 0; i < file_count; i++) {
        size_t k = 0;
        while (k < m->count && m->events[k]->file != &files[i])
            k++;
        if (k < m->count || !covers(&files[i], first))
            continue;
        progress_end();
        printf("differ:      first in ");
        show_call(first);
        printf(", which rank %llu called and rank %llu had not, %.6f s later\n", (unsigned long long)first->file->rank,
               (unsigned long long)files[i].rank,
               seconds((int64_t)files[i].written_ns + files[i].shift - first->start));
        return 1;
    }
    return 0;
}

static void find_difference(event **events, size_t count)
{
    size_t step, numbers = 0;
    progress_begin("dtrace", 500);
    for (size_t at = 0; at < count; at += step, numbers++) {
        meeting m = meet(events + at, count - at);
        step = m.count;
        progress_show((double)at, (double)count, "comparing calls, %.0f %%", 100 * (double)at / (double)count);
        if (differs(&m))
            return;
    }
    progress_end();
    printf("differ:      in none of %zu collectives\n", numbers);
}

/* The time that other ranks waited for one rank. */
typedef struct waited {
    uint64_t rank;
    double seconds;
    size_t operations;
} waited;

static waited *waited_for(waited *all, uint64_t rank)
{
    size_t i = 0;
    while (i < 2 * file_count && all[i].operations > 0 && all[i].rank != rank)
        i++;
    all[i].rank = rank;
    return &all[i];
}

/* Returns the send of a recv, or the recv of a send; NULL if no file holds it. */
static const event *counterpart(const event *e)
{
    const char *other = is(e->file, e->call, "recv") ? "send" : "recv";
    for (size_t i = 0; i < file_count; i++)
        for (size_t k = 0; files[i].rank == e->peer && files[i].group == e->file->group && k < files[i].count; k++) {
            const event *c = &files[i].events[k];
            if (is_operation(c) && is(c->file, c->call, other) && c->number == e->number && c->peer == e->file->rank)
                return c;
        }
    return NULL;
}

/* Adds the time that `waiter` waited until `start`, or until it gave up, to the time that ranks waited for `rank`. */
static void add_wait(waited *all, const event *waiter, uint64_t rank, int64_t start, int *first)
{
    int64_t until = start < waiter->end ? start : waiter->end;
    if (rank == waiter->file->rank || until <= waiter->start)
        return;
    waited *w = waited_for(all, rank);
    w->seconds += seconds(until - waiter->start);
    w->operations += (size_t)*first;
    *first = 0;
}

/* Returns the rank that never came to a meeting and for which `e` waited, directly or through other ranks; or NONE. */
static uint64_t absent(const meeting *m, const event *e)
{
    for (size_t links = 0; links < m->count && is_stuck(e); links++) {
        const event *next = NULL;
        for (size_t i = 0; i < m->count; i++)
            if (m->events[i]->file->rank == e->awaited)
                next = m->events[i];
        if (next == NULL)
            return e->awaited;
        e = next;
    }
    return NONE;
}

static void find_waited(event **events, size_t count)
{
    waited *all = (waited *)grow(NULL, (2 * file_count + 1) * sizeof(waited)), *most = all;
    double sum = 0;
    size_t step;
    progress_begin("dtrace", 500);
    memset(all, 0, (2 * file_count + 1) * sizeof(waited));
    for (size_t at = 0; at < count; at += step) {
        meeting m = meet(events + at, count - at);
        int first = 1;
        step = m.count;
        progress_show((double)at, (double)count, "comparing starts, %.0f %%", 100 * (double)at / (double)count);
        for (size_t i = 0; i < m.count; i++) {
            uint64_t missing = absent(&m, m.events[i]);
            if (missing != NONE)
                add_wait(all, m.events[i], missing, INT64_MAX, &first);
            else
                add_wait(all, m.events[i], m.last->file->rank, m.last->start, &first);
        }
    }
    for (size_t i = 0; i < file_count; i++)
        for (size_t k = 0; k < files[i].count; k++) {
            const event *e = &files[i].events[k], *send;
            int first = 1;
            progress_show((double)i, (double)file_count, "matching messages, file %zu of %zu", i + 1, file_count);
            if (is_operation(e) && is(e->file, e->call, "recv") && (send = counterpart(e)) != NULL)
                add_wait(all, e, send->file->rank, send->start, &first);
        }
    for (size_t i = 0; i < 2 * file_count; i++) {
        sum += all[i].seconds;
        most = all[i].seconds > most->seconds ? &all[i] : most;
    }
    progress_end();
    if (sum > 0)
        printf("waited for:  rank %llu, %.6f s in %zu operations, of %.6f s that ranks waited for each other\n",
               (unsigned long long)most->rank, most->seconds, most->operations, sum);
    else
        printf("waited for:  none\n");
    free(all);
}

/* Returns the last operation of a rank of a group; NULL if there is none. */
static const event *last_of(uint64_t group, uint64_t rank)
{
    const event *last = NULL;
    for (size_t i = 0; i < file_count; i++)
        for (size_t k = 0; files[i].rank == rank && files[i].group == group && k < files[i].count; k++) {
            const event *e = &files[i].events[k];
            if (is_operation(e) && (last == NULL || e->start >= last->start))
                last = e;
        }
    return last;
}

/* Prints who waited for whom when the ranks stopped, beginning with the rank that waited first. */
static void find_last(void)
{
    const event *chosen = NULL, *e;
    for (size_t i = 0; i < file_count; i++) {
        e = last_of(files[i].group, files[i].rank);
        if (is_stuck(e) && (chosen == NULL || e->start < chosen->start))
            chosen = e;
    }
    if (chosen == NULL)
        return;
    e = chosen;
    for (int links = 0; is_stuck(e) && links < TRACE_CHAIN; links++) {
        const event *next = last_of(e->file->group, e->awaited);
        printf("%srank %llu waited for rank %llu in ", links == 0 ? "in the end:  " : "             ",
               (unsigned long long)e->file->rank, (unsigned long long)e->awaited);
        show_call(e);
        printf(" (");
        show(e, e->status);
        printf(")\n");
        if (next == NULL)
            printf("             of rank %llu there is no operation here\n", (unsigned long long)e->awaited);
        e = next == chosen ? NULL : next;
    }
    if (e == NULL || is_stuck(e))
        return;
    int64_t before = chosen->start - e->end;
    printf("             rank %llu ended ", (unsigned long long)e->file->rank);
    show_call(e);
    printf(" (");
    show(e, e->status);
    printf(") %.6f s %s rank %llu began to wait\n", seconds(before < 0 ? -before : before),
           before < 0 ? "after" : "before", (unsigned long long)chosen->file->rank);
}

static void find_slowest(event **events, size_t count)
{
    meeting slowest[TRACE_SLOWEST];
    size_t step, kept = 0;
    for (size_t at = 0; at < count; at += step) {
        meeting m = meet(events + at, count - at);
        size_t place = kept < TRACE_SLOWEST ? kept++ : TRACE_SLOWEST;
        step = m.count;
        for (; place > 0 && slowest[place - 1].end - slowest[place - 1].first < m.end - m.first; place--)
            if (place < TRACE_SLOWEST)
                slowest[place] = slowest[place - 1];
        if (place < TRACE_SLOWEST)
            slowest[place] = m;
    }
    for (size_t i = 0; i < kept; i++) {
        const meeting *m = &slowest[i];
        printf("%s", i == 0 ? "slowest:     " : "             ");
        show_call(m->last);
        printf(" %.6f s, starts %.6f s apart, rank %llu last\n", seconds(m->end - m->first),
               seconds(m->last->start - m->first), (unsigned long long)m->last->file->rank);
    }
}

static void put(FILE *out, const event *e, range r)
{
    fwrite(e->file->text + r.begin, 1, r.end - r.begin, out);
}

/* Writes an event. The bytes of its strings and args are checked JSON and are copied unchanged. */
static void put_event(FILE *out, const event *e, int first)
{
    fprintf(out, "%s{\"name\":\"", first ? "" : ",\n");
    put(out, e, e->name);
    fprintf(out, "\",\"ph\":\"");
    put(out, e, e->phase);
    fprintf(out, "\",\"pid\":%llu,\"tid\":%llu", (unsigned long long)e->file->rank, (unsigned long long)e->file->group);
    if (is_operation(e)) {
        int64_t ns = e->end - e->start;
        fprintf(out, ",\"cat\":\"");
        put(out, e, e->cat);
        fprintf(out, "\",\"ts\":%lld.%03d,\"dur\":%lld.%03d", (long long)(e->start / 1000), (int)(e->start % 1000),
                (long long)(ns / 1000), (int)(ns % 1000));
    }
    if (e->args.end > 0) {
        fprintf(out, ",\"args\":");
        put(out, e, e->args);
    }
    fprintf(out, "}");
}

static int merge(const char *path)
{
    FILE *out = fopen(path, "wb");
    int first = 1;
    if (out == NULL)
        return complain(path, strerror(errno));
    fprintf(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    progress_begin("dtrace", 500);
    for (size_t i = 0; i < file_count; i++) {
        progress_show((double)i, (double)file_count, "writing file %zu of %zu", i + 1, file_count);
        for (size_t k = 0; k < files[i].count; k++, first = 0)
            put_event(out, &files[i].events[k], first);
    }
    progress_end();
    fprintf(out, "\n]}\n");
    int bad = ferror(out);
    if (fclose(out) != 0 || bad) {
        complain(path, strerror(errno));
        remove(path);
        return 0;
    }
    return 1;
}

static int analyse(const char *output)
{
    size_t count;
    event **events;
    if (!check_set())
        return 0;
    set_clocks();
    events = collect(&count);
    find_waited(events, count);
    find_last();
    find_difference(events, count);
    find_slowest(events, count);
    free(events);
    return output == NULL || merge(output);
}

int main(int argc, char **argv)
{
    const char *output = NULL;
    int good = 1, first = 1;
    utf8_arguments(argc, argv);
    for (; first < argc && argv[first][0] == '-' && strcmp(argv[first], "--") != 0; first++) {
        if (strcmp(argv[first], "--help") == 0 || strcmp(argv[first], "-h") == 0)
            return tool_help(help_text);
        if (strcmp(argv[first], "-o") != 0)
            return tool_wrong("dtrace", argv[first], NULL, "there is no such flag");
        if (++first == argc)
            return tool_wrong("dtrace", "-o", NULL, "the name of a file is expected after it");
        output = argv[first];
    }
    first += first < argc && strcmp(argv[first], "--") == 0;
    if (first >= argc)
        return tool_wrong("dtrace", "RANK0.json", NULL, "a trace for each rank is expected");
    file_count = (size_t)(argc - first);
    files = (file *)grow(NULL, file_count * sizeof(file));
    memset(files, 0, file_count * sizeof(file));
    progress_begin("dtrace", 500);
    for (size_t i = 0; i < file_count && good; i++) {
        progress_show((double)i, (double)file_count, "reading file %zu of %zu", i + 1, file_count);
        files[i].path = argv[first + (int)i];
        good = read_file(&files[i]);
    }
    progress_end();
    good = good && analyse(output);
    for (size_t i = 0; i < file_count; i++) {
        free(files[i].text);
        free(files[i].events);
    }
    free(files);
    return good && fflush(stdout) == 0 ? 0 : 1;
}
