/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_UCX_ADDRESS_H
#define KVF_MOVER_UCX_ADDRESS_H

/**
 * @file
 * The envelope of a UCX worker address, and of other things that UCX makes for a peer: version of
 * the UCX that made it (major, minor: u16 each), kvf_digest() of what is inside (u64), what is
 * inside. UCX reads such things without being told their length, a damaged one ends the process,
 * and so does one of another version (1.13 aborts when 1.22 connects to it).
 */

#include "kvmgr/base/status.h"

#include <stddef.h>
#include <stdint.h>

/** Of the longest address inside an envelope; one of ours has a few hundred bytes. */
#define KVF_UCX_ADDRESS_BYTES 2048U

/** Bytes around it. */
#define KVF_UCX_ENVELOPE_BYTES 12U

typedef struct kvf_ucx_release {
    unsigned major, minor;
} kvf_ucx_release_t;

/**
 * Wrap an address.
 *
 * @param[out] buf      Room for cap bytes.
 * @param[out] bytes_p  How many were written.
 * @return KVF_OK, or KVF_ERR_RANGE (cap is too small, or the address is too long).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ucx_address_wrap(kvf_ucx_release_t release, const void *address,
                                            size_t address_bytes, void *buf, size_t cap,
                                            size_t *bytes_p);

/**
 * Unwrap what a peer sent. Only damage and other versions are found: who may send an address is
 * settled before.
 *
 * @param release          Ours.
 * @param[out] address_p   Inside buf.
 * @param[out] bytes_p     Of the address, 1..KVF_UCX_ADDRESS_BYTES.
 * @return KVF_OK; KVF_ERR_INVALID (cut, damaged or too long); KVF_ERR_INCOMPATIBLE (another UCX;
 * the text names both).
 * @thread any
 */
KVF_CHECK kvf_status_t kvf_ucx_address_unwrap(kvf_ucx_release_t release, const void *buf,
                                              size_t bytes, const void **address_p, size_t *bytes_p,
                                              kvf_detail_t *detail);

/** As kvf_ucx_address_wrap(), of anything, however long. @thread any */
KVF_CHECK kvf_status_t kvf_ucx_envelope_wrap(kvf_ucx_release_t release, const void *inside,
                                             size_t inside_bytes, void *buf, size_t cap,
                                             size_t *bytes_p);

/** As kvf_ucx_address_unwrap(), of anything, however long. @thread any */
KVF_CHECK kvf_status_t kvf_ucx_envelope_unwrap(kvf_ucx_release_t release, const void *buf,
                                               size_t bytes, const void **inside_p, size_t *bytes_p,
                                               kvf_detail_t *detail);

#endif
