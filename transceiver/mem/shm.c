/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* linux/fcntl.h, since 5.1 */
#endif

/* Nobody makes it shorter, which would kill who has it mapped, and only we write to it. */
static bool seal(int fd) {
    const int size = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    return fcntl(fd, F_ADD_SEALS, size | F_SEAL_FUTURE_WRITE) == 0 ||
           fcntl(fd, F_ADD_SEALS, size) == 0;
}

/* The pages are taken when they are touched. A pool that can have no room would end the process
 * only then, so what the machine has is compared with it before. */
static uint64_t room(void) {
    struct sysinfo system;
    return sysinfo(&system) == 0 ? (uint64_t)(system.totalram + system.totalswap) * system.mem_unit
                                 : UINT64_MAX;
}

static kvf_status_t shm_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                              kvf_detail_t *detail) {
    if (bytes == 0 || bytes > PTRDIFF_MAX || bytes > room()) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "%" PRIu64 " bytes of shared memory: this machine has %" PRIu64
                        "; ask for less",
                        bytes, room());
    }
    void *base = MAP_FAILED;
    int fd = memfd_create("kvferry", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0) {
        base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    }
    if (base == MAP_FAILED || !seal(fd)) {
        kvf_status_t status =
            kvf_fail(detail, KVF_ERR_NO_MEMORY,
                     "the system refuses %" PRIu64
                     " bytes of shared memory (%s): ask for less, raise the process's limits "
                     "(ulimit -v, ulimit -n), or use memory of kind host",
                     bytes, strerror(errno));
        if (base != MAP_FAILED) {
            (void)munmap(base, (size_t)bytes);
        }
        if (fd >= 0) {
            (void)close(fd);
        }
        return status;
    }
    /* Advice only: a pool without it works. */
    (void)madvise(base, (size_t)bytes, MADV_DONTDUMP);
    (void)madvise(base, (size_t)bytes, MADV_DONTFORK);
    (void)madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    *mem_p = (kvf_mem_t){base, bytes, kind, (void *)(intptr_t)fd};
    return KVF_OK;
}

static void shm_free(kvf_mem_t *mem) {
    if (mem->base != NULL) {
        (void)munmap(mem->base, (size_t)mem->bytes);
        (void)close((int)(intptr_t)mem->priv);
    }
    *mem = (kvf_mem_t){0};
}

int kvf_mem_shm_fd(const kvf_mem_t *mem) {
    return mem->kind == kvf_mem_shm() ? (int)(intptr_t)mem->priv : -1;
}

const kvf_mem_kind_t *kvf_mem_shm(void) {
    static const kvf_mem_kind_t row = {
        "shm",
        KVF_MEM_SHM,
        true,
        NULL,
        shm_alloc,
        shm_free,
        kvf_mem_cpu_write,
        kvf_mem_cpu_read,
        kvf_mem_cpu_zero,
    };
    return &row;
}
