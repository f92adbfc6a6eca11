/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_SCRIPT_H
#define KVF_TOOLS_SIM_SCRIPT_H

/**
 * @file
 * What happens in one simulated run: its requests and faults, drawn from a seed before it starts.
 * Each item carries a seed of its own, so that one can be left out without changing the others.
 */

#include "tools/sim/dice.h"

#include <stddef.h>

/* X(NAME, "name"): the kinds of faults. */
#define KVF_FAULT_MAP(X)                                                                           \
    X(CUT, "cut")             /* control connections of two nodes break */                         \
    X(RECONNECT, "reconnect") /* the same, noticed at once: no transfer ends by it */              \
    X(PARTITION, "partition") /* nothing passes between two nodes for a while */                   \
    X(CRASH, "crash")         /* a process dies; another starts at its address, perhaps at once */ \
    X(PAUSE, "pause")         /* a process stands still, perhaps longer than it may be silent */   \
    X(SHUTDOWN, "shutdown")   /* a process ends in order, and starts again */                      \
    X(BREAK, "break")         /* the data path between two nodes breaks */                         \
    X(MEMORY, "memory")       /* allocations of a node fail */                                     \
    X(POST, "post")           /* a node's mover refuses and fails windows */                       \
    X(SLOW, "slow")           /* copies and digests take seconds */                                \
    X(LOSE, "lose")           /* windows are reported done although bytes never arrive */          \
    X(REPEAT, "repeat")       /* chunks arrive twice */                                            \
    X(FORGE, "forge")         /* somebody sends chunks of another transfer, or to other pages */   \
    X(FLIP_DATA, "flip_data") /* a bit of a chunk changes on its way */                            \
    X(FLIP_WORDS, "flip_words") /* a bit of a control frame changes on its way */

typedef enum kvf_fault {
#define KVF_FAULT_ENUM(name, text) KVF_FAULT_##name,
    KVF_FAULT_MAP(KVF_FAULT_ENUM)
#undef KVF_FAULT_ENUM
        KVF_FAULTS
} kvf_fault_t;

/** @return "cut" .. "flip_words". Static storage. */
const char *kvf_fault_name(kvf_fault_t fault);

/** A kind of run. */
typedef struct kvf_scenario {
    const char *name;
    const char *help;
    bool one_sided;              /**< the mover writes pages without their owner's check */
    uint32_t mapped;             /**< seeds in which nodes map each other's pools, per mille */
    bool ends;                   /**< requests are cancelled, time out, fail, are fetched twice */
    uint8_t weights[KVF_FAULTS]; /**< how often each fault is drawn, against the others */
} kvf_scenario_t;

/** @return The idx-th scenario, or NULL behind the last. Static storage. */
const kvf_scenario_t *kvf_scenario_at(size_t idx);
/** @return The scenario of a name, or NULL. */
const kvf_scenario_t *kvf_scenario_find(const char *name);

/** Most items of a run. */
#define KVF_SCRIPT_ITEMS 256
#define KVF_SCRIPT_REQUEST (-1)

typedef struct kvf_script_item {
    int fault; /**< a kvf_fault_t, or KVF_SCRIPT_REQUEST */
    uint64_t at_us;
    uint64_t seed; /**< of everything else about it */
    bool left_out;
} kvf_script_item_t;

typedef struct kvf_script {
    uint64_t seed;
    const kvf_scenario_t *scenario;
    uint32_t n_context, n_generation; /**< nodes */
    bool mapped;                      /**< nodes map each other's pools */
    bool both;                        /**< every node is of both sides */
    uint64_t end_us;                  /**< no fault lasts longer */
    size_t n_items;
    kvf_script_item_t items[KVF_SCRIPT_ITEMS];
} kvf_script_t;

/**
 * Draw a script.
 *
 * @param scenario  NULL: the seed chooses.
 * @param n_items   At most KVF_SCRIPT_ITEMS; 0: the seed chooses.
 */
void kvf_script_draw(uint64_t seed, const kvf_scenario_t *scenario, size_t n_items,
                     kvf_script_t *script_p);

#endif
