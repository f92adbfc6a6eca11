/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"
#include "tools/key.h"

#include <argp.h>
#include <stdio.h>

static error_t take(int key, char *arg, struct argp_state *state) {
    const char **path_p = state->input;
    if (key == ARGP_KEY_ARG && *path_p == NULL) {
        *path_p = arg;
    } else if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && *path_p == NULL)) {
        argp_usage(state);
    } else {
        return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
    }
    return 0;
}

int kvf_keygen_main(int argc, char **argv) {
    static const struct argp argp = {.parser = take,
                                     .args_doc = "FILE",
                                     .doc = "Write a new cluster key: 32 random bytes that all "
                                            "nodes of a cluster share. An existing "
                                            "file is never overwritten."};
    const char *path = NULL;
    kvf_detail_t detail;
    if (argp_parse(&argp, argc, argv, 0, NULL, &path) != 0) {
        return KVF_EXIT_USAGE;
    }
    if (kvf_key_create(path, &detail) != KVF_OK) {
        (void)fprintf(stderr, "kvferry keygen: %s\n", detail.text);
        return KVF_EXIT_FAILED;
    }
    return KVF_EXIT_DONE;
}
