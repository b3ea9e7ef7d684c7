/* dtrun on Windows: the ranks are in a job object, which ends with dtrun's handle of it, however dtrun ends. A thread
 * for each output of a rank reads its lines and prints them. Ctrl-C goes to the ranks too, as they share the console.
 * There are no signals: ranks that do not end in time are ended at once. */
#ifndef DTRUN_WINDOWS_H
#define DTRUN_WINDOWS_H

#include <shellapi.h>

int _CRT_glob = 0; /* the program's arguments are as they were written */

typedef struct rank {
    HANDLE process, waiting;
    DWORD pid, status;
    int ended;
} rank;

typedef struct reader {
    dtrain__os_thread thread;
    HANDLE from, to;
    int rank, prefixed;
} reader;

typedef struct launch {
    options o;
    wchar_t **wide; /* the program and its arguments */
    HANDLE job, changed, nothing;
    SOCKET listener;
    int first_rank, started, running, first_failed; /* first_failed: -1 while none has failed */
    char token[TOKEN_BYTES + 1];
    rank ranks[MOST_RANKS];
    reader readers[2 * MOST_RANKS];
} launch;

static launch all;
static dtrain__os_mutex printing = DTRAIN__OS_MUTEX;
static int lost_output; /* a line of standard output could not be printed; guarded by printing */
static uint32_t asked;  /* how often somebody asked dtrun to end */

static void say(const char *format, ...)
{
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    dtrain__os_lock(&printing);
    fprintf(stderr, "dtrun: %s\n", text);
    fflush(stderr);
    dtrain__os_unlock(&printing);
}

static void fail_start(const char *what)
{
    DWORD error = GetLastError();
    int missing = error == ERROR_FILE_NOT_FOUND || error == ERROR_PATH_NOT_FOUND || error == ERROR_BAD_EXE_FORMAT ||
                  error == ERROR_ACCESS_DENIED;
    if (all.job != NULL)
        TerminateJobObject(all.job, 1);
    refuse(missing ? 127 : 1, "cannot %s: error %lu of the system", what, error);
}

/* ---- >>environment ---- */

static void set_number(const char *name, int value, int overwrite)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    if (overwrite || getenv(name) == NULL)
        _putenv_s(name, text);
}

static void listen_for_rank_0(launch *l, char *root, size_t bytes)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    dtrain__os_sockets();
    l->listener = WSASocketW(AF_INET, SOCK_STREAM, 0, NULL, 0, WSA_FLAG_OVERLAPPED); /* rank 0 inherits it */
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (l->listener == INVALID_SOCKET || bind(l->listener, (struct sockaddr *)&address, length) != 0 ||
        listen(l->listener, SOMAXCONN) != 0 || getsockname(l->listener, (struct sockaddr *)&address, &length) != 0)
        refuse(1, "cannot listen on 127.0.0.1: %s", dtrain__os_error_text(dtrain__os_socket_error()));
    snprintf(root, bytes, "127.0.0.1:%d", ntohs(address.sin_port));
}

static void set_environment(launch *l)
{
    char root[32] = "", job[64];
    if (l->o.root == NULL)
        listen_for_rank_0(l, root, sizeof root);
    _putenv_s("DTRAIN_ROOT", l->o.root != NULL ? l->o.root : root);
    _putenv_s("DTRAIN_TOKEN", l->token);
    snprintf(job, sizeof job, "dtrun-%ld-%llx", dtrain__os_self(), (unsigned long long)dtrain__os_wall_ns());
    if (l->o.nodes == 1)
        _putenv_s("DTRAIN_JOB", job);
    _putenv_s("DTRAIN_TOKEN_FILE", "");
    _putenv_s("DTRAIN_LISTEN_FD", "");
    set_number("DTRAIN_WORLD_SIZE", l->o.local_size * l->o.nodes, 1);
    set_number("DTRAIN_LOCAL_SIZE", l->o.local_size, 1);
    set_number("OMP_NUM_THREADS", l->o.threads, 0);
    set_number("OPENBLAS_NUM_THREADS", l->o.threads, 0);
    set_number("MKL_NUM_THREADS", l->o.threads, 0);
}

/* ---- >>output ---- */

