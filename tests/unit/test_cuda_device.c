/* Devices of dtrain_cuda.h: memory, copies, fills, events, streams, and what goes wrong with them. */
#include "cuda_device.h"

#include <pthread.h>
#ifdef DTRAIN_CUDA_EMULATE
#include <sys/wait.h>
#include <unistd.h>
#endif

static unsigned char *cuda_bytes(dtrain_device *device, dtrain_memory memory, size_t bytes)
{
    void *pointer = NULL;
    CHECK_OK(dtrain_device_alloc(device, memory, bytes, &pointer));
    return (unsigned char *)pointer;
}

static void cuda_free(dtrain_device *device, void *pointer)
{
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, pointer);
}

static int cuda_count(void)
{
    int count = 0;
    DTRAIN_IGNORE(dtrain_cuda_count(&count));
    return count;
}

TEST(devices_have_names_and_streams)
{
    dtrain_device *device = cuda_device(0), *wrong = NULL;
    dtrain_device stranger = {NULL, "stranger", NULL};
    dtrain_cuda_desc desc = {0, NULL};
    if (device == NULL)
        return;
    CHECK(cuda_count() >= 1);
    CHECK(strcmp(dtrain_device_name(device), "cuda:0") == 0);
    CHECK(dtrain_cuda_stream(device) != NULL);
    CHECK(dtrain_cuda_stream(NULL) == NULL);
    CHECK(dtrain_cuda_stream(&stranger) == NULL);
    desc.index = cuda_count();
    wrong = device;
    CHECK_ERROR(dtrain_cuda_create(&wrong, &desc), DTRAIN_ERR_INVALID, "index must be 0 to ");
    CHECK(wrong == NULL);
    desc.index = -1;
    CHECK_ERROR(dtrain_cuda_create(&wrong, &desc), DTRAIN_ERR_INVALID, "it is -1");
    CHECK_ERROR(dtrain_cuda_create(NULL, NULL), DTRAIN_ERR_INVALID, "device must be an address");
    CHECK_ERROR(dtrain_cuda_count(NULL), DTRAIN_ERR_INVALID, "count must be an address");
    dtrain_cuda_destroy(NULL);
    dtrain_cuda_destroy(device);
}

TEST(memory_is_aligned_to_256_bytes)
{
    static const size_t sizes[] = {1, 255, 256, 257, 4095, 4096, 4097, 1 << 20};
    dtrain_device *device = cuda_device(0);
    if (device == NULL)
        return;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *memory = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, sizes[i]);
        unsigned char *pinned = cuda_bytes(device, DTRAIN_MEMORY_PINNED, sizes[i]);
        CHECK(memory != NULL && (uintptr_t)memory % 256 == 0);
        CHECK(pinned != NULL && (uintptr_t)pinned % 256 == 0);
        memset(pinned, 1, sizes[i]);
        cuda_free(device, memory);
        dtrain_device_free(device, DTRAIN_MEMORY_PINNED, pinned);
    }
    CHECK(cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 0) == NULL);
    cuda_free(device, NULL);
    dtrain_cuda_destroy(device);
}

/* CPU, device, device, pinned, CPU; bytes beside the copied ones stay. */
static void copy_round(dtrain_device *device, unsigned char **on, unsigned char *pinned, size_t bytes, size_t from,
                       size_t to)
{
    unsigned char source[1200], back[1200];
    size_t wrong = 0;
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (unsigned char)(i * 7 + bytes), back[i] = 0x55;
    memset(pinned, 0x55, sizeof back);
    CHECK_OK(dtrain_device_copy(device, on[0] + from, source, bytes));
    CHECK_OK(dtrain_device_copy(device, on[1] + to, on[0] + from, bytes));
    CHECK_OK(dtrain_device_copy(device, pinned + from, on[1] + to, bytes));
    CHECK_OK(dtrain_device_wait(device));
    CHECK_OK(dtrain_device_copy(device, back + to, pinned + from, bytes));
    for (size_t i = 0; i < sizeof back; i++)
        wrong += back[i] != (i >= to && i - to < bytes ? source[i - to] : 0x55);
    if (wrong > 0)
        TEST_FAIL("%zu bytes from %zu to %zu: %zu are wrong", bytes, from, to, wrong);
}

