/* ---- >>pages ----
 * A reserved range of addresses whose pages come when they are taken and go when nobody uses them. Users take and drop
 * stretches of bytes; stretches may share a page, which stays while any of them is in use.
 *
 * To bring a page costs the system more than to copy what it will hold. So pages that go are parked where they are, and
 * moved under the next stretch that is taken; parked pages and those in use are never more than `most`. Where stretches
 * are to be zeros, parked pages are, and their owner says from when on a user may write to a stretch before it takes
 * it: then they are put away, at the same place in a second range of as many addresses. One move takes only pages that
 * came by one, so seams between moves are marked, and few pages are not worth a move. Nothing is lost by moving under a
 * stretch: the contents of one that has no user are nobody's, and where users may write before they take, the system is
 * asked whether anything is there. */
#ifndef DTRAIN__PAGES
#define DTRAIN__PAGES
#include "../base/memory.c"

#define DTRAIN__PAGES_SEAM 0x8000u /* in users: a move has begun here, or ended before */
#define DTRAIN__PAGES_PARKED 64    /* stretches, at most */
#define DTRAIN__PAGES_FEW 16       /* are not worth a move */

typedef struct dtrain__pages_parked_run {
    size_t first, count;
    int away; /* in the second range */
} dtrain__pages_parked_run;

typedef struct dtrain__pages {
    unsigned char *base; /* NULL: nothing was reserved */
    size_t bytes, reserved, page;
    size_t most, held; /* pages */
    int moves;         /* the system moves pages */
    int zeros;         /* a stretch is zeros when it is taken, but for what users have written */
    size_t few;        /* fewer are not parked */
    dtrain__pages_parked_run parked[DTRAIN__PAGES_PARKED];
    int parked_count;
    uint16_t *users; /* of each page */
    dtrain_allocator *allocator;
} dtrain__pages;

/* most: bytes that are held at once where parking is what holds them. */
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
                            pages->reserved, strerror(errno));
    pages->moves = dtrain__os_moves();
    return DTRAIN_OK;
}

/* Pages come (a number that wraps around: they go). */
static DTRAIN__NOINLINE void dtrain__pages_hold(dtrain__pages *pages, size_t more)
{
    pages->held += more;
    dtrain__memory_count(pages->allocator, more * pages->page);
}

static unsigned char *dtrain__pages_at(const dtrain__pages *pages, size_t first, int away)
{
    return pages->base + (away ? pages->bytes : 0) + first * pages->page;
}

/* Frees whole pages; where the system does not, as when they are locked, they are still set to zero. */
static void dtrain__pages_discard(dtrain__pages *pages, size_t first, size_t count, int away)
{
    unsigned char *begin = dtrain__pages_at(pages, first, away);
    if (count > 0 && dtrain__os_discard(begin, count * pages->page) != 0)
        memset(begin, 0, count * pages->page);
    dtrain__pages_hold(pages, (size_t)0 - count);
}

/* Takes pages off what is parked in one place; too few that are left are discarded. */
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

/* Discards what is parked in one place. */
static void dtrain__pages_unpark_all(dtrain__pages *pages, int index)
{
    dtrain__pages_parked_run whole = pages->parked[index];
    dtrain__pages_unpark(pages, index, whole.first, whole.count);
    dtrain__pages_discard(pages, whole.first, whole.count, whole.away);
}

/* Marks that pages have been moved. */
static void dtrain__pages_seams(dtrain__pages *pages, size_t first, size_t count)
{
    for (size_t at = first + 1; at < first + count; at++)
        pages->users[at] &= (uint16_t)~DTRAIN__PAGES_SEAM;
    pages->users[first] |= DTRAIN__PAGES_SEAM;
    if (first + count < pages->bytes / pages->page)
        pages->users[first + count] |= DTRAIN__PAGES_SEAM;
}

/* Moves parked pages, from `from` on, under a stretch; 0: they have not moved. */
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

/* What is parked at the place of page `at`, or -1; *end: where such places end that have something, or have nothing. */
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

/* The parked stretch that fits a number of pages best; -1: none. */
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

/* Pages [first, end) get their first user. What is parked at their own place goes back there, so that the place is free
 * when they are parked again. */
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

/* Pages [first, end) have lost their last user: parks them, seam by seam, or lets them go. What is to be zeros is set
 * to zero now, while the caches still have it. */
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

/* From now on users may write to stretches that they have not taken: puts what is parked there away. */
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

/* Ends a use: pages without users go; what lies in others is set to zero where they are to be zeros. Then a page at
 * either end stays, too, while a neighbour has written there without being noted as its user. */
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
