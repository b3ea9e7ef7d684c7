/* ---- >>os windows ----
 * What >>os asks of Windows 10 or later: threads, clock, memory, processes, and faults. A handle of the system fits in
 * 32 bits, so descriptors of shared memory and of sockets are handles as int. */
#ifndef DTRAIN__OS_WINDOWS
#define DTRAIN__OS_WINDOWS
#include "os.c"
#ifdef _WIN32

static const char *dtrain__os_getenv(const char *name)
{
    return getenv(name);
}

/* ---- errors ---- */

typedef struct dtrain__os_error {
    DWORD of_system;
    int error;
    const char *text; /* of the errno, where the C library has none; else NULL */
} dtrain__os_error;

/* Errors of the system and, from 10000 on, of sockets. */
static const dtrain__os_error dtrain__os_errors[] = {
    {ERROR_FILE_NOT_FOUND, ENOENT, NULL},
    {ERROR_PATH_NOT_FOUND, ENOENT, NULL},
    {ERROR_INVALID_NAME, ENOENT, NULL},
    {ERROR_BAD_PATHNAME, ENOENT, NULL},
    {ERROR_BAD_NETPATH, ENOENT, NULL},
    {ERROR_BAD_NET_NAME, ENOENT, NULL},
    {ERROR_ACCESS_DENIED, EACCES, NULL},
    {ERROR_SHARING_VIOLATION, EACCES, NULL},
    {ERROR_LOCK_VIOLATION, EAGAIN, NULL},
    {ERROR_IO_PENDING, EAGAIN, NULL},
    {ERROR_ALREADY_EXISTS, EEXIST, NULL},
    {ERROR_FILE_EXISTS, EEXIST, NULL},
    {ERROR_DIR_NOT_EMPTY, ENOTEMPTY, NULL},
    {ERROR_DIRECTORY, ENOTDIR, NULL},
    {ERROR_DISK_FULL, ENOSPC, NULL},
    {ERROR_HANDLE_DISK_FULL, ENOSPC, NULL},
    {ERROR_NOT_ENOUGH_MEMORY, ENOMEM, NULL},
    {ERROR_OUTOFMEMORY, ENOMEM, NULL},
    {ERROR_COMMITMENT_LIMIT, ENOMEM, NULL},
    {ERROR_NO_SYSTEM_RESOURCES, ENOMEM, NULL},
    {ERROR_TOO_MANY_OPEN_FILES, EMFILE, NULL},
    {ERROR_INVALID_HANDLE, EBADF, NULL},
    {ERROR_INVALID_PARAMETER, EINVAL, NULL},
    {ERROR_WRITE_PROTECT, EROFS, NULL},
    {ERROR_BROKEN_PIPE, EPIPE, NULL},
    {ERROR_NO_DATA, EPIPE, NULL},
    {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG, NULL},
    {ERROR_NOT_SAME_DEVICE, EXDEV, NULL},
    {ERROR_NOT_SUPPORTED, ENOTSUP, "The system does not support this"},
    {ERROR_CANT_ACCESS_FILE, ELOOP, "It is a link"},
    {WSAEWOULDBLOCK, EWOULDBLOCK, "It would have to wait"},
    {WSAEINPROGRESS, EINPROGRESS, "The operation has begun"},
    {WSAECONNREFUSED, ECONNREFUSED, "Connection refused"},
    {WSAECONNRESET, ECONNRESET, "Connection reset by peer"},
    {WSAENETRESET, ECONNRESET, NULL},
    {WSAESHUTDOWN, EPIPE, NULL},
    {WSAECONNABORTED, ECONNABORTED, "Connection aborted"},
    {WSAETIMEDOUT, ETIMEDOUT, "Connection timed out"},
    {WSAEADDRINUSE, EADDRINUSE, "Address already in use"},
    {WSAEACCES, EADDRINUSE, NULL}, /* another program has the address to itself */
    {WSAEADDRNOTAVAIL, EADDRNOTAVAIL, "No interface has this address"},
    {WSAEAFNOSUPPORT, EAFNOSUPPORT, "This kind of address is not supported"},
    {WSAEPROTONOSUPPORT, EAFNOSUPPORT, NULL},
    {WSAENETUNREACH, ENETUNREACH, "Network is unreachable"},
    {WSAENETDOWN, ENETDOWN, "Network is down"},
    {WSAEHOSTUNREACH, EHOSTUNREACH, "No route to the host"},
    {WSAENOTCONN, ENOTCONN, "It is not connected"},
    {WSAENOTSOCK, ENOTSOCK, "It is not a socket"},
    {WSAEMSGSIZE, EMSGSIZE, "The message is too long"},
    {WSAENOBUFS, ENOBUFS, "No room for more data"},
    {WSAEMFILE, EMFILE, NULL},
    {WSAEINVAL, EINVAL, NULL},
    {WSAEINTR, EINTR, NULL},
    {WSAEBADF, EBADF, NULL},
    {WSAEFAULT, EFAULT, NULL},
};

