/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/metrics.h"

#include <criterion/criterion.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a strict reader, by the rules of the format and of promtool ---- */

typedef struct sample {
    char family[80], suffix[16], labels[256]; /* labels as written, without "le" */
    double le, value;                         /* le: NAN without */
} sample_t;

typedef struct family {
    char name[80], type[16];
} family_t;

static family_t families[32];
static sample_t samples[512];
static size_t n_families, n_samples;

/* Take a fixed text, or fail. */
static const char *take(const char *at, const char *text) {
    cr_assert_eq(strncmp(at, text, strlen(text)), 0, "\"%s\" is missing at \"%.60s\"", text, at);
    return at + strlen(text);
}

static const char *take_name(const char *at, char *name, size_t room) {
    size_t n = strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:");
    cr_assert(n > 0 && n < room && !isdigit((unsigned char)at[0]), "no name at \"%.60s\"", at);
    memcpy(name, at, n);
    name[n] = '\0';
    return at + n;
}

/* {a="x",b="y"}, unescaped into `a=x;b=y;`; le goes elsewhere. */
static const char *take_labels(const char *at, sample_t *sample) {
    char *out = sample->labels;
    sample->le = NAN;
    for (char end = '{'; *at == end; end = ',') {
        char name[80], value[200];
        size_t n = 0;
        at = take(take_name(at + 1, name, sizeof(name)), "=\"");
        for (; *at != '"'; at++) {
            cr_assert(*at != '\0' && *at != '\n' && n < sizeof(value) - 1);
            if (*at == '\\') {
                at++;
                cr_assert(*at == 'n' || *at == '"' || *at == '\\', "bad escape");
                value[n++] = *at == 'n' ? '\n' : *at;
            } else {
                value[n++] = *at;
            }
        }
        at++;
        value[n] = '\0';
        if (strcmp(name, "le") == 0) {
            sample->le = strcmp(value, "+Inf") == 0 ? INFINITY : strtod(value, NULL);
        } else {
            out += sprintf(out, "%s=%s;", name, value);
        }
        cr_assert(*at == ',' || *at == '}', "labels do not end: \"%.60s\"", at);
    }
    return *at == '}' ? at + 1 : at;
}

/* A line of a sample; it must belong to the family that was announced last. */
static void read_sample(const char *line) {
    cr_assert_gt(n_families, 0, "a sample before any TYPE");
    const family_t *family = &families[n_families - 1];
    sample_t *sample = &samples[n_samples];
    char name[80], *end;
    *sample = (sample_t){0};
    const char *at = take_labels(take_name(line, name, sizeof(name)), sample);
    at = take(at, " ");
    cr_assert(isdigit((unsigned char)*at), "no number at \"%.60s\"", at);
    sample->value = strtod(at, &end);
    cr_assert_eq(*end, '\0', "more than a number: \"%s\"", at);
    (void)snprintf(sample->family, sizeof(sample->family), "%s", family->name);
    (void)snprintf(sample->suffix, sizeof(sample->suffix), "%s", take(name, family->name));
    bool histogram = strcmp(family->type, "histogram") == 0;
    bool bucket = strcmp(sample->suffix, "_bucket") == 0;
    cr_assert_eq(sample->suffix[0] != '\0', histogram, "%s in family %s", name, family->name);
    cr_assert(!histogram || bucket || strcmp(sample->suffix, "_sum") == 0 ||
              strcmp(sample->suffix, "_count") == 0);
    cr_assert_eq(bucket, !isnan(sample->le), "le belongs to buckets: %s", line);
    for (size_t i = 0; i < n_samples; i++) {
        const sample_t *other = &samples[i];
        bool same_le = (isnan(other->le) && isnan(sample->le)) || other->le == sample->le;
        cr_assert(!same_le || strcmp(other->family, sample->family) != 0 ||
                      strcmp(other->suffix, sample->suffix) != 0 ||
                      strcmp(other->labels, sample->labels) != 0,
                  "twice: %s", line);
    }
    n_samples++;
}

/* A pair of lines HELP and TYPE. */
static void read_head(const char *help, const char *type) {
    family_t *family = &families[n_families];
    char name[80];
    const char *at = take(take_name(take(help, "# HELP "), family->name, 80), " ");
    cr_assert_gt(strlen(at), 5, "a help that does not help");
    at = take(take_name(take(type, "# TYPE "), name, sizeof(name)), " ");
    cr_assert_str_eq(name, family->name, "TYPE follows its HELP");
    (void)snprintf(family->type, sizeof(family->type), "%s", at);
    bool counter = strcmp(at, "counter") == 0;
    cr_assert(counter || strcmp(at, "gauge") == 0 || strcmp(at, "histogram") == 0, "%s", at);
    size_t n = strlen(name);
    cr_assert_eq(counter, n > 6 && strcmp(name + n - 6, "_total") == 0, "%s", name);
    cr_assert(strcmp(at, "histogram") != 0 || (n > 8 && strcmp(name + n - 8, "_seconds") == 0));
    for (size_t i = 0; i < n_families; i++) {
        cr_assert_str_neq(families[i].name, name, "a family in two places");
    }
    n_families++;
}

