# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers like a prefill or decode node, or as badly as a test tells it to."""

import http.server
import json
import threading
import time


class Answer:
    """What to answer instead of the right thing."""

    def __init__(self, status, body, headers=None, delay_s=0.0):
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = headers or {}
        self.delay_s = delay_s


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, answer):
        time.sleep(answer.delay_s)
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)
        except OSError:
            pass  # the client gave up, which is its right

    def do_GET(self):
        self._send(Answer(200 if self.server.node.ready else 503, {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(self.server.node.answer(self.path, body))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FakeNode:
    """Use as a context manager. `script(path, body)` may return an Answer, or None for the right one."""

    def __init__(self, script=None):
        self.script = script
        self.ready = True
        self.calls = []  # (path, body, time)
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.node = self
        self.url = "http://127.0.0.1:%d" % self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, path):
        return [body for called, body, _ in self.calls if called == path]

    def answer(self, path, body):
        with self._lock:
            self.calls.append((path, body, time.monotonic()))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            answer = self.script(path, body) if self.script else None
            return answer or self._right(path, body)
        finally:
            with self._lock:
                self.running -= 1

    @staticmethod
    def _right(path, body):
        if path == "/v1/prefill":
            params = {"ticket": "ticket-of-" + body["request_id"], "prompt_len": body["prompt_len"],
                      "draft_len": body.get("draft_len", 0)}
            return Answer(200, {"kv_transfer_params": params, "prefill_us": 7,
                                "cached_tokens": body["prompt_len"] - 1})
        if path == "/v1/decode":
            # Times that differ from request to request, so that the percentiles can be told.
            tokens = body["kv_transfer_params"]["prompt_len"]
            return Answer(200, {"verified": True, "bytes": 1000 * tokens, "pages": tokens, "missing": [],
                                "mismatched_bytes": 0, "transfer_us": tokens, "exposed_us": tokens // 2,
                                "verify_us": 3, "cached_tokens": tokens // 3,
                                "draft_tokens": [7] * body["kv_transfer_params"].get("draft_len", 0)})
        return Answer(200, {})
