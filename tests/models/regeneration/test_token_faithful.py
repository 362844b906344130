"""What is trained is what the engine read and emitted, token by token, whatever the template."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.data import RegenerationConfig
from models.config.recipe import load_recipe
from models.data.conversations import Document, Message, read_documents
from models.data.dialogue import Dialogue, Prompter, answer_parts
from models.data.loss_mask import runs_of
from models.data.prepare import prepare_samples
from models.data.sample_set import SampleSet
from models.decoding.plain import continue_greedily
from models.regeneration.engines import PlainTextEngine
from models.regeneration.regenerate import regenerate
from models.run import RunWithTarget
from models.targets.model import TargetModel
from tests.models.chat_templates import FAMILIES, make_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes"
LONGEST = 24
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
# What a target says that reasons, and one that does not: the text after its prompt.
SAID = {
    "chatml": ("one<|im_end|>", None),
    "chatml, tagged": ("one<|im_end|>", None),
    "qwen3": ("<think>\n\n</think>\n\none<|im_end|>", "<think>\nhm\n</think>\n\none<|im_end|>"),
    "qwen3, no thinking": ("one<|im_end|>", None),
    "qwen3, opened": ("\n</think>\n\none<|im_end|>", "hm\n</think>\n\none<|im_end|>"),
    "qwen3, tagged": ("<think>\n\n</think>\n\none<|im_end|>", "<think>\nhm\n</think>\n\none<|im_end|>"),
    "llama3": ("one<|eot_id|>", None),
    "gemma3": ("one<end_of_turn>", None),
    "r1": ("\n</think>\n\none<eos>", "hm\n</think>\n\none<eos>"),
    "r1, closed": ("one<eos>", "<think>\nhm\n</think>\n\none<eos>"),
    "deepseek-v3.1": ("one<eos>", None),
    "deepseek-v3.1, thinking": ("</think>one<eos>", "hm</think>one<eos>"),
    "mistral": ("one<eos>", None),
    "harmony": (f"{FINAL}one<|return|>", f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}one<|return|>"),
    "glm4": ("\none<|user|>", None),
    "glm4.5": ("\n<think></think>\none<|user|>", "\n<think>hm</think>\none<|user|>"),
    "glm4.5, no thinking": ("\none<|user|>", None),
}


def prompter_of(name: str, **settings: Any) -> Prompter:
    template = FAMILIES[name].open()
    ends: Any = template.tokenizer.convert_tokens_to_ids(list(template.ends))
    return Prompter(template.tokenizer, template, RegenerationConfig(**settings), add_bos=False, ends=frozenset(ends))


def test_a_prompt_with_a_token_beyond_the_target_s_vocabulary_is_a_fault() -> None:
    prompter = prompter_of("chatml")
    prompter.vocabulary = 5
    dialogue = Dialogue(Document("here", (Message("user", "a"),), plain=False))
    assert prompter.next(dialogue) is None
    assert dialogue.fault.startswith("here: the tokenizer makes token ")
    assert "but the target knows 5 tokens: remove it" in dialogue.fault


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_prompt_is_a_client_s(name: str, reasons: bool) -> None:
    """The message of an answer is what it says, and the next prompt what a server renders of it."""
    text = SAID[name][reasons]
    if text is None:
        return
    prompter, template = prompter_of(name, max_new_tokens=500), FAMILIES[name].open()
    asked = (Message("system", "be"), Message("user", "a"))
    dialogue = Dialogue(Document("here", (*asked, Message("assistant", "?"), Message("user", "b")), plain=False))
    first = prompter.next(dialogue)
    assert first is not None
    ids: Any = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompter.answer(dialogue, first, ids)
    message = dialogue.turns[-1]
    assert (message.content.strip(), message.reasoning) == ("one", "hm" if reasons else "")
    assert not dialogue.cut
    second = prompter.next(dialogue)
    assert second is not None
    client = [*asked, Message("assistant", "one", message.reasoning), Message("user", "b")]
    rendered = template.render([turn.as_dict() for turn in client], prompt=True)
    shown = template.tokenizer.decode(list(second.tokens))
    assert "".join(str(shown).split()) == "".join(rendered.split())
    prompter.answer(dialogue, second, ids)
    assert prompter.next(dialogue) is None
    generated = [(sample.ids, sample.mask) for sample in dialogue.samples]
    one, two, said = list(first.tokens), list(second.tokens), [1] * len(ids)
    if len(generated) == 1:
        assert two[: len(one) + len(ids)] == one + ids
        assert generated == [(two + ids, [0] * len(one) + said + [0] * (len(two) - len(one + ids)) + said)]
    else:
        assert generated == [(asked + ids, [0] * len(asked) + said) for asked in (one, two)]


CUT = {
    "qwen3": ("<think>\nhm and", "", "hm and"),
    "qwen3, opened": ("hm and", "", "hm and"),
    "harmony": (f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}one and", "one and", "hm"),
    "chatml": ("one and", "one and", ""),
    "mistral": ('[TOOL_CALLS][{"name": "look"}]<eos>', '[TOOL_CALLS][{"name": "look"}]', ""),
}


@pytest.mark.parametrize("name", CUT)
def test_answers_that_are_cut_or_call_a_tool(name: str) -> None:
    text, content, reasoning = CUT[name]
    tokenizer: Any = make_tokenizer(None)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompter = prompter_of(name, max_new_tokens=len(ids))
    dialogue = Dialogue(Document("here", (Message("user", "a"),), plain=False))
    prompt = prompter.next(dialogue)
    assert prompt is not None
    prompter.answer(dialogue, prompt, ids)
    assert dialogue.turns[-1] == Message("assistant", content, reasoning)
    assert dialogue.cut == (not text.endswith("<eos>"))
    assert dialogue.samples[0].ids == [*prompt.tokens, *ids]


@pytest.mark.parametrize(
    ("name", "said"), [("qwen3", "<think>\nhm"), ("qwen3, opened", "hm"), ("chatml", "one"), ("glm4", "\none")]
)
def test_an_answer_that_runs_into_white_space_is_read_in_one_pass(name: str, said: str) -> None:
    """A pattern that looks at a run of white space from each of its characters would take half an hour."""
    prompter, tokenizer = prompter_of(name), FAMILIES[name].open().tokenizer
    dialogue = Dialogue(Document("here", (Message("user", "a"),), plain=False))
    prompt = prompter.next(dialogue)
    assert prompt is not None
    ids: Any = tokenizer(said + "\n" * 300_000, add_special_tokens=False)["input_ids"]
    prompter.answer(dialogue, prompt, ids)
    assert said.rsplit(maxsplit=1)[-1] in dialogue.turns[-1].content + dialogue.turns[-1].reasoning


def by_pattern(text: str, rendered: str, ends: Sequence[str]) -> tuple[str, str] | None:
    """Answer and reasoning by a regular expression, which takes its time."""

    def lenient(part: str) -> str:
        return r"\s*".join(map(re.escape, re.split(r"\s+", part)))

    head, _, tail = rendered.partition("\ue000")
    opening, thinks, middle = head.rpartition("\ue001")
    thought = rf"(?P<thought>.*?){lenient(middle)}" if thinks else lenient(middle)
    end = "|".join(map(re.escape, ends))
    pattern = rf"{lenient(opening)}{thought}(?P<answer>.*?)(?:{lenient(tail)})?(?:{end})?"
    found = re.fullmatch(pattern, text, re.DOTALL)
    return found and (found["answer"], found.groupdict().get("thought", "").strip())


WRITTEN = st.lists(st.sampled_from(["a", "b", "<", "ab", "<e>", " ", "\n", "\n\n", "\u2003"]), max_size=6).map("".join)


@settings(max_examples=300)
@given(st.data(), WRITTEN, WRITTEN, WRITTEN, st.booleans(), st.lists(WRITTEN.filter(bool), max_size=2))
def test_answers_are_read_as_the_pattern_says(
    data: st.DataObject, opening: str, middle: str, tail: str, thinks: bool, ends: list[str]
) -> None:
    parts = [opening, WRITTEN, middle, WRITTEN, tail, *ends, WRITTEN]
    drawn = [part if isinstance(part, str) else data.draw(part) for part in parts]
    text = "".join(part for part in drawn if data.draw(st.integers(0, 4)))
    rendered = f"{opening}\ue001{middle}\ue000{tail}" if thinks else f"{opening}\ue000{tail}"
    assert answer_parts(text, rendered, ends) == by_pattern(text, rendered, ends)


@pytest.fixture
def random_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> TargetRecord:
    """A small random model with the tokenizer of a family: it says anything, special tokens included."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    tokenizer, folder = make_tokenizer(FAMILIES[family].template), tmp_path / "target"
    ends: Any = tokenizer.convert_tokens_to_ids(list(FAMILIES[family].ends))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=4096, eos_token_id=ends, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[ends] *= 2  # so that some answers end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetRecord(
        name="random", path=str(folder), revision=family, model_type="llama", hidden_size=32, num_layers=2,
        vocab_size=len(tokenizer), licence="", eos_ids=tuple(ends),
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_the_engine_s(family: str, random_target: TargetRecord, tmp_path: Path) -> None:
    """Prompts are the template's, answers those of the target decoded alone, and samples hold them unchanged."""
    source, arguments = tmp_path / "prompts.jsonl", FAMILIES[family].arguments
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "b"}]
    questions = [[{"role": "user", "content": f"the answer {n}"}, *turns[1:]] for n in range(5)] + [turns[:1]]
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in questions))
    config = load_recipe(
        RECIPES / "tiny.yaml",
        [f"data.source={source}", "data.chat_template=tokenizer", f"data.template_arguments={json.dumps(arguments)}",
         f"data.regeneration={{temperature: 0, max_new_tokens: {LONGEST}}}", "data.overlong=truncate",
         "data.max_tokens=1024", "target.aux_layer_ids=[0]", "data.min_tokens=2"],
    )  # fmt: skip
    run = RunWithTarget(RunFolder(tmp_path / "run"), config, random_target)
    record = regenerate(run)
    assert record.documents == 6
    tokenizer: Any = AutoTokenizer.from_pretrained(random_target.path)
    ends = frozenset(tokenizer.convert_tokens_to_ids(list(FAMILIES[family].ends)))
    model, parts, cut = TargetModel.load(Path(random_target.path), (0,), torch.float32), [], 0
    for document in read_documents(record.path):
        generated = [(part, run) for part in document.tokens for run in runs_of(part.loss_mask)]
        answers = [turn for turn, message in enumerate(document.messages) if message.role == "assistant"]
        assert len(generated) == len(answers) >= 1
        for turn, (part, (start, end)) in zip(answers, generated, strict=True):
            asked = [message.as_dict() for message in document.messages[:turn]]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False, **arguments)
            assert part.ids[:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]
            said = part.ids[start:end].tolist()
            assert said == continue_greedily(model, part.ids[:start].tolist(), LONGEST, ends)
        cut += any(part.ids[end - 1] not in ends for part, (_, end) in generated)
        parts += [(part.ids.tolist(), part.loss_mask.tolist()) for part in document.tokens]
    assert record.cut == cut
    data = config.data.model_copy(update={"source": record.path})
    samples = prepare_samples(data, random_target, add_bos=False)
    sides = [SampleSet.open(Path(samples.path), split) for split in ("train", "heldout")]
    trained = [(sample.tokens.tolist(), sample.loss_mask.tolist()) for side in sides for sample in side]
    assert sorted(trained) == sorted(parts)


