/* ---- >>no-compression ----
 * Replaces >>compression in a program that defines DTRAIN_NO_COMPRESS. */
#ifndef DTRAIN__NO_COMPRESSION
#define DTRAIN__NO_COMPRESSION
#include "train.h"
#include "../base/status.c"

DTRAIN_API dtrain_status dtrain_aggregator_compressed(dtrain_aggregator *aggregator, dtrain_comm *comm,
                                                      const dtrain_param *table, size_t count,
                                                      const dtrain_compress_desc *desc)
{
    (void)comm, (void)table, (void)count, (void)desc;
    if (aggregator != NULL)
        memset(aggregator, 0, sizeof *aggregator);
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "aggregator_compressed: this program was built with DTRAIN_NO_COMPRESS: remove that macro");
}

#endif
