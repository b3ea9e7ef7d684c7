/* A device whose queue is a thread of its own: it does what it is given in order and later than the call, after delays
 * drawn from a seed. Events are as CUDA's: an await waits for the last record that was called before it, and for
 * nothing where none was. Memory is plain, so that ThreadSanitizer sees every access of every queue; all devices of a
 * process share one table and reach each other's memory, and none other. */
#ifndef ASYNC_DEVICE_H
#define ASYNC_DEVICE_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

enum { ASYNC_BLOCKS = 512, ASYNC_POINTERS = 64 };

/* One holder is who made it, one more every operation in a queue that speaks of it. */
typedef struct async_event {
    pthread_mutex_t mutex;
    pthread_cond_t passed;
    long recorded, reached;
    int holders;
} async_event;

typedef enum async_kind {
    ASYNC_COPY,
    ASYNC_FILL,
    ASYNC_REDUCE,
    ASYNC_CONVERT,
    ASYNC_SCALE,
    ASYNC_AXPY,
    ASYNC_ADAMW,
    ASYNC_SGD,
    ASYNC_SQUARES,
    ASYNC_CLIP,
    ASYNC_PACK,
    ASYNC_UNPACK,
    ASYNC_RECORD,
    ASYNC_AWAIT,
    ASYNC_FREE,
    ASYNC_SLEEP
} async_kind;

typedef struct async_op {
    async_kind kind;
    struct async_op *next;
    async_event *event;
    long record;
    void *to;
    const void *from;
    size_t begin, count;
    unsigned char element[8];
    size_t element_bytes;
    dtrain_dtype dtype, other;
    dtrain_op op;
    double factor;
    dtrain_device_adamw_step adamw;
    dtrain_device_sgd_step sgd;
    double *norm;
    const void *in[ASYNC_POINTERS];
    void *out[ASYNC_POINTERS];
    int n, m;
} async_op;

typedef struct async_device {
    dtrain_device device;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    async_op *first, **last;
    long queued, done; /* operations */
    int leaving, failed;
    uint64_t random, seed; /* the first is the thread's */
    unsigned delay_us;     /* the longest; 0: none */
    char name[16];
    /* What a test asks for, counted from 1; 0: never. Set by the rank's own thread while the queue is empty. */
    long fail_call, fail_done, kill_done, fail_allocation;
    long queue_fail_call, queue_fail_done; /* the same of the queue that is made of this one */
    struct async_device *queue, *of;       /* the last that was made of it, and the one it was made of */
    int queue_failed;                      /* a queue that was made of it */
    long calls, allocations, events;       /* of the rank's own thread */
    int events_open;
} async_device;

/* What devices and the CPU share, of all devices. */
typedef struct async_block {
    unsigned char *memory;
    size_t bytes;
    dtrain_memory kind;
    const async_device *owner;
    int late; /* to be freed with its device, which had failed */
} async_block;

static async_block async_blocks[ASYNC_BLOCKS];
static pthread_mutex_t async_blocks_mutex = PTHREAD_MUTEX_INITIALIZER;

static async_device *async_of(dtrain_device *device)
{
    return (async_device *)device->self;
}

/* What kind of memory this is; 0: the CPU's own, or nobody's. */
static int async_memory(const void *pointer, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)pointer;
    int kind = 0;
    pthread_mutex_lock(&async_blocks_mutex);
    for (int i = 0; i < ASYNC_BLOCKS && kind == 0; i++) {
        const async_block *b = &async_blocks[i];
        if (b->memory != NULL && at >= b->memory && at < b->memory + b->bytes)
            kind = (size_t)(at - b->memory) + bytes <= b->bytes ? (int)b->kind : 0;
    }
    pthread_mutex_unlock(&async_blocks_mutex);
    return kind;
}

static void async_event_drop(async_event *e)
{
    pthread_mutex_lock(&e->mutex);
    int last = --e->holders == 0;
    pthread_mutex_unlock(&e->mutex);
    if (!last)
        return;
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->passed);
    free(e);
}

static void async_event_reach(async_op *o)
{
    pthread_mutex_lock(&o->event->mutex);
    o->event->reached++;
    pthread_cond_broadcast(&o->event->passed);
    pthread_mutex_unlock(&o->event->mutex);
}

static void async_event_block(async_op *o)
{
    pthread_mutex_lock(&o->event->mutex);
    while (o->event->reached < o->record)
        pthread_cond_wait(&o->event->passed, &o->event->mutex);
    pthread_mutex_unlock(&o->event->mutex);
}

