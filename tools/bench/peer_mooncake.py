#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The workload of `kvferry bench` with Mooncake's transfer engine over tcp: batch_transfer_sync with a notification.

MC_TCP_PROTO is refused: with it the notification comes before the data.
"""
import importlib.metadata
import os
import sys

import workload

# Connections that stay, and a queue for as many blocks as a transfer has: the fastest that is safe.
SETTINGS = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535"}


class Engine:
    def __init__(self, base, length, options):
        from mooncake.engine import TransferEngine
        self.engine = TransferEngine()
        self.base = base
        for what, code in (("initialize", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")),
                           ("register_memory", self.engine.register_memory(base, length, "cpu:0"))):
            if code != 0:
                raise RuntimeError("%s gives %d" % (what, code))

    def hello(self):
        return "127.0.0.1:%d" % self.engine.get_rpc_port()

    def connect(self, hello, base):
        self.peer = hello
        self.remote_base = base

    def prepare(self, local, remote, block_bytes):
        from mooncake.engine import TransferOpcode
        self.write = TransferOpcode.Write
        self.lists = ((self.base + local).tolist(), (self.remote_base + remote).tolist(), [block_bytes] * len(local))

    def make(self, tag):
        from mooncake.engine import TransferNotify
        self.notify = TransferNotify("sender", tag)

    def post(self):
        code = self.engine.batch_transfer_sync(self.peer, *self.lists, self.write, self.notify)
        if code != 0:
            raise RuntimeError("batch_transfer_sync gives %d" % code)

    def progress(self):
        pass

    def seen(self, tag):
        return any(notify.msg == tag for notify in self.engine.get_notifies())


def main():
    parser = workload.arguments(__doc__)
    parser.set_defaults(poll_us=100.0)  # a receiver that spins takes a core from the engine's threads
    options = parser.parse_args()
    if "MC_TCP_PROTO" in os.environ:
        parser.error("MC_TCP_PROTO is set: what it measures is not a transfer that has ended; unset it")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    about = {"mover": "mooncake", "transport": "tcp",
             "version": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}
    return workload.run(Engine, options, about)


if __name__ == "__main__":
    sys.exit(main())
