/* SPDX-License-Identifier: Apache-2.0 */
/* Virtual memory of a device, ours and an engine's, and its way into another process; with the
 * stand-in for the CUDA runtime. */
#include "tests/support/cuda/standin.h"
#include "transceiver/mem/cuda.h"

#include <criterion/criterion.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES UINT64_C(100000)
#define GRANULE (UINT64_C(2) << 20) /* the stand-in's */

static kvf_alloc_fail_t memory;
static kvf_cuda_t *cuda;
static kvf_detail_t detail;

static void start(void) {
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 0, &cuda, &detail), KVF_OK, "%s", detail.text);
}

static uint64_t left(void) {
    standin_cuda_counts_t counts = standin_cuda_counts();
    return counts.allocations + counts.imports + counts.pinned + counts.reservations;
}

static void stop(void) {
    kvf_cuda_close(cuda);
    cr_assert_eq(memory.live, 0);
    cr_assert_eq(left(), 0);
}

static kvf_mem_t make(uint64_t bytes) {
    const kvf_mem_kind_t *kind = kvf_cuda_vmm_kind(cuda);
    kvf_mem_t mem = {0};
    cr_assert_eq(kind->alloc(kind, bytes, &mem, &detail), KVF_OK, "%s", detail.text);
    return mem;
}

static uint8_t byte_at(uint64_t i) {
    return (uint8_t)(i * 7 + (i >> 8) * 31);
}

/* What was in the memory before is gone, also behind the pool's end. */
Test(mem_cuda_vmm, written_and_read) {
    static uint8_t bytes[GRANULE], back[GRANULE];
    start();
    kvf_mem_t mem = make(BYTES), whole;
    cr_assert_eq(mem.bytes, BYTES);
    cr_assert_eq(mem.kind->type, KVF_MEM_CUDA);
    cr_assert_str_eq(mem.kind->name, "cuda");
    cr_assert_eq((uintptr_t)mem.base % 4096, 0);
    cr_assert_eq(kvf_cuda_attach(cuda, mem.base, GRANULE, &whole, &detail), KVF_OK);
    cr_assert_eq(whole.kind->read(&whole, 0, back, GRANULE, &detail), KVF_OK);
    cr_assert_arr_eq(back, bytes, GRANULE);
    cr_assert_eq(kvf_cuda_attach(cuda, mem.base, GRANULE + 1, &whole, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "ends after 2097152 of 2097153"), "%s", detail.text);
    for (uint64_t i = 0; i < BYTES; i++) {
        bytes[i] = byte_at(i);
    }
    cr_assert_eq(mem.kind->write(&mem, 1000, bytes, 50000, NULL, &detail), KVF_OK);
    cr_assert_eq(mem.kind->read(&mem, 0, back, BYTES, &detail), KVF_OK);
    for (uint64_t i = 0; i < BYTES; i++) {
        cr_assert_eq(back[i], i >= 1000 && i < 51000 ? byte_at(i - 1000) : 0, "byte %lu", i);
    }
    mem.kind->free(&mem);
    cr_assert_null(mem.base);
    kvf_cuda_vmm_kind(cuda)->free(&mem); /* empty is allowed */
    stop();
}

Test(mem_cuda_vmm, sizes_that_are_none) {
    const uint64_t sizes[] = {0, (uint64_t)PTRDIFF_MAX, UINT64_MAX};
    start();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const kvf_mem_kind_t *kind = kvf_cuda_vmm_kind(cuda);
        kvf_mem_t mem = {0};
        cr_assert_eq(kind->alloc(kind, sizes[i], &mem, &detail), KVF_ERR_NO_MEMORY);
        cr_assert_null(mem.base);
    }
    stop();
}

