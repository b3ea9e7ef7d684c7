/* ---- >>load ----
 * Loads an index into a program's state: chooses the checkpoint, compares it with what is asked for, and reads. All
 * ranks agree after each step, so an error of one is an error of all. Nothing is written before every rank knows that
 * all of it fits. A plain model goes through the same steps: its tensors become an index whose pieces are whole. */
#ifndef DTRAIN__LOAD
#define DTRAIN__LOAD
#include "verify.c"
#include "../format/huggingface.c"

/* Most attempts at a load with the same step chosen each time, and in all. */
enum { DTRAIN__LOAD_SAME = 5, DTRAIN__LOAD_ATTEMPTS = 100 };

/* The tensor that a wanted piece is read from. */
typedef struct dtrain__load_want {
    size_t tensor; /* in the index; NONE: not there */
    size_t piece;  /* among the wanted ones */
} dtrain__load_want;

/* One read: what a stored and a wanted piece share. */
typedef struct dtrain__load_job {
    size_t file, have, want;
} dtrain__load_job;

typedef struct dtrain__load {
    dtrain_checkpoint *ckpt;
    dtrain_checkpoint_load_desc desc;
    dtrain_checkpoint_report report;
    dtrain__index index;
    dtrain_safetensors_model *model; /* of a plain model; NULL: a checkpoint */
    char step_name[32];
    int directory;   /* of the step; -1: a model, or local */
    int opened;      /* a step was chosen and its index read */
    uint64_t branch; /* local: of saves that go on from it */
    dtrain__piece_list list;
    dtrain__load_want *wants;
    unsigned char *flags; /* for each tensor: a rank asks for it; one more: a rank has a place for optimizer state */
    dtrain__load_job *jobs;
    size_t job_count;
    dtrain__verify_reader reader;
} dtrain__load;

static void dtrain__load_end(dtrain__load *load)
{
    dtrain_allocator *allocator = load->ckpt->allocator;
    dtrain__verify_close(&load->reader);
    dtrain__staging_free(&load->reader.way);
    dtrain_safetensors_model_close(load->model);
    dtrain__file_close(load->directory);
    dtrain__index_free(&load->index);
    dtrain__piece_free(&load->list);
    dtrain__free(allocator, load->wants);
    dtrain__free(allocator, load->flags);
    dtrain__free(allocator, load->jobs);
}

/* ---- which checkpoint ---- */

/* Reads the name in latest. Gives an empty name if there is no latest, or if it holds no such name. A latest that
 * cannot be read is an error: another step must not be taken for the newest. */
static dtrain_status dtrain__load_latest(dtrain_checkpoint *ckpt, int directory, char name[32])
{
    dtrain__error before = dtrain__thread_error;
    void *text = NULL;
    size_t bytes = 0, length;
    dtrain__os_facts there;
    dtrain_status status =
        dtrain__file_read_all(directory, DTRAIN__SAVE_LATEST, 64, ckpt->allocator, &text, &bytes, "checkpoint");
    memset(name, 0, 32);
    length = bytes > 0 && ((const char *)text)[bytes - 1] == '\n' ? bytes - 1 : bytes;
    if (status == DTRAIN_OK && length > 0 && length < 32)
        memcpy(name, text, length);
    dtrain__free(ckpt->allocator, text);
    if (status != DTRAIN_OK && status != DTRAIN_ERR_CORRUPT && /* CORRUPT: it is too long */
        (status == DTRAIN_ERR_MEMORY || dtrain__file_sys_stat_at(directory, DTRAIN__SAVE_LATEST, &there, 0) == 0))
        return status;
    dtrain__thread_error = before;
    return DTRAIN_OK;
}

/* Finds the newest checkpoint: the one that latest names, or else the newest step that has an index. A job that saves
 * into the directory may remove the step between the two looks; then latest has changed. */
