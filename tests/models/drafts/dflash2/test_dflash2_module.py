"""DFlash 2: its convolutions and its loss against slow ones; it starts as DFlash."""

import pytest
import torch

from infra.refusal import Refusal
from models.config.dflash import DFlashConfig
from models.config.dflash2 import DFlash2Config
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.batched_proposer import PackedTexts
from models.drafts.dflash.module import DFlashDraft
from models.drafts.dflash2.layers import BlockConvolution
from models.drafts.dflash2.module import DFlash2Draft
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, VOCABULARY, AUX, BLOCK, CANDIDATES = 12, 40, (0, 2), 4, 5
LAYERS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20}
LAYERS |= {"block_size": BLOCK, "layer_types": ["full_attention"] * 2, "decay_gamma": 2.0}


def make_config(**changes) -> DFlash2Config:
    own = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": CANDIDATES}
    return DFlash2Config.model_validate(LAYERS | own | changes)


def make_draft(seed: int = 0, **changes) -> DFlash2Draft:
    torch.manual_seed(seed)
    config = make_config(**changes)
    ids = torch.randperm(VOCABULARY)[: config.vocabulary_size(VOCABULARY)].sort().values
    draft = DFlash2Draft(config, torch.randn(VOCABULARY, HIDDEN), DraftVocabulary(ids, VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name or "base" in name), 0.3)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft.double()


@pytest.mark.parametrize("taps", [1, 2, 3, 6])
def test_convolutions_stay_in_their_block(taps):
    torch.manual_seed(1)
    conv = BlockConvolution(make_config(conv_kernel_size=taps), HIDDEN).double()
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3 * BLOCK, HIDDEN, dtype=torch.double)
    first, deltas = conv.before(x)
    second = conv.after(first, deltas)
    kernels = (conv.kernel_projection.weight @ x.T).T.view(len(x), 2, taps, HIDDEN // 4)
    for side, given, found in ((0, x, first), (1, first, second)):
        for row in range(len(x)):
            expected = torch.zeros(HIDDEN, dtype=torch.double)
            for tap in range(min(taps, row % BLOCK + 1)):
                kernel = conv.base_kernel[side, tap] + kernels[row, side, tap].repeat_interleave(4)
                expected += kernel * given[row - tap]
            assert torch.allclose(found[row], expected)


def test_a_group_must_divide_the_hidden_size():
    with pytest.raises(Refusal, match=r"draft.conv_group_size 5 does not divide the target's hidden size 12"):
        BlockConvolution(make_config(conv_group_size=5), HIDDEN)


def test_it_starts_as_dflash():
    """With the same layers it proposes the same, among its candidates."""
    torch.manual_seed(2)
    vocabulary, embedding = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY), torch.randn(VOCABULARY, HIDDEN)
    plain = DFlashDraft(DFlashConfig.model_validate(LAYERS), embedding, vocabulary, AUX)
    draft = DFlash2Draft(make_config(), embedding, vocabulary, AUX)
    head = torch.randn(VOCABULARY, HIDDEN)
    for one in (plain, draft):
        one.start_from(head)
    draft.load_state_dict(draft.state_dict() | plain.state_dict())
    tokens, aux = torch.randint(VOCABULARY, (21,)), torch.randn(20, len(AUX) * HIDDEN)
    assert torch.equal(draft.rollout(tokens, aux, BLOCK - 1), plain.rollout(tokens, aux, BLOCK - 1))


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 30, "selector_weight": 0.4, "tv_weight": 0.5}])
def test_loss_and_counts_equal_the_slow_ones(changes):
    draft, g = make_draft(3, **changes), torch.Generator().manual_seed(5)
    length, config, ids = 15, draft.config, draft.vocabulary.target_ids.tolist()
    sample = PackedSamples(
        tokens=torch.randint(VOCABULARY, (length,), generator=g),
        loss_mask=torch.rand(length, generator=g) < 0.8,
        aux=torch.randn(length, len(AUX) * HIDDEN, generator=g, dtype=torch.double),
        last=torch.randn(length, HIDDEN, generator=g, dtype=torch.double),
        lengths=(length,),
    )
    assert draft.head is not None
    outcome = draft.loss(sample, TargetProjection(draft.head, None, 1.0, None), 9, 4)
    texts = PackedTexts(sample.tokens[1:], sample.aux[:-1], (length - 1,))
    loss, tried, accepted = torch.zeros((), dtype=torch.double), [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    for anchor in range(1, length - 1):
        (_, hidden), *_ = draft._blocks(texts, torch.tensor([anchor - 1]), BLOCK - 1)
        every, alive = list(draft.logits_along(texts, BLOCK - 1, torch.tensor([anchor - 1]))), True
        for k in range(BLOCK - 1):
            if anchor + k + 1 >= length or not sample.loss_mask[anchor + k + 1]:
                break
            own, weight = int(sample.tokens[anchor + k + 1]), 2.718281828459045 ** (-k / 2) / 9
            p = (draft.head @ sample.last[anchor + k]).softmax(-1)
            tried[k] += alive
            if own not in ids:
                alive = False
                continue
            alive = alive and int(every[k][0].argmax()) == int(p.argmax())
            accepted[k] += alive
            logits = draft.logits(hidden[0, k])
            part = -config.kl_weight * (p * logits.log_softmax(-1)).sum()
            part = part + config.tv_weight * (logits.softmax(-1) - p).abs().sum()
            places = logits.topk(CANDIDATES).indices.tolist()
            label = ids.index(own)
            places = places if label in places else [*places[:-1], label]
            before = draft.candidate_selector.predecessor_codebook[sample.tokens[anchor + k]]
            key = before * (draft.candidate_selector.hidden_projection.weight @ hidden[0, k])
            after = draft.candidate_selector.successor_codebook[torch.tensor(ids)[places]]
            scores = logits[places] + after @ key
            part = part - config.selector_weight * scores.log_softmax(-1)[places.index(label)]
            loss = loss + weight * part
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    parameters = list(draft.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(one, parameters) for one in (outcome.loss, loss)), strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert outcome.tried.tolist() == tried
    assert outcome.accepted.tolist() == accepted
    assert tried[0] > tried[1]
