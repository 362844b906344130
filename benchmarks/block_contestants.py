"""Training steps of block drafts that do the same work: this project's, and the `speculators` package's.

Imported by block_step.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from draft_contestants import AUX_LAYERS, autocast
from torch import Tensor, nn

from infra.planner.memory import loss_chunk_tokens
from models.config.draft import parse_draft_config
from models.drafts.base import PackedSamples, TargetProjection, supervised_positions
from models.drafts.blocks.module import BlockDraft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary

Step = Callable[[], Tensor]
"""Forward, backward, and the optimizer's step; the loss."""
Stepped = tuple[nn.Module, Step]
"""What is trained, and how."""


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a target and its block draft, and of a batch."""

    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    block_size: int
    markov_rank: int
    lengths: tuple[int, ...]
    anchors: int
    """Of each sample."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


SHAPES = {
    "tiny": BlockShape(64, 128, 4, 2, 16, 96, 2, 4, 8, (32, 32), 6),
    "a": BlockShape(256, 8_000, 4, 4, 64, 1_024, 2, 8, 64, (512, 512), 128),
    "b": BlockShape(1_024, 32_000, 16, 8, 64, 3_072, 3, 8, 256, (1_024,), 256),
}
"""Hidden sizes, heads and lengths are those of draft_step.py's shapes; the vocabulary is its draft vocabulary."""
METHODS = ("dflash", "dspark")


@dataclass(frozen=True)
class BlockWork:
    """A draft, and a batch of which every position is supervised and every block is whole."""

    method: str
    shape: BlockShape
    draft: BlockDraft
    batch: PackedSamples
    head: Tensor
    """`[V, H]` the target's."""

    @property
    def total(self) -> int:
        return len(supervised_positions(self.batch.loss_mask, self.batch.lengths))

    def starts(self) -> Tensor:
        """Packed positions of the blocks' known tokens, in order."""
        positions = supervised_positions(self.batch.loss_mask, self.batch.lengths)
        return self.draft._draw(self.batch, self.draft.anchors(self.batch, positions))[0]


def make_work(method: str, shape: BlockShape, dtype: torch.dtype, seed: int = 0) -> BlockWork:
    """Random weights and features, the same on every call; float32 master weights.

    The text is the target's likeliest tokens, so that a loss has the same labels in both packages.
    """
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(shape.vocabulary, shape.hidden, generator=g) * 0.02
    tokens = torch.randint(shape.vocabulary, (shape.tokens,), generator=g)
    following = torch.cat([tokens[1:], tokens[:1]])
    last = torch.randn(shape.tokens, shape.hidden, generator=g) + 50 * head[following]
    batch = PackedSamples(
        tokens=tokens,
        loss_mask=torch.ones(shape.tokens, dtype=torch.bool),
        aux=torch.randn(shape.tokens, len(AUX_LAYERS) * shape.hidden, generator=g).to(dtype),
        last=(F.normalize(last) * shape.hidden**0.5).to(dtype),
        lengths=shape.lengths,
        top=following.int(),
    )
    knobs = {
        "method": method,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "block_size": shape.block_size,
        "anchors": shape.anchors,
        "decay_gamma": 4.0,
        **({"markov_rank": shape.markov_rank} if method == "dspark" else {}),
    }
    torch.manual_seed(seed)
    embedding = torch.randn(shape.vocabulary, shape.hidden, generator=g).to(dtype)
    every = DraftVocabulary(torch.arange(shape.vocabulary), shape.vocabulary)
    draft = build_draft(parse_draft_config(knobs), embedding, every, AUX_LAYERS)
    assert isinstance(draft, BlockDraft)
    draft.start_from(head)
    _start_with_whole_blocks(draft)
    if method == "dspark":
        # At its start the bias is 0, and so are gradients of what it depends on.
        nn.init.normal_(draft.markov_head.markov_w2.weight, std=0.1, generator=g)  # type: ignore[union-attr,arg-type]
    return BlockWork(method, shape, draft, batch, head.to(dtype))