/* Returns the errno of an error of the system or of sockets. */
static int dtrain__os_errno(int error)
{
    for (size_t i = 0; i < sizeof dtrain__os_errors / sizeof dtrain__os_errors[0]; i++)
        if (dtrain__os_errors[i].of_system == (DWORD)error)
            return dtrain__os_errors[i].error;
    return error == 0 ? 0 : EIO;
}

/* Sets errno from the last error. Returns -1. */
static int dtrain__os_failed(void)
{
    errno = dtrain__os_errno((int)GetLastError());
    return -1;
}

static const char *dtrain__os_error_text(int error)
{
    for (size_t i = 0; i < sizeof dtrain__os_errors / sizeof dtrain__os_errors[0]; i++)
        if (dtrain__os_errors[i].error == error && dtrain__os_errors[i].text != NULL)
            return dtrain__os_errors[i].text;
    return strerror(error);
}

/* ---- time and processors ---- */

static DTRAIN__NOINLINE int64_t dtrain__os_now_ns(void)
{
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    int64_t seconds = count.QuadPart / rate.QuadPart, rest = count.QuadPart % rate.QuadPart;
    return seconds * 1000000000 + rest * 1000000000 / rate.QuadPart;
}

static int64_t dtrain__os_file_time(FILETIME time)
{
    return (int64_t)((uint64_t)time.dwHighDateTime << 32 | time.dwLowDateTime) - 116444736000000000; /* 1601 to 1970 */
}

/* Returns the time of day, in nanoseconds since 1970. */
static int64_t dtrain__os_wall_ns(void)
{
    FILETIME now;
    GetSystemTimePreciseAsFileTime(&now);
    return dtrain__os_file_time(now) * 100;
}

static DWORD dtrain__os_ms(int64_t ns)
{
    return ns <= 0 ? 0 : ns > 60000000000 ? 60000 : (DWORD)((ns + 999999) / 1000000);
}

static void dtrain__os_yield(void)
{
    SwitchToThread();
}

/* Sleeps for about ns. A plain Sleep lasts up to 16 ms longer. */
static void dtrain__os_sleep(int64_t ns)
{
    LARGE_INTEGER due;
    HANDLE timer = CreateWaitableTimerExW(NULL, NULL, 2, TIMER_ALL_ACCESS); /* HIGH_RESOLUTION, since Windows 10 1803 */
    due.QuadPart = -(ns + 99) / 100;
    if (timer != NULL && SetWaitableTimer(timer, &due, 0, NULL, NULL, FALSE))
        WaitForSingleObject(timer, INFINITE);
    else
        Sleep(dtrain__os_ms(ns));
    if (timer != NULL)
        CloseHandle(timer);
}

static int dtrain__os_processors(void)
{
    DWORD_PTR own = 0, all = 0;
    SYSTEM_INFO info;
    if (GetActiveProcessorGroupCount() == 1 && GetProcessAffinityMask(GetCurrentProcess(), &own, &all) && own != 0)
        return __builtin_popcountll(own);
    DWORD count = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    GetSystemInfo(&info);
    return (int)(count > 0 ? count : info.dwNumberOfProcessors);
}

