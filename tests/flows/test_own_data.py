"""A target and conversations of one's own: a recipe of three lines, and a file with broken lines in it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.files.run_folder import RunFolder
from infra.records.acceptance import GateDecision
from infra.records.data_path import SamplesRecord, TargetRecord
from models.data import python_docs

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
BROKEN = [
    '{"messages": [', "not json", '{"messages": []}', "[1, 2]", '{"messages": "x"}', '{"text": 3}', "7",
    '{"prompt": "a", "completion": "b"}', '{"messages": [{"role": "robot", "content": "x"}]}',
    '{"messages": [{"role": "user"}]}',
]  # fmt: skip
QUICK = ["training.max_steps=20", "benchmark.prompts=8", "benchmark.max_new_tokens=16", "benchmark.reference_tokens=64"]
QUICK += [
    "benchmark.timed_tokens=16",
    "benchmark.loads=[1]",
    "promotion.smoke_prompts=2",
]


def talk(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


@pytest.mark.slow
def test_three_lines_train_a_draft_from_a_file_with_broken_lines(tiny_target: TargetRecord, tmp_path: Path) -> None:
    shutil.copytree(tiny_target.path, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    texts = [text for _, text in python_docs.documents()][:120]
    lines = [talk(" ".join(text.split()[:12]), " ".join(text.split()[12:80])) for text in texts]
    lines[5:105:10] = [line for pair in zip(BROKEN, lines[5:105:10], strict=True) for line in ("\n".join(pair),)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "own.yaml").write_text("name: own\ntarget: {name: chat}\ndata: {source: talk.jsonl}\n")
    command = [sys.executable, "-c", "from flows.command_line import main; main()", "retrain", "own.yaml", *QUICK]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {
        "DRAFTSMITH_RUNS": str(tmp_path / "runs"),
        "PREFECT_HOME": str(tmp_path / "prefect"),  # a database of its own: servers of others lock the user's
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    listed, _, later = said.partition("target: chat")
    assert later
    assert listed.count("broken: talk.jsonl:") == len(BROKEN), said
    folder = RunFolder(Path(ended.stdout.strip().splitlines()[-1]))
    samples = SamplesRecord.read(folder.samples)
    assert samples.broken == len(BROKEN)
    assert 0.5 < samples.supervised_share < 0.9
    gate = json.loads((folder.path / "benchmark.json").read_text())["gate"]
    assert GateDecision.model_validate(gate).reason
    assert "version 1 of draft-own: " in said