def _start_with_whole_blocks(draft: BlockDraft) -> None:
    """Both packages take the same blocks; `speculators` has no rule for those that a sample's end cuts."""
    own, size = draft.anchors, draft.config.block_size

    def anchors(batch: PackedSamples, positions: Tensor) -> Tensor:
        ends = torch.tensor(batch.lengths).cumsum(0)
        possible = own(batch, positions)
        return possible[possible + size < ends[torch.searchsorted(ends, possible, right=True)]]

    draft.anchors = anchors  # type: ignore[method-assign]


def our_step(work: BlockWork, dtype: torch.dtype) -> Stepped:
    """With training's chunks of the loss and its optimizer."""
    draft = work.draft
    target = TargetProjection(work.head, work.head, 1.0, None)
    chunk_tokens = loss_chunk_tokens(draft.loss_logits * dtype.itemsize, on_cpu=True)
    return _step(draft, lambda: draft.loss(work.batch, target, work.total, chunk_tokens).loss, dtype)


def speculators_step(work: BlockWork, dtype: torch.dtype) -> Stepped:
    """The package's model with the same weights, blocks and loss terms. Raises ValueError: it is not installed."""
    model = _speculators_model(work)
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core

    starts = work.starts()
    given = (starts, torch.ones_like(starts, dtype=torch.bool))
    core.select_anchors = lambda *_: given  # type: ignore[assignment]
    config, batch = work.draft.config, work.batch
    inputs: dict[str, Any] = {
        "hidden_states": batch.aux[None],
        "input_ids": batch.tokens[None],
        "loss_mask": batch.loss_mask[None].float(),
        "verifier_last_hidden_states": batch.last[None],
        "document_ids": torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))[None],
        "position_ids": torch.cat([torch.arange(length) for length in batch.lengths])[None],
        "max_anchors": len(starts),
        "gamma": config.decay_gamma,
    }
    if work.method == "dspark":
        # Its total variation is half of ours.
        terms = f'{{"ce": {config.cross_entropy_weight}, "tv": {2 * config.tv_weight}}}'
        inputs |= {
            "loss_config": resolve_loss_config(terms, "eager"),
            "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0],
        }
    else:
        inputs["loss_config"] = resolve_loss_config("kl_div", "eager")
    return _step(model, lambda: model(**inputs)[1], dtype)


def _step(model: nn.Module, forward: Step, dtype: torch.dtype) -> Stepped:
    """The optimizer has its state before the first step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, fused=True)
    with torch.no_grad():
        for parameter in trained:
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
            optimizer.state[parameter] = state | {"exp_avg_sq": torch.zeros_like(parameter)}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast(dtype):
            loss = forward()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def _speculators_model(work: BlockWork) -> Any:
    try:
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    except ImportError as error:
        raise ValueError(
            "the comparison needs speculators: pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
        ) from error
    from transformers import Qwen3Config

    draft, shape = work.draft, work.shape
    layer = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.layers,
        vocab_size=shape.vocabulary,
        rms_norm_eps=draft.config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": draft.config.rope_theta},
        max_position_embeddings=max(4096, shape.tokens),
    )
    # Its default, flex attention, has no backward pass on a CPU.
    layer._attn_implementation = "sdpa"
    common: dict[str, Any] = {
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.vocabulary,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in AUX_LAYERS],
        "mask_token_id": draft.mask_token_id,
    }
    if work.method == "dspark":
        model: Any = DSparkDraftModel(DSparkSpeculatorConfig(markov_rank=shape.markov_rank, **common))
    else:
        model = DFlashDraftModel(DFlashSpeculatorConfig(**common))
    ours = dict(draft.state_dict()) | {
        "embed_tokens.weight": draft.embedding,
        "verifier_norm.weight": torch.ones(shape.hidden),
    }
    ours |= {"lm_head.weight": work.head, "verifier_lm_head.weight": work.head}
    left = model.load_state_dict({name: value.float() for name, value in ours.items()}, strict=False)
    assert not left.unexpected_keys
    assert not left.missing_keys
    return model
