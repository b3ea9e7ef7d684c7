/* What checkpoints are on the disk: what fits and what does not, damage, what is kept and what is cleared, asynchronous
 * saves. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"

#include <sys/resource.h>
#include <utime.h>

/* ---- a program alone, with two tensors ---- */

typedef struct alone {
    float a[4000], b[30];
    dtrain_piece pieces[2];
    dtrain_pieces lists[2];
    dtrain_checkpoint_state state;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt;
} alone;

static void alone_begin(alone *p, const char *directory)
{
    memset(p, 0, sizeof *p);
    for (int i = 0; i < 2; i++) {
        p->pieces[i].name = i == 0 ? "a" : "b";
        p->pieces[i].dtype = DTRAIN_F32;
        p->pieces[i].ndim = 2;
        p->pieces[i].shape[0] = i == 0 ? 40 : 5;
        p->pieces[i].shape[1] = i == 0 ? 100 : 6;
        p->pieces[i].count = i == 0 ? 4000 : 30;
        p->pieces[i].data = i == 0 ? p->a : p->b;
    }
    p->lists[0].pieces = p->pieces;
    p->lists[0].count = 2;
    p->state.lists = p->lists;
    p->state.list_count = 1;
    p->desc.directory = directory;
    p->desc.no_sync = 1;
    p->desc.timeout_ms = test_ms(10000);
    CHECK_EQ(dtrain_checkpoint_create(&p->ckpt, NULL, &p->desc), DTRAIN_OK);
}

static void alone_fill(alone *p, float with)
{
    for (size_t i = 0; i < 4000; i++)
        p->a[i] = with + (float)i;
    for (size_t i = 0; i < 30; i++)
        p->b[i] = with - (float)i;
}

static dtrain_status alone_save(alone *p, uint64_t step)
{
    p->state.step = step;
    alone_fill(p, (float)step);
    return dtrain_checkpoint_save(p->ckpt, &p->state);
}

/* Loads, and checks that every element is that of the step. */
static dtrain_status alone_load(alone *p, uint64_t step)
{
    alone_fill(p, -1);
    dtrain_status status = dtrain_checkpoint_load(p->ckpt, &p->state, NULL, NULL);
    if (status == DTRAIN_OK) {
        CHECK_EQ(p->state.step, step);
        CHECK(p->a[0] == (float)step && p->a[3999] == (float)step + 3999);
        CHECK(p->b[0] == (float)step && p->b[29] == (float)step - 29);
    }
    return status;
}

/* ---- what fits ---- */

TEST(missing_extra_and_reshaped_tensors_are_one_error_and_nothing_is_loaded)
{
    alone p;
    dtrain_checkpoint_report report;
    dtrain_checkpoint_load_desc lenient = {NULL, 0, 0, 1, 0};
    alone_begin(&p, fresh("fits"));
    CHECK_EQ(alone_save(&p, 7), DTRAIN_OK);
    alone_fill(&p, -1);
    p.state.step = 99;
    p.pieces[1].shape[0] = 6;
    p.pieces[1].shape[1] = 5;
    p.pieces[0].name = "c";
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, &report), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(),
                   "step-7 of 1 ranks and the program's state differ: missing: \"c\"; of another shape: \"b\" is "
                   "F32 {5, 6}, wanted as F32 {6, 5}; extra: \"a\"");
    CHECK_CONTAINS(dtrain_last_error(), "missing: \"c\"");
    CHECK_EQ(report.missing, 1);
    CHECK_EQ(report.extra, 1);
    CHECK_EQ(report.reshaped, 1);
    CHECK_EQ(report.loaded, 0);
    CHECK(p.a[0] == -1 && p.b[1] == -2);
    CHECK_EQ(p.state.step, 99);
    p.pieces[0].name = "a";
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &lenient, &report), DTRAIN_OK);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(report.loaded, 1);
    CHECK_EQ(report.reshaped, 1);
    CHECK(p.a[0] == 7 && p.a[3999] == 7 + 3999 && p.b[1] == -2);
    CHECK_EQ(p.state.step, 7);
    dtrain_checkpoint_destroy(p.ckpt);
}

