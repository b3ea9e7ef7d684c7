/* Models of one file and of several: what is written, what is read, and that an index and its files agree. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_files.h"

#include <errno.h>

static char logged[1024];

static void keep(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    snprintf(logged, sizeof logged, "%s", text);
}

/* Writes a text, or a file of U8 tensors of one byte each, named by single letters. */
static void put_text(const char *path, const char *text)
{
    files_write(path, text, strlen(text));
}

static void put_letters(const char *path, const char *letters)
{
    static const unsigned char zeros[1] = {0};
    dtrain_safetensors_source sources[26];
    char names[26][2];
    size_t count = strlen(letters);
    memset(sources, 0, sizeof sources);
    memset(names, 0, sizeof names);
    for (size_t i = 0; i < count; i++) {
        names[i][0] = letters[i];
        sources[i].name = names[i];
        sources[i].dtype = DTRAIN_U8;
        sources[i].data = zeros;
    }
    CHECK_EQ(dtrain_safetensors_save(path, sources, count, NULL), DTRAIN_OK);
}

static char directory[512];

/* A directory with an index of that text, and the files x.safetensors with a and b, y.safetensors with c. */
static void make(const char *name, const char *index)
{
    char path[600];
    snprintf(directory, sizeof directory, "%s", files_path(name));
    CHECK_EQ(mkdir(directory, 0700), 0);
    snprintf(path, sizeof path, "%s/x.safetensors", directory);
    put_letters(path, "ab");
    snprintf(path, sizeof path, "%s/y.safetensors", directory);
    put_letters(path, "c");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    put_text(path, index);
}

static void verdict(int line, const char *index, const char *error)
{
    dtrain_safetensors_model *model = NULL;
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain_safetensors_desc desc = {0, &heap};
    make("verdict", index);
    dtrain_status status = dtrain_safetensors_model_open(&model, directory, &desc);
    if (error == NULL && status != DTRAIN_OK)
        TEST_FAIL("line %d: refused: %s", line, dtrain_last_error());
    if (error != NULL && (status != DTRAIN_ERR_CORRUPT || strstr(dtrain_last_error(), error) == NULL))
        TEST_FAIL("line %d: status %d, \"%s\", expected \"%s\"", line, (int)status, dtrain_last_error(), error);
    CHECK_EQ(model != NULL, status == DTRAIN_OK);
    if (error == NULL)
        CHECK_EQ(dtrain_safetensors_model_count(model), 3);
    dtrain_safetensors_model_close(model);
    CHECK_EQ(heap.bytes, 0);
    files_remove(directory);
}

#define GOOD(index) verdict(__LINE__, index, NULL)
#define BAD(index, error) verdict(__LINE__, index, error)
#define MAP "\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"x.safetensors\",\"c\":\"y.safetensors\"}"

TEST(an_index_and_its_files_agree_both_ways)
{
    GOOD("{" MAP "}");
    GOOD("{\"metadata\":{\"total_size\":3,\"by\":\"hand\",\"n\":[1,{\"x\":null}]}," MAP "}\n");
    GOOD("{\"metadata\":null," MAP ",\"more\":[[]]}");
    GOOD("{\"weight_map\":{\"c\":\"y.safetensors\",\"\\u0062\":\"x.safeten\\u0073ors\",\"a\":\"x.safetensors\"}}");
    BAD("{\"weight_map\":{\"a\":\"x.safetensors\",\"c\":\"y.safetensors\"}}",
        "S6: \"b\" is in x.safetensors, but not in the index");
    BAD("{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\",\"c\":\"y.safetensors\"}}",
        "S6: \"b\" is not in y.safetensors");
    BAD("{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"x.safetensors\",\"c\":\"y.safetensors\",\"d\":\"y."
        "safetensors\"}}",
        "S6: \"d\" is not in");
    BAD("{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"x.safetensors\",\"b\":\"x.safetensors\",\"c\":\"y."
        "safetensors\"}}",
        "S6: \"a\" comes twice");
    BAD("{\"weight_map\":{}}", "S6: its weight_map is empty");
    BAD("{\"metadata\":{}}", "S6: its weight_map is missing");
    BAD("{" MAP "," MAP "}", "S6: at byte");
    BAD("{\"metadata\":{\"k\":\"1\",\"k\":\"2\"}," MAP "}", "S6: \"k\" comes twice");
}

