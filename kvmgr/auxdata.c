/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/auxdata.h"

#include "kvmgr/base/size.h"

#include <inttypes.h>
#include <string.h>

#define ALIGN_BYTES 16
#define UNSET (-1)

/* A length of a step that arrays have in common. ROWS and TREE exist for each depth, PAGES for each
 * set and depth. */
enum measure { NOTHING, ROWS, PAGES, TREE, APPENDS, TOKENS, TRANSFER, PAGE_TO_PAGE, N_MEASURES };

enum shape { INDPTR, EACH, TRIPLE, ALIKE };

static const struct rule {
    const char *name;
    bool per_depth;
    bool sliding;
    enum shape shape;
    enum measure measure;
    enum measure counts;
} rules[KVF_AUX_N_ARRAYS] = {
#define RULE(NAME, name, elements, per_depth, sliding, shape, measure, counts)                     \
    {name, per_depth, sliding, shape, measure, counts},
    KVF_AUX_ARRAYS(RULE)
#undef RULE
};

/* One array of one set and depth. */
struct entry {
    uint64_t off; /* bytes, in its memory */
    int64_t n;    /* elements, UNSET when the step has not copied it */
};

/* What the two managers do differently. */
struct ops {
    /* Allocate mems (and the packing buffer). */
    kvf_status_t (*reserve)(kvf_auxdata_t *aux, kvf_detail_t *detail);
    /* The memory that holds an entry. */
    kvf_mem_t *(*mem_of)(const kvf_auxdata_t *aux, const struct entry *entry);
    /* Store checked elements, and set entry->off. */
    kvf_status_t (*put)(kvf_auxdata_t *aux, struct entry *entry, const int32_t *data,
                        uint64_t bytes, kvf_detail_t *detail);
    kvf_status_t (*commit)(kvf_auxdata_t *aux, kvf_detail_t *detail);
    /* Whether the device has an entry of the step. */
    bool (*is_there)(const kvf_auxdata_t *aux, const struct entry *entry);
};

struct kvf_auxdata {
    kvf_alloc_t alloc;
    kvf_aux_config_t config;
    const struct ops *ops;
    uint32_t n_sets;
    uint32_t first[KVF_AUX_N_ARRAYS + 1]; /* entries of an array: [set][depth] */
    struct entry *entries;
    int64_t *measures; /* [measure][set][depth] */
    kvf_mem_t *mems;   /* plain: one for each entry; cached: one */
    uint32_t n_mems;
    uint64_t reserved_bytes;
    uint8_t *packed; /* cached: what the next commit copies */
    uint64_t packed_bytes;
    uint64_t committed_bytes;
};

/* Cannot overflow: limits are 32-bit numbers, and T is at most 256. */
static uint64_t reserved_elements(const kvf_aux_limits_t *limits, kvf_aux_array_t array) {
    const uint64_t R = limits->max_seqs, N = limits->max_pages;
    const uint64_t K = limits->max_chunk, T = limits->tree_tokens;
    const uint64_t elements[KVF_AUX_N_ARRAYS] = {
#define ELEMENTS(NAME, name, elements, ...) (elements),
        KVF_AUX_ARRAYS(ELEMENTS)
#undef ELEMENTS
    };
    return elements[array];
}

