/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_AUXDATA_H
#define KVF_KVMGR_AUXDATA_H

/**
 * @file
 * What the attention kernels of a generation side read besides pages: arrays of int32 in device
 * memory, made anew for each step. Source: docs/placement.md "Attention aux data".
 *
 * An array is named by a key. Set 0 is the layer group without a window; every other group has a
 * set of its own, whose page arrays live apart from those of set 0 at every depth. Within a step
 * each key is copied once, so nothing that a layer may still read is ever overwritten.
 */

#include "kvmgr/base/alloc.h"
#include "kvmgr/base/mem.h"
#include "kvmgr/layout.h"

#include <stdbool.h>
#include <stdint.h>

/** Most depths; the deepest tree of shared prefixes that kernels are made for. */
#define KVF_AUX_MAX_DEPTH 8
/** Most tokens of a draft tree: its mask is that many squared. */
#define KVF_AUX_MAX_TREE_TOKENS 256

/**
 * Every array there is; storage, checks and offsets derive from this list.
 *
 * X(NAME, name, reserved elements of one array, per depth, also sliding, length, measure, counts)
 *
 * R max_seqs, N max_pages, K max_chunk, T tree_tokens. How many elements a step may copy depends on
 * what it has copied before:
 *   INDPTR  measure + 1, which the first such array fixes: offsets from 0 on that never fall; the
 *           last one is the measure `counts`
 *   EACH    measure
 *   TRIPLE  3 x measure, row-major
 *   ALIKE   measure, which the first array of a family fixes
 */
#define KVF_AUX_ARRAYS(X)                                                                          \
    X(QO_INDPTR, "qo_indptr", R + 1, true, false, INDPTR, ROWS, NOTHING)                           \
    X(PAGE_INDPTR, "page_indptr", R + 1, true, true, INDPTR, ROWS, PAGES)                          \
    X(PAGE_INDICES, "page_indices", N, true, true, EACH, PAGES, NOTHING)                           \
    X(LENGTH_INFO, "length_info", 3 * R, true, true, TRIPLE, ROWS, NOTHING)                        \
    X(K_ROPE_POS_OFFSET, "k_rope_pos_offset", R, true, true, EACH, ROWS, NOTHING)                  \
    X(TREE_ATTN_MN_INDPTR, "tree_attn_mn_indptr", T == 0 ? 0 : R + 1, true, false, INDPTR, ROWS,   \
      TREE)                                                                                        \
    X(TREE_ATTN_MASK, "tree_attn_mask", T *T *R, true, false, EACH, TREE, NOTHING)                 \
    X(CUR_APPEND_LENGTH_INDPTR, "cur_append_length_indptr", R + 1, false, false, INDPTR, APPENDS,  \
      TOKENS)                                                                                      \
    X(K_RAGGED_ROPE_POS_OFFSET, "k_ragged_rope_pos_offset", R, false, false, EACH, APPENDS,        \
      NOTHING)                                                                                     \
    X(Q_ROPE_POSITION_MAP, "q_rope_position_map", K, false, false, EACH, TOKENS, NOTHING)          \
    X(APPEND_POSITION_MAP, "append_position_map", K, false, false, EACH, TOKENS, NOTHING)          \
    X(TRANSFER_REMOTE_POSITION, "transfer_remote_position", K, false, false, ALIKE, TRANSFER,      \
      NOTHING)                                                                                     \
    X(TRANSFER_RECEIVER_ID, "transfer_receiver_id", K, false, false, ALIKE, TRANSFER, NOTHING)     \
    X(PAGE_TO_PAGE_LOCAL_POSITION, "page_to_page_local_position", K, false, false, ALIKE,          \
      PAGE_TO_PAGE, NOTHING)                                                                       \
    X(PAGE_TO_PAGE_REMOTE_POSITION, "page_to_page_remote_position", K, false, false, ALIKE,        \
      PAGE_TO_PAGE, NOTHING)                                                                       \
    X(PAGE_TO_PAGE_RECEIVER_ID, "page_to_page_receiver_id", K, false, false, ALIKE, PAGE_TO_PAGE,  \
      NOTHING)

typedef enum kvf_aux_array {
#define KVF_AUX_ENUM(NAME, ...) KVF_AUX_##NAME,
    KVF_AUX_ARRAYS(KVF_AUX_ENUM)
#undef KVF_AUX_ENUM
        KVF_AUX_N_ARRAYS
} kvf_aux_array_t;

/** One array of a step. */
typedef struct kvf_aux_key {
    kvf_aux_array_t array;
    uint32_t set;   /**< 0 = global; 1..n_sliding for arrays that are also sliding */
    uint32_t depth; /**< < max_depth; 0 for arrays that exist once */
} kvf_aux_key_t;

/** The largest step that storage is reserved for. */
typedef struct kvf_aux_limits {
    uint32_t max_seqs;  /**< R, > 0 */
    uint32_t max_pages; /**< N of one set and depth, > 0 */
    uint32_t max_chunk; /**< K: query tokens of all sequences, > 0 */
    uint32_t max_depth; /**< 1..KVF_AUX_MAX_DEPTH; usually 2 */
    uint32_t n_sliding; /**< sets besides the global one, at most KVF_MAX_GROUPS; 0: none of
                           their storage is allocated */
    uint32_t
        tree_tokens; /**< T: tokens of a draft tree, at most KVF_AUX_MAX_TREE_TOKENS. Masks take
                        max_depth * T * T * R elements; 0: no tree attention, no storage */
} kvf_aux_limits_t;

