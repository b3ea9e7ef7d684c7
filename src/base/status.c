/* ---- >>status ----
 * Status names, error texts and the log. dtrain__fail is the only maker of error texts: it formats
 * one line into the object's own error and into the calling thread's last error, and returns the
 * status, so that a failing function is one `return dtrain__fail(...)`. */
#ifndef DTRAIN__STATUS
#define DTRAIN__STATUS
#include "base.h"
#include "os.c"

#define DTRAIN__ERROR_BYTES 640
#define DTRAIN__CAUSE_BYTES 400 /* of which a quoted cause takes so many */

typedef struct dtrain__error {
    dtrain_status status;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__error;

static __thread dtrain__error dtrain__thread_error;
static void dtrain__log_to_stderr(void *user, dtrain_log_level level, const char *text);
static dtrain_log_fn dtrain__log_callback = dtrain__log_to_stderr;
static void *dtrain__log_user;

static void dtrain__log_to_stderr(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    if (level >= DTRAIN_LOG_WARN)
        fprintf(stderr, "dtrain: %s\n", text);
}

DTRAIN_API void dtrain_set_log(dtrain_log_fn log, void *user)
{
    dtrain__log_callback = log;
    dtrain__log_user = user;
}

__attribute__((format(printf, 2, 3))) static void dtrain__log(dtrain_log_level level, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    if (dtrain__log_callback == NULL)
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__log_callback(dtrain__log_user, level, text);
}

/* Formats into object (NULL: none) and into the thread's last error. The arguments may quote either text. */
__attribute__((format(printf, 3, 4))) static dtrain_status dtrain__fail(dtrain__error *object, dtrain_status status,
                                                                        const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__thread_error.status = status;
    memcpy(dtrain__thread_error.text, text, sizeof text);
    if (object != NULL)
        *object = dtrain__thread_error;
    return status;
}

/* Makes an error kept elsewhere the calling thread's own. */
static dtrain_status dtrain__report(const dtrain__error *error)
{
    if (error->status != DTRAIN_OK)
        dtrain__thread_error = *error;
    return error->status;
}

/* An error's text, to be quoted by who passes it on. Of a text that has been passed on too often to be quoted whole
 * it is the last part, as that is the cause. */
static const char *dtrain__cause(const dtrain__error *error)
{
    const char *text = error->text, *next;
    while (strlen(text) > DTRAIN__CAUSE_BYTES && (next = strstr(text, ": ")) != NULL)
        text = next + 2;
    return text;
}

DTRAIN_API const char *dtrain_last_error(void)
{
    return dtrain__thread_error.text;
}

DTRAIN_API dtrain_status dtrain_error_set(dtrain_status status, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return dtrain__fail(NULL, status, "%s", text);
}

DTRAIN_API const char *dtrain_status_name(dtrain_status status)
{
    static const char *const names[] = {
        "OK",           "ERR_INVALID", "ERR_MEMORY",      "ERR_IO",     "ERR_TIMEOUT", "ERR_PEER_LOST",
        "ERR_MISMATCH", "ERR_CORRUPT", "ERR_UNSUPPORTED", "ERR_DENIED", "ERR_ABORTED"};
    size_t index = (size_t)status;
    return index < sizeof names / sizeof names[0] ? names[index] : "not a dtrain_status";
}

#endif
