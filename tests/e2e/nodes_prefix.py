# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests share: what each node finds, what moves then, and what makes room for what."""

import os
import random
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import metrics  # noqa: E402
import models  # noqa: E402
from nodes import Asking, ClusterTest, wait_for  # noqa: E402

PRESET = "gemma-3-270m"
BLOCK = 32


class PrefixTest(ClusterTest):
    def go(self, prefill, decode, request_id, prompt, ids):
        """A request that must go well: both nodes' answers."""
        first = prefill.prefill(request_id, prompt, hash_ids=ids)
        self.assertEqual(first.status, 200, first)
        second = decode.decode(request_id, first.json["kv_transfer_params"], hash_ids=ids)
        self.assertEqual(second.status, 200, second)
        self.assertIs(second.json["verified"], True, second)
        return first.json, second.json

    def counts_are_those_of_the_model(self, **settings):
        """Random prompts that share beginnings, one after the other: found is what a naive model finds, and moved is
        the rest."""
        rng = random.Random(20)
        prefill, decode = self.pair(pool__bytes="384MiB", **settings)
        here = models.Cache(PRESET, BLOCK, False, chunks="engine__chunk_tokens" in settings)
        there = models.Cache(PRESET, BLOCK, True)
        found, tokens = 0, 0
        for k in range(40):
            prompt = rng.choice([rng.randrange(1, 1600), rng.randrange(1, 50) * BLOCK])
            ids = [rng.choice((1, 1, 1, 2)) * 100 + i for i in range(-(-prompt // models.PIECE))]
            first, second = self.go(prefill, decode, "r-%d" % k, prompt, ids)
            with self.subTest("request %d: %d tokens, %r" % (k, prompt, ids)):
                cached = here.find(ids, prompt), there.find(ids, prompt)
                self.assertEqual((first["cached_tokens"], second["cached_tokens"]), cached)
                self.assertEqual((second["pages"], second["bytes"]), models.moved(PRESET, BLOCK, prompt, cached[1]))
            here.learn(ids, prompt, cached[0])
            there.learn(ids, prompt, cached[1])
            found += cached[1]
            tokens += prompt
        self.assertGreater(found, tokens / 4)
        samples = metrics.parse(decode.metrics())
        self.assertEqual(samples[("kvferry_prefix_cached_tokens_total", (("role", "decode"),))], found)
        self.assertEqual(samples[("kvferry_prompt_tokens_total", (("role", "decode"),))], tokens)
        shown = decode.status()["prefix_cache"]
        self.assertEqual((shown["enabled"], shown["prompt_tokens"], shown["cached_tokens"]), (True, tokens, found))
        self.assertEqual(samples[("kvferry_prefix_hits_total", (("role", "decode"),))], shown["hits"])
        self.finish()

    def test_counts_in_one_step(self):
        self.counts_are_those_of_the_model()

    def test_counts_in_chunks(self):
        self.counts_are_those_of_the_model(engine__chunk_tokens=100)

    def test_a_whole_prompt_that_is_there_moves_nothing(self):
        prefill, decode = self.pair()
        for prompt in (1, 31, 32, 33, 512, 700, 1024):
            with self.subTest(prompt):
                ids = [prompt * 10 + i for i in range(-(-prompt // models.PIECE))]
                self.go(prefill, decode, "first", prompt, ids)
                _, answer = self.go(prefill, decode, "again", prompt, ids)
                self.assertEqual((answer["pages"], answer["bytes"], answer["pieces"], answer["cached_tokens"]),
                                 (0, 0, 0, prompt))
                self.assertEqual(len(answer["first_tokens"]), 1)
                wait_for(lambda: prefill.transfer("again").json["state"] == "done", "the end of the send")
                self.assert_quiet(prefill)
        self.finish()

    def test_requests_without_ids_share_nothing(self):
        prefill, decode = self.pair()
        for _ in range(2):  # not even with the run before them of the same id
            answer = self.run_one(prefill, decode, "same", 700)
            self.assertEqual((answer["pages"], answer["bytes"]), models.moved(PRESET, BLOCK, 700))
            self.assertEqual(answer["cached_tokens"], 0)
            wait_for(lambda: prefill.transfer("same").json["state"] == "done", "the end of the send")
        self.assertEqual((prefill.pages()["cached"], decode.pages()["cached"]), (0, 0))
        self.finish()

    def test_tokens_are_content_too(self):
        prefill, decode = self.pair()
        long = [(7 * i) % 32000 for i in range(1200)]
        for k, (tokens, cached) in enumerate(((long[:1100], 0), (long[:1100], 1100), (long, 1024),
                                              ([1] + long[1:], 0))):
            first = prefill.post("/v1/prefill", {"request_id": "t-%d" % k, "tokens": tokens}).json
            answer = decode.decode("t-%d" % k, first["kv_transfer_params"], tokens=tokens).json
            self.assertIs(answer["verified"], True)
            self.assertEqual(answer["cached_tokens"], cached)
        self.finish()

    def test_the_cache_can_be_switched_off(self):
        prefill, decode = self.pair(prefix_cache="false")
        for k in range(2):
            first, second = self.go(prefill, decode, "off-%d" % k, 700, [5, 6])
            self.assertEqual((first["cached_tokens"], second["cached_tokens"]), (0, 0))
            self.assertEqual((second["pages"], second["bytes"]), models.moved(PRESET, BLOCK, 700))
        self.assert_quiet(prefill)
        self.assertEqual((prefill.pages()["cached"], decode.pages()["cached"]), (0, 0))
        self.assertIs(decode.status()["prefix_cache"]["enabled"], False)
        self.finish()

    def test_what_was_not_verified_is_not_found(self):
        """Pages that are not what the request says must not be taken for that later."""
        prefill, decode = self.pair()
        for k in range(2):
            params = prefill.prefill("w-%d" % k, 700, hash_ids=[5, 6]).json["kv_transfer_params"]
            answer = decode.decode("w-%d" % k, params, hash_ids=[5, 7]).json
            self.assertEqual((answer["verified"], answer["cached_tokens"]), (False, 0))
        self.assertEqual(decode.pages()["cached"], 0)
        _, answer = self.go(prefill, decode, "right", 700, [5, 6])
        self.assertEqual(answer["cached_tokens"], 0)
        self.finish()

    def test_what_did_not_arrive_is_not_found(self):
        prefill, decode = self.pair()
        params = prefill.prefill("gone", 700, hash_ids=[5, 6]).json["kv_transfer_params"]
        self.assertEqual(prefill.cancel("gone").status, 200)
        self.assertEqual(decode.decode("gone", params, hash_ids=[5, 6]).error, (499, "cancelled"))
        self.assert_quiet(decode)
        self.assertEqual(decode.pages()["cached"], 0)
        first, second = self.go(prefill, decode, "next", 700, [5, 6])
        self.assertEqual((first["cached_tokens"], second["cached_tokens"]), (699, 0))
        self.finish()

    def test_a_small_pool_is_filled_many_times(self):
        """What is cached makes room for what comes; the last request is found, the first is not."""
        prefill, decode = self.pair(pool__bytes="40MiB")
        full = {node.role: node.status()["pages_total"] for node in (prefill, decode)}
        moved = 0
        for k in range(30):
            _, answer = self.go(prefill, decode, "k-%d" % k, 700, [100 + k, 200 + k])
            moved += answer["pages"]
            for node in (prefill, decode):
                pages = node.pages()
                self.assertEqual(sum(pages.values()), full[node.role])
        self.assertGreater(moved, 3 * full["decode"])
        _, answer = self.go(prefill, decode, "last", 700, [129, 229])
        self.assertEqual((answer["cached_tokens"], answer["pages"]), (700, 0))
        _, answer = self.go(prefill, decode, "first", 700, [100, 200])
        self.assertEqual((answer["pages"], answer["bytes"]), models.moved(PRESET, BLOCK, 700))
        self.finish()

    def test_pages_under_transfer_are_never_evicted(self):
        """Requests that wait for their decode while others go through the pool many times over: each page is still
        what it was."""
        prefill, decode = self.pair(pool__bytes="96MiB", limits__lease_ms=60000)
        waiting = {}
        for k, prompt in enumerate((600, 333)):
            ids = [900 + k, 910 + k][:-(-prompt // models.PIECE)]
            reply = prefill.prefill("wait-%d" % k, prompt, hash_ids=ids)
            self.assertEqual(reply.status, 200, reply)
            waiting[k] = reply.json["kv_transfer_params"], prompt, ids
        for k in range(20):
            self.go(prefill, decode, "k-%d" % k, 400, [100 + k])
        for k, (params, prompt, ids) in waiting.items():
            answer = decode.decode("wait-%d" % k, params, hash_ids=ids).json
            self.assertIs(answer["verified"], True)
            self.assertEqual((answer["pages"], answer["bytes"]), models.moved(PRESET, BLOCK, prompt))
        self.finish()

    def test_many_at_once_of_one_prefix(self):
        """The same beginning in flight many times, through a pool that evicts all the time."""
        prefill, decode = self.pair(pool__bytes="64MiB")

        def one(k):
            prompt = 520 + 61 * (k % 7)
            ids = [7, 10 + k % 3][:-(-prompt // models.PIECE)]
            first = prefill.prefill("m-%d" % k, prompt, hash_ids=ids, timeout_ms=60000)
            if first.status != 200:
                return first
            return decode.decode("m-%d" % k, first.json["kv_transfer_params"], hash_ids=ids, timeout_ms=60000)

        asking = [Asking(lambda k=k: one(k)) for k in range(32)]
        for k, call in enumerate(asking):
            reply = call.wait()
            self.assertEqual(reply.status, 200, reply)
            self.assertIs(reply.json["verified"], True, (k, reply))
        self.assertGreater(decode.status()["prefix_cache"]["hits"], 0)
        self.finish()


if __name__ == "__main__":
    unittest.main()
