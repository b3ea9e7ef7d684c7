/* JSON: what is read and what is refused, byte by byte; what is written. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "locales.h"
#include <math.h>

/* Reads all of a text; returns the letters of its tokens, or E and the error's offset. The text lies at the end of
 * its own block, so that a sanitizer sees a read beyond it. */
static const char *read_json(const char *text, size_t length)
{
    static const char letters[] = "E.nftNSKO}A]";
    static char out[256];
    size_t count = 0;
    char *copy = (char *)malloc(length + (length == 0));
    dtrain__json_reader reader;
    dtrain__json_token token;
    memcpy(copy, text, length);
    dtrain__json_open(&reader, copy, length);
    while (count < 200) {
        dtrain__json_kind kind = dtrain__json_next(&reader, &token);
        if (kind == DTRAIN__JSON_END)
            break;
        out[count++] = letters[kind];
        if (kind == DTRAIN__JSON_ERROR)
            break;
    }
    out[count] = '\0';
    if (reader.error != NULL)
        snprintf(out, sizeof out, "E%zu", reader.offset);
    CHECK(reader.offset <= length);
    free(copy);
    return out;
}

typedef struct json_case {
    const char *text;
    const char *expected;
} json_case;

static void check_json(const json_case *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *got = read_json(cases[i].text, strlen(cases[i].text));
        if (strcmp(got, cases[i].expected) != 0)
            TEST_FAIL("%s reads as %s, expected %s", cases[i].text, got, cases[i].expected);
    }
}

TEST(json_reads_what_rfc_8259_allows)
{
    static const json_case cases[] = {{"{}", "O}"},
                                      {"[]", "A]"},
                                      {" \t\r\n{ } \n", "O}"},
                                      {"null", "n"},
                                      {"true", "t"},
                                      {"false", "f"},
                                      {"0", "N"},
                                      {"-0", "N"},
                                      {"-12.50e+03", "N"},
                                      {"1E5", "N"},
                                      {"1e-5", "N"},
                                      {"\"\"", "S"},
                                      {"{\"a\":1}", "OKN}"},
                                      {"{\"a\" : [1 , 2] , \"b\":{}}", "OKANN]KO}}"},
                                      {"[[],[[]],{}]", "AA]AA]]O}]"},
                                      {"[1,0,30,2.5,-3,4e1,5 ]", "ANNNNNNN]"},
                                      {"[[1,2],3,{\"a\":4}]", "AANN]NOKN}]"},
                                      {"[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83D\\ude00\"]", "AS]"},
                                      {"\"\\u0000\"", "S"},
                                      {"\"\x7f\xe2\x80\xa8\xef\xbf\xbf\"", "S"},
                                      {"\"\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\"", "S"},
                                      {"{\"\":\"\",\"\":null}", "OKSKn}"}};
    check_json(cases, sizeof cases / sizeof cases[0]);
}

