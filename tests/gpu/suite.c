/* SPDX-License-Identifier: Apache-2.0 */
/* What only a device can show: that its kernels do what their bodies do on the CPU, that memory
 * goes from process to process, and how fast. Prints one JSON object. Exit code 0: all is well; 1:
 * it is not; 77: there is no device (1 with KVF_REQUIRE_GPU=1). With the stand-in for the CUDA
 * runtime the same code runs, and its times mean nothing.
 *
 *     suite [--short]            everything
 *     suite --child FD FD FD     the other process of a check */
#include "kernels/attention.h"
#include "kernels/digest.h"
#include "kernels/move.h"
#include "kernels/reshape.h"
#include "tests/gpu/processes.h"
#include "tests/gpu/windows.h"
#include "tests/support/random.h"
#include "transceiver/mem/cuda.h"
#include "transceiver/mover/cuda.h"

#include <cuda_runtime_api.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (UINT64_C(1) << 20)
#define SKIPPED 77

static kvf_cuda_t *cuda;
static const kvf_mem_kind_t *kind;
static kvf_detail_t detail;
static bool is_short;
static int n_failed;

/* One line for each check. */
static void report(json_t *checks, const char *name, bool ok, const char *why) {
    (void)fprintf(stderr, "%-4s %s%s%s\n", ok ? "ok" : "FAIL", name, ok ? "" : ": ", ok ? "" : why);
    (void)json_object_set_new(checks, name, ok ? json_true() : json_string(why));
    n_failed += !ok;
}

static kvf_mem_t memory(uint64_t bytes) {
    kvf_mem_t mem;
    if (kind->alloc(kind, bytes, &mem, &detail) != KVF_OK) {
        (void)fprintf(stderr, "%s\n", detail.text);
        exit(1);
    }
    return mem;
}

static void put(kvf_mem_t *mem, const uint8_t *bytes) {
    if (mem->kind->write(mem, 0, bytes, mem->bytes, NULL, &detail) != KVF_OK) {
        (void)fprintf(stderr, "%s\n", detail.text);
        exit(1);
    }
}

static void get(const kvf_mem_t *mem, uint8_t *bytes) {
    if (mem->kind->read(mem, 0, bytes, mem->bytes, &detail) != KVF_OK) {
        (void)fprintf(stderr, "%s\n", detail.text);
        exit(1);
    }
}

static uint8_t *random_bytes(uint64_t n, uint64_t seed) {
    test_random_t random = {seed, seed};
    uint8_t *bytes = malloc(n);
    if (bytes == NULL) {
        exit(1);
    }
    for (uint64_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)test_between(&random, 0, 255);
    }
    return bytes;
}

/* ---- the kernel against its body ---- */

/* A list of moves between two pools, for addresses of either kind. */
static void make_list(kvf_moves_t *list, uint64_t *leaves, uint64_t to, uint64_t from,
                      uint64_t bytes, test_random_t *random, bool aligned) {
    uint64_t dst = 0, src = 0;
    kvf_moves_begin(list, leaves);
    while (list->n < KVF_MOVES) {
        uint64_t length = test_between(random, 0, 2) == 0
                              ? KVF_DIGEST_LEAF_BYTES * (uint64_t)test_between(random, 1, 64)
                              : (uint64_t)test_between(random, 1, 20000);
        dst += aligned ? (16 - dst % 16) % 16 : (uint64_t)test_between(random, 0, 40);
        src += aligned ? (16 - src % 16) % 16 : (uint64_t)test_between(random, 0, 40);
        if (dst + length > bytes || src + length > bytes) {
            break;
        }
        bool stores = test_between(random, 0, 7) > 0;
        (void)kvf_moves_add(list, stores ? to + dst : 0, from + src, length);
        dst += length;
        src += length;
    }
}

