/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_AUXBUILD_H
#define KVF_KVMGR_AUXBUILD_H

/**
 * @file
 * Makes the attention aux data of a step out of block tables by ordinal. Source: docs/placement.md
 * "Attention aux data".
 *
 * What the layers of a group read of a sequence of L tokens (the step's own included) is the window
 * [L - W, L) of its last token, and in front of it the sinks [0, min(s, L - W)); everything when
 * the group has no window. Shared prefixes divide [0, L) into depths. For each depth, a group has
 *
 *   pages   the slots of all ordinals that hold such a token, ascending, nothing between: "the
 * list" row 0   tokens in the list's last page row 1   where the window starts in the list, counted
 * in tokens as if its pages were adjacent row 2   sinks rope    the position of the window's first
 * token; where the depth ends when the window starts behind it. Sinks have the positions from the
 * depth's first token on
 *
 * so that the kernel sees (pages - 1) * t + row0 - row1 + row2 tokens, in the list at [0, row2) and
 * [row1, (pages - 1) * t + row0). A depth without pages has zero rows.
 *
 * Derivations: L = 55, t = 16, W = 18: the window starts at 37, which is its rope offset; ordinal 2
 * starts at 32, so row 1 is 37 - 32 = 5. L = 80, t = 8, W = 24, s = 4: the list is 0,7,8,9, the
 * window starts at 56, the first token of its second page: row 1 is 8.
 */

#include "kvmgr/auxdata.h"
#include "kvmgr/layout.h"

/** A sequence of the step. Borrowed memory. */
typedef struct kvf_aux_seq {
    const kvf_table_t *tables; /**< one for each group of the layout, in its order */
    int64_t n_tokens;          /**< L, at most INT32_MAX */
    int64_t n_query_tokens;    /**< of this step, the last ones of L: 1 for decode */
    /**
     * Where its shared prefixes end, in tokens from the start, ascending, whole blocks of every
     * group, in front of the step's own tokens. Prefix i has depth i; those that find no depth
     * below max_depth - 1, and what the sequence has alone, are the last depth.
     */
    const int64_t *prefix_ends;
    uint32_t n_prefixes;
} kvf_aux_seq_t;

typedef struct kvf_auxbuild kvf_auxbuild_t;

/** @return Sliding sets that a layout needs: its groups but the first one without a window.
 *  @thread any */
uint32_t kvf_auxbuild_n_sliding(const kvf_layout_t *layout);

/** @return The set (kvf_aux_key_t) of a group: 0 for the first one without a window, else 1, 2, ...
 *  in order. @thread any */
uint32_t kvf_auxbuild_set(const kvf_layout_t *layout, uint32_t group_idx);

/**
 * @param layout         Checked; what is needed of it is copied.
 * @param limits         Of the managers that are to be filled; n_sliding as above.
 * @param[out] build_p   The caller destroys it. Memory for one step within the limits.
 * @return KVF_OK, KVF_ERR_INVALID (limits), KVF_ERR_NO_MEMORY.
 * @thread one at a time, as all functions of a builder
 */
KVF_CHECK kvf_status_t kvf_auxbuild_create(const kvf_layout_t *layout,
                                           const kvf_aux_limits_t *limits, const kvf_alloc_t *alloc,
                                           kvf_auxbuild_t **build_p, kvf_detail_t *detail);

/** NULL is allowed. */
void kvf_auxbuild_destroy(kvf_auxbuild_t *build);

/**
 * Make the arrays of a step. One row for each sequence in every depth; pages that sequences share
 * are listed by each of them.
 *
 * A window is that of the last token: queries in front of it see what is left of theirs.
 *
 * @param seqs  n_seqs, in the order of rows; n_seqs may be 0.
 * @return KVF_OK            until the next call kvf_auxbuild_array() has them
 *         KVF_ERR_INVALID   a number of a sequence, or an entry below -1 (the text names it)
 *         KVF_ERR_RANGE     a number that int32 does not hold: L, or the place of an appended token
 *         KVF_ERR_TOO_LARGE more sequences, pages or query tokens than the limits
 *         KVF_ERR_UNCOVERED a page that the kernels would read is unbound (the text names sequence,
 *                           group and ordinal)
 *         After an error there are no arrays.
 * @cost O(pages listed + query tokens), no allocation
 */
KVF_CHECK kvf_status_t kvf_auxbuild_run(kvf_auxbuild_t *build, uint32_t n_seqs,
                                        const kvf_aux_seq_t *seqs, kvf_detail_t *detail);

/**
 * One array of the step in host memory. It makes qo_indptr and the four page arrays, and of those
 * that exist once cur_append_length_indptr, k_ragged_rope_pos_offset (position of the first query),
 * q_rope_position_map and append_position_map (slot * t + offset in the page, in the group of set 0
 * or, when the layout has none, its first one; -1 where that has no page). Elsewhere an appended
 * token is found through page_indices: the last ones of the last depth.
 *
 * @param[out] data_p, n_p  Valid until the next kvf_auxbuild_run().
 * @return KVF_OK, or KVF_ERR_UNKNOWN (no step, not made here, no such key).
 * @cost O(1)
 */
KVF_CHECK kvf_status_t kvf_auxbuild_array(const kvf_auxbuild_t *build, kvf_aux_key_t key,
                                          const int32_t **data_p, int64_t *n_p);

/**
 * Copy all arrays of the step to a manager whose step has none of them yet; commit is the
 * caller's.
 *
 * @return KVF_OK, KVF_ERR_UNKNOWN (no step was built), or what kvf_aux_copy() answers; then the
 *         caller resets the manager.
 */
KVF_CHECK kvf_status_t kvf_auxbuild_copy(const kvf_auxbuild_t *build, kvf_auxdata_t *aux,
                                         kvf_detail_t *detail);

#endif
