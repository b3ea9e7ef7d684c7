/* ---- >>fsdp-debug ----
 * Checks of the caller's order of calls, with DTRAIN_DEBUG=1 or desc.debug.
 *
 * FSDP guards memory. A unit's parameters are open from its gather to its release. Its gradients are open until they
 * are taken over, and again from its next gather. The library opens them while it uses them itself. Units are not
 * gathered ahead, because a unit under way cannot be closed. Parameters that are kept in full may be read at any time,
 * and stay open. Nothing is guarded on a device.
 *
 * DDP has no gathers. It compares gradients with a hash from their last reduce. */
#ifndef DTRAIN__FSDP_DEBUG
#define DTRAIN__FSDP_DEBUG
#include "fsdp.c"
#include "guard.c"

static int dtrain__fsdp_debug_asked(int desc)
{
    return desc != 0 || dtrain__faults_asked();
}

/* ---- FSDP: memory that is guarded ---- */

/* Opens or closes a unit's parameters, or its gradients. */
static void dtrain__fsdp_debug_set(const dtrain_fsdp *fsdp, int number, int grads, int open)
{
    dtrain__guard *guard = fsdp->guard;
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = layout->units[number].first; guard != NULL && i < layout->units[number].end; i++)
        dtrain__guard_set(guard, i + (grads ? layout->cut_count : 0), open);
}

/* Says whether a unit that is not held stays readable. */
static int dtrain__fsdp_debug_stays(const dtrain_fsdp *fsdp)
{
    return fsdp->schedule.keeps || fsdp->desc.no_reshard_after_forward;
}

/* Says whether a unit's gradients are open. */
static int dtrain__fsdp_debug_grads_open(const dtrain_fsdp *fsdp, int number)
{
    const dtrain__guard *guard = fsdp->guard;
    int open = guard == NULL;
    for (size_t i = fsdp->layout.units[number].first; guard != NULL && i < fsdp->layout.units[number].end; i++)
        open |= guard->ranges[i + fsdp->layout.cut_count].open;
    return open;
}

/* Describes the range of a cut, of its parameter or its gradient. */
static void dtrain__fsdp_debug_range(const dtrain_fsdp *fsdp, size_t index, int grad)
{
    const dtrain__layout *layout = &fsdp->layout;
    const dtrain__layout_cut *cut = &layout->cuts[index];
    const dtrain_param *param = &layout->table[cut->param];
    dtrain__guard_range *range = &fsdp->guard->ranges[index + (grad ? layout->cut_count : 0)];
    range->name = param->name;
    range->unit = cut->unit;
    range->grad = grad;
    if (cut->count == 0 || (grad ? !cut->trained : layout->resident))
        return;
    range->begin = (uintptr_t)(grad ? cut->grads : cut->data);
    range->end = range->cover = range->begin + cut->count * sizeof(float);
    if (!(fsdp->state.reserved[cut->param] & (1 << grad)) || cut->element + cut->count < dtrain_param_elements(param))
        return;
    /* addresses between two reserved parameters, and behind the last, are unused */
    const dtrain__pages *pages = &fsdp->state.pages[grad];
    size_t next = cut->param + 1 < layout->table_count ? layout->offsets[cut->param + 1] : pages->bytes;
    range->cover = (uintptr_t)pages->base + next;
}

/* Begins to guard the memory of an object. */
static int dtrain__fsdp_debug_start(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    dtrain__guard *guard = dtrain__guard_create(2 * layout->cut_count, dtrain__fsdp_rank(fsdp), &fsdp->memory);
    fsdp->guard = guard;
    for (size_t i = 0; guard != NULL && i < layout->cut_count; i++) {
        dtrain__fsdp_debug_range(fsdp, i, 0);
        dtrain__fsdp_debug_range(fsdp, i, 1);
    }
    if (guard == NULL || !dtrain__guard_start(guard))
        return 0;
    fsdp->state.pages[0].few = fsdp->state.pages[1].few = SIZE_MAX; /* pages that are closed do not move */
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        uintptr_t own = guard->ranges[i].begin + cut->own * sizeof(float);
        if (cut->home && !layout->resident && guard->ranges[i].region != SIZE_MAX) /* stays open for good */
            dtrain__guard_count(guard, guard->ranges[i].region, own, own + cut->own_count * sizeof(float), 1);
    }
    for (int i = 0; i < layout->unit_count; i++)
        dtrain__fsdp_debug_set(fsdp, i, 1, 1);
    return 1;
}

