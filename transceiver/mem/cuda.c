/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/cuda_impl.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* In a handle; the layout is the compiler's, both ends are of one machine and one program. */
typedef struct handle {
    uint8_t uuid[16];       /* of the device */
    uint64_t offset;        /* of the pool in the allocation */
    cudaIpcMemHandle_t ipc; /* zero, if a descriptor goes with it */
} handle_t;

_Static_assert(sizeof(handle_t) <= KVF_CUDA_HANDLE_BYTES, "handle");

static cudaError_t enter(const kvf_cuda_t *cuda, kvf_cuda_scope_t *scope) {
    return kvf_cuda_enter(&cuda->context, scope);
}

/* ---- the row ---- */

static kvf_status_t cuda_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                               kvf_detail_t *detail) {
    const kvf_cuda_t *cuda = kind->ctx;
    void *base = NULL;
    char what[96];
    kvf_cuda_scope_t scope;
    (void)snprintf(what, sizeof(what), "%" PRIu64 " bytes of device %d", bytes,
                   cuda->context.device);
    cudaError_t error = enter(cuda, &scope);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, what);
    }
    error = bytes == 0 || bytes > PTRDIFF_MAX ? cudaErrorMemoryAllocation
                                              : cudaMalloc(&base, (size_t)bytes);
    if (error == cudaSuccess) {
        error = cudaMemset(base, 0, (size_t)bytes);
    }
    if (error == cudaSuccess) {
        error = cudaDeviceSynchronize(); /* zeroed before anybody writes to it */
    }
    kvf_status_t status = KVF_OK;
    if (error != cudaSuccess) {
        status = kvf_cuda_fail(detail, error, what);
        (void)cudaFree(base);
    }
    kvf_cuda_leave(&scope);
    if (status == KVF_OK) {
        *mem_p = (kvf_mem_t){base, bytes, kind, NULL};
    }
    return status;
}

static void cuda_free(kvf_mem_t *mem) {
    kvf_cuda_scope_t scope;
    if (mem->base != NULL && enter(mem->kind->ctx, &scope) == cudaSuccess) {
        (void)cudaFree(mem->base);
        kvf_cuda_leave(&scope);
    }
    *mem = (kvf_mem_t){0};
}

/* Memory that the device reads by itself, later than the call: the caller may have changed it by
 * then. */
static bool is_pinned(const void *at) {
    struct cudaPointerAttributes attributes = {0};
    if (cudaPointerGetAttributes(&attributes, at) != cudaSuccess) {
        (void)cudaGetLastError();
        return false; /* none of the runtime's */
    }
    return attributes.type != cudaMemoryTypeUnregistered;
}

/* Copy, on a stream of the caller's; or on one that nobody else's work is in, and wait. */
static cudaError_t copy_on(void *to, const void *from, uint64_t bytes, cudaStream_t stream) {
    void *passing = NULL;
    if (stream != NULL && is_pinned(from)) {
        passing = malloc((size_t)bytes);
        if (passing == NULL) {
            return cudaErrorMemoryAllocation;
        }
        memcpy(passing, from, (size_t)bytes);
        from = passing;
    }
    cudaStream_t on = stream != NULL ? stream : cudaStreamPerThread;
    cudaError_t error = cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, on);
    if (error == cudaSuccess && stream == NULL) {
        error = cudaStreamSynchronize(on);
    }
    free(passing); /* what is pageable was read */
    return error;
}

static kvf_status_t copy(const kvf_mem_t *mem, void *to, const void *from, uint64_t bytes,
                         cudaStream_t stream, kvf_detail_t *detail) {
    kvf_cuda_scope_t scope;
    cudaError_t error = enter(mem->kind->ctx, &scope);
    if (error == cudaSuccess) {
        error = copy_on(to, from, bytes, stream);
        kvf_cuda_leave(&scope);
    }
    return error == cudaSuccess ? KVF_OK
                                : kvf_cuda_fail(detail, error, "a copy to or from a device");
}

static kvf_status_t cuda_write(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                               void *stream, kvf_detail_t *detail) {
    return copy(mem, mem->base + off, src, bytes, stream, detail);
}

static kvf_status_t cuda_read(const kvf_mem_t *mem, uint64_t off, void *dst, uint64_t bytes,
                              kvf_detail_t *detail) {
    return copy(mem, dst, mem->base + off, bytes, NULL, detail);
}

