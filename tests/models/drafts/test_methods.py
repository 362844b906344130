"""What holds for every draft method. A new method joins by its entry in `TINY` and `SLOW`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, emulated_device
from plain_mtp import mtp_logits
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from infra.planner.memory import Setting, loss_chunk_tokens, planned_chunk_tokens
from infra.planner.shapes import TargetShape
from models.config.draft import METHODS, parse_draft_config
from models.config.draft_base import LossChoice, VocabularyChoice
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.batched_proposer import PackedTexts, Turn
from models.drafts.dflash.module import DFlashDraft
from models.drafts.dflash2.module import DFlash2Draft
from models.drafts.domino.module import DominoDraft
from models.drafts.dspark.module import DSparkDraft
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.medusa.module import MedusaDraft
from models.drafts.registry import build_draft
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import Proposals
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import read_description
from models.export.served_target import read_served_target
from models.export.sglang import load_draft, write_export
from models.targets.weights import read_target_head

HIDDEN, TARGET_VOCABULARY, AUX = 12, 40, (0, 2)
TARGET = TargetShape(
    hidden_size=HIDDEN, num_layers=4, vocab_size=TARGET_VOCABULARY, parameters=1, active_parameters=1, attention_width=1
)

EAGLE3 = {"vocab_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20, "ttt_steps": 4}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}
MLA = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}

DFLASH = {"block_size": 4, "layer_types": ["full_attention"] * 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
DFLASH |= {"intermediate_size": 20, "anchors": 64}

MTP = {"family": "mimo", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20, "ttt_steps": 4}

GATED = {"family": "qwen", "qk_norm": True, "gated_attention": True, "attention_bias": False}
GATED |= {"partial_rotary_factor": 0.25}

EXPERTS = {"count": 8, "per_token": 3, "intermediate_size": 8, "shared_size": 4}
GROUPED = {"scoring": "sigmoid", "groups": 4, "groups_per_token": 2, "scaling": 1.5}

LATENT = {"family": "deepseek", "mla": MLA, "num_kv_heads": 4, "attention_bias": False}

TINY: dict[str, dict] = {
    "dflash": DFLASH,
    "dflash2": DFLASH | {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
    "domino": DFLASH | {"gru_hidden_dim": 5, "emb_dim": 6},
    "dspark": DFLASH | {"markov_rank": 6},
    "eagle3": EAGLE3,
    "medusa": {"vocab_size": 24, "heads": 3},
    "mtp": MTP | {"attention_bias": True},
}
"""Every registered method, tiny; its draft vocabulary, where it has one, is a part of the target's."""

DISTRIBUTIONS = [method for method in TINY if issubclass(METHODS[method], LossChoice)]
"""Methods that learn the target's distribution along chains, by a loss of their choice."""

SMALLEST, KINDS = "medusa", ("kl", "lk_alpha", "lk_lambda")