/* Returns whether the ranks of this host outnumber the processors that they may use together. */
static int dtrain__os_crowded(const dtrain__os_crowd *crowd)
{
    DWORD_PTR mask = 0, one, all;
    int ranks = 0, single = GetActiveProcessorGroupCount() == 1, known = single;
    for (int rank = 0; rank < crowd->size; rank++) {
        long process = crowd->process(crowd->group, rank);
        HANDLE handle = process > 0 ? OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION, FALSE, (DWORD)process) : NULL;
        if (process >= 0 && handle != NULL && GetProcessAffinityMask(handle, &one, &all))
            mask |= one;
        else if (process >= 0)
            known = 0;
        if (handle != NULL)
            CloseHandle(handle);
        ranks += process >= 0;
    }
    if (single && !known && GetProcessAffinityMask(GetCurrentProcess(), &one, &all))
        mask |= one;
    return ranks > (single && mask != 0 ? __builtin_popcountll(mask) : dtrain__os_processors());
}

/* ---- processes and threads ---- */

static long dtrain__os_self(void)
{
    return (long)GetCurrentProcessId();
}

/* Returns this process: there is no fork. */
static long dtrain__os_pid(void)
{
    return dtrain__os_self();
}

static long dtrain__os_parent(void)
{
    PROCESSENTRY32W entry;
    HANDLE list = CreateToolhelp32Snapshot(TH32CS_SNAPPROCESS, 0);
    long parent = 0;
    entry.dwSize = sizeof entry;
    for (BOOL more = Process32FirstW(list, &entry); more && parent == 0; more = Process32NextW(list, &entry))
        if ((long)entry.th32ProcessID == dtrain__os_self())
            parent = (long)entry.th32ParentProcessID;
    if (list != INVALID_HANDLE_VALUE)
        CloseHandle(list);
    return parent;
}

#define DTRAIN__OS_MUTEX SRWLOCK_INIT
typedef SRWLOCK dtrain__os_mutex;

static void dtrain__os_mutex_init(dtrain__os_mutex *mutex)
{
    InitializeSRWLock(mutex);
}

static void dtrain__os_mutex_free(dtrain__os_mutex *mutex)
{
    (void)mutex;
}

static void dtrain__os_lock(dtrain__os_mutex *mutex)
{
    AcquireSRWLockExclusive(mutex);
}

/* Returns whether the mutex was free and is now held. */
static int dtrain__os_try_lock(dtrain__os_mutex *mutex)
{
    return TryAcquireSRWLockExclusive(mutex) != 0;
}

static void dtrain__os_unlock(dtrain__os_mutex *mutex)
{
    ReleaseSRWLockExclusive(mutex);
}

/* Where threads sleep that wait for a word: those of several words may share a place, and look again. WaitOnAddress
 * would do the same, but needs one more library to link with. */
typedef struct dtrain__os_place {
    SRWLOCK lock;
    CONDITION_VARIABLE woken;
} dtrain__os_place;

enum { DTRAIN__OS_PLACES = 64 };
static dtrain__os_place dtrain__os_places[DTRAIN__OS_PLACES]; /* all zero is their start */

static dtrain__os_place *dtrain__os_place_of(const uint32_t *word)
{
    return &dtrain__os_places[(uintptr_t)word / DTRAIN__CACHE_LINE % DTRAIN__OS_PLACES];
}

/* Sleeps while *word == value, for at most ns. It may return early. */
static void dtrain__os_wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
    dtrain__os_place *place = dtrain__os_place_of(word);
    AcquireSRWLockExclusive(&place->lock);
    if (DTRAIN__ATOMIC_LOAD(word, SEQ_CST) == value)
        SleepConditionVariableSRW(&place->woken, &place->lock, dtrain__os_ms(ns), 0);
    ReleaseSRWLockExclusive(&place->lock);
}