Test(mem_cuda_vmm, the_other_device) {
    struct cudaPointerAttributes attributes;
    (void)setenv("KVF_STANDIN_CUDA_DEVICES", "2", 1);
    kvf_alloc_fail_init(&memory, 0);
    cr_assert_eq(kvf_cuda_open(&memory.table, 1, &cuda, &detail), KVF_OK);
    kvf_mem_t mem = make(BYTES);
    cr_assert_eq(cudaPointerGetAttributes(&attributes, mem.base), cudaSuccess);
    cr_assert_eq(attributes.device, 1);
    mem.kind->free(&mem);
    stop();
}

Test(mem_cuda_vmm, failures_are_told_and_leave_nothing) {
    static const struct {
        const char *function;
        kvf_status_t status;
    } cases[] = {{"cuMemGetAllocationGranularity", KVF_ERR_IO},
                 {"cuMemCreate", KVF_ERR_NO_MEMORY},
                 {"cuMemAddressReserve", KVF_ERR_NO_MEMORY},
                 {"cuMemMap", KVF_ERR_IO},
                 {"cuMemSetAccess", KVF_ERR_IO},
                 {"cudaMemset", KVF_ERR_IO},
                 {"cudaDeviceSynchronize", KVF_ERR_IO},
                 {"cuCtxPushCurrent", KVF_ERR_IO}};
    start();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const kvf_mem_kind_t *kind = kvf_cuda_vmm_kind(cuda);
        kvf_mem_t mem = {0};
        standin_cuda_fail(cases[i].function, 1);
        cr_expect_eq(kind->alloc(kind, BYTES, &mem, &detail), cases[i].status, "%s",
                     cases[i].function);
        cr_expect_not_null(strstr(detail.text, "100000 bytes of device 0, by vmm"), "%s",
                           detail.text);
        cr_expect_null(mem.base);
        cr_expect_eq(left(), 0, "%s", cases[i].function);
    }
    stop();
}

/* ---- another process ---- */

/* What goes from the owner to the other one: a handle, a descriptor beside it. */
static bool send_handle(int to, const uint8_t handle[KVF_CUDA_HANDLE_BYTES], int fd) {
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {(void *)(uintptr_t)handle, KVF_CUDA_HANDLE_BYTES};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    return sendmsg(to, &message, 0) == KVF_CUDA_HANDLE_BYTES;
}

static int receive_handle(int from, uint8_t handle[KVF_CUDA_HANDLE_BYTES]) {
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {handle, KVF_CUDA_HANDLE_BYTES};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    int fd = -1;
    cr_assert_eq(recvmsg(from, &message, MSG_CMSG_CLOEXEC), KVF_CUDA_HANDLE_BYTES);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    return fd;
}

static int ends[2];

/* Makes memory of two granules, offers it, and goes when it is told to. */
static int offer(void) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES], bytes[256], go;
    kvf_cuda_t *own;
    kvf_mem_t mem;
    int fd = -1;
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = byte_at(i);
    }
    if (kvf_cuda_open(kvf_alloc_default(), 0, &own, NULL) != KVF_OK ||
        kvf_cuda_vmm_kind(own)->alloc(kvf_cuda_vmm_kind(own), GRANULE + 5, &mem, NULL) != KVF_OK ||
        mem.kind->write(&mem, 100, bytes, sizeof(bytes), NULL, NULL) != KVF_OK ||
        kvf_cuda_export(&mem, handle, &fd, NULL) != KVF_OK || fd < 0 ||
        fcntl(fd, F_GETFD) != FD_CLOEXEC || !send_handle(ends[1], handle, fd)) {
        return 1;
    }
    (void)close(fd);
    return read(ends[1], &go, 1) == 1 ? 0 : 2;
}

/* Opens what a process of its own has made. @return The process. */
static pid_t start_with_offer(uint8_t handle[KVF_CUDA_HANDLE_BYTES], int *fd_p) {
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        (void)close(ends[0]); /* so that it ends with its parent */
        _exit(offer());
    }
    (void)close(ends[1]);
    *fd_p = receive_handle(ends[0], handle);
    start();
    return pid;
}

static void end_offer(pid_t pid) {
    int status;
    cr_assert_eq(write(ends[0], "x", 1), 1);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(status, 0);
    cr_assert_eq(close(ends[0]), 0);
}