VARIANTS: list[tuple[str, dict]] = [
    *((method, {}) for method in TINY),
    *((method, {"vocab_size": None}) for method in TINY if issubclass(METHODS[method], VocabularyChoice)),
    ("eagle3", {"fc_norm": True, "norm_output": True, "ttt_weights": [1.0, 0.0, 0.5, 0.25]}),
    ("eagle3", {"norm_before_fc": True, "num_kv_heads": 4, "shared_head": True}),
    ("eagle3", {"vocab_size": None, "shared_head": True}),
    ("eagle3", {"train_embeddings": True, "norm_output": True}),
    ("eagle3", {"attention_bias": True, "qk_norm": True, "norm_before_residual": True, "fc_bias": True}),
    ("eagle3", {"layer_types": ["full_attention"] * 2, "qk_norm": True, "rope_scaling": YARN}),
    ("eagle3", SLIDING | {"attention_bias": True}),
    ("eagle3", {"hidden_size": 8, "partial_rotary_factor": 0.5, "rope_scaling": LLAMA3}),
    ("eagle3", {"hidden_size": 20, "norm_before_residual": True, "norm_before_fc": True}),
    ("eagle3", {"mla": MLA, "num_kv_heads": 4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    (
        "eagle3",
        {"mla": MLA | {"q_lora_rank": None}, "num_kv_heads": 4, "layer_types": ["full_attention"] * 2, "fc_norm": True},
    ),
    ("dflash", {"vocab_size": 24, "attention_bias": True, "rope_scaling": YARN}),
    ("dflash", SLIDING | {"sliding_sees_ahead": True}),
    ("dflash", {"sample_from_anchor": True, "vocab_size": 24, "cross_entropy_weight": 0.5, "tv_weight": 0.7}),
    ("dflash2", {"vocab_size": 24, "conv_kernel_size": 3, "conv_group_size": 12, "selector_weight": 0.5} | SLIDING),
    ("domino", {"vocab_size": 24, "sample_from_anchor": False, "kl_weight": 0.5} | SLIDING),
    ("domino", {"fc_norm": True, "cross_entropy_weight": 0.0, "tv_weight": 1.0, "decay_ratio": 0.0}),
    ("dspark", {"vocab_size": 24, "markov_head": "gated", "kl_weight": 0.5}),
    ("dspark", {"markov_head": "rnn", "confidence_reads_token": False} | SLIDING),
    ("dspark", {"confidence_head": False, "fc_norm": True, "cross_entropy_weight": 1.0, "tv_weight": 0.0}),
    ("medusa", {"heads": 5, "layers": 2, "head_decay": 0.5}),
    ("mtp", GATED),
    ("mtp", {"family": "deepseek", "layer_index": 4, "qk_norm": True, "ttt_weights": [1.0, 0.0, 0.5, 0.25]}),
    ("mtp", GATED | {"experts": EXPERTS | {"scoring": "softmax"}}),
    ("mtp", LATENT | {"experts": EXPERTS | GROUPED}),
]


def eagle3_logits(draft: Eagle3Draft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """Decoding from this row: catch up on rows 0..row, then feed back with the text's own tokens."""
    proposer, found = draft.proposers(1), []
    rows, positions = (tokens[1 : row + 2], draft.fuse(aux[: row + 1])), torch.arange(row + 1)
    for step in range(steps):
        hidden = proposer.step(rows[0][None], rows[1], positions[None], row + 1 + step)
        normed = draft.norm(hidden[-1:])
        found.append(draft.logits(normed)[0])
        rows = (tokens[row + 2 + step : row + 3 + step], normed if draft.config.norm_output else hidden[-1:])
        positions = positions[-1:] + 1
    return found


def dflash_logits(draft: DFlashDraft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """One block, filled at once."""
    turn = Turn(tokens[: row + 2].tolist(), aux[: row + 1], steps, GREEDY)
    return list(draft.logits(draft.proposers(1).fill({0: turn})[0, :steps]))


def dflash2_logits(draft: DFlash2Draft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """One block, filled at once; then the score of each candidate after the token before it."""
    turn, selector = Turn(tokens[: row + 2].tolist(), aux[: row + 1], steps, GREEDY), draft.candidate_selector
    rows, found = draft.proposers(1).fill({0: turn})[0], []
    for step in range(min(steps, draft.positions)):
        logits, before = draft.logits(rows[step]), selector.predecessor_codebook[tokens[row + 1 + step]]
        weakest = logits.sort().values[-draft.config.selector_top_k]
        key = before * (selector.hidden_projection.weight @ rows[step])
        scored = logits + selector.successor_codebook[draft.vocabulary.target_ids] @ key
        found.append(torch.where(logits >= weakest, scored, -torch.inf))
    return found


def domino_logits(draft: DominoDraft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """One block, filled at once, and then a correction by torch's own GRU over the tokens before each proposal."""
    turn = Turn(tokens[: row + 2].tolist(), aux[: row + 1], steps, GREEDY)
    rows, found = draft.proposers(1).fill({0: turn})[0], list[Tensor]()
    gru = torch.nn.GRU(HIDDEN, 5, bias=False).to(aux)
    gru.load_state_dict(draft.prefix_gru.state_dict())
    for step in range(min(steps, draft.positions)):
        states, _ = gru(draft.embedding[tokens[row + 1 : row + 2 + step]])
        correction = draft.embed_proj(torch.cat([rows[step], states[-1]]))
        found.append(draft.logits(rows[step]) + (correction if step else 0))
    return found


def dspark_logits(draft: DSparkDraft, tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """One block, filled at once, and then a bias by the token before each proposal."""
    turn = Turn(tokens[: row + 2].tolist(), aux[: row + 1], steps, GREEDY)
    head, rows, found, state = draft.markov_head, draft.proposers(1).fill({0: turn})[0], [], torch.zeros(6).to(aux)
    for step in range(min(steps, draft.positions)):
        h, e = rows[step], head.markov_w1.weight[tokens[row + 1 + step]]
        if draft.config.markov_head == "gated":
            e = e * torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias)
        if draft.config.markov_head == "rnn":
            joint = head.joint_proj.weight @ torch.cat([state, e, h]) + head.joint_proj.bias
            gate, candidate, out = torch.sigmoid(joint[:6]), torch.tanh(joint[6:12]), torch.tanh(joint[12:])
            state, e = gate * state + (1 - gate) * candidate, out
        found.append(draft.logits(h) + head.markov_w2.weight @ e)
    return found


def medusa_logits(draft: MedusaDraft, _tokens: Tensor, aux: Tensor, row: int, steps: int) -> list[Tensor]:
    """Head by head, from the row's feature alone."""
    found, feature = [], aux[row, -HIDDEN:]
    normed = feature * (feature.square().mean() + 1e-6).rsqrt() * draft.norm.weight
    for block in list(draft.blocks)[:steps]:
        x = normed
        for layer in block.layers:
            z = layer.weight @ x
            x = x + z * torch.sigmoid(z)
        found.append(draft.lm_head.weight @ x)
    return found


SLOW: dict[str, Callable[..., list[Tensor]]] = {
    "dflash": dflash_logits,
    "dflash2": dflash2_logits,
    "domino": domino_logits,
    "dspark": dspark_logits,
    "eagle3": eagle3_logits,
    "medusa": medusa_logits,
    "mtp": mtp_logits,
}
"""`[Vd]` logits of every step from one row of one text, as plainly as can be."""

LOSSES = [
    (method, {"loss": loss} | changes) for method, changes in VARIANTS if method in DISTRIBUTIONS for loss in KINDS
]
LATER = [
    changed
    for number, changed in enumerate(LOSSES)
    if len(changed[1]) > 1 and number % len(KINDS) != number // len(KINDS) % len(KINDS)
]
"""For releases: variants have one kind of loss each before that, in turn, and methods as they are have all."""


SMOOTH = [
    *VARIANTS,
    *((method, changes) for method, changes in LOSSES if changes["loss"] == "lk_alpha"),
]


def named(table: list[tuple[str, dict]]) -> list[str]:
    return ["-".join([method, *map(str, changes), str(changes.get("loss", ""))]) for method, changes in table]


def in_turn(table: list[tuple[str, dict]]) -> list[Any]:
    return [pytest.param(*changed, marks=pytest.mark.long if changed in LATER else ()) for changed in table]


variants = pytest.mark.parametrize(("method", "changes"), VARIANTS, ids=named(VARIANTS))
methods = pytest.mark.parametrize("method", TINY)


def target_head(dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of equal length: each token is the greatest along its own row."""
    rows = torch.randn(TARGET_VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (HIDDEN**0.5 * torch.nn.functional.normalize(rows)).to(dtype)


def make_draft(method: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Draft:
    """With random weights: an untrained one would hide much."""
    torch.manual_seed(seed)
    config = parse_draft_config({"method": method} | TINY[method] | changes)
    ids = torch.randperm(TARGET_VOCABULARY)[: config.vocabulary_size(TARGET_VOCABULARY)].sort().values
    draft = build_draft(config, torch.randn(TARGET_VOCABULARY, HIDDEN), DraftVocabulary(ids, TARGET_VOCABULARY), AUX)
    draft.start_from(target_head(torch.float32))
    draft.trained_share = 0.2  # where a loss that changes on the way has all of its parts
    gain = float(getattr(config, "family", None) != "qwen")  # which stores the factors of norms less 1
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, gain * ("norm" in name), 0.2 if "norm" in name else 0.3)
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


def projection(draft: Draft, argmax: bool, soft_cap: float | None = None) -> TargetProjection:
    """`argmax`: the target's, not the text's token, decides which positions count (`with_top`)."""
    head = target_head(next(draft.parameters()).dtype)
    full = head if argmax and draft.config.needs_mass else None
    return TargetProjection(head[draft.vocabulary.target_ids], full, 1.2, soft_cap)


def with_top(batch: PackedSamples) -> PackedSamples:
    """With the target's top tokens."""
    return replace(batch, top=(batch.last @ target_head(batch.last.dtype).T).argmax(-1).int())


def split(batch: PackedSamples) -> list[PackedSamples]:
    """The same samples, a batch each."""
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    cuts = [slice(end - length, end) for end, length in zip(ends, batch.lengths, strict=True)]
    return [replace(batch, lengths=(cut.stop - cut.start,), **{n: x[cut] for n, x in tensors(batch)}) for cut in cuts]


def tensors(batch: PackedSamples) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(batch).items() if isinstance(value, Tensor)]


def test_every_registered_method_is_tested():
    assert set(TINY) == set(SLOW) == set(METHODS)


def target_logits(target: TargetProjection, head: Tensor, last: Tensor) -> Tensor:
    logits = head @ last * target.logit_scale
    return logits if target.soft_cap is None else target.soft_cap * torch.tanh(logits / target.soft_cap)


def slow_divergence(config, q: Tensor, inside: Tensor, p: Tensor) -> Tensor:
    """`inside`: the target's probabilities, renormalised over the draft vocabulary; `p`: as they are."""
    if config.loss == "kl":
        return -(inside * q.log()).sum()
    acceptance = torch.minimum(p, q).sum()
    if config.loss == "lk_alpha":
        return -acceptance.log()
    weight = torch.exp(-config.lk_decay * acceptance)
    return weight * (inside * (inside / q).log()).sum() + (1 - weight) * (1 - acceptance)


def slow_loss(draft: Draft, batch: PackedSamples, target: TargetProjection, total: int):
    """One text, row by row and step by step: loss, accepted and tried chains."""
    length, steps = len(batch.tokens), draft.positions
    ids = draft.vocabulary.target_ids
    loss, accepted, tried = 0.0, [0] * steps, [0] * steps
    for row in range(length - 1):
        alive = True
        within = min(steps, length - 2 - row)
        for step, logits in enumerate(SLOW[draft.config.method](draft, batch.tokens, batch.aux, row, within)):
            position = row + 1 + step
            if not batch.loss_mask[position + 1]:
                alive = False
                continue
            own = target_logits(target, target.rows, batch.last[position])
            inside = p = own.softmax(-1)
            decisive = int(batch.tokens[position + 1])
            if batch.top is not None:
                everywhere = target_logits(target, target_head(), batch.last[position])
                decisive, p = int(everywhere.argmax()), everywhere.softmax(-1)[ids]
            covered = decisive in ids.tolist()
            if covered:
                value = slow_divergence(draft.config, logits.detach().softmax(-1), inside, p)
                loss += draft.config.step_weights[step] * float(value) / total
            if alive:
                tried[step] += 1
                alive = covered and int(logits.argmax()) == int(own.argmax())
                accepted[step] += alive
    return loss, accepted, tried


@pytest.mark.parametrize(("method", "changes"), in_turn(LOSSES), ids=named(LOSSES))
@pytest.mark.parametrize(("argmax", "soft_cap"), [(True, 3.0), (False, None)])
def test_loss_and_counts_equal_the_slow_ones(method, changes, argmax, soft_cap):
    """Of methods that choose their loss; the others have theirs beside their own tests."""
    draft, batch = make_draft(method, **changes), make_batch((19,), 3)
    batch, target = with_top(batch) if argmax else batch, projection(draft, argmax, soft_cap)
    outcome = draft.loss(batch, target, 13, 8)
    expected, accepted, tried = slow_loss(draft, batch, target, 13)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    assert outcome.accepted.tolist() == accepted
    assert outcome.tried.tolist() == tried
    assert 0 < outcome.covered <= outcome.supervised
    assert (outcome.covered == outcome.supervised) == draft.vocabulary.whole


@variants
def test_packing_equals_one_sample_at_a_time(method, changes):
    draft = make_draft(method, **changes)
    batch, target = with_top(make_batch((5, 9, 2, 7))), projection(draft, argmax=True)
    together = draft.loss(batch, target, 10, 4)
    alone = [draft.loss(sample, target, 10, 100) for sample in split(batch)]
    assert together.loss.item() == pytest.approx(sum(one.loss.item() for one in alone), rel=1e-6)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    summed = torch.stack([one.loss for one in alone]).sum()
    for ours, theirs in zip(*(torch.autograd.grad(loss, trained) for loss in (together.loss, summed)), strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    for counts in ("accepted", "tried"):
        assert getattr(together, counts).tolist() == sum(getattr(one, counts) for one in alone).tolist()
    for count in ("supervised", "covered"):
        assert getattr(together, count) == sum(getattr(one, count) for one in alone)


def on_device(batch: PackedSamples) -> PackedSamples:
    """As `MicroBatch.to` gives it."""
    return replace(batch, aux=batch.aux.to(DEVICE), last=batch.last.to(DEVICE))


def target_on_device(target: TargetProjection, dtype: torch.dtype = torch.float32) -> TargetProjection:
    full = None if target.full is None else target.full.to(DEVICE, dtype)
    return TargetProjection(target.rows.to(DEVICE, dtype), full, target.logit_scale, target.soft_cap)


ON_A_DEVICE = [*VARIANTS, *LOSSES]


@pytest.mark.parametrize(("method", "changes"), in_turn(ON_A_DEVICE), ids=named(ON_A_DEVICE))
def test_trains_on_a_device_as_on_the_cpu(method, changes):
    """Loss, gradients, a fused optimizer step and a rollout; tensors of host and device must not meet.

    In the step the host never waits for the device: what it needs to know it plans before.
    """

    def step(draft: Draft, batch: PackedSamples, target: TargetProjection) -> Tensor:
        outcome = draft.loss(batch, target, 10, 8)
        outcome.loss.backward()
        torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], 0.1, fused=True).step()
        return outcome.loss.detach()

    ours, theirs = (make_draft(method, dtype=torch.float32, **changes) for _ in range(2))
    batch, target = with_top(make_batch((9, 14), dtype=torch.float32)), projection(ours, argmax=True)
    expected = step(ours, batch, target)
    with emulated_device() as traffic:
        theirs.to(DEVICE)
        given = on_device(batch), target_on_device(target)
        traffic.clear()
        loss = step(theirs, *given)
        assert not traffic.waits.total(), traffic.waits
        assert not traffic.to_host
        assert len(traffic.to_device) <= 4
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert other.device == DEVICE
            if one.grad is not None:
                assert (other.grad.cpu() - one.grad).norm() <= 1e-4 * one.grad.norm() + 1e-7
        theirs.load_state_dict(ours.state_dict())
        proposals = theirs.rollout(batch.tokens.to(DEVICE), batch.aux[:-1].to(DEVICE), theirs.positions)
        assert torch.equal(proposals.cpu(), ours.rollout(batch.tokens, batch.aux[:-1], ours.positions))


@pytest.mark.parametrize(
    ("method", "changes"), [*((method, {}) for method in TINY), ("eagle3", SLIDING | {"attention_bias": True})], ids=str
)
def test_trains_in_bfloat16_on_a_device(method, changes):
    """Autocast and kernels as on a GPU; weights and their gradients stay in float32."""
    ours, theirs = (make_draft(method, dtype=torch.float32, **changes) for _ in range(2))
    batch, target = with_top(make_batch((9, 14), dtype=torch.float32)), projection(ours, argmax=True)
    expected = ours.loss(batch, target, 10, 8)
    expected.loss.backward()
    half = replace(batch, aux=batch.aux.bfloat16(), last=batch.last.bfloat16())
    with emulated_device(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        theirs.to(DEVICE)
        outcome = theirs.loss(on_device(half), target_on_device(target, torch.bfloat16), 10, 8)
        outcome.loss.backward()
        assert outcome.loss.item() == pytest.approx(expected.loss.item(), rel=0.05)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if one.grad is not None:
                assert other.grad.dtype == torch.float32
                assert torch.cosine_similarity(other.grad.cpu().flatten(), one.grad.flatten(), 0) > 0.95


@methods
def test_frozen_embeddings_in_bfloat16_change_nothing_in_bfloat16(method):
    """Where the target's are stored so: rows are gathered, and then computed with as before."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        draft, batch = make_draft(method, dtype=torch.float32), with_top(make_batch((9, 14), dtype=torch.float32))
        trained = {id(parameter) for parameter in draft.parameters()}
        for table in (buffer for buffer in draft.buffers() if buffer.is_floating_point()):
            table.copy_(table.bfloat16())
        draft.hold_embeddings(dtype)
        assert {id(parameter) for parameter in draft.parameters()} == trained
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(draft.loss(batch, projection(draft, argmax=True), 10, 8).loss)
        assert draft.rollout(batch.tokens, batch.aux[:-1], draft.positions).shape == (22, draft.positions)
    held = {buffer.dtype for buffer in draft.buffers() if buffer.is_floating_point()}
    assert (torch.bfloat16 in held) == bool(draft.config.shape(TARGET, len(AUX), "bfloat16").frozen_embeddings)
    assert torch.equal(*losses)


@methods
def test_the_planner_knows_the_chunks_of_the_loss(method):
    draft = make_draft(method)
    setting = Setting(aux_count=len(AUX), stored="bfloat16", precision="bfloat16", top_token=True, whole_head=False,
                      prefetch_steps=1, one_memory=False)  # fmt: skip
    planned = planned_chunk_tokens(draft.config.shape(TARGET, len(AUX), "bfloat16"), setting)
    assert planned == loss_chunk_tokens(draft.loss_logits * 2, on_cpu=False)


class LossOf(torch.nn.Module):
    def __init__(self, draft: Draft, batch: PackedSamples, target: TargetProjection):
        super().__init__()
        self.draft, self.batch, self.target = draft, batch, target

    def forward(self) -> Tensor:
        return self.draft.loss(self.batch, self.target, 5, 3).loss


@pytest.mark.parametrize(("method", "changes"), SMOOTH, ids=named(SMOOTH))
def test_gradients_against_finite_differences(method, changes):
    """Not of `lk_lambda` and of confidences, where a weight and a label are taken as constants: see their own tests."""
    draft = make_draft(method, **changes | ({"confidence_head": False} if method == "dspark" else {}))
    module = LossOf(draft, with_top(make_batch((6, 4))), projection(draft, argmax=True))
    parameters = dict(draft.named_parameters())

    def value(*values: Tensor) -> Tensor:
        named = {f"draft.{name}": one for name, one in zip(parameters, values, strict=True)}
        return torch.func.functional_call(module, named, ())

    inputs = tuple(p.detach().clone().requires_grad_(True) for p in parameters.values())
    assert torch.autograd.gradcheck(value, inputs, eps=1e-6, atol=1e-5, fast_mode=True)


@variants
def test_rollout_equals_the_proposer(method, changes, alone):
    draft, batch = make_draft(method, 2, torch.float32, **changes), make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    rollout = draft.rollout(tokens, batch.aux, 6)
    assert len(rollout.unique()) > 5
    proposer, seen = alone(draft), 0
    for row in (3, 4, 8, 9, 15, 19):
        proposed = proposer.propose(tokens[: row + 2], batch.aux[seen : row + 1], 6)
        seen = row + 1
        assert proposed.tolist() == rollout[row].tolist(), row


@variants
@pytest.mark.parametrize("first", [1, 7, 19])
def test_a_rollout_from_a_later_position_is_the_end_of_the_whole(method, changes, first):
    draft, batch = make_draft(method, 2, torch.float32, **changes), make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    whole = draft.rollout(tokens, batch.aux, 6)
    assert torch.equal(draft.rollout(tokens, batch.aux, 6, first), whole[first:])


@variants
@pytest.mark.parametrize("rule", [(1.0, 1.0), (0.7, 0.8)])
def test_a_text_is_as_likely_as_the_proposer_draws_it(method, changes, rule, alone):
    """Of a chain that the proposer drew, following the text gives what each of its tokens was drawn from."""
    draft, batch, most = make_draft(method, 2, torch.float32, **changes), make_batch((20,), dtype=torch.float32), 6
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    for row in (3, 9, 17):
        sampling = Sampling(*rule, torch.Generator().manual_seed(row))
        drawn = alone(draft).sample(tokens[: row + 2], batch.aux[: row + 1], most, sampling)
        chain = drawn.tokens[drawn.tokens >= 0][: 19 - row]
        text = torch.cat([tokens[: row + 2], chain, tokens[row + 2 + len(chain) :]])
        # Another text of other tokens comes before and after it.
        other = PackedTexts(tokens[1:8], batch.aux[5:12], (7,))
        packed = PackedTexts.of([other.following, text[1:], other.following], [other.aux, batch.aux, other.aux])
        along = draft.along(packed, most, torch.arange(7 + row, 27), sampling)
        assert drawn.probabilities is not None
        told = drawn.probabilities[range(len(chain)), chain]
        assert along.chances.shape == along.likeliest.shape == (20 - row, most)
        assert torch.allclose(along.chances[0, : len(chain)], told, atol=1e-6)
        best = drawn.probabilities[: len(chain)].argmax(-1) == chain
        assert along.likeliest[0, : len(chain)].tolist() == best.tolist()
        beyond = torch.arange(20 - row).unsqueeze(1) + torch.arange(most) >= 19 - row
        assert not along.chances[beyond].any(), "nothing is proposed beyond the text"
        assert along.chances[~beyond].any()
    if not draft.vocabulary.whole:
        outside = (~draft.vocabulary.t2d).nonzero()[0].expand(21)
        packed = PackedTexts(outside[1:], batch.aux, (20,))
        assert not draft.along(packed, most, torch.arange(3, 20), sampling).chances.any()


@variants
@pytest.mark.parametrize("rule", [None, (1.0, 1.0), (0.7, 0.8)])
def test_a_batch_proposes_what_each_text_does_alone(method, changes, rule, alone):
    """Ragged texts; some rows have no turn in a step, want fewer proposals or leave, and each draws by itself."""
    draft, lengths = make_draft(method, 2, torch.float32, **changes), (5, 1, 9, 3)
    samples = [make_batch((length + 14,), seed=row, dtype=torch.float32) for row, length in enumerate(lengths)]
    draws = [
        [Sampling(*rule, torch.Generator().manual_seed(row)) if rule else GREEDY for row in range(4)] for _ in range(2)
    ]
    together, texts, seen = draft.proposers(4), [alone(draft) for _ in lengths], [0] * 4
    rows, known = [0, 1, 2, 3], list(lengths)
    assert (together.branches, together.candidates) == (method in ("eagle3", "mtp"), 0)
    different = set()
    for step in range(6):
        turns = {}
        for place, row in enumerate(rows):
            known[row] += (row + step) % 3
            if known[row] > seen[row] and (row + step) % 4:
                text, aux = samples[row].tokens[: known[row] + 1], samples[row].aux[seen[row] : known[row]]
                turns[place] = Turn(text.tolist(), aux, 1 + (row + step) % 3, draws[0][row])
                seen[row] = known[row]
        for place, tree in together.propose(turns).items():
            turn, row = turns[place], rows[place]
            text = torch.tensor(turn.text)
            if rule:
                own = texts[row].sample(text, turn.aux, turn.shape, draws[1][row]).usable()
                assert torch.allclose(own.probabilities, tree.proposals.probabilities, atol=1e-5)
            else:
                own = Proposals(texts[row].propose(text, turn.aux, turn.shape), None).usable()
            assert own.tokens.tolist() == tree.proposals.tokens.tolist(), (step, row)
            assert tree.is_chain
            different.add(tuple(own.tokens.tolist()))
        if step == 3:
            rows = [0, 2, 3]
            together.only(rows)
    assert len(different) > 5


def sure_target(draft: Draft, tokens: Tensor) -> tuple[Tensor, TargetProjection]:
    """`last` and head of a target that is sure of every next token."""
    head = target_head(torch.float32)
    return 4 * head[tokens.roll(-1)], TargetProjection(head[draft.vocabulary.target_ids], None, 1.0, None)


@variants
def test_training_counts_the_chains_that_decoding_proposes(method, changes, alone):
    """On a text that mostly is what the draft proposes, with a target that says just that text."""
    draft, batch, length = make_draft(method, 2, torch.float32, **changes), make_batch((41,), dtype=torch.float32), 40
    ids, steps, proposer = draft.vocabulary.target_ids, draft.positions, alone(draft)
    text, seen = ids[batch.tokens % len(ids)], 0
    for row in range(0, length - steps - 1, steps + 1):
        text[row + 2 : row + 2 + steps] = proposer.propose(text[: row + 2], batch.aux[seen : row + 1], steps)
        seen = row + 1
    text = text[:length]
    last, target = sure_target(draft, text)
    everywhere = torch.ones(length, dtype=torch.bool)
    outcome = draft.loss(PackedSamples(text, everywhere, batch.aux[:length], last, (length,)), target, length, 16)
    accepted, tried = [0] * steps, [0] * steps
    for row, proposals in enumerate(draft.rollout(text, batch.aux[: length - 1], steps).tolist()):
        for step, (proposal, said) in enumerate(zip(proposals, text[row + 2 :].tolist(), strict=False)):
            tried[step] += 1
            if proposal != said:
                break
            accepted[step] += 1
    assert outcome.tried.tolist() == tried
    assert outcome.accepted.tolist() == accepted
    assert 0 < accepted[-1] < tried[0]


@variants
@pytest.mark.parametrize("rule", [(1.0, 1.0), (0.7, 0.8)])
def test_sampled_proposals_come_from_the_drafts_own_distribution(method, changes, rule, alone):
    """Distributions given with a chain are those of the chain's own tokens after temperature, written out slowly."""
    draft, batch = make_draft(method, 2, torch.float32, **changes), make_batch((9,), dtype=torch.float32)
    sequence, lookahead = torch.cat([batch.tokens, torch.tensor([3])]), 4
    seen = set()
    for seed in range(4):
        sampling = Sampling(*rule, torch.Generator().manual_seed(seed))
        found = alone(draft).sample(sequence, batch.aux, lookahead, sampling).usable()
        assert len(found.tokens) == min(lookahead, draft.positions)
        logits = SLOW[method](draft, torch.cat([sequence, found.tokens]), batch.aux, 8, len(found.tokens))
        expected = torch.zeros(len(found.tokens), TARGET_VOCABULARY)
        expected[:, draft.vocabulary.target_ids] = (torch.stack(logits) / rule[0]).softmax(-1).detach()
        assert torch.allclose(found.probabilities, expected, atol=1e-5)
        assert bool((found.probabilities.gather(1, found.tokens[:, None]) > 0).all())
        seen.add(tuple(found.tokens.tolist()))
    assert len(seen) > 1


@methods
def test_sampled_tokens_follow_that_distribution(method, alone):
    draft, batch, draws = make_draft(method, 2, torch.float32), make_batch((3,), dtype=torch.float32), 1500
    sequence = torch.cat([batch.tokens, torch.tensor([3])])
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(1))
    found = [alone(draft).sample(sequence, batch.aux, 1, sampling) for _ in range(draws)]
    shares = torch.cat([one.tokens for one in found]).bincount(minlength=TARGET_VOCABULARY) / draws
    # Total variation of 1,500 draws over 24 tokens is about sqrt(24 / 1500) / 2 at most.
    assert (shares - found[0].probabilities[0]).abs().sum() / 2 < 0.09


@methods
def test_sampling_leaves_the_proposer_as_proposing_does(method, alone):
    draft, batch = make_draft(method, 2, torch.float32), make_batch((20,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    one, other = alone(draft), alone(draft)
    one.propose(tokens[:9], batch.aux[:8], 4)
    other.sample(tokens[:9], batch.aux[:8], 4, Sampling(1.0, generator=torch.Generator().manual_seed(1)))
    proposed = one.propose(tokens, batch.aux[8:], 4)
    assert proposed.tolist() == other.sample(tokens, batch.aux[8:], 4, Sampling(1e-6)).tokens.tolist()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target on disk, as wide as the drafts expect."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=TARGET_VOCABULARY, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@variants
def test_an_export_gives_the_same_logits(method, changes, target_folder, tmp_path, alone):
    made, head = make_draft(method, 3, torch.float32, **changes), read_target_head(target_folder, torch.float32)
    draft = build_draft(made.config, head.embedding, made.vocabulary, AUX)
    draft.start_from(head.head)
    draft.load_state_dict(
        {name: made.state_dict()[name] if name in dict(made.named_parameters()) else tensor
         for name, tensor in draft.state_dict().items()}
    )  # fmt: skip
    write_export(draft, tmp_path / "export", {"step": 7}, read_served_target(target_folder))
    again = load_draft(tmp_path / "export", target_folder, torch.float32)
    batch = make_batch((12,), dtype=torch.float32)
    tokens = torch.cat([batch.tokens, torch.tensor([3])])
    ours, theirs = (
        alone(one).sample(tokens, batch.aux, 4, Sampling(1.0, 1.0, torch.Generator().manual_seed(5)))
        for one in (draft, again)
    )
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.probabilities, theirs.probabilities)
    description = read_description(tmp_path / "export")
    assert description.config == draft.config
    assert description.served == (draft.engine_config() is not None)
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert ("d2t" in stored) == ("t2d" in stored) == (not draft.vocabulary.whole)


@pytest.mark.parametrize(
    ("method", "changes"), [*((method, {}) for method in TINY), *((SMALLEST, {"loss": loss}) for loss in KINDS[1:])]
)
def test_a_draft_learns_a_few_texts_by_heart(method, changes):
    draft = make_draft(method, 1, torch.float32, **changes)
    batch, ids = make_batch((14, 11), 8, torch.float32), draft.vocabulary.target_ids
    tokens = ids[batch.tokens % len(ids)]
    last, target = sure_target(draft, tokens)
    texts = PackedSamples(tokens, torch.ones(len(tokens), dtype=torch.bool), batch.aux, last, batch.lengths)
    optimizer = torch.optim.Adam(draft.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        draft.loss(texts, target, len(texts.tokens), 64).loss.backward()
        optimizer.step()
    right = asked = 0
    for text in split(texts):
        proposals = draft.rollout(text.tokens, text.aux[:-1], draft.positions)
        following = text.tokens.tolist()
        for row, proposed in enumerate(proposals.tolist()):
            expected = following[row + 2 : row + 2 + draft.positions]
            right += sum(one == other for one, other in zip(proposed, expected, strict=False))
            asked += len(expected)
    assert right >= 0.97 * asked
