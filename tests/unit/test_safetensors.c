/* safetensors files: what is read, by tensor, range and box; from files, memory and mappings; by many threads while
 * files are replaced. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_files.h"
#include "safetensors_boxes.h"
#include "safetensors_sources.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

/* ---- reading ---- */

static uint64_t seed = 20260711;

static size_t draw(size_t below)
{
    static uint64_t next;
    return (size_t)(dtrain_random_u64(seed, next++) % below);
}

TEST(every_dtype_comes_back_by_every_way)
{
    static const size_t shape[2] = {4, 24};
    unsigned char data[22][768], out[768], stored[768];
    dtrain_safetensors_source sources[22];
    dtrain_safetensors_desc map = {1, NULL};
    dtrain_safetensors *files[3];
    char path[512];
    size_t bytes;
    for (int i = 0; i < 22; i++) {
        for (size_t k = 0; k < sizeof data[i]; k++)
            data[i][k] = (unsigned char)draw(256);
        sources[i] = source(dtrain_dtype_name((dtrain_dtype)(i + 1)), (dtrain_dtype)(i + 1), 2, shape, data[i]);
    }
    snprintf(path, sizeof path, "%s", files_path("every"));
    CHECK_EQ(dtrain_safetensors_save(path, sources, 22, NULL), DTRAIN_OK);
    unsigned char *memory = files_read(path, &bytes);
    CHECK_EQ(dtrain_safetensors_open(&files[0], path, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&files[1], path, &map), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open_memory(&files[2], memory, bytes, NULL), DTRAIN_OK);
    for (int i = 0; i < 22; i++)
        for (int k = 0; k < 3; k++) {
            const dtrain_safetensors_tensor *tensor =
                dtrain_safetensors_find(files[k], sources[i].name, strlen(sources[i].name));
            size_t expected = 96 * dtrain_dtype_bits((dtrain_dtype)(i + 1)) / 8;
            CHECK(tensor != NULL && tensor->dtype == (dtrain_dtype)(i + 1) && tensor->ndim == 2 &&
                  tensor->shape[0] == 4 && tensor->shape[1] == 24 && tensor->count == 96 &&
                  tensor->end - tensor->begin == expected);
            memset(out, 0xAA, sizeof out);
            CHECK_EQ(dtrain_safetensors_read(files[k], tensor, 0, tensor->count, out, (dtrain_dtype)0), DTRAIN_OK);
            CHECK(memcmp(out, data[i], expected) == 0 && (expected == sizeof out || out[expected] == 0xAA));
            memcpy(stored, data[i], expected);
            size_t width = tensor->dtype == DTRAIN_C64 ? 4 : dtrain_dtype_bits(tensor->dtype) / 8;
            if (width > 1)
                little_endian(stored, expected / width, width);
            CHECK(memcmp(memory + tensor->begin, stored, expected) == 0);
        }
    for (int k = 0; k < 3; k++)
        dtrain_safetensors_close(files[k]);
    free(memory);
}

