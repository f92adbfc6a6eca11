/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's virtual memory. A physical allocation is a memfd, its descriptors are duplicates
 * of that. What the driver would take as an error of the caller's that it can live with, a handle
 * that was given back or addresses that are still mapped, ends the process here. */
#define _GNU_SOURCE /* memfd_create */
#include "tests/support/cuda/standin_impl.h"

#include <cuda.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULE ((size_t)2 << 20)
#define NAME "standin-vmm-"
#define PAGE 4096
#define HOST (-1)

typedef struct physical {
    int fd;
    size_t bytes;
    int device; /* of the machine; HOST: memory of the CPU's */
    unsigned types;
    bool imported;
    unsigned n_handles, n_mappings;
    struct physical *next;
} physical_t;

typedef struct reservation {
    uint8_t *base;
    size_t bytes;
    struct reservation *next;
} reservation_t;

static physical_t *physicals;
static reservation_t *reservations;

_Noreturn static void misuse(const char *what) {
    (void)fprintf(stderr, "stand-in: %s\n", what);
    abort();
}

/* Begin a call, with the lock held. @return false: it fails, and has not got the lock. */
static bool begin(const char *function, cudaError_t how, CUresult *result_p) {
    *result_p = (CUresult)standin_enter(function, how);
    if (*result_p == CUDA_SUCCESS) {
        (void)pthread_mutex_lock(&standin.lock);
    }
    return *result_p == CUDA_SUCCESS;
}

static CUresult end(CUresult result) {
    (void)pthread_mutex_unlock(&standin.lock);
    return result;
}

/* ---- physical allocations ---- */

static CUmemGenericAllocationHandle add(physical_t physical) {
    physical_t *copy = malloc(sizeof(*copy));
    if (copy == NULL) {
        abort();
    }
    *copy = physical;
    copy->n_handles = 1;
    copy->next = physicals;
    physicals = copy;
    *(copy->imported ? &standin.counts.imports : &standin.counts.allocations) += 1;
    return (uintptr_t)copy;
}

static physical_t *of_handle(CUmemGenericAllocationHandle handle) {
    for (physical_t *physical = physicals; physical != NULL; physical = physical->next) {
        if ((uintptr_t)physical == handle && physical->n_handles > 0) {
            return physical;
        }
    }
    misuse("a handle of memory that was given back, or never was one");
}

static void free_if_unused(physical_t *physical) {
    if (physical->n_handles > 0 || physical->n_mappings > 0) {
        return;
    }
    physical_t **link = &physicals;
    while (*link != physical) {
        link = &(*link)->next;
    }
    *link = physical->next;
    *(physical->imported ? &standin.counts.imports : &standin.counts.allocations) -= 1;
    (void)close(physical->fd);
    free(physical);
}

static CUresult get_granularity(size_t *granularity, const CUmemAllocationProp *prop,
                                CUmemAllocationGranularity_flags option) {
    (void)option;
    *granularity = GRANULE;
    CUresult result = (CUresult)standin_enter("cuMemGetAllocationGranularity", cudaErrorUnknown);
    return prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_ERROR_INVALID_VALUE : result;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags) {
    static const uint8_t somebodys[PAGE] = {[0 ... PAGE - 1] = 0xa5};
    char name[64];
    CUresult result;
    if (!begin("cuMemCreate", cudaErrorMemoryAllocation, &result)) {
        return result;
    }
    if (bytes == 0 || bytes % GRANULE != 0 || flags != 0 ||
        prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE &&
         prop->location.type != CU_MEM_LOCATION_TYPE_HOST_NUMA)) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    int device = prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE
                     ? HOST
                     : prop->location.id + standin_first_device();
    (void)snprintf(name, sizeof(name), NAME "%d", device);
    int fd = memfd_create(name, MFD_CLOEXEC);
    /* Unlike cudaMalloc()'s here, it is what somebody has left. */
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || pwrite(fd, somebodys, PAGE, 0) != PAGE ||
        pwrite(fd, somebodys, PAGE, (off_t)bytes - PAGE) != PAGE) {
        abort();
    }
    *handle = add((physical_t){
        .fd = fd, .bytes = bytes, .device = device, .types = prop->requestedHandleTypes});
    return end(CUDA_SUCCESS);
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    CUresult result;
    if (!begin("cuMemRelease", cudaErrorUnknown, &result)) {
        return result;
    }
    physical_t *physical = of_handle(handle);
    physical->n_handles--;
    free_if_unused(physical);
    return end(CUDA_SUCCESS);
}