static dtrain_status dtrain__load_newest(dtrain_checkpoint *ckpt, int directory, const char *path, char name[32])
{
    char before[32];
    uint64_t step;
    memset(name, 0, 32);
    for (int attempt = 0; attempt < DTRAIN__LOAD_ATTEMPTS; attempt++) {
        memcpy(before, name, sizeof before);
        dtrain_status status = dtrain__load_latest(ckpt, directory, name);
        if (status != DTRAIN_OK)
            return status;
        if (dtrain__part_is_step(name, &step) && dtrain__save_has_index(directory, step))
            return DTRAIN_OK;
        if (strcmp(name, before) == 0)
            break;
    }
    int error = dtrain__save_list_steps(ckpt, directory);
    memset(name, 0, 32);
    for (size_t i = 0; i < ckpt->step_count && name[0] == '\0'; i++)
        if (dtrain__save_has_index(directory, ckpt->steps[i].step))
            dtrain__part_step_name(name, ckpt->steps[i].step);
    if (error == ENOMEM)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of steps");
    if (name[0] != '\0') {
        dtrain__log(DTRAIN_LOG_WARN, "checkpoint: latest names no checkpoint; %s is the newest that is whole", name);
        return DTRAIN_OK;
    }
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: listing the directory \"%.400s\": %s", path,
                            dtrain__os_error_text(error));
    return dtrain__fail(
        NULL, DTRAIN_ERR_IO,
        "checkpoint: the directory \"%.400s\" holds no checkpoint that is whole: give the directory that holds step-N",
        path);
}

/* Rank 0 chooses a step and tells the others. */
static dtrain_status dtrain__load_choose(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status = DTRAIN_OK;
    if (ckpt->rank == 0 && load->desc.exact)
        dtrain__part_step_name(load->step_name, load->desc.step);
    else if (ckpt->rank == 0)
        status = dtrain__load_newest(ckpt, ckpt->directory, ckpt->path, load->step_name);
    status = dtrain__save_agree(ckpt, dtrain__save_explain(ckpt, ckpt->directory, status), 0, NULL);
    if (status == DTRAIN_OK && ckpt->ranks > 1) {
        status = dtrain_broadcast(ckpt->comm, load->step_name, sizeof load->step_name, DTRAIN_U8, 0);
        if (status != DTRAIN_OK)
            return dtrain__fail(&ckpt->error, status, "checkpoint: %.600s", dtrain__thread_error.text);
    }
    return status;
}

/* Checks that an index is of the step that its directory is named after. A directory of another name may hold any step.
 */
static dtrain_status dtrain__load_of_step(const dtrain__index *index, const char *directory)
{
    uint64_t step = 0;
    const char *end = strncmp(directory, "step-", 5) == 0 ? dtrain__part_digits(directory + 5, &step) : NULL;
    if (end == NULL || *end != '\0' || step == index->facts.step)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "checkpoint: directory \"%s\" holds the save of step %llu: somebody copied or renamed it; name "
                        "it step-%llu, or remove it",
                        directory, (unsigned long long)index->facts.step, (unsigned long long)index->facts.step);
}

/* Reads and checks the index of a step's open directory; name is the last part of its path. */
static dtrain_status dtrain__load_index(dtrain__index *index, int directory, const char *name, uint64_t *bytes_read)
{
    dtrain_status status =
        dtrain__index_read_file(index, directory, DTRAIN__SAVE_INDEX, DTRAIN__INDEX_BYTES, bytes_read);
    if (status == DTRAIN_OK)
        status = dtrain__load_of_step(index, name);
    return status == DTRAIN_OK ? dtrain__index_settle(index, 1) : status;
}

