/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_MAPPED_H
#define KVF_MOVER_MAPPED_H

/**
 * @file
 * Pools of one agent that another one on the same machine maps, for reading alone, to copy from
 * them itself. The descriptors go over an AF_UNIX connection, which lives as long as the mapping:
 * when it ends, or the process at its other end (by a pidfd that comes with the connection, never
 * by a number that somebody tells), nobody reads there any more.
 *
 * Who may map: a process of the same user, on the same kernel, that knows the secret of this
 * agent's hello and says that it is a peer that has got it. All functions: agent thread. None
 * blocks.
 *
 * Pools on a device go by handles instead, some with a descriptor beside it that only the device's
 * driver understands; whoever opens those closes them before it gives the pools back.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/status.h"
#include "kvmgr/layout.h"

#include <stdbool.h>

#define KVF_MAPPED_ADDRESS_BYTES 128
#define KVF_MAPPED_NAME_BYTES 16 /**< an incarnation */

typedef struct kvf_mapped kvf_mapped_t;

/** The pools of a peer, mapped here. */
typedef struct kvf_mapped_source kvf_mapped_source_t;

#define KVF_MAPPED_HANDLE_BYTES 96

/** A pool: a descriptor, borrowed, of memory whose length is sealed; or, of memory that has none
 * because it is a device's, whatever its owner opens it with. All pools of an agent are of one of
 * these kinds, and only agents with the same kind come together. */
typedef struct kvf_mapped_pool {
    int fd; /**< -1: only the handle counts */
    bool on_device;
    uint64_t bytes;
    uint8_t handle[KVF_MAPPED_HANDLE_BYTES];
} kvf_mapped_pool_t;

/** What is called, from kvf_mapped_progress() only. */
typedef struct kvf_mapped_events {
    /** Somebody who may wants this agent's pools. @return The peer's number, or 0: no such peer. */
    uint64_t (*lend)(void *ctx, const uint8_t incarnation[KVF_MAPPED_NAME_BYTES]);
    /** The mapping of a peer that lend named is gone. Once for each. */
    void (*returned)(void *ctx, uint64_t peer);
    /** The answer to kvf_mapped_map(). */
    void (*mapped)(void *ctx, uint64_t peer, kvf_status_t status, const char *why);
    void *ctx;
} kvf_mapped_events_t;

/**
 * Listen for peers.
 *
 * @param pools        Of this agent, one per layer group; copied, the descriptors borrowed.
 * @param incarnation  This agent's.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_IO (no socket, or descriptors; the text says it).
 */
KVF_CHECK kvf_status_t kvf_mapped_create(const kvf_alloc_t *alloc, const kvf_mapped_pool_t *pools,
                                         uint32_t n_pools,
                                         const uint8_t incarnation[KVF_MAPPED_NAME_BYTES],
                                         const kvf_mapped_events_t *events, kvf_mapped_t **mapped_p,
                                         kvf_detail_t *detail);

/** No source is in use. What was lent stays with the peers until they give it back: it is their
 * mapping, of memory that lives as long. No event follows. NULL is allowed. */
void kvf_mapped_destroy(kvf_mapped_t *mapped);

/** Write what goes into the hello. @return Its length, at most KVF_MAPPED_ADDRESS_BYTES. */
size_t kvf_mapped_address(const kvf_mapped_t *mapped, uint8_t address[KVF_MAPPED_ADDRESS_BYTES]);

/**
 * Ask a peer for its pools.
 *
 * @param peer    The caller's number; not mapped now.
 * @param expect  Bytes of each pool, at least. n_pools of them, as many as our own.
 * @return KVF_OK: events.mapped follows, with KVF_OK, KVF_ERR_INVALID (other pools than it spoke
 * of), KVF_ERR_IO or KVF_ERR_NO_MEMORY; or KVF_ERR_INVALID (not an address), KVF_ERR_UNSUPPORTED
 * (another machine), KVF_ERR_IO, KVF_ERR_NO_MEMORY at once.
 */
KVF_CHECK kvf_status_t kvf_mapped_map(kvf_mapped_t *mapped, uint64_t peer, const void *address,
                                      size_t bytes, const uint64_t *expect, kvf_detail_t *detail);

/** Give them back: unmapped when no user is left. No event follows. Unknown peers are ignored. */
void kvf_mapped_unmap(kvf_mapped_t *mapped, uint64_t peer);

/** @return The pools of a peer, with one more user; NULL: they are not mapped. */
kvf_mapped_source_t *kvf_mapped_use(kvf_mapped_t *mapped, uint64_t peer);
/** One user less. */
void kvf_mapped_unuse(kvf_mapped_source_t *source);
/** @return Where a pool begins that is not a device's. @thread any, of a user */
const uint8_t *kvf_mapped_base(const kvf_mapped_source_t *source, uint32_t group_idx);
/** @return How long a pool is, by what its owner spoke of at first. @thread any, of a user */
uint64_t kvf_mapped_bytes(const kvf_mapped_source_t *source, uint32_t group_idx);
/** @return The handle of a pool on a device; the source's. The user opens it, and has closed it
 * when it goes. @thread any, of a user */
const uint8_t *kvf_mapped_handle(const kvf_mapped_source_t *source, uint32_t group_idx);
/** @return The descriptor that came with the handle of a pool, the caller's to close from now on;
 * -1: none came, or it was taken. Nobody has looked at what it is. @thread any, of a user; one at a
 * time
 */
int kvf_mapped_take_fd(kvf_mapped_source_t *source, uint32_t group_idx);

/** @return A descriptor that is readable while kvf_mapped_progress() has work. */
int kvf_mapped_fd(const kvf_mapped_t *mapped);
/** Advance. Bounded. @return How many things happened. */
unsigned kvf_mapped_progress(kvf_mapped_t *mapped);

#endif
