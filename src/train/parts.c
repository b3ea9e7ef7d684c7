/* ---- >>parts ----
 * Cutting a rank's parameters out of the whole model's: layers of a stage, rows and columns of a tensor-parallel rank.
 * Also copies, and where elements lie in the whole. >>params checks a part together with its table. */
#ifndef DTRAIN__PARTS
#define DTRAIN__PARTS
#include "params.c"

static const char *dtrain__parts_name(const dtrain_param *param)
{
    return param->name != NULL ? param->name : "without name";
}

/* Makes param a part; a whole parameter becomes a part that is all of itself. */
static void dtrain__parts_begin(dtrain_param *param, dtrain_param_part *part)
{
    if (param->part == NULL) {
        memset(part, 0, sizeof *part);
        memcpy(part->shape, param->shape, sizeof part->shape);
    } else if (param->part != part) {
        *part = *param->part;
    }
    param->ndim = dtrain__params_ndim(param); /* a size may become 0 */
    param->part = part;
}

static dtrain_status dtrain__parts_check_cut(const dtrain_param *param, int dim, size_t blocks, int parts, int index)
{
    const char *name = dtrain__parts_name(param);
    int ndim = dtrain__params_ndim(param), first = param->stacked != 0;
    if (ndim > DTRAIN_MAX_DIMS || dim < first || dim >= ndim)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_cut: parameter %s of %d dimensions has no dim %d to cut: expected %d to %d",
                            name, ndim, dim, first, ndim - 1);
    if (param->shape[dim] % blocks != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_cut: parameter %s has %zu in dim %d, which is not %zu equal blocks", name,
                            param->shape[dim], dim, blocks);
    if (parts < 1 || index < 0 || index >= parts)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_cut: parameter %s: index is %d and parts %d, expected an index from 0 to "
                            "parts - 1",
                            name, index, parts);
    int cut = param->part != NULL ? dtrain__params_cut_dim(param) : -1;
    if (cut >= 0 && cut < DTRAIN_MAX_DIMS && param->shape[cut] != param->part->shape[cut])
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_cut: parameter %s is cut along dim %d already: a parameter is cut once", name,
                            param->part->dim);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_param_cut(dtrain_param *param, dtrain_param_part *part, int dim, size_t blocks,
                                          size_t granule, int parts, int index)
{
    size_t first;
    blocks = blocks > 0 ? blocks : 1;
    granule = granule > 0 ? granule : 1;
    if (param == NULL || part == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_param_cut: param and part are needed, got NULL");
    dtrain_status status = dtrain__parts_check_cut(param, dim, blocks, parts, index);
    if (status != DTRAIN_OK)
        return status;
    size_t block = param->shape[dim] / blocks, granules = block / granule + (block % granule != 0);
    size_t end = dtrain__split(granules, parts, index, &first) + first;
    dtrain__parts_begin(param, part);
    part->dim = dim;
    part->blocks = blocks;
    part->begin = first < granules ? first * granule : block; /* a short last granule ends the block */
    end = end < granules ? end * granule : block;
    param->shape[dim] = blocks * (end - part->begin);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_param_layers(dtrain_param *param, dtrain_param_part *part, size_t first, size_t count)
{
    if (param == NULL || part == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_param_layers: param and part are needed, got NULL");
    if (!param->stacked)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_layers: parameter %s is not stacked: list it on the stage that has it",
                            dtrain__parts_name(param));
    if (count < 1 || first > param->shape[0] || count > param->shape[0] - first)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_param_layers: parameter %s has %zu layers: first is %zu and count %zu, expected 1 "
                            "or more of these layers",
                            dtrain__parts_name(param), param->shape[0], first, count);
    dtrain__parts_begin(param, part);
    part->first_layer += first;
    param->shape[0] = count;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_param_copies(dtrain_param *param, dtrain_param_part *part, int copies, int copy)
{
    if (param == NULL || part == NULL)
        return;
    dtrain__parts_begin(param, part);
    part->copies = copies;
    part->copy = copy;
}

/* Returns the index in the whole tensor of an index of dimension d. */
static size_t dtrain__parts_index(const dtrain_param *param, int d, size_t index)
{
    const dtrain_param_part *part = param->part;
    if (d != dtrain__params_cut_dim(param))
        return param->stacked && d == 0 ? part->first_layer + index : index;
    size_t blocks = dtrain__params_blocks(param), mine = param->shape[d] / blocks;
    return index / mine * (part->shape[d] / blocks) + part->begin + index % mine;
}

DTRAIN_API size_t dtrain_param_whole_index(const dtrain_param *param, size_t element)
{
    size_t place = 0, stride = 1;
    if (param == NULL || param->part == NULL || dtrain_param_elements(param) == 0)
        return element;
    for (int d = dtrain__params_ndim(param) - 1; d >= 0; d--) {
        place += dtrain__parts_index(param, d, element % param->shape[d]) * stride;
        stride *= param->part->shape[d];
        element /= param->shape[d];
    }
    return place;
}

#endif
