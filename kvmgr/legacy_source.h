/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KVMGR_LEGACY_SOURCE_H
#define KVF_KVMGR_LEGACY_SOURCE_H

/**
 * @file
 * Table sources that have a list of ids instead of ordinals. kvf_source_table() comes here with
 * them, and nothing else does: without this file and kvmgr/legacy.h there are ordinals only.
 */

#include "kvmgr/legacy.h"
#include "kvmgr/source.h"

/**
 * A manager without ordinals, as plain lists.
 *
 * @param lists  One for each layer group; borrowed.
 */
kvf_source_t kvf_source_of_lists(const kvf_legacy_list_t *lists);

/** kvf_source_table() of a source that does not expose ordinals. Parameters and statuses are the
 * same. @cost O(blocks), one allocation */
KVF_CHECK kvf_status_t kvf_legacy_source_table(const kvf_source_t *source, uint32_t group_idx,
                                               const kvf_layer_group_t *group,
                                               const kvf_lengths_t *lengths, bool include_drafts,
                                               const kvf_alloc_t *alloc,
                                               kvf_source_table_t *table_p, kvf_detail_t *detail);

#endif
