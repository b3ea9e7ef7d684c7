/* ---- >>guard ----
 * Memory that a program may not use at the moment, for debugging. A range is what one parameter, or its gradient, has
 * in one unit. Ranges open and close. Pages without an open range are closed: pages of parameters to all use, pages of
 * gradients to writing. Pages that also hold other data stay open.
 *
 * A fault in a closed range prints one line that names it: see >>faults. */
#ifndef DTRAIN__GUARD
#define DTRAIN__GUARD
#include "../base/faults.c"
#include "../base/memory.c"

typedef struct dtrain__guard_range {
    uintptr_t begin, end;
    uintptr_t cover; /* up to there, pages hold nothing else */
    const char *name;
    int unit, grad, open;
    size_t region; /* SIZE_MAX: none, because it has no page to itself */
} dtrain__guard_range;

/* The whole pages of adjacent ranges of one kind. */
typedef struct dtrain__guard_region {
    uintptr_t begin, end;
    int grad, shared; /* shared: another object has it too, so it stays open */
    uint16_t *open;   /* a page's: open ranges on it */
} dtrain__guard_region;

typedef struct dtrain__guard {
    struct dtrain__guard *next;
    dtrain_allocator memory;
    dtrain__guard_range *ranges; /* these two lie behind this struct */
    dtrain__guard_region *regions;
    size_t range_count, region_count, page, pages;
    uint16_t *open;
    int rank, off; /* off: all pages are open for good */
} dtrain__guard;

DTRAIN__OF_PROCESS(dtrain__guard *, dtrain__guard_list)

/* ---- the handler ---- */

/* Returns the closed range that an address is in; NULL: none. */
static const dtrain__guard_range *dtrain__guard_find(const dtrain__guard *guard, uintptr_t address)
{
    for (size_t i = 0; i < guard->range_count; i++) {
        const dtrain__guard_range *range = &guard->ranges[i];
        if (address < range->begin || address >= range->end || range->region == SIZE_MAX)
            continue;
        const dtrain__guard_region *region = &guard->regions[range->region];
        if (address >= region->begin && address < region->end &&
            DTRAIN__ATOMIC_LOAD(&region->open[(address - region->begin) / guard->page], RELAXED) == 0)
            return range;
    }
    return NULL;
}

/* Puts the line together. writes: 1: the access was a write, 0: a read, -1: unknown. */
static void dtrain__guard_describe(dtrain__faults_line *line, const dtrain__guard *guard,
                                   const dtrain__guard_range *range, int writes)
{
    dtrain__faults_put(line, "dtrain: rank ");
    dtrain__faults_put_number(line, guard->rank);
    dtrain__faults_put(line, range->grad || writes == 1 ? " wrote " : writes == 0 ? " read " : " used ");
    dtrain__faults_put(line, range->grad ? "the gradient of " : "");
    dtrain__faults_put(line, "parameter ");
    dtrain__faults_put(line, range->name);
    dtrain__faults_put(line, " (unit ");
    dtrain__faults_put_number(line, range->unit);
    dtrain__faults_put(line, !range->grad ? "), which is not gathered: "
                                          : ") after the unit was reduced, so the sum would miss it: write it before "
                                            "dtrain_fsdp_reduce(fsdp, ");
    if (range->grad) {
        dtrain__faults_put_number(line, range->unit);
        dtrain__faults_put(line, "), or for the next micro-batch ");
    }
    dtrain__faults_put(line, "call dtrain_fsdp_gather(fsdp, ");
    dtrain__faults_put_number(line, range->unit);
    dtrain__faults_put(line, ") before");
}

/* Says which closed range a fault was in. It runs in the handler. */
static void dtrain__guard_report(dtrain__faults_line *line, uintptr_t address, int writes)
{
    const dtrain__guard *guard = DTRAIN__ATOMIC_LOAD(dtrain__guard_list(), SEQ_CST);
    for (; guard != NULL && line->bytes == 0; guard = DTRAIN__ATOMIC_LOAD(&guard->next, SEQ_CST)) {
        const dtrain__guard_range *range = dtrain__guard_find(guard, address);
        if (range != NULL)
            dtrain__guard_describe(line, guard, range, writes);
    }
}

/* ---- the list ---- */

