/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES ((size_t)256 * 1024)

struct arena_block {
    struct arena_block *next;
    size_t bytes;
    _Alignas(max_align_t) unsigned char data[];
};

static arena_block_t *add_block(size_t bytes) {
    size_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
    arena_block_t *block = malloc(sizeof(*block) + room);
    if (block == NULL) {
        (void)fprintf(stderr, "kvferry sim: no memory\n");
        exit(1);
    }
    *block = (arena_block_t){.bytes = room};
    return block;
}

void *arena_take(arena_t *arena, size_t bytes) {
    size_t align = _Alignof(max_align_t);
    bytes = (bytes + align - 1) / align * align;
    if (arena->now == NULL) {
        arena->first = arena->now = add_block(bytes);
        arena->used = 0;
    }
    while (arena->used + bytes > arena->now->bytes) {
        if (arena->now->next == NULL) {
            arena->now->next = add_block(bytes);
        }
        arena->now = arena->now->next;
        arena->used = 0;
    }
    void *at = arena->now->data + arena->used;
    arena->used += bytes;
    return memset(at, 0, bytes);
}

void arena_reset(arena_t *arena) {
    arena->now = arena->first;
    arena->used = 0;
}

void arena_cleanup(arena_t *arena) {
    while (arena->first != NULL) {
        arena_block_t *block = arena->first;
        arena->first = block->next;
        free(block);
    }
    *arena = (arena_t){0};
}
