/* The path of machines that store numbers the other way round, taken on this one: files then hold each number turned
 * around, and reading turns it back. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_memory.h"
#include "safetensors_files.h"
#include "safetensors_boxes.h"

const int hook_file_swap = 1;

static const size_t two[1] = {2};

static dtrain_status fill(void *user, uint64_t offset, void *out, size_t bytes)
{
    memcpy(out, (const unsigned char *)user + offset, bytes);
    return DTRAIN_OK;
}

TEST(every_width_is_turned_around_in_the_file_and_back)
{
    static const dtrain_dtype dtypes[6] = {DTRAIN_U64, DTRAIN_C64, DTRAIN_U32, DTRAIN_U16, DTRAIN_U8, DTRAIN_F4};
    static const char *const in_file[6] = {"\7\6\5\4\3\2\1\0\17\16\15\14\13\12\11\10",
                                           "\3\2\1\0\7\6\5\4\13\12\11\10\17\16\15\14",
                                           "\3\2\1\0\7\6\5\4",
                                           "\1\0\3\2",
                                           "\0\1",
                                           "\0"};
    unsigned char data[16], file[1024], out[16];
    for (int i = 0; i < 16; i++)
        data[i] = (unsigned char)i;
    for (int k = 0; k < 6; k++)
        for (int filled = 0; filled < 2; filled++) {
            size_t width = dtrain_dtype_bits(dtypes[k]) * 2 / 8, bytes = 0;
            dtrain_safetensors_source s = {"x", 0, dtypes[k], 1, two, filled ? NULL : data, filled ? fill : NULL, data};
            dtrain_safetensors *opened = NULL;
            const void *view;
            CHECK_EQ(write_memory(file, sizeof file, &bytes, &s, 1, NULL), DTRAIN_OK);
            CHECK(memcmp(file + bytes - width, in_file[k], width) == 0);
            CHECK(file[0] > 0 && file[1] == 0 && file[8] == '{'); /* the header's length is no number of a tensor */
            CHECK_EQ(dtrain_safetensors_open_memory(&opened, file, bytes, NULL), DTRAIN_OK);
            CHECK_EQ(dtrain_safetensors_load(opened, "x", out, 2, dtypes[k]), DTRAIN_OK);
            CHECK(memcmp(out, data, width) == 0);
            CHECK_EQ(dtrain_safetensors_view(opened, dtrain_safetensors_tensor_at(opened, 0), &view),
                     k < 4 ? DTRAIN_ERR_UNSUPPORTED : DTRAIN_OK);
            dtrain_safetensors_close(opened);
        }
}

TEST(conversions_and_boxes_turn_around_what_they_read)
{
    static const size_t shape[2] = {40, 50}, begin[2] = {3, 5}, size[2] = {30, 20};
    static float values[2000];
    static double out[600];
    dtrain_safetensors_source s = {"x", 0, DTRAIN_F32, 2, shape, values, NULL, NULL};
    for (int i = 0; i < 2000; i++)
        values[i] = (float)i * 0.5f;
    CHECK_EQ(dtrain_safetensors_save(files_path("box"), &s, 1, NULL), DTRAIN_OK);
    read_box(files_path("box"), 2, shape, begin, size, out, DTRAIN_F64);
    for (size_t i = 0; i < 600; i++)
        CHECK(out[i] == (double)((i / 20 + 3) * 50 + i % 20 + 5) * 0.5);
}
