"""From documents to samples: limits, counts, refusals, and the rule that holds documents out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.refusal import Refusal
from models.config.data import DataConfig
from models.data.benchmark_prompts import BenchmarkPrompts
from models.data.conversations import Document, Message, Tokens
from models.data.encoded import EncodedSample
from models.data.outcomes import PreparationCounts
from models.data.samples import (
    SampleEncoder,
    divide,
    even_pieces,
    first_held,
    last_run,
)
from tests.models.chat_templates import CHATML, QWEN3

LIMITS = {"max_tokens": 20, "min_tokens": 4}


def text(content: str) -> Document:
    return Document("a.txt:1", (Message("text", content),), plain=True)


def chat(*turns: tuple[str, str]) -> Document:
    return Document("a.jsonl:1", tuple(Message(role, content) for role, content in turns), plain=False)


def encoder(tokenizer, add_bos: bool = False, **config) -> SampleEncoder:
    return SampleEncoder(tokenizer, DataConfig(**{"chat_template": "none", **LIMITS, **config}), add_bos)


# Digits are single tokens: the tokenizer has seen none.
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize(
    ("overlong", "lengths", "count"), [("drop", [], "dropped"), ("truncate", [20], "truncated"), ("split", [], "split")]
)
def test_overlong_text(make_tokenizer, add_bos: bool, overlong: str, lengths: list[int], count: str) -> None:
    made = encoder(make_tokenizer(None), add_bos, overlong=overlong)
    samples = list(made.encode([text("7" * 50), text("123456789")]))
    if overlong == "split":
        lengths = [16 + add_bos, 17 + add_bos, 17 + add_bos]
    assert [len(sample.tokens) for sample in samples] == [*lengths, 9 + add_bos]
    assert getattr(made.counts, count) == 1
    assert made.counts.dropped + made.counts.truncated + made.counts.split == 1
    for sample in samples:
        assert sample.loss_mask.tolist() == [False] * add_bos + [True] * (len(sample.tokens) - add_bos)
        assert (sample.tokens[0] == 0) == add_bos
    if overlong == "split":
        whole = np.concatenate([sample.tokens[int(add_bos) :] for sample in samples[:3]])
        assert made.tokenizer.decode(whole) == "7" * 50
        assert len({sample.document for sample in samples[:3]}) == 1


def test_counts_are_of_documents_however_many_samples_each_becomes(make_tokenizer) -> None:
    """This template gives a sample for each answer."""
    long = [("user", "7?"), ("assistant", "<think>h</think>21")] * 12
    made = encoder(make_tokenizer(QWEN3), chat_template="tokenizer", max_tokens=60, overlong="truncate")
    samples = list(made.encode([chat(("user", f"{n}!"), ("assistant", "3"), *long) for n in range(5)]))
    assert len(samples) == 5
    assert (made.counts.truncated, made.counts.unusable, made.counts.documents) == (5, 0, 5)


def test_small_talk_of_a_suite_is_no_prompt(make_tokenizer) -> None:
    made = SampleEncoder(
        make_tokenizer(CHATML), DataConfig(max_tokens=500, min_tokens=4), False,
        excluded=BenchmarkPrompts(["thanks", "Tell a joke"]),
    )  # fmt: skip
    documents = [
        chat(("user", "Is it bread?"), ("assistant", "Yes."), ("user", "Thanks!"), ("assistant", "7")),
        chat(("user", "tell a JOKE"), ("assistant", "7")),
    ]
    assert len(list(made.encode(documents))) == 1
    assert made.counts.benchmark_prompts == 1


def test_the_beginning_of_text_is_not_doubled(make_tokenizer) -> None:
    tokenizer = make_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (sample,) = encoder(tokenizer, True, chat_template="tokenizer").encode(
        [chat(("user", "67"), ("assistant", "12345"))]
    )
    assert Counter(sample.tokens.tolist())[tokenizer.bos_token_id] == 1
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 5


def test_short_and_repeated_documents_are_counted(make_tokenizer) -> None:
    made = encoder(make_tokenizer(None))
    assert len(list(made.encode([text("123"), text("12345"), text(" 12345\n"), text("54321")]))) == 2
    assert made.counts == PreparationCounts(documents=4, duplicates=1, dropped=1)


def test_truncation_that_leaves_nothing_supervised_is_counted(make_tokenizer, template: str) -> None:
    made = encoder(make_tokenizer(template), chat_template="tokenizer", overlong="truncate", max_tokens=60)
    samples = list(
        made.encode([chat(("user", "7" * 90), ("assistant", "8")), chat(("user", "7"), ("assistant", "89"))])
    )
    assert len(samples) == 1
    assert (made.counts.truncated, made.counts.unusable) == (1, 1)
    assert "89" in made.tokenizer.decode(samples[0].tokens[samples[0].loss_mask])


def test_conversations_without_a_template_are_their_words(make_tokenizer) -> None:
    (sample,) = encoder(make_tokenizer(None)).encode([chat(("user", "123"), ("assistant", "456"))])
    assert make_tokenizer(None).decode(sample.tokens) == "123\n\n456"


STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_conversations_that_the_template_refuses_are_left_out_and_counted(make_tokenizer) -> None:
    whole = [chat(("user", f"{number}7"), ("assistant", f"8{number}9")) for number in range(9)]
    odd = chat(("user", "7"), ("tool", "5"), ("assistant", "8"))
    made = encoder(
        make_tokenizer(STRICT), chat_template="tokenizer", max_tokens=60, max_refused_share=0.1, min_tokens=2
    )
    list(made.encode([*whole[:4], odd, *whole[4:]]))
    assert made.counts.documents == 10
    (refusal,) = made.counts.refusals
    assert refusal.startswith("a.jsonl:1: the chat template refuses this (no tools here)")
    made = encoder(
        make_tokenizer(STRICT), chat_template="tokenizer", max_tokens=60, max_refused_share=0.1, min_tokens=2
    )
    with pytest.raises(ValueError, match=r"2 of 10 conversations cannot be used, more than .*share=0\.1"):
        list(made.encode([*whole[:8], odd, chat(("user", "6"), ("tool", "4"), ("assistant", "2"))]))


REFUSALS = {
    "no template": (
        None,
        {"chat_template": "tokenizer"},
        [],
        "has no chat template: name a Jinja file",
    ),
    "split conversations": ("x", {"chat_template": "tokenizer", "overlong": "split"}, [], "cuts plain text only"),
    "plain text for a template": ("x", {"chat_template": "tokenizer"}, [text("12345")], r"a\.txt:1: plain text has no"),
    "nothing supervised": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        {"chat_template": "tokenizer"},
        [chat(("user", "12345")), chat(("user", "54321"))],
        "supervised share of .* is 0: 2 of 2",
    ),
    "everything too short": (None, {}, [text("1"), text("2")], r"no sample is left .* 2 of 2 .*min_tokens=4"),
    "everything too long": (None, {"overlong": "drop"}, [text("1" * 30)], r"no sample is left .*max_tokens=20"),
    "one document": (
        None,
        {"overlong": "split"},
        [text("1" * 30)],
        "needs at least two dialogues",
    ),
    "the same twice": (None, {"overlong": "split"}, [text("1" * 30), text("1" * 45)], "also occurs in a held-out"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(make_tokenizer, case: str) -> None:
    template, config, documents, message = REFUSALS[case]

    def prepare() -> None:
        made = encoder(make_tokenizer(template), **config)
        divide(made.encode(documents), made.config, made.counts)

    with pytest.raises(ValueError, match=message):
        prepare()


def test_a_missing_beginning_of_text_is_refused(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match=r"target\.add_bos is set"):
        encoder(tokenizer, add_bos=True)


@given(length=st.integers(1, 5000), room=st.integers(1, 600))
def test_pieces_cover_the_text_and_are_even(length: int, room: int) -> None:
    pieces = [range(length)[piece] for piece in even_pieces(length, room)]
    assert [index for piece in pieces for index in piece] == list(range(length))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) <= room
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-length // room)


HASHES = st.sets(st.text("0123456789abcdef", min_size=4, max_size=8), min_size=2, max_size=60)
SHARES = st.floats(0.01, 0.49)


ASKED = "how do i bake bread with the oven number"


def log_of_requests(dialogues: int, turns: int) -> list[Document]:
    """Each request of each dialogue, with all turns before it, as a server's log has them."""
    found = list[Document]()
    for dialogue in range(dialogues):
        said = list[tuple[str, str]]()
        for turn in range(turns):
            said += [("user", f"{ASKED} {dialogue}" if turn == 0 else f"{turn}?"), ("assistant", f"{dialogue} {turn}")]
            found.append(chat(*said))
    return found


