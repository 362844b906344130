"""The mask covers what the assistant said, all of it and nothing else, whatever the template."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.data.conversations import Document, Message
from models.data.loss_mask import marks_generation, tokenize_conversation


def conversation(*turns: tuple[str, str]) -> Document:
    return Document("chat.jsonl:7", tuple(Message(role, content) for role, content in turns), plain=False)


def masked_runs(tokenizer, document: Document, template: str, **options) -> list[str]:
    ids, mask = tokenize_conversation(tokenizer, document, template, **options)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [message.as_dict() for message in document.messages], tools=list(document.tools) or None, tokenize=False
    )
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [tokenizer.decode(ids[start:end]) for start, end in edges.reshape(-1, 2)]


def test_each_assistant_turn_with_its_end_and_nothing_else(make_tokenizer, template: str) -> None:
    document = conversation(
        ("system", "be the answer"),
        ("user", "who?"),
        ("assistant", "the answer"),
        ("user", "the answer"),
        ("assistant", "é!"),
    )
    runs = masked_runs(make_tokenizer(template), document, template)
    last = "<think>\n\n</think>\n\né!<|im_end|>" if "think" in template else "é!<|im_end|>"
    assert runs == ["the answer<|im_end|>", last]


WORDS = st.text(st.sampled_from("the answer\nis ünd 日 <>|"), min_size=1, max_size=20).filter(str.strip)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_masks_of_any_conversation(make_tokenizer, template: str, pairs: list[tuple[str, str]]) -> None:
    turns = [turn for asked, said in pairs for turn in (("user", asked), ("assistant", said))]
    runs = masked_runs(make_tokenizer(template), conversation(*turns), template)
    thinking = "<think>\n\n</think>\n\n"
    assert [run.removeprefix(thinking).removesuffix("<|im_end|>").strip() for run in runs] == [
        said.strip() for _, said in pairs
    ]
    assert all(run.endswith("<|im_end|>") for run in runs)


def test_thinking_of_earlier_turns_may_be_dropped_by_the_template(make_tokenizer) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thought = "<think>hm</think>the answer"
    document = conversation(("user", "a"), ("assistant", thought), ("user", "b"), ("assistant", thought))
    runs = masked_runs(make_tokenizer(template), document, template)
    assert runs == ["the answer<|im_end|>", f"{thought}<|im_end|>"]


def test_templates_that_change_the_words_are_refused(make_tokenizer) -> None:
    document = conversation(("user", "a"), ("assistant", "the answer"))
    shouting = "{% for m in messages %}{{ m.role }}:{{ m.content | upper }}\n{% endfor %}"
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: the chat template renders turn 2"):
        tokenize_conversation(make_tokenizer(shouting), document, shouting)
    empty_tags = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: the loss mask misses"):
        tokenize_conversation(make_tokenizer(empty_tags), document, empty_tags)
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: .*roles must alternate"):
        tokenize_conversation(make_tokenizer(strict), document, strict)


def test_generation_tags_are_recognised() -> None:
    assert marks_generation("a{%- generation -%}b{% endgeneration %}")
    assert not marks_generation("{% if add_generation_prompt %}{% endif %}")


def test_an_answer_that_looks_like_the_template(make_tokenizer, template: str) -> None:
    for said in ("im_end", "think", "user", "assistant\n", "<"):
        runs = masked_runs(make_tokenizer(template), conversation(("user", said), ("assistant", said)), template)
        assert [run.removeprefix("<think>\n\n</think>\n\n") for run in runs] in (
            [f"{said}<|im_end|>"],
            [f"{said.strip()}<|im_end|>"],
        )


def test_characters_of_several_tokens_at_the_end_of_a_tagged_turn(make_tokenizer) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    assert masked_runs(make_tokenizer(template), conversation(("assistant", "日")), template) == ["日"]


def test_a_conversation_that_the_assistant_begins(make_tokenizer, template: str) -> None:
    runs = masked_runs(make_tokenizer(template), conversation(("assistant", "hi"), ("user", "answer")), template)
    assert runs == ["hi<|im_end|>"]


END = re.compile(r"(<\|im_end\|>|<eos>)$")
EMPTY_BLOCK = re.compile(r"^<think>\s*</think>\s*")


def words(run: str) -> str:
    """What the assistant said, without what templates put around it."""
    assert END.search(run), run
    return EMPTY_BLOCK.sub("", END.sub("", run)).strip()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.none() | WORDS, last=st.booleans())
def test_masks_of_any_conversation_in_real_templates(
    make_tokenizer, real_template: str, pairs: list[tuple[str, str]], system: str | None, last: bool
) -> None:
    """All that the assistant says and nothing else, with its end, in every turn or in the last."""
    turns = [turn for asked, said in pairs for turn in (("user", asked), ("assistant", said))]
    document = conversation(*([("system", system)] if system else []), *turns)
    options = {"turns": "last"} if last else {}
    runs = masked_runs(make_tokenizer(real_template), document, real_template, **options)
    assert [words(run) for run in runs] == [said.strip() for _, said in pairs][-1 if last else 0 :]


THOUGHT = "so the answer is there"


@pytest.mark.parametrize("apart", [True, False], ids=["reasoning_content", "in the text"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3, tagged"])
def test_reasoning_is_learned_or_masked(make_tokenizer, real_templates: dict[str, str], name: str, apart: bool) -> None:
    """Qwen3's template shows the reasoning of the last answer alone."""
    template = real_templates[name]
    tokenizer = make_tokenizer(template)

    def said(words: str) -> Message:
        if apart:
            return Message("assistant", words, reasoning=THOUGHT)
        return Message("assistant", f"<think>\n{THOUGHT}\n</think>\n\n{words}")

    messages = (Message("user", "a"), said("one"), Message("user", "b"), said("two"))
    document = Document("chat.jsonl:1", messages, plain=False)
    block = f"<think>\n{THOUGHT}\n</think>\n\n"
    assert masked_runs(tokenizer, document, template) == ["one<|im_end|>", f"{block}two<|im_end|>"]
    assert masked_runs(tokenizer, document, template, mask_thinking=True) == ["one<|im_end|>", "two<|im_end|>"]
    assert masked_runs(tokenizer, document, template, mask_thinking=True, turns="last") == ["two<|im_end|>"]


