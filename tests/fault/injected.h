/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_INJECTED_H
#define KVF_TESTS_INJECTED_H

/**
 * @file
 * Socket calls and calls of a mover, of which one fails on purpose.
 *
 * Socket calls are those of the C library, which a program with these defines itself: libuv calls
 * them through its symbol table, and so comes here.
 */

#include "transceiver/mover/sim.h"

#include <stdbool.h>

/** Counts the calls of one kind; the fail_at-th fails. */
typedef struct injector {
    bool armed;
    uint64_t calls, fail_at;
} injector_t;

/** Of the sockets of the control channel and of pools that are mapped, and of all movers. */
extern injector_t sockets, movers;

/** @return Whether this run is one with mapped pools (KVF_TEST_MAPPED in the environment). */
bool maps(void);

/**
 * Make a mover that stacks on a simulated one: making it, connecting, posting, and windows that are
 * under way may fail.
 */
kvf_status_t make_faulty_mover(kvf_sim_net_t *net, uint64_t number, const kvf_mover_sink_t *sink,
                               kvf_mover_t **mover_p, kvf_detail_t *detail);

#endif