TEST(json_refuses_the_rest_and_says_where)
{
    static const json_case cases[] = {{"", "E0"},
                                      {"  ", "E2"},
                                      {"{", "E1"},
                                      {"[", "E1"},
                                      {"]", "E0"},
                                      {"}", "E0"},
                                      {"{]", "E1"},
                                      {"[}", "E1"},
                                      {"[1", "E2"},
                                      {"[1,", "E3"},
                                      {"[1,]", "E3"},
                                      {"[,1]", "E1"},
                                      {"[1 2]", "E3"},
                                      {"[1}", "E2"},
                                      {"[1,2", "E4"},
                                      {"[1,2}", "E4"},
                                      {"[1,2,]", "E5"},
                                      {"[1,02]", "E3"},
                                      {"[1,2x]", "E4"},
                                      {"1,2", "E1"},
                                      {"{\"a\":1,2,3}", "E7"},
                                      {"{\"a\"}", "E4"},
                                      {"{\"a\":}", "E5"},
                                      {"{\"a\":1,}", "E7"},
                                      {"{\"a\":1", "E6"},
                                      {"{\"a\":1]", "E6"},
                                      {"{a:1}", "E1"},
                                      {"{1:1}", "E1"},
                                      {"{\"a\" 1}", "E5"},
                                      {"{,}", "E1"},
                                      {"{} {}", "E3"},
                                      {"{}x", "E2"},
                                      {"{},", "E2"},
                                      {"nul", "E0"},
                                      {"nullx", "E4"},
                                      {"True", "E0"},
                                      {"NaN", "E0"},
                                      {"Infinity", "E0"},
                                      {"-Infinity", "E1"},
                                      {"01", "E0"},
                                      {"-01", "E1"},
                                      {"+4", "E0"},
                                      {"-", "E1"},
                                      {".5", "E0"},
                                      {"5.", "E2"},
                                      {"5.e1", "E2"},
                                      {"1e", "E2"},
                                      {"1e+", "E3"},
                                      {"0x10", "E1"},
                                      {"'a'", "E0"},
                                      {"/* */1", "E0"},
                                      {"\xef\xbb\xbf{}", "E0"},
                                      {"\"a", "E2"},
                                      {"\"\n\"", "E1"},
                                      {"\"\x1f\"", "E1"},
                                      {"\"\\x\"", "E1"},
                                      {"\"\\u12\"", "E1"},
                                      {"\"\\u12g4\"", "E1"},
                                      {"\"\\", "E1"},
                                      {"\"\\u", "E1"},
                                      {"\"\\ud83d\"", "E1"},
                                      {"\"\\ude00\"", "E1"},
                                      {"\"\\ud83d\\n\"", "E1"},
                                      {"\"\\ud83d\\ud83d\"", "E1"},
                                      {"\"\\ud83dxude00\"", "E1"},
                                      {"\"\x80\"", "E1"},
                                      {"\"\xc0\xaf\"", "E1"},
                                      {"\"\xc1\xbf\"", "E1"},
                                      {"\"\xe0\x9f\xbf\"", "E1"},
                                      {"\"\xed\xa0\x80\"", "E1"},
                                      {"\"\xf0\x8f\xbf\xbf\"", "E1"},
                                      {"\"\xf4\x90\x80\x80\"", "E1"},
                                      {"\"\xf5\x80\x80\x80\"", "E1"},
                                      {"\"\xc3\"", "E1"},
                                      {"\"\xe2\x82\"", "E1"},
                                      {"\"\xe2\x82", "E1"},
                                      {"\"\xff\"", "E1"},
                                      {"[1]\x0b", "E3"},
                                      {"{\"a\xff\":1}", "E3"},
                                      {"\xc2\xa0{}", "E0"}};
    check_json(cases, sizeof cases / sizeof cases[0]);
    CHECK(strcmp(read_json("{}\0", 3), "E2") == 0);
    CHECK(strcmp(read_json("\"\\\0\"", 4), "E1") == 0);
    CHECK(strcmp(read_json("\"\0\"", 3), "E1") == 0);
}

TEST(json_nests_32_levels_and_no_deeper)
{
    char text[100001];
    memset(text, '[', 33);
    memset(text + 32, ']', 32);
    CHECK_EQ(strlen(read_json(text, 64)), 64);
    memset(text, '[', sizeof text);
    CHECK(strcmp(read_json(text, sizeof text), "E32") == 0);
}

TEST(json_survives_every_cut_and_every_changed_byte)
{
    static const char text[] = "{\"a\\u00e9\":[1,-2.5e3,\"\\ud83d\\ude00\xc3\xa9\"],\"b\":{\"c\":null,\"d\":true}}";
    size_t length = sizeof text - 1;
    char copy[sizeof text];
    CHECK(strcmp(read_json(text, length), "OKANNS]KOKnKt}}") == 0);
    for (size_t cut = 0; cut < length; cut++)
        CHECK(read_json(text, cut)[0] == 'E');
    for (size_t at = 0; at < length; at++)
        for (int byte = 0; byte < 256; byte++) {
            memcpy(copy, text, sizeof text);
            copy[at] = (char)byte;
            read_json(copy, length);
        }
}

