# SPDX-License-Identifier: Apache-2.0
"""Replays of real requests between two real nodes: every byte right, exactly the pages that placement asks for.

Without prefix cache where requests share prefixes: nodes_prefix.py counts what it saves.
"""

import json
import os
import subprocess
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
import models  # noqa: E402
from nodes import KVFERRY, MEMORY, ClusterTest  # noqa: E402

TRACE = os.path.join(HERE, "..", "data", "trace-200.jsonl")


def shared_memory(need_bytes):
    """shm, or host on machines (containers, mostly) whose shared memory is smaller than that."""
    try:
        system = os.statvfs("/dev/shm")
    except OSError:
        return "host"
    return "shm" if system.f_bavail * system.f_frsize > need_bytes else "host"


def trace_lengths(limit, max_input=None):
    with open(TRACE, encoding="utf-8") as lines:
        lengths = [json.loads(line)["input_length"] for line in lines]
    return [tokens for tokens in lengths if max_input is None or tokens <= max_input][:limit]


class NodesReplayTest(ClusterTest):
    def replay(self, prefill, decode, *more, trace=TRACE):
        done = subprocess.run([KVFERRY, "replay", "--json", "--trace", trace, "--prefill", prefill.url, "--decode",
                               decode.url, *more], capture_output=True, text=True, timeout=500, check=False)
        self.assertEqual(done.returncode, 0, "%s\n%s\n%s" % (done.stderr, prefill.text(), decode.text()))
        return json.loads(done.stdout)

    def check(self, summary, preset, block, lengths):
        expected = [models.moved(preset, block, tokens) for tokens in lengths]
        self.assertEqual({key: summary[key] for key in
                          ("requests", "ok", "failed", "verified", "mismatched_bytes", "pages", "bytes")},
                         {"requests": len(lengths), "ok": len(lengths), "failed": {}, "verified": len(lengths),
                          "mismatched_bytes": 0, "pages": sum(pages for pages, _ in expected),
                          "bytes": sum(size for _, size in expected)})

    def write_trace(self, lengths):
        path = os.path.join(self.folder, "trace.jsonl")
        with open(path, "w", encoding="utf-8") as out:
            for k, tokens in enumerate(lengths):
                ids = [1000 * k + i for i in range(-(-tokens // 512))]
                json.dump({"timestamp": 0, "input_length": tokens, "output_length": 4, "hash_ids": ids}, out)
                out.write("\n")
        return path

    def test_real_requests(self):
        self.real_requests("push")

    def test_real_requests_that_are_pulled(self):
        self.real_requests("pull")

    def real_requests(self, direction):
        memory = MEMORY if MEMORY == "cuda" else shared_memory(3 << 29)
        prefill, decode = self.pair(pool__bytes="512MiB", pool__memory=memory, prefix_cache="false",
                                    mover__direction=direction)
        before = prefill.pages(), decode.pages()
        summary = self.replay(prefill, decode, "--limit", "40", "--concurrency", "4")
        self.check(summary, "gemma-3-270m", 32, trace_lengths(40))
        self.assertGreater(summary["transfer_us"]["p50"], 0)
        self.assertGreaterEqual(summary["transfer_us"]["max"], summary["exposed_us"]["max"])
        self.assert_quiet(prefill)
        self.assert_quiet(decode)
        self.assertEqual((prefill.pages(), decode.pages()), before)
        self.finish()

    def reuse(self, draft_layers=0, **settings):
        """Requests that share prefixes, in a pool that they fill many times over: less moves, and every byte is right."""
        lengths = trace_lengths(40, 8000)
        prefill, decode = self.pair(pool__bytes="128MiB", model__draft_layers=draft_layers, **settings)
        summary = self.replay(prefill, decode, "--limit", "40", "--max-input", "8000", "--concurrency", "6",
                              "--timeout-ms", "120000")
        self.assertEqual((summary["ok"], summary["failed"], summary["verified"], summary["mismatched_bytes"]),
                         (len(lengths), {}, len(lengths), 0))
        self.assertEqual(summary["prompt_tokens"], sum(lengths))
        self.assertGreater(summary["cached_tokens"]["decode"], 0)
        self.assertLess(summary["bytes"], sum(models.moved("gemma-3-270m", 32, tokens, draft_layers=draft_layers)[1]
                                              for tokens in lengths))
        self.finish()

    def test_reuse(self):
        self.reuse()

    def test_reuse_in_chunks_with_attention(self):
        self.reuse(draft_layers=2, engine__chunk_tokens=300, verify="attention", engine__extra_tokens=3,
                   mover__direction="pull")

    def test_a_pool_that_holds_two_requests(self):
        """More requests at once than there is room for: waits and 429, never a failure."""
        lengths = trace_lengths(12, 8000)
        prefill, decode = self.pair(pool__bytes="96MiB", prefix_cache="false")
        summary = self.replay(prefill, decode, "--limit", "12", "--max-input", "8000", "--concurrency", "8",
                              "--timeout-ms", "120000")
        self.check(summary, "gemma-3-270m", 32, lengths)
        self.finish()

    def test_two_by_two_nodes(self):
        prefills = [self.node("prefill", pool__bytes="512MiB", prefix_cache="false") for _ in range(2)]
        decodes = [self.node("decode", pool__bytes="512MiB", prefix_cache="false") for _ in range(2)]
        lengths = trace_lengths(8, 8000)
        done = subprocess.run([KVFERRY, "replay", "--json", "--trace", TRACE, "--limit", "8", "--max-input", "8000",
                               "--prefill", ",".join(n.url for n in prefills),
                               "--decode", ",".join(n.url for n in decodes)],
                              capture_output=True, text=True, timeout=500, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(json.loads(done.stdout), "gemma-3-270m", 32, lengths)
        self.finish()

    def test_all_of_a_transfer_after_prefill_is_exposed(self):
        """The ticket comes with the end of prefill, so nothing of this transfer can hide behind it."""
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "connected", 100)
        params = prefill.prefill("exposed", 3000).json["kv_transfer_params"]
        time.sleep(0.5)  # far longer than a message takes: the end of prefill lies before the whole transfer
        answer = decode.decode("exposed", params).json
        self.assertGreater(answer["transfer_us"], 0)
        self.assertEqual(answer["exposed_us"], answer["transfer_us"])
        self.finish()

    def edges(self, preset, block, pool):
        """Prompts around every edge: of a block, of the window, of a piece of 512 tokens."""
        lengths = [1, block - 1, block, block + 1]
        for _, _, window, _ in models.PRESETS[preset]:
            if window is not None:
                lengths += [window - 1, window, window + 1, window + block - 1, window + block]
        lengths += [511, 512, 513]
        prefill, decode = self.pair(model__preset=preset, model__tokens_per_block=block, pool__bytes=pool)
        summary = self.replay(prefill, decode, "--concurrency", "2", trace=self.write_trace(lengths))
        self.check(summary, preset, block, lengths)
        # One by one, so that two errors cannot make up for one another.
        for tokens in lengths:
            answer = self.run_one(prefill, decode, "single-%d" % tokens, tokens)
            self.assertEqual((answer["pages"], answer["bytes"]), models.moved(preset, block, tokens), tokens)
            self.assertEqual(answer["missing"], [])
        self.finish()

    def test_gemma_16(self):
        self.edges("gemma-3-270m", 16, "256MiB")

    def test_gemma_64(self):
        self.edges("gemma-3-270m", 64, "256MiB")

    def test_gemma_128(self):
        self.edges("gemma-3-270m", 128, "256MiB")

    def test_gpt_oss_32(self):
        self.edges("gpt-oss-20b", 32, "256MiB")

    def test_gpt_oss_128(self):
        self.edges("gpt-oss-20b", 128, "512MiB")

    def test_llama_16(self):
        self.edges("llama-3.1-8b", 16, "512MiB")

    def test_llama_128(self):
        self.edges("llama-3.1-8b", 128, "768MiB")

    def test_mla_64(self):
        self.edges("mla-deepseek-v3", 64, "512MiB")


if __name__ == "__main__":
    unittest.main()
