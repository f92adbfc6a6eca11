/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_WORLD_H
#define KVF_TOOLS_SIM_WORLD_H

/**
 * @file
 * A simulated cluster: the real core on every node; time, connections, copies, memory and faults
 * are made up, from a seed. It checks after every event. Source: docs/safety.md "Simulator".
 *
 * One thread. Nothing depends on the clock, on addresses of memory or on earlier runs: the same
 * script gives the same run.
 */

#include "kvmgr/base/status.h"
#include "tools/sim/script.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct kvf_world kvf_world_t;

/** Results are counted by the status's number: [-status]. */
#define KVF_WORLD_STATUSES 96

/** What a run did and found. Can be added up over runs. */
typedef struct kvf_outcome {
    char violation[640]; /**< "" if there was none */
    uint64_t hash;       /**< of everything that happened, in order */
    uint64_t events;
    uint64_t virtual_us;
    uint64_t sends, receives; /**< that were accepted */
    uint64_t results[KVF_WORLD_STATUSES];
    uint64_t faults[KVF_FAULTS];
    uint64_t bytes_checked; /**< of pages that were compared with what they must hold */
    uint64_t copied_bytes;  /**< by receivers, from mapped pools */
    uint64_t fetched_bytes; /**< by receivers, through paths */
    uint64_t audits;
    uint64_t poisoned; /**< pages in released events */
} kvf_outcome_t;

/** @return A world, to run scripts in; NULL without memory. */
kvf_world_t *kvf_world_create(void);

/** NULL is allowed. */
void kvf_world_destroy(kvf_world_t *world);

/**
 * Run a script from a fresh start, until it is over and everything has come to rest, or until a
 * check fails.
 *
 * @param trace      NULL, or gets a line for each thing that happens.
 * @param outcome_p  Of this run alone.
 * @cost about 2 ms
 */
void kvf_world_run(kvf_world_t *world, const kvf_script_t *script, FILE *trace,
                   kvf_outcome_t *outcome_p);

/** Add a run to a sum; the hashes too, by their order. */
void kvf_outcome_add(kvf_outcome_t *sum, const kvf_outcome_t *run);

#endif