def test_reasoning_that_a_template_writes_without_tags_is_masked(make_tokenizer) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}|{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = (Message("user", "a"), Message("assistant", "the answer", reasoning=THOUGHT))
    document = Document("chat.jsonl:1", messages, plain=False)
    assert masked_runs(make_tokenizer(template), document, template) == [f"{THOUGHT}|the answer<|im_end|>"]
    masked = masked_runs(make_tokenizer(template), document, template, mask_thinking=True)
    assert masked == ["|the answer<|im_end|>"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "there"}}}


@pytest.mark.parametrize("name", ["qwen3", "qwen3, tagged", "llama"])
def test_tool_calls_are_what_the_assistant_says(make_tokenizer, real_templates: dict[str, str], name: str) -> None:
    template = real_templates[name]
    messages = (
        Message("user", "what is it?"),
        Message("assistant", "", more={"tool_calls": [CALL]}),
        Message("tool", "sun"),
        Message("assistant", "the sun"),
    )
    document = Document("chat.jsonl:1", messages, plain=False, tools=(TOOL,))
    called, answered = masked_runs(make_tokenizer(template), document, template)
    assert '"name": "weather"' in called
    assert '{"place": "there"}' in called
    assert called.endswith("<|im_end|>")
    assert words(answered) == "the sun"
    ids, _ = tokenize_conversation(make_tokenizer(template), document, template)
    assert ("Tools:" in make_tokenizer(template).decode(ids)) == (name != "llama")


def test_reasoning_before_a_call_stays_while_no_question_follows(make_tokenizer, real_templates) -> None:
    """With a later question the template drops it from turns that the prompt of a middle turn still shows."""
    call = Message("assistant", "", reasoning=THOUGHT, more={"tool_calls": [CALL]})
    first = (Message("user", "a"), call, Message("tool", "sun"), Message("assistant", "the sun"))
    later = (*first, Message("user", "b"), Message("assistant", "is it"))
    template = real_templates["qwen3"]
    tokenizer = make_tokenizer(template)
    called, _ = masked_runs(tokenizer, Document("chat.jsonl:1", first, plain=False), template)
    assert THOUGHT in called
    called, *answers = masked_runs(tokenizer, Document("chat.jsonl:1", later, plain=False), template)
    assert THOUGHT not in called
    assert "weather" in called
    assert [words(answer) for answer in answers] == ["the sun", "is it"]


def test_a_template_that_drops_a_call_is_refused(make_tokenizer, real_templates) -> None:
    document = Document(
        "chat.jsonl:7", (Message("user", "a"), Message("assistant", "", more={"tool_calls": [CALL]})), plain=False
    )
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: the loss mask misses"):
        tokenize_conversation(make_tokenizer(real_templates["gemma"]), document, real_templates["gemma"])
