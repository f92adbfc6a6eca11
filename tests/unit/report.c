/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/report.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/** A stream that ends in memory. */
typedef struct sheet {
    FILE *out;
    char *text;
    size_t bytes;
} sheet_t;

static void sheet_open(sheet_t *sheet) {
    *sheet = (sheet_t){.out = NULL};
    sheet->out = open_memstream(&sheet->text, &sheet->bytes);
    cr_assert_not_null(sheet->out);
}

static const char *sheet_text(sheet_t *sheet) {
    cr_assert_eq(fflush(sheet->out), 0);
    return sheet->text;
}

static void sheet_close(sheet_t *sheet) {
    (void)fclose(sheet->out);
    free(sheet->text);
}

/* Five requests, of which one failed: no two of the numbers are alike. */
static void fill(kvf_score_t *score) {
    kvf_score_init(score, kvf_alloc_default());
    kvf_score_fail(score, "count_mismatch");
    score->ok = 4;
    score->verified = 3;
    score->mismatched_bytes = 17;
    score->bytes = 2500000;
    score->pages = 39;
    score->prompt_tokens = 1000;
    score->prefill_cached_tokens = 250;
    score->decode_cached_tokens = 750;
    score->draft_tokens = 12;
    score->retries = 2;
    score->duration_us = 500000;
    for (uint64_t i = 1; i <= 4; i++) {
        cr_assert_eq(kvf_samples_add(&score->times[KVF_SCORE_REQUEST], 1000 * i), KVF_OK);
        cr_assert_eq(kvf_samples_add(&score->times[KVF_SCORE_PREFILL], 100 * i), KVF_OK);
    }
}

static json_int_t number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    cr_assert(json_is_integer(value), "%s", name);
    return json_integer_value(value);
}

Test(report, json_has_every_number_in_its_place) {
    static const struct {
        const char *name;
        json_int_t value;
    } rows[] = {{"requests", 5},        {"ok", 4},      {"verified", 3},
                {"bytes", 2500000},     {"pages", 39},  {"mismatched_bytes", 17},
                {"draft_tokens", 12},   {"retries", 2}, {"skipped", 6},
                {"prompt_tokens", 1000}};
    kvf_score_t score;
    sheet_t sheet;
    fill(&score);
    sheet_open(&sheet);
    const kvf_report_t report = {.score = &score, .trace = "t.jsonl", .skipped = 6};
    cr_assert_eq(kvf_report_json(&report, sheet.out), KVF_OK);
    const char *text = sheet_text(&sheet);
    cr_assert_eq(strchr(text, '\n'), text + strlen(text) - 1, "one line");
    json_t *summary = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(summary);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        cr_assert_eq(number(summary, rows[i].name), rows[i].value, "%s", rows[i].name);
    }
    const json_t *cached = json_object_get(summary, "cached_tokens");
    cr_assert_eq(number(cached, "prefill"), 250);
    cr_assert_eq(number(cached, "decode"), 750);
    cr_assert_eq(number(json_object_get(summary, "failed"), "count_mismatch"), 1);
    cr_assert_eq(json_object_size(json_object_get(summary, "failed")), 1);
    cr_assert_float_eq(json_real_value(json_object_get(summary, "throughput_bytes_per_s")), 5e6, 1);
    cr_assert_eq(number(json_object_get(summary, "request_us"), "p50"), 2000);
    cr_assert_eq(number(json_object_get(summary, "request_us"), "max"), 4000);
    cr_assert(json_is_null(json_object_get(json_object_get(summary, "late_us"), "p50")));
    /* 1 of 10 microseconds is prefill, and nothing else is known. */
    const json_t *shares = json_object_get(summary, "wall_shares");
    cr_assert_float_eq(json_real_value(json_object_get(shares, "prefill")), 0.1, 1e-9);
    cr_assert_float_eq(json_real_value(json_object_get(shares, "other")), 0.9, 1e-9);
    json_decref(summary);
    sheet_close(&sheet);
    kvf_score_cleanup(&score);
}

Test(report, table_says_what_happened_and_leaves_out_what_did_not) {
    static const char *const lines[] = {
        "t.jsonl: 5 requests in ",
        "\n  ok        4\n",
        "\n  failed    1 (count_mismatch 1)\n",
        "\n  verified  3, 17 wrong bytes (the others' nodes do not verify)\n",
        "\n  moved     2.50 MB in 39 pages, 5.00 MB/s\n",
        "\n  cached    prefill 25 %, decode 75 % of 1000 prompt tokens\n",
        "\n  drafts    12 tokens handed over\n",
        "\n  retries   2\n",
        "\n  skipped   6 (longer prompts)\n"};
    kvf_score_t score;
    sheet_t sheet;
    fill(&score);
    kvf_report_t report = {.score = &score, .trace = "t.jsonl", .skipped = 6};
    sheet_open(&sheet);
    cr_assert_eq(kvf_report_table(&report, sheet.out), KVF_OK);
    const char *text = sheet_text(&sheet);
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        cr_assert_not_null(strstr(text, lines[i]), "'%s' is not in\n%s", lines[i], text);
    }
    cr_assert_null(strstr(text, "\n  late"), "no time that nobody measured");
    sheet_close(&sheet);
    score.draft_tokens = 0;
    report.skipped = 0;
    sheet_open(&sheet);
    cr_assert_eq(kvf_report_table(&report, sheet.out), KVF_OK);
    cr_assert_null(strstr(sheet_text(&sheet), "drafts"));
    cr_assert_null(strstr(sheet.text, "skipped"));
    sheet_close(&sheet);
    kvf_score_cleanup(&score);
}

Test(report, full_streams_are_errors) {
    kvf_score_t score;
    fill(&score);
    const kvf_report_t report = {.score = &score, .trace = "t.jsonl"};
    FILE *full = fopen("/dev/full", "w");
    cr_assert_not_null(full);
    cr_assert_eq(kvf_report_json(&report, full), KVF_ERR_IO);
    cr_assert_eq(kvf_report_table(&report, full), KVF_ERR_IO);
    (void)fclose(full);
    kvf_score_cleanup(&score);
}

Test(report, a_bar_is_drawn_when_it_changes) {
    sheet_t sheet;
    sheet_open(&sheet);
    kvf_bar_t bar = {.out = sheet.out, .total = 10000};
    kvf_bar_draw(&bar, 5000);
    size_t bytes = strlen(sheet_text(&sheet));
    cr_assert_not_null(strstr(sheet.text, "[####################....................] 5000/10000"));
    kvf_bar_draw(&bar, 5009); /* less than a thousandth more */
    cr_assert_eq(strlen(sheet_text(&sheet)), bytes);
    kvf_bar_draw(&bar, 5010);
    cr_assert_gt(strlen(sheet_text(&sheet)), bytes);
    kvf_bar_clear(&bar);
    bytes = strlen(sheet_text(&sheet));
    kvf_bar_clear(&bar); /* nothing is there */
    cr_assert_eq(strlen(sheet_text(&sheet)), bytes);
    kvf_bar_draw(&bar, 5010); /* it comes back */
    cr_assert_gt(strlen(sheet_text(&sheet)), bytes);
    sheet_close(&sheet);
}