static void put(const reader *r, const char *line, size_t bytes)
{
    char prefix[24];
    DWORD written;
    int length = snprintf(prefix, sizeof prefix, "[%d] ", r->rank);
    dtrain__os_lock(&printing);
    int good = !r->prefixed || WriteFile(r->to, prefix, (DWORD)length, &written, NULL);
    good = good && WriteFile(r->to, line, (DWORD)bytes, &written, NULL) && WriteFile(r->to, "\n", 1, &written, NULL);
    lost_output |= !good && r->to == GetStdHandle(STD_OUTPUT_HANDLE);
    dtrain__os_unlock(&printing);
}

/* Prints the lines of an output until its end; a carriage return ends a line too. */
static void read_lines(void *pointer)
{
    reader *r = (reader *)pointer;
    char *line = (char *)malloc(LINE_BYTES), bytes[4096], before = 0;
    size_t length = 0;
    DWORD got;
    while (line != NULL && ReadFile(r->from, bytes, sizeof bytes, &got, NULL) && got > 0)
        for (DWORD i = 0; i < got; i++) {
            int is_end = bytes[i] == '\n' || bytes[i] == '\r';
            if ((bytes[i] == '\n' && before != '\r') || (bytes[i] == '\r' && length > 0) || length == LINE_BYTES) {
                put(r, line, length);
                length = 0;
            }
            if (!is_end)
                line[length++] = bytes[i];
            before = bytes[i];
        }
    if (length > 0)
        put(r, line, length);
    free(line);
    CloseHandle(r->from);
}

/* ---- >>start ---- */

/* Adds an argument to a command line so that the C library of the program finds it as it was. */
static size_t quote(wchar_t *line, size_t at, size_t room, const wchar_t *word)
{
    size_t slashes = 0;
    if (at + 2 * wcslen(word) + 4 > room)
        refuse(2, "the command line is too long");
    line[at++] = L'"';
    for (; *word != 0; word++) {
        for (; *word == L'"' && slashes > 0; slashes--)
            line[at++] = L'\\';
        if (*word == L'"')
            line[at++] = L'\\';
        slashes = *word == L'\\' ? slashes + 1 : 0;
        line[at++] = *word;
    }
    for (; slashes > 0; slashes--)
        line[at++] = L'\\';
    line[at++] = L'"';
    line[at++] = L' ';
    line[at] = 0;
    return at;
}

static void make_line(const launch *l, wchar_t *line, size_t room)
{
    size_t at = 0;
    for (wchar_t **word = l->wide; *word != NULL; word++)
        at = quote(line, at, room, *word);
    for (wchar_t *first = line + 1; *first != L'"'; first++)
        *first = *first == L'/' ? L'\\' : *first;
}

static HANDLE inheritable(HANDLE of)
{
    HANDLE copy = NULL;
    DuplicateHandle(GetCurrentProcess(), of, GetCurrentProcess(), &copy, 0, TRUE, DUPLICATE_SAME_ACCESS);
    return copy;
}

/* Starts a process in the job that inherits `count` handles alone, of which the first three are its standard ones. */
static void spawn(launch *l, rank *r, HANDLE *handles, size_t count)
{
    static wchar_t line[32768];
    STARTUPINFOEXW how;
    PROCESS_INFORMATION made;
    SIZE_T bytes = 0;
    memset(&how, 0, sizeof how);
    make_line(l, line, sizeof line / sizeof line[0]);
    InitializeProcThreadAttributeList(NULL, 1, 0, &bytes);
    how.lpAttributeList = (LPPROC_THREAD_ATTRIBUTE_LIST)malloc(bytes);
    if (how.lpAttributeList == NULL || !InitializeProcThreadAttributeList(how.lpAttributeList, 1, 0, &bytes) ||
        !UpdateProcThreadAttribute(how.lpAttributeList, 0, PROC_THREAD_ATTRIBUTE_HANDLE_LIST, handles,
                                   count * sizeof *handles, NULL, NULL))
        fail_start("start another rank");
    how.StartupInfo.cb = sizeof how;
    how.StartupInfo.dwFlags = STARTF_USESTDHANDLES;
    how.StartupInfo.hStdInput = handles[0];
    how.StartupInfo.hStdOutput = handles[1];
    how.StartupInfo.hStdError = handles[2];
    if (!CreateProcessW(NULL, line, NULL, NULL, TRUE, CREATE_SUSPENDED | EXTENDED_STARTUPINFO_PRESENT, NULL, NULL,
                        &how.StartupInfo, &made))
        fail_start("run the program");
    if (!AssignProcessToJobObject(l->job, made.hProcess)) {
        TerminateProcess(made.hProcess, 1);
        fail_start("put a rank into the job");
    }
    ResumeThread(made.hThread);
    CloseHandle(made.hThread);
    free(how.lpAttributeList);
    r->process = made.hProcess;
    r->pid = made.dwProcessId;
}

