/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's NCCL: communicators of two ranks over a socket, in one process or two; messages
 * are operations of the stand-in's streams. It is linked in place of
 * transceiver/mover/nccl_library.c.
 *
 * Strict, because the real one is, or hangs: communicators work in the background (blocking = 0),
 * and whoever calls one that is at something is ended; both ends must name the same length; a
 * message whose peer has gone waits until the communicator is aborted; an abort waits for messages
 * of all communicators of its device that are not aborted themselves. */
#define _GNU_SOURCE /* accept4 with strict C */
#include "tests/support/cuda/standin_impl.h"
#include "transceiver/mover/nccl_library.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define STEP_BYTES 65536 /* that a message moves at a time */

/* What each end says first. */
typedef struct greeting {
    uint64_t token;
    char device[16];
} greeting_t;

typedef struct message {
    struct ncclComm *comm;
    uint64_t turn; /* among those of its communicator */
    bool sends;
    cudaStream_t stream;
    uint64_t at, bytes, moved;
    uint64_t length, length_moved; /* goes in front */
} message_t;

struct ncclComm {
    uint32_t n_refs; /* messages, and the application */
    int listen_fd, fd;
    bool joined, aborted;
    greeting_t ours, theirs;
    uint64_t told, heard;
    ncclResult_t error;
    message_t *pending; /* given to us, and not queued yet */
    uint64_t polls;     /* until then */
    uint64_t n_issued, n_moved;
    int device;
};

#define MAX_DEVICES 8
static uint64_t under_way[MAX_DEVICES]; /* messages, of communicators that are not aborted */

static struct {
    uint64_t token;
    int fd;
} waiting[64]; /* ids without a communicator yet */

static void misuse(const char *what) {
    (void)fprintf(stderr, "stand-in NCCL: %s\n", what);
    abort();
}