static dtrain_status dtrain__load_open(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_status status = dtrain__load_choose(load);
    if (status != DTRAIN_OK)
        return status;
    uint64_t step;
    int named = load->step_name[sizeof load->step_name - 1] == '\0' && dtrain__part_is_step(load->step_name, &step);
    for (int others = 0; others < 2 && status == DTRAIN_OK; others++) { /* rank 0 reads first: if it fails, no other
                                                                           rank reads */
        if (!named) {
            status =
                dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                             "checkpoint: rank 0 did not send the name of a step: build all ranks from one dtrain.h");
        } else if ((ckpt->rank > 0) == others) {
            status = dtrain__file_open_directory(&load->directory, ckpt->directory, load->step_name, "checkpoint");
            status = dtrain__save_explain(ckpt, ckpt->directory, status);
            if (status == DTRAIN_OK)
                status = dtrain__load_index(&load->index, load->directory, load->step_name, &load->reader.bytes_read);
        }
        status = dtrain__save_agree(ckpt, status, load->index.facts.id.nonce + load->index.facts.id.counter,
                                    others ? "a directory with the save" : NULL);
    }
    return status;
}

/* ---- a model ---- */

static dtrain_status dtrain__load_model_tensor(dtrain__index *index, size_t file, const dtrain_safetensors_tensor *from)
{
    dtrain__index_tensor tensor;
    dtrain__index_piece piece;
    if (from->ndim > DTRAIN_MAX_DIMS || from->name_length == 0 || memchr(from->name, 0, from->name_length) != NULL)
        return DTRAIN_OK; /* no piece can ask for such a tensor */
    memset(&tensor, 0, sizeof tensor);
    memset(&piece, 0, sizeof piece);
    tensor.name = dtrain__index_text(index, from->name, from->name_length);
    tensor.name_length = from->name_length;
    tensor.dtype = from->dtype;
    tensor.ndim = from->ndim;
    for (int d = 0; d < from->ndim; d++)
        tensor.shape[d] = from->shape[d];
    piece.tensor = index->tensor_count;
    piece.file = file;
    piece.number = piece.box = DTRAIN__INDEX_NONE;
    piece.count = from->count;
    if (tensor.name == DTRAIN__INDEX_NONE)
        return DTRAIN_ERR_MEMORY;
    dtrain_status status = DTRAIN__INDEX_ADD(index->allocator, index->tensors, index->tensor_count, tensor);
    return status == DTRAIN_OK ? DTRAIN__INDEX_ADD(index->allocator, index->pieces, index->piece_count, piece) : status;
}

/* Lists one file of a model. */
static dtrain_status dtrain__load_model_file(dtrain__load *load, const dtrain_safetensors *from)
{
    const dtrain_safetensors_tensor *tensor;
    dtrain__index_file file;
    size_t number = load->index.file_count;
    memset(&file, 0, sizeof file);
    file.holder = -1;
    load->reader.bytes_read += dtrain__safetensors_header_bytes(from);
    dtrain_status status = DTRAIN__INDEX_ADD(load->index.allocator, load->index.files, load->index.file_count, file);
    for (size_t i = 0; status == DTRAIN_OK && (tensor = dtrain_safetensors_tensor_at(from, i)) != NULL; i++)
        status = dtrain__load_model_tensor(&load->index, number, tensor);
    return status;
}

/* Lists a model's tensors, the same on every rank. Other names of tied weights are looked up when they are asked for.
 */
static dtrain_status dtrain__load_open_model(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    dtrain_safetensors_desc desc = {0, ckpt->allocator};
    dtrain_status status = dtrain_safetensors_model_open(&load->model, load->desc.path, &desc);
    for (size_t i = 0; status == DTRAIN_OK && i < dtrain_safetensors_model_files(load->model); i++)
        status = dtrain__load_model_file(load, dtrain__huggingface_file(load->model, i));
    if (status == DTRAIN_OK)
        status = dtrain__index_settle(&load->index, 0);
    return dtrain__save_agree(ckpt, status, load->index.tensor_count, "a model whose number of tensors is");
}

/* ---- what fits ---- */

