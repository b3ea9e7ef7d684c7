/* Benchmarks of files:
 *
 *   file_open     opens a large file and reads one element of a tensor; the limit is a fixed time
 *   file_header   the same with very many tensors
 *   file_read     reads a whole file from the page cache, beside read() of as many bytes
 *   file_save     writes a whole file, beside write() and fsync() of as many bytes
 *   file_load     reads a given file into new memory
 *
 * The files lie in TMPDIR, or /tmp, and are removed. */
#ifndef BENCH_FILES_H
#define BENCH_FILES_H
#include <fcntl.h>
#include <sys/stat.h>

#define FILES_TENSORS 64 /* in the file that is read or saved whole */

static const char *files_path(const char *name)
{
    static char paths[2][512];
    static int next;
    const char *directory = getenv("TMPDIR");
    char *path = paths[next++ % 2];
    snprintf(path, sizeof paths[0], "%s/dtrain-bench-%ld-%s", directory != NULL ? directory : "/tmp", (long)getpid(),
             name);
    return path;
}

static dtrain_status files_nothing(void *user, uint64_t offset, void *out, size_t bytes)
{
    (void)user;
    (void)offset;
    memset(out, 0, bytes);
    return DTRAIN_OK;
}

/* A file while its header is written, and the bytes of the header that are still missing. */
typedef struct files_head {
    int fd;
    uint64_t left;
} files_head;

/* Writes the header, which comes first, and then ends the writing with an error. */
static dtrain_status files_header(void *user, const void *data, size_t bytes)
{
    files_head *head = (files_head *)user;
    const unsigned char *first = (const unsigned char *)data;
    if (head->left == 0) {
        head->left = 8;
        for (int i = 0; i < 8; i++)
            head->left += (uint64_t)first[i] << (8 * i);
    }
    if (write(head->fd, data, bytes) != (ssize_t)bytes)
        bench_fail("writing a header");
    head->left -= bytes;
    return head->left > 0 ? DTRAIN_OK : DTRAIN_ERR_ABORTED;
}

/* Makes a sparse file: the header of `count` float32 tensors, and a hole for their data. */
static void files_sparse(const char *path, size_t count, size_t elements)
{
    dtrain_safetensors_source *sources = (dtrain_safetensors_source *)calloc(count, sizeof *sources);
    char(*names)[48] = (char(*)[48])calloc(count, sizeof *names);
    files_head head = {open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), 0};
    uint64_t bytes;
    if (sources == NULL || names == NULL || head.fd < 0)
        bench_fail(path);
    for (size_t i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%zu.mlp.weight", i);
        sources[i].name = names[i];
        sources[i].dtype = DTRAIN_F32;
        sources[i].ndim = 1;
        sources[i].shape = &elements;
        sources[i].fill = files_nothing;
    }
    DTRAIN_IGNORE(dtrain_safetensors_write(files_header, &head, sources, count, NULL));
    DTRAIN_CHECK(dtrain_safetensors_size(&bytes, sources, count, NULL));
    if (ftruncate(head.fd, (off_t)bytes) != 0)
        bench_fail("making a sparse file");
    close(head.fd);
    free(names);
    free(sources);
}

/* Opens a file of b->size tensors and reads one element; the limit is limit_us. */
static void files_open(bench *b, double limit_us)
{
    const char *path = files_path("sparse");
    size_t elements = b->bytes / b->size / sizeof(float);
    float *out = bench_memory(elements * sizeof(float), 0);
    files_sparse(path, b->size, elements);
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        dtrain_safetensors *file;
        float first;
        int64_t begin = bench_now_ns();
        DTRAIN_CHECK(dtrain_safetensors_open(&file, path, NULL));
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(file, "model.layers.7.mlp.weight", 25);
        DTRAIN_CHECK(dtrain_safetensors_read(file, tensor, elements / 2, 1, &first, DTRAIN_F32));
        dtrain_safetensors_close(file);
        if (run >= 0) {
            b->us[run] = (double)(bench_now_ns() - begin) * 1e-3;
            b->limit_us[run] = limit_us;
        }
    }
    unlink(path);
    free(out);
}

typedef struct files_table {
    dtrain_safetensors_source sources[FILES_TENSORS];
    char names[FILES_TENSORS][32];
    size_t shape, bytes; /* of one tensor */
} files_table;

