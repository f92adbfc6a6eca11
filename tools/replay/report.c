/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/report.h"

#include <inttypes.h>
#include <jansson.h>

#define BAR_CELLS 40

static const char *const time_names[KVF_SCORE_TIMES] = {
    [KVF_SCORE_REQUEST] = "request",   [KVF_SCORE_PREFILL] = "prefill",
    [KVF_SCORE_TRANSFER] = "transfer", [KVF_SCORE_EXPOSED] = "exposed",
    [KVF_SCORE_VERIFY] = "verify",     [KVF_SCORE_PAUSE] = "pause",
    [KVF_SCORE_LATE] = "late",
};

/* Parts of a request's wall time that follow one another; the rest is HTTP, waiting for pages and
 * for our turn. */
static const kvf_score_time_t wall_parts[] = {KVF_SCORE_PREFILL, KVF_SCORE_EXPOSED,
                                              KVF_SCORE_VERIFY, KVF_SCORE_PAUSE};
#define N_WALL_PARTS (sizeof(wall_parts) / sizeof(wall_parts[0]))

/* Where time goes: shares of all requests' wall time; shares[N_WALL_PARTS] is the rest. All zero
 * without a request. */
static void wall_shares(const kvf_score_t *score, double shares[N_WALL_PARTS + 1]) {
    double wall = (double)kvf_samples_sum(&score->times[KVF_SCORE_REQUEST]);
    double rest = wall > 0 ? 1 : 0;
    for (size_t i = 0; i < N_WALL_PARTS; i++) {
        double part = (double)kvf_samples_sum(&score->times[wall_parts[i]]);
        shares[i] = wall > 0 ? part / wall : 0;
        rest -= shares[i];
    }
    /* Nodes count by their own clocks: their parts may be a little more than the whole. */
    shares[N_WALL_PARTS] = rest > 0 ? rest : 0;
}

static double throughput(const kvf_score_t *score) {
    double seconds = (double)score->duration_us / 1e6;
    return seconds > 0 ? (double)score->bytes / seconds : 0;
}

static json_t *percentiles_json(kvf_samples_t *samples) {
    if (samples->n == 0) {
        return json_pack("{s:n, s:n, s:n, s:n}", "p50", "p90", "p99", "max");
    }
    return json_pack("{s:I, s:I, s:I, s:I}", "p50", (json_int_t)kvf_samples_percentile(samples, 50),
                     "p90", (json_int_t)kvf_samples_percentile(samples, 90), "p99",
                     (json_int_t)kvf_samples_percentile(samples, 99), "max",
                     (json_int_t)kvf_samples_percentile(samples, 100));
}

static json_t *summary_json(const kvf_report_t *report) {
    kvf_score_t *score = report->score;
    json_t *failed = json_object();
    json_t *shares_json = json_object();
    double shares[N_WALL_PARTS + 1];
    uint64_t requests = score->ok + kvf_score_failed(score);
    int errors = 0;
    for (size_t i = 0; i < score->n_codes; i++) {
        errors |= json_object_set_new(failed, score->failures[i].code,
                                      json_integer((json_int_t)score->failures[i].n));
    }
    wall_shares(score, shares);
    for (size_t i = 0; i <= N_WALL_PARTS; i++) {
        errors |=
            json_object_set_new(shares_json, i < N_WALL_PARTS ? time_names[wall_parts[i]] : "other",
                                json_real(shares[i]));
    }
    json_t *summary = json_pack(
        "{s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:{s:I, s:I}, s:I, s:f, s:f, s:I, s:I, s:o}",
        "requests", (json_int_t)requests, "ok", (json_int_t)score->ok, "failed", failed, "verified",
        (json_int_t)score->verified, "mismatched_bytes", (json_int_t)score->mismatched_bytes,
        "bytes", (json_int_t)score->bytes, "pages", (json_int_t)score->pages, "prompt_tokens",
        (json_int_t)score->prompt_tokens, "cached_tokens", "prefill",
        (json_int_t)score->prefill_cached_tokens, "decode", (json_int_t)score->decode_cached_tokens,
        "draft_tokens", (json_int_t)score->draft_tokens, "duration_s",
        (double)score->duration_us / 1e6, "throughput_bytes_per_s", throughput(score), "retries",
        (json_int_t)score->retries, "skipped", (json_int_t)report->skipped, "wall_shares",
        shares_json);
    for (size_t i = 0; i < KVF_SCORE_TIMES; i++) {
        char key[32];
        (void)snprintf(key, sizeof(key), "%s_us", time_names[i]);
        errors |= json_object_set_new(summary, key, percentiles_json(&score->times[i]));
    }
    if (errors != 0) {
        json_decref(summary);
        return NULL;
    }
    return summary;
}