TEST(a_second_copy_in_another_file_is_refused)
{
    dtrain_safetensors_model *model = NULL;
    char path[600];
    make("copy", "{" MAP "}");
    snprintf(path, sizeof path, "%s/y.safetensors", directory);
    put_letters(path, "bc");
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "S6: \"b\" is in y.safetensors, but the index says x.safetensors");
}

TEST(an_index_is_json_of_its_form)
{
    BAD("", "S1: at byte 0");
    BAD("[]", "S1");
    BAD("{" MAP "}}", "S1");
    BAD("{\"weight_map\":[]}", "S1");
    BAD("{\"metadata\":1," MAP "}", "S1");
    BAD("{\"weight_map\":{\"a\":1}}", "S1: \"a\" at byte 19: its file is not a string");
    BAD("{\"weight_map\":{\"a\":\"\377\"}}", "S1");
    BAD("{\"metadata\":{\"x\":[[}}," MAP "}", "S1");
}

TEST(files_have_plain_names)
{
    static const char *const names[] = {"../x.safetensors",     "/etc/x.safetensors",
                                        "sub/x.safetensors",    "c:x.safetensors",
                                        "..\\\\x.safetensors",  "x.bin",
                                        ".safetensors",         "",
                                        "x.safetensors\\u0000", "x.safetensors/",
                                        "x\\n.safetensors"};
    char index[256];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(index, sizeof index, "{\"weight_map\":{\"a\":\"%s\"}}", names[i]);
        BAD(index, "S5");
    }
}

TEST(links_are_followed)
{
    dtrain_safetensors_model *model = NULL;
    char from[600], to[600];
    make("links", "{" MAP "}");
    snprintf(from, sizeof from, "%s/x.safetensors", directory);
    snprintf(to, sizeof to, "%s/blob", files_directory);
    CHECK_EQ(rename(from, to), 0);
    CHECK_EQ(symlink("../blob", from), 0);
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    dtrain_safetensors_model_close(model);
    CHECK_EQ(unlink(to), 0);
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "\"x.safetensors\": it is a link, and the file that it leads to is missing");
}

TEST(a_link_to_nothing_is_no_missing_model)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    for (int i = 0; i < 2; i++) {
        dtrain_safetensors_model *model = NULL;
        char from[600], text[100];
        snprintf(directory, sizeof directory, "%s", files_path(i ? "cached index" : "cached"));
        snprintf(from, sizeof from, "%s/%s", directory, names[i]);
        CHECK_EQ(mkdir(directory, 0700), 0);
        CHECK_EQ(symlink("../blob that is not there", from), 0);
        CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_ERR_IO);
        snprintf(text, sizeof text, "\"%s\": it is a link, and the file", names[i]);
        CHECK_CONTAINS(dtrain_last_error(), text);
    }
}

TEST(a_wrong_total_is_told_and_no_error)
{
    dtrain_set_log(keep, NULL);
    GOOD("{\"metadata\":{\"total_size\":3.0}," MAP "}");
    GOOD("{\"metadata\":{\"total_size\":3}," MAP "}");
    CHECK(logged[0] == 0);
    GOOD("{\"metadata\":{\"total_size\":4}," MAP "}");
    CHECK_CONTAINS(logged, "total_size is 4, but the files hold 3 bytes");
    dtrain_set_log(NULL, NULL);
}

