"""Collecting a run's first requests while their servers come and go."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.capture.collect import LEAST, collect
from models.config.recipe import load_recipe
from models.data.tokenizer import read_tokenizer
from models.run import RunWithTarget
from tests.models.capture.test_live_texts import SETTINGS, TINY

SERVER = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from models.capture.sglang.live import Live
from tests.models.capture.sglang.fake_engine import FakeRequest

class Asked(FakeRequest):
    origin_input_ids = property(lambda self: self.prompt)

texts, count = json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
live = Live(Path(sys.argv[1]), lambda spec, key: SimpleNamespace(close=lambda: None))
while live.attachment is None:
    time.sleep(0.01)
for number, (prompt, answer) in enumerate(texts[:count]):
    request = Asked(str(number), len(prompt), None, output_ids=answer, ended=True)
    request.prompt = prompt
    live.offer(request)
    while live.attachment.finished or live.attachment._texts:
        time.sleep(0.01)
if count < len(texts):
    os._exit(1)
input()
"""


def test_a_server_that_is_restarted_is_waited_for(
    tiny_target: TargetRecord,
    tmp_path: Path,
    path_in_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What came before is kept, and what became of the requests is told meanwhile."""
    monkeypatch.setattr("models.capture.collect.TELL_S", 0.0)
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(tiny_target.path)

    def tokens(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    answer = tokens("Use the sorted function of Python for these names.")
    (tmp_path / "texts").write_text(
        json.dumps([(tokens(f"Sort a list of {n} names"), answer) for n in range(2 * LEAST)])
    )
    path = path_in_memory / "a.sock"
    servers = [{"address": "http://127.0.0.1:1", "socket": str(path)}]
    live = {"servers": servers, "consent": "users agreed", "retention_days": 1, "share": 1.0}
    config = load_recipe(TINY, [*SETTINGS, "data.min_tokens=2", f"generator.live={json.dumps(live)}"])
    run = RunWithTarget(RunFolder(tmp_path), config, tiny_target)

    def start_server(count: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SERVER, str(path), str(tmp_path / "texts"), str(count)]
        return subprocess.Popen(command, stdin=subprocess.PIPE)

    with ThreadPoolExecutor(1) as collector:
        first = start_server(LEAST // 2)
        collected = collector.submit(collect, run)
        assert first.wait(120) == 1
        second = start_server(2 * LEAST)
        try:
            learned = collected.result(120)
        finally:
            second.kill()
            second.wait(10)
    assert len({text.tokens for text in learned}) == len(learned) == LEAST
    assert f"{LEAST // 2} learned; left out:" in capsys.readouterr().out
