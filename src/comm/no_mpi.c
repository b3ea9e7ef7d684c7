/* ---- >>no-mpi ----
 * The stand-in for worlds over MPI in a program that does not define DTRAIN_MPI. */
#ifndef DTRAIN__NO_MPI_FILE
#define DTRAIN__NO_MPI_FILE
#include "create.c"

static dtrain_status dtrain__from_mpi_world(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    (void)comm, (void)desc;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "comm_create: the transport is mpi, but this program was built without DTRAIN_MPI: define "
                        "it before dtrain.h, without DTRAIN_NO_TRANSPORT");
}

#endif
