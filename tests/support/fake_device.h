/* A device whose memory nobody can touch but its own functions: pages are without access outside of them. Copies from
 * and to pinned memory are put off until something else is asked of the device, and what they will fill is poisoned, so
 * that whoever does not wait reads rubbish, or sends it. Everything is counted, and any call can be made to fail. A
 * queue that is made of a device has the device's memory and counters, and copies put off of its own; it may be another
 * thread's. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H
#pragma GCC diagnostic ignored "-Wunused-function" /* no test uses all of it */

#include <pthread.h>
#include <sys/mman.h>

enum { FAKE_BLOCKS = 64, FAKE_LATE = 64 };

typedef struct fake_block {
    unsigned char *memory;
    size_t bytes, mapped;
    dtrain_memory kind;
} fake_block;

typedef struct fake_copy {
    void *to;
    const void *from;
    size_t bytes;
} fake_copy;

typedef struct fake {
    dtrain_device device;
    struct fake *root; /* whose queue it is, and whose memory and counters it has; NULL: its own */
    struct fake *peer; /* of the same kind: whose memory it can reach; NULL: none */
    fake_block blocks[FAKE_BLOCKS];
    fake_copy late[FAKE_LATE];
    int late_count, open, selections, events;
    int stays_broken;                                    /* 1: every call after the failing one fails, too */
    size_t largest_copy;                                 /* between the device and the CPU */
    long calls, fail_call, allocations, fail_allocation; /* the failing one, counted from 1; 0: none */
} fake;

static pthread_mutex_t fake_mutex; /* of all fakes, recursive */

static fake *fake_of(dtrain_device *device)
{
    return (fake *)device->self;
}

static fake *fake_root(fake *f)
{
    return f->root != NULL ? f->root : f;
}

static fake *fake_root_of(dtrain_device *device)
{
    return fake_root(fake_of(device));
}

static void fake_protect(fake *f, int access)
{
    f = fake_root(f);
    for (int i = 0; i < FAKE_BLOCKS; i++)
        if (f->blocks[i].memory != NULL && f->blocks[i].kind == DTRAIN_MEMORY_DEVICE)
            mprotect(f->blocks[i].memory, f->blocks[i].mapped, access);
    for (int i = 0; f->peer != NULL && i < FAKE_BLOCKS; i++)
        if (f->peer->blocks[i].memory != NULL && f->peer->blocks[i].kind == DTRAIN_MEMORY_DEVICE)
            mprotect(f->peer->blocks[i].memory, f->peer->blocks[i].mapped, access);
}

/* Makes the copies that were put off. The memory is open. */
static void fake_catch_up(fake *f)
{
    for (int i = 0; i < f->late_count; i++)
        memcpy(f->late[i].to, f->late[i].from, f->late[i].bytes);
    f->late_count = 0;
}

static void fake_flush(fake *f)
{
    if (f->late_count == 0)
        return;
    fake_protect(f, PROT_READ | PROT_WRITE);
    fake_catch_up(f);
    fake_protect(f, PROT_NONE);
}

static const fake_block *fake_find(fake *f, const void *pointer, size_t bytes)
{
    f = fake_root(f);
    const unsigned char *at = (const unsigned char *)pointer;
    for (int i = 0; i < FAKE_BLOCKS; i++) {
        const fake_block *block = &f->blocks[i];
        if (block->memory != NULL && at >= block->memory && at < block->memory + block->mapped)
            return (size_t)(at - block->memory) + bytes <= block->bytes ? block : NULL;
    }
    return NULL;
}

/* Opens the device's memory for one function. */
static dtrain_status fake_enter(dtrain_device *device)
{
    fake *f = fake_root_of(device);
    pthread_mutex_lock(&fake_mutex);
    if (++f->calls == f->fail_call || (f->stays_broken && f->fail_call > 0 && f->calls > f->fail_call))
        return dtrain_error_set(DTRAIN_ERR_IO, "the fake device broke at call %ld", f->calls);
    fake_protect(f, PROT_READ | PROT_WRITE);
    fake_catch_up(fake_of(device));
    f->open = 1;
    return DTRAIN_OK;
}

static dtrain_status fake_leave(dtrain_device *device, dtrain_status status)
{
    fake *f = fake_root_of(device);
    if (f->open)
        fake_protect(f, PROT_NONE);
    f->open = 0;
    pthread_mutex_unlock(&fake_mutex);
    return status;
}

/* Whether a kernel may touch this. */
static dtrain_status fake_own(dtrain_device *device, const void *pointer, size_t bytes)
{
    pthread_mutex_lock(&fake_mutex);
    const fake_block *block = fake_find(fake_of(device), pointer, bytes);
    int own = block != NULL && block->kind == DTRAIN_MEMORY_DEVICE;
    pthread_mutex_unlock(&fake_mutex);
    if (own)
        return DTRAIN_OK;
    return dtrain_error_set(DTRAIN_ERR_INVALID, "fake: %p and %zu bytes are not the device's", pointer, bytes);
}

