"""EAGLE-3 training steps that do the same work: this project's, its plain form, and the `speculators` package's.

Imported by draft_step.py, loss.py and max_length.py.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.planner.memory import loss_chunk_tokens
from models.config.eagle3 import Eagle3Config
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3.layers import GroupedAttention
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.layers import RMSNorm
from models.drafts.rope import rotary_tables
from models.drafts.vocabulary import DraftVocabulary

AUX_LAYERS = (1, 2, 3)
CHUNK_TOKENS = 256
"""`training.loss_chunk_tokens` of a CPU."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and its draft, and of a batch."""

    hidden: int
    vocabulary: int
    draft_vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    lengths: tuple[int, ...]
    steps: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def flops(self) -> dict[str, float]:
        """Of a training step: 2 per multiply-add, backward twice the forward, attention as far as it is causal.

        `target` is the target's projection onto the draft vocabulary, forward alone.
        """
        n, h, d = self.tokens, self.hidden, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        layer = 2 * h * (d + 2 * kv) + d * h + 3 * h * self.intermediate
        scores = sum(length * (length + 1) for length in self.lengths) * d
        parts = {
            "fusion": 6 * n * len(AUX_LAYERS) * h * h,
            "layer": 6 * n * self.steps * layer,
            "attention": 6 * self.steps * scores,
            "head": 6 * n * self.steps * h * self.draft_vocabulary,
            "target": 2 * n * h * self.draft_vocabulary,
        }
        return {name: float(value) for name, value in parts.items()}


SHAPES = {
    "tiny": Shape(64, 512, 256, 4, 2, 16, 128, (48, 16), 3),
    "a": Shape(256, 32_000, 8_000, 4, 4, 64, 1_024, (512, 512), 4),
    "b": Shape(1_024, 151_936, 32_000, 16, 8, 64, 3_072, (1_024,), 7),
    "c": Shape(2_048, 128_256, 32_000, 32, 8, 64, 8_192, (768,), 5),
    "gemma-270m": Shape(640, 262_144, 32_000, 4, 1, 256, 2_048, (1_024,), 7),
    "qwen3-8b": Shape(4_096, 151_936, 32_000, 32, 8, 128, 12_288, (2_048,), 7),
    "kimi-k2.5": Shape(7_168, 163_840, 163_840, 64, 8, 128, 18_432, (8_192,), 4),
    "kimi-k2.5-32k": Shape(7_168, 163_840, 32_000, 64, 8, 128, 18_432, (8_192,), 4),
}
"""`a`, `b` and `c` are those of the comparison with `speculators`; head counts of drafts are common ones."""


@dataclass(frozen=True)
class Work:
    """A draft, a batch of which every position is supervised, and the target's head."""

    draft: Eagle3Draft
    batch: PackedSamples
    target: TargetProjection

    @property
    def total(self) -> int:
        return sum(length - 2 for length in self.batch.lengths)


def make_work(shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0, argmax: bool = False) -> Work:
    """Random weights and features, the same on every call; float32 master weights.

    The text's tokens are the draft vocabulary's, and so is the target's likeliest token everywhere: every position
    counts by either rule (`training.out_of_vocabulary`). `argmax`: by the target's top token.
    """
    g = torch.Generator(device).manual_seed(seed)
    ids = torch.randperm(shape.vocabulary, generator=torch.Generator().manual_seed(seed))
    ids = ids[: shape.draft_vocabulary].sort().values
    known, count = ids.to(device), shape.tokens

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=g, device=device, dtype=torch.float32).mul_(scale)

    def draft_tokens() -> Tensor:
        return known[torch.randint(len(known), (count,), generator=g, device=device)]

    head = normal(shape.vocabulary, shape.hidden, 0.02)
    last = F.normalize(normal(count, shape.hidden).add_(head[draft_tokens()], alpha=50)) * shape.hidden**0.5
    batch = PackedSamples(
        tokens=draft_tokens().cpu(),
        loss_mask=torch.ones(count, dtype=torch.bool),
        aux=normal(count, len(AUX_LAYERS) * shape.hidden).to(dtype),
        last=last.to(dtype),
        lengths=shape.lengths,
        top=draft_tokens().cpu().int() if argmax else None,
    )
    config = Eagle3Config(
        vocab_size=None if shape.draft_vocabulary == shape.vocabulary else shape.draft_vocabulary,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        ttt_steps=shape.steps,
        ttt_decay=1.0,
    )
    torch.manual_seed(seed)
    embedding = normal(shape.vocabulary, shape.hidden).to(dtype)
    with torch.device(device):
        draft = Eagle3Draft(config, embedding, DraftVocabulary(ids, shape.vocabulary), AUX_LAYERS)
    draft.to(device).start_from(head)
    rows = head if draft.vocabulary.whole else head[known]
    return Work(draft, batch, TargetProjection(rows.to(dtype), None, 1.0, None))


def autocast(dtype: torch.dtype, device: str = "cpu") -> Any:
    """bf16 as it is trained with: autocast over float32 master weights."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def our_step(work: Work, dtype: torch.dtype) -> Tensor:
    """Forward and backward, with training's chunks of the loss on the device; the loss."""
    work.draft.zero_grad(set_to_none=True)
    chunk_tokens = loss_chunk_tokens(work.draft.loss_logits * dtype.itemsize, not work.batch.last.is_cuda)
    with autocast(dtype, work.batch.last.device.type):
        loss = work.draft.loss(work.batch, work.target, work.total, chunk_tokens).loss
    loss.backward()
    return loss.detach()