static CUresult retain(CUmemGenericAllocationHandle *handle, void *at) {
    CUresult result;
    if (!begin("cuMemRetainAllocationHandle", cudaErrorUnknown, &result)) {
        return result;
    }
    const standin_range_t *range = standin_find((uintptr_t)at, 1);
    if (range == NULL || range->physical == NULL) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    physical_t *physical = range->physical;
    physical->n_handles++;
    *handle = (uintptr_t)physical;
    return end(CUDA_SUCCESS);
}

static CUresult get_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    CUresult result;
    if (!begin("cuMemGetAllocationPropertiesFromHandle", cudaErrorUnknown, &result)) {
        return result;
    }
    const physical_t *physical = of_handle(handle);
    memset(prop, 0, sizeof(*prop));
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = (CUmemAllocationHandleType)physical->types;
    prop->location.type =
        physical->device == HOST ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
    prop->location.id = physical->device == HOST ? 0 : physical->device - standin_first_device();
    return end(CUDA_SUCCESS);
}

/* ---- addresses ---- */

static CUresult reserve(CUdeviceptr *base, size_t bytes, size_t alignment, CUdeviceptr wish,
                        unsigned long long flags) {
    CUresult result;
    if (!begin("cuMemAddressReserve", cudaErrorMemoryAllocation, &result)) {
        return result;
    }
    if (bytes == 0 || bytes % GRANULE != 0 || alignment != 0 || wish != 0 || flags != 0) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    reservation_t *reservation = malloc(sizeof(*reservation));
    uint8_t *at =
        mmap(NULL, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reservation == NULL || at == MAP_FAILED) {
        free(reservation);
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    }
    size_t lead = (GRANULE - (uintptr_t)at % GRANULE) % GRANULE;
    (void)(lead > 0 && munmap(at, lead));
    (void)munmap(at + lead + bytes, GRANULE - lead);
    *reservation = (reservation_t){at + lead, bytes, reservations};
    reservations = reservation;
    standin.counts.reservations++;
    *base = (uintptr_t)reservation->base;
    return end(CUDA_SUCCESS);
}

/* The one that a range lies in. */
static reservation_t **find_reservation(CUdeviceptr at, size_t bytes) {
    reservation_t **link = &reservations;
    while (*link != NULL && !(at >= (uintptr_t)(*link)->base && bytes <= (*link)->bytes &&
                              at - (uintptr_t)(*link)->base <= (*link)->bytes - bytes)) {
        link = &(*link)->next;
    }
    return link;
}

static bool any_mapped(CUdeviceptr at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += GRANULE) {
        if (standin_find(at + i, 1) != NULL) {
            return true;
        }
    }
    return false;
}

static CUresult address_free(CUdeviceptr at, size_t bytes) {
    CUresult result;
    if (!begin("cuMemAddressFree", cudaErrorUnknown, &result)) {
        return result;
    }
    reservation_t **link = find_reservation(at, bytes), *reservation = *link;
    if (reservation == NULL || (uintptr_t)reservation->base != at || reservation->bytes != bytes) {
        misuse("addresses are freed that were not reserved so");
    }
    if (any_mapped(at, bytes)) {
        misuse("addresses are freed while something is mapped there");
    }
    *link = reservation->next;
    (void)munmap(reservation->base, bytes);
    free(reservation);
    standin.counts.reservations--;
    return end(CUDA_SUCCESS);
}

static CUresult map(CUdeviceptr at, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CUresult result;
    if (!begin("cuMemMap", cudaErrorUnknown, &result)) {
        return result;
    }
    physical_t *physical = of_handle(handle);
    if (bytes == 0 || bytes % GRANULE != 0 || at % GRANULE != 0 || offset != 0 || flags != 0 ||
        bytes > physical->bytes) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    if (*find_reservation(at, bytes) == NULL || any_mapped(at, bytes)) {
        misuse("mapped where nothing was reserved, or where something is mapped");
    }
    standin_add(&(standin_range_t){.base = (uint8_t *)(uintptr_t)at,
                                   .bytes = bytes,
                                   .fd = physical->fd,
                                   .device = physical->device - standin_first_device(),
                                   .imported = physical->imported,
                                   .physical = physical});
    physical->n_mappings++;
    return end(CUDA_SUCCESS);
}

