/* ---- >>os posix limits ----
 * Memory that is left, and processors. Linux limits both by control groups: version 1 has a tree of groups for each
 * controller, version 2 one tree, and a system may have both. A group's limit holds for all groups below it. A process
 * in a container sees only a part of a tree.
 * Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst and scheduler/sched-bwc.rst. */
#ifndef DTRAIN__OS_POSIX_LIMITS
#define DTRAIN__OS_POSIX_LIMITS
#include "os_posix_host.c"
#ifndef _WIN32

/* ---- control groups ---- */

#define DTRAIN__OS_CGROUP_BYTES 2048 /* of a group's name */

/* A control group that limits this process, in one mount of its tree. */
typedef struct dtrain__os_cgroup {
    int version;
    char path[DTRAIN__OS_CGROUP_BYTES];          /* its name in the tree, as /proc/PID/cgroup says it */
    char directory[2 * DTRAIN__OS_CGROUP_BYTES]; /* of its files */
    size_t top; /* the length of the mount's own directory: groups above are not visible */
} dtrain__os_cgroup;

/* Returns whether a list with commas has a word. */
static int dtrain__os_listed(const char *list, const char *word)
{
    for (size_t length; *list != 0 && *list != ':'; list += length + (list[length] == ',')) {
        length = strcspn(list, ",:\n");
        if (length == strlen(word) && strncmp(list, word, length) == 0)
            return 1;
        if (list[length] != ',')
            return 0;
    }
    return 0;
}

/* A text of the system, line by line. */
typedef struct dtrain__os_lines {
    int fd, cut; /* cut: the rest of a line that is too long is still to come */
    size_t begin, end;
    char text[4096];
} dtrain__os_lines;

static void dtrain__os_lines_open(dtrain__os_lines *lines, const char *path)
{
    lines->fd = open(path, O_RDONLY | O_CLOEXEC);
    lines->cut = 0;
    lines->begin = lines->end = 0;
}

/* Returns the next line without its end. Of a line that is too long it is the beginning. After the last line it closes
 * the file and returns NULL. */
static char *dtrain__os_lines_next(dtrain__os_lines *lines)
{
    for (;;) {
        char *line = lines->text + lines->begin;
        char *end = (char *)memchr(line, '\n', lines->end - lines->begin);
        int skip = lines->cut, full = end == NULL && lines->end - lines->begin == sizeof lines->text - 1;
        if (end != NULL || full) {
            lines->cut = full;
            lines->begin = full ? lines->end : (size_t)(end + 1 - lines->text);
            *(full ? lines->text + lines->end : end) = 0;
            if (!skip)
                return line;
            continue;
        }
        memmove(lines->text, line, lines->end - lines->begin);
        lines->end -= lines->begin;
        lines->begin = 0;
        ssize_t n = lines->fd >= 0 ? read(lines->fd, lines->text + lines->end, sizeof lines->text - 1 - lines->end) : 0;
        if (n <= 0)
            break;
        lines->end += (size_t)n;
    }
    if (lines->fd >= 0)
        close(lines->fd);
    return NULL;
}

/* Takes the next word off a line of /proc/PID/mountinfo, where "\040" stands for a space. Returns "" at the end. */
static char *dtrain__os_mount_word(char **line)
{
    char *word = *line + strspn(*line, " "), *to = word, *from = word;
    for (; *from != 0 && *from != ' '; to++) {
        int octal = from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' && from[2] <= '7' &&
                    from[3] >= '0' && from[3] <= '7';
        *to = octal ? (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + from[3] - '0') : *from;
        from += octal ? 4 : 1;
    }
    *line = from + (*from != 0);
    *to = 0;
    return word;
}

/* Writes the name of a process's control group for a controller; "": it has none. */
static void dtrain__os_cgroup_path(const char *process, const char *controller, int version,
                                   char path[DTRAIN__OS_CGROUP_BYTES])
{
    char name[64], *line;
    dtrain__os_lines lines;
    snprintf(name, sizeof name, "/proc/%.30s/cgroup", process);
    dtrain__os_lines_open(&lines, name);
    path[0] = 0;
    while ((line = dtrain__os_lines_next(&lines)) != NULL) {
        char *names = strchr(line, ':'), *group = names != NULL ? strchr(names + 1, ':') : NULL;
        if (group != NULL && (version == 2 ? group == names + 1 : dtrain__os_listed(names + 1, controller)))
            snprintf(path, DTRAIN__OS_CGROUP_BYTES, "%s", group + 1);
    }
}

