/* Looks into safetensors files, Hugging Face models and checkpoints, and makes others of them.
 *
 * cc -O2 -ffp-contract=off -I. tools/safetensors.c -o build/safetensors -lpthread -lm
 *
 *   safetensors ls PATH                        every tensor: dtype, shape, bytes, name; and the metadata
 *   safetensors cat PATH NAME [BEGIN [COUNT]]  its elements, one a line
 *   safetensors diff A B                       what one has and the other has not; 1 when there is anything
 *   safetensors verify PATH...                 whether it keeps every rule of the format, and of a checkpoint every
 *                                              hash: ok, or what is broken and where
 *   safetensors merge MODEL FILE               a model of several files as one
 *   safetensors split PATH DIRECTORY [--size 5GB]
 *                                              a file or model as one of several files of that many bytes
 *   safetensors convert PATH FILE --dtype bf16 the same with every F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 as another
 *                                              of these
 *   safetensors export CHECKPOINT FILE [--optimizer]
 *                                              the weights of a checkpoint, whole, as one file; its optimizer state too
 *
 * PATH is a .safetensors file, a model.safetensors.index.json, or a directory with one of them; CHECKPOINT a directory
 * NAME/step-N, or NAME for the newest in it, which verify takes as well. Options may stand anywhere; after -- there are
 * none. merge, split and convert hold no tensor in memory. Ends with 0; with 1 for a file that breaks a rule, or a
 * difference; with 2 for a wrong call, or when the system refuses. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>

enum { GOOD = 0, BAD = 1, FAILED = 2 };

static const char usage_text[] =
    "usage: safetensors ls PATH\n"
    "       safetensors cat PATH NAME [BEGIN [COUNT]]\n"
    "       safetensors diff A B\n"
    "       safetensors verify PATH...\n"
    "       safetensors merge MODEL FILE\n"
    "       safetensors split PATH DIRECTORY [--size 5GB]\n"
    "       safetensors convert PATH FILE --dtype bf16 [--saturate]\n"
    "       safetensors export CHECKPOINT FILE [--optimizer]\n"
    "ends with 0, 1 for a broken rule or a difference, 2 for a wrong call or what the system refuses\n";

/* Says what is wrong with the call. */
static int misused(const char *what)
{
    fprintf(stderr, "safetensors: %s; safetensors --help says how\n", what);
    return FAILED;
}

typedef struct options {
    uint64_t size;
    dtrain_dtype dtype; /* 0: not given */
    int optimizer, saturate;
    const char *command; /* that alone takes the option given; NULL: none was given */
    int mixed;           /* of more than one command */
} options;

/* Prints the library's error; gives the exit code. */
static int complain(dtrain_status status)
{
    fflush(stdout);
    fprintf(stderr, "safetensors: %s\n", dtrain_last_error());
    return status == DTRAIN_ERR_CORRUPT ? BAD : FAILED;
}

/* ---- progress ---- */

static uint64_t progress_total, progress_done;
static int64_t progress_next_ns;

/* Draws a bar, ten times a second, where a person may look at it. */
static void progress(uint64_t more)
{
    int64_t now = dtrain__os_now_ns();
    progress_done += more;
    if (progress_total == 0 || now < progress_next_ns || !isatty(2))
        return;
    if (progress_next_ns == 0) { /* what is over soon needs no bar */
        progress_next_ns = now + 500000000;
        return;
    }
    progress_next_ns = now + 100000000;
    int filled = (int)(progress_done * 40 / progress_total);
    fprintf(stderr, "\r[%.*s%*s] %3d%%", filled, "########################################", 40 - filled, "",
            (int)(progress_done * 100 / progress_total));
}

static void progress_end(void)
{
    if (progress_total > 0 && progress_next_ns > 0 && isatty(2))
        fprintf(stderr, "\r%50s\r", "");
    progress_total = progress_done = 0;
    progress_next_ns = 0;
}

/* ---- printing ---- */

/* Prints a text as it is, or as JSON where it holds what would disturb a line. */
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

/* Prints one element of a dtype that is no float, from its bytes in this machine's order. */
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

/* Prints `bytes` bytes of elements that are narrower, as they are packed. */
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

static int number(const char *text, size_t *value)
{
    char *end;
    errno = 0;
    unsigned long long read = strtoull(text, &end, 10);
    *value = (size_t)read;
    return isdigit((unsigned char)text[0]) && *end == '\0' && errno == 0 && read <= SIZE_MAX;
}

static int cat(const dtrain_safetensors_model *model, int argc, char **argv)
{
    dtrain_safetensors *file;
    size_t begin = 0, count;
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_find(model, argv[0], strlen(argv[0]), &file);
    if (tensor == NULL) {
        fprintf(stderr, "safetensors: there is no tensor \"%s\"; ls lists them\n", argv[0]);
        return FAILED;
    }
    if (argc > 1 && (!number(argv[1], &begin) || begin > tensor->count))
        return misused("BEGIN is no element of the tensor");
    count = tensor->count - begin;
    if (argc > 2 && (!number(argv[2], &count) || count > tensor->count - begin))
        return misused("COUNT goes beyond the tensor");
    return print_elements(file, tensor, begin, count);
}