static void check_moves(json_t *checks) {
    const uint64_t bytes = 32 * MIB, n_leaves = 2 * bytes / KVF_DIGEST_LEAF_BYTES + KVF_MOVES;
    uint8_t *from = random_bytes(bytes, 1), *want = malloc(bytes), *got = malloc(bytes);
    uint64_t *want_leaves = calloc(n_leaves, 8), *got_leaves = NULL;
    kvf_moves_t *list = malloc(sizeof(*list));
    kvf_mem_t source = memory(bytes), target = memory(bytes);
    cudaStream_t stream;
    bool ok =
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaHostAlloc((void **)&got_leaves, n_leaves * 8, cudaHostAllocPortable) == cudaSuccess;
    const char *why = "a call of the runtime failed";
    put(&source, from);
    for (uint64_t round = 0; ok && round < (is_short ? 8U : 60U); round++) {
        test_random_t random = {round, round}, same = random;
        bool hashed = round % 4 != 3, aligned = round % 2 == 0;
        memset(want, 0x5a, bytes);
        put(&target, want);
        memset(got_leaves, 0, n_leaves * 8);
        make_list(list, hashed ? got_leaves : NULL, (uintptr_t)target.base, (uintptr_t)source.base,
                  bytes, &random, aligned);
        ok = kvf_moves_launch(list, stream) == cudaSuccess &&
             cudaStreamSynchronize(stream) == cudaSuccess;
        make_list(list, hashed ? want_leaves : NULL, (uintptr_t)want, (uintptr_t)from, bytes, &same,
                  aligned);
        kvf_moves_run(list);
        get(&target, got);
        if (ok && memcmp(got, want, bytes) != 0) {
            ok = false;
            why = "bytes differ";
        }
        if (ok && hashed && memcmp(got_leaves, want_leaves, list->n_leaves * 8) != 0) {
            ok = false;
            why = "hashes differ";
        }
    }
    report(checks, "kernel against its body: bytes and hashes", ok, why);
    (void)cudaStreamDestroy(stream);
    (void)cudaFreeHost(got_leaves);
    source.kind->free(&source);
    target.kind->free(&target);
    free(list);
    free(from);
    free(want);
    free(got);
    free(want_leaves);
}

static void check_lanes(json_t *checks) {
    const uint64_t bytes = 16 * MIB;
    uint8_t *from = random_bytes(bytes, 2), *got = malloc(bytes);
    uint64_t digests[2][64] = {{0}};
    kvf_mem_t source = memory(bytes), target = memory(bytes);
    kvf_lanes_t *lanes = NULL;
    put(&source, from);
    bool ok =
        kvf_lanes_create(kvf_alloc_default(), kvf_cuda_context(cuda), 2, &lanes, &detail) == KVF_OK;
    for (int host = 0; ok && host < 2; host++) {
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        for (uint64_t i = 0; i < 64; i++) {
            uint64_t at = i * (bytes / 64), length = bytes / 64 - i;
            if (host) {
                kvf_lane_copy_from_host(lane, target.base + at, from + at, length, &digests[1][i]);
            } else {
                kvf_lane_copy(lane, target.base + at, source.base + at, length, &digests[0][i]);
            }
        }
        ok = kvf_lane_finish(lane, &detail) == KVF_OK;
        kvf_lanes_give(lane);
        get(&target, got);
        for (uint64_t i = 0; ok && i < 64; i++) {
            uint64_t at = i * (bytes / 64), length = bytes / 64 - i;
            ok = memcmp(got + at, from + at, length) == 0 &&
                 digests[host][i] == kvf_digest(from + at, length);
            (void)kvf_fail(&detail, KVF_ERR_IO, "piece %d of run %d", (int)i, host);
        }
    }
    report(checks, "lanes: from the device and through the CPU", ok, detail.text);
    kvf_lanes_destroy(lanes);
    source.kind->free(&source);
    target.kind->free(&target);
    free(from);
    free(got);
}

/* Pages that are zeroed, and their neighbours that are not. */
static void check_zeros(json_t *checks) {
    static const int32_t slots[] = {3, 4, 5, 9, 0, 63, 20};
    const uint64_t piece = 20000, bytes = 64 * piece;
    uint8_t *want = random_bytes(bytes, 3), *got = malloc(bytes);
    kvf_mem_t mem = memory(bytes);
    put(&mem, want);
    bool ok = got != NULL && kind->zero(&mem, piece, 7, slots, &detail) == KVF_OK;
    for (int i = 0; ok && i < 7; i++) {
        memset(want + (uint64_t)slots[i] * piece, 0, piece);
    }
    if (ok) {
        get(&mem, got);
        ok = memcmp(got, want, bytes) == 0;
        (void)kvf_fail(&detail, KVF_ERR_IO, "bytes differ");
    }
    report(checks, "pages are zeroed", ok, detail.text);
    mem.kind->free(&mem);
    free(want);
    free(got);
}

