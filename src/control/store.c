/* ---- >>store ----
 * Byte strings by name, for a program's own set-up: one store a world, kept by rank 0, or by all ranks that share an
 * address space. A list: it is small, and asked seldom. The owner guards it. */
#ifndef DTRAIN__STORE
#define DTRAIN__STORE
#include "../base/memory.c"
#include "../base/status.c"

#define DTRAIN__STORE_KEY_BYTES 256
#define DTRAIN__STORE_VALUE_BYTES ((size_t)64 << 10)
#define DTRAIN__STORE_TOTAL_BYTES ((size_t)64 << 20)

enum { DTRAIN__STORE_SET = 0, DTRAIN__STORE_GET, DTRAIN__STORE_WAIT };

static const char *const dtrain__store_names[] = {"store_set", "store_get", "store_wait"};

/* A call of the user's. */
typedef struct dtrain__store_call {
    int what; /* DTRAIN__STORE_SET ... */
    const char *key;
    void *value; /* capacity bytes; of a SET, which only reads it, the value itself */
    size_t capacity, *bytes;
    dtrain__error *error; /* the group's */
    uint32_t id;          /* from here on: of a request to rank 0, and its answer */
    int answered;
    dtrain_status status;
    char why[301];
} dtrain__store_call;

typedef struct dtrain__entry {
    struct dtrain__entry *next;
    size_t key_bytes, bytes;
    /* key_bytes of key and bytes of value follow */
} dtrain__entry;

typedef struct dtrain__store {
    dtrain__entry *first;
    size_t total;
} dtrain__store;

static unsigned char *dtrain__entry_value(dtrain__entry *entry)
{
    return (unsigned char *)(entry + 1) + entry->key_bytes;
}

static dtrain__entry **dtrain__store_place(dtrain__store *store, const void *key, size_t key_bytes)
{
    dtrain__entry **at = &store->first;
    while (*at != NULL && ((*at)->key_bytes != key_bytes || memcmp(*at + 1, key, key_bytes) != 0))
        at = &(*at)->next;
    return at;
}

static void dtrain__store_remove(dtrain__store *store, dtrain_allocator *allocator, dtrain__entry **at)
{
    dtrain__entry *entry = *at;
    size_t bytes = sizeof *entry + entry->key_bytes + entry->bytes;
    *at = entry->next;
    store->total -= bytes;
    dtrain__free(allocator, entry);
}

/* Sets key to value; what it was before stays on an error. Sizes are checked by the caller. */
static dtrain_status dtrain__store_put(dtrain__store *store, dtrain_allocator *allocator, const void *key,
                                       size_t key_bytes, const void *value, size_t bytes)
{
    size_t all = sizeof(dtrain__entry) + key_bytes + bytes;
    dtrain__entry **old = dtrain__store_place(store, key, key_bytes), *entry = NULL;
    if (store->total + all <= DTRAIN__STORE_TOTAL_BYTES)
        entry = (dtrain__entry *)dtrain__alloc(allocator, all);
    if (entry == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "store_set: no room for %zu bytes; the store holds %zu of %zu",
                            all, store->total, DTRAIN__STORE_TOTAL_BYTES);
    if (*old != NULL)
        dtrain__store_remove(store, allocator, old);
    entry->key_bytes = key_bytes;
    entry->bytes = bytes;
    memcpy(entry + 1, key, key_bytes);
    if (bytes > 0)
        memcpy(dtrain__entry_value(entry), value, bytes);
    entry->next = store->first;
    store->first = entry;
    store->total += all;
    return DTRAIN_OK;
}

static void dtrain__store_free(dtrain__store *store, dtrain_allocator *allocator)
{
    while (store->first != NULL)
        dtrain__store_remove(store, allocator, &store->first);
}

/* Gives out what was found. */
static void dtrain__store_copy(const dtrain__store_call *call, const void *data, size_t bytes)
{
    if (bytes > 0 && call->capacity > 0)
        memcpy(call->value, data, bytes < call->capacity ? bytes : call->capacity);
    *call->bytes = bytes;
}

#endif
