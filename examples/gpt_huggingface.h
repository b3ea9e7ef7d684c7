/* train_gpt --open and --export: directories with a GPT-2 in the layout of Hugging Face, config.json and safetensors,
 * which transformers' GPT2LMHeadModel writes and reads. The arithmetic is that of gpt.h; dropout is not computed.
 *
 *                    Hugging Face                          here
 *   layers           a name and a tensor for each          one tensor stacked over layers
 *   linear weights   [inputs, outputs] (Conv1D)            [outputs, inputs]
 *   names            with or without "transformer."        as in the table of gpt.h
 *
 * Include dtrain.h, gpt.h, gpt_flags.h and gpt_text.h first. */
#ifndef GPT_HUGGINGFACE_H
#define GPT_HUGGINGFACE_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each parameter's name, before the layer's number and after it. */
static const struct {
    const char *before, *after; /* after: NULL where there are no layers */
    int transposed;
} gpt_hf_names[GPT_PARAMS] = {
    {"wte.weight", NULL, 0},          {"wpe.weight", NULL, 0},          {"h.", ".ln_1.weight", 0},
    {"h.", ".ln_1.bias", 0},          {"h.", ".attn.c_attn.weight", 1}, {"h.", ".attn.c_attn.bias", 0},
    {"h.", ".attn.c_proj.weight", 1}, {"h.", ".attn.c_proj.bias", 0},   {"h.", ".ln_2.weight", 0},
    {"h.", ".ln_2.bias", 0},          {"h.", ".mlp.c_fc.weight", 1},    {"h.", ".mlp.c_fc.bias", 0},
    {"h.", ".mlp.c_proj.weight", 1},  {"h.", ".mlp.c_proj.bias", 0},    {"ln_f.weight", NULL, 0},
    {"ln_f.bias", NULL, 0},           {"lm_head.weight", NULL, 0}};

enum { GPT_HF_NAME = 80 };

/* Writes the name of layer l of a parameter; the head's never has a prefix. */
static inline void gpt_hf_name(char *name, int which, size_t l, int prefixed)
{
    const char *prefix = prefixed && which != HEADW ? "transformer." : "";
    if (gpt_hf_names[which].after == NULL)
        snprintf(name, GPT_HF_NAME, "%s%s", prefix, gpt_hf_names[which].before);
    else
        snprintf(name, GPT_HF_NAME, "%s%s%zu%s", prefix, gpt_hf_names[which].before, l, gpt_hf_names[which].after);
}

/* out[columns, rows] = in[rows, columns] */
static inline void gpt_hf_transpose(float *out, const float *in, size_t rows, size_t columns)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            out[c * rows + r] = in[r * columns + c];
}

/* ---- config.json ---- */

/* The value of a key of the outermost object, or NULL. */
static inline const char *gpt_hf_value(const char *text, const char *key)
{
    size_t length = strlen(key);
    int depth = 0;
    for (const char *at = text; *at != 0; at++) {
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        if (*at != '"')
            continue;
        const char *begin = ++at;
        while (*at != 0 && *at != '"')
            at += at[0] == '\\' && at[1] != 0 ? 2 : 1;
        if (*at == 0)
            return NULL;
        const char *after = at + 1 + strspn(at + 1, " \t\r\n");
        if (depth == 1 && *after == ':' && (size_t)(at - begin) == length && strncmp(begin, key, length) == 0)
            return after + 1 + strspn(after + 1, " \t\r\n");
    }
    return NULL;
}

/* Whether a value is this word; one that is not there is `otherwise`. */
static inline int gpt_hf_is(const char *text, const char *key, const char *word, int otherwise)
{
    const char *value = gpt_hf_value(text, key);
    size_t length = strlen(word);
    return value == NULL ? otherwise : strncmp(value, word, length) == 0 && strchr(",} \t\r\n", value[length]) != NULL;
}

