"""Datasets of the Hub, against a server that answers as the Hub does: which files, which commit, and refusals."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from pyarrow import parquet

from models.data.hub import parse

COMMITS = {"main": "a" * 40, "refs/convert/parquet": "b" * 40, "old": "c" * 40}
READ = """
import json, sys
from models.data.conversations import read_documents, source_hash, source_revision
for source in sys.argv[1:]:
    try:
        print(json.dumps([[d.text for d in read_documents(source)], source_revision(source), source_hash(source)]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def table(*texts: str) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([{"text": text} for text in texts]), file)
    return file.getvalue()


FILES = {
    "b" * 40: {
        "one/train/0000.parquet": table("first"),
        "one/train/0001.parquet": table("second"),
        "one/test/0000.parquet": table("third"),
        "two/train/0000.parquet": table("fourth"),
    },
    "a" * 40: {
        "README.md": b"about",
        "data/a.jsonl": b'{"text": "fifth"}\n',
        "data/deep/b.jsonl": b'{"text": "6"}\n',
        "data/_old/c.jsonl": b'{"text": "7"}\n',
    },
    "c" * 40: {"README.md": b"about", "data/a.jsonl": b'{"text": "old"}\n'},
}


class Hub(BaseHTTPRequestHandler):
    """One dataset, some/set."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        listing, file = "/api/datasets/some/set", "/datasets/some/set/resolve/"
        if path.startswith(listing):
            revision = path.removeprefix(listing).removeprefix("/tree").removeprefix("/revision").strip("/") or "main"
            commit = COMMITS.get(revision, revision)
            names = FILES.get(commit, {})
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in names.items()]
            info = {"id": "some/set", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            body = json.dumps(tree if "/tree" in path else info).encode()
            self._send(
                200 if names else 404, body, {"X-Error-Code": "RevisionNotFound"} if not names else {}, with_body
            )
        elif path.startswith(file):
            commit, _, name = path.removeprefix(file).partition("/")
            data = FILES[commit][name]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
            self._send(200, data, headers, with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(120)
    server.server_close()


def read(home: Path, endpoint: str, *sources: str, **environment: str) -> list:
    hidden = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    # The Hub answers from this process, which may have to wait for its turn.
    patient = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    variables = os.environ | hidden | patient | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
    ended = subprocess.run(
        [sys.executable, "-c", READ, *sources], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_what_is_read_and_from_which_commit(endpoint: str, tmp_path: Path) -> None:
    sources = [
        "hf://datasets/some/set?config=one", "hf://datasets/some/set?config=one&split=test",
        "hf://datasets/some/set/data", "hf://datasets/some/set/data/_old", "hf://datasets/some/set@old/data/a.jsonl",
        "hf://datasets/some/set", "hf://datasets/some/set?config=two&split=dev", "hf://datasets/some/set/README.md",
        "hf://datasets/some/other", "hf://datasets/some/set@gone/data",
    ]  # fmt: skip
    train, test, folder, hidden, old, *refused = read(tmp_path, endpoint, *sources)
    assert train[:2] == [["first", "second"], "b" * 40]
    assert test[:2] == [["third"], "b" * 40]
    assert folder[:2] == [["fifth", "6"], "a" * 40]
    assert hidden[:2] == [["7"], "a" * 40]  # its own path may hold such a name
    assert old[:2] == [["old"], "c" * 40]
    assert len({of[2] for of in (train, test, folder, old)}) == 4
    messages = [
        "has the configs ['one', 'two']: choose one",
        "no split 'dev' of config 'two'; there are ['train']",
        "holds no file of a known kind",
        "the Hub refused some/other at revision refs/convert/parquet",
        "the Hub refused some/set at revision gone",
    ]
    assert [message in said for message, said in zip(messages, refused, strict=True)] == [True] * 5, refused
    # Without a network, what was read before is read again.
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        sources = [sources[0], "hf://datasets/some/new"]
        (again, missing) = read(tmp_path, "http://127.0.0.1:9", *sources, **environment)
        assert again == train
        assert "is not in the Hugging Face cache, and the Hub cannot be reached" in missing


@pytest.mark.parametrize(
    "url",
    [
        "hf://models/some/set",
        "hf://datasets/set",
        "hf://datasets/some/set/data?split=x",
        "hf://datasets/some/set?name=x",
    ],
)
def test_other_forms_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form hf://datasets/OWNER/NAME"):
        parse(url)
