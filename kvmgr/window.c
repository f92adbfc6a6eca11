/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/window.h"

#include "kvmgr/base/size.h"

kvf_span_t kvf_stale_span(int64_t prompt_tokens, int64_t tokens_per_block, int64_t window,
                          int64_t sinks) {
    if (window == 0) {
        return (kvf_span_t){0, 0};
    }
    int64_t prompt_blocks = kvf_div_ceil(prompt_tokens, tokens_per_block);
    int64_t sink_blocks = kvf_div_ceil(sinks, tokens_per_block);
    int64_t first = sink_blocks < prompt_blocks ? sink_blocks : prompt_blocks;
    int64_t end = kvf_div_floor(prompt_tokens + 1 - window, tokens_per_block);
    return (kvf_span_t){first, end > first ? end : first};
}