/* Reads a size; returns whether it is one from 1 to most. */
static inline int gpt_hf_size(const char *text, const char *key, long most, long *size)
{
    const char *value = gpt_hf_value(text, key);
    char *end = NULL;
    *size = value != NULL ? strtol(value, &end, 10) : 0;
    return value != NULL && end != value && strchr(",} \t\r\n", *end) != NULL && *size >= 1 && *size <= most;
}

/* Takes the model's sizes from config.json, and refuses what gpt.h does not compute. */
static inline int gpt_hf_read_config(gpt_flags *f, const char *path, const char *text)
{
    const struct {
        const char *key;
        long most, *size;
    } sizes[] = {{"n_layer", 1000, &f->layers},
                 {"n_head", 1000, &f->heads},
                 {"n_embd", 65536, &f->width},
                 {"n_positions", 1 << 20, &f->positions},
                 {"vocab_size", 1 << 24, &f->vocab}};
    const char *epsilon = gpt_hf_value(text, "layer_norm_epsilon");
    char why[160];
    long inner = 0;
    if (!gpt_hf_is(text, "model_type", "\"gpt2\"", 0))
        return report_complain("model", path, "has no \"model_type\": \"gpt2\"; only that is known");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (!gpt_hf_size(text, sizes[i].key, sizes[i].most, sizes[i].size)) {
            snprintf(why, sizeof why, "needs \"%s\", a whole number from 1 to %ld", sizes[i].key, sizes[i].most);
            return report_complain("model", path, why);
        }
    if (f->width % f->heads != 0)
        return report_complain("model", path, "has an n_embd that is no multiple of n_head");
    if (!gpt_hf_is(text, "n_inner", "null", 1) &&
        !(gpt_hf_size(text, "n_inner", 1 << 24, &inner) && inner == 4 * f->width))
        return report_complain("model", path, "has an n_inner; only 4 * n_embd is computed, which null means");
    if (!gpt_hf_is(text, "activation_function", "\"gelu_new\"", 1) &&
        !gpt_hf_is(text, "activation_function", "\"gelu_pytorch_tanh\"", 1))
        return report_complain("model", path, "has an activation_function; only \"gelu_new\" is computed");
    if (epsilon != NULL && (float)strtod(epsilon, NULL) != 1e-5f)
        return report_complain("model", path, "has a layer_norm_epsilon; only 1e-05 is computed");
    if (!gpt_hf_is(text, "scale_attn_weights", "true", 1) ||
        !gpt_hf_is(text, "scale_attn_by_inverse_layer_idx", "false", 1) ||
        !gpt_hf_is(text, "add_cross_attention", "false", 1))
        return report_complain("model", path,
                               "has a scale_attn_weights, scale_attn_by_inverse_layer_idx or add_cross_attention that "
                               "is not GPT-2's own");
    f->tied = gpt_hf_is(text, "tie_word_embeddings", "true", 1);
    if (f->context <= f->positions)
        return 0;
    snprintf(why, sizeof why, "has %ld positions: --context %ld is more", f->positions, f->context);
    return report_complain("model", path, why);
}

/* ---- opening ---- */

/* Finds a tensor of the model, under its name or that without its prefix, and holds it to its shape. */
static inline const dtrain_safetensors_tensor *gpt_hf_find(const dtrain_safetensors_model *file, const gpt *m,
                                                           int which, size_t l, dtrain_safetensors **part)
{
    const dtrain_param *param = &m->table[which];
    const size_t *shape = param->shape + param->stacked;
    int ndim = shape[1] > 0 ? 2 : 1, flip = gpt_hf_names[which].transposed;
    char name[GPT_HF_NAME];
    const dtrain_safetensors_tensor *tensor = NULL;
    for (int prefixed = 1; prefixed >= 0 && tensor == NULL; prefixed--) {
        gpt_hf_name(name, which, l, prefixed);
        tensor = dtrain_safetensors_model_find(file, name, strlen(name), part);
    }
    if (tensor == NULL)
        fprintf(stderr, REPORT_PROGRAM ": the model has no tensor %s, with \"transformer.\" before it or without\n",
                name);
    if (tensor == NULL ||
        (tensor->ndim == ndim && tensor->shape[0] == shape[flip] && (ndim == 1 || tensor->shape[1] == shape[!flip])))
        return tensor;
    fprintf(stderr, REPORT_PROGRAM ": tensor %s has another shape than config.json says: %zu", tensor->name,
            shape[flip]);
    fprintf(stderr, ndim == 2 ? " x %zu\n" : "\n", shape[!flip]);
    return NULL;
}