/* Finds this process's group in the mount that a line of /proc/self/mountinfo tells of. Returns 0 if there is none. */
static int dtrain__os_cgroup_find(dtrain__os_cgroup *group, char *line, const char *controller)
{
    char *rest = strstr(line, " - "), *root, *mount, *type;
    if (rest == NULL)
        return 0;
    *rest = 0;
    rest += 3;
    type = dtrain__os_mount_word(&rest);
    dtrain__os_mount_word(&rest);
    for (int i = 0; i < 3; i++)
        dtrain__os_mount_word(&line);
    root = dtrain__os_mount_word(&line);
    mount = dtrain__os_mount_word(&line);
    group->version = strcmp(type, "cgroup2") == 0
                         ? 2
                         : strcmp(type, "cgroup") == 0 && dtrain__os_listed(dtrain__os_mount_word(&rest), controller);
    if (group->version == 0)
        return 0;
    dtrain__os_cgroup_path("self", controller, group->version, group->path);
    size_t skip = strcmp(root, "/") == 0 ? 0 : strlen(root);
    if (group->path[0] == 0)
        return 0;
    if (strncmp(root, "/..", 3) == 0) /* the mount begins above what this process sees of the tree */
        skip = strlen(group->path);
    else if (strncmp(group->path, root, skip) != 0 || (group->path[skip] != '/' && group->path[skip] != 0))
        return 0;
    group->top = strlen(mount);
    return snprintf(group->directory, sizeof group->directory, "%s%s", mount, group->path + skip) <
           (int)sizeof group->directory;
}

/* Goes on to the group that this one is in. Returns 0 if there is none. */
static int dtrain__os_cgroup_up(dtrain__os_cgroup *group)
{
    char *last = strrchr(group->directory + group->top, '/'), *name = strrchr(group->path, '/');
    if (last != NULL)
        *last = 0;
    if (name != NULL)
        *name = 0;
    return last != NULL;
}

static uint64_t dtrain__os_cgroup_number(const dtrain__os_cgroup *group, const char *file, const char *word,
                                         uint64_t fallback)
{
    char path[2 * DTRAIN__OS_CGROUP_BYTES + 64];
    snprintf(path, sizeof path, "%s/%.60s", group->directory, file);
    return dtrain__os_read_number(path, word, fallback);
}

/* Returns the least that `limit` says of the groups that this process is in; UINT64_MAX: no limit. */
static uint64_t dtrain__os_cgroup_least(const char *controller,
                                        uint64_t (*limit)(const dtrain__os_cgroup *, const void *), const void *context)
{
    dtrain__os_cgroup group;
    dtrain__os_lines mounts;
    char *line;
    uint64_t least = UINT64_MAX, value;
    dtrain__os_lines_open(&mounts, "/proc/self/mountinfo");
    while ((line = dtrain__os_lines_next(&mounts)) != NULL) {
        int more = dtrain__os_cgroup_find(&group, line, controller);
        for (; more; more = dtrain__os_cgroup_up(&group))
            least = (value = limit(&group, context)) < least ? value : least;
    }
    return least;
}

/* ---- memory ---- */

/* Returns what a group may still get. The system drops its clean copies of files when it needs room. */
static uint64_t dtrain__os_cgroup_left(const dtrain__os_cgroup *group, const void *context)
{
    static const char *const cache[2][3] = {{"total_inactive_file ", "total_active_file ", NULL},
                                            {"inactive_file ", "\nactive_file ", "slab_reclaimable "}};
    int second = group->version == 2;
    uint64_t most = dtrain__os_cgroup_number(group, second ? "memory.max" : "memory.limit_in_bytes", "", UINT64_MAX);
    (void)context;
    if (most == UINT64_MAX)
        return most;
    uint64_t used = dtrain__os_cgroup_number(group, second ? "memory.current" : "memory.usage_in_bytes", "", 0);
    uint64_t spare = 0;
    for (int i = 0; i < 3 && cache[second][i] != NULL; i++)
        spare += dtrain__os_cgroup_number(group, "memory.stat", cache[second][i], 0);
    used -= spare < used ? spare : used;
    return most > used ? most - used : 0;
}

