/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_PLAN_JSON_H
#define KVF_TOOLS_PLAN_JSON_H

/**
 * @file
 * What `kvferry plan` reads from JSON and writes as JSON or as a table. A null counts as absent
 * everywhere.
 */

#include "kvmgr/table.h"

#include <jansson.h>
#include <stdio.h>

/** In place of a default: the number must be there. */
#define KVF_PLAN_REQUIRED INT64_MIN

/** @return The value of a key (borrowed), or NULL when it is absent, null, or object is no object.
 */
json_t *kvf_plan_get(const json_t *object, const char *key);

/**
 * @param[out] value_p  Borrowed object, NULL when absent.
 * @return KVF_OK, or KVF_ERR_INVALID (it is no object).
 */
KVF_CHECK kvf_status_t kvf_plan_object(const json_t *object, const char *key, json_t **value_p,
                                       kvf_detail_t *detail);

/**
 * @param least, most   Bounds of a value that is given.
 * @param absent        The value when it is not, or KVF_PLAN_REQUIRED.
 * @return KVF_OK, or KVF_ERR_INVALID (absent, no integer or out of bounds).
 */
KVF_CHECK kvf_status_t kvf_plan_int(const json_t *object, const char *key, int64_t least,
                                    int64_t most, int64_t absent, int64_t *value_p,
                                    kvf_detail_t *detail);

/** @return KVF_OK, or KVF_ERR_INVALID (neither true nor false). */
KVF_CHECK kvf_status_t kvf_plan_bool(const json_t *object, const char *key, bool absent,
                                     bool *value_p, kvf_detail_t *detail);

/** Read [size, rank]; [1, 0] when absent. @return KVF_OK, or KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_plan_cp(const json_t *object, const char *key, kvf_cp_t *cp_p,
                                   kvf_detail_t *detail);

/**
 * Read a list of slot numbers.
 *
 * @param[out] slots_p  The caller frees it; never NULL.
 * @return KVF_OK, KVF_ERR_INVALID (no list, or an entry that is no 32-bit integer),
 * KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_plan_slots(const json_t *object, const char *key, int32_t **slots_p,
                                      int64_t *n_p, kvf_detail_t *detail);

/** @return [[ordinal, source]] or [[ordinal, source, destination]], or NULL without memory. */
json_t *kvf_plan_pairs(const kvf_pair_t *pairs, int64_t n, bool two_sided);

/** @return {source_key: [...], destination_key: [...]} of what pairing missed, or NULL without
 * memory. */
json_t *kvf_plan_missing(const kvf_pairing_t *found, const char *source_key, const int64_t *source,
                         const char *destination_key, const int64_t *destination);

/** @return {"ok": false, "error", "message"}, or NULL without memory. Bytes of the text that are
 * not UTF-8 (it may quote the input) become question marks. */
json_t *kvf_plan_refusal(kvf_status_t status, const kvf_detail_t *detail);

/** Draw an answer for people. @return Whether everything was written. */
bool kvf_plan_print(FILE *out, const json_t *answer);

#endif
