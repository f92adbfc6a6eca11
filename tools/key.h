/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_KEY_H
#define KVF_TOOLS_KEY_H

/**
 * @file
 * The cluster key's file: 32 random bytes that only their owner reads.
 */

#include "transceiver/kvferry.h"

/**
 * Write a new key file with mode 0600.
 *
 * @return KVF_OK; KVF_ERR_IO (it exists already, or cannot be written; a half-written one is
 * removed).
 */
KVF_CHECK kvf_status_t kvf_key_create(const char *path, kvf_detail_t *detail);

/**
 * Read a key file.
 *
 * @param[out] key      The secret; wipe it after use.
 * @param[out] loose_p  Whether others than the owner may read or write the file.
 * @return KVF_OK; KVF_ERR_INVALID (cannot be read, or is not KVF_KEY_BYTES long: the text says what
 * to do).
 */
KVF_CHECK kvf_status_t kvf_key_read(const char *path, uint8_t key[KVF_KEY_BYTES], bool *loose_p,
                                    kvf_detail_t *detail);

#endif