static dtrain_status async_divide(const async_op *o)
{
    const float *in = (const float *)o->in[0] + o->begin;
    CHECK_EQ(o->dtype, DTRAIN_F32);
    float *out = (float *)o->out[0] + o->begin, by = (float)o->factor;
    for (size_t i = 0; i < o->count; i++)
        out[i] = in[i] / by;
    return DTRAIN_OK;
}

/* As the manual of dtrain_adamw and dtrain_device_sgd has it, each operation rounded. */
static void async_adamw_now(const dtrain_device_adamw_step *s)
{
    for (size_t i = 0; i < s->count; i++) {
        volatile float m = s->beta1 * s->m[i], g = s->rest1 * s->grads[i], v, square, root;
        m = m + g;
        v = s->beta2 * s->v[i];
        square = s->grads[i] * s->grads[i];
        square = s->rest2 * square;
        v = v + square;
        root = __builtin_sqrtf(v);
        root = root * s->root;
        root = root + s->eps;
        root = m / root;
        root = s->rate * root;
        s->m[i] = m;
        s->v[i] = v;
        volatile float kept = s->keep * s->params[i];
        s->params[i] = kept - root;
    }
}

static void async_sgd_now(const dtrain_device_sgd_step *s)
{
    for (size_t i = 0; i < s->count; i++) {
        volatile float g = s->coupled * s->params[i], d, step;
        g = s->coupled > 0.0f ? s->grads[i] + g : s->grads[i];
        d = g;
        if (s->velocity != NULL) {
            d = s->momentum * s->velocity[i];
            d = d + g;
            s->velocity[i] = d;
        }
        step = s->lr * d;
        volatile float kept = s->keep * s->params[i];
        s->params[i] = kept - step;
    }
}

/* An operation's turn. */
static dtrain_status async_perform(async_op *o)
{
    switch (o->kind) {
    case ASYNC_COPY: memcpy(o->to, o->from, o->count); return DTRAIN_OK;
    case ASYNC_FILL: return dtrain_device_fill(NULL, o->to, o->element, o->element_bytes, o->count);
    case ASYNC_REDUCE:
        for (int i = 0; i < o->n + o->m; i++) /* whoever frees memory must have waited for this */
            if (async_memory(i < o->n ? o->in[i] : o->out[i - o->n], 1) != DTRAIN_MEMORY_DEVICE)
                TEST_FAIL("fake: a queue came to memory that was freed before");
        if (o->op == DTRAIN_MEAN && o->n == 1 && o->factor != 1) /* by a divisor of its own */
            return async_divide(o);
        return dtrain_device_reduce(NULL, o->dtype, o->op, o->in, o->n, o->out, o->m, o->begin, o->count);
    case ASYNC_CONVERT: return dtrain_convert(o->from, o->dtype, o->to, o->other, o->count);
    case ASYNC_SCALE: return dtrain_device_scale(NULL, o->dtype, o->to, o->factor, o->count);
    case ASYNC_AXPY: return dtrain_device_axpy(NULL, o->dtype, o->to, o->factor, o->from, o->count);
    case ASYNC_ADAMW: async_adamw_now(&o->adamw); return DTRAIN_OK;
    case ASYNC_SGD: async_sgd_now(&o->sgd); return DTRAIN_OK;
    case ASYNC_SQUARES: return dtrain_device_squares(NULL, (const float *)o->from, o->count, (int64_t *)o->to);
    case ASYNC_CLIP:
        return dtrain_device_clip(NULL, (const int64_t *)o->from, (float)o->factor, o->norm, (float *)o->to, o->count);
    case ASYNC_PACK: return dtrain_device_pack(NULL, o->dtype, o->begin, (const float *)o->from, o->count, o->to);
    case ASYNC_UNPACK: return dtrain_device_unpack(NULL, o->dtype, o->begin, o->from, (float *)o->to, o->count, o->n);
    case ASYNC_AWAIT: async_event_block(o); return DTRAIN_OK;
    case ASYNC_SLEEP: usleep((useconds_t)o->count); return DTRAIN_OK;
    default: return DTRAIN_OK;
    }
}

static void async_dawdle(async_device *d)
{
    d->random = d->random * 6364136223846793005u + 1442695040888963407u;
    unsigned draw = (unsigned)(d->random >> 40);
    if (d->delay_us == 0)
        return;
    if (draw % 4 == 0)
        usleep(draw / 4 % (d->delay_us + 1));
    else if (draw % 4 == 1)
        sched_yield();
}

