/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"
#include "transceiver/mover/ucx_context.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>

#define ADVICE                                                                                     \
    "ask for less, raise it (mount -o remount,size=SIZE /dev/shm; docker run --shm-size), or use " \
    "memory of kind host"

/*
 * UCX makes System V segments, reserved lazily, or files in /dev/shm, which it writes once (so that
 * a full one is found now and not by SIGBUS). When neither works it gives private memory instead,
 * and says so nowhere.
 */
static bool is_shared(const void *base, int *sysv_id_p) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t cap = 0;
    bool shared = false;
    *sysv_id_p = -1;
    if (maps == NULL) {
        return false;
    }
    while (getline(&line, &cap, maps) > 0) {
        char range[64] = "", rights[8] = "", inode[24] = "", path[8] = "";
        (void)sscanf(line, "%63s %7s %*s %*s %23s %5s", range, rights, inode, path);
        if (strtoull(range, NULL, 16) == (uintptr_t)base) {
            shared = rights[3] == 's';
            /* The inode of a System V segment is its id. */
            *sysv_id_p = strcmp(path, "/SYSV") == 0 ? (int)strtol(inode, NULL, 10) : -1;
            break;
        }
    }
    free(line);
    (void)fclose(maps);
    return shared;
}

/* UCX lets the group attach to its segments; our peers on this machine are of our own user. */
static bool keep_to_user(int sysv_id) {
    struct shmid_ds segment;
    if (sysv_id < 0) {
        return true; /* an unlinked file: others cannot reach it */
    }
    if (shmctl(sysv_id, IPC_STAT, &segment) != 0) {
        return false;
    }
    segment.shm_perm.mode = 0600;
    return shmctl(sysv_id, IPC_SET, &segment) == 0;
}

/* Asked before, because UCX finds out that a file system is full by filling it. */
static bool fits(const kvf_ucx_t *ucx, uint64_t bytes, uint64_t *most_p) {
    const char *dir = getenv("UCX_POSIX_DIR");
    struct statvfs fs;
    struct sysinfo system;
    uint64_t sysv = 0, posix = 0;
    if (ucx->sysv_memory && sysinfo(&system) == 0) {
        sysv = (uint64_t)(system.totalram + system.totalswap) * system.mem_unit;
    }
    if (ucx->posix_memory && statvfs(dir != NULL ? dir : "/dev/shm", &fs) == 0) {
        posix = (uint64_t)fs.f_bavail * fs.f_frsize;
    }
    *most_p = sysv > posix ? sysv : posix;
    return bytes <= *most_p;
}

static kvf_status_t shm_alloc(const kvf_mem_kind_t *kind, uint64_t bytes, kvf_mem_t *mem_p,
                              kvf_detail_t *detail) {
    kvf_ucx_t *ucx = kind->ctx;
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = (size_t)bytes,
        .flags = UCP_MEM_MAP_ALLOCATE,
    };
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    kvf_ucx_scope_t scope;
    uint64_t most;
    ucp_mem_h handle;
    int sysv_id;

    if (!ucx->posix_memory && !ucx->sysv_memory) {
        return kvf_fail(
            detail, KVF_ERR_UNSUPPORTED,
            "ucx tls \"%s\" makes no shared memory: add sysv or posix, or use memory of kind "
            "host",
            ucx->tls);
    }
    if (!fits(ucx, bytes, &most)) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "%" PRIu64 " bytes of shared memory: there is room for %" PRIu64
                        "; " ADVICE,
                        bytes, most);
    }
    kvf_ucx_scope_enter(&scope, &ucx->log);
    ucs_status_t status = ucp_mem_map(ucx->context, &params, &handle);
    if (status == UCS_OK) {
        status = ucp_mem_query(handle, &attr);
        if (status == UCS_OK && (!is_shared(attr.address, &sysv_id) || !keep_to_user(sysv_id))) {
            status = UCS_ERR_NO_MEMORY;
        }
        if (status != UCS_OK) {
            (void)ucp_mem_unmap(ucx->context, handle);
        }
    }
    kvf_ucx_scope_leave(&scope);
    if (status != UCS_OK) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY,
                        "%" PRIu64 " bytes of shared memory: %s%s%s; " ADVICE, bytes,
                        ucs_status_string(status), scope.said[0] ? "; " : "", scope.said);
    }
    /* Advice only: a pool without it works. */
    (void)madvise(attr.address, (size_t)bytes, MADV_DONTDUMP);
    (void)madvise(attr.address, (size_t)bytes, MADV_DONTFORK);
    (void)madvise(attr.address, (size_t)bytes, MADV_HUGEPAGE);
    *mem_p = (kvf_mem_t){attr.address, bytes, kind, handle};
    return KVF_OK;
}

static void shm_free(kvf_mem_t *mem) {
    if (mem->base != NULL) {
        kvf_ucx_t *ucx = mem->kind->ctx;
        (void)ucp_mem_unmap(ucx->context, mem->priv);
    }
    *mem = (kvf_mem_t){0};
}

void kvf_mem_shm_init(kvf_mem_kind_t *kind, kvf_ucx_t *ucx) {
    *kind = (kvf_mem_kind_t){"shm", KVF_MEM_SHM, true, ucx, shm_alloc, shm_free, kvf_mem_cpu_write};
}
