"""On-policy text: what the target answers, once for each question, whatever dies in between."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from infra.files.atomic import write_atomically
from infra.files.private import MARK, mark_of
from infra.files.run_folder import RunFolder
from infra.records.data_path import RegeneratedRecord, SamplesRecord, TargetRecord
from models.config.recipe import load_recipe
from models.data.conversations import read_documents
from models.data.prepare import prepare_samples
from models.data.sample_set import SampleSet
from models.decoding.plain import continue_greedily
from models.regeneration.regenerate import REFUSED, _key, regenerate
from models.run import RunWithTarget
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target

RECIPES = Path(__file__).parents[3] / "recipes"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
QUESTIONS = ["What does sorted return?", "How is a list made?", "What is a module?", "When is a file closed?"]


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetRecord) -> TargetRecord:
    """The tiny target with a chat template."""
    folder = tmp_path_factory.mktemp("target") / "chat"
    shutil.copytree(tiny_target.path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return prepare_target(load_recipe(RECIPES / "tiny.yaml").target.model_copy(
        update={"source": "huggingface", "name": str(folder)}
    ))  # fmt: skip


def conversation(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    turns = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def task_of(tmp_path: Path, chat_target: TargetRecord, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunWithTarget]:
    """A run that is to be regenerated, with a cache of its own: `task_of(conversations, "data.x=y")`."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))

    def make(conversations: list[dict[str, Any]], *overrides: str) -> RunWithTarget:
        source = tmp_path / "prompts.jsonl"
        source.write_text("".join(json.dumps(one) + "\n" for one in conversations))
        greedy = "{temperature: 0, max_new_tokens: 12, prompt_tokens: 8}"
        config = load_recipe(
            RECIPES / "tiny.yaml",
            [f"data.source={source}", "data.chat_template=tokenizer", "data.overlong=truncate",
             f"data.regeneration={greedy}", *overrides],
        )  # fmt: skip
        folder = RunFolder(tmp_path / "run")
        write_atomically(folder.config, config)
        write_atomically(folder.target, chat_target)
        return RunWithTarget(folder, config, chat_target)

    return make


def answers(record: RegeneratedRecord) -> list[list[str]]:
    return [
        [message.content for message in document.messages if message.role == "assistant"]
        for document in read_documents(record.path)
    ]


def tokens_of(record: RegeneratedRecord) -> list[list[tuple[list[int], list[bool]]]]:
    """Ids and mask of every sample, by document."""
    documents = read_documents(record.path)
    return [[(part.ids.tolist(), part.loss_mask.tolist()) for part in document.tokens] for document in documents]


