/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the driver's virtual memory management. A pool is one physical allocation, mapped once;
 * its handle is given back as soon as it is mapped, since the mapping keeps it, and is asked for
 * again by address when a peer is to have it. So memory that an engine has made in this way is
 * shared as our own is. */
#include "transceiver/mem/cuda_impl.h"

#include "kvmgr/base/size.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The numbers of the driver's errors are the runtime's. */
static cudaError_t of_driver(CUresult result) {
    return (cudaError_t)result;
}

cudaError_t kvf_vmm_load(kvf_vmm_calls_t *calls) {
    const struct {
        const char *name;
        void *at;
    } wanted[] = {{"cuMemGetAllocationGranularity", &calls->granularity},
                  {"cuMemCreate", &calls->create},
                  {"cuMemRelease", &calls->release},
                  {"cuMemAddressReserve", &calls->reserve},
                  {"cuMemAddressFree", &calls->free},
                  {"cuMemMap", &calls->map},
                  {"cuMemUnmap", &calls->unmap},
                  {"cuMemSetAccess", &calls->set_access},
                  {"cuMemRetainAllocationHandle", &calls->retain},
                  {"cuMemGetAllocationPropertiesFromHandle", &calls->properties},
                  {"cuMemExportToShareableHandle", &calls->to_fd},
                  {"cuMemImportFromShareableHandle", &calls->from_fd}};
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]) && error == cudaSuccess; i++) {
        error = kvf_cuda_find_symbol(wanted[i].name, wanted[i].at, sizeof(calls->create));
    }
    return error;
}

/* So many bytes in whole granules of an allocation. */
static cudaError_t in_granules(const kvf_vmm_calls_t *vmm, const CUmemAllocationProp *prop,
                               uint64_t bytes, uint64_t *whole_p) {
    size_t granule = 0;
    cudaError_t error =
        of_driver(vmm->granularity(&granule, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (error == cudaSuccess && (granule == 0 || bytes == 0 || bytes > PTRDIFF_MAX - granule)) {
        error = cudaErrorMemoryAllocation;
    }
    if (error == cudaSuccess) {
        *whole_p = (bytes + granule - 1) / granule * granule;
    }
    return error;
}

/* Map an allocation from its beginning, for the device alone. */
static cudaError_t map(const kvf_cuda_t *cuda, CUmemGenericAllocationHandle allocation,
                       uint64_t bytes, CUmemAccess_flags access, void **base_p) {
    const kvf_vmm_calls_t *vmm = &cuda->vmm;
    const CUmemAccessDesc by = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->context.device},
        .flags = access};
    CUdeviceptr base = 0;
    cudaError_t error = of_driver(vmm->reserve(&base, bytes, 0, 0, 0));
    if (error != cudaSuccess) {
        return error;
    }
    error = of_driver(vmm->map(base, bytes, 0, allocation, 0));
    if (error != cudaSuccess) {
        goto err_free;
    }
    error = of_driver(vmm->set_access(base, bytes, &by, 1));
    if (error != cudaSuccess) {
        goto err_unmap;
    }
    memcpy(base_p, &base, sizeof(*base_p));
    return cudaSuccess;
err_unmap:
    (void)vmm->unmap(base, bytes);
err_free:
    (void)vmm->free(base, bytes);
    return error;
}

void kvf_vmm_unmap(const kvf_cuda_t *cuda, void *base, uint64_t bytes) {
    CUdeviceptr at = (uintptr_t)base;
    if (cuda->vmm.unmap(at, bytes) == CUDA_SUCCESS) { /* else the addresses are not free */
        (void)cuda->vmm.free(at, bytes);
    }
}

/* ---- the row ---- */

_Static_assert(sizeof(void *) == sizeof(CUdeviceptr), "addresses");

static cudaError_t make(const kvf_cuda_t *cuda, uint64_t bytes, void **base_p, uint64_t *mapped_p) {
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->context.device}};
    CUmemGenericAllocationHandle allocation = 0;
    void *base = NULL;
    cudaError_t error = in_granules(&cuda->vmm, &prop, bytes, mapped_p);
    if (error == cudaSuccess) {
        error = of_driver(cuda->vmm.create(&allocation, *mapped_p, &prop, 0));
    }
    if (error != cudaSuccess) {
        return error;
    }
    error = map(cuda, allocation, *mapped_p, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &base);
    (void)cuda->vmm.release(allocation); /* the mapping keeps it, or nothing does */
    if (error != cudaSuccess) {
        return error;
    }
    error = cudaMemset(base, 0, *mapped_p); /* whole granules: peers can read all of them */
    if (error == cudaSuccess) {
        error = cudaDeviceSynchronize();
    }
    if (error != cudaSuccess) {
        kvf_vmm_unmap(cuda, base, *mapped_p);
        return error;
    }
    *base_p = base;
    return cudaSuccess;
}