static void dtrain__os_wake_word(uint32_t *word)
{
    dtrain__os_place *place = dtrain__os_place_of(word);
    AcquireSRWLockExclusive(&place->lock); /* else a thread between its look and its sleep would miss this */
    ReleaseSRWLockExclusive(&place->lock);
    WakeAllConditionVariable(&place->woken);
}

typedef struct dtrain__os_thread {
    HANDLE handle;
    void (*body)(void *);
    void *argument;
} dtrain__os_thread;

static unsigned __stdcall dtrain__os_thread_main(void *pointer)
{
    dtrain__os_thread *thread = (dtrain__os_thread *)pointer;
    thread->body(thread->argument);
    return 0;
}

/* Starts body(argument). The struct must stay in place until the join. Returns 0 or an errno. */
static int dtrain__os_thread_start(dtrain__os_thread *thread, void (*body)(void *), void *argument, size_t stack_bytes)
{
    thread->body = body;
    thread->argument = argument;
    thread->handle = (HANDLE)_beginthreadex(NULL, (unsigned)stack_bytes, dtrain__os_thread_main, thread,
                                            STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return thread->handle != NULL ? 0 : errno;
}

/* Lets a thread end by itself, instead of the join. */
static void dtrain__os_thread_leave(dtrain__os_thread *thread)
{
    CloseHandle(thread->handle);
}

static void dtrain__os_thread_join(dtrain__os_thread *thread)
{
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
}

/* Returns when a process began, in the system's count. Two processes with the same id differ in it.
 *
 *   known     out: 0 if the system does not say
 *   returns   if known: 0 means that the process has ended and the system has released all that it held */
static uint64_t dtrain__os_process_began(long process, int *known)
{
    FILETIME began, ended, kernel, user;
    HANDLE handle = OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION | SYNCHRONIZE, FALSE, (DWORD)process);
    *known = handle != NULL || GetLastError() == ERROR_INVALID_PARAMETER; /* there is no such process */
    if (handle == NULL)
        return 0;
    int runs = WaitForSingleObject(handle, 0) == WAIT_TIMEOUT;
    *known = !runs || GetProcessTimes(handle, &began, &ended, &kernel, &user);
    CloseHandle(handle);
    return runs && *known ? (uint64_t)began.dwHighDateTime << 32 | began.dwLowDateTime : 0;
}

/* All processes of a system have their ids in common. */
static uint64_t dtrain__os_process_space(void)
{
    return 0;
}

/* Returns whether it is certain that the process that began then runs no more. */
static int dtrain__os_process_ended(long process, uint64_t began)
{
    int known;
    return dtrain__os_process_began(process, &known) != began && known;
}

/* Returns whether a process of this host runs; 1 if the system does not say. */
static int dtrain__os_is_running(long process)
{
    int known;
    return dtrain__os_process_began(process, &known) != 0 || !known;
}

/* ---- memory ---- */

/* Allocates a block; align is a power of two. Returns NULL without memory. */
static void *dtrain__os_alloc(size_t bytes, size_t align)
{
    return _aligned_malloc(bytes, align);
}

static void dtrain__os_free(void *block)
{
    _aligned_free(block);
}

/* Returns the size of a memory page. */
static DTRAIN__NOINLINE size_t dtrain__os_page_bytes(void)
{
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

/* Reserves a range of addresses in whole pages. They read as zeros, and a page takes memory when it is first written.
 * Returns NULL if the system refuses: it promises memory for all pages at once. */
static void *dtrain__os_reserve(size_t bytes)
{
    void *range = VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (range == NULL)
        dtrain__os_failed();
    return range;
}

/* Gives back what dtrain__os_reserve, dtrain__os_share or dtrain__os_share_open returned. */
static void dtrain__os_unreserve(void *range, size_t bytes)
{
    (void)bytes;
    if (!UnmapViewOfFile(range))
        VirtualFree(range, 0, MEM_RELEASE);
}

/* Returns the memory of whole pages to the system; they read as zeros again. Returns 0 or an errno. */
static int dtrain__os_discard(void *pages, size_t bytes)
{
    if (VirtualFree(pages, bytes, MEM_DECOMMIT) && VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE) != NULL)
        return 0;
    return dtrain__os_failed() == 0 ? 0 : errno;
}

