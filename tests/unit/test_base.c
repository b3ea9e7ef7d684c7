/* The base floor: status and log, allocator, random numbers, SHA-256, names. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "test.h"
#include <dirent.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>

TEST(a_status_has_its_name)
{
    CHECK(strcmp(dtrain_status_name(DTRAIN_OK), "OK") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_INVALID), "ERR_INVALID") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_MEMORY), "ERR_MEMORY") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_IO), "ERR_IO") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_TIMEOUT), "ERR_TIMEOUT") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_PEER_LOST), "ERR_PEER_LOST") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_MISMATCH), "ERR_MISMATCH") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_CORRUPT), "ERR_CORRUPT") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_UNSUPPORTED), "ERR_UNSUPPORTED") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_DENIED), "ERR_DENIED") == 0);
    CHECK(strcmp(dtrain_status_name(DTRAIN_ERR_ABORTED), "ERR_ABORTED") == 0);
    CHECK(dtrain_status_name((dtrain_status)99) != NULL);
}

static void *last_error_length(void *length)
{
    *(size_t *)length = strlen(dtrain_last_error());
    return NULL;
}

TEST(a_thread_without_errors_has_an_empty_last_error)
{
    pthread_t thread;
    size_t length = 99;
    CHECK_EQ(dtrain__fail(NULL, DTRAIN_ERR_IO, "disk %d is gone", 7), DTRAIN_ERR_IO);
    CHECK(strcmp(dtrain_last_error(), "disk 7 is gone") == 0);
    CHECK_EQ(pthread_create(&thread, NULL, last_error_length, &length), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(length, 0);
}

TEST(a_text_that_is_passed_on_again_and_again_keeps_its_cause)
{
    dtrain__error error;
    dtrain__fail(&error, DTRAIN_ERR_IO, "gather #1 on rank 0: the device is on fire: call somebody");
    CHECK(dtrain__status_cause(&error) == error.text);
    for (int hop = 1; hop < 40; hop++) {
        dtrain__error said = error;
        dtrain__fail(&error, DTRAIN_ERR_IO, "gather #%d of a vector of 70001 numbers on rank %d: %s", hop, hop,
                     dtrain__status_cause(&said));
        CHECK_CONTAINS(error.text, "the device is on fire: call somebody");
    }
}

/* A worker that notes its jobs, and stays in the second until it is let go. */
typedef struct noting {
    dtrain__worker worker;
    dtrain__worker_job jobs[5];
    int order[5], count, turns;
    uint32_t held;
    pthread_t thread;
} noting;

static void note_job(void *owner, dtrain__worker_job *job)
{
    noting *n = (noting *)owner;
    while (job == &n->jobs[1] && __atomic_load_n(&n->held, __ATOMIC_SEQ_CST))
        sched_yield();
    n->thread = pthread_self();
    n->order[n->count++] = (int)(job - n->jobs);
}

TEST(a_worker_performs_jobs_in_the_order_in_which_they_are_posted)
{
    static const int posted[5] = {3, 1, 4, 0, 2};
    for (int threaded = 0; threaded < 2; threaded++) {
        noting n;
        memset(&n, 0, sizeof n);
        n.worker.owner = &n;
        n.worker.perform = note_job;
        if (threaded)
            CHECK_EQ(dtrain__worker_start(&n.worker), 0);
        for (int i = 0; i < 5; i++)
            dtrain__worker_post(&n.worker, &n.jobs[posted[i]]);
        CHECK_EQ(n.jobs[4].number, 3);
        CHECK(dtrain__worker_wait(&n.worker, 5, INT64_MAX));
        CHECK(dtrain__worker_is_done(&n.worker, 5) && !dtrain__worker_is_done(&n.worker, 6));
        CHECK(memcmp(n.order, posted, sizeof posted) == 0);
        CHECK_EQ(pthread_equal(n.thread, pthread_self()) != 0, !threaded);
        dtrain__worker_end(&n.worker);
    }
}