def test_requests_of_one_dialogue_are_on_one_side_and_learned_once(make_tokenizer) -> None:
    made = encoder(make_tokenizer(CHATML), chat_template="tokenizer", max_tokens=500)
    splits = divide(made.encode(log_of_requests(20, 4)), made.config, made.counts)
    texts = [[made.tokenizer.decode(one.tokens) for one in side] for side in (splits.train, splits.heldout)]
    assert [len(side) for side in texts] == [18, 2]
    assert made.counts.duplicates == 60
    begins = [{text.split("<|im_end|>")[0] for text in side} for side in texts]
    assert not begins[0] & begins[1]


def test_answers_to_one_question_are_on_one_side(make_tokenizer) -> None:
    made = encoder(make_tokenizer(CHATML), chat_template="tokenizer", max_tokens=500)
    documents = [
        chat(("system", f"{answer}"), ("user", f"{ASKED}  {question}"), ("assistant", f"{answer}"))
        for question in range(20) for answer in range(5)
    ]  # fmt: skip
    splits = divide(made.encode(documents), made.config, made.counts)
    assert (len(splits.train), len(splits.heldout)) == (90, 10)
    assert not {one.document for one in splits.train} & {one.document for one in splits.heldout}


def test_system_prompts_and_images_tell_dialogues_apart_and_the_time_does_not() -> None:
    def name(system: str, *images: str, question: str = ASKED) -> str:
        asked = Message("user", question, images=images)
        return Document("a:1", (Message("system", system), asked), plain=False).dialogue_hash

    assert name("It is 12:03.") == name("It is 12:04.") != name("It is late.")
    assert len({name("", "cat.png", question="?"), name("", "dog.png", question="?"), name("", question="?")}) == 3


