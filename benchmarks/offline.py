"""Trainings without a pipeline: samples are captured once, and every draft is trained on them in this process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from models.config.training import TrainingConfig
from models.decoding.acceptance import AcceptedCounts, ExpectedCounts
from models.decoding.continuations import continue_batch
from models.decoding.sampled_walk import walk_sampled
from models.decoding.simulated import TextReading, read_texts, simulate
from models.drafts.base import Draft, PackedSamples, supervised_positions
from models.drafts.batched_proposer import DrawingSource, ProposalSource
from models.drafts.sampling import Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.model import TargetModel
from models.targets.weights import read_target_head
from models.training.heldout import weights_of
from models.training.lightning_module import DraftModule
from models.training.start import first_draft, target_projection

CHUNK = 256
Counted = AcceptedCounts | ExpectedCounts
TOGETHER = 8
"""Texts that drafts walk over at once."""


def capture(run: PreparedRun, target: TargetModel) -> list[PackedSamples]:
    """The batch of every optimizer step of an epoch."""
    samples, size = run.open_samples(), run.config.training.samples_per_step
    found, layout = list[PackedSamples](), run.layout
    for slot in run.epoch_slots(0):
        one = samples[slot.sample]
        hidden = target.forward(one.tokens[None])
        aux, last = (states[0].to(layout.dtype) for states in (hidden.aux, hidden.last))
        top = target.top_tokens(hidden.last[0]) if layout.top_token else None
        found.append(PackedSamples(one.tokens, one.loss_mask, aux, last, (len(one.tokens),), top))
    return [joined(found[first : first + size]) for first in range(0, len(found), size)]


def joined(parts: Sequence[PackedSamples]) -> PackedSamples:
    """Samples concatenated."""
    tops = [part.top for part in parts if part.top is not None]
    tokens, mask, aux, last = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "loss_mask", "aux", "last")
    )
    lengths = tuple(length for part in parts for length in part.lengths)
    return PackedSamples(tokens, mask, aux, last, lengths, torch.cat(tops) if tops else None)


def of_layers(features: torch.Tensor, captured: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """`[N, K*H]` of the wanted layers, from `[N, K'*H]` of all captured ones."""
    if tuple(captured) == tuple(wanted):
        return features
    parts = features.chunk(len(captured), dim=-1)
    return torch.cat([parts[captured.index(layer)] for layer in wanted], dim=-1)


def train(run: PreparedRun, batches: Sequence[PackedSamples], settings: TrainingConfig) -> tuple[DraftModule, float]:
    """A trained module, and the CPU seconds that it took."""
    head = read_target_head(Path(run.target.path), torch.float32)
    draft, _ = first_draft(run, head)
    dtype = DTYPES[run.config.training_dtype]
    draft.hold_embeddings(dtype)
    module = DraftModule(draft, target_projection(run, head, draft), settings, len(batches))
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    begun = time.process_time()
    for step, batch in enumerate(batches, start=1):
        total = max(1, len(supervised_positions(batch.loss_mask, batch.lengths)))
        draft.trained_share = (step - 1) / len(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = draft.loss(batch, module.target, total, CHUNK).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), settings.clip_norm)
        optimizer.step()
        schedule.step()
        module.average(step)
    return module, time.process_time() - begun


@contextmanager
def averaged(module: DraftModule, dtype: torch.dtype) -> Iterator[Draft]:
    """The draft with its averaged weights, as an export has it, for walks over a target's texts."""
    with weights_of(module.draft, module.averaged, next(module.draft.parameters()).device):
        yield module.draft.to(dtype).eval()


@dataclass(frozen=True)
class Texts:
    """A target's own continuations of some prompts."""

    prompts: list[list[int]]
    texts: list[list[int]]
    sampling: Sampling
    eos_ids: frozenset[int]

    @classmethod
    def write(
        cls, target: TargetModel, prompts: list[list[int]], sampling: Sampling, most: int, eos_ids: frozenset[int]
    ) -> "Texts":
        """Let the target continue the prompts by at most `most` tokens."""
        texts = continue_batch(target, prompts, most, eos_ids, sampling, batch_size=len(prompts))
        return cls(prompts, texts, sampling, eos_ids)

    def read(self, target: TargetModel, candidates: int = 0) -> list[TextReading]:
        """What the target says of them. `candidates`: likely tokens of every position, for sources that observe them:
        each position takes the target's whole head."""
        whole = [[*prompt, *text] for prompt, text in zip(self.prompts, self.texts, strict=True)]
        drawn = [] if self.sampling.greedy else [len(text) - 1 for text in self.texts]
        found = list[TextReading]()
        for first in range(0, len(whole), TOGETHER):
            some = slice(first, first + TOGETHER)
            found += read_texts(target, whole[some], candidates=candidates, sampled=drawn[some], sampling=self.sampling)
        return found

    def walk(self, source: ProposalSource, readings: list[TextReading], lookahead: int) -> Sequence[Counted]:
        """Counts of every text; a draft draws its proposals for sampled text."""
        if not self.sampling.greedy and isinstance(source, DrawingSource):
            parts = [readings[first : first + TOGETHER] for first in range(0, len(readings), TOGETHER)]
            walk = partial(walk_sampled, source, max_lookahead=lookahead, sampling=self.sampling, eos_ids=self.eos_ids)
            return [walked.drawn[-1] for part in parts for walked in walk(readings=part)]
        return [
            simulate(source, prompt, text, reading.aux, lookahead, reading.likeliest, eos_ids=self.eos_ids)[-1]
            for prompt, text, reading in zip(self.prompts, self.texts, readings, strict=True)
        ]
