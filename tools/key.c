/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/key.h"

#include "kvmgr/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int fd, const uint8_t *bytes, size_t n) {
    while (n > 0) {
        ssize_t written = write(fd, bytes, n);
        if (written < 0 && errno != EINTR) {
            return false;
        }
        bytes += written > 0 ? written : 0;
        n -= written > 0 ? (size_t)written : 0;
    }
    return true;
}

kvf_status_t kvf_key_create(const char *path, kvf_detail_t *detail) {
    uint8_t key[KVF_KEY_BYTES];
    const kvf_rand_t *source = kvf_rand_default();
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 && errno == EEXIST) {
        return kvf_fail(detail, KVF_ERR_IO,
                        "%.300s exists and is left as it is; choose another name or remove it",
                        path);
    }
    if (fd < 0) {
        return kvf_fail(detail, KVF_ERR_IO, "cannot create %.300s: %s", path, strerror(errno));
    }
    source->fill(source->ctx, key, sizeof(key));
    bool ok = write_all(fd, key, sizeof(key)) && fsync(fd) == 0;
    int error = errno;
    explicit_bzero(key, sizeof(key));
    if (close(fd) != 0 && ok) {
        ok = false;
        error = errno;
    }
    if (!ok) {
        (void)unlink(path);
        return kvf_fail(detail, KVF_ERR_IO, "cannot write %.300s: %s", path, strerror(error));
    }
    return KVF_OK;
}

kvf_status_t kvf_key_read(const char *path, uint8_t key[KVF_KEY_BYTES], bool *loose_p,
                          kvf_detail_t *detail) {
    uint8_t bytes[KVF_KEY_BYTES + 1]; /* one more, to see that there is no more */
    struct stat info;
    size_t n = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "control.key_file: cannot read %.250s: %s; kvferry keygen makes one", path,
                        strerror(errno));
    }
    ssize_t got = fstat(fd, &info) == 0 ? 1 : -1;
    while (got > 0 && n < sizeof(bytes)) {
        got = read(fd, bytes + n, sizeof(bytes) - n);
        n += got > 0 ? (size_t)got : 0;
    }
    int error = errno;
    (void)close(fd);
    if (got < 0) {
        return kvf_fail(detail, KVF_ERR_INVALID, "control.key_file: cannot read %.250s: %s", path,
                        strerror(error));
    }
    if (n != KVF_KEY_BYTES) {
        explicit_bzero(bytes, sizeof(bytes));
        return kvf_fail(detail, KVF_ERR_INVALID,
                        "control.key_file: %.250s is not %d bytes long; kvferry keygen makes a key",
                        path, KVF_KEY_BYTES);
    }
    memcpy(key, bytes, KVF_KEY_BYTES);
    explicit_bzero(bytes, sizeof(bytes));
    *loose_p = (info.st_mode & (S_IRWXG | S_IRWXO)) != 0;
    return KVF_OK;
}
