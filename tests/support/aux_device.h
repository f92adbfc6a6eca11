/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_AUX_DEVICE_H
#define KVF_TESTS_AUX_DEVICE_H

/**
 * @file
 * A memory kind whose memory only its write reaches, as on a device: addresses are pages without
 * access, the bytes lie elsewhere. It counts, and fails on purpose. One at a time.
 */

#include "kvmgr/auxdata.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_MEMS 1024

static struct {
    kvf_mem_t mems[DEVICE_MEMS]; /* priv: the bytes; base NULL: free */
    uint64_t allocs, live, live_bytes, writes, bytes_written, last_bytes;
    uint64_t fail_alloc, fail_write; /* the one that fails, 1 is the first; 0 = none */
    void *last_stream;
} device;

static inline kvf_status_t device_alloc(const kvf_mem_kind_t *kind, uint64_t bytes,
                                        kvf_mem_t *mem_p, kvf_detail_t *detail) {
    size_t i = 0;
    if (++device.allocs == device.fail_alloc) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "device allocation fails on purpose");
    }
    while (device.mems[i].base != NULL) {
        i++;
        cr_assert_lt(i, DEVICE_MEMS);
    }
    void *base = mmap(NULL, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(base, MAP_FAILED);
    device.mems[i] = (kvf_mem_t){base, bytes, kind, calloc(1, (size_t)bytes)};
    cr_assert_not_null(device.mems[i].priv);
    device.live++;
    device.live_bytes += bytes;
    *mem_p = device.mems[i];
    return KVF_OK;
}

/* The memory that an address belongs to. */
static inline kvf_mem_t *device_find(const void *address, uint64_t bytes) {
    for (size_t i = 0; i < DEVICE_MEMS; i++) {
        kvf_mem_t *mem = &device.mems[i];
        uint64_t off = (uintptr_t)address - (uintptr_t)mem->base;
        if (mem->base != NULL && off < mem->bytes) {
            cr_assert_leq(bytes, mem->bytes - off);
            return mem;
        }
    }
    cr_assert_fail("%p is not an address of the device", address);
    return NULL;
}

static inline void device_free(kvf_mem_t *mem) {
    kvf_mem_t *mine = device_find(mem->base, mem->bytes);
    free(mine->priv);
    (void)munmap(mine->base, (size_t)mine->bytes);
    device.live--;
    device.live_bytes -= mine->bytes;
    *mine = (kvf_mem_t){0};
    *mem = (kvf_mem_t){0};
}

static inline kvf_status_t device_write(kvf_mem_t *mem, uint64_t off, const void *src,
                                        uint64_t bytes, void *stream, kvf_detail_t *detail) {
    cr_assert(bytes > 0 && off <= mem->bytes && bytes <= mem->bytes - off);
    if (++device.writes == device.fail_write) {
        return kvf_fail(detail, KVF_ERR_IO, "device write fails on purpose");
    }
    memcpy((uint8_t *)mem->priv + off, src, (size_t)bytes);
    device.bytes_written += bytes;
    device.last_bytes = bytes;
    device.last_stream = stream;
    return KVF_OK;
}

static const kvf_mem_kind_t device_kind = {
    "device", KVF_MEM_FAKE, false, NULL, device_alloc, device_free, device_write, NULL, NULL,
};

/* What a kernel would read at a view. */
static inline const int32_t *device_read(const kvf_aux_view_t *view) {
    uint64_t bytes = (uint64_t)view->n * sizeof(int32_t);
    cr_assert_eq((uintptr_t)view->device % 16, 0);
    const kvf_mem_t *mem = device_find(view->device, bytes);
    const uint8_t *at =
        (const uint8_t *)mem->priv + ((uintptr_t)view->device - (uintptr_t)mem->base);
    return (const int32_t *)(const void *)at;
}

#endif
