/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_FAILPOINT_H
#define KVF_BASE_FAILPOINT_H

/**
 * @file
 * Named places of a transfer at which a test makes its process fail. Only a build of its own has
 * them (KVF_FAIL_POINTS); everywhere else KVF_FAIL_POINT() is nothing.
 */

/* X(name, "where that is") */
#define KVF_FAIL_POINT_MAP(X)                                                                      \
    X(handshake, "the peer's hello has come, and is not answered")                                 \
    X(granted, "decode: the request is out; prefill: its grants are read, and nothing is posted")  \
    X(chunk, "decode: a chunk is in its page, or a copy is; prefill: a window is posted")          \
    X(commit_before, "decode: a commit has come; prefill: one is about to be sent")                \
    X(commit_after, "decode: a commit was taken; prefill: one was sent")                           \
    X(ack_before, "decode: done is about to be said; prefill: it has come")                        \
    X(release, "the pages of a request are let go")

#ifdef KVF_FAIL_POINTS
typedef enum kvf_fail_point {
#define KVF_FAIL_POINT_ENUM(name, text) KVF_FAIL_POINT_##name,
    KVF_FAIL_POINT_MAP(KVF_FAIL_POINT_ENUM)
#undef KVF_FAIL_POINT_ENUM
} kvf_fail_point_t;

/** A point is passed; the test's part of the program decides what happens. @thread agent */
void kvf_fail_point(kvf_fail_point_t point);

/** How to write what was said before the point is passed, and how to break all control connections,
 * as a network would; set by the agent's loop. */
extern void (*kvf_fail_flush)(void *control);
extern void (*kvf_fail_cut)(void *control);
extern void *kvf_fail_control;

#define KVF_FAIL_POINT(name) kvf_fail_point(KVF_FAIL_POINT_##name)
#else
#define KVF_FAIL_POINT(name) ((void)0)
#endif

#endif
