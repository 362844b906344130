"""Acceptance after images: the gate's ground of held-out prompts that hold one.

Texts and walks are as of other prompts, one by one. Nothing is decoded for real after an image: the walk's counts are
those of a served draft, which a test shows with SGLang.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants, SelectedLayers
from models.benchmark.measure import LEAST_CONVERSATIONS, WalkedTexts, judged_sources, walked_to
from models.data.images import ImageProcessor
from models.data.media import Prompt
from models.data.prompts import seen_prompts
from models.decoding.after_images import continue_seen
from models.decoding.simulated import read_seen
from models.drafts.base import Draft
from models.drafts.batched_proposer import ProposalSource, shown_in
from models.drafts.sampling import GREEDY
from models.progress_bars import bars
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates

GROUND = "prompts with images"


def image_prompts(run: PreparedRun) -> list[Prompt]:
    """The run's held-out prompts with an image; none where they are too few to judge by."""
    if run.config.data.images is None:
        return []
    found = seen_prompts(run.open_samples("heldout"), run.config.benchmark.prompts, run.samples.longest)
    if len(found) < LEAST_CONVERSATIONS:
        print(
            f"the gate does not look at acceptance after images: {len(found)} held-out prompts have one, and "
            f"{LEAST_CONVERSATIONS} are needed",
            flush=True,
        )
        return []
    return found


def measure_after_images(run: PreparedRun, contestants: Contestants, prompts: Sequence[Prompt]) -> WalkedTexts:
    """What the gate compares, over the target's texts about images, sampled or greedy as the traffic is."""
    walks = _Walks(run, contestants)
    with bars() as bar:
        done = bar(GROUND, len(prompts))
        for prompt in prompts:
            walks.add(prompt)
            done(1)
    return walks.found


class _Walks:
    """Walks of every source over the target's texts about images."""

    def __init__(self, run: PreparedRun, contestants: Contestants):
        self._contestants, self._config = contestants, run.config.benchmark
        self._folder, self._media = Path(run.target.path), torch.tensor(run.target.media_ids)
        self._sources = judged_sources(contestants)
        sampled = run.config.promotion.traffic.sampling == "sampled"
        law = sampled_law(self._config, contestants.recommended) if sampled else GREEDY
        self._sampling = law.seeded(run.config.seed, contestants.target.device)
        # Of the drafts themselves: what `after_images` makes of one has no configuration.
        self._most = {name: walked_to(source, self._config) for name, source in self._sources.items()}
        self.found = WalkedTexts.of(self._sources, law)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._folder)

    def add(self, prompt: Prompt) -> None:
        """Let the target answer one prompt, and walk over the answer."""
        target, sampling = self._contestants.target, self._sampling
        asked = torch.tensor(prompt.tokens)
        ends = self._contestants.eos_ids | frozenset(self._media.tolist())
        text = continue_seen(target, asked, self._seen(asked, prompt), self._config.max_new_tokens, ends, sampling)
        whole = torch.tensor([*prompt.tokens, *text])
        candidates = max(source.proposers(1).candidates for source in self._sources.values())
        reading, hidden = read_seen(
            target, whole.tolist(), self._seen(whole[:-1], prompt), candidates=candidates,
            sampled=0 if sampling.greedy else len(text) - 1, sampling=sampling,
        )  # fmt: skip
        self.found.texts.append(text)
        shown = shown_in(prompt.tokens, text, self._media)
        sources = {name: self._reading_images(source, hidden, shown) for name, source in self._sources.items()}
        self.found.add_walks(
            sources, [(prompt.tokens, text)], [reading], self._most, sampling=sampling,
            eos_ids=self._contestants.eos_ids,
        )  # fmt: skip

    def _seen(self, tokens: Tensor, prompt: Prompt) -> Mapping[str, Tensor]:
        return self._processor.inputs(tokens, prompt.images, self._contestants.target.head_weight)

    def _reading_images(self, source: ProposalSource, hidden: HiddenStates, shown: Tensor) -> ProposalSource:
        """The source for this text alone."""
        if not isinstance(source, Draft | SelectedLayers):
            return source
        assert hidden.embedded is not None
        assert hidden.places is not None
        return source.after_images(hidden.embedded, hidden.places, shown.to(hidden.embedded.device))
