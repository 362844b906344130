"""Prompts from request logs: a random sample, without private data, that a recipe can read."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.drift.config import RequestLogConfig
from infra.files.atomic import write_atomically
from infra.records.prompts import PromptsRecord
from models.data.conversations import read_documents
from models.data.private_data import find_private_data
from models.data.request_log import IDS_ALONE, RECORD, PromptSample, Request, logged_texts, parse, sample_prompts, texts

CLEAN = [f"How does a list comprehension over {word} work in Python?" for word in ("sets", "dicts", "rows", "text")]
PRIVATE = {
    "EMAIL_ADDRESS": "Write to jo.doe@example.org about it",
    "PHONE_NUMBER": "Call me at +49 30 901820 tonight",
    "CREDIT_CARD": "Pay with 4111 1111 1111 1111 please",
    "IBAN_CODE": "Transfer it to DE89 3704 0044 0532 0130 00",
    "IP_ADDRESS": "Why does 10.20.30.40 not answer?",
}
SECRETS = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    "gh" + "p_" + "a1B2" * 9,
    "glp" + "at-" + "a1B2" * 5,
    "xo" + "xb-" + "1234567890-abc",
    "s" + "k-" + "proj-" + "a1B2" * 6,
    "AI" + "za" + "a1B2C" * 7,
    "sk_" + "live_" + "a1B2" * 5,
    "h" + "f_" + "a1B2" * 8,
    "pyp" + "i-" + "a1B2" * 9,
    "ey" + "J" + "hbGciOiJIUzI1" + ".ey" + "J" + "zdWIiOiIxMjM0" + ".abc-_1",
    "-----BEGIN RSA " + "PRIVATE KEY-----",
    "Authorization: Bearer " + "a1B2" * 6,
    "postgresql://admin:hunter22@db/prod",
    "DB_PASSWORD=correct-horse-battery",
    'api_key: "0123456789abcdef"',
]


def no_finding(_: list[str]) -> set[str]:
    return set()


def request_of(line: bytes) -> Request | str:
    found = parse(line)
    return found if isinstance(found, str) else found.request


def chat(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize(("kind", "text"), PRIVATE.items())
def test_personal_data_is_found(kind: str, text: str):
    assert kind in find_private_data([text])


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_found(text: str):
    assert "SECRET" in find_private_data([f"Why does this fail?\n{text}\nThanks"])


def test_ordinary_text_is_left_alone():
    ordinary = [
        "sum(1 for token in tokens if x > 3)",
        "In 2001 it cost $1,250,000.",
        "max_tokens = 4096",
        "std::vector<int> a[1:2]",
    ]
    assert find_private_data([*CLEAN, *ordinary]) == set()


def test_requests_are_read_as_openai_sends_them():
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "x = 1"}]
    noted = [part | {"by": "jo.doe@example.org"} for part in parts]
    request = request_of(json.dumps({"messages": [{"role": "user", "content": noted}]}).encode())
    assert request == {"messages": [{"role": "user", "content": parts}]}
    assert request_of(b'{"prompt": "Once upon"}') == {"text": "Once upon"}
    assert texts(request) == ["Look: x = 1"]
    image = {"type": "image_url", "image_url": {"url": "https://x"}}
    refused = {
        "not JSON": b"{",
        "not a request": b'{"event": "started"}',
        "empty": b'{"prompt": "  "}',
        "with half a surrogate pair": b'{"messages": [{"role": "user", "content": "a cut emoji \\ud83d"}]}',
        "nested too deeply": b'{"messages": [{"role": "user", "content": "a"}], "tools": '
        + b"[" * 500
        + b"]" * 500
        + b"}",
        "not only text": json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode(),
    }
    assert {why: request_of(line) for why, line in refused.items()} == {why: why for why in refused}


AGENT = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "f", "description": "look up"}}],
    "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
        ]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"},
    ],
}  # fmt: skip


def test_requests_keep_their_tools_and_calls(tmp_path: Path):
    line = json.dumps(AGENT)
    request = request_of(line.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps(request) + "\n" + line)
    (kept, logged) = read_documents(str(tmp_path / "a.jsonl"))
    assert kept.messages == logged.messages
    assert kept.tools == logged.tools != ()
    assert kept.messages[1].tools_called == ("f",)


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request["tools"][0]["function"].update(description="\nWrite to jo.doe@example.org"),
        lambda request: request.update(functions=[{"name": "jo.doe@example.org"}]),
        lambda request: request["messages"][1]["tool_calls"][0]["function"].update(
            arguments=json.dumps({"to": "x\njo.doe@example.org"})
        ),
        lambda request: request["messages"][1].update(reasoning_content="I write to jo.doe@example.org"),
        lambda request: request["messages"][2].update(name="jo.doe@example.org"),
    ],
)
def test_tools_and_calls_are_searched_for_private_data(change, tmp_path: Path):
    sample = PromptSample(RequestLogConfig(folder=str(tmp_path)), find_private_data)
    sample.add(json.dumps(AGENT).encode())
    request = json.loads(json.dumps(AGENT))
    change(request)
    sample.add(json.dumps(request).encode())
    assert len(sample.documents()) == 1
    assert sample.dropped["EMAIL_ADDRESS"] == 1


def test_a_password_is_found_beside_its_name(tmp_path: Path):
    request = json.loads(json.dumps(AGENT))
    request["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"password": "correct-horse"}'
    sample = PromptSample(RequestLogConfig(folder=str(tmp_path)), find_private_data)
    sample.add(json.dumps(request).encode())
    assert sample.dropped["SECRET"] == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=60), st.randoms(), st.integers(1, 20))
def test_the_sample_depends_on_the_set_of_requests_alone(words, shuffle, prompts: int):
    config = RequestLogConfig(folder="logs", prompts=prompts, seed=7)
    found = []
    for _ in range(2):
        sample = PromptSample(config, no_finding)
        for word in words:
            sample.add(chat(word))
        found.append(sample.documents())
        shuffle.shuffle(words)
    assert found[0] == found[1]
    assert len(found[0]) == min(prompts, len(set(words)))
    assert sample.dropped["duplicate"] == len(words) - len(set(words))


def test_every_request_is_as_likely():
    counts = dict.fromkeys(range(40), 0)
    for seed in range(400):
        sample = PromptSample(RequestLogConfig(folder="logs", prompts=10, seed=seed), no_finding)
        for number in counts:
            sample.add(chat(str(number)))
        for document in sample.documents():
            counts[int(texts(json.loads(document))[0])] += 1
    assert min(counts.values()) > 55
    assert max(counts.values()) < 150, "100 on average"


@pytest.fixture(params=["folder", "s3"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Request logs of two days, one of them compressed, with private data, and something else beside them."""
    url = (
        str(tmp_path / "logs")
        if request.param == "folder"
        else f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}"
    )
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/day", exist_ok=True)
    private = [*PRIVATE.values(), *SECRETS[:3]]
    first = [chat(text) for text in (*CLEAN, *private)] + [b"broken", b""]
    second = [chat(CLEAN[0]), chat("x" * 30_000), chat("What is a generator?"), b'{"prompt": "Once upon a time"}']
    files.pipe_file(f"{root}/day/one.jsonl", b"\n".join(first))
    files.pipe_file(f"{root}/two.jsonl.gz", gzip.compress(b"\n".join(second)))
    files.pipe_file(f"{root}/readme.txt", b"not a log")
    return url