/* Whether a tensor is one that the model's parameters know: of a layer there is, and of no other kind of model. The
 * masks of old files (h.0.attn.bias, h.0.attn.masked_bias) are constants, and a tied head is the embedding. */
static inline int gpt_hf_known(const gpt *m, const char *name)
{
    char known[GPT_HF_NAME];
    const char *plain = strncmp(name, "transformer.", 12) == 0 ? name + 12 : name;
    char *end = NULL;
    size_t l = strncmp(plain, "h.", 2) == 0 ? (size_t)strtoul(plain + 2, &end, 10) : 0;
    if (end != NULL && l < m->L && (strcmp(end, ".attn.bias") == 0 || strcmp(end, ".attn.masked_bias") == 0))
        return 1;
    for (int i = 0; i < GPT_PARAMS && l < m->L; i++) {
        gpt_hf_name(known, i, l, 0);
        if (strcmp(plain, known) == 0)
            return 1;
    }
    return 0;
}

/* Reads --open's config.json into the flags, and checks that the files have the model's tensors and no others. */
static inline int gpt_hf_open(gpt_flags *f)
{
    char path[512];
    unsigned char *text = NULL;
    size_t bytes = 0;
    dtrain_safetensors_model *file = NULL;
    gpt m;
    if (f->open_model == NULL)
        return 0;
    if (snprintf(path, sizeof path, "%s/config.json", f->open_model) >= (int)sizeof path)
        return report_complain("model", f->open_model, "has too long a path");
    int bad = gpt_file_read("model", path, &text, &bytes) || gpt_hf_read_config(f, path, (const char *)text);
    free(text);
    if (bad)
        return 1;
    gpt_describe(&m, f);
    if (dtrain_safetensors_model_open(&file, f->open_model, NULL) != DTRAIN_OK)
        return report_complain("model", f->open_model, dtrain_last_error());
    for (int i = 0; i < m.listed && !bad; i++)
        for (size_t l = 0; l < (m.table[i].stacked ? m.L : 1) && !bad; l++)
            bad = gpt_hf_find(file, &m, i, l, NULL) == NULL;
    for (size_t i = 0; i < dtrain_safetensors_model_count(file) && !bad; i++) {
        const char *name = dtrain_safetensors_model_tensor(file, i, NULL)->name;
        if (!gpt_hf_known(&m, name))
            bad = report_complain("tensor", name, "is none of this model's");
    }
    dtrain_safetensors_model_close(file);
    return bad;
}

/* Reads layer l of a parameter, in the layout of gpt.h; spare: room for a layer. */
static inline dtrain_status gpt_hf_read(const dtrain_safetensors_model *file, const gpt *m, int which, size_t l,
                                        float *value, float *spare)
{
    dtrain_safetensors *part = NULL;
    const size_t *shape = m->table[which].shape + m->table[which].stacked;
    const dtrain_safetensors_tensor *tensor = gpt_hf_find(file, m, which, l, &part);
    if (tensor == NULL)
        return dtrain_error_set(DTRAIN_ERR_MISMATCH, "the model in the files is not the one that was opened");
    if (!gpt_hf_names[which].transposed)
        return dtrain_safetensors_read(part, tensor, 0, tensor->count, value, DTRAIN_F32);
    dtrain_status status = dtrain_safetensors_read(part, tensor, 0, tensor->count, spare, DTRAIN_F32);
    if (status == DTRAIN_OK)
        gpt_hf_transpose(value, spare, shape[1], shape[0]);
    return status;
}

/* Sets a parameter to what the files hold. Collective: every rank of comm, that the model is sharded over; rank 0
 * reads. */
