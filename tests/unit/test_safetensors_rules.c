/* Every rule of the format by files that keep it and files that break it: verdicts are written by hand, from the rules'
 * text. Where dtrain is stricter than the reference implementation, the case says so. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_files.h"

/* Opens a file in memory of exactly its bytes, so that a sanitizer sees a read beyond; gives the status and closes. */
static dtrain_status verdict(const void *data, size_t bytes)
{
    static dtrain_allocator heap;
    dtrain_safetensors_desc desc = {0, &heap};
    dtrain_safetensors *file = NULL;
    void *copy = malloc(bytes > 0 ? bytes : 1);
    if (copy == NULL)
        abort();
    memcpy(copy, data, bytes);
    dtrain_status status = dtrain_safetensors_open_memory(&file, copy, bytes, &desc);
    CHECK((status == DTRAIN_OK) == (file != NULL));
    dtrain_safetensors_close(file);
    free(copy);
    CHECK_EQ(heap.bytes, 0);
    return status;
}

/* rule 0: the file is good. */
static void check(int line, const void *header, size_t length, size_t data_bytes, int rule)
{
    char expected[32];
    size_t bytes;
    unsigned char *file = files_make(header, length, data_bytes, &bytes);
    dtrain_status status = verdict(file, bytes);
    snprintf(expected, sizeof expected, " breaks R%d at byte ", rule);
    int beyond = SIZE_MAX == UINT32_MAX && status == DTRAIN_ERR_UNSUPPORTED; /* a size that 32 bits do not count */
    if (beyond && strstr(dtrain_last_error(), "and this machine counts to 4294967295") != NULL)
        status = rule == 0 ? DTRAIN_OK : status, snprintf(expected, sizeof expected, "this machine");
    if (rule == 0 && status != DTRAIN_OK)
        TEST_FAIL("case of line %d: refused: %s", line, dtrain_last_error());
    if (rule != 0 && status == DTRAIN_OK)
        TEST_FAIL("case of line %d: accepted, expected R%d", line, rule);
    if (rule != 0 && status != DTRAIN_OK && strstr(dtrain_last_error(), expected) == NULL)
        TEST_FAIL("case of line %d: \"%s\", expected R%d", line, dtrain_last_error(), rule);
    free(file);
}

#define GOOD(header, data_bytes) check(__LINE__, header, sizeof(header) - 1, data_bytes, 0)
#define BAD(header, data_bytes, rule) check(__LINE__, header, sizeof(header) - 1, data_bytes, rule)

#define ONE(fields) "{\"a\":{" fields "}}"
#define U8(shape, offsets) "\"dtype\":\"U8\",\"shape\":" shape ",\"data_offsets\":" offsets

TEST(r1_a_file_has_at_least_eight_bytes)
{
    CHECK_EQ(verdict("\2\0\0\0\0\0\0\0{}", 10), DTRAIN_OK); /* the smallest there is */
    CHECK_EQ(verdict("", 0), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "R1 ");
    CHECK_EQ(verdict("\2\0\0\0\0\0\0", 7), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "R1 ");
}

/* The length alone, in a file of 8 bytes and a few. */
static void check_length(const char *length, int rule)
{
    char file[16] = {0}, expected[32];
    memcpy(file, length, 8);
    memcpy(file + 8, "{}      ", 8);
    snprintf(expected, sizeof expected, "R%d ", rule);
    CHECK_EQ(verdict(file, 16), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), expected);
}

