/* SPDX-License-Identifier: Apache-2.0 */
/* Instead of cuda.c in a build without CUDA: no device is ever opened, so nothing else is called.
 */
#include "transceiver/mem/cuda.h"

#include <stdlib.h>

kvf_status_t kvf_cuda_open(const kvf_alloc_t *alloc, int number, kvf_cuda_t **cuda_p,
                           kvf_detail_t *detail) {
    (void)alloc;
    (void)number;
    (void)cuda_p;
    return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                    "this kvferry was built without CUDA: build it where nvcc is in PATH, or with "
                    "-Dcuda=enabled");
}

void kvf_cuda_close(kvf_cuda_t *cuda) {
    (void)cuda;
}

int kvf_cuda_number(const kvf_cuda_t *cuda) {
    (void)cuda;
    abort();
}

const struct kvf_cuda_context *kvf_cuda_context(const kvf_cuda_t *cuda) {
    (void)cuda;
    abort();
}

const char *kvf_cuda_name(const kvf_cuda_t *cuda) {
    (void)cuda;
    abort();
}

const kvf_mem_kind_t *kvf_cuda_kind(const kvf_cuda_t *cuda) {
    (void)cuda;
    abort();
}

const kvf_mem_kind_t *kvf_cuda_vmm_kind(const kvf_cuda_t *cuda) {
    (void)cuda;
    abort();
}

kvf_status_t kvf_cuda_attach(const kvf_cuda_t *cuda, void *base, uint64_t bytes, kvf_mem_t *mem_p,
                             kvf_detail_t *detail) {
    (void)cuda;
    (void)base;
    (void)bytes;
    (void)mem_p;
    (void)detail;
    abort();
}

kvf_status_t kvf_cuda_export(const kvf_mem_t *mem, uint8_t handle[KVF_CUDA_HANDLE_BYTES], int *fd_p,
                             kvf_detail_t *detail) {
    (void)mem;
    (void)handle;
    (void)fd_p;
    (void)detail;
    abort();
}

kvf_status_t kvf_cuda_open_import(const kvf_cuda_t *cuda,
                                  const uint8_t handle[KVF_CUDA_HANDLE_BYTES], int fd,
                                  uint64_t bytes, kvf_cuda_import_t *import_p,
                                  kvf_detail_t *detail) {
    (void)cuda;
    (void)handle;
    (void)fd;
    (void)bytes;
    (void)import_p;
    (void)detail;
    abort();
}

void kvf_cuda_close_import(const kvf_cuda_t *cuda, kvf_cuda_import_t *import) {
    (void)cuda;
    (void)import;
    abort();
}
