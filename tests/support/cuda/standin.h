/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CUDA_STANDIN_H
#define KVF_TESTS_CUDA_STANDIN_H

/**
 * @file
 * A stand-in for the CUDA runtime, linked in its place: the calls that kvferry makes, over shared
 * memory, on machines without a device. What it is strict about, because the real one is:
 *
 * - addresses of device memory are pages without access: the CPU that touches one dies;
 * - nothing queued happens before the call returns, and not soon: one thread does it, after a delay
 *   of its own, stream by stream in any order;
 * - what a copy reads from pinned memory it reads then, not when it is queued;
 * - an address outside every allocation kills the context: every later call fails;
 * - memory opens in other processes only, and closes;
 * - virtual memory is in whole granules and holds what somebody has left there; without access, or
 *   for writing without the right to, its addresses are none; handles, mappings and addresses that
 *   are given back in the wrong order end the process;
 * - kernels run through the bodies that nvcc compiles, too.
 *
 * The environment configures it: KVF_STANDIN_CUDA_DEVICES (1; 0: no driver),
 * KVF_STANDIN_CUDA_DELAY_US (20: the longest delay of an operation), KVF_STANDIN_CUDA_FAIL
 * ("cudaMalloc:3": the third call fails; "execute:5": the fifth operation does, for good; "nccl:7":
 * a communicator, when NCCL is asked for the seventh time), CUDA_VISIBLE_DEVICES (which one the
 * process sees as its first, so that two processes have different ones), KVF_STANDIN_NCCL_NONE
 * (there is no NCCL).
 */

#include <stdbool.h>
#include <stdint.h>

/** Let the n-th call of a function from now on fail, 1 is the next; "execute": the n-th operation.
 * 0: none. @thread any */
void standin_cuda_fail(const char *function, uint64_t n);

/** Let nothing queued begin until it is called with false. @thread any */
void standin_cuda_hold(bool hold);
/** The same, for one stream: as kernels that take long. @param stream  A cudaStream_t. */
void standin_cuda_hold_stream(void *stream, bool hold);

/** Give the device back as new: the context of a test before may be dead. Nothing is in use. */
void standin_cuda_reset(void);

/** What is there. */
typedef struct standin_cuda_counts {
    uint64_t allocations, imports, pinned, streams, events; /**< now */
    uint64_t reservations; /**< of addresses, for virtual memory; its allocations, ours and others',
                              are among those above */
    uint64_t contexts;     /**< a bit for each device that has ever had one */
    uint64_t communicators;
    uint64_t launches, executed; /**< since the start */
} standin_cuda_counts_t;

standin_cuda_counts_t standin_cuda_counts(void);

#endif
