/* ---- >>pages ----
 * A reserved range of addresses whose pages come as they are written and go when nobody uses them. Users take and drop
 * stretches of bytes; stretches may share a page, which stays while any of them is in use. */
#ifndef DTRAIN__PAGES
#define DTRAIN__PAGES
#include "../base/memory.c"

typedef struct dtrain__pages {
    unsigned char *base; /* NULL: nothing was reserved */
    size_t bytes, page;
    uint16_t *users; /* of each page */
    dtrain_allocator *allocator;
} dtrain__pages;

static dtrain_status dtrain__pages_create(dtrain__pages *pages, size_t bytes, dtrain_allocator *allocator)
{
    pages->page = dtrain__os_page_bytes();
    pages->allocator = allocator;
    pages->bytes = (bytes + pages->page - 1) / pages->page * pages->page;
    if (bytes == 0)
        return DTRAIN_OK;
    pages->users = (uint16_t *)dtrain__alloc(allocator, pages->bytes / pages->page * sizeof(uint16_t));
    pages->base = (unsigned char *)dtrain__os_reserve(pages->bytes);
    if (pages->users == NULL || pages->base == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "the system does not reserve %zu bytes of addresses: %s",
                            pages->bytes, strerror(errno));
    return DTRAIN_OK;
}

/* Notes a user of `bytes` bytes from `begin` on. */
static void dtrain__pages_take(dtrain__pages *pages, size_t begin, size_t bytes)
{
    size_t fresh = 0;
    for (size_t at = begin / pages->page; bytes > 0 && at <= (begin + bytes - 1) / pages->page; at++)
        fresh += pages->users[at]++ == 0;
    dtrain__memory_count(pages->allocator, fresh * pages->page);
}

/* Frees whole pages; where the system does not, as when they are locked, they are still set to zero. */
static void dtrain__pages_discard(dtrain__pages *pages, size_t first, size_t end)
{
    if (end > first && dtrain__os_discard(pages->base + first * pages->page, (end - first) * pages->page) != 0)
        memset(pages->base + first * pages->page, 0, (end - first) * pages->page);
}

static int dtrain__pages_are_zero(const unsigned char *at, size_t bytes)
{
    return bytes == 0 || (*at == 0 && memcmp(at, at + 1, bytes - 1) == 0);
}

/* Ends a use: pages without users go; what lies in others is set to zero where zero says so. Then a page at either end
 * stays, too, while a neighbour has written there without being noted as its user. */
static void dtrain__pages_drop(dtrain__pages *pages, size_t begin, size_t bytes, int zero)
{
    size_t page = pages->page, free_begin = begin / page, gone = 0, at;
    size_t end = bytes > 0 ? (begin + bytes - 1) / page + 1 : free_begin;
    for (at = begin / page; at < end; at++) {
        int last = --pages->users[at] == 0;
        size_t low = at * page > begin ? at * page : begin;
        size_t high = (at + 1) * page < begin + bytes ? (at + 1) * page : begin + bytes;
        gone += last ? 1 : 0;
        if (last && (!zero || high - low == page))
            continue;
        if (zero)
            memset(pages->base + low, 0, high - low);
        if (last && dtrain__pages_are_zero(pages->base + at * page, page))
            continue;
        dtrain__pages_discard(pages, free_begin, at);
        free_begin = at + 1;
    }
    dtrain__pages_discard(pages, free_begin, at);
    dtrain__memory_count(pages->allocator, (size_t)0 - gone * page);
}

static void dtrain__pages_destroy(dtrain__pages *pages)
{
    size_t used = 0;
    for (size_t at = 0; pages->users != NULL && at < pages->bytes / pages->page; at++)
        used += pages->users[at] > 0;
    if (pages->base != NULL)
        dtrain__os_unreserve(pages->base, pages->bytes);
    if (pages->users != NULL) {
        dtrain__memory_count(pages->allocator, (size_t)0 - used * pages->page);
        dtrain__free(pages->allocator, pages->users, pages->bytes / pages->page * sizeof(uint16_t));
    }
    memset(pages, 0, sizeof *pages);
}

#endif