TEST(the_end_of_a_worker_leaves_what_it_has_not_begun)
{
    noting n;
    memset(&n, 0, sizeof n);
    n.worker.owner = &n;
    n.worker.perform = note_job;
    n.held = 1;
    CHECK_EQ(dtrain__worker_start(&n.worker), 0);
    for (int i = 0; i < 3; i++)
        dtrain__worker_post(&n.worker, &n.jobs[i]);
    CHECK(dtrain__worker_wait(&n.worker, 1, INT64_MAX));
    CHECK(!dtrain__worker_wait(&n.worker, 2, dtrain__os_now_ns()));
    dtrain__worker_stop(&n.worker);
    __atomic_store_n(&n.held, 0, __ATOMIC_SEQ_CST);
    dtrain__worker_end(&n.worker);
    CHECK(n.count >= 1 && n.count <= 2);
    CHECK(!dtrain__worker_is_done(&n.worker, 3));
    dtrain__worker_end(&n.worker); /* it has no thread left */
}

static int64_t count_turns(void *owner)
{
    __atomic_add_fetch(&((noting *)owner)->turns, 1, __ATOMIC_SEQ_CST);
    return INT64_MAX;
}

TEST(a_worker_that_looks_for_work_does_so_when_it_is_called)
{
    noting n;
    memset(&n, 0, sizeof n);
    n.worker.owner = &n;
    n.worker.turn = count_turns;
    CHECK_EQ(dtrain__worker_start(&n.worker), 0);
    for (int turns = 1; turns <= 3; turns++) {
        while (__atomic_load_n(&n.turns, __ATOMIC_SEQ_CST) < turns)
            sched_yield();
        dtrain__worker_call(&n.worker);
    }
    dtrain__worker_end(&n.worker);
    CHECK(n.turns <= 4);
}

TEST(the_end_of_a_worker_in_a_forked_child_waits_for_no_thread)
{
    noting n;
    int state;
    memset(&n, 0, sizeof n);
    n.worker.owner = &n;
    n.worker.turn = count_turns;
    CHECK_EQ(dtrain__worker_start(&n.worker), 0);
    pid_t child = fork();
    if (child == 0) {
        dtrain__worker_end(&n.worker);
        _exit(dtrain__worker_runs(&n.worker));
    }
    CHECK_EQ(waitpid(child, &state, 0), child);
    CHECK(WIFEXITED(state) && WEXITSTATUS(state) == 0);
    dtrain__worker_end(&n.worker);
}

static int logged;
static char logged_text[100];

static void record_log(void *user, dtrain_log_level level, const char *text)
{
    *(dtrain_log_level *)user = level;
    snprintf(logged_text, sizeof logged_text, "%s", text);
    logged++;
}

TEST(the_log_callback_gets_level_and_text_and_null_silences)
{
    dtrain_log_level level = DTRAIN_LOG_ERROR;
    dtrain_set_log(record_log, &level);
    dtrain__log(DTRAIN_LOG_INFO, "rank %d of %d", 2, 3);
    CHECK_EQ(logged, 1);
    CHECK_EQ(level, DTRAIN_LOG_INFO);
    CHECK(strcmp(logged_text, "rank 2 of 3") == 0);
    dtrain_set_log(NULL, NULL);
    dtrain__log(DTRAIN_LOG_ERROR, "nobody hears this");
    CHECK_EQ(logged, 1);
    dtrain_set_log(dtrain__log_stderr, NULL);
}

typedef struct heap {
    int left; /* allocations until there is no more; negative: no limit */
    int calls;
    size_t bytes;
} heap;

static void *heap_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    heap *h = (heap *)user;
    void *block = NULL;
    h->calls++;
    if (new_bytes > 0 && h->left == 0)
        return NULL;
    h->left -= new_bytes > 0 && h->left > 0;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL && block != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    h->bytes += new_bytes - old_bytes;
    return block;
}

