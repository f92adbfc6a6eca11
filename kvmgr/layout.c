/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/layout.h"

#include "kvmgr/base/cursor.h"
#include "kvmgr/base/size.h"

#include <inttypes.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* A group in the digest: its name, ten 32-bit and two 64-bit numbers, and the layer ids. */
#define DIGEST_GROUP_BYTES (KVF_GROUP_NAME_BYTES + 10 * 4 + 2 * 8 + KVF_MAX_GROUP_LAYERS * 4)

static const struct {
    uint32_t bytes;
    const char *name;
} dtypes[] = {
    [KVF_DTYPE_F32] = {4, "f32"},
    [KVF_DTYPE_F16] = {2, "f16"},
    [KVF_DTYPE_BF16] = {2, "bf16"},
    [KVF_DTYPE_F8_E4M3] = {1, "f8_e4m3"},
};

#define N_DTYPES (sizeof(dtypes) / sizeof(dtypes[0]))

uint32_t kvf_dtype_bytes(kvf_dtype_t dtype) {
    return dtypes[dtype].bytes;
}

const char *kvf_dtype_name(kvf_dtype_t dtype) {
    return dtypes[dtype].name;
}

static bool name_ok(const char *name) {
    size_t n = strnlen(name, KVF_GROUP_NAME_BYTES);
    for (size_t i = 0; i < n; i++) {
        if (name[i] <= ' ' || name[i] > '~') {
            return false;
        }
    }
    return n > 0 && n < KVF_GROUP_NAME_BYTES;
}

static kvf_status_t check_number(const kvf_layer_group_t *group, const char *field, int64_t value,
                                 int64_t least, int64_t most, kvf_detail_t *detail) {
    if (value >= least && value <= most) {
        return KVF_OK;
    }
    return kvf_fail(detail, KVF_ERR_INVALID,
                    "group %s: %s is %" PRId64 "; give a number from %" PRId64 " to %" PRId64,
                    group->name, field, value, least, most);
}

static kvf_status_t check_fields(const kvf_layer_group_t *group, kvf_detail_t *detail) {
    const struct {
        const char *name;
        int64_t value;
        int64_t least;
        int64_t most;
    } fields[] = {
        {"n_layers", group->n_layers, 1, KVF_MAX_GROUP_LAYERS},
        {"window", group->window, 0, KVF_MAX_TOKENS},
        {"sinks", group->sinks, 0, KVF_MAX_TOKENS},
        {"tokens_per_block", group->tokens_per_block, 1, UINT32_MAX},
        {"kv_heads", group->kv_heads, 1, UINT32_MAX},
        {"head_dim", group->head_dim, 1, UINT32_MAX},
        {"kv_factor", group->kv_factor, 1, 2},
        {"dtype", (int64_t)group->dtype, 0, N_DTYPES - 1},
        {"order", (int64_t)group->order, KVF_ORDER_HND, KVF_ORDER_NHD},
        {"kind", (int64_t)group->kind, KVF_GROUP_PAGED, KVF_GROUP_STATE},
        {"role", (int64_t)group->role, KVF_GROUP_TARGET, KVF_GROUP_DRAFT},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        kvf_status_t status = check_number(group, fields[i].name, fields[i].value, fields[i].least,
                                           fields[i].most, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

static kvf_status_t check_bytes(const kvf_layer_group_t *group, kvf_detail_t *detail) {
    const uint64_t factors[] = {group->n_layers, group->kv_factor, group->kv_heads,
                                group->tokens_per_block, group->head_dim};
    uint64_t bytes = kvf_dtype_bytes(group->dtype);
    for (size_t i = 0; i < sizeof(factors) / sizeof(factors[0]); i++) {
        if (kvf_mul_u64(bytes, factors[i], &bytes) != KVF_OK) {
            return kvf_fail(
                detail, KVF_ERR_INVALID,
                "group %s: a block is larger than 2^64 bytes; check n_layers, kv_heads, "
                "tokens_per_block and head_dim",
                group->name);
        }
    }
    return KVF_OK;
}

static kvf_status_t check_group(const kvf_layer_group_t *group, kvf_detail_t *detail) {
    kvf_status_t status = check_fields(group, detail);
    if (status == KVF_OK) {
        status = check_bytes(group, detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t i = 1; i < group->n_layers; i++) {
        if (group->layers[i] <= group->layers[i - 1]) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s: layer %" PRIu32 " follows %" PRIu32
                            "; list layers in ascending order",
                            group->name, group->layers[i], group->layers[i - 1]);
        }
    }
    if (group->kind == KVF_GROUP_STATE) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "group %s: kind is state; this version carries paged groups only",
                        group->name);
    }
    return KVF_OK;
}

