# SPDX-License-Identifier: Apache-2.0
"""Nodes that fetch through NCCL, between devices of their own: which requests go that way, and what becomes of them when
NCCL, a device or a process fails. CUDA and NCCL are stand-ins (tests/support/cuda/); everything else is real.

Everything else about such nodes is in the other tests, which run once more with KVF_TEST_MOVER=nccl.
"""

import os
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from device_nodes import BIG, CUDA, DeviceTest  # noqa: E402
from nodes import PATIENCE_S, Asking, wait_for  # noqa: E402


class NcclTest(DeviceTest):
    def test_each_way(self):
        for direction in ("push", "pull"):
            prefill, decode = self.pair(mover__direction=direction, **CUDA)
            self.check_way(prefill, decode, "nccl")
            self.assertEqual([self.fallbacks(node) for node in (prefill, decode)], [0, 0])
            self.finish()
            self.nodes.clear()

    def test_messages_and_pieces_of_all_lengths(self):
        """Requests longer than a message, in pieces longer than one, or much shorter: every byte is compared."""
        for preset, prompt_len in (("llama-3.1-8b", 2000), ("gemma-3-270m", 9000)):
            prefill, decode = self.pair(model__preset=preset, pool__bytes="1GiB", pool__memory="cuda")
            for k in range(2):
                answer = self.run_one(prefill, decode, "r%d" % k, prompt_len + k)
                self.assertEqual((answer["mover"], answer["verified"]), ("nccl", True))
            self.end()

    def test_several_nodes_at_once(self):
        """Each pair has a path of its own, more than there are stages for."""
        prefills = [self.node("prefill", **CUDA) for _ in range(2)]
        decodes = [self.node("decode", **CUDA) for _ in range(3)]
        asked = []
        for k in range(18):
            prefill, decode = prefills[k % 2], decodes[k % 3]
            asked.append(Asking(lambda p=prefill, d=decode, k=k: self.run_one(p, d, "many-%d" % k, 1000 + 37 * k)))
        for asking in asked:
            self.assertEqual(asking.wait()["mover"], "nccl")
        self.finish()

    # What cannot be.

    def test_only_one_of_them_is_for_nccl(self):
        prefill = self.node("prefill", mover__kind="auto", **CUDA)
        decode = self.node("decode", **CUDA)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("both mover nccl", reply.json["message"])
        self.end()
        prefill = self.node("prefill", **CUDA)
        decode = self.node("decode", mover__kind="auto", **CUDA)
        self.check_way(prefill, decode, "tcp")
        self.finish()

    def test_one_device_for_both(self):
        prefill = self.node("prefill", **CUDA)
        decode = self.node_with({"CUDA_VISIBLE_DEVICES": "0"}, "decode", **CUDA)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("on one device", decode.text())
        self.finish()

    def test_what_does_not_go_together(self):
        self.refused({"pool__memory": "shm"}, "mover nccl is for pools of kind cuda")
        self.refused({"pool__memory": "cuda", "mover__digests": "false"}, "mover nccl needs digests")
        self.refused({"pool__memory": "cuda"}, "NCCL_COMM_ID", environment={"NCCL_COMM_ID": "127.0.0.1:1"})
        self.refused({"pool__memory": "cuda"}, "no NCCL", environment={"KVF_STANDIN_NCCL_NONE": "1"})

    # NCCL fails: requests end with an error, nothing is left over, and a while later there is a new path.

    def check_recovers(self, prefill, decode, n):
        failed = 0
        for k in range(n):
            first = prefill.prefill("r%d" % k, 700)
            self.assertEqual(first.status, 200, first)
            reply = decode.decode("r%d" % k, first.json["kv_transfer_params"])
            if reply.status != 200:
                self.assertIn(reply.json["error"], ("peer_lost", "incompatible"), reply)
                failed += 1
                break
            self.assertTrue(reply.json["verified"])
        self.assertEqual(failed, 1, "nothing failed")
        for node in (prefill, decode):
            self.assert_quiet(node)

        def again():
            first = prefill.prefill("again-%f" % time.monotonic(), 700)
            return decode.decode(first.json["request_id"], first.json["kv_transfer_params"]).status == 200
        wait_for(again, "a new path")
        self.end()

    def test_a_path_cannot_be_made(self):
        for role, function in (("decode", "ncclGetUniqueId"), ("prefill", "ncclCommInitRankConfig")):
            nodes = {name: self.failing(name, function, 1, **CUDA) if name == role else self.node(name, **CUDA)
                     for name in ("prefill", "decode")}
            self.check_recovers(nodes["prefill"], nodes["decode"], 1)

    def test_a_path_fails(self):
        for role, function, n in (("prefill", "ncclSend", 3), ("decode", "ncclRecv", 3), ("decode", "nccl", 30),
                                  ("prefill", "nccl", 30)):
            nodes = {name: self.failing(name, function, n, **CUDA) if name == role else self.node(name, **CUDA)
                     for name in ("prefill", "decode")}
            self.check_recovers(nodes["prefill"], nodes["decode"], 50)

    def test_decode_device_fails(self):
        self.decode_device_fails("nccl", ("internal", "io", "peer_lost", "incompatible"))

    def test_prefill_device_fails(self):
        self.prefill_device_fails("nccl", ("peer_lost", "prefill_failed", "internal", "io", "incompatible"))

    # Processes that end, or stand still, with a message under way: the communicator is aborted, and then the pages are
    # free.

    def test_decode_node_dies_in_the_middle(self):
        self.decode_node_dies()

    def test_prefill_node_dies_in_the_middle(self):
        self.prefill_node_dies()

    def test_a_node_that_stands_still(self):
        for role in ("prefill", "decode"):
            prefill = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "20000"}, "prefill", **BIG)
            decode = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "20000"}, "decode", **BIG)
            still, other = (prefill, decode) if role == "prefill" else (decode, prefill)
            asking = self.start_moving(prefill, decode, "still", 2500)
            os.kill(still.pid, signal.SIGSTOP)
            try:
                self.assert_quiet(other)
            finally:
                os.kill(still.pid, signal.SIGCONT)
            reply = asking.wait()
            self.assertIn(reply.error[1], (None, "peer_lost"), reply)
            self.assert_quiet(still)
            self.run_one(prefill, decode, "after", 100)
            self.end()

    def test_cancelled_while_the_device_is_late(self):
        prefill = self.node("prefill", **CUDA)
        decode = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "30000"}, "decode", **CUDA)
        for k in range(4):
            asking = self.start_moving(prefill, decode, "c%d" % k, 3000)
            (decode if k % 2 == 0 else prefill).cancel("c%d" % k)
            reply = asking.wait()
            self.assertIn(reply.status, (200, 499, 502), reply)
            self.assert_quiet(decode, 2 * PATIENCE_S)
            self.assert_quiet(prefill, 2 * PATIENCE_S)
        self.run_one(prefill, decode, "after", 2000)
        self.end()


if __name__ == "__main__":
    unittest.main()
