#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The workload of `kvferry bench` with NIXL: one side writes its blocks into the other's, with a notification.

The whole pool is one prepared table of slots, as caches of KV pages use it, and each transfer picks indices of it.
UCX_* variables in the environment choose the transports.
"""
import importlib.metadata
import os
import sys

import workload


class Engine:
    def __init__(self, base, length, options):
        import nixl_cu13 as nixl
        import numpy
        self.numpy = numpy
        self.base = base
        self.length = length
        name = "agent-%d" % os.getpid()
        config = nixl.nixl_agent_config(enable_prog_thread=options.progress_thread, num_threads=0, backends=[])
        self.agent = nixl.nixl_agent(name, config)
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "none"} if options.no_error_handling else {})
        self.memory = self.agent.register_memory([(base, length, 0, "")], "DRAM")
        self.posted = None
        self.state = "DONE"

    def hello(self):
        return self.agent.get_agent_metadata()

    def connect(self, hello, base):
        peer = self.agent.add_remote_agent(hello)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.remote_base = base

    def table(self, base, block_bytes):
        slots = self.numpy.zeros((self.length // block_bytes, 3), dtype=self.numpy.uint64)
        slots[:, 0] = self.numpy.uint64(base) + self.numpy.arange(len(slots), dtype=self.numpy.uint64) * \
            self.numpy.uint64(block_bytes)
        slots[:, 1] = block_bytes
        return slots

    def prepare(self, local, remote, block_bytes):
        self.lists = [self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.table(self.base, block_bytes), "DRAM"),
                      self.agent.prep_xfer_dlist(self.peer, self.table(self.remote_base, block_bytes), "DRAM")]
        self.indices = [(offsets // block_bytes).astype(self.numpy.int32) for offsets in (local, remote)]

    def make(self, tag):
        self.tag = tag.encode()
        if self.posted is not None:
            self.agent.release_xfer_handle(self.posted)
        self.posted = self.agent.make_prepped_xfer("WRITE", self.lists[0], self.indices[0], self.lists[1],
                                                   self.indices[1], self.tag)

    def post(self):
        self.state = self.agent.transfer(self.posted, self.tag)
        while self.state == "PROC":
            self.state = self.agent.check_xfer_state(self.posted)
        if self.state != "DONE":
            raise RuntimeError("the transfer ended as " + self.state)

    def progress(self):
        self.agent.get_new_notifs()  # without a progress thread nothing goes on by itself

    def seen(self, tag):
        return any(tag.encode() in told for told in self.agent.get_new_notifs().values())


def main():
    parser = workload.arguments(__doc__)
    parser.add_argument("--progress-thread", action="store_true", help="NIXL's default; costs a core")
    parser.add_argument("--no-error-handling", action="store_true", help="needed by UCX's shared memory")
    options = parser.parse_args()
    about = {"mover": "nixl", "transport": os.environ.get("UCX_TLS", "default"),
             "version": importlib.metadata.version("nixl-cu13")}
    return workload.run(Engine, options, about)


if __name__ == "__main__":
    sys.exit(main())
