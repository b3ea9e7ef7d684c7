/* ---- >>mpi-api ----
 * The functions of MPI that the transport calls. They come from a library that is loaded at run time through the
 * standard ABI, or from the mpi.h that DTRAIN_MPI_HEADER names. Only the table here knows which. Functions, constants
 * and handles are those of the MPI 5.0 standard, chapter 20 (Application Binary Interface). */
#ifndef DTRAIN__MPI_API
#define DTRAIN__MPI_API
#include "../base/os_files.c"
#include "../base/status.c"

#ifdef DTRAIN_MPI_HEADER
typedef MPI_Comm dtrain__mpi_comm;
typedef MPI_Request dtrain__mpi_request;
typedef MPI_Message dtrain__mpi_message;
typedef MPI_Datatype dtrain__mpi_datatype;
typedef MPI_Errhandler dtrain__mpi_errhandler;
typedef MPI_Status dtrain__mpi_status;
#define DTRAIN__MPI_WORLD MPI_COMM_WORLD
#define DTRAIN__MPI_SELF MPI_COMM_SELF
#define DTRAIN__MPI_NULL MPI_COMM_NULL
#define DTRAIN__MPI_BYTE MPI_BYTE
#define DTRAIN__MPI_RETURN MPI_ERRORS_RETURN
#define DTRAIN__MPI_NO_STATUS MPI_STATUS_IGNORE
enum {
    DTRAIN__MPI_SINGLE = MPI_THREAD_SINGLE,
    DTRAIN__MPI_FUNNELED = MPI_THREAD_FUNNELED,
    DTRAIN__MPI_SERIALIZED = MPI_THREAD_SERIALIZED,
    DTRAIN__MPI_MULTIPLE = MPI_THREAD_MULTIPLE,
    DTRAIN__MPI_TAG_UB = MPI_TAG_UB,
    DTRAIN__MPI_TEXT = MPI_MAX_ERROR_STRING
};
#else
typedef struct dtrain__mpi_comm_handle *dtrain__mpi_comm;
typedef struct dtrain__mpi_request_handle *dtrain__mpi_request;
typedef struct dtrain__mpi_message_handle *dtrain__mpi_message;
typedef struct dtrain__mpi_datatype_handle *dtrain__mpi_datatype;
typedef struct dtrain__mpi_errhandler_handle *dtrain__mpi_errhandler;
typedef struct dtrain__mpi_status {
    int source, tag, error, reserved[5];
} dtrain__mpi_status;
#define DTRAIN__MPI_WORLD ((dtrain__mpi_comm)(uintptr_t)0x101)
#define DTRAIN__MPI_SELF ((dtrain__mpi_comm)(uintptr_t)0x102)
#define DTRAIN__MPI_NULL ((dtrain__mpi_comm)(uintptr_t)0x100)
#define DTRAIN__MPI_BYTE ((dtrain__mpi_datatype)(uintptr_t)0x247)
#define DTRAIN__MPI_RETURN ((dtrain__mpi_errhandler)(uintptr_t)0x143)
#define DTRAIN__MPI_NO_STATUS ((dtrain__mpi_status *)0)
enum {
    DTRAIN__MPI_SINGLE = 0,
    DTRAIN__MPI_FUNNELED = 1024,
    DTRAIN__MPI_SERIALIZED = 2048,
    DTRAIN__MPI_MULTIPLE = 4096,
    DTRAIN__MPI_TAG_UB = 501,
    DTRAIN__MPI_TEXT = 512
};
#endif

typedef int dtrain__mpi_attr_copy(dtrain__mpi_comm comm, int key, void *extra, void *value, void *copy, int *flag);
typedef int dtrain__mpi_attr_delete(dtrain__mpi_comm comm, int key, void *value, void *extra);

