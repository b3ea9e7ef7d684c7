/* ---- >>keys ----
 * What a rank proves, and is known by, before it has met another one. */
#ifndef DTRAIN__KEYS
#define DTRAIN__KEYS
#include "../base/base.h"

#define DTRAIN__ADDRESS_BYTES 256
#define DTRAIN__RUN_BYTES 16
#define DTRAIN__JOB_BYTES 64
#define DTRAIN__NAME_BYTES 96

/* What all handshakes of one rank share. */
typedef struct dtrain__keys {
    unsigned char token[256];
    size_t token_bytes;                   /* 0: the proof is made with an empty key */
    unsigned char run[DTRAIN__RUN_BYTES]; /* made by rank 0; zero on the others until they hear it */
    int rank, world_size;
    int secure;                    /* as in dtrain_comm_desc */
    char job[DTRAIN__JOB_BYTES];   /* the launcher's id of the job; empty: it gave none */
    char name[DTRAIN__NAME_BYTES]; /* this process: "pid 4711 (train) on alpha" */
} dtrain__keys;

#endif
