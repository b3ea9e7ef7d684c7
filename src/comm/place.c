/* ---- >>place ----
 * Where this process stands: its rank, the world's size, the root and the token. They come from a desc or from the
 * environment of a known launcher. What was used is kept for error texts. This module reads, and connects to nothing.
 */
#ifndef DTRAIN__PLACE
#define DTRAIN__PLACE
#include "op.c"
#include "../wire/net.c"
#include "../wire/admission.c"

typedef struct dtrain__place {
    dtrain__keys keys;                /* rank and size of the world, token, job */
    dtrain__hub_desc hub;             /* its texts point to those below and to the desc */
    char root[DTRAIN__ADDRESS_BYTES]; /* empty in a world of one */
    char listen_on[64];               /* empty: the interface that routes to the root */
    char believed[400];               /* the variables or fields that were used, with values; of the token its length
                                       * only */
    int alone;                        /* a world of one because no launcher has set a rank */
} dtrain__place;

/* The value of a variable; an empty one counts as unset. */
static DTRAIN__NOINLINE const char *dtrain__place_get(const char *name)
{
    const char *value = name != NULL ? dtrain__os_getenv(name) : NULL;
    return value != NULL && value[0] != 0 ? value : NULL;
}

DTRAIN__PRINTF(2, 3) static void dtrain__place_believe(dtrain__place *place, const char *format, ...)
{
    size_t used = strlen(place->believed);
    va_list arguments;
    va_start(arguments, format);
    if (used > 0 && used < sizeof place->believed - 2)
        place->believed[used++] = ' ';
    vsnprintf(place->believed + used, sizeof place->believed - used, format, arguments);
    va_end(arguments);
}

static dtrain_status dtrain__place_number(const char *name, int64_t low, int64_t high, int64_t *out)
{
    const char *text = dtrain__place_get(name);
    char *end = NULL;
    long long value;
    errno = 0;
    value = text != NULL ? strtoll(text, &end, 10) : 0;
    if (text == NULL || *end != 0 || errno != 0 || value < low || value > high)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s=%.40s: expected a number from %lld to %lld",
                            name, text != NULL ? text : "(unset)", (long long)low, (long long)high);
    *out = value;
    return DTRAIN_OK;
}

/* The same for an optional variable; keeps *out unless the variable is wanted and set. */
static dtrain_status dtrain__place_option(int wanted, const char *name, int64_t low, int64_t high, int64_t *out)
{
    return wanted && dtrain__place_get(name) != NULL ? dtrain__place_number(name, low, high, out) : DTRAIN_OK;
}

static dtrain_status dtrain__place_pair(dtrain__place *place, const char *rank, const char *size)
{
    int64_t r = 0, n = 0;
    dtrain_status status;
    if (dtrain__place_get(size) == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s=%s is set and %s is not; set both", rank,
                            dtrain__place_get(rank), size);
    status = dtrain__place_number(size, 1, DTRAIN__MAX_RANKS, &n);
    if (status == DTRAIN_OK)
        status = dtrain__place_number(rank, 0, n - 1, &r);
    place->keys.rank = (int)r;
    place->keys.world_size = (int)n;
    dtrain__place_believe(place, "%s=%d %s=%d", rank, place->keys.rank, size, place->keys.world_size);
    return status;
}

