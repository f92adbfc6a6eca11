/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_SIM_H
#define KVF_MOVER_SIM_H

/**
 * @file
 * Movers inside one process whose driver decides when a chunk leaves, when it arrives and whether
 * it arrives at all. No threads, no clock, no randomness: the same calls give the same run.
 *
 * A posted chunk waits at its sender, then is under way (it was read from the source; the window is
 * done when all its chunks were read), then arrives. Done does not mean arrived, as with eager
 * messages and with puts. What is under way outlives disconnect, a broken path and even its sender:
 * a late write.
 */

#include "transceiver/mover/mover.h"

typedef struct kvf_sim_net kvf_sim_net_t;

typedef struct kvf_sim_config {
    /** true: an arrived chunk is handed to the receiver's sink in its next progress. false:
     * one-sided, its bytes are written at once to where find says, whatever the receiver thinks of
     * it. */
    bool checked;
    uint64_t chunk_bytes; /**< pieces are cut at multiples of it; > 0 */
    /** One-sided only. @return The first byte of an agent's slot, or NULL: the bytes are lost. */
    uint8_t *(*find)(void *ctx, uint64_t agent, uint32_t group_idx, int32_t slot);
    void *ctx;
} kvf_sim_config_t;

/** A chunk that has not arrived. */
typedef struct kvf_sim_chunk {
    uint64_t from, to; /**< agents */
    bool under_way;    /**< false: waits at its sender */
    kvf_chunk_t chunk;
} kvf_sim_chunk_t;

/** @param config  Copied. @return KVF_OK, KVF_ERR_NO_MEMORY. @thread any one */
KVF_CHECK kvf_status_t kvf_sim_net_create(const kvf_sim_config_t *config, const kvf_alloc_t *alloc,
                                          kvf_sim_net_t **net_p);

/** All its movers are gone; what is under way is lost. NULL is allowed. */
void kvf_sim_net_destroy(kvf_sim_net_t *net);

/**
 * Make a mover; its address says `agent`. post gives KVF_ERR_AGAIN without memory. Its fd is -1.
 *
 * @param agent  Not 0; no other mover of the net has it now.
 * @param sink   Copied.
 * @return KVF_OK, KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_mover_sim_create(kvf_sim_net_t *net, uint64_t agent,
                                            const kvf_mover_sink_t *sink, kvf_mover_t **mover_p);

/** @return How many chunks have not arrived. They are numbered from 0, oldest post first. */
size_t kvf_sim_net_pending(const kvf_sim_net_t *net);

/** @return false: there is no idx-th chunk. */
bool kvf_sim_net_peek(const kvf_sim_net_t *net, size_t idx, kvf_sim_chunk_t *chunk_p);

/** Let the idx-th chunk take its next step: it leaves, or it arrives. @return false: there is none.
 */
bool kvf_sim_net_step(kvf_sim_net_t *net, size_t idx);

/** Lose the idx-th chunk; its sender notices nothing. @return false: there is none. */
bool kvf_sim_net_drop(kvf_sim_net_t *net, size_t idx);

/** Step until nothing is pending. */
void kvf_sim_net_run(kvf_sim_net_t *net);

/** Break the paths between two agents, both ways: waiting windows fail, both hear of it in their
 * next progress. */
void kvf_sim_net_break(kvf_sim_net_t *net, uint64_t agent_a, uint64_t agent_b);

#endif
