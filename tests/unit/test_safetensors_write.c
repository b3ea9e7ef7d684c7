/* safetensors files as they are written: byte for byte, in pieces, and from what need not be in memory. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_files.h"
#include "safetensors_memory.h"
#include "safetensors_sources.h"

/* Compares what is written with a file typed by hand: the header's length in its first byte, header, data. */
static void written_is(int line, const dtrain_safetensors_source *sources, size_t count,
                       const dtrain_safetensors_write_desc *desc, const char *expected, size_t expected_bytes)
{
    unsigned char out[1024];
    size_t bytes = 0;
    uint64_t size = 0;
    if (write_memory(out, sizeof out, &bytes, sources, count, desc) != DTRAIN_OK)
        TEST_FAIL("line %d: %s", line, dtrain_last_error());
    if (bytes != expected_bytes || memcmp(out, expected, bytes) != 0)
        TEST_FAIL("line %d: %zu bytes, expected %zu, or others: \"%.*s\"", line, bytes, expected_bytes, (int)bytes - 8,
                  (const char *)out + 8);
    CHECK_EQ(dtrain_safetensors_size(&size, sources, count, desc), DTRAIN_OK);
    CHECK_EQ(size, expected_bytes);
}

#define WRITTEN(sources, count, desc, expected) \
    written_is(__LINE__, sources, count, desc, expected, sizeof(expected) - 1)

TEST(the_widest_dtype_is_first_then_the_name_that_sorts_first)
{
    unsigned char b[2] = {1, 2}, a[4] = {3, 4, 5, 6}, z[4] = {7, 8, 9, 10};
    dtrain_safetensors_source sources[3];
    little_endian(a, 1, 4);
    little_endian(z, 1, 4);
    sources[0] = source("b", DTRAIN_U8, 1, two, b);
    sources[1] = source("z", DTRAIN_F32, 0, NULL, z);
    sources[2] = source("a", DTRAIN_F32, 1, one, a);
    /* 1 + 52 + 1 + 51 + 1 + 52 + 1 = 159 bytes, and a space */
    WRITTEN(sources, 3, NULL,
            "\240\0\0\0\0\0\0\0"
            "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
            "\"z\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[4,8]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[8,10]}} "
            "\3\4\5\6\7\10\11\12\1\2");
}

