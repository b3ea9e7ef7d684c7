/* ---- >>pages ----
 * A reserved range of addresses whose pages come when they are taken, and go when nobody uses them. Users take and drop
 * stretches of bytes. Stretches may share a page, which stays while any of them is in use.
 *
 * A new page costs the system more time than copying its contents. So unused pages are parked in place, and moved under
 * the next stretch that is taken. Pages stay parked only while they and the pages in use are at most `most`.
 *
 * One move takes only pages that came by one move. So seams between moves are marked, and a few pages are not worth a
 * move.
 *
 * Stretches may have to be zeros when they are taken; then parked pages are zeros. The owner of such a range calls
 * dtrain__pages_put_away when users may write to stretches that they have not taken. Parked pages then move away, to
 * the same place in a second range of the same size. A move under a stretch loses nothing: a stretch without users has
 * no contents, and if users may have written to it, the system is asked whether they did. */
#ifndef DTRAIN__PAGES
#define DTRAIN__PAGES
#include "../base/memory.c"

#define DTRAIN__PAGES_SEAM 0x8000u /* in users: a move has begun here, or ended before */
#define DTRAIN__PAGES_PARKED 64    /* parked runs, at most */
#define DTRAIN__PAGES_FEW 16       /* fewer pages are not worth a move */

typedef struct dtrain__pages_parked_run {
    size_t first, count;
    int away; /* in the second range */
} dtrain__pages_parked_run;

typedef struct dtrain__pages {
    unsigned char *base; /* NULL: nothing was reserved */
    size_t bytes, reserved, page;
    size_t most, held; /* pages */
    int moves;         /* the system can move pages */
    int zeros;         /* a stretch is zeros when it is taken, except for what users have written */
    size_t few;        /* fewer pages are not parked */
    dtrain__pages_parked_run parked[DTRAIN__PAGES_PARKED];
    int parked_count;
    uint16_t *users; /* of each page */
    dtrain_allocator *allocator;
} dtrain__pages;

/* Reserves addresses; most: bytes beyond which no pages are parked. */
static dtrain_status dtrain__pages_create(dtrain__pages *pages, size_t bytes, size_t most, int zeros,
                                          dtrain_allocator *allocator)
{
    pages->page = dtrain__os_page_bytes();
    pages->allocator = allocator;
    pages->bytes = (bytes + pages->page - 1) / pages->page * pages->page;
    pages->most = most / pages->page;
    pages->zeros = zeros;
    pages->few = pages->bytes / pages->page / 4096; /* a process has some 65,000 mappings */
    pages->few = pages->few > DTRAIN__PAGES_FEW ? pages->few : DTRAIN__PAGES_FEW;
    if (bytes == 0)
        return DTRAIN_OK;
    pages->users = (uint16_t *)dtrain__alloc(allocator, pages->bytes / pages->page * sizeof(uint16_t));
    pages->reserved = zeros ? 2 * pages->bytes : pages->bytes;
    pages->base = (unsigned char *)dtrain__os_reserve(pages->reserved);
    if (pages->users == NULL || pages->base == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "the system does not reserve %zu bytes of addresses: %s: see its limit (ulimit -v)",
                            pages->reserved, dtrain__os_error_text(errno));
    pages->moves = dtrain__os_moves();
    return DTRAIN_OK;
}

/* Counts pages that come; a number that wraps around counts pages that go. */
static DTRAIN__NOINLINE void dtrain__pages_hold(dtrain__pages *pages, size_t more)
{
    pages->held += more;
    dtrain__memory_count(pages->allocator, more * pages->page);
}

static unsigned char *dtrain__pages_at(const dtrain__pages *pages, size_t first, int away)
{
    return pages->base + (away ? pages->bytes : 0) + first * pages->page;
}

/* Frees whole pages. If the system refuses, as for locked pages, they are set to zero. */
static void dtrain__pages_discard(dtrain__pages *pages, size_t first, size_t count, int away)
{
    unsigned char *begin = dtrain__pages_at(pages, first, away);
    if (count > 0 && dtrain__os_discard(begin, count * pages->page) != 0)
        memset(begin, 0, count * pages->page);
    dtrain__pages_hold(pages, (size_t)0 - count);
}

