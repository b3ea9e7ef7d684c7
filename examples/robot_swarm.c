/* DiLoCo on four robots, which are processes here. Each robot trains on what it has seen itself. Every 20 steps the
 * robots average how far they have come, in eight bits a number. One is five times as slow, and one loses its power.
 *
 * cc -O2 -ffp-contract=off -I. examples/robot_swarm.c -o build/robot_swarm -lpthread -lm && build/robot_swarm
 *
 * No robot waits for another. A round takes the robots that hand in within 40 ms; a late one counts in the next. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nn.h"

enum { W1, B1, W2, B2, W3, B3, PARAMS };
enum { HIDDEN = 48, UNITS = 3, SAMPLES = 64, SEEN = 512 };
enum { ROBOTS = 4, SLOW = 2, DIES = 3, STEPS = 400, LAST_STEP = 150 };

static const float learning_rate = 0.01f;
static const size_t shapes[PARAMS][2] = {{HIDDEN, 2}, {HIDDEN, 0}, {HIDDEN, HIDDEN}, {HIDDEN, 0}, {2, HIDDEN}, {2, 0}};

/* A network of three layers, one unit each, learns to tell two spirals of points apart. */
typedef struct net {
    dtrain_param table[PARAMS];
    float params[PARAMS][HIDDEN * HIDDEN], grads[PARAMS][HIDDEN * HIDDEN];
    float x[UNITS][SAMPLES * HIDDEN], sum[UNITS][SAMPLES * HIDDEN]; /* what a layer reads, and what it gives */
    float dx[SAMPLES * HIDDEN], dsum[SAMPLES * HIDDEN];
} net;

static void net_init(net *n)
{
    static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2", "w3", "b3"};
    memset(n, 0, sizeof *n);
    for (int i = 0; i < PARAMS; i++) {
        n->table[i].name = names[i];
        n->table[i].dtype = DTRAIN_F32;
        memcpy(n->table[i].shape, shapes[i], sizeof shapes[i]);
        n->table[i].unit = i / 2;
        n->table[i].data = n->params[i];
        n->table[i].grad = n->grads[i];
        for (size_t k = 0; k < dtrain_param_elements(&n->table[i]) && i % 2 == 0; k++)
            n->params[i][k] = (i == W1 ? 0.5f : 0.2f) * dtrain_random_normal((uint64_t)i, k);
    }
}

/* A point that a robot has seen lies near one of two arms. */
static void look(net *n, int robot, uint64_t index, int place, int32_t *labels)
{
    uint64_t seed = 10 + (uint64_t)robot;
    float along = dtrain_random_uniform(seed, 4 * index), angle = 9 * along + 3.14159265f * (float)(index % 2);
    n->x[0][2 * place] = along * cosf(angle) + 0.02f * dtrain_random_normal(seed, 4 * index + 1);
    n->x[0][2 * place + 1] = along * sinf(angle) + 0.02f * dtrain_random_normal(seed, 4 * index + 2);
    labels[place] = (int32_t)(index % 2);
}

static size_t inputs_of(int unit)
{
    return unit == 0 ? 2 : HIDDEN;
}

static size_t outputs_of(int unit)
{
    return unit == UNITS - 1 ? 2 : HIDDEN;
}

/* The summed loss of SAMPLES points from `first` on; the last layer's sums become its gradient. */
static double forward(net *n, int robot, uint64_t first)
{
    int32_t labels[SAMPLES];
    for (int k = 0; k < SAMPLES; k++)
        look(n, robot, (first + (uint64_t)k) % SEEN, k, labels);
    for (int unit = 0; unit < UNITS; unit++) {
        nn_linear_forward(n->sum[unit], n->x[unit], n->params[2 * unit], n->params[2 * unit + 1], SAMPLES,
                          inputs_of(unit), outputs_of(unit));
        if (unit < UNITS - 1)
            nn_gelu_forward(n->x[unit + 1], n->sum[unit], SAMPLES * HIDDEN);
    }
    return nn_cross_entropy(n->sum[UNITS - 1], labels, SAMPLES, 2);
}

static dtrain_status train_step(net *n, dtrain_optimizer *optimizer, int robot, uint64_t step)
{
    forward(n, robot, step * SAMPLES);
    memset(n->grads, 0, sizeof n->grads);
    memcpy(n->dsum, n->sum[UNITS - 1], SAMPLES * 2 * sizeof(float));
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        nn_linear_backward(n->dx, n->grads[2 * unit], n->grads[2 * unit + 1], n->dsum, n->x[unit], n->params[2 * unit],
                           SAMPLES, inputs_of(unit), outputs_of(unit));
        if (unit > 0)
            nn_gelu_backward(n->dsum, n->dx, n->sum[unit - 1], SAMPLES * HIDDEN);
    }
    for (int i = 0; i < PARAMS; i++)
        for (size_t k = 0; k < dtrain_param_elements(&n->table[i]); k++)
            n->grads[i][k] /= SAMPLES;
    return dtrain_optimizer_step(optimizer, learning_rate);
}

/* The mean loss over what all robots have seen. */
static double loss_of_all(net *n)
{
    double loss = 0;
    for (int robot = 0; robot < ROBOTS; robot++)
        for (uint64_t first = 0; first < SEEN; first += SAMPLES)
            loss += forward(n, robot, first);
    return loss / (ROBOTS * SEEN);
}

