"""The served side of a simulated fortnight: an engine's `/metrics` and `/server_info`, and what real drafts accept.

    python benchmarks/soak_serving.py --count TARGET EXPORT PROMPTS OUT

counts, conversation by conversation, what a draft accepts of the target's own continuations of the prompts; soak.py
draws its requests from these rows.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from infra.drift.scrape import Counters
from infra.processes.exit import run_main

LOOKAHEAD = 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 96, 48, 24
COUNT_S = 1800.0
METRICS = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total {0.generated}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total {0.requests}
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total {0.steps}
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps 4
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens 5
"""

Rows = Sequence[tuple[int, int]]
"""Per request: tokens emitted by verification steps, and steps."""


class Engine(ThreadingHTTPServer):
    """Counts requests as SGLang does, and says which draft it runs."""

    def __init__(self, seed: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.counted = Counters()
        self.info: dict[str, object] = {}
        self._draw = random.Random(seed)

    def load(self, export: Path) -> None:
        """Restart with the draft in this folder, unless it is loaded already."""
        if self.info.get("speculative_draft_model_path") == str(export):
            return
        self.counted = Counters()
        self.info = {
            "speculative_draft_model_path": str(export),
            "startup_time": {"tokenizer_e2e": time.perf_counter()},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, rows: Rows, steps: int, quality: float = 1.0) -> None:
        """Requests drawn from `rows` until `steps` verification steps are counted.

        `quality` below 1: the engine needs more steps for the same tokens.
        """
        tokens = counted = requests = 0
        while counted < steps:
            drawn = self._draw.choice(rows)
            tokens, requests = tokens + drawn[0], requests + 1
            counted += round(drawn[1] / quality + self._draw.random() - 0.5)
        self.counted = self.counted.plus(Counters(generated=tokens + requests, requests=requests, steps=counted))


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Engine)
        self.send_response(200)
        self.end_headers()
        info = json.dumps(self.server.info)
        self.wfile.write((METRICS.format(self.server.counted) if self.path == "/metrics" else info).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextmanager
def engine(seed: int) -> Iterator[Engine]:
    """A server on loopback."""
    server = Engine(seed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def count(target: Path, export: Path, prompts: Path, out: Path) -> Rows:
    """Rows of one draft over one kind of traffic, counted in a process of its own and kept in the file `out`."""
    if not out.exists():
        command = [sys.executable, __file__, "--count", *map(str, (target, export, prompts, out))]
        subprocess.run(command, check=True, timeout=COUNT_S, stdout=subprocess.DEVNULL)
    return [(tokens, steps) for tokens, steps in json.loads(out.read_text())]


def _count(target: Path, export: Path, prompts: Path, out: Path) -> None:
    import torch

    from models.benchmark.contestants import load_contestants
    from models.benchmark.measure import DRAFT, at, measure_suite
    from models.benchmark.standalone import find_target
    from models.config.benchmark import BenchmarkConfig
    from models.data.prompts import read_prompts
    from models.export.description import read_description

    config = BenchmarkConfig(prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS)
    record = find_target(str(target), read_description(export).aux_layer_ids)
    read, _ = read_prompts(str(prompts), record, config, "none", add_bos=False)
    walks = measure_suite(
        load_contestants(target, [export], torch.float32), config, "traffic", read, sampled=False, seed=0
    )
    rows = [
        counts.as_served(len(text) - 1)
        for counts, text in zip(at(walks.walks[DRAFT], LOOKAHEAD), walks.texts, strict=True)
    ]
    out.write_text(json.dumps([row for row in rows if row[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", nargs=4, type=Path, required=True, metavar=("TARGET", "EXPORT", "PROMPTS", "OUT"))
    _count(*parser.parse_args().count)


if __name__ == "__main__":
    run_main(main)
