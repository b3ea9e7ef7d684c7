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
 * A header is read into private memory and checked whole before anything of it is given out; texts of errors name the
 * rule that is broken, the tensor and the byte of the file. Data is not looked at: a BOOL may have other bytes than 0
 * and 1, a float may be NaN. Rows are stored one after the other (the last index runs fastest), little-endian on every
 * machine.
 *
 *   source   the format's README, and the reference implementation (huggingface/safetensors 0.8), whose bytes are
 *            written here: widest dtype first, then by name */
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
    int map;                     /* 1: also map the file, for dtrain_safetensors_view. Only for files that nobody cuts
                                    while they are open: touching a mapping past the end kills the process */
    dtrain_allocator *allocator; /* of the header and its tables, a few times the header; must outlive the file; NULL:
                                    the C library */
} dtrain_safetensors_desc;

/* One tensor of an open file; all that it points to is the file's and goes with it. */
typedef struct dtrain_safetensors_tensor {
    const char *name;   /* UTF-8; may be empty, and may hold U+0000: the length counts. A zero byte follows it */
    size_t name_length; /* bytes */
    dtrain_dtype dtype;
    int ndim;            /* 0: a scalar, of one element */
    const size_t *shape; /* ndim sizes; may be zero */
    size_t count;        /* elements */
    uint64_t begin, end; /* its bytes, counted from the beginning of the file */
} dtrain_safetensors_tensor;

/* A text and its value, as a file's metadata holds them. */
typedef struct dtrain_safetensors_pair {
    const char *key;
    size_t key_length; /* bytes; for writing, 0: up to the zero byte */
    const char *value;
    size_t value_length; /* the same */
} dtrain_safetensors_pair;

/* Opens a file and checks all of its header.
 *
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_IO           there is no such file, or it cannot be read
 *            DTRAIN_ERR_CORRUPT      it breaks a rule of the format
 *            DTRAIN_ERR_UNSUPPORTED  a FIFO, a directory or a device, which cannot be read at any place: copy it to a
 *                                    file; a size of an empty tensor that this machine's size_t has not; no mapping
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_open(dtrain_safetensors **file, const char *path,
                                                      const dtrain_safetensors_desc *desc);

/* The same of a file's bytes in memory, which stay where they are and unchanged until close; the header is copied.
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_open_memory(dtrain_safetensors **file, const void *data, size_t bytes,
                                                             const dtrain_safetensors_desc *desc);

/* Closes a file, and with it its mapping; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_safetensors_close(dtrain_safetensors *file);

/* Returns the number of tensors.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_count(const dtrain_safetensors *file);

/* Returns tensor i, in the order of their data in the file; NULL beyond the last.
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_tensor_at(const dtrain_safetensors *file, size_t i);

/* Returns the tensor of a name, or NULL; a hash finds it.
 *
 *   length   bytes of name
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_find(const dtrain_safetensors *file, const char *name,
                                                                    size_t length);

/* Reads elements begin to begin + count of a tensor, counted row by row.
 *
 *   tensor   of this file
 *   out      room for count elements of dtype, any alignment. A tensor's count comes from the file: compare it with the
 *            room first, or let dtrain_safetensors_load do it
 *   dtype    what out gets: the tensor's own, or, where both are among F64, F32, F16, BF16, F8_E4M3 and F8_E5M2, any
 *            other (see dtrain_convert); (dtrain_dtype)0: the tensor's own, whatever it is
 *   errors   DTRAIN_ERR_INVALID      no file, tensor or out; beyond the tensor; of a dtype narrower than a byte, a range
 *                                    that begins or ends inside one
 *            DTRAIN_ERR_UNSUPPORTED  a conversion that is none of those
 *            DTRAIN_ERR_IO, DTRAIN_ERR_CORRUPT  the system refused; the file was cut after it was opened
 *            on any error the contents of out are undefined
 *
 * any thread, any number at once on one file; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_read(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                      size_t begin, size_t count, void *out, dtrain_dtype dtype);

/* Finds a tensor by name and reads it, if it has exactly count elements; otherwise as dtrain_safetensors_read.
 *
 *   name     ends with a zero byte; a tensor whose name holds U+0000 is not found by it
 *   errors   DTRAIN_ERR_MISMATCH  there is no such tensor, or it has another count
 *
 * any thread, any number at once on one file; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_load(dtrain_safetensors *file, const char *name, void *out,
                                                      size_t count, dtrain_dtype dtype);

/* Gives the address of a tensor's bytes in the mapping, or in the memory that was opened; nothing is read.
 *
 *   data     out: good until close; NULL for an empty tensor
 *   errors   DTRAIN_ERR_UNSUPPORTED  neither mapping nor memory; a tensor that is not aligned for its dtype, as the
 *                                    format promises no alignment; a machine of the other byte order. Read it instead
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_view(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                      const void **data);

/* Supplies `bytes` bytes of a tensor from `offset` on, in this machine's byte order. Calls come in order and without
 * gaps, whole elements each; any status but DTRAIN_OK ends the writing and is returned. */
typedef dtrain_status (*dtrain_safetensors_fill)(void *user, uint64_t offset, void *out, size_t bytes);

