/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_RUNNER_H
#define KVF_TOOLS_SIM_RUNNER_H

/**
 * @file
 * Many runs, one after another; the first that fails is made short and told.
 */

#include "tools/sim/world.h"

typedef struct kvf_sim_request {
    uint64_t seed, n_seeds;
    size_t n_items;                 /**< of each run; 0: the seed chooses */
    const kvf_scenario_t *scenario; /**< NULL: the seed chooses */
    const char *keep;               /**< NULL, or the items that are not left out: "0,4,7" */
    bool trace;                     /**< tell all that happens, on stdout */
    bool shorten;                   /**< look for the shortest script that still fails */
} kvf_sim_request_t;

typedef struct kvf_sim_answer {
    kvf_outcome_t sum;    /**< sum.violation: of the run that failed, if one did */
    uint64_t n_runs;      /**< the one that failed included */
    uint64_t failed_seed; /**< if one did */
    const char *scenario; /**< its scenario */
    double seconds;       /**< of processor time */
} kvf_sim_answer_t;

/**
 * Run scripts until all are done or one fails. What failed goes to stderr: the seed, the violation,
 * how to run it again, and what happened in the shortened script.
 *
 * @param[out] answer_p  Written always.
 * @return Whether nothing failed. (An answer that cannot be had, such as a list of items that is
 * none, is a failure.)
 * @thread One in a process: it catches SIGABRT and SIGPROF.
 */
bool kvf_sim_run(const kvf_sim_request_t *request, kvf_sim_answer_t *answer_p);

#endif
