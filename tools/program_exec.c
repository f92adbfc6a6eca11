/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes, the simulator and the benchmark are programs of their own, kvferry-node, kvferry-sim and
 * kvferry-bench: they load UCX, whose memory hooks cost 0.4 s of CPU before main() unless they are
 * switched off in the environment before the library is loaded. The other commands do not need UCX
 * at all. */
#include "tools/command.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where it is: beside this program (a build folder), or where it was installed. */
static void find_program(const char *name, char *path, size_t cap) {
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *slash = NULL;
    if (n > 0) {
        self[n] = '\0';
        slash = strrchr(self, '/');
    }
    if (slash != NULL) {
        slash[1] = '\0';
        if ((size_t)snprintf(path, cap, "%s%s", self, name) < cap && access(path, X_OK) == 0) {
            return;
        }
    }
    (void)snprintf(path, cap, "%s/%s", KVF_LIBEXECDIR, name);
}

int kvf_program_exec(const char *program, int argc, char **argv, const char *command) {
    char path[PATH_MAX];
    char **args = calloc((size_t)argc + 2, sizeof(*args));
    char *self = strdup(program), *name = strdup(command);
    if (args == NULL || self == NULL || name == NULL) {
        free(args);
        free(self);
        free(name);
        (void)fprintf(stderr, "kvferry: no memory\n");
        return KVF_EXIT_FAILED;
    }
    args[0] = self;
    args[1] = name;
    for (int i = 1; i < argc; i++) {
        args[i + 1] = argv[i];
    }
    find_program(program, path, sizeof(path));
    (void)setenv("UCX_MEM_MMAP_HOOK_MODE", "none", 0);
    (void)execv(path, args);
    (void)fprintf(stderr, "kvferry: cannot run %s: %s; build or install the whole program\n", path,
                  strerror(errno));
    free(args);
    free(self);
    free(name);
    return KVF_EXIT_FAILED;
}