static socklen_t address_of(uint64_t token, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1,
                     "kvf-standin-nccl-%016lx", token);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static ncclResult_t get_version(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

static ncclResult_t get_unique_id(ncclUniqueId *id) {
    struct sockaddr_un address;
    uint64_t token;
    if (standin_enter("ncclGetUniqueId", cudaErrorUnknown) != cudaSuccess) {
        return ncclSystemError;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (getrandom(&token, sizeof(token), 0) != sizeof(token) || fd < 0 ||
        bind(fd, (struct sockaddr *)&address, address_of(token, &address)) != 0 ||
        listen(fd, 1) != 0) {
        return ncclSystemError;
    }
    memset(id, 0, sizeof(*id));
    memcpy(id->internal, &token, sizeof(token));
    (void)pthread_mutex_lock(&standin.lock);
    for (size_t i = 0; i < sizeof(waiting) / sizeof(waiting[0]); i++) {
        if (waiting[i].token == 0) {
            waiting[i].token = token;
            waiting[i].fd = fd;
            break;
        }
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return ncclSuccess;
}

static void unref(struct ncclComm *comm) {
    if (--comm->n_refs == 0) {
        standin.counts.communicators--;
        free(comm);
    }
}

static int take_listener(uint64_t token) {
    for (size_t i = 0; i < sizeof(waiting) / sizeof(waiting[0]); i++) {
        if (waiting[i].token == token) {
            waiting[i].token = 0;
            return waiting[i].fd;
        }
    }
    return -1;
}

static ncclResult_t comm_init(ncclComm_t *comm_p, int n, ncclUniqueId id, int rank,
                              ncclConfig_t *config) {
    struct sockaddr_un address;
    struct cudaDeviceProp prop;
    int device;
    if (n != 2 || config->blocking != 0) {
        misuse("a communicator that is not of two, or blocks");
    }
    if (standin_enter("ncclCommInitRankConfig", cudaErrorUnknown) != cudaSuccess ||
        cudaGetDevice(&device) != cudaSuccess ||
        cudaGetDeviceProperties(&prop, device) != cudaSuccess) {
        return ncclUnhandledCudaError;
    }
    struct ncclComm *comm = calloc(1, sizeof(*comm));
    if (comm == NULL) {
        abort();
    }
    comm->n_refs = 1;
    comm->device = device;
    comm->fd = comm->listen_fd = -1;
    memcpy(&comm->ours.token, id.internal, sizeof(comm->ours.token));
    memcpy(comm->ours.device, prop.uuid.bytes, sizeof(comm->ours.device));
    (void)pthread_mutex_lock(&standin.lock);
    standin.counts.communicators++;
    if (rank == 0) {
        comm->listen_fd = take_listener(comm->ours.token);
    } else {
        socklen_t length = address_of(comm->ours.token, &address);
        comm->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (connect(comm->fd, (struct sockaddr *)&address, length) != 0) {
            comm->error = ncclSystemError;
        }
    }
    (void)pthread_mutex_unlock(&standin.lock);
    *comm_p = comm;
    return ncclInProgress;
}

/* Move bytes over the socket. @return false: the peer has gone. */
static bool exchange(struct ncclComm *comm, bool send_, void *at, uint64_t bytes, uint64_t *moved) {
    if (*moved == bytes) {
        return true;
    }
    ssize_t n =
        send_ ? send(comm->fd, (char *)at + *moved, bytes - *moved, MSG_NOSIGNAL | MSG_DONTWAIT)
              : recv(comm->fd, (char *)at + *moved, bytes - *moved, MSG_DONTWAIT);
    if (n > 0) {
        *moved += (uint64_t)n;
        return true;
    }
    return n < 0 && (errno == EAGAIN || errno == EINTR);
}

/* With the lock held. */
static void join(struct ncclComm *comm) {
    if (comm->fd < 0 && comm->listen_fd >= 0) {
        comm->fd = accept4(comm->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (comm->fd < 0) {
            return;
        }
        (void)close(comm->listen_fd);
        comm->listen_fd = -1;
    }
    if (!exchange(comm, true, &comm->ours, sizeof(comm->ours), &comm->told) ||
        !exchange(comm, false, &comm->theirs, sizeof(comm->theirs), &comm->heard)) {
        comm->error = ncclRemoteError;
    } else if (comm->heard == sizeof(comm->theirs)) {
        comm->joined = true;
        if (memcmp(comm->ours.device, comm->theirs.device, sizeof(comm->ours.device)) == 0) {
            comm->error = ncclInvalidUsage; /* "Duplicate GPU detected" */
        }
    }
}

/* One operation of a stream. @return true: it is over. With the lock held. */
static bool step(void *args) {
    message_t *message = args;
    struct ncclComm *comm = message->comm;
    if (comm->aborted || standin.dead != cudaSuccess) {
        unref(comm);
        return true;
    }
    if (message->turn != comm->n_moved || comm->error != ncclSuccess) {
        return false;
    }
    uint8_t *at = standin_reach(message->at, message->bytes);
    if (at == NULL) {
        misuse("a message that is not of a device's memory");
    }
    uint64_t end = message->moved + STEP_BYTES;
    end = end < message->bytes ? end : message->bytes;
    if (message->length_moved < sizeof(message->length)) {
        if (!exchange(comm, message->sends, &message->length, sizeof(message->length),
                      &message->length_moved)) {
            comm->error = ncclRemoteError;
        }
        if (!message->sends && message->length_moved == sizeof(message->length) &&
            message->length != message->bytes) {
            misuse("the ends of a message have different lengths");
        }
    } else if (!exchange(comm, message->sends, at, end, &message->moved)) {
        comm->error = ncclRemoteError;
    }
    if (message->moved < message->bytes) {
        return false;
    }
    comm->n_moved++;
    under_way[comm->device]--;
    unref(comm);
    return true;
}

static ncclResult_t give(bool sends, void *buf, size_t n, ncclDataType_t type, ncclComm_t comm,
                         cudaStream_t stream) {
    if (standin_enter(sends ? "ncclSend" : "ncclRecv", cudaErrorUnknown) != cudaSuccess) {
        return ncclSystemError;
    }
    if (type != ncclUint8 || n == 0) {
        misuse("a message of other things than bytes");
    }
    (void)pthread_mutex_lock(&standin.lock);
    if (!comm->joined || comm->pending != NULL || comm->aborted) {
        misuse("a call of a communicator that is at something else");
    }
    message_t *message = malloc(sizeof(*message));
    if (message == NULL) {
        abort();
    }
    *message = (message_t){.comm = comm,
                           .turn = comm->n_issued++,
                           .sends = sends,
                           .stream = stream,
                           .at = (uintptr_t)buf,
                           .bytes = n,
                           .length = n};
    comm->n_refs++;
    under_way[comm->device]++;
    comm->pending = message;
    comm->polls = standin_roll() % 4;
    (void)pthread_mutex_unlock(&standin.lock);
    return ncclInProgress;
}

static ncclResult_t send_message(const void *buf, size_t n, ncclDataType_t type, int peer,
                                 ncclComm_t comm, cudaStream_t stream) {
    if (peer != 0) {
        misuse("a message to itself");
    }
    return give(true, (void *)(uintptr_t)buf, n, type, comm, stream);
}

static ncclResult_t receive_message(void *buf, size_t n, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
    if (peer != 1) {
        misuse("a message from itself");
    }
    return give(false, buf, n, type, comm, stream);
}

static ncclResult_t get_async_error(ncclComm_t comm, ncclResult_t *error) {
    (void)pthread_mutex_lock(&standin.lock);
    if (!comm->joined && comm->error == ncclSuccess) {
        join(comm);
    }
    if (standin_hits("nccl")) {
        comm->error = ncclRemoteError;
    }
    *error = comm->error;
    if (comm->error == ncclSuccess && (!comm->joined || comm->pending != NULL)) {
        *error = ncclInProgress;
        if (comm->pending != NULL && comm->polls-- == 0) {
            standin_queue(comm->pending->stream, step, comm->pending);
            comm->pending = NULL;
            *error = ncclSuccess;
        }
    }
    (void)pthread_mutex_unlock(&standin.lock);
    return ncclSuccess;
}

static ncclResult_t comm_abort(ncclComm_t comm) {
    const int device = comm->device;
    (void)pthread_mutex_lock(&standin.lock);
    comm->aborted = true;
    under_way[device] -= comm->n_issued - comm->n_moved;
    (void)pthread_cond_broadcast(&standin.cond);
    if (comm->fd >= 0) {
        (void)close(comm->fd);
    }
    if (comm->listen_fd >= 0) {
        (void)close(comm->listen_fd);
    }
    if (comm->pending != NULL) {
        free(comm->pending);
        comm->pending = NULL;
        comm->n_refs--;
    }
    while (under_way[device] > 0 && standin.dead == cudaSuccess) {
        (void)pthread_cond_wait(&standin.cond, &standin.lock);
    }
    unref(comm);
    (void)pthread_mutex_unlock(&standin.lock);
    return ncclSuccess;
}

static const char *get_error_string(ncclResult_t result) {
    return result == ncclRemoteError ? "remote process exited or there was a network error"
                                     : "an error of the stand-in";
}

static const char *get_last_error(ncclComm_t comm) {
    (void)comm;
    return "";
}

kvf_status_t kvf_nccl_load(const kvf_nccl_library_t **library_p, kvf_detail_t *detail) {
    static const kvf_nccl_library_t library = {get_version,     get_unique_id,    comm_init,
                                               get_async_error, comm_abort,       send_message,
                                               receive_message, get_error_string, get_last_error};
    if (getenv("KVF_STANDIN_NCCL_NONE") != NULL) {
        return kvf_fail(detail, KVF_ERR_UNSUPPORTED, "no NCCL: the test wants none");
    }
    *library_p = &library;
    return KVF_OK;
}