@pytest.mark.parametrize("family", ["gemma3"])
def test_prompts_that_cannot_be_asked_are_left_out_and_listed(
    family: str, random_target: TargetRecord, tmp_path: Path
) -> None:
    """A role that the template refuses, and a prompt that leaves no room; the rest is answered."""
    source = tmp_path / "prompts.jsonl"
    user = {"role": "user", "content": "a"}
    conversations = [[user], [user, user], [{"role": "user", "content": "ab" * 90}], [user | {"content": "b"}]]
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    overrides = [
        f"data.source={source}", "data.chat_template=tokenizer", "data.overlong=truncate", "data.max_tokens=64",
        "data.regeneration={max_new_tokens: 4}", "target.aux_layer_ids=[0]",
    ]  # fmt: skip
    run = RunWithTarget(RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", overrides), random_target)
    record = regenerate(run)
    assert (record.documents, record.refused) == (2, 2)
    roles, long = record.refusals
    assert roles.startswith(f"{source}:2: the chat template refuses this (roles must alternate)")
    assert f"{source}:3: a prompt of" in long
    assert f"left out: {source}:2" in record.summary
    assert regenerate(run).refusals == record.refusals
    strict = load_recipe(RECIPES / "tiny.yaml", [*overrides, "data.max_refused_share=0.2"])
    with pytest.raises(ValueError, match="2 of 4 conversations cannot be used"):
        regenerate(RunWithTarget(run.folder, strict, random_target))


@pytest.mark.parametrize("family", ["chatml"])
def test_an_engine_goes_on_after_a_batch_of_prompts_that_cannot_be_asked(
    family: str, random_target: TargetRecord, tmp_path: Path
) -> None:
    overrides = ["data.chat_template=tokenizer", "data.overlong=truncate", "data.max_tokens=40",
                 "data.regeneration={max_new_tokens: 2}", "target.aux_layer_ids=[0]"]  # fmt: skip
    run = RunWithTarget(RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", overrides), random_target)
    dialogues = [
        Dialogue(Document(str(n), (Message("user", "ab" * 20 if n < 40 else ""),), plain=False)) for n in range(43)
    ]
    finished = list(PlainTextEngine(run, tmp_path).finished(iter(dialogues)))
    assert len(finished) == 43
    assert [bool(dialogue.fault) for dialogue in dialogues] == [True] * 40 + [False] * 3
    assert [len(dialogue.samples) for dialogue in dialogues] == [0] * 40 + [1] * 3