/* Takes pages from a parked run. What is left at its ends stays parked, or is discarded if it is too short. */
static void dtrain__pages_unpark(dtrain__pages *pages, int index, size_t first, size_t count)
{
    dtrain__pages_parked_run whole = pages->parked[index];
    dtrain__pages_parked_run left[2] = {{whole.first, first - whole.first, whole.away},
                                        {first + count, whole.first + whole.count - first - count, whole.away}};
    pages->parked[index] = pages->parked[--pages->parked_count];
    for (int i = 0; i < 2; i++) {
        if (left[i].count >= pages->few && pages->parked_count < DTRAIN__PAGES_PARKED)
            pages->parked[pages->parked_count++] = left[i];
        else
            dtrain__pages_discard(pages, left[i].first, left[i].count, whole.away);
    }
}

/* Discards a parked run. */
static void dtrain__pages_unpark_all(dtrain__pages *pages, int index)
{
    dtrain__pages_parked_run whole = pages->parked[index];
    dtrain__pages_unpark(pages, index, whole.first, whole.count);
    dtrain__pages_discard(pages, whole.first, whole.count, whole.away);
}

/* Marks the seams at the ends of pages that have been moved. */
static void dtrain__pages_seams(dtrain__pages *pages, size_t first, size_t count)
{
    for (size_t at = first + 1; at < first + count; at++)
        pages->users[at] &= (uint16_t)~DTRAIN__PAGES_SEAM;
    pages->users[first] |= DTRAIN__PAGES_SEAM;
    if (first + count < pages->bytes / pages->page)
        pages->users[first + count] |= DTRAIN__PAGES_SEAM;
}

/* Moves parked pages, from `from` on, under a stretch. Returns 0 if they could not be moved. */
static int dtrain__pages_move(dtrain__pages *pages, int index, size_t from, size_t to, size_t count)
{
    size_t bytes = count * pages->page;
    unsigned char *source = dtrain__pages_at(pages, from, pages->parked[index].away);
    unsigned char *target = dtrain__pages_at(pages, to, 0);
    if (source != target) {
        if (!pages->moves || (pages->zeros && !dtrain__os_untouched(target, bytes)) ||
            dtrain__os_move(source, target, bytes) != 0)
            return 0;
        dtrain__pages_seams(pages, to, count);
    }
    dtrain__pages_unpark(pages, index, from, count);
    return 1;
}

/* Returns the parked run at page `at`, or -1. Lowers *end to where that run ends, or where the next one begins. */
static int dtrain__pages_parked_at(const dtrain__pages *pages, size_t at, size_t *end)
{
    for (int i = 0; i < pages->parked_count; i++) {
        const dtrain__pages_parked_run *parked = &pages->parked[i];
        if (at >= parked->first && at < parked->first + parked->count) {
            *end = parked->first + parked->count < *end ? parked->first + parked->count : *end;
            return i;
        }
        if (at < parked->first && parked->first < *end)
            *end = parked->first;
    }
    return -1;
}

/* Returns the parked run that fits a number of pages best; -1: none. */
static int dtrain__pages_fitting(const dtrain__pages *pages, size_t count)
{
    int best = -1;
    for (int i = 0; i < pages->parked_count; i++) {
        size_t has = pages->parked[i].count, most = best >= 0 ? pages->parked[best].count : 0;
        if (best < 0 || (most < count ? has > most : has >= count && has < most))
            best = i;
    }
    return best;
}

/* Brings pages for a stretch that has none: parked ones, then new ones. */
static void dtrain__pages_bring(dtrain__pages *pages, size_t first, size_t count)
{
    int index;
    while (count >= pages->few && (index = dtrain__pages_fitting(pages, count)) >= 0) {
        size_t has = pages->parked[index].count, n = has < count ? has : count;
        if (!dtrain__pages_move(pages, index, pages->parked[index].first, first, n))
            break;
        first += n;
        count -= n;
    }
    while (pages->parked_count > 0 && pages->held + count > pages->most)
        dtrain__pages_unpark_all(pages, 0);
    dtrain__pages_hold(pages, count);
    if (count > 0)
        dtrain__os_populate(pages->base + first * pages->page, count * pages->page);
}

/* Fills pages [first, end), which get their first user. Pages that are parked at the same place go back there, so that
 * the place is free for the next parking. */