static void CALLBACK on_end(void *pointer, BOOLEAN timed_out)
{
    (void)timed_out;
    SetEvent(((launch *)pointer)->changed);
}

static void start_rank(launch *l, int index)
{
    int global = l->first_rank + index, leads = global == 0 && l->listener != INVALID_SOCKET;
    HANDLE handles[4] = {inheritable(global == 0 ? GetStdHandle(STD_INPUT_HANDLE) : l->nothing)};
    rank *r = &l->ranks[index];
    for (int i = 0; i < 2; i++) {
        reader *out = &l->readers[2 * index + i];
        if (!CreatePipe(&out->from, &handles[1 + i], NULL, 0) ||
            !SetHandleInformation(handles[1 + i], HANDLE_FLAG_INHERIT, HANDLE_FLAG_INHERIT))
            fail_start("make a pipe");
        out->to = GetStdHandle(i == 0 ? STD_OUTPUT_HANDLE : STD_ERROR_HANDLE);
        out->rank = global;
        out->prefixed = !l->o.no_prefix;
    }
    if (handles[0] == NULL)
        handles[0] = inheritable(l->nothing);
    set_number("DTRAIN_RANK", global, 1);
    set_number("DTRAIN_LOCAL_RANK", index, 1);
    if (leads)
        set_number("DTRAIN_LISTEN_FD", (int)l->listener, 1);
    handles[3] = (HANDLE)l->listener;
    spawn(l, r, handles, leads ? 4 : 3);
    _putenv_s("DTRAIN_LISTEN_FD", "");
    for (int i = 0; i < 3; i++)
        CloseHandle(handles[i]);
    for (int i = 0; i < 2; i++)
        if (dtrain__os_thread_start(&l->readers[2 * index + i].thread, read_lines, &l->readers[2 * index + i], 65536) !=
            0)
            fail_start("start a thread");
    l->started++;
    l->running++;
    if (!RegisterWaitForSingleObject(&r->waiting, r->process, on_end, l, INFINITE, WT_EXECUTEONLYONCE))
        fail_start("wait for a rank");
}

/* ---- >>ending ---- */

static BOOL WINAPI on_control(DWORD kind)
{
    (void)kind;
    __atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
    SetEvent(all.changed);
    return TRUE;
}

static const char *end_of(const launch *l, int index, char text[160])
{
    const rank *r = &l->ranks[index];
    int length = snprintf(text, 160, "rank %d (pid %lu) ", l->first_rank + index, r->pid);
    if (r->ended)
        snprintf(text + length, 64, r->status < 65536 ? "exited with status %lu" : "was ended by 0x%08lx", r->status);
    else
        snprintf(text + length, 64, "has not ended");
    return text;
}

static void look(launch *l)
{
    char text[160];
    for (int i = 0; i < l->started; i++) {
        rank *r = &l->ranks[i];
        if (r->ended || WaitForSingleObject(r->process, 0) != WAIT_OBJECT_0)
            continue;
        r->ended = 1;
        GetExitCodeProcess(r->process, &r->status);
        l->running--;
        if (r->status == 0)
            continue;
        if (l->first_failed < 0)
            l->first_failed = i;
        if (l->o.survivors && __atomic_load_n(&asked, __ATOMIC_SEQ_CST) == 0)
            say(l->running > 0 ? "%s; ranks that go on: %d" : "%s", end_of(l, i, text), l->running);
    }
}

/* Waits until all ranks have ended. After a failure without --survivors, or when asked to end, they have grace_ms to
 * end by themselves. */
