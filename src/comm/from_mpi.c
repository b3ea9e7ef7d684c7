/* ---- >>groups_over_mpi ----
 * Worlds over messages of MPI: its transport behind the mux that any transport of two functions has. */
#ifndef DTRAIN__FROM_MPI
#define DTRAIN__FROM_MPI
#include "from_mpi.h"
#include "../transport/mpi.c"
#include "own_transport.c"

/* The number of ranks that a launcher has started, by its own account; 0: it does not say. */
static int dtrain__from_mpi_launched(const char **name)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_NRANKS", "SLURM_STEP_NUM_TASKS",
                                        "DTRAIN_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = dtrain__os_getenv(names[i]);
        *name = names[i];
        if (text != NULL && atoi(text) > 0)
            return atoi(text);
    }
    return 0;
}

static dtrain_status dtrain__from_mpi_make(dtrain_comm **comm, dtrain_transport *table, const dtrain_comm_desc *desc)
{
    dtrain_comm_desc trusting = *desc;
    trusting.checksum = desc->checksum != 0 ? desc->checksum : -1; /* MPI's own transports look after that */
    dtrain_status status = dtrain_comm_from_transport(comm, table, &trusting);
    if (status == DTRAIN_OK)
        return status;
    dtrain__error kept = dtrain__thread_error;
    table->destroy(table->self);
    return dtrain__report(&kept);
}

/* A rank that polls may be silent for as long as it likes, unless the desc says otherwise. */
static int64_t dtrain__from_mpi_heartbeat(const dtrain_comm_desc *desc)
{
    return desc->heartbeat_ms != 0 ? desc->heartbeat_ms : desc->progress == DTRAIN_PROGRESS_POLL ? -1 : 15000;
}

/* Makes the world of DTRAIN_TRANSPORT=mpi. */
static dtrain_status dtrain__from_mpi_world(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    dtrain_transport table;
    const char *from;
    int launched = dtrain__from_mpi_launched(&from), polls = desc->progress == DTRAIN_PROGRESS_POLL;
    dtrain_status status = dtrain__mpi_ready(1, polls);
    if (status == DTRAIN_OK)
        status = dtrain__mpi_open(&table, DTRAIN__MPI_WORLD, desc->timeout_ms, dtrain__from_mpi_heartbeat(desc));
    if (status != DTRAIN_OK)
        return status;
    if (table.size == 1 && launched > 1) {
        table.destroy(table.self);
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "comm_create: %s is %d, but MPI has a world of one rank: %s is not of the launcher's MPI; "
                            "set DTRAIN_MPI_LIBRARY to that one's%s",
                            from, launched, dtrain__mpi()->library,
                            strncmp(from, "SLURM", 5) == 0 ? ", or give srun --mpi=pmi2 or --mpi=pmix" : "");
    }
    return dtrain__from_mpi_make(comm, &table, desc);
}

DTRAIN_API dtrain_status dtrain_comm_from_mpi(dtrain_comm **comm, const void *handle, const dtrain_comm_desc *desc)
{
    dtrain_transport table;
    dtrain__mpi_comm given;
    if (comm == NULL || handle == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_mpi: %s is NULL; give an address for the group, and that of an MPI_Comm",
                            comm == NULL ? "comm" : "handle");
    *comm = NULL;
    memcpy(&given, handle, sizeof given);
    dtrain_status status = dtrain__create_check_desc(&desc);
    if (status != DTRAIN_OK)
        return status;
    int polls = desc->progress == DTRAIN_PROGRESS_POLL;
    status = dtrain__mpi_ready(0, polls);
    if (status == DTRAIN_OK)
        status = dtrain__mpi_open(&table, given, desc->timeout_ms, dtrain__from_mpi_heartbeat(desc));
    return status == DTRAIN_OK ? dtrain__from_mpi_make(comm, &table, desc) : status;
}

#endif
