/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BASE_MUTANT_H
#define KVF_BASE_MUTANT_H

/**
 * @file
 * Guards that a test can remove, one at a time, to show that it notices. Only a build of its own
 * has them (KVF_MUTANTS); everywhere else KVF_MUTANT() is false at compile time.
 */

/* X(name, "what is wrong then") */
#define KVF_MUTANT_MAP(X)                                                                          \
    X(free_at_cancel, "a receive gives its pages back at its end, and needs no proof")             \
    X(free_at_timeout, "quarantine_ms is taken for a proof")                                       \
    X(settle_without_proof, "the end of a connection is taken for a proof")                        \
    X(ignore_drained, "nobody hears that the last access has completed")                           \
    X(drain_too_early, "drained is said while windows are still posted")                           \
    X(failure_is_proof, "a window that failed is taken for one that has arrived")                  \
    X(free_under_read, "a send gives its pages back while windows are still posted")               \
    X(free_under_copy, "a send gives its pages back while its receiver copies from them")          \
    X(free_while_copying, "a receive gives its pages back while it copies into them")              \
    X(free_while_storing, "a receive gives its pages back while what landed is copied to them")    \
    X(free_while_sending, "a send gives its pages back while they are sent through a path")        \
    X(free_while_hashing, "a send gives its pages back while they are hashed for nobody yet")      \
    X(keep_path, "a path by which a peer that is given up fetches stays")                          \
    X(fetch_again, "ranges may be fetched again, and out of order")                                \
    X(drain_while_copying, "drained is said while copies from the sender's pools are under way")   \
    X(returned_of_one, "one mapping that is given back is taken for all")                          \
    X(keep_mapped, "the pools of a peer that is given up stay mapped")                             \
    X(no_second_abort, "a sender does not ask again for pages that are in doubt")                  \
    X(skip_slot_check, "a commit may name slots that its sender's pool does not have")             \
    X(skip_grant_key, "whoever knows a transfer's number may write to it")                         \
    X(skip_generation_check, "a chunk's slot and generation are not compared with the grant")      \
    X(chunk_twice, "bytes may come a second time")                                                 \
    X(accept_handover, "a commit is taken for the arrival of its bytes")                           \
    X(skip_digest, "digests are not compared")                                                     \
    X(skip_coverage, "a receive is done without all of its bytes")                                 \
    X(done_without_verify, "a receive is done while digests are being computed")                   \
    X(post_twice, "what was moved is moved again")                                                 \
    X(ignore_failed_window, "a window that failed is committed")                                   \
    X(ignore_broken_path, "a broken data path is not noticed")                                     \
    X(ignore_closed, "a closed connection ends nothing")                                           \
    X(ignore_silence, "a silent peer is never lost")                                               \
    X(accept_old_incarnation, "a ticket of an earlier process is taken")                           \
    X(reuse_ticket, "a ticket that is in use is taken again")                                      \
    X(accept_duplicate_id, "a request id that is alive is taken again")                            \
    X(lose_released, "the released event of a cancelled send is lost")                             \
    X(release_at_end, "a receive is released with its result")                                     \
    X(result_twice, "an abort ends what has ended")                                                \
    X(lazy_heap, "a timer that is taken out leaves the others out of order")                       \
    X(no_renewal, "a receiver's heartbeats do not name what it still wants")                       \
    X(keep_old_input, "a broken connection is still read when another one has taken its place")    \
    X(resend_nothing, "what was lost with a connection is not said again")                         \
    X(no_lease, "a lease never ends")                                                              \
    X(no_deadline, "a receive that was requested has no deadline")                                 \
    X(no_peer_deadline, "a send waits for its receiver for ever")                                  \
    X(no_farewell, "who gives up before it has asked does not say so")                             \
    X(final_too_early, "the final commit goes out while windows are posted")                       \
    X(free_in_doubt, "a page in doubt is free")                                                    \
    X(free_while_written, "a page that a peer may write is free when it is released")              \
    X(keep_generation, "a grant does not change the page's generation")                            \
    X(ready_too_much, "one block more than is ready leaves")                                       \
    X(wrong_source, "the neighbour of a block is read")                                            \
    X(push_unasked, "more is posted than the receiver that pulls has asked for")                   \
    X(forget_pull, "what is asked for while there is no connection is not said later")             \
    X(ask_for_all, "a receiver that pulls asks for all that is ready")                             \
    X(keep_the_turn, "who has had a turn is not behind the others")                                \
    X(judge_after_stall, "who stood still takes its own silence for the peers'")

#ifdef KVF_MUTANTS
typedef enum kvf_mutant {
    KVF_MUTANT_none,
#define KVF_MUTANT_ENUM(name, text) KVF_MUTANT_##name,
    KVF_MUTANT_MAP(KVF_MUTANT_ENUM)
#undef KVF_MUTANT_ENUM
} kvf_mutant_t;

/** The guard that is removed. Set before anything runs. */
extern kvf_mutant_t kvf_mutant;

#define KVF_MUTANT(name) (kvf_mutant == KVF_MUTANT_##name)
#else
#define KVF_MUTANT(name) 0
#endif

#endif
