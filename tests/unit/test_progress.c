/* The progress lines of examples and tools on real pseudo-terminals: each redraws one line, and none is wider than the
 * terminal. */
#define _XOPEN_SOURCE 700
#define _DEFAULT_SOURCE
#include "dtrain.h"
#include "test.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <termios.h>

#define REPORT_PROGRAM "test_progress"
#include "examples/report.h"
#include "tools/tool.h"

/* What a terminal shows: a character beyond the last column starts a new line, and so does a newline. */
typedef struct screen {
    int columns, at, lines; /* lines that have begun below the first */
    char line[512];         /* the last one that has characters */
} screen;

static const char halved = 1; /* on the screen: it has become half as wide */

static void show(screen *s, char c)
{
    if (c == halved) {
        s->columns /= 2;
        return;
    }
    if (c == '\r') {
        s->at = 0;
        return;
    }
    if (c == '\n' || s->at == s->columns) {
        s->at = 0;
        s->lines++;
    }
    if (c == '\n')
        return;
    if (s->at == 0 && s->lines > 0)
        memset(s->line, 0, sizeof s->line);
    s->line[s->at++] = c;
}

static int descriptor; /* of the terminal, in the process that draws */

static void set_columns(int fd, int columns)
{
    struct winsize size = {24, 0, 0, 0};
    size.ws_col = (unsigned short)columns;
    CHECK_EQ(ioctl(fd, TIOCSWINSZ, &size), 0);
}

/* Runs `draw` in a process whose outputs are a terminal of so many columns; 0: it does not tell. The screen has `shown`
 * columns. */
static screen on_terminal(int columns, int shown, void (*draw)(void))
{
    screen s = {0, 0, 0, ""};
    int far, near = posix_openpt(O_RDWR | O_NOCTTY), status = -1;
    char bytes[4096];
    s.columns = shown;
    CHECK(near >= 0 && grantpt(near) == 0 && unlockpt(near) == 0);
    far = open(ptsname(near), O_RDWR | O_NOCTTY);
    CHECK(far >= 0);
    set_columns(far, columns);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(far, 1);
        dup2(far, 2);
        descriptor = far;
        draw();
        exit(test_failures != 0);
    }
    close(far);
    for (ssize_t got; (got = read(near, bytes, sizeof bytes)) > 0;) /* an error once no process holds the other side */
        for (ssize_t i = 0; i < got; i++)
            show(&s, bytes[i]);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    close(near);
    for (size_t end = strlen(s.line); end > 0 && s.line[end - 1] == ' ';)
        s.line[--end] = 0;
    return s;
}

/* The last text has 63 characters, so that a bar of 13 fills 79 columns; the others have up to 69. */
static void training(void)
{
    char text[128];
    for (long step = 1; step <= 40; step++) {
        snprintf(text, sizeof text, "%ld/40 loss 2.5000 lr 1.00e-03 norm 1.000 1000 tokens/s left %s%ld s", step,
                 step < 40 ? "1000" : "", 40 - step);
        report_step(text, step, 40);
    }
}

static void short_texts(void)
{
    for (long step = 1; step <= 4; step++)
        report_step(step < 4 ? "loss 2.500000000" : "loss 2", step, 4);
}

TEST(training_on_80_columns_is_one_line_with_a_bar)
{
    screen s = on_terminal(80, 80, training);
    CHECK_EQ(s.lines, 1); /* after the last step */
    CHECK(strcmp(s.line, "[#############] 40/40 loss 2.5000 lr 1.00e-03 norm 1.000 1000 tokens/s left 0 s") == 0);
}

TEST(training_on_40_columns_is_one_line_of_39)
{
    screen s = on_terminal(40, 40, training);
    CHECK_EQ(s.lines, 1);
    CHECK(strcmp(s.line, "40/40 loss 2.5000 lr 1.00e-03 norm 1.00") == 0);
}

TEST(a_short_text_covers_a_longer_one)
{
    screen s = on_terminal(80, 80, short_texts);
    CHECK_EQ(s.lines, 1);
    CHECK(strcmp(s.line, "[####################] loss 2") == 0);
}

TEST(the_terminal_is_believed_before_COLUMNS)
{
    setenv("COLUMNS", "200", 1);
    CHECK_EQ(on_terminal(40, 40, training).lines, 1);
    unsetenv("COLUMNS");
}

TEST(a_terminal_that_tells_no_width_has_COLUMNS_or_80)
{
    CHECK_EQ(on_terminal(0, 80, training).lines, 1);
    setenv("COLUMNS", "40", 1);
    CHECK_EQ(on_terminal(0, 40, training).lines, 1);
    unsetenv("COLUMNS");
}

TEST(a_terminal_of_one_column_shows_nothing)
{
    CHECK_EQ(on_terminal(1, 1, training).lines, 1);
}

static void become(int columns)
{
    set_columns(descriptor, columns);
    fputc(halved, stderr);
}

static void narrowed(void)
{
    for (int columns = 80; columns >= 20; columns /= 2) {
        progress_begin("plan", 0);
        progress_show(0, 0, "%s", "this line has 60 characters, and each redraw begins with it.");
        become(columns / 2);
    }
    progress_end();
}

TEST(a_tool_redraws_its_line_on_a_terminal_that_becomes_narrow)
{
    screen s = on_terminal(80, 80, narrowed);
    CHECK_EQ(s.columns, 10);
    CHECK_EQ(s.lines, 0);
    CHECK_EQ(s.at, 0);
}
