"""Drafts that read embeddings, on texts with images: as if the target's table had a row for every part of an image."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, emulated_device
from torch import Tensor

from models.config.draft import parse_draft_config
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.batched_proposer import PackedTexts
from models.drafts.registry import build_draft
from models.drafts.sampling import Sampling
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, VOCABULARY, AUX, LENGTHS = 12, 40, (0, 2), (23, 9, 14)
CONFIG: dict[str, Any] = {"method": "eagle3", "vocab_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
CONFIG |= {"ttt_steps": 4, "intermediate_size": 20}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "axes": {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    "two layers": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
}


def drafts_of(variant: str, more: Tensor) -> tuple[Draft, Draft]:
    """A draft, and one with the same weights whose table goes on with the rows `more`."""
    torch.manual_seed(0)
    ids, embedding = torch.arange(0, VOCABULARY, 2)[:24], torch.randn(VOCABULARY, HIDDEN)
    config = parse_draft_config(CONFIG | {"vocab_size": len(ids)} | VARIANTS[variant])
    tables = (embedding, torch.cat([embedding, more]))
    made = [build_draft(config, table, DraftVocabulary(ids, len(table)), AUX) for table in tables]
    for name, parameter in made[0].named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    missing, unexpected = made[1].load_state_dict(made[0].state_dict(), strict=False)
    assert {*missing, *unexpected} <= {"t2d", "d2t"}
    return made[0], made[1]


@pytest.fixture
def batch() -> PackedSamples:
    torch.manual_seed(1)
    count = sum(LENGTHS)
    tokens, shown = torch.randint(VOCABULARY, (count,)), torch.rand(count) < 0.4
    mask = (torch.rand(count) < 0.7) & ~shown
    aux, last = torch.randn(count, len(AUX) * HIDDEN), torch.randn(count, HIDDEN)
    embedded, places = torch.randn(count, HIDDEN), consecutive(LENGTHS)
    return PackedSamples(tokens, mask, aux, last, LENGTHS, embedded=embedded, shown=shown, places=places)


def consecutive(lengths: tuple[int, ...]) -> Tensor:
    """`[N, 3]`: the places of text."""
    return torch.cat([torch.arange(length) for length in lengths]).int().unsqueeze(1).expand(-1, 3)


def head_of(draft: Draft) -> Tensor:
    """The target's, of the draft vocabulary."""
    torch.manual_seed(2)
    return torch.randn(VOCABULARY, HIDDEN)[draft.vocabulary.target_ids.cpu()]


def loss_of(draft: Draft, batch: PackedSamples) -> dict[str, Tensor]:
    target = TargetProjection(head_of(draft), None, 1.0, None)
    found = draft.loss(batch, target, 13, 8)
    found.loss.backward()
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    return {"loss": found.loss.detach(), "accepted": found.accepted, "tried": found.tried, **gradients}


def with_long_table(batch: PackedSamples) -> PackedSamples:
    """The same texts for a draft whose table goes on with what is embedded here."""
    assert batch.shown is not None
    tokens = torch.where(batch.shown, VOCABULARY + torch.arange(len(batch.tokens)), batch.tokens)
    return PackedSamples(tokens, batch.loss_mask, batch.aux, batch.last, batch.lengths)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_with_a_longer_table(variant: str, recompute: bool, batch: PackedSamples) -> None:
    assert batch.embedded is not None
    short, long = drafts_of(variant, batch.embedded)
    short.recompute = recompute
    ours, theirs = loss_of(short, batch), loss_of(long, with_long_table(batch))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = replace(batch, embedded=-batch.embedded)
    assert not torch.equal(ours["loss"], loss_of(short, other)["loss"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_waits_for_no_device(variant: str, batch: PackedSamples) -> None:
    assert batch.embedded is not None
    ours, theirs = (drafts_of(variant, batch.embedded)[0] for _ in range(2))
    expected = loss_of(ours, batch)
    with emulated_device() as traffic:
        theirs.to(DEVICE)
        moved = {name: getattr(batch, name).to(DEVICE) for name in ("aux", "last", "embedded", "places")}
        head = head_of(theirs).to(DEVICE)
        traffic.clear()
        loss = theirs.loss(replace(batch, **moved), TargetProjection(head, None, 1.0, None), 13, 8).loss
        loss.backward()
        assert not traffic.waits.total(), traffic.waits
        assert not traffic.to_host
        assert len(traffic.to_device) <= 5
        assert loss.item() == pytest.approx(expected["loss"].item(), rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_after_an_image_are_those_with_a_longer_table(variant: str, batch: PackedSamples) -> None:
    assert batch.embedded is not None
    assert batch.shown is not None
    short, long = drafts_of(variant, batch.embedded)
    # An answer of text at the end.
    batch.shown[-12:] = False
    shown = torch.cat([batch.shown, torch.zeros(1, dtype=torch.bool)])
    tokens = torch.cat([batch.tokens, torch.tensor([5])])
    longer = torch.cat([with_long_table(batch).tokens, torch.tensor([5])])
    places = consecutive((len(batch.tokens),))
    found = short.after_images(batch.embedded, places, shown).rollout(tokens, batch.aux, 4)
    assert torch.equal(found, long.rollout(longer, batch.aux, 4))
    answer = short.after_images(batch.embedded, places, shown).rollout(tokens, batch.aux, 4, len(tokens) - 12)
    assert torch.equal(answer, found[len(tokens) - 12 :])
    assert not torch.equal(found, short.rollout(tokens, batch.aux, 4))
    count, law = len(batch.tokens), Sampling(temperature=0.7)
    texts = [PackedTexts(text[1:], batch.aux, (count,)) for text in (tokens, longer)]
    rows = torch.arange(count - 9, count)
    ours = short.after_images(batch.embedded, places, shown).along(texts[0], 4, rows, law)
    theirs = long.along(texts[1], 4, rows, law)
    assert torch.equal(ours.chances, theirs.chances)
    assert torch.equal(ours.likeliest, theirs.likeliest)
