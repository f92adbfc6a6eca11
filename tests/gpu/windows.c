/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/windows.h"

#include "transceiver/mem/cuda_scope.h"
#include "transceiver/mover/cuda.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIB (UINT64_C(1) << 20)
#define MAX_REPS 40

typedef enum way { ONE_COPY, KERNEL, KERNEL_DIGESTS, BATCH } way_t;

/* Two pools; a window is every other slot of them, in another order on each side. */
typedef struct scene {
    kvf_mem_t to, from;
    kvf_lanes_t *lanes;
    cudaStream_t stream;
    void **dsts; /* of a batch */
    const void **srcs;
    size_t *sizes;
    uint64_t *digests;
    kvf_detail_t detail;
} scene_t;

static uint64_t source_of(uint64_t i, uint64_t n) {
    return 2 * ((i * 7919) % n);
}

static bool scene_open(scene_t *scene, kvf_cuda_t *cuda, uint64_t pool_bytes, uint64_t most) {
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    *scene = (scene_t){.dsts = calloc(most, sizeof(*scene->dsts)),
                       .srcs = calloc(most, sizeof(*scene->srcs)),
                       .sizes = calloc(most, sizeof(*scene->sizes)),
                       .digests = calloc(most, sizeof(*scene->digests))};
    return scene->dsts != NULL && scene->srcs != NULL && scene->sizes != NULL &&
           scene->digests != NULL &&
           kind->alloc(kind, pool_bytes, &scene->to, &scene->detail) == KVF_OK &&
           kind->alloc(kind, pool_bytes, &scene->from, &scene->detail) == KVF_OK &&
           kvf_lanes_create(kvf_alloc_default(), kvf_cuda_context(cuda), 1, &scene->lanes,
                            &scene->detail) == KVF_OK &&
           cudaStreamCreateWithFlags(&scene->stream, cudaStreamNonBlocking) == cudaSuccess;
}

static void scene_close(scene_t *scene) {
    (void)cudaStreamDestroy(scene->stream);
    kvf_lanes_destroy(scene->lanes);
    scene->to.kind->free(&scene->to);
    scene->from.kind->free(&scene->from);
    free(scene->dsts);
    free(scene->srcs);
    free(scene->sizes);
    free(scene->digests);
}

static bool copy_batch(scene_t *scene, uint64_t piece_bytes, uint64_t n) {
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream};
    size_t first = 0;
    for (uint64_t i = 0; i < n; i++) {
        scene->dsts[i] = scene->to.base + 2 * i * piece_bytes;
        scene->srcs[i] = scene->from.base + source_of(i, n) * piece_bytes;
        scene->sizes[i] = piece_bytes;
    }
    cudaError_t error = cudaMemcpyBatchAsync(scene->dsts, scene->srcs, scene->sizes, n, &attributes,
                                             &first, 1, scene->stream);
    error = error == cudaSuccess ? cudaStreamSynchronize(scene->stream) : error;
    return error == cudaSuccess ||
           kvf_cuda_fail(&scene->detail, error, "a batch of copies") == KVF_OK;
}

static bool copy_window(scene_t *scene, way_t way, uint64_t piece_bytes, uint64_t n) {
    if (way == ONE_COPY) {
        return cudaMemcpyAsync(scene->to.base, scene->from.base, piece_bytes * n, cudaMemcpyDefault,
                               scene->stream) == cudaSuccess &&
               cudaStreamSynchronize(scene->stream) == cudaSuccess;
    }
    if (way == BATCH) {
        return copy_batch(scene, piece_bytes, n);
    }
    kvf_lane_t *lane = kvf_lanes_take(scene->lanes);
    for (uint64_t i = 0; i < n; i++) {
        kvf_lane_copy(lane, scene->to.base + 2 * i * piece_bytes,
                      scene->from.base + source_of(i, n) * piece_bytes, piece_bytes,
                      way == KERNEL_DIGESTS ? &scene->digests[i] : NULL);
    }
    kvf_status_t status = kvf_lane_finish(lane, &scene->detail);
    kvf_lanes_give(lane);
    return status == KVF_OK;
}

