/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/cuda.h"

#include "transceiver/mem/cuda_status.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct kvf_cuda {
    const kvf_alloc_t *alloc;
    int number;
    uint8_t uuid[16];
    char name[256];
    kvf_mem_kind_t kind;
};

/* In a handle; the layout is the compiler's, both ends are of one machine and one program. */
typedef struct handle {
    uint8_t uuid[16]; /* of the device */
    uint64_t offset;  /* of the pool in the allocation */
    cudaIpcMemHandle_t ipc;
} handle_t;

_Static_assert(sizeof(handle_t) <= KVF_CUDA_HANDLE_BYTES, "handle");

/* Calls of the runtime are for a thread's current device. */
static cudaError_t enter(const kvf_cuda_t *cuda, int *before_p) {
    cudaError_t error = cudaGetDevice(before_p);
    return error != cudaSuccess ? error : cudaSetDevice(cuda->number);
}

static void leave(int before) {
    (void)cudaSetDevice(before);
    (void)cudaGetLastError(); /* what failed was reported, and is not the application's */
}

/* ---- the row ---- */

static kvf_status_t cuda_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                               kvf_detail_t *detail) {
    const kvf_cuda_t *cuda = kind->ctx;
    void *base = NULL;
    int before;
    cudaError_t error = enter(cuda, &before);
    if (error == cudaSuccess && (bytes == 0 || bytes > PTRDIFF_MAX)) {
        error = cudaErrorMemoryAllocation;
    }
    if (error == cudaSuccess) {
        error = cudaMalloc(&base, (size_t)bytes);
    }
    if (error == cudaSuccess) {
        error = cudaMemset(base, 0, (size_t)bytes);
    }
    if (error == cudaSuccess) {
        error = cudaDeviceSynchronize(); /* zeroed before anybody writes to it */
    }
    if (error != cudaSuccess) {
        char what[96];
        (void)snprintf(what, sizeof(what), "%" PRIu64 " bytes of device %d", bytes, cuda->number);
        kvf_status_t status = kvf_cuda_fail(detail, error, what);
        if (base != NULL) {
            (void)cudaFree(base);
        }
        leave(before);
        return status;
    }
    leave(before);
    *mem_p = (kvf_mem_t){base, bytes, kind, NULL};
    return KVF_OK;
}

static void cuda_free(kvf_mem_t *mem) {
    int before;
    if (mem->base != NULL && enter(mem->kind->ctx, &before) == cudaSuccess) {
        (void)cudaFree(mem->base);
        leave(before);
    }
    *mem = (kvf_mem_t){0};
}

/* Copy, on a stream of the caller's; or on one that nobody else's work is in, and wait. */
static kvf_status_t copy(const kvf_mem_t *mem, void *to, const void *from, uint64_t bytes,
                         cudaStream_t stream, kvf_detail_t *detail) {
    int before;
    cudaStream_t on = stream != NULL ? stream : cudaStreamPerThread;
    cudaError_t error = enter(mem->kind->ctx, &before);
    if (error == cudaSuccess) {
        error = cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, on);
    }
    if (error == cudaSuccess && stream == NULL) {
        error = cudaStreamSynchronize(on);
    }
    kvf_status_t status =
        error == cudaSuccess ? KVF_OK : kvf_cuda_fail(detail, error, "a copy to or from a device");
    leave(before);
    return status;
}

static kvf_status_t cuda_write(kvf_mem_t *mem, uint64_t off, const void *src, uint64_t bytes,
                               void *stream, kvf_detail_t *detail) {
    return copy(mem, mem->base + off, src, bytes, stream, detail);
}

static kvf_status_t cuda_read(const kvf_mem_t *mem, uint64_t off, void *dst, uint64_t bytes,
                              kvf_detail_t *detail) {
    return copy(mem, dst, mem->base + off, bytes, NULL, detail);
}

/* ---- devices ---- */

kvf_status_t kvf_cuda_open(const kvf_alloc_t *alloc, int number, kvf_cuda_t **cuda_p,
                           kvf_detail_t *detail) {
    struct cudaDeviceProp properties;
    int n = 0, before;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaSuccess && n == 0) {
        error = cudaErrorNoDevice;
    }
    if (error == cudaSuccess && number == -1) {
        error = cudaGetDevice(&number);
    }
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
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
    cuda->number = number;
    error = enter(cuda, &before);
    if (error == cudaSuccess) {
        error = cudaGetDeviceProperties(&properties, number);
        if (error == cudaSuccess) {
            error = cudaFree(NULL); /* makes the context, here instead of in the first transfer */
        }
        leave(before);
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
    };
    *cuda_p = cuda;
    return KVF_OK;
}

void kvf_cuda_close(kvf_cuda_t *cuda) {
    if (cuda != NULL) {
        kvf_free(cuda->alloc, cuda);
    }
}

int kvf_cuda_number(const kvf_cuda_t *cuda) {
    return cuda->number;
}

const char *kvf_cuda_name(const kvf_cuda_t *cuda) {
    return cuda->name;
}

const kvf_mem_kind_t *kvf_cuda_kind(const kvf_cuda_t *cuda) {
    return &cuda->kind;
}

/* ---- memory of others ---- */

/* Where the allocation begins that an address lies in, and its length. The runtime has no call for
 * it; the driver's is found at run time, so that nothing is linked with libcuda. */
