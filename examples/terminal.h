/* The width of the terminal, for the progress lines of examples and tools. */
#ifndef TERMINAL_H
#define TERMINAL_H

#include <stdlib.h>
#ifdef _WIN32
#include <io.h>
#include <windows.h>
#else
#include <sys/ioctl.h>
#endif

/* Returns how many columns a line on the terminal of a descriptor may use. A line that fills the last column starts a
 * new one on some terminals, so it leaves that column free. If the terminal does not tell its width, $COLUMNS does; if
 * that is not set, 80 is assumed. */
static inline int terminal_room(int fd)
{
    const char *set = getenv("COLUMNS");
    int columns = 0;
#ifdef _WIN32
    CONSOLE_SCREEN_BUFFER_INFO info;
    if (GetConsoleScreenBufferInfo((HANDLE)_get_osfhandle(fd), &info))
        columns = info.srWindow.Right - info.srWindow.Left + 1;
#elif defined(TIOCGWINSZ)
    struct winsize size = {0, 0, 0, 0};
    if (ioctl(fd, TIOCGWINSZ, &size) == 0)
        columns = size.ws_col;
#else
    (void)fd;
#endif
    if (columns < 1)
        columns = set != NULL && atoi(set) > 0 ? atoi(set) : 80;
    return columns - 1;
}

#endif
