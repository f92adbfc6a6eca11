/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/options.h"

#include "kvmgr/base/size.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A head vector: bytes, so that a block of any number of them is a layout. */
#define VECTOR_BYTES 64
#define LAYERS 16

kvf_status_t kvf_bench_parse_size(const char *text, uint64_t *bytes_p) {
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {{"", 1},
                 {"KiB", UINT64_C(1) << 10},
                 {"MiB", UINT64_C(1) << 20},
                 {"GiB", UINT64_C(1) << 30}};
    char *end;
    errno = 0;
    uint64_t bytes = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || errno != 0) {
        return KVF_ERR_INVALID;
    }
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(end, units[i].name) == 0) {
            if (kvf_mul_u64(bytes, units[i].bytes, &bytes) != KVF_OK || bytes > INT64_MAX) {
                return KVF_ERR_INVALID;
            }
            *bytes_p = bytes;
            return KVF_OK;
        }
    }
    return KVF_ERR_INVALID;
}

kvf_status_t kvf_bench_layout(uint64_t block_bytes, uint64_t layers, kvf_layout_t *layout_p,
                              kvf_detail_t *detail) {
    const uint64_t vectors = block_bytes / VECTOR_BYTES;
    if (vectors == 0 || block_bytes % VECTOR_BYTES != 0 || vectors > UINT32_MAX) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--block-bytes is %" PRIu64 "; give a multiple of %d, at most %" PRIu64,
                        block_bytes, VECTOR_BYTES, (uint64_t)UINT32_MAX * VECTOR_BYTES);
    }
    if (layers == 0) {
        for (layers = LAYERS; vectors % layers != 0;) {
            layers /= 2;
        }
    }
    if (layers > KVF_MAX_GROUP_LAYERS || vectors % layers != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--layers is %" PRIu64 "; give at most %d that divide the %" PRIu64
                        " vectors of %d bytes that a block has",
                        layers, KVF_MAX_GROUP_LAYERS, vectors, VECTOR_BYTES);
    }
    *layout_p = (kvf_layout_t){.n_groups = 1,
                               .groups = {{.name = "bench",
                                           .n_layers = (uint32_t)layers,
                                           .tokens_per_block = 1,
                                           .kv_heads = (uint32_t)(vectors / layers),
                                           .head_dim = VECTOR_BYTES,
                                           .kv_factor = 1,
                                           .dtype = KVF_DTYPE_F8_E4M3}}};
    for (uint32_t i = 0; i < layers; i++) {
        layout_p->groups[0].layers[i] = i;
    }
    return KVF_OK;
}

const char *kvf_bench_memory(const char *mover, const char *tls) {
    if (strcmp(mover, "cuda") == 0 || strcmp(mover, "nccl") == 0) {
        return "cuda";
    }
    return strcmp(tls, "auto") == 0 || strstr(tls, "posix") != NULL || strstr(tls, "sysv") != NULL
               ? "shm"
               : "host";
}

kvf_status_t kvf_bench_check(const kvf_bench_options_t *options, kvf_detail_t *detail) {
    kvf_layout_t layout;
    uint64_t slots, least;
    kvf_status_t status = kvf_bench_layout(options->block_bytes, options->layers, &layout, detail);
    if (status != KVF_OK) {
        return status;
    }
    if (strcmp(options->mover, "auto") != 0 && strcmp(options->mover, "mapped") != 0 &&
        strcmp(options->mover, "tcp") != 0 && strcmp(options->mover, "ucx") != 0 &&
        strcmp(options->mover, "cuda") != 0 && strcmp(options->mover, "nccl") != 0 &&
        strcmp(options->mover, "rdma") != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--mover is %.32s; give auto, mapped, tcp, ucx, cuda, nccl or rdma",
                        options->mover);
    }
    if (strcmp(options->memory, "host") != 0 && strcmp(options->memory, "shm") != 0 &&
        strcmp(options->memory, "cuda") != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "--memory is %.32s; give host, shm or cuda",
                        options->memory);
    }
    if (options->device_alloc != NULL && strcmp(options->memory, "cuda") != 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "--device-alloc is for --memory cuda");
    }
    if (strcmp(options->memory, "cuda") == 0 && options->reference != KVF_BENCH_NONE) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--memory cuda: references are the CPU's; tools/check-gpu has a device's");
    }
    /* Every second slot, so that no two are adjacent. */
    if (kvf_mul_u64(options->blocks, 2, &slots) != KVF_OK || slots == 0 ||
        kvf_mul_u64(slots - 1, options->block_bytes, &least) != KVF_OK || slots > INT32_MAX ||
        options->pool_bytes / options->block_bytes > INT32_MAX) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--pool-bytes, --block-bytes and --blocks: a pool has at most 2^31 - 1 "
                        "slots; give larger or fewer blocks");
    }
    if (options->pool_bytes < least) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--pool-bytes is %" PRIu64 "; %" PRIu64 " blocks of %" PRIu64
                        " bytes of which no two are adjacent need %" PRIu64,
                        options->pool_bytes, options->blocks, options->block_bytes, least);
    }
    if (options->measure != KVF_BENCH_REQUEST && options->reference != KVF_BENCH_NONE) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--measure %s: a reference has no request apart from its copy; leave "
                        "--measure or --reference out",
                        kvf_bench_measure_name(options->measure));
    }
    if (options->measure == KVF_BENCH_EXPOSED && layout.groups[0].n_layers < 2) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "--measure exposed needs blocks of two layers or more; give --layers");
    }
    return KVF_OK;
}

const char *kvf_bench_measure_name(kvf_bench_measure_t measure) {
    static const char *const names[] = {
        [KVF_BENCH_REQUEST] = "request", [KVF_BENCH_PUT] = "put", [KVF_BENCH_EXPOSED] = "exposed"};
    return names[measure];
}

const char *kvf_bench_reference_name(kvf_bench_reference_t reference) {
    static const char *const names[] = {[KVF_BENCH_NONE] = "none",
                                        [KVF_BENCH_MEMCPY] = "memcpy",
                                        [KVF_BENCH_NT] = "nt",
                                        [KVF_BENCH_SOCKET] = "socket",
                                        [KVF_BENCH_WAKEUP] = "wakeup"};
    return names[reference];
}
