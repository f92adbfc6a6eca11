/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target over the files of folders, without libFuzzer: so a corpus is an ordinary test.
 * An input that breaks a property ends the process with its name as the last line on stderr.
 */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

/* An exact allocation for each input, so that a sanitizer sees the first byte past it. @return
 * Whether it was run. */
static int replay_file(const char *path) {
    struct stat info;
    FILE *file = fopen(path, "rb");
    if (file == NULL || fstat(fileno(file), &info) != 0) {
        perror(path);
        exit(2);
    }
    if (!S_ISREG(info.st_mode)) {
        (void)fclose(file);
        return 0;
    }
    size_t bytes = (size_t)info.st_size;
    uint8_t *data = malloc(bytes > 0 ? bytes : 1);
    if (data == NULL || fread(data, 1, bytes, file) != bytes) {
        perror(path);
        exit(2);
    }
    (void)fclose(file);
    (void)fprintf(stderr, "%s, %zu bytes\n", path, bytes);
    (void)LLVMFuzzerTestOneInput(data, bytes);
    free(data);
    return 1;
}

static int replay_folder(const char *folder) {
    DIR *dir = opendir(folder);
    if (dir == NULL) {
        perror(folder);
        exit(2);
    }
    int n = 0;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name) < (int)sizeof(path)) {
            n += replay_file(path);
        }
    }
    (void)closedir(dir);
    return n;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (replay_folder(argv[i]) == 0) {
            (void)fprintf(stderr, "%s: no input in it\n", argv[i]);
            return 2;
        }
    }
    return argc > 1 ? 0 : 2;
}
