/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "kernels/copy.h"

#include "kernels/digest.h"

#include "../support/random.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#define FILL 0xEE
#define GUARD 256U /* on either side of what is written */
#define MAX_BYTES (3U * 4096U + 300U)

static const uint64_t longer[] = {1023, 1024, 1025,          1087,      1088,         1151,
                                  2048, 3000, 4096 - 64,     4096 - 63, 4096 - 1,     4096,
                                  4097, 4159, 4096 + 64,     4096 + 65, 2 * 4096 - 1, 2 * 4096,
                                  8193, 8300, 3 * 4096 - 65, 3 * 4096,  3 * 4096 + 1, MAX_BYTES};

static uint8_t source[MAX_BYTES + 64], got[MAX_BYTES + 64 + 2 * GUARD],
    want[MAX_BYTES + 64 + 2 * GUARD];

static void source_fill(void) {
    test_random_t random = test_random("copy");
    for (size_t i = 0; i < sizeof(source); i++) {
        source[i] = (uint8_t)test_between(&random, 0, 255);
    }
}

/* Copies alone, with their digest, and with the hashes of their leaves, from source + src to got +
 * GUARD + dst, and nothing around it. */
static void copy_both(const kvf_wide_t *wide, size_t dst, size_t src, uint64_t bytes) {
    const size_t span = 2 * GUARD + 64 + (size_t)bytes;
    memset(want, FILL, span);
    for (size_t i = 0; i < bytes; i++) {
        want[GUARD + dst + i] = source[src + i];
    }
    memset(got, FILL, span);
    kvf_copy_by(wide, got + GUARD + dst, source + src, bytes);
    cr_assert(memcmp(got, want, span) == 0, "%s, %zu bytes, to %zu, from %zu", wide->name,
              (size_t)bytes, dst, src);
    memset(got, FILL, span);
    uint64_t digest = kvf_copy_digest_by(wide, got + GUARD + dst, source + src, bytes);
    cr_assert(memcmp(got, want, span) == 0, "%s, %zu bytes, to %zu, from %zu, digested", wide->name,
              (size_t)bytes, dst, src);
    cr_assert_eq(digest, kvf_digest(source + src, bytes), "%s, %zu bytes, to %zu, from %zu",
                 wide->name, (size_t)bytes, dst, src);
    uint64_t leaves[MAX_BYTES / 4096 + 2] = {0};
    memset(got, FILL, span);
    kvf_copy_leaves_by(wide, got + GUARD + dst, source + src, bytes, leaves);
    cr_assert(memcmp(got, want, span) == 0, "%s, %zu bytes, to %zu, from %zu, by leaves",
              wide->name, (size_t)bytes, dst, src);
    cr_assert_eq(kvf_digest_of_hashes(leaves, bytes), digest, "%s, %zu bytes, to %zu, from %zu",
                 wide->name, (size_t)bytes, dst, src);
    cr_assert_eq(leaves[(bytes + 4095) / 4096], 0, "as many hashes as there are leaves");
}

Test(copy, short_ones_at_every_pair_of_alignments, .timeout = 120) {
    source_fill();
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        for (uint64_t bytes = 0; bytes <= 300; bytes++) {
            for (size_t pair = 0; pair < 64 * 64; pair++) {
                copy_both(wide, pair / 64, pair % 64, bytes);
            }
        }
    }
}

Test(copy, long_ones_at_every_pair_of_alignments, .timeout = 120) {
    source_fill();
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        for (size_t i = 0; i < sizeof(longer) / sizeof(longer[0]); i++) {
            for (size_t pair = 0; pair < 64 * 64; pair++) {
                copy_both(wide, pair / 64, pair % 64, longer[i]);
            }
        }
    }
}