TEST(an_allocator_counts_what_is_in_use_and_the_peak)
{
    heap h = {-1, 0, 0};
    dtrain_allocator allocator = {heap_resize, &h, 0, 0};
    char *a = (char *)dtrain__alloc(&allocator, 100);
    void *b = dtrain__alloc(&allocator, 50);
    CHECK_EQ(allocator.bytes, 150);
    CHECK_EQ(h.bytes, 150 + 2 * 64); /* each with the line before it, which holds its size */
    CHECK_EQ(a[0] | a[99], 0);
    CHECK_EQ((uintptr_t)a % 64, 0);
    dtrain__free(&allocator, b);
    CHECK_EQ(allocator.bytes, 100);
    a[99] = 5;
    a = (char *)dtrain__resize(&allocator, a, 120);
    CHECK_EQ(a[99], 5);
    CHECK_EQ(allocator.bytes, 120);
    dtrain__free(&allocator, a);
    CHECK_EQ(allocator.bytes, 0);
    CHECK_EQ(allocator.peak_bytes, 150);
    CHECK_EQ(h.bytes, 0);
    CHECK_EQ(h.calls, 5);
}

TEST(memory_that_runs_out_at_any_point_is_an_error_and_leaks_nothing)
{
    int left, created = 0;
    for (left = 0; left < 200 && !created; left++) {
        heap h = {left, 0, 0};
        dtrain_allocator allocator = {heap_resize, &h, 0, 0};
        dtrain_comm *comms[3] = {NULL, NULL, NULL};
        dtrain_comm_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.allocator = &allocator;
        dtrain_status status = dtrain_threads_create(comms, 3, &desc);
        created = status == DTRAIN_OK;
        CHECK(created || status == DTRAIN_ERR_MEMORY);
        CHECK(created || strlen(dtrain_last_error()) > 0);
        for (int r = 0; created && r < 3; r++)
            dtrain_comm_destroy(comms[r]);
        CHECK_EQ(h.bytes, 0);
        CHECK_EQ(allocator.bytes, 0);
    }
    CHECK(created);
    CHECK(left > 1);
}

TEST(memory_that_processes_share_cannot_be_made_shorter)
{
    int fd;
    char path[64], name[64] = "";
    if (!dtrain__os_shows_files())
        return;
    unsigned char *memory = (unsigned char *)dtrain__os_share(8192, &fd);
    CHECK(memory != NULL);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 || strstr(name, "memfd:") == NULL) /* a file has no such seals */
        return;
    int other = open(path, O_RDWR | O_CLOEXEC);
    CHECK(other >= 0 && ftruncate(other, 0) != 0 && ftruncate(other, 4096) != 0);
    memory[8191] = 1; /* SIGBUS where it worked */
    close(other);
    close(fd);
    dtrain__os_unreserve(memory, 8192);
}

static int has_text(const char *path, const char *expected)
{
    char text[64] = "";
    FILE *file = fopen(path, "r");
    size_t bytes = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL)
        fclose(file);
    return bytes == strlen(expected) && memcmp(text, expected, bytes) == 0;
}