static void check_reshape(json_t *checks) {
    const kvf_layer_group_t groups[] = {{.n_layers = 4,
                                         .tokens_per_block = 16,
                                         .head_dim = 128,
                                         .kv_factor = 2,
                                         .dtype = KVF_DTYPE_BF16},
                                        {.n_layers = 3,
                                         .tokens_per_block = 32,
                                         .head_dim = 20,
                                         .kv_factor = 1,
                                         .dtype = KVF_DTYPE_BF16}};
    const uint64_t bytes = 8 * MIB;
    uint8_t *from = random_bytes(bytes, 4), *want = malloc(bytes), *got = malloc(bytes);
    kvf_reshape_t *list = malloc(sizeof(*list));
    kvf_mem_t source = memory(bytes), target = memory(bytes);
    cudaStream_t stream;
    bool ok = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
    put(&source, from);
    for (int round = 0; ok && round < 8; round++) {
        const kvf_layer_group_t *group = &groups[round / 4];
        const kvf_block_shape_t dst = {round % 2 ? KVF_ORDER_HND : KVF_ORDER_NHD, 4, 1},
                                src = {round / 2 % 2 ? KVF_ORDER_HND : KVF_ORDER_NHD, 8, 3};
        uint64_t vectors = (uint64_t)group->n_layers * group->kv_factor *
                           (uint64_t)group->tokens_per_block * group->head_dim * 2;
        for (int side = 0; side < 2; side++) { /* the CPU's list, then the device's */
            uint64_t to = side == 0 ? (uintptr_t)want : (uintptr_t)target.base;
            uint64_t at = side == 0 ? (uintptr_t)from : (uintptr_t)source.base;
            (void)kvf_reshape_begin(list, group, &dst, &src, 3);
            for (uint64_t i = 0; (i + 1) * vectors * 8 < bytes; i++) {
                (void)kvf_reshape_add(list, to + i * vectors * 4, at + i * vectors * 8);
            }
            if (side == 0) {
                memset(want, 0x5a, bytes);
                put(&target, want);
                kvf_reshape_run(list);
            }
        }
        ok = kvf_reshape_launch(list, stream) == cudaSuccess &&
             cudaStreamSynchronize(stream) == cudaSuccess;
        get(&target, got);
        ok = ok && memcmp(got, want, bytes) == 0;
    }
    report(checks, "blocks between layouts, slices of heads", ok, "bytes differ");
    (void)cudaStreamDestroy(stream);
    source.kind->free(&source);
    target.kind->free(&target);
    free(list);
    free(from);
    free(want);
    free(got);
}

/* Numbers of a step for the judge: three sequences over one pool, at two depths. */
#define SEQS 3
#define ATTENTION_SLOTS 64
static void make_depths(kvf_attention_depth_t depths[2], int32_t *numbers) {
    for (int d = 0; d < 2; d++) {
        int32_t *indptr = numbers, *indices = indptr + 4, *info = indices + 16, *rope = info + 9;
        const int32_t ends[] = {0, 3 + d, 9, 12};
        memcpy(indptr, ends, sizeof(ends));
        for (int32_t i = 0; i < 12; i++) {
            indices[i] = (i * 37 + d * 11) % ATTENTION_SLOTS;
        }
        for (int32_t s = 0; s < SEQS; s++) {
            info[s] = 1 + (s * 5 + d) % 16;
            info[SEQS + s] = s;
            info[2 * SEQS + s] = 0;
            rope[s] = d == 0 ? s : 900 + s;
        }
        depths[d] = (kvf_attention_depth_t){indptr, indices, info, rope, 12};
        numbers = rope + SEQS;
    }
}

