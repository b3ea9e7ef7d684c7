/* The cost of sealing. `seal` seals and opens records on one thread, beside one copy of as many bytes; DTRAIN_ISA
 * chooses the kernel. With transport=sealed, the same processes run a collective over sealed TCP and over plain TCP. */
#ifndef BENCH_SEAL_H
#define BENCH_SEAL_H

static dtrain_comm *bench_plain; /* the world over plain TCP of this process */

/* Seals all bytes on one thread, in records of a connection's size, and opens them again. */
static int seal_alone(bench *b)
{
    unsigned char *data = (unsigned char *)bench_memory(b->bytes, b->huge), key[DTRAIN__KEY_BYTES] = {1};
    unsigned char *back = (unsigned char *)bench_memory(b->bytes, b->huge), nonce[12] = {0}, head[4] = {0}, tag[16];
    static unsigned char record[DTRAIN__RECORD_BYTES];
    const dtrain__chacha_way *way = dtrain__chacha_choose(dtrain__isa());
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns();
        for (size_t at = 0, n; at < b->bytes; at += n) {
            n = b->bytes - at < sizeof record ? b->bytes - at : sizeof record;
            dtrain__aead_seal(way, key, nonce, head, sizeof head, data + at, record, n, tag);
            if (!dtrain__aead_open(way, key, nonce, head, sizeof head, record, back + at, n, tag))
                return 1;
        }
        int64_t middle = bench_now_ns();
        memcpy(back, data, b->bytes);
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
    }
    progress_end();
    double us = bench_median(b->us, b->runs), limit_us = bench_median(b->limit_us, b->runs);
    printf("op=seal transport=none ranks=1 bytes=%zu against=limit isa=%s us=%.3f algbw_GBps=%.4f limit_us=%.3f "
           "limit_GBps=%.4f of_limit=%.3f\n",
           b->bytes, dtrain_isa_name(), us, (double)b->bytes * 1e-3 / us, limit_us, (double)b->bytes * 1e-3 / limit_us,
           limit_us / us);
    free(data);
    free(back);
    return 0;
}

/* Makes both worlds of a rank and returns the sealed one. */
static dtrain_comm *seal_worlds(dtrain_comm_desc *desc, int port)
{
    char root[64];
    dtrain_comm *sealed;
    desc->secure = 1;
    desc->token = "a token for a benchmark";
    DTRAIN_CHECK(dtrain_comm_create(&sealed, desc));
    snprintf(root, sizeof root, "127.0.0.1:%d", port);
    desc->root = root;
    desc->secure = -1;
    DTRAIN_CHECK(dtrain_comm_create(&bench_plain, desc));
    return sealed;
}

#endif