static inline dtrain_status gpt_hf_load(const dtrain_safetensors_model *file, gpt *m, dtrain_comm *comm, int which)
{
    int root = dtrain_comm_rank(comm) == 0;
    size_t count = dtrain_param_elements(&m->table[which]), layers = m->table[which].stacked ? m->L : 1;
    float *value = root ? (float *)malloc((count + count / layers) * sizeof(float)) : NULL;
    uint64_t good = 1;
    dtrain_status status = root && value == NULL ? DTRAIN_ERR_MEMORY : DTRAIN_OK, agreed;
    for (size_t l = 0; l < layers && root && status == DTRAIN_OK; l++)
        status = gpt_hf_read(file, m, which, l, value + l * (count / layers), value + count);
    good = status == DTRAIN_OK;
    agreed = dtrain_broadcast(comm, &good, 1, DTRAIN_U64, 0);
    if (agreed == DTRAIN_OK && good)
        status = dtrain_fsdp_set(m->fsdp, m->table[which].name, value, 0);
    else if (status == DTRAIN_OK)
        status = agreed != DTRAIN_OK ? agreed : dtrain_error_set(DTRAIN_ERR_IO, "rank 0 could not read the model");
    free(value);
    return status;
}

/* Sets the whole model. Collective: every rank of comm. */
static inline dtrain_status gpt_hf_load_all(gpt *m, const gpt_flags *f, dtrain_comm *comm)
{
    dtrain_safetensors_model *file = NULL;
    uint64_t good = 1;
    dtrain_status status = DTRAIN_OK, agreed;
    if (dtrain_comm_rank(comm) == 0)
        status = dtrain_safetensors_model_open(&file, f->open_model, NULL);
    good = status == DTRAIN_OK;
    agreed = dtrain_broadcast(comm, &good, 1, DTRAIN_U64, 0);
    if (status == DTRAIN_OK && agreed == DTRAIN_OK && !good)
        status = dtrain_error_set(DTRAIN_ERR_IO, "rank 0 could not open the model");
    status = status == DTRAIN_OK ? agreed : status;
    for (int i = 0; i < m->listed && status == DTRAIN_OK; i++)
        status = gpt_hf_load(file, m, comm, i);
    dtrain_safetensors_model_close(file);
    return status;
}

/* ---- exporting ---- */

enum { GPT_HF_PATH = 512 };

/* Whether --export can be written: said before training, not after it. */
static inline int gpt_hf_check_export(const gpt_flags *f)
{
    DIR *directory = f->export_model != NULL ? opendir(f->export_model) : NULL;
    int entries = 0;
    if (directory == NULL && f->export_model != NULL && errno != ENOENT)
        return report_complain("--export", f->export_model, strerror(errno));
    if (f->export_model != NULL && strlen(f->export_model) + sizeof "/config.json" > GPT_HF_PATH) {
        if (directory != NULL)
            closedir(directory);
        return report_complain("--export", f->export_model, "has too long a path");
    }
    if (directory == NULL)
        return 0;
    while (readdir(directory) != NULL)
        entries++;
    closedir(directory);
    return entries > 2 ? report_complain("--export", f->export_model, "is there already, and not empty") : 0;
}

static inline dtrain_status gpt_hf_write_config(const gpt *m, const char *directory)
{
    char path[GPT_HF_PATH];
    snprintf(path, sizeof path, "%s/config.json", directory);
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return dtrain_error_set(DTRAIN_ERR_IO, "%s: %s", path, strerror(errno));
    fprintf(file,
            "{\n  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n  \"model_type\": \"gpt2\",\n"
            "  \"activation_function\": \"gelu_new\",\n  \"attn_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n"
            "  \"resid_pdrop\": 0.0,\n  \"layer_norm_epsilon\": 1e-05,\n  \"bos_token_id\": null,\n"
            "  \"eos_token_id\": null,\n  \"n_inner\": null,\n  \"n_embd\": %zu,\n  \"n_head\": %zu,\n"
            "  \"n_layer\": %zu,\n  \"n_positions\": %zu,\n  \"vocab_size\": %zu,\n  \"tie_word_embeddings\": %s,\n"
            "  \"torch_dtype\": \"float32\"\n}\n",
            m->C, m->H, m->L, m->P, m->V, m->tied ? "true" : "false");
    int bad = ferror(file);
    return fclose(file) != 0 || bad ? dtrain_error_set(DTRAIN_ERR_IO, "%s: %s", path, strerror(errno)) : DTRAIN_OK;
}

