/* Paths in UTF-8, as dtrain takes them. On Windows main() and C's files have another code page. Include it after the
 * system's headers. */
#ifndef UTF8_H
#define UTF8_H

#ifdef _WIN32
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <wchar.h>
#include <windows.h>
#include <shellapi.h>

/* Returns a text in UTF-16, in memory of malloc's; NULL if it is no text of that code page. */
static inline wchar_t *utf8_wide(UINT page, const char *text)
{
    int units = MultiByteToWideChar(page, MB_ERR_INVALID_CHARS, text, -1, NULL, 0);
    wchar_t *wide = units > 0 ? (wchar_t *)malloc((size_t)units * sizeof *wide) : NULL;
    errno = units > 0 ? ENOMEM : EILSEQ;
    if (wide != NULL)
        MultiByteToWideChar(page, 0, text, -1, wide, units);
    return wide;
}

static inline char *utf8_narrow(const wchar_t *wide)
{
    int bytes = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
    char *text = bytes > 0 ? (char *)malloc((size_t)bytes) : NULL;
    if (text != NULL)
        WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, bytes, NULL, NULL);
    return text;
}

/* Gives main() its arguments in UTF-8. They stay until the program ends. Those of the code page are converted if the C
 * library has put names of files in the place of a pattern. */
static inline void utf8_arguments(int argc, char **argv)
{
    int count = 0;
    wchar_t **given = CommandLineToArgvW(GetCommandLineW(), &count);
    for (int i = 0; i < argc; i++) {
        wchar_t *wide = given != NULL && count == argc ? given[i] : utf8_wide(CP_ACP, argv[i]);
        char *text = wide != NULL ? utf8_narrow(wide) : NULL;
        if (text != NULL)
            argv[i] = text;
        if (count != argc)
            free(wide);
    }
    LocalFree(given);
}

static inline FILE *utf8_fopen(const char *path, const char *mode)
{
    wchar_t *wide = utf8_wide(CP_UTF8, path), *how = utf8_wide(CP_UTF8, mode);
    FILE *file = wide != NULL && how != NULL ? _wfopen(wide, how) : NULL;
    free(wide);
    free(how);
    return file;
}

static inline int utf8_remove(const char *path)
{
    wchar_t *wide = utf8_wide(CP_UTF8, path);
    int result = wide != NULL ? _wremove(wide) : -1;
    free(wide);
    return result;
}

static inline int utf8_access(const char *path, int mode)
{
    wchar_t *wide = utf8_wide(CP_UTF8, path);
    int result = wide != NULL ? _waccess(wide, mode) : -1;
    free(wide);
    return result;
}

/* Returns the st_mode of a file; 0: there is none. */
static inline int utf8_mode(const char *path)
{
    struct _stat64 info;
    wchar_t *wide = utf8_wide(CP_UTF8, path);
    int mode = wide != NULL && _wstat64(wide, &info) == 0 ? info.st_mode : 0;
    free(wide);
    return mode;
}

/* Moves a file to a place, where it may replace another. */
static inline int utf8_rename(const char *from, const char *to)
{
    wchar_t *wide = utf8_wide(CP_UTF8, from), *place = utf8_wide(CP_UTF8, to);
    int good = wide != NULL && place != NULL && MoveFileExW(wide, place, MOVEFILE_REPLACE_EXISTING);
    free(wide);
    free(place);
    return good ? 0 : -1;
}

/* Makes a new file of a name that ends with XXXXXX, and writes that name. */
static inline int utf8_mkstemp(char *name)
{
    wchar_t *wide = utf8_wide(CP_UTF8, name), *made = wide != NULL ? _wmktemp(wide) : NULL;
    char *text = made != NULL ? utf8_narrow(made) : NULL;
    int fd = text != NULL ? _wopen(made, _O_RDWR | _O_CREAT | _O_EXCL | _O_BINARY, _S_IREAD | _S_IWRITE) : -1;
    if (fd >= 0)
        memcpy(name, text, strlen(name)); /* the letters in place of the X are of ASCII */
    free(text);
    free(wide);
    return fd;
}

static inline char *utf8_real_path(const char *path)
{
    wchar_t *wide = utf8_wide(CP_UTF8, path), *whole = wide != NULL ? _wfullpath(NULL, wide, 0) : NULL;
    char *text = whole != NULL ? utf8_narrow(whole) : NULL;
    free(whole);
    free(wide);
    return text;
}

#define fopen utf8_fopen
#define remove utf8_remove
#define access utf8_access
#define rename utf8_rename
#define mkstemp utf8_mkstemp
#else
#include <sys/stat.h>

static inline void utf8_arguments(int argc, char **argv)
{
    (void)argc;
    (void)argv;
}

static inline int utf8_mode(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 ? (int)info.st_mode : 0;
}
#endif

#endif