/* What is under way may touch it: then the context dies, as a real one does. */
static CUresult unmap(CUdeviceptr at, size_t bytes) {
    CUresult result;
    if (!begin("cuMemUnmap", cudaErrorUnknown, &result)) {
        return result;
    }
    standin_range_t *range = standin_find(at, bytes);
    if (range == NULL || range->physical == NULL || (uintptr_t)range->base != at ||
        range->bytes != bytes) {
        misuse("unmapped where nothing is mapped so");
    }
    physical_t *physical = range->physical;
    (void)standin_remove(range->base);
    if (range->alias != NULL) {
        (void)munmap(range->alias, range->bytes);
    }
    free(range);
    physical->n_mappings--;
    free_if_unused(physical);
    return end(CUDA_SUCCESS);
}

/* The alias has the same rights, so that what forgets to ask dies. */
static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *desc,
                           size_t count) {
    CUresult result;
    if (!begin("cuMemSetAccess", cudaErrorUnknown, &result)) {
        return result;
    }
    standin_range_t *range = standin_find(at, bytes);
    if (range == NULL || range->physical == NULL || range->bytes != bytes || count != 1) {
        misuse("access to what is not mapped so");
    }
    if (desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        desc->location.id != standin_device_now()) {
        misuse("access for another device than the one at work");
    }
    range->read_only = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ;
    if (!range->read_only && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    range->alias = mmap(NULL, bytes, range->read_only ? PROT_READ : PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE, range->fd, 0);
    if (range->alias == MAP_FAILED) {
        abort();
    }
    return end(CUDA_SUCCESS);
}

/* ---- other processes ---- */

static CUresult to_fd(void *shareable, CUmemGenericAllocationHandle handle,
                      CUmemAllocationHandleType type, unsigned long long flags) {
    CUresult result;
    if (!begin("cuMemExportToShareableHandle", cudaErrorUnknown, &result)) {
        return result;
    }
    const physical_t *physical = of_handle(handle);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0 ||
        (physical->types & (unsigned)type) == 0) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    int fd = dup(physical->fd);
    memcpy(shareable, &fd, sizeof(fd));
    return end(fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

static CUresult from_fd(CUmemGenericAllocationHandle *handle, void *shareable,
                        CUmemAllocationHandleType type) {
    char path[64], is[64] = "";
    struct stat stat;
    int device = 0, fd = (int)(intptr_t)shareable;
    CUresult result;
    if (!begin("cuMemImportFromShareableHandle", cudaErrorUnknown, &result)) {
        return result;
    }
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        readlink(path, is, sizeof(is) - 1) < 0 || sscanf(is, "/memfd:" NAME "%d", &device) != 1 ||
        fstat(fd, &stat) != 0) {
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
        return end(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *handle = add((physical_t){.fd = fd,
                               .bytes = (size_t)stat.st_size,
                               .device = device,
                               .types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                               .imported = true});
    return end(CUDA_SUCCESS);
}

standin_function_t *standin_vmm_function(const char *name) {
    static const struct {
        const char *name;
        standin_function_t *function;
    } functions[] = {
        {"cuMemGetAllocationGranularity", (standin_function_t *)get_granularity},
        {"cuMemCreate", (standin_function_t *)create},
        {"cuMemRelease", (standin_function_t *)release},
        {"cuMemRetainAllocationHandle", (standin_function_t *)retain},
        {"cuMemGetAllocationPropertiesFromHandle", (standin_function_t *)get_properties},
        {"cuMemAddressReserve", (standin_function_t *)reserve},
        {"cuMemAddressFree", (standin_function_t *)address_free},
        {"cuMemMap", (standin_function_t *)map},
        {"cuMemUnmap", (standin_function_t *)unmap},
        {"cuMemSetAccess", (standin_function_t *)set_access},
        {"cuMemExportToShareableHandle", (standin_function_t *)to_fd},
        {"cuMemImportFromShareableHandle", (standin_function_t *)from_fd}};
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        if (strcmp(name, functions[i].name) == 0) {
            return functions[i].function;
        }
    }
    return NULL;
}
