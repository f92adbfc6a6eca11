/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the models of push and pull share: two nodes, the control connection between them, and what
 * goes wrong. quarantine.py says what is checked and with which definitions.
 *
 * Every step of a node is the handling of one event (a message, a timer, a call), as in its loop,
 * and every step uses something up: a message, a state, a fault of a bounded budget. So no run is
 * infinite (quarantine.py lets pan search for one), and what must happen in the end is asserted
 * where nothing can happen any more (judge). Timers have no time here: one that runs may fire at
 * any moment, so whatever holds here holds for all durations.
 *
 * There are no digests: the proofs must be right without them.
 */

#define NREQ 2
#define NPAGES 2
#define PAGES_OF(t) (2 - (t)) /* request 0 needs both pages, request 1 either one */
#define BIT(p) (1 << (p))
#define ALL_PAGES (BIT(NPAGES) - 1)
#define COUNT(mask) (((mask) & 1) + (((mask) >> 1) & 1))

/* How bytes move, and what proves that no more will come: docs/protocol.md "Pages".
 *   CHECKED  our handler makes the copies: a grant that is over is a proof
 *   MAPPED   a process of the same machine: Drained, or that the process is dead (a pidfd)
 *   RDMA     one-sided: Drained, or that we destroyed our end of the path
 *   BARE     one-sided, nothing but Drained */
#ifndef CHECKED
#define CHECKED 0
#endif
#ifndef MAPPED
#define MAPPED 0
#endif
#ifndef LENT /* (pull) and R gives its mapping back with its last copy of a session that is over */
#define LENT 0
#endif
#ifndef RDMA
#define RDMA 0
#endif
#ifndef BARE
#define BARE 0
#endif

/* How many faults a run may have, of any kind: the session ends although both nodes live; the
 * context node is killed, and may come back as another incarnation; the generation node is killed
 * and comes back; a copy is reported as failed although its bytes may be on their way. (Who moves
 * is killed once at the most.) Cancels and timers need no budget: each ends something. */
#ifndef FAULTS
#define FAULTS 2
#endif

/* The broken variants: each takes one guard out. */
#ifndef BUG_FREE_AT_ABORT
#define BUG_FREE_AT_ABORT 0 /* the end of a transfer frees its pages */
#endif
#ifndef BUG_FREE_AT_DEADLINE
#define BUG_FREE_AT_DEADLINE 0 /* a transfer that is out of time frees its pages */
#endif
#ifndef BUG_FREE_AT_LEASE
#define BUG_FREE_AT_LEASE 0 /* the context side's lease ends: its pages are free */
#endif
#ifndef BUG_FREE_AT_QUARANTINE
#define BUG_FREE_AT_QUARANTINE 0 /* quarantine_ms is taken for a proof */
#endif
#ifndef BUG_CRASH_FENCES
#define BUG_CRASH_FENCES 0 /* a control connection that died is taken for a proof */
#endif
#ifndef BUG_NO_GENERATION
#define BUG_NO_GENERATION 0 /* the handler looks whether the page is granted, not to whom */
#endif
#ifndef BUG_OLD_DRAINED
#define BUG_OLD_DRAINED 0 /* the word of any incarnation at that address counts */
#endif
#ifndef BUG_OLD_INPUT
#define BUG_OLD_INPUT 0 /* what is buffered of the session before is read beside the new one */
#endif
#ifndef BUG_DRAINED_EARLY
#define BUG_DRAINED_EARLY 0 /* Drained is said while copies are posted */
#endif
#ifndef BUG_FAILED_IS_DRAINED
#define BUG_FAILED_IS_DRAINED 0 /* a copy that was reported as failed counts as over */
#endif
#ifndef BUG_NO_SECOND_ABORT
#define BUG_NO_SECOND_ABORT 0 /* in a new session nothing is said of what is still in doubt */
#endif
#ifndef BUG_ABORT_UNANSWERED
#define BUG_ABORT_UNANSWERED 0 /* an Abort of what is unknown, or over, is only dropped */
#endif

#ifndef BUG_UNMAP_EARLY
#define BUG_UNMAP_EARLY 0 /* a mapping is given back while copies from it are posted */
#endif
#ifndef BUG_ONE_OF_TWO
#define BUG_ONE_OF_TWO 0 /* one mapping that is given back is taken for all */
#endif

/* What must be possible, lest the rest holds for nothing: a run that gets there fails. */
#define SEEN_OK 1      /* both requests succeed */
#define SEEN_HEALED 2  /* a proof comes for a poisoned page */
#define SEEN_POISON 3  /* none comes */
#define SEEN_REFUSED 4 /* a chunk comes after its grant is over */
#ifndef SEEK
#define SEEK 0
#endif
byte n_ok; /* counted only if looked for */

