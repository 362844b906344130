"""A program with the addresses of an SGLang server that a follower uses, which starts in a tenth of a second.

    python stand_in_sglang.py --tests PID --port PORT [--enable-metrics] [--speculative-draft-model-path FOLDER] [...]

The draft's config.json says what it is worth: {"length": acceptance length}, and {"broken": true} for one that cannot
be loaded, {"frozen": true} for one whose server takes no other weights. With {"in_weights": true} the length is the
number in the tensor `length`, so that a swap changes it. The text is the target's, whatever the draft. Like SGLang it
drains after SIGTERM: its health is 503, and it ends when no request is left. It has no counters without
--enable-metrics, and with --api-key it tells nothing without the key. While there is a file FULL its queue is full.
With --ssl-certfile it speaks TLS; the file holds the key, too. It outlives followers, but not the tests' process.
"""

import argparse
import base64
import json
import os
import pickle
import random
import select
import signal
import ssl
import struct
import threading
import time
import uuid
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOOKAHEAD, NEW_TOKENS = 4, 32


def target_text(prompt: list[int]) -> list[int]:
    """What the target says."""
    draws = random.Random(f"{prompt}")
    return [draws.randrange(1000) for _ in range(NEW_TOKENS)]


def count_steps(prompt: list[int], length: float) -> int:
    """Verification steps for the tokens after the first one; the mean per step is the acceptance length."""
    draws, left, steps = random.Random(f"{prompt} {length}"), NEW_TOKENS - 1, 0
    while left > 0:
        left -= 1 + sum(draws.random() < (length - 1) / LOOKAHEAD for _ in range(LOOKAHEAD))
        steps += 1
    return steps


class StandIn(ThreadingHTTPServer):
    """The server's state."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace, worth: dict[str, Any]) -> None:
        self.draft, self.length, self.started = options.speculative_draft_model_path, worth["length"], str(uuid.uuid4())
        self.key, self.has_metrics, self.workers = options.api_key, options.enable_metrics, options.tokenizer_worker_num
        self.full: Path | None = options.full
        self.frozen, self.weight_version = worth.get("frozen", False), "default"
        self.going, self.session = threading.Event(), False
        self.going.set()
        self.generated = self.requests = self.steps = self.busy = 0
        self.draining = False
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", options.port), Answers)
        if options.ssl_certfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.ssl_certfile)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def info(self) -> dict[str, Any]:
        speculation = {"speculative_num_draft_tokens": LOOKAHEAD + 1, "speculative_eagle_topk": 1}
        started = {"startup_time": self.started, "tokenizer_worker_num": self.workers}
        return started | {"speculative_draft_model_path": self.draft} | (speculation if self.draft else {})

    def allows(self, authorization: str | None) -> bool:
        return self.key is None or authorization == f"Bearer {self.key}"

    def metrics(self) -> str:
        names = {
            "sglang:generation_tokens_total": self.generated,
            "sglang:num_requests_total": self.requests,
            "sglang:spec_verify_calls_total": self.steps,
        }
        return "".join(f"# TYPE {name} counter\n{name} {count}\n" for name, count in names.items())

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["input_ids"]
        time.sleep(0.02)
        self.going.wait()
        tokens, steps = target_text(prompt), count_steps(prompt, self.length) if self.draft else 0
        with self.lock:
            self.generated, self.requests = self.generated + len(tokens), self.requests + 1
            self.steps += steps
        return {"output_ids": tokens, "meta_info": {"spec_verify_ct": steps}}

    def control(self, path: str, body: dict[str, Any]) -> int:
        """A step of a swap; the status."""
        if path == "/pause_generation":
            assert body == {"mode": "retract"}
            self.going.clear()
        elif path == "/continue_generation":
            self.going.set()
        elif path in ("/begin_weight_update", "/end_weight_update"):
            self.session = path.startswith("/begin")
        else:
            assert self.session
            assert not self.going.is_set()
            assert body["selector"] == "draft"
            if self.frozen:
                return 400
            (rank,) = body["serialized_named_tensors"]
            self.length = round(float(dict(pickle.loads(base64.b64decode(rank)))["length"]), 3)  # noqa: S301
            self.weight_version = body["weight_version"]
        return 200

    def drain(self) -> None:
        self.draining = True
        while self.busy:
            time.sleep(0.02)
        self.shutdown()


class Answers(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if self.server.draining else 200, "")
        elif self.path == "/metrics" and not self.server.has_metrics:
            self.answer(404, "")
        elif (
            self.path != "/metrics" and self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}"
        ):
            self.answer(401, "")
        else:
            pages = {
                "/server_info": lambda: json.dumps(self.server.info()),
                "/model_info": lambda: json.dumps({"weight_version": self.server.weight_version}),
                "/metrics": self.server.metrics,
            }
            self.answer(200, pages[self.path]())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.answer(self.server.control(self.path, body), "")
            return
        if self.server.full and self.server.full.exists():
            self.answer(503, "The request queue is full.")
            return
        with self.server.lock:
            self.server.busy += 1
        try:
            self.answer(200, json.dumps(self.server.generate(body)))
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def read_length(file: Path) -> float:
    """The only number in a safetensors file, without importing torch."""
    content = file.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    return struct.unpack("<f", content[begin : begin + 4])[0]


def end_after(process: int) -> None:
    """pytest may be killed, and nobody else would end this server."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tests", type=int, required=True)
    parser.add_argument("--speculative-draft-model-path")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--full", type=Path)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--tokenizer-worker-num", type=int, default=1)
    options, _ = parser.parse_known_args()
    worth: dict[str, Any] = {"length": 1.0}
    if options.speculative_draft_model_path:
        draft = Path(options.speculative_draft_model_path)
        worth |= json.loads((draft / "config.json").read_text())
        if worth.get("in_weights"):
            worth["length"] = round(read_length(draft / "model.safetensors"), 3)
    if worth.get("broken"):
        raise SystemExit("RuntimeError: the draft's tensors do not fit")
    server = StandIn(options, worth)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.drain).start())
    threading.Thread(target=end_after, args=(options.tests,), daemon=True).start()
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
