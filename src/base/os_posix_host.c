/* ---- >>os posix host ----
 * What >>os asks of the host: random bytes, its name and number, when processes began, and libraries. */
#ifndef DTRAIN__OS_POSIX_HOST
#define DTRAIN__OS_POSIX_HOST
#include "os_posix.c"
#ifndef _WIN32

/* Fills out with up to 256 bytes that nobody can guess; systems return so many in one call. Returns 0 or an errno. */
static int dtrain__os_random(void *out, size_t bytes)
{
#ifdef DTRAIN__OS_BSD
    arc4random_buf(out, bytes);
    return 0;
#else
    ssize_t n = -1;
    int fd, error = 0;
#if defined(__linux__) && defined(__NR_getrandom)
    do
        n = syscall(__NR_getrandom, out, bytes, 0);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)bytes)
        return 0;
#endif
    fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    do
        n = read(fd, out, bytes);
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)bytes)
        error = n < 0 ? errno : EIO;
    close(fd);
    return error;
#endif
}

/* Returns whether processes can open each other's descriptors, in /proc. */
static int dtrain__os_shows_files(void)
{
#ifdef __linux__
    return !dtrain__without("proc");
#else
    return 0;
#endif
}

/* Returns how many descriptors this process may have open; 0: unknown. */
static long dtrain__os_most_files(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < LONG_MAX ? (long)limit.rlim_cur : 0;
}

/* Reads the start of a system file as text. Returns its length, or -errno and an empty text. */
static int dtrain__os_read_text(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, room - 1) : -1;
    int error = errno;
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n >= 0 ? (int)n : -error;
}

/* Returns a number from a text of the system, after a word in it; fallback if there is none. */
static uint64_t dtrain__os_read_number(const char *path, const char *word, uint64_t fallback)
{
    char text[4096];
    unsigned long long value;
    dtrain__os_read_text(path, text, sizeof text);
    const char *at = strstr(text, word);
    return at != NULL && sscanf(at + strlen(word), "%llu", &value) == 1 ? value : fallback;
}

/* Writes the name of this process's program, such as " (train)"; "" if the system does not say. */
static void dtrain__os_program(char *out, size_t room)
{
#ifdef DTRAIN__OS_BSD
    const char *name = getprogname();
#else
    char name[32];
    dtrain__os_read_text("/proc/self/comm", name, sizeof name);
    name[strcspn(name, "\n")] = 0;
#endif
    snprintf(out, room, name[0] != 0 ? " (%.20s)" : "%s", name);
}

static void dtrain__os_host_name(char *out, size_t room)
{
    gethostname(out, room - 1);
}

static const char *dtrain__os_error_text(int error)
{
    return strerror(error);
}

/* Fills id with bytes that identify this host, and where the system says so its last start. All processes of the host
 * get the same. */
static void dtrain__os_host_id(unsigned char id[128])
{
    memset(id, 0, 128);
    gethostname((char *)id, 63);
#if defined(__OpenBSD__)
    int name[] = {CTL_HW, HW_UUID};
    size_t room = 63;
    sysctl(name, 2, id + 64, &room, NULL, 0);
#elif defined(DTRAIN__OS_BSD)
    static const char *const names[] = {"kern.bootsessionuuid", "kern.boot_id", "kern.hostuuid",
                                        "machdep.dmi.system-uuid"};
    size_t i = 0, room = 63;
    while (i < sizeof names / sizeof names[0] && sysctlbyname(names[i], id + 64, &room, NULL, 0) != 0) {
        room = 63;
        i++;
    }
#else
    dtrain__os_read_text("/proc/sys/kernel/random/boot_id", (char *)id + 64, 64);
#endif
}

/* Reads a process's numbers. Of these, 6 are its flags, 17 counts its threads, and 19 is when it began.
 *
 *   known     out: 0 if the system does not say
 *   returns   its state, a letter; if known, 0 means that there is no such process, or that it is hidden */
static char dtrain__os_process_stat(long process, uint64_t numbers[20], int *known)
{
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%ld/stat", process);
    int length = dtrain__os_read_text(path, text, sizeof text);
    char *at = strrchr(text, ')'); /* after the program's name come the letter and the numbers */
    int told = at != NULL && strlen(at) >= 4;
    *known = told || length == -ENOENT || length == -ESRCH;
    if (!told)
        return 0;
    char state = at[2];
    at += 3;
    memset(numbers, 0, 20 * sizeof *numbers);
    for (int i = 1; i < 20 && *at != 0; i++)
        numbers[i] = (uint64_t)strtoull(at, &at, 10);
    return state;
}

/* Returns when a process began, in the system's count. Two processes with the same id differ in it.
 *
 *   known     out: 0 if the system does not say
 *   returns   if known: 0 means that the process has ended and the system has released all that it held */
static uint64_t dtrain__os_process_began(long process, int *known)
{
    uint64_t numbers[20] = {0};
    char state = dtrain__os_process_stat(process, numbers, known);
    /* once its last thread has ended, nothing but the name of a process remains */
    return (state == 'Z' || state == 'X') && numbers[17] <= 1 ? 0 : numbers[19];
}

/* Returns a number of the ids that this process has in common with others; in containers the same id is of several. */
static uint64_t dtrain__os_process_space(void)
{
    struct stat at;
    return stat("/proc/self/ns/pid", &at) == 0 ? (uint64_t)at.st_ino : 0;
}

/* Returns whether it is certain that the process that began then runs no more. The system may still be releasing what
 * it held, which takes seconds for much memory. */
static int dtrain__os_process_ended(long process, uint64_t began)
{
    enum { EXITS = 4 }; /* PF_EXITING of include/linux/sched.h, in the flags */
    uint64_t numbers[20] = {0};
    int known;
    char state = dtrain__os_process_stat(process, numbers, &known);
    if (state == 0) /* a process that is only hidden can be asked for */
        return known && kill((pid_t)process, 0) != 0 && errno == ESRCH;
    return numbers[19] != began || ((state == 'Z' || state == 'X' || (numbers[6] & EXITS) != 0) && numbers[17] <= 1);
}

#if !defined(DTRAIN_NO_MPI) && !defined(DTRAIN_MPI_HEADER)
/* Loads a library whose plugins look for its symbols. Returns NULL if there is none. */
static void *dtrain__os_library(const char *name)
{
    return dlopen(name, RTLD_NOW | RTLD_GLOBAL);
}

/* Returns why a library was not loaded; may be NULL. */
static const char *dtrain__os_library_why(void)
{
    return dlerror();
}

static void *dtrain__os_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}
#endif

#endif
#endif
