/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/options.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <string.h>

Test(bench_options, sizes) {
    static const struct {
        const char *text;
        uint64_t bytes; /* 0: refused */
    } cases[] = {
        {"1", 1},
        {"64", 64},
        {"4KiB", 4096},
        {"64MiB", 67108864},
        {"1GiB", 1073741824},
        {"9223372036854775807", INT64_MAX},
        {"", 0},
        {"KiB", 0},
        {"-1", 0},
        {" 1", 0},
        {"1kib", 0},
        {"1 KiB", 0},
        {"1.5KiB", 0},
        {"9223372036854775808", 0},
        {"18446744073709551616", 0},
        {"8589934592GiB", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint64_t bytes = 77;
        kvf_status_t status = kvf_bench_parse_size(cases[i].text, &bytes);
        cr_assert_eq(status, cases[i].bytes != 0 ? KVF_OK : KVF_ERR_INVALID, "%s", cases[i].text);
        cr_assert_eq(bytes, cases[i].bytes != 0 ? cases[i].bytes : 77, "%s: %" PRIu64,
                     cases[i].text, bytes);
    }
}

Test(bench_options, any_multiple_of_64_is_a_layout) {
    for (uint64_t vectors = 1; vectors <= 4096; vectors++) {
        kvf_layout_t layout;
        kvf_detail_t detail;
        cr_assert_eq(kvf_bench_layout(vectors * 64, 0, &layout, &detail), KVF_OK);
        cr_assert_eq(kvf_layout_check(&layout, &detail), KVF_OK, "%s", detail.text);
        cr_assert_eq(kvf_group_block_bytes(&layout.groups[0]), vectors * 64);
        /* The largest power of two that divides, up to 16: the lowest bit that is set. */
        uint64_t lowest = vectors & (~vectors + 1);
        cr_assert_eq(layout.groups[0].n_layers, lowest < 16 ? lowest : 16, "%" PRIu64, vectors);
        for (uint32_t i = 0; i < layout.groups[0].n_layers; i++) {
            cr_assert_eq(layout.groups[0].layers[i], i);
        }
    }
}

Test(bench_options, layers_as_told) {
    kvf_layout_t layout;
    kvf_detail_t detail;
    cr_assert_eq(kvf_bench_layout(64 * 21, 7, &layout, &detail), KVF_OK);
    cr_assert_eq(layout.groups[0].n_layers, 7);
    cr_assert_eq(kvf_group_layer_bytes(&layout.groups[0]), 64 * 3);
    cr_assert_eq(kvf_bench_layout(64 * 21, 4, &layout, &detail), KVF_ERR_INVALID);
    cr_assert(strstr(detail.text, "--layers is 4") != NULL, "%s", detail.text);
    cr_assert_eq(kvf_bench_layout(64 * 512, 512, &layout, &detail), KVF_ERR_INVALID);
    cr_assert_eq(layout.groups[0].n_layers, 7, "written on error");
}

Test(bench_options, no_layout) {
    static const uint64_t sizes[] = {0, 1, 63, 65, 100, ((uint64_t)UINT32_MAX + 1) * 64, INT64_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        kvf_layout_t layout;
        kvf_detail_t detail;
        cr_assert_eq(kvf_bench_layout(sizes[i], 0, &layout, &detail), KVF_ERR_INVALID, "%" PRIu64,
                     sizes[i]);
        cr_assert(strstr(detail.text, "--block-bytes") != NULL, "%s", detail.text);
    }
}

static const kvf_bench_options_t good = {.mover = "auto",
                                         .tls = "auto",
                                         .memory = "shm",
                                         .block_bytes = 4096,
                                         .blocks = 4,
                                         .pool_bytes = 7 * 4096,
                                         .threads = 1};

static void refused(kvf_bench_options_t options, const char *word) {
    kvf_detail_t detail = {""};
    cr_assert_eq(kvf_bench_check(&options, &detail), KVF_ERR_INVALID, "%s", word);
    cr_assert(strstr(detail.text, word) != NULL, "%s: %s", word, detail.text);
}

Test(bench_options, numbers_that_do_not_go_together) {
    kvf_detail_t detail;
    kvf_bench_options_t options = good;
    cr_assert_eq(kvf_bench_check(&options, &detail), KVF_OK, "%s", detail.text);
    options.pool_bytes--; /* 4 blocks and 3 gaps */
    refused(options, "need 28672");
    options = good;
    options.mover = "magic";
    refused(options, "auto, mapped, tcp, ucx, cuda, nccl or rdma");
    options = good;
    options.memory = "disk";
    refused(options, "host, shm or cuda");
    options = good;
    options.memory = "cuda";
    options.reference = KVF_BENCH_NT;
    refused(options, "tools/check-gpu");
    options = good;
    options.device_alloc = "vmm";
    refused(options, "is for --memory cuda");
    options = good;
    options.block_bytes = 4097;
    refused(options, "--block-bytes");
    options = good;
    options.blocks = 0;
    refused(options, "slots");
    options = good;
    options.blocks = UINT64_MAX;
    refused(options, "slots");
    options = good;
    options.block_bytes = 64;
    options.pool_bytes = UINT64_C(64) << 31;
    refused(options, "2^31 - 1");
    options = good;
    options.measure = KVF_BENCH_EXPOSED;
    options.layers = 1;
    refused(options, "--layers");
    options = good;
    options.measure = KVF_BENCH_PUT;
    options.reference = KVF_BENCH_NT;
    refused(options, "--reference");
}

Test(bench_options, memory_goes_with_the_transports) {
    cr_assert_str_eq(kvf_bench_memory("auto", "auto"), "shm");
    cr_assert_str_eq(kvf_bench_memory("cuda", "auto"), "cuda");
    cr_assert_str_eq(kvf_bench_memory("auto", "posix,self"), "shm");
    cr_assert_str_eq(kvf_bench_memory("auto", "tcp,sysv"), "shm");
    cr_assert_str_eq(kvf_bench_memory("auto", "tcp,self"), "host");
}