#define FAKE_OP(call) \
    do { \
        dtrain_status fake_status_ = fake_enter(device); \
        return fake_leave(device, fake_status_ == DTRAIN_OK ? (call) : fake_status_); \
    } while (0)

/* `call` where all of what it touches is the device's. */
#define FAKE_OWN(pointer, bytes, call) (fake_own(device, pointer, bytes) == DTRAIN_OK ? (call) : DTRAIN_ERR_INVALID)

static dtrain_status fake_allocate_now(fake *f, dtrain_memory memory, size_t bytes, void **pointer)
{
    int i = 0;
    while (i < FAKE_BLOCKS && f->blocks[i].memory != NULL)
        i++;
    if (++f->allocations == f->fail_allocation || i == FAKE_BLOCKS)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "the fake device has no %zu bytes", bytes);
    size_t mapped = (bytes + 4095) / 4096 * 4096;
    void *made = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "fake: no %zu bytes", bytes);
    if (memory == DTRAIN_MEMORY_DEVICE) {
        memset(made, 0xa5, mapped);
        mprotect(made, mapped, PROT_NONE);
    }
    f->blocks[i].memory = (unsigned char *)made;
    f->blocks[i].bytes = bytes;
    f->blocks[i].mapped = mapped;
    f->blocks[i].kind = memory;
    *pointer = made;
    return DTRAIN_OK;
}

static dtrain_status fake_allocate(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer)
{
    pthread_mutex_lock(&fake_mutex);
    dtrain_status status = fake_allocate_now(fake_root_of(device), memory, bytes, pointer);
    pthread_mutex_unlock(&fake_mutex);
    return status;
}

static void fake_release_now(fake *f, dtrain_memory memory, void *pointer)
{
    for (int i = 0; i < FAKE_BLOCKS; i++)
        if (f->blocks[i].memory == pointer) {
            CHECK_EQ(f->blocks[i].kind, memory);
            munmap(pointer, f->blocks[i].mapped);
            memset(&f->blocks[i], 0, sizeof f->blocks[i]);
            return;
        }
    TEST_FAIL("fake: %p was never allocated", pointer);
}

static void fake_release(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    pthread_mutex_lock(&fake_mutex);
    fake_flush(fake_of(device));
    fake_release_now(fake_root_of(device), memory, pointer);
    pthread_mutex_unlock(&fake_mutex);
}

static dtrain_status fake_copy_now(fake *f, void *to, const void *from, size_t bytes)
{
    const fake_block *target = fake_find(f, to, bytes), *source = fake_find(f, from, bytes);
    int pinned = (target != NULL && target->kind == DTRAIN_MEMORY_PINNED) ||
                 (source != NULL && source->kind == DTRAIN_MEMORY_PINNED);
    if ((target == NULL || source == NULL || pinned) && bytes > fake_root(f)->largest_copy)
        fake_root(f)->largest_copy = bytes;
    if (!pinned || f->late_count == FAKE_LATE) {
        fake_protect(f, PROT_READ | PROT_WRITE);
        fake_catch_up(f);
        memcpy(to, from, bytes);
        fake_protect(f, PROT_NONE);
        return DTRAIN_OK;
    }
    if (target != NULL && target->kind == DTRAIN_MEMORY_PINNED)
        memset(to, 0x5a, bytes);
    f->late[f->late_count].to = to;
    f->late[f->late_count].from = from;
    f->late[f->late_count++].bytes = bytes;
    return DTRAIN_OK;
}

static dtrain_status fake_copy_op(dtrain_device *device, void *to, const void *from, size_t bytes)
{
    fake *f = fake_root_of(device);
    dtrain_status status;
    pthread_mutex_lock(&fake_mutex);
    if (++f->calls == f->fail_call || (f->stays_broken && f->fail_call > 0 && f->calls > f->fail_call))
        status = dtrain_error_set(DTRAIN_ERR_IO, "the fake device broke at call %ld", f->calls);
    else
        status = fake_copy_now(fake_of(device), to, from, bytes);
    pthread_mutex_unlock(&fake_mutex);
    return status;
}

static dtrain_status fake_fill(dtrain_device *device, void *to, const void *element, size_t element_bytes, size_t count)
{
    FAKE_OP(FAKE_OWN(to, element_bytes * count, dtrain_device_fill(NULL, to, element, element_bytes, count)));
}

static dtrain_status fake_wait(dtrain_device *device)
{
    FAKE_OP(DTRAIN_OK);
}