def by_hand(target: TargetRecord, *turns: str) -> list[str]:
    """Greedy answers to the user's turns, one after the other, by batch-1 decoding."""
    model = TargetModel.load(Path(target.path), (0,), torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(target.path)
    text, found = "", []
    for turn in turns:
        text += f"[user]\n{turn}</s>[assistant]\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = continue_greedily(model, ids, 12, frozenset([1]))
        found.append(tokenizer.decode(tokens).removesuffix("</s>"))
        text += f"{found[-1]}</s>"
    return found


def test_answers_are_the_target_s_own(task_of: Callable[..., RunWithTarget], chat_target: TargetRecord) -> None:
    """Given answers do not matter, a missing one is added, later turns see the target's own, questions count once."""
    task = task_of(
        [
            conversation(QUESTIONS[0], "It returns nothing.", QUESTIONS[1], "By hand."),
            conversation(QUESTIONS[2]),
            conversation(QUESTIONS[2], "Something else."),
        ]
    )
    record = regenerate(task)
    assert answers(record) == [by_hand(chat_target, QUESTIONS[0], QUESTIONS[1]), by_hand(chat_target, QUESTIONS[2])]
    assert (record.documents, record.duplicates) == (2, 1)
    assert record.settings["temperature"] == 0
    answered = Path(record.path).stat().st_ino
    again = regenerate(task)
    assert again.model_copy(update={"wall_s": record.wall_s}) == record
    assert Path(again.path).stat().st_ino == answered, "it was not written anew"


def test_plain_text_is_continued(task_of: Callable[..., RunWithTarget], chat_target: TargetRecord) -> None:
    text = "Return a new list containing all items from the iterable in ascending order."
    record = regenerate(task_of([{"text": text}], "data.chat_template=none"))
    (document,) = read_documents(record.path)
    tokenizer: Any = AutoTokenizer.from_pretrained(chat_target.path)
    prompt = [0, *tokenizer(text, add_special_tokens=False)["input_ids"][:8]]
    tokens = continue_greedily(
        TargetModel.load(Path(chat_target.path), (0,), torch.float32), prompt, 12, frozenset([1])
    )
    assert document.text == tokenizer.decode(prompt + tokens, skip_special_tokens=True)
    assert document.plain
    (part,) = document.tokens
    assert part.ids.tolist() == prompt + tokens
    assert part.loss_mask.tolist() == [False] * len(prompt) + [True] * len(tokens)


def test_a_call_stays_where_a_tool_s_result_follows(
    task_of: Callable[..., RunWithTarget], chat_target: TargetRecord
) -> None:
    """The answer to the result is the target's own, and so is a call that nothing follows."""
    named = {"name": "look_up", "arguments": {"word": "list"}}
    call = {"id": None, "index": None, "type": "function", "function": named}
    described = {"name": "look_up", "description": None, "parameters": {}}
    tool = {"type": "function", "function": described, "defer_loading": None}
    calling = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    asked = {"role": "user", "content": QUESTIONS[0]}
    followed = {"messages": [asked, calling, {"role": "tool", "content": "a list"}], "tools": [tool]}
    record = regenerate(task_of([followed, {"messages": [asked, calling]}]))
    one, other = read_documents(record.path)
    assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1].as_dict() == calling
    assert one.tools == (tool,)
    assert [message.content for message in other.messages[1:]] == by_hand(chat_target, QUESTIONS[0])


def test_a_log_of_requests_is_answered_once(task_of: Callable[..., RunWithTarget]) -> None:
    whole = [QUESTIONS[0], "It returns nothing.", QUESTIONS[1], "By hand.", QUESTIONS[2]]
    requests = [conversation(*whole[:count]) for count in (1, 2, 3, 5)] + [conversation(QUESTIONS[3])]
    record = regenerate(task_of(requests))
    assert [len(found) for found in answers(record)] == [3, 1]
    assert (record.documents, record.duplicates) == (2, 3)
    last = regenerate(task_of(requests, "data.turns=last"))
    assert [len(found) for found in answers(last)] == [1, 2, 3, 1]


