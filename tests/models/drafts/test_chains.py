"""Which positions are trained, and what a chain's counts are made of."""

from types import SimpleNamespace

import torch

from models.drafts.base import PackedSamples, TargetProjection, supervised_positions
from models.drafts.chains import ChainDraft, chain_loss
from models.drafts.vocabulary import DraftVocabulary


def test_supervised_positions_stay_inside_their_sample():
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert supervised_positions(mask, (4, 2, 4)).tolist() == [1, 2, 7, 8]
    assert supervised_positions(mask, (10,)).tolist() == [1, 2, 3, 5, 6, 7, 8]


def test_a_batch_without_supervised_positions_has_no_loss_and_no_counts():
    tokens, last = torch.arange(6), torch.randn(6, 4)
    batch = PackedSamples(tokens, torch.zeros(6, dtype=torch.bool), torch.randn(6, 8), last, (3, 3))
    outputs, head = [torch.randn(6, 4, requires_grad=True)] * 2, torch.randn(5, 4, requires_grad=True)
    full = torch.randn(9, 4)
    target = TargetProjection(full[:5], full, 1.0, None)
    draft: ChainDraft = SimpleNamespace(  # type: ignore[assignment]
        config=SimpleNamespace(step_weights=(1.0, 0.5), loss="lk_alpha"),
        vocabulary=DraftVocabulary(torch.arange(5), 9),
        target_ids=torch.arange(5),
        lm_head=SimpleNamespace(weight=head),
    )
    found = chain_loss(draft, outputs, batch, target, 7, 2)
    found.loss.backward()
    assert found.loss.item() == 0
    assert head.grad is not None
    assert not head.grad.any()
    assert found.accepted.tolist() == found.tried.tolist() == [0, 0]
    assert found.supervised == found.covered == 0