/* Prints a line for each round that this robot hears of. */
static void report(net *n, dtrain_local_sgd *local, uint64_t *rounds)
{
    dtrain_local_sgd_stats stats = dtrain_local_sgd_get_stats(local);
    int members[ROBOTS], count = dtrain_local_sgd_members(local, members);
    char who[ROBOTS + 1] = "";
    if (stats.rounds == *rounds)
        return;
    *rounds = stats.rounds;
    memset(who, '-', ROBOTS);
    for (int i = 0; i < count; i++)
        who[members[i]] = (char)('0' + members[i]);
    printf("round %2d: robots %s of %d, loss %.4f, %.1f KiB sent instead of %.1f\n", (int)stats.rounds, who, stats.left,
           loss_of_all(n), (double)stats.sent_bytes / 1024, (double)stats.dense_bytes / 1024);
    fflush(stdout);
}

/* Finishes with the robots that are left, and checks that their weights are equal. */
static int end(net *n, dtrain_local_sgd *local, dtrain_comm *world, uint64_t *rounds)
{
    dtrain_comm *rest;
    DTRAIN_CHECK(dtrain_local_sgd_finish(local));
    if (dtrain_comm_rank(world) == 0)
        report(n, local, rounds);
    DTRAIN_CHECK(dtrain_comm_shrink(world, &rest));
    for (int i = 0; i < PARAMS; i++)
        DTRAIN_CHECK(dtrain_comm_check_equal(rest, n->params[i], dtrain_param_elements(&n->table[i]), DTRAIN_F32));
    double loss = loss_of_all(n);
    if (dtrain_comm_rank(rest) == 0)
        printf("%d robots end with the same weights, loss %.4f\n", dtrain_comm_size(rest), loss);
    fflush(stdout);                     /* the process ends by _exit */
    DTRAIN_CHECK(dtrain_barrier(rest)); /* no robot leaves before all have compared */
    dtrain_comm_destroy(rest);
    return loss < 0.1 ? 0 : 1;
}

static int robot_main(int robot, const char *root)
{
    static net n;
    dtrain_comm *world;
    dtrain_local_sgd *local;
    dtrain_optimizer *optimizer;
    dtrain_comm_desc where = {0};
    dtrain_local_sgd_desc desc = {0};
    dtrain_compress_desc bits = {0};
    uint64_t rounds = 0;
    where.rank = robot;
    where.world_size = ROBOTS;
    where.root = root;
    dtrain_set_log(NULL, NULL); /* the log would tell of the lost robot, which is expected */
    DTRAIN_CHECK(dtrain_comm_create(&world, &where));
    net_init(&n);
    bits.kind = DTRAIN_COMPRESS_INT8;
    desc.steps = 20;
    desc.window_ms = 40;
    desc.compress = &bits;
    DTRAIN_CHECK(dtrain_local_sgd_create(&local, world, n.table, PARAMS, &desc));
    DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, n.table, PARAMS, NULL, NULL));
    if (robot == 0)
        printf("%d robots learn to tell two spirals apart; 01-3: in the round, -: late or lost\n", ROBOTS);
    for (uint64_t step = 0; step < (robot == SLOW ? STEPS / 5 : STEPS); step++) {
        if (robot == DIES && step == LAST_STEP)
            raise(SIGKILL);
        DTRAIN_CHECK(train_step(&n, optimizer, robot, step));
        DTRAIN_CHECK(dtrain_local_sgd_step(local, SAMPLES));
        if (robot == 0)
            report(&n, local, &rounds);
        usleep(robot == SLOW ? 15000 : 3000);
    }
    int bad = end(&n, local, world, &rounds);
    dtrain_local_sgd_destroy(local);
    dtrain_optimizer_destroy(optimizer);
    dtrain_comm_destroy(world);
    return bad;
}

int main(void)
{
    char directory[] = "/tmp/robot_swarm-XXXXXX", root[64];
    pid_t pids[ROBOTS];
    int bad = mkdtemp(directory) == NULL;
    snprintf(root, sizeof root, "unix:%s/root", directory);
    for (int robot = 0; robot < ROBOTS && !bad; robot++)
        if ((pids[robot] = fork()) == 0)
            _exit(robot_main(robot, root)); /* each makes its group after the fork */
    for (int robot = 0; robot < ROBOTS && !bad; robot++) {
        int status = 0;
        waitpid(pids[robot], &status, 0);
        bad |= robot == DIES ? !WIFSIGNALED(status) : !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    rmdir(directory);
    return bad;
}

/* What it prints, less a few rounds. Runs differ in who takes part in which round.
 *
 * round  1: robots 01-3 of 4, loss 0.6293, 4.0 KiB sent instead of 501.6
 * round  3: robots 01-3 of 4, loss 0.5103, 12.0 KiB sent instead of 1109.5
 * round  4: robots 0123 of 4, loss 0.4840, 16.0 KiB sent instead of 1322.3
 * round  6: robots 01-3 of 4, loss 0.3634, 24.1 KiB sent instead of 1991.1
 * round  7: robots 01-- of 3, loss 0.2169, 27.6 KiB sent instead of 2447.1
 * round  8: robots 012- of 3, loss 0.1827, 31.1 KiB sent instead of 2766.3
 * round 11: robots 01-- of 3, loss 0.0600, 41.7 KiB sent instead of 3815.0
 * round 19: robots 012- of 3, loss 0.0357, 70.0 KiB sent instead of 6079.7
 * 3 robots end with the same weights, loss 0.0357
 */
