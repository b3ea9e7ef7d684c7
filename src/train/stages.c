/* ---- >>stages ----
 * Cutting layers into the stages of a pipeline. */
#ifndef DTRAIN__STAGES
#define DTRAIN__STAGES
#include "pipeline.h"
#include "../base/status.c"
#include "../base/memory.c"
#include <math.h>

static dtrain_status dtrain__stages_check(const char *call, int layers, int stages, const int *begins)
{
    if (begins == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: begins is NULL, expected stages + 1 numbers", call);
    if (stages >= 1 && stages <= layers)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %d layers make no %d stages; 1 to %d would fit", call, layers,
                        stages, layers > 1 ? layers : 1);
}

DTRAIN_API dtrain_status dtrain_split_into_stages(int layers, int stages, int *begins)
{
    dtrain_status status = dtrain__stages_check("split_into_stages", layers, stages, begins);
    if (status != DTRAIN_OK)
        return status;
    for (int s = 0, begin = 0; s <= stages; s++) {
        begins[s] = begin;
        begin += layers / stages + (s < layers % stages);
    }
    return DTRAIN_OK;
}

/* Fills stages up to most, each with a layer at least, so that those to come have one left as well. Returns whether all
 * layers have found a place. */
static int dtrain__stages_fill(const double *costs, int layers, int stages, double most, int *begins)
{
    int layer = 0;
    for (int s = 0; s < stages; s++) {
        double cost = costs[layer];
        begins[s] = layer++;
        if (cost > most)
            return 0;
        while (layer < layers - (stages - s - 1) && cost + costs[layer] <= most)
            cost += costs[layer++];
    }
    begins[stages] = layers;
    return layer == layers;
}

/* The least that is enough for all stages, to the last bit: numbers of at least 0 are in the order of their bits. */
static double dtrain__stages_least(const double *costs, int layers, int stages, int *begins)
{
    double most = HUGE_VAL;
    uint64_t low = 0, high, middle; /* high is enough, and what is below low is not */
    memcpy(&high, &most, sizeof high);
    while (low < high) {
        middle = low + (high - low) / 2;
        memcpy(&most, &middle, sizeof most);
        if (dtrain__stages_fill(costs, layers, stages, most, begins))
            high = middle;
        else
            low = middle + 1;
    }
    memcpy(&most, &high, sizeof most);
    return most;
}

DTRAIN_API dtrain_status dtrain_split_by_cost(const double *costs, int layers, int stages, int *begins)
{
    dtrain_status status = dtrain__stages_check("split_by_cost", layers, stages, begins);
    if (status != DTRAIN_OK)
        return status;
    if (costs == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "split_by_cost: costs is NULL, expected %d numbers", layers);
    for (int i = 0; i < layers; i++)
        if (!(costs[i] >= 0.0 && costs[i] < HUGE_VAL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "split_by_cost: layer %d costs %g, expected a finite number of at least 0", i,
                                costs[i]);
    dtrain__stages_fill(costs, layers, stages, dtrain__stages_least(costs, layers, stages, begins), begins);
    return DTRAIN_OK;
}

#endif