TEST(r2_a_header_has_at_most_a_hundred_million_bytes)
{
    size_t most = 100000000, bytes;
    char *header = (char *)malloc(most);
    if (header == NULL)
        abort();
    memset(header, ' ', most);
    memcpy(header, "{}", 2);
    unsigned char *file = files_make(header, most, 0, &bytes);
    dtrain_safetensors *opened = NULL;
    CHECK_EQ(dtrain_safetensors_open_memory(&opened, file, bytes, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain__safetensors_header_bytes(opened), 100000008);
    dtrain_safetensors_close(opened);
    free(file);
    free(header);
    check_length("\1\341\365\5\0\0\0\0", 2);             /* 100,000,001; before the file's size is asked */
    check_length("\377\377\377\377\377\377\377\377", 2); /* 2^64 - 1 */
}

TEST(r3_a_header_ends_inside_the_file)
{
    CHECK_EQ(verdict("\10\0\0\0\0\0\0\0{}      ", 16), DTRAIN_OK);
    check_length("\11\0\0\0\0\0\0\0", 3);
    check_length("\0\341\365\5\0\0\0\0", 3);             /* 100,000,000 in a file of 16 bytes */
    check_length("\370\377\377\377\377\377\377\377", 2); /* 8 + N wraps to 0 */
    CHECK_EQ(verdict("\2\0\0\0\0\0\0\0{", 9), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "R3 ");
}

TEST(r4_a_header_is_utf8)
{
    GOOD("{\"\303\251\342\202\254\360\237\230\200\":{" U8("[1]", "[0,1]") "}}", 1);
    GOOD("{\"\364\217\277\277\":{" U8("[1]", "[0,1]") "}}", 1);   /* U+10FFFF */
    BAD("{\"\300\257\":{" U8("[1]", "[0,1]") "}}", 1, 4);         /* overlong / */
    BAD("{\"\340\237\277\":{" U8("[1]", "[0,1]") "}}", 1, 4);     /* overlong */
    BAD("{\"\355\240\200\":{" U8("[1]", "[0,1]") "}}", 1, 4);     /* a surrogate */
    BAD("{\"\364\220\200\200\":{" U8("[1]", "[0,1]") "}}", 1, 4); /* U+110000 */
    BAD("{\"\377\":{" U8("[1]", "[0,1]") "}}", 1, 4);
    BAD("{\"\303\":{" U8("[1]", "[0,1]") "}}", 1, 4); /* cut */
    BAD("{\"__metadata__\":{\"a\":\"\200\"}}", 0, 4);
    BAD("{}\240", 0, 5); /* outside of texts nothing but ASCII is JSON */
}

TEST(r5_a_header_is_one_json_value_and_whitespace)
{
    GOOD("{}", 0);
    GOOD("{} \t\n\r  ", 0);
    GOOD("{ \"a\" : { \"dtype\" : \"U8\" ,\n\t\"shape\" : [ 1 ] , \"data_offsets\" : [ 0 , 1 ] } }\r\n", 1);
    BAD("", 0, 5);
    BAD("{}\0\0", 0, 5); /* as some published files are padded */
    BAD("{}{}", 0, 5);
    BAD("{}x", 0, 5);
    BAD("{", 0, 5);
    BAD("\357\273\277{}", 0, 5);
    BAD("{}/**/", 0, 5);
    BAD("{\"a\":{" U8("[1]", "[0,1]") "},}", 1, 5);
    BAD("{\"a\":{" U8("[1,]", "[0,1]") "}}", 1, 5);
    BAD("{\"a\":{" U8("[1]", "[0,1]") ",\"x\":NaN}}", 1, 5);
    BAD("{\"a\":{" U8("[1]", "[0,1]") ",\"x\":Infinity}}", 1, 5);
    BAD("{'a':{" U8("[1]", "[0,1]") "}}", 1, 5);
    BAD("{\"a\" {" U8("[1]", "[0,1]") "}}", 1, 5);
    BAD("{}\v", 0, 5);
    BAD("{}\302\240", 0, 5); /* no-break space */
}

TEST(r6_strings_hold_no_control_characters_and_only_json_escapes)
{
    GOOD("{\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\u00E9\\uD83D\\uDE00\":{" U8("[1]", "[0,1]") "}}", 1);
    GOOD("{\"\177\342\200\250\357\277\277\\u0000\":{" U8("[1]", "[0,1]") "}}", 1); /* DEL, U+2028, U+FFFF, U+0000 */
    BAD("{\"a\nb\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"a\\x41\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"a\\u12g4\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"\\ud800\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"\\udc00\\ud800\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"\\ud800\\u0041\":{" U8("[1]", "[0,1]") "}}", 1, 6);
    BAD("{\"__metadata__\":{\"a\":\"\t\"}}", 0, 6);
    BAD(ONE(U8("[1]", "[0,1]") ",\"note\":[\"\\q\"]"), 1, 6);
}

TEST(r7_sizes_and_offsets_are_plain_whole_numbers)
{
    GOOD(ONE(U8("[4]", "[0,4]")), 4);
    GOOD(ONE(U8("[0,18446744073709551615]", "[0,0]")), 0);
    BAD(ONE(U8("[-1]", "[0,4]")), 4, 7);
    BAD(ONE(U8("[-0]", "[0,0]")), 0, 7);
    BAD(ONE(U8("[4.0]", "[0,4]")), 4, 7);
    BAD(ONE(U8("[4e0]", "[0,4]")), 4, 7);
    BAD(ONE(U8("[04]", "[0,4]")), 4, 5);
    BAD(ONE(U8("[+4]", "[0,4]")), 4, 5);
    BAD(ONE(U8("[\"4\"]", "[0,4]")), 4, 14);
    BAD(ONE(U8("[true]", "[0,1]")), 1, 14);
    BAD(ONE(U8("[0,18446744073709551616]", "[0,0]")), 0, 7);
    BAD(ONE(U8("[4]", "[0,4.0]")), 4, 7);
    BAD(ONE(U8("[4]", "[-0,4]")), 4, 7);
    BAD(ONE(U8("[4]", "[0,18446744073709551620]")), 4, 7); /* 2^64 + 4 */
    BAD(ONE(U8("[4]", "[0,\"4\"]")), 4, 15);
}

TEST(r8_nesting_is_bounded)
{
    char header[2048] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":";
    size_t at = strlen(header);
    memset(header + at, '[', 20);
    memset(header + at + 20, ']', 20);
    memcpy(header + at + 40, "}}", 3);
    check(__LINE__, header, at + 42, 1, 0);
    memset(header + at, '[', 200); /* the reference stops at 127 in all, dtrain at 32 */
    memset(header + at + 200, ']', 200);
    memcpy(header + at + 400, "}}", 3);
    check(__LINE__, header, at + 402, 1, 8);
}

TEST(r9_the_top_is_an_object)
{
    GOOD(" \n{}", 0); /* read as the reference reads, not as the README writes */
    BAD("[]", 0, 9);
    BAD("null", 0, 9);
    BAD("\"{}\"", 0, 9);
    BAD("1", 0, 9);
}

TEST(r10_metadata_maps_strings_to_strings)
{
    GOOD("{\"__metadata__\":{\"format\":\"pt\"}}", 0);
    GOOD("{\"__metadata__\":{}}", 0);
    GOOD("{\"a\":{" U8("[1]", "[0,1]") "},\"__metadata__\":{\"k\":\"v\"}}", 1);
    GOOD("{\"__metadata__\":null}", 0);
    BAD("{\"__metadata__\":{\"k\":1}}", 0, 10);
    BAD("{\"__metadata__\":{\"k\":null}}", 0, 10);
    BAD("{\"__metadata__\":{\"k\":{}}}", 0, 10);
    BAD("{\"__metadata__\":[]}", 0, 10);
    BAD("{\"__metadata__\":\"x\"}", 0, 10);
    BAD("{\"__metadata__\":{" U8("[1]", "[0,1]") "}}", 1, 10); /* a tensor's entry */
    BAD("{\"__metadata\\u005f_\":{\"k\":1}}", 0, 10);          /* names are compared after unescaping */
}

TEST(r11_entries_have_three_fields_of_any_order)
{
    GOOD(ONE("\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"U8\""), 1);
    GOOD(ONE(U8("[0]", "[0,0]")), 0);
    GOOD(ONE(U8("[1]", "[0,1]") ",\"note\":{\"x\":[1,{\"y\":null}]}"), 1); /* fields that nobody knows */
    GOOD(ONE("\"dt\\u0079pe\":\"U\\u0038\",\"shape\":[1],\"data_offsets\":[0,1]"), 1);
    BAD(ONE("\"shape\":[1],\"data_offsets\":[0,1]"), 1, 11);
    BAD(ONE("\"dtype\":\"U8\",\"data_offsets\":[0,1]"), 1, 11);
    BAD(ONE("\"dtype\":\"U8\",\"shape\":[0]"), 0, 11);
    BAD(ONE("\"Dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]"), 1, 11);
    BAD(ONE("\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]"), 1, 11);
    BAD("{\"a\":null}", 0, 11);
    BAD("{\"a\":{}}", 0, 11);
    BAD("{\"a\":[\"U8\",[4],[0,4]]}", 4, 11); /* the reference takes it; dtrain is stricter */
    BAD(ONE(U8("[1]", "[0,1]") ",\"note\":tru"), 1, 5);
}

TEST(r12_nothing_comes_twice)
{
    GOOD("{\"a\":{" U8("[1]", "[0,1]") "},\"A\":{" U8("[1]", "[1,2]") "}}", 2);
    GOOD(ONE(U8("[1]", "[0,1]") ",\"x\":{\"k\":1},\"y\":{\"k\":1}"), 1);
    BAD(ONE(U8("[1]", "[0,1]") ",\"dtype\":\"U8\""), 1, 12);
    BAD(ONE(U8("[1]", "[0,1]") ",\"shape\":[1]"), 1, 12);
    BAD("{\"__metadata__\":{},\"__metadata__\":{}}", 0, 12);
    BAD("{\"__metadata__\":null,\"__metadata__\":{}}", 0, 12);
    /* from here on dtrain is stricter than the reference, where the last one wins */
    BAD("{\"a\":{" U8("[1]", "[0,1]") "},\"a\":{" U8("[1]", "[1,2]") "}}", 2, 12);
    BAD("{\"a\":{" U8("[1]", "[0,1]") "},\"\\u0061\":{" U8("[1]", "[1,2]") "}}", 2, 12);
    BAD("{\"a\":{" U8("[9]", "[7,1]") "},\"a\":{" U8("[1]", "[0,1]") "}}", 1, 12);
    BAD("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, 12);
    BAD("{\"__metadata__\":{\"k\":\"1\",\"\\u006b\":\"1\"}}", 0, 12);
    BAD(ONE(U8("[1]", "[0,1]") ",\"x\":1,\"x\":1"), 1, 12);
    BAD(ONE(U8("[1]", "[0,1]") ",\"x\":[{\"k\":1,\"l\":{},\"k\":1}]"), 1, 12);
    BAD(ONE(U8("[1]",
               "[0,1]") ",\"x\":{\"a\":0,\"b\":0,\"c\":0,\"d\":0,\"e\":0,\"f\":0,\"g\":0,\"h\":0,\"i\":0,\"c\":0}"),
        1, 12);
    BAD("{\"a\\u0000b\":{" U8("[1]", "[0,1]") "},\"a\\u0000b\":{" U8("[1]", "[1,2]") "}}", 2, 12);
}

TEST(r13_dtypes_are_the_twenty_two)
{
    static const char *const names[22] = {"BOOL",    "F4",      "F6_E2M3", "F6_E3M2",     "U8",          "I8",
                                          "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",
                                          "U16",     "F16",     "BF16",    "I32",         "U32",         "F32",
                                          "C64",     "F64",     "I64",     "U64"};
    static const int bits[22] = {8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64};
    static const char *const unknown[] = {"u8",          "F",       "F128",      "U8 ", "",
                                          "BF16\\u0000", "float32", "F8_E4M3FN", "I4",  "C128"};
    char header[256];
    for (int i = 0; i < 22; i++) {
        int n = snprintf(header, sizeof header, "{\"a\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,%d]}}",
                         names[i], bits[i]);
        check(__LINE__, header, (size_t)n, (size_t)bits[i], 0);
    }
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        int n = snprintf(header, sizeof header, "{\"a\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,8]}}",
                         unknown[i]);
        check(__LINE__, header, (size_t)n, 8, 13);
    }
    BAD(ONE("\"dtype\":{\"U8\":null},\"shape\":[1],\"data_offsets\":[0,1]"), 1, 11); /* the reference takes it */
}

TEST(r14_shapes_are_lists_of_sizes)
{
    char header[4096] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1";
    GOOD(ONE(U8("[]", "[0,1]")), 1); /* a scalar */
    GOOD(ONE(U8("[0]", "[0,0]")), 0);
    GOOD(ONE(U8("[3,0,5]", "[0,0]")), 0);
    for (int i = 0; i < 1000; i++)
        strcat(header, ",1");
    strcat(header, "],\"data_offsets\":[0,1]}}");
    check(__LINE__, header, strlen(header), 1, 0); /* as many sizes as one likes */
    BAD(ONE(U8("4", "[0,4]")), 4, 14);
    BAD(ONE(U8("{}", "[0,1]")), 1, 14);
    BAD(ONE(U8("null", "[0,1]")), 1, 14);
    BAD(ONE(U8("[[1]]", "[0,1]")), 1, 14);
    BAD(ONE(U8("[null]", "[0,1]")), 1, 14);
}

TEST(r15_offsets_are_two)
{
    GOOD(ONE(U8("[2]", "[0,2]")), 2);
    BAD(ONE(U8("[2]", "[0]")), 2, 15);
    BAD(ONE(U8("[2]", "[]")), 2, 15);
    BAD(ONE(U8("[2]", "[0,2,2]")), 2, 15);
    BAD(ONE(U8("[2]", "2")), 2, 15);
    BAD(ONE(U8("[2]", "{\"0\":2}")), 2, 15);
    BAD(ONE(U8("[2]", "[0,[2]]")), 2, 15);
}

#define TWO(first, second) "{\"a\":{" first "},\"b\":{" second "}}"

TEST(r16_data_follow_each_other_without_holes_or_overlap)
{
    GOOD(TWO(U8("[2]", "[0,2]"), U8("[3]", "[2,5]")), 5);
    GOOD(TWO(U8("[3]", "[2,5]"), U8("[2]", "[0,2]")), 5); /* in any order of the header */
    GOOD(TWO(U8("[0]", "[2,2]"), U8("[2]", "[0,2]")), 2);
    GOOD(TWO(U8("[0]", "[0,0]"), U8("[2]", "[0,2]")), 2);
    BAD(ONE(U8("[2]", "[1,3]")), 3, 16);
    BAD(TWO(U8("[2]", "[0,2]"), U8("[2]", "[3,5]")), 5, 16); /* a hole */
    BAD(TWO(U8("[2]", "[0,2]"), U8("[2]", "[8,10]")), 10, 16);
    BAD(TWO(U8("[2]", "[0,2]"), U8("[2]", "[1,3]")), 3, 16); /* overlap */
    BAD(TWO(U8("[2]", "[0,2]"), U8("[2]", "[0,2]")), 2, 16); /* one place for two */
    BAD(ONE(U8("[2]", "[2,0]")), 2, 16);
    BAD(TWO(U8("[2]", "[0,2]"), U8("[0]", "[2,1]")), 2, 16);
    BAD(TWO(U8("[4]", "[0,4]"), U8("[0]", "[2,2]")), 4, 16); /* an empty one inside another */
    BAD(TWO(U8("[2]", "[0,2]"), U8("[0]", "[9,9]")), 2, 16);
}

TEST(r17_sizes_multiply_without_overflow)
{
    GOOD(ONE(U8("[0,4294967296,4294967296]", "[0,0]")), 0); /* from left to right: 0 stays 0 */
    BAD(ONE(U8("[4294967296,4294967296,0]", "[0,0]")), 0, 17);
    BAD(ONE(U8("[4294967296,4294967296]", "[0,0]")), 0, 17); /* 2^64 is 0 where nobody looks */
    BAD(ONE(U8("[9223372036854775807,2]", "[0,0]")), 0, 17);
    BAD(ONE(U8("[2305843009213693952]", "[0,0]")), 0, 17); /* 2^61 bytes are 2^64 bits */
    BAD(ONE("\"dtype\":\"F64\",\"shape\":[2305843009213693953],\"data_offsets\":[0,8]"), 8, 17);
}

TEST(r18_tensors_fill_whole_bytes)
{
    GOOD(ONE("\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[0,3]"), 3);
    GOOD(ONE("\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]"), 3);
    BAD(ONE("\"dtype\":\"F4\",\"shape\":[5],\"data_offsets\":[0,3]"), 3, 18);
    BAD(ONE("\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[0,1]"), 1, 18);
    BAD(ONE("\"dtype\":\"F6_E3M2\",\"shape\":[2],\"data_offsets\":[0,2]"), 2, 18);
}

TEST(r19_offsets_hold_what_the_shape_takes)
{
    GOOD(ONE("\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]"), 24);
    BAD(ONE("\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,20]"), 20, 19);
    BAD(ONE("\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,28]"), 28, 19);
    BAD(ONE(U8("[]", "[0,0]")), 0, 19);
    BAD(ONE(U8("[0]", "[0,1]")), 1, 19);
    BAD(ONE(U8("[1]", "[0,18446744073709551615]")), 1, 19);
}

TEST(r20_the_data_end_where_the_file_does)
{
    GOOD("{}  ", 0);
    GOOD(ONE(U8("[4]", "[0,4]")), 4);
    BAD(ONE(U8("[4]", "[0,4]")), 3, 20); /* cut */
    BAD(ONE(U8("[4]", "[0,4]")), 5, 20); /* something else at the end */
    BAD("{}", 1, 20);
    BAD(ONE("\"dtype\":\"U8\",\"shape\":[2305843009213693951],\"data_offsets\":[0,2305843009213693951]"), 4, 20);
}

TEST(r21_data_may_begin_anywhere)
{
    for (size_t pad = 0; pad < 8; pad++) {
        char header[128] = "{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                           "\"d\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[1,17]}}";
        size_t length = strlen(header), bytes;
        unsigned char out[16], *data;
        dtrain_safetensors *file = NULL;
        memset(header + length, ' ', pad);
        data = files_make(header, length + pad, 17, &bytes);
        CHECK_EQ(dtrain_safetensors_open_memory(&file, data, bytes, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_load(file, "d", out, 2, DTRAIN_F64), DTRAIN_OK);
        little_endian(out, 2, 8);
        for (int i = 0; i < 16; i++)
            CHECK_EQ(out[i], 1 + i);
        dtrain_safetensors_close(file);
        free(data);
    }
}

TEST(r22_values_are_not_looked_at)
{
    unsigned char file[128] = {0}, out[8];
    static const char header[] = "{\"b\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[0,2]},"
                                 "\"f\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[2,8]}}";
    dtrain_safetensors *opened = NULL;
    size_t length = sizeof header - 1;
    file[0] = (unsigned char)length;
    memcpy(file + 8, header, length);
    memcpy(file + 8 + length, "\2\377\0\174\1\176\0\374", 8); /* 2 and 255; infinity, NaN, -infinity */
    CHECK_EQ(dtrain_safetensors_open_memory(&opened, file, 16 + length, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_load(opened, "b", out, 2, DTRAIN_BOOL), DTRAIN_OK);
    CHECK(out[0] == 2 && out[1] == 255);
    CHECK_EQ(dtrain_safetensors_load(opened, "f", out, 3, DTRAIN_F16), DTRAIN_OK);
    little_endian(out, 3, 2);
    CHECK(memcmp(out, "\0\174\1\176\0\374", 6) == 0);
    dtrain_safetensors_close(opened);
}

TEST(r23_names_are_any_text)
{
    static const char header[] = "{\"\":{" U8("[1]", "[0,1]") "},\"a\\u0000b\":{" U8("[1]", "[1,2]") "},\"a\":{" U8(
        "[1]",
        "[2,3]") "},\"../a b/\\n\":{" U8("[1]",
                                         "[3,4]") "},\"\303\251\":{" U8("[1]",
                                                                        "[4,5]") "},\"e\314\201\":{" U8("[1]",
                                                                                                        "[5,6]") "}}";
    static const struct {
        const char *name;
        size_t length;
        int at;
    } names[] = {{"", 0, 0}, {"a\0b", 3, 1}, {"a", 1, 2}, {"../a b/\n", 8, 3}, {"\303\251", 2, 4}, {"e\314\201", 3, 5}};
    size_t bytes;
    unsigned char *data = files_make(header, sizeof header - 1, 6, &bytes), out;
    dtrain_safetensors *file = NULL;
    CHECK_EQ(dtrain_safetensors_open_memory(&file, data, bytes, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_count(file), 6);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(file, names[i].name, names[i].length);
        CHECK(tensor != NULL);
        if (tensor == NULL)
            continue;
        CHECK_EQ(tensor->name_length, names[i].length);
        CHECK(memcmp(tensor->name, names[i].name, names[i].length + 1) == 0); /* a zero byte follows */
        CHECK_EQ(dtrain_safetensors_read(file, tensor, 0, tensor->count, &out, DTRAIN_U8), DTRAIN_OK);
        CHECK_EQ(out, names[i].at); /* they lie in this order: no two are one */
    }
    CHECK(dtrain_safetensors_find(file, "a\0c", 3) == NULL);
    CHECK(dtrain_safetensors_find(file, "E\314\201", 3) == NULL);
    dtrain_safetensors_close(file);
    free(data);
    BAD("{1:{" U8("[1]", "[0,1]") "}}", 1, 5); /* but a text it must be */
}

/* Faults that were found in other readers. Each is a file that some reader has taken, or died of. */
TEST(faults_in_the_wild_are_refused)
{
    BAD(ONE(U8("[4]", "[0,4]")), 4096, 20);                                        /* TOB-SFTN-1: a polyglot's tail */
    BAD(ONE(U8("[4611686018427387905,4]", "[0,4]")), 4, 17);                       /* TOB-SFTN-2: 2^64 + 4 */
    GOOD(ONE(U8("[0,7]", "[0,0]")), 0);                                            /* TOB-SFTN-3: empty is legal */
    BAD("{\"a\":{" U8("[1]", "[0,1]") "},\"a\":{" U8("[2]", "[0,2]") "}}", 2, 12); /* TOB-SFTN-7: parsers differ */
    BAD(ONE("\"dtype\":\"F32\",\"shape\":[65536,65536,65536,65536],\"data_offsets\":[0,4294967296]"), 4,
        17); /* product 0 */
    BAD(ONE("\"dtype\":\"F32\",\"shape\":[65536,65536,65536,65536],\"data_offsets\":[0,0]"), 0, 17);
    BAD(ONE(U8("[1000000]", "[0,1000000]")), 16, 20); /* no look at the file's size */
    BAD(ONE(U8("[100]", "[0,4]")), 4, 19);            /* shape and offsets that differ */
    BAD(ONE(U8("[4]", "[-4,0]")), 4, 7);              /* negative offsets */
    BAD(ONE("\"dtype\":\"X9\",\"shape\":[9223372036854775807],\"data_offsets\":[0,9223372036854775807]"), 4, 13);
    GOOD("{\"__metadata__\":{},\"a\":{" U8("[1]", "[0,1]") "}}", 1); /* an empty map of metadata */
    GOOD(ONE(U8("[1,1,1,1,1,1,1,1]", "[0,1]")), 1);                  /* eight sizes, which one reader makes 0 of */
    check_length("\377\377\377\377\377\377\377\177", 2);             /* memory by the header's word */
    BAD("{},\"__metadata__\":{}}", 0, 5);                            /* what the reference writes of nothing */
}

TEST(an_error_names_rule_tensor_and_byte)
{
    static const char header[] = TWO(U8("[2]", "[0,2]"), U8("[2]", "[3,5]"));
    size_t bytes;
    unsigned char *data = files_make(header, sizeof header - 1, 5, &bytes);
    dtrain_safetensors *file = NULL;
    CHECK_EQ(dtrain_safetensors_open_memory(&file, data, bytes, NULL), DTRAIN_ERR_CORRUPT);
    /* b's entry begins 53 bytes into the header, which begins at byte 8 */
    CHECK_CONTAINS(dtrain_last_error(), "memory breaks R16 at byte 61: tensor \"b\": its data begin at 3, and the data "
                                        "before them end at 2");
    free(data);
    data = files_make("{\"x\ty\":0}", 9, 0, &bytes);
    CHECK_EQ(dtrain_safetensors_open_memory(&file, data, bytes, NULL), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "memory breaks R6 at byte 11: a control character");
    free(data);
}
