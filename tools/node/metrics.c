/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/metrics.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *type, *labels[2], *help;
} rows[] = {
#define ROW(name, text, type, label1, label2, help) {text, type, {label1, label2}, help},
    KVF_METRIC_MAP(ROW)
#undef ROW
};

/* Upper bounds, inclusive, with their texts in seconds. */
static const struct {
    uint64_t us;
    const char *le;
} bounds[KVF_HISTOGRAM_BUCKETS] = {
    {100, "0.0001"},  {250, "0.00025"}, {500, "0.0005"},  {1000, "0.001"},  {2500, "0.0025"},
    {5000, "0.005"},  {10000, "0.01"},  {25000, "0.025"}, {50000, "0.05"},  {100000, "0.1"},
    {250000, "0.25"}, {500000, "0.5"},  {1000000, "1"},   {2500000, "2.5"}, {5000000, "5"},
    {10000000, "10"}, {30000000, "30"}, {60000000, "60"},
};

void kvf_histogram_observe(kvf_histogram_t *histogram, uint64_t duration_us) {
    size_t i = 0;
    while (i < KVF_HISTOGRAM_BUCKETS && duration_us > bounds[i].us) {
        i++;
    }
    histogram->counts[i]++;
    histogram->sum_us += duration_us;
}

void kvf_metrics_begin(kvf_metrics_t *metrics, const kvf_alloc_t *alloc) {
    *metrics = (kvf_metrics_t){.alloc = alloc};
}

/* Append bytes, unless something failed before. */
static void append(kvf_metrics_t *metrics, const char *text, size_t bytes) {
    if (metrics->status != KVF_OK) {
        return;
    }
    if (metrics->room - metrics->bytes < bytes) {
        size_t room = 2 * (metrics->bytes + bytes) + 1024;
        char *more = kvf_realloc(metrics->alloc, metrics->text, room, 1);
        if (more == NULL) {
            metrics->status = KVF_ERR_NO_MEMORY;
            return;
        }
        metrics->text = more;
        metrics->room = room;
    }
    memcpy(metrics->text + metrics->bytes, text, bytes);
    metrics->bytes += bytes;
}

static void appendf(kvf_metrics_t *metrics, const char *fmt, ...) KVF_PRINTF(2, 3);

/* Append a line or part of one; names and helps of the table and one number fit. */
static void appendf(kvf_metrics_t *metrics, const char *fmt, ...) {
    char line[256];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    append(metrics, line, (size_t)n);
}

/* A label's value is free text: the three bytes that would end it are escaped. */
static void append_label(kvf_metrics_t *metrics, const char *name, const char *value) {
    appendf(metrics, "%s=\"", name);
    for (; *value != '\0'; value++) {
        if (*value == '\n') {
            append(metrics, "\\n", 2);
        } else {
            if (*value == '"' || *value == '\\') {
                append(metrics, "\\", 1);
            }
            append(metrics, value, 1);
        }
    }
    append(metrics, "\"", 1);
}

/* Write the head of a metric before its first sample; refuse to come back to one. */
static void begin_metric(kvf_metrics_t *metrics, kvf_metric_t metric, bool histogram) {
    bool first = (metrics->begun & 1u << metric) == 0;
    if ((strcmp(rows[metric].type, "histogram") == 0) != histogram ||
        (!first && metrics->current != metric)) {
        metrics->status = metrics->status == KVF_OK ? KVF_ERR_INVALID : metrics->status;
        return;
    }
    metrics->begun |= 1u << metric;
    metrics->current = metric;
    if (first) {
        appendf(metrics, "# HELP %s %s\n", rows[metric].name, rows[metric].help);
        appendf(metrics, "# TYPE %s %s\n", rows[metric].name, rows[metric].type);
    }
}

void kvf_metrics_sample(kvf_metrics_t *metrics, kvf_metric_t metric, const char *label1,
                        const char *label2, uint64_t value) {
    const char *const values[2] = {label1, label2};
    begin_metric(metrics, metric, false);
    appendf(metrics, "%s", rows[metric].name);
    for (size_t i = 0; i < 2; i++) {
        if ((rows[metric].labels[i][0] == '\0') != (values[i] == NULL)) {
            metrics->status = metrics->status == KVF_OK ? KVF_ERR_INVALID : metrics->status;
            return;
        }
        if (values[i] != NULL) {
            append(metrics, i == 0 ? "{" : ",", 1);
            append_label(metrics, rows[metric].labels[i], values[i]);
        }
    }
    appendf(metrics, "%s %" PRIu64 "\n", label1 != NULL ? "}" : "", value);
}

void kvf_metrics_histogram(kvf_metrics_t *metrics, kvf_metric_t metric,
                           const kvf_histogram_t *histogram) {
    const char *name = rows[metric].name;
    uint64_t count = 0;
    begin_metric(metrics, metric, true);
    for (size_t i = 0; i <= KVF_HISTOGRAM_BUCKETS; i++) {
        count += histogram->counts[i];
        appendf(metrics, "%s_bucket{le=\"%s\"} %" PRIu64 "\n", name,
                i < KVF_HISTOGRAM_BUCKETS ? bounds[i].le : "+Inf", count);
    }
    appendf(metrics, "%s_sum %" PRIu64 ".%06" PRIu64 "\n", name, histogram->sum_us / 1000000,
            histogram->sum_us % 1000000);
    appendf(metrics, "%s_count %" PRIu64 "\n", name, count);
}

kvf_status_t kvf_metrics_end(kvf_metrics_t *metrics, char **text_p, size_t *bytes_p) {
    if (metrics->status != KVF_OK) {
        kvf_free(metrics->alloc, metrics->text);
        return metrics->status;
    }
    *text_p = metrics->text;
    *bytes_p = metrics->bytes;
    return KVF_OK;
}