static void dtrain__pages_fill(dtrain__pages *pages, size_t first, size_t end)
{
    while (first < end) {
        size_t to = end;
        int index = dtrain__pages_parked_at(pages, first, &to);
        if (index >= 0 && dtrain__pages_move(pages, index, first, first, to - first)) {
            first = to;
            continue;
        }
        if (index >= 0)
            dtrain__pages_unpark_all(pages, index);
        dtrain__pages_bring(pages, first, to - first);
        first = to;
    }
}

/* Notes a user of `bytes` bytes from `begin` on. */
static void dtrain__pages_take(dtrain__pages *pages, size_t begin, size_t bytes)
{
    size_t at = begin / pages->page, end = bytes > 0 ? (begin + bytes - 1) / pages->page + 1 : at, fresh = at;
    for (; at < end; at++) {
        if ((pages->users[at]++ & ~DTRAIN__PAGES_SEAM) == 0)
            continue;
        dtrain__pages_fill(pages, fresh, at);
        fresh = at + 1;
    }
    dtrain__pages_fill(pages, fresh, end);
}

/* Parks or frees pages [first, end), which have lost their last user, seam by seam. Pages that must be zeros are set to
 * zero now, while they are still in the caches. */
static void dtrain__pages_leave(dtrain__pages *pages, size_t first, size_t end)
{
    while (first < end) {
        size_t to = first + 1, n;
        while (to < end && !(pages->users[to] & DTRAIN__PAGES_SEAM))
            to++;
        n = to - first;
        if (n >= pages->few && pages->held <= pages->most && pages->parked_count < DTRAIN__PAGES_PARKED) {
            dtrain__pages_parked_run parked = {first, n, 0};
            pages->parked[pages->parked_count++] = parked;
            if (pages->zeros)
                memset(dtrain__pages_at(pages, first, 0), 0, n * pages->page);
        } else {
            dtrain__pages_discard(pages, first, n, 0);
        }
        first = to;
    }
}

/* Moves parked pages to the second range, because users may now write to stretches that they have not taken. */
static void dtrain__pages_put_away(dtrain__pages *pages)
{
    for (int i = pages->parked_count - 1; i >= 0; i--) {
        dtrain__pages_parked_run *parked = &pages->parked[i];
        unsigned char *here = dtrain__pages_at(pages, parked->first, 0);
        if (parked->away)
            continue;
        parked->away = pages->moves && dtrain__os_move(here, here + pages->bytes, parked->count * pages->page) == 0;
        if (!parked->away)
            dtrain__pages_unpark_all(pages, i);
    }
}

static int dtrain__pages_are_zero(const unsigned char *at, size_t bytes)
{
    return bytes == 0 || (*at == 0 && memcmp(at, at + 1, bytes - 1) == 0);
}

/* Ends a use. Pages without users go. With `zeros`, the stretch is set to zero in pages that stay. Then a page at
 * either end also stays if a neighbour has written there without taking it. */
static void dtrain__pages_drop(dtrain__pages *pages, size_t begin, size_t bytes)
{
    size_t page = pages->page, at = begin / page, gone = at;
    size_t end = bytes > 0 ? (begin + bytes - 1) / page + 1 : at;
    for (; at < end; at++) {
        size_t low = at * page > begin ? at * page : begin;
        size_t high = (at + 1) * page < begin + bytes ? (at + 1) * page : begin + bytes;
        int last = (--pages->users[at] & ~DTRAIN__PAGES_SEAM) == 0;
        if (last && (!pages->zeros || high - low == page))
            continue;
        if (pages->zeros)
            memset(pages->base + low, 0, high - low);
        if (last && dtrain__pages_are_zero(pages->base + at * page, page))
            continue;
        dtrain__pages_leave(pages, gone, at);
        dtrain__pages_hold(pages, (size_t)0 - (size_t)last);
        gone = at + 1;
    }
    dtrain__pages_leave(pages, gone, end);
}

static void dtrain__pages_destroy(dtrain__pages *pages)
{
    if (pages->held > 0)
        dtrain__pages_hold(pages, (size_t)0 - pages->held);
    if (pages->base != NULL)
        dtrain__os_unreserve(pages->base, pages->reserved);
    dtrain__free(pages->allocator, pages->users);
    memset(pages, 0, sizeof *pages);
}

#endif