def test_short_openings_are_no_common_dialogue(make_tokenizer) -> None:
    made = encoder(make_tokenizer(CHATML), chat_template="tokenizer", max_tokens=500)
    documents = [
        chat(("user", "Hi"), ("assistant", "Yes?"), ("user", f"{ASKED} {n}"), ("assistant", "7")) for n in range(20)
    ]
    splits = divide(made.encode(documents), made.config, made.counts)
    assert (len(splits.train), len(splits.heldout)) == (18, 2)


@given(hashes=HASHES, share=SHARES, data=st.data())
def test_the_held_out_side_is_the_last_share_of_the_documents(hashes: set[str], share: float, data) -> None:
    samples = [
        EncodedSample(np.array([number, 1], dtype=np.int32), np.ones(2, dtype=bool), name)
        for number, name in enumerate(sorted(hashes))
    ]
    splits = divide(samples, DataConfig(heldout_share=share), PreparationCounts())
    held = {one.document for one in splits.heldout}
    assert abs(len(held) - share * len(hashes)) <= 1
    assert 0 < len(held) < len(hashes)
    assert min(held) > max(hashes - held)
    shuffled = data.draw(st.permutations(samples))
    again = divide([*shuffled, shuffled[0]], DataConfig(heldout_share=share), PreparationCounts())
    assert {one.document for one in again.heldout} == held


def sample(document: int, number: int) -> EncodedSample:
    tokens = np.array([document, number, 3], dtype=np.int32)
    return EncodedSample(tokens, np.ones(3, dtype=bool), f"{document * 2654435761 % 2**32:08x}")