TEST(floats_convert_on_the_way)
{
    static const dtrain_dtype floats[6] = {DTRAIN_F64,  DTRAIN_F32,     DTRAIN_F16,
                                           DTRAIN_BF16, DTRAIN_F8_E4M3, DTRAIN_F8_E5M2};
    enum { COUNT = 40001 }; /* more than a stage holds, and no multiple of it */
    static const size_t shape[1] = {COUNT};
    static unsigned char data[6][COUNT * 8], out[COUNT * 8], expected[COUNT * 8];
    static float values[COUNT];
    dtrain_safetensors_source sources[6];
    dtrain_safetensors *file = NULL;
    for (size_t i = 0; i < COUNT; i++)
        values[i] = (float)((int)i - 20000) / 37.0f;
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(floats[i] == DTRAIN_F32 ? DTRAIN_OK : dtrain_convert(values, DTRAIN_F32, data[i], floats[i], COUNT),
                 DTRAIN_OK);
        if (floats[i] == DTRAIN_F32)
            memcpy(data[i], values, sizeof values);
        sources[i] = source(dtrain_dtype_name(floats[i]), floats[i], 1, shape, data[i]);
    }
    CHECK_EQ(dtrain_safetensors_save(files_path("floats"), sources, 6, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("floats"), NULL), DTRAIN_OK);
    for (int from = 0; from < 6; from++)
        for (int to = 0; to < 6; to++) {
            size_t begin = 17, count = COUNT - 40, width = dtrain_dtype_bits(floats[from]) / 8;
            const dtrain_safetensors_tensor *tensor =
                dtrain_safetensors_find(file, sources[from].name, strlen(sources[from].name));
            if (from == to)
                memcpy(expected, data[from] + begin * width, count * width);
            else
                CHECK_EQ(dtrain_convert(data[from] + begin * width, floats[from], expected, floats[to], count),
                         DTRAIN_OK);
            CHECK_EQ(dtrain_safetensors_read(file, tensor, begin, count, out, floats[to]), DTRAIN_OK);
            CHECK(memcmp(out, expected, count * dtrain_dtype_bits(floats[to]) / 8) == 0);
        }
    /* the one thing that must not be believed of another implementation of ours: 1/37 in float32 and bfloat16 */
    CHECK_EQ(dtrain_safetensors_load(file, "F32", out, COUNT, DTRAIN_BF16), DTRAIN_OK);
    little_endian(out, COUNT, 2);
    CHECK(out[2 * 20001] == 0xdd && out[2 * 20001 + 1] == 0x3c); /* 0.027027 is 0x3cdd67c9 */
    CHECK_EQ(dtrain_safetensors_load(file, "F32", out, COUNT, DTRAIN_I32), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_safetensors_load(file, "F32", out, COUNT - 1, DTRAIN_F32), DTRAIN_ERR_MISMATCH);
    CHECK_EQ(dtrain_safetensors_load(file, "F99", out, COUNT, DTRAIN_F32), DTRAIN_ERR_MISMATCH);
    dtrain_safetensors_close(file);
}

/* Picks a box element by element, which is how nobody would read it. */
static void pick(const unsigned char *data, size_t width, int ndim, const size_t *shape, const size_t *begin,
                 const size_t *size, unsigned char *out)
{
    size_t index[5] = {0}, count = 1;
    for (int d = 0; d < ndim; d++)
        count *= size[d];
    for (size_t i = 0; i < count; i++) {
        size_t rest = i, at = 0;
        for (int d = ndim - 1; d >= 0; d--) {
            index[d] = begin[d] + rest % size[d];
            rest /= size[d];
        }
        for (int d = 0; d < ndim; d++)
            at = at * shape[d] + index[d];
        memcpy(out + i * width, data + at * width, width);
    }
}

TEST(boxes_are_what_picking_each_element_gives)
{
    static const dtrain_dtype dtypes[4] = {DTRAIN_U8, DTRAIN_F16, DTRAIN_F32, DTRAIN_F64};
    unsigned char *data = (unsigned char *)malloc(8 << 20), *out = (unsigned char *)malloc(8 << 20),
                  *expected = (unsigned char *)malloc(8 << 20);
    if (data == NULL || out == NULL || expected == NULL)
        abort();
    for (size_t i = 0; i < (size_t)8 << 20; i++)
        data[i] = (unsigned char)(i * 2654435761u >> 13);
    int before = test_failures;
    for (int round = 0; round < 300; round++) {
        size_t shape[5], begin[5], size[5], count = 1, box = 1;
        int ndim = (int)draw(6);
        dtrain_dtype dtype = dtypes[draw(4)];
        size_t width = dtrain_dtype_bits(dtype) / 8, most = round % 3 == 0 ? 4000 : 12;
        for (int d = 0; d < ndim; d++) {
            shape[d] = 1 + draw(d < ndim - 2 ? 4 : d == ndim - 1 ? most : most > 12 ? 40 : 12);
            int kind = (int)draw(8);
            begin[d] = kind < 3 ? 0 : draw(shape[d]);
            size[d] = kind < 3 ? shape[d] : kind == 7 && round % 5 == 0 ? 0 : 1 + draw(shape[d] - begin[d]);
            count *= shape[d];
            box *= size[d];
        }
        if (count * width > (size_t)8 << 20)
            continue;
        dtrain_safetensors_source s = source("x", dtype, ndim, shape, data);
        dtrain_safetensors_write_desc desc = {NULL, 0, 1, NULL};
        CHECK_EQ(dtrain_safetensors_save(files_path("box"), &s, 1, &desc), DTRAIN_OK);
        memset(out, 0x55, box * width + 8);
        read_box(files_path("box"), ndim, shape, begin, size, out, dtype);
        if (box > 0)
            pick(data, width, ndim, shape, begin, size, expected);
        CHECK(memcmp(out, expected, box * width) == 0 && out[box * width] == 0x55);
        if (dtype == DTRAIN_F32 && box > 0) { /* the same through a conversion that loses nothing */
            double *wide = (double *)malloc(box * 8), *wanted = (double *)malloc(box * 8);
            read_box(files_path("box"), ndim, shape, begin, size, wide, DTRAIN_F64);
            CHECK_EQ(dtrain_convert(expected, DTRAIN_F32, wanted, DTRAIN_F64, box), DTRAIN_OK);
            CHECK(memcmp(wide, wanted, box * 8) == 0);
            free(wide);
            free(wanted);
        }
        if (test_failures > before) {
            TEST_FAIL("round %d of seed %llu", round, (unsigned long long)seed);
            round = 300;
        }
    }
    free(data);
    free(out);
    free(expected);
}