/* Variables of launchers that mean nothing without the second one. */
static const char *const dtrain__place_halves[][2] = {{"WORLD_SIZE", "RANK"},
                                                      {"RANK", "WORLD_SIZE"},
                                                      {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
                                                      {"SLURM_NTASKS", "SLURM_PROCID"},
                                                      {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                                      {"PMI_SIZE", "PMI_RANK"}};

/* Writes which variable looks like a launcher's, although no rank is set: " (WORLD_SIZE=4 is set, and RANK is not)". */
static void dtrain__place_half(char *text, size_t room)
{
    text[0] = 0;
    for (size_t i = 0; text[0] == 0 && i < sizeof dtrain__place_halves / sizeof dtrain__place_halves[0]; i++) {
        const char *const *names = dtrain__place_halves[i], *value = dtrain__place_get(names[0]);
        if (value != NULL && strcmp(value, "1") != 0 && dtrain__place_get(names[1]) == NULL)
            snprintf(text, room, " (%s=%.40s is set, and %s is not)", names[0], value, names[1]);
    }
}

enum {
    DTRAIN__LAUNCHER_NONE,
    DTRAIN__LAUNCHER_OWN,
    DTRAIN__LAUNCHER_TORCH,
    DTRAIN__LAUNCHER_SLURM,
    DTRAIN__LAUNCHER_OPENMPI,
    DTRAIN__LAUNCHER_PMI,
    DTRAIN__LAUNCHER_KUBERNETES
};

/* Whether this process is a Slurm batch script's own. It has the variables of a rank 0, and belongs to no step, as srun
 * has not started it. */
static int dtrain__place_is_batch(void)
{
    const char *rank = dtrain__place_get("SLURM_PROCID");
    return rank != NULL && strcmp(rank, "0") == 0 && dtrain__place_get("SLURM_STEP_ID") == NULL &&
           dtrain__place_get("SLURM_STEP_NUM_TASKS") == NULL;
}

/* Takes the place of a batch script's own process: a world of one. If its job has more tasks, the script forgot srun.
 * Unless the job says how many it has, srun starts one on each node. */
static dtrain_status dtrain__place_batch(dtrain__place *place)
{
    const char *size = dtrain__place_get("DTRAIN_WORLD_SIZE");
    const char *what = dtrain__place_get("SLURM_NTASKS") != NULL          ? "SLURM_NTASKS"
                       : dtrain__place_get("SLURM_JOB_NUM_NODES") != NULL ? "SLURM_JOB_NUM_NODES"
                                                                          : "SLURM_NNODES";
    int64_t tasks = 1;
    dtrain_status status = dtrain__place_option(1, what, 1, INT_MAX, &tasks);
    place->alone = size == NULL && strcmp(what, "SLURM_NTASKS") != 0;
    if (status != DTRAIN_OK || tasks == 1 || (size != NULL && strcmp(size, "1") == 0))
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "comm_create: SLURM_PROCID=0 and %s=%lld, and SLURM_STEP_ID is not set: this process runs in "
                        "the batch script, and srun has not started it as one of the job's ranks; start the program "
                        "with srun, or set DTRAIN_WORLD_SIZE=1 for a world of one",
                        what, (long long)tasks);
}

static dtrain_status dtrain__place_launcher(dtrain__place *place, int *launcher)
{
    /* a step may have fewer tasks than its job */
    const char *tasks = dtrain__place_get("SLURM_STEP_NUM_TASKS") != NULL ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    const char *size = dtrain__place_get("DTRAIN_WORLD_SIZE");
    /* Inside a Slurm job mpirun passes on the variables of its own task, the same to all its ranks. srun sets neither
     * of these two. */
    int inner = dtrain__place_get("OMPI_COMM_WORLD_RANK") != NULL ||
                (dtrain__place_get("PMI_RANK") != NULL && dtrain__place_get("MPI_LOCALNRANKS") != NULL);
    place->keys.world_size = 1;
    *launcher = DTRAIN__LAUNCHER_OWN;
    if (dtrain__place_get("DTRAIN_RANK") != NULL)
        return dtrain__place_pair(place, "DTRAIN_RANK", "DTRAIN_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_TORCH; /* the names are so common that one alone means nothing */
    if (dtrain__place_get("RANK") != NULL && dtrain__place_get("WORLD_SIZE") != NULL)
        return dtrain__place_pair(place, "RANK", "WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_SLURM;
    if (!inner && dtrain__place_is_batch())
        return dtrain__place_batch(place);
    if (!inner && dtrain__place_get("SLURM_PROCID") != NULL)
        return dtrain__place_pair(place, "SLURM_PROCID", tasks);
    *launcher = DTRAIN__LAUNCHER_OPENMPI;
    if (dtrain__place_get("OMPI_COMM_WORLD_RANK") != NULL)
        return dtrain__place_pair(place, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_PMI;
    if (dtrain__place_get("PMI_RANK") != NULL)
        return dtrain__place_pair(place, "PMI_RANK", "PMI_SIZE");
    *launcher = DTRAIN__LAUNCHER_KUBERNETES;
    if (dtrain__place_get("JOB_COMPLETION_INDEX") != NULL && size == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: JOB_COMPLETION_INDEX=%.20s says that this is a pod of an indexed job; set "
                            "DTRAIN_WORLD_SIZE and DTRAIN_ROOT (host:port of pod 0), or DTRAIN_WORLD_SIZE=1 for a pod "
                            "of its own",
                            dtrain__place_get("JOB_COMPLETION_INDEX"));
    if (dtrain__place_get("JOB_COMPLETION_INDEX") != NULL && strcmp(size, "1") != 0)
        return dtrain__place_pair(place, "JOB_COMPLETION_INDEX", "DTRAIN_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_NONE;
    place->alone = size == NULL;
    if (size != NULL && strcmp(size, "1") != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: DTRAIN_WORLD_SIZE=%.20s is set and no rank is; set DTRAIN_RANK", size);
    return DTRAIN_OK;
}

/* Takes the id that tells the launcher's job from others. torchrun's id is "none" if nobody gave one. The parts of a
 * heterogeneous Slurm job have ids of their own. An id that is too long or not printable ends with a hash of all of it.
 */
static void dtrain__place_job(dtrain__place *place, int launcher)
{
    const char *own = dtrain__place_get("DTRAIN_JOB"), *kind = "", *id = own, *step = NULL;
    char text[512];
    int plain = 1;
    if (id == NULL && launcher == DTRAIN__LAUNCHER_TORCH) {
        kind = "torchrun-";
        id = dtrain__place_get("TORCHELASTIC_RUN_ID");
        id = id != NULL && strcmp(id, "none") == 0 ? NULL : id;
    } else if (id == NULL && launcher == DTRAIN__LAUNCHER_SLURM && dtrain__place_get("SLURM_HET_SIZE") == NULL) {
        kind = "slurm-";
        id = dtrain__place_get("SLURM_JOB_ID");
        step = dtrain__place_get("SLURM_STEP_ID");
    } else if (id == NULL && (launcher == DTRAIN__LAUNCHER_OPENMPI || launcher == DTRAIN__LAUNCHER_PMI)) {
        kind = "mpi-";
        id = dtrain__place_get("PMIX_NAMESPACE");
        if (id == NULL)
            id = dtrain__place_get(launcher == DTRAIN__LAUNCHER_PMI ? "PMI_JOBID" : "OMPI_MCA_ess_base_jobid");
    }
    if (id == NULL)
        return;
    snprintf(text, sizeof text, "%s%.400s%s%.40s", kind, id, step != NULL ? "." : "", step != NULL ? step : "");
    snprintf(place->keys.job, sizeof place->keys.job, "%.63s", text);
    for (char *at = place->keys.job; *at != 0; at++)
        if (*at < 0x21 || *at > 0x7e) {
            *at = '?';
            plain = 0;
        }
    if (plain && strlen(text) < sizeof place->keys.job)
        return;
    unsigned char digest[32];
    size_t at =
        strlen(place->keys.job) < sizeof place->keys.job - 18 ? strlen(place->keys.job) : sizeof place->keys.job - 18;
    dtrain_sha256(id, strlen(id), digest);
    snprintf(place->keys.job + at, sizeof place->keys.job - at, "~%016llx",
             (unsigned long long)dtrain__get_le(digest, 8));
}

/* The first host of a Slurm node list: "gpu[007-009,12]-x,b" begins with gpu007-x. */
static int dtrain__place_first_node(const char *list, char *out, size_t capacity)
{
    size_t n = 0;
    int inside = 0, skip = 0;
    for (; *list != 0 && (inside || *list != ','); list++) {
        if (*list == '[')
            inside = 1;
        else if (*list == ']')
            inside = skip = 0;
        else if (inside && (*list == '-' || *list == ','))
            skip = 1;
        else if (!skip && n + 1 < capacity)
            out[n++] = *list;
    }
    out[n] = 0;
    return n > 0;
}

/* If the launcher says that all ranks are on this host, they meet at a unix socket named after the job. Without such
 * sockets they meet at a port computed from the name. */
static dtrain_status dtrain__place_local(dtrain__place *place, const char *local_size, const char *job)
{
    char name[32];
    int64_t local = 0;
    size_t n = 0;
    if (dtrain__place_get(local_size) == NULL || dtrain__place_number(local_size, 1, INT_MAX, &local) != DTRAIN_OK ||
        local != place->keys.world_size)
        return DTRAIN_OK;
    if (job != NULL && strlen(job) >= sizeof name) /* its end differs between jobs of one host */
        job += strlen(job) - (sizeof name - 1);
    for (; job != NULL && job[n] != 0 && n + 1 < sizeof name; n++)
        name[n] =
            (job[n] >= '0' && job[n] <= '9') || (job[n] >= 'a' && job[n] <= 'z') || (job[n] >= 'A' && job[n] <= 'Z')
                ? job[n]
                : '_';
    name[n] = 0;
    if (n == 0) /* the local ranks have the same parent */
        snprintf(name, sizeof name, "p%ld", dtrain__os_parent());
    dtrain__place_believe(place, "%s=%d (all on this host)", local_size, (int)local);
    if (!dtrain__net_has(AF_UNIX)) {
        uint32_t number = 0;
        for (n = 0; name[n] != 0; n++)
            number = number * 31 + (unsigned char)name[n];
        snprintf(place->root, sizeof place->root, "127.0.0.1:%d", 15000 + (int)(number % 10000));
        return DTRAIN_OK;
    }
    return dtrain__net_private(place->root, sizeof place->root, name);
}

/* Takes a root and remembers which variable or field gave it. */
static dtrain_status dtrain__place_given(dtrain__place *place, const char *name, const char *root)
{
    snprintf(place->root, sizeof place->root, "%s", root);
    dtrain__place_believe(place, "%s=%.120s", name, root);
    return strlen(root) < sizeof place->root
               ? DTRAIN_OK
               : dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s has %zu bytes; expected at most %zu", name,
                              strlen(root), sizeof place->root - 1);
}

static dtrain_status dtrain__place_root(dtrain__place *place, int launcher)
{
    const char *root = dtrain__place_get("DTRAIN_ROOT"), *host = dtrain__place_get("MASTER_ADDR");
    const char *port = dtrain__place_get("MASTER_PORT"), *nodes = dtrain__place_get("SLURM_STEP_NODELIST");
    const char *job = dtrain__place_get("PMIX_NAMESPACE");
    char node[128];
    int64_t number = 0, step = 0;
    dtrain_status status = DTRAIN_OK;
    if (root != NULL)
        return dtrain__place_given(place, "DTRAIN_ROOT", root);
    if (host != NULL && port != NULL) {
        /* then torchrun's own agent listens at MASTER_PORT */
        const char *agent = dtrain__place_get("TORCHELASTIC_USE_AGENT_STORE");
        int taken = agent != NULL && strcmp(agent, "True") == 0;
        status = dtrain__place_number("MASTER_PORT", 0, 65535 - taken, &number);
        snprintf(place->root, sizeof place->root, strchr(host, ':') != NULL ? "[%.200s]:%d" : "%.200s:%d", host,
                 (int)number + taken);
        dtrain__place_believe(place, "MASTER_ADDR=%.100s MASTER_PORT=%.8s%s", host, port,
                              taken ? " + 1 (torchrun has the first)" : "");
        return status;
    }
    nodes = nodes != NULL ? nodes : dtrain__place_get("SLURM_JOB_NODELIST");
    if (launcher == DTRAIN__LAUNCHER_SLURM && nodes != NULL && dtrain__place_get("SLURM_JOB_ID") != NULL &&
        dtrain__place_first_node(nodes, node, sizeof node)) {
        status = dtrain__place_number("SLURM_JOB_ID", 0, INT64_MAX, &number);
        if (status == DTRAIN_OK)
            status = dtrain__place_option(1, "SLURM_STEP_ID", 0, UINT32_MAX, &step);
        /* the steps of a job may run at once, and so may jobs with neighbouring numbers */
        snprintf(place->root, sizeof place->root, "%s:%d", node,
                 15000 + (int)((number % 10000 + step % 10000 * 101) % 10000));
        dtrain__place_believe(place, "SLURM_JOB_NODELIST=%.80s SLURM_JOB_ID=%lld SLURM_STEP_ID=%lld", nodes,
                              (long long)number, (long long)step);
    } else if (launcher == DTRAIN__LAUNCHER_OPENMPI) {
        status = dtrain__place_local(place, "OMPI_COMM_WORLD_LOCAL_SIZE",
                                     job != NULL ? job : dtrain__place_get("OMPI_MCA_ess_base_jobid"));
    } else if (launcher == DTRAIN__LAUNCHER_PMI) {
        status = dtrain__place_local(place, "MPI_LOCALNRANKS", job);
    }
    if (status != DTRAIN_OK || place->root[0] != 0)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "comm_create: rank %d of %d (%s) does not know where rank 0 is: set %s", place->keys.rank,
                        place->keys.world_size, place->believed,
                        host != NULL   ? "MASTER_PORT, or DTRAIN_ROOT=host:port"
                        : port != NULL ? "MASTER_ADDR, or DTRAIN_ROOT=host:port"
                                       : "DTRAIN_ROOT=host:port, the same on every rank");
}

/* Checks a token. what: where it comes from. */
static dtrain_status dtrain__place_check_token(const char *what, const char *token, size_t bytes)
{
    if (memchr(token, 0, bytes) != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s has a byte of 0; expected a text of 16 to 255 bytes", what);
    if (bytes > 255)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s has %zu bytes; expected 16 to 255", what, bytes);
    if (bytes == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_DENIED, "%s is empty; expected 16 to 255 bytes; unset it to have no token",
                            what);
    if (bytes < 16)
        return dtrain__fail(NULL, DTRAIN_ERR_DENIED,
                            "%s has %zu bytes; a token needs at least 16 bytes that nobody can guess", what, bytes);
    return DTRAIN_OK;
}

/* Reads the first line of a regular file; another kind of file may make its reader wait for ever. dtrun reads its token
 * file with this function. */
static dtrain_status dtrain__place_read_token(const char *what, const char *path, char token[256], size_t *bytes)
{
    char text[512], from[300];
    dtrain__os_facts file = {DTRAIN__OS_IS_OTHER, 0, 0, 0, 0};
    ssize_t n = 0;
    int fd = dtrain__os_open(DTRAIN__OS_HERE, path, DTRAIN__OS_READ), error = 0, regular = 0;
    snprintf(from, sizeof from, "%.60s \"%.200s\"", what, path);
    memset(&file, 0, sizeof file);
    *bytes = 0;
    if (fd < 0 || dtrain__os_look(fd, &file) != 0)
        error = errno;
    else
        regular = file.kind == DTRAIN__OS_IS_FILE;
    while (regular && *bytes < sizeof text &&
           ((n = dtrain__os_read(fd, text + *bytes, sizeof text - *bytes)) > 0 || (n < 0 && errno == EINTR)))
        *bytes += n > 0 ? (size_t)n : 0;
    error = n < 0 ? errno : error;
    if (fd >= 0)
        dtrain__os_close(fd);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s cannot be read: %s", from, dtrain__os_error_text(error));
    if (!regular)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s is no regular file; write the token to one", from);
    if (file.open_to_others)
        dtrain__log(DTRAIN_LOG_WARN, "%s can be read or written by others than its owner; chmod 600 prevents that",
                    from);
    for (size_t i = 0; i < *bytes; i++)
        if (text[i] == '\n' || text[i] == '\r')
            *bytes = i;
    dtrain_status status = dtrain__place_check_token(from, text, *bytes);
    if (status == DTRAIN_OK)
        memcpy(token, text, *bytes);
    memset(text, 0, sizeof text);
    return status;
}

static dtrain_status dtrain__place_token(dtrain__place *place, const dtrain_comm_desc *desc, int environment)
{
    const char *token = desc->token, *from = "desc.token", *file = NULL;
    char line[256], what[64];
    size_t bytes;
    dtrain_status status;
    if (token == NULL && environment) {
        token =
            dtrain__os_getenv("DTRAIN_TOKEN"); /* a variable that is set and empty is an error: a secret is missing */
        file = token == NULL ? dtrain__os_getenv("DTRAIN_TOKEN_FILE") : NULL;
        from = file != NULL ? "DTRAIN_TOKEN_FILE" : "DTRAIN_TOKEN";
    }
    if (token == NULL && file == NULL)
        return DTRAIN_OK;
    snprintf(what, sizeof what, "comm_create: %s", from);
    bytes = token != NULL ? strlen(token) : 0;
    status = token != NULL ? dtrain__place_check_token(what, token, bytes)
                           : dtrain__place_read_token(what, file, line, &bytes);
    if (status != DTRAIN_OK)
        return status;
    memcpy(place->keys.token, token != NULL ? token : line, bytes);
    memset(line, 0, sizeof line);
    place->keys.token_bytes = bytes;
    dtrain__place_believe(place, "%s (%zu bytes)", from, bytes);
    return DTRAIN_OK;
}

/* Reads desc.transport, or DTRAIN_TRANSPORT. */
static dtrain_status dtrain__place_transport(const dtrain_comm_desc *desc, int *out)
{
    static const char *const names[] = {"", "tcp", "unix", "shm", "mpi"}; /* by DTRAIN__TRANSPORT_ANY ... */
    const char *asked = desc->transport != NULL ? desc->transport : dtrain__place_get("DTRAIN_TRANSPORT");
    *out = DTRAIN__TRANSPORT_ANY;
    while (asked != NULL && *out <= DTRAIN__TRANSPORT_MPI && strcmp(asked, names[*out]) != 0)
        ++*out;
    if (*out <= DTRAIN__TRANSPORT_MPI)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "comm_create: %s is \"%.40s\"; expected tcp, unix, shm or mpi, or %s to let each pair of ranks "
                        "take the fastest",
                        desc->transport != NULL ? "desc.transport" : "DTRAIN_TRANSPORT", asked,
                        desc->transport != NULL ? "NULL" : "unset it");
}

/* Reads everything but rank, size and root. */
static dtrain_status dtrain__place_rest(dtrain__place *place, const dtrain_comm_desc *desc, int environment)
{
    dtrain__hub_desc *hub = &place->hub;
    const char *listen_on = desc->listen_on;
    int64_t insecure = desc->insecure, secure = desc->secure > 0, listen_fd = -1;
    int asks = environment && desc->secure == 0 && dtrain__place_get("DTRAIN_SECURE") != NULL;
    int leads = environment && place->keys.rank == 0 && dtrain__place_get("DTRAIN_ROOT") != NULL;
    if (environment && listen_on == NULL)
        listen_on = dtrain__place_get("DTRAIN_INTERFACE");
    snprintf(place->listen_on, sizeof place->listen_on, "%s", listen_on != NULL ? listen_on : "");
    hub->root = place->root;
    hub->listen_on = place->listen_on;
    hub->believed = place->believed;
    hub->fingerprint = desc->fingerprint != NULL ? desc->fingerprint : "";
    hub->connections = desc->connections;
    hub->polls = desc->progress == DTRAIN_PROGRESS_POLL;
    hub->heartbeat_ms = desc->heartbeat_ms;
    hub->reconnect_ms = desc->reconnect_ms;
    hub->timeout_ms = desc->timeout_ms;
    hub->on_address = desc->on_address;
    hub->on_address_user = desc->on_address_user;
    if (dtrain__place_option(environment && !desc->insecure, "DTRAIN_INSECURE", 0, 1, &insecure) != DTRAIN_OK ||
        dtrain__place_option(asks, "DTRAIN_SECURE", 0, 1, &secure) != DTRAIN_OK ||
        dtrain__place_option(environment && desc->timeout_ms == 0, "DTRAIN_TIMEOUT_MS", -1, INT_MAX,
                             &hub->timeout_ms) != DTRAIN_OK ||
        dtrain__place_option(leads, "DTRAIN_LISTEN_FD", 0, INT_MAX, &listen_fd) != DTRAIN_OK ||
        dtrain__place_transport(desc, &hub->transport) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (hub->timeout_ms == 0)
        hub->timeout_ms = 60000;
    hub->insecure = (int)insecure;
    hub->listen_fd = (int)listen_fd;
    place->keys.secure = secure > 0 ? 1 : asks ? -1 : desc->secure;
    return dtrain__place_token(place, desc, environment);
}

static dtrain_status dtrain__place_check_root(const dtrain__place *place)
{
    char host[DTRAIN__ADDRESS_BYTES], port[8];
    if (strncmp(place->root, "unix:", 5) == 0 && place->root[5] != 0 && strlen(place->root) <= 100)
        return DTRAIN_OK;
    if (strncmp(place->root, "unix:", 5) != 0 && dtrain__net_split(place->root, host, port) && atoi(port) <= 65535 &&
        host[0] != 0 && (place->keys.rank == 0 || atoi(port) > 0))
        return DTRAIN_OK;
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "comm_create: the root is \"%.120s\" on rank %d; expected host:port, [address]:port or "
        "unix:/path or unix:@name; the port is 1 to 65535 (on rank 0 also 0: any), the path or name at most 95 bytes",
        place->root, place->keys.rank);
}

/* Finds out where this process stands; desc is not NULL. */
static dtrain_status dtrain__place_read(dtrain__place *place, const dtrain_comm_desc *desc)
{
    int launcher = DTRAIN__LAUNCHER_NONE, environment = desc->world_size == 0;
    dtrain_status status = DTRAIN_OK;
    memset(place, 0, sizeof *place);
    if (environment) {
        status = dtrain__place_launcher(place, &launcher);
        dtrain__place_job(place, launcher);
    } else {
        place->keys.rank = desc->rank;
        place->keys.world_size = desc->world_size;
        if (desc->world_size < 0 || desc->world_size > DTRAIN__MAX_RANKS || desc->rank < 0 ||
            desc->rank >= desc->world_size)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "comm_create: rank %d of %d ranks; expected 1 to %d ranks, counted from 0" DTRAIN__ZERO_FIRST,
                desc->rank, desc->world_size, DTRAIN__MAX_RANKS);
        dtrain__place_believe(place, "desc.rank=%d desc.world_size=%d", desc->rank, desc->world_size);
    }
    if (status == DTRAIN_OK)
        status = dtrain__place_rest(place, desc, environment);
    if (status != DTRAIN_OK || place->keys.world_size == 1)
        return status;
    if (place->keys.secure > 0 && place->keys.token_bytes == 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "comm_create: rank %d: %s asks for sealed traffic and there is no token to make keys of: set "
            "DTRAIN_TOKEN to one secret of 16 bytes or more on every rank",
            place->keys.rank, desc->secure > 0 ? "desc.secure = 1" : "DTRAIN_SECURE=1");
    if (desc->root != NULL) {
        status = dtrain__place_given(place, "desc.root", desc->root);
    } else if (environment) {
        status = dtrain__place_root(place, launcher);
    } else {
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "comm_create: rank %d of %d: desc.root is needed: set it to the host:port or "
                              "unix:/path where rank 0 listens",
                              place->keys.rank, place->keys.world_size);
    }
    return status == DTRAIN_OK ? dtrain__place_check_root(place) : status;
}

#endif
