/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"
#include "tools/config.h"

#include <argp.h>

static error_t take(int key, char *arg, struct argp_state *state) {
    bool *defaults_p = state->input;
    switch (key) {
    case 'd':
        *defaults_p = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "options are all that it takes; %s is one argument too many", arg);
        return 0;
    case ARGP_KEY_END:
        if (!*defaults_p) {
            argp_error(state, "say what to do: --defaults");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int kvf_config_main(int argc, char **argv) {
    static const struct argp_option options[] = {
        {.name = "defaults", .key = 'd', .doc = "Print the whole commented configuration file"},
        {.name = NULL}};
    static const struct argp argp = {
        .options = options, .parser = take, .doc = "Tell about the configuration of a node."};
    bool defaults = false;
    if (argp_parse(&argp, argc, argv, 0, NULL, &defaults) != 0) {
        return KVF_EXIT_USAGE;
    }
    if (kvf_config_write_defaults(stdout) != KVF_OK) {
        (void)fprintf(stderr, "%s: cannot write to stdout\n", argv[0]);
        return KVF_EXIT_FAILED;
    }
    return KVF_EXIT_DONE;
}