/* Bytes that a box of a 1,000 x 4,000 tensor of float32 costs, whose elements are their own numbers. */
static uint64_t cost(uint64_t header, size_t row, size_t rows, size_t column, size_t columns, float *out)
{
    static const size_t shape[2] = {1000, 4000};
    size_t begin[2], size[2];
    begin[0] = row, begin[1] = column, size[0] = rows, size[1] = columns;
    uint64_t bytes = read_box(files_path("cost"), 2, shape, begin, size, out, DTRAIN_F32);
    for (size_t i = 0; i < rows * columns; i++)
        if (out[i] != (float)((row + i / columns) * 4000 + column + i % columns)) {
            TEST_FAIL("element %zu of %zu x %zu from %zu, %zu on is %g", i, rows, columns, row, column, (double)out[i]);
            break;
        }
    return bytes - header;
}

/* Runs of elements as they are in memory. A big-endian machine turns them around, and reads whole pages for that. */
static uint64_t as_they_are(uint64_t runs, uint64_t bytes)
{
    return runs * (DTRAIN__FILE_SWAP ? (bytes + 4095) / 4096 * 4096 : bytes);
}

TEST(a_box_of_a_file_without_hashes_costs_the_bytes_it_needs_and_the_rest_of_pages)
{
    static const size_t shape[2] = {1000, 4000};
    float *values = (float *)malloc(16000000);
    dtrain_safetensors *file = NULL;
    if (values == NULL)
        abort();
    for (size_t i = 0; i < 4000000; i++)
        values[i] = (float)i;
    dtrain_safetensors_source s = source("x", DTRAIN_F32, 2, shape, values);
    CHECK_EQ(dtrain_safetensors_save(files_path("cost"), &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("cost"), NULL), DTRAIN_OK);
    uint64_t header = dtrain_safetensors_tensor_at(file, 0)->begin;
    dtrain_safetensors_close(file);
    CHECK_EQ(cost(header, 3, 5, 0, 4000, values), as_they_are(1, 5 * 16000)); /* whole rows: one run */
    CHECK_EQ(cost(header, 0, 1000, 0, 2000, values),
             as_they_are(1000, 8000)); /* half of each row, gaps of 8,000 bytes */
    CHECK_EQ(cost(header, 0, 10, 0, 3000, values), as_they_are(10, 12000));
    CHECK_EQ(cost(header, 0, 10, 0, 1000, values), 10 * 4096); /* 4,000 bytes of each row */
    CHECK_EQ(cost(header, 7, 1, 100, 10, values), 4096);
    CHECK_EQ(cost(header, 0, 1000, 4000, 0, values), 0);
    CHECK_EQ(cost(header, 0, 0, 0, 4000, values), 0);
    free(values);
}

TEST(tensors_that_begin_anywhere_are_converted)
{
    static const char header[] = "{\"u\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                                 "\"x\":{\"dtype\":\"F32\",\"shape\":[3000],\"data_offsets\":[3,12003]}}";
    static const size_t shape[1] = {3000}, begin[1] = {5}, size[1] = {2990};
    static double out[3000];
    size_t bytes;
    unsigned char *file = files_make(header, sizeof header - 1, 12003, &bytes);
    for (int i = 0; i < 3000; i++) {
        float value = (float)i * 0.25f;
        little_endian(&value, 1, 4);
        memcpy(file + 8 + sizeof header - 1 + 3 + 4 * i, &value, 4);
    }
    files_write(files_path("anywhere"), file, bytes);
    free(file);
    read_box(files_path("anywhere"), 1, shape, begin, size, out, DTRAIN_F64);
    for (int i = 0; i < 2990; i++)
        CHECK(out[i] == (i + 5) * 0.25);
}

