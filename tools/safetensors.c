/* Lists, compares, checks and rewrites safetensors files, Hugging Face models and checkpoints.
 * `build/safetensors --help` lists its commands.
 *
 * cc -O2 -ffp-contract=off -I. tools/safetensors.c -o build/safetensors -lpthread -lm
 *
 * merge, split and convert copy tensors in chunks and hold none of them whole in memory. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tool.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>

enum { GOOD = 0, BAD = 1, FAILED = 2 };

static const char help_text[] =
    "usage: safetensors COMMAND ARGUMENTS [flags]\n"
    "  ls PATH                        lists metadata and tensors: dtype, bytes, shape\n"
    "  cat PATH NAME [BEGIN [COUNT]]  prints a tensor's elements, one a line\n"
    "  diff A B                       prints what differs\n"
    "  verify PATH...                 checks the format, and a checkpoint's hashes\n"
    "  merge MODEL FILE               writes a model of several files as one file\n"
    "  split PATH DIRECTORY           writes a model as files of --size bytes each\n"
    "  convert PATH FILE --dtype D    writes every float tensor as dtype D\n"
    "  export CHECKPOINT FILE         writes a checkpoint's whole weights as one file\n"
    "  --size S      for split: bytes of a file, as 700MB or 2GiB; default 5GB\n"
    "  --dtype D     for convert: f64, f32, f16, bf16, f8_e4m3 or f8_e5m2\n"
    "  --saturate    for convert to f8: cuts values that are too large\n"
    "  --optimizer   for export: writes the optimizer's state too\n"
    "  --            ends the flags: what follows are paths and names\n"
    "PATH is a .safetensors file, a model.safetensors.index.json, or a directory that\n"
    "holds one of them. CHECKPOINT is a directory NAME/step-N, or NAME for the newest\n"
    "step in it; verify takes it as well. Flags may stand anywhere.\n"
    "Exit status: 0; 1 for a broken file or a difference; 2 for a wrong command line\n"
    "or an error of the system.\n"
    "  safetensors verify model.safetensors\n"
    "  safetensors convert model.safetensors half.safetensors --dtype bf16\n";

typedef struct options {
    uint64_t size;
    dtrain_dtype dtype; /* 0: not given */
    int optimizer, saturate;
    const char *flag, *command; /* the first flag and the only command that takes it; NULL: no flag */
} options;

/* Prints the library's error; returns the exit status. */
static int complain(dtrain_status status)
{
    progress_clear();
    fflush(stdout);
    fprintf(stderr, "safetensors: %s\n", dtrain_last_error());
    return status == DTRAIN_ERR_CORRUPT ? BAD : FAILED;
}

/* ---- progress ---- */

static uint64_t bytes_total, bytes_done;
static const char *bytes_verb;

/* Begins the progress line of work on so many bytes. */
static void count_bytes(const char *verb, uint64_t total)
{
    bytes_verb = verb;
    bytes_total = total;
    bytes_done = 0;
    progress_begin("safetensors", 500);
}

static void add_bytes(uint64_t more)
{
    double done = (double)(bytes_done += more), total = (double)bytes_total;
    if (bytes_total > 0)
        progress_show(done, total, "%s %.0f %% of %.1f MB", bytes_verb, 100 * done / total, total * 1e-6);
}

/* ---- printing ---- */

/* Prints a text as it is, or as a JSON string if it holds control characters, a backslash or a leading quote. */
static void print_text(const char *text, size_t length)
{
    int plain = length > 0 && text[0] != '"';
    for (size_t i = 0; i < length && plain; i++)
        plain = (unsigned char)text[i] >= 0x20 && text[i] != 0x7f && text[i] != '\\';
    if (plain) {
        fwrite(text, 1, length, stdout);
        return;
    }
    size_t room = 6 * length + 2;
    char *out = (char *)malloc(room);
    dtrain__json_writer json;
    if (out == NULL)
        return;
    dtrain__json_write_start(&json, out, room);
    dtrain__json_write_string(&json, text, length);
    fwrite(out, 1, json.bytes < room ? json.bytes : room, stdout);
    free(out);
}