static void check_attention(json_t *checks) {
    const kvf_attention_shape_t shape = {.dtype = KVF_DTYPE_BF16,
                                         .order = KVF_ORDER_NHD,
                                         .n_layers = 2,
                                         .kv_factor = 2,
                                         .kv_heads = 4,
                                         .head_dim = 64,
                                         .tokens_per_block = 16,
                                         .q_heads = 8,
                                         .value_dim = 64,
                                         .rope_dims = 64,
                                         .rope_theta = 10000.0F,
                                         .scale = 0.125F};
    const uint64_t block = (uint64_t)2 * 2 * 4 * 16 * 64 * 2, pool_bytes = block * ATTENTION_SLOTS;
    const uint64_t rows = SEQS * 8, floats = rows * 64;
    uint8_t *pool = random_bytes(pool_bytes, 5);
    for (uint64_t i = 1; i < pool_bytes; i += 2) {
        pool[i] = (uint8_t)(0x3c | (pool[i] & 0x83)); /* bf16 of moderate size */
    }
    int32_t numbers[2 * 32];
    kvf_attention_depth_t depths[2], *there_depths = NULL;
    float *q = NULL, *out = NULL, *want = calloc(floats, sizeof(float));
    int32_t *there = NULL;
    kvf_mem_t device = memory(pool_bytes), work = memory(SEQS * 4 * sizeof(kvf_attention_head_t));
    put(&device, pool);
    make_depths(depths, numbers);
    bool ok = cudaHostAlloc((void **)&q, floats * sizeof(float), 0) == cudaSuccess &&
              cudaHostAlloc((void **)&out, floats * sizeof(float), 0) == cudaSuccess &&
              cudaHostAlloc((void **)&there, sizeof(numbers), 0) == cudaSuccess &&
              cudaHostAlloc((void **)&there_depths, sizeof(depths), 0) == cudaSuccess;
    for (uint64_t i = 0; ok && i < floats; i++) {
        q[i] = (float)((int)(i * 37 % 201) - 100) / 100.0F;
    }
    kvf_attention_t attention = {.shape = shape,
                                 .layer_idx = 1,
                                 .pool = pool,
                                 .n_slots = ATTENTION_SLOTS,
                                 .n_seqs = SEQS,
                                 .n_depths = 2,
                                 .depths = depths};
    ok = ok && kvf_attention_run(&attention, q, want, &detail) == KVF_OK;
    if (ok) {
        make_depths(there_depths, there);
        attention.pool = device.base;
        attention.depths = there_depths;
        ok = kvf_attention_launch(&attention, q, out, (kvf_attention_head_t *)(void *)work.base,
                                  NULL) == cudaSuccess &&
             cudaDeviceSynchronize() == cudaSuccess &&
             kvf_attention_distance(out, want, rows, 64) < KVF_ATTENTION_TOLERANCE;
        (void)kvf_fail(&detail, KVF_ERR_IO, "results differ by %g",
                       kvf_attention_distance(out, want, rows, 64));
    }
    report(checks, "attention against its body", ok, detail.text);
    (void)cudaFreeHost(q);
    (void)cudaFreeHost(out);
    (void)cudaFreeHost(there);
    (void)cudaFreeHost(there_depths);
    device.kind->free(&device);
    work.kind->free(&work);
    free(pool);
    free(want);
}

/* ---- two processes ---- */

static void check_processes(json_t *checks, const char *program, int device, bool vmm) {
    char name[128];
    (void)snprintf(name, sizeof(name),
                   "%sanother process reads device %d, and is killed with the mapping open",
                   vmm ? "vmm: " : "", device);
    report(checks, name, gpu_check_reader(program, device, vmm, is_short ? 1 : 3, &detail),
           detail.text);
    if (vmm) {
        (void)snprintf(name, sizeof(name), "vmm: another process cannot write to device %d",
                       device);
        report(checks, name, gpu_check_read_only(program, device, &detail), detail.text);
    }
}

int main(int argc, char **argv) {
    kvf_status_t status = kvf_cuda_open(kvf_alloc_default(), 0, &cuda, &detail);
    if (status != KVF_OK) {
        const char *required = getenv("KVF_REQUIRE_GPU");
        bool must = required != NULL && strcmp(required, "1") == 0;
        (void)fprintf(stderr, "%s: %s\n", must ? "FAIL" : "skipped", detail.text);
        return must ? 1 : SKIPPED;
    }
    kind = kvf_cuda_kind(cuda);
    if (argc == 5 && strcmp(argv[1], "--child") == 0) {
        return gpu_run_child(cuda, (int)strtol(argv[2], NULL, 10), (int)strtol(argv[3], NULL, 10),
                             (int)strtol(argv[4], NULL, 10));
    }
    is_short = argc == 2 && strcmp(argv[1], "--short") == 0;
    json_t *checks = json_object();
    check_moves(checks);
    check_lanes(checks);
    check_zeros(checks);
    report(checks, "a batch of copies", gpu_check_batch(cuda, &detail), detail.text);
    check_reshape(checks);
    check_attention(checks);
    int n_devices = 0;
    (void)cudaGetDeviceCount(&n_devices);
    for (int i = 0; i < n_devices && i < 2; i++) { /* the second one over NVLink, or PCIe */
        int reaches = i == 0;
        if (reaches || (cudaDeviceCanAccessPeer(&reaches, 0, i) == cudaSuccess && reaches)) {
            check_processes(checks, argv[0], i, false);
            check_processes(checks, argv[0], i, true);
        }
    }
    json_t *result = json_pack("{s:s, s:o, s:o}", "device", kvf_cuda_name(cuda), "checks", checks,
                               "windows", gpu_measure_windows(cuda, is_short));
    if (result == NULL || json_dumpf(result, stdout, JSON_INDENT(2)) != 0) {
        return 1;
    }
    (void)putchar('\n');
    json_decref(result);
    kvf_cuda_close(cuda);
    return n_failed == 0 ? 0 : 1;
}