/* Opens memory that this object gets and that is guarded for an older one, which the program will destroy later. */
static void dtrain__fsdp_debug_share(const dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count && fsdp->device.queue == NULL; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        uintptr_t data = (uintptr_t)param->data, grad = (uintptr_t)param->grad;
        size_t count = dtrain_param_elements(param);
        if (data != 0 && !(fsdp->state.reserved[i] & 1))
            dtrain__guard_share(data, data + count * dtrain_dtype_bits(param->dtype) / 8);
        if (grad != 0 && !(fsdp->state.reserved[i] & 2))
            dtrain__guard_share(grad, grad + count * sizeof(float));
    }
}

static void dtrain__fsdp_debug_destroy(dtrain_fsdp *fsdp)
{
    dtrain_allocator memory = {fsdp->memory.resize, fsdp->memory.user, 0, 0};
    dtrain__guard_destroy(fsdp->guard);
    dtrain__free(&memory, fsdp->left);
    fsdp->guard = NULL;
    fsdp->left = NULL;
}

/* Makes what an object needs for these checks. Without memory for them, training continues unchecked. */
static void dtrain__fsdp_debug_create(dtrain_fsdp *fsdp)
{
    dtrain_allocator memory = {fsdp->memory.resize, fsdp->memory.user, 0, 0};
    int done;
    if (fsdp->device.queue != NULL) {
        dtrain__log(DTRAIN_LOG_INFO, "DTRAIN_DEBUG: parameters on %s are not watched on rank %d",
                    dtrain_device_name(fsdp->device.queue), dtrain__fsdp_rank(fsdp));
        fsdp->desc.debug = 0;
        return;
    }
    if (fsdp->ddp) {
        fsdp->left = (uint64_t *)dtrain__alloc(&memory, fsdp->layout.cut_count * sizeof *fsdp->left);
        done = fsdp->left != NULL;
    } else {
        done = dtrain__fsdp_debug_start(fsdp);
    }
    if (done)
        return;
    dtrain__fsdp_debug_destroy(fsdp);
    dtrain__log(DTRAIN_LOG_WARN, "DTRAIN_DEBUG: rank %d has no memory for it: nothing is watched, training goes on",
                dtrain__fsdp_rank(fsdp));
}

/* ---- DDP: gradients that are compared ---- */

/* Returns a hash of a range's gradients, never 0. */
static uint64_t dtrain__fsdp_debug_hash(const dtrain__layout_cut *cut)
{
    const unsigned char *at = (const unsigned char *)cut->grads;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < cut->count; i++) {
        uint32_t word;
        memcpy(&word, at + i * sizeof word, sizeof word);
        hash = (hash ^ word) * 0x100000001b3u; /* an odd factor: if one word differs, the hash does */
    }
    return hash != 0 ? hash : 1;
}

/* Fails the step if a unit's gradients have changed since their last reduce. */
static void dtrain__fsdp_debug_compare(dtrain_fsdp *fsdp, int number)
{
    char why[160];
    for (size_t i = fsdp->layout.units[number].first; fsdp->left != NULL && i < fsdp->layout.units[number].end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (fsdp->left[i] == 0 || dtrain__fsdp_debug_hash(cut) == fsdp->left[i])
            continue;
        snprintf(why, sizeof why, "the gradient of %.40s (unit %d) was written after dtrain_ddp_reduce",
                 fsdp->layout.table[cut->param].name, number);
        dtrain__fsdp_fail(fsdp, why);
    }
}

/* Notes a unit's gradients after its last reduce of a step. */
static void dtrain__fsdp_debug_note(const dtrain_fsdp *fsdp, int number)
{
    for (size_t i = fsdp->layout.units[number].first; fsdp->left != NULL && i < fsdp->layout.units[number].end; i++)
        if (fsdp->layout.cuts[i].trained)
            fsdp->left[i] = dtrain__fsdp_debug_hash(&fsdp->layout.cuts[i]);
}

/* Compares all units at the end of a step. */
static void dtrain__fsdp_debug_compare_all(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++)
        dtrain__fsdp_debug_compare(fsdp, i);
    if (fsdp->left != NULL)
        memset(fsdp->left, 0, fsdp->layout.cut_count * sizeof *fsdp->left);
}

#endif
