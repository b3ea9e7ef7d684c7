/* ---- >>local ----
 * Checkpoints on disks that ranks do not share. Each rank keeps its own in directory/rank-NNNNN, with an index of its
 * own part. It may be started later on another host or with another number, so every rank lists all parts that it can
 * see. The ranks load the newest save whose parts hold everything, wherever they are. A rank reads what it can reach,
 * and asks the others for the rest. */
#ifndef DTRAIN__LOCAL
#define DTRAIN__LOCAL
#include "load.c"
#include "../comm/mover.c"

#define DTRAIN__LOCAL_TURN ((size_t)4 << 20)    /* most bytes of one request */
#define DTRAIN__LOCAL_INDEX ((size_t)256 << 20) /* most bytes of the index of one part */
#define DTRAIN__LOCAL_LIST ((size_t)16 << 20)   /* most bytes of the list of what one rank sees */

/* A part that a rank can see. */
typedef struct dtrain__local_part {
    uint64_t step;
    dtrain__index_save_id id;
    uint64_t world_size;
    uint64_t rank;   /* the rank that wrote it */
    uint64_t holder; /* the rank that sees it */
    uint64_t before; /* 1: a later save of the step has replaced its index */
    uint64_t age;    /* parts replaced so: 0: none, 2: some, 4: all; and 1 more if some ranks have no part */
    uint64_t branch;
} dtrain__local_part;

static const char *dtrain__local_index(uint64_t before)
{
    return before ? DTRAIN__SAVE_BEFORE : DTRAIN__SAVE_INDEX;
}

typedef struct dtrain__local_list {
    dtrain_checkpoint *ckpt;
    dtrain__local_part *parts;
    size_t count;
    int rank; /* the rank whose directory is being read */
    dtrain_status status;
} dtrain__local_list;

/* Adds the part that an index of one step of a rank lists; a damaged index is skipped. */
static dtrain_status dtrain__local_add(dtrain__local_list *list, int directory, const char *name, uint64_t before)
{
    dtrain_checkpoint *ckpt = list->ckpt;
    dtrain__index index;
    uint64_t ignored = 0;
    dtrain__index_begin(&index, ckpt->allocator);
    dtrain_status status =
        dtrain__index_read_file(&index, directory, dtrain__local_index(before), DTRAIN__LOCAL_INDEX, &ignored);
    if (status == DTRAIN_OK)
        status = dtrain__load_of_step(&index, name);
    if (status == DTRAIN_OK && index.file_count == 1 && index.files[0].rank == list->rank) {
        const dtrain__index_facts *facts = &index.facts;
        dtrain__local_part part = {
            facts->step, facts->id, facts->world_size, (uint64_t)list->rank, (uint64_t)ckpt->rank,
            before,      0,         facts->branch};
        status = DTRAIN__INDEX_ADD(ckpt->allocator, list->parts, list->count, part);
    } else if (status == DTRAIN_ERR_CORRUPT) {
        dtrain__log(DTRAIN_LOG_WARN, "%.600s", dtrain__thread_error.text);
    }
    dtrain__index_free(&index);
    return status == DTRAIN_ERR_MEMORY ? status : DTRAIN_OK;
}

/* Adds the parts of one step, from the open directory of a rank. */
static dtrain_status dtrain__local_add_step(dtrain__local_list *list, int directory, uint64_t step)
{
    char name[32];
    int fd = -1;
    dtrain__part_step_name(name, step);
    dtrain_status status = DTRAIN_OK;
    if (dtrain__file_open_directory(&fd, directory, name, "checkpoint") != DTRAIN_OK)
        return DTRAIN_OK;
    for (uint64_t before = 0; before < 2 && status == DTRAIN_OK; before++)
        status = dtrain__local_add(list, fd, name, before);
    dtrain__file_close(fd);
    return status;
}

