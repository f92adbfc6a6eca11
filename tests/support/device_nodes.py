# SPDX-License-Identifier: Apache-2.0
"""What tests of nodes with pages on a device share (nodes_cuda.py, nodes_nccl.py). The device is the stand-in
(tests/support/cuda/standin.h); everything else is real."""

import time

import metrics
from nodes import SLOWNESS, ClusterTest, Node, wait_for

CUDA = {"pool__memory": "cuda", "verify": "attention"}
BIG = {"model__preset": "llama-3.1-8b", "pool__bytes": "1GiB", "pool__memory": "cuda"}
TRIES = 6


class DeviceTest(ClusterTest):
    def failing(self, role, function, n, **settings):
        """A node whose device fails at the n-th call of a function."""
        return self.node_with({"KVF_STANDIN_CUDA_FAIL": "%s:%d" % (function, n)}, role, **settings)

    def node_with(self, environment, role, **settings):
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        settings.setdefault("instance", "%s-%d" % (role, len(self.nodes)))
        node = Node(role, self.folder, settings, environment=environment)
        self.nodes.append(node)
        return node.wait_ready()

    def end(self):
        """The nodes of one case; others follow."""
        self.finish()
        self._kill_all()
        self.nodes.clear()

    def fallbacks(self, node):
        return sum(value for (name, _), value in metrics.parse(node.metrics()).items()
                   if name == "kvferry_mover_fallback_total")

    def check_way(self, prefill, decode, mover):
        """Requests of several shapes, by that mover."""
        for request_id, prompt_len in (("short", 3), ("one", 32), ("partial", 700), ("long", 5000)):
            answer = self.run_one(prefill, decode, request_id, prompt_len)
            self.assertEqual(answer["mover"], mover)
            self.assertEqual(answer["attention"]["distance"] < 1e-4, True, answer)
        wait_for(lambda: prefill.transfer("long").json["state"] == "done", "the end of the send")
        self.assertEqual(prefill.transfer("long").json["mover"], mover)
        self.assertEqual([node.status()["peers"][0]["mover"] for node in (prefill, decode)], [mover, mover])

    def refused(self, settings, *texts, environment=None):
        """A node that does not start says why."""
        node = Node("decode", self.folder, {key.replace("__", "."): value for key, value in settings.items()},
                    environment=environment)
        self.nodes.append(node)
        self.assertNotEqual(node.wait_end(), 0)
        for text in texts:
            self.assertIn(text, node.text())

    def check_dead(self, prefill, decode, dead, states):
        """Requests until the device fails, and two after it."""
        n_failed = 0
        for k in range(200):
            first = prefill.prefill("r%d" % k, 700)
            reply = first if first.status != 200 else decode.decode("r%d" % k, first.json["kv_transfer_params"])
            if reply.status == 200:
                self.assertTrue(reply.json["verified"] or reply.json["verify"] == "off", reply)
                self.assertEqual(n_failed, 0, "a device that has failed stays so")
                continue
            self.assertIn(reply.json["error"], states, reply)
            n_failed += 1
            if n_failed == 3:
                break
        self.assertEqual(n_failed, 3, dead.text())
        for node in (prefill, decode):
            self.assert_quiet(node)
            self.assertTrue(node.alive())

    def decode_device_fails(self, kind, states):
        """Another decode node, whose device is well, gets its requests from the same prefill node."""
        prefill = self.node("prefill", mover__kind=kind, **CUDA)
        decode = self.failing("decode", "execute", 40, mover__kind=kind, pool__memory="cuda", verify="off")
        self.check_dead(prefill, decode, decode, states)
        self.assertEqual(self.run_one(prefill, self.node("decode", **CUDA), "other")["bytes"] > 0, True)
        decode.kill()
        self.end()

    def prefill_device_fails(self, kind, states):
        prefill = self.failing("prefill", "execute", 40, mover__kind=kind, **CUDA)
        decode = self.node("decode", mover__kind=kind, **CUDA)
        self.check_dead(prefill, decode, prefill, states)
        self.run_one(self.node("prefill", **CUDA), decode, "other")
        prefill.kill()
        self.end()

    def decode_node_dies(self):
        """While bytes come to it, several times: the prefill node has its pages back at once, and serves the next one."""
        prefill = self.node("prefill", **BIG)
        caught = 0
        for k in range(TRIES):
            decode = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "20000"}, "decode", **BIG)
            asking = self.start_moving(prefill, decode, "kill-%d" % k, 3000)
            caught += not asking.ended
            decode.kill()
            killed = time.monotonic()
            self.assert_quiet(prefill, 1.0 * SLOWNESS)
            self.assertLess(time.monotonic() - killed, 1.0 * SLOWNESS)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.run_one(prefill, self.node("decode", **BIG), "after", 100)
        self.finish()

    def prefill_node_dies(self):
        """The same the other way round."""
        decode = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "20000"}, "decode", **BIG)
        caught = 0
        for k in range(TRIES):
            prefill = self.node("prefill", **BIG)
            asking = self.start_moving(prefill, decode, "kill-%d" % k, 3000)
            prefill.kill()
            reply = asking.wait()
            caught += reply.status != 200
            self.assertIn(reply.error[1], (None, "peer_lost"), reply)
            self.assert_quiet(decode)
            if caught == 2:
                break
        self.assertGreater(caught, 0, "no kill met a transfer in the middle")
        self.run_one(self.node("prefill", **BIG), decode, "after", 100)
        self.finish()
