/* SPDX-License-Identifier: Apache-2.0 */
/* Receivers that fetch through paths: what is said, what is refused, and whose pages are held until
 * when. (That they get the right bytes is for the tests of cores, which run once more that way.) */
#include "tests/support/pair.h"
#include "tests/support/paths.h"

static const cluster_options_t fetching = {.fetch = true};

static struct {
    size_t n[KVF_FRAME_TYPES_END];
    uint64_t n_fetched; /* ranges */
    uint64_t transfers; /* whose ranges were fetched in order, one behind the other */
    uint64_t next;
    void (*spoil)(ProtobufCMessage *message);
    kvf_frame_type_t spoiled;
    int countdown; /* to the message that is spoiled */
} seen;

static void on_message(kvf_frame_type_t type, ProtobufCMessage *message) {
    seen.n[type]++;
    if (type == KVF_FRAME_FETCH) {
        const Kvf__Wire__Fetch *fetch = (Kvf__Wire__Fetch *)message;
        cr_expect(fetch->first == 0 || fetch->first == seen.next);
        seen.next = fetch->first + fetch->n;
        seen.n_fetched += fetch->n;
    }
    if (seen.spoil != NULL && type == seen.spoiled && --seen.countdown == 0) {
        seen.spoil(message);
    }
}

static void open_pair(pair_t *p, int64_t prompt) {
    memset(&seen, 0, sizeof(seen));
    pair_open(p, &fetching, prompt);
    cluster_on_message(p->cluster, on_message);
}

/* Until all has been asked for, and nothing has come. */
static void run_to_the_middle(pair_t *p) {
    cluster_hold_chunks(p->cluster, true);
    cr_assert_eq(pair_fetch(p), KVF_OK, "%s", p->detail.text);
    cluster_run(p->cluster);
    cr_assert_gt(seen.n[KVF_FRAME_FETCH], 0);
    cr_assert_eq(p->got.results, 0);
    cr_assert_eq(node_written(p->gen, p->destinations), 0);
}

static void finish_well(pair_t *p) {
    cluster_hold_chunks(p->cluster, false);
    cluster_run(p->cluster);
    expect_one_end_each(p);
    cr_expect_eq(p->got.status, KVF_OK, "%s", p->got.message);
    cr_expect_eq(node_wrong(p->gen, p->prompt, CONTENT, p->destinations), 0);
}

/* One path for all requests; each range is fetched once, in the order of the commits. */
Test(fetch, what_is_said) {
    pair_t p;
    open_pair(&p, 100);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    finish_well(&p);
    cr_expect_str_eq(p.got.mover, "nccl");
    cr_expect_str_eq(p.sent.mover, "nccl");
    cr_expect_eq(seen.n[KVF_FRAME_JOIN], 1);
    cr_expect_eq(seen.n[KVF_FRAME_LEAVE], 0);
    cr_expect_eq(seen.n_fetched, p.got.pieces);
    cr_expect_gt(seen.n_fetched, 10);
    cr_expect_eq(kvf_core_lent(p.ctx->core), 1);
    cr_expect_eq(kvf_core_lent(p.gen->core), 0);
    cr_expect_eq(paths_ends(cluster_paths(p.cluster), p.gen), 1);
    pair_close(&p);
}

/* Where the other end has to say how it is reached, it does so once, and what it says comes as it
 * was said (paths.c looks). */
Test(fetch, the_other_end_answers) {
    static const cluster_options_t answering = {.fetch = true, .answer = true};
    pair_t p;
    memset(&seen, 0, sizeof(seen));
    pair_open(&p, &answering, 100);
    cluster_on_message(p.cluster, on_message);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    finish_well(&p);
    cr_expect_str_eq(p.got.mover, "nccl");
    cr_expect_eq(seen.n[KVF_FRAME_JOIN], 1);
    cr_expect_eq(seen.n[KVF_FRAME_JOINED], 1);
    pair_close(&p);
}

static void of_another(ProtobufCMessage *message) {
    ((Kvf__Wire__Joined *)message)->path += 5;
}

/* An answer to what nobody has made: who waits for its own goes on by other ways after a while.
 * Nobody is the worse for it where nobody waits for answers. */
Test(fetch, an_answer_to_nothing) {
    for (int answer = 0; answer < 2; answer++) {
        const cluster_options_t options = {.fetch = true, .answer = answer == 1};
        pair_t p;
        memset(&seen, 0, sizeof(seen));
        pair_open(&p, &options, 100);
        cluster_on_message(p.cluster, on_message);
        seen.spoil = of_another;
        seen.spoiled = KVF_FRAME_JOINED;
        seen.countdown = 1;
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        if (answer == 0) {
            kvf_core_answer(p.ctx->core, 1, 9, "no", 2);
            cluster_run(p.cluster);
        }
        cr_expect_eq(seen.n[KVF_FRAME_JOINED], 1);
        cr_expect_eq(p.got.results, answer == 0);
        cluster_advance(p.cluster, 50000000);
        finish_well(&p);
        cr_expect_str_eq(p.got.mover, answer == 0 ? "nccl" : "sim");
        cr_expect_eq(seen.n[KVF_FRAME_LEAVE], answer == 1 ? 1 : 0, "the path is given up");
        cr_expect_eq(kvf_core_lent(p.ctx->core), answer == 0 ? 1 : 0);
        pair_close(&p);
    }
}

