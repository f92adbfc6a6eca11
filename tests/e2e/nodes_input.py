# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind: a clear error with the contract's code, and the next request works."""

import base64
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from nodes import KVFERRY, PATIENCE_S, ClusterTest, wait_for  # noqa: E402


class ConfigTest(ClusterTest):
    """What a node says about its configuration before it starts: one line, exit 2."""

    def refuse(self, role, *arguments, config="node.yaml", code=2):
        done = subprocess.run([KVFERRY, role, "--config", os.path.join(self.folder, config), *arguments],
                              capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertNotIn('{"ready":true', done.stderr)
        self.assertEqual(done.stdout, "")
        return done.stderr

    def write(self, text, name="bad.yaml"):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as out:
            out.write(text)
        return name

    def test_unknown_keys_name_the_nearest(self):
        self.assertIn("pool.bytes", self.refuse("prefill", "--set", "pool.byte=1GiB"))
        self.assertIn("heartbeat.lost_ms", self.refuse("decode", "--set", "heartbeat.losst_ms=1"))
        error = self.refuse("decode", config=self.write("pool:\n  memory: host\n  bites: 1GiB\n"))
        self.assertIn("pool.bytes", error)
        self.assertIn("3", error)

    def test_wrong_types_and_values(self):
        for setting, words in (("pool.bytes=many", ["pool.bytes", "many"]),
                               ("pool.bytes=-1", ["pool.bytes"]),
                               ("pool=3", ["pool.memory, pool.device_alloc, pool.zero_freed, pool.bytes"]),
                               ("limits.frame_bytes=1MiB", ["limits.frame_bytes", "2097152"]),
                               ("model.tokens_per_block=33", ["model.tokens_per_block", "16", "128"]),
                               ("model.preset=gemma", ["model.preset", "gemma-3-270m", "mla-deepseek-v3"]),
                               ("prefix_cache=maybe", ["prefix_cache", "true"]),
                               ("limits.transfers=0", ["limits.transfers"]),
                               ("limits.lease_ms=1.5", ["limits.lease_ms"]),
                               ("verify=all", ["verify", "bytes"]),
                               ("engine.extra_tokens=9", ["engine.extra_tokens", "8"]),
                               ("http.listen=nowhere", ["http.listen", "nowhere", ":8200"]),
                               ("control.listen=127.0.0.1:99999", ["control.listen", "99999", ":9200"]),
                               ("nonsense", ["nonsense"])):
            with self.subTest(setting):
                error = self.refuse("prefill", "--set", setting)
                for word in words:
                    self.assertIn(word, error)
        for text in ("pool: {bytes: [1]}\n", "peers: 5: 6\n", "pool: {memory: host\n", "[1, 2]\n", "\x00\x01", "{" * 3000,
                     "pool: {bytes: 1GiB, bytes: 2GiB}\n"):
            with self.subTest(text[:20]):
                self.assertIn("bad.yaml", self.refuse("decode", config=self.write(text)))

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "there is a device")
    def test_device_memory_without_a_device(self):
        """Whether it was built with CUDA or not: it starts, and says that it is not to be had."""
        error = self.refuse("decode", "--set", "pool.memory=cuda")
        self.assertIn("unsupported: pool.memory: ", error)
        self.assertRegex(error, "NVIDIA driver|built without CUDA")

    def test_wrong_transports_and_devices(self):
        """One line, whether UCX refuses them or would go on without them."""
        for settings, words in ((["ucx.tls=nonsense"], ["tls", "nonsense", "tcp"]),
                                (["ucx.tls=tcp,nonsense"], ["ucx.tls", "nonsense"]),
                                (["ucx.devices=eth99"], ["ucx.devices", "eth99", "lo"]),
                                (["ucx.tls=tcp", "ucx.devices=eth99"], ["devices", "eth99", "lo"]),
                                (["ucx.tls=tcp,nonsense", "log.level=error"], ["nonsense"]),
                                (["ucx.tls=nonsense", "log.level=trace"], ["nonsense"])):
            with self.subTest(settings):
                error = self.refuse("decode", *(word for setting in settings for word in ("--set", setting)))
                self.assertEqual(error.count("\n"), 1, error)
                self.assertRegex(error, r"\Akvferry decode: .*use one or more of")
                for word in words:
                    self.assertIn(word, error)

    def test_files_that_are_not_there(self):
        self.assertIn("none.yaml", self.refuse("prefill", config="none.yaml"))
        error = self.refuse("prefill", "--set", "control.key_file=none.key")
        self.assertIn("none.key", error)
        self.assertIn("keygen", error)
        with open(os.path.join(self.folder, "short.key"), "wb") as out:
            out.write(b"x" * 31)
        self.assertIn("short.key", self.refuse("prefill", "--set", "control.key_file=short.key"))

    def test_key_file_is_never_overwritten(self):
        path = os.path.join(self.folder, "cluster.key")
        with open(path, "rb") as key:
            before = key.read()
        self.assertEqual((len(before), os.stat(path).st_mode & 0o777), (32, 0o600))
        done = subprocess.run([KVFERRY, "keygen", path], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("cluster.key", done.stderr)
        with open(path, "rb") as key:
            self.assertEqual(key.read(), before)

    def test_port_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for key in ("http.listen", "control.listen"):
                error = self.refuse("prefill", "--set", "%s=127.0.0.1:%d" % (key, port), code=1)
                self.assertEqual(error.count("\n"), 1, error)  # before any memory is prepared
                self.assertIn("127.0.0.1:%d (%s)" % (port, key), error)
                self.assertIn("in use", error)
        same = ["--set", "http.listen=127.0.0.1:%d" % port, "--set", "control.listen=127.0.0.1:%d" % port]
        self.assertIn("control.listen", self.refuse("decode", *same, code=1))

    def test_control_beyond_loopback(self):
        error = self.refuse("prefill", "--set", "control.listen=0.0.0.0:0", code=2)
        self.assertRegex(error, r"\Akvferry prefill: control.listen: 0.0.0.0:0 .*127.0.0.1.*\n\Z")

    def test_pool_too_small_for_anything(self):
        error = self.refuse("prefill", "--set", "pool.bytes=4KiB", code=2)
        self.assertRegex(error, r"\A.*: pool.bytes: 4096 .*\n\Z")

    def test_pool_larger_than_the_machine(self):
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for memory in ("host", "shm"):
            with self.subTest(memory):
                error = self.refuse("decode", "--set", "pool.memory=" + memory, "--set", "pool.bytes=900TiB", code=1)
                self.assertRegex(error, r"\A.*: pool.bytes: %d .* %d .*\n\Z" % (900 << 40, machine))
                error = self.refuse("decode", "--set", "pool.memory=" + memory, "--set",
                                    "pool.bytes=%d" % (machine + 1), code=1)
                self.assertIn("pool.bytes: %d " % (machine + 1), error)

    def test_memory_that_cannot_be_had(self):
        error = self.refuse("decode", "--set", "pool.memory=host", "--set", "mover.kind=mapped")
        self.assertRegex(error.splitlines()[-1], r"\Akvferry decode: unsupported: .*mapped needs pools of kind shm")
        error = self.refuse("decode", "--set", "ucx.tls=cma")  # it carries no messages
        self.assertRegex(error.splitlines()[-1], r"\Akvferry decode: .*: ucx.tls, ucx.devices: .*\"cma\"")

    def test_defaults_are_a_valid_file(self):
        done = subprocess.run([KVFERRY, "config", "--defaults"], capture_output=True, text=True, timeout=PATIENCE_S,
                              check=True)
        for key in ("instance", "tokens_per_block", "request_timeout_ms", "lost_ms", "prefill_tokens_per_s"):
            self.assertIn(key, done.stdout)
        self.write(done.stdout, "node.yaml")
        self.node("prefill", http__listen="127.0.0.1:0", control__listen="127.0.0.1:0", pool__bytes="16MiB",
                  pool__memory="host")
        self.finish()


class RequestTest(ClusterTest):
    """Bad requests to a running pair."""

    def setUp(self):
        super().setUp()
        self.prefill, self.decode = self.pair()
        self.serial = 0

    def fine(self):
        """The next request works."""
        self.serial += 1
        self.run_one(self.prefill, self.decode, "fine-%d" % self.serial, 700)

    def ticket(self, request_id, prompt_len=700):
        reply = self.prefill.prefill(request_id, prompt_len)
        self.assertEqual(reply.status, 200, reply)
        return reply.json["kv_transfer_params"]

    def test_bodies_that_are_not_right(self):
        good = {"request_id": "r", "prompt_len": 100}
        bodies = [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b"[" * 100000, b'{"request_id":"a","request_id":"b"}']
        bodies += [json.dumps(dict(good, **change)).encode() for change in (
            {"request_id": ""}, {"request_id": "x" * 129}, {"request_id": 5}, {"request_id": None},
            {"request_id": "a\nb"}, {"prompt_len": 0}, {"prompt_len": -5}, {"prompt_len": 2 ** 40 + 1}, {"prompt_len": 10.5},
            {"prompt_len": "100"}, {"prompt_len": True}, {"prompt_len": None}, {"hash_ids": [1, 2]},
            {"hash_ids": ["a"]}, {"hash_ids": 7}, {"draft_len": -1}, {"draft_len": "no"}, {"timeout_ms": -1},
            {"timeout_ms": "soon"}, {"tokens": [1, 2, 3]}, {"tokens": ["a"] * 100})]
        bodies += [b'{"request_id":"r"}', b'{"prompt_len":100}', b'{"request_id":"r","prompt_len":1e400}']
        for body in bodies:
            with self.subTest(body[:80]):
                reply = self.prefill.http("POST", "/v1/prefill", raw=body)
                self.assertEqual(reply.error, (400, "invalid"), reply)
                self.assertTrue(reply.json["message"])
        params = self.ticket("d")
        for body in ({"request_id": "d"}, {"kv_transfer_params": params}, {"request_id": "d", "kv_transfer_params": 5},
                     {"request_id": "d", "kv_transfer_params": {"ticket": 5, "prompt_len": 700}},
                     {"request_id": "d", "kv_transfer_params": {"prompt_len": 700}},
                     {"request_id": "d", "kv_transfer_params": params, "max_tokens": "x"},
                     {"request_id": "d", "kv_transfer_params": params, "hash_ids": [1]},
                     {"request_id": "d", "kv_transfer_params": params, "timeout_ms": -1}):
            with self.subTest(str(body)[:60]):
                self.assertEqual(self.decode.post("/v1/decode", body).error, (400, "invalid"))
        for node in (self.prefill, self.decode):
            self.assertEqual(node.post("/v1/cancel", {}).error, (400, "invalid"))
        # The ticket is still good after all that.
        reply = self.decode.decode("d", params)
        self.assertEqual(reply.status, 200, reply)
        self.fine()
        self.finish()

    def test_paths_and_methods(self):
        self.assertEqual(self.prefill.get("/v1/nothing").status, 404)
        self.assertEqual(self.prefill.get("/").status, 404)
        self.assertEqual(self.prefill.get("/" + "x" * 5000).status // 100, 4)
        self.assertIn(self.prefill.get("/v1/prefill").status, (404, 405))
        for node, path in ((self.prefill, "decode"), (self.decode, "prefill")):
            reply = node.post("/v1/" + path, {})
            self.assertEqual(reply.error, (404, "unknown"), reply)
            self.assertIn("this is a %s node" % node.role, reply.json["message"])
            self.assertIs(reply.json["recompute"], False)
        self.assertEqual(self.decode.get("/v1/transfers/never-seen").error, (404, "unknown"))
        self.assertEqual(self.decode.get("/healthz").status, 200)
        self.assertEqual(self.decode.get("/readyz").status, 200)
        self.fine()
        self.finish()

    def test_oversized_bodies(self):
        for node, path in ((self.prefill, "/v1/prefill"), (self.decode, "/v1/decode"), (self.prefill, "/v1/cancel")):
            for size in (1 << 20, 2 << 20):
                reply = node.http("POST", path, raw=b'{"request_id":"' + b"x" * size + b'"}')
                self.assertEqual(reply.error, (413, "too_large"), reply)
            before = node.resident_bytes()
            with socket.create_connection(node.address("http"), timeout=PATIENCE_S) as client:
                client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 4294967296\r\n\r\n" % path.encode())
                sent = 0
                try:
                    while sent < 256 << 20:
                        client.sendall(bytes(1 << 16))
                        sent += 1 << 16
                except ConnectionError:
                    pass  # closed in our face, as it should be
            self.assertLess(sent, 256 << 20, "a body without end is read on and on")
            self.assertLess(node.resident_bytes() - before, 64 << 20)
        self.fine()
        self.finish()

    def test_slow_and_broken_http(self):
        rng = random.Random(7)
        held = []
        for text in (b"POST /v1/prefill HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"GET /v1/st", b"\x16\x03\x01",
                     rng.randbytes(2000), b"POST /v1/prefill HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"):
            client = socket.create_connection(self.prefill.address("http"), timeout=PATIENCE_S)
            client.sendall(text)
            held.append(client)
        self.fine()
        for client in held:
            client.close()
        self.fine()
        self.finish()

    def test_forged_tickets(self):
        params = self.ticket("forged")
        raw = params["ticket"]
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
        bad = ["", "x", raw[:-4], raw + "AAAA", raw * 40, "\u00e9" * 20, base64.urlsafe_b64encode(bytes(100)).decode().rstrip("=")]
        for place in range(0, len(raw), max(1, len(raw) // 40)):
            bad.append(raw[:place] + letters[(letters.index(raw[place]) + 32) % 64] + raw[place + 1:])
        for ticket in bad:
            with self.subTest(ticket[:200]):
                reply = self.decode.decode("forged", dict(params, ticket=ticket))
                self.assertIn(reply.error, ((403, "forged"), (400, "invalid")), reply)
        self.assertEqual(self.decode.decode("forged", dict(params, ticket=bad[-1])).error, (403, "forged"))
        # Another request may not use it, nor one of another length.
        self.assertEqual(self.decode.decode("somebody-else", params).status // 100, 4)
        reply = self.decode.decode("forged", dict(params, prompt_len=701))
        self.assertEqual(reply.status // 100, 4, reply)
        self.assertEqual(self.decode.decode("forged", params).status, 200)
        self.fine()
        self.finish()

    def test_ticket_of_another_cluster(self):
        path = os.path.join(self.folder, "other.key")
        subprocess.run([KVFERRY, "keygen", path], check=True, timeout=PATIENCE_S)
        stranger = self.node("decode", control__key_file="other.key")
        params = self.ticket("foreign")
        reply = stranger.decode("foreign", params)
        self.assertEqual(reply.error, (403, "forged"), reply)
        self.assertIn("control.key_file", reply.json["message"])
        self.assertEqual(stranger.transfer("foreign").json["message"], reply.json["message"])
        self.assertEqual(self.decode.decode("foreign", params).status, 200)
        self.fine()
        self.finish()

    def test_used_ticket(self):
        params = self.ticket("once")
        self.assertEqual(self.decode.decode("once", params).status, 200)
        done = self.decode.transfer("once").json
        self.assertEqual(done["state"], "done")
        for ticket, error in ((params["ticket"], (410, "used")), ("x", (403, "forged"))):
            reply = self.decode.decode("once", dict(params, ticket=ticket))
            self.assertEqual(reply.error, error, reply)
            self.assertEqual(self.decode.transfer("once").json, done)  # what was refused changes nothing
        self.assertIs(self.decode.decode("once", params).json["recompute"], True)
        # One that runs does.
        self.run_one(self.prefill, self.decode, "once", 500)
        self.assertLess(self.decode.transfer("once").json["bytes"], done["bytes"])
        self.fine()
        self.finish()

    def test_duplicate_request_ids(self):
        params = self.ticket("twice")
        reply = self.prefill.prefill("twice", 700)
        self.assertEqual(reply.error, (409, "duplicate"), reply)
        self.assertEqual(self.decode.decode("twice", params).status, 200)
        wait_for(lambda: self.prefill.transfer("twice").json.get("state") != "running", "the end of the send")
        self.run_one(self.prefill, self.decode, "twice", 800)  # what has ended may be used again
        self.fine()
        self.finish()

    def test_prompt_larger_than_the_pool(self):
        reply = self.prefill.prefill("large", 1000000)
        self.assertEqual(reply.error, (413, "too_large"), reply)
        reply = self.prefill.prefill("huge", 2 ** 40)
        self.assertEqual(reply.error, (413, "too_large"), reply)
        self.fine()
        # A decode node whose pool cannot hold what the prefill node gave; its pages come back at once, not by the lease.
        small = self.node("decode", pool__bytes="16MiB")
        params = self.ticket("larger", 6000)
        reply = small.decode("larger", params)
        self.assertEqual(reply.error, (413, "too_large"), reply)
        self.assertEqual(self.prefill.cancel("larger").status, 200)
        self.fine()
        self.finish()

    def test_expired_lease(self):
        hasty = self.node("prefill", limits__lease_ms=300)
        params = hasty.prefill("late", 700).json["kv_transfer_params"]
        # The sweep needs no other work to run.
        self.assert_quiet(hasty, 5)
        self.assertEqual(hasty.transfer("late").json["state"], "expired")
        reply = self.decode.decode("late", params)
        self.assertEqual(reply.error, (410, "expired"), reply)
        self.assertIs(reply.json["recompute"], True)
        self.run_one(hasty, self.decode, "late", 700)
        self.finish()

    def test_unknown_cancel(self):
        for node in (self.prefill, self.decode):
            for reply in (node.cancel("never-seen"), node.transfer("never-seen")):
                self.assertEqual(reply.error, (404, "unknown"), reply)
                self.assertIs(reply.json["recompute"], False)  # nothing was lost
        self.fine()
        self.finish()

    def test_peers_of_another_layout(self):
        for settings, word in (({"model__tokens_per_block": 64}, "tokens_per_block"),
                               ({"model__preset": "llama-3.1-8b", "pool__bytes": "256MiB"}, "group")):
            other = self.node("decode", **settings)
            request_id = "layout-" + word
            params = self.ticket(request_id)
            reply = other.decode(request_id, params)
            self.assertEqual(reply.error, (422, "incompatible"), reply)
            self.assertIn(word, reply.json["message"])
            self.assertIn("compare model.* of both nodes", reply.json["message"])
            # Nobody else's business: the same ticket works where it fits.
            self.assertEqual(self.decode.decode(request_id, params).status, 200)
        self.fine()
        self.finish()

    def test_allow_list(self):
        picky = self.node("prefill", peers="[decode-77]")
        params = picky.prefill("picky", 700).json["kv_transfer_params"]
        reply = self.decode.decode("picky", params)
        self.assertEqual(reply.error, (403, "not_allowed"), reply)
        welcome = self.node("decode", instance="decode-77")
        self.assertEqual(welcome.decode("picky", params).status, 200)
        self.fine()
        self.finish()

    def test_full_pool_is_a_bounded_wait_and_then_429(self):
        params = self.ticket("first", 9000)
        start = time.monotonic()
        reply = self.prefill.prefill("second", 9000, timeout_ms=500)
        self.assertEqual(reply.error, (429, "again"), reply)
        self.assertGreaterEqual(int(reply.headers["Retry-After"]), 1)
        self.assertLess(time.monotonic() - start, PATIENCE_S)
        self.assertEqual(self.decode.decode("first", params).status, 200)
        self.run_one(self.prefill, self.decode, "second", 9000)
        self.finish()


class ControlPortTest(ClusterTest):
    """Strangers on the control port: that connection is closed, nobody else notices."""

    def strangers(self):
        rng = random.Random(11)
        yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        # The start of a TLS 1.3 handshake.
        yield bytes.fromhex("16030100c8010000c40303") + rng.randbytes(189)
        for size in (1, 47, 48, 49, 1000, 100000):
            yield rng.randbytes(size)
        yield bytes(100000)

    def closes(self, client):
        """Read until the other end has closed."""
        try:
            while client.recv(65536):
                pass
        except ConnectionError:
            pass

    def test_noise(self):
        prefill, decode = self.pair()
        self.run_one(prefill, decode, "before")
        for node in (prefill, decode):
            for noise in self.strangers():
                with socket.create_connection(node.address("control"), timeout=PATIENCE_S) as client:
                    try:
                        client.sendall(noise)
                    except ConnectionError:
                        pass
                    if len(noise) >= 48:
                        self.closes(client)  # whoever is no peer is not kept
        self.run_one(prefill, decode, "after")
        self.finish()

    def test_half_frames_and_silence(self):
        """The greeting of a real node, replayed whole, in halves, and not at all."""
        prefill, decode = self.pair()
        with socket.create_server(("127.0.0.1", 0)) as ear:
            ear.settimeout(PATIENCE_S)
            # A ticket leads the decode node to whoever it names, so what a node says first is easy to hear:
            # take the place of a prefill node that has ended.
            victim = self.node("prefill")
            params = victim.prefill("heard", 100).json["kv_transfer_params"]
            host, port = victim.address("control")
            victim.kill()
            with socket.socket() as place:
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                place.bind((host, port))
                place.listen()
                place.settimeout(PATIENCE_S)
                answers = []
                asking = threading.Thread(target=lambda: answers.append(decode.decode("heard", params, timeout_ms=3000)))
                asking.start()
                peer, _ = place.accept()
                with peer:
                    peer.settimeout(PATIENCE_S)
                    greeting = peer.recv(65536)
                    self.closes(peer)  # it gives up by its own timer
                asking.join()
                self.assertIn(answers[0].error, ((502, "peer_lost"), (504, "deadline")), answers[0])
        self.assertGreaterEqual(len(greeting), 8)
        held = []
        for node in (prefill, decode):
            for part in (b"", greeting[:1], greeting[:len(greeting) // 2], greeting, greeting * 2):
                client = socket.create_connection(node.address("control"), timeout=PATIENCE_S)
                if part:
                    client.sendall(part)
                held.append(client)
        self.run_one(prefill, decode, "meanwhile")
        for client in held:
            self.closes(client)  # silence is not for ever
            client.close()
        self.run_one(prefill, decode, "after")
        self.finish()

    def test_many_connections(self):
        prefill, decode = self.pair()
        clients = [socket.create_connection(prefill.address("control"), timeout=PATIENCE_S) for _ in range(300)]
        self.run_one(prefill, decode, "meanwhile")
        for client in clients:
            client.close()
        self.run_one(prefill, decode, "after")
        self.finish()


if __name__ == "__main__":
    unittest.main()