/* A device that has failed waits for nobody any more, so that peers may still be in its memory: as with CUDA that is
 * free when the device ends. */
static void async_free(const async_device *d, const async_op *o, int failed)
{
    int found = 0;
    pthread_mutex_lock(&async_blocks_mutex);
    for (int i = 0; i < ASYNC_BLOCKS && !found; i++)
        if (async_blocks[i].memory == o->to) {
            found = (size_t)async_blocks[i].kind == o->count && async_blocks[i].owner == d;
            if (failed)
                async_blocks[i].late = 1;
            else
                memset(&async_blocks[i], 0, sizeof async_blocks[i]);
        }
    pthread_mutex_unlock(&async_blocks_mutex);
    if (!found)
        TEST_FAIL("fake: %p was not allocated so on %s", o->to, d->name);
    if (!failed)
        free(o->to);
}

/* Notes whether a queue has failed, also with the device that it was made of. */
static void async_fail(async_device *d, int fails)
{
    d->failed |= fails;
    if (d->of != NULL && fails)
        __atomic_store_n(&d->of->queue_failed, 1, __ATOMIC_SEQ_CST);
}

/* Does one operation. A device that has failed does nothing any more, but its events pass and its memory is freed. */
static void async_turn(async_device *d, async_op *o, int failed)
{
    async_dawdle(d);
    if (d->done + 1 == d->kill_done)
        kill(getpid(), SIGKILL);
    int queue_failed = __atomic_load_n(&d->queue_failed, __ATOMIC_SEQ_CST); /* what it was to wait for is not there */
    int fails = d->done + 1 == d->fail_done || (!failed && !queue_failed && async_perform(o) != DTRAIN_OK);
    if (o->kind == ASYNC_RECORD)
        async_event_reach(o);
    if (o->kind == ASYNC_FREE)
        async_free(d, o, failed || __atomic_load_n(&d->queue_failed, __ATOMIC_SEQ_CST));
    if (o->event != NULL)
        async_event_drop(o->event);
    free(o);
    pthread_mutex_lock(&d->mutex);
    d->done++;
    async_fail(d, fails);
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

static void *async_main(void *pointer)
{
    async_device *d = (async_device *)pointer;
    for (;;) {
        pthread_mutex_lock(&d->mutex);
        while (d->first == NULL && !d->leaving)
            pthread_cond_wait(&d->changed, &d->mutex);
        async_op *o = d->first;
        if (o != NULL && (d->first = o->next) == NULL)
            d->last = &d->first;
        int failed = d->failed;
        pthread_mutex_unlock(&d->mutex);
        if (o == NULL)
            return NULL;
        async_turn(d, o, failed);
    }
}

static dtrain_status async_broken(const async_device *d)
{
    return dtrain_error_set(DTRAIN_ERR_IO, "the fake device %s broke", d->name);
}

/* Counts a call; an error where the device has failed, or is to fail in this one. */
static dtrain_status async_call(async_device *d)
{
    pthread_mutex_lock(&d->mutex);
    async_fail(d, ++d->calls == d->fail_call);
    int failed = d->failed;
    pthread_mutex_unlock(&d->mutex);
    return failed ? async_broken(d) : DTRAIN_OK;
}

static async_op *async_new(async_kind kind)
{
    async_op *o = (async_op *)calloc(1, sizeof *o);
    o->kind = kind;
    return o;
}

static void async_push(async_device *d, async_op *o)
{
    pthread_mutex_lock(&d->mutex);
    *d->last = o;
    d->last = &o->next;
    d->queued++;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

static dtrain_status async_wait(dtrain_device *device)
{
    async_device *d = async_of(device);
    dtrain_status status = async_call(d);
    pthread_mutex_lock(&d->mutex);
    while (d->done < d->queued)
        pthread_cond_wait(&d->changed, &d->mutex);
    int failed = d->failed;
    pthread_mutex_unlock(&d->mutex);
    return status == DTRAIN_OK && failed ? async_broken(d) : status;
}

static dtrain_status async_allocate(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer)
{
    async_device *d = async_of(device);
    if (++d->allocations == d->fail_allocation)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "the fake device %s has no %zu bytes", d->name, bytes);
    if (posix_memalign(pointer, 256, bytes) != 0)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "fake: no %zu bytes", bytes);
    memset(*pointer, 0xa5, bytes);
    pthread_mutex_lock(&async_blocks_mutex);
    int i = 0;
    while (i < ASYNC_BLOCKS && async_blocks[i].memory != NULL)
        i++;
    CHECK(i < ASYNC_BLOCKS);
    async_blocks[i].memory = (unsigned char *)*pointer;
    async_blocks[i].bytes = bytes;
    async_blocks[i].kind = memory;
    async_blocks[i].owner = d;
    pthread_mutex_unlock(&async_blocks_mutex);
    return DTRAIN_OK;
}

