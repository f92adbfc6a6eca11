/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_CURSOR_H
#define KVF_BASE_CURSOR_H

/**
 * @file
 * Byte cursors: little-endian numbers and byte runs, read from and written to bounded memory. An
 * access past the end moves nothing, returns zero and makes the cursor bad for good, so that a
 * parser checks once, at its end, with kvf_reader_done().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/** Reads borrowed memory. One thread. */
typedef struct kvf_reader {
    const uint8_t *at;
    size_t left;
    bool bad;
} kvf_reader_t;

/** Writes into the caller's memory. One thread. */
typedef struct kvf_writer {
    uint8_t *at;
    size_t left;
    bool bad;
} kvf_writer_t;

static inline kvf_reader_t kvf_reader(const void *data, size_t bytes) {
    return (kvf_reader_t){data, bytes, false};
}

static inline kvf_writer_t kvf_writer(void *data, size_t bytes) {
    return (kvf_writer_t){data, bytes, false};
}

/** @return bytes bytes of the reader's memory (borrowed), or NULL past the end. */
static inline const uint8_t *kvf_read_bytes(kvf_reader_t *r, size_t bytes) {
    if (r->bad || bytes > r->left) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *at = r->at;
    if (bytes > 0) { /* an empty cursor has no memory to point into */
        r->at += bytes;
        r->left -= bytes;
    }
    return at;
}

static inline uint64_t kvf_read_le(kvf_reader_t *r, size_t bytes) {
    const uint8_t *at = kvf_read_bytes(r, bytes);
    uint64_t value = 0;
    for (size_t i = 0; at != NULL && i < bytes; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    return value;
}

static inline uint8_t kvf_read_u8(kvf_reader_t *r) {
    return (uint8_t)kvf_read_le(r, 1);
}

static inline uint16_t kvf_read_u16(kvf_reader_t *r) {
    return (uint16_t)kvf_read_le(r, 2);
}

static inline uint32_t kvf_read_u32(kvf_reader_t *r) {
    return (uint32_t)kvf_read_le(r, 4);
}

static inline uint64_t kvf_read_u64(kvf_reader_t *r) {
    return kvf_read_le(r, 8);
}

/** @return Whether everything was read and nothing was missing. */
static inline bool kvf_reader_done(const kvf_reader_t *r) {
    return !r->bad && r->left == 0;
}

static inline void kvf_write_bytes(kvf_writer_t *w, const void *data, size_t bytes) {
    if (w->bad || bytes > w->left) {
        w->bad = true;
        return;
    }
    if (bytes > 0) {
        memcpy(w->at, data, bytes);
        w->at += bytes;
        w->left -= bytes;
    }
}

static inline void kvf_write_le(kvf_writer_t *w, uint64_t value, size_t bytes) {
    uint8_t raw[8];
    for (size_t i = 0; i < bytes; i++) {
        raw[i] = (uint8_t)(value >> (8 * i));
    }
    kvf_write_bytes(w, raw, bytes);
}

static inline void kvf_write_u8(kvf_writer_t *w, uint8_t value) {
    kvf_write_le(w, value, 1);
}

static inline void kvf_write_u16(kvf_writer_t *w, uint16_t value) {
    kvf_write_le(w, value, 2);
}

static inline void kvf_write_u32(kvf_writer_t *w, uint32_t value) {
    kvf_write_le(w, value, 4);
}

static inline void kvf_write_u64(kvf_writer_t *w, uint64_t value) {
    kvf_write_le(w, value, 8);
}

#endif