/* ---- fetches that no receiver makes ---- */

static void skip_one(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->first++;
}

static void again(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->first = 0;
}

static void more(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->n++;
}

static void far_behind(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->first = UINT64_MAX;
}

/* Not a byte of a page goes to who asks for what was not committed, or twice: the sender gives the
 * receiver up. */
Test(fetch, what_was_not_committed_is_refused) {
    static void (*const ways[])(ProtobufCMessage * message) = {skip_one, more, far_behind, again};
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        kvf_counters_t counters;
        pair_t p;
        open_pair(&p, 500); /* several jobs */
        seen.spoil = ways[i];
        seen.spoiled = KVF_FRAME_FETCH;
        seen.countdown = ways[i] == again ? 2 : 1; /* the second one begins behind the first */
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cr_assert_leq(seen.countdown, 0, "%zu: %zu fetches of %d, %s", i, seen.n[KVF_FRAME_FETCH],
                      (int)seen.n_fetched, p.got.message);
        cluster_advance(p.cluster, 3000000);
        kvf_core_counters(p.ctx->core, &counters);
        cr_expect_eq(counters.refused_frames, 1, "%zu", i);
        cr_expect_neq(p.got.status, KVF_OK, "%zu", i);
        cr_expect_eq(p.sent.status, KVF_ERR_PEER_REFUSED, "%zu: %s", i, p.sent.message);
        cr_expect(ways[i] == again || node_written(p.gen, p.destinations) == 0, "%zu", i);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.n_poisoned + p.sent.n_poisoned, 0);
        pair_close(&p);
    }
}

static void other_path(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->path = 77;
}

static void other_transfer(ProtobufCMessage *message) {
    ((Kvf__Wire__Fetch *)message)->transfer->counter += 5;
}

/* A fetch of a path that is not there brings nothing, and its request ends by its deadline. One of
 * a transfer that is not there ends its path: what would be sent next is not what the receiver
 * waits for. */
Test(fetch, what_is_not_there) {
    static void (*const ways[])(ProtobufCMessage * message) = {other_path, other_transfer};
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        pair_t p;
        open_pair(&p, 100);
        seen.spoil = ways[i];
        seen.spoiled = KVF_FRAME_FETCH;
        seen.countdown = 1;
        cr_assert_eq(pair_fetch(&p), KVF_OK);
        cluster_run(p.cluster);
        cr_expect_eq(p.got.results, i == 1);
        cr_expect_eq(seen.n[KVF_FRAME_LEAVE], 1);
        cluster_advance(p.cluster, 50000000);
        expect_one_end_each(&p);
        cr_expect_eq(p.got.status, i == 1 ? KVF_ERR_PEER_LOST : KVF_ERR_DEADLINE, "%s",
                     p.got.message);
        cr_expect_eq(node_written(p.gen, p.destinations), 0);
        cr_expect_eq(kvf_core_lent(p.ctx->core), 0);
        pair_close(&p);
    }
}

static void no_invitation(ProtobufCMessage *message) {
    ((Kvf__Wire__Join *)message)->invitation.len = 3;
}

/* The sender cannot make its end: the receiver hears why, at once. */
Test(fetch, a_path_that_is_refused) {
    pair_t p;
    open_pair(&p, 100);
    seen.spoil = no_invitation;
    seen.spoiled = KVF_FRAME_JOIN;
    seen.countdown = 1;
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(seen.n[KVF_FRAME_LEAVE], 1);
    cr_expect_eq(seen.n[KVF_FRAME_FETCH], 0);
    cr_expect_eq(kvf_core_lent(p.ctx->core), 0);
    cr_expect_eq(p.got.results, 1, "the ordinary mover carries");
    cr_expect_eq(p.got.status, KVF_OK, "%s", p.got.message);
    cr_expect_str_eq(p.got.mover, "sim");
    cr_expect_eq(node_wrong(p.gen, p.prompt, CONTENT, p.destinations), 0);
    pair_close(&p);
}

/* ---- the end in the middle ---- */

/* A path fails: its jobs end, then the request does, and both sides have their pages back at once.
 * A while later there is another path. */