/* Members have MPI's names, without MPI_. */
typedef struct dtrain__mpi_calls {
    int (*Initialized)(int *flag);
    int (*Finalized)(int *flag);
    int (*Init_thread)(int *argc, char ***argv, int required, int *provided);
    int (*Query_thread)(int *provided);
    int (*Is_thread_main)(int *flag);
    int (*Finalize)(void);
    int (*Comm_rank)(dtrain__mpi_comm comm, int *rank);
    int (*Comm_size)(dtrain__mpi_comm comm, int *size);
    int (*Comm_idup)(dtrain__mpi_comm comm, dtrain__mpi_comm *copy, dtrain__mpi_request *request);
    int (*Comm_set_errhandler)(dtrain__mpi_comm comm, dtrain__mpi_errhandler handler);
    int (*Comm_get_attr)(dtrain__mpi_comm comm, int key, void *value, int *flag);
    int (*Comm_set_attr)(dtrain__mpi_comm comm, int key, void *value);
    int (*Comm_create_keyval)(dtrain__mpi_attr_copy *copy, dtrain__mpi_attr_delete *ends, int *key, void *extra);
    int (*Comm_test_inter)(dtrain__mpi_comm comm, int *flag);
    int (*Isend)(const void *data, int count, dtrain__mpi_datatype type, int to, int tag, dtrain__mpi_comm comm,
                 dtrain__mpi_request *request);
    int (*Improbe)(int from, int tag, dtrain__mpi_comm comm, int *flag, dtrain__mpi_message *message,
                   dtrain__mpi_status *status);
    int (*Imrecv)(void *data, int count, dtrain__mpi_datatype type, dtrain__mpi_message *message,
                  dtrain__mpi_request *request);
    int (*Get_count)(const dtrain__mpi_status *status, dtrain__mpi_datatype type, int *count);
    int (*Test)(dtrain__mpi_request *request, int *flag, dtrain__mpi_status *status);
    int (*Error_string)(int code, char *text, int *length);
} dtrain__mpi_calls;

/* The members, for the two ways to fill them in. */
#define DTRAIN__MPI_TAKE_ALL \
    DTRAIN__MPI_TAKE(Initialized) \
    DTRAIN__MPI_TAKE(Finalized) \
    DTRAIN__MPI_TAKE(Init_thread) \
    DTRAIN__MPI_TAKE(Query_thread) \
    DTRAIN__MPI_TAKE(Is_thread_main) \
    DTRAIN__MPI_TAKE(Finalize) \
    DTRAIN__MPI_TAKE(Comm_rank) \
    DTRAIN__MPI_TAKE(Comm_size) \
    DTRAIN__MPI_TAKE(Comm_idup) \
    DTRAIN__MPI_TAKE(Comm_set_errhandler) \
    DTRAIN__MPI_TAKE(Comm_get_attr) \
    DTRAIN__MPI_TAKE(Comm_set_attr) \
    DTRAIN__MPI_TAKE(Comm_create_keyval) \
    DTRAIN__MPI_TAKE(Comm_test_inter) \
    DTRAIN__MPI_TAKE(Isend) \
    DTRAIN__MPI_TAKE(Improbe) \
    DTRAIN__MPI_TAKE(Imrecv) \
    DTRAIN__MPI_TAKE(Get_count) \
    DTRAIN__MPI_TAKE(Test) \
    DTRAIN__MPI_TAKE(Error_string)

/* MPI belongs to the process, and so does this. */
typedef struct dtrain__mpi_state {
    dtrain__mpi_calls call;
    int loaded, failed;    /* failed: a call of MPI has, so MPI_Finalize may wait without end */
    int watched, over;     /* over: MPI_Finalize has begun, so nothing here may call MPI */
    int worlds;            /* first lanes that are open */
    long owner;            /* the process in which dtrain has initialised it; 0: the program has */
    char library[256 + 1]; /* what was loaded */
} dtrain__mpi_state;

DTRAIN__OF_PROCESS(dtrain__mpi_state, dtrain__mpi)

/* SERIALIZED: one thread at a time is in MPI, for all groups. It also guards the struct above. */
DTRAIN__MUTEX_OF_PROCESS(dtrain__mpi_mutex)

