/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_CONFIG_KEYS_H
#define KVF_TOOLS_CONFIG_KEYS_H

/**
 * @file
 * The table of configuration keys, and what its users (YAML reader, --set, check, defaults) share.
 * Private to tools/config*.c.
 */

#include "tools/config.h"

/** No more keys than that. */
#define KVF_CONFIG_MAX_KEYS 64

typedef enum kvf_key_type {
    KVF_KEY_TEXT,
    KVF_KEY_CHOICE, /**< one of `choices` */
    KVF_KEY_NUMBER,
    KVF_KEY_SIZE, /**< bytes, with or without KiB, MiB, GiB, TiB */
    KVF_KEY_BOOL,
    KVF_KEY_LIST
} kvf_key_type_t;

typedef struct kvf_key {
    const char *path; /**< "section.name" or "name" */
    kvf_key_type_t type;
    const char *fallback; /**< the default as it is written in a file; "" = an empty text or list */
    const char *unit;     /**< of a number, for texts */
    const char *help;
    uint64_t minimum; /**< of numbers and sizes; of the length of a text */
    uint64_t maximum;
    const char *const *choices; /**< NULL-terminated; NULL: not a choice */
    size_t offset;              /**< of the field in kvf_config_t */
} kvf_key_t;

/** @return All keys, sections together, in the order of the file. @param[out] n_p  How many. */
const kvf_key_t *kvf_config_keys(size_t *n_p);

/** @return The key of that path, or NULL. */
const kvf_key_t *kvf_config_find(const char *path);

/** @return Whether some key lies in that section. */
bool kvf_config_is_section(const char *name);

/** Write the keys of a section ("pool.memory, pool.bytes"). @return buf. */
const char *kvf_config_section_keys(const char *name, char *buf, size_t cap);

/** @return The known path or section nearest to a wrong one, by edit distance. Static storage. */
const char *kvf_config_nearest(const char *path, char *buf, size_t cap);

/** Write what a key takes ("a number of milliseconds, 1 to 86400000"). */
void kvf_config_expected(const kvf_key_t *key, char *buf, size_t cap);

/** Store a value that is given as text. @return KVF_OK, KVF_ERR_INVALID (no detail: the caller
 * knows where), KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_config_store(kvf_config_t *config, const kvf_key_t *key,
                                        const char *text);

/** Append one item to a list. @return as kvf_config_store(). */
KVF_CHECK kvf_status_t kvf_config_append(kvf_config_t *config, const kvf_key_t *key,
                                         const char *text);

/** Empty a list. */
void kvf_config_clear(kvf_config_t *config, const kvf_key_t *key);

#endif