static const sample_t *find(const char *family, const char *suffix, const char *labels, double le) {
    for (size_t i = 0; i < n_samples; i++) {
        if (strcmp(samples[i].family, family) == 0 && strcmp(samples[i].suffix, suffix) == 0 &&
            strcmp(samples[i].labels, labels) == 0 &&
            (isnan(le) ? isnan(samples[i].le) : samples[i].le == le)) {
            return &samples[i];
        }
    }
    cr_assert_fail("no %s%s{%s}", family, suffix, labels);
    return NULL;
}

static double value_of(const char *family, const char *labels) {
    return find(family, "", labels, NAN)->value;
}

/* Read a whole text into families and samples. */
static void read_text(const char *text, size_t bytes) {
    cr_assert_gt(bytes, 0);
    cr_assert_eq(text[bytes - 1], '\n');
    cr_assert_null(memchr(text, '\0', bytes));
    char *copy = strndup(text, bytes), *save;
    cr_assert_null(strstr(copy, "\n\n"));
    n_families = 0;
    n_samples = 0;
    for (char *line = strtok_r(copy, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        if (line[0] == '#') {
            char *type = strtok_r(NULL, "\n", &save);
            cr_assert_not_null(type);
            read_head(line, type);
        } else {
            read_sample(line);
        }
    }
    free(copy);
    for (size_t i = 0; i < n_families; i++) {
        if (strcmp(families[i].type, "histogram") != 0) {
            continue;
        }
        double le = -INFINITY, count = 0;
        for (size_t j = 0; j < n_samples; j++) {
            const sample_t *sample = &samples[j];
            if (strcmp(sample->family, families[i].name) == 0 && !isnan(sample->le)) {
                cr_assert_gt(sample->le, le, "bounds ascend");
                cr_assert_geq(sample->value, count, "buckets are cumulative");
                le = sample->le;
                count = sample->value;
            }
        }
        cr_assert_eq(le, INFINITY, "the last bucket is +Inf");
        cr_assert_eq(find(families[i].name, "_count", "", NAN)->value, count);
        (void)find(families[i].name, "_sum", "", NAN);
    }
}

/* ---- the tests ---- */

static const uint64_t durations_us[] = {0,       1,        100,      101,      250,       999,
                                        1000,    1001,     49999,    50000,    50001,     100000,
                                        2500000, 59999999, 60000000, 60000001, 3600000000};
#define N_DURATIONS (sizeof(durations_us) / sizeof(durations_us[0]))

/* One sample at least of everything. */
static void write_all(kvf_metrics_t *metrics) {
    kvf_histogram_t transfer = {0}, exposed = {0};
    for (size_t i = 0; i < N_DURATIONS; i++) {
        kvf_histogram_observe(&transfer, durations_us[i]);
    }
    kvf_metrics_sample(metrics, KVF_METRIC_TRANSFERS, "receiver", "ok", 41);
    kvf_metrics_sample(metrics, KVF_METRIC_TRANSFERS, "receiver", "peer_lost", 1);
    kvf_metrics_sample(metrics, KVF_METRIC_TRANSFERS, "sender", "ok", 7);
    kvf_metrics_sample(metrics, KVF_METRIC_TRANSFER_BYTES, "sender", "ucx",
                       UINT64_C(9007199254740992));
    kvf_metrics_sample(metrics, KVF_METRIC_TRANSFER_PIECES, NULL, NULL, 3);
    kvf_metrics_histogram(metrics, KVF_METRIC_TRANSFER_SECONDS, &transfer);
    kvf_metrics_histogram(metrics, KVF_METRIC_EXPOSED_SECONDS, &exposed);
    kvf_metrics_histogram(metrics, KVF_METRIC_QUARANTINE_SECONDS, &transfer);
    kvf_metrics_sample(metrics, KVF_METRIC_PAGES, "full", "free", 12);
    kvf_metrics_sample(metrics, KVF_METRIC_PAGES, "a\"b\\c\nd\xc3\xbc", "held", 13);
    kvf_metrics_sample(metrics, KVF_METRIC_PEERS, "up", NULL, 2);
    kvf_metrics_sample(metrics, KVF_METRIC_DIGEST_MISMATCH, NULL, NULL, 0);
    kvf_metrics_sample(metrics, KVF_METRIC_CONTENT_MISMATCH, NULL, NULL, 4);
    kvf_metrics_sample(metrics, KVF_METRIC_UNKNOWN_TRANSFER, NULL, NULL, 5);
    kvf_metrics_sample(metrics, KVF_METRIC_REFUSED, "", NULL, 6);
    kvf_metrics_sample(metrics, KVF_METRIC_RECONNECTS, NULL, NULL, 8);
    kvf_metrics_sample(metrics, KVF_METRIC_AUDIT_FAILURES, NULL, NULL, 9);
    kvf_metrics_sample(metrics, KVF_METRIC_MOVER_FALLBACK, NULL, NULL, UINT64_MAX);
}

Test(metrics, every_name_of_the_contract) {
    static const struct {
        const char *name, *type;
    } contract[] = {
        {"kvferry_transfers_total", "counter"},
        {"kvferry_transfer_bytes_total", "counter"},
        {"kvferry_transfer_pieces_total", "counter"},
        {"kvferry_transfer_seconds", "histogram"},
        {"kvferry_exposed_seconds", "histogram"},
        {"kvferry_quarantine_seconds", "histogram"},
        {"kvferry_pages", "gauge"},
        {"kvferry_peers", "gauge"},
        {"kvferry_digest_mismatch_total", "counter"},
        {"kvferry_content_mismatch_total", "counter"},
        {"kvferry_unknown_transfer_total", "counter"},
        {"kvferry_refused_total", "counter"},
        {"kvferry_reconnects_total", "counter"},
        {"kvferry_audit_failures_total", "counter"},
        {"kvferry_mover_fallback_total", "counter"},
    };
    kvf_metrics_t metrics;
    char *text;
    size_t bytes;
    kvf_metrics_begin(&metrics, kvf_alloc_default());
    write_all(&metrics);
    cr_assert_eq(kvf_metrics_end(&metrics, &text, &bytes), KVF_OK);
    read_text(text, bytes);
    cr_assert_eq(n_families, sizeof(contract) / sizeof(contract[0]));
    for (size_t i = 0; i < n_families; i++) {
        cr_assert_str_eq(families[i].name, contract[i].name);
        cr_assert_str_eq(families[i].type, contract[i].type);
    }
    cr_assert_eq(value_of("kvferry_transfers_total", "role=receiver;result=ok;"), 41);
    cr_assert_eq(value_of("kvferry_transfers_total", "role=receiver;result=peer_lost;"), 1);
    cr_assert_eq(value_of("kvferry_transfers_total", "role=sender;result=ok;"), 7);
    cr_assert_eq(value_of("kvferry_transfer_bytes_total", "role=sender;mover=ucx;"),
                 9007199254740992.0);
    cr_assert_eq(value_of("kvferry_transfer_pieces_total", ""), 3);
    cr_assert_eq(value_of("kvferry_pages", "pool=full;state=free;"), 12);
    cr_assert_eq(value_of("kvferry_pages", "pool=a\"b\\c\nd\xc3\xbc;state=held;"), 13);
    cr_assert_eq(value_of("kvferry_peers", "state=up;"), 2);
    cr_assert_eq(value_of("kvferry_digest_mismatch_total", ""), 0);
    cr_assert_eq(value_of("kvferry_content_mismatch_total", ""), 4);
    cr_assert_eq(value_of("kvferry_unknown_transfer_total", ""), 5);
    cr_assert_eq(value_of("kvferry_refused_total", "reason=;"), 6);
    /* Counters stay exact beyond what a double holds. */
    char *end = strndup(text, bytes);
    cr_assert_not_null(strstr(end, "\nkvferry_mover_fallback_total 18446744073709551615\n"));
    free(end);
    kvf_free(kvf_alloc_default(), text);
}

Test(metrics, histograms_count_like_a_naive_one) {
    kvf_metrics_t metrics;
    char *text;
    size_t bytes, n_buckets = 0;
    kvf_metrics_begin(&metrics, kvf_alloc_default());
    write_all(&metrics);
    cr_assert_eq(kvf_metrics_end(&metrics, &text, &bytes), KVF_OK);
    read_text(text, bytes);
    for (size_t i = 0; i < n_samples; i++) {
        double le_us = samples[i].le * 1e6, count = 0;
        if (isnan(le_us) || strcmp(samples[i].family, "kvferry_transfer_seconds") != 0) {
            continue;
        }
        for (size_t j = 0; j < N_DURATIONS; j++) {
            count += (double)durations_us[j] <= le_us + 0.01;
        }
        cr_assert_eq(samples[i].value, count, "le %g", samples[i].le);
        n_buckets++;
    }
    cr_assert_eq(n_buckets, KVF_HISTOGRAM_BUCKETS + 1);
    cr_assert_float_eq(find("kvferry_transfer_seconds", "_sum", "", NAN)->value, 3782.753452, 1e-6);
    cr_assert_eq(find("kvferry_exposed_seconds", "_count", "", NAN)->value, 0);
    kvf_free(kvf_alloc_default(), text);
}

Test(metrics, text_of_one_metric) {
    static const char expected[] = "# HELP kvferry_peers Known peers by state.\n"
                                   "# TYPE kvferry_peers gauge\n"
                                   "kvferry_peers{state=\"up\"} 1\n"
                                   "kvferry_peers{state=\"lo\\\"st\"} 2\n"
                                   "# HELP kvferry_pages Pages by state; adds up to the pool.\n"
                                   "# TYPE kvferry_pages gauge\n"
                                   "kvferry_pages{pool=\"full\",state=\"free\"} 3\n";
    kvf_metrics_t metrics;
    char *text;
    size_t bytes;
    kvf_metrics_begin(&metrics, kvf_alloc_default());
    kvf_metrics_sample(&metrics, KVF_METRIC_PEERS, "up", NULL, 1);
    kvf_metrics_sample(&metrics, KVF_METRIC_PEERS, "lo\"st", NULL, 2);
    kvf_metrics_sample(&metrics, KVF_METRIC_PAGES, "full", "free", 3);
    cr_assert_eq(kvf_metrics_end(&metrics, &text, &bytes), KVF_OK);
    cr_assert_eq(bytes, sizeof(expected) - 1);
    cr_assert_arr_eq(text, expected, bytes);
    kvf_free(kvf_alloc_default(), text);
}

Test(metrics, misuse_is_an_error) {
    for (int defect = 0; defect < 6; defect++) {
        kvf_histogram_t histogram = {0};
        kvf_alloc_fail_t memory;
        kvf_metrics_t metrics;
        char *text = NULL;
        size_t bytes = 77;
        kvf_alloc_fail_init(&memory, 0);
        kvf_metrics_begin(&metrics, &memory.table);
        kvf_metrics_sample(&metrics, KVF_METRIC_PEERS, "up", NULL, 1);
        switch (defect) {
        case 0: /* two places */
            kvf_metrics_sample(&metrics, KVF_METRIC_REFUSED, "x", NULL, 1);
            kvf_metrics_sample(&metrics, KVF_METRIC_PEERS, "lost", NULL, 1);
            break;
        case 1: /* a label too few */
            kvf_metrics_sample(&metrics, KVF_METRIC_PAGES, "full", NULL, 1);
            break;
        case 2: /* one too many */
            kvf_metrics_sample(&metrics, KVF_METRIC_PEERS, "lost", "x", 1);
            break;
        case 3: /* one where there are none */
            kvf_metrics_sample(&metrics, KVF_METRIC_TRANSFER_PIECES, "x", NULL, 1);
            break;
        case 4:
            kvf_metrics_sample(&metrics, KVF_METRIC_TRANSFER_SECONDS, NULL, NULL, 1);
            break;
        default:
            kvf_metrics_histogram(&metrics, KVF_METRIC_REFUSED, &histogram);
        }
        cr_assert_eq(kvf_metrics_end(&metrics, &text, &bytes), KVF_ERR_INVALID, "%d", defect);
        cr_assert_null(text);
        cr_assert_eq(bytes, 77);
        cr_assert_eq(memory.live, 0);
    }
}

Test(metrics, every_allocation_may_fail) {
    kvf_status_t status = KVF_ERR_NO_MEMORY;
    for (uint64_t n = 1; status != KVF_OK; n++) {
        kvf_alloc_fail_t memory;
        kvf_metrics_t metrics;
        char *text = NULL;
        size_t bytes = 77;
        kvf_alloc_fail_init(&memory, n);
        kvf_metrics_begin(&metrics, &memory.table);
        write_all(&metrics);
        status = kvf_metrics_end(&metrics, &text, &bytes);
        if (status == KVF_OK) {
            cr_assert_gt(n, 2, "nothing failed");
            read_text(text, bytes);
            kvf_free(&memory.table, text);
        } else {
            cr_assert_eq(status, KVF_ERR_NO_MEMORY);
            cr_assert_null(text);
        }
        cr_assert_eq(memory.live, 0);
    }
}
