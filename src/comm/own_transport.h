/* ---- >>own_transport ----
 * Groups over a transport that the program brings. */
#ifndef DTRAIN__OWN_TRANSPORT_H
#define DTRAIN__OWN_TRANSPORT_H
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a group over a transport of your own; the table is copied, and destroyed with the last group that comes of it.
 *
 *   errors   DTRAIN_ERR_INVALID  a missing function, or a rank outside the size; the table stays yours
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_comm_from_transport(dtrain_comm **comm, const dtrain_transport *transport,
                                                         const dtrain_comm_desc *desc);

#ifdef __cplusplus
}
#endif

#endif