kvf_status_t kvf_report_json(const kvf_report_t *report, FILE *out) {
    json_t *summary = summary_json(report);
    if (summary == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    int failed = json_dumpf(summary, out, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(summary);
    if (failed != 0 || fputc('\n', out) == EOF || fflush(out) != 0) {
        return KVF_ERR_IO;
    }
    return KVF_OK;
}

static double percent(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : 100.0 * (double)part / (double)whole;
}

/* A duration in the unit that suits it. */
static const char *human_us(uint64_t us, char text[16]) {
    if (us < 1000) {
        (void)snprintf(text, 16, "%" PRIu64 " us", us);
    } else if (us < 1000000) {
        (void)snprintf(text, 16, "%.1f ms", (double)us / 1e3);
    } else {
        (void)snprintf(text, 16, "%.2f s", (double)us / 1e6);
    }
    return text;
}

static const char *human_bytes(double bytes, char text[16]) {
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    size_t unit = 0;
    while (bytes >= 1000 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1000;
        unit++;
    }
    (void)snprintf(text, 16, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return text;
}

static void table_times(kvf_score_t *score, FILE *out) {
    static const unsigned percents[] = {50, 90, 99, 100};
    fprintf(out, "\n  %-10s%12s%12s%12s%12s\n", "", "p50", "p90", "p99", "max");
    for (size_t i = 0; i < KVF_SCORE_TIMES; i++) {
        kvf_samples_t *samples = &score->times[i];
        if (samples->n == 0 || kvf_samples_percentile(samples, 100) == 0) {
            continue;
        }
        fprintf(out, "  %-10s", time_names[i]);
        for (size_t p = 0; p < 4; p++) {
            char text[16];
            fprintf(out, "%12s", human_us(kvf_samples_percentile(samples, percents[p]), text));
        }
        fputc('\n', out);
    }
    double shares[N_WALL_PARTS + 1];
    wall_shares(score, shares);
    fprintf(out, "\n  where time goes:");
    for (size_t i = 0; i <= N_WALL_PARTS; i++) {
        fprintf(out, "%s %s %.0f %%", i == 0 ? "" : ",",
                i < N_WALL_PARTS ? time_names[wall_parts[i]] : "other", 100 * shares[i]);
    }
    fputc('\n', out);
}

kvf_status_t kvf_report_table(const kvf_report_t *report, FILE *out) {
    kvf_score_t *score = report->score;
    uint64_t failed = kvf_score_failed(score);
    const char *good = report->colour ? "\033[32m" : "";
    const char *bad = report->colour ? "\033[31m" : "";
    const char *end = report->colour ? "\033[0m" : "";
    char moved[16];
    char rate[16];
    fprintf(out, "%s: %" PRIu64 " requests in %.2f s\n\n", report->trace, score->ok + failed,
            (double)score->duration_us / 1e6);
    fprintf(out, "  ok        %s%" PRIu64 "%s\n", good, score->ok, end);
    fprintf(out, "  failed    %s%" PRIu64 "%s", failed > 0 ? bad : good, failed, end);
    for (size_t i = 0; i < score->n_codes; i++) {
        fprintf(out, "%s%s %" PRIu64, i == 0 ? " (" : ", ", score->failures[i].code,
                score->failures[i].n);
    }
    fprintf(out, "%s\n", score->n_codes > 0 ? ")" : "");
    fprintf(out, "  verified  %" PRIu64 ", %s%" PRIu64 " wrong bytes%s%s\n", score->verified,
            score->mismatched_bytes > 0 ? bad : good, score->mismatched_bytes, end,
            score->verified < score->ok ? " (the others' nodes do not verify)" : "");
    fprintf(out, "  moved     %s in %" PRIu64 " pages, %s/s\n",
            human_bytes((double)score->bytes, moved), score->pages,
            human_bytes(throughput(score), rate));
    fprintf(out, "  cached    prefill %.0f %%, decode %.0f %% of %" PRIu64 " prompt tokens\n",
            percent(score->prefill_cached_tokens, score->prompt_tokens),
            percent(score->decode_cached_tokens, score->prompt_tokens), score->prompt_tokens);
    if (score->draft_tokens > 0) {
        fprintf(out, "  drafts    %" PRIu64 " tokens handed over\n", score->draft_tokens);
    }
    fprintf(out, "  retries   %" PRIu64 "\n", score->retries);
    if (report->skipped > 0) {
        fprintf(out, "  skipped   %" PRIu64 " (longer prompts)\n", report->skipped);
    }
    if (score->ok > 0) {
        table_times(score, out);
    }
    return fflush(out) != 0 || ferror(out) ? KVF_ERR_IO : KVF_OK;
}

void kvf_bar_draw(kvf_bar_t *bar, uint64_t done) {
    if (bar->out == NULL || bar->total == 0) {
        return;
    }
    int per_mille = (int)((double)done * 1000 / (double)bar->total);
    if (bar->drawn == per_mille + 1) {
        return;
    }
    bar->drawn = per_mille + 1;
    fprintf(bar->out, "\r%s", bar->colour ? "\033[36m[" : "[");
    for (int i = 0; i < BAR_CELLS; i++) {
        fputc(i < per_mille * BAR_CELLS / 1000 ? '#' : '.', bar->out);
    }
    fprintf(bar->out, "]%s %" PRIu64 "/%" PRIu64, bar->colour ? "\033[0m" : "", done, bar->total);
    (void)fflush(bar->out);
}

void kvf_bar_clear(kvf_bar_t *bar) {
    if (bar->drawn != 0) {
        fprintf(bar->out, "\r\033[K");
        (void)fflush(bar->out);
        bar->drawn = 0;
    }
}
