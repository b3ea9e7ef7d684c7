/* ---- >>safetensors ----
 * Files of named tensors that the Python ecosystem reads and writes: one file, or a Hugging Face model of several.
 *
 *     dtrain_safetensors *file;
 *     DTRAIN_CHECK(dtrain_safetensors_open(&file, "model.safetensors", NULL));
 *     DTRAIN_CHECK(dtrain_safetensors_load(file, "wte", wte, V * C, DTRAIN_F32));      converts from what is stored
 *     dtrain_safetensors_close(file);
 *
 *     DTRAIN_CHECK(dtrain_safetensors_open_memory(&file, weights, sizeof weights, NULL));      compiled into a program
 *     DTRAIN_CHECK(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "wte", 3), &data));
 *
 *     dtrain_safetensors_source arrays[2] = {{"wte", 0, DTRAIN_F32, 2, wte_shape, wte, NULL, NULL},
 *                                            {"wpe", 0, DTRAIN_F32, 2, wpe_shape, wpe, NULL, NULL}};
 *     DTRAIN_CHECK(dtrain_safetensors_save("model.safetensors", arrays, 2, NULL));
 *
 * Opening a file copies its header and checks all of it first. Error texts name the broken rule, the tensor and the
 * byte of the file. Data is not checked: a BOOL may hold other bytes than 0 and 1, a float may be NaN. Tensors are
 * row-major (the last index runs fastest), and little-endian on every machine.
 *
 *   source   the format's README and its reference implementation, huggingface/safetensors 0.8. Files have the same
 *            bytes as that one writes: tensors sorted by dtype, the widest first, then by name */
#ifndef DTRAIN__SAFETENSORS_H
#define DTRAIN__SAFETENSORS_H
#include "../base/base.h"
#include "../tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open file. */
typedef struct dtrain_safetensors dtrain_safetensors;

typedef struct dtrain_safetensors_desc {
    int map;                     /* 1: also maps the file, for dtrain_safetensors_view. Nobody may shorten the file
                                    while it is open: a read past its end would kill the process */
    dtrain_allocator *allocator; /* NULL: the C library. The header and its tables take a few times the header's bytes.
                                    Must outlive the file */
} dtrain_safetensors_desc;

/* One tensor of an open file. All that it points to lives until the file is closed. */
typedef struct dtrain_safetensors_tensor {
    const char *name;   /* UTF-8, followed by a zero byte; may be empty, and may contain U+0000 itself */
    size_t name_length; /* bytes */
    dtrain_dtype dtype;
    int ndim;            /* 0: a scalar, of one element */
    const size_t *shape; /* ndim sizes; a size may be 0 */
    size_t count;        /* elements */
    uint64_t begin, end; /* its bytes, counted from the start of the file */
} dtrain_safetensors_tensor;

/* A key and its value in a file's metadata. Both are UTF-8. */
typedef struct dtrain_safetensors_pair {
    const char *key;
    size_t key_length; /* bytes; when you write, 0: up to the zero byte */
    const char *value;
    size_t value_length; /* as key_length */
} dtrain_safetensors_pair;

/* Opens a file and checks its whole header.
 *
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_IO           there is no such file, or the system cannot read it
 *            DTRAIN_ERR_CORRUPT      the file breaks a rule of the format
 *            DTRAIN_ERR_UNSUPPORTED  path is a FIFO, a directory or a device: copy it to a file; a tensor has a size
 *                                    above this machine's SIZE_MAX; the file cannot be mapped
 *            DTRAIN_ERR_MEMORY
 *            DTRAIN_ERR_INVALID      file or path is NULL
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_open(dtrain_safetensors **file, const char *path,
                                                      const dtrain_safetensors_desc *desc);

/* Opens a file that is in memory. The library copies the header and reads the rest in place.
 *
 *   data     all bytes of the file; they must stay in place and unchanged until the close
 *   desc     as above; map has no effect
 *   errors   as above
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_open_memory(dtrain_safetensors **file, const void *data, size_t bytes,
                                                             const dtrain_safetensors_desc *desc);

/* Closes a file and its mapping; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_safetensors_close(dtrain_safetensors *file);

/* Returns the number of tensors.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_count(const dtrain_safetensors *file);

/* Returns tensor i in the order of the data in the file; NULL after the last.
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_tensor_at(const dtrain_safetensors *file, size_t i);

/* Returns the tensor with a name, or NULL. A hash table finds it.
 *
 *   name     length bytes, no zero byte needed
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_find(const dtrain_safetensors *file, const char *name,
                                                                    size_t length);

/* Reads `count` elements of a tensor from element `begin` on, counted row by row. It allocates nothing.
 *
 *   tensor   a tensor of this file
 *   out      room for count elements of dtype, any alignment. tensor->count comes from the file: compare it with your
 *            room first, or let dtrain_safetensors_load do so
 *   dtype    of the elements in out; 0 or the tensor's own: no conversion. F64, F32, F16, BF16, F8_E4M3 and F8_E5M2
 *            convert into each other, as dtrain_convert does
 *   errors   DTRAIN_ERR_INVALID      file, tensor or out is NULL; a range beyond the tensor, or, with elements
 *                                    narrower than a byte, one that begins or ends inside a byte
 *            DTRAIN_ERR_UNSUPPORTED  any other conversion
 *            DTRAIN_ERR_IO           the system cannot read the file
 *            DTRAIN_ERR_CORRUPT      the file has become shorter since it was opened
 *            on any error the contents of out are undefined
 *
 * any thread: several may read one file at once */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_read(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                      size_t begin, size_t count, void *out, dtrain_dtype dtype);

