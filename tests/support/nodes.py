# SPDX-License-Identifier: Apache-2.0
"""Real nodes for tests: start on free ports, talk HTTP, look inside, and end by pid.

A test class derives from ClusterTest; every node it starts is stopped at the end, must drain and exit 0 unless the test
killed it, and must have let go of every page before.
"""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

KVFERRY = os.environ["KVFERRY"]
# A machine that builds at the same time, or a sanitizer: how long to wait for what has no time of its own.
PATIENCE_S = 60.0
# By how much a sanitizer stretches the times that the contracts promise.
SLOWNESS = float(os.environ.get("KVFERRY_SLOWNESS", "1"))

# host: UCX carries; shm: the pools are mapped.
MEMORY = os.environ.get("KVF_TEST_MEMORY", "host")
# nccl: decode nodes have another device than prefill nodes.
MOVER = os.environ.get("KVF_TEST_MOVER", "auto")

CONFIG = """\
http:
  listen: 127.0.0.1:0
control:
  listen: "127.0.0.1:0"
  key_file: cluster.key
model: {preset: gemma-3-270m, tokens_per_block: 32}
pool:
  memory: %s
  bytes: 64MiB
mover: {kind: %s}
""" % (MEMORY, MOVER)


class Reply:
    """An HTTP answer; `json` is None when the body is not JSON."""

    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers
        self.body = body
        try:
            self.json = json.loads(body)
        except ValueError:
            self.json = None

    def __repr__(self):
        return "HTTP %d %s" % (self.status, self.body[:500])

    @property
    def error(self):
        """(HTTP status, error name) for comparisons."""
        return self.status, self.json.get("error") if isinstance(self.json, dict) else None


def wait_for(condition, what, seconds=PATIENCE_S):
    """Poll until condition() is true and return it; AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError("not within %.1f s: %s" % (seconds, what() if callable(what) else what))
        time.sleep(0.01)


_given = set()  # ports: a node that is being started does not have its own yet
_given_lock = threading.Lock()


def place():
    """Settings of a node that another one will follow at the same addresses. The ports are not among those that the
    system gives to outgoing connections: such a connection may have the port when the follower wants it."""
    ports = []
    while len(ports) < 2:
        port = random.randrange(20000, 32000)
        with _given_lock, socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                ports.append(port)
    return {"http.listen": "127.0.0.1:%d" % ports[0], "control.listen": "127.0.0.1:%d" % ports[1]}


class Asking:
    """A call that runs on a thread of its own."""

    def __init__(self, call):
        self.ended = False
        self._result = None
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            self._result = call()
        except (OSError, http.client.HTTPException) as error:
            self._error = error
        self.ended = True

    def wait(self):
        """Its result, or the exception when the other end broke the connection."""
        self._thread.join(2 * PATIENCE_S)
        if not self.ended:
            raise AssertionError("the call did not end")
        return self._error or self._result


class Node:
    """One process of `kvferry prefill` or `kvferry decode`, or of another program that takes its place."""

    def __init__(self, role, folder, settings, program=KVFERRY, environment=None):
        self.role = role
        self.log = []
        self.ready = None
        self.killed = False
        arguments = ["%s=%s" % item for item in settings.items()]
        config = os.path.join(folder, "node.yaml")
        command = [program, role, "--config", config]
        for argument in arguments:
            command += ["--set", argument]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, errors="replace",
                                        env={**os.environ, **self.device(role), **(environment or {})})
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def device(role):
        """The environment of a role, if each has a device of its own."""
        return {"CUDA_VISIBLE_DEVICES": "1" if role == "decode" else "0"} if MOVER == "nccl" else {}

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if line.startswith('{"ready":true'):
                self.ready = json.loads(line)

    def text(self):
        return "\n".join(["--- %s %d" % (self.role, self.pid)] + self.log[-60:])

    def wait_ready(self):
        wait_for(lambda: self.ready or self.process.poll() is not None, "a ready line")
        if self.ready is None:
            raise AssertionError("the node ended with %d\n%s" % (self.process.wait(), self.text()))
        return self

    @property
    def url(self):
        return "http://" + self.ready["http"]

    def address(self, which):
        host, _, port = self.ready[which].rpartition(":")
        return host.strip("[]"), int(port)

    # HTTP

    def http(self, method, path, body=None, raw=None, headers=None, timeout=PATIENCE_S):
        """One call on a connection of its own. `raw` is sent as it is, `body` as JSON."""
        connection = http.client.HTTPConnection(*self.address("http"), timeout=timeout)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, body=data, headers=headers or {})
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path, **more):
        return self.http("GET", path, **more)

    def post(self, path, body, **more):
        return self.http("POST", path, body, **more)

    def prefill(self, request_id, prompt_len, **more):
        return self.post("/v1/prefill", {"request_id": request_id, "prompt_len": prompt_len, **more})

    def decode(self, request_id, params, **more):
        return self.post("/v1/decode", {"request_id": request_id, "kv_transfer_params": params, **more})

    def cancel(self, request_id):
        return self.post("/v1/cancel", {"request_id": request_id})

    def transfer(self, request_id):
        return self.get("/v1/transfers/" + request_id)

    def status(self):
        reply = self.get("/v1/status")
        if reply.status != 200 or reply.json is None:
            raise AssertionError("/v1/status: %r" % reply)
        return reply.json

    def pages(self):
        """Pages of all pools by label. The labels of each pool add up to it, always."""
        status = self.status()
        for pool in status["pools"]:
            if sum(pool["pages"].values()) != pool["total"]:
                raise AssertionError("labels do not add up to the pool: %r" % pool)
        if sum(status["pages"].values()) != status["pages_total"]:
            raise AssertionError("labels do not add up to the pools: %r" % status)
        return status["pages"]

    def quiet(self):
        """Nothing runs and every page is free."""
        status = self.status()
        counters = status["counters"]
        return self.pages()["free"] + self.pages()["cached"] == status["pages_total"] and status["transfers"]["running"] == 0 and \
            counters["sends_live"] == 0 and counters["recvs_live"] == 0

    def metrics(self):
        reply = self.get("/metrics")
        if reply.status != 200:
            raise AssertionError("/metrics: %r" % reply)
        return reply.body.decode()

    # The process

    def alive(self):
        return self.process.poll() is None

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """SIGKILL, and wait until the process is gone."""
        self.killed = True
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds=PATIENCE_S):
        """SIGTERM, and the exit code."""
        if self.alive():
            self.signal(signal.SIGTERM)
        return self.wait_end(seconds)

    def wait_end(self, seconds=PATIENCE_S):
        """Wait for the end of the process; the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        self.process.stderr.close()
        return code

    def resident_bytes(self):
        with open("/proc/%d/statm" % self.pid, encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def private_bytes(self):
        """Resident memory that no other process has, too: not pools that are shared."""
        with open("/proc/%d/statm" % self.pid, encoding="ascii") as statm:
            _, resident, shared = statm.read().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def cpu_ticks(self):
        """User and system time so far, all threads, in clock ticks."""
        with open("/proc/%d/stat" % self.pid, encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])


