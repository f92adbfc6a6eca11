/* SPDX-License-Identifier: Apache-2.0 */
#include "mappings.h"

#include "kernels/digest.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_MAPPINGS 256
#define MAX_KEPT 256

typedef enum mapping_state {
    MAPPING_ASKED,    /* the owner has not read it yet */
    MAPPING_ANSWERED, /* who maps has not read the answer yet */
    MAPPING_READY,
    MAPPING_ENDED, /* the owner has not noticed yet */
    MAPPING_OVER
} mapping_state_t;

struct mapping {
    mapping_state_t state;
    const node_t *node;
    uint64_t life;
    kvf_incarnation_t who; /* the node's, then */
    uint64_t peer;         /* its number for the owner */
    node_t *owner;
    uint64_t owner_life;
    uint8_t *memory[KVF_MAX_GROUPS];
    uint64_t lent; /* the owner's number for the node; 0: it got nothing */
    bool gone;     /* unmap was called */
    uint32_t n_users;
};

struct mappings {
    map_fate_t fate;
    bool hold_returned;
    mapping_t all[MAX_MAPPINGS];
    size_t n;
    uint8_t *kept[MAX_KEPT];
    size_t n_kept;
};

mappings_t *mappings_create(void) {
    return calloc(1, sizeof(mappings_t));
}

void mappings_destroy(mappings_t *m) {
    for (size_t i = 0; m != NULL && i < m->n_kept; i++) {
        free(m->kept[i]);
    }
    free(m);
}

void mappings_keep(mappings_t *m, uint8_t *memory) {
    cr_assert(m->n_kept < MAX_KEPT);
    m->kept[m->n_kept++] = memory;
}

static bool runs(const node_t *node, uint64_t life) {
    return node->core != NULL && node->life == life && !node->stopped;
}

/* The owner reads who asks. */
static void answer(const mappings_t *m, mapping_t *mapping) {
    if (mapping->state != MAPPING_ASKED || m->fate == MAP_SILENT) {
        return;
    }
    if (mapping->owner->life != mapping->owner_life || mapping->owner->core == NULL ||
        m->fate == MAP_FAILS) {
        mapping->state = MAPPING_ANSWERED; /* its socket is closed */
    } else if (!mapping->owner->stopped) {
        mapping->lent = kvf_core_lend(mapping->owner->core, &mapping->who);
        mapping->state = MAPPING_ANSWERED;
    }
}

kvf_status_t mappings_map(mappings_t *m, node_t *node, uint64_t peer, const void *address,
                          size_t bytes, const int64_t *n_pages, kvf_detail_t *detail) {
    mappings_address_t parts;
    cr_assert_eq(bytes, sizeof(parts));
    cr_assert(m->n < MAX_MAPPINGS);
    memcpy(&parts, address, sizeof(parts));
    if (m->fate == MAP_IS_REFUSED) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "it is on another machine");
    }
    node_t *owner = cluster_find(node->cluster, parts.number);
    mapping_t *mapping = &m->all[m->n++];
    *mapping = (mapping_t){.state = MAPPING_ASKED,
                           .node = node,
                           .life = node->life,
                           .who = *kvf_core_incarnation(node->core),
                           .peer = peer,
                           .owner = owner,
                           .owner_life = parts.life};
    memcpy(mapping->memory, owner->memory, sizeof(mapping->memory));
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        cr_expect_eq(n_pages[g], owner->n_pages);
    }
    answer(m, mapping);
    return KVF_OK;
}

static void end(mapping_t *mapping) {
    mapping->state = mapping->lent == 0 ? MAPPING_OVER : MAPPING_ENDED;
}

static mapping_t *find(mappings_t *m, const node_t *node, uint64_t peer) {
    for (size_t i = 0; i < m->n; i++) {
        mapping_t *mapping = &m->all[i];
        if (mapping->node == node && mapping->life == node->life && mapping->peer == peer &&
            !mapping->gone && mapping->state < MAPPING_ENDED) {
            return mapping;
        }
    }
    return NULL;
}

void mappings_unmap(mappings_t *m, const node_t *node, uint64_t peer) {
    mapping_t *mapping = find(m, node, peer);
    cr_assert_not_null(mapping, "what was not mapped is unmapped");
    answer(m, mapping); /* asked is asked */
    mapping->gone = true;
    if (mapping->n_users == 0) {
        end(mapping);
    }
}

void mappings_use(mappings_t *m, const node_t *node, kvf_verify_t *job) {
    mapping_t *mapping = find(m, node, job->peer);
    cr_assert_not_null(mapping);
    cr_assert_eq(mapping->state, MAPPING_READY, "a copy from pools that are not mapped");
    mapping->n_users++;
    job->source = mapping;
}

void mappings_run(node_t *node, kvf_verify_t *job) {
    mapping_t *mapping = job->source;
    for (uint32_t i = 0; i < job->n_items; i++) {
        kvf_verify_item_t *item = &job->items[i];
        uint8_t *to = node_page(node, item->group_idx, item->slot) + item->offset;
        if (mapping != NULL) {
            cr_assert(item->source_slot >= 0 && item->source_slot < mapping->owner->n_pages);
            uint64_t page = kvf_group_block_bytes(&node->layout.groups[item->group_idx]);
            cr_assert(item->offset + item->bytes <= page);
            memcpy(to,
                   mapping->memory[item->group_idx] + (uint64_t)item->source_slot * page +
                       item->offset,
                   item->bytes);
        }
        if (mapping == NULL && item->landing != NULL) {
            memcpy(to, item->landing, item->bytes);
        }
        item->digest = !job->digests          ? 0
                       : item->leaves != NULL ? kvf_digest_of_hashes(item->leaves, item->bytes)
                                              : kvf_digest(to, item->bytes);
    }
    if (mapping != NULL && --mapping->n_users == 0 && mapping->gone) {
        end(mapping);
    }
    kvf_core_verified(node->core, job);
}

void mappings_drop(mappings_t *m, const node_t *node) {
    for (size_t i = 0; i < m->n; i++) {
        if (m->all[i].node == node && m->all[i].life == node->life &&
            m->all[i].state < MAPPING_ENDED) {
            end(&m->all[i]);
        }
    }
}

bool mappings_step(mappings_t *m, const node_t *node) {
    bool any = false;
    for (size_t i = 0; i < m->n; i++) {
        mapping_t *mapping = &m->all[i];
        if (mapping->state == MAPPING_ANSWERED && mapping->node == node &&
            runs(node, mapping->life)) {
            bool well = mapping->lent != 0;
            mapping->state = well ? MAPPING_READY : MAPPING_OVER;
            kvf_core_mapped(node->core, mapping->peer, well ? KVF_OK : KVF_ERR_IO,
                            well ? "" : "it refused");
            any = true;
        }
        if (mapping->owner != node || node->stopped) {
            continue;
        }
        if (mapping->state == MAPPING_ASKED) {
            answer(m, mapping);
            any |= mapping->state != MAPPING_ASKED;
        } else if (mapping->state == MAPPING_ENDED && !m->hold_returned) {
            mapping->state = MAPPING_OVER;
            if (runs(node, mapping->owner_life)) {
                kvf_core_returned(node->core, mapping->lent);
                any = true;
            }
        }
    }
    return any;
}

/* ---- for tests ---- */

void cluster_map_fate(cluster_t *cluster, map_fate_t fate) {
    cluster_mappings(cluster)->fate = fate;
}

void cluster_hold_returned(cluster_t *cluster, bool hold) {
    cluster_mappings(cluster)->hold_returned = hold;
}
