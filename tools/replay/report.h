/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_REPLAY_REPORT_H
#define KVF_TOOLS_REPLAY_REPORT_H

/**
 * @file
 * A replay's score as JSON and as a table for people, and the bar that shows how far it is.
 */

#include "tools/replay/score.h"

#include <stdio.h>

/** What a report says besides the score. */
typedef struct kvf_report {
    kvf_score_t *score;
    const char *trace; /**< the file's name */
    uint64_t skipped;  /**< requests whose prompt was longer than asked for */
    bool colour;
} kvf_report_t;

/** Write the summary of docs/contracts.md "kvferry replay" and its extras as one line. @return
 * KVF_OK, KVF_ERR_NO_MEMORY, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_report_json(const kvf_report_t *report, FILE *out);

/** Write the table. @return KVF_OK, KVF_ERR_IO. */
KVF_CHECK kvf_status_t kvf_report_table(const kvf_report_t *report, FILE *out);

/** A progress bar. Zeroed it is off. */
typedef struct kvf_bar {
    FILE *out; /**< a terminal; NULL: off */
    bool colour;
    uint64_t total;
    int drawn; /**< per mille at the last drawing, plus 1; 0 = never */
} kvf_bar_t;

/** Draw the bar when it would look different. */
void kvf_bar_draw(kvf_bar_t *bar, uint64_t done);

/** Take the bar off its line, before something else is written to the terminal; the next draw
 * brings it back. */
void kvf_bar_clear(kvf_bar_t *bar);

#endif