static void print_shape(const dtrain_safetensors_tensor *tensor)
{
    putchar('[');
    for (int d = 0; d < tensor->ndim; d++)
        printf("%s%zu", d > 0 ? "," : "", tensor->shape[d]);
    putchar(']');
}

static int is_float(dtrain_dtype dtype)
{
    return dtrain__dtype_converts(dtype, dtype);
}

/* ---- ls ---- */

static int list(const dtrain_safetensors_model *model)
{
    uint64_t bytes = 0, elements = 0;
    for (size_t i = 0; i < dtrain_safetensors_model_metadata_count(model); i++) {
        const dtrain_safetensors_pair *pair = dtrain_safetensors_model_metadata(model, i);
        printf("# ");
        print_text(pair->key, pair->key_length);
        printf(": ");
        print_text(pair->value, pair->value_length);
        putchar('\n');
    }
    for (size_t i = 0; i < dtrain_safetensors_model_count(model); i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_tensor(model, i, NULL);
        printf("%-11s %14" PRIu64 "  ", dtrain_dtype_name(tensor->dtype), tensor->end - tensor->begin);
        print_text(tensor->name, tensor->name_length);
        putchar(' ');
        print_shape(tensor);
        putchar('\n');
        bytes += tensor->end - tensor->begin;
        elements += tensor->count;
    }
    size_t files = dtrain_safetensors_model_files(model);
    printf("# %zu tensors in %zu file%s, %" PRIu64 " elements, %" PRIu64 " bytes\n",
           dtrain_safetensors_model_count(model), files, files == 1 ? "" : "s", elements, bytes);
    return GOOD;
}

/* ---- cat ---- */

/* Prints one element of a dtype that is not a float, from its bytes in this machine's order. */
static void print_element(const unsigned char *at, dtrain_dtype dtype)
{
    uint64_t bits = dtrain__dtype_load(at, (int)(dtrain_dtype_bits(dtype) / 8));
    int64_t number = (int64_t)bits;
    float parts[2];
    switch ((int)dtype) {
    case DTRAIN_BOOL:
    case DTRAIN_U8:
    case DTRAIN_U16:
    case DTRAIN_U32:
    case DTRAIN_U64: printf("%" PRIu64 "\n", bits); break;
    case DTRAIN_I8: printf("%d\n", (int)(int8_t)bits); break;
    case DTRAIN_I16: printf("%d\n", (int)(int16_t)bits); break;
    case DTRAIN_I32: printf("%" PRId32 "\n", (int32_t)bits); break;
    case DTRAIN_I64: printf("%" PRId64 "\n", number); break;
    case DTRAIN_C64:
        memcpy(parts, at, 8);
        printf("%.9g%+.9gi\n", (double)parts[0], (double)parts[1]);
        break;
    default: printf("0x%02" PRIx64 "\n", bits);
    }
}

/* Prints the bytes that hold elements narrower than a byte. */
static void print_packed(const unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        printf("0x%02x\n", data[i]);
}

static int print_elements(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor, size_t begin, size_t count)
{
    enum { STEP = 4096 };
    double values[STEP];
    unsigned bits = dtrain_dtype_bits(tensor->dtype);
    for (size_t at = 0; at < count; at += STEP) {
        size_t some = count - at < STEP ? count - at : (size_t)STEP;
        dtrain_status status = dtrain_safetensors_read(file, tensor, begin + at, some, values,
                                                             is_float(tensor->dtype) ? DTRAIN_F64 : (dtrain_dtype)0);
        if (status != DTRAIN_OK)
            return complain(status);
        if (bits < 8)
            print_packed((const unsigned char *)values, some * bits / 8);
        for (size_t i = 0; i < some && bits >= 8; i++)
            if (is_float(tensor->dtype))
                printf("%.*g\n", tensor->dtype == DTRAIN_F64 ? 17 : 9, values[i]);
            else
                print_element((const unsigned char *)values + i * bits / 8, tensor->dtype);
    }
    return GOOD;
}

