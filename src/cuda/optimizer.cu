/* ---- >>cuda-optimizer ----
 * AdamW and SGD in one pass over memory. The operations are those of >>train-kernels, in their order, each rounded by
 * itself. If a copy is asked for, the new parameters are also stored as BF16. */
#ifndef DTRAIN__CUDA_OPTIMIZER
#define DTRAIN__CUDA_OPTIMIZER
#include "walk.cu"
#include "convert.cu"

#define DTRAIN__CUDA_OPTIMIZER_GROUPS 2 /* groups that a thread loads from each array before it stores the first */

typedef struct dtrain__cuda_adamw_args {
    dtrain_device_adamw_step step;
    dtrain__cuda_walk walk;
} dtrain__cuda_adamw_args;

typedef struct dtrain__cuda_sgd_args {
    dtrain_device_sgd_step step;
    dtrain__cuda_walk walk;
    int decays, remembers; /* a coupled decay; a velocity */
} dtrain__cuda_sgd_args;

typedef struct dtrain__cuda_step_held {
    dtrain__cuda_vector p, g, m, v; /* m: also SGD's velocity */
} dtrain__cuda_step_held;

DTRAIN__CUDA_FN void dtrain__cuda_step_copy(uint16_t *copy, size_t element, int whole, dtrain__cuda_vector p)
{
    uint64_t bits = 0;
    if (copy == NULL)
        return;
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) bits |=
        (uint64_t)dtrain__cuda_bf16_of(dtrain__cuda_float_of(p.word[i])) << 16 * i;
    dtrain__cuda_store_half(copy, element, whole, bits);
}

DTRAIN__CUDA_FN dtrain__cuda_step_held dtrain__cuda_adamw_all_load(const dtrain__cuda_adamw_args *args, size_t element,
                                                                   int whole)
{
    dtrain__cuda_step_held held;
    held.p = dtrain__cuda_load(args->step.params, element, 4, whole);
    held.g = dtrain__cuda_load(args->step.grads, element, 4, whole);
    held.m = dtrain__cuda_load(args->step.m, element, 4, whole);
    held.v = dtrain__cuda_load(args->step.v, element, 4, whole);
    return held;
}

DTRAIN__CUDA_FN void dtrain__cuda_adamw_one(const dtrain_device_adamw_step *c, uint32_t *p_bits, uint32_t g_bits,
                                            uint32_t *m_bits, uint32_t *v_bits)
{
    float p = dtrain__cuda_float_of(*p_bits), g = dtrain__cuda_float_of(g_bits);
    float m = dtrain__cuda_float_of(*m_bits), v = dtrain__cuda_float_of(*v_bits);
    float grown = dtrain__cuda_mul_f32(g, c->rest1),
          square = dtrain__cuda_mul_f32(dtrain__cuda_mul_f32(g, g), c->rest2);
    float spread, change;
    m = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(m, c->beta1), grown);
    v = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(v, c->beta2), square);
    spread = dtrain__cuda_mul_f32(dtrain__cuda_sqrt_f32(v), c->root);
    change = dtrain__cuda_mul_f32(dtrain__cuda_div_f32(m, dtrain__cuda_add_f32(spread, c->eps)), c->rate);
    *p_bits = dtrain__cuda_bits_f32(dtrain__cuda_sub_f32(dtrain__cuda_mul_f32(p, c->keep), change));
    *m_bits = dtrain__cuda_bits_f32(m);
    *v_bits = dtrain__cuda_bits_f32(v);
}

DTRAIN__CUDA_FN void dtrain__cuda_adamw_all_store(const dtrain__cuda_adamw_args *args, size_t element, int whole,
                                                  dtrain__cuda_step_held *held)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++)
        dtrain__cuda_adamw_one(&args->step, &held->p.word[i], held->g.word[i], &held->m.word[i], &held->v.word[i]);
    dtrain__cuda_store(args->step.m, element, 4, whole, held->m);
    dtrain__cuda_store(args->step.v, element, 4, whole, held->v);
    dtrain__cuda_store(args->step.params, element, 4, whole, held->p);
    dtrain__cuda_step_copy(args->step.copy, element, whole, held->p);
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_adamw_all, dtrain__cuda_adamw_args, dtrain__cuda_step_held, 4,
                         DTRAIN__CUDA_OPTIMIZER_GROUPS)