TEST(another_dtype_is_converted_and_another_sampler_refused)
{
    alone p;
    double wide[30];
    dtrain_sampler sampler;
    dtrain_sampler_desc desc = {100, 1, 0, 2, 3, 0};
    alone_begin(&p, fresh("dtypes"));
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    p.lists[1] = dtrain_sampler_pieces(&sampler);
    p.state.list_count = 2;
    CHECK_EQ(alone_save(&p, 3), DTRAIN_OK);
    p.pieces[1].dtype = DTRAIN_F64;
    p.pieces[1].data = wide;
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_OK);
    CHECK(wide[0] == 3 && wide[29] == -26);
    desc.seed = 2;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "state differ: another sampler.seed: 1 was saved, this run has 2");
    p.state.list_count = 1;
    p.pieces[1].dtype = DTRAIN_I32;
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "\"b\" is F32 {5, 6}, wanted as I32 {5, 6}");
    dtrain_checkpoint_destroy(p.ckpt);
}

TEST(pieces_that_do_not_tile_and_names_of_optimizer_state_are_refused_and_the_old_checkpoint_stays)
{
    alone p;
    alone_begin(&p, fresh("tile"));
    CHECK_EQ(alone_save(&p, 1), DTRAIN_OK);
    p.pieces[0].count = 3999;
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the pieces of tensor \"a\" have 3999 elements, the tensor 4000");
    CHECK_EQ(count_files(p.desc.directory, "*.safetensors"), 2);
    p.pieces[1].name = "a";
    p.pieces[1].count = 29;
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "tensor \"a\" is F32 {40, 100} in one part and F32 {5, 6} in another");
    p.pieces[0].count = 4000;
    p.pieces[1].count = 30;
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "tensor \"a\" comes twice");
    p.pieces[1].name = "b@adam.m";
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the name \"b@adam.m\" ends as names of optimizer state do");
    p.pieces[1].name = "\xff";
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_INVALID);
    p.pieces[1].name = "b";
    dtrain_safetensors_pair values[3] = {{"key", 0, "1", 0}, {"other", 0, "2", 0}, {"keys", 3, "3", 0}};
    p.state.values = values;
    p.state.value_count = 3;
    CHECK_EQ(alone_save(&p, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the key \"key\" of value 2 comes twice");
    p.state.value_count = 0;
    CHECK_EQ(alone_load(&p, 1), DTRAIN_OK);
    CHECK_EQ(alone_save(&p, 2), DTRAIN_OK);
    CHECK_EQ(alone_load(&p, 2), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt);
}

static dtrain_status two_optimizers(dtrain_comm *world, void *user)
{
    dtrain_checkpoint *ckpt = NULL;
    model sharded, whole;
    model_create(&sharded, world, DTRAIN_FULL_SHARD, 0, 0);
    model_create(&whole, world, 0, 0, 0);
    for (int i = 0; i < PARAMS; i++) {
        static const char *const names[PARAMS] = {"1", "2", "3", "4", "5", "6"};
        whole.table[i].name = names[i];
    }
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, (const dtrain_checkpoint_desc *)user), DTRAIN_OK);
    dtrain_checkpoint_state state = state_of(&sharded, 1), other = state_of(&whole, 1);
    sharded.lists[1] = other.lists[0];
    state.list_count = 2;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    whole.optimizer->step = 3;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "a list of this rank has optimizer.step 3, and an earlier list or part has 0");
    CHECK_EQ(dtrain_fsdp_set_step(sharded.fsdp, 3), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    model_destroy(&sharded);
    model_destroy(&whole);
    return DTRAIN_OK;
}

/* One number of steps is kept: of two that differ, one would be lost. */
TEST(two_optimizers_that_have_not_taken_as_many_steps_are_refused)
{
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = fresh("two optimizers");
    desc.no_sync = 1;
    CHECK_EQ(dtrain_run_threads(2, two_optimizers, &desc, NULL), DTRAIN_OK);
}