/* Finds a tensor by name and reads all of it. It allocates nothing.
 *
 *   name     ends with a zero byte, so it cannot find a name that contains U+0000
 *   count    what the tensor must have
 *   dtype    as dtrain_safetensors_read
 *   errors   DTRAIN_ERR_MISMATCH  there is no such tensor, or it has another count
 *            those of dtrain_safetensors_read
 *
 * any thread: several may read one file at once */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_load(dtrain_safetensors *file, const char *name, void *out,
                                                      size_t count, dtrain_dtype dtype);

/* Gives the address of a tensor's elements in the mapped file, or in the memory that you opened. It reads nothing.
 *
 *   data     out: valid until the close; NULL for an empty tensor and on an error
 *   errors   DTRAIN_ERR_UNSUPPORTED  the file is neither mapped nor in memory; the tensor is not aligned for its dtype,
 *                                    since the format promises no alignment; this machine is big-endian. Read the
 *                                    tensor instead
 *            DTRAIN_ERR_INVALID      a NULL argument
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_view(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                      const void **data);

/* Writes `bytes` bytes of a tensor to out, from byte `offset` of the tensor on, in this machine's byte order.
 *
 * Calls come in order and without gaps, each for whole elements. Any status but DTRAIN_OK ends the writing, and the
 * writing call returns it. */
typedef dtrain_status (*dtrain_safetensors_fill)(void *user, uint64_t offset, void *out, size_t bytes);

/* One tensor to write. */
typedef struct dtrain_safetensors_source {
    const char *name;
    size_t name_length; /* bytes; 0: up to the zero byte */
    dtrain_dtype dtype;
    int ndim;            /* 0: a scalar */
    const size_t *shape; /* ndim sizes */
    const void *data;    /* packed row by row; NULL: fill supplies it */
    dtrain_safetensors_fill fill;
    void *user; /* passed to fill */
} dtrain_safetensors_source;

typedef struct dtrain_safetensors_write_desc {
    const dtrain_safetensors_pair *metadata; /* in any order, written sorted by key; NULL: no metadata */
    size_t metadata_count;                   /* 0, and metadata not NULL: the header has an empty "__metadata__":{} */
    int no_sync;                             /* 1: the call does not wait until the file is on the disk */
    dtrain_allocator *allocator;             /* NULL: the C library */
} dtrain_safetensors_write_desc;

/* Takes the next bytes of a file. Any status but DTRAIN_OK ends the writing, and the writing call returns it. */
typedef dtrain_status (*dtrain_safetensors_sink)(void *user, const void *data, size_t bytes);

