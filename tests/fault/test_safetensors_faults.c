/* What the system refuses while files are written and read: every call in turn, a disk that is full, a process that is
 * killed. The old file stays, nothing is left beside it, and no descriptor is lost. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "safetensors_files.h"

#include <sys/resource.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/mount.h>
#include <sys/syscall.h>
#endif

static int fault_calls;       /* so far */
static int fault_at;          /* the call that fails; 0: none */
static int fault_forever;     /* all later calls of its kind fail as well */
static int fault_error;       /* with this errno */
static const char *fault_one; /* only calls of this name are counted; NULL: all */
static const char *fault_hit; /* the name of the call that failed; NULL: none did */

static size_t fault_limit = (size_t)-1;

size_t hook_file_limit(const char *call, size_t bytes)
{
    (void)call;
    return bytes < fault_limit ? bytes : fault_limit;
}

int hook_file_fault(const char *call)
{
    if (fault_at == 0 || (fault_one != NULL && strcmp(call, fault_one) != 0))
        return 0;
    fault_calls++;
    if (fault_forever ? fault_calls < fault_at || (fault_hit != NULL && strcmp(call, fault_hit) != 0)
                      : fault_calls != fault_at)
        return 0;
    fault_hit = call;
    return fault_error;
}

static void fault_set(int at, int error, int forever, const char *one)
{
    fault_calls = 0;
    fault_at = at;
    fault_error = error;
    fault_forever = forever;
    fault_one = one;
    fault_hit = NULL;
}

enum { COUNT = 60000 };
static uint32_t stamps[COUNT];
static const size_t shape[1] = {COUNT};

static dtrain_safetensors_source stamped(uint32_t stamp)
{
    dtrain_safetensors_source s;
    memset(&s, 0, sizeof s);
    s.name = "x";
    s.dtype = DTRAIN_U32;
    s.ndim = 1;
    s.shape = shape;
    s.data = stamps;
    for (size_t i = 0; i < COUNT; i++)
        stamps[i] = stamp;
    return s;
}

/* The stamp that all elements of a file have; -1 when it cannot be read, or they differ. */
static int64_t stamp_of(const char *path)
{
    static uint32_t out[COUNT];
    dtrain_safetensors *file = NULL;
    int64_t stamp = -1;
    if (dtrain_safetensors_open(&file, path, NULL) == DTRAIN_OK &&
        dtrain_safetensors_load(file, "x", out, COUNT, DTRAIN_U32) == DTRAIN_OK) {
        stamp = out[0];
        for (size_t i = 1; i < COUNT; i++)
            stamp = out[i] == out[0] ? stamp : -1;
    }
    dtrain_safetensors_close(file);
    return stamp;
}

static int descriptors(void)
{
    return files_in("/proc/self/fd");
}

static void make_place(const char *name, char directory[512], char path[600])
{
    snprintf(directory, 512, "%s", files_path(name));
    snprintf(path, 600, "%s/file", directory);
    CHECK_EQ(mkdir(directory, 0700), 0);
}

TEST(whichever_call_fails_the_old_file_stays)
{
    static const int errors[3] = {EIO, ENOSPC, EACCES};
    char directory[512], path[600];
    make_place("each", directory, path);
    for (int e = 0; e < 3; e++) {
        int calls = 0, in_place = 0, open_before = descriptors();
        for (int at = 1; at <= calls + 1; at++) {
            dtrain_safetensors_source old = stamped(1);
            CHECK_EQ(dtrain_safetensors_save(path, &old, 1, NULL), DTRAIN_OK);
            dtrain_safetensors_source renewed = stamped(2);
            fault_set(at, errors[e], 0, NULL);
            dtrain_status status = dtrain_safetensors_save(path, &renewed, 1, NULL);
            calls = fault_calls;
            const char *hit = fault_hit;
            fault_set(0, 0, 0, NULL);
            if (status == DTRAIN_OK) {
                CHECK(hit == NULL || strcmp(hit, "close") == 0); /* of the directory, which nothing depends on */
                CHECK_EQ(stamp_of(path), 2);
            } else if (strstr(dtrain_last_error(), "is in place") != NULL) {
                in_place++;
                CHECK_EQ(stamp_of(path), 2);
            } else {
                CHECK_EQ(status, DTRAIN_ERR_IO);
                CHECK_CONTAINS(dtrain_last_error(), strerror(errors[e]));
                CHECK_EQ(stamp_of(path), 1);
            }
            CHECK_EQ(files_in(directory), 1);
        }
        /* open the directory, look at the place, open, write header and data, sync, close, rename, sync the directory,
         * close it */
        CHECK_EQ(calls, 10);
        CHECK_EQ(in_place, 1);
        CHECK_EQ(descriptors(), open_before);
    }
}