static void async_release(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    async_op *o = async_new(ASYNC_FREE);
    o->to = pointer;
    o->count = (size_t)memory;
    async_push(async_of(device), o);
}

/* An error unless this is memory of a device, of this one or another. */
static dtrain_status async_own(const void *pointer, size_t bytes)
{
    if (bytes == 0 || async_memory(pointer, bytes) == DTRAIN_MEMORY_DEVICE)
        return DTRAIN_OK;
    TEST_FAIL("fake: %p and %zu bytes are no device's", pointer, bytes);
    return dtrain_error_set(DTRAIN_ERR_INVALID, "fake: %p and %zu bytes are no device's", pointer, bytes);
}

static dtrain_status async_copy(dtrain_device *device, void *to, const void *from, size_t bytes)
{
    dtrain_status status = async_call(async_of(device));
    if (status != DTRAIN_OK)
        return status;
    int at_once = async_memory(to, bytes) != 0 && async_memory(from, bytes) != 0;
    async_op *o = async_new(ASYNC_COPY);
    o->to = to;
    o->from = from;
    o->count = bytes;
    async_push(async_of(device), o);
    return at_once ? DTRAIN_OK : async_wait(device);
}

static dtrain_status async_fill(dtrain_device *device, void *to, const void *element, size_t element_bytes,
                                size_t count)
{
    dtrain_status status = async_call(async_of(device));
    if (status == DTRAIN_OK)
        status = async_own(to, element_bytes * count);
    if (status != DTRAIN_OK)
        return status;
    async_op *o = async_new(ASYNC_FILL);
    o->to = to;
    memcpy(o->element, element, element_bytes);
    o->element_bytes = element_bytes;
    o->count = count;
    async_push(async_of(device), o);
    return DTRAIN_OK;
}

static dtrain_status async_event_create(dtrain_device *device, dtrain_device_event **event)
{
    async_device *d = async_of(device);
    dtrain_status status = async_call(d);
    if (status != DTRAIN_OK)
        return status;
    async_event *e = (async_event *)calloc(1, sizeof *e);
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->passed, NULL);
    e->holders = 1;
    d->events++;
    d->events_open++;
    *event = (dtrain_device_event *)e;
    return DTRAIN_OK;
}

static void async_event_destroy(dtrain_device *device, dtrain_device_event *event)
{
    async_of(device)->events_open--;
    async_event_drop((async_event *)event);
}

static dtrain_status async_event_put(dtrain_device *device, dtrain_device_event *event, async_kind kind)
{
    dtrain_status status = async_call(async_of(device));
    if (status != DTRAIN_OK)
        return status;
    async_op *o = async_new(kind);
    o->event = (async_event *)event;
    pthread_mutex_lock(&o->event->mutex);
    o->event->holders++;
    o->event->recorded += kind == ASYNC_RECORD;
    o->record = o->event->recorded;
    pthread_mutex_unlock(&o->event->mutex);
    async_push(async_of(device), o);
    return DTRAIN_OK;
}

static dtrain_status async_event_record(dtrain_device *device, dtrain_device_event *event)
{
    return async_event_put(device, event, ASYNC_RECORD);
}

static dtrain_status async_event_await(dtrain_device *device, dtrain_device_event *event)
{
    return async_event_put(device, event, ASYNC_AWAIT);
}

static dtrain_status async_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    async_event *e = (async_event *)event;
    dtrain_status status = async_call(async_of(device));
    pthread_mutex_lock(&e->mutex);
    *done = e->reached == e->recorded;
    pthread_mutex_unlock(&e->mutex);
    return status;
}