/* Returns the bytes that this process can still get: more, and the system would kill a process. */
static uint64_t dtrain__os_memory_left(void)
{
    uint64_t kib = dtrain__os_read_number("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10), host = kib << 10;
    uint64_t group = dtrain__os_cgroup_least("memory", dtrain__os_cgroup_left, NULL);
    return group < host ? group : host;
}

/* ---- processors ---- */

#define DTRAIN__OS_MASK_WORDS (8192 / (8 * sizeof(unsigned long)))

/* Adds the processors that a process may run on to a mask; process 0 is this thread. Returns how many the mask has: all
 * that are online if the system knows no masks. */
static int dtrain__os_mask_add(unsigned long mask[DTRAIN__OS_MASK_WORDS], long process)
{
#if defined(__linux__) && defined(__NR_sched_getaffinity)
    int count = 0;
    unsigned long own[DTRAIN__OS_MASK_WORDS];
    long bytes = syscall(__NR_sched_getaffinity, process, sizeof own, own);
    for (size_t i = 0; i < DTRAIN__OS_MASK_WORDS; i++) {
        mask[i] |= (long)(i * sizeof own[0]) < bytes ? own[i] : 0;
        count += __builtin_popcountl(mask[i]);
    }
    if (count > 0)
        return count;
#endif
    (void)mask;
    (void)process;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

/* Returns the time of processors that a group may use, in thousandths of one; UINT64_MAX: all there is. */
static uint64_t dtrain__os_cgroup_quota(const dtrain__os_cgroup *group, const void *context)
{
    int second = group->version == 2;
    uint64_t quota = dtrain__os_cgroup_number(group, second ? "cpu.max" : "cpu.cfs_quota_us", "", UINT64_MAX);
    uint64_t period = second ? dtrain__os_cgroup_number(group, "cpu.max", " ", 0)
                             : dtrain__os_cgroup_number(group, "cpu.cfs_period_us", "", 0);
    (void)context;
    return period == 0 || quota > UINT64_MAX / 1000 ? UINT64_MAX
                                                    : quota * 1000 / period; /* version 1 says -1 for none */
}

/* Returns how many processors this thread may use. Containers, launchers and taskset leave a process fewer than the
 * machine has. Of a processor that a quota allows in part nothing is counted. */
static int dtrain__os_processors(void)
{
    unsigned long mask[DTRAIN__OS_MASK_WORDS] = {0};
    int count = dtrain__os_mask_add(mask, 0);
    uint64_t whole = dtrain__os_cgroup_least("cpu", dtrain__os_cgroup_quota, NULL) / 1000;
    return whole >= (uint64_t)count ? count : whole > 0 ? (int)whole : 1;
}

/* Returns 0 if more ranks run in the group than its quota has processors for. */
static uint64_t dtrain__os_cgroup_suffices(const dtrain__os_cgroup *group, const void *context)
{
    const dtrain__os_crowd *crowd = (const dtrain__os_crowd *)context;
    uint64_t quota = dtrain__os_cgroup_quota(group, NULL), ranks = 0;
    size_t length = strlen(group->path);
    for (int rank = 0; quota != UINT64_MAX && rank < crowd->size; rank++) {
        long process = crowd->process(crowd->group, rank);
        char path[DTRAIN__OS_CGROUP_BYTES], name[24];
        snprintf(name, sizeof name, "%ld", process);
        if (process > 0)
            dtrain__os_cgroup_path(name, "cpu", group->version, path);
        ranks += process == 0 ||
                 (process > 0 && strncmp(path, group->path, length) == 0 && (path[length] == '/' || path[length] == 0));
    }
    return quota >= ranks * 1000;
}

/* Returns whether the ranks of this host outnumber the processors that they may use together. */
static int dtrain__os_crowded(const dtrain__os_crowd *crowd)
{
    unsigned long mask[DTRAIN__OS_MASK_WORDS] = {0};
    int count = dtrain__os_mask_add(mask, 0), ranks = 0;
    for (int rank = 0; rank < crowd->size; rank++) {
        long process = crowd->process(crowd->group, rank);
        ranks += process >= 0;
        if (process > 0)
            count = dtrain__os_mask_add(mask, process);
    }
    return ranks > count || dtrain__os_cgroup_least("cpu", dtrain__os_cgroup_suffices, crowd) == 0;
}

#endif
#endif