TEST(a_call_that_a_signal_cut_short_is_made_again)
{
    static const char *const calls[4] = {"open", "write", "sync", "read"};
    char directory[512], path[600];
    make_place("again", directory, path);
    for (int k = 0; k < 4; k++)
        for (int at = 1; at <= 3; at++) {
            dtrain_safetensors_source s = stamped((uint32_t)(10 * k + at));
            fault_set(at, EINTR, 0, calls[k]);
            CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
            if (k == 3)
                CHECK_EQ(stamp_of(path), 10 * k + at);
            fault_set(0, 0, 0, NULL);
            CHECK_EQ(stamp_of(path), 10 * k + at);
        }
}

TEST(short_writes_and_reads_add_up)
{
    char directory[512], path[600];
    make_place("short", directory, path);
    dtrain_safetensors_source s = stamped(77);
    fault_limit = 1009;
    CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
    fault_limit = 503;
    CHECK_EQ(stamp_of(path), 77);
    fault_limit = (size_t)-1;
    CHECK_EQ(stamp_of(path), 77);
}

TEST(whichever_call_of_a_reader_fails_there_is_an_error)
{
    char directory[512], path[600];
    static uint32_t out[COUNT];
    make_place("reader", directory, path);
    dtrain_safetensors_source s = stamped(5);
    CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
    for (int map = 0; map < 2; map++) {
        int calls = 0, open_before = descriptors();
        for (int at = 1; at <= calls + 1; at++) {
            dtrain_safetensors_desc desc = {map, NULL};
            dtrain_safetensors *file = NULL;
            fault_set(at, EIO, 0, NULL);
            dtrain_status status = dtrain_safetensors_open(&file, path, &desc);
            CHECK((status == DTRAIN_OK) == (file != NULL));
            if (status == DTRAIN_OK)
                status = dtrain_safetensors_load(file, "x", out, COUNT, DTRAIN_U32);
            calls = fault_calls;
            CHECK_EQ(status, fault_hit == NULL               ? DTRAIN_OK
                             : strcmp(fault_hit, "map") == 0 ? DTRAIN_ERR_UNSUPPORTED
                                                             : DTRAIN_ERR_IO);
            fault_set(0, 0, 0, NULL);
            dtrain_safetensors_close(file);
        }
        CHECK_EQ(calls, 5 + map); /* open, stat, two reads of the header, (map,) one of the data */
        CHECK_EQ(descriptors(), open_before);
    }
}

TEST(a_model_is_there_whole_or_not_at_all)
{
    char directory[512], path[600];
    make_place("models", directory, path);
    int calls = 0, in_place = 0, open_before = descriptors();
    for (int at = 1; at <= calls + 1; at++) {
        dtrain_safetensors_source s[3];
        s[0] = s[1] = s[2] = stamped(9);
        s[0].name = "a", s[1].name = "b", s[2].name = "c";
        s[1].dtype = DTRAIN_I32, s[2].dtype = DTRAIN_F32; /* or they would be tied */
        fault_set(at, ENOSPC, 0, NULL);
        dtrain_status status = dtrain_safetensors_model_save(path, s, 3, 300000, NULL);
        calls = fault_calls;
        fault_set(0, 0, 0, NULL);
        int there = access(path, F_OK) == 0;
        in_place += there && status != DTRAIN_OK;
        CHECK(there || status == DTRAIN_ERR_IO);
        CHECK_EQ(files_in(directory), there);
        if (there) {
            dtrain_safetensors_model *model = NULL;
            CHECK_EQ(dtrain_safetensors_model_open(&model, path, NULL), DTRAIN_OK);
            CHECK_EQ(dtrain_safetensors_model_count(model), 3);
            dtrain_safetensors_model_close(model);
            files_remove(path);
        }
    }
    CHECK(calls > 25);
    CHECK_EQ(in_place, 1);
    CHECK_EQ(descriptors(), open_before);
}