/* Pages come at their first write. */
static void dtrain__os_populate(void *pages, size_t bytes)
{
    (void)pages;
    (void)bytes;
}

/* Windows does not move pages. */
static int dtrain__os_move(void *from, void *to, size_t bytes)
{
    (void)from;
    (void)to;
    (void)bytes;
    return ENOSYS;
}

static int dtrain__os_alias(void *pages, void *to, size_t bytes)
{
    return dtrain__os_move(pages, to, bytes);
}

static int dtrain__os_moves(void)
{
    return 0;
}

/* Returns whether whole pages were neither read nor written since they were discarded: Windows does not say. */
static int dtrain__os_untouched(const void *pages, size_t bytes)
{
    (void)pages;
    (void)bytes;
    return 0;
}

/* Sets the access to whole pages: 0 none, 1 reading, 2 reading and writing. Returns 0 or an errno. */
static int dtrain__os_protect(void *pages, size_t bytes, int access)
{
    const DWORD kinds[] = {PAGE_NOACCESS, PAGE_READONLY, PAGE_READWRITE};
    DWORD before;
    if (dtrain__without("mprotect"))
        return ENOSYS;
    return VirtualProtect(pages, bytes, kinds[access], &before) ? 0 : dtrain__os_errno((int)GetLastError());
}

/* Returns the bytes that this process can still get. */
static uint64_t dtrain__os_memory_left(void)
{
    MEMORYSTATUSEX status;
    status.dwLength = sizeof status;
    return GlobalMemoryStatusEx(&status) ? status.ullAvailPageFile : UINT64_MAX;
}

/* Windows does not replace shared pages in place. */
static int dtrain__os_privately(void *pages, size_t bytes)
{
    (void)pages;
    (void)bytes;
    return ENOSYS;
}

static void dtrain__os_share_close(int fd)
{
    CloseHandle((HANDLE)(intptr_t)fd);
}

/* Makes memory that other processes of the host can map; NULL if that is not possible. It has no name. Others copy the
 * handle while it is open. */
static void *dtrain__os_share(size_t bytes, int *fd)
{
    HANDLE section = CreateFileMappingW(INVALID_HANDLE_VALUE, NULL, PAGE_READWRITE, (DWORD)((uint64_t)bytes >> 32),
                                        (DWORD)bytes, NULL);
    void *memory = section != NULL ? MapViewOfFile(section, FILE_MAP_READ | FILE_MAP_WRITE, 0, 0, bytes) : NULL;
    *fd = -1;
    if (memory != NULL)
        *fd = (int)(intptr_t)section;
    else if (section != NULL)
        CloseHandle(section);
    return memory;
}

/* Pages come at their first write. */
static void *dtrain__os_share_as(size_t bytes, int empty, int *fd)
{
    (void)empty;
    return dtrain__os_share(bytes, fd);
}

static int dtrain__os_share_fill(int fd, size_t begin, size_t bytes)
{
    (void)fd;
    (void)begin;
    (void)bytes;
    return 0;
}

/* Maps the memory that a process shares. Returns NULL if its handle now belongs to something else, or to memory that is
 * smaller. */
static void *dtrain__os_share_open(long process, int fd, size_t bytes, int huge)
{
    (void)huge;
    HANDLE peer = OpenProcess(PROCESS_DUP_HANDLE, FALSE, (DWORD)process), own = NULL;
    void *memory = NULL;
    if (peer != NULL && DuplicateHandle(peer, (HANDLE)(intptr_t)fd, GetCurrentProcess(), &own,
                                        FILE_MAP_READ | FILE_MAP_WRITE, FALSE, 0)) {
        memory = MapViewOfFile(own, FILE_MAP_READ | FILE_MAP_WRITE, 0, 0, bytes);
        CloseHandle(own);
    }
    if (peer != NULL)
        CloseHandle(peer);
    return memory;
}

