/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_NODE_METRICS_H
#define KVF_NODE_METRICS_H

/**
 * @file
 * What GET /metrics says, in the Prometheus text format. The names of docs/contracts.md "Metrics"
 * are rows of one table, with their labels, so that no caller can misspell them.
 */

#include "kvmgr/base/alloc.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* X(NAME, "name", type, "first label" or "", "second label" or "", "help") */
#define KVF_METRIC_MAP(X)                                                                          \
    X(TRANSFERS, "kvferry_transfers_total", "counter", "role", "result", "Transfers that ended.")  \
    X(TRANSFER_BYTES, "kvferry_transfer_bytes_total", "counter", "role", "mover",                  \
      "KV bytes that moved, whole blocks.")                                                        \
    X(TRANSFER_PIECES, "kvferry_transfer_pieces_total", "counter", "", "",                         \
      "Pieces that movers carried, after merging.")                                                \
    X(TRANSFER_SECONDS, "kvferry_transfer_seconds", "histogram", "", "",                           \
      "Time from the receiver's request to its verified result.")                                  \
    X(EXPOSED_SECONDS, "kvferry_exposed_seconds", "histogram", "", "",                             \
      "Time a receiver waited after prefill had ended.")                                           \
    X(QUARANTINE_SECONDS, "kvferry_quarantine_seconds", "histogram", "", "",                       \
      "Time that pages of ended transfers waited for a proof, when there was none at once.")       \
    X(PAGES, "kvferry_pages", "gauge", "pool", "state", "Pages by state; adds up to the pool.")    \
    X(PROMPT_TOKENS, "kvferry_prompt_tokens_total", "counter", "role", "",                         \
      "Prompt tokens of requests that got pages.")                                                 \
    X(PREFIX_TOKENS, "kvferry_prefix_cached_tokens_total", "counter", "role", "",                  \
      "Prompt tokens that the prefix cache had.")                                                  \
    X(PREFIX_HITS, "kvferry_prefix_hits_total", "counter", "role", "",                             \
      "Requests of which the prefix cache had any token.")                                         \
    X(PEERS, "kvferry_peers", "gauge", "state", "", "Known peers by state.")                       \
    X(DIGEST_MISMATCH, "kvferry_digest_mismatch_total", "counter", "", "",                         \
      "Ranges that arrived with other bytes than were sent.")                                      \
    X(CONTENT_MISMATCH, "kvferry_content_mismatch_total", "counter", "", "",                       \
      "Transfers that ended well with pages that are not what the request asks for.")              \
    X(UNKNOWN_TRANSFER, "kvferry_unknown_transfer_total", "counter", "", "",                       \
      "Messages about transfers that are not known any more; harmless.")                           \
    X(REFUSED, "kvferry_refused_total", "counter", "reason", "",                                   \
      "Requests, chunks and connections that were refused.")                                       \
    X(RECONNECTS, "kvferry_reconnects_total", "counter", "", "",                                   \
      "Control connections that took the place of a broken one.")                                  \
    X(AUDIT_FAILURES, "kvferry_audit_failures_total", "counter", "", "",                           \
      "Recounts of a pool's pages that did not add up: a defect.")                                 \
    X(MOVER_FALLBACK, "kvferry_mover_fallback_total", "counter", "", "",                           \
      "Pairs of pools that got a slower mover than the first choice.")

typedef enum kvf_metric {
#define KVF_METRIC_ENUM(name, text, type, label1, label2, help) KVF_METRIC_##name,
    KVF_METRIC_MAP(KVF_METRIC_ENUM)
#undef KVF_METRIC_ENUM
        KVF_N_METRICS
} kvf_metric_t;

/** Number of finite buckets of a histogram: 100 us to 60 s. */
#define KVF_HISTOGRAM_BUCKETS 18

/** Durations by size. Zero-initialise. */
typedef struct kvf_histogram {
    uint64_t counts[KVF_HISTOGRAM_BUCKETS + 1]; /**< each bucket alone; the last one has no bound */
    uint64_t sum_us;
} kvf_histogram_t;

/** Count one duration. @thread the histogram's */
void kvf_histogram_observe(kvf_histogram_t *histogram, uint64_t duration_us);

/** A text in the making. Caller's memory; one thread. */
typedef struct kvf_metrics {
    const kvf_alloc_t *alloc;
    char *text;
    size_t bytes, room;
    uint32_t begun;       /**< bit per metric that has its head */
    kvf_metric_t current; /**< the last one begun */
    kvf_status_t status;  /**< the first error; then nothing more is written */
} kvf_metrics_t;

/** Begin a text. @param alloc  Borrowed until kvf_metrics_end(). */
void kvf_metrics_begin(kvf_metrics_t *metrics, const kvf_alloc_t *alloc);

/**
 * Write one sample of a counter or gauge. All samples of a metric come one after the other, each
 * with other labels.
 *
 * @param label1, label2  Values of the metric's labels, any UTF-8; NULL where it has none.
 */
void kvf_metrics_sample(kvf_metrics_t *metrics, kvf_metric_t metric, const char *label1,
                        const char *label2, uint64_t value);

/** Write a histogram. */
void kvf_metrics_histogram(kvf_metrics_t *metrics, kvf_metric_t metric,
                           const kvf_histogram_t *histogram);

/**
 * End a text.
 *
 * @param[out] text_p   kvf_free() it; not zero-terminated.
 * @param[out] bytes_p  Its length.
 * @return KVF_OK; KVF_ERR_NO_MEMORY; KVF_ERR_INVALID (a defect of the caller: a metric in two
 *         places, of another type, or with other labels than its own). Nothing is left to free
 *         after an error.
 */
KVF_CHECK kvf_status_t kvf_metrics_end(kvf_metrics_t *metrics, char **text_p, size_t *bytes_p);

#endif
