/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CUDA_STANDIN_IMPL_H
#define KVF_TESTS_CUDA_STANDIN_IMPL_H

/**
 * @file
 * The stand-in's parts: standin_memory.c (allocations, IPC), standin_vmm.c (virtual memory),
 * standin_stream.c (what is queued, and
 * when it happens), standin_kernels.c (kernels, by their bodies), standin_nccl.c (communicators).
 */

#include "tests/support/cuda/standin.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>

/** The whole state, under one lock. */
extern struct standin {
    pthread_mutex_t lock;
    pthread_cond_t cond; /**< something was queued, or has happened */
    cudaError_t dead;    /**< why the context is; cudaSuccess: it lives */
    bool held;
    standin_cuda_counts_t counts;
} standin;

/** Begin a call of the runtime. @return What it fails with, if it does: the context is dead, or a
 * test wants it to. */
cudaError_t standin_enter(const char *function, cudaError_t how);

/** With the lock held: whether a test wants the n-th of these to fail. */
bool standin_hits(const char *function);

/** Memory of a device, ours or opened; or of the CPU's that is pinned. */
typedef struct standin_range {
    uint8_t *base;  /**< what the application sees */
    uint8_t *alias; /**< where it can be touched; NULL: nobody has access */
    size_t bytes;
    int fd; /**< -1: pinned */
    int device;
    bool imported;
    bool read_only;
    void *physical; /**< of virtual memory: what is mapped; NULL: other memory */
    uint64_t token;
    struct standin_range *next;
} standin_range_t;

/** With the lock held. @return What the bytes are part of; NULL: they are not of one allocation. */
standin_range_t *standin_find(uint64_t address, uint64_t bytes);
/** With the lock held. A copy becomes known; an address is part of one range at most. */
void standin_add(const standin_range_t *range);
/** With the lock held. @return The range that begins there, not known any more, the caller's to
 * free(); NULL: there is none. */
standin_range_t *standin_remove(const void *base);

/** @return The device whose context is the thread's current one. */
int standin_device_now(void);
/** @return Which of the machine's devices is the process's first. */
int standin_first_device(void);

/** With the lock held. @return Where the bytes of a device's, or of pinned memory, can be read;
 * NULL: they are not of one allocation, or nobody may. */
uint8_t *standin_reach(uint64_t address, uint64_t bytes);
/** The same, to write there. */
uint8_t *standin_reach_to(uint64_t address, uint64_t bytes);
/** With the lock held. @return Whether an address is that of a device's, or of pinned memory. */
bool standin_is_known(uint64_t address);

/** Queue a kernel: run(copy of args) later, with the lock held. @param run  Returns false for an
 * illegal address. */
cudaError_t standin_launch(const char *function, cudaStream_t stream, bool (*run)(void *args),
                           const void *args, size_t bytes);

/** With the lock held: queue an operation that takes several steps, each with the lock held,
 * between which other streams go on. @param args  Is freed when step has returned true. */
void standin_queue(cudaStream_t stream, bool (*step)(void *args), void *args);

/** With the lock held. @return A number that nobody can foresee, but that is the same in each run.
 */
uint64_t standin_roll(void);

/** @return The function of the driver's virtual memory that has a name; NULL: there is none. */
typedef void standin_function_t(void);
standin_function_t *standin_vmm_function(const char *name);

/** Wait until all streams have nothing queued. Without the lock. */
void standin_drain(void);

#endif
