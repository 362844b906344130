"""DFlash: training forward equals decoding; the loss equals a slow one; drawn blocks are fair."""

import json
from dataclasses import replace

import pytest
import torch
from emulated_device import DEVICE, emulated_device
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models.config.dflash import DFlashConfig
from models.decoding.plain import continue_greedily
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate
from models.drafts.base import PackedSamples, TargetProjection, supervised_positions
from models.drafts.batched_proposer import Turn
from models.drafts.blocks import layers
from models.drafts.blocks.layers import Blocks
from models.drafts.dflash.module import DFlashDraft
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import NO_PROPOSAL
from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel

HIDDEN, VOCABULARY, AUX, BLOCK = 12, 40, (0, 2), 4
SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 5}
SCALED = {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
AHEAD = SLIDING | {"sliding_sees_ahead": True}
VARIANTS = [
    {},
    SLIDING,
    AHEAD,
    SCALED,
    {"fc_norm": True, "num_kv_heads": 4},
    {"fc_norm": True, "mask_token_id": 7} | SLIDING,
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_draft(seed: int = 0, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY, **changes):
    torch.manual_seed(seed)
    knobs = {
        "block_size": BLOCK,
        "layer_types": ("full_attention", "full_attention"),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
    }
    config = DFlashConfig.model_validate(knobs | changes)
    ids = torch.randperm(vocabulary)[: config.vocabulary_size(vocabulary)].sort().values
    draft = DFlashDraft(config, torch.randn(vocabulary, HIDDEN), DraftVocabulary(ids, vocabulary), AUX)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.6)
    draft.start_from(torch.randn(vocabulary, HIDDEN))
    return draft.to(dtype)


def make_batch(lengths: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.float64) -> PackedSamples:
    g = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    return PackedSamples(
        tokens=torch.randint(VOCABULARY, (count,), generator=g),
        loss_mask=torch.rand(count, generator=g) < 0.8,
        aux=torch.randn(count, len(AUX) * HIDDEN, generator=g, dtype=dtype),
        last=torch.randn(count, HIDDEN, generator=g, dtype=dtype),
        lengths=lengths,
    )


def projection(draft: DFlashDraft) -> TargetProjection:
    return TargetProjection(draft.head, None, 0.5, 3.0)


def split(batch: PackedSamples) -> list[PackedSamples]:
    parts = zip(
        *(part.split(batch.lengths) for part in (batch.tokens, batch.loss_mask, batch.aux, batch.last)), strict=True
    )
    return [PackedSamples(*part, (len(part[0]),)) for part in parts]


def norm(x, module):
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def turned(x, position, config):
    """Rotary embedding of one row `[heads, d]`: of the first r dimensions, the pair (i, i + r / 2) turns by position *
    theta ** (-2i / r), by `linear` scaling `factor` times slower."""
    half = int(x.shape[-1] * config.partial_rotary_factor) // 2
    slower = config.rope_scaling.factor if config.rope_scaling else 1.0
    turns = torch.polar(
        torch.ones(half, dtype=torch.float64),
        position / slower * config.rope_theta ** (-torch.arange(half) / half).double(),
    )
    out = torch.complex(x[:, :half].double(), x[:, half : 2 * half].double()) * turns
    return torch.cat([out.real, out.imag, x[:, 2 * half :]], -1).to(x)


def slow_attention(attention, config, layer_type, rows, given, anchor):
    """One block `[B, H]` over features `[a, H]`, row by row and head by head."""
    shape, places = (-1, config.head_dim), [*range(anchor), *(anchor + k for k in range(len(rows)))]
    sources = [*given[:anchor], *rows]
    keys = [
        turned(norm(attention.k_proj(source).view(shape), attention.k_norm), place, config)
        for place, source in zip(places, sources, strict=True)
    ]
    values, out = [attention.v_proj(source).view(shape) for source in sources], []
    for k, row in enumerate(rows):
        q = turned(norm(attention.q_proj(row).view(shape), attention.q_norm), anchor + k, config)
        seen = range(len(places))
        if layer_type == "sliding_attention":
            last = places[-1] if config.sliding_sees_ahead else anchor + k
            seen = [i for i in seen if anchor + k - config.sliding_window < places[i] <= last]
        parts = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = torch.stack([q[head] @ keys[i][shared] for i in seen]) / config.head_dim**0.5
            parts.append(scores.softmax(0) @ torch.stack([values[i][shared] for i in seen]))
        out.append(attention.o_proj(torch.cat(parts)))
    return torch.stack(out)


def slow_block(draft, token, aux, anchor):
    """The block behind `anchor` features, as the paper says it: normed hidden states `[B - 1, H]`."""
    config = draft.config
    parts = aux[:anchor].chunk(len(AUX), dim=-1)
    if config.fc_norm:
        parts = [norm(part, module) for part, module in zip(parts, draft.aux_hidden_norms, strict=True)]
    fused = norm(draft.fc(torch.cat(parts, -1)), draft.hidden_norm)
    mask = VOCABULARY - 1 if config.mask_token_id is None else config.mask_token_id
    hidden = draft.embedding[torch.tensor([int(token)] + [mask] * (config.block_size - 1))]
    for kind, layer in zip(config.layer_types, draft.layers, strict=True):
        given = norm(fused, layer.input_layernorm) if config.fc_norm else fused
        rows = norm(hidden, layer.input_layernorm)
        hidden = hidden + slow_attention(layer.self_attn, config, kind, rows, given, anchor)
        x = norm(hidden, layer.post_attention_layernorm)
        hidden = hidden + layer.mlp.down_proj(functional.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
    return norm(hidden[1:], draft.norm)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_forward_equals_the_slow_one_and_decoding(variant, monkeypatch):
    """Blocks of packed samples, several to an attention call, against one block at a time and against the cache."""
    monkeypatch.setattr("models.drafts.blocks.layers.ROWS_AT_ONCE", 3 * BLOCK)
    draft, batch = make_draft(**variant), make_batch((4, 13, 2))
    places, starts = torch.tensor([2, 3, *range(5, 17)]), torch.tensor([0] * 2 + [4] * 12)
    own = torch.cat([torch.arange(n) for n in batch.lengths])
    together = draft.fill(Blocks(batch.tokens[places], own[places], starts), draft.feature_keys(batch.aux, own))
    for index in (0, 1, 2, 7, 13):
        place, start = int(places[index]), int(starts[index])
        slow = slow_block(draft, batch.tokens[place], batch.aux[start:], place - start)
        assert torch.allclose(together[index], slow, atol=1e-6)
    proposer, seen = draft.proposers(1), 4
    for place in (5, 6, 9, 10, 16):
        turn = Turn(batch.tokens[4 : place + 1].tolist(), batch.aux[seen:place], BLOCK - 1, GREEDY)
        seen, alone = place, proposer.fill({0: turn})[0]
        assert torch.allclose(alone, together[places.tolist().index(place)], atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lookahead", [1, 3, 6])
def test_rollout_equals_the_proposer(variant, lookahead, monkeypatch, alone):
    monkeypatch.setattr("models.drafts.blocks.module.BLOCKS_AT_ONCE", 7)
    draft = make_draft(seed=2, dtype=torch.float32, **variant)
    batch = make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    rollout = draft.rollout(tokens, batch.aux, lookahead)
    assert rollout.shape == (20, lookahead)
    assert len(rollout[:, : BLOCK - 1].unique()) > 3
    assert bool((rollout[:, BLOCK - 1 :] == NO_PROPOSAL).all())
    proposer, seen = alone(draft), 0
    for row in (0, 3, 4, 8, 9, 15, 19):
        proposed = proposer.propose(tokens[: row + 2], batch.aux[seen : row + 1], lookahead)
        seen = row + 1
        assert proposed.tolist() == rollout[row].tolist(), row


@pytest.mark.parametrize("rule", [(1.0, 1.0), (0.7, 0.8)])
def test_sampled_proposals_come_from_the_distributions_given(rule, alone):
    draft, batch = make_draft(seed=2, dtype=torch.float32), make_batch((9,), dtype=torch.float32)
    sequence = torch.cat([batch.tokens, torch.tensor([3])])
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    hidden = slow_block(draft.double(), sequence[-1], batch.aux.double(), 9)
    expected = (hidden @ draft.head.T / rule[0]).softmax(-1).float()
    draft.float()
    counts = torch.zeros(BLOCK - 1, VOCABULARY)
    draws = 250
    for _ in range(draws):
        found = alone(draft).sample(sequence, batch.aux, 5, sampling)
        assert found.tokens[BLOCK - 1 :].tolist() == [NO_PROPOSAL] * 2
        usable = found.usable()
        assert torch.allclose(usable.probabilities, expected, atol=1e-5)
        counts[torch.arange(BLOCK - 1), usable.tokens] += 1
    # Total variation of 250 draws over 40 tokens is about sqrt(40 / 250) / 2 at most.
    assert ((counts / draws - expected).abs().sum(-1) / 2).max() < 0.25
    greedy = alone(draft).sample(sequence, batch.aux, 2, replace(sampling, temperature=1e-6))
    assert greedy.tokens.tolist() == alone(draft).propose(sequence, batch.aux, 2).tolist()


def weights_of(draft, chances):
    """What each proposal of a block weighs, from the draft's probabilities of the text's own tokens."""
    config = draft.config
    if config.position_weights == "decay":
        return [2.718281828459045 ** (-k / config.decay_gamma) for k in range(len(chances))]
    smooth = [(1 - config.dpace_alpha) * float(chance) + config.dpace_alpha for chance in chances]
    products = torch.tensor(smooth, dtype=torch.float64).cumprod(0)
    return [float(products[k:].sum()) for k in range(len(chances))]


def slow_loss(draft: DFlashDraft, sample: PackedSamples, target: TargetProjection, total: int):
    """Every block of one sample, proposal by proposal."""
    steps = draft.config.block_size - 1
    loss, accepted, tried = 0.0, [0] * steps, [0] * steps
    ids = draft.vocabulary.target_ids.tolist()
    for anchor in range(1, len(sample.tokens) - 1):
        count = 0
        while count < steps and anchor + count + 1 < len(sample.tokens) and sample.loss_mask[anchor + count + 1]:
            count += 1
        q = (slow_block(draft, sample.tokens[anchor], sample.aux, anchor) @ target.rows.T).log_softmax(-1).detach()
        texts = sample.tokens[anchor + 1 : anchor + 1 + count].tolist()
        own = [q[k, ids.index(token)].exp() if token in ids else 0.0 for k, token in enumerate(texts)]
        alive = True
        for k, weight in enumerate(weights_of(draft, own)):
            tried[k] += alive
            if texts[k] not in ids:
                alive = False
                continue
            logits = torch.tanh(sample.last[anchor + k] @ target.rows.T * target.logit_scale / target.soft_cap)
            loss -= weight * float((logits * target.soft_cap).softmax(-1) @ q[k]) / total
            alive = alive and int(q[k].argmax()) == int(logits.argmax())
            accepted[k] += alive
    return loss, accepted, tried


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_weights": "dpace"},
        SLIDING | {"position_weights": "dpace"},
        {"vocab_size": 32},
        {"vocab_size": 32, "position_weights": "dpace"} | SCALED,
    ],
)
def test_loss_and_counts_equal_the_slow_ones(changes):
    draft, batch = make_draft(3, decay_gamma=2.0, dpace_alpha=0.3, **changes), make_batch((14,), 5)
    target = projection(draft)
    # Some of the target's choices are the draft's own, so that chains go on.
    for place in range(2, 13, 2):
        best = slow_block(draft, batch.tokens[place - 1], batch.aux, place - 1) @ target.rows.T
        batch.last[place - 1] = 9 * target.rows[best[0].argmax()]
        batch.last[place] = 9 * target.rows[best[1].argmax()]
    outcome = draft.loss(batch, target, 11, 8)
    loss, accepted, tried = slow_loss(draft, batch, target, 11)
    assert outcome.loss.item() == pytest.approx(loss, rel=1e-6)
    assert outcome.accepted.tolist() == accepted
    assert outcome.tried.tolist() == tried
    assert tried[0] == outcome.supervised > tried[1] > 0
    assert (outcome.covered == outcome.supervised) == draft.vocabulary.whole
    assert accepted[0] > 0


def test_packing_equals_one_sample_at_a_time():
    draft, batch = make_draft(anchors=3, position_weights="dpace"), make_batch((5, 12, 2, 1, 9, 3))
    target = projection(draft)
    together = draft.loss(batch, target, 10, 4)
    alone = [draft.loss(sample, target, 10, 100) for sample in split(batch)]
    assert together.loss.item() == pytest.approx(sum(one.loss.item() for one in alone), rel=1e-6)
    for counts in ("accepted", "tried"):
        assert getattr(together, counts).tolist() == sum(getattr(one, counts) for one in alone).tolist()
    for count in ("supervised", "covered"):
        assert getattr(together, count) == sum(getattr(one, count) for one in alone)
    assert int(together.tried[0]) < together.supervised


def test_drawn_blocks_stand_for_all_of_them(monkeypatch):
    """The mean over every draw is the loss of all blocks; a draw depends on content and seed, on nothing else."""
    draft, batch = make_draft(anchors=1), make_batch((9, 12))
    target, possible = projection(draft), [len(supervised_positions(s.loss_mask, s.lengths)) for s in split(batch)]
    assert possible[0] != possible[1]
    assert min(possible) > 2
    whole = make_draft(anchors=100).loss(batch, target, 7, 100).loss
    monkeypatch.setattr("models.drafts.blocks.module._draw_without_order", lambda *_: torch.tensor([now]))
    sums = []
    for sample, count in zip(split(batch), possible, strict=True):
        drawn = []
        for now in range(count):  # noqa: B007  the draw above reads it
            drawn.append(draft.loss(sample, target, 7, 100).loss)
        sums.append(sum(drawn) / count)
    assert sum(sums).item() == pytest.approx(whole.item(), rel=1e-6)


def test_a_draw_depends_on_the_tokens_the_seed_and_the_epoch_alone():
    batch = make_batch((40,))
    positions = supervised_positions(batch.loss_mask, batch.lengths)

    def drawn(batch: PackedSamples, epoch: int = 0, **changes) -> list[int]:
        torch.rand(1)
        draft = make_draft(anchors=5, **changes)
        draft.epoch = epoch
        return draft._draw(batch, positions)[0].tolist()

    first = drawn(batch)
    assert len(first) == len(set(first)) == 5
    assert first == sorted(first)
    assert set(first) <= set(positions.tolist())
    assert drawn(replace(batch, aux=-batch.aux)) == first
    assert drawn(batch, anchor_seed=1) != first
    assert drawn(batch, epoch=1) == drawn(batch, epoch=1)
    assert len({tuple(drawn(batch, epoch)) for epoch in range(4)}) == 4
    assert drawn(replace(batch, tokens=(batch.tokens + 1) % VOCABULARY)) != first


@pytest.mark.parametrize("changes", [{"fc_norm": True}, SLIDING | {"anchors": 3}, AHEAD | {"anchors": 3}])
def test_gradients_against_finite_differences(changes):
    draft, batch = make_draft(**changes), make_batch((6, 5), 3)
    target = projection(draft)
    parameters = dict(draft.named_parameters())

    def loss(*values):
        named = {f"draft.{name}": value for name, value in zip(parameters, values, strict=True)}
        return torch.func.functional_call(_Loss(draft, batch, target), named, ())

    inputs = tuple(p.detach().clone().requires_grad_(True) for p in parameters.values())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-5, fast_mode=True)