/* The life of an operation, and of a page under it. S is the context node, R the generation node.
 *   NEW       not opened yet
 *   OFFERED   (S) opened, its ticket is out; nobody came yet
 *   LIVE      R: opened; S: claimed by its receiver
 *   ENDED     (who moves) has its result; its own pages wait for the copies that it posted, which
 *             is in its hands
 *   DOUBT     (who granted) has its result; the peer may still touch the pages: quarantined
 *   POISONED  the same, after quarantine_ms
 *   RELEASED  nothing can touch its pages any more
 *   LOST      its process died */
mtype = { NEW, OFFERED, LIVE, ENDED, DOUBT, POISONED, RELEASED, LOST };

#define IN_DOUBT(state) ((state) == DOUBT || (state) == POISONED)

mtype r[NREQ] = NEW; /* receives: transceiver/recv.c, recv_seal.c */
mtype s[NREQ] = NEW; /* sends: transceiver/send*.c */
bit asked[NREQ];     /* R: its request was sent; the peer may know of it */
byte s_inc_of[NREQ]; /* the incarnation that the ticket names; 0: there is no ticket yet */
byte r_inc_of[NREQ]; /* (pull) the incarnation that S granted to; 0: nobody yet */
bit r_result[NREQ], r_released[NREQ], s_result[NREQ], s_released[NREQ]; /* events given */

/* Copies that were posted and may land at any time, as a mask of pages. `posted` is what their
 * poster knows of them. */
byte flight[NREQ], posted[NREQ];

bit s_alive = 1;
byte s_inc = 1, r_inc = 1; /* incarnations */
bit gone;              /* the first incarnation of the node that moves is proven to be dead */
bit s_stays_down;      /* it was killed for good */
byte faults = FAULTS;

/* Every request has one result and, later, one released event on each side. */
inline give(event) {
    assert(!event);
    event = 1;
}

inline succeed() {
    n_ok = n_ok + (SEEK == SEEN_OK);
    assert(n_ok < NREQ);
}

/* ---- the control connection: transceiver/link.c, peer.c; docs/protocol.md "Frames" ---- */

/* A connection that breaks and is replaced in time is not seen here: every message of the session
 * comes once and in order all the same (quarantine_session.pml). What is modelled is the end of a
 * session: one side gives the other up, the other one notices or finds out when a new session
 * begins, and any end of what was said is lost. REQ..DRAINED are the frames of docs/protocol.md.
 * GRANT (pull): the source pages. WANT (pull on software transports): send one more window. HELLO
 * and WELCOME stand for the handshake. */
mtype = { REQ, GRANT, WANT, COMMIT, DONE, ABORT, DRAINED, HELLO, WELCOME };

chan to_s = [10] of { mtype, byte, byte, byte }; /* message, session, transfer, granted pages */
chan to_r = [10] of { mtype, byte, byte }; /* message, transfer (WELCOME: incarnation), pages */
byte session;   /* the newest one */
bit intact;     /* it is */
byte s_session; /* the one that S is in; 0: none */
bit r_dialled;
byte r_peer;  /* R: incarnation at the other end; 0: no peer is up */

/* kvf_peer_tell: whatever is said in a session that is over is lost. */
inline tell_s(message, transfer, pages) {
    if
    :: intact && r_dialled -> assert(nfull(to_s)); to_s!message, session, transfer, pages
    :: else
    fi
}

inline tell_r(message, transfer, pages) {
    if
    :: intact && s_session == session -> assert(nfull(to_r)); to_r!message, transfer, pages
    :: else
    fi
}

inline drop_all_to_r() {
    do
    :: nempty(to_r) -> to_r?_, _, _
    :: empty(to_r) -> break
    od
}

inline drop_all_to_s() {
    do
    :: nempty(to_s) -> to_s?_, _, _, _
    :: empty(to_s) -> break
    od
}

/* ---- faults that concern no transfer ---- */

inline end_copies(t) {
    if
    :: MOVER_INC(t) == 1 -> flight[t] = 0
    :: else
    fi
}

proctype network() {
end:
    do
    :: atomic { intact && faults > 0 -> faults--; intact = 0 }
    /* A killed process is gone some time after its connections are. Its copies end with it if it
     * made them itself; else what left it is on its way. */
    :: atomic { MAPPED && MOVER_DIED && !gone -> gone = 1; end_copies(0); end_copies(1) }
    od
}