/* One tensor to be written. */
typedef struct dtrain_safetensors_source {
    const char *name;
    size_t name_length; /* bytes; 0: up to the zero byte */
    dtrain_dtype dtype;
    int ndim;            /* 0: a scalar */
    const size_t *shape; /* ndim sizes */
    const void *data;    /* packed row by row; NULL: fill is asked for it */
    dtrain_safetensors_fill fill;
    void *user; /* handed to fill */
} dtrain_safetensors_source;

typedef struct dtrain_safetensors_write_desc {
    const dtrain_safetensors_pair *metadata; /* in any order, written sorted by key; NULL: the header has none */
    size_t metadata_count;                   /* 0 with a pointer: the header has an empty "__metadata__":{} */
    int no_sync;                             /* 1: leaves it to the system when the file reaches the disk */
    dtrain_allocator *allocator;             /* NULL: the C library */
} dtrain_safetensors_write_desc;

/* Takes the next bytes of a file. Any status but DTRAIN_OK ends the writing and is returned. */
typedef dtrain_status (*dtrain_safetensors_sink)(void *user, const void *data, size_t bytes);

/* Writes a file beside path, brings it to the disk, and puts it in the place of what was there, all at once: whoever
 * opens path meanwhile, or after the machine has stopped, finds the old file or the new one whole. A symbolic link is
 * replaced, not followed; a device or a pipe, or a link to one, is refused, as it would be lost: write to its
 * descriptor. The same tensors give the same bytes, in whatever order they come.
 *
 *   sources  count tensors, in any order
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID  a name that comes twice, is "__metadata__" or no UTF-8; a bad dtype or shape; sizes
 *                                that overflow or end inside a byte; neither data nor fill; a header of more than
 *                                100,000,000 bytes; path is a directory, a device or a pipe. Nothing was written
 *            DTRAIN_ERR_IO       the system refused; what stood at path is untouched, and nothing is left beside it
 *            DTRAIN_ERR_MEMORY
 *            those of fill
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_save(const char *path, const dtrain_safetensors_source *sources,
                                                      size_t count, const dtrain_safetensors_write_desc *desc);

/* Hands the same bytes to a callback, in order, at most 8 MiB a call.
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_write(dtrain_safetensors_sink sink, void *user,
                                                       const dtrain_safetensors_source *sources, size_t count,
                                                       const dtrain_safetensors_write_desc *desc);

/* Says how many bytes such a file has.
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_size(uint64_t *bytes, const dtrain_safetensors_source *sources,
                                                      size_t count, const dtrain_safetensors_write_desc *desc);

/* A model in one file or several, read as one. */
typedef struct dtrain_safetensors_model dtrain_safetensors_model;

/* Opens a Hugging Face model and checks that the index and the files agree: every name of the index is in exactly the
 * file that it gives, and no file holds another.
 *
 *   path     a .safetensors file; a model.safetensors.index.json; or a directory with model.safetensors or, in its
 *            absence, model.safetensors.index.json. Files that an index names are plain names beside it; links are
 *            followed
 *   desc     of every file; NULL: all defaults
 *   errors   as dtrain_safetensors_open; DTRAIN_ERR_CORRUPT also: a bad index, or one that does not agree
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_safetensors_model_open(dtrain_safetensors_model **model, const char *path,
                                                            const dtrain_safetensors_desc *desc);

/* Closes a model; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_safetensors_model_close(dtrain_safetensors_model *model);

/* Returns the number of files.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_files(const dtrain_safetensors_model *model);

/* Returns the number of tensors of all files together.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_count(const dtrain_safetensors_model *model);

/* Returns tensor i, file by file; NULL beyond the last.
 *
 *   file   out: that which holds it, for the reading calls above; may be NULL
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_tensor(const dtrain_safetensors_model *model,
                                                                            size_t i, dtrain_safetensors **file);

/* Returns the tensor of a name, or NULL. Where no tensor has the name and the metadata maps it to one that is there, as
 * Python's save_model does for tied weights, that is the one.
 *
 *   file   as above
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_find(const dtrain_safetensors_model *model,
                                                                          const char *name, size_t length,
                                                                          dtrain_safetensors **file);

/* Returns the number of the metadata's pairs: those of the index that are texts, or those of the only file.
 *
 * any thread */
DTRAIN_API size_t dtrain_safetensors_model_metadata_count(const dtrain_safetensors_model *model);

/* Returns pair i of the metadata; NULL beyond the last.
 *
 * any thread */
DTRAIN_API const dtrain_safetensors_pair *dtrain_safetensors_model_metadata(const dtrain_safetensors_model *model,
                                                                            size_t i);

/* Writes a model that Hugging Face loaders read: model.safetensors, or, where that would hold more than
 * max_file_bytes of tensors, model-00001-of-0000N.safetensors and so on, in the order of sources, with an index. The
 * directory is made beside its place and renamed when all is on the disk.
 *
 *   directory       is not there yet, or empty
 *   sources         tensors with the same dtype, shape and data are stored once, under the name that sorts first; the
 *                   metadata then maps the others to it, but for a name that is a key of the metadata already: that
 *                   tensor is stored as well
 *   max_file_bytes  of tensors; 0: 5,000,000,000. No tensor is cut: a larger one has a file to itself
 *   desc            metadata stands in the index, or in the only file; format is "pt" unless it says otherwise, as
 *                   loaders demand one of "pt" and "mlx"
 *   errors          as dtrain_safetensors_save; DTRAIN_ERR_INVALID also: the directory is there and not empty
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
