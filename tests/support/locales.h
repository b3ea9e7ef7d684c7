/* For tests in another locale: one whose decimal point is U+066B, two bytes in UTF-8. Include test.h first. */
#ifndef DTRAIN_TEST_LOCALES_H
#define DTRAIN_TEST_LOCALES_H

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Sets that locale. Where the system's localedef does not make it, says so and returns 0. */
static int locale_of_two_bytes(void)
{
    static const char *const copied[] = {"LC_CTYPE", "LC_COLLATE", "LC_MONETARY", "LC_TIME", "LC_MESSAGES"};
    char directory[] = "/tmp/dtrain-locale-XXXXXX", command[400];
    FILE *file;
    int made = 0;
    if (mkdtemp(directory) == NULL)
        return 0;
    snprintf(command, sizeof command, "%s/point", directory);
    file = fopen(command, "w");
    for (int i = 0; file != NULL && i < 5; i++)
        fprintf(file, "%s\ncopy \"POSIX\"\nEND %s\n", copied[i], copied[i]);
    if (file != NULL) {
        fprintf(file, "LC_NUMERIC\ndecimal_point \"<U066B>\"\nthousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n");
        fclose(file);
        snprintf(command, sizeof command, "cd %s && localedef -c -i ./point -f UTF-8 ./point.UTF-8 >/dev/null 2>&1",
                 directory);
        if (system(command) >= 0 && setenv("LOCPATH", directory, 1) == 0)
            made = setlocale(LC_NUMERIC, "point.UTF-8") != NULL;
    }
    snprintf(command, sizeof command, "rm -rf %s", directory);
    if (system(command) != 0 || !made)
        printf("skipped: a locale whose decimal point has two bytes (no localedef that makes it)\n");
    return made;
}

#endif
