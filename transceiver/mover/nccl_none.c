/* SPDX-License-Identifier: Apache-2.0 */
/* Instead of nccl.c in a build without NCCL: the mover is never made, so nothing else is called. */
#include "transceiver/mover/nccl.h"

#include <stdlib.h>

kvf_status_t kvf_nccl_create(const kvf_alloc_t *alloc, const struct kvf_cuda_context *context,
                             const kvf_nccl_events_t *events, void (*wake)(void *ctx),
                             void *wake_ctx, kvf_nccl_t **nccl_p, kvf_detail_t *detail) {
    (void)alloc;
    (void)context;
    (void)events;
    (void)wake;
    (void)wake_ctx;
    (void)nccl_p;
    return kvf_fail(detail, KVF_ERR_UNSUPPORTED,
                    "this kvferry was built without NCCL (-Dnccl=enabled); take mover auto");
}

void kvf_nccl_destroy(kvf_nccl_t *nccl) {
    if (nccl != NULL) {
        abort();
    }
}

void kvf_nccl_address(const kvf_nccl_t *nccl, uint8_t address[KVF_NCCL_ADDRESS_BYTES]) {
    (void)nccl;
    (void)address;
    abort();
}

kvf_status_t kvf_nccl_check_address(const kvf_nccl_t *nccl, const void *address, size_t bytes,
                                    kvf_detail_t *detail) {
    (void)nccl;
    (void)address;
    (void)bytes;
    (void)detail;
    abort();
}

kvf_status_t kvf_nccl_invite(kvf_nccl_t *nccl, void *owner, kvf_nccl_path_t **path_p) {
    (void)nccl;
    (void)owner;
    (void)path_p;
    abort();
}

kvf_status_t kvf_nccl_join(kvf_nccl_t *nccl, void *owner, const void *invitation, size_t bytes,
                           kvf_nccl_path_t **path_p) {
    (void)nccl;
    (void)owner;
    (void)invitation;
    (void)bytes;
    (void)path_p;
    abort();
}

void kvf_nccl_leave(kvf_nccl_path_t *path, const char *why) {
    (void)path;
    (void)why;
    abort();
}

kvf_nccl_job_t *kvf_nccl_take(kvf_nccl_path_t *path) {
    (void)path;
    abort();
}

void kvf_nccl_give(kvf_nccl_path_t *path, kvf_nccl_job_t *job) {
    (void)path;
    (void)job;
    abort();
}

void kvf_nccl_post(kvf_nccl_path_t *path, kvf_nccl_job_t *job) {
    (void)path;
    (void)job;
    abort();
}

unsigned kvf_nccl_progress(kvf_nccl_t *nccl) {
    (void)nccl;
    abort();
}
