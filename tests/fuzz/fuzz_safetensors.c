/* Fuzz target: safetensors files and the indices of Hugging Face models. The first byte chooses: a whole file; a header
 * that gets its frame and as many bytes of data as the second byte says; an index. What is accepted is read in every
 * way, written again and compared.
 *
 * make fuzz MINUTES=n */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "safetensors_memory.h"

static void require(int fact)
{
    if (!fact)
        abort();
}

static void quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

/* Reads a tensor whole and in two halves, to memory of exactly its size. */
static void read_all(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor)
{
    size_t bytes = (size_t)(tensor->end - tensor->begin), half = tensor->count / 16 * 8;
    unsigned char *out = (unsigned char *)malloc(bytes + 1), *again = (unsigned char *)malloc(bytes + 1);
    const void *view = NULL;
    require(out != NULL && again != NULL);
    require(dtrain_safetensors_find(file, tensor->name, tensor->name_length) == tensor);
    require(tensor->name[tensor->name_length] == '\0');
    require(dtrain_safetensors_read(file, tensor, 0, tensor->count, out, (dtrain_dtype)0) == DTRAIN_OK);
    require(dtrain_safetensors_read(file, tensor, 0, half, again, (dtrain_dtype)0) == DTRAIN_OK);
    require(dtrain_safetensors_read(file, tensor, half, tensor->count - half,
                                          again + half / 8 * dtrain_dtype_bits(tensor->dtype),
                                          (dtrain_dtype)0) == DTRAIN_OK);
    require(memcmp(out, again, bytes) == 0);
    if (dtrain_safetensors_view(file, tensor, &view) == DTRAIN_OK && bytes > 0)
        require(memcmp(out, view, bytes) == 0);
    free(out);
    free(again);
}

/* Writes what was read; the reader must take it, and find the same in it. */
static void write_again(dtrain_safetensors *file)
{
    size_t count = dtrain_safetensors_count(file), bytes = 0;
    dtrain_safetensors_source *sources = (dtrain_safetensors_source *)calloc(count + 1, sizeof *sources);
    dtrain_safetensors_write_desc desc = {dtrain__safetensors_metadata(file, 0),
                                          dtrain__safetensors_metadata_count(file), 0, NULL};
    require(sources != NULL);
    for (size_t i = 0; i < count; i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_tensor_at(file, i);
        sources[i].name = tensor->name;
        sources[i].name_length = tensor->name_length;
        sources[i].dtype = tensor->dtype;
        sources[i].ndim = tensor->ndim;
        sources[i].shape = tensor->shape;
        sources[i].data = file->memory + tensor->begin;
    }
    uint64_t size = 0;
    require(dtrain_safetensors_size(&size, sources, count, &desc) == DTRAIN_OK);
    unsigned char *out = (unsigned char *)malloc((size_t)size);
    dtrain_safetensors *second = NULL;
    require(out != NULL);
    require(write_memory(out, (size_t)size, &bytes, sources, count, &desc) == DTRAIN_OK &&
            bytes == size);
    require(dtrain_safetensors_open_memory(&second, out, bytes, NULL) == DTRAIN_OK);
    require(dtrain_safetensors_count(second) == count && second->pair_count == file->pair_count);
    for (size_t i = 0; i < count; i++) {
        const dtrain_safetensors_tensor *a = dtrain_safetensors_tensor_at(file, i);
        const dtrain_safetensors_tensor *b = dtrain_safetensors_find(second, a->name, a->name_length);
        require(b != NULL && b->dtype == a->dtype && b->ndim == a->ndim && b->end - b->begin == a->end - a->begin);
        require(a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
        require(memcmp(file->memory + a->begin, out + b->begin, (size_t)(a->end - a->begin)) == 0);
    }
    for (size_t i = 0; i < file->pair_count; i++) {
        const dtrain_safetensors_pair *a = dtrain__safetensors_metadata(file, i);
        const dtrain_safetensors_pair *b = dtrain__safetensors_metadata_find(second, a->key, a->key_length);
        require(b != NULL && b->value_length == a->value_length && memcmp(a->value, b->value, a->value_length) == 0);
    }
    dtrain_safetensors_close(second);
    free(out);
    free(sources);
}

static void fuzz_file(const uint8_t *data, size_t bytes)
{
    dtrain_allocator heap;
    dtrain_safetensors_desc desc;
    dtrain_safetensors *file = NULL;
    memset(&heap, 0, sizeof heap);
    memset(&desc, 0, sizeof desc);
    desc.allocator = &heap;
    dtrain_status status = dtrain_safetensors_open_memory(&file, data, bytes, &desc);
    require(status == DTRAIN_OK || (status == DTRAIN_ERR_CORRUPT && file == NULL));
    require(heap.peak_bytes < 16 * bytes + 8192);
    for (size_t i = 0; i < dtrain_safetensors_count(file); i++)
        read_all(file, dtrain_safetensors_tensor_at(file, i));
    if (file != NULL)
        write_again(file);
    dtrain_safetensors_close(file);
    require(heap.bytes == 0);
}

static void fuzz_header(const uint8_t *data, size_t bytes)
{
    size_t data_bytes = bytes > 0 ? data[0] : 0, header = bytes > 0 ? bytes - 1 : 0;
    uint8_t *file = (uint8_t *)calloc(8 + header + data_bytes, 1);
    require(file != NULL);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)header >> (8 * i));
    if (header > 0)
        memcpy(file + 8, data + 1, header);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + header + i] = (uint8_t)(i * 7);
    fuzz_file(file, 8 + header + data_bytes);
    free(file);
}

static void fuzz_index(const uint8_t *data, size_t bytes)
{
    dtrain_allocator heap;
    memset(&heap, 0, sizeof heap);
    dtrain_safetensors_model *model = (dtrain_safetensors_model *)dtrain__alloc(&heap, sizeof *model);
    require(model != NULL);
    model->allocator = &heap;
    model->index = dtrain__alloc(&heap, bytes);
    model->index_bytes = bytes;
    require(model->index != NULL);
    memcpy(model->index, data, bytes);
    if (dtrain__huggingface_index(model) == DTRAIN_OK && dtrain__huggingface_number(model) == DTRAIN_OK)
        for (size_t i = 0; i < model->line_count; i++) {
            size_t line = 0;
            require(dtrain__names_find(&model->names, model->lines[i].name.text, model->lines[i].name.length, &line) &&
                    line == i);
            require(model->lines[i].shard < model->shard_count);
            require(strchr(model->lines[i].file.text, '/') == NULL);
        }
    require(heap.peak_bytes < 32 * bytes + 8192);
    dtrain_safetensors_model_close(model);
    require(heap.bytes == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dtrain_set_log(quiet, NULL);
    if (bytes == 0)
        return 0;
    switch (data[0] % 4) {
    case 0: fuzz_file(data + 1, bytes - 1); break;
    case 1: fuzz_index(data + 1, bytes - 1); break;
    default: fuzz_header(data + 1, bytes - 1); break;
    }
    return 0;
}
