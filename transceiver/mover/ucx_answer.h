/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_ANSWER_H
#define KVF_MOVER_UCX_ANSWER_H

/**
 * @file
 * What a sender tells a receiver that is to read its pools: of each pool where it begins, its
 * length, and UCX's key for it; and the address of the worker to read through. All of it in an
 * envelope (ucx_address.h): UCX reads keys and addresses without being told their length.
 */

#include "kvmgr/layout.h"
#include "transceiver/mover/ucx_address.h"

/** Of the longest answer. */
#define KVF_UCX_ANSWER_BYTES 8192U
/** Of the longest key; one of ours has some tens. */
#define KVF_UCX_KEY_BYTES 256U

/** A pool that may be read. */
typedef struct kvf_ucx_lent {
    uint64_t base;
    uint64_t bytes;
    const void *key;
    size_t key_bytes;
} kvf_ucx_lent_t;

typedef struct kvf_ucx_answer {
    kvf_ucx_lent_t pools[KVF_MAX_GROUPS];
    uint32_t n_pools;
    const void *address;
    size_t address_bytes;
} kvf_ucx_answer_t;

/**
 * Write an answer.
 *
 * @param[out] buf      Room for KVF_UCX_ANSWER_BYTES.
 * @param[out] bytes_p  How many were written.
 * @return KVF_OK, or KVF_ERR_RANGE (a key or the address is too long).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ucx_answer_write(kvf_ucx_release_t release,
                                            const kvf_ucx_answer_t *answer, uint8_t *buf,
                                            size_t *bytes_p);

/**
 * Read one.
 *
 * @param n_pools        As many as it must be of.
 * @param least          How long each of them must be, at least.
 * @param[out] answer_p  Keys and address are inside buf, with no alignment.
 * @return KVF_OK; KVF_ERR_INVALID (cut, damaged, of other pools, or shorter ones);
 * KVF_ERR_INCOMPATIBLE (another UCX).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ucx_answer_read(kvf_ucx_release_t release, const void *buf, size_t bytes,
                                           uint32_t n_pools, const uint64_t *least,
                                           kvf_ucx_answer_t *answer_p, kvf_detail_t *detail);

#endif