/* Two checked groups must differ in name and share no layer. */
static kvf_status_t check_two(const kvf_layer_group_t *a, const kvf_layer_group_t *b,
                              kvf_detail_t *detail) {
    if (strcmp(a->name, b->name) == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "group %s: the name is used twice", a->name);
    }
    for (uint32_t i = 0, j = 0; i < a->n_layers && j < b->n_layers;) {
        if (a->layers[i] == b->layers[j]) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group %s: layer %" PRIu32 " belongs to group %s already", b->name,
                            b->layers[j], a->name);
        }
        if (a->layers[i] < b->layers[j]) {
            i++;
        } else {
            j++;
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_layout_check(const kvf_layout_t *layout, kvf_detail_t *detail) {
    if (layout->n_groups < 1 || layout->n_groups > KVF_MAX_GROUPS) {
        return kvf_fail(detail, KVF_ERR_INVALID, "the layout has %" PRIu32 " groups; give 1 to %d",
                        layout->n_groups, KVF_MAX_GROUPS);
    }
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        if (!name_ok(group->name)) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "group number %" PRIu32
                            ": the name must be 1 to %d printable characters without space",
                            g, KVF_GROUP_NAME_BYTES - 1);
        }
        kvf_status_t status = check_group(group, detail);
        for (uint32_t before = 0; status == KVF_OK && before < g; before++) {
            status = check_two(&layout->groups[before], group, detail);
        }
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

uint64_t kvf_group_layer_bytes(const kvf_layer_group_t *group) {
    return (uint64_t)group->kv_factor * group->kv_heads * group->tokens_per_block *
           group->head_dim * kvf_dtype_bytes(group->dtype);
}

uint64_t kvf_group_block_bytes(const kvf_layer_group_t *group) {
    return group->n_layers * kvf_group_layer_bytes(group);
}

uint64_t kvf_group_offset(const kvf_layer_group_t *group, uint32_t layer_idx, uint32_t kv,
                          uint32_t head, uint32_t token) {
    uint64_t vector = (uint64_t)group->head_dim * kvf_dtype_bytes(group->dtype);
    uint64_t heads = group->kv_heads, tokens = group->tokens_per_block;
    uint64_t inner = group->order == KVF_ORDER_HND ? head * tokens + token : token * heads + head;
    return (((uint64_t)layer_idx * group->kv_factor + kv) * heads * tokens + inner) * vector;
}

/* How many of the group's layers have a global id below the bound. */
static uint32_t layers_below(const kvf_layer_group_t *group, uint32_t bound) {
    uint32_t low = 0, high = group->n_layers;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (group->layers[middle] < bound) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void kvf_group_layer_span(const kvf_layer_group_t *group, uint32_t first, uint32_t end,
                          uint32_t *first_idx_p, uint32_t *end_idx_p) {
    uint32_t first_idx = layers_below(group, first);
    uint32_t end_idx = layers_below(group, end);
    *first_idx_p = first_idx;
    *end_idx_p = end_idx > first_idx ? end_idx : first_idx;
}

uint64_t kvf_layout_digest(const kvf_layout_t *layout) {
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    (void)XXH3_64bits_reset(&state);
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        const kvf_layer_group_t *group = &layout->groups[g];
        /* Little-endian and zero-padded, so that the digest is the same on every machine. */
        uint8_t raw[DIGEST_GROUP_BYTES];
        char name[KVF_GROUP_NAME_BYTES] = {0};
        memcpy(name, group->name, strnlen(group->name, sizeof(name)));
        kvf_writer_t w = kvf_writer(raw, sizeof(raw));
        kvf_write_bytes(&w, name, sizeof(name));
        kvf_write_u32(&w, group->n_layers);
        for (uint32_t i = 0; i < group->n_layers; i++) {
            kvf_write_u32(&w, group->layers[i]);
        }
        kvf_write_u64(&w, (uint64_t)group->window);
        kvf_write_u64(&w, (uint64_t)group->sinks);
        kvf_write_u32(&w, group->tokens_per_block);
        kvf_write_u32(&w, group->kv_heads);
        kvf_write_u32(&w, group->head_dim);
        kvf_write_u32(&w, group->kv_factor);
        kvf_write_u32(&w, (uint32_t)group->dtype);
        kvf_write_u32(&w, (uint32_t)group->order);
        kvf_write_u32(&w, (uint32_t)group->kind);
        kvf_write_u32(&w, (uint32_t)group->role);
        (void)XXH3_64bits_update(&state, raw, sizeof(raw) - w.left);
    }
    return XXH3_64bits_digest(&state);
}

