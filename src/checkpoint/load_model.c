/* ---- >>load-model ----
 * Reading the pieces of a load from a plain model, whose tensors are whole: box after box, to wherever a piece is. */
#ifndef DTRAIN__LOAD_MODEL
#define DTRAIN__LOAD_MODEL
#include "load.c"

/* One box of a wanted piece, read from a model. */
typedef struct dtrain__load_box {
    dtrain_safetensors *file;
    const dtrain_safetensors_tensor *tensor;
    const dtrain_piece *want;
    unsigned char *out; /* of the next box */
} dtrain__load_box;

static dtrain_status dtrain__load_model_box(void *user, const dtrain__region *region)
{
    dtrain__load_box *box = (dtrain__load_box *)user;
    unsigned char *out = box->out;
    box->out += dtrain__region_product(region->size, 0, region->ndim) * (dtrain_dtype_bits(box->want->dtype) / 8);
    return dtrain_safetensors_read_box(box->file, box->tensor, region->begin, region->size, out, box->want->dtype);
}

/* Reads a piece on a device, a range of it after another. */
static dtrain_status dtrain__load_model_to(dtrain__load *load, dtrain__region *region, dtrain__load_box *box)
{
    const dtrain_piece *want = box->want;
    size_t each = dtrain_dtype_bits(want->dtype) / 8, have = 0;
    dtrain_status status = DTRAIN_OK;
    for (size_t done = 0; done < want->count && status == DTRAIN_OK; done += region->count) {
        void *at;
        status = dtrain__staging_room(&load->shelf.way, want->device, (want->count - done) * each, &at, &have);
        region->at = want->begin + done;
        region->count = have / each;
        box->out = (unsigned char *)at;
        if (status == DTRAIN_OK)
            status = dtrain__region_boxes(region, dtrain__load_model_box, box);
        if (status == DTRAIN_OK)
            status =
                dtrain__staging_send(&load->shelf.way, (unsigned char *)want->data + done * each, region->count * each);
    }
    return status;
}

static dtrain_status dtrain__load_read_model(dtrain__load *load)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < load->piece_count && status == DTRAIN_OK; i++) {
        const dtrain_piece *want = &load->pieces[load->wants[i].piece];
        dtrain__region region;
        dtrain__load_box box;
        if (load->wants[i].tensor == DTRAIN__INDEX_NONE || want->count == 0)
            continue;
        memset(&box, 0, sizeof box);
        box.want = want;
        box.tensor = dtrain_safetensors_model_find(load->model, want->name, strlen(want->name), &box.file);
        dtrain__region_of(&region, want);
        box.out = (unsigned char *)want->data;
        status = want->device == NULL ? dtrain__region_boxes(&region, dtrain__load_model_box, &box)
                                      : dtrain__load_model_to(load, &region, &box);
        load->report.bytes += (uint64_t)want->count * (dtrain_dtype_bits(box.tensor->dtype) / 8);
    }
    for (size_t i = 0; i < dtrain_safetensors_model_files(load->model); i++) {
        dtrain_safetensors *file = dtrain_safetensors_model_file(load->model, i);
        load->shelf.bytes_read += dtrain_safetensors_header_bytes(file) + dtrain_safetensors_bytes_read(file);
    }
    return status == DTRAIN_OK ? dtrain__staging_wait(&load->shelf.way) : status;
}

#endif
