/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/base/clock.h"
#include "kvmgr/base/cursor.h"
#include "transceiver/mover/mapped_impl.h"
#include "transceiver/mover/mapped_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* Pending connections; and events in one call of progress, which then gives way to others. */
#define BACKLOG 64
#define MAX_EVENTS 64

bool mapped_on_device(const kvf_mapped_t *mapped) {
    return mapped->n_pools > 0 && mapped->pools[0].on_device;
}

bool mapped_watch(kvf_mapped_t *mapped, mapped_watch_t *watch, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = watch};
    watch->fd = fd;
    return epoll_ctl(mapped->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

void mapped_unwatch(kvf_mapped_t *mapped, mapped_watch_t *watch) {
    if (watch->fd >= 0) {
        (void)epoll_ctl(mapped->epoll, EPOLL_CTL_DEL, watch->fd, NULL);
        (void)close(watch->fd);
        watch->fd = -1;
    }
}

static bool read_boot_id(char *text, size_t cap) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    bool ok = file != NULL && fgets(text, (int)cap, file) != NULL;
    if (file != NULL) {
        (void)fclose(file);
    }
    text[strcspn(ok ? text : "", "\n")] = '\0';
    return ok && text[0] != '\0';
}

kvf_status_t kvf_mapped_create(const kvf_alloc_t *alloc, const kvf_mapped_pool_t *pools,
                               uint32_t n_pools, const uint8_t incarnation[KVF_MAPPED_NAME_BYTES],
                               const kvf_mapped_events_t *events, kvf_mapped_t **mapped_p,
                               kvf_detail_t *detail) {
    const kvf_rand_t *rand = kvf_rand_default();
    struct sockaddr_un address;
    kvf_mapped_t *mapped = kvf_calloc(alloc, 1, sizeof(*mapped));
    if (mapped == NULL) {
        return kvf_fail(detail, KVF_ERR_NO_MEMORY, "no memory for the mapped mover");
    }
    mapped->alloc = alloc;
    mapped->events = *events;
    mapped->n_pools = n_pools;
    memcpy(mapped->pools, pools, n_pools * sizeof(*pools));
    memcpy(mapped->incarnation, incarnation, sizeof(mapped->incarnation));
    rand->fill(rand->ctx, mapped->name, sizeof(mapped->name));
    rand->fill(rand->ctx, mapped->secret, sizeof(mapped->secret));
    mapped->listener = (mapped_watch_t){-1, mapped_accept, NULL};
    mapped->epoll = epoll_create1(EPOLL_CLOEXEC);
    mapped->spare = fcntl(mapped->epoll, F_DUPFD_CLOEXEC, 0);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    socklen_t bytes = mapped_socket_address(mapped->name, &address);
    if (!read_boot_id(mapped->boot_id, sizeof(mapped->boot_id)) || mapped->spare < 0 || fd < 0 ||
        bind(fd, (const struct sockaddr *)&address, bytes) != 0 || listen(fd, BACKLOG) != 0 ||
        !mapped_watch(mapped, &mapped->listener, fd)) {
        (void)kvf_fail(detail, KVF_ERR_IO, "no socket for peers on this machine: %s",
                       strerror(errno));
        if (fd >= 0 && mapped->listener.fd < 0) {
            (void)close(fd);
        }
        kvf_mapped_destroy(mapped);
        return KVF_ERR_IO;
    }
    *mapped_p = mapped;
    return KVF_OK;
}

void kvf_mapped_destroy(kvf_mapped_t *mapped) {
    if (mapped == NULL) {
        return;
    }
    mapped_forget_loans(mapped);
    mapped_forget_sources(mapped);
    mapped_unwatch(mapped, &mapped->listener);
    (void)close(mapped->spare);
    (void)close(mapped->epoll);
    kvf_free(mapped->alloc, mapped);
}

size_t kvf_mapped_address(const kvf_mapped_t *mapped, uint8_t address[KVF_MAPPED_ADDRESS_BYTES]) {
    kvf_writer_t writer = kvf_writer(address, KVF_MAPPED_ADDRESS_BYTES);
    kvf_write_bytes(&writer, mapped->name, sizeof(mapped->name));
    kvf_write_bytes(&writer, mapped->secret, sizeof(mapped->secret));
    kvf_write_bytes(&writer, mapped->boot_id, strlen(mapped->boot_id));
    return KVF_MAPPED_ADDRESS_BYTES - writer.left;
}

int kvf_mapped_fd(const kvf_mapped_t *mapped) {
    return mapped->epoll;
}

unsigned kvf_mapped_progress(kvf_mapped_t *mapped) {
    unsigned n = 0;
    struct epoll_event event;
    /* One at a time: what is told of one may close another. */
    while (n < MAX_EVENTS && epoll_wait(mapped->epoll, &event, 1, 0) == 1) {
        mapped_watch_t *watch = event.data.ptr;
        watch->ready(mapped, watch);
        n++;
    }
    return n;
}
