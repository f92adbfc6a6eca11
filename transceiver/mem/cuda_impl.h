/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MEM_CUDA_IMPL_H
#define KVF_MEM_CUDA_IMPL_H

/**
 * @file
 * The parts of memory on a device: cuda.c (devices, cudaMalloc(), CUDA IPC, the way into another
 * process) and cuda_vmm.c (the driver's virtual memory: physical allocations that are mapped, and
 * shared as file descriptors). Only these include it.
 */

#include "transceiver/mem/cuda.h"
#include "transceiver/mem/cuda_scope.h"

#include <cudaTypedefs.h>

/** The driver's calls for virtual memory, by the names of cuda.h. */
typedef struct kvf_vmm_calls {
    PFN_cuMemGetAllocationGranularity_v10020 granularity;
    PFN_cuMemCreate_v10020 create;
    PFN_cuMemRelease_v10020 release;
    PFN_cuMemAddressReserve_v10020 reserve;
    PFN_cuMemAddressFree_v10020 free;
    PFN_cuMemMap_v10020 map;
    PFN_cuMemUnmap_v10020 unmap;
    PFN_cuMemSetAccess_v10020 set_access;
    PFN_cuMemRetainAllocationHandle_v11000 retain;
    PFN_cuMemGetAllocationPropertiesFromHandle_v10020 properties;
    PFN_cuMemExportToShareableHandle_v10020 to_fd;
    PFN_cuMemImportFromShareableHandle_v10020 from_fd;
} kvf_vmm_calls_t;

struct kvf_cuda {
    const kvf_alloc_t *alloc;
    struct kvf_cuda_context context;
    int (*release)(int device); /* of the primary context */
    kvf_vmm_calls_t vmm;
    uint8_t uuid[16];
    char name[256];
    kvf_mem_kind_t kind, vmm_kind;
};

/** Find a function of the driver's at run time, so that nothing is linked with libcuda.
 * @param function_p  A pointer to a function of that name, which has so many bytes. */
cudaError_t kvf_cuda_find_symbol(const char *name, void *function_p, size_t bytes);

/** Where the allocation begins that an address lies in, and its length; of virtual memory, what one
 * handle is mapped to. @thread any, with the device entered, as for all below */
cudaError_t kvf_cuda_allocation_of(const void *at, uintptr_t *base_p, size_t *bytes_p);

/* ---- cuda_vmm.c ---- */

/** Find the calls. */
cudaError_t kvf_vmm_load(kvf_vmm_calls_t *calls);

/** Write the row's functions for virtual memory. @thread any, without the device */
void kvf_vmm_row(kvf_mem_kind_t *kind);

/** @return Whether something that the driver has given a handle for is mapped at an address. */
bool kvf_vmm_is(const kvf_cuda_t *cuda, void *at);

/**
 * Make a descriptor of the allocation that is mapped at an address.
 *
 * @param[out] fd_p  The caller's to close; it keeps the physical memory. Not passed on to children.
 * -1: there is none, because the address is that of another kind of memory.
 * @return KVF_OK; KVF_ERR_UNSUPPORTED (it was made without this kind of handle); KVF_ERR_IO.
 */
KVF_CHECK kvf_status_t kvf_vmm_export(const kvf_cuda_t *cuda, void *at, int *fd_p,
                                      kvf_detail_t *detail);

/**
 * Map an allocation of another process for this device to read, as far as it is needed.
 *
 * @param fd             Borrowed, not to be trusted.
 * @param offset, bytes  What will be read, counted from the allocation's beginning.
 * @param[out] import_p  kvf_vmm_unmap() it.
 * @return KVF_OK; KVF_ERR_INVALID (the allocation is shorter, or not a device's);
 * KVF_ERR_UNSUPPORTED; KVF_ERR_NO_MEMORY; KVF_ERR_IO (the descriptor is none of an allocation).
 */
KVF_CHECK kvf_status_t kvf_vmm_import(const kvf_cuda_t *cuda, int fd, uint64_t offset,
                                      uint64_t bytes, kvf_cuda_import_t *import_p,
                                      kvf_detail_t *detail);

/** End a mapping, and give its addresses back; nothing of the device's touches it any more. */
void kvf_vmm_unmap(const kvf_cuda_t *cuda, void *base, uint64_t bytes);

#endif
