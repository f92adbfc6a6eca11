/* SPDX-License-Identifier: Apache-2.0 */
/* Pools as their engine sees them: pages for several sequences and for a prefix index. */
#include "transceiver/kvferry.h"

#include <criterion/criterion.h>
#include <string.h>

static const kvf_layout_t layout = {.n_groups = 1,
                                    .groups = {{.name = "full",
                                                .n_layers = 1,
                                                .layers = {0},
                                                .tokens_per_block = 16,
                                                .kv_heads = 1,
                                                .head_dim = 8,
                                                .kv_factor = 2,
                                                .dtype = KVF_DTYPE_BF16}}};

static kvf_agent_t *agent;
static kvf_pool_t *pool;
static kvf_detail_t detail;

static void open_agent(void) {
    kvf_agent_config_t config;
    kvf_agent_config_init(&config);
    config.instance = "one";
    config.control_listen = "127.0.0.1:0";
    config.layout = &layout;
    memset(config.cluster_key, 0x5a, sizeof(config.cluster_key));
    cr_assert_eq(kvf_agent_create(&config, &agent, &detail), KVF_OK, "%s", detail.text);
}

static void open_pool(void) {
    const kvf_pool_desc_t desc = {.memory = "host", .n_pages = 8};
    open_agent();
    cr_assert_eq(kvf_pool_create(agent, &desc, &pool, &detail), KVF_OK, "%s", detail.text);
}

static void open_zeroing_pool(bool zero_freed) {
    const kvf_pool_desc_t desc = {.memory = "host", .n_pages = 8, .zero_freed = zero_freed};
    open_agent();
    cr_assert_eq(kvf_pool_create(agent, &desc, &pool, &detail), KVF_OK, "%s", detail.text);
}

/* How many bytes of a page are not zero. */
static int bytes_of(int32_t slot) {
    uint8_t bytes[512];
    int n = 0;
    cr_assert_eq(kvf_pool_read(pool, slot, 0, bytes, sizeof(bytes), &detail), KVF_OK);
    for (size_t i = 0; i < sizeof(bytes); i++) {
        n += bytes[i] != 0;
    }
    return n;
}

/* A sequence with a page that the index keeps, another one, and one that has come for the index's:
 * pages that are handed out again are zeros, what is still somebody's stays. */
static void hand_out_again(bool zero_freed) {
    int32_t slots[4], more[8];
    int64_t n;
    open_zeroing_pool(zero_freed);
    cr_assert_eq(kvf_pool_acquire(pool, 4, slots), KVF_OK);
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(bytes_of(slots[i]), 0, "new memory");
        memset(kvf_pool_page(pool, slots[i]), 0x40 + i, 512);
    }
    cr_assert_eq(kvf_pool_cache(pool, 2, slots), KVF_OK);
    cr_assert_eq(kvf_pool_hold(pool, 2, slots + 2), KVF_OK); /* shared with another sequence */
    cr_assert_eq(kvf_pool_release(pool, 4, slots), KVF_OK);
    cr_expect_eq(bytes_of(slots[2]), 512, "the other one has it");
    cr_assert_eq(kvf_pool_hold(pool, 2, slots), KVF_OK);
    cr_assert_eq(kvf_pool_release(pool, 2, slots), KVF_OK);
    cr_assert_eq(kvf_pool_acquire(pool, 4, more), KVF_OK);
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(bytes_of(slots[i]), 512, "still somebody's");
        memset(kvf_pool_page(pool, more[i]), 0x50 + i, 512);
    }
    cr_assert_eq(kvf_pool_release(pool, 1, slots + 2), KVF_OK);
    cr_assert_eq(kvf_pool_evict(pool, 1, slots, &n), KVF_OK);
    cr_assert_eq(kvf_pool_acquire(pool, 2, more + 4), KVF_OK);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(bytes_of(more[4 + i]), zero_freed ? 0 : 512);
    }
    cr_expect_eq(bytes_of(slots[1]), 512, "in the index");
    cr_expect_eq(bytes_of(slots[3]), 512, "held");
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(bytes_of(more[i]), 512, "held");
    }
    cr_assert_eq(kvf_pool_release(pool, 4, more), KVF_OK);
    cr_assert_eq(kvf_pool_acquire(pool, 4, more), KVF_OK);
    cr_expect_eq(bytes_of(more[3]), zero_freed ? 0 : 512, "used, then free, without a write");
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

Test(agent_pool, zeroed_when_handed_out_again) {
    hand_out_again(true);
}

Test(agent_pool, or_not) {
    hand_out_again(false);
}

