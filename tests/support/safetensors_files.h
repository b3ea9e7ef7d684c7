/* Files for tests of safetensors: made of a header's text and some data, in memory or in a directory of this program's
 * own, which is gone when it ends. */
#ifndef DTRAIN_TEST_SAFETENSORS_FILES_H
#define DTRAIN_TEST_SAFETENSORS_FILES_H
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char files_directory[64];
static pid_t files_owner;

static void files_remove(const char *path)
{
    DIR *list = opendir(path);
    struct dirent *entry;
    char inner[512];
    while (list != NULL && (entry = readdir(list)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        if (unlink(inner) != 0)
            files_remove(inner);
    }
    if (list != NULL)
        closedir(list);
    rmdir(path);
}

static void files_clean(void)
{
    if (getpid() == files_owner)
        files_remove(files_directory);
}

/* A path in the directory. */
__attribute__((unused)) static const char *files_path(const char *name)
{
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    if (files_directory[0] == 0) {
        snprintf(files_directory, sizeof files_directory, "/tmp/dtrain-test-XXXXXX");
        if (mkdtemp(files_directory) == NULL)
            abort();
        files_owner = getpid();
        atexit(files_clean);
    }
    snprintf(path, sizeof paths[0], "%s/%s", files_directory, name);
    return path;
}

/* The entries of a directory but . and .. */
__attribute__((unused)) static int files_in(const char *path)
{
    DIR *list = opendir(path);
    int count = -2;
    while (list != NULL && readdir(list) != NULL)
        count++;
    if (list != NULL)
        closedir(list);
    return count;
}

__attribute__((unused)) static void files_write(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || (bytes > 0 && fwrite(data, bytes, 1, file) != 1) || fclose(file) != 0)
        TEST_FAIL("%s cannot be written", path);
}

/* Reads a whole file; its bytes go to the size, to be freed. */
__attribute__((unused)) static unsigned char *files_read(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    unsigned char *data = NULL;
    *bytes = 0;
    if (file == NULL)
        return NULL;
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    data = (unsigned char *)malloc(*bytes + 1);
    if (data != NULL && *bytes > 0 && fread(data, *bytes, 1, file) != 1)
        TEST_FAIL("%s cannot be read", path);
    fclose(file);
    return data;
}

/* A file of a header of `length` bytes and data_bytes of data, byte i of which is i modulo 251; to be freed. */
__attribute__((unused)) static unsigned char *files_make(const void *header, size_t length, size_t data_bytes,
                                                         size_t *bytes)
{
    unsigned char *file = (unsigned char *)malloc(8 + length + data_bytes + 1);
    if (file == NULL)
        abort();
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((unsigned long long)length >> (8 * i));
    memcpy(file + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + length + i] = (unsigned char)(i % 251);
    *bytes = 8 + length + data_bytes;
    return file;
}

#endif