class ClusterTest(unittest.TestCase):
    """A folder with a cluster key, and the nodes of a test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.nodes = []
        self.addCleanup(self._kill_all)
        subprocess.run([KVFERRY, "keygen", os.path.join(self.folder, "cluster.key")], check=True, timeout=PATIENCE_S)
        with open(os.path.join(self.folder, "node.yaml"), "w", encoding="utf-8") as out:
            out.write(CONFIG)

    def _kill_all(self):
        for node in self.nodes:
            if node.alive():
                node.kill()
                node._reader.join(PATIENCE_S)
            if not node.process.stderr.closed:
                node.process.stderr.close()

    def node(self, role, **settings):
        """Start a node; keys are written with one underscore pair for the dot: pool__bytes="1GiB"."""
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        settings.setdefault("instance", "%s-%d" % (role, len(self.nodes)))
        node = Node(role, self.folder, settings)
        self.nodes.append(node)
        return node.wait_ready()

    def pair(self, **settings):
        return self.node("prefill", **settings), self.node("decode", **settings)

    def finish(self):
        """To be called at the end of a test: nothing is held, and every node drains and exits 0."""
        for node in self.nodes:
            if not node.killed:
                self.assert_quiet(node)
        for node in self.nodes:
            if not node.killed:
                code = node.stop()
                self.assertEqual(code, 0, node.text())

    def assert_quiet(self, node, seconds=PATIENCE_S):
        """Every page is free, the labels add up to the pool, and nothing runs."""
        wait_for(node.quiet, lambda: "all pages free: %r\n%s" % (node.get("/v1/status").json, node.text()), seconds)

    def start_moving(self, prefill, decode, request_id, prompt_len):
        """A request of which bytes have arrived; the waiting decode call (ended, if it was too quick for us).

        Pages that are granted are no sign of that: a receive grants them before the sender knows of it.
        """
        first = prefill.prefill(request_id, prompt_len)
        self.assertEqual(first.status, 200, first)
        before = decode.status()["counters"]["bytes_received"]
        asking = Asking(lambda: decode.decode(request_id, first.json["kv_transfer_params"]))
        wait_for(lambda: asking.ended or decode.status()["counters"]["bytes_received"] > before, "bytes to arrive")
        return asking

    def run_one(self, prefill, decode, request_id, prompt_len=600, **more):
        """A whole request that must go well; the decode node's answer."""
        first = prefill.prefill(request_id, prompt_len, **more)
        self.assertEqual(first.status, 200, first)
        second = decode.decode(request_id, first.json["kv_transfer_params"], **more)
        self.assertEqual(second.status, 200, second)
        self.assertTrue(second.json["verified"], second)
        self.assertEqual(second.json.get("mismatched_bytes", 0), 0)
        return second.json
