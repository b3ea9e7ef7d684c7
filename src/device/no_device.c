/* ---- >>no-device ----
 * Stands in for groups of devices under FSDP in a program that defines DTRAIN_NO_DEVICE. No group can be made, so
 * nothing else is called with one. */
#ifndef DTRAIN__NO_DEVICE
#define DTRAIN__NO_DEVICE
#include "../tensor/device.c"
#include "../comm/op.c"

typedef struct dtrain_device_group dtrain_device_group;
typedef struct dtrain_device_work dtrain_device_work;

static dtrain_status dtrain__no_device(const dtrain_device *device)
{
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "parameters are on %s, and this program was built with DTRAIN_NO_DEVICE: remove that macro",
                        dtrain_device_name(device));
}

static dtrain_status dtrain__device_group_async(dtrain_device_group **group, dtrain_comm *comm, dtrain_device *device)
{
    (void)comm;
    *group = NULL;
    return dtrain__no_device(device);
}

static dtrain_status dtrain_device_group_all_reduce(dtrain_device_group *group, const void *in, void *out, size_t count,
                                                    dtrain_dtype dtype, dtrain_op op)
{
    (void)group, (void)in, (void)out, (void)count, (void)dtype, (void)op;
    return dtrain__no_device(NULL);
}

static dtrain_status dtrain_device_group_broadcast(dtrain_device_group *group, void *data, size_t count,
                                                   dtrain_dtype dtype, int root)
{
    (void)group, (void)data, (void)count, (void)dtype, (void)root;
    return dtrain__no_device(NULL);
}

static dtrain_status dtrain_device_group_all_reduce_async(dtrain_device_group *group, const void *in, void *out,
                                                          size_t count, dtrain_dtype dtype, dtrain_op op,
                                                          dtrain_device_work **work)
{
    (void)group, (void)in, (void)out, (void)count, (void)dtype, (void)op, (void)work;
    return dtrain__no_device(NULL);
}

static dtrain_status dtrain__async_start_v(dtrain_device_group *group, dtrain__kind kind, const void *in, void *out,
                                           const size_t *counts, dtrain_dtype dtype, dtrain_op op,
                                           dtrain_device_work **work)
{
    (void)group, (void)kind, (void)in, (void)out, (void)counts, (void)dtype, (void)op, (void)work;
    return dtrain__no_device(NULL);
}

static int dtrain__async_times(const dtrain_device_work *work, int64_t *begin_ns, int64_t *end_ns)
{
    (void)work, (void)begin_ns, (void)end_ns;
    return 0;
}

static dtrain_status dtrain_device_work_wait(dtrain_device_work *work, dtrain_device *device)
{
    (void)work;
    return dtrain__no_device(device);
}

static void dtrain_device_group_destroy(dtrain_device_group *group)
{
    (void)group;
}

#endif
