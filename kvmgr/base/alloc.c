/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/alloc.h"

#include <stdlib.h>
#include <string.h>

static void *libc_resize(void *ctx, void *ptr, size_t size) {
    (void)ctx;
    if (size == 0) {
        free(ptr);
        return NULL;
    }
    return realloc(ptr, size);
}

const kvf_alloc_t *kvf_alloc_default(void) {
    static const kvf_alloc_t table = {libc_resize, NULL};
    return &table;
}

void *kvf_alloc(const kvf_alloc_t *alloc, size_t size) {
    return size == 0 ? NULL : alloc->resize(alloc->ctx, NULL, size);
}

void *kvf_realloc(const kvf_alloc_t *alloc, void *ptr, size_t n, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes) || bytes == 0) {
        return NULL;
    }
    return alloc->resize(alloc->ctx, ptr, bytes);
}

void *kvf_calloc(const kvf_alloc_t *alloc, size_t n, size_t size) {
    void *ptr = kvf_realloc(alloc, NULL, n, size);
    if (ptr != NULL) {
        memset(ptr, 0, n * size);
    }
    return ptr;
}

void kvf_free(const kvf_alloc_t *alloc, const void *ptr) {
    if (ptr != NULL) {
        /* The one place that drops const: owners hold some of their memory through const pointers.
         */
        (void)alloc->resize(alloc->ctx, (void *)(uintptr_t)ptr, 0);
    }
}

char *kvf_strdup(const kvf_alloc_t *alloc, const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = kvf_alloc(alloc, bytes);
    if (copy != NULL) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

static void *fail_resize(void *ctx, void *ptr, size_t size) {
    kvf_alloc_fail_t *fail = ctx;
    if (size == 0) {
        fail->live -= ptr != NULL;
        return libc_resize(NULL, ptr, 0);
    }
    fail->calls++;
    if (fail->fail_at != 0 &&
        (fail->calls == fail->fail_at || (fail->fail_from && fail->calls > fail->fail_at))) {
        return NULL;
    }
    void *fresh = libc_resize(NULL, ptr, size);
    fail->live += fresh != NULL && ptr == NULL;
    return fresh;
}

void kvf_alloc_fail_init(kvf_alloc_fail_t *fail, uint64_t fail_at) {
    *fail = (kvf_alloc_fail_t){.table = {fail_resize, fail}, .fail_at = fail_at};
}
