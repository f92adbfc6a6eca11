/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"
#include "tools/node/node.h"

#include <argp.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>

#define MAX_SETTINGS 256

/* Behind the options, which is what the vertical tab says. */
#define KEYS_HELP                                                                                  \
    "\v`kvferry config --defaults` prints a configuration file with every KEY, what it means and " \
    "its default."

typedef struct options {
    const char *config;
    const char *settings[MAX_SETTINGS];
    size_t n_settings;
} options_t;

static error_t take(int key, char *arg, struct argp_state *state) {
    options_t *options = state->input;
    switch (key) {
    case 'c':
        options->config = arg;
        return 0;
    case 's':
        if (options->n_settings == MAX_SETTINGS) {
            argp_error(state, "more than %d times --set", MAX_SETTINGS);
        }
        options->settings[options->n_settings++] = arg;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "options are all that it takes; %s is one argument too many", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static kvf_status_t load(const options_t *options, kvf_config_t *config, kvf_detail_t *detail) {
    kvf_status_t status = KVF_OK;
    if (options->config != NULL) {
        status = kvf_config_read(config, options->config, detail);
    }
    for (size_t i = 0; status == KVF_OK && i < options->n_settings; i++) {
        status = kvf_config_set(config, options->settings[i], detail);
    }
    return status == KVF_OK ? kvf_config_check(config, detail) : status;
}

static int run(int argc, char **argv, kvf_role_t role, const char *doc) {
    static const struct argp_option arguments[] = {
        {.name = "config",
         .key = 'c',
         .arg = "FILE",
         .doc = "Read the configuration from FILE (YAML)"},
        {.name = "set",
         .key = 's',
         .arg = "KEY=VALUE",
         .doc = "Override a key of the configuration; may be repeated"},
        {.name = NULL}};
    struct argp argp = {.options = arguments, .parser = take, .doc = doc};
    const kvf_alloc_t *alloc = kvf_alloc_default();
    options_t options = {.config = NULL};
    kvf_config_t config;
    kvf_detail_t detail;
    if (argp_parse(&argp, argc, argv, 0, NULL, &options) != 0) {
        return KVF_EXIT_USAGE;
    }
    kvf_status_t status = kvf_config_init(alloc, &config, &detail);
    if (status != KVF_OK) {
        (void)fprintf(stderr, "%s: %s\n", argv[0], detail.text);
        return KVF_EXIT_FAILED;
    }
    int code = KVF_EXIT_USAGE;
    status = load(&options, &config, &detail);
    if (status == KVF_OK) {
        code = kvf_node_run(alloc, &config, role);
    } else {
        (void)fprintf(stderr, "%s: %s\n", argv[0], detail.text);
    }
    kvf_config_cleanup(&config);
    return code;
}

static void print_version(FILE *stream, struct argp_state *state) {
    (void)state;
    (void)fprintf(stream, "%s\n", kvf_version());
}

/* Run by `kvferry prefill` and the like, with the command as its first argument
 * (tools/node_exec.c). */
int main(int argc, char **argv) {
    char prefill[] = "kvferry prefill", decode[] = "kvferry decode";
    const char *command = argc < 2 ? "" : argv[1];
    /* UCX's buffers of a path go back to the system when it ends. By itself glibc keeps blocks of
     * up to 32 MiB in its heaps as soon as one such was freed. */
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 20);
    argp_err_exit_status = KVF_EXIT_USAGE;
    argp_program_version_hook = print_version;
    if (strcmp(command, "prefill") == 0) {
        argv[1] = prefill;
        return run(argc - 1, argv + 1, KVF_ROLE_PREFILL,
                   "Run a prefill node: it computes KV caches and offers them to decode nodes. "
                   "SIGTERM drains it; a second one stops it at once." KEYS_HELP);
    }
    if (strcmp(command, "decode") == 0) {
        argv[1] = decode;
        return run(argc - 1, argv + 1, KVF_ROLE_DECODE,
                   "Run a decode node: it fetches KV caches from prefill nodes and verifies them. "
                   "SIGTERM drains it; a second one stops it at once." KEYS_HELP);
    }
    if (strcmp(command, "--version") == 0) {
        print_version(stdout, NULL);
        return KVF_EXIT_DONE;
    }
    (void)fprintf(stderr, "kvferry-node: run `kvferry prefill` or `kvferry decode` instead\n");
    return KVF_EXIT_USAGE;
}