TEST(copies_go_in_all_directions_at_any_alignment)
{
    dtrain_device *device = cuda_device(0);
    unsigned char *on[2], *pinned, plain[8] = "plain", other[8] = "other";
    if (device == NULL)
        return;
    on[0] = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 1200);
    on[1] = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 1200);
    pinned = cuda_bytes(device, DTRAIN_MEMORY_PINNED, 1200);
    for (size_t bytes = 0; bytes <= 1000; bytes += bytes < 40 ? 1 : 37)
        for (size_t from = 0; from < 5; from++)
            copy_round(device, on, pinned, bytes, from, (from * 7 + bytes) % 17);
    CHECK_OK(dtrain_device_copy(device, other, plain, sizeof plain));
    CHECK(memcmp(other, plain, sizeof plain) == 0);
    cuda_free(device, on[0]);
    cuda_free(device, on[1]);
    dtrain_device_free(device, DTRAIN_MEMORY_PINNED, pinned);
    dtrain_cuda_destroy(device);
}

static void fill_round(dtrain_device *device, unsigned char *on, size_t width, size_t count, size_t from)
{
    static const unsigned char element[8] = {1, 2, 3, 4, 5, 6, 7, 8}, around = 0x55;
    unsigned char back[8100];
    size_t bytes = width * count, room = bytes + 40, wrong = 0;
    CHECK_OK(dtrain_device_fill(device, on, &around, 1, room));
    CHECK_OK(dtrain_device_fill(device, on + from, element, width, count));
    CHECK_OK(dtrain_device_copy(device, back, on, room));
    for (size_t i = 0; i < room; i++)
        wrong += back[i] != (i >= from && i - from < bytes ? element[(i - from) % width] : around);
    if (wrong > 0)
        TEST_FAIL("%zu elements of %zu bytes at %zu: %zu bytes are wrong", count, width, from, wrong);
}

TEST(a_fill_writes_its_elements_and_nothing_beside)
{
    dtrain_device *device = cuda_device(0);
    unsigned char *on;
    if (device == NULL)
        return;
    on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 8100);
    for (size_t width = 1; width <= 8; width *= 2) {
        for (size_t count = 0; count <= 40; count++)
            for (size_t from = 0; from < 17; from++)
                fill_round(device, on, width, count, from);
        for (size_t count = 41; count <= 1000; count++)
            fill_round(device, on, width, count, count % 17);
    }
    cuda_free(device, on);
    dtrain_cuda_destroy(device);
}

TEST(a_large_fill_goes_round_the_grid)
{
    size_t count = (size_t)5 << 20;
    dtrain_device *device = cuda_device(0);
    unsigned char *on;
    uint64_t *back = (uint64_t *)malloc(count * sizeof *back), element = UINT64_C(0x0123456789abcdef);
    size_t wrong = 0;
    if (device != NULL) {
        on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, count * sizeof *back + 1);
        CHECK_OK(dtrain_device_fill(device, on + 1, &element, sizeof element, count));
        CHECK_OK(dtrain_device_copy(device, back, on + 1, count * sizeof *back));
        for (size_t i = 0; i < count; i++)
            wrong += back[i] != element;
        CHECK_EQ(wrong, 0);
        cuda_free(device, on);
        dtrain_cuda_destroy(device);
    }
    free(back);
}