static void files_make_table(bench *b, files_table *table, unsigned char *data)
{
    memset(table, 0, sizeof *table);
    table->shape = b->bytes / FILES_TENSORS / sizeof(float);
    table->bytes = table->shape * sizeof(float);
    for (int i = 0; i < FILES_TENSORS; i++) {
        snprintf(table->names[i], sizeof table->names[i], "layer.%02d", i);
        table->sources[i].name = table->names[i];
        table->sources[i].dtype = DTRAIN_F32;
        table->sources[i].ndim = 1;
        table->sources[i].shape = &table->shape;
        table->sources[i].data = data + (size_t)i * table->bytes;
    }
}

/* Loads every tensor; the limit reads the same bytes into the same memory with read(). */
static void files_read(bench *b, files_table *table, unsigned char *data, const char *path)
{
    dtrain_safetensors_write_desc desc = {NULL, 0, 1, NULL};
    DTRAIN_CHECK(dtrain_safetensors_save(path, table->sources, FILES_TENSORS, &desc));
    for (int run = -2; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        dtrain_safetensors *file;
        int64_t begin = bench_now_ns(), middle;
        DTRAIN_CHECK(dtrain_safetensors_open(&file, path, NULL));
        for (size_t i = 0; i < FILES_TENSORS; i++)
            DTRAIN_CHECK(
                dtrain_safetensors_load(file, table->names[i], data + i * table->bytes, table->shape, DTRAIN_F32));
        off_t first = (off_t)dtrain_safetensors_tensor_at(file, 0)->begin;
        dtrain_safetensors_close(file);
        middle = bench_now_ns();
        int fd = open(path, O_RDONLY);
        if (fd < 0 || lseek(fd, first, SEEK_SET) != first)
            bench_fail(path);
        for (size_t i = 0; i < FILES_TENSORS; i++)
            if (read(fd, data + i * table->bytes, table->bytes) != (ssize_t)table->bytes)
                bench_fail("read");
        close(fd);
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
    }
}

/* Saves all tensors; the limit writes as many bytes with write() and fsync(). */
static void files_save(bench *b, files_table *table, const unsigned char *data, const char *path)
{
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns(), middle;
        DTRAIN_CHECK(dtrain_safetensors_save(path, table->sources, FILES_TENSORS, NULL));
        middle = bench_now_ns();
        unlink(path);
        int64_t again = bench_now_ns();
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd < 0)
            bench_fail(path);
        for (size_t i = 0; i < FILES_TENSORS; i++)
            if (write(fd, data + i * table->bytes, table->bytes) != (ssize_t)table->bytes)
                bench_fail("write");
        if (fsync(fd) != 0 || close(fd) != 0)
            bench_fail("fsync");
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - again) * 1e-3;
        }
        unlink(path);
    }
}

/* Loads the file that BENCH_FILE names into new memory in every run, as Python's load_file does. */
static void files_load(bench *b)
{
    const char *path = getenv("BENCH_FILE");
    if (path == NULL)
        exit(tool_wrong("bench", "file_load", NULL, "BENCH_FILE in the environment must name a safetensors file"));
    b->bytes = 0;
    for (int run = 0; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        dtrain_safetensors *file;
        int64_t begin = bench_now_ns();
        DTRAIN_CHECK(dtrain_safetensors_open(&file, path, NULL));
        size_t count = dtrain_safetensors_count(file);
        void **places = (void **)calloc(count + 1, sizeof *places);
        for (size_t i = 0; i < count && places != NULL; i++) {
            const dtrain_safetensors_tensor *tensor = dtrain_safetensors_tensor_at(file, i);
            places[i] = malloc((size_t)(tensor->end - tensor->begin) + 1);
            b->bytes += run == 0 ? (size_t)(tensor->end - tensor->begin) : 0;
            DTRAIN_CHECK(dtrain_safetensors_read(file, tensor, 0, tensor->count, places[i], (dtrain_dtype)0));
        }
        dtrain_safetensors_close(file);
        b->us[run] = b->limit_us[run] = (double)(bench_now_ns() - begin) * 1e-3;
        for (size_t i = 0; i < count && places != NULL; i++)
            free(places[i]);
        free(places);
    }
}

static int files_run(bench *b)
{
    if (b->op == FILE_LOAD) {
        files_load(b);
    } else if (b->op == FILE_OPEN) {
        files_open(b, 2000);
    } else if (b->op == FILE_HEADER) {
        files_open(b, 150000);
    } else {
        files_table *table = (files_table *)malloc(sizeof *table);
        unsigned char *data = (unsigned char *)bench_memory(b->bytes, b->huge);
        const char *path = files_path("whole");
        if (table == NULL)
            bench_fail("memory");
        files_make_table(b, table, data);
        if (b->op == FILE_READ)
            files_read(b, table, data, path);
        else
            files_save(b, table, data, path);
        unlink(path);
        free(data);
        free(table);
    }
    bench_print(b);
    return 0;
}

#endif
