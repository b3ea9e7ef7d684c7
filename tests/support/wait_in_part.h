#ifndef DTRAIN_TEST_WAIT_IN_PART_H
#define DTRAIN_TEST_WAIT_IN_PART_H

/* Waits for a work for so many milliseconds, as the library does inside; returns whether it has ended well, and
 * freed it. */
static int wait_in_part(dtrain_work *work, int64_t ms)
{
    int ended;
    CHECK_EQ(dtrain__work_end(work, dtrain__os_now_ns() + ms * 1000000, &ended), DTRAIN_OK);
    return ended;
}

#endif