/* Leaves out regions that another object guards. Else one object would close memory that the other uses. */
static void dtrain__guard_skip_shared(dtrain__guard *guard)
{
    for (size_t i = 0; i < guard->region_count; i++) {
        dtrain__guard_region *region = &guard->regions[i];
        for (const dtrain__guard *other = *dtrain__guard_list(); other != NULL; other = other->next)
            for (size_t k = 0; k < other->region_count; k++)
                if (region->begin < other->regions[k].end && other->regions[k].begin < region->end)
                    region->end = region->begin;
    }
}

/* Opens guarded regions for good that a new object will use too. */
static void dtrain__guard_share(uintptr_t begin, uintptr_t end)
{
    if (DTRAIN__ATOMIC_LOAD(dtrain__guard_list(), SEQ_CST) == NULL)
        return;
    dtrain__faults_lock();
    for (dtrain__guard *guard = *dtrain__guard_list(); guard != NULL; guard = guard->next)
        for (size_t i = 0; i < guard->region_count; i++) {
            dtrain__guard_region *region = &guard->regions[i];
            if (region->begin >= end || begin >= region->end || region->shared)
                continue;
            region->shared = 1;
            if (!guard->off)
                dtrain__os_protect((void *)region->begin, region->end - region->begin, 2);
        }
    dtrain__faults_unlock();
}

static void dtrain__guard_add(dtrain__guard *guard)
{
    dtrain__faults_lock();
    dtrain__guard_skip_shared(guard);
    guard->next = *dtrain__guard_list();
    DTRAIN__ATOMIC_STORE(dtrain__guard_list(), guard, SEQ_CST);
    dtrain__faults_watch(DTRAIN__FAULTS_GUARDS, dtrain__guard_report);
    dtrain__faults_unlock();
}

static void dtrain__guard_remove(dtrain__guard *guard)
{
    dtrain__faults_lock();
    dtrain__guard **at = dtrain__guard_list();
    while (*at != NULL && *at != guard)
        at = &(*at)->next;
    if (*at == guard)
        DTRAIN__ATOMIC_STORE(at, guard->next, SEQ_CST);
    if (*dtrain__guard_list() == NULL)
        dtrain__faults_watch(DTRAIN__FAULTS_GUARDS, NULL);
    dtrain__faults_unlock();
    dtrain__faults_settle();
}

/* ---- ranges ---- */

/* Opens all regions for good. */
static void dtrain__guard_off(dtrain__guard *guard)
{
    for (size_t i = 0; i < guard->region_count && !guard->off; i++)
        if (guard->regions[i].end > guard->regions[i].begin)
            dtrain__os_protect((void *)guard->regions[i].begin, guard->regions[i].end - guard->regions[i].begin, 2);
    guard->off = 1;
}

/* Opens all that a guard has closed, and frees it. */
static void dtrain__guard_destroy(dtrain__guard *guard)
{
    if (guard == NULL)
        return;
    dtrain_allocator last = guard->memory;
    dtrain__guard_off(guard);
    dtrain__guard_remove(guard);
    dtrain__free(&last, guard->open);
    dtrain__free(&last, guard);
}

/* Makes a guard; NULL: no memory. The caller fills in the ranges, then starts it. */
static dtrain__guard *dtrain__guard_create(size_t ranges, int rank, const dtrain_allocator *memory)
{
    dtrain_allocator own = {memory->resize, memory->user, 0, 0}; /* not counted: it is not in an object's plan */
    size_t bytes = ranges * (sizeof(dtrain__guard_range) + sizeof(dtrain__guard_region));
    dtrain__guard *guard = (dtrain__guard *)dtrain__alloc(&own, sizeof *guard + bytes);
    if (guard == NULL)
        return NULL;
    guard->ranges = (dtrain__guard_range *)(void *)(guard + 1);
    guard->regions = (dtrain__guard_region *)(void *)(guard->ranges + ranges);
    guard->memory = own;
    guard->range_count = ranges;
    guard->page = dtrain__os_page_bytes();
    guard->rank = rank;
    return guard;
}