static dtrain_status fake_event_create(dtrain_device *device, dtrain_device_event **event)
{
    fake *f = fake_root_of(device);
    dtrain_status status = fake_enter(device);
    *event = (dtrain_device_event *)&f->events;
    f->events += status == DTRAIN_OK;
    return fake_leave(device, status);
}

static void fake_event_destroy(dtrain_device *device, dtrain_device_event *event)
{
    pthread_mutex_lock(&fake_mutex);
    CHECK(event == (dtrain_device_event *)&fake_root_of(device)->events);
    fake_root_of(device)->events--;
    pthread_mutex_unlock(&fake_mutex);
}

static dtrain_status fake_event(dtrain_device *device, dtrain_device_event *event)
{
    CHECK(event == (dtrain_device_event *)&fake_root_of(device)->events);
    FAKE_OP(DTRAIN_OK);
}

/* Also one of another fake's, whose record has ended as all work of fakes does. */
static dtrain_status fake_event_await(dtrain_device *device, dtrain_device_event *event)
{
    CHECK(event != NULL);
    FAKE_OP(DTRAIN_OK);
}

static dtrain_status fake_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    CHECK(event == (dtrain_device_event *)&fake_root_of(device)->events);
    *done = fake_of(device)->late_count == 0;
    return DTRAIN_OK;
}

static dtrain_status fake_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                  size_t count)
{
    FAKE_OP(FAKE_OWN(in, count * dtrain_dtype_bits(from) / 8,
                     FAKE_OWN(out, count * dtrain_dtype_bits(to) / 8, dtrain_convert(in, from, out, to, count))));
}

static dtrain_status fake_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
                                 const void *const *in, int n, void *const *out, int m, size_t begin, size_t count)
{
    CHECK(divisor == n);
    for (int i = 0; i < n + m; i++)
        if (fake_own(device, i < n ? in[i] : out[i - n], (begin + count) * dtrain_dtype_bits(dtype) / 8) != DTRAIN_OK)
            return DTRAIN_ERR_INVALID;
    FAKE_OP(dtrain_device_reduce(NULL, dtype, op, in, n, out, m, begin, count));
}

static dtrain_status fake_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor, size_t count)
{
    FAKE_OP(FAKE_OWN(x, count * dtrain_dtype_bits(dtype) / 8, dtrain_device_scale(NULL, dtype, x, factor, count)));
}

static dtrain_status fake_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha, const void *x,
                               size_t count)
{
    FAKE_OP(FAKE_OWN(
        x, count * dtrain_dtype_bits(dtype) / 8,
        FAKE_OWN(y, count * dtrain_dtype_bits(dtype) / 8, dtrain_device_axpy(NULL, dtype, y, alpha, x, count))));
}

static dtrain_status fake_adamw(dtrain_device *device, const dtrain_device_adamw_step *step)
{
    FAKE_OP(FAKE_OWN(step->grads, 4 * step->count, FAKE_OWN(step->v, 4 * step->count, dtrain__train_adamw(step))));
}

static dtrain_status fake_sgd(dtrain_device *device, const dtrain_device_sgd_step *step)
{
    FAKE_OP(FAKE_OWN(step->grads, 4 * step->count, FAKE_OWN(step->params, 4 * step->count, dtrain__train_sgd(step))));
}

static dtrain_status fake_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x, size_t count,
                                   uint32_t *found)
{
    FAKE_OP(FAKE_OWN(found, 4, dtrain_device_overflow(NULL, dtype, x, count, found)));
}

static dtrain_status fake_squares(dtrain_device *device, const float *x, size_t count, int64_t *limbs)
{
    FAKE_OP(FAKE_OWN(limbs, 8 * DTRAIN_SQUARES_LIMBS, dtrain_device_squares(NULL, x, count, limbs)));
}

static dtrain_status fake_clip(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm, float *x,
                               size_t count)
{
    FAKE_OP(FAKE_OWN(norm, 8, dtrain_device_clip(NULL, limbs, max_norm, norm, x, count)));
}

/* Counts something that is made; 0 where it is not to be. */
static int fake_may_allocate(dtrain_device *device)
{
    fake *f = fake_root_of(device);
    pthread_mutex_lock(&fake_mutex);
    int may = ++f->allocations != f->fail_allocation;
    pthread_mutex_unlock(&fake_mutex);
    return may;
}

static dtrain_status fake_selection_create(dtrain_device *device, size_t count, size_t k,
                                           dtrain_device_selection **made)
{
    if (!fake_may_allocate(device))
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "the fake device has no memory for a selection");
    dtrain_status status = dtrain_device_selection_create(NULL, count, k, made);
    __atomic_add_fetch(&fake_root_of(device)->selections, status == DTRAIN_OK, __ATOMIC_SEQ_CST);
    return status;
}