static void wait_for_ranks(launch *l)
{
    int64_t deadline = INT64_MAX;
    int killed = 0;
    char text[160];
    while (l->running > 0) {
        int64_t now = dtrain__os_now_ns() / 1000000, left = deadline - now;
        WaitForSingleObject(l->changed, killed || left > 1000 ? 1000 : left > 0 ? (DWORD)left : 0);
        look(l);
        uint32_t times = __atomic_load_n(&asked, __ATOMIC_SEQ_CST);
        int ends = times > 0 || (l->first_failed >= 0 && !l->o.survivors);
        if (ends && deadline == INT64_MAX && l->running > 0) {
            deadline = now + l->o.grace_ms;
            if (times == 0)
                say("%s; ending the other %d rank%s, as --survivors is not set", end_of(l, l->first_failed, text),
                    l->running, l->running == 1 ? "" : "s");
            else
                say("asked to end; the ranks are ended after %d ms or a second time", l->o.grace_ms);
        }
        if (killed || l->running == 0 || !ends || (times < 2 && dtrain__os_now_ns() / 1000000 < deadline))
            continue;
        say("%d rank%s did not end within %d ms: ended", l->running, l->running == 1 ? "" : "s", l->o.grace_ms);
        killed = TerminateJobObject(l->job, 137) != 0;
    }
}

static int finish(launch *l)
{
    char text[160];
    JOBOBJECT_BASIC_ACCOUNTING_INFORMATION about;
    int64_t until = dtrain__os_now_ns() + (int64_t)LINGER_MS * 1000000;
    do { /* children of ranks may still end by themselves */
        about.ActiveProcesses = 0;
        QueryInformationJobObject(l->job, JobObjectBasicAccountingInformation, &about, sizeof about, NULL);
        dtrain__os_sleep(about.ActiveProcesses > 0 ? 20000000 : 0);
    } while (about.ActiveProcesses > 0 && dtrain__os_now_ns() < until);
    TerminateJobObject(l->job, 137);
    for (int i = 0; i < 2 * l->started; i++)
        dtrain__os_thread_join(&l->readers[i].thread);
    for (int i = 0; l->first_failed >= 0 && l->o.local_size > 1 && i < l->started; i++)
        say("%s%s", end_of(l, i, text), i == l->first_failed ? ", the first to fail" : "");
    if (l->first_failed >= 0)
        return (int)l->ranks[l->first_failed].status;
    if (lost_output)
        say("standard output could not be written, and lines of the ranks are lost");
    return lost_output ? 1 : asked > 0 ? 130 : 0;
}

static int run(char **arguments)
{
    launch *l = &all;
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limits;
    int count = 0, given = 0;
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    parse(&l->o, arguments);
    if (l->o.use_unix)
        exit(tool_wrong("dtrun", "--unix", NULL, "Windows has no unix sockets here: leave it out"));
    while (l->o.command[given] != NULL)
        given++;
    l->wide = wide + (count - given);
    if (l->o.token_file != NULL)
        read_token(l->token, l->o.token_file);
    else
        make_token(l->token);
    memset(&limits, 0, sizeof limits);
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
    l->changed = CreateEventW(NULL, FALSE, FALSE, NULL);
    l->job = CreateJobObjectW(NULL, NULL);
    l->nothing = CreateFileW(L"NUL", GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE, NULL, OPEN_EXISTING, 0, NULL);
    if (l->changed == NULL || l->job == NULL ||
        !SetInformationJobObject(l->job, JobObjectExtendedLimitInformation, &limits, sizeof limits))
        fail_start("make a job object");
    SetConsoleCtrlHandler(on_control, TRUE);
    l->first_rank = l->o.node * l->o.local_size;
    l->listener = INVALID_SOCKET;
    l->first_failed = -1;
    set_environment(l);
    while (l->started < l->o.local_size && (l->first_failed < 0 || l->o.survivors) && asked == 0) {
        start_rank(l, l->started);
        if (l->listener != INVALID_SOCKET)
            closesocket(l->listener); /* so that connections to a dead rank 0 are refused */
        l->listener = INVALID_SOCKET;
        look(l);
    }
    wait_for_ranks(l);
    return finish(l);
}

#endif