static dtrain_status async_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
                                  const void *const *in, int n, void *const *out, int m, size_t begin, size_t count)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    dtrain_status status = async_call(async_of(device));
    CHECK(op != DTRAIN_MEAN || n == 1 || divisor == n);
    for (int i = 0; i < n + m && status == DTRAIN_OK; i++)
        status = async_own((const char *)(i < n ? in[i] : out[i - n]) + begin * width, count * width);
    if (status != DTRAIN_OK)
        return status;
    async_op *o = async_new(ASYNC_REDUCE);
    o->dtype = dtype;
    o->op = op;
    memcpy(o->in, in, (size_t)n * sizeof *in);
    memcpy(o->out, out, (size_t)m * sizeof *out);
    o->n = n;
    o->m = m;
    o->factor = divisor;
    o->begin = begin;
    o->count = count;
    async_push(async_of(device), o);
    return DTRAIN_OK;
}

/* to[i] of x of dtype `to_dtype` from from[i], where there is one. */
static dtrain_status async_vector(dtrain_device *device, async_op *o)
{
    dtrain_status status = async_call(async_of(device));
    dtrain_dtype to = o->kind == ASYNC_CONVERT ? o->other : o->dtype;
    if (status == DTRAIN_OK)
        status = async_own(o->to, o->count * dtrain_dtype_bits(to) / 8);
    if (status == DTRAIN_OK && o->from != NULL)
        status = async_own(o->from, o->count * dtrain_dtype_bits(o->dtype) / 8);
    if (status != DTRAIN_OK)
        free(o);
    else
        async_push(async_of(device), o);
    return status;
}

static async_op *async_vector_op(async_kind kind, dtrain_dtype dtype, void *to, const void *from, size_t count,
                                 double factor)
{
    async_op *o = async_new(kind);
    o->dtype = dtype;
    o->to = to;
    o->from = from;
    o->count = count;
    o->factor = factor;
    return o;
}

static dtrain_status async_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                   size_t count)
{
    async_op *o = async_vector_op(ASYNC_CONVERT, from, out, in, count, 0);
    o->other = to;
    return async_vector(device, o);
}

static dtrain_status async_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor, size_t count)
{
    return async_vector(device, async_vector_op(ASYNC_SCALE, dtype, x, NULL, count, factor));
}

static dtrain_status async_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha, const void *x,
                                size_t count)
{
    return async_vector(device, async_vector_op(ASYNC_AXPY, dtype, y, x, count, alpha));
}

static dtrain_status async_coded(dtrain_device *device, async_op *o, dtrain_dtype code, size_t block, size_t count)
{
    dtrain_status status = async_call(async_of(device));
    o->dtype = code;
    o->begin = block;
    o->count = count;
    if (status == DTRAIN_OK)
        async_push(async_of(device), o);
    else
        free(o);
    return status;
}

static dtrain_status async_pack(dtrain_device *device, dtrain_dtype code, size_t block, const float *in, size_t count,
                                void *out)
{
    async_op *o = async_new(ASYNC_PACK);
    o->from = in;
    o->to = out;
    return async_coded(device, o, code, block, count);
}

static dtrain_status async_unpack(dtrain_device *device, dtrain_dtype code, size_t block, const void *in, float *out,
                                  size_t count, int add)
{
    async_op *o = async_new(ASYNC_UNPACK);
    o->from = in;
    o->to = out;
    o->n = add;
    return async_coded(device, o, code, block, count);
}

static dtrain_device *async_begin(async_device *d, int number, uint64_t seed, unsigned delay_us);
static void async_end(async_device *d);

/* Another queue, with the same name and longest delay, which fails apart, but for memory that others may be in. */
static dtrain_status async_queue_create(dtrain_device *device, dtrain_device **made)
{
    async_device *d = async_of(device);
    dtrain_status status = async_call(d);
    if (status != DTRAIN_OK)
        return status;
    async_device *another = (async_device *)malloc(sizeof *another);
    *made = async_begin(another, 0, d->seed = d->seed * 31 + 7, d->delay_us);
    memcpy(another->name, d->name, sizeof another->name);
    another->fail_call = d->queue_fail_call;
    another->fail_done = d->queue_fail_done;
    another->of = d;
    d->queue = another;
    return DTRAIN_OK;
}

static void async_queue_destroy(dtrain_device *made)
{
    async_end(async_of(made));
    free(async_of(made));
}

static dtrain_status async_adamw(dtrain_device *device, const dtrain_device_adamw_step *step)
{
    async_op *o = async_vector_op(ASYNC_ADAMW, DTRAIN_F32, step->params, step->grads, step->count, 0);
    CHECK(step->copy == NULL);
    o->adamw = *step;
    return async_vector(device, o);
}

