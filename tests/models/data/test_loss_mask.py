"""The mask covers what the assistant said, all of it and nothing else, whatever the template."""

import re
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.data.chat_template import ChatTemplate, open_chat_template
from models.data.conversations import Document, Message
from models.data.loss_mask import MaskedTokens, runs_of, tokenize_conversation
from models.data.message import sent_back
from tests.models.chat_templates import CHATML, FAMILIES, QWEN3, make_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"word": "list"}}}


def conversation(*messages: Message | tuple[str, str], tools: bool = False) -> Document:
    turns = [Message(*message) if isinstance(message, tuple) else message for message in messages]
    return Document("chat.jsonl:7", tuple(turns), plain=False, tools=(TOOL,) if tools else ())


def runs(template: ChatTemplate, parts: list[MaskedTokens]) -> list[list[str]]:
    """What is learned of each sample, one text for each run of the mask."""
    return [[template.tokenizer.decode(part.ids[a:b]) for a, b in runs_of(part.mask)] for part in parts]  # pyright: ignore[reportReturnType]


def opened(template: str) -> ChatTemplate:
    found = open_chat_template(make_tokenizer(template))
    assert found is not None
    return found


QUESTION, OTHER = ("user", "a"), ("user", "b")
CONVERSATIONS = {
    "one turn": conversation(("user", "q"), ("assistant", "one")),
    "system, two turns": conversation(
        ("system", "be"), QUESTION, ("assistant", "one"), OTHER, ("assistant", "two")
    ),
    "reasoning apart": conversation(
        QUESTION, Message("assistant", "one", "hm"), OTHER, Message("assistant", "two", "so")
    ),
    "reasoning in the text": conversation(QUESTION, ("assistant", "<think>\nhm\n</think>\n\none")),
    "tools": conversation(
        QUESTION, Message("assistant", "", more={"tool_calls": [CALL]}), ("tool", "sun"), ("assistant", "one"),
        OTHER, ("assistant", "two"), tools=True,
    ),
    "reasoning before a call": conversation(
        QUESTION, Message("assistant", "", "hm", more={"tool_calls": [CALL]}), ("tool", "sun"),
        Message("assistant", "one", "so"), tools=True,
    ),
}  # fmt: skip
CHATML_WIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY = re.compile(r"<think>\s*(</think>\s*)?")
REFUSED = "refused"
DROPPED = "the reasoning has no place"
JSON_CALL = '{"name": "look", "arguments": {"word": "list"}}'
HERMES = f"<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
HARMONY_CALL = 'to=functions.look<|channel|>commentary json<|message|>{"word": "list"}<|call|>'
MISTRAL_CALL = f'[TOOL_CALLS][{JSON_CALL[:-1]}, "id": "abcdefghi"}}]<eos>'
R1_CALL = '<|tool_calls_begin|>look\n{"word": "list"}<|tool_calls_end|><eos>'
GLM_CALL = "<tool_call>look\n<arg_key>word</arg_key>\n<arg_value>list</arg_value>\n</tool_call><|observation|>"
# What is learned: a list of texts for each sample. Rows: one turn; system, two turns; reasoning apart; reasoning in the
# text; tools; reasoning before a call.
LEARNED: dict[str, list[Any]] = {
    "chatml": [
        [["one<|im_end|>"]],
        [["one<|im_end|>", "two<|im_end|>"]],
        (DROPPED, [["one<|im_end|>", "two<|im_end|>"]]),
        [["<think>\nhm\n</think>\n\none<|im_end|>"]],
        REFUSED,
        REFUSED,
    ],
    # A block that is empty is not said: history is learned without it.
    "qwen3": [
        [["<think>\n\n</think>\n\none<|im_end|>"]],
        [["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]],
        [["<think>\nhm\n</think>\n\none<|im_end|>"], ["<think>\nso\n</think>\n\ntwo<|im_end|>"]],
        [["<think>\nhm\n</think>\n\none<|im_end|>"]],
        [[HERMES, "one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]],
        [[f"<think>\nhm\n</think>\n\n{HERMES}", "<think>\nso\n</think>\n\none<|im_end|>"]],
    ],
    "qwen3, no thinking": [
        [["one<|im_end|>"]],
        [["one<|im_end|>", "two<|im_end|>"]],
        REFUSED,
        REFUSED,
        [[HERMES, "one<|im_end|>", "two<|im_end|>"]],
        REFUSED,
    ],
    "qwen3, opened": [
        [["\n</think>\n\none<|im_end|>"]],
        [["one<|im_end|>", "\n</think>\n\ntwo<|im_end|>"]],
        [["hm\n</think>\n\none<|im_end|>"], ["so\n</think>\n\ntwo<|im_end|>"]],
        [["hm\n</think>\n\none<|im_end|>"]],
        [[HERMES, "one<|im_end|>", "\n</think>\n\ntwo<|im_end|>"]],
        [[f"hm\n</think>\n\n{HERMES}", "so\n</think>\n\none<|im_end|>"]],
    ],
    "llama3": [
        [["one<|eot_id|>"]],
        [["one<|eot_id|>", "two<|eot_id|>"]],
        (DROPPED, [["one<|eot_id|>", "two<|eot_id|>"]]),
        [["<think>\nhm\n</think>\n\none<|eot_id|>"]],
        [['{"name": "look", "parameters": {"word": "list"}}<|eot_id|>', "one<|eot_id|>", "two<|eot_id|>"]],
        (DROPPED, [['{"name": "look", "parameters": {"word": "list"}}<|eot_id|>', "one<|eot_id|>"]]),
    ],
    "gemma3": [
        [["one<end_of_turn>"]],
        [["one<end_of_turn>", "two<end_of_turn>"]],
        (DROPPED, [["one<end_of_turn>", "two<end_of_turn>"]]),
        [["<think>\nhm\n</think>\n\none<end_of_turn>"]],
        REFUSED,
        REFUSED,
    ],
    "r1": [
        [["\n</think>\n\none<eos>"]],
        [["one<eos>", "\n</think>\n\ntwo<eos>"]],
        [["hm\n</think>\n\none<eos>"], ["so\n</think>\n\ntwo<eos>"]],
        [["hm\n</think>\n\none<eos>"]],
        [[R1_CALL, "one<eos>", "\n</think>\n\ntwo<eos>"]],
        [[f"hm\n</think>\n\n{R1_CALL}"], ["<think>\nso\n</think>\n\none<eos>"]],
    ],
    "r1, closed": [
        [["one<eos>"]],
        [["one<eos>", "two<eos>"]],
        [["<think>\nhm\n</think>\n\none<eos>"], ["<think>\nso\n</think>\n\ntwo<eos>"]],
        [["<think>\nhm\n</think>\n\none<eos>"]],
        [[R1_CALL, "one<eos>", "two<eos>"]],
        [[f"<think>\nhm\n</think>\n\n{R1_CALL}"], ["<think>\nso\n</think>\n\none<eos>"]],
    ],
    "deepseek-v3.1": [[["one<eos>"]], [["one<eos>", "two<eos>"]], REFUSED, REFUSED, REFUSED, REFUSED],
    "deepseek-v3.1, thinking": [
        [["</think>one<eos>"]],
        [["</think>one<eos>"], ["</think>two<eos>"]],
        [["hm</think>one<eos>"], ["so</think>two<eos>"]],
        [["hm</think>\n\none<eos>"]],
        REFUSED,
        REFUSED,
    ],
    # The system prompt and the tools stand before the last question.
    "mistral": [
        [["one<eos>"]],
        [["one<eos>"], ["two<eos>"]],
        (DROPPED, [["one<eos>", "two<eos>"]]),
        [["<think>\nhm\n</think>\n\none<eos>"]],
        [[MISTRAL_CALL, "one<eos>"], ["two<eos>"]],
        (DROPPED, [[MISTRAL_CALL, "one<eos>"]]),
    ],
    # History has another end of turn, and no analysis.
    "harmony": [
        [[f"{FINAL}one<|return|>"]],
        [[f"{FINAL}one<|return|>"], [f"{FINAL}two<|return|>"]],
        [
            [f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}one<|return|>"],
            [f"{ANALYSIS}so<|end|><|start|>assistant{FINAL}two<|return|>"],
        ],
        [[f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}one<|return|>"]],
        [[f" {HARMONY_CALL}", f"{FINAL}one<|return|>"], [f"{FINAL}two<|return|>"]],
        [
            [
                f"{ANALYSIS}hm<|end|><|start|>assistant {HARMONY_CALL}",
                f"{ANALYSIS}so<|end|><|start|>assistant{FINAL}one<|return|>",
            ]
        ],
    ],
    # The next turn's beginning ends an answer.
    "glm4": [
        [["\none<|user|>"]],
        [["\none<|user|>", "\ntwo<|user|>"]],
        (DROPPED, [["\none<|user|>", "\ntwo<|user|>"]]),
        [["\n<think>\nhm\n</think>\n\none<|user|>"]],
        [['look\n{"word": "list"}<|observation|>', "\none<|user|>", "\ntwo<|user|>"]],
        (DROPPED, [['look\n{"word": "list"}<|observation|>', "\none<|user|>"]]),
    ],
    "glm4.5": [
        [["\n<think></think>\none<|user|>"]],
        [["\n<think></think>\none<|user|>", "\n<think></think>\ntwo<|user|>"]],
        [["\n<think>hm</think>\none<|user|>"], ["\n<think>so</think>\ntwo<|user|>"]],
        [["\n<think>hm</think>\none<|user|>"]],
        [
            [
                f"\n<think></think>\n{GLM_CALL}", "\n<think></think>\none<|user|>", "\n<think></think>\ntwo<|user|>",
            ]
        ],
        [[f"\n<think>hm</think>\n{GLM_CALL}", "\n<think>so</think>\none<|user|>"]],
    ],
    "glm4.5, no thinking": [
        [["\none<|user|>"]],
        [["\none<|user|>", "\ntwo<|user|>"]],
        REFUSED,
        REFUSED,
        [[f"\n{GLM_CALL}", "\none<|user|>", "\ntwo<|user|>"]],
        REFUSED,
    ],
}  # fmt: skip
LEARNED |= {"chatml, tagged": LEARNED["chatml"], "qwen3, tagged": LEARNED["qwen3"]}


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned(name: str, case: str) -> None:
    """What the assistant said, with its end of turn: everything, nothing else, and each turn once."""
    template, document = FAMILIES[name].open(), CONVERSATIONS[case]
    expected = LEARNED[name][list(CONVERSATIONS).index(case)]
    if expected == REFUSED:
        with pytest.raises(ValueError, match=r"chat\.jsonl:7: the (chat template|answer) .*leave the conversation out"):
            tokenize_conversation(template, document)
        return
    parts = tokenize_conversation(template, document)
    learned = runs(template, parts)
    dropped = any(part.reasoning_dropped for part in parts)
    assert (DROPPED, learned) == expected if dropped else learned == expected
    assert [part.turns for part in parts] == [len(texts) for texts in learned]
    assert any(part.thinking for part in parts) == any("hm" in text for texts in learned for text in texts)
    last = tokenize_conversation(template, document, "last")
    assert runs(template, last) == [[learned[-1][-1]]]


WORDS = st.text(st.sampled_from("the answer\nis ünd 日 <>|/"), min_size=1, max_size=20).map(str.strip).filter(bool)


def shows_thinking(name: str) -> bool:
    """Whether the target reasons, and its template has a place for that."""
    arguments = FAMILIES[name].arguments
    off = not arguments.get("enable_thinking", True) or name == "deepseek-v3.1"
    return name.partition(",")[0] in ("qwen3", "r1", "deepseek-v3.1", "harmony", "glm4.5") and not off


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(WORDS, st.sampled_from(["", "hm", "so it is"]), WORDS), min_size=1, max_size=4),
    system=st.none() | WORDS,
)
def test_what_is_learned_is_what_the_template_would_have_generated(
    family: str, turns: list[tuple[str, str, str]], system: str | None
) -> None:
    """Each answer once, after its prompt and up to its end; the last of a sample after its prompt's very tokens.

    Answers that came back without their reasoning are not learned.
    """
    messages, template = [Message("system", system)] if system else [], FAMILIES[family].open()
    for asked, thought, said in turns:
        shown = thought if shows_thinking(family) else ""
        messages += [Message("user", asked), Message("assistant", said, shown)]
    answered = {turn for turn, message in enumerate(messages) if message.role == "assistant"}
    answers = sorted(answered - sent_back(messages))
    tokenizer: Any = template.tokenizer
    for part in tokenize_conversation(template, conversation(*messages)):
        covered, answers = answers[: part.turns], answers[part.turns :]
        for turn, (start, end) in zip(covered, runs_of(part.mask), strict=True):
            prompt = tokenizer.apply_chat_template(
                [message.as_dict() for message in messages[:turn]],
                add_generation_prompt=True,
                tokenize=False,
                **template.arguments,
            )
            before, text = tokenizer.decode(part.ids[:start]), tokenizer.decode(part.ids[start:end])
            if turn == covered[-1]:
                assert end == len(part.ids)
                assert part.ids[:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]
            else:  # history may lack an empty block
                assert re.sub(EMPTY, "", prompt + text) == re.sub(EMPTY, "", before + text)
            assert any(text.endswith(mark) for mark in template.ends)
            assert sum(text.count(mark) for mark in template.ends) == 1
            for words in (messages[turn].content, messages[turn].reasoning):
                assert "".join(words.split()) in "".join(text.split())
    assert answers == []


def test_a_template_that_changes_the_words_is_refused() -> None:
    document = conversation(QUESTION, ("assistant", "the answer"))
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: the chat template changes or drops .*turn 2"):
        tokenize_conversation(
            opened("{% for m in messages %}{{ m.role }}:{{ m.content | upper }}\n{% endfor %}"), document
        )
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: .*roles must alternate"):
        tokenize_conversation(opened("{{ raise_exception('roles must alternate') }}"), document)
    another = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}BOT:{% endif %}"
    )
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: .*in another way than its own prompt begins it"):
        tokenize_conversation(opened(another), document)


def test_a_template_without_tools_is_said_to_drop_the_call() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    turns = (Message("user", "hi"), Message("assistant", "", more={"tool_calls": [call]}))
    with pytest.raises(ValueError, match=r"what the assistant said in turn 2 \('weather'\)"):
        tokenize_conversation(opened(CHATML), Document("chat.jsonl:7", turns, plain=False))


def test_an_answer_that_goes_on_after_its_end_is_left_out(family: str) -> None:
    template = FAMILIES[family].open()
    end = template.ends[0]
    with pytest.raises(ValueError, match=rf"chat\.jsonl:7: the answer in turn 2 goes on after {re.escape(end)}"):
        tokenize_conversation(template, conversation(("user", "hi"), ("assistant", f"one{end}two")))
    assert len(tokenize_conversation(template, conversation(("user", "hi"), ("assistant", f"one{end}")))) == 1


def test_generation_tags_are_recognised() -> None:
    assert opened("a{%- generation -%}b{% endgeneration %}").marks_generation(())
    assert not opened("{% if add_generation_prompt %}{% endif %}").marks_generation(())


def test_an_answer_that_looks_like_the_template(family: str) -> None:
    template = FAMILIES[family].open()
    for said in ("im_end", "think", "user", "assistant\n", "<", "</", "<think"):
        (part,) = tokenize_conversation(template, conversation(("user", said), ("assistant", said)))
        ((text,),) = runs(template, [part])
        end = next(mark for mark in template.ends if text.endswith(mark))
        assert text.removesuffix(end).rpartition("</think>")[2].removeprefix(FINAL).strip() == said.strip()


def test_an_answer_begins_after_its_prompt_where_a_token_could_hold_both() -> None:
    """Line breaks on both sides of the boundary are one token of the whole text."""
    template = FAMILIES["chatml"].open()
    (part,) = tokenize_conversation(template, conversation(QUESTION, ("assistant", "\n\nthe answer")))
    assert runs(template, [part]) == [["\n\nthe answer<|im_end|>"]]
    whole: Any = template.tokenizer("assistant\n\n\nthe answer", add_special_tokens=False)
    assert "ĊĊ" in template.tokenizer.convert_ids_to_tokens(whole["input_ids"])


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_tokenizers_that_begin_every_text_with_a_space(scheme: Literal["first", "never"]) -> None:
    """SentencePiece does for Llama 2, not for Gemma: a part of a text has no space more than the whole."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[assignment]
    made.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)  # type: ignore[assignment]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, initial_alphabet=list("abcdefghijklmnop▁\n"))
    made.train_from_iterator(["a one", "one a one"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", additional_special_tokens=special[3:]
    )
    tokenizer.chat_template = (  # type: ignore[assignment]
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    template = open_chat_template(tokenizer, ends=frozenset([2]))
    assert template is not None
    assert template.adds_space == (scheme == "first")
    (part,) = tokenize_conversation(template, conversation(QUESTION, ("assistant", "one"), OTHER, ("assistant", "one")))
    whole = "<s>[INST] a [/INST] one</s>[INST] b [/INST] one</s>"
    assert part.ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    answers = [tokenizer.convert_ids_to_tokens(part.ids[start:end].tolist()) for start, end in runs_of(part.mask)]
    assert ["".join(tokens) for tokens in answers] == ["▁one</s>"] * 2


def test_characters_of_several_tokens_at_the_end() -> None:
    template = opened("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    parts = tokenize_conversation(template, conversation(QUESTION, ("assistant", "日")))
    assert runs(template, parts) == [["日"]]


def test_tags_serve_where_the_prompt_does_not() -> None:
    """The prompt of a template decides; one that is unlike its answers may mark them."""
    unlike = "{% if add_generation_prompt %}BOT:{% endif %}"
    tagged = "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}!{% endgeneration %}\n{% endfor %}"
    document = conversation(QUESTION, ("assistant", "one"), OTHER, ("assistant", "two"))
    template = opened(tagged + unlike)
    assert runs(template, tokenize_conversation(template, document)) == [["one!", "two!"]]
    with pytest.raises(ValueError, match=r"chat\.jsonl:7: .*in another way than its own prompt begins it"):
        tokenize_conversation(
            opened(tagged.replace("generation", "if true", 1).replace("endgeneration", "endif") + unlike), document
        )
    # Tags may hold the header, which the prompt holds as well.
    wide = opened(CHATML_WIDE)
    assert runs(wide, tokenize_conversation(wide, document)) == [["one<|im_end|>", "two<|im_end|>"]]


def test_a_greeting_is_not_learned() -> None:
    """Nothing stands before it, so that no target generates it."""
    template = FAMILIES["chatml"].open()
    greeting = ("assistant", "hi")
    assert tokenize_conversation(template, conversation(greeting, QUESTION)) == []
    parts = tokenize_conversation(template, conversation(greeting, QUESTION, ("assistant", "one")))
    assert runs(template, parts) == [["one<|im_end|>"]]
    assert "hi<|im_end|>" in str(template.tokenizer.decode(parts[0].ids))


def test_an_empty_block_is_not_opened_twice() -> None:
    """The prompt opens a block with a line break, which answers without reasoning do not show."""
    template = opened(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    parts = tokenize_conversation(template, conversation(QUESTION, ("assistant", "one")))
    assert runs(template, parts) == [["</think>one<|im_end|>"]]


THOUGHT = "so the answer is there"


@pytest.mark.parametrize("apart", [True, False], ids=["reasoning_content", "in the text"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3, tagged", "qwen3, opened", "r1", "glm4.5"])
def test_reasoning_may_be_shown_and_not_learned(name: str, apart: bool) -> None:
    template = FAMILIES[name].open()

    def said(words: str) -> Message:
        if apart:
            return Message("assistant", words, reasoning=THOUGHT)
        return Message("assistant", f"<think>\n{THOUGHT}\n</think>\n\n{words}")

    document = conversation(QUESTION, said("one"), OTHER, said("two"))
    parts = tokenize_conversation(template, document, mask_thinking=True)
    assert all(THOUGHT in str(template.tokenizer.decode(part.ids)) for part in parts)
    texts = [text.strip() for learned in runs(template, parts) for text in learned]
    end = FAMILIES[name].ends[0]
    assert [text for text in texts if text] == [f"one{end}", f"two{end}"]


def test_reasoning_that_a_template_writes_without_tags_is_masked() -> None:
    template = FAMILIES["harmony"].open()
    document = conversation(QUESTION, Message("assistant", "one", reasoning=THOUGHT))
    parts = tokenize_conversation(template, document, mask_thinking=True)
    assert runs(template, parts) == [[ANALYSIS, f"<|end|><|start|>assistant{FINAL}one<|return|>"]]


def test_reasoning_before_a_call_stays_while_no_question_follows() -> None:
    """With a later question the template drops it from turns that the prompt of a middle turn still shows."""
    call = Message("assistant", "", reasoning=THOUGHT, more={"tool_calls": [CALL]})
    first = (Message(*QUESTION), call, Message("tool", "sun"), Message("assistant", "one"))
    template = opened(QWEN3)
    (part,) = tokenize_conversation(template, conversation(*first))
    called, _ = runs(template, [part])[0]
    assert THOUGHT in called
    earlier, later = tokenize_conversation(template, conversation(*first, OTHER, ("assistant", "two")))
    assert THOUGHT in runs(template, [earlier])[0][0]
    assert THOUGHT not in str(template.tokenizer.decode(later.ids))
    assert later.turns == 1


KIMI_THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_reasoning_stands_in_the_empty_block_of_an_answer() -> None:
    """Kimi-K2-Thinking's template counts the last answer as history."""
    template = opened(KIMI_THINKING)
    parts = tokenize_conversation(template, CONVERSATIONS["reasoning apart"])
    assert runs(template, parts) == [["<think>hm</think>one<|im_end|>"], ["<think>so</think>two<|im_end|>"]]


def test_answers_that_are_marked_or_empty_are_not_learned() -> None:
    template = opened(CHATML)
    document = conversation(
        QUESTION, Message("assistant", "bad", learned=False), OTHER, ("assistant", " \n"), OTHER, ("assistant", "one")
    )
    parts = tokenize_conversation(template, document)
    assert runs(template, parts) == [["one<|im_end|>"]]
    assert "bad" in str(template.tokenizer.decode(parts[0].ids))
    good = replace(document, messages=(document.messages[0], replace(document.messages[1], learned=True)))
    bad = replace(document, messages=document.messages[:2])
    assert tokenize_conversation(template, bad) == []
    assert bad.content_hash != good.content_hash