/* In whichever parts a range comes, and in whichever order: the hashes are those of its leaves. */
Test(copy, a_range_in_parts) {
    static const uint64_t ends[][4] = {
        {4096, 8192, 12288, MAX_BYTES}, {8192, MAX_BYTES}, {MAX_BYTES}};
    source_fill();
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        uint64_t leaves[MAX_BYTES / 4096 + 1];
        for (size_t k = 4; k-- > 0;) { /* the last part first */
            uint64_t from = k == 0 ? 0 : ends[i][k - 1];
            if (ends[i][k] > from) {
                kvf_copy_leaves(got + from, source + from, ends[i][k] - from, leaves + from / 4096);
            }
        }
        cr_assert(memcmp(got, source, MAX_BYTES) == 0);
        for (size_t leaf = 0; leaf * 4096 < MAX_BYTES; leaf++) {
            uint64_t bytes = MAX_BYTES - leaf * 4096 < 4096 ? MAX_BYTES - leaf * 4096 : 4096;
            cr_assert_eq(leaves[leaf], XXH3_64bits(source + leaf * 4096, bytes));
        }
        cr_assert_eq(kvf_digest_of_hashes(leaves, MAX_BYTES), kvf_digest(source, MAX_BYTES));
    }
}

/* A mapping of n bytes between two pages that must not be touched. */
static uint8_t *fenced(size_t n) {
    uint8_t *all = mmap(NULL, n + 2 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(all, MAP_FAILED);
    cr_assert_eq(mprotect(all + 4096, n, PROT_READ | PROT_WRITE), 0);
    return all + 4096;
}

static void copy_at_the_edges(const kvf_wide_t *wide, uint8_t *from, uint8_t *to, size_t mapped,
                              size_t bytes) {
    for (int edge = 0; edge < 4; edge++) {
        const uint8_t *src = from + (edge & 1 ? mapped - bytes : 0);
        uint8_t *dst = to + (edge & 2 ? mapped - bytes : 0);
        memset(to, FILL, mapped);
        kvf_copy_by(wide, dst, src, bytes);
        cr_assert(memcmp(dst, src, bytes) == 0);
        memset(to, FILL, mapped);
        cr_assert_eq(kvf_copy_digest_by(wide, dst, src, bytes), kvf_digest(src, bytes));
        cr_assert(memcmp(dst, src, bytes) == 0);
    }
}

/* Faults where it reads or writes out of the range; src is mapped read-only, as a peer's pool. */
Test(copy, stays_between_pages_that_are_not_there) {
    enum { MAPPED = 4 * 4096 };
    uint8_t *from = fenced(MAPPED), *to = fenced(MAPPED);
    for (size_t i = 0; i < MAPPED; i++) {
        from[i] = (uint8_t)(i * i >> 5);
    }
    cr_assert_eq(mprotect(from, MAPPED, PROT_READ), 0);
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        for (size_t bytes = 0; bytes <= 300; bytes++) {
            copy_at_the_edges(wide, from, to, MAPPED, bytes);
        }
        for (size_t i = 0; i < sizeof(longer) / sizeof(longer[0]); i++) {
            copy_at_the_edges(wide, from, to, MAPPED, longer[i]);
        }
        copy_at_the_edges(wide, from, to, MAPPED, MAPPED);
    }
    cr_assert_eq(munmap(from - 4096, MAPPED + 2 * 4096), 0);
    cr_assert_eq(munmap(to - 4096, MAPPED + 2 * 4096), 0);
}

/* ---- the digest is that of the stored bytes ---- */

/* A row whose hash is late: somebody has changed src and dst by then. */
static const kvf_wide_t *late_row;
static uint8_t *late_dst;
static bool late_spoils_dst;

static uint64_t late_hash(const void *data, size_t bytes) {
    memset(source, 0x55, sizeof(source));
    if (late_spoils_dst) {
        memset(late_dst, 0xAA, 4096);
    }
    return late_row->hash(data, bytes);
}

Test(copy, what_changes_before_the_hash_does_not_count) {
    source_fill();
    memcpy(want, source, 4096);
    for (size_t row = 0; (late_row = kvf_wide_at(row)) != NULL; row++) {
        kvf_wide_t late = *late_row;
        late.hash = late_hash;
        for (size_t bytes = 1; bytes <= 4096; bytes += bytes < 4032 ? 63 : 1) {
            for (size_t dst = 0; dst < 64; dst += 9) {
                memcpy(source, want, bytes);
                late_dst = got + dst;
                late_spoils_dst = false;
                cr_assert_eq(kvf_copy_digest_by(&late, late_dst, source, bytes),
                             kvf_digest(want, bytes), "%s, %zu bytes", late.name, bytes);
                cr_assert(memcmp(late_dst, want, bytes) == 0, "%s, %zu bytes", late.name, bytes);
                memcpy(source, want, bytes);
                late_spoils_dst = true;
                cr_assert_eq(kvf_copy_digest_by(&late, late_dst, source, bytes),
                             kvf_digest(want, bytes), "%s, %zu bytes", late.name, bytes);
            }
        }
    }
}