TEST(a_path_may_be_a_file_an_index_or_a_directory)
{
    dtrain_safetensors_model *model = NULL;
    char path[600];
    make("paths", "{" MAP "}");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    CHECK_EQ(dtrain_safetensors_model_open(&model, path, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_files(model), 2);
    dtrain_safetensors_model_close(model);
    snprintf(path, sizeof path, "%s/x.safetensors", directory);
    CHECK_EQ(dtrain_safetensors_model_open(&model, path, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_files(model), 1);
    CHECK_EQ(dtrain_safetensors_model_count(model), 2);
    dtrain_safetensors_model_close(model);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    put_letters(path, "xyz"); /* which goes before an index */
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    CHECK(dtrain_safetensors_model_find(model, "x", 1, NULL) != NULL &&
          dtrain_safetensors_model_find(model, "a", 1, NULL) == NULL);
    dtrain_safetensors_model_close(model);
    CHECK_EQ(mkdir(files_path("empty"), 0700), 0);
    CHECK_EQ(dtrain_safetensors_model_open(&model, files_path("empty"), NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "neither model.safetensors nor model.safetensors.index.json");
    CHECK_EQ(dtrain_safetensors_model_open(&model, files_path("absent"), NULL), DTRAIN_ERR_IO);
    CHECK_EQ(dtrain_safetensors_model_open(&model, files_path("absent.json"), NULL), DTRAIN_ERR_IO);
    CHECK(model == NULL);
    dtrain_safetensors_model_close(NULL);
}

/* As PyTorch's consolidation writes it: Python's json, escapes for what is no ASCII, no padding, no metadata. */
TEST(what_pytorch_consolidates_is_read)
{
    static const char header[] =
        "{\"w\\u00e9\\ud83d\\ude00\": {\"dtype\": \"F32\", \"shape\": [2, 1], \"data_offsets\": [0, 8]}, "
        "\"b\": {\"dtype\": \"BF16\", \"shape\": [1], \"data_offsets\": [8, 10]}}";
    static const char name[] = "w\303\251\360\237\230\200";
    dtrain_safetensors_model *model = NULL;
    dtrain_safetensors *file;
    uint32_t out[2];
    char path[600];
    size_t bytes;
    snprintf(directory, sizeof directory, "%s", files_path("consolidated"));
    CHECK_EQ(mkdir(directory, 0700), 0);
    unsigned char *made = files_make(header, sizeof header - 1, 10, &bytes);
    snprintf(path, sizeof path, "%s/model-00001-of-00001.safetensors", directory);
    files_write(path, made, bytes);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    put_text(path, "{\"metadata\": {\"total_size\": 10}, \"weight_map\": {\"w\\u00e9\\ud83d\\ude00\": "
                   "\"model-00001-of-00001.safetensors\", \"b\": \"model-00001-of-00001.safetensors\"}}");
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_find(model, name, strlen(name), &file);
    CHECK(tensor != NULL);
    CHECK_EQ(dtrain_safetensors_read(file, tensor, 0, tensor->count, out, DTRAIN_F32), DTRAIN_OK);
    CHECK(out[0] == 0x03020100 && out[1] == 0x07060504);
    dtrain_safetensors_model_close(model);
    free(made);
}

/* ---- writing ---- */

static const size_t ten[1] = {10};
static unsigned char data[5][40];

static void ten_floats(dtrain_safetensors_source sources[5])
{
    static const char *const names[5] = {"e", "d", "c", "b", "a"};
    memset(sources, 0, 5 * sizeof sources[0]);
    for (int i = 0; i < 5; i++) {
        sources[i].name = names[i];
        sources[i].dtype = DTRAIN_F32;
        sources[i].ndim = 1;
        sources[i].shape = ten;
        sources[i].data = data[i];
        memset(data[i], i + 1, 40);
    }
}

static void text_is(const char *path, const char *expected)
{
    size_t bytes;
    unsigned char *text = files_read(path, &bytes);
    if (text == NULL || bytes != strlen(expected) || memcmp(text, expected, bytes) != 0)
        TEST_FAIL("%s is \"%.*s\", expected \"%s\"", path, (int)bytes, text != NULL ? (const char *)text : "",
                  expected);
    free(text);
}

TEST(a_model_is_cut_in_its_order_where_a_file_is_full)
{
    dtrain_safetensors_source sources[5];
    dtrain_safetensors_pair pair = {"made", 0, "here \"\303\251\"", 0};
    dtrain_safetensors_write_desc desc = {&pair, 1, 0, NULL};
    dtrain_safetensors_model *model = NULL;
    dtrain_safetensors *file = NULL;
    unsigned char out[40];
    char path[600];
    ten_floats(sources);
    snprintf(directory, sizeof directory, "%s", files_path("cut"));
    CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, 80, &desc), DTRAIN_OK);
    CHECK_EQ(files_in(directory), 4);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    text_is(path, "{\n"
                  "  \"metadata\": {\n"
                  "    \"made\": \"here \\\"\303\251\\\"\",\n"
                  "    \"format\": \"pt\",\n"
                  "    \"total_size\": 200\n"
                  "  },\n"
                  "  \"weight_map\": {\n"
                  "    \"a\": \"model-00003-of-00003.safetensors\",\n"
                  "    \"b\": \"model-00002-of-00003.safetensors\",\n"
                  "    \"c\": \"model-00002-of-00003.safetensors\",\n"
                  "    \"d\": \"model-00001-of-00003.safetensors\",\n"
                  "    \"e\": \"model-00001-of-00003.safetensors\"\n"
                  "  }\n"
                  "}\n");
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_count(model), 5);
    for (int i = 0; i < 5; i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_find(model, sources[i].name, 1, &file);
        CHECK(tensor != NULL && file != NULL);
        CHECK_EQ(dtrain_safetensors_read(file, tensor, 0, tensor->count, out, DTRAIN_F32), DTRAIN_OK);
        CHECK(memcmp(out, data[i], 40) == 0);
    }
    static const char order[] = "debca"; /* file by file, in the order of data */
    for (size_t i = 0; i < 5; i++)
        CHECK_EQ(dtrain_safetensors_model_tensor(model, i, &file)->name[0], order[i]);
    CHECK(dtrain_safetensors_model_tensor(model, 5, &file) == NULL && file == NULL);
    CHECK(dtrain_safetensors_model_find(model, "f", 1, &file) == NULL && file == NULL);
    CHECK_EQ(dtrain_safetensors_model_metadata_count(model), 2);
    CHECK(strcmp(dtrain_safetensors_model_metadata(model, 0)->value, "here \"\303\251\"") == 0);
    CHECK(dtrain_safetensors_model_metadata(model, 2) == NULL);
    file = dtrain__huggingface_file(model, 2);
    CHECK_EQ(dtrain__safetensors_metadata_count(file), 1);
    CHECK(strcmp(dtrain__safetensors_metadata_find(file, "format", 6)->value, "pt") == 0);
    CHECK(dtrain__huggingface_file(model, 3) == NULL);
    dtrain_safetensors_model_close(model);
}