bool gpu_check_batch(kvf_cuda_t *cuda, kvf_detail_t *detail) {
    enum { N = 50, PIECE = 20000 };
    const uint64_t bytes = UINT64_C(2) * N * PIECE;
    uint8_t *from = malloc(bytes), *want = malloc(bytes), *got = malloc(bytes);
    scene_t scene = {0};
    bool ok = from != NULL && want != NULL && got != NULL && scene_open(&scene, cuda, bytes, N);
    if (!ok) {
        (void)fprintf(stderr, "no memory for two pools: %s\n", scene.detail.text);
        exit(1);
    }
    for (uint64_t i = 0; i < bytes; i++) {
        from[i] = (uint8_t)(i * 31 + i / 253);
    }
    memset(want, 0x5a, bytes);
    ok = scene.to.kind->write(&scene.to, 0, want, bytes, NULL, detail) == KVF_OK &&
         scene.from.kind->write(&scene.from, 0, from, bytes, NULL, detail) == KVF_OK &&
         (copy_batch(&scene, PIECE, N) ||
          kvf_fail(detail, KVF_ERR_IO, "%s", scene.detail.text) == KVF_OK) &&
         scene.to.kind->read(&scene.to, 0, got, bytes, detail) == KVF_OK;
    for (uint64_t i = 0; i < N; i++) {
        memcpy(want + 2 * i * PIECE, from + source_of(i, N) * PIECE, PIECE);
    }
    if (ok && memcmp(got, want, bytes) != 0) {
        (void)kvf_fail(detail, KVF_ERR_IO, "bytes differ");
        ok = false;
    }
    scene_close(&scene);
    free(from);
    free(want);
    free(got);
    return ok;
}

static double now_us(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double window_us(scene_t *scene, way_t way, uint64_t piece_bytes, uint64_t n, int reps) {
    double times[MAX_REPS];
    for (int rep = -3; rep < reps; rep++) {
        double began = now_us();
        if (!copy_window(scene, way, piece_bytes, n)) {
            (void)fprintf(stderr, "a window failed: %s\n", scene->detail.text);
            exit(1);
        }
        if (rep >= 0) {
            times[rep] = now_us() - began;
        }
    }
    qsort(times, (size_t)reps, sizeof(times[0]), by_value);
    return times[reps / 2];
}

json_t *gpu_measure_windows(kvf_cuda_t *cuda, bool is_short) {
    static const uint64_t sizes[] = {4096, 16384, 65536, 262144, 1048576};
    const uint64_t bytes = is_short ? 4 * MIB : 64 * MIB;
    const int reps = is_short ? 3 : MAX_REPS;
    json_t *rows = json_array();
    scene_t scene = {0};
    if (!scene_open(&scene, cuda, 2 * bytes, bytes / sizes[0])) {
        (void)fprintf(stderr, "no memory to measure: %s\n", scene.detail.text);
        exit(1);
    }
    double one = window_us(&scene, ONE_COPY, bytes, 1, reps);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const uint64_t n = bytes / sizes[i];
        double plain = window_us(&scene, KERNEL, sizes[i], n, reps);
        double digested = window_us(&scene, KERNEL_DIGESTS, sizes[i], n, reps);
        double batch = window_us(&scene, BATCH, sizes[i], n, reps);
        double again = window_us(&scene, ONE_COPY, bytes, 1, reps);
        double reference = (one + again) / 2; /* before it and after it */
        (void)fprintf(stderr,
                      "%8lu-byte pieces: %.1f us, with digests %.1f us, a batch of copies %.1f us; "
                      "one copy of all %.1f us: %.2f, %.2f and %.2f of it\n",
                      (unsigned long)sizes[i], plain, digested, batch, reference, reference / plain,
                      reference / digested, reference / batch);
        (void)json_array_append_new(rows, json_pack("{s:I, s:f, s:f, s:f, s:f}", "piece_bytes",
                                                    (json_int_t)sizes[i], "us", plain, "digests_us",
                                                    digested, "batch_us", batch, "one_copy_us",
                                                    reference));
        one = again;
    }
    const double flat[] = {window_us(&scene, KERNEL, 4096, 1, reps),
                           window_us(&scene, KERNEL, 4096, 256, reps),
                           window_us(&scene, KERNEL_DIGESTS, 4096, 1, reps)};
    (void)fprintf(stderr,
                  "flat: 1 piece %.1f us, 256 pieces %.1f us, 1 piece with digest %.1f us\n",
                  flat[0], flat[1], flat[2]);
    scene_close(&scene);
    return json_pack("{s:I, s:o, s:f, s:f, s:f}", "window_bytes", (json_int_t)bytes, "rows", rows,
                     "flat_1_piece_us", flat[0], "flat_256_pieces_us", flat[1], "flat_1_digest_us",
                     flat[2]);
}
