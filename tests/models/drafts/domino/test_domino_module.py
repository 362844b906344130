"""Domino's loss against a slow one, and the way from uncorrected to corrected logits."""

import pytest
import torch

from models.config.domino import DominoConfig
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.batched_proposer import PackedTexts
from models.drafts.domino.module import DominoDraft
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, VOCABULARY, AUX, BLOCK = 12, 40, (0, 2), 5


def make_draft(**changes) -> DominoDraft:
    torch.manual_seed(3)
    knobs = {"block_size": BLOCK, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20}
    config = DominoConfig.model_validate(knobs | {"gru_hidden_dim": 7, "emb_dim": 5, "decay_gamma": 2.0} | changes)
    ids = torch.randperm(VOCABULARY)[: config.vocabulary_size(VOCABULARY)].sort().values
    draft = DominoDraft(config, torch.randn(VOCABULARY, HIDDEN), DraftVocabulary(ids, VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2 if "norm" in name else 0.5)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft.double()


def make_batch(length: int) -> PackedSamples:
    g = torch.Generator().manual_seed(1)
    return PackedSamples(
        tokens=torch.randint(VOCABULARY, (length,), generator=g),
        loss_mask=torch.rand(length, generator=g) < 0.8,
        aux=torch.randn(length, len(AUX) * HIDDEN, generator=g, dtype=torch.float64),
        last=torch.randn(length, HIDDEN, generator=g, dtype=torch.float64),
        lengths=(length,),
    )


def slow_loss(draft: DominoDraft, sample: PackedSamples, share: float, total: int) -> torch.Tensor:
    """As the paper has it, block by block and proposal by proposal; the text's own tokens alone are learnt."""
    ids, loss = draft.vocabulary.target_ids.tolist(), torch.zeros((), dtype=torch.float64)
    texts = PackedTexts(sample.tokens[1:], sample.aux[:-1], (len(sample.tokens) - 1,))
    for anchor in range(1, len(sample.tokens) - 1):
        rows = torch.tensor([anchor - 1])
        (_, hidden), *_ = draft._blocks(texts, rows, BLOCK - 1)
        for k, corrected in enumerate(draft.logits_along(texts, BLOCK - 1, rows)):
            if anchor + k + 1 >= len(sample.tokens) or not sample.loss_mask[anchor + k + 1]:
                break
            own = int(sample.tokens[anchor + k + 1])
            if own in ids:
                weight = 2.718281828459045 ** (-k / draft.config.decay_gamma) / total
                of_both = [
                    -logits.log_softmax(-1)[ids.index(own)] for logits in (corrected[0], draft.logits(hidden[0, k]))
                ]
                loss = loss + weight * ((1 - share) * of_both[0] + share * of_both[1])
    return loss


@pytest.mark.parametrize(
    ("trained", "ratio", "share"), [(0.0, 0.5, 1.0), (0.2, 0.5, 0.6), (0.5, 0.5, 0.0), (0.9, 1.0, 0.1), (0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 30, "sample_from_anchor": False}])
def test_loss_and_gradients_equal_the_slow_ones(changes, trained, ratio, share):
    draft, batch = make_draft(decay_ratio=ratio, **changes), make_batch(14)
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    draft.start_from(head)
    target = TargetProjection(head[draft.vocabulary.target_ids], None if draft.vocabulary.whole else head, 1.0, None)
    draft.trained_share = trained
    outcome, expected = draft.loss(batch, target, 11, 8), slow_loss(draft, batch, share, 11)
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    named = dict(draft.named_parameters())
    ours = torch.autograd.grad(outcome.loss, list(named.values()))
    theirs = torch.autograd.grad(expected, list(named.values()), allow_unused=True)
    for name, one, other in zip(named, ours, theirs, strict=True):
        assert (one - (0 if other is None else other)).norm() <= 1e-6 * one.norm(), name
        if share == 1 and name.startswith(("prefix_gru", "embed_proj")):
            assert not one.any(), "the head is not trained yet"
        elif share < 1:
            assert one.any(), name


def test_an_untrained_draft_corrects_nothing():
    """And with the anchor first a block proposes one token less than it has rows."""
    torch.manual_seed(1)
    config = make_draft().config
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = DominoDraft(config, torch.randn(VOCABULARY, HIDDEN), every, AUX)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    normed, before = torch.randn(3, draft.positions, HIDDEN), torch.randint(VOCABULARY, (draft.positions, 3))
    found = torch.stack(list(draft.step_logits(normed, lambda step: before[step])), dim=1)
    # Step by step or at once: processors add products of other shapes up in another order.
    torch.testing.assert_close(found, draft.logits(normed), rtol=1e-5, atol=1e-5)
    assert draft.positions == config.proposals == BLOCK - 1