/* Memory of the caller's: nobody knows what was in it. */
Test(agent_pool, attached_memory_is_zeroed) {
    static uint8_t theirs[8 * 512];
    const kvf_pool_desc_t desc = {.memory = "host", .n_pages = 8, .zero_freed = true};
    int32_t slots[8];
    memset(theirs, 1, sizeof(theirs));
    open_agent();
    cr_assert_eq(kvf_pool_attach(agent, &desc, theirs, &pool, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pool_acquire(pool, 3, slots), KVF_OK);
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(bytes_of(slots[i]), 0);
    }
    int n = 0;
    for (size_t i = 0; i < sizeof(theirs); i++) {
        n += theirs[i];
    }
    cr_expect_eq(n, 5 * 512, "the others are nobody's yet");
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

static void expect_pages(int64_t n_held, int64_t n_cached, int64_t n_free) {
    kvf_pool_info_t info;
    kvf_pool_get_info(pool, &info);
    cr_expect_eq(info.held, n_held);
    cr_expect_eq(info.cached, n_cached);
    cr_expect_eq(info.free, n_free);
}

static void share_pages(void) {
    int32_t slots[3], more[8];
    cr_assert_eq(kvf_pool_acquire(pool, 3, slots), KVF_OK);
    const int32_t shared[] = {slots[0], -1, slots[2]};
    cr_expect_eq(kvf_pool_hold(pool, 3, shared), KVF_OK);
    cr_expect_eq(kvf_pool_release(pool, 3, slots), KVF_OK);
    expect_pages(2, 0, 6);
    /* All or none: slot 1 is nobody's, and the page in front of it gets no third hold. */
    cr_expect_eq(kvf_pool_hold(pool, 2, slots), KVF_ERR_INVALID);
    cr_expect_eq(kvf_pool_hold(pool, 2, (int32_t[]){slots[0], 8}), KVF_ERR_RANGE);
    cr_expect_eq(kvf_pool_release(pool, 3, shared), KVF_OK);
    expect_pages(0, 0, 8);

    /* The index keeps what the sequence lets go, and another sequence comes for it. */
    cr_assert_eq(kvf_pool_acquire(pool, 3, slots), KVF_OK);
    cr_expect_eq(kvf_pool_cache(pool, 3, (int32_t[]){slots[0], slots[1], slots[0]}), KVF_OK);
    cr_expect_eq(kvf_pool_cache(pool, 2, &slots[1]), KVF_ERR_INVALID, "one is in the index");
    cr_expect_eq(kvf_pool_cache(pool, 2, (int32_t[]){slots[2], 8}), KVF_ERR_RANGE);
    cr_expect_eq(kvf_pool_cache(pool, 1, &slots[2]), KVF_OK, "it was not taken with the others");
    cr_expect_eq(kvf_pool_release(pool, 3, slots), KVF_OK);
    expect_pages(0, 3, 5);
    cr_expect_eq(kvf_pool_acquire(pool, 6, more), KVF_ERR_AGAIN);
    cr_expect_eq(kvf_pool_hold(pool, 1, &slots[1]), KVF_OK);
    int64_t n;
    cr_expect_eq(kvf_pool_evict(pool, 1, slots, &n), KVF_OK);
    cr_expect_eq(n, 1);
    cr_expect_eq(kvf_pool_evict(pool, 1, slots, &n), KVF_ERR_INVALID);
    cr_expect_eq(n, 0);
    cr_expect_eq(kvf_pool_evict(pool, 4, (int32_t[]){-1, slots[1], slots[0], slots[2]}, &n),
                 KVF_ERR_INVALID);
    cr_expect_eq(n, 2, "what is behind one that does not go stays");
    expect_pages(1, 1, 6);
    cr_expect_eq(kvf_pool_release(pool, 1, &slots[1]), KVF_OK);
    cr_expect_eq(kvf_pool_evict(pool, 2, (int32_t[]){slots[2], 8}, &n), KVF_ERR_RANGE);
    cr_expect_eq(n, 1);
    expect_pages(0, 0, 8);
}

Test(agent_pool, pages_are_shared_and_cached) {
    open_pool();
    share_pages();
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

/* The same through the agent's thread. */
Test(agent_pool, of_a_running_agent) {
    open_pool();
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    share_pages();
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

/* A page is 512 bytes. */
Test(agent_pool, bytes_are_written_and_read) {
    uint8_t bytes[512], back[512];
    open_pool();
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t)(i * 3 + 1);
    }
    cr_assert_eq(kvf_pool_write(pool, 3, 0, bytes, 512, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_pool_write(pool, 7, 500, bytes, 12, &detail), KVF_OK);
    cr_assert_eq(kvf_pool_read(pool, 3, 100, back, 412, &detail), KVF_OK);
    cr_assert_arr_eq(back, bytes + 100, 412);
    cr_assert_eq(memcmp((uint8_t *)kvf_pool_page(pool, 7) + 500, bytes, 12), 0);
    const struct {
        int32_t slot;
        uint64_t offset, bytes;
    } wrong[] = {{-1, 0, 1}, {8, 0, 1}, {0, 512, 1}, {0, 511, 2}, {0, 0, 0}, {0, 1, UINT64_MAX}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cr_expect_eq(
            kvf_pool_write(pool, wrong[i].slot, wrong[i].offset, bytes, wrong[i].bytes, &detail),
            KVF_ERR_RANGE);
        cr_expect_not_null(strstr(detail.text, "the pool has 8 pages of 512 bytes"), "%s",
                           detail.text);
        cr_expect_eq(
            kvf_pool_read(pool, wrong[i].slot, wrong[i].offset, back, wrong[i].bytes, &detail),
            KVF_ERR_RANGE);
    }
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
}

/* The caller's memory is a pool, and is the caller's again when the agent has ended. */
Test(agent_pool, memory_of_the_caller) {
    static _Alignas(64) uint8_t memory[8 * 512];
    const kvf_pool_desc_t desc = {.memory = "host", .n_pages = 8},
                          shared = {.memory = "shm", .n_pages = 8};
    memset(memory, 7, sizeof(memory));
    open_agent();
    cr_expect_eq(kvf_pool_attach(agent, &desc, NULL, &pool, &detail), KVF_ERR_INVALID);
    cr_expect_eq(kvf_pool_attach(agent, &shared, memory, &pool, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_eq(kvf_pool_attach(agent, &desc, memory, &pool, &detail), KVF_OK, "%s", detail.text);
    cr_expect_eq(kvf_pool_page(pool, 5), memory + 5 * 512);
    cr_expect_eq(memory[5 * 512], 7, "it is as it was");
    share_pages();
    cr_assert_eq(kvf_agent_start_thread(agent, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_agent_destroy(agent), KVF_OK);
    memory[0] = 1;
}