/* On a stream that nobody else's work is in, a call for each run of neighbours; and wait. */
static kvf_status_t cuda_zero(kvf_mem_t *mem, uint64_t piece_bytes, int64_t n, const int32_t *slots,
                              kvf_detail_t *detail) {
    kvf_cuda_scope_t scope;
    cudaError_t error = enter(mem->kind->ctx, &scope);
    if (error == cudaSuccess) {
        for (int64_t i = 0; i < n && error == cudaSuccess;) {
            int32_t first = slots[i], last = first;
            for (i++; i < n && (slots[i] == last + 1 || slots[i] == first - 1); i++) {
                first = slots[i] < first ? slots[i] : first;
                last = slots[i] > last ? slots[i] : last;
            }
            error = cudaMemsetAsync(mem->base + (uint64_t)first * piece_bytes, 0,
                                    (size_t)(last - first + 1) * piece_bytes, cudaStreamPerThread);
        }
        /* Whoever has a page next writes to it: until one or the other is said, zeros may come. */
        cudaError_t ended = cudaStreamSynchronize(cudaStreamPerThread);
        while (ended != cudaSuccess && !kvf_cuda_is_fatal(ended)) {
            const struct timespec pause = {0, 1000000};
            (void)nanosleep(&pause, NULL);
            ended = cudaStreamSynchronize(cudaStreamPerThread);
        }
        error = error == cudaSuccess ? ended : error;
        kvf_cuda_leave(&scope);
    }
    return error == cudaSuccess ? KVF_OK
                                : kvf_cuda_fail(detail, error, "zeroing pages of a device");
}

/* ---- devices ---- */

cudaError_t kvf_cuda_find_symbol(const char *name, void *function_p, size_t bytes) {
    void *symbol = NULL;
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &symbol, 12000, cudaEnableDefault, &found);
    if (error == cudaSuccess && (found != cudaDriverEntryPointSuccess || symbol == NULL)) {
        error = cudaErrorNotSupported;
    }
    if (error == cudaSuccess) {
        memcpy(function_p, &symbol, bytes);
    }
    return error;
}

/* Take the device's primary context, which is that of everybody who uses the runtime. */
static cudaError_t retain(kvf_cuda_t *cuda) {
    int (*take)(void **context_p, int device);
    struct kvf_cuda_context *context = &cuda->context;
    cudaError_t error = kvf_cuda_find_symbol("cuDevicePrimaryCtxRetain", &take, sizeof(take));
    if (error == cudaSuccess) {
        error = kvf_cuda_find_symbol("cuDevicePrimaryCtxRelease", &cuda->release,
                                     sizeof(cuda->release));
    }
    if (error == cudaSuccess) {
        error = kvf_cuda_find_symbol("cuCtxPushCurrent", &context->push, sizeof(context->push));
    }
    if (error == cudaSuccess) {
        error = kvf_cuda_find_symbol("cuCtxPopCurrent", &context->pop, sizeof(context->pop));
    }
    if (error == cudaSuccess) {
        error = kvf_vmm_load(&cuda->vmm);
    }
    /* A device's handle is its number. */
    if (error == cudaSuccess && take(&context->primary, context->device) != 0) {
        error = cudaErrorDevicesUnavailable;
    }
    return error;
}

kvf_status_t kvf_cuda_open(const kvf_alloc_t *alloc, int number, kvf_cuda_t **cuda_p,
                           kvf_detail_t *detail) {
    struct cudaDeviceProp properties;
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaSuccess && n == 0) {
        error = cudaErrorNoDevice;
    }
    if (error == cudaSuccess && number == -1) {
        error = cudaGetDevice(&number);
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "no CUDA device");
    }
    if (number < 0 || number >= n) {
        return kvf_fail(detail, KVF_ERR_INVALID, "CUDA device %d: this process sees %d, from 0 on",
                        number, n);
    }
    kvf_cuda_t *cuda = kvf_calloc(alloc, 1, sizeof(*cuda));
    if (cuda == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for a device");
    }
    cuda->alloc = alloc;
    cuda->context.device = number;
    error = cudaGetDeviceProperties(&properties, number);
    if (error == cudaSuccess) {
        error = retain(cuda);
    }
    if (error != cudaSuccess) {
        kvf_free(alloc, cuda);
        return kvf_cuda_fail(detail, error, "a CUDA device cannot be used");
    }
    memcpy(cuda->uuid, properties.uuid.bytes, sizeof(cuda->uuid));
    (void)snprintf(cuda->name, sizeof(cuda->name), "%s", properties.name);
    cuda->kind = (kvf_mem_kind_t){
        .name = "cuda",
        .type = KVF_MEM_CUDA,
        .ctx = cuda,
        .alloc = cuda_alloc,
        .free = cuda_free,
        .write = cuda_write,
        .read = cuda_read,
        .zero = cuda_zero,
    };
    cuda->vmm_kind = cuda->kind;
    kvf_vmm_row(&cuda->vmm_kind);
    *cuda_p = cuda;
    return KVF_OK;
}

