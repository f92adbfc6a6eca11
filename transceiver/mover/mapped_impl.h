/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MOVER_MAPPED_IMPL_H
#define KVF_MOVER_MAPPED_IMPL_H

/**
 * @file
 * The mapped mover's parts: mapped.c (watching, the address), mapped_lend.c (our pools, to others),
 * mapped_borrow.c (others' pools, here).
 */

#include "transceiver/mover/mapped.h"

#include <stdbool.h>

#define SECRET_BYTES 16

/* What is said first, by who wants to map; and the answer, with the descriptors beside it. Both are
 * of one machine and one program, so their layout is that of the compiler. */
typedef struct mapped_ask {
    char magic[8];
    uint8_t secret[SECRET_BYTES]; /* of the hello of the agent that is asked */
    uint8_t incarnation[KVF_MAPPED_NAME_BYTES];
} mapped_ask_t;

typedef struct mapped_answer {
    char magic[8];
    uint32_t n_pools;
    uint8_t on_device; /* 1: all pools are; 0: none is */
    uint8_t
        has_fd[KVF_MAX_GROUPS]; /* 1: one of the descriptors, which are in order, is the pool's */
    uint64_t bytes[KVF_MAX_GROUPS];
    uint8_t handles[KVF_MAX_GROUPS][KVF_MAPPED_HANDLE_BYTES];
} mapped_answer_t;

#define MAPPED_MAGIC "kvfmap3"

/* A descriptor in the epoll set, first member of what it belongs to. */
typedef struct mapped_watch {
    int fd; /* -1: none */
    void (*ready)(kvf_mapped_t *mapped, struct mapped_watch *watch);
    void *owner;
} mapped_watch_t;

typedef struct mapped_loan mapped_loan_t;

struct kvf_mapped {
    const kvf_alloc_t *alloc;
    kvf_mapped_events_t events;
    kvf_mapped_pool_t pools[KVF_MAX_GROUPS];
    uint32_t n_pools;
    uint8_t incarnation[KVF_MAPPED_NAME_BYTES];
    uint8_t name[KVF_MAPPED_NAME_BYTES]; /* of the socket, in hexadecimal */
    uint8_t secret[SECRET_BYTES];
    char boot_id[40]; /* of the kernel */
    int epoll;
    int spare; /* a descriptor for when there are no others */
    mapped_watch_t listener;
    mapped_loan_t *loans;
    uint32_t n_asking; /* loans whose owner has not said yet who it is */
    kvf_mapped_source_t *sources;
};

/* mapped.c */
/** @return Whether our pools are a device's. */
bool mapped_on_device(const kvf_mapped_t *mapped);
/** Watch a descriptor for input, and its end. @return false: no room. */
bool mapped_watch(kvf_mapped_t *mapped, mapped_watch_t *watch, int fd);
/** Close it. */
void mapped_unwatch(kvf_mapped_t *mapped, mapped_watch_t *watch);

/* mapped_lend.c */
void mapped_accept(kvf_mapped_t *mapped, mapped_watch_t *watch);
void mapped_forget_loans(kvf_mapped_t *mapped);

/* mapped_borrow.c */
void mapped_forget_sources(kvf_mapped_t *mapped);

#endif