#ifdef DTRAIN_MPI_HEADER
static dtrain_status dtrain__mpi_find(void)
{
#define DTRAIN__MPI_TAKE(name) dtrain__mpi()->call.name = MPI_##name;
    DTRAIN__MPI_TAKE_ALL
#undef DTRAIN__MPI_TAKE
    snprintf(dtrain__mpi()->library, sizeof dtrain__mpi()->library, "the MPI of DTRAIN_MPI_HEADER");
    return DTRAIN_OK;
}
#else
/* Opens the library that DTRAIN_MPI_LIBRARY names, or the first that has the ABI's name. */
static void *dtrain__mpi_library(void)
{
    static const char *const names[] = {"libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so", "libmpi_abi.dylib"};
    const char *asked = dtrain__os_getenv("DTRAIN_MPI_LIBRARY");
    int given = asked != NULL && asked[0] != 0;
    void *library = NULL;
    for (size_t i = 0; library == NULL && i < (given ? 1 : sizeof names / sizeof names[0]); i++) {
        const char *name = given ? asked : names[i];
        library = dtrain__os_library(name);
        snprintf(dtrain__mpi()->library, sizeof dtrain__mpi()->library, "%.256s", name);
    }
    if (library != NULL)
        return library;
    const char *why = dtrain__os_library_why();
    dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                 "MPI: no library with the standard ABI: %s: %.200s; set DTRAIN_MPI_LIBRARY to its path, or compile "
                 "with DTRAIN_MPI_HEADER",
                 given ? asked : "tried libmpi_abi.so.1, .so.0, .so and .dylib", why != NULL ? why : "not found");
    return NULL;
}

static dtrain_status dtrain__mpi_find(void)
{
    int (*version)(int *major, int *minor), major = 0, minor = 0, missing = 0;
    void *library = dtrain__mpi_library(), *found;
    if (library == NULL)
        return DTRAIN_ERR_UNSUPPORTED;
#define DTRAIN__MPI_TAKE(name) \
    found = dtrain__os_symbol(library, "MPI_" #name); \
    missing |= found == NULL; \
    memcpy(&dtrain__mpi()->call.name, &found, sizeof found);
    DTRAIN__MPI_TAKE_ALL
#undef DTRAIN__MPI_TAKE
    found = dtrain__os_symbol(library, "MPI_Abi_get_version");
    memcpy(&version, &found, sizeof found);
    if (!missing && found != NULL && version(&major, &minor) == 0 && major == 1)
        return DTRAIN_OK;
    return dtrain__fail(
        NULL, DTRAIN_ERR_UNSUPPORTED,
        "MPI: %s does not have the standard ABI, version 1 (it says %d.%d): take libmpi_abi of MPICH 5, "
        "Intel MPI 2021.18 or later, or compile with DTRAIN_MPI_HEADER",
        dtrain__mpi()->library, major, minor);
}
#endif

/* Says what a call of MPI has returned. The caller holds the lock. */
static dtrain_status dtrain__mpi_error(const char *call, int code)
{
    char text[DTRAIN__MPI_TEXT + 1] = "";
    int length = 0;
    dtrain__mpi()->failed = 1;
    if (dtrain__mpi()->call.Error_string(code, text, &length) != 0)
        snprintf(text, sizeof text, "error %d", code);
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "MPI_%s: %.300s", call, text);
}

/* Ranks that end early wait here for the others, as MPI asks. After a failure that could last for ever. A program that
 * ends with an open world has failed: its launcher is to see that, and its service thread is still in MPI. */
static void dtrain__mpi_finalize(void)
{
    if (dtrain__mpi()->owner != dtrain__os_pid()) /* a forked child */
        return;
    dtrain__os_lock(dtrain__mpi_mutex());
    int ends = !dtrain__mpi()->failed && dtrain__mpi()->worlds == 0 && !dtrain__mpi()->over;
    dtrain__os_unlock(dtrain__mpi_mutex());
    if (ends)
        dtrain__mpi()->call.Finalize();
}

static int dtrain__mpi_attr_none(dtrain__mpi_comm comm, int key, void *extra, void *value, void *copy, int *flag)
{
    (void)comm, (void)key, (void)extra, (void)value, (void)copy;
    *flag = 0;
    return 0;
}

/* MPI_Finalize calls it first, and waits until it returns: MPI 5.0, 11.4.3. No thread of dtrain calls MPI after it. */
static int dtrain__mpi_attr_ends(dtrain__mpi_comm comm, int key, void *value, void *extra)
{
    (void)comm, (void)key, (void)value, (void)extra;
    dtrain__os_lock(dtrain__mpi_mutex());
    dtrain__mpi()->over = 1;
    int worlds = dtrain__mpi()->worlds;
    dtrain__os_unlock(dtrain__mpi_mutex());
    if (worlds > 0)
        dtrain__log(DTRAIN_LOG_WARN,
                    "MPI: MPI_Finalize was called while %d worlds over MPI are open, so their calls fail now: call "
                    "dtrain_comm_destroy before MPI_Finalize",
                    worlds);
    return 0;
}