TEST(names_that_look_like_numbered_ones_stay_apart)
{
    alone p;
    alone_begin(&p, fresh("names"));
    p.pieces[0].name = "b#1";
    CHECK_EQ(alone_save(&p, 5), DTRAIN_OK);
    CHECK_EQ(alone_load(&p, 5), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt);
}

/* ---- plain files ---- */

TEST(a_plain_file_loads_the_same_way_and_an_export_is_one)
{
    alone p;
    dtrain_checkpoint_load_desc desc = {NULL, 0, 0, 0, 0};
    dtrain_checkpoint_report report;
    char file[200];
    alone_begin(&p, fresh("plain"));
    CHECK_EQ(alone_save(&p, 4), DTRAIN_OK);
    snprintf(file, sizeof file, "%s/out.safetensors", p.desc.directory);
    CHECK_EQ(dtrain_checkpoint_export(p.desc.directory, file, 0), DTRAIN_OK);
    alone_fill(&p, -1);
    desc.path = file;
    p.state.step = 1234;
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &desc, &report), DTRAIN_OK);
    CHECK(p.a[0] == 4 && p.a[3999] == 4003 && p.b[29] == -25);
    CHECK_EQ(p.state.step, 1234);
    CHECK_EQ(report.world_size, 0);
    CHECK_EQ(report.bytes, 4030 * 4);
    p.pieces[0].boxed = 1; /* a range of a box: from column 90 on, all but the first and last two elements */
    p.pieces[0].box_begin[1] = 90;
    p.pieces[0].box_size[0] = 40;
    p.pieces[0].box_size[1] = 10;
    p.pieces[0].begin = 1;
    p.pieces[0].count = 397;
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &desc, NULL), DTRAIN_OK);
    CHECK(p.a[0] == 4 + 91 && p.a[8] == 4 + 99 && p.a[9] == 4 + 190 && p.a[396] == 4 + 3997);
    p.pieces[1].name = "c";
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &desc, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "missing: \"c\"; extra: \"b\"");
    desc.path = "/nowhere/at/all";
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &desc, NULL), DTRAIN_ERR_IO);
    dtrain_checkpoint_destroy(p.ckpt);
}

/* ---- damage ---- */

/* Flips one bit of a file, calls the loader and says how it went; then turns it back. */
static dtrain_status with_bit(alone *p, const char *path, long byte, int bit)
{
    FILE *file = fopen(path, "r+b");
    int was;
    dtrain_status status;
    CHECK(file != NULL);
    for (int turn = 0; turn < 2; turn++) {
        fseek(file, byte, SEEK_SET);
        was = fgetc(file);
        fseek(file, byte, SEEK_SET);
        fputc(was ^ 1 << bit, file);
        fflush(file);
        if (turn == 0) {
            status = dtrain_checkpoint_load(p->ckpt, &p->state, NULL, NULL);
            CHECK_EQ(dtrain_checkpoint_verify(p->desc.directory) == DTRAIN_OK, status == DTRAIN_OK);
        }
    }
    fclose(file);
    return status;
}

TEST(a_flipped_bit_anywhere_is_found)
{
    alone p;
    char list[300], path[300];
    alone_begin(&p, fresh("flip"));
    CHECK_EQ(alone_save(&p, 9), DTRAIN_OK);
    snprintf(list, sizeof list, "find %s/step-9 -type f", p.desc.directory);
    FILE *pipe = popen(list, "r");
    int files = 0;
    while (fgets(path, sizeof path, pipe) != NULL) {
        struct stat status;
        path[strcspn(path, "\n")] = 0;
        CHECK_EQ(stat(path, &status), 0);
        files++;
        for (long byte = 0; byte < status.st_size; byte += byte < 1500 ? 1 : 37)
            if (with_bit(&p, path, byte, (int)(byte % 8)) != DTRAIN_ERR_CORRUPT)
                TEST_FAIL("%s: byte %ld: %s", path, byte, dtrain_last_error());
    }
    pclose(pipe);
    CHECK_EQ(files, 3);
    CHECK_EQ(alone_load(&p, 9), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt);
}

