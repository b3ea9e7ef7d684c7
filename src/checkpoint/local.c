/* ---- >>local ----
 * Checkpoints on disks that ranks do not share. A rank keeps its own in directory/rank-NNNNN, each with an index of its
 * own part, and may be started on another host later, in another number: so every rank lists all parts that it can see.
 * The newest save whose parts, wherever they are, hold everything is the one that is loaded; a rank reads what it can
 * reach, and asks the others for the rest, one request of a few MiB a rank and turn. */
#ifndef DTRAIN__LOCAL
#define DTRAIN__LOCAL
#include "load.c"

#define DTRAIN__LOCAL_TURN ((size_t)4 << 20) /* bytes of one request at most */

/* A part that a rank can see. */
typedef struct dtrain__local_part {
    uint64_t step, nonce, counter, world_size;
    uint64_t rank;   /* that wrote it */
    uint64_t holder; /* that sees it */
} dtrain__local_part;

typedef struct dtrain__local_list {
    dtrain_checkpoint *ckpt;
    dtrain__local_part *parts;
    size_t count, room;
    int rank; /* whose directory is being looked through */
    dtrain_status status;
} dtrain__local_list;

/* Adds the part of one step of the rank whose directory is open. A damaged index is no part. */
static dtrain_status dtrain__local_add(dtrain__local_list *list, int directory, uint64_t step)
{
    dtrain_checkpoint *ckpt = list->ckpt;
    char name[32];
    dtrain__index index;
    int fd = -1;
    void *text = NULL, *larger;
    size_t bytes = 0;
    dtrain__portion_step_name(name, step);
    dtrain__index_begin(&index, ckpt->allocator);
    dtrain_status status = dtrain__file_open_directory(&fd, directory, name, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__file_read_all(fd, DTRAIN__SAVE_INDEX, DTRAIN__INDEX_BYTES, ckpt->allocator, &text, &bytes,
                                       "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__index_read(&index, DTRAIN__SAVE_INDEX, (const char *)text, bytes);
    dtrain__free(ckpt->allocator, text, bytes);
    dtrain__file_close(fd);
    if (status == DTRAIN_OK && index.facts.step == step && index.file_count == 1 && index.files[0].rank == list->rank) {
        dtrain__local_part part = {step,
                                   index.facts.id.nonce,
                                   index.facts.id.counter,
                                   index.facts.world_size,
                                   (uint64_t)list->rank,
                                   (uint64_t)ckpt->rank};
        larger = dtrain__index_grow(ckpt->allocator, list->parts, sizeof part, list->count, 1, &list->room);
        if (larger != NULL) {
            list->parts = (dtrain__local_part *)larger;
            list->parts[list->count++] = part;
        } else {
            status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of parts");
        }
    } else if (status == DTRAIN_ERR_CORRUPT) {
        dtrain__log(DTRAIN_LOG_WARN, "%.600s", dtrain__thread_error.text);
    }
    dtrain__index_free(&index);
    return status == DTRAIN_ERR_MEMORY ? status : DTRAIN_OK;
}

/* Lists the parts of one rank's directory. */
static int dtrain__local_look(void *user, const char *name)
{
    dtrain__local_list *list = (dtrain__local_list *)user;
    uint64_t rank;
    int fd = -1;
    const char *end = strncmp(name, "rank-", 5) == 0 ? dtrain__portion_digits(name + 5, &rank) : NULL;
    if (end == NULL || *end != '\0' || rank > INT_MAX)
        return 0;
    list->rank = (int)rank;
    if (dtrain__file_open_directory(&fd, list->ckpt->base, name, "checkpoint") != DTRAIN_OK)
        return 0;
    if (dtrain__save_list_steps(list->ckpt, fd) == ENOMEM) /* an older step is not to be taken for the newest */
        list->status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of steps");
    for (size_t i = 0; i < list->ckpt->step_count && list->status == DTRAIN_OK; i++)
        list->status = dtrain__local_add(list, fd, list->ckpt->steps[i]);
    dtrain__file_close(fd);
    return list->status != DTRAIN_OK;
}

/* Gathers bytes of any number from every rank: *all of *bytes, to be freed. */
static dtrain_status dtrain__local_gather(dtrain_checkpoint *ckpt, const void *mine, size_t mine_bytes, void **all,
                                          size_t *bytes)
{
    size_t ranks = (size_t)ckpt->ranks;
    uint64_t *sizes = (uint64_t *)dtrain__alloc(ckpt->allocator, ranks * sizeof *sizes);
    size_t *counts = (size_t *)dtrain__alloc(ckpt->allocator, ranks * sizeof *counts);
    dtrain_status status = sizes != NULL && counts != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    *all = NULL;
    *bytes = 0;
    if (status == DTRAIN_OK) {
        sizes[ckpt->rank] = mine_bytes;
        if (ranks > 1)
            status = dtrain_all_gather(ckpt->comm, &sizes[ckpt->rank], sizes, ranks, DTRAIN_U64);
    }
    for (size_t rank = 0; status == DTRAIN_OK && rank < ranks; rank++) {
        counts[rank] = (size_t)sizes[rank];
        *bytes += counts[rank];
    }
    if (status == DTRAIN_OK && (*all = dtrain__alloc(ckpt->allocator, *bytes)) == NULL)
        status = DTRAIN_ERR_MEMORY;
    if (status == DTRAIN_OK && ranks > 1)
        status = dtrain_all_gather_v(ckpt->comm, mine, *all, counts, NULL, DTRAIN_U8);
    else if (status == DTRAIN_OK && mine_bytes > 0)
        memcpy(*all, mine, mine_bytes);
    dtrain__free(ckpt->allocator, sizes, ranks * sizeof *sizes);
    dtrain__free(ckpt->allocator, counts, ranks * sizeof *counts);
    if (status == DTRAIN_ERR_MEMORY)
        dtrain__fail(NULL, status, "checkpoint: no memory for %zu bytes of lists", *bytes);
    return status;
}

static int dtrain__local_newer(const void *left, const void *right)
{
    const dtrain__local_part *a = (const dtrain__local_part *)left, *b = (const dtrain__local_part *)right;
    const uint64_t x[] = {b->step, b->nonce, b->counter, a->rank, a->holder};
    const uint64_t y[] = {a->step, a->nonce, a->counter, b->rank, b->holder};
    for (int i = 0; i < 5; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

/* Reads the index of a part that this rank sees. */
static dtrain_status dtrain__local_read(dtrain__load *load, const dtrain__local_part *part, void **text, size_t *bytes)
{
    char name[80], step[32];
    int fd = -1;
    dtrain__portion_step_name(step, part->step);
    snprintf(name, sizeof name, "rank-%05d/%s", (int)part->rank, step);
    dtrain_status status = dtrain__file_open_directory(&fd, load->ckpt->base, name, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__file_read_all(fd, DTRAIN__SAVE_INDEX, DTRAIN__INDEX_BYTES, load->ckpt->allocator, text, bytes,
                                       "checkpoint");
    load->shelf.bytes_read += *bytes;
    dtrain__file_close(fd);
    return status;
}

/* Tries the save whose parts are parts[0] to parts[count - 1], of which the first of each rank is used: every rank gets
 * all their indexes. *whole: they hold everything. The same on every rank. */
static dtrain_status dtrain__local_try(dtrain__load *load, const dtrain__local_part *parts, size_t count, int *whole)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status = DTRAIN_OK, sent;
    dtrain__error full; /* no memory here: not the same as a part that is not there */
    memset(&full, 0, sizeof full);
    dtrain__index_clear(&load->index);
    *whole = 1;
    for (size_t i = 0; i < count && *whole; i++) {
        void *text = NULL, *all = NULL;
        size_t bytes = 0, all_bytes = 0;
        if (i > 0 && parts[i].rank == parts[i - 1].rank)
            continue;
        if (parts[i].holder == (uint64_t)ckpt->rank)
            status = dtrain__local_read(load, &parts[i], &text, &bytes);
        if (status == DTRAIN_ERR_MEMORY)
            full = dtrain__thread_error;
        size_t before = load->index.file_count;
        sent = dtrain__local_gather(ckpt, text, status == DTRAIN_OK ? bytes : 0, &all, &all_bytes);
        if (sent == DTRAIN_OK) {
            status = dtrain__index_read(&load->index, DTRAIN__SAVE_INDEX, (const char *)all, all_bytes);
            *whole = status == DTRAIN_OK && load->index.file_count == before + 1;
        }
        dtrain__free(ckpt->allocator, text, bytes);
        dtrain__free(ckpt->allocator, all, all_bytes);
        if (sent != DTRAIN_OK)
            return dtrain__fail(&ckpt->error, sent, "checkpoint: %.600s", dtrain__thread_error.text);
        if (*whole)
            load->index.files[load->index.file_count - 1].holder = (int)parts[i].holder;
    }
    for (size_t k = 0; k < count; k++) /* what this rank sees, it reads */
        for (size_t i = 0; i < load->index.file_count && parts[k].holder == (uint64_t)ckpt->rank; i++)
            if ((uint64_t)load->index.files[i].rank == parts[k].rank)
                load->index.files[i].holder = -1;
    status = *whole ? dtrain__index_settle(&load->index, 1) : status;
    *whole = *whole && status == DTRAIN_OK;
    return full.status != DTRAIN_OK ? dtrain__report(&full) : status == DTRAIN_ERR_MEMORY ? status : DTRAIN_OK;
}

/* Goes through the saves that anybody sees, the newest first, until one is whole. */
static dtrain_status dtrain__local_choose(dtrain__load *load, dtrain__local_part *parts, size_t count)
{
    dtrain_status status = DTRAIN_OK;
    int whole = 0;
    if (count > 0)
        qsort(parts, count, sizeof *parts, dtrain__local_newer);
    for (size_t i = 0, end; i < count && !whole; i = end) {
        for (end = i; end < count && parts[end].step == parts[i].step && parts[end].nonce == parts[i].nonce &&
                      parts[end].counter == parts[i].counter;
             end++)
            continue;
        if (load->desc.exact && parts[i].step != load->desc.step)
            continue;
        status = dtrain__local_try(load, parts + i, end - i, &whole);
        status = dtrain__save_agree(load->ckpt, status, 0, NULL);
        if (status != DTRAIN_OK)
            return status;
        dtrain__portion_step_name(load->step_name, parts[i].step);
        if (!whole && load->ckpt->rank == 0)
            dtrain__log(DTRAIN_LOG_WARN, "checkpoint: of step %llu not everything is there: %.400s",
                        (unsigned long long)parts[i].step, dtrain__thread_error.text);
    }
    if (whole)
        return DTRAIN_OK;
    return dtrain__fail(&load->ckpt->error, DTRAIN_ERR_IO,
                        "checkpoint: among the disks of %d ranks no step is whole: %zu parts are there",
                        load->ckpt->ranks, count);
}

/* As dtrain__load_open, where files are not shared. */
static dtrain_status dtrain__local_open(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain__local_list list;
    void *all = NULL;
    size_t bytes = 0;
    memset(&list, 0, sizeof list);
    list.ckpt = ckpt;
    int error = dtrain__file_list(ckpt->base, dtrain__local_look, &list);
    dtrain_status status = list.status;
    if (status == DTRAIN_OK && error != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: listing the directory: %s", strerror(error));
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    if (status == DTRAIN_OK) {
        status = dtrain__local_gather(ckpt, list.parts, list.count * sizeof *list.parts, &all, &bytes);
        if (status != DTRAIN_OK)
            status = dtrain__fail(&ckpt->error, status, "checkpoint: %.600s", dtrain__thread_error.text);
    }
    if (status == DTRAIN_OK)
        status = dtrain__local_choose(load, (dtrain__local_part *)all, bytes / sizeof(dtrain__local_part));
    dtrain__free(ckpt->allocator, list.parts, list.room * sizeof *list.parts);
    dtrain__free(ckpt->allocator, all, bytes);
    return status;
}

/* ---- what others hold ---- */

/* What one rank asks for in a turn: what a stored piece shares with a range of a box. */
typedef struct dtrain__local_request {
    uint64_t holder, piece, bytes; /* bytes 0: nothing */
    uint64_t begin[DTRAIN_MAX_DIMS], size[DTRAIN_MAX_DIMS], at, count;
} dtrain__local_request;

typedef struct dtrain__local_turn {
    dtrain__load *load;
    dtrain__local_request *requests; /* of all ranks */
    unsigned char *out, *in;         /* in: what was asked for, and before it whether it is good */
    size_t out_bytes;
    size_t *counts[2];
    size_t job, done; /* of which this many elements of the wanted piece were asked for */
} dtrain__local_turn;

/* The region that a request is about. */
static void dtrain__local_region(const dtrain__load *load, const dtrain__local_request *request, dtrain__region *region)
{
    const dtrain__index_tensor *tensor = &load->index.tensors[load->index.pieces[request->piece].tensor];
    dtrain__index_region(&load->index, tensor, NULL, region);
    for (int d = 0; d < tensor->ndim; d++) {
        region->begin[d] = (size_t)request->begin[d];
        region->size[d] = (size_t)request->size[d];
    }
    region->at = (size_t)request->at;
    region->count = (size_t)request->count;
    dtrain__region_settle(region);
}

/* Fills in this rank's next request: of the wanted piece a range of at most a turn's bytes, that shares something. */
static void dtrain__local_ask(dtrain__local_turn *turn)
{
    dtrain__load *load = turn->load;
    dtrain__local_request *request = &turn->requests[load->ckpt->rank];
    memset(request, 0, sizeof *request);
    for (; turn->job < load->job_count && load->failed.status == DTRAIN_OK; turn->job++, turn->done = 0) {
        const dtrain__load_job *job = &load->jobs[turn->job];
        const dtrain_piece *want = &load->pieces[job->want];
        const dtrain__index_piece *piece = &load->index.pieces[job->have];
        const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
        size_t bytes = dtrain_dtype_bits(tensor->dtype) / 8, most = DTRAIN__LOCAL_TURN / bytes;
        dtrain__region have, region;
        dtrain__overlap overlap;
        if (load->index.files[job->file].holder < 0)
            continue;
        dtrain__index_region(&load->index, tensor, piece, &have);
        dtrain__region_of(&region, want);
        while (turn->done < want->count) {
            size_t left = want->count - turn->done;
            region.at = want->begin + turn->done;
            region.count = left < most ? left : most;
            turn->done += region.count;
            if (!dtrain__overlap_begin(&overlap, &have, &region))
                continue;
            for (int d = 0; d < tensor->ndim; d++) {
                request->begin[d] = region.begin[d];
                request->size[d] = region.size[d];
            }
            request->holder = (uint64_t)load->index.files[job->file].holder;
            request->piece = job->have;
            request->at = region.at;
            request->count = region.count;
            request->bytes = (uint64_t)dtrain__overlap_count(&overlap) * bytes;
            return;
        }
    }
}

/* Reads what another rank asked for, packed in the order of elements; the byte before it says whether it is good. */
static void dtrain__local_serve(dtrain__local_turn *turn, const dtrain__local_request *request, unsigned char *out)
{
    dtrain__load *load = turn->load;
    const dtrain__index_piece *piece = &load->index.pieces[request->piece];
    const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
    size_t bytes = dtrain_dtype_bits(tensor->dtype) / 8;
    dtrain__region have, region;
    dtrain__overlap overlap;
    dtrain__overlap_run run;
    uint64_t begin = 0;
    unsigned char *to = out + 1;
    dtrain__local_region(load, request, &region);
    dtrain__index_region(&load->index, tensor, piece, &have);
    dtrain_status status = dtrain__load_open_file(load, piece->file);
    if (status == DTRAIN_OK)
        status = dtrain__shelf_find(&load->shelf, tensor, piece, &begin);
    dtrain__overlap_begin(&overlap, &have, &region);
    while (status == DTRAIN_OK && dtrain__overlap_next(&overlap, &run)) {
        status = dtrain__shelf_copy(&load->shelf, begin + (uint64_t)run.from_begin * bytes, run.count, tensor->dtype,
                                    to, tensor->dtype);
        to += run.count * bytes;
    }
    *out = status != DTRAIN_OK;
    if (status != DTRAIN_OK && load->failed.status == DTRAIN_OK)
        load->failed = dtrain__thread_error;
}

/* Converts elements on their way to a device. */
static dtrain_status dtrain__local_send(dtrain__load *load, const unsigned char *from, dtrain_dtype dtype,
                                        unsigned char *to, const dtrain_piece *want, size_t count)
{
    size_t from_bytes = dtrain_dtype_bits(dtype) / 8, to_bytes = dtrain_dtype_bits(want->dtype) / 8, have = 0;
    dtrain_status status = DTRAIN_OK;
    while (count > 0 && status == DTRAIN_OK) {
        void *at;
        status = dtrain__staging_room(&load->shelf.way, want->device, count * to_bytes, &at, &have);
        size_t n = have / to_bytes;
        if (status == DTRAIN_OK && dtype == want->dtype)
            memcpy(at, from, n * to_bytes);
        else if (status == DTRAIN_OK)
            status = dtrain_convert(from, dtype, at, want->dtype, n);
        if (status == DTRAIN_OK)
            status = dtrain__staging_send(&load->shelf.way, to, n * to_bytes);
        from += n * from_bytes;
        to += n * to_bytes;
        count -= n;
    }
    return status;
}

/* Puts what was asked for in its place. */
static dtrain_status dtrain__local_take(dtrain__local_turn *turn)
{
    dtrain__load *load = turn->load;
    const dtrain__local_request *request = &turn->requests[load->ckpt->rank];
    const dtrain__load_job *job = &load->jobs[turn->job];
    const dtrain_piece *want = &load->pieces[job->want];
    const dtrain__index_piece *piece = &load->index.pieces[job->have];
    const dtrain__index_tensor *tensor = &load->index.tensors[piece->tensor];
    size_t from_bytes = dtrain_dtype_bits(tensor->dtype) / 8, to_bytes = dtrain_dtype_bits(want->dtype) / 8;
    const unsigned char *from = turn->in + 1;
    dtrain__region have, region;
    dtrain__overlap overlap;
    dtrain__overlap_run run;
    dtrain_status status = DTRAIN_OK;
    if (turn->in[0] != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: rank %llu could not read its part for rank %d",
                            (unsigned long long)request->holder, load->ckpt->rank);
    dtrain__local_region(load, request, &region);
    dtrain__index_region(&load->index, tensor, piece, &have);
    dtrain__overlap_begin(&overlap, &have, &region);
    while (status == DTRAIN_OK && dtrain__overlap_next(&overlap, &run)) {
        unsigned char *to = (unsigned char *)want->data + (region.at - want->begin + run.to_begin) * to_bytes;
        if (want->device != NULL)
            status = dtrain__local_send(load, from, tensor->dtype, to, want, run.count);
        else if (tensor->dtype == want->dtype)
            memcpy(to, from, run.count * to_bytes);
        else
            status = dtrain_convert(from, tensor->dtype, to, want->dtype, run.count);
        from += run.count * from_bytes;
    }
    load->report.bytes += request->bytes;
    return status == DTRAIN_OK ? dtrain__staging_wait(&load->shelf.way) : status;
}

/* One turn: everybody asks one rank, reads for those that ask it, and gets what it asked for. *more: somebody asked. */
static dtrain_status dtrain__local_exchange(dtrain__local_turn *turn, int *more)
{
    dtrain_checkpoint *ckpt = turn->load->ckpt;
    const dtrain__local_request *mine = &turn->requests[ckpt->rank];
    size_t ranks = (size_t)ckpt->ranks, out = 0;
    dtrain__local_ask(turn);
    dtrain_status status = dtrain_all_gather(ckpt->comm, mine, turn->requests, ranks * sizeof *mine, DTRAIN_U8);
    if (status != DTRAIN_OK)
        return status;
    *more = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        const dtrain__local_request *request = &turn->requests[rank];
        *more |= request->bytes > 0;
        turn->counts[0][rank] =
            request->bytes > 0 && request->holder == (uint64_t)ckpt->rank ? (size_t)request->bytes + 1 : 0;
        turn->counts[1][rank] = mine->bytes > 0 && mine->holder == rank ? (size_t)mine->bytes + 1 : 0;
        out += turn->counts[0][rank];
    }
    if (!*more)
        return DTRAIN_OK;
    void *larger = dtrain__index_grow(ckpt->allocator, turn->out, 1, 0, out, &turn->out_bytes);
    if (larger == NULL) /* the others wait for it: they learn when this rank leaves */
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu bytes that others ask for", out);
    turn->out = (unsigned char *)larger;
    out = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        if (turn->counts[0][rank] > 0)
            dtrain__local_serve(turn, &turn->requests[rank], turn->out + out);
        out += turn->counts[0][rank];
    }
    status =
        dtrain_all_to_all_v(ckpt->comm, turn->out, turn->counts[0], NULL, turn->in, turn->counts[1], NULL, DTRAIN_U8);
    if (status == DTRAIN_OK && mine->bytes > 0 && dtrain__local_take(turn) != DTRAIN_OK &&
        turn->load->failed.status == DTRAIN_OK)
        turn->load->failed = dtrain__thread_error;
    return status;
}

/* Gets what this rank cannot read itself. Every rank calls it; `own` is how its own reading went. */
static dtrain_status dtrain__local_fetch(dtrain__load *load, dtrain_status own)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain__local_turn turn;
    size_t ranks = (size_t)ckpt->ranks;
    int more = 1;
    memset(&turn, 0, sizeof turn);
    turn.load = load;
    if (own != DTRAIN_OK)
        load->failed = dtrain__thread_error;
    turn.requests = (dtrain__local_request *)dtrain__alloc(ckpt->allocator, ranks * sizeof *turn.requests);
    turn.in = (unsigned char *)dtrain__alloc(ckpt->allocator, DTRAIN__LOCAL_TURN + 1);
    turn.counts[0] = (size_t *)dtrain__alloc(ckpt->allocator, 2 * ranks * sizeof(size_t));
    dtrain_status status = turn.requests != NULL && turn.in != NULL && turn.counts[0] != NULL
                               ? DTRAIN_OK
                               : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for requests");
    status = dtrain__save_agree(ckpt, status, 0, NULL);
    turn.counts[1] = turn.counts[0] != NULL ? turn.counts[0] + ranks : NULL;
    while (status == DTRAIN_OK && more && ranks > 1)
        status = dtrain__local_exchange(&turn, &more);
    dtrain__free(ckpt->allocator, turn.requests, ranks * sizeof *turn.requests);
    dtrain__free(ckpt->allocator, turn.in, DTRAIN__LOCAL_TURN + 1);
    dtrain__free(ckpt->allocator, turn.counts[0], 2 * ranks * sizeof(size_t));
    dtrain__free(ckpt->allocator, turn.out, turn.out_bytes);
    return status != DTRAIN_OK ? status : dtrain__report(&load->failed);
}

#endif
