"""From documents to samples: limits, counts, refusals, and the rule that holds documents out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.data.config import DataConfig
from models.data.conversations import Document, Message
from models.data.samples import (
    Counts,
    EncodedSample,
    SampleEncoder,
    divide,
    even_pieces,
    heldout_documents,
)

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


def test_the_beginning_of_text_is_not_doubled(make_tokenizer) -> None:
    tokenizer = make_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (sample,) = encoder(tokenizer, True, chat_template="tokenizer").encode([chat(("assistant", "12345"))])
    assert Counter(sample.tokens.tolist())[tokenizer.bos_token_id] == 1
    assert sample.loss_mask.tolist() == [False] + [True] * 5


def test_short_and_repeated_documents_are_counted(make_tokenizer) -> None:
    made = encoder(make_tokenizer(None))
    assert len(list(made.encode([text("123"), text("12345"), text(" 12345\n"), text("54321")]))) == 2
    assert made.counts == Counts(documents=4, duplicates=1, dropped=1)


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


REFUSALS = {
    "no template": (None, {"chat_template": "tokenizer"}, [], "has no chat template: set data.chat_template=none"),
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
    "one document": (None, {"overlong": "split"}, [text("1" * 30)], "only one document is usable"),
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


@given(hashes=HASHES, share=SHARES, data=st.data())
def test_the_held_out_side_is_the_last_share_of_the_set(hashes: set[str], share: float, data) -> None:
    held = heldout_documents(hashes, share)
    assert abs(len(held) - share * len(hashes)) <= 1
    assert 0 < len(held) < len(hashes)
    assert min(held) > max(hashes - held)
    shuffled = data.draw(st.permutations(sorted(hashes)))
    assert heldout_documents([*shuffled, shuffled[0]], share) == held


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
    if len({one.document for one in samples}) < 2:
        return
    try:
        splits = divide(samples, config, Counts())
    except ValueError:
        # Only where nothing but the shared piece would be left to train on.
        assert len({one.id for one in samples}) <= 1 + len(samples) * share + 5
        return
    assert not {one.document for one in splits.train} & {one.document for one in splits.heldout}
    assert not {one.id for one in splits.train} & {one.id for one in splits.heldout}
    for side in (splits.train, splits.heldout):
        ids = [one.id for one in side]
        assert ids == sorted(set(ids))
    if limit is None:
        assert {one.id for one in splits.train} | {one.id for one in splits.heldout} == {one.id for one in samples}
    else:
        assert len(splits.train) <= limit
    again = divide(data.draw(st.permutations(samples)), config, Counts())
    assert [one.id for one in again.train] == [one.id for one in splits.train]
    assert [one.id for one in again.heldout] == [one.id for one in splits.heldout]
