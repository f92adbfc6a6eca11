/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"
#include "transceiver/mover/ucx.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static kvf_ucx_t *open_ucx(const char *tls) {
    const kvf_ucx_config_t config = {tls, "auto", "127.0.0.1"};
    kvf_ucx_t *ucx = NULL;
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_ucx_create(&config, kvf_alloc_default(), NULL, &ucx, &detail), KVF_OK, "%s",
                 detail.text);
    return ucx;
}

/* A field of the smaps entry that holds an address; VmFlags as one string. */
static void smaps_of(const void *address, const char *field, char *out, size_t cap) {
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;
    cr_assert_not_null(file);
    out[0] = '\0';
    while (fgets(line, sizeof(line), file) != NULL) {
        char *dash, *end;
        const uintptr_t first = strtoull(line, &dash, 16);
        const uintptr_t last = dash > line && *dash == '-' ? strtoull(dash + 1, &end, 16) : 0;
        if (last > first && *end == ' ') {
            inside = (uintptr_t)address >= first && (uintptr_t)address < last;
        } else if (inside && strncmp(line, field, strlen(field)) == 0) {
            (void)snprintf(out, cap, "%s", line + strlen(field));
        }
    }
    (void)fclose(file);
}

static uint64_t resident_kib(const void *address) {
    char text[64];
    smaps_of(address, "Rss:", text, sizeof(text));
    return strtoull(text, NULL, 10);
}

static void check_zero_and_writable(const kvf_mem_t *mem) {
    cr_assert_eq((uintptr_t)mem->base % 4096, 0);
    for (uint64_t at = 0; at < mem->bytes; at += 4096 - 1) {
        cr_assert_eq(mem->base[at], 0);
    }
    cr_assert_eq(mem->base[mem->bytes - 1], 0);
    mem->base[0] = 1;
    mem->base[mem->bytes - 1] = 2;
    cr_assert_eq(mem->base[0] + mem->base[mem->bytes - 1], 3);
    kvf_mem_t same = *mem;
    cr_assert_eq(mem->kind->write(&same, 1, "abc", 3, NULL, NULL), KVF_OK);
    cr_assert_arr_eq(mem->base, "\1abc\0", 5);
}

Test(mem, host_is_zero_sparse_and_not_dumped) {
    const kvf_mem_kind_t *kind = kvf_mem_host();
    kvf_mem_t mem = {0}, small = {0};
    char flags[256];
    cr_assert_str_eq(kind->name, "host");
    cr_assert_eq(kind->type, KVF_MEM_HOST);
    cr_assert(kind->host_access);
    cr_assert_eq(kind->alloc(kind, 64 * GIB, &mem, NULL), KVF_OK); /* more than there is */
    cr_assert_eq(mem.bytes, 64 * GIB);
    cr_assert_eq(mem.kind, kind);
    mem.base[63 * GIB] = 1;
    cr_assert_leq(resident_kib(mem.base + 63 * GIB), 4096);
    smaps_of(mem.base, "VmFlags:", flags, sizeof(flags));
    cr_assert_not_null(strstr(flags, " dd"), "not MADV_DONTDUMP: %s", flags);
    cr_assert_eq(kind->alloc(kind, 3 * MIB + 5, &small, NULL), KVF_OK);
    check_zero_and_writable(&small);
    kind->free(&small);
    cr_assert_null(small.base);
    kind->free(&small); /* empty is allowed */
    kind->free(&mem);
}

Test(mem, host_refuses_what_does_not_fit) {
    const kvf_mem_kind_t *kind = kvf_mem_host();
    const uint64_t sizes[] = {UINT64_C(1) << 60, UINT64_MAX};
    for (size_t i = 0; i < 2; i++) {
        kvf_mem_t mem = {0};
        kvf_detail_t detail = {""};
        char number[32];
        cr_assert_eq(kind->alloc(kind, sizes[i], &mem, &detail), KVF_ERR_NO_MEMORY);
        cr_assert_null(mem.base);
        (void)snprintf(number, sizeof(number), "%" PRIu64, sizes[i]);
        cr_assert_not_null(strstr(detail.text, number), "%s", detail.text);
    }
}

/* Open a context whose shared memory comes from one transport. */
static kvf_ucx_t *open_shm(kvf_mem_kind_t *kind, const char *tls) {
    kvf_ucx_t *ucx = open_ucx(tls);
    kvf_mem_shm_init(kind, ucx);
    cr_assert_str_eq(kind->name, "shm");
    cr_assert_eq(kind->type, KVF_MEM_SHM);
    cr_assert(kind->host_access);
    return ucx;
}

static void check_shared(const kvf_mem_t *mem) {
    char flags[256];
    smaps_of(mem->base, "VmFlags:", flags, sizeof(flags));
    cr_assert_not_null(strstr(flags, " sh"), "not shared: %s", flags);
    cr_assert_not_null(strstr(flags, " dd"), "not MADV_DONTDUMP: %s", flags);
    cr_assert_not_null(strstr(flags, " dc"), "not MADV_DONTFORK: %s", flags);
}