TEST(without_verifying_damaged_data_loads_and_damaged_headers_do_not)
{
    alone p;
    dtrain_checkpoint_load_desc blind = {NULL, 0, 0, 0, 1};
    char command[300];
    alone_begin(&p, fresh("blind"));
    CHECK_EQ(alone_save(&p, 9), DTRAIN_OK);
    snprintf(command, sizeof command,
             "f=$(ls %s/step-9/rank-00000.*-1.safetensors); printf x | dd of=$f bs=1 seek=$(($(wc -c <$f) - 40)) "
             "conv=notrunc 2>/dev/null",
             p.desc.directory);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "do not have the hash that was saved");
    CHECK_CONTAINS(dtrain_last_error(), "(in step-9)");
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &blind, NULL), DTRAIN_OK);
    shell("f=$(ls %s/step-9/rank-00000.*-1.safetensors); printf x | dd of=$f bs=1 seek=8 conv=notrunc 2>/dev/null",
          p.desc.directory);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &blind, NULL), DTRAIN_ERR_CORRUPT);
    shell("truncate -s -1 %s/step-9/rank-00000.*-1.safetensors", p.desc.directory);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &blind, NULL), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "it was cut");
    shell("rm %s/step-9/rank-00000.*-1.safetensors", p.desc.directory);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &blind, NULL), DTRAIN_ERR_IO);
    dtrain_checkpoint_destroy(p.ckpt);
}

/* ---- which stay ---- */

TEST(the_newest_keep_last_stay_and_latest_is_found_or_found_out)
{
    alone p;
    dtrain_checkpoint_load_desc exact = {NULL, 1, 20, 0, 0};
    alone_begin(&p, fresh("keep"));
    dtrain_checkpoint_destroy(p.ckpt);
    p.desc.keep_last = 2;
    CHECK_EQ(dtrain_checkpoint_create(&p.ckpt, NULL, &p.desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "holds no checkpoint that is whole");
    for (uint64_t step = 10; step <= 40; step += 10)
        CHECK_EQ(alone_save(&p, step), DTRAIN_OK);
    CHECK(!exists(p.desc.directory, "step-10") && !exists(p.desc.directory, "step-20"));
    CHECK(exists(p.desc.directory, "step-30") && exists(p.desc.directory, "step-40"));
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &exact, NULL), DTRAIN_ERR_IO);
    exact.step = 30;
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &exact, NULL), DTRAIN_OK);
    CHECK_EQ(p.state.step, 30);
    CHECK_EQ(alone_save(&p, 20), DTRAIN_OK); /* turned back: those ahead stay, and are not the newest */
    CHECK(exists(p.desc.directory, "step-30") && exists(p.desc.directory, "step-40"));
    CHECK_EQ(alone_load(&p, 20), DTRAIN_OK);
    dtrain_set_log(quiet, NULL);
    shell("echo nonsense >%s/latest", p.desc.directory);
    CHECK_EQ(alone_load(&p, 20), DTRAIN_OK);
    shell("rm %s/latest", p.desc.directory);
    CHECK_EQ(alone_load(&p, 20), DTRAIN_OK);
    shell("mkdir %s/latest", p.desc.directory); /* there, and cannot be read: no other step is taken for the newest */
    CHECK(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL) != DTRAIN_OK);
    CHECK_CONTAINS(dtrain_last_error(), "latest");
    shell("rmdir %s/latest", p.desc.directory);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(alone_save(&p, 40), DTRAIN_OK); /* replaced: its old files are gone. 30 was given up, so it goes first */
    CHECK_EQ(count_files(p.desc.directory, "*.safetensors"), 4);
    CHECK(exists(p.desc.directory, "step-20") && !exists(p.desc.directory, "step-30"));
    dtrain_checkpoint_destroy(p.ckpt);
}