/* The entries of a directory that are no links. */
static int plain_entries(const char *path)
{
    int count = 0;
    struct dirent *entry;
    struct stat about;
    DIR *list = opendir(path);
    while (list != NULL && (entry = readdir(list)) != NULL)
        count += fstatat(dirfd(list), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(about.st_mode);
    if (list != NULL)
        closedir(list);
    return count;
}

TEST(links_planted_beside_a_file_that_is_replaced_are_not_followed)
{
    char directory[] = "/tmp/test_base-XXXXXX", path[64], victim[64], name[128], beside[160];
    struct stat about;
    mode_t mask = umask(027);
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/trace", directory);
    snprintf(victim, sizeof victim, "%s/victim", directory);
    CHECK_EQ(dtrain__os_replace_file(victim, "mine", 4), 0);
    for (int i = 0; i < 100; i++) { /* names of this process and of those that come after it */
        static const char *const forms[] = {"%s.%ld.new", "%s.%ld.part", "%s.%ld-0-0.part", "%s.%ld.tmp"};
        snprintf(name, sizeof name, forms[i % 4], path, (long)getpid() + i / 4);
        CHECK_EQ(symlink(victim, name), 0);
    }
    CHECK_EQ(dtrain__os_replace_file(path, "old", 3), 0);
    CHECK_EQ(dtrain__os_replace_file(path, "new", 3), 0);
    CHECK(has_text(path, "new"));
    CHECK(has_text(victim, "mine"));
    CHECK(stat(path, &about) == 0 && (about.st_mode & 0777) == 0640);
    CHECK_EQ(plain_entries(directory), 2);
    unlink(path); /* a link at the place itself is replaced */
    CHECK_EQ(symlink(victim, path), 0);
    CHECK_EQ(dtrain__os_replace_file(path, "newer", 5), 0);
    CHECK(has_text(path, "newer") && has_text(victim, "mine"));
    unlink(path);
    CHECK_EQ(mkdir(path, 0700), 0);
    CHECK(dtrain__os_replace_file(path, "none", 4) != 0);
    CHECK_EQ(plain_entries(directory), 1); /* what could not take its place is removed */
    for (int i = 0; i < 8; i++) {          /* no name comes twice */
        static char before[160];
        CHECK(dtrain__os_name_beside(beside, sizeof beside, path));
        CHECK(strcmp(beside, before) != 0);
        strcpy(before, beside);
    }
    CHECK(!dtrain__os_name_beside(beside, strlen(path) + 22, path));
    CHECK(dtrain__os_name_beside(beside, strlen(path) + 23, path));
    snprintf(name, sizeof name, "rm -r %s", directory);
    CHECK_EQ(system(name), 0);
    umask(mask);
}

TEST(philox_gives_the_published_vectors)
{
    static const uint32_t counter[3][4] = {{0, 0, 0, 0},
                                           {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},
                                           {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}};
    static const uint32_t key[3][2] = {{0, 0}, {0xffffffffu, 0xffffffffu}, {0xa4093822u, 0x299f31d0u}};
    static const uint32_t expected[3][4] = {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
                                            {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu},
                                            {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}};
    uint32_t out[4], same[4];
    for (int i = 0; i < 3; i++) {
        dtrain__random_philox(counter[i], key[i], out);
        CHECK(memcmp(out, expected[i], sizeof out) == 0);
    }
    dtrain__random_u32x4(0, 0, out);
    CHECK(memcmp(out, expected[0], sizeof out) == 0);
    static const uint32_t split_counter[4] = {0x22222222u, 0x11111111u, 0, 0};
    static const uint32_t split_key[2] = {0x44444444u, 0x33333333u};
    dtrain__random_philox(split_counter, split_key, same);
    dtrain__random_u32x4(0x3333333344444444u, 0x1111111122222222u, out);
    CHECK(memcmp(out, same, sizeof out) == 0);
    CHECK(dtrain_random_u64(0, 0) == 0xe169c58d6627e8d5u);
}

TEST(uniform_has_the_moments_of_the_uniform_distribution)
{
    const int count = 1000000;
    double sum = 0, squares = 0;
    for (int i = 0; i < count; i++) {
        float u = dtrain_random_uniform(42, (uint64_t)i);
        CHECK(u >= 0.0f && u < 1.0f);
        CHECK((double)u * 16777216 == floor((double)u * 16777216));
        sum += (double)u;
        squares += (double)u * (double)u;
    }
    CHECK(fabs(sum / count - 0.5) < 0.0015);
    CHECK(fabs(squares / count - 1.0 / 3) < 0.0015);
}

TEST(normal_has_the_moments_and_tails_of_the_normal_distribution)
{
    const int count = 4000000;
    double moment[4] = {0, 0, 0, 0};
    int beyond[6] = {0, 0, 0, 0, 0, 0};
    for (int i = 0; i < count; i++) {
        double z = (double)dtrain_random_normal(7, (uint64_t)i), power = 1;
        for (int m = 0; m < 4; m++)
            moment[m] += power *= z;
        for (int sigma = 0; sigma < 6; sigma++)
            beyond[sigma] += fabs(z) > sigma;
    }
    CHECK(fabs(moment[0] / count) < 0.0025);
    CHECK(fabs(moment[1] / count - 1) < 0.0036);
    CHECK(fabs(moment[2] / count) < 0.01);
    CHECK(fabs(moment[3] / count - 3) < 0.025);
    for (int sigma = 1; sigma < 6; sigma++) {
        double expected = count * erfc(sigma / sqrt(2.0));
        CHECK(fabs(beyond[sigma] - expected) < 5 * sqrt(expected) + 2);
    }
}

TEST(normal_agrees_with_the_same_formula_in_libm)
{
    for (uint64_t i = 0; i < 200000; i++) {
        uint32_t word[4];
        dtrain__random_u32x4(11, i, word);
        double u = ((double)word[1] * 4294967296.0 + word[0] + 1) / 18446744073709551616.0;
        double z = sqrt(-2 * log(u)) * sin(acos(-1.0) / 2 * (word[2] + 0.5) / 4294967296.0);
        CHECK(fabs((word[3] & 1 ? -z : z) - (double)dtrain_random_normal(11, i)) < 2e-7 * (1 + z));
    }
    /* 64 ln 2 - ln 47: the far tail; ln 2 */
    const double unit = 144115188075855872.0;
    CHECK(fabs((double)dtrain__random_minus_log(47) / unit - (44.3614195558364998 - log(47.0))) < 1e-14);
    CHECK(fabs((double)dtrain__random_minus_log((uint64_t)1 << 63) / unit - 0.69314718055994531) < 1e-15);
}

TEST(normal_has_the_same_bits_everywhere)
{
    uint64_t hash = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        float z = dtrain_random_normal(9, i);
        uint32_t bits;
        memcpy(&bits, &z, sizeof bits);
        hash = hash * 31 + bits;
    }
    CHECK(hash == 0x68b2d18f28aeffceu);
}

