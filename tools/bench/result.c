/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/result.h"

#include <inttypes.h>
#include <jansson.h>

static double percentile_us(kvf_bench_result_t *result, unsigned percent) {
    return (double)kvf_samples_percentile(&result->ns, percent) / 1e3;
}

static double min_us(kvf_bench_result_t *result) {
    (void)kvf_samples_percentile(&result->ns, 100); /* sorts */
    return (double)result->ns.values[0] / 1e3;
}

static double bytes_per_s(kvf_bench_result_t *result) {
    return (double)result->bytes / (percentile_us(result, 50) + 1e-3) * 1e6;
}

kvf_status_t kvf_bench_print_json(const kvf_bench_options_t *options, kvf_bench_result_t *result,
                                  FILE *out) {
    const bool reference = options->reference != KVF_BENCH_NONE;
    json_t *line = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:s, s:I, s:{s:f, s:f, s:f}, s:f, s:I, s:b, s:I, s:s, s:s, s:s, "
        "s:I, s:I, s:I, s:s, s:I}",
        "mover", result->mover, "transport", result->transport, "block_bytes",
        (json_int_t)options->block_bytes, "blocks", (json_int_t)options->blocks, "bytes",
        (json_int_t)result->bytes, "digest", options->digest && !reference ? "on" : "off", "reps",
        (json_int_t)options->reps, "us", "p50", percentile_us(result, 50), "p99",
        percentile_us(result, 99), "min", min_us(result), "bytes_per_s", bytes_per_s(result),
        "pieces", (json_int_t)result->pieces, "verified", result->wrong_bytes == 0,
        "mismatched_bytes", (json_int_t)result->wrong_bytes, "measure",
        kvf_bench_measure_name(options->measure), "memory", options->memory, "direction",
        options->pull ? "pull" : "push", "threads", (json_int_t)options->threads, "pool_bytes",
        (json_int_t)options->pool_bytes, "busy_poll_us", (json_int_t)options->busy_poll_us,
        "driver", options->caller ? "caller" : "thread", "seed", (json_int_t)options->seed);
    if (line != NULL && !reference) {
        (void)json_object_set_new(line, "layers", json_integer((json_int_t)result->layers));
        (void)json_object_set_new(line, "posting_ns", json_real(result->posting_ns));
    }
    if (line != NULL && options->measure == KVF_BENCH_EXPOSED) {
        /* Most bytes left before the time that is measured began. */
        (void)json_object_set_new(line, "bytes_per_s", json_null());
        (void)json_object_set_new(line, "layer_us", json_real((double)result->layer_ns / 1e3));
    }
    if (line == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    int failed = json_dumpf(line, out, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(line);
    return failed == 0 && fputc('\n', out) != EOF && fflush(out) == 0 ? KVF_OK : KVF_ERR_IO;
}

kvf_status_t kvf_bench_print_table(const kvf_bench_options_t *options, kvf_bench_result_t *result,
                                   FILE *out) {
    (void)fprintf(out, "%s over %s: %" PRIu64 " blocks of %" PRIu64 " bytes, %" PRIu64 " pieces",
                  result->mover, result->transport, options->blocks, options->block_bytes,
                  result->pieces);
    if (options->reference == KVF_BENCH_NONE) {
        (void)fprintf(out, ", digest %s, %s", options->digest ? "on" : "off",
                      options->pull ? "pull" : "push");
    }
    if (options->measure == KVF_BENCH_EXPOSED) {
        (void)fprintf(out, ", %" PRIu64 " layers, one every %.0f us", result->layers,
                      (double)result->layer_ns / 1e3);
    }
    (void)fprintf(out, "\n%-10s %10s %10s %10s %10s %10s\n", "measure", "p50 us", "p99 us",
                  "min us", "GB/s", "reps");
    char rate[16] = "-"; /* as in the line of JSON */
    if (options->measure != KVF_BENCH_EXPOSED) {
        (void)snprintf(rate, sizeof(rate), "%.3f", bytes_per_s(result) / 1e9);
    }
    (void)fprintf(out, "%-10s %10.1f %10.1f %10.1f %10s %10" PRIu64 "\n",
                  kvf_bench_measure_name(options->measure), percentile_us(result, 50),
                  percentile_us(result, 99), min_us(result), rate, options->reps);
    if (options->reference == KVF_BENCH_NONE) {
        (void)fprintf(out, "posting a piece %.0f ns of the sender\n", result->posting_ns);
    }
    if (result->wrong_bytes == 0) {
        (void)fprintf(out, "every byte verified after every repetition\n");
    } else {
        (void)fprintf(out, "%" PRIu64 " bytes were wrong\n", result->wrong_bytes);
    }
    return fflush(out) == 0 && ferror(out) == 0 ? KVF_OK : KVF_ERR_IO;
}
