/* What a training example leaves behind: files that take their place when they are whole, and the loss as an SVG
 * curve. Define REPORT_PROGRAM, the name that error lines begin with, and include dtrain.h first. */
#ifndef REPORT_H
#define REPORT_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "terminal.h"
#include "utf8.h"

#ifdef _WIN32 /* files belong to who may use their directory */
static inline char *report_real_path(const char *path)
{
    return utf8_real_path(path);
}

static inline void report_share(int fd)
{
    (void)fd;
}
#else
static inline char *report_real_path(const char *path)
{
    return realpath(path, NULL);
}

static inline void report_share(int fd)
{
    mode_t mask = umask(0); /* mkstemp leaves the file to its owner alone */
    umask(mask);
    fchmod(fd, 0666 & ~mask);
}
#endif

/* A file that is being written beside its target, whose place it takes when it is whole. */
typedef struct report_file {
    FILE *file;
    const char *path;
    char aside[4096]; /* empty: written in place, as a device or a pipe must be */
} report_file;

static inline int report_complain(const char *what, const char *detail, const char *why)
{
    fprintf(stderr, REPORT_PROGRAM ": %s %s: %s\n", what, detail, why);
    return 1;
}

/* A plain file is written as PATH.XXXXXX, a name that nobody can guess; anything else that exists, a device or a pipe,
 * is written itself. */
static inline int report_open(report_file *out, const char *path)
{
    int mode = utf8_mode(path), there = mode != 0;
    out->path = path;
    if (there && S_ISDIR(mode))
        return report_complain("output", path, "is a directory");
    if (there && access(path, W_OK) != 0)
        return report_complain("output", path, strerror(errno));
    if (*path == 0 || strlen(path) + 8 > sizeof out->aside)
        return report_complain("output", path, *path == 0 ? "the name is empty" : "the name is too long");
    if (!there || S_ISREG(mode))
        snprintf(out->aside, sizeof out->aside, "%s.XXXXXX", path);
    int fd = out->aside[0] != 0 ? mkstemp(out->aside) : -1;
    if (fd >= 0)
        report_share(fd);
    out->file = out->aside[0] == 0 ? fopen(path, "wb") : fd >= 0 ? fdopen(fd, "wb") : NULL;
    return out->file != NULL ? 0 : report_complain("output", path, strerror(errno));
}

/* Whether both are to be put in one place, however their paths spell it. */
static inline int report_same_file(const report_file *a, const report_file *b)
{
    char *x = a->aside[0] != 0 ? report_real_path(a->aside) : NULL,
         *y = b->aside[0] != 0 ? report_real_path(b->aside) : NULL;
    int same = x != NULL && y != NULL && strlen(x) == strlen(y) && memcmp(x, y, strlen(x) - 6) == 0; /* 6: XXXXXX */
    free(x);
    free(y);
    return same;
}

static inline int report_close(report_file *out)
{
    int bad = ferror(out->file);
    bad |= fclose(out->file) != 0;
    out->file = NULL;
    if (bad || (out->aside[0] != 0 && rename(out->aside, out->path) != 0))
        return report_complain("output", out->path, "could not be written; is the disk full?");
    return 0;
}

static inline void report_discard(report_file *out)
{
    if (out->file == NULL)
        return;
    fclose(out->file);
    out->file = NULL;
    if (out->aside[0] != 0)
        remove(out->aside);
}

/* Says whether a plain file can be written at path, and leaves it as it is. */
static inline int report_try(const char *path)
{
    report_file file;
    memset(&file, 0, sizeof file);
    if (report_open(&file, path) != 0)
        return 1;
    report_discard(&file);
    return file.aside[0] != 0 ? 0 : report_complain("output", path, "is no plain file");
}

/* Prints how far training is: a bar on a terminal, twenty lines in all anywhere else. */
static inline void report_step(const char *text, long done, long steps)
{
    long every = steps / 20 > 0 ? steps / 20 : 1;
    int line = terminal_room(1), room = line - 3 - (int)strlen(text); /* the bar takes what the text leaves */
    char bar[21];
    room = room > 20 ? 20 : room < 0 ? 0 : room;
    for (int i = 0; i < room; i++)
        bar[i] = (long)i < (long)room * done / steps ? '#' : '.';
    bar[room] = 0;
    line -= room > 0 ? room + 3 : 0;
    if (isatty(1)) /* blanks up to the end of the line cover a longer text before */
        printf("\r%s%s%s%-*.*s%s", room > 0 ? "[" : "", bar, room > 0 ? "] " : "", line, line, text,
               done == steps ? "\n" : "");
    else if (done % every == 0 || done == steps)
        printf("step %s\n", text);
    fflush(stdout);
}

/* The smallest of 1, 2 and 5 times a power of ten that cuts `whole` into at most `parts`. */
static inline double report_tick(double whole, int parts)
{
    static const double factors[] = {1, 2, 5};
    double unit = 1e-9;
    for (;; unit *= 10)
        for (int i = 0; i < 3; i++)
            if (whole / (factors[i] * unit) <= parts || unit > 1e30)
                return factors[i] * unit;
}

/* The loss of each step as a line over a grid; values that are no numbers leave it out. */
static inline void report_draw_curve(FILE *svg, const double *losses, long steps)
{
    double high = 0, tick, across = steps > 1 ? 560.0 / (double)(steps - 1) : 0;
    long stride = 1 + steps / 2000;
    for (long i = 0; i < steps; i++)
        high = losses[i] > high && losses[i] < 1e9 ? losses[i] : high;
    high = high > 0 ? high * 1.05 : 1;
    fprintf(svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 640 360\" width=\"640\" height=\"360\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n<title>Training loss</title>\n"
                 "<rect width=\"640\" height=\"360\" fill=\"white\"/>\n"
                 "<text x=\"340\" y=\"14\" text-anchor=\"middle\" font-weight=\"bold\">Training loss</text>\n");
    tick = report_tick(high, 6);
    for (int i = 0; tick * i <= high; i++)
        fprintf(svg,
                "<path d=\"M60 %.1fH620\" stroke=\"#ddd\"/><text x=\"54\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                310 - 290 * tick * i / high, 314 - 290 * tick * i / high, tick * i);
    tick = report_tick((double)steps, 6);
    tick = tick < 1 ? 1 : tick;
    for (int i = 1; tick * i <= (double)steps; i++)
        fprintf(
            svg,
            "<path d=\"M%.1f 310v5\" stroke=\"#888\"/><text x=\"%.1f\" y=\"328\" text-anchor=\"middle\">%.0f</text>\n",
            60 + across * (tick * i - 1), 60 + across * (tick * i - 1), tick * i);
    fprintf(
        svg,
        "<path d=\"M60 20V310H620\" fill=\"none\" stroke=\"#888\"/>\n"
        "<text x=\"340\" y=\"348\" text-anchor=\"middle\">step</text>\n"
        "<text x=\"18\" y=\"165\" text-anchor=\"middle\" transform=\"rotate(-90 18 165)\">loss, nats a byte</text>\n"
        "<polyline fill=\"none\" stroke=\"#06c\" stroke-width=\"1.5\" points=\"");
    for (long i = 0; i < steps; i += stride)
        if (losses[i] >= 0 && losses[i] <= high)
            fprintf(svg, "%.1f,%.1f ", 60 + across * (double)i, 310 - 290 * losses[i] / high);
    fprintf(svg, "\"/>\n</svg>\n");
}

#endif
