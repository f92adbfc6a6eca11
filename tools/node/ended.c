/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/node/ended.h"

#include "transceiver/hash.h"

typedef struct record {
    char *id; /* NULL: not in use; the text lies behind it */
    const char *text;
    bool refused;
    UT_hash_handle hh;
} record_t;

struct kvf_ended {
    const kvf_alloc_t *alloc;
    record_t *by_id;
    size_t capacity;
    size_t next; /* the oldest record, or the first that was never used */
    record_t records[];
};

kvf_status_t kvf_ended_create(const kvf_alloc_t *alloc, size_t capacity, kvf_ended_t **ended_p) {
    kvf_ended_t *ended =
        kvf_calloc(alloc, 1, sizeof(*ended) + capacity * sizeof(ended->records[0]));
    if (ended == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    ended->alloc = alloc;
    ended->capacity = capacity;
    *ended_p = ended;
    return KVF_OK;
}

static void drop(kvf_ended_t *ended, record_t *record) {
    const kvf_alloc_t *hash_alloc = ended->alloc;
    if (record->id != NULL && ended->by_id != NULL) { /* the second follows from the first */
        HASH_DEL(ended->by_id, record);
        kvf_free(ended->alloc, record->id);
        *record = (record_t){.id = NULL};
    }
}

void kvf_ended_destroy(kvf_ended_t *ended) {
    if (ended == NULL) {
        return;
    }
    for (size_t i = 0; i < ended->capacity; i++) {
        drop(ended, &ended->records[i]);
    }
    kvf_free(ended->alloc, ended);
}

void kvf_ended_put(kvf_ended_t *ended, const char *request_id, const char *text, bool refused) {
    const kvf_alloc_t *hash_alloc = ended->alloc;
    size_t id_bytes = strlen(request_id) + 1, text_bytes = strlen(text) + 1;
    record_t *record, *same;
    HASH_FIND_STR(ended->by_id, request_id, same);
    if (same != NULL && refused && !same->refused) {
        return;
    }
    if (same != NULL) {
        drop(ended, same);
    }
    record = &ended->records[ended->next];
    drop(ended, record);
    record->id = kvf_alloc(ended->alloc, id_bytes + text_bytes);
    if (record->id == NULL) {
        return;
    }
    memcpy(record->id, request_id, id_bytes);
    memcpy(record->id + id_bytes, text, text_bytes);
    record->text = record->id + id_bytes;
    record->refused = refused;
    HASH_ADD_KEYPTR(hh, ended->by_id, record->id, id_bytes - 1, record);
    if (!kvf_hashed(record)) {
        kvf_free(ended->alloc, record->id);
        *record = (record_t){.id = NULL};
        return;
    }
    ended->next = (ended->next + 1) % ended->capacity;
}

const char *kvf_ended_get(const kvf_ended_t *ended, const char *request_id) {
    const record_t *record;
    HASH_FIND_STR(ended->by_id, request_id, record);
    return record == NULL ? NULL : record->text;
}
