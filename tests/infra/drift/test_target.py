"""What servers tell of their target, and when a version's target has changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.drift.scrape import Counters, Reading, Scrape, ServedDraft
from infra.drift.target import ReportedTarget, read_target, with_content
from infra.drift.traffic import TrafficRecord

INFO = json.loads((Path(__file__).parent / "sglang_server_info.json").read_text())


def looked(record: TrafficRecord, versions: dict[str, int], **targets: Any) -> TrafficRecord:
    """The record after a look at servers of these versions, whose targets differ from the first one's in this."""
    readings = {
        url: Reading(
            counters=Counters(), lookahead=4, draft_tokens=5,
            draft=ServedDraft(start=f"{url} {targets.get(url, {})}", path=None),
            target=ReportedTarget(path="/targets/one").model_copy(update=targets.get(url, {})),
        )
        for url in versions
    }  # fmt: skip
    return record.observe(Scrape(readings=readings), dict(versions), "greedy", 0.0, 100)


SERVERS = {"a": 1, "b": 1, "c": 1}
FP8 = {"quantization": "fp8"}


def test_a_target_changes_when_most_servers_of_the_version_say_so() -> None:
    record = looked(TrafficRecord(draft="d"), SERVERS)
    assert record.change_under(1) is None
    assert looked(record, SERVERS, a=FP8).change_under(1) is None, "one server is a trial"
    record = looked(record, SERVERS, a=FP8, b=FP8)
    before, now = record.change_under(1) or pytest.fail("nothing has changed")
    assert before.changes_to(now) == "quantization none -> fp8"
    assert not before.is_another(now)
    record = record.with_change_announced(1, now, 100.0)
    assert record.change_under(1) is None
    assert looked(record, SERVERS, a=FP8, b=FP8, c=FP8).change_under(1) is None, "the last one follows"


def test_a_new_version_has_the_target_that_it_met() -> None:
    record = looked(TrafficRecord(draft="d"), SERVERS)
    record = looked(record, {"a": 2, "b": 2, "c": 1}, a=FP8, b=FP8)
    assert record.change_under(2) is None
    assert looked(record, {"a": 2, "b": 2, "c": 2}).change_under(2) is not None
    assert TrafficRecord.model_validate_json(record.model_dump_json()) == record


def test_what_a_real_server_tells() -> None:
    target = read_target(INFO)
    assert target == ReportedTarget(path=INFO["model_path"])
    told = {"quantization": "fp8", "chat_template": "chatml", "revision": "r2", "reasoning_parser": "qwen3"}
    told |= {"lora_paths": [{"lora_name": "b", "lora_path": "/b"}, "a=/a"]}
    now = read_target(INFO | told)
    assert target.changes_to(now) == (
        "revision none -> r2; quantization none -> fp8; chat template none -> chatml; reasoning parser none -> qwen3; "
        "adapters none -> a=/a, b=/b"
    )
    assert target.is_another(now)


def test_files_of_the_target_are_compared_where_they_can_be_read(tmp_path: Path) -> None:
    template, weights = tmp_path / "template.jinja", tmp_path / "model.safetensors"
    template.write_text("one")
    weights.write_bytes(bytes(3_000_000))
    (tmp_path / "config.json").write_text("{}")
    info = INFO | {"model_path": str(tmp_path), "chat_template": str(template)}
    first = with_content(read_target(info))
    assert first.changes_to(with_content(read_target(info))) == ""
    weights.write_bytes(bytes(2_000_000) + bytes([1]) * 1_000_000)
    assert first.changes_to(with_content(read_target(info))) == "files of the target changed"
    assert first.changes_to(read_target(info)) == "", "a folder that cannot be read says nothing"
    (tmp_path / "chat_template.json").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    assert with_content(read_target(info)).content == "", "a file that cannot be read"
    template.write_text("two")
    assert "chat template" in first.changes_to(read_target(info))
    assert with_content(ReportedTarget(path="org/model")).content == ""
    assert with_content(ReportedTarget(path=f"/{'x' * 300}")).content == "", "stat fails, as where one may not enter"
