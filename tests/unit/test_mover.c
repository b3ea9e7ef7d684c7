/* Pieces that move between ranks: uneven wants, one holder whom all ask, holders that fail, requests that may not be.
 */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

enum { NUMBERS = 1009, MOST = 8 * 16 };

typedef struct number_request {
    dtrain__move move;
    uint64_t first; /* numbers first, first + ranks, and so on, as many as its bytes say */
} number_request;

/* Rank r holds the numbers i with i % ranks == r; each is 7 * i + 1. */
typedef struct mover_end {
    dtrain__mover mover;
    size_t next, wanted, here; /* the next number that it asks for; how many it wants; how many have come */
    size_t turn, given;        /* bytes that were given in this turn */
    int one_holder;            /* all ask rank 0 */
    uint64_t wild_holder, wild_bytes, wild_first;
    int fails_for; /* the rank for which this one cannot read; -1: none */
} mover_end;

static uint64_t ranks_of(const mover_end *end)
{
    return (uint64_t)dtrain_comm_size(end->mover.comm);
}

static void ask(void *user, dtrain__move *mine)
{
    mover_end *end = (mover_end *)user;
    uint64_t ranks = ranks_of(end), holder = end->one_holder ? 0 : end->next % ranks;
    number_request *request = (number_request *)mine;
    if (end->here >= end->wanted)
        return;
    size_t left = end->wanted - end->here, most = MOST / 8 - end->next % 3; /* uneven pieces */
    request->first = holder + ranks * (end->next % 10);
    mine->holder = holder;
    mine->bytes = 8 * (left < most ? left : most);
    end->next++;
    if (end->wild_bytes > 0) {
        mine->holder = end->wild_holder;
        mine->bytes = end->wild_bytes;
        request->first = end->wild_first;
    }
}

static int known(void *user, const dtrain__move *asked)
{
    const mover_end *end = (const mover_end *)user;
    uint64_t first = ((const number_request *)asked)->first;
    return asked->bytes % 8 == 0 && first + (asked->bytes / 8 - 1) * ranks_of(end) < NUMBERS;
}

static dtrain_status give(void *user, const dtrain__move *asked, int rank, unsigned char *out)
{
    mover_end *end = (mover_end *)user;
    if (end->turn != end->mover.turn) {
        end->turn = end->mover.turn;
        end->given = 0;
    }
    end->given += (size_t)asked->bytes;
    CHECK(end->given <= 4 * MOST);
    CHECK_EQ(asked->holder, dtrain_comm_rank(end->mover.comm));
    if (rank == end->fails_for)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "numbers: a disk is gone");
    for (uint64_t i = 0; i < asked->bytes / 8; i++) {
        uint64_t number = 7 * (((const number_request *)asked)->first + i * ranks_of(end)) + 1;
        memcpy(out + 8 * i, &number, 8);
    }
    return DTRAIN_OK;
}

static dtrain_status take(void *user, const dtrain__move *mine, unsigned char *in)
{
    mover_end *end = (mover_end *)user;
    for (uint64_t i = 0; i < mine->bytes / 8; i++, end->here++) {
        uint64_t number;
        memcpy(&number, in + 8 * i, 8);
        CHECK_EQ(number, 7 * (((const number_request *)mine)->first + i * ranks_of(end)) + 1);
    }
    return DTRAIN_OK;
}

static void begin(mover_end *end, dtrain_comm *world)
{
    memset(end, 0, sizeof *end);
    end->mover.comm = world;
    end->mover.allocator = dtrain_comm_allocator(world);
    end->mover.call = "numbers";
    end->mover.most = MOST;
    end->mover.request_bytes = sizeof(number_request);
    end->mover.user = end;
    end->mover.ask = ask;
    end->mover.known = known;
    end->mover.give = give;
    end->mover.take = take;
    end->wanted = (size_t)dtrain_comm_rank(world) * 137; /* rank 0 wants nothing */
    end->fails_for = -1;
}

static void move(dtrain_comm *world, int from_one)
{
    mover_end end;
    begin(&end, world);
    end.one_holder = from_one;
    CHECK_EQ(dtrain__mover_run(&end.mover), DTRAIN_OK);
    CHECK_EQ(end.here, end.wanted);
}

static int move_all(dtrain_comm *world, scene *s)
{
    (void)s;
    move(world, 0);
    move(world, 1);
    return 0;
}

TEST(every_rank_gets_what_it_wants_from_all_or_from_one)
{
    for (int ranks = 1; ranks <= 9; ranks += ranks < 3 ? 1 : 2)
        on_threads(ranks, move_all, NULL);
    on_both(4, move_all);
}

static int move_without_a_disk(dtrain_comm *world, scene *s)
{
    mover_end end;
    int rank = dtrain_comm_rank(world);
    (void)s;
    begin(&end, world);
    end.fails_for = rank == 2 ? 1 : -1;
    CHECK_EQ(dtrain__mover_run(&end.mover), rank == 1 || rank == 2 ? DTRAIN_ERR_IO : DTRAIN_OK);
    if (rank == 1)
        CHECK_CONTAINS(dtrain_last_error(), "numbers: rank 2 could not read its part for rank 1");
    else if (rank == 2)
        CHECK_CONTAINS(dtrain_last_error(), "numbers: a disk is gone");
    else
        CHECK_EQ(end.here, end.wanted);
    return 0;
}

TEST(a_holder_that_cannot_read_fails_whom_it_serves_and_itself)
{
    on_threads(5, move_without_a_disk, NULL);
}

static int ask_too_much(dtrain_comm *world, scene *s)
{
    const uint64_t wild[][3] = {{0, MOST + 8, 0}, {3, 8, 0}, {UINT64_MAX, 8, 0}, {0, 8, NUMBERS}, {0, UINT64_MAX, 0}};
    mover_end end;
    (void)s;
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) {
        begin(&end, world);
        if (dtrain_comm_rank(world) == 1) {
            end.wild_holder = wild[i][0];
            end.wild_bytes = wild[i][1];
            end.wild_first = wild[i][2];
        }
        CHECK_EQ(dtrain__mover_run(&end.mover), DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(dtrain_last_error(), "numbers: rank 1 asks rank ");
        CHECK_EQ(end.here, 0);
    }
    return 0;
}

TEST(a_request_for_what_nobody_has_ends_it_on_all_ranks)
{
    on_threads(3, ask_too_much, NULL);
}