/* The bytes that an array of n elements takes, with the gap behind it. */
static uint64_t padded_bytes(uint64_t n) {
    return (n * sizeof(int32_t) + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

/* The plain manager */

static kvf_status_t plain_reserve(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    const kvf_mem_kind_t *memory = aux->config.memory;
    kvf_status_t status = KVF_OK;
    for (unsigned a = 0; a < KVF_AUX_N_ARRAYS; a++) {
        uint64_t bytes = padded_bytes(reserved_elements(&aux->config.limits, (kvf_aux_array_t)a));
        for (uint32_t i = aux->first[a]; bytes > 0 && i < aux->first[a + 1]; i++) {
            status = memory->alloc(memory, bytes, &aux->mems[i], detail);
            if (status != KVF_OK) {
                return status;
            }
        }
    }
    return KVF_OK;
}

static kvf_mem_t *plain_mem_of(const kvf_auxdata_t *aux, const struct entry *entry) {
    return &aux->mems[entry - aux->entries];
}

static kvf_status_t plain_put(kvf_auxdata_t *aux, struct entry *entry, const int32_t *data,
                              uint64_t bytes, kvf_detail_t *detail) {
    return bytes == 0 ? KVF_OK
                      : aux->config.memory->write(plain_mem_of(aux, entry), 0, data, bytes,
                                                  aux->config.stream, detail);
}

static kvf_status_t plain_commit(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    (void)aux;
    (void)detail;
    return KVF_OK;
}

static bool plain_is_there(const kvf_auxdata_t *aux, const struct entry *entry) {
    (void)aux;
    return entry->n != UNSET;
}

static const struct ops plain_ops = {
    plain_reserve, plain_mem_of, plain_put, plain_commit, plain_is_there,
};

/* The cached manager */

static kvf_status_t cached_reserve(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    const kvf_mem_kind_t *memory = aux->config.memory;
    aux->packed = kvf_calloc(&aux->alloc, (size_t)aux->reserved_bytes, 1);
    if (aux->packed == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "no memory for %" PRIu64 " bytes of aux data: lower the limits",
                        aux->reserved_bytes);
    }
    return memory->alloc(memory, aux->reserved_bytes, &aux->mems[0], detail);
}

static kvf_mem_t *cached_mem_of(const kvf_auxdata_t *aux, const struct entry *entry) {
    (void)entry;
    return &aux->mems[0];
}

/* There is always room: each key is packed once in a step, within what is reserved for it. */
static kvf_status_t cached_put(kvf_auxdata_t *aux, struct entry *entry, const int32_t *data,
                               uint64_t bytes, kvf_detail_t *detail) {
    (void)detail;
    entry->off = aux->packed_bytes;
    if (bytes > 0) {
        memcpy(aux->packed + entry->off, data, (size_t)bytes);
    }
    aux->packed_bytes += padded_bytes(bytes / sizeof(int32_t));
    return KVF_OK;
}

static kvf_status_t cached_commit(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    if (aux->packed_bytes > 0) {
        kvf_status_t status = aux->config.memory->write(
            &aux->mems[0], 0, aux->packed, aux->packed_bytes, aux->config.stream, detail);
        if (status != KVF_OK) {
            return status;
        }
    }
    aux->committed_bytes = aux->packed_bytes;
    return KVF_OK;
}

static bool cached_is_there(const kvf_auxdata_t *aux, const struct entry *entry) {
    return entry->n != UNSET &&
           entry->off + (uint64_t)entry->n * sizeof(int32_t) <= aux->committed_bytes;
}

static const struct ops cached_ops = {
    cached_reserve, cached_mem_of, cached_put, cached_commit, cached_is_there,
};

/* What both share */

const char *kvf_aux_array_name(kvf_aux_array_t array) {
    return rules[array].name;
}

bool kvf_aux_array_per_depth(kvf_aux_array_t array) {
    return rules[array].per_depth;
}

bool kvf_aux_array_sliding(kvf_aux_array_t array) {
    return rules[array].sliding;
}

kvf_status_t kvf_aux_limits_check(const kvf_aux_limits_t *limits, kvf_detail_t *detail) {
    const struct {
        const char *name;
        uint32_t value, least, most;
    } rows[] = {
        {"max_seqs", limits->max_seqs, 1, INT32_MAX - 1},
        {"max_pages", limits->max_pages, 1, INT32_MAX},
        {"max_chunk", limits->max_chunk, 1, INT32_MAX},
        {"max_depth", limits->max_depth, 1, KVF_AUX_MAX_DEPTH},
        {"n_sliding", limits->n_sliding, 0, KVF_MAX_GROUPS},
        {"tree_tokens", limits->tree_tokens, 0, KVF_AUX_MAX_TREE_TOKENS},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].value < rows[i].least || rows[i].value > rows[i].most) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "aux data: %s is %" PRIu32 ", not %" PRIu32 " to %" PRIu32,
                            rows[i].name, rows[i].value, rows[i].least, rows[i].most);
        }
    }
    return KVF_OK;
}