TEST(an_event_orders_two_queues)
{
    enum { bytes = 1 << 22 };
    dtrain_device *one = cuda_device(0), *two = one != NULL ? cuda_device(0) : NULL;
    dtrain_device_event *event = NULL;
    unsigned char *x, *y, back[64];
    int done = 0;
    if (two == NULL)
        return;
    x = cuda_bytes(one, DTRAIN_MEMORY_DEVICE, bytes);
    y = cuda_bytes(two, DTRAIN_MEMORY_DEVICE, bytes);
    CHECK_OK(one->ops->event_create(one, &event));
    CHECK_OK(one->ops->event_done(one, event, &done));
    CHECK_EQ(done, 1);
    for (unsigned char round = 1; round < 20; round++) {
        for (unsigned char i = 0; i <= round; i++)
            CHECK_OK(dtrain_device_fill(one, x, &i, 1, bytes));
        CHECK_OK(one->ops->event_record(one, event));
        CHECK_OK(two->ops->event_await(two, event));
        CHECK_OK(dtrain_device_copy(two, y, x, bytes));
        CHECK_OK(dtrain_device_copy(two, back, y + bytes - sizeof back, sizeof back));
        for (size_t i = 0; i < sizeof back; i++)
            CHECK_EQ(back[i], round);
        CHECK_OK(two->ops->event_done(two, event, &done));
        CHECK_EQ(done, 1);
    }
    one->ops->event_destroy(one, event);
    cuda_free(one, x);
    cuda_free(two, y);
    dtrain_cuda_destroy(one);
    dtrain_cuda_destroy(two);
}

TEST(a_device_on_a_stream_of_the_callers_leaves_it_whole)
{
    dtrain_device *first = cuda_device(0), *device = NULL;
    dtrain_cuda_desc desc = {0, NULL};
    cudaStream_t stream = NULL;
    if (first == NULL)
        return;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    desc.stream = (void *)stream;
    CHECK_OK(dtrain_cuda_create(&device, &desc));
    CHECK(dtrain_cuda_stream(device) == (void *)stream);
    CHECK_OK(dtrain_device_wait(device));
    dtrain_cuda_destroy(device);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    if (cuda_count() > 1) {
        desc.index = 1;
        CHECK_ERROR(dtrain_cuda_create(&device, &desc), DTRAIN_ERR_INVALID, "destroyed or another GPU's");
        CHECK(device == NULL);
    }
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    dtrain_cuda_destroy(first);
}

TEST(out_of_memory_is_a_status_and_the_device_goes_on)
{
    dtrain_device *device = cuda_device(0);
    void *pointer = device;
    unsigned char *on;
    if (device == NULL)
        return;
    const int wide = sizeof(size_t) == 8;
    const size_t much = wide ? SIZE_MAX / 16384 + 1 : (size_t)3 << 30; /* 2^50 */
    for (int round = 0; round < 3; round++) {
        CHECK_ERROR(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, much, &pointer), DTRAIN_ERR_MEMORY,
                    wide ? "alloc of 1125899906842624 bytes on cuda:0: " : "alloc of 3221225472 bytes on cuda:0: ");
        CHECK_CONTAINS(dtrain_last_error(), "bytes are free");
        CHECK(pointer == NULL);
        CHECK_EQ(cudaGetLastError(), cudaSuccess);
        on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 1000);
        CHECK_OK(dtrain_device_fill(device, on, "x", 1, 1000));
        CHECK_OK(dtrain_device_wait(device));
        cuda_free(device, on);
    }
    dtrain_cuda_destroy(device);
}