static cudaError_t allocation_of(const void *at, uintptr_t *base_p, size_t *bytes_p) {
    typedef int get_range_fn(unsigned long long *base, size_t *bytes, unsigned long long at);
    void *symbol = NULL;
    unsigned long long base = 0;
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &symbol, 12000,
                                                         cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || symbol == NULL) {
        return error != cudaSuccess ? error : cudaErrorNotSupported;
    }
    get_range_fn *get_range;
    memcpy(&get_range, &symbol, sizeof(get_range));
    if (get_range(&base, bytes_p, (unsigned long long)(uintptr_t)at) != 0) {
        return cudaErrorInvalidValue;
    }
    *base_p = (uintptr_t)base;
    return cudaSuccess;
}

kvf_status_t kvf_cuda_attach(const kvf_cuda_t *cuda, void *base, uint64_t bytes, kvf_mem_t *mem_p,
                             kvf_detail_t *detail) {
    struct cudaPointerAttributes attributes = {0};
    uintptr_t from = 0;
    size_t length = 0;
    int before;
    cudaError_t error = enter(cuda, &before);
    if (error == cudaSuccess) {
        error = cudaPointerGetAttributes(&attributes, base);
        if (error == cudaSuccess && attributes.type == cudaMemoryTypeDevice) {
            error = allocation_of(base, &from, &length);
        }
        leave(before);
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory to be attached");
    }
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != cuda->number) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory to be attached is not that of CUDA device %d", cuda->number);
    }
    if (bytes > length - ((uintptr_t)base - from)) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "memory to be attached ends after %" PRIu64 " of %" PRIu64 " bytes",
                        (uint64_t)(length - ((uintptr_t)base - from)), bytes);
    }
    *mem_p = (kvf_mem_t){base, bytes, &cuda->kind, NULL};
    return KVF_OK;
}

kvf_status_t kvf_cuda_export(const kvf_mem_t *mem, uint8_t handle[KVF_CUDA_HANDLE_BYTES],
                             kvf_detail_t *detail) {
    const kvf_cuda_t *cuda = mem->kind->ctx;
    handle_t h = {.offset = 0};
    uintptr_t from = (uintptr_t)mem->base;
    size_t length;
    int before;
    cudaError_t error = enter(cuda, &before);
    if (error == cudaSuccess) {
        error = allocation_of(mem->base, &from, &length);
        if (error == cudaSuccess) {
            error = cudaIpcGetMemHandle(&h.ipc, mem->base);
        }
        leave(before);
    }
    if (error == cudaErrorInvalidValue) { /* what it says of memory that is not cudaMalloc()'s */
        error = cudaErrorNotSupported;
    }
    if (error != cudaSuccess) {
        return kvf_cuda_fail(detail, error, "memory of a device cannot be shared");
    }
    memcpy(h.uuid, cuda->uuid, sizeof(h.uuid));
    h.offset = (uintptr_t)mem->base - from;
    memset(handle, 0, KVF_CUDA_HANDLE_BYTES);
    memcpy(handle, &h, sizeof(h));
    return KVF_OK;
}

/* Peers' devices need not be visible here, or have another number; NVLink or PCIe must lead there.
 */
static kvf_status_t check_reach(const kvf_cuda_t *cuda, const uint8_t uuid[16],
                                kvf_detail_t *detail) {
    struct cudaDeviceProp properties;
    int n = 0, can = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    for (int i = 0; error == cudaSuccess && i < n; i++) {
        error = cudaGetDeviceProperties(&properties, i);
        if (error != cudaSuccess || memcmp(properties.uuid.bytes, uuid, 16) != 0) {
            continue;
        }
        if (i == cuda->number) {
            return KVF_OK;
        }
        error = cudaDeviceCanAccessPeer(&can, cuda->number, i);
        if (error == cudaSuccess && can == 0) {
            return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                            "CUDA device %d has no peer access to device %d, where its pools are",
                            cuda->number, i);
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

kvf_status_t kvf_cuda_open_import(const kvf_cuda_t *cuda,
                                  const uint8_t handle[KVF_CUDA_HANDLE_BYTES],
                                  kvf_cuda_import_t *import_p, kvf_detail_t *detail) {
    handle_t h;
    void *mapping = NULL;
    int before;
    memcpy(&h, handle, sizeof(h));
    cudaError_t error = enter(cuda, &before);
    kvf_status_t status = error == cudaSuccess
                              ? check_reach(cuda, h.uuid, detail)
                              : kvf_cuda_fail(detail, error, "a CUDA device cannot be used");
    if (status == KVF_OK) {
        error = cudaIpcOpenMemHandle(&mapping, h.ipc, cudaIpcMemLazyEnablePeerAccess);
        status = error == cudaSuccess ? KVF_OK : kvf_cuda_fail(detail, error, "opening its memory");
    }
    leave(before);
    if (status == KVF_OK) {
        *import_p = (kvf_cuda_import_t){(uint8_t *)mapping + h.offset, mapping};
    }
    return status;
}

void kvf_cuda_close_import(const kvf_cuda_t *cuda, kvf_cuda_import_t *import) {
    int before;
    if (import->mapping != NULL && enter(cuda, &before) == cudaSuccess) {
        (void)cudaIpcCloseMemHandle(import->mapping);
        leave(before);
    }
    *import = (kvf_cuda_import_t){NULL, NULL};
}
