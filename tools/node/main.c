/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"
#include "tools/node/node.h"

#include <argp.h>
#include <stdio.h>

#define MAX_SETTINGS 256

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
        argp_usage(state);
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

int kvf_prefill_main(int argc, char **argv) {
    return run(argc, argv, KVF_ROLE_PREFILL,
               "Run a prefill node: it computes KV caches and offers them to decode nodes. SIGTERM "
               "drains it; "
               "a second one stops it at once.");
}

int kvf_decode_main(int argc, char **argv) {
    return run(argc, argv, KVF_ROLE_DECODE,
               "Run a decode node: it fetches KV caches from prefill nodes and verifies them. "
               "SIGTERM drains "
               "it; a second one stops it at once.");
}
