/* SPDX-License-Identifier: Apache-2.0 */
/* Digests that are made before anybody asks: how many at once, of which sends, and whose pages wait
 * for them. (That they are the right ones is for all other tests of transfers.) */
#include "../support/pair.h"

#include <stdio.h>
#include <stdlib.h>

#define N_SENDS 12
#define MOST 8 /* windows under way */
#define PROMPT 40

typedef struct scene {
    pair_t p; /* its send is the first */
    int32_t source[N_SENDS][KVF_MAX_GROUPS][64];
    kvf_table_t sources[N_SENDS][KVF_MAX_GROUPS];
    watch_t sent[N_SENDS];
    uint64_t id[N_SENDS];
    char ticket[N_SENDS][KVF_TICKET_BYTES];
} scene_t;

/* So many sends, whose digests are held. Each of them is a window. */
static scene_t *open_scene(size_t n) {
    scene_t *s = calloc(1, sizeof(*s));
    cr_assert_not_null(s);
    pair_make(&s->p, &(cluster_options_t){0}, 512, PROMPT);
    cluster_hold_digests(s->p.cluster, true);
    for (size_t i = 0; i < n; i++) {
        char name[8];
        (void)snprintf(name, sizeof(name), "s%zu", i);
        node_take(s->p.ctx, PROMPT, CONTENT, s->source[i], s->sources[i]);
        cr_assert_eq(
            node_offer(s->p.ctx, name, PROMPT, s->sources[i], &s->sent[i], &s->id[i], s->ticket[i]),
            KVF_OK);
    }
    cluster_run(s->p.cluster);
    return s;
}

static void close_scene(scene_t *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        node_give(s->p.ctx, s->sources[i]);
    }
    pair_close(&s->p);
    free(s);
}

static size_t n_windows(const scene_t *s) {
    size_t n = 0;
    for (const kvf_job_t *job = s->p.ctx->digests; job != NULL; job = job->next) {
        n++;
    }
    return n;
}

/* Whose pages the window reads that was handed over last, or (first) first. */
static size_t send_of(const scene_t *s, bool first) {
    const kvf_job_t *job = s->p.ctx->digests;
    while (first && job->next != NULL) {
        job = job->next;
    }
    const kvf_window_t *window = (const kvf_window_t *)job;
    const kvf_piece_t *piece = &window->pieces[0];
    for (size_t i = 0; i < N_SENDS; i++) {
        const kvf_table_t *table = &s->sources[i][piece->group_idx];
        for (int64_t b = 0; b < table->n_blocks; b++) {
            if (table->slots[b] >= 0 &&
                node_page(s->p.ctx, piece->group_idx, table->slots[b]) + piece->offset ==
                    piece->source) {
                return i;
            }
        }
    }
    return SIZE_MAX;
}

Test(send_ahead, eight_at_once_and_the_oldest_first) {
    scene_t *s = open_scene(N_SENDS);
    cr_assert_eq(n_windows(s), MOST);
    for (size_t i = 0; i < N_SENDS; i++) {
        size_t next = i + MOST - 1 < N_SENDS ? i + MOST - 1 : N_SENDS - 1;
        cr_expect_eq(send_of(s, true), i);
        cr_expect_eq(send_of(s, false), next, "%zu", i);
        node_run_digest(s->p.ctx);
        cr_expect_eq(n_windows(s), i + MOST < N_SENDS ? MOST : N_SENDS - 1 - i);
    }
    for (size_t i = 0; i < N_SENDS; i++) {
        cr_assert_eq(kvf_core_send_cancel(s->p.ctx->core, s->id[i], KVF_ERR_CANCELLED), KVF_OK);
    }
    cluster_run(s->p.cluster);
    close_scene(s, N_SENDS);
}

/* One that has ended, or has a receiver by now, has no more of them made: the next one's are. */
Test(send_ahead, not_of_a_send_that_needs_none) {
    scene_t *s = open_scene(N_SENDS);
    const size_t ended = MOST, claimed = MOST + 1;
    cr_assert_eq(kvf_core_send_cancel(s->p.ctx->core, s->id[ended], KVF_ERR_CANCELLED), KVF_OK);
    cr_assert_eq(node_fetch(s->p.gen, "s9", s->ticket[claimed], PROMPT, s->p.destinations,
                            &s->p.got, &s->p.recv, &s->p.detail),
                 KVF_OK, "%s", s->p.detail.text);
    cluster_hold_chunks(s->p.cluster, true);
    cluster_run(s->p.cluster);
    cr_expect(watch_ended(&s->sent[ended]));
    node_run_digest(s->p.ctx);
    cr_expect_eq(send_of(s, false), claimed + 1);
    cluster_hold_chunks(s->p.cluster, false);
    cluster_run(s->p.cluster);
    cr_expect_eq(s->p.got.status, KVF_OK, "its digests are made as it is sent");
    cr_expect(watch_ended(&s->p.got));
    cr_expect(watch_ended(&s->sent[claimed]), "nothing of its is under way");
    cluster_hold_digests(s->p.cluster, false);
    for (size_t i = 0; i < N_SENDS; i++) {
        cr_expect_eq(kvf_core_send_cancel(s->p.ctx->core, s->id[i], KVF_ERR_CANCELLED),
                     i == ended || i == claimed ? KVF_ERR_UNKNOWN : KVF_OK);
    }
    cluster_run(s->p.cluster);
    close_scene(s, N_SENDS);
}

/* The pages of a send are read while its digests are made: however it ends, they come back when
 * those are done, and are out of use until then. */
Test(send_ahead, pages_wait_for_digests) {
    for (int well = 0; well < 2; well++) {
        scene_t *s = open_scene(1);
        const watch_t *sent = &s->sent[0];
        cr_assert_eq(n_windows(s), 1);
        if (well == 1) {
            cr_assert_eq(node_fetch(s->p.gen, "s0", s->ticket[0], PROMPT, s->p.destinations,
                                    &s->p.got, &s->p.recv, &s->p.detail),
                         KVF_OK);
        } else {
            cr_assert_eq(kvf_core_send_cancel(s->p.ctx->core, s->id[0], KVF_ERR_CANCELLED), KVF_OK);
        }
        cluster_run(s->p.cluster);
        cr_expect_eq(sent->results, 1);
        cr_expect_eq(sent->status, well == 1 ? KVF_OK : KVF_ERR_CANCELLED);
        cr_expect_eq(sent->releases, 0, "they are being read");
        cr_expect_gt(kvf_pages_count(s->p.ctx->pages[0], KVF_PAGE_QUARANTINED), 0);
        cluster_advance(s->p.cluster, 600000);
        cr_expect_eq(sent->releases, 1);
        cr_expect_gt(sent->n_poisoned, 0);
        cr_expect_gt(kvf_pages_count(s->p.ctx->pages[0], KVF_PAGE_POISONED), 0);
        node_run_digest(s->p.ctx);
        cr_expect_eq(kvf_pages_count(s->p.ctx->pages[0], KVF_PAGE_POISONED), 0, "they have healed");
        close_scene(s, 1);
    }
}