void kvf_cuda_close(kvf_cuda_t *cuda) {
    if (cuda != NULL) {
        (void)cuda->release(cuda->context.device);
        kvf_free(cuda->alloc, cuda);
    }
}

int kvf_cuda_number(const kvf_cuda_t *cuda) {
    return cuda->context.device;
}

const struct kvf_cuda_context *kvf_cuda_context(const kvf_cuda_t *cuda) {
    return &cuda->context;
}

const char *kvf_cuda_name(const kvf_cuda_t *cuda) {
    return cuda->name;
}

const kvf_mem_kind_t *kvf_cuda_kind(const kvf_cuda_t *cuda) {
    return &cuda->kind;
}

const kvf_mem_kind_t *kvf_cuda_vmm_kind(const kvf_cuda_t *cuda) {
    return &cuda->vmm_kind;
}

/* ---- memory of others ---- */

/* The runtime has no call for it. */
cudaError_t kvf_cuda_allocation_of(const void *at, uintptr_t *base_p, size_t *bytes_p) {
    int (*get_range)(unsigned long long *base, size_t *bytes, unsigned long long at);
    unsigned long long base = 0;
    cudaError_t error = kvf_cuda_find_symbol("cuMemGetAddressRange", &get_range, sizeof(get_range));
    if (error == cudaSuccess && get_range(&base, bytes_p, (unsigned long long)(uintptr_t)at) != 0) {
        error = cudaErrorInvalidValue;
    }
    *base_p = (uintptr_t)base;
    return error;
}

/* How much of a device's memory there is from an address on, up to `wanted`. Virtual memory may be
 * of several allocations, one behind the other; others that lie so have nothing to do with each
 * other.
 */
static cudaError_t length_of(const kvf_cuda_t *cuda, uint8_t *at, uint64_t wanted,
                             uint64_t *bytes_p) {
    uint64_t bytes = 0;
    cudaError_t error = cudaSuccess;
    bool more = true;
    while (more && bytes < wanted) {
        uintptr_t from = 0;
        size_t length = 0;
        error = kvf_cuda_allocation_of(at + bytes, &from, &length);
        more = error == cudaSuccess && kvf_vmm_is(cuda, at + bytes);
        bytes += error == cudaSuccess ? length - ((uintptr_t)at + bytes - from) : 0;
    }
    *bytes_p = bytes;
    return bytes > 0 ? cudaSuccess : error;
}

kvf_status_t kvf_cuda_attach(const kvf_cuda_t *cuda, void *base, uint64_t bytes, kvf_mem_t *mem_p,
                             kvf_detail_t *detail) {
    struct cudaPointerAttributes attributes = {0};
    uint64_t length = 0;
    kvf_cuda_scope_t scope;
    cudaError_t error = enter(cuda, &scope);
    if (error == cudaSuccess) {
        error = cudaPointerGetAttributes(&attributes, base);
        if (error == cudaSuccess && attributes.type == cudaMemoryTypeDevice) {
            error = length_of(cuda, base, bytes, &length);
        }
        kvf_cuda_leave(&scope);
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory to be attached");
    }
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != cuda->context.device) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory to be attached is not that of CUDA device %d",
                        cuda->context.device);
    }
    if (bytes > length) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory to be attached ends after %" PRIu64 " of %" PRIu64 " bytes", length,
                        bytes);
    }
    *mem_p = (kvf_mem_t){base, bytes, &cuda->kind, NULL};
    return KVF_OK;
}

/* By a descriptor if it is virtual memory, else by CUDA IPC. */
static kvf_status_t export(const kvf_mem_t *mem, handle_t *handle, int *fd_p,
                           kvf_detail_t *detail) {
    uintptr_t from = 0;
    size_t length = 0;
    int fd = -1;
    cudaError_t error = kvf_cuda_allocation_of(mem->base, &from, &length);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory of a device cannot be shared");
    }
    handle->offset = (uintptr_t)mem->base - from;
    if (mem->bytes > length - handle->offset) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                        "memory of a device cannot be shared: it is of several allocations");
    }
    kvf_status_t status = kvf_vmm_export(mem->kind->ctx, mem->base, &fd, detail);
    if (status != KVF_OK) {
        return status;
    }
    error = fd >= 0 ? cudaSuccess : cudaIpcGetMemHandle(&handle->ipc, (void *)from);
    if (error == cudaErrorInvalidValue) { /* what it says of memory that is not cudaMalloc()'s */
        error = cudaErrorNotSupported;
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory of a device cannot be shared");
    }
    *fd_p = fd;
    return KVF_OK;
}

