/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_COMMAND_H
#define KVF_TOOLS_COMMAND_H

/**
 * @file
 * The subcommands of the program: a row of the table in kvferry.c and one function each.
 */

/** Exit codes of every command (docs/contracts.md). */
typedef enum kvf_exit {
    KVF_EXIT_DONE = 0,
    KVF_EXIT_FAILED = 1, /**< it ran and failed; one line on stderr says why and what to do */
    KVF_EXIT_USAGE = 2   /**< wrong usage or configuration */
} kvf_exit_t;

typedef struct kvf_command {
    const char *name;
    const char *help; /**< one line of `kvferry --help` */
    /**
     * @param argc, argv  The command's own; argv[0] is "kvferry NAME", for argp's texts. argp is
     * set up: --version is answered, and wrong usage exits with KVF_EXIT_USAGE.
     * @return The process's exit code, a kvf_exit_t.
     */
    int (*run)(int argc, char **argv);
} kvf_command_t;

/**
 * Become one of the programs that load UCX.
 *
 * @param program     "kvferry-node" | "kvferry-sim" | "kvferry-bench".
 * @param argc, argv  The command's own; argv[0] is not used and may be missing.
 * @param command     "prefill" | "decode" | "--version"; "sim"; "bench".
 * @return KVF_EXIT_FAILED when it cannot be run, otherwise not at all.
 */
int kvf_program_exec(const char *program, int argc, char **argv, const char *command);

/** `kvferry config`: tells about the configuration of a node. @return As kvf_command_t.run. */
int kvf_config_main(int argc, char **argv);

/** `kvferry keygen`: writes a cluster key. @return As kvf_command_t.run. */
int kvf_keygen_main(int argc, char **argv);

/** `kvferry plan`: a dry run, what would be moved and why. @return As kvf_command_t.run. */
int kvf_plan_main(int argc, char **argv);

/** `kvferry replay`: drives nodes with a trace, as an orchestrator would. @return As
 * kvf_command_t.run. */
int kvf_replay_main(int argc, char **argv);

#endif
