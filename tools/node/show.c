/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/node.h"

#define N_LABELS 7

static const char *const labels[N_LABELS] = {"free",    "held",        "cached",  "reading",
                                             "writing", "quarantined", "poisoned"};

/* Pages of a pool, in the order of `labels`. */
static kvf_pool_info_t count_pages(const kvf_node_t *node, uint32_t group_idx,
                                   uint64_t counts[N_LABELS]) {
    kvf_pool_info_t info;
    kvf_pool_get_info(node->pools.pools[group_idx], &info);
    const int64_t pages[N_LABELS] = {info.free,    info.held,        info.cached,  info.reading,
                                     info.writing, info.quarantined, info.poisoned};
    for (size_t i = 0; i < N_LABELS; i++) {
        counts[i] = (uint64_t)pages[i];
    }
    return info;
}

kvf_peer_info_t *kvf_node_peers(kvf_node_t *node, size_t *n_p) {
    kvf_peer_info_t *infos = NULL;
    size_t cap = 0, n = kvf_agent_get_peers(node->agent, NULL, 0);
    while (n > cap) { /* more may come between two calls */
        kvf_free(node->alloc, infos);
        cap = n + 8;
        infos = kvf_realloc(node->alloc, NULL, cap, sizeof(*infos));
        if (infos == NULL) {
            n = 0;
            break;
        }
        n = kvf_agent_get_peers(node->agent, infos, cap);
    }
    *n_p = n;
    return infos;
}

static void set(json_t *object, const char *name, json_t *value) {
    (void)json_object_set_new(object, name, value); /* without memory a field is absent */
}

static void set_number(json_t *object, const char *name, uint64_t value) {
    set(object, name, json_integer((json_int_t)value));
}

static json_t *show_peers(kvf_node_t *node) {
    size_t n;
    kvf_peer_info_t *infos = kvf_node_peers(node, &n);
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *peer = json_object();
        set(peer, "instance", json_string(infos[i].instance));
        set(peer, "address", json_string(infos[i].address));
        set(peer, "incarnation", json_string(infos[i].incarnation));
        set(peer, "state", json_string(kvf_peer_state_name(infos[i].state)));
        set(peer, "mover", json_string(infos[i].mover));
        set(peer, "reason", json_string(infos[i].reason));
        (void)json_array_append_new(list, peer);
    }
    kvf_free(node->alloc, infos);
    return list;
}

static json_t *label_object(const uint64_t counts[N_LABELS]) {
    json_t *object = json_object();
    for (size_t i = 0; i < N_LABELS; i++) {
        set_number(object, labels[i], counts[i]);
    }
    return object;
}

/* Pages of all pools by label, and the same pool by pool. */
static void show_pages(kvf_node_t *node, json_t *status) {
    uint64_t counts[N_LABELS], sums[N_LABELS] = {0}, total = 0;
    json_t *pools = json_array();
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        kvf_pool_info_t info = count_pages(node, g, counts);
        json_t *pool = json_object();
        set(pool, "group", json_string(info.group));
        set(pool, "memory", json_string(info.memory));
        set_number(pool, "page_bytes", info.page_bytes);
        set_number(pool, "total", (uint64_t)info.n_pages);
        set(pool, "pages", label_object(counts));
        (void)json_array_append_new(pools, pool);
        total += (uint64_t)info.n_pages;
        for (size_t i = 0; i < N_LABELS; i++) {
            sums[i] += counts[i];
        }
    }
    set(status, "pages", label_object(sums));
    set_number(status, "pages_total", total);
    set(status, "pools", pools);
}