@given(
    pieces=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=80),
    share=SHARES,
    limit=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_no_document_is_on_both_sides(pieces, share: float, limit: int | None, data) -> None:
    # Documents 0 to 9 also hold a piece that occurs in several of them.
    shared = EncodedSample(np.array([99, 99], dtype=np.int32), np.ones(2, dtype=bool), "")
    samples = [sample(*piece) for piece in pieces]
    samples += [EncodedSample(shared.tokens, shared.loss_mask, sample(d, 0).document) for d, n in pieces if d < 10 > n]
    config = DataConfig(heldout_share=share, max_samples=limit)
    names = sorted({one.document for one in samples})
    if len(names) < 2:
        return
    held = names[first_held(len(names), share * len(names) / len(names)) :]
    if {one.id for one in samples} == {one.id for one in samples if one.document in held}:
        with pytest.raises(Refusal, match="every training sample also occurs in a held-out document"):
            divide(samples, config, PreparationCounts())
        return
    splits = divide(samples, config, PreparationCounts())
    assert not {one.document for one in splits.train} & {one.document for one in splits.heldout}
    assert not {one.id for one in splits.train} & {one.id for one in splits.heldout}
    for side in (splits.train, splits.heldout):
        ids = [one.id for one in side]
        assert ids == sorted(set(ids))
    if limit is None:
        assert {one.id for one in splits.train} | {one.id for one in splits.heldout} == {one.id for one in samples}
    else:
        assert len(splits.train) <= limit
    again = divide(data.draw(st.permutations(samples)), config, PreparationCounts())
    assert [one.id for one in again.train] == [one.id for one in splits.train]
    assert [one.id for one in again.heldout] == [one.id for one in splits.heldout]


def tokens(ids: list[int], mask: list[int], made_by: str | None = None) -> Document:
    found = Tokens(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool), made_by)
    return Document("t.jsonl:3", (), plain=True, tokens=(found,))


def test_tokens_are_taken_as_they_are(make_tokenizer) -> None:
    made = encoder(make_tokenizer(None), True, overlong="truncate")
    samples = list(made.encode([tokens([9, 5, 6, 7, 8], [0, 1, 0, 1, 1]), tokens([9] * 30, [1] * 30)]))
    assert [(one.tokens.tolist(), one.loss_mask.astype(int).tolist()) for one in samples] == [
        ([9, 5, 6, 7, 8], [0, 1, 0, 1, 1]), ([9] * 20, [1] * 20),
    ]  # fmt: skip
    assert made.counts == PreparationCounts(documents=2, truncated=1)
    (last,) = encoder(make_tokenizer(None), turns="last").encode([tokens([9, 5, 6, 7, 8], [0, 1, 0, 1, 1])])
    assert last.loss_mask.astype(int).tolist() == [0, 0, 0, 1, 1]


def test_tokens_of_another_tokenizer_are_refused(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None)
    good = tokens([1, 2, 3, 4], [1, 1, 1, 1], "abc")
    config = DataConfig(chat_template="none", min_tokens=2)
    made = SampleEncoder(tokenizer, config, False, tokenizer_hash="abc", vocabulary=9)
    assert len(list(made.encode([good]))) == 1
    for document, message in (
        (tokens([1, 2, 9], [1, 1, 1]), r"t\.jsonl:3: token 9, but the target knows 9"),
        (tokens([1, 2, 3], [1, 1, 1], "abd"), r"t\.jsonl:3: made with the tokenizer abd, the target's is abc"),
    ):
        with pytest.raises(ValueError, match=message):
            list(made.encode([document]))
    with pytest.raises(ValueError, match=r"t\.jsonl:3: tokens have no turns for a chat template"):
        list(encoder(make_tokenizer("x"), chat_template="tokenizer").encode([good]))


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chatml"])
def test_text_with_a_token_beyond_the_target_s_vocabulary_is_left_out(make_tokenizer, template: str | None) -> None:
    tokenizer = make_tokenizer(template)
    known = len(tokenizer)
    tokenizer.add_tokens(["<|new|>"], special_tokens=True)
    config = DataConfig(chat_template="tokenizer" if template else "none", min_tokens=2)
    made = SampleEncoder(tokenizer, config, False, vocabulary=known)
    documents = [chat(("user", f"{number}?"), ("assistant", "12")) for number in range(3)]
    left_out = chat(("user", "3?"), ("assistant", "1<|new|>2"))
    assert len(list(made.encode([*documents, left_out]))) == 3
    (refusal,) = made.counts.refusals
    assert refusal.startswith(f"a.jsonl:1: the tokenizer makes token {known} ('<|new|>') of the text, but the target")
    assert "remove it from the text" in refusal


