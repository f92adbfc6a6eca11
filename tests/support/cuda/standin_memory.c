/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's devices and memory. */
#define _GNU_SOURCE /* memfd_create, fallocate */
#include "tests/support/cuda/standin_impl.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

struct standin standin = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};

typedef standin_range_t range_t;

static range_t *ranges;
static _Thread_local int current = -1; /* set by cudaSetDevice(); -1: never */
static _Thread_local int pushed[32], n_pushed;

/* What a handle says. */
typedef struct handle {
    uint64_t token;
    uint64_t bytes;
    int32_t pid;
    int32_t fd;
    int32_t device;
} handle_t;

static int n_devices(void) {
    const char *text = getenv("KVF_STANDIN_CUDA_DEVICES");
    return text == NULL ? 1 : atoi(text);
}

/* ---- failures on purpose ---- */

static struct {
    char function[64];
    uint64_t left; /* calls until it fails; 0: it does not */
    bool read;     /* the environment was */
} failing;

bool standin_hits(const char *function) {
    const char *text = getenv("KVF_STANDIN_CUDA_FAIL");
    if (!failing.read && text != NULL &&
        sscanf(text, "%63[^:]:%lu", failing.function, &failing.left) != 2) {
        abort();
    }
    failing.read = true;
    return failing.left > 0 && strcmp(failing.function, function) == 0 && --failing.left == 0;
}

void standin_cuda_fail(const char *function, uint64_t n) {
    (void)pthread_mutex_lock(&standin.lock);
    (void)snprintf(failing.function, sizeof(failing.function), "%s", function);
    failing.left = n;
    failing.read = true;
    (void)pthread_mutex_unlock(&standin.lock);
}

cudaError_t standin_enter(const char *function, cudaError_t how) {
    (void)pthread_mutex_lock(&standin.lock);
    cudaError_t error = n_devices() == 0              ? cudaErrorInsufficientDriver
                        : standin.dead != cudaSuccess ? standin.dead
                        : standin_hits(function)      ? how
                                                      : cudaSuccess;
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

standin_cuda_counts_t standin_cuda_counts(void) {
    (void)pthread_mutex_lock(&standin.lock);
    standin_cuda_counts_t counts = standin.counts;
    (void)pthread_mutex_unlock(&standin.lock);
    return counts;
}

void standin_cuda_reset(void) {
    (void)pthread_mutex_lock(&standin.lock);
    standin.dead = cudaSuccess;
    (void)pthread_mutex_unlock(&standin.lock);
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = standin_enter("cudaGetDeviceCount", cudaErrorUnknown);
    *count = error == cudaSuccess ? n_devices() : 0;
    return error;
}

/* Without any context, that of the first. */
int standin_device_now(void) {
    return n_pushed > 0 ? pushed[n_pushed - 1] : current < 0 ? 0 : current;
}

/* A context costs memory and time, so no device is to get one that is not used. */
static void make_context(int device) {
    (void)pthread_mutex_lock(&standin.lock);
    standin.counts.contexts |= UINT64_C(1) << device;
    (void)pthread_mutex_unlock(&standin.lock);
}

cudaError_t cudaGetDevice(int *device) {
    cudaError_t error = standin_enter("cudaGetDevice", cudaErrorUnknown);
    if (error == cudaSuccess) {
        *device = standin_device_now();
    }
    return error;
}

cudaError_t cudaSetDevice(int device) {
    cudaError_t error = standin_enter("cudaSetDevice", cudaErrorUnknown);
    if (error == cudaSuccess && (device < 0 || device >= n_devices())) {
        error = cudaErrorInvalidDevice;
    }
    if (error == cudaSuccess) {
        current = device;
        make_context(device);
    }
    return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static _Thread_local enum cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = now;
    now = *mode;
    *mode = before;
    return cudaSuccess;
}

int standin_first_device(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* of which there is one, or all are */
    return visible == NULL ? 0 : atoi(visible);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    cudaError_t error = standin_enter("cudaGetDeviceProperties", cudaErrorUnknown);
    memset(prop, 0, sizeof(*prop));
    device += standin_first_device();
    (void)snprintf(prop->name, sizeof(prop->name), "stand-in %d", device);
    (void)snprintf(prop->uuid.bytes, sizeof(prop->uuid.bytes), "stand-in %d", device);
    return error;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return standin_enter("cudaDeviceCanAccessPeer", cudaErrorUnknown);
}

cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = standin_enter("cudaDeviceSynchronize", cudaErrorUnknown);
    standin_drain();
    return error;
}

cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorIllegalAddress:
        return "an illegal memory access was encountered";
    case cudaErrorNotSupported:
        return "operation not supported";
    default:
        return "unknown error of the stand-in";
    }
}

/* ---- memory ---- */

range_t *standin_find(uint64_t address, uint64_t bytes) {
    range_t *range = ranges;
    while (range != NULL && !(address - (uintptr_t)range->base < range->bytes &&
                              bytes <= range->bytes - (address - (uintptr_t)range->base))) {
        range = range->next;
    }
    return range;
}