def test_prompts_without_private_data(logs: str, tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(RequestLogConfig(folder=logs).model_dump_json())
    command = [sys.executable, "-m", "models.data.request_log", str(config), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=240, env=os.environ | {"TMPDIR": str(tmp_path)})
    record = PromptsRecord.read(tmp_path / "out" / RECORD)
    documents = list(read_documents(record.path))
    assert sorted(document.text for document in documents) == sorted([*CLEAN, "What is a generator?"])
    dropped = {"SECRET": 3, "duplicate": 1, "too long": 1, "not JSON": 1, "of the rarer kind (prompt or messages)": 1}
    assert record.dropped.items() >= (dropped | dict.fromkeys(PRIVATE, 1)).items()
    assert (record.prompts, record.lines) == (5, 4 + 8 + 1 + 4)
    kept = Path(record.path).read_text()
    assert not any(text in kept for text in (*PRIVATE.values(), *SECRETS))


def test_the_newest_logs_are_read_first(tmp_path: Path):
    logs = tmp_path / "logs"
    for age in range(4):
        write_atomically(logs / f"{age}.jsonl", b"".join(chat(f"{age} {word}") + b"\n" for word in range(10)))
        os.utime(logs / f"{age}.jsonl", (10**9, 10**9 - 3600 * age))
    for prompts, ages in ((10, {"0"}), (11, {"0", "1"}), (25, {"0", "1", "2"}), (100, {"0", "1", "2", "3"})):
        config = RequestLogConfig(folder=str(logs), prompts=prompts)
        record = sample_prompts(config, tmp_path / "out", no_finding, 1e9)
        found = Counter(document.text.split()[0] for document in read_documents(record.path))
        assert found.keys() == ages
        assert all(found[age] == 10 for age in ages - {max(ages)}), "of older ones only as many as are missing"
        assert (record.prompts, record.lines) == (min(prompts, 40), 10 * len(ages))


def test_logs_of_the_same_hour_are_one(tmp_path: Path):
    """A log for each tenant or replica: whichever was written last says nothing of what all users ask."""
    for seconds, tenant in enumerate("abc"):
        log = tmp_path / "logs" / f"{tenant}.jsonl"
        write_atomically(log, b"".join(chat(f"{tenant} {word}") + b"\n" for word in range(200)))
        os.utime(log, (10**9, 10**9 - 1000 * seconds))
    config = RequestLogConfig(folder=str(tmp_path / "logs"), prompts=150)
    record = sample_prompts(config, tmp_path / "out", no_finding, 1e9)
    found = Counter(document.text.split()[0] for document in read_documents(record.path))
    assert record.lines == 600
    assert min(found[tenant] for tenant in "abc") > 25, "50 on average"


ROTATED = ("a.jsonl", "a.jsonl.1", "a.jsonl-20261129", "a.jsonl.2026-11-29_03", "a-20261129.jsonl")


def test_rotated_logs_are_read(tmp_path: Path):
    for name in ROTATED:
        write_atomically(tmp_path / "logs" / name, chat(name))
        write_atomically(tmp_path / "logs" / f"{name}.gz", gzip.compress(chat(f"{name} compressed")))
    for name in ("a.jsonl.tmp", "a.jsonl.gz.part", "a.json", "jsonl.1"):
        write_atomically(tmp_path / "logs" / name, chat("of something else"))
    config = RequestLogConfig(folder=str(tmp_path / "logs"))
    record = sample_prompts(config, tmp_path / "out", no_finding, time.time())
    found = {document.text for document in read_documents(record.path)}
    assert found == {*ROTATED, *(f"{name} compressed" for name in ROTATED)}
    assert record.dropped == {}


def test_a_log_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = tmp_path / "logs"
    write_atomically(logs / "sound.jsonl", chat("sound"))
    whole = gzip.compress(b"".join(chat(f"{number}") + b"\n" for number in range(5000)))
    write_atomically(logs / "changed.jsonl.gz", whole[:2000] + bytes(100) + whole[2100:])
    write_atomically(logs / "plain.jsonl.gz", b"plain")
    write_atomically(logs / "plain.jsonl.xz", b"plain")
    (logs / "gone.jsonl").symlink_to(tmp_path / "rotated")
    config = RequestLogConfig(folder=str(logs))
    record = sample_prompts(config, tmp_path / "out", no_finding, time.time())
    assert "sound" in {document.text for document in read_documents(record.path)}
    told = capsys.readouterr().out
    assert all(f"{name} cannot be read" in told for name in ("changed.jsonl.gz", "plain.jsonl.gz", "plain.jsonl.xz"))
    (logs / "sound.jsonl").unlink()
    (logs / "changed.jsonl.gz").unlink()
    with pytest.raises(ValueError, match=r"plain\.jsonl\.gz cannot be read"):
        sample_prompts(config, tmp_path / "out", no_finding, time.time())


def test_a_store_that_is_away_is_an_error(tmp_path: Path):
    """Not a log that is left out: the alarm is raised again when its prompts can be read."""
    write_atomically(tmp_path / "a.jsonl", chat("a"))
    (tmp_path / "b.jsonl").symlink_to("/proc/self/mem")  # an error of the device
    with pytest.raises(OSError, match="Errno"):
        sample_prompts(RequestLogConfig(folder=str(tmp_path)), tmp_path / "out", no_finding, time.time())


def test_old_and_missing_logs_are_refused(logs: str, tmp_path: Path):
    config = RequestLogConfig(folder=logs, hours=1)
    with pytest.raises(ValueError, match=r"2 request logs .* none of the last 1 hours"):
        sample_prompts(config, tmp_path / "out", no_finding, time.time() + 7200)
    with pytest.raises(ValueError, match="give no prompt: 17 lines read"):
        sample_prompts(config.model_copy(update={"longest_characters": 1}), tmp_path / "out", no_finding, time.time())


def test_the_texts_of_one_log(tmp_path: Path):
    lines = [b'{"prompt": "first"}', b"broken", chat("second"), b'{"prompt": " "}']
    for path, data in (("a.jsonl", b"\n".join(lines)), ("b.jsonl.gz", gzip.compress(b"\n".join(lines)))):
        (tmp_path / path).write_bytes(data)
        found = logged_texts(tmp_path / path)
        assert (found[0], found[1:]) == ("first", texts(request_of(chat("second"))))
    (tmp_path / "none.jsonl").write_bytes(b"broken")
    with pytest.raises(ValueError, match="has no request"):
        logged_texts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"give a \.jsonl"):
        logged_texts(tmp_path / "missing.jsonl")