static int cat(const dtrain_safetensors_model *model, int argc, char **argv)
{
    dtrain_safetensors *file;
    uint64_t begin = 0, count;
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_find(model, argv[0], strlen(argv[0]), &file);
    if (tensor == NULL) {
        fprintf(stderr, "safetensors: there is no tensor \"%s\"; safetensors ls lists them\n", argv[0]);
        return FAILED;
    }
    if (argc > 1 && !tool_whole(argv[1], 0, tensor->count, &begin))
        return tool_wrong("safetensors", "BEGIN", argv[1], "a number from 0 to %zu is expected", tensor->count);
    count = tensor->count - begin;
    if (argc > 2 && !tool_whole(argv[2], 0, tensor->count - begin, &count))
        return tool_wrong("safetensors", "COUNT", argv[2], "a number from 0 to %" PRIu64 " is expected",
                          tensor->count - begin);
    return print_elements(file, tensor, (size_t)begin, (size_t)count);
}

/* ---- diff ---- */

/* Adds the difference of one chunk of two tensors: how many elements differ, and by how much at most. */
static void compare_chunk(const double *a, const double *b, size_t count, size_t *differ, double *most)
{
    for (size_t i = 0; i < count; i++) {
        double distance = a[i] > b[i] ? a[i] - b[i] : b[i] - a[i];
        int a_nan = a[i] != a[i], b_nan = b[i] != b[i];
        if (a[i] == b[i] || (a_nan && b_nan))
            continue;
        ++*differ;
        *most = a_nan || b_nan ? HUGE_VAL : distance > *most ? distance : *most;
    }
}

/* Counts the elements that differ: in value if both tensors are floats, else in bytes. */
static dtrain_status compare(dtrain_safetensors *a_file, const dtrain_safetensors_tensor *a, dtrain_safetensors *b_file,
                             const dtrain_safetensors_tensor *b, size_t *differ, double *most)
{
    enum { STEP = 8192 };
    static double left[STEP], right[STEP];
    int floats = is_float(a->dtype) && is_float(b->dtype);
    dtrain_status status = DTRAIN_OK;
    for (size_t at = 0; at < a->count && status == DTRAIN_OK; at += STEP) {
        size_t some = a->count - at < STEP ? a->count - at : (size_t)STEP,
               bytes = some * dtrain_dtype_bits(a->dtype) / 8;
        status = dtrain_safetensors_read(a_file, a, at, some, left, floats ? DTRAIN_F64 : (dtrain_dtype)0);
        if (status == DTRAIN_OK)
            status = dtrain_safetensors_read(b_file, b, at, some, right, floats ? DTRAIN_F64 : (dtrain_dtype)0);
        if (status == DTRAIN_OK && floats)
            compare_chunk(left, right, some, differ, most);
        size_t width = dtrain_dtype_bits(a->dtype) < 8 ? 1 : dtrain_dtype_bits(a->dtype) / 8;
        for (size_t i = 0; i < bytes && status == DTRAIN_OK && !floats; i += width)
            *differ += memcmp((const char *)left + i, (const char *)right + i, width) != 0;
        add_bytes(bytes);
    }
    return status;
}

static void print_difference(const dtrain_safetensors_tensor *a, const dtrain_safetensors_tensor *b)
{
    printf("! ");
    print_text(a->name, a->name_length);
    printf(": %s ", dtrain_dtype_name(a->dtype));
    print_shape(a);
    printf(" and %s ", dtrain_dtype_name(b->dtype));
    print_shape(b);
    putchar('\n');
}

