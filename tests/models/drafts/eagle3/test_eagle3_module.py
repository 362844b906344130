"""EAGLE-3: training forward equals step-by-step decoding; the loss equals a slow one; gradients are right."""

import pytest
import torch

from models.decoding.sampling import Sampling
from models.drafts.base import PackedSamples, TargetProjection, supervised_positions
from models.drafts.eagle3.config import Eagle3Config
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, TARGET_VOCABULARY, AUX = 12, 40, (0, 2)


def make_draft(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Eagle3Draft:
    torch.manual_seed(seed)
    knobs = {
        "vocab_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "ttt_steps": 4,
    }
    config = Eagle3Config(**(knobs | changes))
    ids = torch.randperm(TARGET_VOCABULARY)[: config.vocab_size].sort().values
    draft = Eagle3Draft(config, torch.randn(TARGET_VOCABULARY, HIDDEN), DraftVocabulary(ids, TARGET_VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return draft.to(dtype)


def make_batch(lengths: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.float64) -> PackedSamples:
    g = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    return PackedSamples(
        tokens=torch.randint(TARGET_VOCABULARY, (count,), generator=g),
        loss_mask=torch.rand(count, generator=g) < 0.7,
        aux=torch.randn(count, len(AUX) * HIDDEN, generator=g, dtype=dtype),
        last=torch.randn(count, HIDDEN, generator=g, dtype=dtype),
        lengths=lengths,
    )


def projection(draft: Eagle3Draft, whole: bool) -> TargetProjection:
    g = torch.Generator().manual_seed(9)
    head = torch.randn(TARGET_VOCABULARY, HIDDEN, generator=g, dtype=draft.fc.weight.dtype)
    return TargetProjection(head[draft.target_ids], head if whole else None, 1.0, None)


VARIANTS = [{}, {"fc_norm": True}, {"norm_output": True}, {"num_kv_heads": 4, "fc_norm": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_forward_equals_decoding_step_by_step(variant):
    draft = make_draft(**variant)
    batch = make_batch((9,))
    steps = draft.config.ttt_steps
    outputs = draft.unroll(
        torch.cat([batch.tokens[1:], batch.tokens[:1]]),
        batch.aux,
        batch.lengths,
        steps,
        lambda j, _: torch.cat([batch.tokens[1 + j :], batch.tokens[: 1 + j]]),
    )
    for row in range(9 - steps - 1):
        # Decoding from this row: catch up on rows 0..row, then feed back with the text's own tokens.
        proposer = draft.proposer()
        hidden, keys, values = proposer._step(
            batch.tokens[1 : row + 2], draft.fuse(batch.aux[: row + 1]), 0, proposer.keys, proposer.values
        )
        hidden = hidden[-1:]
        for step in range(steps):
            normed = draft.norm(hidden)
            assert torch.allclose(outputs[step][row], normed[0], atol=1e-6), (row, step)
            fed_back = normed if draft.config.norm_output else hidden
            hidden, keys, values = proposer._step(
                batch.tokens[row + 2 + step : row + 3 + step], fed_back, len(keys), keys, values
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_rollout_equals_the_proposer(variant):
    draft = make_draft(seed=2, dtype=torch.float32, **variant)
    batch = make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    rollout = draft.rollout(tokens, batch.aux, 5)
    assert len(rollout.unique()) > 5
    proposer, seen = draft.proposer(), 0
    for row in (3, 4, 8, 9, 15, 19):
        proposed = proposer.propose(tokens[: row + 2], batch.aux[seen : row + 1], 5)
        seen = row + 1
        assert proposed.tolist() == rollout[row].tolist(), row


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", [(1.0, 1.0), (0.7, 0.8)])
def test_sampled_proposals_come_from_the_drafts_own_distribution(variant, rule):
    """Distributions given with a chain are those that training's forward gives for the chain's own tokens."""
    draft = make_draft(seed=2, dtype=torch.float32, **variant)
    batch, lookahead = make_batch((9,), dtype=torch.float32), 4
    sequence = torch.cat([batch.tokens, torch.tensor([3])])
    seen = set()
    for seed in range(5):
        sampling = Sampling(*rule, torch.Generator().manual_seed(seed))
        found = draft.proposer().sample(sequence, batch.aux, lookahead, sampling)
        text = torch.cat([sequence, found.tokens])
        outputs = draft.unroll(text[1:10], batch.aux, (9,), lookahead, lambda j, _, text=text: text.roll(-1 - j)[:9])
        expected = torch.zeros(lookahead, TARGET_VOCABULARY)
        rows = torch.stack([output[-1] for output in outputs])
        expected[:, draft.target_ids] = sampling.distribution(draft.lm_head(rows))
        assert torch.allclose(found.probabilities, expected, atol=1e-5)
        assert bool((found.probabilities.gather(1, found.tokens[:, None]) > 0).all())
        seen.add(tuple(found.tokens.tolist()))
    assert len(seen) > 1


def test_sampled_tokens_follow_that_distribution():
    draft, batch, draws = make_draft(seed=2, dtype=torch.float32), make_batch((3,), dtype=torch.float32), 3000
    sequence = torch.cat([batch.tokens, torch.tensor([3])])
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(1))
    found = [draft.proposer().sample(sequence, batch.aux, 1, sampling) for _ in range(draws)]
    shares = torch.cat([one.tokens for one in found]).bincount(minlength=TARGET_VOCABULARY) / draws
    # Total variation of 3,000 draws over 24 tokens is about sqrt(24 / 3000) / 2 at most.
    assert (shares - found[0].probabilities[0]).abs().sum() / 2 < 0.06


def test_sampling_leaves_the_proposer_as_proposing_does():
    draft, batch = make_draft(seed=2, dtype=torch.float32), make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    one, other = draft.proposer(), draft.proposer()
    one.propose(tokens[:9], batch.aux[:8], 4)
    other.sample(tokens[:9], batch.aux[:8], 4, Sampling(1.0, generator=torch.Generator().manual_seed(1)))
    proposed = one.propose(tokens, batch.aux[8:], 4)
    assert proposed.tolist() == other.sample(tokens, batch.aux[8:], 4, Sampling(1.0, 1e-9)).tokens.tolist()


def test_packing_equals_one_sample_at_a_time():
    draft, lengths = make_draft(), (5, 9, 2, 7)
    batch, target = make_batch(lengths), projection(make_draft(), whole=False)
    together = draft.loss(batch, target, 10, 4)
    alone, start = [], 0
    for length in lengths:
        cut = slice(start, start + length)
        sample = PackedSamples(batch.tokens[cut], batch.loss_mask[cut], batch.aux[cut], batch.last[cut], (length,))
        alone.append(draft.loss(sample, target, 10, 100))
        start += length
    assert together.loss.item() == pytest.approx(sum(one.loss.item() for one in alone), rel=1e-6)
    for counts in ("accepted", "tried", "supervised", "covered"):
        assert getattr(together, counts).tolist() == sum(getattr(one, counts) for one in alone).tolist()


def slow_loss(draft: Eagle3Draft, batch: PackedSamples, target: TargetProjection, total: int):
    """Row by row and step by step, as the paper says it."""
    length, steps = len(batch.tokens), draft.config.ttt_steps
    known = set(draft.target_ids.tolist())
    loss, accepted, tried = 0.0, [0] * steps, [0] * steps
    outputs = draft.unroll(
        torch.cat([batch.tokens[1:], batch.tokens[:1]]),
        batch.aux,
        batch.lengths,
        steps,
        lambda j, _: torch.cat([batch.tokens[1 + j :], batch.tokens[: 1 + j]]),
    )
    for row in range(length):
        alive = True
        for step in range(steps):
            position = row + 1 + step
            if position + 1 >= length or not batch.loss_mask[position + 1]:
                alive = False
                continue
            logits = target.rows @ batch.last[position]
            own = int((target.full @ batch.last[position]).argmax()) if target.full is not None else None
            decisive = int(batch.tokens[position + 1]) if own is None else own
            q = draft.lm_head(outputs[step][row]).log_softmax(-1).detach()
            if decisive in known:
                loss -= draft.config.ttt_decay**step * float((logits.softmax(-1) * q).sum()) / total
            if alive:
                tried[step] += 1
                alive = decisive in known and int(q.argmax()) == int(logits.argmax())
                accepted[step] += alive
    return loss, accepted, tried


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_counts_equal_the_slow_ones(whole, seed):
    draft, batch = make_draft(seed), make_batch((30,), seed)
    target = projection(draft, whole)
    outcome = draft.loss(batch, target, 13, 8)
    loss, accepted, tried = slow_loss(draft, batch, target, 13)
    assert outcome.loss.item() == pytest.approx(loss, rel=1e-5)
    assert outcome.accepted.tolist() == accepted
    assert outcome.tried.tolist() == tried
    assert 0 < int(outcome.covered) < int(outcome.supervised)


def test_gradients_against_finite_differences():
    draft, batch = make_draft(fc_norm=True, ttt_steps=3), make_batch((6, 4))
    target = projection(draft, whole=True)
    parameters = dict(draft.named_parameters())

    def loss(*values):
        return torch.func.functional_call(
            _Loss(draft, batch, target), {f"draft.{n}": v for n, v in zip(parameters, values, strict=True)}, ()
        )

    inputs = tuple(p.detach().clone().requires_grad_(True) for p in parameters.values())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-5, fast_mode=True)


class _Loss(torch.nn.Module):
    def __init__(self, draft, batch, target):
        super().__init__()
        self.draft, self.batch, self.target = draft, batch, target

    def forward(self):
        return self.draft.loss(self.batch, self.target, 5, 3).loss


def test_supervised_positions_stay_inside_their_sample():
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert supervised_positions(mask, (4, 2, 4)).tolist() == [1, 2, 7, 8]
    assert supervised_positions(mask, (10,)).tolist() == [1, 2, 3, 5, 6, 7, 8]