static void fake_selection_destroy(dtrain_device *device, dtrain_device_selection *selection)
{
    __atomic_sub_fetch(&fake_root_of(device)->selections, 1, __ATOMIC_SEQ_CST);
    dtrain_device_selection_destroy(NULL, selection);
}

static dtrain_status fake_select(dtrain_device *device, dtrain_device_selection *selection, float *sum,
                                 const float *add, uint32_t *indices, float *values)
{
    FAKE_OP(dtrain_device_select(NULL, selection, sum, add, indices, values));
}

static dtrain_status fake_sparse_add(dtrain_device *device, const uint32_t *indices, const float *values, size_t k,
                                     float *data, size_t count)
{
    FAKE_OP(FAKE_OWN(data, 4 * count, dtrain_device_sparse_add(NULL, indices, values, k, data, count)));
}

static dtrain_status fake_pack(dtrain_device *device, dtrain_dtype code, size_t block, const float *in, size_t count,
                               void *out)
{
    FAKE_OP(FAKE_OWN(in, 4 * count, dtrain_device_pack(NULL, code, block, in, count, out)));
}

static dtrain_status fake_unpack(dtrain_device *device, dtrain_dtype code, size_t block, const void *in, float *out,
                                 size_t count, int add)
{
    FAKE_OP(FAKE_OWN(out, 4 * count, dtrain_device_unpack(NULL, code, block, in, out, count, add)));
}

static dtrain_device *fake_begin(fake *f, const char *name);

static dtrain_status fake_queue_create(dtrain_device *device, dtrain_device **made)
{
    if (!fake_may_allocate(device))
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "the fake device has no memory for a queue");
    fake *another = (fake *)malloc(sizeof *another);
    *made = fake_begin(another, device->name);
    another->root = fake_root_of(device);
    another->device.ops = device->ops;
    return DTRAIN_OK;
}

static void fake_queue_destroy(dtrain_device *made)
{
    pthread_mutex_lock(&fake_mutex);
    fake_flush(fake_of(made));
    pthread_mutex_unlock(&fake_mutex);
    free(fake_of(made));
}

static const dtrain_device_ops fake_ops = {.allocate = fake_allocate,
                                           .release = fake_release,
                                           .copy = fake_copy_op,
                                           .fill = fake_fill,
                                           .wait = fake_wait,
                                           .event_create = fake_event_create,
                                           .event_destroy = fake_event_destroy,
                                           .event_record = fake_event,
                                           .event_await = fake_event_await,
                                           .event_done = fake_event_done,
                                           .convert = fake_convert,
                                           .reduce = fake_reduce,
                                           .scale = fake_scale,
                                           .axpy = fake_axpy,
                                           .adamw = fake_adamw,
                                           .sgd = fake_sgd,
                                           .overflow = fake_overflow,
                                           .squares = fake_squares,
                                           .clip = fake_clip,
                                           .selection_create = fake_selection_create,
                                           .selection_destroy = fake_selection_destroy,
                                           .select = fake_select,
                                           .sparse_add = fake_sparse_add,
                                           .pack = fake_pack,
                                           .unpack = fake_unpack,
                                           .queue_create = fake_queue_create,
                                           .queue_destroy = fake_queue_destroy};

static void fake_make_mutex(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&fake_mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static dtrain_device *fake_begin(fake *f, const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fake_make_mutex);
    memset(f, 0, sizeof *f);
    f->device.ops = &fake_ops;
    f->device.name = name;
    f->device.self = f;
    return &f->device;
}

/* Checks that nothing of it is left. */
static void fake_end(fake *f)
{
    for (int i = 0; i < FAKE_BLOCKS; i++)
        if (f->blocks[i].memory != NULL)
            TEST_FAIL("%zu bytes of %s were not freed", f->blocks[i].bytes, f->device.name);
    CHECK_EQ(f->selections, 0);
    CHECK_EQ(f->events, 0);
}

/* A copy of the CPU's memory on a device, freed by dtrain_device_free. */
static void *fake_upload(dtrain_device *device, const void *from, size_t bytes)
{
    void *made = NULL;
    DTRAIN_CHECK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, bytes, &made));
    DTRAIN_CHECK(dtrain_device_copy(device, made, from, bytes));
    return made;
}

/* Whether a device's memory holds these bytes. */
static int fake_holds(dtrain_device *device, const void *memory, const void *expected, size_t bytes)
{
    void *here = malloc(bytes + 1);
    DTRAIN_CHECK(dtrain_device_copy(device, here, memory, bytes));
    int same = memcmp(here, expected, bytes) == 0;
    free(here);
    return same;
}

#endif