/* Writes a file and replaces what was at path in one step.
 *
 * The call writes a file beside path, waits until it is on the disk, and renames it. Whoever opens path, during the
 * call or after a power failure, finds the whole old file or the whole new one. The same tensors give the same bytes,
 * in any order.
 *
 *   path     a file, or nothing yet. A symbolic link is replaced, not followed. A device or a pipe, or a link to one,
 *            is refused: write to its descriptor instead
 *   sources  count tensors, in any order
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID  nothing is written. The cause is one of these:
 *                                - a name that is a duplicate, "__metadata__" or not UTF-8
 *                                - a bad dtype or shape, sizes that overflow or end inside a byte, no data and no fill
 *                                - a header of more than 100,000,000 bytes
 *                                - a path to a directory, a device or a pipe
 *            DTRAIN_ERR_IO       the system refused
 *            DTRAIN_ERR_MEMORY
 *            what fill returns
 *            on any error the old file stays and nothing is left beside it. In one case the new file is in place and
 *            may be lost after a power failure; the text says so
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_save(const char *path, const dtrain_safetensors_source *sources,
                                                      size_t count, const dtrain_safetensors_write_desc *desc);

/* Writes the same bytes as dtrain_safetensors_save to a callback, in order.
 *
 *   sink     gets at most 8 MiB per call
 *   user     passed to sink
 *   errors   as dtrain_safetensors_save, and what sink returns
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_write(dtrain_safetensors_sink sink, void *user,
                                                       const dtrain_safetensors_source *sources, size_t count,
                                                       const dtrain_safetensors_write_desc *desc);

/* Calculates the size of the file that dtrain_safetensors_save would write.
 *
 *   bytes    out: 0 on an error
 *   errors   DTRAIN_ERR_INVALID, DTRAIN_ERR_MEMORY as dtrain_safetensors_save. It neither calls fill nor opens a file
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_size(uint64_t *bytes, const dtrain_safetensors_source *sources,
                                                      size_t count, const dtrain_safetensors_write_desc *desc);

/* A model in one or several files, read as one. */
typedef struct dtrain_safetensors_model dtrain_safetensors_model;

/* Opens a Hugging Face model and checks that its index agrees with its files.
 *
 * Every tensor of the index must be in the file that the index gives, and no file may hold another tensor.
 *
 *   path     a .safetensors file, a model.safetensors.index.json, or a directory that holds one of the two. In a
 *            directory model.safetensors comes first. An index names files beside it, without a path; links are
 *            followed
 *   desc     for each file; NULL: all defaults
 *   errors   as dtrain_safetensors_open; DTRAIN_ERR_CORRUPT also for a bad index, or one that does not agree
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_model_open(dtrain_safetensors_model **model, const char *path,
                                                            const dtrain_safetensors_desc *desc);

/* Closes a model and its files; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_safetensors_model_close(dtrain_safetensors_model *model);

/* Returns the number of files.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_files(const dtrain_safetensors_model *model);

/* Returns the number of tensors in all files together.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_count(const dtrain_safetensors_model *model);

/* Returns tensor i, file by file; NULL after the last.
 *
 *   file   out: the file that holds it, for the reading calls above; may be NULL
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_tensor(const dtrain_safetensors_model *model,
                                                                            size_t i, dtrain_safetensors **file);

/* Returns the tensor with a name, or NULL.
 *
 * If no tensor has the name, the metadata may map it to another name, and that tensor is returned. Python's save_model
 * writes such a map for tied weights.
 *
 *   name   length bytes, no zero byte needed
 *   file   out: the file that holds it; may be NULL
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_find(const dtrain_safetensors_model *model,
                                                                          const char *name, size_t length,
                                                                          dtrain_safetensors **file);

/* Returns the number of metadata pairs: those of the index whose values are texts; without an index, the only file's.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_metadata_count(const dtrain_safetensors_model *model);

/* Returns pair i of the metadata; NULL after the last.
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_pair *dtrain_safetensors_model_metadata(const dtrain_safetensors_model *model,
                                                                            size_t i);

/* Writes a model that Hugging Face loaders read.
 *
 * A small model is one file, model.safetensors. A larger one is several, model-00001-of-0000N.safetensors and so on,
 * and model.safetensors.index.json. Tensors go to the files in the order of sources. The call makes a directory beside
 * the place of the new one, writes the files there, and renames it when all of them are on the disk.
 *
 *   directory       must not exist yet, or must be empty
 *   sources         count tensors. Those with equal dtype, shape and data pointer are tied: the file holds one, under
 *                   the name that sorts first, and the metadata maps the other names to it. A tied name that is
 *                   already a key of the metadata is stored as well
 *   max_file_bytes  of tensors in a file; 0: 5,000,000,000. A larger tensor gets a file of its own
 *   desc            metadata goes to the index, or to the only file. Its "format" is "pt" unless you give another, as
 *                   loaders require "pt" or "mlx"
 *   errors          as dtrain_safetensors_save; DTRAIN_ERR_INVALID also if the directory exists and is not empty
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_model_save(const char *directory,
                                                            const dtrain_safetensors_source *sources, size_t count,
                                                            uint64_t max_file_bytes,
                                                            const dtrain_safetensors_write_desc *desc);

#ifdef __cplusplus
}
#endif

#endif