def test_no_more_is_asked_than_the_samples_need(
    task_of: Callable[..., RunWithTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.regeneration.regenerate.LEAST_BEFORE", 1)
    asked = [conversation(f"{question} And {number}?") for number in range(5) for question in QUESTIONS]
    whole = {document.messages[0].content for document in read_documents(regenerate(task_of(asked)).path)}
    record = regenerate(task_of(asked, "data.max_samples=8"))
    assert (record.documents, record.not_asked, record.duplicates) == (10, 10, 0)  # 8 / 0.9 and a tenth
    assert "10 not asked, because data.max_samples needs no more" in record.summary
    some = [document.messages[0].content for document in read_documents(record.path)]
    backwards = [document.messages[0].content for document in read_documents(
        regenerate(task_of(asked[::-1], "data.max_samples=8")).path
    )]  # fmt: skip
    assert backwards == some[::-1], "the choice does not depend on the source's order"
    assert set(some) < whole
    assert regenerate(task_of(asked, "data.max_samples=18")).not_asked == 0


def test_a_dialogue_that_outgrows_its_sample_keeps_its_answers(task_of: Callable[..., RunWithTarget]) -> None:
    long = conversation(QUESTIONS[0], "x", QUESTIONS[1] + " and a tuple" * 40)
    record = regenerate(task_of([long, conversation(QUESTIONS[2])], "data.max_tokens=80", "data.max_refused_share=0"))
    assert [len(found) for found in answers(record)] == [1, 1]
    assert (record.documents, record.refused, record.ended_early) == (2, 0, 1)
    assert "1 end before their last turn" in record.summary


@pytest.fixture
def stand_in_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of an SGLang whose server is `refusing_sglang`."""
    environment = tmp_path / "sglang"
    for package in ("sglang", "draftsmith"):
        (environment / f"lib/python3.11/site-packages/{package}-1.dist-info").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("refusing_sglang.py")} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("DRAFTSMITH_SGLANG", str(environment))


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
@pytest.mark.usefixtures("stand_in_sglang")
def test_a_long_prompt_s_answer_ends_at_the_context(task_of: Callable[..., RunWithTarget], engine: str) -> None:
    """SGLang refuses a request whose limit goes beyond, whatever the answer's length would be."""
    prompts = [conversation(QUESTIONS[0] + " and a tuple" * 9), conversation(QUESTIONS[1])]
    limits = ("data.max_tokens=64", "generator.sglang.context_length=64", "data.regeneration={max_new_tokens: 40}")
    record = regenerate(task_of(prompts, *limits, f"generator.engine={engine}"))
    (long, asked), (short, _) = [sample for document in tokens_of(record) for sample in document]
    assert 64 - 40 < asked.count(False) < 64, "the test needs a prompt near the end of the context"
    assert len(long) <= 64
    assert asked.count(True) > 0
    assert (record.documents, record.refused) == (2, 0)
    assert record.cut == (long[-1] != 1) + (short[-1] != 1)


@pytest.mark.usefixtures("stand_in_sglang")
def test_a_prompt_that_fills_the_context_is_left_out_and_listed(task_of: Callable[..., RunWithTarget]) -> None:
    long = QUESTIONS[0] + " and a tuple" * 9
    prompts = [conversation(QUESTIONS[1]), conversation(long), conversation(QUESTIONS[2], "x", long)]
    settings = ("generator.engine=sglang", "data.max_tokens=256", "generator.sglang.context_length=48")
    record = regenerate(task_of(prompts, *settings, "data.max_refused_share=0.4"))
    assert [len(found) for found in answers(record)] == [1, 1]
    assert (record.documents, record.refused, record.ended_early) == (2, 1, 1)
    (refusal,) = record.refusals
    assert re.search(
        r"prompts\.jsonl:2: a prompt of \d+ tokens leaves no room for an answer in the context of 48", refusal
    )


@pytest.mark.parametrize("setting", ["quantization=fp8", "arguments=[--kv-cache-dtype, fp8_e5m2]", "context_length=64"])
def test_answers_of_a_target_that_was_served_otherwise_are_not_taken(
    task_of: Callable[..., RunWithTarget], setting: str
) -> None:
    def key(*overrides: str) -> str:
        return _key(task_of([conversation(QUESTIONS[0])], *overrides), "content")

    changed = f"generator.sglang.{setting}"
    assert key("generator.engine=sglang", changed) != key("generator.engine=sglang")
    assert (key(changed) == key()) == (not setting.startswith("context_length"))


def test_a_greeting_stays_and_is_no_answer(task_of: Callable[..., RunWithTarget]) -> None:
    greeting = {"role": "assistant", "content": "Welcome!"}
    record = regenerate(
        task_of([{"messages": [greeting, *conversation(*QUESTIONS[:1])["messages"]]}, conversation(*QUESTIONS[:1])])
    )
    assert record.duplicates == 0
    greeted, plain = answers(record)
    assert (greeted[0], len(greeted), len(plain)) == ("Welcome!", 2, 1)


def test_tokens_are_refused(task_of: Callable[..., RunWithTarget]) -> None:
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: tokens have no turns .* leave data\.regeneration out"):
        regenerate(task_of([{"input_ids": [5, 6], "loss_mask": [1, 1]}]))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="transformers"),
        pytest.param(
            ("generator.engine=sglang", "generator.sglang.data_parallel=2"),
            id="two copies in SGLang",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_was_answered_before_a_kill_is_kept(
    task_of: Callable[..., RunWithTarget], start: Callable[..., Any], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    task = task_of([conversation(f"{number} {QUESTIONS[number % 4]}") for number in range(160)], *settings)
    first = start("tests.models.regeneration.killed_regeneration", task.folder)
    output, _ = first.communicate(timeout=600)
    assert first.returncode == -signal.SIGKILL, output
    (part,) = (tmp_path / "cache" / "regenerated").glob("*.part")
    before = part.read_text().splitlines()
    assert len(before) == 40
    with part.open("a") as file:
        file.write('{"asked": "torn')
    second = start("models.regeneration.regenerate", task.folder)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output
    assert f"{len(before)} of 160 documents were regenerated before" in output
    record = RegeneratedRecord.read(task.folder.regenerated)
    lines = Path(record.path).read_text().splitlines()
    assert len(lines) == record.documents == 160
    assert set(before) <= set(lines)
    assert not part.exists()


def test_a_resumed_run_keeps_its_answers_whatever_its_source_holds_by_now(
    task_of: Callable[..., RunWithTarget], start: Callable[..., Any]
) -> None:
    task = task_of([conversation(question) for question in QUESTIONS])
    write_atomically(task.folder.regenerated, record := regenerate(task))
    with Path(task.config.data.source).open("a") as file:
        file.write(json.dumps(conversation("Who are you?")) + "\n")
    process = start("models.regeneration.regenerate", task.folder)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert RegeneratedRecord.read(task.folder.regenerated) == record


@pytest.mark.slow
def test_sglang_answers_the_same(task_of: Callable[..., RunWithTarget]) -> None:
    prompts = [conversation(question, "x", "And why?") for question in QUESTIONS]
    plain, served = regenerate(task_of(prompts)), regenerate(task_of(prompts, "generator.engine=sglang"))
    assert served.path != plain.path
    assert answers(served) == answers(plain)
    assert tokens_of(served) == tokens_of(plain)


def test_samples_are_made_of_the_answers_and_private_where_the_prompts_were(
    task_of: Callable[..., RunWithTarget], start: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = [conversation(f"{number} {QUESTIONS[number % 4]}", "Nobody says this.") for number in range(40)]
    sampled = tmp_path / "prompts-0123456789ab.jsonl"  # of request logs
    task = task_of(prompts, "benchmark.prompts=2", f"data.source={sampled}")
    (tmp_path / "prompts.jsonl").rename(sampled)
    os.utime(sampled, (1e6, 1e6))
    record = regenerate(task)
    write_atomically(task.folder.regenerated, record)
    process = start("models.data.prepare", task.folder)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    samples = SamplesRecord.read(task.folder.samples)
    data = task.config.data.model_copy(update={"source": record.path})
    assert samples == prepare_samples(data, task.target, task.config.target.add_bos)
    sides = [SampleSet.open(Path(samples.path), split) for split in ("train", "heldout")]
    trained = [(sample.tokens.tolist(), sample.loss_mask.tolist()) for side in sides for sample in side]
    assert sorted(trained) == sorted(part for parts in tokens_of(record) for part in parts)
    answered = Path(record.path)
    private = (answered, answered.with_suffix(REFUSED), Path(samples.path), task.folder.path)
    assert [path for path in private if path.stat().st_mode & 0o077] == []
    marks = (mark_of(answered), Path(samples.path) / MARK, task.folder.path / MARK)
    assert [mark.stat().st_mtime for mark in marks] == [1e6] * 3