static void check_bytes(const kvf_cuda_import_t *import) {
    uint8_t bytes[256];
    const kvf_mem_t there = {import->base, GRANULE, kvf_cuda_kind(cuda), NULL};
    cr_assert_eq(there.kind->read(&there, 100, bytes, sizeof(bytes), &detail), KVF_OK, "%s",
                 detail.text);
    for (size_t i = 0; i < sizeof(bytes); i++) {
        cr_assert_eq(bytes[i], byte_at(i));
    }
}

Test(mem_cuda_vmm, opened_by_another_process, .timeout = 20) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd;
    pid_t pid = start_with_offer(handle, &fd);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE + 5, &import, &detail), KVF_OK,
                 "%s", detail.text);
    cr_assert_eq(close(fd), 0);
    cr_assert_eq(import.base, import.mapping);
    cr_assert_eq(import.vmm_bytes, 2 * GRANULE);
    check_bytes(&import);
    end_offer(pid);
    check_bytes(&import); /* its memory lives as long as somebody maps it */
    kvf_cuda_close_import(cuda, &import);
    cr_assert_null(import.mapping);
    kvf_cuda_close_import(cuda, &import); /* harmless */
    stop();
}

/* As far as it was promised, and no byte more than the granule needs; never more than there is. */
Test(mem_cuda_vmm, sizes, .timeout = 20) {
    static const uint64_t sizes[] = {1, GRANULE, GRANULE + 1, 2 * GRANULE};
    static const uint64_t offsets[] = {GRANULE, 2 * GRANULE, UINT64_MAX, UINT64_MAX - GRANULE,
                                       UINT64_C(1) << 62};
    struct cudaPointerAttributes attributes;
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd;
    pid_t pid = start_with_offer(handle, &fd);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, sizes[i], &import, &detail), KVF_OK);
        cr_assert_eq(import.vmm_bytes, (i < 2 ? 1 : 2) * GRANULE);
        cr_assert_eq(
            cudaPointerGetAttributes(&attributes, (uint8_t *)import.mapping + import.vmm_bytes - 1),
            cudaSuccess);
        cr_assert_eq(attributes.type, cudaMemoryTypeDevice);
        cr_assert_eq(
            cudaPointerGetAttributes(&attributes, (uint8_t *)import.mapping + import.vmm_bytes),
            cudaSuccess);
        cr_assert_eq(attributes.type, cudaMemoryTypeUnregistered);
        kvf_cuda_close_import(cuda, &import);
    }
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, 2 * GRANULE + 1, &import, &detail),
                 KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "not the 4194305 bytes that it spoke of"), "%s",
                       detail.text);
    /* It says that its pool begins elsewhere: the eight bytes behind the device's 16. */
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        memcpy(handle + 16, &offsets[i], sizeof(offsets[i]));
        cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE + 1, &import, &detail),
                     KVF_ERR_INVALID, "%lx", offsets[i]);
        cr_assert_eq(left(), 0);
    }
    cr_assert_null(import.mapping);
    end_offer(pid);
    cr_assert_eq(close(fd), 0);
    stop();
}

/* Nobody writes through it: neither the runtime's calls nor what was queued. */
Test(mem_cuda_vmm, read_only, .timeout = 20) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES], bytes[64] = {0};
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd;
    pid_t pid = start_with_offer(handle, &fd);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE, &import, &detail), KVF_OK);
    cr_assert_eq(cudaMemset(import.base, 0, 1000), cudaErrorInvalidValue);
    check_bytes(&import);
    kvf_mem_t there = {import.base, GRANULE, kvf_cuda_kind(cuda), NULL};
    cr_assert_eq(there.kind->write(&there, 100, bytes, sizeof(bytes), NULL, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "illegal memory access"), "%s", detail.text);
    standin_cuda_reset();
    check_bytes(&import);
    kvf_cuda_close_import(cuda, &import);
    end_offer(pid);
    cr_assert_eq(close(fd), 0);
    stop();
}

