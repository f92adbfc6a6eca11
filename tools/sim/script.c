/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/script.h"

#include <string.h>

static const kvf_scenario_t scenarios[] = {
    {.name = "calm", .help = "no faults: every request must succeed"},
    {.name = "ends",
     .mapped = 250,
     .help = "cancels, deadlines, tickets used twice; no faults",
     .ends = true},
    {.name = "reconnect",
     .mapped = 250,
     .help = "connections break and are made again: every request must succeed",
     .weights = {[KVF_FAULT_RECONNECT] = 1}},
    {.name = "network",
     .mapped = 250,
     .help = "connections break, nodes do not reach each other",
     .ends = true,
     .weights = {[KVF_FAULT_CUT] = 4,
                 [KVF_FAULT_PARTITION] = 3,
                 [KVF_FAULT_BREAK] = 2,
                 [KVF_FAULT_REPEAT] = 1,
                 [KVF_FAULT_SLOW] = 1}},
    {.name = "crash",
     .mapped = 250,
     .help = "processes die, and start again at the same address",
     .ends = true,
     .weights = {[KVF_FAULT_CRASH] = 4,
                 [KVF_FAULT_SHUTDOWN] = 1,
                 [KVF_FAULT_CUT] = 1,
                 [KVF_FAULT_SLOW] = 1}},
    {.name = "pause",
     .mapped = 250,
     .help = "processes stand still for longer than leases and heartbeats last",
     .ends = true,
     .weights = {[KVF_FAULT_PAUSE] = 4, [KVF_FAULT_CUT] = 1, [KVF_FAULT_SLOW] = 2}},
    {.name = "memory",
     .mapped = 250,
     .help = "allocations and posts fail",
     .ends = true,
     .weights = {[KVF_FAULT_MEMORY] = 4, [KVF_FAULT_POST] = 3, [KVF_FAULT_CUT] = 1}},
    {.name = "liar",
     .help = "completions that lie: handed over, and bytes are missing, twice or changed",
     .ends = true,
     .weights = {[KVF_FAULT_LOSE] = 3,
                 [KVF_FAULT_REPEAT] = 2,
                 [KVF_FAULT_FLIP_DATA] = 2,
                 [KVF_FAULT_FORGE] = 2,
                 [KVF_FAULT_SLOW] = 1,
                 [KVF_FAULT_BREAK] = 1}},
    {.name = "flips",
     .mapped = 100,
     .help = "bits of control frames change",
     .ends = true,
     .weights = {[KVF_FAULT_FLIP_WORDS] = 4, [KVF_FAULT_FLIP_DATA] = 1, [KVF_FAULT_CUT] = 1}},
    {.name = "onesided",
     .mapped = 100,
     .help = "a mover that writes without a check: only proofs let pages go",
     .one_sided = true,
     .ends = true,
     .weights = {[KVF_FAULT_CRASH] = 2,
                 [KVF_FAULT_PAUSE] = 2,
                 [KVF_FAULT_PARTITION] = 2,
                 [KVF_FAULT_CUT] = 2,
                 [KVF_FAULT_BREAK] = 2,
                 [KVF_FAULT_SLOW] = 4,
                 [KVF_FAULT_LOSE] = 1,
                 [KVF_FAULT_POST] = 1,
                 [KVF_FAULT_MEMORY] = 1}},
    {.name = "proofs",
     .help = "the same mover without faults: every proof comes, so no page is poisoned",
     .one_sided = true,
     .ends = true},
    {.name = "lent",
     .help = "receivers map their senders' pools and copy; no faults, no page is poisoned",
     .mapped = 1000,
     .ends = true},
    {.name = "mapped",
     .help = "the same with faults: copies that are slow, late, or of a process that is gone",
     .mapped = 1000,
     .ends = true,
     .weights = {[KVF_FAULT_CRASH] = 3,
                 [KVF_FAULT_PAUSE] = 3,
                 [KVF_FAULT_PARTITION] = 2,
                 [KVF_FAULT_CUT] = 2,
                 [KVF_FAULT_RECONNECT] = 1,
                 [KVF_FAULT_SHUTDOWN] = 1,
                 [KVF_FAULT_SLOW] = 6,
                 [KVF_FAULT_POST] = 1,
                 [KVF_FAULT_MEMORY] = 1}},
    {.name = "storm",
     .mapped = 250,
     .help = "everything at once",
     .ends = true,
     .weights = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
};

#define N_SCENARIOS (sizeof(scenarios) / sizeof(scenarios[0]))

const char *kvf_fault_name(kvf_fault_t fault) {
    static const char *const names[] = {
#define FAULT_NAME(name, text) text,
        KVF_FAULT_MAP(FAULT_NAME)
#undef FAULT_NAME
    };
    return (unsigned)fault < KVF_FAULTS ? names[fault] : "none";
}

const kvf_scenario_t *kvf_scenario_at(size_t idx) {
    return idx < N_SCENARIOS ? &scenarios[idx] : NULL;
}

const kvf_scenario_t *kvf_scenario_find(const char *name) {
    for (size_t i = 0; i < N_SCENARIOS; i++) {
        if (strcmp(scenarios[i].name, name) == 0) {
            return &scenarios[i];
        }
    }
    return NULL;
}

static int draw_fault(kvf_dice_t *dice, const kvf_scenario_t *scenario, uint64_t sum) {
    uint64_t at = kvf_dice_below(dice, sum);
    int fault = 0;
    while (at >= scenario->weights[fault]) {
        at -= scenario->weights[fault++];
    }
    return fault;
}

void kvf_script_draw(uint64_t seed, const kvf_scenario_t *scenario, size_t n_items,
                     kvf_script_t *script_p) {
    kvf_dice_t dice = {kvf_dice_mix(seed + 1)}, maps = {kvf_dice_mix(seed + 4)};
    uint64_t chosen = kvf_dice_below(&dice, N_SCENARIOS);
    uint64_t drawn = kvf_dice_between(&dice, 4, 16), sum = 0;
    if (scenario == NULL) {
        scenario = &scenarios[chosen];
    }
    n_items = n_items == 0 ? (size_t)drawn : n_items;
    n_items = n_items > KVF_SCRIPT_ITEMS ? KVF_SCRIPT_ITEMS : n_items;
    script_p->seed = seed;
    script_p->scenario = scenario;
    script_p->n_context = (uint32_t)kvf_dice_between(&dice, 1, kvf_dice_hit(&dice, 500) ? 1 : 3);
    script_p->n_generation = (uint32_t)kvf_dice_between(&dice, 1, kvf_dice_hit(&dice, 500) ? 1 : 3);
    script_p->mapped = kvf_dice_hit(&maps, scenario->mapped);
    script_p->both = kvf_dice_hit(&dice, 150);
    script_p->end_us = n_items * kvf_dice_between(&dice, 20000, 300000);
    script_p->n_items = n_items;
    for (int fault = 0; fault < KVF_FAULTS; fault++) {
        sum += scenario->weights[fault];
    }
    for (size_t i = 0; i < n_items; i++) {
        bool request = sum == 0 || i == 0 || kvf_dice_hit(&dice, 600);
        script_p->items[i] = (kvf_script_item_t){
            .fault = request ? KVF_SCRIPT_REQUEST : draw_fault(&dice, scenario, sum),
            .at_us = kvf_dice_below(&dice, script_p->end_us),
            .seed = kvf_dice_next(&dice),
        };
        /* Most faults come while a request is under way. */
        uint64_t near = script_p->items[kvf_dice_below(&dice, i + 1)].at_us +
                        kvf_dice_delay(&dice, 40000, 300000);
        if (!request && kvf_dice_hit(&dice, 700) && near < script_p->end_us) {
            script_p->items[i].at_us = near;
        }
    }
}