TEST(a_directory_that_holds_another_steps_save_is_an_error_everywhere)
{
    alone p;
    const dtrain_checkpoint_load_desc exact = {NULL, 1, 10, 0, 0};
    static const char *const wrong[] = {"step-10", "step-10//", "step-10/.", "best", "step-09"};
    static const char *const right[] = {"step-5", "step-05", "kept", "good", "step-5/."};
    char path[300], file[300];
    alone_begin(&p, fresh("other"));
    CHECK_EQ(alone_save(&p, 9), DTRAIN_OK);
    CHECK_EQ(alone_save(&p, 5), DTRAIN_OK);
    shell("cd %s && for d in step-10 step-05 kept; do cp -r step-5 $d; done && cp -r step-5 step-09 && "
          "ln -s step-10 best && ln -s step-5 good && mkdir step-11",
          p.desc.directory);
    snprintf(file, sizeof file, "%s/out.safetensors", p.desc.directory);
    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/%s", p.desc.directory, wrong[i]);
        CHECK_EQ(dtrain_checkpoint_verify(path), DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(dtrain_last_error(),
                       i == 4 ? "\"step-09\" holds the save of step 5" : "\"step-10\" holds the save of step 5");
        CHECK_CONTAINS(dtrain_last_error(), "name it step-5, or remove it");
        CHECK_EQ(dtrain_checkpoint_export(path, file, 0), DTRAIN_ERR_CORRUPT);
        snprintf(path, sizeof path, "%s/%s", p.desc.directory, right[i]);
        CHECK_EQ(dtrain_checkpoint_verify(path), DTRAIN_OK);
    }
    CHECK(!exists(p.desc.directory, "out.safetensors"));
    alone_fill(&p, -1);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &exact, NULL), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "\"step-10\" holds the save of step 5");
    CHECK(p.a[0] == -1.0f);
    CHECK_EQ(alone_load(&p, 5), DTRAIN_OK);
    shell("echo step-10 >%s/latest", p.desc.directory);
    CHECK_EQ(alone_load(&p, 0), DTRAIN_ERR_CORRUPT); /* no other step is taken for the newest */
    CHECK_EQ(dtrain_checkpoint_verify(p.desc.directory), DTRAIN_ERR_CORRUPT);
    dtrain_set_log(quiet, NULL);
    shell("rm %s/latest", p.desc.directory);
    CHECK_EQ(alone_load(&p, 0), DTRAIN_ERR_CORRUPT);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(alone_save(&p, 10), DTRAIN_OK); /* a save of that step puts it right */
    CHECK_EQ(alone_load(&p, 10), DTRAIN_OK);
    snprintf(path, sizeof path, "%s/step-10", p.desc.directory);
    CHECK_EQ(dtrain_checkpoint_verify(path), DTRAIN_OK);
    CHECK_EQ(count_files(path, "*.safetensors"), 2);
    dtrain_checkpoint_destroy(p.ckpt);
}

/* ---- files that claim more than they have ---- */

static dtrain_status sparse_load(dtrain_comm *world, void *user)
{
    alone p;
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain_checkpoint_report report;
    memset(&p, 0, sizeof p);
    memset(&report, 0, sizeof report);
    p.desc.directory = (const char *)user;
    p.desc.no_sync = 1;
    p.desc.allocator = &heap;
    CHECK_EQ(dtrain_checkpoint_create(&p.ckpt, world, &p.desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, &report), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0: checkpoint: \"index.json\" is not a text: its byte ");
    CHECK(report.bytes_read == 0); /* rank 0 came no further, and nobody else began */
    dtrain_checkpoint_destroy(p.ckpt);
    CHECK(heap.peak_bytes < 2 << 20);
    CHECK_EQ(heap.bytes, 0);
    return DTRAIN_OK;
}

/* Verifies in a child whose address space has no room for what the index claims. */
static void sparse_verify(const char *path)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    int end = 0;
    pid_t child = fork();
    if (child == 0) {
        const struct rlimit limit = {(rlim_t)1 << 30, (rlim_t)1 << 30};
        _exit(setrlimit(RLIMIT_AS, &limit) != 0 || dtrain_checkpoint_verify(path) != DTRAIN_ERR_CORRUPT);
    }
    CHECK(waitpid(child, &end, 0) == child && WIFEXITED(end) && WEXITSTATUS(end) == 0);
#endif
    CHECK_EQ(dtrain_checkpoint_verify(path), DTRAIN_ERR_CORRUPT);
}