static int dtrain__load_is_float(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16 ||
           dtype == DTRAIN_F8_E4M3 || dtype == DTRAIN_F8_E5M2;
}

/* Adds to the report's text, which ends in dots when it is full. */
DTRAIN__PRINTF(2, 3) static void dtrain__load_say(dtrain__load *load, const char *format, ...)
{
    size_t used = strlen(load->report.text), room = sizeof load->report.text - used;
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(load->report.text + used, room, format, arguments);
    va_end(arguments);
    if (more > 0 && (size_t)more >= room)
        memcpy(load->report.text + sizeof load->report.text - 4, "...", 4);
}

/* Returns whether a tensor has the shape of a piece, and a dtype that converts to the piece's. */
static int dtrain__load_fits(const dtrain__index_tensor *tensor, const dtrain_piece *piece)
{
    return tensor->ndim == piece->ndim &&
           memcmp(tensor->shape, piece->shape, (size_t)piece->ndim * sizeof piece->shape[0]) == 0 &&
           (tensor->dtype == piece->dtype ||
            (dtrain__load_is_float(tensor->dtype) && dtrain__load_is_float(piece->dtype)));
}

/* Returns the tensor of a piece, or NULL. In a model a tensor may have a second name. */
static const dtrain__index_tensor *dtrain__load_find(const dtrain__load *load, const dtrain_piece *piece)
{
    const dtrain__index_tensor *tensor = dtrain__index_find(&load->index, piece->name, piece->suffix);
    if (tensor != NULL || load->model == NULL || piece->suffix != NULL)
        return tensor;
    const dtrain_safetensors_tensor *tied =
        dtrain_safetensors_model_find(load->model, piece->name, strlen(piece->name), NULL);
    return tied != NULL ? dtrain__index_find(&load->index, tied->name, NULL) : NULL;
}

/* Finds each wanted piece's tensor. Counts and lists those that are missing or of another shape. */
static void dtrain__load_match(dtrain__load *load)
{
    char name[160], one[200], other[200];
    for (int pass = 0; pass < 2; pass++) /* 0: lists what is missing; 1: what has another shape */
        for (size_t i = 0, listed = 0; i < load->list.count; i++) {
            const dtrain_piece *piece = &load->list.pieces[i];
            const dtrain__index_tensor *tensor = dtrain__load_find(load, piece);
            int again = i > 0 && dtrain__region_compare_names(piece, &load->list.pieces[i - 1]) == 0;
            int fits = tensor != NULL && dtrain__load_fits(tensor, piece);
            int asks = load->model == NULL || piece->suffix == NULL; /* optimizer state is not missing in a model */
            asks = asks && !(tensor == NULL && piece->optional);
            load->wants[i].piece = i;
            load->wants[i].tensor = fits && asks ? (size_t)(tensor - load->index.tensors) : DTRAIN__INDEX_NONE;
            if (tensor != NULL)
                load->flags[tensor - load->index.tensors] = 1;
            if (piece->suffix != NULL)
                load->flags[load->index.tensor_count] = 1;
            if (again || !asks || fits || (pass == 0) != (tensor == NULL)) {
                load->report.loaded += pass == 0 && fits && asks && !again;
                continue;
            }
            dtrain__load_say(load, "%s\"%s\"",
                             listed++ > 0 ? ", "
                             : pass == 0  ? "; missing: "
                                          : "; of another shape: ",
                             dtrain__region_name(name, piece));
            load->report.missing += pass == 0;
            load->report.reshaped += pass == 1;
            if (pass == 0)
                continue;
            dtrain__load_say(load, " is %s, wanted as %s",
                             dtrain__index_form(one, tensor->dtype, tensor->shape, tensor->ndim),
                             dtrain__index_form(other, piece->dtype, piece->shape, piece->ndim));
        }
}