static kvf_status_t vmm_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                              kvf_detail_t *detail) {
    const kvf_cuda_t *cuda = kind->ctx;
    void *base = NULL;
    uint64_t mapped = 0;
    char what[96];
    kvf_cuda_scope_t scope;
    (void)snprintf(what, sizeof(what), "%" PRIu64 " bytes of device %d, by vmm", bytes,
                   cuda->context.device);
    cudaError_t error = kvf_cuda_enter(&cuda->context, &scope);
    if (error == cudaSuccess) {
        error = make(cuda, bytes, &base, &mapped);
        kvf_cuda_leave(&scope);
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, what);
    }
    *mem_p = (kvf_mem_t){base, bytes, kind, (void *)(uintptr_t)mapped};
    return KVF_OK;
}

static void vmm_free(kvf_mem_t *mem) {
    kvf_cuda_scope_t scope;
    if (mem->base != NULL) {
        const kvf_cuda_t *cuda = mem->kind->ctx;
        if (kvf_cuda_enter(&cuda->context, &scope) == cudaSuccess) {
            /* As cudaFree() does: kernels of the application may still look at it. */
            (void)cudaDeviceSynchronize();
            kvf_vmm_unmap(cuda, mem->base, (uintptr_t)mem->priv);
            kvf_cuda_leave(&scope);
        }
    }
    *mem = (kvf_mem_t){0};
}

void kvf_vmm_row(kvf_mem_kind_t *kind) {
    kind->alloc = vmm_alloc;
    kind->free = vmm_free;
}

/* ---- other processes ---- */

bool kvf_vmm_is(const kvf_cuda_t *cuda, void *at) {
    CUmemGenericAllocationHandle allocation = 0;
    bool is = cuda->vmm.retain(&allocation, at) == CUDA_SUCCESS;
    if (is) {
        (void)cuda->vmm.release(allocation);
    }
    return is;
}

kvf_status_t kvf_vmm_export(const kvf_cuda_t *cuda, void *at, int *fd_p, kvf_detail_t *detail) {
    CUmemGenericAllocationHandle allocation = 0;
    CUmemAllocationProp prop;
    int fd = -1;
    if (cuda->vmm.retain(&allocation, at) != CUDA_SUCCESS) {
        *fd_p = -1;
        return KVF_OK;
    }
    memset(&prop, 0, sizeof(prop));
    cudaError_t error = of_driver(cuda->vmm.properties(&prop, allocation));
    bool shared = (prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
    if (error == cudaSuccess && shared) {
        error = of_driver(
            cuda->vmm.to_fd(&fd, allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    }
    (void)cuda->vmm.release(allocation);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory of a device cannot be shared");
    }
    if (!shared) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "memory of a device cannot be shared: it was made by cuMemCreate() without "
                        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
    }
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    *fd_p = fd;
    return KVF_OK;
}

kvf_status_t kvf_vmm_import(const kvf_cuda_t *cuda, int fd, uint64_t offset, uint64_t bytes,
                            kvf_cuda_import_t *import_p, kvf_detail_t *detail) {
    const kvf_vmm_calls_t *vmm = &cuda->vmm;
    CUmemGenericAllocationHandle allocation = 0;
    CUmemAllocationProp prop;
    void *base = NULL;
    uint64_t end = 0, mapped = 0;
    if (kvf_add_u64(offset, bytes, &end) != KVF_OK || end > PTRDIFF_MAX / 2) {
        return kvf_fail(detail, KVF_ERR_INVALID, "its memory is larger than any device's");
    }
    cudaError_t error = of_driver(
        vmm->from_fd(&allocation, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "opening the descriptor of its memory");
    }
    memset(&prop, 0, sizeof(prop));
    error = of_driver(vmm->properties(&prop, allocation));
    bool is_devices = prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (error == cudaSuccess && is_devices) {
        error = in_granules(vmm, &prop, end, &mapped);
    }
    if (error == cudaSuccess && is_devices) {
        error = map(cuda, allocation, mapped, CU_MEM_ACCESS_FLAGS_PROT_READ, &base);
    }
    (void)vmm->release(allocation);
    if (error == cudaSuccess && !is_devices) {
        return kvf_fail(detail, KVF_ERR_INVALID, "its memory is not that of a device");
    }
    if (error == cudaErrorInvalidValue) { /* what the driver says of a range behind the end */
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "its memory is not the %" PRIu64 " bytes that it spoke of, or cannot be "
                        "mapped for reading alone",
                        bytes);
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "mapping its memory");
    }
    *import_p = (kvf_cuda_import_t){(uint8_t *)base + offset, base, mapped};
    return KVF_OK;
}