static kvf_status_t compare_layers(const kvf_layer_group_t *a, const kvf_layer_group_t *b,
                                   kvf_detail_t *detail) {
    for (uint32_t i = 0; i < a->n_layers; i++) {
        if (a->layers[i] != b->layers[i]) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                            "group %s: layers[%" PRIu32 "] %" PRIu32 " here, %" PRIu32 " there",
                            a->name, i, a->layers[i], b->layers[i]);
        }
    }
    return KVF_OK;
}

static const char *role_name(kvf_group_role_t role) {
    return role == KVF_GROUP_DRAFT ? "draft" : "target";
}

static kvf_status_t compare_groups(const kvf_layer_group_t *a, const kvf_layer_group_t *b,
                                   kvf_detail_t *detail) {
    const struct {
        const char *name;
        int64_t ours;
        int64_t theirs;
    } fields[] = {
        {"n_layers", a->n_layers, b->n_layers},
        {"window", a->window, b->window},
        {"sinks", a->sinks, b->sinks},
        {"tokens_per_block", a->tokens_per_block, b->tokens_per_block},
        {"kv_heads", a->kv_heads, b->kv_heads},
        {"head_dim", a->head_dim, b->head_dim},
        {"kv_factor", a->kv_factor, b->kv_factor},
    };
    static const char *const orders[] = {"HND", "NHD"}, *const kinds[] = {"paged", "state"};
    const struct {
        const char *name;
        const char *ours;
        const char *theirs;
    } words[] = {
        {"dtype", kvf_dtype_name(a->dtype), kvf_dtype_name(b->dtype)},
        {"order", orders[a->order], orders[b->order]},
        {"kind", kinds[a->kind], kinds[b->kind]},
        {"role", role_name(a->role), role_name(b->role)},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].ours != fields[i].theirs) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                            "group %s: %s %" PRId64 " here, %" PRId64 " there", a->name,
                            fields[i].name, fields[i].ours, fields[i].theirs);
        }
    }
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (strcmp(words[i].ours, words[i].theirs) != 0) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE, "group %s: %s %s here, %s there", a->name,
                            words[i].name, words[i].ours, words[i].theirs);
        }
    }
    return compare_layers(a, b, detail);
}

/* The first group of the layout with more groups whose name the other does not have: there is one,
 * as names are unique. */
static const kvf_layer_group_t *find_extra(const kvf_layout_t *more, const kvf_layout_t *fewer) {
    uint32_t g = 0, other = 0;
    while (other < fewer->n_groups) {
        if (strcmp(more->groups[g].name, fewer->groups[other].name) == 0) {
            g++;
            other = 0;
        } else {
            other++;
        }
    }
    return &more->groups[g];
}

kvf_status_t kvf_layout_compare(const kvf_layout_t *ours, const kvf_layout_t *theirs,
                                kvf_detail_t *detail) {
    if (ours->n_groups != theirs->n_groups) {
        bool here = ours->n_groups > theirs->n_groups;
        const kvf_layer_group_t *extra = here ? find_extra(ours, theirs) : find_extra(theirs, ours);
        return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                        "%" PRIu32 " layer groups here, %" PRIu32
                        " there: group %s (role %s) is only %s",
                        ours->n_groups, theirs->n_groups, extra->name, role_name(extra->role),
                        here ? "here" : "there");
    }
    for (uint32_t g = 0; g < ours->n_groups; g++) {
        const kvf_layer_group_t *a = &ours->groups[g], *b = &theirs->groups[g];
        if (strcmp(a->name, b->name) != 0) {
            return kvf_fail(detail, KVF_ERR_INCOMPATIBLE,
                            "group number %" PRIu32 " is %s here, %s there", g, a->name, b->name);
        }
        kvf_status_t status = compare_groups(a, b, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}