TEST(ranges_beyond_a_tensor_are_refused)
{
    static const float values[6] = {0, 1, 2, 3, 4, 5};
    float out[6];
    dtrain_safetensors_source s = source("x", DTRAIN_F32, 2, two_by_three, values);
    dtrain_safetensors *file = NULL;
    CHECK_EQ(dtrain_safetensors_save(files_path("beyond"), &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("beyond"), NULL), DTRAIN_OK);
    const dtrain_safetensors_tensor *x = dtrain_safetensors_tensor_at(file, 0);
    CHECK_EQ(dtrain_safetensors_read(file, x, 6, 0, NULL, DTRAIN_F32), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_read(file, x, 5, 2, out, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, x, 7, 0, out, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, x, 1, (size_t)-1, out, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, x, 0, x->count, NULL, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, NULL, 0, 1, out, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(NULL, x, 0, x->count, out, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK(dtrain_safetensors_tensor_at(file, 1) == NULL && dtrain_safetensors_find(file, "y", 1) == NULL);
    dtrain_safetensors_close(file);
    dtrain_safetensors_close(NULL);
}

TEST(narrow_dtypes_are_read_at_whole_bytes)
{
    static const unsigned char four[6] = {1, 2, 3, 4, 5, 6}, six[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    static const size_t shape[2] = {3, 4};
    unsigned char out[9] = {0};
    dtrain_safetensors_source s[2];
    dtrain_safetensors *file = NULL;
    s[0] = source("four", DTRAIN_F4, 2, shape, four);
    s[1] = source("six", DTRAIN_F6_E3M2, 2, shape, six);
    CHECK_EQ(dtrain_safetensors_save(files_path("narrow"), s, 2, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("narrow"), NULL), DTRAIN_OK);
    const dtrain_safetensors_tensor *x = dtrain_safetensors_find(file, "four", 4),
                                    *y = dtrain_safetensors_find(file, "six", 3);
    CHECK_EQ(dtrain_safetensors_read(file, x, 2, 4, out, DTRAIN_F4), DTRAIN_OK);
    CHECK(out[0] == 2 && out[1] == 3 && out[2] == 0);
    CHECK_EQ(dtrain_safetensors_read(file, x, 1, 4, out, DTRAIN_F4), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, x, 2, 3, out, DTRAIN_F4), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, y, 4, 8, out, DTRAIN_F6_E3M2), DTRAIN_OK);
    CHECK(memcmp(out, six + 3, 6) == 0);
    CHECK_EQ(dtrain_safetensors_read(file, y, 2, 4, out, DTRAIN_F6_E3M2), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_read(file, x, 0, x->count, out, DTRAIN_F32), DTRAIN_ERR_UNSUPPORTED);
    dtrain_safetensors_close(file);
}

TEST(views_are_given_where_alignment_allows)
{
    static const float values[2] = {1.5f, -2};
    static const unsigned char bytes[3] = {7, 8, 9};
    static const size_t three[1] = {3};
    dtrain_safetensors_desc map = {1, NULL};
    dtrain_safetensors *file = NULL;
    dtrain_safetensors_source s[3];
    const void *view;
    s[0] = source("f", DTRAIN_F32, 1, two, values);
    s[1] = source("u", DTRAIN_U8, 1, three, bytes);
    s[2] = source("e", DTRAIN_F64, 1, none, NULL);
    CHECK_EQ(dtrain_safetensors_save(files_path("view"), s, 3, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("view"), &map), DTRAIN_OK);
    if (DTRAIN__FILE_SWAP) {
        CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "f", 1), &view), DTRAIN_ERR_UNSUPPORTED);
        CHECK_CONTAINS(dtrain_last_error(), "is little-endian");
    } else {
        CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "f", 1), &view), DTRAIN_OK);
        CHECK(((const float *)view)[0] == 1.5f && ((const float *)view)[1] == -2);
    }
    CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "u", 1), &view), DTRAIN_OK);
    CHECK(memcmp(view, bytes, 3) == 0);
    CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "e", 1), &view), DTRAIN_OK);
    CHECK(view == NULL);
    dtrain_safetensors_close(file);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("view"), NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "f", 1), &view), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "not mapped");
    dtrain_safetensors_close(file);
    static const char header[] =
        "{\"xy\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]}}"; /* 55 bytes: odd */
    size_t length;
    unsigned char *made = files_make(header, sizeof header - 1, 2, &length);
    CHECK_EQ(dtrain_safetensors_open_memory(&file, made, length, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_tensor_at(file, 0), &view), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), DTRAIN__FILE_SWAP ? "is little-endian at byte 63" : "not aligned at byte 63");
    dtrain_safetensors_close(file);
    free(made);
}