/* Counts and lists tensors that no rank asked for. The flags are those of all ranks. */
static void dtrain__load_extra(dtrain__load *load)
{
    const dtrain__index *index = &load->index;
    for (size_t i = 0; i < index->tensor_count; i++) {
        const char *name = dtrain__index_name(index, &index->tensors[i]);
        int state = dtrain__piece_is_state(name, index->tensors[i].name_length);
        if (load->flags[i] || (state && !load->flags[index->tensor_count]))
            continue;
        dtrain__load_say(load, "%s\"%.120s\"", load->report.extra++ > 0 ? ", " : "; extra: ", name);
    }
}

/* Lists a setting that differs from the run that saved, if the list refuses that. */
static dtrain_status dtrain__load_compare_setting(void *owner, const char *key, const char *value, int fixed)
{
    dtrain__load *load = (dtrain__load *)owner;
    const char *then = dtrain__index_setting(&load->index, key);
    if (fixed && then != NULL && strcmp(then, value) != 0)
        dtrain__load_say(load, "; another %s: %s was saved, this run has %s", key, then, value);
    return DTRAIN_OK;
}

static dtrain_status dtrain__load_ask(void *owner, const char *key, uint64_t most, uint64_t *whole, double *real)
{
    const char *text = dtrain__index_setting(&((dtrain__load *)owner)->index, key);
    dtrain__json_reader json;
    dtrain__json_token token;
    if (text == NULL)
        return DTRAIN_OK;
    dtrain__json_open(&json, text, strlen(text));
    int good = dtrain__json_next(&json, &token) == DTRAIN__JSON_NUMBER;
    if (good && real != NULL)
        good = dtrain__json_double(&json, &token, real);
    else if (good)
        good = dtrain__json_u64(&json, &token, whole) && *whole <= most;
    return good ? DTRAIN_OK
                : dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint: %s is \"%.40s\", expected a number in its range",
                               key, text);
}

/* Returns whether the tensor of a piece was found. */
static int dtrain__load_got(void *owner, const void *data)
{
    const dtrain__load *load = (const dtrain__load *)owner;
    for (size_t i = 0; i < load->list.count; i++)
        if (load->list.pieces[load->wants[i].piece].data == data)
            return load->wants[i].tensor != DTRAIN__INDEX_NONE;
    return 0;
}

/* What the lists of a state are asked by. */
static dtrain__lister dtrain__load_lister(dtrain__load *load)
{
    dtrain__lister lister = {load->ckpt->ranks,
                             load->ckpt->rank,
                             NULL,
                             0,
                             DTRAIN_OK,
                             NULL,
                             load,
                             NULL,
                             dtrain__load_compare_setting,
                             load->model == NULL ? dtrain__load_ask : NULL,
                             dtrain__load_got,
                             0};
    return lister;
}

