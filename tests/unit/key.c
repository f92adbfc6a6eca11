/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/key.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/kvf-key-XXXXXX";
static char path[64];
static kvf_detail_t detail;
static uint8_t key[KVF_KEY_BYTES];
static bool loose;

static void setup(void) {
    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(path, sizeof(path), "%s/k", folder);
}

static void teardown(void) {
    (void)unlink(path);
    (void)rmdir(folder);
}

TestSuite(key, .init = setup, .fini = teardown);

static void write_file(size_t n) {
    FILE *file = fopen(path, "we");
    cr_assert_not_null(file);
    for (size_t i = 0; i < n; i++) {
        cr_assert_neq(fputc((int)i, file), EOF);
    }
    (void)fclose(file);
}

Test(key, a_new_key_is_random_private_and_read_back) {
    uint8_t raw[64], first[KVF_KEY_BYTES];
    struct stat info;
    cr_assert_eq(kvf_key_create(path, &detail), KVF_OK);
    cr_assert_eq(stat(path, &info), 0);
    cr_assert_eq(info.st_mode & 07777, 0600);
    FILE *file = fopen(path, "re");
    cr_assert_not_null(file);
    cr_assert_eq(fread(raw, 1, sizeof(raw), file), 32);
    (void)fclose(file);
    cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_OK);
    cr_assert_eq(memcmp(key, raw, 32), 0);
    cr_assert_not(loose);
    memcpy(first, key, sizeof(key));
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(kvf_key_create(path, &detail), KVF_OK);
    cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_OK);
    cr_assert_neq(memcmp(key, first, 32), 0);
}

Test(key, an_existing_file_is_left_as_it_is) {
    write_file(5);
    cr_assert_eq(kvf_key_create(path, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, path));
    cr_assert_not_null(strstr(detail.text, "exists"));
    struct stat info;
    cr_assert_eq(stat(path, &info), 0);
    cr_assert_eq(info.st_size, 5);
}

Test(key, a_link_is_not_followed) {
    cr_assert_eq(symlink("/tmp/kvf-key-nowhere", path), 0);
    cr_assert_eq(kvf_key_create(path, &detail), KVF_ERR_IO);
    cr_assert_neq(access("/tmp/kvf-key-nowhere", F_OK), 0);
}

Test(key, other_lengths_are_refused) {
    static const size_t lengths[] = {0, 1, 31, 33, 1000};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        write_file(lengths[i]);
        memset(key, 0x55, sizeof(key));
        cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_ERR_INVALID);
        cr_assert_not_null(strstr(detail.text, "not 32 bytes"));
        cr_assert_eq(key[0], 0x55);
    }
}

Test(key, loose_permissions_are_told) {
    static const mode_t modes[] = {0640, 0604, 0620, 0602, 0660};
    write_file(32);
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        cr_assert_eq(chmod(path, modes[i]), 0);
        cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_OK);
        cr_assert(loose, "%o", (unsigned)modes[i]);
    }
    cr_assert_eq(chmod(path, 0400), 0);
    cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_OK);
    cr_assert_not(loose);
    cr_assert_eq(key[31], 31);
}

Test(key, what_cannot_be_read_says_why) {
    cr_assert_eq(kvf_key_read(path, key, &loose, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "No such file"));
    cr_assert_not_null(strstr(detail.text, "keygen"));
    cr_assert_eq(kvf_key_read(folder, key, &loose, &detail), KVF_ERR_INVALID);
    cr_assert_not_null(strstr(detail.text, "directory"));
    char below[80];
    (void)snprintf(below, sizeof(below), "%s/none/k", folder);
    cr_assert_eq(kvf_key_create(below, &detail), KVF_ERR_IO);
    cr_assert_not_null(strstr(detail.text, "No such file"));
}
