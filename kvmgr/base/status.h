/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_STATUS_H
#define KVF_BASE_STATUS_H

/**
 * @file
 * The one status enum of kvferry. Installed beside the public header.
 *
 * Codes are grouped by the largest thing that is dead after the error, so that recovery can switch
 * on kvf_status_scope() instead of on single codes. Texts are the `error` names of
 * docs/contracts.md.
 */

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVF_CHECK __attribute__((warn_unused_result))
#define KVF_PRINTF(fmt_arg, first_arg) __attribute__((format(printf, fmt_arg, first_arg)))
#define KVF_API __attribute__((visibility("default")))
#else
#define KVF_CHECK
#define KVF_PRINTF(fmt_arg, first_arg)
#define KVF_API
#endif

/** What is dead after an error. */
typedef enum kvf_scope {
    KVF_SCOPE_NONE,     /**< nothing: KVF_OK */
    KVF_SCOPE_CALL,     /**< only this call; the caller has to change something */
    KVF_SCOPE_RETRY,    /**< nothing is lost; the same call may succeed later */
    KVF_SCOPE_TRANSFER, /**< this transfer; the engine should prefill again or give up the request
                         */
    KVF_SCOPE_PEER,     /**< everything that runs with this peer */
    KVF_SCOPE_AGENT     /**< the agent; start a new process */
} kvf_scope_t;

/* X(code, NAME, scope, "name", "what it means and what to do") */
#define KVF_STATUS_MAP(X)                                                                          \
    X(0, OK, NONE, "ok", "done")                                                                   \
    X(-1, ERR_INVALID, CALL, "invalid", "an argument is wrong; correct it")                        \
    X(-2, ERR_RANGE, CALL, "range", "an offset or length lies outside its region")                 \
    X(-3, ERR_UNSUPPORTED, CALL, "unsupported", "this build or version cannot do that")            \
    X(-4, ERR_DUPLICATE, CALL, "duplicate", "a live request has this id; use another id")          \
    X(-5, ERR_UNKNOWN, CALL, "unknown", "nothing of this name is known here")                      \
    X(-6, ERR_TOO_LARGE, CALL, "too_large", "larger than the pool or a configured limit")          \
    X(-7, ERR_CAPACITY_MISMATCH, CALL, "capacity_mismatch",                                        \
      "a table was allocated for another number of tokens than get_kv_capacity_tokens gives")      \
    X(-8, ERR_COUNT_MISMATCH, CALL, "count_mismatch",                                              \
      "a list has more blocks than its request can explain")                                       \
    X(-20, ERR_AGAIN, RETRY, "again", "a queue or pool is full; retry after a completion")         \
    X(-21, ERR_BUSY, RETRY, "busy", "still in use; retry when its users are done")                 \
    X(-22, ERR_NO_MEMORY, RETRY, "no_memory", "the allocator has no memory left")                  \
    X(-40, ERR_CANCELLED, TRANSFER, "cancelled", "cancelled by one of the sides")                  \
    X(-41, ERR_DEADLINE, TRANSFER, "deadline", "not finished within its time")                     \
    X(-42, ERR_UNCOVERED, TRANSFER, "uncovered", "a wanted block has no page on one of the sides") \
    X(-43, ERR_DIGEST_MISMATCH, TRANSFER, "digest_mismatch", "bytes arrived that were not sent")   \
    X(-44, ERR_PREFILL_FAILED, TRANSFER, "prefill_failed", "the context side lost this prefill")   \
    X(-45, ERR_FORGED, TRANSFER, "forged", "the ticket was not made under this cluster key")       \
    X(-46, ERR_USED, TRANSFER, "used", "the ticket was used before; prefill again")                \
    X(-47, ERR_EXPIRED, TRANSFER, "expired", "the ticket's lease has ended; prefill again")        \
    X(-60, ERR_PEER_LOST, PEER, "peer_lost", "the other node died, froze or restarted")            \
    X(-61, ERR_PEER_REFUSED, PEER, "peer_refused", "the other node refused this one")              \
    X(-62, ERR_INCOMPATIBLE, PEER, "incompatible", "the two nodes' models or versions differ")     \
    X(-63, ERR_PROTOCOL, PEER, "protocol", "the other end sent something that breaks protocol")    \
    X(-64, ERR_NOT_ALLOWED, PEER, "not_allowed", "the other node is not on the allow-list")        \
    X(-80, ERR_IO, AGENT, "io", "the operating system refused an operation")                       \
    X(-81, ERR_INTERNAL, AGENT, "internal", "a defect of kvferry; please report it")

typedef enum kvf_status {
#define KVF_STATUS_ENUM(code, name, scope, text, help) KVF_##name = (code),
    KVF_STATUS_MAP(KVF_STATUS_ENUM)
#undef KVF_STATUS_ENUM
} kvf_status_t;

/** Bytes of a detail text, with its terminating zero. */
#define KVF_DETAIL_BYTES 512

/**
 * The sentence that goes with an error: the exact cause and the way out.
 *
 * Caller's memory. A function that takes a `kvf_detail_t *` writes it only when it fails; NULL is
 * allowed everywhere and means that the caller does not want the text.
 */
typedef struct kvf_detail {
    char text[KVF_DETAIL_BYTES];
} kvf_detail_t;

/**
 * @param status  Any value.
 * @return Its short name as in docs/contracts.md ("peer_lost"); "status(N)" texts do not exist: an
 *         unknown number gives "internal". Static storage.
 * @thread any
 */
KVF_API const char *kvf_status_name(kvf_status_t status);

/**
 * @param status  Any value.
 * @return One sentence: what it means and what to do. Static storage.
 * @thread any
 */
KVF_API const char *kvf_status_text(kvf_status_t status);

/**
 * @param status  Any value.
 * @return What is dead after it; KVF_SCOPE_AGENT for an unknown number.
 * @thread any
 */
KVF_API kvf_scope_t kvf_status_scope(kvf_status_t status);

/**
 * Find a status by its short name (the inverse of kvf_status_name()).
 *
 * @param name           Zero-terminated.
 * @param[out] status_p  Untouched when the name is unknown.
 * @return KVF_OK, or KVF_ERR_UNKNOWN.
 * @thread any
 */
KVF_API KVF_CHECK kvf_status_t kvf_status_from_name(const char *name, kvf_status_t *status_p);

/**
 * Write the reason of a failure and return its status: `return kvf_fail(detail, KVF_ERR_X, "...")`.
 *
 * @param detail  NULL, or the caller's text; cut at KVF_DETAIL_BYTES - 1.
 * @param status  Returned as it is.
 * @param fmt     printf format; lower case, the exact cause, then what to do.
 * @thread any
 */
KVF_API kvf_status_t kvf_fail(kvf_detail_t *detail, kvf_status_t status, const char *fmt, ...)
    KVF_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif

#endif