/* Reports how the state and the index fit. It is an error if they do not and desc.lenient is 0. */
static dtrain_status dtrain__load_compare(dtrain__load *load)
{
    dtrain_checkpoint *ckpt = load->ckpt;
    size_t tensors = load->index.tensor_count, bytes;
    dtrain_status status = DTRAIN_OK;
    if (dtrain__mul_size(load->list.count, sizeof *load->wants, &bytes))
        load->wants = (dtrain__load_want *)dtrain__alloc(ckpt->allocator, bytes);
    load->flags = (unsigned char *)dtrain__alloc(ckpt->allocator, tensors + 1);
    if (load->wants == NULL || load->flags == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu pieces", load->list.count);
    if ((status = dtrain__save_agree(ckpt, status, 0, NULL)) != DTRAIN_OK)
        return status;
    dtrain__load_match(load);
    if (ckpt->ranks > 1) {
        status = dtrain_all_reduce(ckpt->comm, load->flags, load->flags, tensors + 1, DTRAIN_U8, DTRAIN_OR);
        if (status != DTRAIN_OK)
            return dtrain__fail(&ckpt->error, status, "checkpoint: %.600s", dtrain__thread_error.text);
    }
    dtrain__load_extra(load);
    if (load->report.text[0] != '\0')
        memmove(load->report.text, load->report.text + 2, strlen(load->report.text) - 1);
    char what[80] = "the file";
    if (load->model == NULL)
        snprintf(what, sizeof what, "checkpoint %.31s of %d ranks", load->step_name, load->report.world_size);
    if (load->report.text[0] != '\0' && !load->desc.lenient)
        status = dtrain__fail(NULL, DTRAIN_ERR_MISMATCH, "%s and the program's state differ: %.560s", what,
                              load->report.text);
    else if (load->report.text[0] != '\0' && ckpt->rank == 0)
        dtrain__log(DTRAIN_LOG_WARN, "checkpoint: %.600s", load->report.text);
    return dtrain__save_agree(ckpt, status, 0, NULL);
}

/* ---- reading ---- */

static int dtrain__load_by_tensor(const void *left, const void *right)
{
    const dtrain__load_want *a = (const dtrain__load_want *)left, *b = (const dtrain__load_want *)right;
    if (a->tensor != b->tensor)
        return a->tensor < b->tensor ? -1 : 1;
    return a->piece < b->piece ? -1 : a->piece > b->piece;
}

static int dtrain__load_by_file(const void *left, const void *right)
{
    const dtrain__load_job *a = (const dtrain__load_job *)left, *b = (const dtrain__load_job *)right;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->have != b->have)
        return a->have < b->have ? -1 : 1;
    return a->want < b->want ? -1 : a->want > b->want;
}

/* Returns a copy of a stored piece that this rank can reach, if there is one, in place of a piece that another rank
 * has. */
static size_t dtrain__load_nearest(const dtrain__load *load, const dtrain__index_tensor *tensor, size_t piece)
{
    const dtrain__index *index = &load->index;
    dtrain__region region, spare;
    if (index->files[index->pieces[piece].file].holder < 0)
        return piece;
    dtrain__index_region(index, tensor, &index->pieces[piece], &region);
    for (size_t k = tensor->first + tensor->count; k < tensor->first + tensor->count + tensor->spares; k++) {
        dtrain__index_region(index, tensor, &index->pieces[k], &spare);
        if (index->files[index->pieces[k].file].holder < 0 && dtrain__region_compare(&region, &spare) == 0)
            return k;
    }
    return piece;
}

/* Lists what stored and wanted pieces share, sorted by file. */
static dtrain_status dtrain__load_plan(dtrain__load *load)
{
    const dtrain__index *index = &load->index;
    if (load->list.count > 0)
        qsort(load->wants, load->list.count, sizeof *load->wants, dtrain__load_by_tensor);
    for (size_t i = 0; i < load->list.count && load->wants[i].tensor != DTRAIN__INDEX_NONE; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[load->wants[i].tensor];
        dtrain__region want, have;
        dtrain__region_overlap overlap;
        dtrain__region_of(&want, &load->list.pieces[load->wants[i].piece]);
        for (size_t k = tensor->first; k < tensor->first + tensor->count && want.count > 0; k++) {
            dtrain__index_region(index, tensor, &index->pieces[k], &have);
            if (!dtrain__region_overlap_begin(&overlap, &have, &want))
                continue;
            size_t nearest = dtrain__load_nearest(load, tensor, k);
            dtrain__load_job job = {index->pieces[nearest].file, nearest, load->wants[i].piece};
            if (DTRAIN__INDEX_ADD(load->ckpt->allocator, load->jobs, load->job_count, job) != DTRAIN_OK)
                return DTRAIN_ERR_MEMORY;
        }
    }
    if (load->job_count > 0)
        qsort(load->jobs, load->job_count, sizeof *load->jobs, dtrain__load_by_file);
    return DTRAIN_OK;
}

