/* When a GPU's queue was at what: spans between two events of CUDA's, the last GPU_SPANS of them, added to the Chrome
 * trace that dtrain_fsdp_trace writes, on the same clock. Emulated queues run at once, and spans are the CPU's. Include
 * gpu_kernels.h first. */
#ifndef GPU_TRACE_H
#define GPU_TRACE_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define GPU_SPANS 4096

#ifdef DTRAIN_CUDA_EMULATE
typedef int64_t gpu_time;
#else
typedef cudaEvent_t gpu_time;
#endif

typedef struct gpu_span {
    const char *what;
    int unit;
    gpu_time begin, end;
} gpu_span;

typedef struct gpu_trace {
    gpu_span *spans; /* [GPU_SPANS], the oldest overwritten; NULL: nothing is traced */
    size_t count;    /* so far */
    gpu_time base;   /* passed at base_ns */
    int64_t base_ns;
} gpu_trace;

static int64_t gpu_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Marks a time in the queue; the event is made where there is none yet. */
static void gpu_mark(gpu *g, gpu_time *at)
{
#ifdef DTRAIN_CUDA_EMULATE
    (void)g;
    *at = gpu_now_ns();
#else
    if (*at == NULL)
        gpu_note(g, "cudaEventCreate", cudaEventCreate(at));
    if (*at != NULL)
        gpu_note(g, "cudaEventRecord", cudaEventRecord(*at, g->stream));
#endif
}

/* Microseconds from one mark to another, both passed. */
static double gpu_between_us(gpu *g, gpu_time from, gpu_time to)
{
#ifdef DTRAIN_CUDA_EMULATE
    (void)g;
    return (double)(to - from) * 1e-3;
#else
    float ms = 0;
    gpu_note(g, "cudaEventElapsedTime", cudaEventElapsedTime(&ms, from, to));
    return (double)ms * 1e3;
#endif
}

static dtrain_status gpu_trace_open(gpu_trace *trace, gpu *g)
{
    trace->spans = (gpu_span *)calloc(GPU_SPANS, sizeof *trace->spans);
    if (trace->spans == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "no memory for %d spans of a trace", GPU_SPANS);
    gpu_mark(g, &trace->base);
    dtrain_status status = dtrain_device_wait(g->device);
    trace->base_ns = gpu_now_ns();
    return status == DTRAIN_OK ? g->status : status;
}

static void gpu_trace_close(gpu_trace *trace)
{
#ifndef DTRAIN_CUDA_EMULATE
    for (size_t i = 0; trace->spans != NULL && i < GPU_SPANS; i++) {
        if (trace->spans[i].begin != NULL)
            cudaEventDestroy(trace->spans[i].begin);
        if (trace->spans[i].end != NULL)
            cudaEventDestroy(trace->spans[i].end);
    }
    if (trace->base != NULL)
        cudaEventDestroy(trace->base);
#endif
    free(trace->spans);
    memset(trace, 0, sizeof *trace);
}

/* Around what is queued for one unit. */
static void gpu_span_begin(gpu_trace *trace, gpu *g, const char *what, int unit)
{
    if (trace->spans == NULL)
        return;
    gpu_span *span = &trace->spans[trace->count % GPU_SPANS];
    span->what = what;
    span->unit = unit;
    gpu_mark(g, &span->begin);
}

static void gpu_span_end(gpu_trace *trace, gpu *g)
{
    if (trace->spans != NULL)
        gpu_mark(g, &trace->spans[trace->count++ % GPU_SPANS].end);
}

/* Adds the spans to the trace at path, as a lane of their own; waits for the queue. */
static dtrain_status gpu_trace_add(gpu_trace *trace, gpu *g, const char *path)
{
    static const char end[] = "\n]}\n"; /* of the file */
    size_t first = trace->count > GPU_SPANS ? trace->count - GPU_SPANS : 0;
    dtrain_status status = dtrain_device_wait(g->device);
    FILE *file = status == DTRAIN_OK ? fopen(path, "r+") : NULL;
    if (status != DTRAIN_OK)
        return status;
    if (file == NULL || fseek(file, -(long)(sizeof end - 1), SEEK_END) != 0) {
        if (file != NULL)
            fclose(file);
        return dtrain_error_set(DTRAIN_ERR_IO, "the trace %s cannot be written", path);
    }
    fprintf(file, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":9,\"args\":{\"name\":\"stream of %s\"}}",
            dtrain_device_name(g->device));
    /* Far from the base milliseconds in float32 are coarse: they are counted from the first span. */
    gpu_time from = trace->spans[first % GPU_SPANS].begin;
    double from_us = trace->count > 0 ? (double)trace->base_ns * 1e-3 + gpu_between_us(g, trace->base, from) : 0;
    for (size_t i = first; i < trace->count; i++) {
        const gpu_span *span = &trace->spans[i % GPU_SPANS];
        fprintf(file, ",\n{\"name\":\"%s unit %d\",\"ph\":\"X\",\"pid\":0,\"tid\":9,\"ts\":%.3f,\"dur\":%.3f}",
                span->what, span->unit, from_us + gpu_between_us(g, from, span->begin),
                gpu_between_us(g, span->begin, span->end));
    }
    fputs(end, file);
    int bad = ferror(file);
    bad |= fclose(file) != 0;
    return bad ? dtrain_error_set(DTRAIN_ERR_IO, "the trace %s cannot be written", path) : g->status;
}

#endif