TEST(wrong_pointers_are_refused)
{
    const size_t room = (size_t)1 << 21; /* where an allocation's size may be rounded, it is to no more than that */
    dtrain_device *device = cuda_device(0);
    unsigned char host[64], *on, *pinned, *freed;
    if (device == NULL)
        return;
    on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, room);
    pinned = cuda_bytes(device, DTRAIN_MEMORY_PINNED, 64);
    freed = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, (size_t)1 << 25);
    cuda_free(device, freed);
    CHECK_ERROR(dtrain_device_fill(device, host, "x", 1, 64), DTRAIN_ERR_INVALID, "must be memory of the device");
    CHECK_CONTAINS(dtrain_last_error(), "fill on cuda:0: to (");
    CHECK_ERROR(device->ops->fill(device, NULL, "x", 1, 64), DTRAIN_ERR_INVALID, "must be memory of the device");
    CHECK_ERROR(dtrain_device_fill(device, freed, "x", 1, 64), DTRAIN_ERR_INVALID, "must be memory of the device");
    CHECK_ERROR(dtrain_device_fill(device, on + 1, "x", 1, room), DTRAIN_ERR_INVALID, "ends after 2097151");
    CHECK_ERROR(dtrain_device_copy(device, on + room - 10, host, 11), DTRAIN_ERR_INVALID, "to (");
    CHECK_CONTAINS(dtrain_last_error(), "must hold 11 bytes, and its allocation ends after 10");
    CHECK_ERROR(dtrain_device_copy(device, host, on + room - 1, 2), DTRAIN_ERR_INVALID, "from (");
    CHECK_OK(dtrain_device_fill(device, on, "x", 1, room));
    CHECK_OK(dtrain_device_fill(device, pinned, "x", 1, 64));
    CHECK_OK(dtrain_device_wait(device));
    CHECK_EQ(pinned[63], 'x');
    cuda_free(device, on);
    dtrain_device_free(device, DTRAIN_MEMORY_PINNED, pinned);
    dtrain_cuda_destroy(device);
}

/* Kernels that take whole words at any multiple of their width: elsewhere a GPU faults, and is lost to the process. */
TEST(what_lies_between_words_is_refused)
{
    static const size_t places[][4] = {{1, 0, 0, 0}, {0, 2, 0, 0}, {0, 0, 3, 0}, {0, 0, 0, 1}};
    dtrain_device *device = cuda_device(0);
    dtrain_device_selection *selection = NULL;
    unsigned char *on;
    if (device == NULL)
        return;
    on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 4096);
    CHECK_OK(dtrain_device_fill(device, on, "", 1, 4096));
    CHECK_OK(dtrain_device_selection_create(device, 9, 3, &selection));
    CHECK_ERROR(dtrain_device_squares(device, (float *)(void *)(on + 2), 9, (int64_t *)(void *)(on + 1024)),
                DTRAIN_ERR_INVALID, "must be at a multiple of 4 bytes");
    CHECK_ERROR(dtrain_device_squares(device, (float *)(void *)on, 9, (int64_t *)(void *)(on + 1028)),
                DTRAIN_ERR_INVALID, "squares on cuda:0: limbs (");
    CHECK_ERROR(dtrain_device_clip(device, (int64_t *)(void *)(on + 1024), 1, (double *)(void *)(on + 4), NULL, 0),
                DTRAIN_ERR_INVALID, "norm (");
    CHECK_ERROR(dtrain_device_clip(device, (int64_t *)(void *)(on + 1024), 1, (double *)(void *)on,
                                   (float *)(void *)(on + 65), 9),
                DTRAIN_ERR_INVALID, "x (");
    CHECK_ERROR(dtrain_device_overflow(device, DTRAIN_F32, on + 1, 9, (uint32_t *)(void *)(on + 66)),
                DTRAIN_ERR_INVALID, "found (");
    for (size_t i = 0; i < 4; i++)
        CHECK_ERROR(dtrain_device_select(device, selection, (float *)(void *)(on + places[i][0]),
                                         (float *)(void *)(on + 256 + places[i][1]),
                                         (uint32_t *)(void *)(on + 512 + places[i][2]),
                                         (float *)(void *)(on + 768 + places[i][3])),
                    DTRAIN_ERR_INVALID, "must be at a multiple of 4 bytes");
    CHECK_OK(dtrain_device_overflow(device, DTRAIN_F32, on + 1, 9, (uint32_t *)(void *)(on + 64)));
    CHECK_OK(dtrain_device_wait(device));
    dtrain_device_selection_destroy(device, selection);
    cuda_free(device, on);
    dtrain_cuda_destroy(device);
}