TEST(a_disk_that_stays_full_leaves_the_old_file)
{
    char directory[512], path[600];
    make_place("full", directory, path);
    dtrain_safetensors_source old = stamped(1);
    CHECK_EQ(dtrain_safetensors_save(path, &old, 1, NULL), DTRAIN_OK);
    for (int at = 1; at <= 2; at++) {
        dtrain_safetensors_source renewed = stamped(2);
        fault_set(at, ENOSPC, 1, "write");
        CHECK_EQ(dtrain_safetensors_save(path, &renewed, 1, NULL), DTRAIN_ERR_IO);
        fault_set(0, 0, 0, NULL);
        CHECK_CONTAINS(dtrain_last_error(), "what was there before is unchanged");
        CHECK_EQ(stamp_of(path), 1);
        CHECK_EQ(files_in(directory), 1);
    }
}

#ifdef __linux__
enum { SKIP = 77 };

static int put_line(const char *path, const char *line)
{
    FILE *file = fopen(path, "w");
    int bad = file == NULL || fputs(line, file) < 0;
    return (file == NULL || fclose(file) == 0) && !bad;
}

/* Gives this process mounts of its own: root may have them, others in a world where they are root. */
static int own_mounts(void)
{
    char users[32], groups[32];
    snprintf(users, sizeof users, "0 %u 1", (unsigned)getuid());
    snprintf(groups, sizeof groups, "0 %u 1", (unsigned)getgid());
    if (syscall(SYS_unshare, 0x00020000) != 0 && /* CLONE_NEWNS; with CLONE_NEWUSER: */
        (syscall(SYS_unshare, 0x10020000) != 0 || !put_line("/proc/self/uid_map", users) ||
         !put_line("/proc/self/setgroups", "deny") || !put_line("/proc/self/gid_map", groups)))
        return 0;
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* A file system of 400 KiB, which one file of 240,000 bytes fits into and two do not, seen by this process alone. */
static int save_to_a_small_disk(const char *directory, const char *path)
{
    if (!own_mounts())
        return SKIP;
    if (mount("none", directory, "tmpfs", 0, "size=400k") != 0)
        return SKIP;
    dtrain_safetensors_source s = stamped(1);
    if (dtrain_safetensors_save(path, &s, 1, NULL) != DTRAIN_OK || stamp_of(path) != 1)
        return 2;
    s = stamped(2);
    if (dtrain_safetensors_save(path, &s, 1, NULL) != DTRAIN_ERR_IO ||
        strstr(dtrain_last_error(), strerror(ENOSPC)) == NULL)
        return 3;
    if (stamp_of(path) != 1 || files_in(directory) != 1)
        return 4;
    unlink(path); /* and there is room again */
    return dtrain_safetensors_save(path, &s, 1, NULL) == DTRAIN_OK && stamp_of(path) == 2 ? 0 : 5;
}

TEST(a_small_disk_fills_and_empties)
{
    char directory[512], path[600];
    int end;
    make_place("small", directory, path);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(save_to_a_small_disk(directory, path));
    CHECK_EQ(waitpid(pid, &end, 0), pid);
    CHECK(WIFEXITED(end));
    if (WEXITSTATUS(end) == SKIP)
        printf("skipped: this process may mount nothing\n");
    else
        CHECK_EQ(WEXITSTATUS(end), 0);
}
#endif

/* The system's own limit, which comes with a signal whose default ends the process. */
static int save_beyond_the_limit(const char *path)
{
    struct rlimit limit = {100000, 100000};
    dtrain_safetensors_source s = stamped(2);
    sigset_t pending;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        return 2;
    if (dtrain_safetensors_save(path, &s, 1, NULL) != DTRAIN_ERR_IO ||
        strstr(dtrain_last_error(), strerror(EFBIG)) == NULL)
        return 3;
    return sigpending(&pending) != 0 || sigismember(&pending, SIGXFSZ) ? 4 : 0;
}

TEST(a_file_size_limit_is_an_error_and_no_signal)
{
    char directory[512], path[600];
    int end;
    make_place("limit", directory, path);
    dtrain_safetensors_source old = stamped(1);
    CHECK_EQ(dtrain_safetensors_save(path, &old, 1, NULL), DTRAIN_OK);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(save_beyond_the_limit(path));
    CHECK_EQ(waitpid(pid, &end, 0), pid);
    CHECK(WIFEXITED(end) && WEXITSTATUS(end) == 0);
    CHECK_EQ(stamp_of(path), 1);
    CHECK_EQ(files_in(directory), 1);
}

/* Saves one stamp after the other until it is killed; tells of each before and after. */
static void save_for_ever(const char *path, int to_parent, uint32_t from, int no_sync)
{
    dtrain_safetensors_write_desc desc = {NULL, 0, no_sync, NULL};
    for (uint32_t stamp = from;; stamp++) {
        dtrain_safetensors_source s = stamped(stamp);
        if (dtrain_safetensors_save(path, &s, 1, &desc) != DTRAIN_OK ||
            write(to_parent, &stamp, sizeof stamp) != sizeof stamp)
            _exit(1);
    }
}

TEST(a_writer_that_is_killed_leaves_the_last_file_or_the_next)
{
    const char *rounds = getenv("KILL_ROUNDS");
    char directory[512], path[600];
    uint32_t last = 1;
    make_place("killed", directory, path);
    dtrain_safetensors_source s = stamped(last);
    CHECK_EQ(dtrain_safetensors_save(path, &s, 1, NULL), DTRAIN_OK);
    int renewed = 0;
    for (int round = 0; round < (rounds != NULL ? atoi(rounds) : 60); round++) {
        int ends[2], end;
        uint32_t told = last;
        CHECK_EQ(pipe(ends), 0);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0)
            save_for_ever(path, ends[1], last + 1, round % 2);
        close(ends[1]);
        usleep(2000 + (unsigned)(dtrain_random_u64(7, (uint64_t)round) % 20000));
        kill(pid, SIGKILL);
        waitpid(pid, &end, 0);
        CHECK(WIFSIGNALED(end));
        while (read(ends[0], &told, sizeof told) == sizeof told)
            continue;
        close(ends[0]);
        int64_t found = stamp_of(path);
        if (found != told && found != (int64_t)told + 1)
            TEST_FAIL("round %d: stamp %lld, told %u", round, (long long)found, told);
        renewed += found > (int64_t)last;
        last = found > 0 ? (uint32_t)found : told;
    }
    CHECK(renewed > 10); /* or nothing was tested */
}

