/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_AGENT_DRIVER_H
#define KVF_AGENT_DRIVER_H

/**
 * @file
 * What connects the core with what it decides about: its actions, carried out by the control
 * channel, the mover and the copier; and their events, told to the core. Whoever turns them
 * (agent_loop.c) does so on one thread.
 */

#include "transceiver/agent_impl.h"
#include "transceiver/control/control.h"

typedef struct kvf_driver {
    kvf_agent_t *agent;
    kvf_control_t *control;
    kvf_mover_t *movers[KVF_CORE_MOVERS];
    uint32_t n_movers; /**< that were made */
    kvf_copier_t *copier;
    uint64_t events;     /**< things that happened; a turn without any may be followed by sleep */
    uint64_t posting_us; /**< kvf_counters_t.posting_us */
} kvf_driver_t;

/** What the control channel and the mover tell; ctx is the driver. */
kvf_control_events_t kvf_driver_control_events(kvf_driver_t *driver);
kvf_mover_sink_t kvf_driver_sink(kvf_driver_t *driver);

/** Make the agent's core; control and mover are there, the copier comes next. @return KVF_OK,
 * KVF_ERR_NO_MEMORY, KVF_ERR_INTERNAL. */
KVF_CHECK kvf_status_t kvf_driver_make_core(kvf_driver_t *driver, kvf_detail_t *detail);

/** Tell the core the time. */
void kvf_driver_set_time(kvf_driver_t *driver);

#endif