static int dtrain__guard_compare(const void *a, const void *b)
{
    const dtrain__guard_range *x = *(dtrain__guard_range *const *)a, *y = *(dtrain__guard_range *const *)b;
    if (x->grad != y->grad)
        return x->grad - y->grad;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Finds the regions of ranges, which `order` gives by kind and address. */
static void dtrain__guard_find_regions(dtrain__guard *guard, dtrain__guard_range *const *order)
{
    for (size_t i = 0, end; i < guard->range_count; i = end) {
        const dtrain__guard_range *first = order[i];
        uintptr_t cover = first->cover;
        for (end = i + 1; end < guard->range_count; end++) {
            const dtrain__guard_range *next = order[end];
            if (next->grad != first->grad || next->begin > cover)
                break;
            cover = next->cover > cover ? next->cover : cover;
        }
        uintptr_t low = (first->begin + guard->page - 1) / guard->page * guard->page;
        uintptr_t high = cover / guard->page * guard->page;
        if (first->begin == first->end || low >= high)
            continue;
        for (size_t k = i; k < end; k++)
            order[k]->region = guard->region_count;
        dtrain__guard_region *region = &guard->regions[guard->region_count++];
        region->begin = low;
        region->end = high;
        region->grad = first->grad;
        guard->pages += (high - low) / guard->page;
    }
}

/* Closes or opens pages of a region. If the system refuses, as when it is out of mappings, all regions are opened for
 * good. */
static void dtrain__guard_protect(dtrain__guard *guard, const dtrain__guard_region *region, size_t first, size_t end,
                                  int open)
{
    size_t bytes = (end - first) * guard->page;
    int error = guard->off || region->shared || end == first
                    ? 0
                    : dtrain__os_protect((void *)(region->begin + first * guard->page), bytes, open ? 2 : region->grad);
    if (error == 0)
        return;
    dtrain__guard_off(guard);
    dtrain__log(DTRAIN_LOG_WARN,
                "DTRAIN_DEBUG: rank %d cannot protect memory (%s): nothing is watched, training goes on", guard->rank,
                dtrain__os_error_text(error));
}

/* Counts one more or one fewer open range at addresses [begin, end), and opens or closes their pages. */
static void dtrain__guard_count(dtrain__guard *guard, size_t index, uintptr_t begin, uintptr_t end, int open)
{
    const dtrain__guard_region *region = &guard->regions[index];
    begin = begin > region->begin ? begin : region->begin;
    end = end < region->end ? end : region->end;
    if (begin >= end)
        return;
    size_t at = (begin - region->begin) / guard->page, last = (end - 1 - region->begin) / guard->page, run = at;
    for (; at <= last; at++) {
        uint16_t users = region->open[at];
        DTRAIN__ATOMIC_STORE(&region->open[at], (uint16_t)(open ? users + 1 : users - 1), RELAXED);
        if (users == !open)
            continue;
        dtrain__guard_protect(guard, region, run, at, open);
        run = at + 1;
    }
    dtrain__guard_protect(guard, region, run, last + 1, open);
}

/* Opens or closes a range. It may be open or closed already. */
static void dtrain__guard_set(dtrain__guard *guard, size_t index, int open)
{
    dtrain__guard_range *range = &guard->ranges[index];
    if (range->open == open || range->region == SIZE_MAX)
        return;
    range->open = open;
    dtrain__guard_count(guard, range->region, range->begin, range->end, open);
}

/* Starts to guard, with all ranges closed. Returns 0 if there is no memory. */
static int dtrain__guard_start(dtrain__guard *guard)
{
    size_t at = 0;
    dtrain__guard_range **order =
        (dtrain__guard_range **)dtrain__alloc(&guard->memory, guard->range_count * sizeof *order);
    if (order == NULL)
        return 0;
    for (size_t i = 0; i < guard->range_count; i++) {
        guard->ranges[i].region = SIZE_MAX;
        order[i] = &guard->ranges[i];
    }
    qsort(order, guard->range_count, sizeof *order, dtrain__guard_compare);
    dtrain__guard_find_regions(guard, order);
    dtrain__free(&guard->memory, order);
    guard->open = (uint16_t *)dtrain__alloc(&guard->memory, guard->pages * sizeof *guard->open);
    if (guard->open == NULL) {
        guard->region_count = 0;
        return 0;
    }
    for (size_t i = 0; i < guard->region_count; i++) {
        guard->regions[i].open = guard->open + at;
        at += (guard->regions[i].end - guard->regions[i].begin) / guard->page;
    }
    dtrain__guard_add(guard);
    for (size_t i = 0; i < guard->region_count; i++)
        dtrain__guard_protect(guard, &guard->regions[i], 0,
                              (guard->regions[i].end - guard->regions[i].begin) / guard->page, 0);
    return 1;
}

#endif
