"""Drafts that know by heart what a tiny target says of images."""

from pathlib import Path

import torch
from torch import Tensor

from models.capture.engine import Continued
from models.capture.plain_engine import PlainEngine
from models.data.media import Prompt
from models.decoding.acceptance import AcceptedCounts
from models.decoding.simulated import simulate
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.batched_proposer import shown_in
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import PreparedRun
from models.targets.weights import read_target_head

DRAFT = "draft={method: eagle3, vocab_size: null, num_heads: 2, num_kv_heads: 2, head_dim: 8, intermediate_size: 32}"
LOOKAHEAD = 3


def learned_by_heart(run: PreparedRun, samples: list[PackedSamples], steps: int = 150) -> Draft:
    """A draft of the run that was trained on these samples alone."""
    head = read_target_head(Path(run.target.path), torch.float32)
    every = DraftVocabulary(torch.arange(run.target.vocab_size), run.target.vocab_size)
    torch.manual_seed(0)
    draft = build_draft(run.config.draft, head.embedding, every, run.config.target.aux_layer_ids)
    draft.start_from(head.head)
    target = TargetProjection(head.head, None, head.logit_scale, head.soft_cap)
    batch = joined(samples)
    total = int(batch.loss_mask.sum())
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        draft.loss(batch, target, total, 256).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


def joined(samples: list[PackedSamples]) -> PackedSamples:
    names = ("tokens", "loss_mask", "aux", "last", "embedded", "shown", "places")
    parts: dict[str, Tensor] = {name: torch.cat([getattr(one, name) for one in samples]) for name in names}
    return PackedSamples(lengths=tuple(one.lengths[0] for one in samples), **parts)


def sample_of(engine: PlainEngine, prompt: Prompt, text: Continued, media: Tensor) -> PackedSamples:
    read = torch.tensor([*text.prompt, *text.continuation][:-1])
    hidden = engine.prefill(read, prompt.images)
    learned = torch.arange(len(read)) >= len(text.prompt)
    return PackedSamples(
        read, learned, hidden.aux, hidden.last, (len(read),), embedded=hidden.embedded, places=hidden.places,
        shown=torch.isin(read, media),
    )  # fmt: skip


def walk(draft: Draft, text: Continued, media: Tensor) -> AcceptedCounts:
    assert text.embedded is not None
    assert text.places is not None
    shown = shown_in(text.prompt, text.continuation, media)
    source = draft.after_images(text.embedded, text.places, shown)
    return simulate(source, text.prompt, text.continuation, text.aux, LOOKAHEAD, eos_ids=frozenset())[-1]