/* Compares two tensors of one name; returns GOOD, BAD if they differ, or FAILED. */
static int diff_tensor(dtrain_safetensors *a_file, const dtrain_safetensors_tensor *a, dtrain_safetensors *b_file,
                       const dtrain_safetensors_tensor *b)
{
    size_t differ = 0;
    double most = 0;
    int shapes =
        a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
    if (!shapes || a->dtype != b->dtype) {
        progress_clear();
        print_difference(a, b);
    }
    if (!shapes || (a->dtype != b->dtype && !(is_float(a->dtype) && is_float(b->dtype))))
        return BAD;
    dtrain_status status = compare(a_file, a, b_file, b, &differ, &most);
    if (status != DTRAIN_OK)
        return complain(status), FAILED;
    if (differ > 0) {
        progress_clear();
        printf("~ ");
        print_text(a->name, a->name_length);
        printf(": %zu of %zu %s differ", differ, a->count,
               dtrain_dtype_bits(a->dtype) < 8 ? "elements' bytes" : "elements");
        if (is_float(a->dtype))
            printf(", by at most %.3g", most);
        putchar('\n');
    }
    return differ > 0 || a->dtype != b->dtype ? BAD : GOOD;
}

/* Prints the tensors of model a that model b does not have. */
static int diff_missing(const dtrain_safetensors_model *a, const dtrain_safetensors_model *b, char sign)
{
    int result = GOOD;
    for (size_t i = 0; i < dtrain_safetensors_model_count(a); i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_tensor(a, i, NULL);
        if (dtrain_safetensors_model_find(b, tensor->name, tensor->name_length, NULL) != NULL)
            continue;
        printf("%c ", sign);
        print_text(tensor->name, tensor->name_length);
        printf(": %s ", dtrain_dtype_name(tensor->dtype));
        print_shape(tensor);
        putchar('\n');
        result = BAD;
    }
    return result;
}

static const dtrain_safetensors_pair *find_pair(const dtrain_safetensors_model *model,
                                                const dtrain_safetensors_pair *pair)
{
    for (size_t i = 0; i < dtrain_safetensors_model_metadata_count(model); i++) {
        const dtrain_safetensors_pair *other = dtrain_safetensors_model_metadata(model, i);
        if (other->key_length == pair->key_length && memcmp(other->key, pair->key, pair->key_length) == 0)
            return other;
    }
    return NULL;
}

/* Prints the metadata of model a that model b does not have, or has with another value. */
static int diff_metadata(const dtrain_safetensors_model *a, const dtrain_safetensors_model *b, char sign)
{
    int result = GOOD;
    for (size_t i = 0; i < dtrain_safetensors_model_metadata_count(a); i++) {
        const dtrain_safetensors_pair *pair = dtrain_safetensors_model_metadata(a, i), *other = find_pair(b, pair);
        if (other != NULL && other->value_length == pair->value_length &&
            memcmp(other->value, pair->value, pair->value_length) == 0)
            continue;
        printf("%c # ", sign);
        print_text(pair->key, pair->key_length);
        printf(": ");
        print_text(pair->value, pair->value_length);
        putchar('\n');
        result = BAD;
    }
    return result;
}

static uint64_t model_bytes(const dtrain_safetensors_model *model)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < dtrain_safetensors_model_count(model); i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_tensor(model, i, NULL);
        bytes += tensor->end - tensor->begin;
    }
    return bytes;
}

static int diff(const dtrain_safetensors_model *a, const char *path)
{
    dtrain_safetensors_model *b;
    dtrain_status status = dtrain_safetensors_model_open(&b, path, NULL);
    if (status != DTRAIN_OK) {
        complain(status);
        return FAILED; /* BAD stands for a difference */
    }
    int result =
        diff_metadata(a, b, '-') | diff_metadata(b, a, '+') | diff_missing(a, b, '-') | diff_missing(b, a, '+');
    count_bytes("compared", model_bytes(a));
    for (size_t i = 0; i < dtrain_safetensors_model_count(a) && (result & FAILED) == 0; i++) {
        dtrain_safetensors *a_file, *b_file;
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_tensor(a, i, &a_file);
        const dtrain_safetensors_tensor *other =
            dtrain_safetensors_model_find(b, tensor->name, tensor->name_length, &b_file);
        if (other != NULL)
            result |= diff_tensor(a_file, tensor, b_file, other);
    }
    progress_end();
    dtrain_safetensors_model_close(b);
    return (result & FAILED) != 0 ? FAILED : result;
}