TEST(equal_widths_follow_the_reference_s_rank)
{
    static const char *const by_rank[22] = {"U64",         "I64",     "F64",     "C64",     "F32", "U32",
                                            "I32",         "BF16",    "F16",     "U16",     "I16", "F8_E5M2FNUZ",
                                            "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8",  "U8",
                                            "F6_E3M2",     "F6_E2M3", "F4",      "BOOL"};
    static const unsigned char zeros[64];
    static const size_t eight[1] = {8};
    dtrain_safetensors_source sources[22];
    dtrain_safetensors *file = NULL;
    unsigned char out[4096];
    size_t bytes = 0;
    for (int i = 0; i < 22; i++) /* names in the opposite order */
        sources[i] = source(i % 2 ? "a" : "b", (dtrain_dtype)(i + 1), 1, eight, zeros);
    static char names[22][2];
    for (int i = 0; i < 22; i++) {
        names[i][0] = (char)('a' + (i * 7) % 22);
        sources[i].name = names[i];
    }
    CHECK_EQ(write_memory(out, sizeof out, &bytes, sources, 22, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_open_memory(&file, out, bytes, NULL), DTRAIN_OK);
    for (size_t i = 0; i < 22; i++)
        CHECK(strcmp(dtrain_dtype_name(dtrain_safetensors_tensor_at(file, i)->dtype), by_rank[i]) == 0);
    dtrain_safetensors_close(file);
}

TEST(names_sort_by_bytes)
{
    static const unsigned char d[1] = {0};
    dtrain_safetensors_source sources[5];
    sources[0] =
        source("\360\220\200\200", DTRAIN_U8, 1, none, d); /* U+10000: before U+FFFF in UTF-16, after it here */
    sources[1] = source("\357\277\277", DTRAIN_U8, 1, none, d);
    sources[2] = source("a", DTRAIN_U8, 1, none, d);
    sources[3] = source("Z", DTRAIN_U8, 1, none, d);
    sources[4] = source("", DTRAIN_U8, 1, none, NULL);
    /* 1 + 50 + 51 + 51 + 53 + 54 + 4 commas + 1 = 265 bytes, and seven spaces */
    WRITTEN(sources, 5, NULL,
            "\20\1\0\0\0\0\0\0"
            "{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
            "\"Z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
            "\"\357\277\277\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
            "\"\360\220\200\200\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}       ");
}

TEST(only_what_must_be_is_escaped)
{
    static const unsigned char d[1] = {0};
    dtrain_safetensors_source s = source("\"\\/\b\t\n\f\r\1\37\177\303\251", DTRAIN_U8, 1, one, d);
    /* the name has 4 + 1 + 10 + 12 + 1 + 2 = 30 bytes: 1 + 33 + 47 + 1 = 82, and 6 spaces */
    WRITTEN(&s, 1, NULL,
            "\130\0\0\0\0\0\0\0"
            "{\"\\\"\\\\/\\b\\t\\n\\f\\r\\u0001\\u001f\177\303\251\":"
            "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}      \0");
}

TEST(a_header_of_whole_eights_is_not_padded)
{
    static const unsigned char d[1] = {5};
    dtrain_safetensors_source s = source("name", DTRAIN_U8, 1, one, d);
    /* 1 + 7 + 47 + 1 = 56 */
    WRITTEN(&s, 1, NULL, "\70\0\0\0\0\0\0\0{\"name\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}\5");
}

TEST(metadata_come_first_and_sorted)
{
    dtrain_safetensors_pair pairs[3] = {{"z", 0, "1", 0}, {"format", 0, "pt", 0}, {"a\0b", 3, "", 0}};
    dtrain_safetensors_write_desc desc = {pairs, 3, 0, NULL};
    /* 17 + 13 + 1 + 13 + 1 + 7 + 2 = 54, and 2 spaces */
    WRITTEN(NULL, 0, &desc, "\70\0\0\0\0\0\0\0{\"__metadata__\":{\"a\\u0000b\":\"\",\"format\":\"pt\",\"z\":\"1\"}}  ");
}

TEST(an_empty_file_is_readable)
{
    dtrain_safetensors_pair pair = {"", 0, "", 0};
    dtrain_safetensors_write_desc empty = {&pair, 0, 0, NULL};
    WRITTEN(NULL, 0, NULL, "\10\0\0\0\0\0\0\0{}      ");
    WRITTEN(NULL, 0, &empty, "\30\0\0\0\0\0\0\0{\"__metadata__\":{}}     "); /* the reference writes no JSON here */
}

TEST(metadata_of_no_pairs_are_written_empty_and_none_without_a_pointer)
{
    static const unsigned char d[1] = {5};
    dtrain_safetensors_pair pair = {"", 0, "", 0};
    dtrain_safetensors_write_desc empty = {&pair, 0, 0, NULL}, absent = {NULL, 0, 0, NULL}, bad = {NULL, 1, 0, NULL};
    dtrain_safetensors_source s = source("name", DTRAIN_U8, 1, one, d);
    size_t bytes;
    /* 1 + 17 + 1 + 54 + 1 = 74, and 6 spaces */
    WRITTEN(&s, 1, &empty,
            "\120\0\0\0\0\0\0\0{\"__metadata__\":{},\"name\":{\"dtype\":\"U8\",\"shape\":[1],"
            "\"data_offsets\":[0,1]}}      \5");
    WRITTEN(&s, 1, &absent, "\70\0\0\0\0\0\0\0{\"name\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}\5");
    CHECK_EQ(write_memory(NULL, 0, &bytes, &s, 1, &bad), DTRAIN_ERR_INVALID);
}

static void refused(int line, const dtrain_safetensors_source *sources, size_t count,
                    const dtrain_safetensors_write_desc *desc, const char *text)
{
    unsigned char out[256] = {0};
    size_t bytes;
    if (write_memory(out, sizeof out, &bytes, sources, count, desc) != DTRAIN_ERR_INVALID)
        TEST_FAIL("line %d: taken, or another error: %s", line, dtrain_last_error());
    else if (strstr(dtrain_last_error(), text) == NULL)
        TEST_FAIL("line %d: \"%s\", expected \"%s\"", line, dtrain_last_error(), text);
    CHECK_EQ(out[0], 0); /* nothing is written */
}

TEST(what_nobody_could_read_back_is_refused)
{
    static const unsigned char d[8] = {0};
    static const size_t huge[4] = {SIZE_MAX, SIZE_MAX, SIZE_MAX, 0}, odd[1] = {3};
    dtrain_safetensors_pair pairs[2] = {{"k", 0, "1", 0}, {"k", 0, "2", 0}}, bad = {"k\377", 0, "", 0};
    dtrain_safetensors_write_desc twice = {pairs, 2, 0, NULL}, not_utf8 = {&bad, 1, 0, NULL};
    dtrain_safetensors_source s[2];
    s[0] = source("__metadata__", DTRAIN_U8, 1, one, d);
    refused(__LINE__, s, 1, NULL, "R10");
    s[0] = source("a", DTRAIN_U8, 1, one, d);
    s[1] = source("a", DTRAIN_F32, 1, one, d);
    refused(__LINE__, s, 2, NULL, "R12");
    refused(__LINE__, NULL, 0, &twice, "R12");
    refused(__LINE__, NULL, 0, &not_utf8, "R4");
    s[0] = source("\355\240\200", DTRAIN_U8, 1, one, d);
    refused(__LINE__, s, 1, NULL, "R4");
    s[0] = source("a", (dtrain_dtype)23, 1, one, d);
    refused(__LINE__, s, 1, NULL, "R13");
    s[0] = source("a", DTRAIN_U8, 4, huge, d);
    refused(__LINE__, s, 1, NULL, "R17");
    s[0] = source("a", DTRAIN_F4, 1, odd, d);
    refused(__LINE__, s, 1, NULL, "R18");
    s[0] = source("a", DTRAIN_U8, 1, one, NULL);
    refused(__LINE__, s, 1, NULL, "neither data nor fill");
    s[0] = source(NULL, DTRAIN_U8, 1, one, d);
    refused(__LINE__, s, 1, NULL, "no name");
    s[0] = source("a", DTRAIN_U8, 1, NULL, d);
    refused(__LINE__, s, 1, NULL, "no shape");
    s[0] = source("a", DTRAIN_F64, 1, one, d);
    unsigned char small[70];
    size_t bytes = 0;
    CHECK_EQ(write_memory(small, sizeof small, &bytes, s, 1, NULL), DTRAIN_ERR_IO); /* the sink's own */
}

/* ---- sinks and fills ---- */

typedef struct spool {
    unsigned char *data;
    size_t bytes, calls, most, fail_at;
} spool;

static dtrain_status spool_take(void *user, const void *data, size_t bytes)
{
    spool *s = (spool *)user;
    if (++s->calls == s->fail_at)
        return DTRAIN_ERR_ABORTED;
    memcpy(s->data + s->bytes, data, bytes);
    s->bytes += bytes;
    s->most = bytes > s->most ? bytes : s->most;
    return DTRAIN_OK;
}

TEST(a_tensor_need_not_be_in_memory)
{
    static const size_t shape[2] = {1250000, 3}; /* 30,000,000 bytes of float64 */
    size_t whole = 30000000;
    counter c = {0, 0};
    spool s = {(unsigned char *)malloc(whole + 4096), 0, 0, 0, 0};
    unsigned char *data = (unsigned char *)malloc(whole);
    if (s.data == NULL || data == NULL)
        abort();
    for (size_t i = 0; i < whole; i++)
        data[i] = (unsigned char)(i % 253);
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain_safetensors_write_desc desc = {NULL, 0, 0, &heap};
    dtrain_safetensors_source filled = source("x", DTRAIN_F64, 2, shape, NULL),
                              held = source("x", DTRAIN_F64, 2, shape, data);
    filled.fill = counter_fill;
    filled.user = &c;
    CHECK_EQ(dtrain_safetensors_write(spool_take, &s, &filled, 1, &desc), DTRAIN_OK);
    CHECK_EQ(c.next, whole);
    CHECK(heap.peak_bytes < 2000000 && heap.bytes == 0);
    size_t filled_bytes = s.bytes;
    unsigned char *first = (unsigned char *)malloc(filled_bytes);
    if (first == NULL)
        abort();
    memcpy(first, s.data, filled_bytes);
    s.bytes = s.most = 0;
    CHECK_EQ(dtrain_safetensors_write(spool_take, &s, &held, 1, NULL), DTRAIN_OK);
    CHECK(s.bytes == filled_bytes && memcmp(first, s.data, s.bytes) == 0);
    CHECK_EQ(s.most, DTRAIN__FILE_SWAP ? DTRAIN__SAFETENSORS_FILL : 8 << 20); /* or what is turned around at once */
    s.bytes = s.calls = 0;
    s.fail_at = 3;
    CHECK_EQ(dtrain_safetensors_write(spool_take, &s, &held, 1, NULL), DTRAIN_ERR_ABORTED);
    c.next = 0;
    c.fail = 1;
    s.fail_at = 0;
    CHECK_EQ(dtrain_safetensors_write(spool_take, &s, &filled, 1, NULL), DTRAIN_ERR_TIMEOUT);
    c.next = 0;
    CHECK_EQ(dtrain_safetensors_save(NULL, &filled, 1, NULL), DTRAIN_ERR_INVALID); /* an older text is not repeated */
    CHECK_EQ(dtrain_safetensors_save(files_path("never"), &filled, 1, NULL), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(dtrain_last_error(), "fill returned ERR_TIMEOUT at tensor \"x\"");
    CHECK_EQ(files_in(files_directory), 0);
    free(first);
    free(data);
    free(s.data);
}