/* Opens the file of a stored piece. */
static dtrain_status dtrain__load_open_file(dtrain__load *load, size_t file)
{
    char name[80];
    int directory = load->directory;
    if (load->reader.open == file)
        return DTRAIN_OK;
    if (load->model != NULL)
        return dtrain__verify_open_model(&load->reader, dtrain__huggingface_file(load->model, file), file);
    if (!load->ckpt->local)
        return dtrain__verify_open(&load->reader, directory, file);
    snprintf(name, sizeof name, "rank-%05d/%s", load->index.files[file].rank, load->step_name);
    dtrain_status status = dtrain__file_open_directory(&directory, load->ckpt->base, name, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__verify_open(&load->reader, directory, file);
    dtrain__file_close(directory);
    return status;
}

/* Does every read from files that this rank can reach. */
static dtrain_status dtrain__load_read(dtrain__load *load)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < load->job_count && status == DTRAIN_OK; i++) {
        const dtrain__load_job *job = &load->jobs[i];
        const dtrain_piece *want = &load->list.pieces[job->want];
        dtrain__verify_target to = {want->data, want->dtype, want->device, &load->reader.way};
        dtrain__region region;
        if (load->index.files[job->file].holder >= 0)
            continue;
        dtrain__region_of(&region, want);
        status = dtrain__load_open_file(load, job->file);
        if (status == DTRAIN_OK)
            status =
                dtrain__verify_read(&load->reader, &load->index.pieces[job->have], &region, &to, &load->report.bytes);
    }
    return status == DTRAIN_OK ? dtrain__staging_wait(&load->reader.way) : status;
}

enum { DTRAIN__LOAD_DONE = 2 }; /* a turn after the two of dtrain_pieces.loading */

/* Tells every list that it is about to be overwritten, so that it gives up what is under way; or that it was. It goes
 * on after an error: ranks that share another list wait for this one. */
static dtrain_status dtrain__load_tell(dtrain__load *load, const dtrain_checkpoint_state *state, int turn)
{
    dtrain_status first = DTRAIN_OK;
    dtrain__error cause = dtrain__thread_error;
    dtrain__lister lister = dtrain__load_lister(load);
    for (size_t i = 0; i < state->list_count; i++) {
        const dtrain_pieces *list = &state->lists[i];
        dtrain_status status = DTRAIN_OK;
        if (turn == DTRAIN__LOAD_DONE && list->loaded != NULL)
            status = list->loaded(list, &lister);
        else if (turn != DTRAIN__LOAD_DONE && list->loading != NULL)
            status = list->loading(list, turn);
        if (first == DTRAIN_OK && status != DTRAIN_OK)
            cause = dtrain__thread_error;
        first = first == DTRAIN_OK ? status : first;
    }
    if (first != DTRAIN_OK)
        dtrain__thread_error = cause;
    return dtrain__save_agree(load->ckpt, first, 0, NULL);
}

/* After an error in reading: lists forget what they cannot use in part. Returns the error. */
static dtrain_status dtrain__load_lost(dtrain__load *load, const dtrain_checkpoint_state *state)
{
    dtrain__error cause = dtrain__thread_error;
    dtrain__lister lister = dtrain__load_lister(load);
    lister.failed = 1;
    for (size_t i = 0; i < state->list_count; i++)
        if (state->lists[i].loading != NULL)
            DTRAIN_IGNORE(state->lists[i].loaded(&state->lists[i], &lister));
    return dtrain__report(&cause);
}

/* Tells the lists that they were loaded, and sets the state's counters. */
static dtrain_status dtrain__load_finish(dtrain__load *load, dtrain_checkpoint_state *state)
{
    const dtrain__index_facts *facts = &load->index.facts;
    dtrain_status status = dtrain__load_tell(load, state, DTRAIN__LOAD_DONE);
    if (status != DTRAIN_OK || load->model != NULL)
        return status;
    state->step = facts->step;
    state->seed = facts->seed;
    state->random_index = facts->random_index;
    return DTRAIN_OK;
}

#endif
