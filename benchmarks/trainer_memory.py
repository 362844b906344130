"""Peak memory of a trainer as torch's allocator saw it, beside what the planner says.

Every allocation and release of the process, workspaces inside operators included, from before the first weight: torch's
profiler records them, and the same steps give the same figure to the byte. A trainer on a CPU reads the target's tables
in float32 first, so that building a draft may be dearer than its steps. What is not torch's (the interpreter, its
libraries) is not in it, and neither is what the C library keeps of freed memory.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from infra.planner.memory import CPU_CHUNK_TOKENS, RankMemory, Setting, rank_memory
from infra.planner.shapes import Precision, TargetShape
from models.config.draft import DraftConfig, parse_draft_config
from models.config.training import TrainingConfig
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.dtypes import DTYPES
from models.training.lightning_module import DraftModule

AUX = 3


@dataclass(frozen=True)
class Point:
    """One setting of a trainer on one sample, or on several."""

    hidden: int
    vocabulary: int
    draft: dict[str, Any]
    lengths: tuple[int, ...]
    precision: Precision = "float32"
    chunk_tokens: int = CPU_CHUNK_TOKENS
    name: str = ""
    recompute: bool = False
    tied: bool = False
    """Whether the target's head is its embedding."""
    aux: int = AUX
    optimizer: str = "adamw"

    @property
    def config(self) -> DraftConfig:
        return parse_draft_config(self.draft)

    @property
    def target(self) -> TargetShape:
        """Of the target only what a trainer sees matters."""
        return TargetShape(
            hidden_size=self.hidden, num_layers=1, vocab_size=self.vocabulary, parameters=1, active_parameters=1,
            attention_width=1, tied_head=self.tied,
        )  # fmt: skip

    @property
    def pruned(self) -> bool:
        return self.config.vocabulary_size(self.vocabulary) < self.vocabulary

    def predicted(self) -> RankMemory:
        setting = Setting(
            aux_count=self.aux, stored="bfloat16", precision=self.precision, top_token=self.pruned,
            whole_head=self.pruned and self.config.needs_mass, chunk_tokens=self.chunk_tokens, prefetch_steps=-1,
            one_memory=True, recompute=self.recompute, muon=self.optimizer == "muon",
        )  # fmt: skip
        return rank_memory(self.config.shape(self.target, self.aux, self.precision), self.target, setting, self.lengths)


def measured_peak(point: Point, steps: int = 2) -> int:
    """Bytes alive at the dearest moment of `steps` optimizer steps of this process."""
    gc.collect()  # what was there before would count as freed by the steps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(point, steps)
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    """Bytes alive at the dearest moment of what was profiled, over what was there before."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def train(point: Point, steps: int) -> None:
    """What a rank does: the draft as the trainer builds it, and whole optimizer steps."""
    module, optimizer = built(point)
    batch = _batch(point)
    for step in range(1, steps + 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=point.precision == "bfloat16"):
            outcome = module.draft.loss(batch, module.target, sum(point.lengths), point.chunk_tokens)
        # Lightning forgets the step's gradients before the backward, not before the forward.
        optimizer.zero_grad()
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(module.draft.parameters(), 1.0)
        optimizer.step()
        module.average(step)
        del outcome


def built(point: Point) -> tuple[DraftModule, torch.optim.Optimizer]:
    """What is trained, and its optimizer, in the order of models.training.trainer.open_trainer."""
    config, dtype = point.config, DTYPES[point.precision]
    torch.manual_seed(0)
    embedding = torch.randn(point.vocabulary, point.hidden)
    head = embedding if point.tied else torch.randn(point.vocabulary, point.hidden)
    chosen = torch.arange(config.vocabulary_size(point.vocabulary))
    draft = build_draft(config, embedding, DraftVocabulary(chosen, point.vocabulary), range(point.aux))
    draft.start_from(head)
    draft.hold_embeddings(dtype)
    projection = _projection(point, head.to(dtype), chosen)
    settings = {"precision": point.precision, "recompute": point.recompute, "optimizer": point.optimizer}
    module = DraftModule(draft, projection, TrainingConfig.model_validate(settings), total_steps=10)
    return module, module.configure_optimizers()["optimizer"]


def _projection(point: Point, weight: torch.Tensor, chosen: torch.Tensor) -> TargetProjection:
    whole = weight if point.pruned and point.config.needs_mass else None
    return TargetProjection(weight[chosen], whole, 1.0, None)


def _batch(point: Point) -> PackedSamples:
    tokens = sum(point.lengths)
    aux, last = (torch.randn(tokens, width).bfloat16() for width in (point.aux * point.hidden, point.hidden))
    aux = aux if point.aux else last
    supervised = torch.ones(tokens, dtype=torch.bool)
    # A token of the draft vocabulary.
    top = torch.zeros(tokens, dtype=torch.int32) if point.pruned else None
    return PackedSamples(torch.randint(0, point.vocabulary, (tokens,)), supervised, aux, last, point.lengths, top)


def components(memory: RankMemory) -> Iterator[tuple[str, float]]:
    """Name and MiB of every component."""
    for name in type(memory).model_fields:
        yield name, round(getattr(memory, name) / 2**20, 2)