/* What the node itself counts: transfers by state, and time. */
static void show_counts(kvf_node_t *node, json_t *status) {
    json_t *transfers = json_object(), *time = json_object(), *prefix = json_object();
    (void)pthread_mutex_lock(&node->lock);
    const kvf_node_counts_t *counts = &node->counts;
    set_number(transfers, "running", HASH_COUNT(node->by_id));
    set_number(transfers, "done", counts->ended[kvf_node_status_idx(KVF_OK)]);
    for (size_t i = 0; i < KVF_N_STATUSES; i++) {
        if (kvf_node_statuses[i] != KVF_OK && counts->ended[i] > 0) {
            set_number(transfers, kvf_status_name(kvf_node_statuses[i]), counts->ended[i]);
        }
    }
    set_number(time, "wait", counts->wait_us);
    set_number(time, "fill", counts->fill_us);
    set_number(time, "transfer", counts->transfer_us);
    set_number(time, "verify", counts->verify_us);
    set_number(prefix, "prompt_tokens", counts->prompt_tokens);
    set_number(prefix, "cached_tokens", counts->cached_tokens);
    set_number(prefix, "hits", counts->prefix_hits);
    set(status, "draining", json_boolean(node->draining));
    (void)pthread_mutex_unlock(&node->lock);
    set(status, "transfers", transfers);
    set(status, "time_us", time);
    set(prefix, "enabled", json_boolean(node->config->prefix_cache));
    set(status, "prefix_cache", prefix);
}

static void show_agent(kvf_node_t *node, json_t *status) {
    kvf_counters_t counters;
    json_t *object = json_object();
    kvf_agent_get_counters(node->agent, &counters);
    set_number(object, "bytes_sent", counters.bytes_sent);
    set_number(object, "bytes_received", counters.bytes_received);
    set_number(object, "pieces_sent", counters.pieces_sent);
    set_number(object, "pieces_received", counters.pieces_received);
    set_number(object, "posting_us", counters.posting_us);
    set_number(object, "digest_mismatches", counters.digest_mismatches);
    set_number(object, "unknown_transfers", counters.unknown_transfers);
    set_number(object, "refused_chunks", counters.refused_chunks);
    set_number(object, "refused_frames", counters.refused_frames);
    set_number(object, "mover_fallbacks", counters.mover_fallbacks);
    set_number(object, "capacity_mismatches", counters.capacity_mismatches);
    set_number(object, "reconnects", counters.reconnects);
    set_number(object, "audit_failures", counters.audit_failures);
    set_number(object, "sends_live", counters.sends_live);
    set_number(object, "recvs_live", counters.recvs_live);
    set(status, "counters", object);
}

void kvf_node_get_status(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    char incarnation[33];
    json_t *status = json_object();
    kvf_agent_incarnation(node->agent, incarnation);
    set(status, "role", json_string(kvf_role_name(node->role)));
    set(status, "instance", json_string(node->instance));
    set(status, "incarnation", json_string(incarnation));
    set(status, "version", json_string(kvf_version()));
    set(status, "control", json_string(node->control));
    set(status, "model", json_string(node->config->preset));
    set(status, "peers", show_peers(node));
    show_pages(node, status);
    show_counts(node, status);
    show_agent(node, status);
    kvf_http_answer_json(http, 200, status);
    json_decref(status);
}

static void write_transfers(kvf_metrics_t *page, kvf_role_t role, const kvf_node_counts_t *counts) {
    const char *name = kvf_role_name(role);
    for (size_t i = 0; i < KVF_N_STATUSES; i++) {
        if (counts->ended[i] > 0 || kvf_node_statuses[i] == KVF_OK) {
            kvf_metrics_sample(page, KVF_METRIC_TRANSFERS, name,
                               kvf_status_name(kvf_node_statuses[i]), counts->ended[i]);
        }
    }
    for (size_t i = 0; i < KVF_NODE_MOVERS && counts->movers[i].name[0] != '\0'; i++) {
        kvf_metrics_sample(page, KVF_METRIC_TRANSFER_BYTES, name, counts->movers[i].name,
                           counts->movers[i].bytes);
    }
    kvf_metrics_sample(page, KVF_METRIC_TRANSFER_PIECES, NULL, NULL, counts->pieces);
    kvf_metrics_histogram(page, KVF_METRIC_TRANSFER_SECONDS, &counts->transfer);
    kvf_metrics_histogram(page, KVF_METRIC_EXPOSED_SECONDS, &counts->exposed);
    kvf_metrics_histogram(page, KVF_METRIC_QUARANTINE_SECONDS, &counts->quarantine);
}

static void write_pages(kvf_metrics_t *page, const kvf_node_t *node) {
    uint64_t counts[N_LABELS];
    for (uint32_t g = 0; g < node->layout.n_groups; g++) {
        kvf_pool_info_t info = count_pages(node, g, counts);
        for (size_t i = 0; i < N_LABELS; i++) {
            kvf_metrics_sample(page, KVF_METRIC_PAGES, info.group, labels[i], counts[i]);
        }
    }
}

