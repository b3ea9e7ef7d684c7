/* What tests/interop/packages.sh builds by each package, as C and as C++: an all-reduce over two threads, and the
 * versions of header and library. */
#include <dtrain.h>

static dtrain_status body(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    float x[2] = {1.5f + (float)rank, -(float)rank};
    dtrain_status status = dtrain_all_reduce(world, x, x, 2, DTRAIN_F32, DTRAIN_SUM);
    ((int *)user)[rank] = x[0] == 4 && x[1] == -1; /* 1.5 + 2.5, 0 - 1 */
    return status;
}

int main(void)
{
    int good[2] = {0, 0}, version = dtrain_version();
    DTRAIN_CHECK(dtrain_run_threads(2, body, good, NULL));
    if (!good[0] || !good[1] || version != DTRAIN_VERSION)
        return 1;
    printf("%d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    return 0;
}