TEST(a_file_of_holes_takes_no_memory_however_long_it_is)
{
    alone p;
    char path[300];
    dtrain_safetensors *file;
    dtrain_safetensors_model *other;
    dtrain_safetensors_desc desc;
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    memset(&desc, 0, sizeof desc);
    desc.allocator = &heap;
    alone_begin(&p, fresh("holes"));
    CHECK_EQ(alone_save(&p, 5), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt);
    for (int turn = 0; turn < 2; turn++) { /* a hole after the text, then nothing else */
        shell(turn == 0 ? "truncate -s 4G %s/step-5/index.json"
                        : "cd %s/step-5 && : >index.json && truncate -s 4G *.json",
              p.desc.directory);
        sparse_verify(p.desc.directory);
        char *directory = strdup(p.desc.directory);
        CHECK_EQ(dtrain_run_threads(2, sparse_load, directory, NULL), DTRAIN_OK);
        free(directory);
    }
    /* headers of 99 MB, of which the first entry is there */
    shell("cd %s && printf '\\000\\235\\346\\005\\000\\000\\000\\000{\"a\":{\"dtype\":\"U8\"' >h.safetensors && "
          "truncate -s 100M h.safetensors && printf '{\"weight_map\":{' >h.json && truncate -s 90M h.json",
          p.desc.directory);
    snprintf(path, sizeof path, "%s/h.safetensors", p.desc.directory);
    CHECK_EQ(dtrain_safetensors_open(&file, path, &desc), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "at byte 26: "); /* the first zero byte */
    snprintf(path, sizeof path, "%s/h.json", p.desc.directory);
    CHECK_EQ(dtrain_safetensors_model_open(&other, path, &desc), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "\"h.json\" is not a text: its byte 15 of 94371840 is zero");
    CHECK(heap.peak_bytes < 2 << 20);
    CHECK_EQ(heap.bytes, 0);
}

/* An allocator whose call number `left` and no other fails; the blocks in use are counted. */
static long memory_left, memory_blocks;

static void *memory_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes > 0 && __atomic_fetch_sub(&memory_left, 1, __ATOMIC_RELAXED) == 0)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    __atomic_add_fetch(&memory_blocks, (block != NULL) - (pointer != NULL), __ATOMIC_RELAXED);
    free(pointer);
    return block;
}

/* Makes a checkpointer and saves or loads with it; its allocator has only so many calls before one fails. */
static dtrain_status memory_use(alone *p, dtrain_allocator *heap, long left, int what, uint64_t step)
{
    p->desc.allocator = heap;
    memory_left = left;
    dtrain_status status = dtrain_checkpoint_create(&p->ckpt, NULL, &p->desc);
    p->state.step = what == 0 ? 77 : step;
    if (status == DTRAIN_OK)
        status = what == 0   ? dtrain_checkpoint_load(p->ckpt, &p->state, NULL, NULL)
                 : what == 1 ? dtrain_checkpoint_save(p->ckpt, &p->state)
                             : dtrain_checkpoint_save_async(p->ckpt, &p->state);
    if (status == DTRAIN_OK && what == 2)
        status = dtrain_checkpoint_wait(p->ckpt);
    dtrain_checkpoint_destroy(p->ckpt);
    p->ckpt = NULL;
    return status;
}

/* Whichever allocation fails, that is what is said, and no other step is loaded than the newest. */
TEST(without_memory_there_is_a_status_and_never_another_step)
{
    for (int local = 0; local < 2; local++) {
        alone p;
        dtrain_allocator heap = {memory_resize, NULL, 0, 0};
        alone_begin(&p, fresh(local ? "memory local" : "memory"));
        dtrain_checkpoint_destroy(p.ckpt);
        p.desc.local = local;
        CHECK_EQ(memory_use(&p, &heap, -1, 1, local ? 2 : 4), DTRAIN_OK);
        CHECK_EQ(memory_use(&p, &heap, -1, 1, 3),
                 DTRAIN_OK); /* not local: turned back, the highest is not the newest */
        for (int what = 0; what < 3; what++) {
            long failed = 0;
            for (long k = 0; memory_left < 0 || k == 0; k++) {
                dtrain_status status = memory_use(&p, &heap, k, what, 3);
                failed += status != DTRAIN_OK;
                if (status != DTRAIN_OK && status != DTRAIN_ERR_MEMORY)
                    TEST_FAIL("local %d, what %d, allocation %ld: %s", local, what, k, dtrain_last_error());
                CHECK(status != DTRAIN_OK || p.state.step == 3);
                CHECK(heap.bytes == 0 && memory_blocks == 0);
            }
            CHECK(failed > 10);
        }
    }
}

