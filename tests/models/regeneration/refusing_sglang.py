"""A program with the addresses of an SGLang server that generates; like SGLang it refuses what exceeds its context.

    python refusing_sglang.py -m sglang.launch_server --port PORT --context-length TOKENS [...]

It answers every prompt with as many spaces as it may.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RefusingServer(ThreadingHTTPServer):
    def __init__(self, port: int, context: int) -> None:
        self.context = context
        super().__init__(("127.0.0.1", port), Generation)

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt, most = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        if prompt >= self.context or prompt + most > self.context:
            return 400, {"error": {"message": f"{prompt} + {most} tokens exceed the context of {self.context}"}}
        return 200, {"output_ids": [5] * most, "meta_info": {"finish_reason": {"type": "length"}}}


class Generation(BaseHTTPRequestHandler):
    server: RefusingServer

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        self.answer(*self.server.generate(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, required=True)
    options, _ = parser.parse_known_args()
    RefusingServer(options.port, options.context_length).serve_forever()