/* An allocator whose nth new block is refused. */
typedef struct miser {
    int count, refused;
} miser;

static void *resize_or_refuse(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    miser *m = (miser *)user;
    void *block = NULL;
    if (new_bytes > 0 && ++m->count == m->refused)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align < sizeof block ? sizeof block : align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

TEST(a_good_file_that_there_is_no_memory_for_is_not_called_corrupt)
{
    static const char header[] = "{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]},"
                                 "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    unsigned char bytes[8 + sizeof header - 1 + 8] = {sizeof header - 1};
    dtrain_status status = DTRAIN_ERR_MEMORY;
    memcpy(bytes + 8, header, sizeof header - 1);
    for (int nth = 1; nth < 50 && status != DTRAIN_OK; nth++) {
        miser m = {0, nth};
        dtrain_allocator heap = {resize_or_refuse, &m, 0, 0};
        dtrain_safetensors_desc desc = {0, &heap};
        dtrain_safetensors *file = NULL;
        status = dtrain_safetensors_open_memory(&file, bytes, sizeof bytes, &desc);
        CHECK_EQ(status, nth > m.count ? DTRAIN_OK : DTRAIN_ERR_MEMORY);
        dtrain_safetensors_close(file);
        CHECK_EQ(heap.bytes, 0);
    }
    CHECK_EQ(status, DTRAIN_OK);
}