TEST(destroy_ends_what_is_queued)
{
    enum { bytes = 1 << 22 };
    dtrain_device *keeper = cuda_device(0), *device = keeper != NULL ? cuda_device(0) : NULL;
    unsigned char *on, last = 0;
    if (device == NULL)
        return;
    on = cuda_bytes(keeper, DTRAIN_MEMORY_DEVICE, bytes);
    for (unsigned char i = 0; i <= 40; i++)
        CHECK_OK(dtrain_device_fill(device, on, &i, 1, bytes));
    dtrain_cuda_destroy(device);
    CHECK_OK(dtrain_device_copy(keeper, &last, on + bytes - 1, 1));
    CHECK_EQ(last, 40);
    cuda_free(keeper, on);
    dtrain_cuda_destroy(keeper);
}

TEST(the_threads_current_gpu_stays)
{
    dtrain_device *zero = cuda_device(0), *one = NULL;
    dtrain_cuda_desc desc = {1, NULL};
    unsigned char *on, host[8] = "1234567", back[8];
    int current = -1;
    if (zero == NULL || cuda_count() < 2) {
        if (zero != NULL)
            printf("skipped: one GPU\n");
        dtrain_cuda_destroy(zero);
        return;
    }
    CHECK_OK(dtrain_cuda_create(&one, &desc));
    CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
    CHECK_EQ(current, 0);
    CHECK(strcmp(dtrain_device_name(one), "cuda:1") == 0);
    on = cuda_bytes(one, DTRAIN_MEMORY_DEVICE, 8);
    CHECK_OK(dtrain_device_fill(one, on, "x", 1, 8));
    CHECK_ERROR(dtrain_device_fill(zero, on, "x", 1, 8), DTRAIN_ERR_INVALID, "memory of cuda:1");
    CHECK_OK(dtrain_device_copy(one, on, host, 8));
    CHECK_OK(dtrain_device_copy(zero, back, on, 8));
    CHECK(memcmp(host, back, 8) == 0);
    cuda_free(one, on);
    dtrain_cuda_destroy(one);
    CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
    CHECK_EQ(current, 0);
    dtrain_cuda_destroy(zero);
}

static void *fill_and_compare(void *argument)
{
    dtrain_device *device = NULL;
    dtrain_cuda_desc desc = {0, NULL};
    unsigned char *on, back[1000], value;
    size_t wrong = 0;
    desc.index = *(int *)argument % cuda_count();
    CHECK_OK(dtrain_cuda_create(&device, &desc));
    for (int round = 0; round < 50 && device != NULL; round++) {
        on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, sizeof back);
        value = (unsigned char)(*(int *)argument * 50 + round);
        CHECK_OK(dtrain_device_fill(device, on, &value, 1, sizeof back));
        CHECK_OK(dtrain_device_copy(device, back, on, sizeof back));
        for (size_t i = 0; i < sizeof back; i++)
            wrong += back[i] != value;
        cuda_free(device, on);
    }
    CHECK_EQ(wrong, 0);
    dtrain_cuda_destroy(device);
    return NULL;
}

TEST(threads_have_devices_of_their_own)
{
    pthread_t thread[4];
    int number[4];
    dtrain_device *device = cuda_device(0);
    for (int i = 0; i < 4; i++) {
        number[i] = i;
        CHECK_EQ(pthread_create(&thread[i], NULL, fill_and_compare, &number[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(thread[i], NULL), 0);
    dtrain_cuda_destroy(device);
}

#ifdef DTRAIN_CUDA_EMULATE
TEST(work_on_one_gpu_makes_no_context_on_another)
{
    for (int turn = 0; turn < 2; turn++) { /* with the driver's functions, and without, which knows no better */
        dtrain_device *device;
        unsigned char *on, back[8];
        int current = -1;
        CHECK_EQ(cudaSetDevice(0), cudaSuccess);
        dtrain__cuda_emulated.contexts[0] = 0;
        device = cuda_device(1);
        if (turn == 1)
            dtrain__cuda_queue_of(device)->context = NULL;
        on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 8);
        CHECK_OK(dtrain_device_fill(device, on, "x", 1, 8));
        CHECK_OK(dtrain_device_copy(device, back, on, 8));
        CHECK_EQ(back[7], 'x');
        CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
        CHECK_EQ(current, 0);
        cuda_free(device, on);
        dtrain_cuda_destroy(device);
        CHECK_EQ(dtrain__cuda_emulated.contexts[0], turn);
    }
}

TEST(emulated_memory_has_a_limit_to_the_byte)
{
    dtrain_device *device = cuda_device(0);
    void *a = NULL, *b = NULL;
    setenv("DTRAIN_CUDA_EMULATED_BYTES", "1000", 1);
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, 600, &a));
    CHECK_ERROR(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, 401, &b), DTRAIN_ERR_MEMORY,
                ", 400 of 1000 bytes are free; free some");
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, 400, &b));
    unsetenv("DTRAIN_CUDA_EMULATED_BYTES");
    cuda_free(device, a);
    cuda_free(device, b);
    dtrain_cuda_destroy(device);
}