Test(fetch, a_path_that_fails) {
    pair_t p;
    watch_t sent, got;
    uint64_t id;
    open_pair(&p, 100);
    run_to_the_middle(&p);
    paths_fail(cluster_paths(p.cluster), 0);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.status, KVF_ERR_PEER_LOST, "%s", p.got.message);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    cr_expect_eq(p.got.quarantine_us + p.sent.quarantine_us, 0);
    cr_expect_eq(seen.n[KVF_FRAME_LEAVE], 1, "each end is told once, or tells");
    cr_expect_eq(kvf_core_lent(p.ctx->core), 0);
    cluster_hold_chunks(p.cluster, false);
    cluster_advance(p.cluster, 6000000);
    memset(&sent, 0, sizeof(sent));
    memset(&got, 0, sizeof(got));
    cr_assert_eq(node_offer(p.ctx, "r2", p.prompt, p.sources, &sent, &id, p.ticket), KVF_OK);
    cr_assert_eq(node_fetch(p.gen, "r2", p.ticket, p.prompt, p.destinations, &got, &id, &p.detail),
                 KVF_OK);
    cluster_run(p.cluster);
    cr_expect(watch_ended(&sent) && watch_ended(&got));
    cr_expect_eq(got.status, KVF_OK, "%s", got.message);
    cr_expect_str_eq(got.mover, "nccl");
    cr_expect_eq(node_wrong(p.gen, p.prompt, CONTENT, p.destinations), 0);
    cr_expect_eq(seen.n[KVF_FRAME_JOIN], 2);
    pair_close(&p);
}

/* The receiver is gone, and our device is still at its pages: they are not given back before. */
Test(fetch, pages_are_held_while_they_are_sent) {
    pair_t p;
    open_pair(&p, 100);
    run_to_the_middle(&p);
    paths_hold_serves(cluster_paths(p.cluster), true);
    cluster_kill(p.gen);
    cluster_advance(p.cluster, 2500000);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.status, KVF_ERR_PEER_LOST, "%s", p.sent.message);
    cr_expect_eq(p.sent.releases, 1, "after quarantine_us");
    cr_expect_gt(p.sent.n_poisoned, 0);
    cr_expect_eq((int64_t)p.sent.n_poisoned,
                 kvf_pages_count(p.ctx->pages[0], KVF_PAGE_POISONED) +
                     kvf_pages_count(p.ctx->pages[1], KVF_PAGE_POISONED));
    cr_expect(kvf_core_busy(p.ctx->core));
    paths_hold_serves(cluster_paths(p.cluster), false);
    cluster_run(p.cluster);
    cr_expect_eq(kvf_pages_count(p.ctx->pages[0], KVF_PAGE_POISONED) +
                     kvf_pages_count(p.ctx->pages[1], KVF_PAGE_POISONED),
                 0);
    cr_expect_eq(kvf_core_lent(p.ctx->core), 0);
    cr_expect_not(kvf_core_busy(p.ctx->core));
    node_give(p.ctx, p.sources);
    cr_expect(node_clean(p.ctx));
    cluster_destroy(p.cluster);
}

/* The same when the receiver says that it has drained: it does not know of our device. */
Test(fetch, drained_is_not_enough) {
    pair_t p;
    open_pair(&p, 100);
    run_to_the_middle(&p);
    paths_hold_serves(cluster_paths(p.cluster), true);
    paths_fail(cluster_paths(p.cluster), 0); /* at the receiver's end */
    cluster_run(p.cluster);
    cr_expect_eq(p.got.results + p.got.releases, 2, "its own jobs are done");
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.releases, 0, "%s", p.sent.message);
    paths_hold_serves(cluster_paths(p.cluster), false);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.releases, 1);
    cr_expect_eq(p.sent.n_poisoned, 0);
    pair_close(&p);
}

/* The sender is cancelled, and what the receiver has asked for still comes: from pages that it
 * holds. */
Test(fetch, cancelled_by_the_sender_in_the_middle) {
    pair_t p;
    open_pair(&p, 100);
    run_to_the_middle(&p);
    cr_assert_eq(kvf_core_send_cancel(p.ctx->core, p.send, KVF_ERR_CANCELLED), KVF_OK);
    cluster_run(p.cluster);
    cr_expect_eq(p.sent.results, 1);
    cr_expect_eq(p.sent.releases, 0);
    cr_expect_eq(p.got.releases, 0, "bytes may still come in");
    cluster_hold_chunks(p.cluster, false);
    cluster_run(p.cluster);
    expect_one_end_each(&p);
    cr_expect_eq(p.got.n_poisoned + p.sent.n_poisoned, 0);
    cr_expect_eq(paths_ends(cluster_paths(p.cluster), p.gen), 1, "the path is well");
    pair_close(&p);
}

/* A receiver may have some paths, not any number of them. */
Test(fetch, paths_are_limited) {
    pair_t p;
    open_pair(&p, 100);
    cr_assert_eq(pair_fetch(&p), KVF_OK);
    finish_well(&p);
    for (int i = 0; i < 20; i++) {
        cr_assert_eq(paths_map(cluster_paths(p.cluster), p.gen, 1), KVF_OK);
    }
    cluster_run(p.cluster);
    cr_expect_eq(seen.n[KVF_FRAME_JOIN], 21);
    cr_expect_eq(seen.n[KVF_FRAME_LEAVE], 13, "each of the others is answered");
    cr_expect_eq(kvf_core_lent(p.ctx->core), 8);
    cluster_kill(p.gen);
    cluster_advance(p.cluster, 3000000);
    cr_expect_eq(kvf_core_lent(p.ctx->core), 0);
    node_give(p.ctx, p.sources);
    cr_expect(node_clean(p.ctx));
    cluster_destroy(p.cluster);
}