/* The tensors of a model to be written, and the room that they need. */
typedef struct gpt_hf_writer {
    float *values; /* of the whole model, in the layout of the files */
    dtrain_safetensors_source *sources;
    char (*names)[GPT_HF_NAME];
    size_t (*shapes)[2];
    size_t count, written; /* sources, and floats of values */
} gpt_hf_writer;

/* Takes a parameter over, whose value has the layout of gpt.h. */
static inline void gpt_hf_add(gpt_hf_writer *w, const gpt *m, int which, const float *value)
{
    const dtrain_param *param = &m->table[which];
    const size_t *shape = param->shape + param->stacked;
    size_t layers = param->stacked ? m->L : 1, each = dtrain_param_elements(param) / layers;
    int flip = gpt_hf_names[which].transposed;
    for (size_t l = 0; l < layers; l++) {
        float *to = w->values + w->written;
        dtrain_safetensors_source *source = &w->sources[w->count];
        if (flip)
            gpt_hf_transpose(to, value + l * each, shape[0], shape[1]);
        else
            memcpy(to, value + l * each, each * sizeof(float));
        gpt_hf_name(w->names[w->count], which, l, 1);
        w->shapes[w->count][0] = shape[flip];
        w->shapes[w->count][1] = shape[!flip];
        memset(source, 0, sizeof *source);
        source->name = w->names[w->count];
        source->dtype = DTRAIN_F32;
        source->ndim = shape[1] > 0 ? 2 : 1;
        source->shape = w->shapes[w->count++];
        source->data = to;
        w->written += each;
    }
}

/* Writes --export. Collective: every rank that the model is sharded over; the rank that is root there has the model in
 * full twice, and writes. writes: whether that is this rank. */
static inline dtrain_status gpt_hf_export(gpt *m, const gpt_flags *f, int writes)
{
    gpt_hf_writer w;
    size_t tensors = GPT_PARAMS + m->L * GPT_PARAMS, largest = 0;
    float *value = NULL;
    dtrain_status status = DTRAIN_OK;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < m->listed; i++)
        largest = dtrain_param_elements(&m->table[i]) > largest ? dtrain_param_elements(&m->table[i]) : largest;
    if (writes) {
        value = (float *)malloc(largest * sizeof(float));
        w.values = (float *)malloc(m->count * sizeof(float));
        w.sources = (dtrain_safetensors_source *)calloc(tensors, sizeof *w.sources);
        w.names = (char(*)[GPT_HF_NAME])calloc(tensors, sizeof *w.names);
        w.shapes = (size_t(*)[2])calloc(tensors, sizeof *w.shapes);
        if (value == NULL || w.values == NULL || w.sources == NULL || w.names == NULL || w.shapes == NULL)
            status = dtrain_error_set(DTRAIN_ERR_MEMORY, "no memory for the model that --export writes");
    }
    for (int i = 0; i < m->listed && status == DTRAIN_OK; i++) {
        status = dtrain_fsdp_get(m->fsdp, m->table[i].name, value, 0);
        if (writes && status == DTRAIN_OK)
            gpt_hf_add(&w, m, i, value);
    }
    if (writes && status == DTRAIN_OK)
        status = dtrain_safetensors_model_save(f->export_model, w.sources, w.count, 0, NULL);
    if (writes && status == DTRAIN_OK)
        status = gpt_hf_write_config(m, f->export_model);
    free(value);
    free(w.values);
    free(w.sources);
    free(w.names);
    free(w.shapes);
    return status;
}

#endif
