/* A small harness: TEST(name) { CHECK(...); } per fact, main is here. Checks may run on any thread. Arguments name the
 * tests to run; none runs all. */
#ifndef DTRAIN_TEST_H
#define DTRAIN_TEST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_case {
    const char *name;
    void (*body)(void);
    struct test_case *next;
} test_case;

static test_case *test_first, **test_last = &test_first;
/* Checks that do not hold; of these, those that a deadline ended, and those whose other rank had gone. A test that fails
 * by a deadline, and else by ranks that had gone, may have had too little of the machine: run.sh runs it once more. */
static int test_failures, test_late, test_left;
/* What a process of a test ends with that failed so; two statuses, for tests without dtrain.h. */
enum { TEST_ENDS_LATE = 75, TEST_ENDS_LEFT, TEST_TIMEOUT = 34, TEST_PEER_LOST };

/* How many times longer than alone things may take, which run.sh says. */
static inline int test_slow(void)
{
    const char *slow = getenv("TEST_SLOW");
    return slow != NULL && atoi(slow) > 1 ? atoi(slow) : 1;
}

/* A deadline that no test awaits. */
static inline int test_ms(int alone)
{
    return alone * test_slow();
}

#define TEST(name) \
    static void test_body_##name(void); \
    static test_case test_case_##name = {#name, test_body_##name, NULL}; \
    __attribute__((constructor)) static void test_add_##name(void) \
    { \
        *test_last = &test_case_##name; \
        test_last = &test_case_##name.next; \
    } \
    static void test_body_##name(void)

/* Part `part` of `parts` of count elements, as the manual of dtrain_shard says. */
static inline size_t cut_of(size_t count, int parts, int part, size_t *begin)
{
    size_t all = (size_t)parts, at = (size_t)part, longer = count % all;
    if (begin != NULL)
        *begin = at * (count / all) + (at < longer ? at : longer);
    return count / all + (at < longer);
}

#define TEST_FAIL(...) \
    do { \
        __atomic_add_fetch(&test_failures, 1, __ATOMIC_SEQ_CST); \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr); \
    } while (0)

/* Why a number is wrong: a status, or the end of a process, that says a deadline. */
static inline void test_judge(long long got, const char *what, const char *expected)
{
    int is_end = strncmp(what, "end_of(", 7) == 0, is_status = strncmp(expected, "DTRAIN_", 7) == 0;
    if ((is_end && (got == -1 || got == TEST_ENDS_LATE)) || (is_status && got == TEST_TIMEOUT))
        __atomic_add_fetch(&test_late, 1, __ATOMIC_SEQ_CST);
    else if ((is_end && got == TEST_ENDS_LEFT) || (is_status && got == TEST_PEER_LOST))
        __atomic_add_fetch(&test_left, 1, __ATOMIC_SEQ_CST);
}

/* What a process of a test ends with, or 0 where all its checks held. */
static inline int test_end(void)
{
    return test_failures == 0                      ? 0
           : test_failures > test_late + test_left ? 1
           : test_late > 0                         ? TEST_ENDS_LATE
                                                   : TEST_ENDS_LEFT;
}

#define CHECK(fact) \
    do { \
        if (!(fact)) \
            TEST_FAIL("%s is false", #fact); \
    } while (0)

#define CHECK_EQ(got, expected) \
    do { \
        long long test_got_ = (long long)(got), test_expected_ = (long long)(expected); \
        if (test_got_ != test_expected_) { \
            test_judge(test_got_, #got, #expected); \
            TEST_FAIL("%s is %lld, expected %lld", #got, test_got_, test_expected_); \
        } \
    } while (0)

#define CHECK_WITHIN(took, seconds) \
    do { \
        double test_took_ = (took), test_most_ = (seconds) * test_slow(); \
        if (test_took_ > test_most_) { \
            __atomic_add_fetch(&test_late, 1, __ATOMIC_SEQ_CST); \
            TEST_FAIL("%s is %g seconds, expected at most %g", #took, test_took_, test_most_); \
        } \
    } while (0)

#define CHECK_CONTAINS(text, part) \
    do { \
        const char *test_text_ = (text); \
        if (strstr(test_text_, (part)) == NULL) \
            TEST_FAIL("\"%s\" does not contain \"%s\"", test_text_, (part)); \
    } while (0)

/* What a counting allocator of a test's passes on to. */
static inline void *test_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    if (new_bytes > 0) {
        if (posix_memalign(&block, align < sizeof block ? sizeof block : align, new_bytes) != 0)
            return NULL;
        if (pointer != NULL)
            memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    }
    free(pointer);
    return block;
}

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Turns numbers of `width` bytes that stand as little-endian bytes into those of memory, or back. */
static inline void little_endian(void *numbers, size_t count, size_t width)
{
    const uint16_t one = 1;
    unsigned char low, *at = (unsigned char *)numbers;
    memcpy(&low, &one, 1);
    for (size_t i = 0; i < count && low == 0; i++, at += width)
        for (size_t j = 0; j < width / 2; j++) {
            unsigned char kept = at[j];
            at[j] = at[width - 1 - j];
            at[width - 1 - j] = kept;
        }
}

static int test_wanted(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return 1;
    return argc < 2;
}

static int test_run(int argc, char **argv)
{
    int passed = 0, failed = 0, late = 0;
    for (test_case *test = test_first; test != NULL; test = test->next) {
        if (!test_wanted(argc, argv, test->name))
            continue;
        test_failures = test_late = test_left = 0;
        test->body();
        int bad = test_failures != 0;
        printf("%s %s\n", bad ? "FAIL" : "ok", test->name);
        fflush(stdout);
        failed += bad;
        passed += !bad;
        late += test_end() == TEST_ENDS_LATE;
    }
    if (late > 0)
        printf("%d by a deadline\n", late);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0;
}

int main(int argc, char **argv)
{
    return test_run(argc, argv);
}

#endif
