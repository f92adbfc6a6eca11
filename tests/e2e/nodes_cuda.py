# SPDX-License-Identifier: Apache-2.0
"""Nodes whose pages are on a device: by which way they go, and what becomes of requests when a device, a mapping or a
process fails. The device is the stand-in (tests/support/cuda/standin.h); everything else is real.

Everything else about such nodes is in the other tests, which run once more with KVF_TEST_MEMORY=cuda.
"""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from device_nodes import CUDA, DeviceTest  # noqa: E402
from nodes import PATIENCE_S  # noqa: E402

VMM = dict(CUDA, pool__device_alloc="vmm")


class CudaTest(DeviceTest):
    def test_each_way(self):
        for direction in ("push", "pull"):
            for kinds, mover in ((("auto", "auto"), "cuda"), (("auto", "cuda"), "cuda"), (("ucx", "auto"), "ucx"),
                                 (("auto", "ucx"), "ucx")):
                prefill = self.node("prefill", mover__kind=kinds[0], mover__direction=direction, **CUDA)
                decode = self.node("decode", mover__kind=kinds[1], mover__direction=direction, **CUDA)
                self.check_way(prefill, decode, mover)
                self.assertEqual([self.fallbacks(node) for node in (prefill, decode)], [0, 0])
                self.finish()
                self.nodes.clear()

    def test_virtual_memory(self):
        """Both pools, or those of one node, are the driver's virtual memory; each way to pull, too."""
        for context, generation, direction in (("vmm", "vmm", "push"), ("malloc", "vmm", "push"), ("vmm", "malloc", "pull")):
            prefill = self.node("prefill", pool__device_alloc=context, mover__direction=direction, **CUDA)
            decode = self.node("decode", mover__kind="cuda", pool__device_alloc=generation, mover__direction=direction, **CUDA)
            self.check_way(prefill, decode, "cuda")
            self.assertEqual([self.fallbacks(node) for node in (prefill, decode)], [0, 0])
            self.end()

    def test_virtual_memory_that_cannot_be_had(self):
        """Where it has no descriptor; where it cannot be mapped, once the first pool is; and where there is none."""
        self.check_way(self.failing("prefill", "cuMemExportToShareableHandle", 1, **VMM), self.node("decode", **VMM), "tcp")
        self.end()
        prefill = self.node("prefill", **VMM)
        decode = self.failing("decode", "cuMemImportFromShareableHandle", 2, **VMM)
        self.check_way(prefill, decode, "tcp")
        self.assertEqual(self.fallbacks(decode), 1)
        self.assertIn("are not mapped, so tcp carries: opening the descriptor of its memory", decode.text())
        self.end()
        self.refused(VMM, "pool.bytes", "of device 0, by vmm", environment={"KVF_STANDIN_CUDA_FAIL": "cuMemMap:2"})
        self.refused({"pool__device_alloc": "vmm", "pool__memory": "shm"}, "is for memory of a device")

    def test_zero_freed(self):
        """Pools that one request fills: each gets the pages of the one before. What it keeps, and what moved, is right."""
        for memory in ("cuda", "shm"):
            settings = {"pool__memory": memory, "pool__zero_freed": "true", "pool__bytes": "16MiB", "verify": "attention"}
            prefill, decode = self.pair(**settings)
            for k in range(6):
                self.run_one(prefill, decode, "z%d" % k, 700)
            self.end()

    def test_device_to_cpu_and_back(self):
        """The kinds of memory need not be the same: what the CPU does not reach is gathered, and scattered."""
        for context, generation in (("cuda", "host"), ("cuda", "shm"), ("host", "cuda"), ("shm", "cuda")):
            prefill = self.node("prefill", **dict(CUDA, pool__memory=context))
            decode = self.node("decode", **dict(CUDA, pool__memory=generation))
            self.check_way(prefill, decode, "tcp")
            self.end()

    def test_without_digests(self):
        for kind, mover in (("auto", "cuda"), ("ucx", "ucx"), ("tcp", "tcp")):
            prefill, decode = self.pair(mover__kind=kind, mover__digests="false", **CUDA)
            self.check_way(prefill, decode, mover)
            self.end()

    def test_cuda_was_asked_for_and_is_not_possible(self):
        prefill = self.node("prefill", pool__memory="host")
        decode = self.node("decode", mover__kind="cuda", **CUDA)
        first = prefill.prefill("no", 700)
        reply = decode.decode("no", first.json["kv_transfer_params"])
        self.assertEqual(reply.error, (422, "incompatible"), reply)
        self.assertIn("devices that reach each other", reply.json["message"])
        self.finish()

    def test_what_does_not_go_together(self):
        self.refused({"pool__memory": "shm", "mover__kind": "cuda"}, "mover cuda is for pools of kind cuda")
        self.refused({"pool__memory": "cuda", "mover__kind": "mapped"}, "mover mapped is for pools of kind shm")

    def test_no_driver(self):
        self.refused({"pool__memory": "cuda"}, "pool.memory", "NVIDIA driver", environment={"KVF_STANDIN_CUDA_DEVICES": "0"})

    def test_no_room_on_the_device(self):
        self.refused({"pool__memory": "cuda"}, "of device 0: out of memory",
                     environment={"KVF_STANDIN_CUDA_FAIL": "cudaMalloc:2"})

    # Mappings that cannot be had: the CPU's memory is the way.

    def test_memory_that_cannot_be_shared(self):
        prefill = self.failing("prefill", "cudaIpcGetMemHandle", 1, **CUDA)
        decode = self.node("decode", **CUDA)
        self.assertIn("mover cuda is not available, so all goes through tcp", prefill.text())
        self.check_way(prefill, decode, "tcp")
        self.finish()

    def test_mapping_that_cannot_be_opened(self):
        """The first pool can be, the second cannot: what was opened is closed, and given back."""
        prefill = self.node("prefill", **CUDA)
        decode = self.failing("decode", "cudaIpcOpenMemHandle", 2, **CUDA)
        self.check_way(prefill, decode, "tcp")
        self.assertEqual(self.fallbacks(decode), 1)
        self.assertIn("are not mapped, so tcp carries: opening its memory", decode.text())
        self.finish()

    # A device that fails, for good: an error for each request, never 200, nothing hangs, and the other side is well.

    def test_decode_device_fails(self):
        for kind in ("auto", "ucx"):
            self.decode_device_fails(kind, ("internal", "io"))

    def test_prefill_device_fails(self):
        for kind in ("auto", "ucx"):
            self.prefill_device_fails(kind, ("peer_lost", "prefill_failed", "internal", "io"))

    # Processes that end with mappings open.

    def test_decode_node_dies_in_the_middle(self):
        self.decode_node_dies()

    def test_prefill_node_dies_in_the_middle(self):
        self.prefill_node_dies()

    def test_cancelled_while_the_device_is_late(self):
        """Its pages come back when the device has let go of them, and serve the next request."""
        for kind in ("auto", "ucx"):
            prefill = self.node("prefill", mover__kind=kind, **CUDA)
            decode = self.node_with({"KVF_STANDIN_CUDA_DELAY_US": "30000"}, "decode", mover__kind=kind, **CUDA)
            for k in range(4):
                asking = self.start_moving(prefill, decode, "c%d" % k, 5000)
                decode.cancel("c%d" % k)
                reply = asking.wait()
                self.assertIn(reply.status, (200, 499), reply)
                self.assert_quiet(decode, 2 * PATIENCE_S)
            self.run_one(prefill, decode, "after", 2000)
            self.end()


if __name__ == "__main__":
    unittest.main()