static void write_prefix(kvf_metrics_t *page, const char *role, const kvf_node_counts_t *counts) {
    kvf_metrics_sample(page, KVF_METRIC_PROMPT_TOKENS, role, NULL, counts->prompt_tokens);
    kvf_metrics_sample(page, KVF_METRIC_PREFIX_TOKENS, role, NULL, counts->cached_tokens);
    kvf_metrics_sample(page, KVF_METRIC_PREFIX_HITS, role, NULL, counts->prefix_hits);
}

static void write_peers(kvf_metrics_t *page, kvf_node_t *node) {
    uint64_t counts[KVF_PEER_REFUSED + 1] = {0};
    size_t n;
    kvf_peer_info_t *infos = kvf_node_peers(node, &n);
    for (size_t i = 0; i < n; i++) {
        counts[infos[i].state]++;
    }
    kvf_free(node->alloc, infos);
    for (kvf_peer_state_t state = KVF_PEER_CONNECTING; state <= KVF_PEER_REFUSED; state++) {
        kvf_metrics_sample(page, KVF_METRIC_PEERS, kvf_peer_state_name(state), NULL, counts[state]);
    }
}

static void write_refusals(kvf_metrics_t *page, const kvf_node_counts_t *counts,
                           const kvf_counters_t *agent) {
    for (size_t i = 0; i < KVF_N_STATUSES; i++) {
        /* Those that the agent counts itself come below, once. */
        if (counts->refused[i] > 0 && kvf_node_statuses[i] != KVF_ERR_CAPACITY_MISMATCH) {
            kvf_metrics_sample(page, KVF_METRIC_REFUSED, kvf_status_name(kvf_node_statuses[i]),
                               NULL, counts->refused[i]);
        }
    }
    kvf_metrics_sample(page, KVF_METRIC_REFUSED, "capacity_mismatch", NULL,
                       agent->capacity_mismatches);
    kvf_metrics_sample(page, KVF_METRIC_REFUSED, "chunk", NULL, agent->refused_chunks);
    kvf_metrics_sample(page, KVF_METRIC_REFUSED, "connection", NULL, agent->refused_frames);
}

void kvf_node_get_metrics(void *ctx, kvf_http_request_t *http) {
    kvf_node_t *node = ctx;
    kvf_metrics_t page;
    kvf_counters_t agent;
    char *text;
    size_t bytes;
    kvf_agent_get_counters(node->agent, &agent);
    (void)pthread_mutex_lock(&node->lock);
    kvf_node_counts_t counts = node->counts;
    (void)pthread_mutex_unlock(&node->lock);
    kvf_metrics_begin(&page, node->alloc);
    write_transfers(&page, node->role, &counts);
    write_pages(&page, node);
    write_prefix(&page, kvf_role_name(node->role), &counts);
    write_peers(&page, node);
    kvf_metrics_sample(&page, KVF_METRIC_DIGEST_MISMATCH, NULL, NULL, agent.digest_mismatches);
    kvf_metrics_sample(&page, KVF_METRIC_CONTENT_MISMATCH, NULL, NULL, counts.content_mismatches);
    kvf_metrics_sample(&page, KVF_METRIC_UNKNOWN_TRANSFER, NULL, NULL, agent.unknown_transfers);
    write_refusals(&page, &counts, &agent);
    kvf_metrics_sample(&page, KVF_METRIC_RECONNECTS, NULL, NULL, agent.reconnects);
    kvf_metrics_sample(&page, KVF_METRIC_AUDIT_FAILURES, NULL, NULL, agent.audit_failures);
    kvf_metrics_sample(&page, KVF_METRIC_MOVER_FALLBACK, NULL, NULL, agent.mover_fallbacks);
    kvf_status_t status = kvf_metrics_end(&page, &text, &bytes);
    if (status == KVF_OK) {
        kvf_http_answer(http, 200, KVF_METRICS_CONTENT_TYPE, text, bytes, 0);
        kvf_free(node->alloc, text);
    } else {
        kvf_http_answer_error(http, status, "no metrics now");
    }
}
