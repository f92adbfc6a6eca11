/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into a program, lets the mover rdma go over tcp, where UCX only emulates reads: all of it
 * but what a network card does can be tested so, and nothing else is it good for. */
#include "transceiver/agent_impl.h"

__attribute__((constructor)) static void allow_software(void) {
    kvf_agent_rdma_over_software = true;
}
