/* Ranks that meet, or do not: each a process of its own. */
#ifndef DTRAIN_TEST_MEETINGS_H
#define DTRAIN_TEST_MEETINGS_H

__attribute__((unused)) static const char token[] = "sixteen bytes or more of secret";

/* Ranks that do not get in: each runs create and expects an error. */
typedef struct misfit {
    dtrain_status expected;
    const char *text;
} misfit;

static int refused(scene *s, int rank, misfit m)
{
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    int before = test_failures;
    CHECK_EQ(dtrain_comm_create(&world, &desc), m.expected);
    CHECK(world == NULL);
    CHECK_CONTAINS(dtrain_last_error(), m.text);
    return test_failures != before;
}

__attribute__((unused)) static pid_t start_refused(scene *s, int rank, dtrain_status expected, const char *text)
{
    misfit m = {expected, text};
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(refused(s, rank, m));
    return pid;
}

__attribute__((unused)) static int nothing(dtrain_comm *world, scene *s)
{
    (void)s;
    return dtrain_barrier(world) != DTRAIN_OK;
}

/* Where rank 0 listens, as text. */
__attribute__((unused)) static dtrain__address_text listens_at(const char *root, const char *secret)
{
    dtrain_comm_desc desc;
    dtrain_comm *world;
    dtrain__address_text text = {""};
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    desc.root = root;
    desc.token = secret;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    if (world != NULL)
        text = dtrain__net_text(&CHANNEL(world)->hub->listening);
    dtrain_comm_destroy(world);
    return text;
}

#endif
