"""A target's small files on the Hub, against a server that answers as the Hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "a" * 40
LLAMA = {
    "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1024, "num_attention_heads": 8, "intermediate_size": 896,
}  # fmt: skip
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
FILES = {
    "some/plain/config.json": LLAMA,
    "nvidia/fp8/config.json": LLAMA,
    "nvidia/fp8/hf_quant_config.json": MODELOPT,
}
READ = """
import sys
from infra.refusal import Refusal
from models.config.target import TargetConfig
from models.config.target_settings import read_settings, read_shape
for name in sys.argv[2:]:
    target = TargetConfig(name=name, aux_layer_ids=(0,))
    try:
        found = read_shape(target).bytes_per_weight if sys.argv[1] == "shape" else read_settings(target)["hidden_size"]
        print(found)
    except Refusal as error:
        print(" ".join(str(error).split()))
"""


class Hub(BaseHTTPRequestHandler):
    """A gated repository, two others, and nothing else."""

    asked: list[str]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        repository, _, rest = self.path.strip("/").partition("/resolve/")
        name = f"{repository}/{rest.partition('/')[2]}"
        self.asked.append(name)
        status, body, headers = 200, b"", {"X-Repo-Commit": COMMIT}
        if repository == "meta-llama/gated":
            status, headers = 401, {"X-Error-Code": "GatedRepo"}
        elif name in FILES:
            body = json.dumps(FILES[name]).encode()
            headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
        elif any(file.startswith(f"{repository}/") for file in FILES):
            status, headers = 404, headers | {"X-Error-Code": "EntryNotFound"}
        else:
            status, headers = 401, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the files that it was asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join(120)
    server.server_close()


def read(home: Path, endpoint: str, what: str, *names: str, **environment: str) -> list[str]:
    hidden = {name: "" for name in os.environ if name.lower().endswith("_proxy")} | {"HF_TOKEN": ""}
    variables = os.environ | hidden | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
    ended = subprocess.run(
        [sys.executable, "-c", READ, what, *names],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_what_the_hub_refuses_is_told_from_a_hub_that_is_not_reached(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, _ = hub
    gated, mistyped = read(tmp_path, endpoint, "settings", "meta-llama/gated", "some/mistyped")
    for name, message in (("meta-llama/gated", gated), ("some/mistyped", mistyped)):
        assert message.startswith(f"target.name: the Hub refused {name} at revision main: "), message
        assert message.endswith("Check name and revision; if it is gated, accept its terms and run `hf auth login`")
    # A shape can be given instead; the settings of a draft's layers, which `draftsmith init` needs, cannot.
    (shape,) = read(tmp_path, endpoint, "shape", "some/mistyped")
    assert shape.endswith("run `hf auth login`, or give the shape by plan.target")
    nobody = "http://127.0.0.1:9"
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        (message,) = read(tmp_path, nobody, "settings", "meta-llama/gated", **environment)
        assert message == (
            "target.name: meta-llama/gated is not in the Hugging Face cache, and the Hub cannot be reached: check "
            "network and proxy, or name a local folder"
        )


def test_modelopts_file_is_read_from_the_hub_before_a_run(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert read(tmp_path, endpoint, "shape", "nvidia/fp8", "some/plain") == ["1.0", "None"]
    assert "some/plain/hf_quant_config.json" in asked
    asked.clear()
    assert read(tmp_path, endpoint, "shape", "nvidia/fp8", "some/plain") == ["1.0", "None"]
    assert asked == []  # the cache remembers that there is none, too


def test_a_cached_target_is_planned_without_a_network(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert read(tmp_path, endpoint, "settings", "some/plain") == ["256"]
    assert "some/plain/hf_quant_config.json" not in asked
    assert read(tmp_path, "http://127.0.0.1:9", "shape", "some/plain") == ["None"]