class _Loss(torch.nn.Module):
    def __init__(self, draft, batch, target):
        super().__init__()
        self.draft, self.batch, self.target = draft, batch, target

    def forward(self):
        return self.draft.loss(self.batch, self.target, 5, 3).loss


def test_every_parameter_gets_a_gradient_even_without_supervision():
    for lengths in ((6, 5), (2, 1)):
        draft, batch = make_draft(fc_norm=True), make_batch(lengths, 3)
        outcome = draft.loss(batch, projection(draft), 5, 3)
        outcome.loss.backward()
        assert {name for name, p in draft.named_parameters() if p.grad is None} == set()
        assert bool(outcome.loss) == bool(outcome.supervised) == (lengths == (6, 5))


def test_its_own_tensors_are_those_it_trains():
    draft = make_draft(fc_norm=True)
    assert set(draft.state_dict()) == set(dict(draft.named_parameters()))
    assert not {name for name in draft.state_dict() if "embed" in name or "head" in name}
    json.dumps(draft.engine_config())


def test_bfloat16_autocast_stays_near():
    draft, batch = make_draft(dtype=torch.float32), make_batch((14, 9), dtype=torch.float32)
    exact = draft.loss(batch, projection(draft), 5, 8).loss
    with torch.autocast("cpu", torch.bfloat16):
        near = draft.loss(batch, projection(draft), 5, 8).loss
    near.backward()
    assert near.item() == pytest.approx(exact.item(), rel=0.03)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A random Llama, loud enough for its greedy text to vary."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=256))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2.5 / parameter.shape[-1] ** 0.5)
        # Sure of its choices: the draft learns distributions, and the gate asks for the likeliest.
        model.lm_head.weight *= 3
    return TargetModel(model, AUX)