TEST(a_model_that_fits_is_one_file)
{
    dtrain_safetensors_source sources[5];
    dtrain_safetensors_pair pair = {"format", 0, "mlx", 0};
    dtrain_safetensors_write_desc desc = {&pair, 1, 0, NULL};
    dtrain_safetensors_model *model = NULL;
    ten_floats(sources);
    snprintf(directory, sizeof directory, "%s/", files_path("fits"));
    CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, 200, &desc), DTRAIN_OK);
    CHECK_EQ(files_in(directory), 1);
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_metadata_count(model), 1);
    CHECK(strcmp(dtrain_safetensors_model_metadata(model, 0)->value, "mlx") == 0);
    dtrain_safetensors_model_close(model);
    /* once more to the same place: taken, and nothing of it is touched */
    CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 4, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "exists and is not empty");
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_count(model), 5);
    dtrain_safetensors_model_close(model);
    put_text(files_path("a file"), "");
    CHECK_EQ(dtrain_safetensors_model_save(files_path("a file"), sources, 5, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(mkdir(files_path("empty place"), 0700), 0);
    CHECK_EQ(dtrain_safetensors_model_save(files_path("empty place"), sources, 5, 0, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_save("", sources, 5, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(symlink(".", files_path("a link")), 0);
    CHECK_EQ(dtrain_safetensors_model_save(files_path("a link"), sources, 5, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "exists and is not a directory");
}

TEST(a_tensor_larger_than_a_file_has_one_to_itself)
{
    dtrain_safetensors_source sources[5];
    dtrain_safetensors_model *model = NULL;
    ten_floats(sources);
    snprintf(directory, sizeof directory, "%s", files_path("larger"));
    CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, 39, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_model_files(model), 5);
    dtrain_safetensors_model_close(model);
}

TEST(a_name_in_two_files_is_refused_before_anything_is_written)
{
    dtrain_safetensors_source sources[5];
    ten_floats(sources);
    sources[4].name = "e";
    int before = files_in(files_directory);
    CHECK_EQ(dtrain_safetensors_model_save(files_path("twice"), sources, 5, 40, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "R12");
    CHECK_EQ(files_in(files_directory), before);
}

TEST(tied_tensors_are_stored_once_and_found_by_both_names)
{
    dtrain_safetensors_source sources[5];
    dtrain_safetensors_model *model = NULL;
    for (uint64_t most = 40; most <= 400; most += 360) {
        ten_floats(sources);
        sources[0].data = data[3]; /* e is b */
        snprintf(directory, sizeof directory, "%s", files_path(most == 40 ? "tied" : "tied in one"));
        CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, most, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_model_count(model), 4);
        const dtrain_safetensors_tensor *b = dtrain_safetensors_model_find(model, "b", 1, NULL);
        CHECK(b != NULL && dtrain_safetensors_model_find(model, "e", 1, NULL) == b);
        CHECK(strcmp(b->name, "b") == 0);                                       /* the name that sorts first */
        CHECK(dtrain_safetensors_model_find(model, "format", 6, NULL) == NULL); /* maps to "pt", which is no tensor */
        dtrain_safetensors_model_close(model);
    }
}

/* A key that is given with a length need not end with a zero byte, nor be all of what stands there. */
TEST(keys_of_a_length_end_there)
{
    for (int in_one = 0; in_one < 2; in_one++) {
        dtrain_safetensors_source sources[5];
        char *key = (char *)malloc(6);
        dtrain_safetensors_pair pairs[2] = {{key, 6, "mlxx", 3}, {"total_sizes", 10, "no number", 2}};
        dtrain_safetensors_write_desc desc = {pairs, 1 + (size_t)!in_one, 0, NULL};
        dtrain_safetensors_model *model = NULL;
        memcpy(key, "format", 6);
        ten_floats(sources);
        snprintf(directory, sizeof directory, "%s", files_path(in_one ? "length in one" : "length"));
        CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, in_one ? 400 : 40, &desc), DTRAIN_OK);
        free(key);
        CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_model_metadata_count(model), 1);
        CHECK(model != NULL && strcmp(dtrain_safetensors_model_metadata(model, 0)->value, "mlx") == 0);
        dtrain_safetensors_model_close(model);
    }
}

/* Where the metadata have another use for a tied tensor's name, the tensor is stored a second time. */
TEST(a_tied_name_that_is_a_key_of_the_metadata_is_stored_as_well)
{
    static const char *const names[5] = {"a", "format", "mine", "total_size", "z"};
    for (int in_one = 0; in_one < 2; in_one++) {
        dtrain_safetensors_source sources[5];
        dtrain_safetensors_pair pair = {"mine", 0, "text", 0};
        dtrain_safetensors_write_desc desc = {&pair, 1, 0, NULL};
        dtrain_safetensors_model *model = NULL;
        ten_floats(sources);
        for (int i = 0; i < 5; i++) {
            sources[i].name = names[i];
            sources[i].data = data[0];
        }
        snprintf(directory, sizeof directory, "%s", files_path(in_one ? "key in one" : "key"));
        CHECK_EQ(dtrain_safetensors_model_save(directory, sources, 5, in_one ? 400 : 40, &desc), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_model_open(&model, directory, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_safetensors_model_count(model), 4);
        for (int i = 0; i < 5; i++) {
            const dtrain_safetensors_tensor *tensor =
                dtrain_safetensors_model_find(model, names[i], strlen(names[i]), NULL);
            CHECK(tensor != NULL && strcmp(tensor->name, i < 4 ? names[i] : "a") == 0);
        }
        dtrain_safetensors_model_close(model);
    }
}