DTRAIN__CUDA_FN dtrain__cuda_step_held dtrain__cuda_sgd_all_load(const dtrain__cuda_sgd_args *args, size_t element,
                                                                 int whole)
{
    dtrain__cuda_step_held held;
    held.p = dtrain__cuda_load(args->step.params, element, 4, whole);
    held.g = dtrain__cuda_load(args->step.grads, element, 4, whole);
    held.m = args->remembers ? dtrain__cuda_load(args->step.velocity, element, 4, whole) : held.g;
    held.v = held.m; /* unused */
    return held;
}

DTRAIN__CUDA_FN void dtrain__cuda_sgd_one(const dtrain__cuda_sgd_args *args, uint32_t *p_bits, uint32_t g_bits,
                                          uint32_t *m_bits)
{
    const dtrain_device_sgd_step *c = &args->step;
    float p = dtrain__cuda_float_of(*p_bits), g = dtrain__cuda_float_of(g_bits);
    if (args->decays)
        g = dtrain__cuda_add_f32(g, dtrain__cuda_mul_f32(p, c->coupled));
    if (args->remembers) {
        float v = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(*m_bits), c->momentum), g);
        g = c->nesterov ? dtrain__cuda_add_f32(g, dtrain__cuda_mul_f32(v, c->momentum)) : v;
        *m_bits = dtrain__cuda_bits_f32(v);
    }
    p = dtrain__cuda_sub_f32(dtrain__cuda_mul_f32(p, c->keep), dtrain__cuda_mul_f32(g, c->lr));
    *p_bits = dtrain__cuda_bits_f32(p);
}

DTRAIN__CUDA_FN void dtrain__cuda_sgd_all_store(const dtrain__cuda_sgd_args *args, size_t element, int whole,
                                                dtrain__cuda_step_held *held)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++)
        dtrain__cuda_sgd_one(args, &held->p.word[i], held->g.word[i], &held->m.word[i]);
    if (args->remembers)
        dtrain__cuda_store(args->step.velocity, element, 4, whole, held->m);
    dtrain__cuda_store(args->step.params, element, 4, whole, held->p);
    dtrain__cuda_step_copy(args->step.copy, element, whole, held->p);
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_sgd_all, dtrain__cuda_sgd_args, dtrain__cuda_step_held, 4,
                         DTRAIN__CUDA_OPTIMIZER_GROUPS)

static dtrain_status dtrain__cuda_adamw(dtrain_device *device, const dtrain_device_adamw_step *step)
{
    const dtrain__cuda_array arrays[] = {{"params", step->params, 4, step->count, 0},
                                         {"grads", step->grads, 4, step->count, 0},
                                         {"m", step->m, 4, step->count, 0},
                                         {"v", step->v, 4, step->count, 0},
                                         {"copy", step->copy, 2, step->count, 0},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_adamw_args args;
    args.step = *step;
    dtrain_status status = dtrain__cuda_walk_arrays(device, "device_adamw", arrays, &args.walk);
    return status == DTRAIN_OK ? dtrain__cuda_adamw_all_walk(device, "device_adamw", &args) : status;
}

static dtrain_status dtrain__cuda_sgd(dtrain_device *device, const dtrain_device_sgd_step *step)
{
    const dtrain__cuda_array arrays[] = {{"params", step->params, 4, step->count, 0},
                                         {"grads", step->grads, 4, step->count, 0},
                                         {"velocity", step->velocity, 4, step->count, 0},
                                         {"copy", step->copy, 2, step->count, 0},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_sgd_args args;
    uint32_t coupled;
    args.step = *step;
    memcpy(&coupled, &step->coupled, sizeof coupled);
    args.decays = coupled << 1 != 0; /* by its bits, as the CPU may treat a subnormal as zero */
    args.remembers = step->velocity != NULL;
    dtrain_status status = dtrain__cuda_walk_arrays(device, "device_sgd", arrays, &args.walk);
    return status == DTRAIN_OK ? dtrain__cuda_sgd_all_walk(device, "device_sgd", &args) : status;
}

#endif
