/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/processes.h"

#include "kernels/digest.h"
#include "transceiver/mover/cuda.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define POOL_BYTES (UINT64_C(8) << 20)

/* ---- the owner ---- */

typedef struct owner {
    const char *program;
    kvf_cuda_t *cuda;
    kvf_mem_t pool;
    uint8_t *bytes; /* that are in it */
    uint64_t digest;
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    int fd;
} owner_t;

static bool owner_open(owner_t *owner, const char *program, int device, bool vmm,
                       kvf_detail_t *detail) {
    *owner = (owner_t){.program = program, .fd = -1, .bytes = malloc(POOL_BYTES)};
    if (kvf_cuda_open(kvf_alloc_default(), device, &owner->cuda, detail) != KVF_OK) {
        return false;
    }
    const kvf_mem_kind_t *kind = vmm ? kvf_cuda_vmm_kind(owner->cuda) : kvf_cuda_kind(owner->cuda);
    for (uint64_t i = 0; i < POOL_BYTES; i++) {
        owner->bytes[i] = (uint8_t)(i * 7 + (i >> 8) * 31 + (i >> 16) * 101);
    }
    owner->digest = kvf_digest(owner->bytes, POOL_BYTES);
    if (kind->alloc(kind, POOL_BYTES, &owner->pool, detail) != KVF_OK ||
        kind->write(&owner->pool, 0, owner->bytes, POOL_BYTES, NULL, detail) != KVF_OK ||
        kvf_cuda_export(&owner->pool, owner->handle, &owner->fd, detail) != KVF_OK) {
        return false;
    }
    (void)kvf_fail(detail, KVF_ERR_IO, "it has no descriptor, or one that it should not have");
    return (owner->fd >= 0) == vmm;
}

static void owner_close(owner_t *owner) {
    if (owner->fd >= 0) {
        (void)close(owner->fd);
    }
    if (owner->pool.kind != NULL) {
        owner->pool.kind->free(&owner->pool);
    }
    kvf_cuda_close(owner->cuda);
    free(owner->bytes);
}

typedef struct child {
    pid_t pid;
    int to, from;
} child_t;

static child_t start_child(const owner_t *owner) {
    int down[2], up[2];
    char in[16], out[16], pool[16];
    if (pipe(down) != 0 || pipe(up) != 0) {
        exit(1);
    }
    child_t child = {fork(), down[1], up[0]};
    if (child.pid == 0) { /* a new program: a context does not survive a fork */
        (void)close(down[1]);
        (void)close(up[0]);
        (void)snprintf(in, sizeof(in), "%d", down[0]);
        (void)snprintf(out, sizeof(out), "%d", up[1]);
        (void)snprintf(pool, sizeof(pool), "%d", owner->fd);
        (void)(owner->fd >= 0 && fcntl(owner->fd, F_SETFD, 0));
        (void)execl(owner->program, owner->program, "--child", in, out, pool, (char *)NULL);
        _exit(127);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    return child;
}

/* A process that has read the pool once. */
static bool start_reader(const owner_t *owner, child_t *child_p, kvf_detail_t *detail) {
    uint8_t word;
    *child_p = start_child(owner);
    (void)kvf_fail(detail, KVF_ERR_IO, "the other process did not read it");
    return write(child_p->to, owner->handle, sizeof(owner->handle)) == sizeof(owner->handle) &&
           write(child_p->to, &owner->digest, sizeof(owner->digest)) == sizeof(owner->digest) &&
           read(child_p->from, &word, 1) == 1;
}

static void end_child(const child_t *child) {
    int status;
    (void)kill(child->pid, SIGKILL);
    (void)waitpid(child->pid, &status, 0);
    (void)close(child->to);
    (void)close(child->from);
}

bool gpu_check_reader(const char *program, int device, bool vmm, int rounds, kvf_detail_t *detail) {
    owner_t owner;
    bool ok = owner_open(&owner, program, device, vmm, detail);
    for (int round = 0; ok && round < rounds; round++) {
        child_t child;
        ok = start_reader(&owner, &child, detail);
        end_child(&child);
    }
    owner_close(&owner);
    return ok;
}

bool gpu_check_read_only(const char *program, int device, kvf_detail_t *detail) {
    owner_t owner;
    child_t child;
    uint8_t word = 0, *now = malloc(POOL_BYTES);
    bool ok = owner_open(&owner, program, device, true, detail);
    if (ok) {
        ok = start_reader(&owner, &child, detail) && write(child.to, &word, 1) == 1;
        while (ok && word != '-' && word != 'w') {
            ok = read(child.from, &word, 1) == 1;
        }
        end_child(&child);
        ok = ok && owner.pool.kind->read(&owner.pool, 0, now, POOL_BYTES, detail) == KVF_OK;
        (void)kvf_fail(detail, KVF_ERR_IO, "the other process could write to it, or has ended");
        ok = ok && word == '-' && memcmp(now, owner.bytes, POOL_BYTES) == 0;
    }
    owner_close(&owner);
    free(now);
    return ok;
}

/* ---- the other process ---- */

int gpu_run_child(kvf_cuda_t *cuda, int in, int out, int fd) {
    const kvf_mem_kind_t *kind = kvf_cuda_kind(cuda);
    uint8_t handle[KVF_CUDA_HANDLE_BYTES], word;
    kvf_cuda_import_t import = {NULL, NULL, 0};
    kvf_lanes_t *lanes = NULL;
    kvf_mem_t target;
    kvf_detail_t detail = {""};
    uint64_t digest = 0, want = 0;
    if (read(in, handle, sizeof(handle)) != sizeof(handle) ||
        read(in, &want, sizeof(want)) != sizeof(want) ||
        kvf_cuda_open_import(cuda, handle, fd, POOL_BYTES, &import, &detail) != KVF_OK ||
        kvf_lanes_create(kvf_alloc_default(), kvf_cuda_context(cuda), 1, &lanes, &detail) !=
            KVF_OK ||
        kind->alloc(kind, POOL_BYTES, &target, &detail) != KVF_OK) {
        (void)fprintf(stderr, "child: %s\n", detail.text);
        return 1;
    }
    for (;;) {
        kvf_lane_t *lane = kvf_lanes_take(lanes);
        kvf_lane_copy(lane, target.base, import.base, POOL_BYTES, &digest);
        if (kvf_lane_finish(lane, &detail) != KVF_OK || digest != want) {
            (void)fprintf(stderr, "child: %s\n", digest != want ? "other bytes" : detail.text);
            return 1;
        }
        kvf_lanes_give(lane);
        if (write(out, "r", 1) != 1) {
            return 0;
        }
        struct pollfd more = {.fd = in, .events = POLLIN};
        if (fd >= 0 && poll(&more, 1, 0) == 1 && read(in, &word, 1) == 1) {
            bool written = cudaMemset(import.base, 1, 64) == cudaSuccess &&
                           cudaDeviceSynchronize() == cudaSuccess;
            return write(out, written ? "w" : "-", 1) == 1 ? 0 : 1;
        }
    }
}
