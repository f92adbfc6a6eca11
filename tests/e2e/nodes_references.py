# SPDX-License-Identifier: Apache-2.0
"""The bad references of vLLM 52234, as a client of the HTTP interface can make them: each is an error, none is a 200."""

import base64
import hashlib
import hmac
import os
import struct
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from nodes import ClusterTest, wait_for  # noqa: E402

PROMPT = 700


def decode_text(ticket):
    return base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))


def encode_text(raw):
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class BadReferenceTest(ClusterTest):
    def setUp(self):
        super().setUp()
        self.prefill, self.decode = self.pair(prefix_cache="false", pool__bytes="64MiB")

    def ticket(self, request_id, prompt_len=PROMPT):
        reply = self.prefill.prefill(request_id, prompt_len)
        self.assertEqual(reply.status, 200, reply)
        return reply.json["kv_transfer_params"]

    def sign(self, body):
        """A ticket under the cluster's key (docs/protocol.md, "Identity"), as nobody without it can make one."""
        with open(os.path.join(self.folder, "cluster.key"), "rb") as file:
            mac = hmac.new(file.read(), b"kvferry ticket\0" + body, hashlib.sha256)
        return encode_text(body + mac.digest())

    def refused(self, reply, *errors):
        """One of these errors, and nothing is left of it on the decode node."""
        self.assertIn(reply.error, errors, reply)
        self.assertNotIn("verified", reply.json)
        self.assert_quiet(self.decode)

    def fine(self):
        self.run_one(self.prefill, self.decode, "fine")
        self.finish()

    def test_unknown_id(self):
        params = self.ticket("known")
        body = decode_text(params["ticket"])[:-32]
        self.assertEqual(self.sign(body), params["ticket"])  # or what follows would show nothing
        for number in (0, 1000000, 2 ** 64 - 1):
            other = body[:1] + struct.pack("<Q", number) + body[9:]
            self.refused(self.decode.decode("known", dict(params, ticket=self.sign(other))), (404, "unknown"))
        stranger = body[:9] + bytes(16) + body[25:]  # another process at this address
        self.refused(self.decode.decode("known", dict(params, ticket=self.sign(stranger))),
                     (502, "peer_lost"), (403, "not_allowed"))
        self.assertEqual(self.decode.decode("known", params).status, 200)
        self.fine()

    def test_pages_out_of_range(self):
        """A client names no pages; what it can change is the length of the prompt, here and in the ticket."""
        params = self.ticket("ranges")
        body = decode_text(params["ticket"])[:-32]
        for prompt_len in (1, PROMPT - 1, PROMPT + 1, 2 * PROMPT, 10 ** 6, 2 ** 40, 2 ** 63):
            reply = self.decode.decode("ranges", dict(params, prompt_len=prompt_len))
            self.refused(reply, (400, "invalid"), (413, "too_large"))
            longer = body[:25] + struct.pack("<Q", prompt_len) + body[33:]
            forged = encode_text(longer + decode_text(params["ticket"])[-32:])
            reply = self.decode.decode("ranges", dict(params, prompt_len=prompt_len, ticket=forged))
            self.refused(reply, (403, "forged"), (400, "invalid"), (413, "too_large"))
            # Even under the right key: the prefill node compares it with what it has.
            reply = self.decode.decode("ranges", dict(params, prompt_len=prompt_len, ticket=self.sign(longer)))
            self.refused(reply, (400, "invalid"), (403, "forged"), (413, "too_large"))
        self.assertEqual(self.decode.decode("ranges", params).status, 200)
        self.fine()

    def test_consumed_reference(self):
        params = self.ticket("once")
        self.assertEqual(self.decode.decode("once", params).status, 200)
        for _ in range(3):
            self.refused(self.decode.decode("once", params), (410, "used"))
        self.fine()

    def test_reference_after_its_pages_were_reused(self):
        for request_id, end, error in (("given-up", self.prefill.cancel, (499, "cancelled")),
                                       ("fetched", self.fetch, (410, "used"))):
            params = self.ticket(request_id)
            end(request_id, *([params] if end == self.fetch else []))
            self.assert_quiet(self.prefill)
            # The pages of one layer group are all taken by others, and later given back.
            others = []
            while min(pool["pages"]["free"] for pool in self.prefill.status()["pools"]) >= 4:
                others.append("%s-%d" % (request_id, len(others)))
                self.ticket(others[-1], 100)
            self.assertGreater(len(others), 2)
            self.refused(self.decode.decode(request_id, params), error)
            for other in others:
                self.assertEqual(self.prefill.cancel(other).status, 200)
            self.assert_quiet(self.prefill)
            self.refused(self.decode.decode(request_id, params), error)
        self.fine()

    def fetch(self, request_id, params):
        self.assertEqual(self.decode.decode(request_id, params).status, 200)

    def test_expired_lease(self):
        hasty = self.node("prefill", limits__lease_ms=300, prefix_cache="false")
        params = hasty.prefill("late", PROMPT).json["kv_transfer_params"]
        wait_for(lambda: hasty.transfer("late").json["state"] == "expired", "the lease to end", 10)
        self.assert_quiet(hasty)
        self.refused(self.decode.decode("late", params), (410, "expired"))
        time.sleep(0.5)
        self.refused(self.decode.decode("late", params), (410, "expired"))
        self.fine()


if __name__ == "__main__":
    unittest.main()