bool standin_is_known(uint64_t address) {
    return standin_find(address, 1) != NULL;
}

uint8_t *standin_reach(uint64_t address, uint64_t bytes) {
    const range_t *range = standin_find(address, bytes);
    return range == NULL || range->alias == NULL
               ? NULL
               : range->alias + (address - (uintptr_t)range->base);
}

uint8_t *standin_reach_to(uint64_t address, uint64_t bytes) {
    const range_t *range = standin_find(address, bytes);
    return range == NULL || range->read_only ? NULL : standin_reach(address, bytes);
}

void standin_add(const range_t *range) {
    range_t *copy = malloc(sizeof(*copy));
    if (copy == NULL) {
        abort();
    }
    *copy = *range;
    copy->next = ranges;
    ranges = copy;
}

range_t *standin_remove(const void *base) {
    range_t **link = &ranges, *range;
    while (*link != NULL && (*link)->base != base) {
        link = &(*link)->next;
    }
    range = *link;
    if (range != NULL) {
        *link = range->next;
    }
    return range;
}

static void add(const range_t *range) {
    (void)pthread_mutex_lock(&standin.lock);
    standin_add(range);
    standin.counts.allocations += range->fd >= 0 && !range->imported;
    standin.counts.imports += range->imported;
    standin.counts.pinned += range->fd < 0;
    (void)pthread_mutex_unlock(&standin.lock);
}

/* Forget the range that begins there. @return false: there is none of that kind. */
static bool drop(void *base, bool pinned, bool imported) {
    (void)pthread_mutex_lock(&standin.lock);
    range_t *range = standin_find((uintptr_t)base, 1);
    bool ok = range != NULL && range->base == base && (range->fd < 0) == pinned &&
              range->imported == imported && range->physical == NULL;
    if (ok) {
        (void)standin_remove(base);
        standin.counts.allocations -= !pinned && !imported;
        standin.counts.imports -= imported;
        standin.counts.pinned -= pinned;
    }
    (void)pthread_mutex_unlock(&standin.lock);
    if (ok) {
        (void)munmap(range->base, range->bytes);
        if (!pinned) {
            (void)munmap(range->alias, range->bytes);
            (void)close(range->fd);
        }
        free(range);
    }
    return ok;
}

/* Map a file as a device's memory: addresses without access, and an alias. */
static cudaError_t map(int fd, size_t bytes, bool imported, uint64_t token, int device,
                       void **base_p) {
    range_t range = {
        .bytes = bytes, .fd = fd, .device = device, .imported = imported, .token = token};
    range.base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    range.alias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (range.base == MAP_FAILED || range.alias == MAP_FAILED) {
        (void)close(fd);
        return cudaErrorMemoryAllocation;
    }
    add(&range);
    *base_p = range.base;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **base_p, size_t bytes) {
    char name[32];
    uint64_t token;
    cudaError_t error = standin_enter("cudaMalloc", cudaErrorMemoryAllocation);
    if (error != cudaSuccess || getrandom(&token, sizeof(token), 0) != sizeof(token)) {
        return error;
    }
    (void)snprintf(name, sizeof(name), "standin-%016lx", token);
    bytes = (bytes + 4095) & ~(size_t)4095;
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        return cudaErrorMemoryAllocation;
    }
    make_context(standin_device_now());
    return map(fd, bytes, false, token, standin_device_now(), base_p);
}

cudaError_t cudaFree(void *base) {
    cudaError_t error = standin_enter("cudaFree", cudaErrorUnknown);
    if (base == NULL) {
        return error;
    }
    standin_drain();
    return drop(base, false, false) ? error : cudaErrorInvalidValue;
}

cudaError_t cudaHostAlloc(void **base_p, size_t bytes, unsigned flags) {
    (void)flags;
    cudaError_t error = standin_enter("cudaHostAlloc", cudaErrorMemoryAllocation);
    if (error != cudaSuccess) {
        return error;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return cudaErrorMemoryAllocation;
    }
    add(&(range_t){.base = base, .alias = base, .bytes = bytes, .fd = -1});
    *base_p = base;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *base) {
    cudaError_t error = standin_enter("cudaFreeHost", cudaErrorUnknown);
    if (base == NULL) {
        return error;
    }
    standin_drain();
    return drop(base, true, false) ? error : cudaErrorInvalidValue;
}

