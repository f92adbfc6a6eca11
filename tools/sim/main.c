/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/world.h"
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
             n = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    kvf_world_t *w = kvf_world_create();
    kvf_script_t script;
    kvf_outcome_t sum = {0}, one;
    for (uint64_t i = 0; i < n; i++) {
        kvf_script_draw(seed + i, argc > 3 ? kvf_scenario_find(argv[3]) : NULL, 0, &script);
        kvf_world_run(w, &script, n == 1 ? stdout : NULL, &one);
        kvf_outcome_add(&sum, &one);
        if (one.violation[0]) {
            printf("seed %lu %s: %s\n", (unsigned long)(seed + i), script.scenario->name,
                   one.violation);
        }
    }
    printf("events %lu sends %lu recvs %lu hash %lx\n", sum.events, sum.sends, sum.receives,
           sum.hash);
    for (int i = 0; i < KVF_WORLD_STATUSES; i++)
        if (sum.results[i])
            printf("  %s %lu\n", kvf_status_name(-i), sum.results[i]);
    kvf_world_destroy(w);
}