/* Number the entries and add up what they reserve. */
static kvf_status_t lay_out(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    const kvf_aux_limits_t *limits = &aux->config.limits;
    for (unsigned a = 0; a < KVF_AUX_N_ARRAYS; a++) {
        uint32_t n =
            (rules[a].per_depth ? limits->max_depth : 1) * (rules[a].sliding ? aux->n_sets : 1);
        uint64_t bytes;
        aux->first[a + 1] = aux->first[a] + n;
        if (kvf_mul_u64(padded_bytes(reserved_elements(limits, (kvf_aux_array_t)a)), n, &bytes) !=
                KVF_OK ||
            kvf_add_u64(aux->reserved_bytes, bytes, &aux->reserved_bytes) != KVF_OK) {
            return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                            "aux data of more than 2^64 bytes: lower the limits");
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_aux_create(const kvf_aux_config_t *config, const kvf_alloc_t *alloc,
                            kvf_auxdata_t **aux_p, kvf_detail_t *detail) {
    kvf_status_t status = kvf_aux_limits_check(&config->limits, detail);
    if (status != KVF_OK) {
        return status;
    }
    kvf_auxdata_t *aux = kvf_calloc(alloc, 1, sizeof(*aux));
    if (aux == NULL) {
        goto err_memory;
    }
    aux->alloc = *alloc;
    aux->config = *config;
    aux->ops = config->manager == KVF_AUX_PLAIN ? &plain_ops : &cached_ops;
    aux->n_sets = 1 + config->limits.n_sliding;
    status = lay_out(aux, detail);
    if (status != KVF_OK) {
        goto err_destroy;
    }
    uint32_t n_entries = aux->first[KVF_AUX_N_ARRAYS];
    aux->n_mems = config->manager == KVF_AUX_PLAIN ? n_entries : 1;
    aux->mems = kvf_calloc(alloc, aux->n_mems, sizeof(aux->mems[0]));
    aux->entries = kvf_calloc(alloc, n_entries, sizeof(aux->entries[0]));
    aux->measures = kvf_calloc(alloc, (size_t)N_MEASURES * aux->n_sets * config->limits.max_depth,
                               sizeof(aux->measures[0]));
    if (aux->mems == NULL || aux->entries == NULL || aux->measures == NULL) {
        kvf_aux_destroy(aux);
        goto err_memory;
    }
    status = aux->ops->reserve(aux, detail);
    if (status != KVF_OK) {
        goto err_destroy;
    }
    kvf_aux_reset(aux);
    *aux_p = aux;
    return KVF_OK;

err_destroy:
    kvf_aux_destroy(aux);
    return status;
err_memory:
    return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for an aux manager");
}

void kvf_aux_destroy(kvf_auxdata_t *aux) {
    if (aux == NULL) {
        return;
    }
    for (uint32_t i = 0; aux->mems != NULL && i < aux->n_mems; i++) {
        if (aux->mems[i].base != NULL) {
            aux->config.memory->free(&aux->mems[i]);
        }
    }
    kvf_alloc_t alloc = aux->alloc;
    kvf_free(&alloc, aux->packed);
    kvf_free(&alloc, aux->measures);
    kvf_free(&alloc, aux->entries);
    kvf_free(&alloc, aux->mems);
    kvf_free(&alloc, aux);
}

uint64_t kvf_aux_reserved_bytes(const kvf_auxdata_t *aux) {
    return aux->reserved_bytes;
}

void kvf_aux_reset(kvf_auxdata_t *aux) {
    const size_t n_measures = (size_t)N_MEASURES * aux->n_sets * aux->config.limits.max_depth;
    for (uint32_t i = 0; i < aux->first[KVF_AUX_N_ARRAYS]; i++) {
        aux->entries[i].n = UNSET;
    }
    for (size_t i = 0; i < n_measures; i++) {
        aux->measures[i] = UNSET;
    }
    aux->packed_bytes = 0;
    aux->committed_bytes = 0;
}

static kvf_status_t find(const kvf_auxdata_t *aux, kvf_aux_key_t key, struct entry **entry_p,
                         kvf_detail_t *detail) {
    if ((unsigned)key.array >= KVF_AUX_N_ARRAYS) {
        return kvf_fail(detail, KVF_ERR_INVALID, "there is no aux array %u", (unsigned)key.array);
    }
    const struct rule *rule = &rules[key.array];
    uint32_t n_depths = rule->per_depth ? aux->config.limits.max_depth : 1;
    if (key.depth >= n_depths) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: depth %" PRIu32 ", and there are %" PRIu32,
                        rule->name, key.depth, n_depths);
    }
    if (key.set > 0 && !rule->sliding) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s: set %" PRIu32 ", and sliding sets have no such array", rule->name,
                        key.set);
    }
    if (key.set >= aux->n_sets) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s: sliding set %" PRIu32 ", and storage was reserved for %" PRIu32
                        " (n_sliding)",
                        rule->name, key.set, aux->n_sets - 1);
    }
    *entry_p = &aux->entries[aux->first[key.array] + key.set * n_depths + key.depth];
    return KVF_OK;
}