/* ---- verify, export ---- */

/* Returns whether a path is a directory without a model. */
static int is_checkpoint(const char *path)
{
    int directory = dtrain__os_open(DTRAIN__OS_HERE, path, DTRAIN__OS_DIRECTORY);
    int is = directory >= 0 && !dtrain__file_is_there(directory, DTRAIN__HUGGINGFACE_FILE) &&
             !dtrain__file_is_there(directory, DTRAIN__HUGGINGFACE_INDEX);
    if (directory >= 0)
        dtrain__os_close(directory);
    return is;
}

/* Returns whether a path is a checkpoint of PyTorch's torch.distributed.checkpoint. */
static int is_torch_checkpoint(const char *path)
{
    int directory = dtrain__os_open(DTRAIN__OS_HERE, path, DTRAIN__OS_DIRECTORY);
    int is = directory >= 0 && dtrain__file_is_there(directory, ".metadata") && is_checkpoint(path);
    if (directory >= 0)
        dtrain__os_close(directory);
    return is;
}

static void advise_torch(const char *path)
{
    fprintf(
        stderr,
        "safetensors: %s is a checkpoint of PyTorch (torch.distributed.checkpoint). Only PyTorch reads it. Make one "
        "file of it: python3 -m torch.distributed.checkpoint.format_utils dcp_to_torch %s model.pt. Then write the "
        "tensors that torch.load gives by safetensors.torch.save_file. HuggingFaceStorageWriter saves safetensors "
        "at once\n",
        path, path);
}

static int verify_checkpoint(const char *path)
{
    if (is_torch_checkpoint(path)) {
        advise_torch(path);
        return FAILED;
    }
    dtrain__export all;
    uint64_t bytes = 0;
    dtrain_status status = dtrain__export_begin(&all, path);
    for (size_t i = 0; status == DTRAIN_OK && i < all.index.file_count; i++)
        bytes += all.index.files[i].data.data_bytes;
    count_bytes("verified", bytes);
    all.tell = add_bytes;
    if (status == DTRAIN_OK)
        status = dtrain__export_check(&all);
    dtrain__export_end(&all);
    progress_end();
    if (status != DTRAIN_OK)
        return complain(status);
    printf("%s: ok, a checkpoint\n", path);
    return GOOD;
}

static int verify(int count, char **paths)
{
    int result = GOOD;
    for (int i = 0; i < count; i++) {
        dtrain_safetensors_model *model;
        if (is_checkpoint(paths[i])) {
            int checkpoint = verify_checkpoint(paths[i]);
            result = checkpoint > result ? checkpoint : result;
            continue;
        }
        dtrain_status status = dtrain_safetensors_model_open(&model, paths[i], NULL);
        int one = status == DTRAIN_OK ? GOOD : complain(status);
        if (status == DTRAIN_OK)
            printf("%s: ok, %zu tensors, %" PRIu64 " bytes\n", paths[i], dtrain_safetensors_model_count(model),
                   model_bytes(model));
        if (status == DTRAIN_OK)
            dtrain_safetensors_model_close(model);
        result = one > result ? one : result;
    }
    return result;
}

static int export_checkpoint(const options *given, char **argv)
{
    uint64_t bytes = 0;
    if (is_torch_checkpoint(argv[0])) {
        advise_torch(argv[0]);
        return FAILED;
    }
    dtrain__export all;
    dtrain_status status = dtrain__export_begin(&all, argv[0]);
    if (status == DTRAIN_OK)
        status = dtrain__export_list(&all, given->optimizer);
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_size(&bytes, all.sources, all.count, NULL);
    count_bytes("wrote", bytes);
    all.tell = add_bytes;
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_save(argv[1], all.sources, all.count, NULL);
    dtrain__export_end(&all);
    progress_end();
    return status == DTRAIN_OK ? GOOD : complain(status);
}

