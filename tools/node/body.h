/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TOOLS_NODE_BODY_H
#define KVF_TOOLS_NODE_BODY_H

/**
 * @file
 * JSON bodies of the nodes' HTTP interface, checked strictly. Source: docs/contracts.md "Nodes".
 * Pure; any thread.
 */

#include "kvmgr/base/alloc.h"
#include "tools/node/synthetic.h"
#include "transceiver/kvferry.h"

/** What a request asks for. */
typedef struct kvf_body {
    char request_id[KVF_MAX_ID_BYTES + 1];
    char ticket[KVF_TICKET_BYTES]; /**< decode */
    kvf_lengths_t lengths;         /**< num_extra_kv_tokens and total_input_len_cp are 0 */
    uint64_t timeout_us;           /**< 0: the node's default */
    bool early_ticket;             /**< prefill: answer before it has ended */
    int64_t *ids;                  /**< the content's, NULL without; this struct's memory */
    kvf_content_t content;
    const char
        *content_from; /**< hash_ids | tokens | request_id: what the content was taken from */
} kvf_body_t;

/**
 * Read the body of POST /v1/prefill: {request_id, prompt_len or tokens, hash_ids?, draft_len?,
 * timeout_ms?, early_ticket?}. The content is hash_ids, else what tokens say, else unlike any other
 * request's.
 *
 * @param alloc        For ids.
 * @param[out] body_p  kvf_body_cleanup() it.
 * @return KVF_OK; KVF_ERR_INVALID (the text names the field); KVF_ERR_NO_MEMORY.
 */
KVF_CHECK kvf_status_t kvf_body_read_prefill(const kvf_alloc_t *alloc, const char *text,
                                             size_t bytes, kvf_body_t *body_p,
                                             kvf_detail_t *detail);

/**
 * Read the body of POST /v1/decode: {request_id, kv_transfer_params: {ticket, prompt_len,
 * draft_len?, content?}, hash_ids?, tokens?, max_tokens?, timeout_ms?}. The content is hash_ids,
 * else tokens, else unlike any other request's; never what the sender says.
 *
 * @param verify  Pages will be compared with the content: refuse a request that has neither
 *                hash_ids nor tokens when the params' content says that the sender's had.
 * @return as kvf_body_read_prefill().
 */
KVF_CHECK kvf_status_t kvf_body_read_decode(const kvf_alloc_t *alloc, const char *text,
                                            size_t bytes, bool verify, kvf_body_t *body_p,
                                            kvf_detail_t *detail);

/** Read the body of POST /v1/cancel. @param[out] request_id  KVF_MAX_ID_BYTES + 1. @return KVF_OK,
 * KVF_ERR_INVALID. */
KVF_CHECK kvf_status_t kvf_body_read_cancel(const char *text, size_t bytes, char *request_id,
                                            kvf_detail_t *detail);

/** Free what the struct owns. A zeroed one is allowed. */
void kvf_body_cleanup(const kvf_alloc_t *alloc, kvf_body_t *body);

#endif