/* ---- diff ---- */

/* What one chunk of two tensors adds to their difference. */
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

/* Counts the elements that differ in value, where both tensors are floats, otherwise in bytes. */
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
        progress(bytes);
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

/* Compares two tensors of one name; gives whether they differ, or FAILED. */
static int diff_tensor(dtrain_safetensors *a_file, const dtrain_safetensors_tensor *a, dtrain_safetensors *b_file,
                       const dtrain_safetensors_tensor *b)
{
    size_t differ = 0;
    double most = 0;
    int shapes =
        a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
    if (!shapes || a->dtype != b->dtype)
        print_difference(a, b);
    if (!shapes || (a->dtype != b->dtype && !(is_float(a->dtype) && is_float(b->dtype))))
        return BAD;
    dtrain_status status = compare(a_file, a, b_file, b, &differ, &most);
    if (status != DTRAIN_OK)
        return complain(status), FAILED;
    if (differ > 0) {
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

/* Prints tensors of one model that the other has not. */
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

/* Prints metadata of one model that are not those of the other. */
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
        return FAILED; /* 1 is for what differs */
    }
    int result =
        diff_metadata(a, b, '-') | diff_metadata(b, a, '+') | diff_missing(a, b, '-') | diff_missing(b, a, '+');
    progress_total = model_bytes(a);
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

/* Whether a path is a directory that holds no model. */
static int is_checkpoint(const char *path)
{
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int is = directory >= 0 && !dtrain__huggingface_has(directory, DTRAIN__HUGGINGFACE_FILE) &&
             !dtrain__huggingface_has(directory, DTRAIN__HUGGINGFACE_INDEX);
    if (directory >= 0)
        close(directory);
    return is;
}

/* Whether a directory is a checkpoint of PyTorch's torch.distributed.checkpoint. */
static int is_torch_checkpoint(const char *path)
{
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int is = directory >= 0 && dtrain__huggingface_has(directory, ".metadata") && is_checkpoint(path);
    if (directory >= 0)
        close(directory);
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
    dtrain_status status = dtrain__export_begin(&all, path);
    for (size_t i = 0; status == DTRAIN_OK && i < all.index.file_count; i++)
        progress_total += all.index.files[i].data.data_bytes;
    all.tell = progress;
    for (size_t file = 0; status == DTRAIN_OK && file < all.index.file_count; file++)
        status = dtrain__export_check_file(&all, file);
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

static int export_checkpoint(const options *given, int argc, char **argv)
{
    if (argc != 2)
        return misused("export takes a checkpoint and a file");
    if (is_torch_checkpoint(argv[0])) {
        advise_torch(argv[0]);
        return FAILED;
    }
    dtrain__export all;
    dtrain_status status = dtrain__export_begin(&all, argv[0]);
    if (status == DTRAIN_OK)
        status = dtrain__export_list(&all, given->optimizer);
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_size(&progress_total, all.sources, all.count, NULL);
    all.tell = progress;
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
    int saturate; /* what is too large for 8 bits becomes the largest number that they have */
} passage;

/* Converts elements begin and on with saturation, chunk by chunk. */
static dtrain_status pass_saturated(const passage *p, size_t begin, unsigned char *out, size_t count)
{
    double chunk[512]; /* of the widest dtype */
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
    progress(bytes);
    if (p->saturate)
        return pass_saturated(p, (size_t)offset, (unsigned char *)out, bytes);
    return dtrain_safetensors_read(p->file, p->tensor, (size_t)(offset * 8 / bits), bytes * 8 / bits, out,
                                         p->dtype);
}

/* Writes all tensors of a model to a file, or to a directory of files of `most` bytes; dtype 0 leaves them as they are.
 */
static int rewrite(const dtrain_safetensors_model *model, const char *path, uint64_t most, dtrain_dtype dtype,
                   int saturate)
{
    size_t count = dtrain_safetensors_model_count(model), pairs = dtrain_safetensors_model_metadata_count(model);
    passage *passages = (passage *)calloc(count + 1, sizeof *passages);
    dtrain_safetensors_source *sources = (dtrain_safetensors_source *)calloc(count + 1, sizeof *sources);
    dtrain_safetensors_write_desc desc = {pairs > 0 ? dtrain_safetensors_model_metadata(model, 0) : NULL, pairs, 0,
                                          NULL};
    dtrain_status status = DTRAIN_ERR_MEMORY;
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
            progress_total += (uint64_t)p->tensor->count * dtrain_dtype_bits(p->dtype) / 8;
        }
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

/* Reads a size: 1000, 5GB, 512MiB. */
static int size_of(const char *text, uint64_t *bytes)
{
    static const char *const units[] = {"", "B", "kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"};
    static const uint64_t factors[] = {1,    1,       1000,       1000,          1000000, 1000000000, 1000000000000u,
                                       1024, 1048576, 1073741824, 1099511627776u};
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(end, units[i]) == 0) {
            *bytes = (uint64_t)value * factors[i];
            return isdigit((unsigned char)text[0]) && value > 0 && value <= UINT64_MAX / factors[i];
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

/* Remembers whose option was given: one that a command would pass over is a mistake. */
static void take(options *given, const char *command)
{
    given->mixed |= given->command != NULL && strcmp(given->command, command) != 0;
    given->command = command;
}

/* Takes the options out of the arguments; NULL, or what is wrong with them. */
static const char *take_options(options *given, int *argc, char **argv)
{
    int kept = 0, plain = 0;
    for (int i = 0; i < *argc; i++) {
        const char *value = i + 1 < *argc ? argv[i + 1] : "";
        if (plain || strncmp(argv[i], "--", 2) != 0) {
            argv[kept++] = argv[i];
        } else if (strcmp(argv[i], "--") == 0) {
            plain = 1;
        } else if (strcmp(argv[i], "--optimizer") == 0) {
            given->optimizer = 1;
            take(given, "export");
        } else if (strcmp(argv[i], "--saturate") == 0) {
            given->saturate = 1;
            take(given, "convert");
        } else if (strcmp(argv[i], "--size") == 0) {
            if (!size_of(value, &given->size))
                return "--size is followed by a size as 5GB or 512MiB";
            take(given, "split");
            i++;
        } else if (strcmp(argv[i], "--dtype") == 0) {
            if (!dtype_of(value, &given->dtype))
                return "--dtype is followed by one of f64, f32, f16, bf16, f8_e4m3 and f8_e5m2";
            take(given, "convert");
            i++;
        } else {
            return "there is no such option";
        }
    }
    *argc = kept;
    return NULL;
}

/* Runs a command on an open model; arguments are those after its path. */
static int run(const char *command, const options *given, const dtrain_safetensors_model *model, int argc, char **argv)
{
    if (strcmp(command, "ls") == 0)
        return argc == 0 ? list(model) : misused("ls takes one path");
    if (strcmp(command, "cat") == 0)
        return argc >= 1 && argc <= 3 ? cat(model, argc, argv) : misused("cat takes a path and a name");
    if (strcmp(command, "diff") == 0)
        return argc == 1 ? diff(model, argv[0]) : misused("diff takes two paths");
    if (strcmp(command, "merge") == 0)
        return argc == 1 ? rewrite(model, argv[0], 0, (dtrain_dtype)0, 0) : misused("merge takes a model and a file");
    if (strcmp(command, "split") == 0)
        return argc == 1 ? rewrite(model, argv[0], given->size, (dtrain_dtype)0, 0)
                         : misused("split takes a path and a directory");
    if (argc != 1 || (int)given->dtype == 0)
        return misused("convert takes a path, a file and a --dtype");
    if (given->saturate && given->dtype != DTRAIN_F8_E4M3 && given->dtype != DTRAIN_F8_E5M2)
        return misused("--saturate is for --dtype f8_e4m3 and f8_e5m2");
    return rewrite(model, argv[0], 0, given->dtype, given->saturate);
}

/* Opens what a command reads and runs it; arguments are those after the command. */
static int open_and_run(const char *command, const options *given, int argc, char **argv)
{
    dtrain_safetensors_model *model;
    dtrain_status status = dtrain_safetensors_model_open(&model, argv[0], NULL);
    if (status != DTRAIN_OK) {
        int result = complain(status);
        if (is_torch_checkpoint(argv[0]))
            advise_torch(argv[0]);
        else if (is_checkpoint(argv[0]))
            fprintf(stderr, "safetensors: of a checkpoint, \"safetensors export\" makes a file first\n");
        return strcmp(command, "diff") == 0 ? FAILED : result;
    }
    int result = run(command, given, model, argc - 1, argv + 1);
    dtrain_safetensors_model_close(model);
    return result;
}

int main(int argc, char **argv)
{
    static const char *const commands[] = {"ls", "cat", "diff", "merge", "split", "convert", "verify", "export"};
    options given = {5000000000u, (dtrain_dtype)0, 0, 0, NULL, 0};
    int known = 0, result;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
        return fputs(usage_text, stdout) < 0 || fflush(stdout) != 0 ? FAILED : GOOD;
    argc--;
    argv++;
    const char *wrong = take_options(&given, &argc, argv);
    if (wrong != NULL)
        return misused(wrong);
    for (size_t i = 0; i < sizeof commands / sizeof commands[0] && argc > 0; i++)
        known |= strcmp(argv[0], commands[i]) == 0;
    if (!known || argc < 2)
        return misused(argc == 0 ? "no command" : !known ? "there is no such command" : "no path");
    if (given.command != NULL && (given.mixed || strcmp(argv[0], given.command) != 0))
        return misused("--size is for split, --dtype and --saturate for convert, --optimizer for export");
    if (strcmp(argv[0], "verify") == 0)
        result = verify(argc - 1, argv + 1);
    else if (strcmp(argv[0], "export") == 0)
        result = export_checkpoint(&given, argc - 1, argv + 1);
    else
        result = open_and_run(argv[0], &given, argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "safetensors: writing the output: %s\n", strerror(errno));
        result = FAILED;
    }
    return result;
}