/* Lists the parts of one rank's directory. */
static int dtrain__local_look(void *user, const char *name)
{
    dtrain__local_list *list = (dtrain__local_list *)user;
    uint64_t rank;
    int fd = -1;
    const char *end = strncmp(name, "rank-", 5) == 0 ? dtrain__part_digits(name + 5, &rank) : NULL;
    if (end == NULL || *end != '\0' || rank > INT_MAX)
        return 0;
    list->rank = (int)rank;
    if (dtrain__file_open_directory(&fd, list->ckpt->base, name, "checkpoint") != DTRAIN_OK)
        return 0;
    if (dtrain__save_list_steps(list->ckpt, fd) == ENOMEM) /* an older step must not be taken for the newest */
        list->status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of steps");
    for (size_t i = 0; i < list->ckpt->step_count && list->status == DTRAIN_OK; i++)
        list->status = dtrain__local_add_step(list, fd, list->ckpt->steps[i].step);
    dtrain__file_close(fd);
    return list->status != DTRAIN_OK;
}

/* What the ranks have sent, one after the other. */
typedef struct dtrain__local_told {
    unsigned char *data;
    size_t bytes, *counts; /* counts: bytes of each rank */
} dtrain__local_told;

static void dtrain__local_told_free(dtrain_checkpoint *ckpt, dtrain__local_told *told)
{
    dtrain__free(ckpt->allocator, told->data);
    dtrain__free(ckpt->allocator, told->counts);
    memset(told, 0, sizeof *told);
}

/* Adds up the bytes that ranks announce. Each may announce at most `most`; if `from` is not -1, only that rank may. */
static dtrain_status dtrain__local_announced(dtrain_checkpoint *ckpt, const uint64_t *sizes, size_t most, int from,
                                             dtrain__local_told *told)
{
    size_t sum = 0;
    for (int rank = 0; rank < ckpt->ranks; rank++) {
        size_t limit = from < 0 || rank == from ? most : 0;
        told->counts[rank] = (size_t)sizes[rank];
        if (sizes[rank] > limit || !dtrain__add_size(sum, told->counts[rank], &sum))
            return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                "checkpoint: rank %d announces %llu bytes of lists, expected at most %zu", rank,
                                (unsigned long long)sizes[rank], limit);
    }
    told->data = (unsigned char *)dtrain__alloc(ckpt->allocator, sum);
    told->bytes = told->data != NULL ? sum : 0;
    return told->data != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
}

/* Gathers any number of bytes from every rank, within the limits of dtrain__local_announced. Free the result. */
static dtrain_status dtrain__local_gather(dtrain_checkpoint *ckpt, const void *mine, size_t mine_bytes, size_t most,
                                          int from, dtrain__local_told *told)
{
    size_t ranks = (size_t)ckpt->ranks;
    uint64_t *sizes = (uint64_t *)dtrain__alloc(ckpt->allocator, ranks * sizeof *sizes);
    memset(told, 0, sizeof *told);
    told->counts = (size_t *)dtrain__alloc(ckpt->allocator, ranks * sizeof *told->counts);
    dtrain_status status = sizes != NULL && told->counts != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    if (status == DTRAIN_OK)
        sizes[ckpt->rank] = mine_bytes;
    if (status == DTRAIN_OK && ranks > 1)
        status = dtrain_all_gather(ckpt->comm, &sizes[ckpt->rank], sizes, ranks, DTRAIN_U64);
    if (status == DTRAIN_OK)
        status = dtrain__local_announced(ckpt, sizes, most, from, told);
    if (status == DTRAIN_OK && ranks > 1)
        status = dtrain_all_gather_v(ckpt->comm, mine, told->data, told->counts, NULL, DTRAIN_U8);
    else if (status == DTRAIN_OK && mine_bytes > 0)
        memcpy(told->data, mine, mine_bytes);
    dtrain__free(ckpt->allocator, sizes);
    if (status == DTRAIN_ERR_MEMORY)
        dtrain__fail(NULL, status, "checkpoint: no memory for lists of %zu ranks", ranks);
    return status;
}

/* Checks the lists of parts: a rank may list only what it sees itself. */
static dtrain_status dtrain__local_check_parts(const dtrain_checkpoint *ckpt, const dtrain__local_told *told)
{
    const dtrain__local_part *part = (const dtrain__local_part *)(const void *)told->data;
    for (int rank = 0; rank < ckpt->ranks; rank++) {
        size_t count = told->counts[rank] / sizeof *part;
        int good = told->counts[rank] % sizeof *part == 0;
        for (size_t i = 0; i < count && good; i++, part++)
            good = part->holder == (uint64_t)rank && part->rank <= INT_MAX && part->before <= 1;
        if (!good)
            return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                "checkpoint: rank %d lists parts that it cannot see: build all ranks from one dtrain.h",
                                rank);
    }
    return DTRAIN_OK;
}