Test(mem_cuda_vmm, imports_that_fail_leave_nothing, .timeout = 20) {
    static const struct {
        const char *function;
        kvf_status_t status;
    } cases[] = {{"cuMemImportFromShareableHandle", KVF_ERR_IO},
                 {"cuMemGetAllocationPropertiesFromHandle", KVF_ERR_IO},
                 {"cuMemGetAllocationGranularity", KVF_ERR_IO},
                 {"cuMemAddressReserve", KVF_ERR_NO_MEMORY},
                 {"cuMemMap", KVF_ERR_IO},
                 {"cuMemSetAccess", KVF_ERR_IO},
                 {"cudaGetDeviceCount", KVF_ERR_IO},
                 {"cuCtxPushCurrent", KVF_ERR_IO}};
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd;
    pid_t pid = start_with_offer(handle, &fd);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        standin_cuda_fail(cases[i].function, 1);
        cr_expect_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE, &import, &detail),
                     cases[i].status, "%s: %s", cases[i].function, detail.text);
        cr_expect_null(import.mapping);
        cr_expect_eq(left(), 0, "%s", cases[i].function);
    }
    end_offer(pid);
    cr_assert_eq(close(fd), 0);
    stop();
}

/* Descriptors of anything else, and handles without theirs. */
Test(mem_cuda_vmm, what_is_no_allocation, .timeout = 20) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    int fd, others[5];
    pid_t pid = start_with_offer(handle, &fd);
    cr_assert_eq(pipe(others), 0);
    others[2] = open("/dev/zero", O_RDWR | O_CLOEXEC);
    others[3] = dup(ends[0]);
    others[4] = dup(others[0]);
    cr_assert_eq(close(others[4]), 0); /* just a number */
    for (size_t i = 0; i < 5; i++) {
        cr_assert_eq(kvf_cuda_open_import(cuda, handle, others[i], GRANULE, &import, &detail),
                     KVF_ERR_IO, "%zu", i);
        cr_assert_not_null(strstr(detail.text, "opening the descriptor"), "%s", detail.text);
    }
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, -1, GRANULE, &import, &detail), KVF_ERR_IO);
    handle[0] ^= 1; /* a device that is not here */
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE, &import, &detail),
                 KVF_ERR_UNSUPPORTED);
    cr_assert_null(import.mapping);
    end_offer(pid);
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(close(others[i]), 0);
    }
    cr_assert_eq(close(fd), 0);
    stop();
}

Test(mem_cuda_vmm, exports_that_fail_leave_nothing) {
    static const char *const calls[] = {"cuMemGetAllocationPropertiesFromHandle",
                                        "cuMemExportToShareableHandle", "cuCtxPushCurrent"};
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    start();
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        kvf_mem_t mem = make(BYTES);
        int fd = -2;
        standin_cuda_fail(calls[i], 1);
        cr_expect_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_ERR_IO, "%s", calls[i]);
        cr_expect_eq(fd, -2);
        mem.kind->free(&mem);
        cr_expect_eq(left(), 0, "%s", calls[i]);
    }
    stop();
}

/* ---- memory of an engine ---- */

static void *symbol(const char *name) {
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    cr_assert_eq(
        cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
        cudaSuccess);
    cr_assert_eq(found, cudaDriverEntryPointSuccess, "%s", name);
    return function;
}

