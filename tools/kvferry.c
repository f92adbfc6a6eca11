/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/command.h"
#include "tools/nearest.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAME 32

static int run_prefill(int argc, char **argv) {
    return kvf_program_exec("kvferry-node", argc, argv, "prefill");
}

static int run_decode(int argc, char **argv) {
    return kvf_program_exec("kvferry-node", argc, argv, "decode");
}

static int run_sim(int argc, char **argv) {
    return kvf_program_exec("kvferry-sim", argc, argv, "sim");
}

static int run_bench(int argc, char **argv) {
    return kvf_program_exec("kvferry-bench", argc, argv, "bench");
}

static const kvf_command_t commands[] = {
    {"prefill", "run a prefill node", run_prefill},
    {"decode", "run a decode node", run_decode},
    {"config", "print the commented configuration of a node", kvf_config_main},
    {"keygen", "write a new cluster key", kvf_keygen_main},
    {"plan", "say what would be moved, and why, without moving it", kvf_plan_main},
    {"replay", "drive prefill and decode nodes with a trace of requests", kvf_replay_main},
    {"bench", "measure a mover between two processes", run_bench},
    {"sim", "run whole clusters under the simulator", run_sim},
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

/* The program that loads UCX knows its version, too. */
static void print_version(FILE *stream, struct argp_state *state) {
    (void)stream;
    (void)state;
    exit(kvf_program_exec("kvferry-node", 1, NULL, "--version"));
}

static void print_help(FILE *stream) {
    (void)fprintf(stream, "Usage: kvferry COMMAND [OPTION...]\n"
                          "Move the KV cache of requests from prefill to decode workers.\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++) {
        (void)fprintf(stream, "  %-10s %s\n", commands[i].name, commands[i].help);
    }
    (void)fprintf(stream,
                  "\n`kvferry COMMAND --help` tells the options of a command; `kvferry --version` "
                  "the version.\nExit codes: 0 done, 1 it ran and failed, 2 wrong usage or "
                  "configuration.\n");
}

static int fail_unknown(const char *name) {
    const char *nearest = commands[0].name;
    for (size_t i = 1; i < N_COMMANDS; i++) {
        if (kvf_nearest_distance(name, commands[i].name) < kvf_nearest_distance(name, nearest)) {
            nearest = commands[i].name;
        }
    }
    (void)fprintf(stderr,
                  "kvferry: there is no command %s; did you mean %s? `kvferry --help` lists all\n",
                  name, nearest);
    return KVF_EXIT_USAGE;
}

int main(int argc, char **argv) {
    argp_err_exit_status = KVF_EXIT_USAGE;
    argp_program_version_hook = print_version;
    if (argc < 2) {
        print_help(stderr);
        return KVF_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-?") == 0 || strcmp(name, "help") == 0) {
        print_help(stdout);
        return KVF_EXIT_DONE;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        print_version(stdout, NULL);
        return KVF_EXIT_DONE;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i].name) == 0) {
            char full[MAX_NAME];
            (void)snprintf(full, sizeof(full), "kvferry %s", name);
            argv[1] = full;
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    return fail_unknown(name);
}