MASKS = st.lists(st.booleans(), max_size=30)


@given(mask=MASKS)
def test_the_last_run(mask: list[bool]) -> None:
    found = last_run(np.array(mask, dtype=bool)).tolist()
    shown = "".join("x" if flag else "." for flag in mask).rstrip(".")
    head, dot, run = shown.rpartition(".")
    expected = "." * len(head + dot) + run
    assert "".join("x" if flag else "." for flag in found) == expected.ljust(len(mask), ".")


def said(made: SampleEncoder, sample: EncodedSample) -> str:
    return str(made.tokenizer.decode(sample.tokens[sample.loss_mask]))


def test_turns_and_thinking(make_tokenizer) -> None:
    """Reasoning is kept, left out, or shown and not learned; samples say whether they show any."""
    thought = "<think>\nhm 12\n</think>\n\n"
    document = chat(("user", "1?"), ("assistant", f"{thought}21"), ("user", "2?"), ("assistant", f"{thought}34"))
    shown = {
        ("keep", "all"): [(f"{thought}21<|im_end|>", 1), (f"{thought}34<|im_end|>", 1)],
        ("keep", "last"): [(f"{thought}34<|im_end|>", 1)],
        ("mask", "all"): [("21<|im_end|>", 1), ("34<|im_end|>", 1)],
        ("strip", "all"): [("21<|im_end|><think>\n\n</think>\n\n34<|im_end|>", 2)],
        ("strip", "last"): [("<think>\n\n</think>\n\n34<|im_end|>", 1)],
    }
    for (thinking, turns), expected in shown.items():
        made = encoder(make_tokenizer(QWEN3), chat_template="tokenizer", max_tokens=500, thinking=thinking, turns=turns)
        samples = list(made.encode([document]))
        assert [(said(made, sample), sample.turns) for sample in samples] == expected
        for sample in samples:
            assert sample.thinking == ("hm" in str(made.tokenizer.decode(sample.tokens))) == (thinking != "strip")
        assert len({sample.document for sample in samples}) == 1


def test_reasoning_is_counted_where_it_is_shown(make_tokenizer) -> None:
    """A template that has no place for it drops it, and that is counted too."""
    messages = (Message("user", "1?"), Message("assistant", "21", "hm"))
    document = Document("a.jsonl:1", messages, plain=False)
    for template, shown in ((QWEN3, True), (CHATML, False)):
        made = encoder(make_tokenizer(template), chat_template="tokenizer", max_tokens=500)
        (sample,) = made.encode([document])
        assert (sample.thinking, made.counts.reasoning_dropped) == (shown, 0 if shown else 1)


def generated(tokenizer, *answers: str, reasoning: str = "") -> Document:
    """A regenerated conversation, each answer in a sample of its own."""
    messages, parts = list[Message](), list[Tokens]()
    for answer in answers:
        messages += [Message("user", "7"), Message("assistant", answer.rpartition("</think>")[2], reasoning)]
        asked, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<|im_start|>7", answer))
        mask = np.array([False] * len(asked) + [True] * len(said))
        parts.append(Tokens(np.array(asked + said, dtype=np.int32), mask, None))
    return Document("g.jsonl:2", tuple(messages), plain=False, tokens=tuple(parts))