static int digest_is(const unsigned char digest[32], const char *hex)
{
    char text[65];
    for (int i = 0; i < 32; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return strcmp(text, hex) == 0;
}

TEST(sha256_gives_the_digests_of_fips_180)
{
    static const char fips56[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    unsigned char digest[32];
    dtrain_sha256(NULL, 0, digest);
    CHECK(digest_is(digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
    dtrain_sha256("abc", 3, digest);
    CHECK(digest_is(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    dtrain_sha256(fips56, 56, digest);
    CHECK(digest_is(digest, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
    char *million = (char *)malloc(1000000);
    memset(million, 'a', 1000000);
    dtrain_sha256(million, 1000000, digest);
    CHECK(digest_is(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
    free(million);
}

TEST(sha256_in_odd_pieces_is_sha256_in_one)
{
    unsigned char data[600], whole[32], pieces[32];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 7 % 251);
    for (size_t length = 0; length <= sizeof data; length++) {
        dtrain__sha256 sha;
        size_t at = 0, step = length % 71 + 1;
        dtrain_sha256(data, length, whole);
        for (dtrain__sha256_start(&sha); at < length; at += step, step = step * 5 % 131 + 1) {
            if (step > length - at)
                step = length - at;
            dtrain__sha256_add(&sha, data + at, step);
            if (step == length - at)
                break;
        }
        dtrain__sha256_finish(&sha, pieces);
        CHECK(memcmp(whole, pieces, sizeof whole) == 0);
    }
}

/* SipHash-1-3 of the bytes 0, 1, 2 and so on under the key of the bytes 0 to 15. */
TEST(names_are_hashed_by_siphash_1_3)
{
    static const struct {
        size_t length;
        uint64_t hash;
    } cases[] = {{0, 0xabac0158050fc4dcu}, {1, 0xc9f49bf37d57ca93u},  {7, 0xd3927d989bb11140u},
                 {8, 0x369095118d299a8eu}, {15, 0xd320d86d2a519956u}, {63, 0x9d199062b7bbb3a8u}};
    const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    char text[64];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)i;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_EQ(dtrain__names_hash(key, text, cases[i].length), cases[i].hash);
}

/* Enough of them for a table of many bins. */
TEST(names_are_found_and_the_first_that_comes_twice_is_told)
{
    enum { COUNT = 200000 };
    static const size_t copies[][3] = {/* of two names: where, the first twice */
                                       {199999, 3, 199999},
                                       {150000, 149999, 150000},
                                       {70001, 70000, 70001},
                                       {70002, 5, 70001},
                                       {1, 0, 1}};
    static char texts[COUNT][8];
    static dtrain__names_text list[COUNT];
    dtrain_allocator plain = {NULL, NULL, 0, 0};
    dtrain__names names;
    size_t index, twice = 0;
    for (size_t i = 0; i < COUNT; i++) {
        list[i].length = (size_t)snprintf(texts[i], sizeof texts[i], "%zu", i);
        list[i].text = texts[i];
    }
    CHECK(dtrain__names_build(&names, &plain, list, sizeof list[0], COUNT, &twice));
    CHECK_EQ(twice, COUNT);
    for (size_t i = 0; i < COUNT; i++)
        if (!dtrain__names_find(&names, texts[i], strlen(texts[i]), &index) || index != i)
            TEST_FAIL("%s is not found at its place", texts[i]);
    CHECK(!dtrain__names_find(&names, "200000", 6, &index) && !dtrain__names_find(&names, "", 0, &index));
    dtrain__names_free(&names, &plain);
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
        list[copies[i][0]] = list[copies[i][1]];
        CHECK(dtrain__names_build(&names, &plain, list, sizeof list[0], COUNT, &twice));
        CHECK_EQ(twice, copies[i][2]);
        dtrain__names_free(&names, &plain);
    }
    CHECK_EQ(plain.bytes, 0);
}

TEST(what_is_to_be_done_without_is_not_tried)
{
    static const char *const names[] = {"pkeys",    "avx512", "avx2",  "populate", "mremap", "pagemap",
                                        "memfd",    "unix",   "ipv6",  "mprotect", "shm",    "huge",
                                        "abstract", "bf16",   "futex", "proc"};
    dtrain__without("unix");
    uint32_t before = dtrain__os_without_mask;
    dtrain_log_level level = DTRAIN_LOG_ERROR;
    int told = logged;
    dtrain_set_log(record_log, &level);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        setenv("DTRAIN_WITHOUT", names[i], 1);
        dtrain__os_without_mask = 0; /* the environment is read again */
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
            CHECK_EQ(dtrain__without(names[k]), i == k);
    }
    CHECK_EQ(logged, told);
    setenv("DTRAIN_WITHOUT", "ipv6,quicksilver,memfd", 1);
    dtrain__os_without_mask = 0;
    CHECK(dtrain__without("memfd") && dtrain__without("ipv6") && !dtrain__without("avx2"));
    CHECK(logged == told + 1 && level == DTRAIN_LOG_WARN);
    CHECK_CONTAINS(logged_text, "\"quicksilver\"");
    setenv("DTRAIN_WITHOUT", "all", 1);
    dtrain__os_without_mask = 0;
    CHECK(dtrain__without("pkeys") && dtrain__without("ipv6"));
    dtrain_set_log(dtrain__log_stderr, NULL);
    unsetenv("DTRAIN_WITHOUT");
    dtrain__os_without_mask = before;
}

TEST(without_its_vector_units_a_processor_has_the_narrower_ones)
{
    dtrain__without("avx2");
    uint32_t before = dtrain__os_without_mask;
    setenv("DTRAIN_WITHOUT", "avx512", 1);
    dtrain__os_without_mask = 0;
    CHECK(dtrain__isa_widest() != DTRAIN__ISA_AVX512);
    setenv("DTRAIN_WITHOUT", "avx2", 1); /* a processor without it has no wider one */
    dtrain__os_without_mask = 0;
    CHECK(dtrain__isa_widest() < DTRAIN__ISA_AVX2);
    unsetenv("DTRAIN_WITHOUT");
    dtrain__os_without_mask = before;
}