#define CALL(name, ...)                                                                            \
    do {                                                                                           \
        __typeof__(&name) call;                                                                    \
        void *at = symbol(#name);                                                                  \
        memcpy(&call, &at, sizeof(call));                                                          \
        cr_assert_eq(call(__VA_ARGS__), CUDA_SUCCESS);                                             \
    } while (0)

/* Reserve three granules, and map allocations of one and two of them. */
static CUdeviceptr engine_makes(CUmemAllocationHandleType type) {
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = type,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr base;
    CALL(cuMemAddressReserve, &base, 3 * GRANULE, 0, 0, 0);
    for (uint64_t i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle part;
        CALL(cuMemCreate, &part, (1 + i) * GRANULE, &prop, 0);
        CALL(cuMemMap, base + i * GRANULE, (1 + i) * GRANULE, 0, part, 0);
        CALL(cuMemSetAccess, base + i * GRANULE, (1 + i) * GRANULE, &access, 1);
        CALL(cuMemRelease, part);
    }
    return base;
}

static void engine_frees(CUdeviceptr base) {
    CALL(cuMemUnmap, base, GRANULE);
    CALL(cuMemUnmap, base + GRANULE, 2 * GRANULE);
    CALL(cuMemAddressFree, base, 3 * GRANULE);
}

/* An allocation, and not a device's. */
Test(mem_cuda_vmm, memory_of_the_cpu) {
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA}};
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    CUmemGenericAllocationHandle theirs;
    int fd = -1;
    start();
    kvf_mem_t mem = make(BYTES);
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_OK);
    cr_assert_eq(close(fd), 0);
    CALL(cuMemCreate, &theirs, GRANULE, &prop, 0);
    CALL(cuMemExportToShareableHandle, &fd, theirs, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    CALL(cuMemRelease, theirs);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, BYTES, &import, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "not that of a device"), "%s", detail.text);
    cr_assert_null(import.mapping);
    cr_assert_eq(close(fd), 0);
    mem.kind->free(&mem);
    stop();
}

Test(mem_cuda_vmm, attached) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_cuda_import_t import = {NULL, NULL, 0};
    uint64_t offset;
    kvf_mem_t mem;
    int fd = -1;
    start();
    CUdeviceptr base = engine_makes(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    uint8_t *at = (uint8_t *)(uintptr_t)base;
    /* A part of the second allocation. */
    cr_assert_eq(kvf_cuda_attach(cuda, at + GRANULE + 4096, GRANULE, &mem, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_OK, "%s", detail.text);
    cr_assert_geq(fd, 0);
    memcpy(&offset, handle + 16, sizeof(offset));
    cr_assert_eq(offset, 4096);
    cr_assert_eq(mem.kind->write(&mem, 0, "page", 4, NULL, &detail), KVF_OK);
    cr_assert_eq(kvf_cuda_open_import(cuda, handle, fd, GRANULE, &import, &detail), KVF_OK, "%s",
                 detail.text);
    cr_assert_eq((uint8_t *)import.base - (uint8_t *)import.mapping, 4096);
    char back[4];
    const kvf_mem_t there = {import.base, GRANULE, kvf_cuda_kind(cuda), NULL};
    cr_assert_eq(there.kind->read(&there, 0, back, 4, &detail), KVF_OK);
    cr_assert_arr_eq(back, "page", 4);
    kvf_cuda_close_import(cuda, &import);
    cr_assert_eq(close(fd), 0);
    /* Of both, it is a pool, but there is no one handle for it. */
    cr_assert_eq(kvf_cuda_attach(cuda, at, 3 * GRANULE, &mem, &detail), KVF_OK, "%s", detail.text);
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "several allocations"), "%s", detail.text);
    cr_assert_eq(kvf_cuda_attach(cuda, at + 1, 3 * GRANULE, &mem, &detail), KVF_ERR_INVALID);
    engine_frees(base);
    stop();
}

Test(mem_cuda_vmm, attached_and_not_to_be_shared) {
    uint8_t handle[KVF_CUDA_HANDLE_BYTES];
    kvf_mem_t mem;
    int fd = -2;
    start();
    CUdeviceptr base = engine_makes(CU_MEM_HANDLE_TYPE_NONE);
    cr_assert_eq(kvf_cuda_attach(cuda, (void *)(uintptr_t)base, GRANULE, &mem, &detail), KVF_OK);
    cr_assert_eq(kvf_cuda_export(&mem, handle, &fd, &detail), KVF_ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(detail.text, "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"), "%s",
                       detail.text);
    cr_assert_eq(fd, -2);
    engine_frees(base);
    stop();
}