/* ---- merge, split, convert ---- */

/* A tensor on its way from one file to another. */
typedef struct passage {
    dtrain_safetensors *file;
    const dtrain_safetensors_tensor *tensor;
    dtrain_dtype dtype;
    int saturate; /* a value too large for 8 bits becomes the largest that they can hold */
} passage;

/* Converts count elements from begin on with saturation, chunk by chunk. */
static dtrain_status pass_saturated(const passage *p, size_t begin, unsigned char *out, size_t count)
{
    double chunk[512]; /* fits any dtype */
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0, n; i < count && status == DTRAIN_OK; i += n) {
        n = count - i < 512 ? count - i : 512;
        status = dtrain_safetensors_read(p->file, p->tensor, begin + i, n, chunk, p->tensor->dtype);
        if (status == DTRAIN_OK)
            status = dtrain_convert_saturating(chunk, p->tensor->dtype, out + i, p->dtype, n);
    }
    return status;
}

static dtrain_status pass(void *user, uint64_t offset, void *out, size_t bytes)
{
    const passage *p = (const passage *)user;
    unsigned bits = dtrain_dtype_bits(p->dtype);
    add_bytes(bytes);
    if (p->saturate)
        return pass_saturated(p, (size_t)offset, (unsigned char *)out, bytes);
    return dtrain_safetensors_read(p->file, p->tensor, (size_t)(offset * 8 / bits), bytes * 8 / bits, out,
                                         p->dtype);
}

/* Writes all tensors of a model to a file, or with most > 0 to a directory of files of `most` bytes. dtype 0 keeps the
 * tensors' dtypes. */
static int rewrite(const dtrain_safetensors_model *model, const char *path, uint64_t most, dtrain_dtype dtype,
                   int saturate)
{
    size_t count = dtrain_safetensors_model_count(model), pairs = dtrain_safetensors_model_metadata_count(model);
    passage *passages = (passage *)calloc(count + 1, sizeof *passages);
    dtrain_safetensors_source *sources = (dtrain_safetensors_source *)calloc(count + 1, sizeof *sources);
    dtrain_safetensors_write_desc desc = {pairs > 0 ? dtrain_safetensors_model_metadata(model, 0) : NULL, pairs, 0,
                                          NULL};
    dtrain_status status = DTRAIN_ERR_MEMORY;
    uint64_t bytes = 0;
    if (passages == NULL || sources == NULL) {
        fprintf(stderr, "safetensors: no memory for %zu tensors\n", count);
    } else {
        for (size_t i = 0; i < count; i++) {
            passage *p = &passages[i];
            p->tensor = dtrain_safetensors_model_tensor(model, i, &p->file);
            p->dtype = (int)dtype != 0 && is_float(p->tensor->dtype) ? dtype : p->tensor->dtype;
            p->saturate = saturate && is_float(p->tensor->dtype);
            sources[i].name = p->tensor->name;
            sources[i].name_length = p->tensor->name_length;
            sources[i].dtype = p->dtype;
            sources[i].ndim = p->tensor->ndim;
            sources[i].shape = p->tensor->shape;
            sources[i].fill = pass;
            sources[i].user = p;
            bytes += (uint64_t)p->tensor->count * dtrain_dtype_bits(p->dtype) / 8;
        }
        count_bytes("wrote", bytes);
        status = most > 0 ? dtrain_safetensors_model_save(path, sources, count, most, &desc)
                          : dtrain_safetensors_save(path, sources, count, &desc);
        progress_end();
        if (status != DTRAIN_OK)
            complain(status);
    }
    free(passages);
    free(sources);
    return status == DTRAIN_OK ? GOOD : FAILED;
}