/** Which manager, as in the configuration (`aux: plain | cached`). */
typedef enum kvf_aux_manager {
    KVF_AUX_PLAIN, /**< a device array for each key, each copied at once by a copy of its own */
    KVF_AUX_CACHED /**< packed in host memory, and copied together by kvf_aux_commit() */
} kvf_aux_manager_t;

typedef struct kvf_aux_config {
    kvf_aux_manager_t manager;
    kvf_aux_limits_t limits;
    const kvf_mem_kind_t *memory; /**< what kernels read from; outlives the manager */
    void *stream;                 /**< the row's queue that kernels run in; NULL = its default */
} kvf_aux_config_t;

/** An array as kernels see it. */
typedef struct kvf_aux_view {
    const int32_t *device; /**< aligned to 16 bytes; the CPU may read it only when the memory kind
                              has host_access */
    int64_t n;             /**< elements */
} kvf_aux_view_t;

typedef struct kvf_auxdata kvf_auxdata_t;

/** @return The array's name in texts and in docs/placement.md; static storage. @thread any */
const char *kvf_aux_array_name(kvf_aux_array_t array);

/** @return Whether the array exists for each depth. @thread any */
bool kvf_aux_array_per_depth(kvf_aux_array_t array);

/** @return Whether the array exists for each sliding set, too. @thread any */
bool kvf_aux_array_sliding(kvf_aux_array_t array);

/** @return KVF_OK, or KVF_ERR_INVALID (the text names the limit). @thread any */
KVF_CHECK kvf_status_t kvf_aux_limits_check(const kvf_aux_limits_t *limits, kvf_detail_t *detail);

/**
 * Reserve storage for steps of some size; a first step is open.
 *
 * @param config      Copied. One device allocation for each key (plain), or one for all with host
 *                    memory of the same size (cached).
 * @param[out] aux_p  The caller destroys it.
 * @return KVF_OK, KVF_ERR_INVALID (a limit), KVF_ERR_NO_MEMORY, or what config->memory answers.
 * @thread one at a time, as all functions of a manager
 */
KVF_CHECK kvf_status_t kvf_aux_create(const kvf_aux_config_t *config, const kvf_alloc_t *alloc,
                                      kvf_auxdata_t **aux_p, kvf_detail_t *detail);

/** Give the storage back; no kernel may read it any more. NULL is allowed. */
void kvf_aux_destroy(kvf_auxdata_t *aux);

/** @return Bytes of device memory that are reserved. @cost O(1) */
uint64_t kvf_aux_reserved_bytes(const kvf_auxdata_t *aux);

/**
 * Copy one array of the step. All is checked before anything is written: the key, the length
 * against the limits and against the arrays of the step so far (the list above), offsets and slots.
 * After an error the step is as it was, and the same key may be tried again.
 *
 * @param data  n elements; may be changed after the call. May be NULL when n is 0, which is legal
 *              where the length comes out so.
 * @return KVF_OK            the plain manager has copied it, the cached one has packed it
 *         KVF_ERR_INVALID   no such key (a sliding copy without sliding storage; a tree without
 *                           tree_tokens), a second copy within the step, an array that comes before
 *                           the one that determines its length, a wrong length, a bad indptr
 *         KVF_ERR_RANGE     a slot < 0: its number did not fit 32 bits, or the block is unbound
 *         KVF_ERR_TOO_LARGE more than is reserved
 *         or what the memory kind's write answers (plain)
 * @cost O(n), no allocation
 */
KVF_CHECK kvf_status_t kvf_aux_copy(kvf_auxdata_t *aux, kvf_aux_key_t key, const int32_t *data,
                                    int64_t n, kvf_detail_t *detail);

/**
 * Bring to the device what was packed since the last reset, with one copy (none when that is
 * nothing). May be repeated within a step: arrays keep their places, and the copy starts at the
 * first one again. The plain manager has nothing to do.
 *
 * @return KVF_OK, or what the memory kind's write answers (what was committed before stays so).
 * @cost O(packed bytes)
 */
KVF_CHECK kvf_status_t kvf_aux_commit(kvf_auxdata_t *aux, kvf_detail_t *detail);

/** Open the next step: all layers have read the last one's arrays, and its views end. */
void kvf_aux_reset(kvf_auxdata_t *aux);

/**
 * Where an array of the step is.
 *
 * @param[out] view_p  Valid until kvf_aux_reset() or destroy, also across later copies and commits.
 * @return KVF_OK, KVF_ERR_INVALID (no such key), or KVF_ERR_UNKNOWN (not copied in this step, or
 *         packed and not yet committed).
 * @cost O(1)
 */
KVF_CHECK kvf_status_t kvf_aux_view(const kvf_auxdata_t *aux, kvf_aux_key_t key,
                                    kvf_aux_view_t *view_p, kvf_detail_t *detail);

#endif