static int64_t *measure_of(const kvf_auxdata_t *aux, enum measure measure, kvf_aux_key_t key) {
    uint32_t set = measure == PAGES ? key.set : 0;
    return &aux->measures[((size_t)measure * aux->n_sets + set) * aux->config.limits.max_depth +
                          key.depth];
}

/* The most that a measure can come to. */
static uint64_t measure_limit(const kvf_aux_limits_t *limits, enum measure measure) {
    switch (measure) {
    case PAGES:
        return limits->max_pages;
    case TREE:
        return reserved_elements(limits, KVF_AUX_TREE_ATTN_MASK);
    default:
        return limits->max_chunk;
    }
}

static kvf_status_t check_length(const kvf_auxdata_t *aux, kvf_aux_key_t key, int64_t n,
                                 kvf_detail_t *detail) {
    const struct rule *rule = &rules[key.array];
    const int64_t measure = *measure_of(aux, rule->measure, key);
    const uint64_t reserved = reserved_elements(&aux->config.limits, key.array);
    const bool opens = rule->shape == INDPTR || rule->shape == ALIKE;
    if (reserved == 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "%s: no storage was reserved (tree_tokens is 0)",
                        rule->name);
    }
    if (n < 0 || (uint64_t)n > reserved) {
        return kvf_fail(detail, n < 0 ? KVF_ERR_INVALID : KVF_ERR_TOO_LARGE,
                        "%s of set %" PRIu32 ", depth %" PRIu32 ": %" PRId64
                        " elements, and room for %" PRIu64,
                        rule->name, key.set, key.depth, n, reserved);
    }
    if (measure == UNSET && opens) {
        return KVF_OK;
    }
    if (measure == UNSET) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s of set %" PRIu32 ", depth %" PRIu32 ": copy the indptr of it first",
                        rule->name, key.set, key.depth);
    }
    int64_t want = measure * (rule->shape == TRIPLE ? 3 : 1) + (rule->shape == INDPTR ? 1 : 0);
    if (n != want) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "%s of set %" PRIu32 ", depth %" PRIu32 ": %" PRId64
                        " elements, and the step so far wants %" PRId64,
                        rule->name, key.set, key.depth, n, want);
    }
    return KVF_OK;
}