static int dtrain__local_newer(const void *left, const void *right)
{
    const dtrain__local_part *a = (const dtrain__local_part *)left, *b = (const dtrain__local_part *)right;
    const uint64_t x[] = {b->branch, b->step, a->age, b->id.nonce, b->id.counter, a->rank, a->holder};
    const uint64_t y[] = {a->branch, a->step, b->age, a->id.nonce, a->id.counter, b->rank, b->holder};
    for (int i = 0; i < 7; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

/* Reads the index of a part that this rank sees. */
static dtrain_status dtrain__local_read(dtrain__load *load, const dtrain__local_part *part, void **text, size_t *bytes)
{
    char name[80], step[32];
    int fd = -1;
    dtrain__part_step_name(step, part->step);
    snprintf(name, sizeof name, "rank-%05d/%s", (int)part->rank, step);
    dtrain_status status = dtrain__file_open_directory(&fd, load->ckpt->base, name, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__file_read_all(fd, dtrain__local_index(part->before), DTRAIN__LOCAL_INDEX,
                                       load->ckpt->allocator, text, bytes, "checkpoint");
    load->reader.bytes_read += *bytes;
    dtrain__file_close(fd);
    return status;
}

/* Adds the index that the holder of a part has sent. Returns whether it is of that part. */
static int dtrain__local_take_index(dtrain__load *load, const dtrain__local_part *part, const dtrain__local_told *told,
                                    dtrain_status *status)
{
    dtrain__index *index = &load->index;
    size_t before = index->file_count;
    *status = dtrain__index_read(index, DTRAIN__SAVE_INDEX, (const char *)told->data, told->bytes);
    if (*status != DTRAIN_OK || index->file_count != before + 1 || index->facts.step != part->step ||
        !dtrain__index_same_save(&index->facts.id, &part->id) || (uint64_t)index->files[before].rank != part->rank)
        return 0;
    index->files[before].holder = (int)part->holder;
    return 1;
}

/* Tries the save of parts[0] to parts[count - 1], with the first part of each rank. Every rank gets all their indexes.
 * *whole: they hold everything. The result is the same on every rank. */
static dtrain_status dtrain__local_try(dtrain__load *load, const dtrain__local_part *parts, size_t count, int *whole)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status = DTRAIN_OK, sent;
    dtrain__error full; /* no memory here; other than a part that is missing */
    memset(&full, 0, sizeof full);
    dtrain__index_clear(&load->index);
    *whole = 1;
    for (size_t i = 0; i < count && *whole; i++) {
        dtrain__local_told told;
        void *text = NULL;
        size_t bytes = 0;
        if (i > 0 && parts[i].rank == parts[i - 1].rank)
            continue;
        if (parts[i].holder == (uint64_t)ckpt->rank)
            status = dtrain__local_read(load, &parts[i], &text, &bytes);
        if (status == DTRAIN_ERR_MEMORY)
            full = dtrain__thread_error;
        sent = dtrain__local_gather(ckpt, text, status == DTRAIN_OK ? bytes : 0, DTRAIN__LOCAL_INDEX,
                                    (int)parts[i].holder, &told);
        if (sent == DTRAIN_OK)
            *whole = dtrain__local_take_index(load, &parts[i], &told, &status);
        dtrain__free(ckpt->allocator, text);
        dtrain__local_told_free(ckpt, &told);
        if (sent != DTRAIN_OK)
            return dtrain__fail(&ckpt->error, sent, "checkpoint: %.600s", dtrain__thread_error.text);
    }
    for (size_t k = 0; k < count; k++) /* a rank reads what it sees itself */
        for (size_t i = 0; i < load->index.file_count && parts[k].holder == (uint64_t)ckpt->rank; i++)
            if ((uint64_t)load->index.files[i].rank == parts[k].rank)
                load->index.files[i].holder = -1;
    status = *whole ? dtrain__index_settle(&load->index, 1) : status;
    *whole = *whole && status == DTRAIN_OK;
    return full.status != DTRAIN_OK ? dtrain__report(&full) : status == DTRAIN_ERR_MEMORY ? status : DTRAIN_OK;
}

/* Returns the end of the parts that are of the save of parts[i]. */
static size_t dtrain__local_end(const dtrain__local_part *parts, size_t i, size_t count)
{
    size_t end = i;
    while (end < count && parts[end].step == parts[i].step && dtrain__index_same_save(&parts[end].id, &parts[i].id))
        end++;
    return end;
}

/* Sorts the parts by save, the newest first. Among saves of one step, the first is one whose parts are all there, and
 * of which no part was replaced. Parts of ranks that a later, smaller job lacks are never removed. */
static void dtrain__local_sort(dtrain__local_part *parts, size_t count)
{
    for (size_t i = 0; i < count; i++)
        parts[i].age = 0;
    qsort(parts, count, sizeof *parts, dtrain__local_newer);
    for (size_t i = 0, end; i < count; i = end) {
        uint64_t any = 0, all = 1, ranks = 0;
        end = dtrain__local_end(parts, i, count);
        for (size_t k = i; k < end; k++) {
            any |= parts[k].before != 0;
            all &= parts[k].before != 0;
            ranks += k == i || parts[k].rank != parts[k - 1].rank;
        }
        for (size_t k = i; k < end; k++)
            parts[k].age = 2 * (any + all) + (ranks < parts[k].world_size);
    }
    qsort(parts, count, sizeof *parts, dtrain__local_newer);
}

/* Goes through the saves that any rank sees, the newest first, until one is whole. */
static dtrain_status dtrain__local_choose(dtrain__load *load, dtrain__local_part *parts, size_t count)
{
    dtrain_status status = DTRAIN_OK;
    int whole = 0;
    if (count > 0)
        dtrain__local_sort(parts, count);
    for (size_t i = 0, end; i < count && !whole; i = end) {
        end = dtrain__local_end(parts, i, count);
        if (load->desc.exact && parts[i].step != load->desc.step)
            continue;
        status = dtrain__local_try(load, parts + i, end - i, &whole);
        status = dtrain__save_agree(load->ckpt, status, 0, NULL);
        if (status != DTRAIN_OK)
            return status;
        dtrain__part_step_name(load->step_name, parts[i].step);
        load->branch = parts[0].branch + (i > 0);
        if (!whole && load->ckpt->rank == 0)
            dtrain__log(DTRAIN_LOG_WARN, "checkpoint: step %llu is not whole on the disks of the ranks: %.400s",
                        (unsigned long long)parts[i].step, dtrain__thread_error.text);
    }
    if (whole)
        return DTRAIN_OK;
    status =
        dtrain__fail(&load->ckpt->error, DTRAIN_ERR_IO,
                     "checkpoint: on the disks of the %d ranks no step is whole; they hold %zu parts: start ranks on "
                     "the hosts that saved",
                     load->ckpt->ranks, count);
    return dtrain__save_explain(load->ckpt, load->ckpt->base, status);
}

/* Does what dtrain__load_open does, if files are not shared. */
static dtrain_status dtrain__local_open(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain__local_list list;
    dtrain__local_told told;
    memset(&list, 0, sizeof list);
    memset(&told, 0, sizeof told);
    list.ckpt = ckpt;
    int error = dtrain__file_list(ckpt->base, dtrain__local_look, &list);
    dtrain_status status = list.status;
    if (status == DTRAIN_OK && error != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: listing the directory \"%.200s\": %s", ckpt->path,
                              dtrain__os_error_text(error));
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    if (status == DTRAIN_OK) {
        status = dtrain__local_gather(ckpt, list.parts, list.count * sizeof *list.parts, DTRAIN__LOCAL_LIST, -1, &told);
        status = status == DTRAIN_OK ? dtrain__local_check_parts(ckpt, &told) : status;
        if (status != DTRAIN_OK)
            status = dtrain__fail(&ckpt->error, status, "checkpoint: %.600s", dtrain__thread_error.text);
    }
    if (status == DTRAIN_OK)
        status = dtrain__local_choose(load, (dtrain__local_part *)(void *)told.data,
                                      told.bytes / sizeof(dtrain__local_part));
    dtrain__free(ckpt->allocator, list.parts);
    dtrain__local_told_free(ckpt, &told);
    return status;
}

/* ---- what others hold ---- */

/* What one rank asks for in a turn: the elements that a stored piece shares with a range of a box. */
typedef struct dtrain__local_request {
    dtrain__move move;
    uint64_t piece, begin[DTRAIN_MAX_DIMS], size[DTRAIN_MAX_DIMS], at, count;
} dtrain__local_request;

typedef struct dtrain__local_fetcher {
    dtrain__load *load;
    size_t job, done; /* done: elements of the wanted piece of this job that were asked for */
} dtrain__local_fetcher;

/* Gives the region that a request asks about, and the region of the stored piece. */
static void dtrain__local_regions(const dtrain__load *load, const dtrain__local_request *request,
                                  dtrain__region *region, dtrain__region *have)
{
    const dtrain__index_piece *piece = &load->index.pieces[request->piece];
    const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
    dtrain__index_region(&load->index, tensor, piece, have);
    dtrain__index_region(&load->index, tensor, NULL, region);
    for (int d = 0; d < tensor->ndim; d++) {
        region->begin[d] = (size_t)request->begin[d];
        region->size[d] = (size_t)request->size[d];
    }
    region->at = (size_t)request->at;
    region->count = (size_t)request->count;
    dtrain__region_settle(region);
}

/* Fills in this rank's next request: the next range of the wanted piece that shares something, at most a turn's bytes.
 */
static void dtrain__local_ask(void *user, dtrain__move *mine)
{
    dtrain__local_fetcher *fetcher = (dtrain__local_fetcher *)user;
    dtrain__load *load = fetcher->load;
    dtrain__local_request *request = (dtrain__local_request *)mine;
    for (; fetcher->job < load->job_count; fetcher->job++, fetcher->done = 0) {
        const dtrain__load_job *job = &load->jobs[fetcher->job];
        const dtrain_piece *want = &load->list.pieces[job->want];
        const dtrain__index_piece *piece = &load->index.pieces[job->have];
        const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
        size_t bytes = dtrain_dtype_bits(tensor->dtype) / 8, most = DTRAIN__LOCAL_TURN / bytes;
        dtrain__region have, region;
        dtrain__region_overlap overlap;
        if (load->index.files[job->file].holder < 0)
            continue;
        dtrain__index_region(&load->index, tensor, piece, &have);
        dtrain__region_of(&region, want);
        while (fetcher->done < want->count) {
            size_t left = want->count - fetcher->done;
            region.at = want->begin + fetcher->done;
            region.count = left < most ? left : most;
            fetcher->done += region.count;
            if (!dtrain__region_overlap_begin(&overlap, &have, &region))
                continue;
            for (int d = 0; d < tensor->ndim; d++) {
                request->begin[d] = region.begin[d];
                request->size[d] = region.size[d];
            }
            mine->holder = (uint64_t)load->index.files[job->file].holder;
            mine->bytes = (uint64_t)dtrain__region_overlap_count(&overlap) * bytes;
            request->piece = job->have;
            request->at = region.at;
            request->count = region.count;
            return;
        }
    }
}

static int dtrain__local_known(void *user, const dtrain__move *asked)
{
    const dtrain__local_fetcher *fetcher = (const dtrain__local_fetcher *)user;
    return ((const dtrain__local_request *)asked)->piece < fetcher->load->index.piece_count;
}

/* Begins to read what a request asks for. Returns 0 if it asks for something else than it may, or claims other bytes.
 */
static int dtrain__local_begin(const dtrain__load *load, const dtrain__local_request *request, dtrain__region *have,
                               dtrain__region *region, dtrain__region_overlap *overlap)
{
    const dtrain__index_tensor *tensor = &load->index.tensors[load->index.pieces[request->piece].tensor];
    size_t elements = 1, bytes = dtrain_dtype_bits(tensor->dtype) / 8;
    for (int d = 0; d < tensor->ndim; d++) {
        if (request->begin[d] > tensor->shape[d] || request->size[d] > tensor->shape[d] - request->begin[d])
            return 0;
        elements *= (size_t)request->size[d]; /* no overflow: at most the tensor's, which were checked */
    }
    if (request->at > elements || request->count > elements - request->at)
        return 0;
    dtrain__local_regions(load, request, region, have);
    return dtrain__region_overlap_begin(overlap, have, region) &&
           dtrain__region_overlap_count(overlap) == request->move.bytes / bytes && request->move.bytes % bytes == 0;
}

/* Reads what another rank asked for, packed, in the order of elements. */
static dtrain_status dtrain__local_give(void *user, const dtrain__move *asked, int rank, unsigned char *out)
{
    dtrain__load *load = ((dtrain__local_fetcher *)user)->load;
    const dtrain__local_request *request = (const dtrain__local_request *)asked;
    const dtrain__index_piece *piece = &load->index.pieces[request->piece];
    const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
    size_t bytes = dtrain_dtype_bits(tensor->dtype) / 8;
    dtrain__region have, region;
    dtrain__region_overlap overlap;
    dtrain__region_overlap_run run;
    uint64_t begin = 0;
    if (load->index.files[piece->file].holder >= 0 || !dtrain__local_begin(load, request, &have, &region, &overlap)) {
        memset(out, 0, (size_t)asked->bytes);
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "checkpoint: rank %d asks rank %d for %llu bytes that are not what their piece has", rank,
                            load->ckpt->rank, (unsigned long long)asked->bytes);
    }
    dtrain_status status = dtrain__load_open_file(load, piece->file);
    if (status == DTRAIN_OK)
        status = dtrain__verify_find(&load->reader, piece, &begin);
    while (status == DTRAIN_OK && dtrain__region_overlap_next(&overlap, &run)) {
        status = dtrain__verify_copy(&load->reader.data, begin + (uint64_t)run.from_begin * bytes, run.count * bytes,
                                     DTRAIN_U8, out, DTRAIN_U8);
        out += run.count * bytes;
    }
    return status;
}

/* Puts the reply in its place. */
static dtrain_status dtrain__local_take(void *user, const dtrain__move *mine, unsigned char *in)
{
    const dtrain__local_fetcher *fetcher = (const dtrain__local_fetcher *)user;
    const dtrain__local_request *request = (const dtrain__local_request *)mine;
    dtrain__load *load = fetcher->load;
    const dtrain__load_job *job = &load->jobs[fetcher->job];
    const dtrain_piece *want = &load->list.pieces[job->want];
    const dtrain__index_tensor *tensor = &load->index.tensors[load->index.pieces[job->have].tensor];
    size_t before = (size_t)request->at - want->begin;
    dtrain__verify_target to = {(unsigned char *)want->data + before * (dtrain_dtype_bits(want->dtype) / 8),
                                want->dtype, want->device, &load->reader.way};
    dtrain__verify_file reply; /* all of it is in the window */
    dtrain__region have, region;
    memset(&reply, 0, sizeof reply);
    reply.window = in;
    reply.end = mine->bytes;
    dtrain__local_regions(load, request, &region, &have);
    dtrain_status status = dtrain__verify_share(&reply, 0, 1, &have, tensor->dtype, &region, &to, &load->report.bytes);
    return status == DTRAIN_OK ? dtrain__staging_wait(&load->reader.way) : status;
}

/* Gets what this rank cannot read itself. Every rank calls it; `own` is the result of its own reading. */
static dtrain_status dtrain__local_fetch(dtrain__load *load, dtrain_status own)
{
    dtrain__local_fetcher fetcher = {load, 0, 0};
    dtrain__mover mover;
    memset(&mover, 0, sizeof mover);
    if (load->ckpt->ranks == 1)
        return own;
    mover.comm = load->ckpt->comm;
    mover.allocator = load->ckpt->allocator;
    mover.call = "checkpoint";
    mover.most = DTRAIN__LOCAL_TURN;
    mover.request_bytes = sizeof(dtrain__local_request);
    mover.user = &fetcher;
    mover.ask = dtrain__local_ask;
    mover.known = dtrain__local_known;
    mover.give = dtrain__local_give;
    mover.take = dtrain__local_take;
    dtrain__mover_check(&mover, own);
    return dtrain__mover_run(&mover);
}

#endif