def draft_of(target: TargetModel, **changes) -> DFlashDraft:
    shaped = make_draft(dtype=torch.float32, **changes)
    embedding = target.model.get_input_embeddings().weight.detach()
    draft = DFlashDraft(shaped.config, embedding, shaped.vocabulary, AUX)
    draft.start_from(target.head_weight.detach())
    return draft


def overfit(draft: DFlashDraft, target: TargetModel, text: list[int], steps: int) -> None:
    tokens = torch.tensor(text)
    states = target.forward(tokens.unsqueeze(0))
    batch = PackedSamples(tokens, torch.ones(len(text), dtype=torch.bool), states.aux[0], states.last[0], (len(text),))
    head = TargetProjection(target.head_weight.detach(), None, 1.0, None)
    optimizer = torch.optim.Adam(draft.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        draft.loss(batch, head, len(text), 256).loss.backward()
        optimizer.step()


MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5, "fc_norm": True}


@pytest.mark.parametrize("changes", [{}, MIXED | {"position_weights": "dpace"}])
def test_overfit_on_one_text_it_is_accepted_and_lossless(target, changes):
    """The short overfit gate: nearly all is accepted where it was trained, and all text stays the target's."""
    draft, prompt, most = draft_of(target, intermediate_size=64, **changes), [3, 9, 21, 5], 40
    text = continue_greedily(target, prompt, most, frozenset())
    assert len(set(text)) > 8
    overfit(draft, target, [*prompt, *text], 80)
    lengths = []
    for start in (prompt, [8, 30, 2], [17]):
        own = continue_greedily(target, start, most, frozenset())
        aux = features(target, [*start, *own])
        walks = simulate(draft, start, own, aux, BLOCK + 1, eos_ids=frozenset())
        for lookahead in (1, BLOCK - 1, BLOCK + 1):
            decoded = speculate(target, draft, start, lookahead, most, frozenset())
            assert list(decoded.tokens) == list(own)
            assert decoded.counts == walks[lookahead - 1]
        lengths.append(walks[BLOCK - 2].tokens / walks[BLOCK - 2].steps)
    assert lengths[0] >= 0.95 * BLOCK


def test_repeated_keys_on_a_device_attend_as_grouped_ones_do() -> None:
    q, k, v = (torch.randn(1, heads, count, 8) for heads, count in ((4, 5), (2, 9), (2, 9)))
    mask = torch.rand(5, 9) < 0.6
    mask[:, 0] = True
    expected = layers._masked_attention(q, k, v, mask)
    with emulated_device():
        found = layers._masked_attention(*(x.to(DEVICE) for x in (q, k, v, mask)))
        torch.testing.assert_close(found.cpu(), expected)