/* ---- the host ---- */

/* Fills out with up to 256 bytes that nobody can guess. Returns 0 or an errno. */
static int dtrain__os_random(void *out, size_t bytes)
{
    return RtlGenRandom(out, (ULONG)bytes) ? 0 : EIO;
}

/* Writes a text of the system as UTF-8. Returns 0 if there is no room. */
static int dtrain__os_narrow(const wchar_t *wide, char *out, size_t room)
{
    return WideCharToMultiByte(CP_UTF8, 0, wide, -1, out, (int)room, NULL, NULL) > 0;
}

static void dtrain__os_host_name(char *out, size_t room)
{
    wchar_t name[256];
    DWORD count = sizeof name / sizeof name[0];
    if (GetComputerNameExW(ComputerNameDnsHostname, name, &count) && count < room)
        dtrain__os_narrow(name, out, room);
}

/* Writes the name of this process's program, such as " (train)"; "" if the system does not say. */
static void dtrain__os_program(char *out, size_t room)
{
    wchar_t path[1024] = L"";
    char name[1024] = "";
    GetModuleFileNameW(NULL, path, sizeof path / sizeof path[0] - 1);
    const wchar_t *slash = wcsrchr(path, L'\\');
    dtrain__os_narrow(slash != NULL ? slash + 1 : path, name, sizeof name);
    char *dot = strrchr(name, '.');
    if (dot != NULL)
        *dot = 0;
    snprintf(out, room, name[0] != 0 ? " (%.20s)" : "%s", name);
}

/* Fills id with bytes that identify this host. All processes of the host get the same. */
static void dtrain__os_host_id(unsigned char id[128])
{
    DWORD bytes = 64;
    memset(id, 0, 128);
    dtrain__os_host_name((char *)id, 64);
    RegGetValueA(HKEY_LOCAL_MACHINE, "SOFTWARE\\Microsoft\\Cryptography", "MachineGuid", RRF_RT_REG_SZ, NULL, id + 64,
                 &bytes);
}

#if !defined(DTRAIN_NO_MPI) && !defined(DTRAIN_MPI_HEADER)
/* Loads a library. Returns NULL if there is none. */
static void *dtrain__os_library(const char *name)
{
    return (void *)LoadLibraryA(name);
}

/* Returns why a library was not loaded; may be NULL. */
static const char *dtrain__os_library_why(void)
{
    return NULL;
}

static void *dtrain__os_symbol(void *library, const char *name)
{
    FARPROC found = GetProcAddress((HMODULE)library, name);
    void *symbol;
    memcpy(&symbol, &found, sizeof symbol);
    return symbol;
}
#endif

/* ---- faults ---- */

static dtrain__os_fault_fn dtrain__os_fault_report;
static void *dtrain__os_fault_handler;

static LONG CALLBACK dtrain__os_fault_handle(EXCEPTION_POINTERS *what)
{
    const EXCEPTION_RECORD *record = what->ExceptionRecord;
    if (record->ExceptionCode == EXCEPTION_ACCESS_VIOLATION && record->NumberParameters >= 2)
        dtrain__os_fault_report((uintptr_t)record->ExceptionInformation[1], record->ExceptionInformation[0] == 1);
    return EXCEPTION_CONTINUE_SEARCH;
}

/* Reports each fault. Calls may repeat. */
static void dtrain__os_watch_faults(dtrain__os_fault_fn report)
{
    dtrain__os_fault_report = report;
    if (dtrain__os_fault_handler == NULL)
        dtrain__os_fault_handler = AddVectoredExceptionHandler(1, dtrain__os_fault_handle);
}

static void dtrain__os_unwatch_faults(void)
{
    if (dtrain__os_fault_handler != NULL)
        RemoveVectoredExceptionHandler(dtrain__os_fault_handler);
    dtrain__os_fault_handler = NULL;
}

#endif
#endif
