/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_SIM_ARENA_H
#define KVF_TOOLS_SIM_ARENA_H

/**
 * @file
 * Memory that is given back all at once: what a simulated run throws away at its end.
 */

#include <stddef.h>

typedef struct arena_block arena_block_t;

typedef struct arena {
    arena_block_t *first, *now; /**< blocks stay for the next run */
    size_t used;                /**< of `now` */
} arena_t;

/** @return bytes zeroed bytes, aligned for any type; ends the process without memory. */
void *arena_take(arena_t *arena, size_t bytes);

/** Everything that was taken is free again. */
void arena_reset(arena_t *arena);

/** Give the memory back to the system. */
void arena_cleanup(arena_t *arena);

#endif
