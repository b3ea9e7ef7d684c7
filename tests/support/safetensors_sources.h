/* What tests of safetensors write: tensors, and one that is not in memory. */
#ifndef DTRAIN_TEST_SAFETENSORS_SOURCES_H
#define DTRAIN_TEST_SAFETENSORS_SOURCES_H

__attribute__((unused)) static const size_t one[1] = {1}, two[1] = {2}, none[1] = {0}, two_by_three[2] = {2, 3};

static dtrain_safetensors_source source(const char *name, dtrain_dtype dtype, int ndim, const size_t *shape,
                                        const void *data)
{
    dtrain_safetensors_source s;
    memset(&s, 0, sizeof s);
    s.name = name;
    s.dtype = dtype;
    s.ndim = ndim;
    s.shape = shape;
    s.data = data;
    return s;
}

/* Gives byte i of a tensor as i modulo 253, and wants to be asked in order. */
typedef struct counter {
    uint64_t next;
    int fail;
} counter;

static dtrain_status counter_fill(void *user, uint64_t offset, void *out, size_t bytes)
{
    counter *c = (counter *)user;
    CHECK_EQ(offset, c->next);
    CHECK(bytes % 24 == 0 || bytes % 8 == 0);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)out)[i] = (unsigned char)((offset + i) % 253);
    c->next += bytes;
    return c->fail ? DTRAIN_ERR_TIMEOUT : DTRAIN_OK;
}

#endif