kvf_status_t kvf_cuda_export(const kvf_mem_t *mem, uint8_t handle[KVF_CUDA_HANDLE_BYTES], int *fd_p,
                             kvf_detail_t *detail) {
    const kvf_cuda_t *cuda = mem->kind->ctx;
    handle_t h = {.offset = 0};
    kvf_cuda_scope_t scope;
    cudaError_t error = enter(cuda, &scope);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory of a device cannot be shared");
    }
    kvf_status_t status = export(mem, &h, fd_p, detail);
    kvf_cuda_leave(&scope);
    if (status == KVF_OK) {
        memcpy(h.uuid, cuda->uuid, sizeof(h.uuid));
        memset(handle, 0, KVF_CUDA_HANDLE_BYTES);
        memcpy(handle, &h, sizeof(h));
    }
    return status;
}

/* Peers' devices need not be visible here, or have another number; NVLink or PCIe must lead there.
 */
static kvf_status_t check_reach(const kvf_cuda_t *cuda, const uint8_t uuid[16],
                                kvf_detail_t *detail) {
    struct cudaDeviceProp properties;
    int n = 0, can = 0, own = cuda->context.device;
    cudaError_t error = cudaGetDeviceCount(&n);
    for (int i = 0; error == cudaSuccess && i < n; i++) {
        error = cudaGetDeviceProperties(&properties, i);
        if (error != cudaSuccess || memcmp(properties.uuid.bytes, uuid, 16) != 0) {
            continue;
        }
        if (i == own) {
            return KVF_OK;
        }
        error = cudaDeviceCanAccessPeer(&can, own, i);
        if (error == cudaSuccess && can == 0) {
            return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                            "CUDA device %d has no peer access to device %d, where its pools are",
                            own, i);
        }
        if (error == cudaSuccess) {
            return KVF_OK;
        }
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "looking for its device");
    }
    return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                    "its device is not one of the %d that this process sees: add it to "
                    "CUDA_VISIBLE_DEVICES",
                    n);
}

/* Open it; what a peer says of offset and length is believed only as far as the allocation goes. */
static kvf_status_t open_handle(const handle_t *handle, uint64_t bytes, kvf_cuda_import_t *import_p,
                                kvf_detail_t *detail) {
    void *mapping = NULL;
    uintptr_t from = 0;
    size_t length = 0;
    cudaError_t error = cudaIpcOpenMemHandle(&mapping, handle->ipc, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "opening its memory");
    }
    error = kvf_cuda_allocation_of(mapping, &from, &length);
    if (error != cudaSuccess || handle->offset > length || bytes > length - handle->offset) {
        (void)cudaIpcCloseMemHandle(mapping);
        return error != cudaSuccess
                   ? kvf_cuda_fail(detail, error, "looking at its memory")
                   : kvf_fail(detail, KVF_ERR_INVALID,
                              "its memory is not the %" PRIu64 " bytes that it spoke of", bytes);
    }
    *import_p = (kvf_cuda_import_t){(uint8_t *)mapping + handle->offset, mapping, 0};
    return KVF_OK;
}

kvf_status_t kvf_cuda_open_import(const kvf_cuda_t *cuda,
                                  const uint8_t handle[KVF_CUDA_HANDLE_BYTES], int fd,
                                  uint64_t bytes, kvf_cuda_import_t *import_p,
                                  kvf_detail_t *detail) {
    handle_t h;
    kvf_cuda_scope_t scope;
    memcpy(&h, handle, sizeof(h));
    cudaError_t error = enter(cuda, &scope);
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "a CUDA device cannot be used");
    }
    kvf_status_t status = check_reach(cuda, h.uuid, detail);
    if (status == KVF_OK) {
        status = fd >= 0 ? kvf_vmm_import(cuda, fd, h.offset, bytes, import_p, detail)
                         : open_handle(&h, bytes, import_p, detail);
    }
    kvf_cuda_leave(&scope);
    return status;
}

void kvf_cuda_close_import(const kvf_cuda_t *cuda, kvf_cuda_import_t *import) {
    kvf_cuda_scope_t scope;
    if (import->mapping != NULL && enter(cuda, &scope) == cudaSuccess) {
        if (import->vmm_bytes > 0) {
            kvf_vmm_unmap(cuda, import->mapping, import->vmm_bytes);
        } else {
            (void)cudaIpcCloseMemHandle(import->mapping);
        }
        kvf_cuda_leave(&scope);
    }
    *import = (kvf_cuda_import_t){NULL, NULL, 0};
}