static dtrain_status dtrain__mpi_watch(void)
{
    int key = 0;
    int code = dtrain__mpi()->call.Comm_create_keyval(dtrain__mpi_attr_none, dtrain__mpi_attr_ends, &key, NULL);
    if (code == 0)
        code = dtrain__mpi()->call.Comm_set_attr(DTRAIN__MPI_SELF, key, NULL);
    dtrain__mpi()->watched = code == 0;
    return code == 0 ? DTRAIN_OK : dtrain__mpi_error("Comm_set_attr", code);
}

/* Whether MPI_Finalize has begun; the caller holds the lock. */
static dtrain_status dtrain__mpi_usable(void)
{
    return !dtrain__mpi()->over
               ? DTRAIN_OK
               : dtrain__fail(NULL, DTRAIN_ERR_IO,
                              "MPI: the program has called MPI_Finalize, which ends groups over MPI: call "
                              "dtrain_comm_destroy before it");
}

/* Whether this thread may call MPI, and others later, at the level that MPI has. */
static dtrain_status dtrain__mpi_level(int polls)
{
    int level = 0, main_thread = 0, good;
    if (dtrain__mpi()->call.Query_thread(&level) != 0 || dtrain__mpi()->call.Is_thread_main(&main_thread) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "MPI: %s does not say its level of threads", dtrain__mpi()->library);
    if (polls)
        good = level >= DTRAIN__MPI_SERIALIZED || main_thread;
    else
        good = level >= (dtrain__mpi()->owner != 0 ? DTRAIN__MPI_SERIALIZED : DTRAIN__MPI_MULTIPLE);
    if (good)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "MPI was initialised with level %d of threads (single %d, funneled %d, serialized %d, multiple "
                        "%d): %s",
                        level, DTRAIN__MPI_SINGLE, DTRAIN__MPI_FUNNELED, DTRAIN__MPI_SERIALIZED, DTRAIN__MPI_MULTIPLE,
                        polls ? "make this group on MPI's main thread"
                              : "call MPI_Init_thread with MPI_THREAD_MULTIPLE, or set desc.progress = "
                                "DTRAIN_PROGRESS_POLL");
}

static dtrain_status dtrain__mpi_prepare(int initialises, int polls)
{
    int on = 0, over = 0, level, code;
    dtrain_status status = dtrain__mpi()->loaded ? DTRAIN_OK : dtrain__mpi_find();
    if (status != DTRAIN_OK)
        return status;
    dtrain__mpi()->loaded = 1;
    if (dtrain__mpi()->call.Initialized(&on) != 0 || dtrain__mpi()->call.Finalized(&over) != 0 || over)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "MPI: %s was finalised already: make groups before that",
                            dtrain__mpi()->library);
    if (!on && !initialises)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_mpi: the program has not initialised %s; if it uses another MPI, compile with "
                            "DTRAIN_MPI_HEADER",
                            dtrain__mpi()->library);
    if (!on) {
        code = dtrain__mpi()->call.Init_thread(NULL, NULL, DTRAIN__MPI_SERIALIZED, &level);
        if (code != 0)
            return dtrain__mpi_error("Init_thread", code);
        dtrain__mpi()->owner = dtrain__os_pid();
        atexit(dtrain__mpi_finalize);
    }
    status = dtrain__mpi()->watched ? DTRAIN_OK : dtrain__mpi_watch();
    return status == DTRAIN_OK ? dtrain__mpi_level(polls) : status;
}

/* Loads MPI. Initialises it if `initialises`, and if the program has not. */
static dtrain_status dtrain__mpi_ready(int initialises, int polls)
{
    dtrain__os_lock(dtrain__mpi_mutex());
    dtrain_status status = dtrain__mpi_prepare(initialises, polls);
    dtrain__os_unlock(dtrain__mpi_mutex());
    return status;
}

#endif
