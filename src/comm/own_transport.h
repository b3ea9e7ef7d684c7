/* ---- >>own_transport ----
 * Groups over a transport that the program brings. */
#ifndef DTRAIN__OWN_TRANSPORT_H
#define DTRAIN__OWN_TRANSPORT_H
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the world of a transport of your own (see >>transport): every rank calls it with its own table.
 *
 *   comm        out: this rank's end; NULL on an error
 *   transport   copied. Its destroy is called once the last group made from this world is gone
 *   desc        NULL: all defaults; rank, size, root and token are not read
 *   errors      DTRAIN_ERR_INVALID  no send or recv, a rank outside the size, or DTRAIN_ALGORITHM_FUSED
 *               DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO
 *               on any error the table stays yours
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_comm_from_transport(dtrain_comm **comm, const dtrain_transport *transport,
                                                         const dtrain_comm_desc *desc);

#ifdef __cplusplus
}
#endif

#endif