/* latest names a step that is gone, and none is left: every rank is told, and none waits for another. */
static dtrain_status nothing_left(dtrain_comm *world, void *user)
{
    dtrain_checkpoint *ckpt = NULL;
    float x[6] = {0};
    dtrain_piece piece;
    dtrain_pieces list;
    dtrain_checkpoint_state state;
    memset(&list, 0, sizeof list);
    memset(&piece, 0, sizeof piece);
    memset(&state, 0, sizeof state);
    piece.name = "x";
    piece.dtype = DTRAIN_F32;
    piece.ndim = 1;
    piece.shape[0] = piece.count = 6;
    piece.data = x;
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, (const dtrain_checkpoint_desc *)user), DTRAIN_OK);
    for (int attempt = 0; attempt < 2; attempt++) {
        CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_ERR_IO);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0: checkpoint: the directory \"");
        CHECK_CONTAINS(dtrain_last_error(), "holds no checkpoint that is whole");
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    return DTRAIN_OK;
}

TEST(a_directory_whose_last_checkpoint_is_gone_is_an_error_on_every_rank)
{
    dtrain_comm_desc comm;
    dtrain_checkpoint_desc desc;
    memset(&comm, 0, sizeof comm);
    memset(&desc, 0, sizeof desc);
    comm.timeout_ms = test_ms(20000);
    desc.directory = fresh("gone");
    shell("mkdir -p %s", desc.directory);
    shell("echo step-7 >%s/latest", desc.directory);
    CHECK_EQ(dtrain_run_threads(3, nothing_left, &desc, &comm), DTRAIN_OK);
}

static void age(const char *path)
{
    struct utimbuf old = {1000000000, 1000000000};
    CHECK_EQ(utime(path, &old), 0);
}

TEST(what_is_nobodys_is_cleared_and_what_may_run_is_not)
{
    alone p;
    char command[900];
    const char *d;
    alone_begin(&p, fresh("clear"));
    d = p.desc.directory;
    CHECK_EQ(alone_save(&p, 1), DTRAIN_OK);
    snprintf(
        command, sizeof command,
        "n=$(ls %s/step-1 | sed -n 's/rank-00000.\\(.*\\)-1.safetensors/\\1/p'); cd %s; mkdir step-5 step-6 step-7 "
        "step-8; touch step-1/rank-00000.$n-0.safetensors step-1/rank-00001.$n-1.done; " /* of earlier calls */
        "touch step-5/rank-00000.$n-9.safetensors; "                                     /* of a rank ahead */
        "touch step-6/rank-00000.00000000deadbeef-1.safetensors step-6/mine; "           /* another's, new */
        "touch step-7/rank-00000.00000000deadbeef-2.safetensors "
        "step-7/.rank-00000.00000000deadbeef-2.done.0123456789abcdef.tmp; " /* another's, old */
        "touch .latest.0123456789abcdef.tmp .shared-0123456789abcdef",
        d, d);
    CHECK_EQ(system(command), 0);
    snprintf(command, sizeof command,
             "cd %s; touch -d 2001-01-01 step-7/* step-7/.rank* step-7 step-8 .latest* .shared*", d);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(alone_save(&p, 2), DTRAIN_OK);
    CHECK_EQ(count_files(d, "*-0.safetensors"), 0);
    CHECK_EQ(count_files(d, "*.done"), 0);
    CHECK_EQ(count_files(d, "*-9.safetensors"), 1);
    CHECK_EQ(count_files(d, "*deadbeef-1.safetensors"), 1);
    CHECK(exists(d, "step-6/mine"));
    CHECK(!exists(d, "step-7") && !exists(d, "step-8"));
    CHECK(!exists(d, ".latest.0123456789abcdef.tmp") && !exists(d, ".shared-0123456789abcdef"));
    /* by a clock that is far ahead, also of what nanoseconds count to, nothing is old */
    snprintf(command, sizeof command,
             "cd %s; touch .latest.0123456789abcdef.tmp; touch -d 2330-01-01 .latest.0123456789abcdef.tmp", d);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(alone_save(&p, 2), DTRAIN_OK);
    CHECK(exists(d, ".latest.0123456789abcdef.tmp"));
    snprintf(command, sizeof command, "%s/step-6/rank-00000.00000000deadbeef-1.safetensors", d);
    age(command);
    snprintf(command, sizeof command, "%s/step-6/mine", d);
    age(command);
    snprintf(command, sizeof command, "%s/step-6", d);
    age(command);
    CHECK_EQ(alone_save(&p, 3), DTRAIN_OK);
    CHECK_EQ(count_files(d, "*deadbeef*"), 0);
    CHECK(exists(d, "step-6/mine")); /* what is not of a save's form stays */
    for (uint64_t step = 1; step <= 3; step++) {
        dtrain_checkpoint_load_desc exact = {NULL, 1, step, 0, 0};
        CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, &exact, NULL), DTRAIN_OK);
    }
    dtrain_checkpoint_destroy(p.ckpt);
}

