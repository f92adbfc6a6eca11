/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_CONFIG_H
#define KVF_TOOLS_CONFIG_H

/**
 * @file
 * The configuration of a node: one table of keys (path, type, default, unit, help, limits) that
 * serves the YAML file, `--set key=value`, `kvferry config --defaults` and every error text.
 * Source: docs/contracts.md "Configuration keys".
 */

#include "kvmgr/base/alloc.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/** A list of texts. */
typedef struct kvf_texts {
    char **items;
    size_t n;
} kvf_texts_t;

/** Every setting. Texts belong to the struct; choices are static storage. Which text means what:
 * the table. */
typedef struct kvf_config {
    const kvf_alloc_t *alloc;
    char *folder; /**< of the file that was read last, "." without one: relative paths start here */
    char *instance;
    char *http_listen;
    char *control_listen;
    char *key_file;
    kvf_texts_t peers;
    const char *preset;
    uint64_t tokens_per_block;
    uint64_t draft_layers;
    const char *memory;
    const char *device_alloc;
    bool zero_freed;
    uint64_t pool_bytes;
    const char *mover;
    const char *direction;
    uint64_t mover_threads;
    uint64_t busy_poll_us;
    bool digests;
    char *ucx_tls;
    char *ucx_devices;
    const char *engine;
    uint64_t prefill_tokens_per_s;
    uint64_t chunk_tokens;
    uint64_t extra_tokens;
    bool prefix_cache;
    const char *verify;
    const char *aux;
    uint64_t max_transfers;
    uint64_t request_timeout_ms;
    uint64_t lease_ms;
    uint64_t quarantine_ms;
    uint64_t frame_bytes;
    uint64_t heartbeat_ms;
    uint64_t suspect_ms;
    uint64_t lost_ms;
    const char *log_level;
} kvf_config_t;

/**
 * @param alloc          Everything in the struct comes from it; borrowed until
 * kvf_config_cleanup().
 * @param[out] config_p  Holds every default.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_config_init(const kvf_alloc_t *alloc, kvf_config_t *config_p,
                                       kvf_detail_t *detail);

/** Free what the struct owns. NULL, and a zeroed struct, are allowed. */
void kvf_config_cleanup(kvf_config_t *config);

/**
 * Read a YAML file over what is there. A dotted key is the same as a nested one.
 *
 * @param config  Initialised; on error some keys may have been changed.
 * @param path    Zero-terminated.
 * @return KVF_OK; KVF_ERR_IO (cannot be read); KVF_ERR_INVALID (the text gives file, line and what
 * was expected; an unknown key with the nearest known one); KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_config_read(kvf_config_t *config, const char *path,
                                       kvf_detail_t *detail);

/** The same from an open file. @param name  For texts, and to find the folder. */
KVF_CHECK kvf_status_t kvf_config_read_stream(kvf_config_t *config, FILE *file, const char *name,
                                              kvf_detail_t *detail);

/**
 * Carry out one `--set`.
 *
 * @param setting  "key=value"; the items of a list are separated by commas, brackets around them
 * are allowed.
 * @return KVF_OK, KVF_ERR_INVALID, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_config_set(kvf_config_t *config, const char *setting,
                                      kvf_detail_t *detail);

/**
 * Check what one key alone cannot tell, and refuse settings that this version does not carry out.
 *
 * @return KVF_OK; KVF_ERR_INVALID; KVF_ERR_UNSUPPORTED (the text names the key and what works).
 */
KVF_CHECK kvf_status_t kvf_config_check(const kvf_config_t *config, kvf_detail_t *detail);

/** Write the whole commented file with every default, as YAML. @return KVF_OK, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_config_write_defaults(FILE *file);

/** @param[out] path_p  The key file's path, relative ones starting at the config file's folder; the
 * caller frees it with the config's allocator. @return KVF_OK, KVF_ERR_NO_MEMORY. */
KVF_CHECK kvf_status_t kvf_config_key_path(const kvf_config_t *config, char **path_p);

#endif
