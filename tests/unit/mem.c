/* SPDX-License-Identifier: Apache-2.0 */
#include "transceiver/mem/mem.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

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
    const int32_t second = 1; /* of pieces of three bytes */
    memcpy(mem->base, "\1\2\3\4\5\6\7\10", 8);
    cr_assert_eq(mem->kind->zero((kvf_mem_t *)(uintptr_t)mem, 3, 1, &second, NULL), KVF_OK);
    cr_assert_arr_eq(mem->base, "\1\2\3\0\0\0\7\10", 8);
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

static void check_shared(const kvf_mem_t *mem) {
    char flags[256];
    smaps_of(mem->base, "VmFlags:", flags, sizeof(flags));
    cr_assert_not_null(strstr(flags, " sh"), "not shared: %s", flags);
    cr_assert_not_null(strstr(flags, " dd"), "not MADV_DONTDUMP: %s", flags);
    cr_assert_not_null(strstr(flags, " dc"), "not MADV_DONTFORK: %s", flags);
}

Test(mem, shm_is_zero_sparse_and_shared) {
    const kvf_mem_kind_t *kind = kvf_mem_shm();
    kvf_mem_t mem = {0}, small = {0};
    kvf_detail_t detail = {""};
    cr_assert_str_eq(kind->name, "shm");
    cr_assert_eq(kind->type, KVF_MEM_SHM);
    cr_assert(kind->host_access);
    cr_assert_eq(kind->alloc(kind, 6 * GIB, &mem, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(mem.bytes, 6 * GIB);
    check_shared(&mem);
    mem.base[0] = 1;
    mem.base[6 * GIB - 1] = 1;
    cr_assert_leq(resident_kib(mem.base), 4096);
    kind->free(&mem);
    cr_assert_null(mem.base);
    kind->free(&mem);
    cr_assert_eq(kind->alloc(kind, 3 * MIB + 5, &small, NULL), KVF_OK);
    cr_assert_eq(small.bytes, 3 * MIB + 5);
    check_zero_and_writable(&small);
    kind->free(&small);
}

/* Who is given the descriptor can read, and neither write nor change the length. */
Test(mem, shm_is_sealed) {
    const kvf_mem_kind_t *kind = kvf_mem_shm();
    kvf_mem_t mem = {0}, host = {0};
    cr_assert_eq(kind->alloc(kind, MIB, &mem, NULL), KVF_OK);
    cr_assert_eq(kvf_mem_host()->alloc(kvf_mem_host(), MIB, &host, NULL), KVF_OK);
    cr_assert_eq(kvf_mem_shm_fd(&host), -1);
    int fd = kvf_mem_shm_fd(&mem);
    cr_assert_geq(fd, 0);
    cr_assert_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    cr_assert_lt(ftruncate(fd, MIB / 2), 0, "shorter");
    cr_assert_lt(ftruncate(fd, 2 * MIB), 0, "longer");
    cr_assert_eq(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    const uint8_t *view = mmap(NULL, MIB, PROT_READ, MAP_SHARED, fd, 0);
    cr_assert_neq(view, MAP_FAILED);
    mem.base[MIB - 1] = 77;
    cr_assert_eq(view[MIB - 1], 77);
    kind->free(&mem);
    cr_assert_eq(view[MIB - 1], 77, "what is mapped stays");
    cr_assert_eq(munmap((void *)(uintptr_t)view, MIB), 0);
    kvf_mem_host()->free(&host);
}

Test(mem, shm_that_does_not_fit_is_refused) {
    const kvf_mem_kind_t *kind = kvf_mem_shm();
    const uint64_t sizes[] = {0, UINT64_C(1) << 50, UINT64_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        kvf_mem_t mem = {0};
        kvf_detail_t detail = {""};
        char number[32];
        cr_assert_eq(kind->alloc(kind, sizes[i], &mem, &detail), KVF_ERR_NO_MEMORY);
        cr_assert_null(mem.base);
        (void)snprintf(number, sizeof(number), "%" PRIu64 " bytes", sizes[i]);
        cr_assert_not_null(strstr(detail.text, number), "%s", detail.text);
    }
}

Test(mem, shm_without_descriptors_is_refused) {
    const kvf_mem_kind_t *kind = kvf_mem_shm();
    kvf_mem_t mem = {0};
    kvf_detail_t detail = {""};
    struct rlimit limit, none;
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    kvf_status_t status = kind->alloc(kind, MIB, &mem, &detail);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert_eq(status, KVF_ERR_NO_MEMORY);
    cr_assert_null(mem.base);
    cr_assert_not_null(strstr(detail.text, "ulimit -n"), "%s", detail.text);
}
