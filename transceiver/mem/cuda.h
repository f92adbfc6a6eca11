/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MEM_CUDA_H
#define KVF_MEM_CUDA_H

/**
 * @file
 * Memory of a CUDA device: the rows of the memory kind table, and its way into another process on
 * this machine (CUDA IPC, or a file descriptor of the driver's virtual memory). Without CUDA in the
 * build (cuda_none.c) or a driver on the machine, kvf_cuda_open() says so and nothing else is
 * called.
 *
 * All functions: any thread; its current device and context are the same after the call, and no
 * other device gets one. Those that wait for the device say so; the agent's thread does not call
 * them.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/mem.h"

/** A device of this process. */
typedef struct kvf_cuda kvf_cuda_t;

/** What another process opens memory with: plain bytes, for one machine. */
#define KVF_CUDA_HANDLE_BYTES 96

/**
 * @param number       As in CUDA_VISIBLE_DEVICES' order; -1: the calling thread's current device.
 * @param[out] cuda_p  kvf_cuda_close() it after all of its memory.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (no CUDA in the build, no driver, no device); KVF_ERR_INVALID
 * (no such number; the text says how many there are); KVF_ERR_NO_MEMORY; KVF_ERR_IO. @cost the
 * first time in a process: that of a CUDA context
 */
KVF_CHECK kvf_status_t kvf_cuda_open(const kvf_alloc_t *alloc, int number, kvf_cuda_t **cuda_p,
                                     kvf_detail_t *detail);

/** NULL is allowed. */
void kvf_cuda_close(kvf_cuda_t *cuda);

/** @return Its number, not negative. */
int kvf_cuda_number(const kvf_cuda_t *cuda);

/** How its context is entered (mem/cuda_scope.h); the device's. */
struct kvf_cuda_context;
const struct kvf_cuda_context *kvf_cuda_context(const kvf_cuda_t *cuda);

/** @return What the driver calls it, such as "NVIDIA H200"; the device's. */
const char *kvf_cuda_name(const kvf_cuda_t *cuda);

/** @return The row for memory of this device by cudaMalloc(); it belongs to the device. alloc,
 * free, write and read wait for the device; write with a stream waits at most for room in the
 * driver's buffers. */
const kvf_mem_kind_t *kvf_cuda_kind(const kvf_cuda_t *cuda);

/** @return The same by the driver's virtual memory management (cuMemCreate() and so on): each
 * allocation takes whole granules of the device's, usually 2 MiB, and can be mapped by another
 * process for reading alone. KVF_ERR_UNSUPPORTED also where the driver has no such memory. */
const kvf_mem_kind_t *kvf_cuda_vmm_kind(const kvf_cuda_t *cuda);

/**
 * Describe memory that somebody else allocated on the device: of one allocation by cudaMalloc(), or
 * of mappings of virtual memory one behind the other.
 *
 * @param[out] mem_p  Its owner's as before: not to be given to free().
 * @return KVF_OK; KVF_ERR_INVALID (not memory of this device, or shorter); KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_cuda_attach(const kvf_cuda_t *cuda, void *base, uint64_t bytes,
                                       kvf_mem_t *mem_p, kvf_detail_t *detail);

/**
 * Make the handle of memory of a device.
 *
 * @param[out] fd_p  -1: the handle is all. Else a descriptor that the other process needs, too: of
 * virtual memory, which it keeps; the caller's to close. Whoever has it may map the allocation,
 * also for writing.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (memory from a kind of allocation, or of an operating system,
 * that has none; virtual memory made without descriptors, or of several allocations); KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_cuda_export(const kvf_mem_t *mem, uint8_t handle[KVF_CUDA_HANDLE_BYTES],
                                       int *fd_p, kvf_detail_t *detail);

/** Memory of another process, opened here. */
typedef struct kvf_cuda_import {
    void *base;         /**< where the pool begins */
    void *mapping;      /**< what is to be closed */
    uint64_t vmm_bytes; /**< that are mapped there for reading alone; 0: it is a mapping of CUDA
                           IPC's */
} kvf_cuda_import_t;

/**
 * Open another process's memory. Waits for the device.
 *
 * @param handle  Not to be trusted.
 * @param fd      What came with it, or -1; borrowed, not to be trusted, and not needed any more
 * after the call.
 * @param bytes   That will be read there. Of virtual memory no more is mapped than these, from the
 * allocation's beginning on, in whole granules.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (a device that this one does not reach, or this process's own
 * memory by CUDA IPC); KVF_ERR_INVALID (there is less, or it is not a device's); KVF_ERR_NO_MEMORY;
 * KVF_ERR_IO (it has ended, or handle or descriptor are none).
 */
KVF_CHECK kvf_status_t kvf_cuda_open_import(const kvf_cuda_t *cuda,
                                            const uint8_t handle[KVF_CUDA_HANDLE_BYTES], int fd,
                                            uint64_t bytes, kvf_cuda_import_t *import_p,
                                            kvf_detail_t *detail);

/** Close it; nothing reads it any more. Waits for the device. An empty one is allowed. */
void kvf_cuda_close_import(const kvf_cuda_t *cuda, kvf_cuda_import_t *import);

#endif