TEST(no_driver_and_no_gpu_are_unsupported)
{
    static const int errors[] = {34, 35, 100, 803, 804};
    dtrain_device *device = NULL;
    int count = 7;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        char number[16];
        snprintf(number, sizeof number, "error %d)", errors[i]);
        dtrain__cuda_emulated.lasting = errors[i];
        CHECK_ERROR(dtrain_cuda_count(&count), DTRAIN_ERR_UNSUPPORTED, number);
        CHECK_EQ(count, 0);
        CHECK_ERROR(dtrain_cuda_create(&device, NULL), DTRAIN_ERR_UNSUPPORTED, number);
        CHECK(device == NULL);
    }
    dtrain__cuda_emulated.lasting = 0;
}

TEST(the_programs_own_error_waits_for_the_program)
{
    dtrain_device *device = cuda_device(0);
    unsigned char *on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 64);
    dtrain_device_event *event = NULL;
    CHECK_OK(device->ops->event_create(device, &event));
    dtrain__cuda_emulated_last = cudaErrorInvalidConfiguration; /* as a launch leaves it */
    CHECK_OK(dtrain_device_fill(device, on, "x", 1, 64));
    cuda_free(device, on);
    device->ops->event_destroy(device, event);
    dtrain_cuda_destroy(device);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

TEST(a_build_without_code_for_the_gpu_is_unsupported)
{
    static const int errors[] = {98, 209, 221, 222, 223};
    dtrain_device *device = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        dtrain__cuda_emulated.next = errors[i], dtrain__cuda_emulated.after = 1;
        CHECK_ERROR(dtrain_cuda_create(&device, NULL), DTRAIN_ERR_UNSUPPORTED, "nvcc -arch for this GPU");
        CHECK(device == NULL);
    }
}

TEST(create_gives_back_what_it_took_whichever_call_fails)
{
    dtrain_cuda_desc desc = {0, NULL};
    dtrain_device *device = NULL;
    cudaStream_t stream = NULL;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, 0), 0);
    for (int own = 0; own < 2; own++) {
        int after = -1, failed = 1;
        desc.stream = own ? NULL : stream;
        while (failed) {
            dtrain__cuda_emulated.next = 999, dtrain__cuda_emulated.after = ++after;
            dtrain__cuda_emulated_thing *things = dtrain__cuda_emulated.things;
            failed = dtrain_cuda_create(&device, &desc) != DTRAIN_OK;
            CHECK_EQ(failed, device == NULL);
            CHECK(!failed || things == dtrain__cuda_emulated.things);
            if (failed)
                CHECK_CONTAINS(dtrain_last_error(), "error 999)");
        }
        dtrain__cuda_emulated.next = 0;
        CHECK(after >= 3);
        dtrain_cuda_destroy(device);
    }
    CHECK_EQ(cudaStreamDestroy(stream), 0);
    CHECK_ERROR(dtrain_cuda_create(&device, (desc.stream = stream, &desc)), DTRAIN_ERR_INVALID, "stream on cuda:0: ");
    CHECK(dtrain__cuda_emulated.things == NULL);
}