static dtrain_status async_sgd(dtrain_device *device, const dtrain_device_sgd_step *step)
{
    async_op *o = async_vector_op(ASYNC_SGD, DTRAIN_F32, step->params, step->grads, step->count, 0);
    CHECK(step->copy == NULL && !step->nesterov);
    o->sgd = *step;
    return async_vector(device, o);
}

static dtrain_status async_squares(dtrain_device *device, const float *x, size_t count, int64_t *limbs)
{
    async_op *o = async_vector_op(ASYNC_SQUARES, DTRAIN_F32, limbs, x, count, 0);
    dtrain_status status = async_call(async_of(device));
    if (status == DTRAIN_OK)
        status = async_own(x, count * sizeof *x);
    if (status == DTRAIN_OK)
        async_push(async_of(device), o);
    else
        free(o);
    return status;
}

static dtrain_status async_clip(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm, float *x,
                                size_t count)
{
    async_op *o = async_vector_op(ASYNC_CLIP, DTRAIN_F32, x, limbs, count, (double)max_norm);
    dtrain_status status = async_call(async_of(device));
    o->norm = norm;
    if (status == DTRAIN_OK)
        status = async_own(x, count * sizeof *x);
    if (status == DTRAIN_OK)
        async_push(async_of(device), o);
    else
        free(o);
    return status;
}

static const dtrain_device_ops *async_ops(void)
{
    static const dtrain_device_ops ops = {.allocate = async_allocate,
                                          .release = async_release,
                                          .copy = async_copy,
                                          .fill = async_fill,
                                          .wait = async_wait,
                                          .event_create = async_event_create,
                                          .event_destroy = async_event_destroy,
                                          .event_record = async_event_record,
                                          .event_await = async_event_await,
                                          .event_done = async_event_done,
                                          .convert = async_convert,
                                          .reduce = async_reduce,
                                          .scale = async_scale,
                                          .axpy = async_axpy,
                                          .adamw = async_adamw,
                                          .sgd = async_sgd,
                                          .squares = async_squares,
                                          .clip = async_clip,
                                          .pack = async_pack,
                                          .unpack = async_unpack,
                                          .queue_create = async_queue_create,
                                          .queue_destroy = async_queue_destroy};
    return &ops;
}

/* The queue rests for so long, as an operation of its own. */
__attribute__((unused)) static void async_sleep(dtrain_device *device, unsigned us)
{
    async_op *o = async_new(ASYNC_SLEEP);
    o->count = us;
    async_push(async_of(device), o);
}

static dtrain_device *async_begin(async_device *d, int number, uint64_t seed, unsigned delay_us)
{
    memset(d, 0, sizeof *d);
    snprintf(d->name, sizeof d->name, "fake:%d", number);
    d->device.ops = async_ops();
    d->device.name = d->name;
    d->device.self = d;
    d->last = &d->first;
    d->seed = seed * 64 + (uint64_t)number;
    d->random = (seed * 64 + (uint64_t)number) * 0x9e3779b97f4a7c15u + 1;
    d->delay_us = delay_us;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->changed, NULL);
    CHECK_EQ(pthread_create(&d->thread, NULL, async_main, d), 0);
    return &d->device;
}

/* Blocks until the queue is empty. */
__attribute__((unused)) static void async_idle(async_device *d)
{
    pthread_mutex_lock(&d->mutex);
    while (d->done < d->queued)
        pthread_cond_wait(&d->changed, &d->mutex);
    pthread_mutex_unlock(&d->mutex);
}

/* Ends the queue when it is empty, and checks that nothing is left of what was made on it. */
static void async_end(async_device *d)
{
    pthread_mutex_lock(&d->mutex);
    d->leaving = 1;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
    pthread_join(d->thread, NULL);
    pthread_mutex_lock(&async_blocks_mutex);
    for (int i = 0; i < ASYNC_BLOCKS; i++)
        if (async_blocks[i].memory != NULL && async_blocks[i].owner == d) {
            if (!async_blocks[i].late)
                TEST_FAIL("%zu bytes of %s were not freed", async_blocks[i].bytes, d->name);
            free(async_blocks[i].memory);
            memset(&async_blocks[i], 0, sizeof async_blocks[i]);
        }
    pthread_mutex_unlock(&async_blocks_mutex);
    CHECK_EQ(d->events_open, 0);
    pthread_mutex_destroy(&d->mutex);
    pthread_cond_destroy(&d->changed);
}

#endif
