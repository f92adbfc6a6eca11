/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_HASH_H
#define KVF_HASH_H

/**
 * @file
 * uthash over our allocator. A function that adds or deletes has a variable `hash_alloc` in scope;
 * after an add it checks kvf_hashed(), since a table that cannot grow does not end the process.
 */

#include "kvmgr/base/alloc.h"

#define HASH_NONFATAL_OOM 1
#define uthash_malloc(bytes) kvf_alloc(hash_alloc, bytes)
#define uthash_free(ptr, bytes) kvf_free(hash_alloc, ptr)
#include <uthash.h>

/** @return Whether the element was added (or is in a table). */
#define kvf_hashed(element) ((element)->hh.tbl != NULL)

#endif
