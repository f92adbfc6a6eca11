/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/mac.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <string.h>

kvf_status_t kvf_mac(const uint8_t key[KVF_MAC_KEY_BYTES], const kvf_bytes_t *parts, size_t n_parts,
                     uint8_t mac[KVF_MAC_BYTES]) {
    kvf_status_t status = KVF_ERR_INTERNAL;
    EVP_MAC *hmac = EVP_MAC_fetch(NULL, OSSL_MAC_NAME_HMAC, NULL);
    EVP_MAC_CTX *ctx = hmac == NULL ? NULL : EVP_MAC_CTX_new(hmac);
    if (ctx == NULL) {
        goto out;
    }
    char digest[] = OSSL_DIGEST_NAME_SHA2_256;
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_end(),
    };
    if (EVP_MAC_init(ctx, key, KVF_MAC_KEY_BYTES, params) != 1) {
        goto out;
    }
    for (size_t i = 0; i < n_parts; i++) {
        if (EVP_MAC_update(ctx, parts[i].data, parts[i].bytes) != 1) {
            goto out;
        }
    }
    uint8_t result[KVF_MAC_BYTES];
    size_t bytes;
    if (EVP_MAC_final(ctx, result, &bytes, sizeof(result)) != 1 || bytes != sizeof(result)) {
        goto out;
    }
    memcpy(mac, result, sizeof(result));
    status = KVF_OK;
out:
    EVP_MAC_CTX_free(ctx);
    EVP_MAC_free(hmac);
    return status;
}

bool kvf_mac_equal(const uint8_t a[KVF_MAC_BYTES], const uint8_t b[KVF_MAC_BYTES]) {
    return CRYPTO_memcmp(a, b, KVF_MAC_BYTES) == 0;
}
