# SPDX-License-Identifier: Apache-2.0
"""`kvferry replay` against fake nodes: what it sends, how it paces, and what it makes of bad answers."""

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from fake_node import Answer, FakeNode  # noqa: E402

KVFERRY = os.environ["KVFERRY"]


def entry(tokens, timestamp=0, output=5, first_id=0):
    pieces = -(-tokens // 512)
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output,
            "hash_ids": list(range(first_id, first_id + pieces))}


class ReplayTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.trace = os.path.join(self.folder.name, "trace.jsonl")

    def write(self, lines):
        with open(self.trace, "w", encoding="utf-8") as out:
            for line in lines:
                out.write((line if isinstance(line, str) else json.dumps(line)) + "\n")

    def command(self, prefill, decode, *more):
        return [KVFERRY, "replay", "--trace", self.trace, "--prefill", ",".join(n.url for n in prefill),
                "--decode", ",".join(n.url for n in decode), *more]

    def run_json(self, prefill, decode, *more, code=0):
        done = subprocess.run(self.command(prefill, decode, "--json", *more), capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout.count("\n"), 1, done.stdout)
        return json.loads(done.stdout), done.stderr

    def test_what_the_nodes_get(self):
        self.write([entry(513, output=9, first_id=40), entry(512, output=0, first_id=7)])
        with FakeNode() as prefill, FakeNode() as decode:
            self.run_json([prefill], [decode], "--concurrency", "1", "--timeout-ms", "4321")
            first, second = prefill.bodies("/v1/prefill")
            self.assertEqual((first["prompt_len"], first["hash_ids"], first["timeout_ms"]), (513, [40, 41], 4321))
            self.assertEqual((second["prompt_len"], second["hash_ids"]), (512, [7]))
            asked = decode.bodies("/v1/decode")
            self.assertEqual([body["request_id"] for body in asked], [first["request_id"], second["request_id"]])
            self.assertEqual(asked[0]["kv_transfer_params"],
                             {"ticket": "ticket-of-" + first["request_id"], "prompt_len": 513, "draft_len": 0})
            self.assertEqual((asked[0]["hash_ids"], asked[0]["max_tokens"], asked[0]["timeout_ms"]),
                             ([40, 41], 9, 4321))
            self.assertNotIn("max_tokens", asked[1])
            self.run_json([prefill], [decode])
            ids = [body["request_id"] for body in prefill.bodies("/v1/prefill")]
            self.assertEqual(len(set(ids)), 4, "ids of two runs must differ")
            self.assertEqual(prefill.bodies("/v1/cancel"), [])

    def test_summary(self):
        lengths = [600 + 13 * ((7 * k) % 101) for k in range(101)]  # 600, 613 .. 1900, shuffled
        self.write([entry(tokens) for tokens in lengths])
        with FakeNode() as prefill, FakeNode() as decode:
            summary, _ = self.run_json([prefill], [decode])
        self.assertEqual({key: summary[key] for key in
                          ("requests", "ok", "failed", "verified", "mismatched_bytes", "bytes", "pages", "retries")},
                         {"requests": 101, "ok": 101, "failed": {}, "verified": 101, "mismatched_bytes": 0,
                          "bytes": 1000 * sum(lengths), "pages": sum(lengths), "retries": 0})
        self.assertEqual((summary["prompt_tokens"], summary["cached_tokens"]),
                         (sum(lengths), {"prefill": sum(lengths) - 101, "decode": sum(n // 3 for n in lengths)}))
        # 101 values in steps of 13: at least half of them are <= the 51st, 90 % <= the 91st, 99 % <= the 100th.
        self.assertEqual(summary["transfer_us"], {"p50": 1250, "p90": 1770, "p99": 1887, "max": 1900})
        self.assertEqual(summary["exposed_us"], {"p50": 625, "p90": 885, "p99": 943, "max": 950})
        self.assertEqual(summary["prefill_us"]["max"], 7)
        self.assertEqual(summary["verify_us"]["p50"], 3)
        self.assertAlmostEqual(summary["throughput_bytes_per_s"] * summary["duration_s"], summary["bytes"],
                               delta=summary["bytes"] * 1e-3)
        self.assertAlmostEqual(sum(summary["wall_shares"].values()), 1, places=6)

    def test_drafts(self):
        self.write([entry(100 + k) for k in range(4)])
        with FakeNode() as prefill, FakeNode() as decode:
            for drafts in (0, 1, 4096):
                summary, _ = self.run_json([prefill], [decode], "--draft-len", str(drafts))
                self.assertEqual((summary["ok"], summary["draft_tokens"]), (4, 4 * drafts))
                self.assertEqual({body["draft_len"] for body in prefill.bodies("/v1/prefill")[-4:]}, {drafts})
                self.assertEqual({body["kv_transfer_params"]["draft_len"] for body in decode.bodies("/v1/decode")[-4:]},
                                 {drafts})
            self.assertEqual(prefill.bodies("/v1/cancel"), [])

    def test_another_number_of_drafts_is_a_failure(self):
        self.write([entry(100 + k) for k in range(4)])
        right = {"verified": True, "bytes": 5, "pages": 1, "transfer_us": 1, "exposed_us": 1}

        def at_decode(_, body):
            return {100: Answer(200, right), 101: Answer(200, dict(right, draft_tokens=[1, 2])),
                    102: Answer(200, dict(right, draft_tokens=3))}.get(body["kv_transfer_params"]["prompt_len"])

        with FakeNode() as prefill, FakeNode(at_decode) as decode:
            summary, err = self.run_json([prefill], [decode], "--draft-len", "3", code=1)
            self.assertEqual((summary["failed"], summary["ok"], summary["draft_tokens"]), ({"count_mismatch": 3}, 1, 3))
            self.assertIn("2 draft tokens came, 3 were asked for", err)
            self.assertEqual(prefill.bodies("/v1/cancel"), [])  # these requests have ended on both sides

    def test_every_pair_of_nodes_meets(self):
        """Two by two: taking turns on both sides in step would leave half of the pairs out."""
        self.write([entry(100 + k) for k in range(12)])
        with FakeNode() as p0, FakeNode() as p1, FakeNode() as d0, FakeNode() as d1:
            self.run_json([p0, p1], [d0, d1])
            for prefill in (p0, p1):
                for decode in (d0, d1):
                    first = {body["request_id"] for body in prefill.bodies("/v1/prefill")}
                    second = {body["request_id"] for body in decode.bodies("/v1/decode")}
                    self.assertEqual((len(first), len(second), len(first & second)), (6, 6, 3))

    def test_concurrency(self):
        self.write([entry(64) for _ in range(12)])
        barrier = threading.Barrier(4)

        def together(path, _):
            if path == "/v1/prefill":
                barrier.wait(20)  # passes only when four are under way at once

        with FakeNode(together) as prefill, FakeNode() as decode:
            summary, _ = self.run_json([prefill], [decode], "--concurrency", "4")
            self.assertEqual(summary["ok"], 12)
            self.assertEqual(prefill.most_running, 4)

    def test_speed_keeps_the_times_of_the_trace(self):
        self.write([entry(64, timestamp=5000 + t) for t in (0, 1000, 1000, 4000)])
        with FakeNode() as prefill, FakeNode() as decode:
            summary, _ = self.run_json([prefill], [decode], "--speed", "4")
            starts = [when for path, _, when in prefill.calls if path == "/v1/prefill"]
            self.assertEqual(summary["ok"], 4)
            for start, due in zip(starts, (0, 0.25, 0.25, 1.0)):
                self.assertGreater(start - starts[0], due - 0.1)
            self.assertGreaterEqual(summary["duration_s"], 1.0)
            self.assertIsNotNone(summary["late_us"]["p50"])

    def test_429_is_asked_again_after_the_pause_it_names(self):
        self.write([entry(64)])
        refusals = {"/v1/prefill": 2, "/v1/decode": 1}

        def busy(path, _):
            if refusals.get(path, 0) > 0:
                refusals[path] -= 1
                return Answer(429, {"error": "again", "message": "full"}, {"Retry-After": "1"})
            return None

        with FakeNode(busy) as prefill, FakeNode(busy) as decode:
            summary, _ = self.run_json([prefill], [decode])
            self.assertEqual((summary["ok"], summary["retries"]), (1, 3))
            times = [when for path, _, when in prefill.calls if path == "/v1/prefill"]
            self.assertEqual(len(times), 3)
            self.assertGreater(times[1] - times[0], 0.95)
            self.assertGreater(times[2] - times[1], 0.95)
            same = {json.dumps(body, sort_keys=True) for body in prefill.bodies("/v1/prefill")}
            self.assertEqual(len(same), 1)
            self.assertGreaterEqual(summary["pause_us"]["max"], 3000000)

    def test_429_for_ever_fails_as_again(self):
        self.write([entry(64)])
        with FakeNode(lambda *_: Answer(429, {"error": "again", "message": "the pool is full"})) as prefill, \
                FakeNode() as decode:
            summary, err = self.run_json([prefill], [decode], "--timeout-ms", "1000", code=1)
            self.assertEqual(summary["failed"], {"again": 1})
            self.assertIn("the pool is full", err)
            self.assertGreaterEqual(len(prefill.bodies("/v1/prefill")), 3)
            self.assertEqual(decode.calls, [])

    def test_failures_by_code(self):
        self.write([entry(100 + k) for k in range(10)])

        def at_prefill(path, body):
            if path == "/v1/prefill" and body["prompt_len"] == 100:
                return Answer(413, {"error": "too_large", "message": "pool has 10 pages"})
            if path == "/v1/prefill" and body["prompt_len"] == 101:
                return Answer(200, b"<html>")
            return None

        def at_decode(_, body):
            tokens = body["kv_transfer_params"]["prompt_len"]
            right = {"verified": False, "bytes": 5, "pages": 1, "transfer_us": 1, "exposed_us": 1}
            return {102: Answer(502, {"error": "peer_lost", "message": "killed", "recompute": True}),
                    103: Answer(502, {"error": "peer_lost", "message": "killed", "recompute": True}),
                    104: Answer(200, dict(right, mismatched_bytes=4)),
                    105: Answer(200, dict(right, bytes="5")),
                    106: Answer(500, b"\x00not json"),
                    107: Answer(200, dict(right, mismatched_bytes=0)),
                    108: Answer(200, dict(right, verify="off"))}.get(tokens)

        with FakeNode(at_prefill) as prefill, FakeNode(at_decode) as decode:
            summary, err = self.run_json([prefill], [decode], code=1)
            self.assertEqual(summary["failed"], {"too_large": 1, "protocol": 3, "peer_lost": 2, "mismatch": 2})
            self.assertEqual((summary["requests"], summary["ok"], summary["verified"],
                              summary["mismatched_bytes"]), (10, 2, 1, 4))
            self.assertIn("line 1 (", err)
            self.assertIn("pool has 10 pages", err)
            # What failed after prefill is given up there, so that its pages come back; nothing else is.
            lengths = {body["request_id"]: body["prompt_len"] for body in prefill.bodies("/v1/prefill")}
            cancelled = {lengths[body["request_id"]] for body in prefill.bodies("/v1/cancel")}
            self.assertEqual(cancelled, {101, 102, 103, 105, 106})

    def test_node_that_never_answers(self):
        self.write([entry(64)])
        with FakeNode() as prefill, FakeNode(lambda *_: Answer(200, {}, delay_s=30)) as decode:
            start = time.monotonic()
            summary, err = self.run_json([prefill], [decode], "--timeout-ms", "100", code=1)
            self.assertEqual(summary["failed"], {"deadline": 1})
            self.assertIn(decode.url, err)
            self.assertLess(time.monotonic() - start, 20)

    def test_node_that_goes_away(self):
        self.write([entry(64) for _ in range(3)])
        decode = FakeNode()
        with FakeNode() as prefill:
            def gone(path, _):
                if path == "/v1/prefill" and decode is not None:
                    decode.__exit__()

            with decode:
                prefill.script = gone
                done = subprocess.run(self.command([prefill], [decode], "--json", "--concurrency", "1"),
                                      capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(json.loads(done.stdout)["failed"], {"unreachable": 3})

    def test_invalid_lines_are_named_and_counted(self):
        self.write([entry(64), "{broken", "", "[]", dict(entry(64), hash_ids=[1, 2]), dict(entry(64), input_length=0),
                    dict(entry(64), timestamp=-1), entry(65)])
        with FakeNode() as prefill, FakeNode() as decode:
            summary, err = self.run_json([prefill], [decode], code=1)
        self.assertEqual((summary["requests"], summary["ok"], summary["failed"]), (7, 2, {"invalid": 5}))
        for line in (2, 4, 5, 6, 7):
            self.assertIn("%s: line %d: " % (self.trace, line), err)
        self.assertNotIn("line 3:", err)
        self.assertNotIn("line 8:", err)

    def test_limit_and_max_input(self):
        self.write([entry(tokens) for tokens in (100, 5000, 101, 102, 103)])
        with FakeNode() as prefill, FakeNode() as decode:
            summary, _ = self.run_json([prefill], [decode], "--limit", "3", "--max-input", "4999", "--concurrency", "1")
            self.assertEqual([body["prompt_len"] for body in prefill.bodies("/v1/prefill")], [100, 101, 102])
            self.assertEqual((summary["requests"], summary["skipped"]), (3, 1))

    def fails(self, arguments, code, *words):
        done = subprocess.run([KVFERRY, "replay", *arguments], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(word, done.stderr)
        return done.stderr

    def test_clear_errors(self):
        self.write([])
        with FakeNode() as node:
            urls = ["--prefill", node.url, "--decode", node.url]
            self.fails(["--trace", self.trace, *urls], 1, self.trace, "no request")
            self.fails(["--trace", self.folder.name + "/none", *urls], 1, "No such file")
            self.fails(["--trace", self.folder.name, *urls], 1, "Is a directory")
            self.write([entry(600)])
            self.fails(["--trace", self.trace, "--max-input", "599", *urls], 1, "--max-input")
            dead = FakeNode()
            dead.__enter__()
            dead.__exit__()
            self.fails(["--trace", self.trace, "--prefill", node.url, "--decode", dead.url], 1, "decode node", dead.url,
                       "running")
            node.ready = False
            self.fails(["--trace", self.trace, *urls], 1, "prefill node", node.url, "503")
            self.assertEqual(node.calls, [])

    def test_usage_errors(self):
        good = ["--trace", "x", "--prefill", "http://h:1", "--decode", "http://h:2"]
        for bad in (good[2:], good[:4], good + ["--limit", "0"], good + ["--limit", "-1"], good + ["--limit", "1x"],
                    good + ["--concurrency", "4097"], good + ["--speed", "0"], good + ["--speed", "nan"],
                    good + ["--speed", "2", "--concurrency", "2"], good + ["--timeout-ms", ""],
                    good + ["--draft-len", "-1"], good + ["--draft-len", "4097"], good + ["--draft-len", "3.5"], good + ["--nonsense"],
                    good + ["extra"], good[:2] + ["--prefill", "h:1", "--decode", "http://h:2"],
                    good[:2] + ["--prefill", "http://h:1,,http://h:3", "--decode", "http://h:2"],
                    good + ["--prefill", "http://h:3"]):
            self.fails(bad, 2, "kvferry replay")

    def test_help(self):
        done = subprocess.run([KVFERRY, "replay", "--help"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0)
        for word in ("--trace", "--prefill", "--decode", "--limit", "--max-input", "--concurrency", "--speed",
                     "--draft-len", "--timeout-ms", "--json"):
            self.assertIn(word, done.stdout)

    def test_proxy_of_the_environment_is_not_used(self):
        self.write([entry(64)])
        with FakeNode() as prefill, FakeNode() as decode:
            done = subprocess.run(self.command([prefill], [decode], "--json"), capture_output=True, text=True,
                                  timeout=60, check=False,
                                  env=dict(os.environ, http_proxy="http://127.0.0.1:9", no_proxy=""))
        self.assertEqual(json.loads(done.stdout)["ok"], 1, done.stderr)

    def test_signal_lets_what_runs_end(self):
        self.write([entry(64) for _ in range(500)])
        with FakeNode(lambda *_: time.sleep(0.1)) as prefill, FakeNode() as decode:
            with subprocess.Popen(self.command([prefill], [decode], "--json", "--concurrency", "2"),
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as replay:
                while len(prefill.calls) < 4:
                    time.sleep(0.01)
                replay.send_signal(signal.SIGTERM)
                out, err = replay.communicate(timeout=30)
            summary = json.loads(out)
            self.assertEqual(replay.returncode, 0, err)
            self.assertEqual(summary["requests"], len(prefill.bodies("/v1/prefill")))
            self.assertEqual(summary["ok"], summary["requests"])
            self.assertLess(summary["requests"], 500)
            self.assertIn("stopped by a signal", err)

    def on_terminal(self, **environment):
        """Run with stderr on a terminal; what came there, and stdout."""
        master, slave = pty.openpty()
        with FakeNode() as prefill, FakeNode() as decode:
            env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
            done = subprocess.run(self.command([prefill], [decode]), stdout=subprocess.PIPE, stderr=slave, text=True,
                                  timeout=60, check=False, env=dict(env, **environment))
        os.close(slave)
        seen = b""
        try:
            while chunk := os.read(master, 65536):
                seen += chunk
        except OSError:
            pass  # the end of a pseudo-terminal
        os.close(master)
        self.assertEqual(done.returncode, 0)
        return seen.decode(), done.stdout

    def test_progress_and_table(self):
        self.write([entry(64) for _ in range(10)])
        seen, table = self.on_terminal()
        self.assertIn("10/10", seen)
        self.assertIn("\033[36m", seen)
        self.assertNotIn("\033", table)
        for word in ("10 requests", "ok        10", "verified  10", "p50", "transfer", "where time goes",
                     "cached    prefill 98 %, decode 33 % of 640 prompt tokens"):
            self.assertIn(word, table)
        seen, _ = self.on_terminal(NO_COLOR="1")
        self.assertIn("10/10", seen)
        self.assertNotIn("\033[36m", seen)
        with FakeNode() as prefill, FakeNode() as decode:
            done = subprocess.run(self.command([prefill], [decode]), capture_output=True, text=True, timeout=60,
                                  check=True)
        self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    unittest.main()