/* A peer that writes to its pool all the time, until its parent ends it or is no more. */
static pid_t scribbler_start(uint8_t *memory, size_t bytes) {
    pid_t parent = getpid(), child = fork();
    cr_assert_geq(child, 0);
    for (uint64_t word = 1; child == 0 && getppid() == parent;) {
        for (size_t at = 0; at < bytes; at += 8) {
            word = word * UINT64_C(6364136223846793005) + 1442695040888963407;
            memcpy(memory + at, &word, 8);
        }
    }
    if (child == 0) {
        _exit(0);
    }
    return child;
}

Test(copy, a_source_in_motion_is_digested_as_it_was_stored, .timeout = 120) {
    enum { BYTES = 4 * 4096, TIMES = 20000 };
    uint8_t *shared = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(shared, MAP_FAILED);
    pid_t child = scribbler_start(shared, BYTES);
    const kvf_wide_t *wide;
    for (size_t row = 0; (wide = kvf_wide_at(row)) != NULL; row++) {
        uint32_t wrong = 0;
        for (size_t i = 0; i < TIMES; i++) {
            static uint8_t stored[BYTES + 64];
            uint8_t *dst = stored + i % 64;
            uint64_t bytes = i % 2 == 0 ? BYTES : i % BYTES;
            uint64_t digest = kvf_copy_digest_by(wide, dst, shared, bytes);
            wrong += digest != kvf_digest(dst, bytes);
        }
        if (wrong > 0) {
            (void)kill(child, SIGKILL);
        }
        cr_assert_eq(wrong, 0, "%s: %u of %d", wide->name, wrong, TIMES);
    }
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    cr_assert_eq(munmap(shared, BYTES), 0);
}

/* ---- which kernels ---- */

/* Whether the kernel lists this flag of the CPU. */
static bool cpu_has(const char *flag) {
    char line[8192], word[32];
    bool has = false;
    FILE *file = fopen("/proc/cpuinfo", "r");
    cr_assert_not_null(file);
    (void)snprintf(word, sizeof(word), " %s ", flag);
    while (!has && fgets(line, sizeof(line), file) != NULL) {
        line[strcspn(line, "\n")] = ' ';
        has = strncmp(line, "flags", 5) == 0 && strstr(line, word) != NULL;
    }
    (void)fclose(file);
    return has;
}

Test(copy, the_widest_that_the_cpu_has_comes_first) {
    const char *names[4];
    size_t n = 0;
#ifdef __x86_64__
    static const char *const flags[][2] = {
        {"avx512f", "avx512"}, {"avx2", "avx2"}, {"sse2", "sse2"}};
    for (size_t i = 0; i < 3; i++) {
        if (cpu_has(flags[i][0])) {
            names[n++] = flags[i][1];
        }
    }
#endif
    names[n++] = "portable";
    for (size_t i = 0; i < n; i++) {
        const kvf_wide_t *wide = kvf_wide_at(i);
        cr_assert_not_null(wide);
        cr_assert_str_eq(wide->name, names[i]);
        cr_assert_eq(wide->stream != NULL, i < n - 1);
    }
    cr_assert_null(kvf_wide_at(n));
    cr_assert_str_eq(kvf_copy_name(), names[0]);

    source_fill();
    kvf_copy(got, source, MAX_BYTES);
    cr_assert(memcmp(got, source, MAX_BYTES) == 0);
    memset(got, FILL, MAX_BYTES);
    cr_assert_eq(kvf_copy_digest(got, source, MAX_BYTES), kvf_digest(source, MAX_BYTES));
    cr_assert(memcmp(got, source, MAX_BYTES) == 0);
}