/* Reads a size such as 1000, 5GB or 512MiB; returns 0 for any other text. */
static int size_of(const char *text, uint64_t *bytes)
{
    static const char *const units[] = {"", "B", "kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"};
    static const uint64_t factors[] = {1,    1,       1000,       1000,          1000000, 1000000000, 1000000000000u,
                                       1024, 1048576, 1073741824, 1099511627776u};
    const char *end;
    uint64_t value;
    if (!tool_digits(text, &end, &value))
        return 0;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(end, units[i]) == 0) {
            *bytes = value * factors[i];
            return value > 0 && value <= UINT64_MAX / factors[i];
        }
    return 0;
}

static int dtype_of(const char *text, dtrain_dtype *dtype)
{
    char upper[16] = {0};
    for (size_t i = 0; text[i] != '\0' && i < sizeof upper - 1; i++)
        upper[i] = (char)toupper((unsigned char)text[i]);
    return strlen(text) < sizeof upper && dtrain_dtype_from_name(dtype, upper, strlen(upper)) == DTRAIN_OK &&
           is_float(*dtype);
}

/* Takes one flag of argv[0]; *used is how many arguments it is. Returns GOOD, or FAILED after an error text. */
static int take_flag(options *given, char **argv, int *used)
{
    static const struct {
        const char *name, *command, *value; /* the values that are expected; NULL: it has none */
    } flags[] = {{"--size", "split", "a size such as 5GB or 512MiB is expected"},
                 {"--dtype", "convert", "f64, f32, f16, bf16, f8_e4m3 or f8_e5m2 is expected"},
                 {"--saturate", "convert", NULL},
                 {"--optimizer", "export", NULL}};
    size_t at = 0, count = sizeof flags / sizeof flags[0];
    const char *value = NULL;
    while (at < count && strcmp(argv[0], flags[at].name) != 0)
        at++;
    if (at == count)
        return tool_wrong("safetensors", argv[0], NULL, "there is no such flag");
    if (given->command != NULL && strcmp(given->command, flags[at].command) != 0)
        return tool_wrong("safetensors", argv[0], NULL, "it is a flag of %s, and %s one of %s", flags[at].command,
                          given->flag, given->command);
    given->flag = flags[at].name;
    given->command = flags[at].command;
    value = flags[at].value != NULL ? argv[1] : NULL;
    *used = flags[at].value != NULL ? 2 : 1;
    given->saturate |= at == 2;
    given->optimizer |= at == 3;
    if (flags[at].value != NULL &&
        (value == NULL || !(at == 0 ? size_of(value, &given->size) : dtype_of(value, &given->dtype))))
        return tool_wrong("safetensors", argv[0], value, "%s", flags[at].value);
    return GOOD;
}

/* Takes the flags out of the arguments; returns GOOD, or FAILED after an error text. */
static int take_flags(options *given, int *argc, char **argv)
{
    int kept = 0, plain = 0, used;
    for (int i = 0; i < *argc; i += used) {
        used = 1;
        if (plain || strncmp(argv[i], "--", 2) != 0)
            argv[kept++] = argv[i];
        else if (strcmp(argv[i], "--") == 0)
            plain = 1;
        else if (strcmp(argv[i], "--help") == 0)
            exit(tool_help(help_text));
        else if (take_flag(given, argv + i, &used) != GOOD)
            return FAILED;
    }
    *argc = kept;
    return GOOD;
}

/* Runs a command on an open model; argv holds the arguments after the model's path. */
static int run(const char *command, const options *given, const dtrain_safetensors_model *model, int argc, char **argv)
{
    if (strcmp(command, "ls") == 0)
        return list(model);
    if (strcmp(command, "cat") == 0)
        return cat(model, argc, argv);
    if (strcmp(command, "diff") == 0)
        return diff(model, argv[0]);
    if (strcmp(command, "merge") == 0)
        return rewrite(model, argv[0], 0, (dtrain_dtype)0, 0);
    if (strcmp(command, "split") == 0)
        return rewrite(model, argv[0], given->size, (dtrain_dtype)0, 0);
    return rewrite(model, argv[0], 0, given->dtype, given->saturate);
}