TEST(another_checkpointers_save_of_the_same_step_is_replaced_whole)
{
    alone p, q;
    alone_begin(&p, fresh("same"));
    alone_begin(&q, p.desc.directory);
    CHECK_EQ(alone_save(&p, 1), DTRAIN_OK);
    alone_fill(&q, 500);
    q.state.step = 1;
    CHECK_EQ(dtrain_checkpoint_save(q.ckpt, &q.state), DTRAIN_OK);
    CHECK_EQ(count_files(p.desc.directory, "*.safetensors"), 2);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.state, NULL, NULL), DTRAIN_OK);
    CHECK(p.a[0] == 500);
    dtrain_checkpoint_destroy(p.ckpt);
    dtrain_checkpoint_destroy(q.ckpt);
}

/* ---- asynchronous saves ---- */

TEST(one_asynchronous_save_at_a_time_and_its_result_as_often_as_asked)
{
    alone p;
    alone_begin(&p, fresh("async"));
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_OK);
    CHECK_EQ(dtrain__checkpoint_done(p.ckpt), 1);
    alone_fill(&p, 11);
    p.state.step = 11;
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_OK);
    alone_fill(&p, 0); /* training goes on */
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_OK);
    CHECK_EQ(alone_load(&p, 11), DTRAIN_OK);
    p.state.step = 12;
    alone_fill(&p, 12);
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt); /* waits */
    p.desc.timeout_ms = INT64_MAX;     /* as good as none */
    CHECK_EQ(dtrain_checkpoint_create(&p.ckpt, NULL, &p.desc), DTRAIN_OK);
    CHECK_EQ(alone_load(&p, 12), DTRAIN_OK);
    p.pieces[0].data = NULL;
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_ERR_INVALID); /* it does not begin */
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "has no data");
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_ERR_INVALID);
    p.pieces[0].data = p.a;
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_OK); /* nothing is held back: it was told */
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_OK);
    shell("touch %s/step-13", p.desc.directory); /* a file, where a directory is to be */
    p.state.step = 13;
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "step-13");
    CHECK_EQ(dtrain_checkpoint_wait(p.ckpt), DTRAIN_ERR_IO);
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_OK); /* wait has told */
    while (!dtrain__checkpoint_done(p.ckpt))
        usleep(100);
    p.state.step = 14;
    CHECK_EQ(dtrain_checkpoint_save_async(p.ckpt, &p.state), DTRAIN_ERR_IO); /* nobody has */
    CHECK_CONTAINS(dtrain_last_error(), "this save was not begun, as the save before it failed");
    CHECK_EQ(dtrain_checkpoint_save(p.ckpt, &p.state), DTRAIN_OK);
    dtrain_checkpoint_destroy(p.ckpt);
}