Test(mem, shm_files_are_zero_and_there_at_once) {
    kvf_mem_kind_t kind;
    kvf_ucx_t *ucx = open_shm(&kind, "posix,tcp,self");
    kvf_mem_t mem = {0};
    kvf_detail_t detail = {""};
    cr_assert_eq(kind.alloc(&kind, 32 * MIB, &mem, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(mem.bytes, 32 * MIB);
    check_zero_and_writable(&mem);
    check_shared(&mem);
    /* All of it is there already: a full /dev/shm cannot turn a later access into SIGBUS. */
    cr_assert_geq(resident_kib(mem.base), 32768);
    kind.free(&mem);
    cr_assert_null(mem.base);
    kind.free(&mem);
    kvf_ucx_destroy(ucx);
}

Test(mem, shm_segments_are_zero_sparse_and_for_this_user_only) {
    kvf_mem_kind_t kind;
    kvf_ucx_t *ucx = open_shm(&kind, "auto");
    kvf_mem_t mem = {0}, small = {0};
    kvf_detail_t detail = {""};
    struct shmid_ds segment;
    struct shm_info info;
    uint32_t found = 0;
    cr_assert_eq(kind.alloc(&kind, 6 * GIB, &mem, &detail), KVF_OK, "%s", detail.text);
    check_shared(&mem);
    mem.base[0] = 1;
    mem.base[6 * GIB - 1] = 1;
    cr_assert_leq(resident_kib(mem.base), 4096);
    const int last = shmctl(0, SHM_INFO, (struct shmid_ds *)&info);
    for (int i = 0; i <= last; i++) {
        if (shmctl(i, SHM_STAT, &segment) >= 0 && segment.shm_cpid == getpid() &&
            segment.shm_segsz == 6 * GIB) {
            cr_assert_eq(segment.shm_perm.mode & 0777, 0600);
            cr_assert_eq(segment.shm_perm.mode & SHM_DEST, SHM_DEST, "would outlive the process");
            found++;
        }
    }
    cr_assert_eq(found, 1);
    kind.free(&mem);
    cr_assert_eq(kind.alloc(&kind, 3 * MIB + 5, &small, NULL), KVF_OK);
    cr_assert_eq(small.bytes, 3 * MIB + 5);
    check_zero_and_writable(&small);
    kind.free(&small);
    kvf_ucx_destroy(ucx);
}

Test(mem, shm_that_does_not_fit_is_refused_without_filling_anything) {
    static const char *const tls[] = {"posix,tcp,self", "auto"};
    for (size_t i = 0; i < 2; i++) {
        struct statvfs before;
        kvf_mem_kind_t kind;
        kvf_ucx_t *ucx = open_shm(&kind, tls[i]);
        kvf_mem_t mem = {0};
        kvf_detail_t detail = {""};
        cr_assert_eq(statvfs("/dev/shm", &before), 0);
        uint64_t bytes = (uint64_t)before.f_blocks * before.f_frsize + 1;
        cr_assert_eq(kind.alloc(&kind, i == 0 ? bytes : UINT64_C(1) << 50, &mem, &detail),
                     KVF_ERR_NO_MEMORY);
        cr_assert_null(mem.base);
        cr_assert_not_null(strstr(detail.text, "/dev/shm"), "%s", detail.text);
        cr_assert_not_null(strstr(detail.text, "--shm-size"), "%s", detail.text);
        kvf_ucx_destroy(ucx);
    }
}

/* UCX falls back to private memory when its shared memory fails: that must not pass for shared
 * memory. */
Test(mem, shm_that_ucx_cannot_share_is_refused) {
    char dir[] = "/dev/shm/kvferry-test-XXXXXX";
    kvf_mem_kind_t kind;
    kvf_mem_t mem = {0};
    kvf_detail_t detail = {""};
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(setenv("UCX_POSIX_DIR", dir, 1), 0);
    kvf_ucx_t *ucx = open_shm(&kind, "posix,tcp,self");
    cr_assert_eq(rmdir(dir), 0);
    cr_assert_eq(kind.alloc(&kind, MIB, &mem, &detail), KVF_ERR_NO_MEMORY);
    cr_assert_null(mem.base);
    cr_assert_not_null(strstr(detail.text, "1048576"), "%s", detail.text);
    kvf_ucx_destroy(ucx);
}

Test(mem, shm_needs_a_transport_that_makes_it) {
    kvf_mem_kind_t kind;
    kvf_ucx_t *ucx = open_shm(&kind, "tcp,self");
    kvf_mem_t mem = {0};
    kvf_detail_t detail = {""};
    cr_assert_eq(kind.alloc(&kind, MIB, &mem, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "posix"), "%s", detail.text);
    kvf_ucx_destroy(ucx);
}