/* Opens the model that a command reads and runs the command; argv holds the arguments after the command. */
static int open_and_run(const char *command, const options *given, int argc, char **argv)
{
    dtrain_safetensors_model *model;
    dtrain_status status = dtrain_safetensors_model_open(&model, argv[0], NULL);
    if (status != DTRAIN_OK) {
        int result = complain(status);
        if (is_torch_checkpoint(argv[0]))
            advise_torch(argv[0]);
        else if (is_checkpoint(argv[0]))
            fprintf(stderr, "safetensors: %s may be a checkpoint: \"safetensors export\" makes a file of it first\n",
                    argv[0]);
        return strcmp(command, "diff") == 0 ? FAILED : result;
    }
    int result = run(command, given, model, argc - 1, argv + 1);
    dtrain_safetensors_model_close(model);
    return result;
}

/* Refuses what the arguments, without the flags, and the flags cannot mean together; returns GOOD or FAILED. */
static int check_call(const options *given, int argc, char **argv)
{
    static const struct {
        const char *name;
        int least, most; /* arguments after the command; most 0: any number */
        const char *expected;
    } commands[] = {{"ls", 1, 1, "one PATH is expected"},
                    {"cat", 2, 4, "a PATH, a NAME and perhaps BEGIN and COUNT are expected"},
                    {"diff", 2, 2, "two paths are expected"},
                    {"verify", 1, 0, "one PATH or more are expected"},
                    {"merge", 2, 2, "a MODEL and a FILE are expected"},
                    {"split", 2, 2, "a PATH and a DIRECTORY are expected"},
                    {"convert", 2, 2, "a PATH, a FILE and --dtype are expected"},
                    {"export", 2, 2, "a CHECKPOINT and a FILE are expected"}};
    size_t at = 0, count = sizeof commands / sizeof commands[0];
    if (argc == 0)
        return tool_wrong("safetensors", "COMMAND", NULL, "a command is expected");
    while (at < count && strcmp(argv[0], commands[at].name) != 0)
        at++;
    if (at == count)
        return tool_wrong("safetensors", argv[0], NULL, "there is no such command");
    if (given->command != NULL && strcmp(argv[0], given->command) != 0)
        return tool_wrong("safetensors", given->flag, NULL, "it is a flag of %s, not of %s", given->command, argv[0]);
    if (argc - 1 < commands[at].least || (commands[at].most > 0 && argc - 1 > commands[at].most) ||
        (strcmp(argv[0], "convert") == 0 && (int)given->dtype == 0))
        return tool_wrong("safetensors", argv[0], NULL, "%s", commands[at].expected);
    if (given->saturate && given->dtype != DTRAIN_F8_E4M3 && given->dtype != DTRAIN_F8_E5M2)
        return tool_wrong("safetensors", "--saturate", NULL, "it needs --dtype f8_e4m3 or f8_e5m2");
    return GOOD;
}

int main(int argc, char **argv)
{
    options given = {5000000000u, (dtrain_dtype)0, 0, 0, NULL, NULL};
    int result;
    utf8_arguments(argc, argv);
    if (argc == 2 && strcmp(argv[1], "-h") == 0)
        return tool_help(help_text);
    argc--;
    argv++;
    if (take_flags(&given, &argc, argv) != GOOD || check_call(&given, argc, argv) != GOOD)
        return FAILED;
    if (strcmp(argv[0], "verify") == 0)
        result = verify(argc - 1, argv + 1);
    else if (strcmp(argv[0], "export") == 0)
        result = export_checkpoint(&given, argv + 1);
    else
        result = open_and_run(argv[0], &given, argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "safetensors: writing the output: %s\n", strerror(errno));
        result = FAILED;
    }
    return result;
}
