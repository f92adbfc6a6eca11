/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replay/client.h"

#include <curl/curl.h>
#include <stdbool.h>
#include <string.h>

#define CONNECT_TIMEOUT_MS 5000

/** One call that is under way. */
typedef struct call {
    kvf_client_t *client;
    CURL *easy;
    kvf_answer_cb cb;
    void *ctx;
    char *body;
    size_t bytes;
    size_t room;
    struct call *prev, *next;
} call_t;

struct kvf_client {
    const kvf_alloc_t *alloc;
    CURLM *multi;
    struct curl_slist *headers; /* of every POST */
    call_t *calls;
    bool global; /* curl_global_init() was done */
};

static void call_destroy(call_t *call) {
    kvf_client_t *client = call->client;
    if (call->prev != NULL) {
        call->prev->next = call->next;
    } else if (client->calls == call) {
        client->calls = call->next;
    }
    if (call->next != NULL) {
        call->next->prev = call->prev;
    }
    if (call->easy != NULL) {
        (void)curl_multi_remove_handle(client->multi, call->easy);
        curl_easy_cleanup(call->easy);
    }
    kvf_free(client->alloc, call->body);
    kvf_free(client->alloc, call);
}

/* curl's write callback; anything but n ends the call with CURLE_WRITE_ERROR. */
static size_t take_bytes(char *data, size_t size, size_t n, void *ctx) {
    call_t *call = ctx;
    (void)size; /* always 1 */
    if (n > KVF_CLIENT_MAX_ANSWER_BYTES - call->bytes) {
        return 0;
    }
    if (call->bytes + n > call->room) {
        size_t room = call->bytes + n < 1024 ? 1024 : 2 * (call->bytes + n);
        char *grown = kvf_realloc(call->client->alloc, call->body, room, 1);
        if (grown == NULL) {
            return 0;
        }
        call->body = grown;
        call->room = room;
    }
    memcpy(call->body + call->bytes, data, n);
    call->bytes += n;
    return n;
}

kvf_status_t kvf_client_create(const kvf_alloc_t *alloc, uint32_t max_calls,
                               kvf_client_t **client_p) {
    kvf_client_t *client = kvf_calloc(alloc, 1, sizeof(*client));
    if (client == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    client->alloc = alloc;
    client->global = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
    client->multi = client->global ? curl_multi_init() : NULL;
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    /* Without this, curl waits up to a second for "100 Continue" before it sends a longer body. */
    struct curl_slist *more = headers == NULL ? NULL : curl_slist_append(headers, "Expect:");
    client->headers = headers;
    if (client->multi == NULL || more == NULL ||
        curl_multi_setopt(client->multi, CURLMOPT_MAXCONNECTS, (long)max_calls) != CURLM_OK) {
        kvf_client_destroy(client);
        return KVF_ERR_NO_MEMORY;
    }
    *client_p = client;
    return KVF_OK;
}

void kvf_client_destroy(kvf_client_t *client) {
    if (client == NULL) {
        return;
    }
    while (client->calls != NULL) {
        call_destroy(client->calls);
    }
    curl_slist_free_all(client->headers);
    if (client->multi != NULL) {
        (void)curl_multi_cleanup(client->multi);
    }
    if (client->global) {
        curl_global_cleanup();
    }
    kvf_free(client->alloc, client);
}

/* Everything about a call that can be set before it starts. */
static bool call_set_up(call_t *call, const char *url, const char *body, uint64_t timeout_us) {
    CURL *easy = call->easy;
    bool ok =
        curl_easy_setopt(easy, CURLOPT_URL, url) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_PROXY, "") == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_TIMEOUT_MS) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)((timeout_us + 999) / 1000)) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_bytes) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, call) == CURLE_OK &&
        curl_easy_setopt(easy, CURLOPT_PRIVATE, call) == CURLE_OK;
    if (body != NULL) {
        ok = ok && curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call->client->headers) == CURLE_OK &&
             curl_easy_setopt(easy, CURLOPT_COPYPOSTFIELDS, body) == CURLE_OK;
    }
    return ok;
}

kvf_status_t kvf_client_call(kvf_client_t *client, const char *url, const char *body,
                             uint64_t timeout_us, kvf_answer_cb cb, void *ctx) {
    call_t *call = kvf_calloc(client->alloc, 1, sizeof(*call));
    if (call == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    *call = (call_t){.client = client, .cb = cb, .ctx = ctx, .next = client->calls};
    if (client->calls != NULL) {
        client->calls->prev = call;
    }
    client->calls = call;
    call->easy = curl_easy_init();
    if (call->easy == NULL || !call_set_up(call, url, body, timeout_us) ||
        curl_multi_add_handle(client->multi, call->easy) != CURLM_OK) {
        call_destroy(call);
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

/* Tell how a call ended, and forget it. */
static void finish(call_t *call, CURLcode result) {
    kvf_answer_t answer = {.body = call->body, .bytes = call->bytes};
    curl_off_t retry_after_s = 0;
    if (result == CURLE_OK) {
        (void)curl_easy_getinfo(call->easy, CURLINFO_RESPONSE_CODE, &answer.http_status);
        (void)curl_easy_getinfo(call->easy, CURLINFO_RETRY_AFTER, &retry_after_s);
        answer.retry_after_us = (uint64_t)retry_after_s * 1000000;
    } else {
        answer.failure = result == CURLE_OPERATION_TIMEDOUT ? KVF_ERR_DEADLINE : KVF_ERR_IO;
        answer.why = curl_easy_strerror(result);
    }
    call->cb(call->ctx, &answer);
    call_destroy(call);
}

void kvf_client_progress(kvf_client_t *client, uint64_t wait_us) {
    int running;
    int queued;
    bool finished = false;
    (void)curl_multi_perform(client->multi, &running);
    for (CURLMsg *message; (message = curl_multi_info_read(client->multi, &queued)) != NULL;) {
        if (message->msg == CURLMSG_DONE) {
            char *call = NULL;
            CURLcode result = message->data.result;
            (void)curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &call);
            finish((call_t *)(void *)call, result);
            finished = true;
        }
    }
    /* A callback may have made room for the caller's next call: no sleep before it has had a look.
     */
    if (!finished) {
        (void)curl_multi_poll(client->multi, NULL, 0, (int)((wait_us + 999) / 1000), NULL);
    }
}