TEST(metadata_are_listed_and_found)
{
    static const char header[] = "{\"__metadata__\":{\"b\\u0000\":\"1\\n\",\"\":\"\\u00e9\",\"a\":\"\"}}";
    size_t bytes;
    unsigned char *made = files_make(header, sizeof header - 1, 0, &bytes);
    dtrain_safetensors *file = NULL;
    CHECK_EQ(dtrain_safetensors_open_memory(&file, made, bytes, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain__safetensors_metadata_count(file), 3);
    const dtrain_safetensors_pair *first = dtrain__safetensors_metadata(file, 0);
    CHECK(first->key_length == 2 && memcmp(first->key, "b\0", 3) == 0 && strcmp(first->value, "1\n") == 0);
    CHECK(dtrain__safetensors_metadata_find(file, "b\0", 2) == first);
    CHECK(dtrain__safetensors_metadata_find(file, "b", 1) == NULL);
    CHECK(strcmp(dtrain__safetensors_metadata_find(file, "", 0)->value, "\303\251") == 0);
    CHECK(dtrain__safetensors_metadata(file, 3) == NULL);
    CHECK_EQ(dtrain__safetensors_header_bytes(file), bytes);
    dtrain_safetensors_close(file);
    free(made);
}

/* The header's own example. */
TEST(the_example_saves_and_loads)
{
    enum { V = 5, C = 3, T = 4 };
    static float wte[V * C] = {1, 2, 3}, wpe[T * C] = {4, 5, 6}, again[V * C];
    static const size_t wte_shape[2] = {V, C}, wpe_shape[2] = {T, C};
    const char *path = files_path("model.safetensors");
    dtrain_safetensors *file;
    dtrain_safetensors_source arrays[2] = {{"wte", 0, DTRAIN_F32, 2, wte_shape, wte, NULL, NULL},
                                           {"wpe", 0, DTRAIN_F32, 2, wpe_shape, wpe, NULL, NULL}};
    DTRAIN_CHECK(dtrain_safetensors_save(path, arrays, 2, NULL));
    DTRAIN_CHECK(dtrain_safetensors_open(&file, path, NULL));
    DTRAIN_CHECK(dtrain_safetensors_load(file, "wte", again, V * C, DTRAIN_F32));
    dtrain_safetensors_close(file);
    CHECK(memcmp(again, wte, sizeof wte) == 0);
}

/* ---- files ---- */

TEST(what_is_no_file_is_refused)
{
    dtrain_safetensors *file = (dtrain_safetensors *)1;
    dtrain_safetensors_model *model;
    char moved[300];
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("absent"), NULL), DTRAIN_ERR_IO);
    CHECK(file == NULL);
    CHECK_CONTAINS(dtrain_last_error(), strerror(ENOENT));
    CHECK_EQ(dtrain_safetensors_open(&file, "/", NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(mkfifo(files_path("fifo"), 0600), 0); /* which would block whoever opens it */
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("fifo"), NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_safetensors_open(&file, "/dev/zero", NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "\"/dev/zero\" is not a regular file");
    CHECK_EQ(dtrain_safetensors_model_open(&model, files_path("fifo"), NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(rename(files_path("fifo"), strcpy(moved, files_path("fifo.json"))), 0);
    CHECK_EQ(dtrain_safetensors_model_open(&model, moved, NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(mkdir(files_path("step-1"), 0700), 0);
    CHECK_EQ(rename(moved, files_path("step-1/index.json")), 0);
    CHECK_EQ(dtrain_checkpoint_verify(files_path("step-1")), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_safetensors_open(&file, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_save(NULL, NULL, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_safetensors_save(files_path("absent/file"), NULL, 0, NULL), DTRAIN_ERR_IO);
    CHECK_EQ(dtrain_safetensors_save(files_path(""), NULL, 0, NULL), DTRAIN_ERR_INVALID);
}

TEST(what_a_file_would_replace_and_lose_is_refused)
{
    struct stat kind;
    dtrain_safetensors_source x = source("x", DTRAIN_U8, 0, NULL, "x");
    CHECK_EQ(mkfifo(files_path("a pipe"), 0600), 0);
    CHECK_EQ(symlink("a pipe", files_path("to a pipe")), 0);
    CHECK_EQ(mkdir(files_path("a directory"), 0700), 0);
    CHECK_EQ(symlink("a directory", files_path("to a directory")), 0);
    CHECK_EQ(symlink("nothing", files_path("to nothing")), 0);
    CHECK_EQ(dtrain_safetensors_save(files_path("a pipe"), &x, 1, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "a device or a pipe, which a file would replace");
    CHECK_EQ(dtrain_safetensors_save(files_path("to a pipe"), &x, 1, NULL), DTRAIN_ERR_INVALID);
    CHECK(lstat(files_path("a pipe"), &kind) == 0 && S_ISFIFO(kind.st_mode));
    CHECK(lstat(files_path("to a pipe"), &kind) == 0 && S_ISLNK(kind.st_mode));
    CHECK_EQ(dtrain_safetensors_save(files_path("a directory"), &x, 1, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "is a directory");
    /* links to anything else are replaced themselves */
    CHECK_EQ(dtrain_safetensors_save(files_path("to a directory"), &x, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_save(files_path("to nothing"), &x, 1, NULL), DTRAIN_OK);
    CHECK(lstat(files_path("to nothing"), &kind) == 0 && S_ISREG(kind.st_mode));
    CHECK(lstat(files_path("a directory"), &kind) == 0 && S_ISDIR(kind.st_mode));
}

TEST(a_file_that_is_cut_after_it_was_opened_is_an_error)
{
    static const float values[6] = {0, 1, 2, 3, 4, 5};
    float out[6];
    dtrain_safetensors_source s = source("x", DTRAIN_F32, 2, two_by_three, values);
    dtrain_safetensors *file = NULL;
    CHECK_EQ(dtrain_safetensors_save(files_path("cut"), &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("cut"), NULL), DTRAIN_OK);
    const dtrain_safetensors_tensor *x = dtrain_safetensors_tensor_at(file, 0);
    CHECK_EQ(truncate(files_path("cut"), (off_t)x->begin + 10), 0);
    CHECK_EQ(dtrain_safetensors_read(file, x, 0, 2, out, DTRAIN_F32), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_read(file, x, 0, x->count, out, DTRAIN_F32), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "14 bytes short: it was cut after it was opened; tensor \"x\"");
    dtrain_safetensors_close(file);
}

TEST(what_is_replaced_keeps_nothing_of_the_old_file)
{
    static const unsigned char many[4] = {1, 2, 3, 4}, few[1] = {9};
    static const size_t four[1] = {4};
    dtrain_safetensors *before = NULL, *after = NULL;
    unsigned char out[4];
    dtrain_safetensors_source s = source("x", DTRAIN_U8, 1, four, many);
    char path[512];
    CHECK_EQ(mkdir(files_path("place"), 0700), 0);
    snprintf(path, sizeof path, "%s", files_path("place/file"));
    CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&before, path, NULL), DTRAIN_OK);
    s = source("x", DTRAIN_U8, 1, one, few);
    CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&after, path, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_load(before, "x", out, 4, DTRAIN_U8), DTRAIN_OK); /* who has it open keeps it */
    CHECK(memcmp(out, many, 4) == 0);
    CHECK_EQ(dtrain_safetensors_load(after, "x", out, 1, DTRAIN_U8), DTRAIN_OK);
    CHECK_EQ(out[0], 9);
    CHECK_EQ(files_in(files_path("place")), 1);
    dtrain_safetensors_close(before);
    dtrain_safetensors_close(after);
}

/* Saves from a mapping of the very file that is replaced. */
TEST(a_file_may_be_saved_from_a_view_of_itself)
{
    static const float values[6] = {0, 1, 2, 3, 4, 5};
    float out[6];
    dtrain_safetensors_desc map = {1, NULL};
    dtrain_safetensors *file = NULL;
    const void *view = NULL;
    static const size_t bytes[1] = {sizeof values}; /* views of bytes are given on every machine */
    dtrain_safetensors_source s = source("x", DTRAIN_U8, 1, bytes, values);
    CHECK_EQ(dtrain_safetensors_save(files_path("self"), &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("self"), &map), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_view(file, dtrain_safetensors_tensor_at(file, 0), &view), DTRAIN_OK);
    s = source("a longer name than it had before", DTRAIN_U8, 1, bytes, view);
    CHECK_EQ(dtrain_safetensors_save(files_path("self"), &s, 1, NULL), DTRAIN_OK);
    dtrain_safetensors_close(file);
    CHECK_EQ(dtrain_safetensors_open(&file, files_path("self"), NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_load(file, s.name, out, sizeof out, DTRAIN_U8), DTRAIN_OK);
    CHECK(memcmp(out, values, sizeof values) == 0);
    dtrain_safetensors_close(file);
}

/* ---- threads ---- */

enum { STAMPS = 100000 };
static int readers_stop;
static int readers_seen;

/* Opens the file again and again: all its elements must be of one writing. */
static void *reader_main(void *user)
{
    static __thread uint32_t out[STAMPS];
    while (!__atomic_load_n(&readers_stop, __ATOMIC_RELAXED)) {
        dtrain_safetensors *file = NULL;
        if (dtrain_safetensors_open(&file, (const char *)user, NULL) != DTRAIN_OK) {
            TEST_FAIL("%s", dtrain_last_error());
            return NULL;
        }
        CHECK_EQ(dtrain_safetensors_load(file, "x", out, STAMPS, DTRAIN_U32), DTRAIN_OK);
        for (size_t i = 1; i < STAMPS; i++)
            if (out[i] != out[0]) {
                TEST_FAIL("element %zu is of writing %u, and the first of %u", i, out[i], out[0]);
                break;
            }
        __atomic_add_fetch(&readers_seen, 1, __ATOMIC_RELAXED);
        dtrain_safetensors_close(file);
    }
    return NULL;
}

TEST(readers_see_the_old_file_or_the_new_one)
{
    static uint32_t stamps[STAMPS];
    static const size_t shape[1] = {STAMPS};
    static char path[512];
    pthread_t readers[3];
    dtrain_safetensors_source s = source("x", DTRAIN_U32, 1, shape, stamps);
    dtrain_safetensors_write_desc desc = {NULL, 0, 1, NULL};
    snprintf(path, sizeof path, "%s", files_path("replaced"));
    for (uint32_t writing = 0;
         writing < 200 || (__atomic_load_n(&readers_seen, __ATOMIC_RELAXED) < 100 && writing < 100000); writing++) {
        for (size_t i = 0; i < STAMPS; i++)
            stamps[i] = writing;
        CHECK_EQ(dtrain_safetensors_save(path, &s, 1, &desc), DTRAIN_OK);
        for (int i = 0; i < 3 && writing == 0; i++)
            pthread_create(&readers[i], NULL, reader_main, path);
    }
    __atomic_store_n(&readers_stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++)
        pthread_join(readers[i], NULL);
    CHECK(readers_seen >= 100);
}

static dtrain_safetensors *shared_file;

static void *shared_main(void *user)
{
    static __thread float out[40000];
    size_t number = *(const size_t *)user;
    for (size_t round = 0; round < 200; round++) {
        size_t begin = (number * 7919 + round * 104729) % 60000, count = 1 + (round * 31 + number) % 40000;
        const dtrain_safetensors_tensor *x = dtrain_safetensors_find(shared_file, "x", 1);
        CHECK_EQ(dtrain_safetensors_read(shared_file, x, begin, count, out, DTRAIN_F32), DTRAIN_OK);
        CHECK(out[0] == (float)begin && out[count - 1] == (float)(begin + count - 1));
    }
    return NULL;
}

TEST(any_number_of_threads_read_one_open_file)
{
    static double values[100000];
    static const size_t shape[1] = {100000};
    size_t numbers[8];
    pthread_t threads[8];
    dtrain_safetensors_source s = source("x", DTRAIN_F64, 1, shape, values);
    for (size_t i = 0; i < 100000; i++)
        values[i] = (double)i;
    CHECK_EQ(dtrain_safetensors_save(files_path("shared"), &s, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open(&shared_file, files_path("shared"), NULL), DTRAIN_OK);
    for (size_t i = 0; i < 8; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, shared_main, &numbers[i]);
    }
    for (size_t i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    dtrain_safetensors_close(shared_file);
}

/* ---- memory ---- */

static int allocations_left;

static void *stingy(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes > 0) {
        if (allocations_left-- <= 0 || posix_memalign(&block, align, new_bytes) != 0)
            return NULL;
        if (pointer != NULL)
            memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    }
    free(pointer);
    return block;
}

TEST(without_memory_there_is_a_status_and_nothing_leaks)
{
    static const float values[2] = {1, 2};
    dtrain_allocator heap = {stingy, NULL, 0, 0};
    dtrain_safetensors_pair pair = {"k", 0, "v", 0};
    dtrain_safetensors_desc desc = {0, &heap};
    dtrain_safetensors_write_desc write_desc = {&pair, 1, 1, &heap};
    dtrain_safetensors_source sources[40];
    static char names[40][8];
    dtrain_safetensors *file = NULL;
    int saves = 0, opens = 0;
    counter c = {0, 0};
    for (size_t i = 0; i < 40; i++) {
        snprintf(names[i], sizeof names[i], "t%zu", i);
        sources[i] = source(names[i], i % 2 ? DTRAIN_F32 : DTRAIN_U8, 1, two, values);
    }
    sources[0] = source("filled", DTRAIN_F64, 1, two, NULL);
    sources[0].fill = counter_fill;
    sources[0].user = &c;
    for (int allowed = 0; saves == 0 && allowed < 100; allowed++) {
        allocations_left = allowed;
        c.next = 0;
        dtrain_status status = dtrain_safetensors_save(files_path("stingy"), sources, 40, &write_desc);
        saves += status == DTRAIN_OK;
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_MEMORY);
        CHECK_EQ(heap.bytes, 0);
        CHECK_EQ(access(files_path("stingy"), F_OK) == 0, status == DTRAIN_OK);
    }
    for (int allowed = 0; opens == 0 && allowed < 100; allowed++) {
        allocations_left = allowed;
        dtrain_status status = dtrain_safetensors_open(&file, files_path("stingy"), &desc);
        opens += status == DTRAIN_OK;
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_MEMORY);
        CHECK(status == DTRAIN_OK || (heap.bytes == 0 && file == NULL));
    }
    CHECK_EQ(saves, 1);
    CHECK_EQ(opens, 1);
    dtrain_safetensors_close(file);
    CHECK_EQ(heap.bytes, 0);
}

/* A header in the order of its names, as Python's json writes it: entries out of the order of their data. */
TEST(memory_is_a_few_times_the_header)
{
    size_t count = 20000, at = 1;
    char *header = (char *)malloc(count * 100);
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain_safetensors_desc desc = {0, &heap};
    dtrain_safetensors *file = NULL;
    if (header == NULL)
        abort();
    header[0] = '{';
    for (size_t i = 0; i < count; i++)
        at += (size_t)sprintf(
            header + at,
            "%s\"layers.%zu.weight\": {\"dtype\": \"F32\", \"shape\": [1, 1], \"data_offsets\": [%zu, %zu]}",
            i > 0 ? ", " : "", i, (count - 1 - i) * 4, (count - i) * 4);
    header[at++] = '}';
    size_t bytes;
    unsigned char *made = files_make(header, at, count * 4, &bytes);
    CHECK_EQ(dtrain_safetensors_open_memory(&file, made, bytes, &desc), DTRAIN_OK);
    CHECK(heap.peak_bytes < 5 * at);
    CHECK_EQ(dtrain_safetensors_tensor_at(file, 0)->begin, 8 + at);
    CHECK(strcmp(dtrain_safetensors_tensor_at(file, 0)->name, "layers.19999.weight") == 0);
    for (size_t i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%zu.weight", i);
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(file, name, strlen(name));
        CHECK(tensor != NULL && tensor->begin == 8 + at + (count - 1 - i) * 4);
    }
    dtrain_safetensors_close(file);
    free(made);
    free(header);
}