TEST(json_finds_what_is_not_plain_at_every_place_of_a_string)
{
    for (size_t at = 0; at < 23; at++)
        for (int byte = 0; byte < 256; byte++) {
            char text[32], expected[16];
            memset(text, 'a', 26);
            text[0] = text[25] = '"';
            text[at + 1] = (char)byte;
            snprintf(expected, sizeof expected, "E%zu", byte == '"' ? at + 2 : at + 1);
            if (byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\')
                snprintf(expected, sizeof expected, "S");
            const char *got = read_json(text, 26);
            if (strcmp(got, expected) != 0)
                TEST_FAIL("byte %d at %zu reads as %s, expected %s", byte, at, got, expected);
            for (size_t cut = at + 2; cut < 26 && expected[0] == 'S'; cut++) {
                snprintf(text + 26, 6, "E%zu", cut);
                CHECK(strcmp(read_json(text, cut), text + 26) == 0);
            }
        }
}

static dtrain__json_token first_token(dtrain__json_reader *reader, const char *text)
{
    dtrain__json_token token;
    dtrain__json_open(reader, text, strlen(text));
    dtrain__json_next(reader, &token);
    return token;
}

TEST(json_unescapes_into_a_bounded_buffer)
{
    static const char expected[] = "a\"\n\0\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
    dtrain__json_reader reader;
    dtrain__json_token token = first_token(&reader, "\"a\\\"\\n\\u0000\\u00e9\\u20AC\\ud83d\\ude00\"");
    char out[32];
    memset(out, '#', sizeof out);
    CHECK_EQ(dtrain__json_string(&reader, &token, NULL, 0), 13);
    CHECK_EQ(dtrain__json_string(&reader, &token, out, 3), 13);
    CHECK(memcmp(out, "a\"\n#", 4) == 0);
    CHECK_EQ(dtrain__json_string(&reader, &token, out, 13), 13);
    CHECK(memcmp(out, expected, 13) == 0);
    CHECK_EQ(out[13], '#');
    token = first_token(&reader, "\"dt\\u0079pe\"");
    CHECK(dtrain__json_is(&reader, &token, "dtype"));
    CHECK(!dtrain__json_is(&reader, &token, "dtyp") && !dtrain__json_is(&reader, &token, "dtypes"));
    token = first_token(&reader, "\"a\\u0000b\"");
    CHECK(!dtrain__json_is(&reader, &token, "a"));
}

TEST(json_u64_is_exact_or_refused)
{
    static const char *const bad[] = {"-1",
                                      "-0",
                                      "4.0",
                                      "4e0",
                                      "\"4\"",
                                      "true",
                                      "18446744073709551616",
                                      "99999999999999999999",
                                      "184467440737095516150",
                                      "[4]"};
    dtrain__json_reader reader;
    uint64_t value = 1;
    dtrain__json_token token = first_token(&reader, "0");
    CHECK(dtrain__json_u64(&reader, &token, &value) && value == 0);
    token = first_token(&reader, "18446744073709551615");
    CHECK(dtrain__json_u64(&reader, &token, &value) && value == UINT64_MAX);
    token = first_token(&reader, "9007199254740993");
    CHECK(dtrain__json_u64(&reader, &token, &value) && value == 9007199254740993u);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        token = first_token(&reader, bad[i]);
        CHECK(token.kind != DTRAIN__JSON_ERROR && !dtrain__json_u64(&reader, &token, &value));
    }
}

TEST(json_skips_a_whole_value)
{
    static const char text[] = "[{\"a\":[[1],{\"b\":2}]},3,[";
    dtrain__json_reader reader;
    dtrain__json_token token = first_token(&reader, text);
    CHECK_EQ(dtrain__json_next(&reader, &token), DTRAIN__JSON_OBJECT);
    CHECK(dtrain__json_skip(&reader, &token));
    CHECK_EQ(dtrain__json_next(&reader, &token), DTRAIN__JSON_NUMBER);
    CHECK(dtrain__json_skip(&reader, &token));
    CHECK_EQ(text[token.begin], '3');
    CHECK_EQ(dtrain__json_next(&reader, &token), DTRAIN__JSON_ARRAY);
    CHECK(!dtrain__json_skip(&reader, &token));
    CHECK_EQ(reader.offset, sizeof text - 1);
    CHECK_EQ(dtrain__json_next(&reader, &token), DTRAIN__JSON_ERROR);
}

static void write_sample(dtrain__json_writer *writer, char *out, size_t capacity)
{
    dtrain__json_write_start(writer, out, capacity);
    dtrain__json_begin(writer, 1);
    dtrain__json_write_key(writer, "k\"/\x7f", 4);
    dtrain__json_begin(writer, 0);
    dtrain__json_write_u64(writer, UINT64_MAX);
    dtrain__json_write_double(writer, 0.1);
    dtrain__json_write_word(writer, "true");
    dtrain__json_write_word(writer, "null");
    dtrain__json_end(writer);
    dtrain__json_write_key(writer, "", 0);
    dtrain__json_write_string(writer, "\b\t\n\v\f\r\x1f\\\0\xc3\xa9", 11);
    dtrain__json_write_key(writer, "e", 1);
    dtrain__json_begin(writer, 1);
    dtrain__json_end(writer);
    dtrain__json_end(writer);
}