static kvf_status_t check_values(const kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data,
                                 int64_t n, kvf_detail_t *detail) {
    const struct rule *rule = &rules[key.array];
    if (rule->shape == INDPTR) {
        bool rises = n > 0 && data[0] == 0;
        for (int64_t i = 1; rises && i < n; i++) {
            rises = data[i] >= data[i - 1];
        }
        if (!rises) {
            return kvf_fail(detail, KVF_ERR_INVALID,
                            "%s of set %" PRIu32 ", depth %" PRIu32
                            ": offsets start with 0 and never fall",
                            rule->name, key.set, key.depth);
        }
        if (rule->counts != NOTHING &&
            (uint64_t)data[n - 1] > measure_limit(&aux->config.limits, rule->counts)) {
            return kvf_fail(detail, KVF_ERR_TOO_LARGE,
                            "%s of set %" PRIu32 ", depth %" PRIu32 ": ends with %" PRId32
                            ", and there is room for %" PRIu64,
                            rule->name, key.set, key.depth, data[n - 1],
                            measure_limit(&aux->config.limits, rule->counts));
        }
    }
    if (key.array == KVF_AUX_PAGE_INDICES) {
        for (int64_t i = 0; i < n; i++) {
            if (data[i] < 0) {
                return kvf_fail(detail, KVF_ERR_RANGE,
                                "%s of set %" PRIu32 ", depth %" PRIu32 ": entry %" PRId64
                                " is %" PRId32 ", not a slot of 31 bits",
                                rule->name, key.set, key.depth, i, data[i]);
            }
        }
    }
    return KVF_OK;
}

kvf_status_t kvf_aux_copy(kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data, int64_t n,
                          kvf_detail_t *detail) {
    struct entry *entry;
    kvf_status_t status = find(aux, key, &entry, detail);
    if (status == KVF_OK && entry->n != UNSET) {
        status = kvf_fail(detail, KVF_ERR_INVALID,
                          "%s of set %" PRIu32 ", depth %" PRIu32
                          " was copied in this step: layers may still read it; reset first",
                          rules[key.array].name, key.set, key.depth);
    }
    if (status == KVF_OK) {
        status = check_length(aux, key, n, detail);
    }
    if (status == KVF_OK) {
        status = check_values(aux, key, data, n, detail);
    }
    if (status == KVF_OK) {
        status = aux->ops->put(aux, entry, data, (uint64_t)n * sizeof(int32_t), detail);
    }
    if (status != KVF_OK) {
        return status;
    }
    entry->n = n;
    const struct rule *rule = &rules[key.array];
    if (rule->shape == INDPTR) {
        *measure_of(aux, rule->measure, key) = n - 1;
        *measure_of(aux, rule->counts, key) = data[n - 1]; /* NOTHING has a place, too */
    } else if (rule->shape == ALIKE) {
        *measure_of(aux, rule->measure, key) = n;
    }
    return KVF_OK;
}

kvf_status_t kvf_aux_commit(kvf_auxdata_t *aux, kvf_detail_t *detail) {
    return aux->ops->commit(aux, detail);
}

kvf_status_t kvf_aux_view(const kvf_auxdata_t *aux, kvf_aux_key_t key, kvf_aux_view_t *view_p,
                          kvf_detail_t *detail) {
    struct entry *entry;
    kvf_status_t status = find(aux, key, &entry, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (!aux->ops->is_there(aux, entry)) {
        return kvf_fail(detail, KVF_ERR_UNKNOWN,
                        "%s of set %" PRIu32 ", depth %" PRIu32 " was not %s in this step",
                        rules[key.array].name, key.set, key.depth,
                        entry->n == UNSET ? "copied" : "committed");
    }
    const uint8_t *device = aux->ops->mem_of(aux, entry)->base + entry->off;
    *view_p = (kvf_aux_view_t){(const int32_t *)(const void *)device, entry->n};
    return KVF_OK;
}
