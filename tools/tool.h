/* What the tools share: reading numbers of a command line, refusing a wrong one, and the progress line on a terminal.
 * Every tool ends with status TOOL_WRONG after a wrong call. */
#ifndef TOOL_H
#define TOOL_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "examples/terminal.h"
#include "examples/utf8.h"

enum { TOOL_WRONG = 2 };

/* ---- the command line ---- */

/* Reads the decimal digits at the start of a text; *end is the first byte after them. Returns 0 if there are none, or
 * if the number needs more than 64 bits. */
static inline int tool_digits(const char *text, const char **end, uint64_t *value)
{
    const char *at = text;
    for (*value = 0; *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (*value > (UINT64_MAX - digit) / 10)
            return 0;
        *value = *value * 10 + digit;
    }
    *end = at;
    return at > text;
}

/* Reads a text that is one whole number from least to most; returns 0 for any other text. */
static inline int tool_whole(const char *text, uint64_t least, uint64_t most, uint64_t *value)
{
    const char *end;
    return tool_digits(text, &end, value) && *end == 0 && *value >= least && *value <= most;
}

/* Reads a text that is one decimal number from least to most; returns 0 for any other text. */
static inline int tool_real(const char *text, double least, double most, double *value)
{
    char *end;
    if (text[0] == 0 || text[strspn(text, "0123456789.eE+-")] != 0) /* strtod also takes spaces, "0x1" and "nan" */
        return 0;
    *value = strtod(text, &end);
    return *end == 0 && *value >= least && *value <= most;
}

/* Prints "TOOL: FLAG VALUE: WHY; see TOOL --help" and returns TOOL_WRONG. value may be NULL. */
static inline int tool_wrong(const char *tool, const char *flag, const char *value, const char *why, ...)
{
    va_list list;
    fflush(stdout);
    fprintf(stderr, "%s: %s%s%s: ", tool, flag, value != NULL ? " " : "", value != NULL ? value : "");
    va_start(list, why);
    vfprintf(stderr, why, list);
    va_end(list);
    fprintf(stderr, "; see %s --help\n", tool);
    return TOOL_WRONG;
}

/* Prints a help text; returns the exit status. */
static inline int tool_help(const char *text)
{
    return fputs(text, stdout) < 0 || fflush(stdout) != 0 ? TOOL_WRONG : 0;
}

/* ---- the progress line ----
 * One line on standard error, redrawn in place at most ten times a second and erased at the end. Nothing is drawn
 * unless standard error is a terminal and progress_begin was called. One thread at a time draws. */

static struct {
    const char *tool; /* NULL: nothing is drawn */
    int64_t begun_ns, next_ns;
    int drawn; /* characters of the line on the screen */
} tool_line;

static inline int64_t tool_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Begins to count; work that ends within after_ms draws nothing. */
static inline void progress_begin(const char *tool, int after_ms)
{
    if (!isatty(2))
        return;
    tool_line.tool = tool;
    tool_line.begun_ns = tool_now_ns();
    tool_line.next_ns = tool_line.begun_ns + (int64_t)after_ms * 1000000;
}

/* What of the line is on the screen; the terminal may be narrower than when it was drawn. */
static inline int progress_drawn(int room)
{
    return tool_line.drawn < room ? tool_line.drawn : room;
}

/* Erases the line until the next progress_show: call it before anything else is printed. */
static inline void progress_clear(void)
{
    if (tool_line.drawn > 0)
        fprintf(stderr, "\r%*s\r", progress_drawn(terminal_room(2)), "");
    tool_line.drawn = 0;
}

static inline void progress_end(void)
{
    progress_clear();
    tool_line.tool = NULL;
}

/* Draws "TOOL: TEXT, N s left" if the line is due. total 0: how much is left is unknown. */
static inline void progress_show(double done, double total, const char *format, ...)
{
    char text[240];
    int room, used, before;
    va_list list;
    int64_t now = tool_line.tool != NULL ? tool_now_ns() : 0;
    if (tool_line.tool == NULL || now < tool_line.next_ns)
        return;
    tool_line.next_ns = now + 100000000;
    used = snprintf(text, sizeof text, "%s: ", tool_line.tool);
    va_start(list, format);
    used += vsnprintf(text + used, sizeof text - 40 - (size_t)used, format, list);
    va_end(list);
    used = used < (int)sizeof text - 41 ? used : (int)sizeof text - 41;
    if (done > 0 && done <= total && now - tool_line.begun_ns >= 500000000) {
        double seconds = (double)(now - tool_line.begun_ns) * 1e-9 * (total - done) / done;
        int in_minutes = seconds >= 120;
        used +=
            snprintf(text + used, 40, ", %.0f %s left", in_minutes ? seconds / 60 : seconds, in_minutes ? "min" : "s");
    }
    room = terminal_room(2);
    used = used < room ? used : room;
    before = progress_drawn(room);
    tool_line.drawn = used > before ? used : before;
    fprintf(stderr, "\r%-*.*s", tool_line.drawn, used, text);
}

#endif