cudaError_t cudaMemset(void *base, int value, size_t bytes) {
    cudaError_t error = standin_enter("cudaMemset", cudaErrorUnknown);
    standin_drain();
    (void)pthread_mutex_lock(&standin.lock);
    uint8_t *at = standin_reach_to((uintptr_t)base, bytes);
    if (at != NULL && error == cudaSuccess && value != 0) {
        memset(at, value, bytes);
    } else if (at != NULL && error == cudaSuccess) { /* without making all of it real */
        const range_t *range = standin_find((uintptr_t)base, bytes);
        if (range->fd < 0 || fallocate(range->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                       at - range->alias, (off_t)bytes) != 0) {
            memset(at, 0, bytes);
        }
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return at == NULL ? cudaErrorInvalidValue : error;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
    cudaError_t error = standin_enter("cudaPointerGetAttributes", cudaErrorUnknown);
    (void)pthread_mutex_lock(&standin.lock);
    const range_t *range = standin_find((uintptr_t)at, 1);
    *attributes = (struct cudaPointerAttributes){
        .type = range == NULL   ? cudaMemoryTypeUnregistered
                : range->fd < 0 ? cudaMemoryTypeHost
                                : cudaMemoryTypeDevice,
        .device = range == NULL ? 0 : range->device,
    };
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

/* cuMemGetAddressRange, which is the driver's. */
static int get_range(unsigned long long *base, size_t *bytes, unsigned long long at) {
    (void)pthread_mutex_lock(&standin.lock);
    const range_t *range = standin_find(at, 1);
    if (range != NULL) {
        *base = (uintptr_t)range->base;
        *bytes = range->bytes;
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return range == NULL;
}

/* A primary context is its device's number and one. */
static int retain(void **context, int device) {
    if (standin_enter("cuDevicePrimaryCtxRetain", cudaErrorUnknown) != cudaSuccess) {
        return 1;
    }
    make_context(device);
    *context = (void *)(uintptr_t)(device + 1);
    return 0;
}

static int release(int device) {
    return device < 0;
}

static int push(void *context) {
    cudaError_t error = standin_enter("cuCtxPushCurrent", cudaErrorUnknown);
    if (error != cudaSuccess || n_pushed == 32) {
        return error != cudaSuccess ? (int)error : 1;
    }
    pushed[n_pushed++] = (int)(uintptr_t)context - 1;
    return 0;
}

static int pop(void **context) {
    if (n_pushed == 0) {
        abort();
    }
    *context = (void *)(uintptr_t)(pushed[--n_pushed] + 1);
    return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    static const struct {
        const char *name;
        standin_function_t *function;
    } functions[] = {{"cuMemGetAddressRange", (standin_function_t *)get_range},
                     {"cuDevicePrimaryCtxRetain", (standin_function_t *)retain},
                     {"cuDevicePrimaryCtxRelease", (standin_function_t *)release},
                     {"cuCtxPushCurrent", (standin_function_t *)push},
                     {"cuCtxPopCurrent", (standin_function_t *)pop}};
    (void)version;
    (void)flags;
    *found = cudaDriverEntryPointSymbolNotFound;
    *function = NULL;
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        if (strcmp(symbol, functions[i].name) == 0) {
            memcpy(function, &functions[i].function, sizeof(*function));
            *found = cudaDriverEntryPointSuccess;
        }
    }
    standin_function_t *vmm = standin_vmm_function(symbol);
    if (vmm != NULL) {
        memcpy(function, &vmm, sizeof(*function));
        *found = cudaDriverEntryPointSuccess;
    }
    return standin_enter("cudaGetDriverEntryPointByVersion", cudaErrorUnknown);
}

/* ---- other processes ---- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) {
    cudaError_t error = standin_enter("cudaIpcGetMemHandle", cudaErrorInvalidValue);
    (void)pthread_mutex_lock(&standin.lock);
    const range_t *range = standin_find((uintptr_t)at, 1);
    if (range == NULL || range->fd < 0 || range->imported || range->physical != NULL) {
        error = cudaErrorInvalidValue;
    }
    if (error == cudaSuccess) {
        handle_t h = {range->token, range->bytes, getpid(), range->fd, range->device};
        memset(handle, 0, sizeof(*handle));
        memcpy(handle, &h, sizeof(h));
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return error;
}

cudaError_t cudaIpcOpenMemHandle(void **base_p, cudaIpcMemHandle_t handle, unsigned flags) {
    char path[64], is[64] = "", want[64];
    handle_t h;
    (void)flags;
    memcpy(&h, &handle, sizeof(h));
    cudaError_t error = standin_enter("cudaIpcOpenMemHandle", cudaErrorUnknown);
    if (error != cudaSuccess) {
        return error;
    }
    if (h.pid == getpid()) {
        return cudaErrorDeviceUninitialized;
    }
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
    (void)snprintf(want, sizeof(want), "/memfd:standin-%016lx (deleted)", h.token);
    struct stat stat;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || readlink(path, is, sizeof(is) - 1) < 0 || strcmp(is, want) != 0 ||
        fstat(fd, &stat) != 0 || (uint64_t)stat.st_size != h.bytes) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return cudaErrorInvalidResourceHandle; /* its owner has ended */
    }
    return map(fd, h.bytes, true, h.token, h.device, base_p);
}

cudaError_t cudaIpcCloseMemHandle(void *base) {
    cudaError_t error = standin_enter("cudaIpcCloseMemHandle", cudaErrorUnknown);
    standin_drain();
    return drop(base, false, true) ? error : cudaErrorInvalidValue;
}