TEST(json_writes_compactly_and_counts_what_it_would_need)
{
    static const char expected[] = "{\"k\\\"/\x7f\":[18446744073709551615,0.1,true,null],"
                                   "\"\":\"\\b\\t\\n\\u000b\\f\\r\\u001f\\\\\\u0000\xc3\xa9\",\"e\":{}}";
    size_t length = sizeof expected - 1;
    char out[256];
    dtrain__json_writer writer;
    for (size_t capacity = 0; capacity <= length + 1; capacity++) {
        memset(out, '#', sizeof out);
        write_sample(&writer, capacity > 0 ? out : NULL, capacity);
        CHECK_EQ(writer.bytes, length);
        CHECK_EQ(dtrain__json_write_finish(&writer), capacity >= length);
        CHECK(memcmp(out, expected, capacity < length ? capacity : length) == 0);
        CHECK_EQ(out[capacity < length ? capacity : length], '#');
    }
    CHECK(strcmp(read_json(out, length), "OKANNtn]KSKO}}") == 0);
}

static int write_out_of_place(int which)
{
    char out[64];
    dtrain__json_writer w;
    dtrain__json_write_start(&w, out, sizeof out);
    if (which > 2)
        dtrain__json_begin(&w, which < 7);
    switch (which) {
    case 0: break;
    case 1: dtrain__json_write_word(&w, "null"), dtrain__json_write_word(&w, "null"); break;
    case 2: dtrain__json_write_key(&w, "a", 1); break;
    case 3: dtrain__json_write_word(&w, "null"), dtrain__json_end(&w); break;
    case 4: dtrain__json_write_key(&w, "a", 1), dtrain__json_end(&w); break;
    case 5: dtrain__json_write_key(&w, "a", 1), dtrain__json_write_key(&w, "b", 1); break;
    case 6: break;
    case 7: dtrain__json_write_key(&w, "a", 1), dtrain__json_end(&w); break;
    case 8: dtrain__json_write_string(&w, "\xed\xa0\x80", 3), dtrain__json_end(&w); break;
    case 9: dtrain__json_write_double(&w, (double)INFINITY), dtrain__json_end(&w); break;
    case 10: dtrain__json_write_double(&w, (double)NAN), dtrain__json_end(&w); break;
    case 11: dtrain__json_end(&w), dtrain__json_end(&w); break;
    default: dtrain__json_end(&w); break;
    }
    return dtrain__json_write_finish(&w);
}

TEST(json_that_would_not_be_json_is_not_finished)
{
    dtrain__json_writer writer;
    char out[128];
    for (int which = 0; which < 12; which++)
        CHECK_EQ(write_out_of_place(which), 0);
    CHECK_EQ(write_out_of_place(12), 1);
    for (int levels = 32; levels <= 33; levels++) {
        dtrain__json_write_start(&writer, out, sizeof out);
        for (int i = 0; i < levels; i++)
            dtrain__json_begin(&writer, 0);
        for (int i = 0; i < levels; i++)
            dtrain__json_end(&writer);
        CHECK_EQ(dtrain__json_write_finish(&writer), levels == 32);
    }
}

static void check_double(double value, const char *expected)
{
    char out[64];
    dtrain__json_writer writer;
    dtrain__json_write_start(&writer, out, sizeof out - 1);
    dtrain__json_write_double(&writer, value);
    CHECK(dtrain__json_write_finish(&writer));
    out[writer.bytes] = '\0';
    CHECK(strcmp(read_json(out, writer.bytes), "N") == 0);
    if (expected != NULL && strcmp(out, expected) != 0)
        TEST_FAIL("%s, expected %s", out, expected);
    double again = strtod(out, NULL);
    CHECK(expected != NULL || memcmp(&again, &value, sizeof value) == 0);
}

TEST(json_doubles_read_back_as_the_same_bits)
{
    check_double(0.0, "0");
    check_double(-0.0, "-0");
    check_double(3e-4, "0.0003");
    check_double(1.0 / 3, "0.3333333333333333");
    check_double(5e-324, "5e-324");
    check_double(1.7976931348623157e308, "1.7976931348623157e+308");
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t bits = dtrain_random_u64(3, i);
        double value;
        memcpy(&value, &bits, sizeof value);
        if ((bits >> 52 & 0x7ff) != 0x7ff)
            check_double(value, NULL);
    }
    if (locale_of_two_bytes())
        check_double(-0.5, "-0.5");
    setlocale(LC_ALL, "C");
}