def counted(text: str, tokens: int, steps: int, *, inside: bool = False) -> bytes:
    """A logged request with what SGLang counted of it."""
    counts = {"completion_tokens": tokens, "spec_verify_ct": steps}
    return json.dumps({"prompt": text} | ({"meta_info": counts} if inside else counts)).encode()


@pytest.mark.parametrize(("power", "expected"), [(0.0, 0.5), (1.0, 0.8), (2.0, 16 / 17)])
def test_what_accepted_little_is_preferred(power: float, expected: float):
    """Of two kinds, one with a token a step and one with four; 300 of 20,000 are close to drawing with replacement."""
    config = RequestLogConfig(folder="unused", prompts=300, low_acceptance=power, seed=3)
    sample = PromptSample(config, no_finding)
    for number in range(10_000):
        sample.add(counted(f"poor {number}", 60, 60, inside=bool(number % 2)))
        sample.add(counted(f"rich {number}", 60, 15))
    poor = sum("poor" in document for document in sample.documents())
    assert abs(poor / 300 - expected) < 4 * (expected * (1 - expected) / 300) ** 0.5 + 0.01


def test_requests_without_counts_are_those_of_two_tokens_a_step():
    assumed = parse(b'{"prompt": "a"}')
    for odd in ({"spec_verify_ct": 0, "completion_tokens": 4}, {"spec_verify_ct": "7", "completion_tokens": 9}, {}):
        line = json.dumps({"prompt": "a", "meta_info": None, **odd}).encode()
        assert parse(line) == assumed
    assert parse(counted("a", 8, 4)) == assumed
    assert parse(counted("a", 3, 9)) == parse(counted("a", 3, 3)), "no step gives less than a token"


def test_sglang_s_own_files_are_read(tmp_path: Path):
    """As `--export-metrics-to-file` writes them."""
    asked = {"rid": "1", "text": "What is a generator?", "stream": False}
    line = {"request_parameters": json.dumps(asked), "id": "1", "completion_tokens": 12, "spec_verify_ct": 6}
    file = tmp_path / "sglang-request-metrics-20261127_03.log"
    lines = [
        json.dumps(line),
        json.dumps({**line, "request_parameters": "[]"}),
        json.dumps({**line, "request_parameters": "{"}),
        json.dumps({**line, "request_parameters": json.dumps({"rid": "2", "input_ids": [1, 2, 3]})}),
    ]
    file.write_text("\n".join(lines) + "\n")
    (tmp_path / "server.log").write_text("started\n")
    config = RequestLogConfig(folder=str(tmp_path), prompts=5)
    found = sample_prompts(config, tmp_path / "out", no_finding, time.time())
    assert found.lines == 4
    assert found.prompts == 1
    assert json.loads(Path(found.path).read_text()) == {"text": "What is a generator?"}
    assert found.dropped == {"not JSON": 2, IDS_ALONE: 1}
    assert "1 with token ids alone (a chat in SGLang's own file: log requests at your gateway)" in found.summary
