/* Boxes of the tensor "x" of a file, read as a program reads a model: by a load of a checkpointer. Include dtrain.h,
 * test.h and safetensors_files.h first. */
#ifndef DTRAIN_TEST_SAFETENSORS_BOXES_H
#define DTRAIN_TEST_SAFETENSORS_BOXES_H

/* Returns how many bytes of the file were read, its header among them. */
static uint64_t read_box(const char *path, int ndim, const size_t *shape, const size_t *begin, const size_t *size,
                         void *out, dtrain_dtype dtype)
{
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_load_desc from;
    dtrain_checkpoint_report report;
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_pieces list;
    dtrain_piece piece;
    memset(&desc, 0, sizeof desc);
    memset(&from, 0, sizeof from);
    memset(&report, 0, sizeof report);
    memset(&state, 0, sizeof state);
    memset(&list, 0, sizeof list);
    memset(&piece, 0, sizeof piece);
    piece.name = "x";
    piece.dtype = dtype;
    piece.ndim = ndim;
    piece.boxed = 1;
    piece.count = 1;
    piece.data = out;
    for (int d = 0; d < ndim; d++) {
        piece.shape[d] = shape[d];
        piece.box_begin[d] = begin[d];
        piece.box_size[d] = size[d];
        piece.count *= size[d];
    }
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    from.path = path;
    from.lenient = 1; /* the file may have others */
    desc.directory = files_path("boxes");
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, &from, &report), DTRAIN_OK);
    CHECK_EQ(report.loaded, 1);
    dtrain_checkpoint_destroy(ckpt);
    return report.bytes_read;
}

#endif
