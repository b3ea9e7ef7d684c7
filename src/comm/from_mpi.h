/* ---- >>from_mpi ----
 * Groups over MPI. Define DTRAIN_MPI to have them. dtrain moves its bytes by messages of MPI, so it runs on every fabric
 * that MPI drives. The collectives are dtrain's own, with the same bits as everywhere. Groups
 * whose ranks all share a host do them in shared memory.
 *
 * dtrain_comm_create takes MPI where DTRAIN_TRANSPORT=mpi is set, or desc.transport is "mpi": rank and size are then
 * MPI's. It initialises MPI, and finalises it at exit, unless the program does. The library is loaded at run time:
 *
 *   DTRAIN_MPI_LIBRARY   the library's path; else libmpi_abi.so.1, libmpi_abi.so.0, libmpi_abi.so, libmpi_abi.dylib.
 *                        It has the standard ABI of MPI 5.0: MPICH 5, Intel MPI 2021.18 and later
 *   DTRAIN_MPI_HEADER    a macro for older ones: compile with mpicc and -DDTRAIN_MPI_HEADER="<mpi.h>"
 *   DTRAIN_MPI_SHM=0     has MPI move all bytes, also inside a host
 *   DTRAIN_MPI_STAGED=1  copies all bytes through buffers of dtrain. Otherwise MPI moves long runs from and to the
 *                        caller's memory. Keep the buffers of a call that has met its deadline until the process ends
 *
 *     $ DTRAIN_TRANSPORT=mpi mpiexec -n 4 ./program
 *     $ DTRAIN_TRANSPORT=mpi srun --mpi=pmi2 --ntasks=4 ./program
 *
 * srun has to speak MPI's own protocol for the start: pmi2 for MPICH, pmix for Open MPI, either for Intel MPI.
 *
 * Making a world waits for all its ranks, also in dtrain_comm_create_async. Each world keeps a communicator of MPI until
 * the process ends. A program that exits with a world open skips MPI_Finalize, and its launcher reports that. Destroy
 * groups before you call MPI_Finalize: after it, calls that need MPI end with DTRAIN_ERR_IO.
 *
 * Two calls of MPI have no deadline: MPI_Init_thread, and MPI_Finalize at exit. If a rank dies, most launchers end the
 * whole job. Open MPI's lets survivors go on with --enable-recovery: they get DTRAIN_ERR_PEER_LOST once the rank has
 * been silent for desc.heartbeat_ms, and dtrain_comm_shrink makes their group. Ranks that poll have no such limit unless
 * the desc sets one. */
#ifndef DTRAIN__FROM_MPI_H
#define DTRAIN__FROM_MPI_H
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the world of the ranks of an MPI communicator, in a program that has initialised MPI.
 *
 * All ranks of the communicator call it. dtrain uses a copy, so its messages meet none of the program's.
 *
 *   comm     out: this rank's end; NULL on an error
 *   handle   the address of an MPI_Comm of the MPI that dtrain uses
 *   desc     NULL: all defaults; rank, size, root and token are not read
 *   errors   DTRAIN_ERR_UNSUPPORTED  no library with the ABI; MPI was finalised; or its level of threads: the service
 *                                    thread takes MPI_THREAD_MULTIPLE, DTRAIN_PROGRESS_POLL on the main thread takes any
 *            DTRAIN_ERR_INVALID      MPI is not initialised, or the program uses another one; MPI_COMM_NULL; an
 *                                    intercommunicator
 *            DTRAIN_ERR_IO           MPI has failed; the text is MPI's
 *            DTRAIN_ERR_TIMEOUT      not all ranks have called it
 *
 * any thread; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_from_mpi(dtrain_comm **comm, const void *handle,
                                                   const dtrain_comm_desc *desc);

#ifdef __cplusplus
}
#endif

#endif