def test_regenerated_tokens_are_taken_as_they_are(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    document = generated(tokenizer, "<think>hm</think>21<|im_end|>", "<think>hm 日</think>é日<|im_end|>")
    shown = {
        ("keep", "all"): ["<think>hm</think>21<|im_end|>", "<think>hm 日</think>é日<|im_end|>"],
        ("keep", "last"): ["<think>hm 日</think>é日<|im_end|>"],
        ("mask", "all"): ["21<|im_end|>", "é日<|im_end|>"],
    }
    for (thinking, turns), expected in shown.items():
        made = encoder(tokenizer, chat_template="tokenizer", max_tokens=500, thinking=thinking, turns=turns)
        samples = list(made.encode([document]))
        assert [said(made, sample) for sample in samples] == expected
        ids = [part.ids.tolist() for part in document.tokens]
        assert [sample.tokens.tolist() for sample in samples] == (ids if turns == "all" else ids[-1:])
        assert all(sample.thinking and sample.turns == 1 for sample in samples)
        assert {sample.document for sample in samples} == {document.content_hash}
    with pytest.raises(ValueError, match=r"g\.jsonl:2: data\.thinking=strip would change"):
        list(encoder(tokenizer, chat_template="tokenizer", thinking="strip").encode([document]))


def test_reasoning_without_tags_is_masked_in_regenerated_tokens(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    document = generated(tokenizer, "<|channel|>日 hm<|end|>21<|return|>", reasoning="日 hm")
    made = encoder(tokenizer, chat_template="tokenizer", max_tokens=500, thinking="mask")
    (sample,) = made.encode([document])
    assert said(made, sample) == "<|channel|><|end|>21<|return|>"
    assert sample.thinking


def test_regenerated_conversations_may_hold_a_benchmark_s_prompt(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    text = "Who is it that knocks at the door at night?"
    document = generated(tokenizer, text)
    excluded = BenchmarkPrompts([text])
    made = SampleEncoder(tokenizer, DataConfig(), False, excluded=excluded)
    assert list(made.encode([document])) == []
    assert made.counts.benchmark_prompts == 1


def test_an_answer_that_was_reasoning_alone_or_empty_is_left_out(make_tokenizer) -> None:
    made = encoder(make_tokenizer(QWEN3), chat_template="tokenizer", max_tokens=500, thinking="strip")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    calling = Message("assistant", "<think>hm</think>", more={"tool_calls": [call]})
    documents = [
        chat(("user", "1?"), ("assistant", "<think>hm and")),
        Document("a", (Message("user", "1?"), Message("assistant", "", "hm")), plain=False),
        chat(("user", "2?"), ("assistant", "")),
        Document("b", (Message("user", "3?"), calling), plain=False),
    ]
    kept = [made.tokenizer.decode(sample.tokens) for sample in made.encode(documents)]
    assert ["1?" in "".join(kept), "2?" in "".join(kept), "3?" in "".join(kept)] == [False, False, True]
    assert made.counts.unusable == 3


def test_reasoning_alone_is_no_empty_answer_where_the_template_drops_it(make_tokenizer) -> None:
    made = encoder(make_tokenizer(CHATML), chat_template="tokenizer", max_tokens=500)
    document = Document("a.jsonl:1", (Message("user", "1?"), Message("assistant", "", "hm")), plain=False)
    assert list(made.encode([chat(("user", "2?"), ("assistant", "12")), document])) != []
    (refusal,) = made.counts.refusals
    assert refusal.startswith("a.jsonl:1: the answer in turn 2 is reasoning alone")


def test_documents_with_a_benchmark_s_prompt_are_left_out_and_counted(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None)
    config = DataConfig(chat_template="none", min_tokens=2)
    excluded = BenchmarkPrompts(["What is the answer to the question of all questions?", "Who is it?"])
    asked = "what is the answer to the question of all questions"
    made = SampleEncoder(tokenizer, config, False, excluded=excluded)
    documents = [
        chat(("user", "Who is it?"), ("assistant", "the answer")),
        text(f"Somebody said: {asked}, and left."),
        chat(("user", "What is it?"), ("assistant", "Who is it? It is not.")),
    ]
    (kept,) = made.encode(documents)
    assert kept.document == documents[2].content_hash
    assert made.counts == PreparationCounts(documents=3, benchmark_prompts=2)
    ids = tokenizer(asked)["input_ids"]
    made = SampleEncoder(tokenizer, config, False, excluded=excluded)
    assert list(made.encode([tokens(ids, [1] * len(ids))])) == []
    with pytest.raises(ValueError, match="1 of 1 documents hold prompts of the benchmarks"):
        divide([], config, made.counts)