TEST(a_lost_gpu_is_an_error_in_every_later_call)
{
    dtrain_device *device = cuda_device(0);
    unsigned char *on = cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 64), host[64] = {0};
    dtrain_device_event *event = NULL;
    void *more = NULL;
    int done = 0;
    CHECK_OK(device->ops->event_create(device, &event));
    dtrain__cuda_emulated.lasting = cudaErrorIllegalAddress;
    CHECK_ERROR(dtrain_device_wait(device), DTRAIN_ERR_IO, "cudaErrorIllegalAddress, error 700); the GPU is lost");
    CHECK_ERROR(dtrain_device_copy(device, host, on, 64), DTRAIN_ERR_IO, "lost");
    CHECK_ERROR(dtrain_device_fill(device, on, host, 1, 64), DTRAIN_ERR_IO, "lost");
    CHECK_ERROR(device->ops->event_record(device, event), DTRAIN_ERR_IO, "lost");
    CHECK_ERROR(device->ops->event_await(device, event), DTRAIN_ERR_IO, "lost");
    CHECK_ERROR(device->ops->event_done(device, event, &done), DTRAIN_ERR_IO, "lost");
    CHECK_ERROR(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, 64, &more), DTRAIN_ERR_IO, "lost");
    cuda_free(device, on);
    device->ops->event_destroy(device, event);
    dtrain_cuda_destroy(device);
    dtrain__cuda_emulated.lasting = 0;
    CHECK(dtrain__cuda_emulated.things == NULL);
}

/* Those after which CUDA says that the process must end. */
TEST(every_error_that_lasts_says_so)
{
    static const int errors[] = {226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810};
    dtrain_device *device = cuda_device(0);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        dtrain__cuda_emulated.lasting = errors[i];
        CHECK_ERROR(dtrain_device_wait(device), DTRAIN_ERR_IO, "the GPU is lost to this process");
    }
    dtrain__cuda_emulated.lasting = 0;
    dtrain_cuda_destroy(device);
}

/* Runs act on 100 bytes of device memory in a process of its own; returns 1 when that came to its end. */
static int survives(int (*act)(dtrain_device *device, unsigned char *on))
{
    int state = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dtrain_device *device = cuda_device(0);
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(1);
        _exit(act(device, cuda_bytes(device, DTRAIN_MEMORY_DEVICE, 100)));
    }
    CHECK(waitpid(child, &state, 0) == child);
    return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

static int touch(dtrain_device *device, unsigned char *on)
{
    (void)device;
    *(volatile unsigned char *)on = 1;
    return 0;
}

static int touch_inside(dtrain_device *device, unsigned char *on)
{
    dtrain__cuda_emulated_enter();
    int state = touch(device, on);
    dtrain__cuda_emulated_leave();
    return state;
}

static int write_behind(dtrain_device *device, unsigned char *on)
{
    dtrain__cuda_emulated_enter();
    on[100] = 1;
    dtrain__cuda_emulated_leave();
    cuda_free(device, on);
    return dtrain_device_wait(device) != DTRAIN_ERR_IO;
}

TEST(emulated_memory_is_the_devices_alone)
{
    CHECK(survives(touch_inside));
    CHECK(!survives(touch));
    CHECK(survives(write_behind));
}
#else
__global__ static void fault(unsigned char *nowhere)
{
    *nowhere = 1;
}

/* Stands last: the process has no GPU after it. */
TEST(a_kernels_fault_is_an_error_in_every_later_call)
{
    dtrain_device *device = cuda_device(0);
    void *pointer = NULL;
    if (device == NULL)
        return;
    fault<<<1, 1, 0, (cudaStream_t)dtrain_cuda_stream(device)>>>((unsigned char *)16);
    CHECK_ERROR(dtrain_device_wait(device), DTRAIN_ERR_IO, "the GPU is lost");
    CHECK_ERROR(dtrain_device_wait(device), DTRAIN_ERR_IO, "the GPU is lost");
    CHECK_ERROR(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, 64, &pointer), DTRAIN_ERR_IO, "the GPU is lost");
    dtrain_cuda_destroy(device);
}
#endif
