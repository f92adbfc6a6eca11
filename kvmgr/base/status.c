/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    kvf_status_t status;
    kvf_scope_t scope;
    const char *name;
    const char *text;
} rows[] = {
#define ROW(code, name, scope, text, help) {KVF_##name, KVF_SCOPE_##scope, text, help},
    KVF_STATUS_MAP(ROW)
#undef ROW
};

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

/* Index of a status in rows; the row of KVF_ERR_INTERNAL (the last one) for unknown numbers. */
static size_t row_of(kvf_status_t status) {
    for (size_t i = 0; i < N_ROWS; i++) {
        if (rows[i].status == status) {
            return i;
        }
    }
    return N_ROWS - 1;
}

const char *kvf_status_name(kvf_status_t status) {
    return rows[row_of(status)].name;
}

const char *kvf_status_text(kvf_status_t status) {
    return rows[row_of(status)].text;
}

kvf_scope_t kvf_status_scope(kvf_status_t status) {
    return rows[row_of(status)].scope;
}

kvf_status_t kvf_status_from_name(const char *name, kvf_status_t *status_p) {
    for (size_t i = 0; i < N_ROWS; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            *status_p = rows[i].status;
            return KVF_OK;
        }
    }
    return KVF_ERR_UNKNOWN;
}

kvf_status_t kvf_fail(kvf_detail_t *detail, kvf_status_t status, const char *fmt, ...) {
    if (detail != NULL) {
        va_list args;
        va_start(args, fmt);
        (void)vsnprintf(detail->text, sizeof(detail->text), fmt, args);
        va_end(args);
    }
    return status;
}