def plain_step(work: Work, dtype: torch.dtype) -> Tensor:
    """The same as plainly as can be: dense scores of all steps, whole logits, autograd."""
    work.draft.zero_grad(set_to_none=True)
    with autocast(dtype, work.batch.last.device.type):
        loss = _plain_loss(work)
    loss.backward()
    return loss.detach()


def _plain_loss(work: Work) -> Tensor:
    draft, batch, (layer,) = work.draft, work.batch, work.draft.decoder_layers
    config, attention, count = draft.config, layer.self_attn, len(batch.tokens)
    assert isinstance(attention, GroupedAttention)
    group, row = config.num_heads // config.num_kv_heads, torch.arange(count)
    sample = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
    own = torch.cat([torch.arange(n) for n in batch.lengths])
    ends = row - own + torch.tensor(batch.lengths)[sample]
    causal = (sample[:, None] == sample) & (row <= row[:, None])
    p = (batch.last.to(work.target.rows.dtype) @ work.target.rows.T).float().softmax(-1)
    hidden, keys, values, loss = draft.fuse(batch.aux), [], [], torch.zeros(())
    for step in range(config.ttt_steps):
        tokens = batch.tokens[(row + 1 + step).clamp(max=count - 1)]
        embedded = _plain_norm(layer.input_layernorm, F.embedding(tokens, draft.embed_tokens.weight))
        x = torch.cat([embedded, _plain_norm(layer.hidden_norm, hidden)], dim=-1)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (projection(x).unflatten(1, (-1, config.head_dim)) for projection in projections)
        tables = rotary_tables(own + step, config)
        q, k = _plain_rotation(q, tables), _plain_rotation(k, tables)
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        mask = torch.cat([causal, *[torch.eye(count, dtype=torch.bool)] * step], dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, torch.cat(keys)).float() * config.head_dim**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights.to(v.dtype), torch.cat(values)).flatten(1)
        hidden = hidden + attention.o_proj(attended)
        normed, mlp = _plain_norm(layer.post_attention_layernorm, hidden), layer.mlp
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        predicted = row + 1 + step
        valid = predicted < ends - 1
        logits = F.linear(_plain_norm(draft.norm, hidden), draft.lm_head.weight).float()
        loss = loss - (p[predicted[valid]] * logits[valid].log_softmax(-1)).sum() / work.total
    return loss


def _plain_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), norm.weight, norm.eps)


def _plain_rotation(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def speculators_step(work: Work, shape: Shape) -> tuple[nn.Module, Callable[[torch.dtype], Tensor]]:
    """The `speculators` package's model with the same weights, and its forward and backward on the same batch.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    except ImportError as error:
        raise ValueError(
            "the comparison needs speculators: pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
        ) from error
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.vocabulary,
        rms_norm_eps=work.draft.config.rms_norm_eps,
        max_position_embeddings=max(4096, shape.tokens),
    )
    # Its default, flex attention, has no backward pass on a CPU.
    layer._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.draft_vocabulary,
            eagle_aux_hidden_state_layer_ids=list(AUX_LAYERS),
        )
    )
    vocabulary = work.draft.vocabulary
    model.load_vocab_mappings(vocabulary.t2d, vocabulary.d2t)
    ours = {name.replace("midlayer", "layers.0"): value for name, value in work.draft.state_dict().items()}
    ours |= {"embed_tokens.weight": work.draft.embed_tokens.weight, "verifier_lm_head.weight": work.target.rows}
    ours |= {"verifier_norm.weight": torch.ones(shape.hidden)}
    left = model.load_state_dict({name: value.float() for name, value in ours.items()}, strict=False)
    assert not left.unexpected_keys
    model.lm_head.weight.requires_grad_(True)
    inputs = _speculators_inputs(work.batch)
    loss_config = resolve_loss_config("kl_div", "eager")

    def step(dtype: torch.dtype) -> Tensor:
        model.zero_grad(set_to_none=True)
        with autocast(dtype):
            _, loss, _ = model(**inputs, ttt_steps=shape.steps, ttt_step_loss_decay=1.0, loss_config=loss_config)
        loss.backward()
        return loss.detach()

    return model, step


def _speculators_inputs(batch: PackedSamples) -> dict[str, Tensor]:
    """Shifted as its collate function does: features lose each sample's last position, the rest its first."""
    parts: dict[str, list[Tensor]] = {}
    start = 0
    for index, length in enumerate(batch.lengths):
        features, following = slice(start, start + length - 1), slice(start + 1, start + length)
        mask = torch.ones(length - 1, dtype=torch.bool)
        mask[-1] = False
        for name, part in {
            "hidden_states": batch.aux[features],
            "input_ids": batch.tokens[following].to(batch.last.device),
            "verifier_last_hidden_states": batch.last[following],
            "document_ids": torch.full((length - 1,), index),
            "position_ids": torch.arange(length - 1),
            "loss_mask": mask,
        }.items():
            parts.setdefault(name, []).append(part)
        start += length
    return {name: torch.cat(found).unsqueeze(0) for name, found in parts.items()}
