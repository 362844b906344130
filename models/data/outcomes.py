"""What becomes of each document, whatever other documents hold; in files, so that finished work is kept."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from infra.files.atomic import write_atomically
from infra.refusal import Refusal
from models.config.data import DataConfig
from models.data.encoded import EncodedSample

SHOWN_REFUSALS = 3
"""Refused conversations whose reasons a message repeats."""


@dataclass
class PreparationCounts:
    """What happened to the documents."""

    documents: int = 0
    duplicates: int = 0
    """Documents with the same words as an earlier one, and samples that also occur on the held-out side."""
    benchmark_prompts: int = 0
    """Left out because they contain a benchmark prompt."""
    dropped: int = 0
    """Left out because of their length."""
    truncated: int = 0
    """Cut at the end, in the samples that they became or before one."""
    split: int = 0
    unusable: int = 0
    """Left out because nothing in them is supervised."""
    refusals: list[str] = field(default_factory=list)
    """Place and reason of each that was left out: more than text, or a chat template that cannot render it."""
    reasoning_dropped: int = 0
    """Conversations with reasoning that the chat template has no place for."""

    def of_a_document(self, used: bool) -> "PreparationCounts":
        """Its samples' counts as the document's: each at most once, and nothing of it is unusable if a part is used."""
        once = {one.name: min(1, getattr(self, one.name)) for one in fields(self) if one.name != "refusals"}
        unusable = not used and not self.refusals and not self.dropped and once["unusable"]
        return PreparationCounts(**once | {"unusable": int(unusable)}, refusals=self.refusals[:1])

    def add(self, others: "PreparationCounts") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(others, one.name))


@dataclass(frozen=True)
class Outcome:
    """What becomes of a document."""

    place: str
    wording: str
    """Hash of its words; empty for one that is refused for what it holds beside text."""
    counts: PreparationCounts
    samples: tuple[EncodedSample, ...] = ()
    error: str = ""
    """Why the preparation ends here."""


def collect(outcomes: Iterable[Outcome], config: DataConfig, counts: PreparationCounts) -> Iterator[EncodedSample]:
    """The samples of all documents in order, without those that have the words of an earlier one.

    Raises Refusal for an outcome with an error, and at the end where too many were refused.
    """
    seen: set[bytes] = set()
    for outcome in outcomes:
        counts.documents += 1
        wording = bytes.fromhex(outcome.wording)[:16]  # half of the hash: there may be millions
        if wording in seen:
            counts.duplicates += 1
            continue
        if wording:
            seen.add(wording)
        if outcome.error:
            raise Refusal(outcome.error)
        counts.add(outcome.counts)
        yield from outcome.samples
    check_refused(counts.refusals, counts.documents, config)


def check_refused(refusals: Sequence[str], documents: int, config: DataConfig) -> None:
    """Raise Refusal for many refused conversations: a sign of wrong roles, the wrong template or data of images."""
    if refusals and len(refusals) > config.max_refused_share * documents:
        first = "\n  ".join(refusals[:SHOWN_REFUSALS])
        raise Refusal(
            f"{len(refusals)} of {documents} conversations cannot be used, more than data.max_refused_share="
            f"{config.max_refused_share:g} allows: correct them, or raise it. The first:\n  {first}"
        )


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a part of the documents; it is whole or not there."""
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    described = [
        {
            "place": outcome.place,
            "wording": outcome.wording,
            "counts": asdict(outcome.counts),
            "error": outcome.error,
            "samples": [
                [len(one.tokens), one.document, one.turns, one.thinking, list(one.images), one.prompt]
                for one in outcome.samples
            ],
        }
        for outcome in outcomes
    ]
    nothing = np.empty(0, dtype=np.int32)
    tokens = np.concatenate([nothing, *(sample.tokens for sample in samples)])
    masks = np.concatenate([nothing.astype(bool), *(sample.loss_mask for sample in samples)])
    text = np.frombuffer(json.dumps(described).encode(), dtype=np.uint8)
    content = io.BytesIO()
    np.savez(content, tokens=tokens, masks=masks, described=text)
    write_atomically(path, content.getvalue())


def read_outcomes(path: Path) -> Iterator[Outcome]:
    with np.load(path, allow_pickle=False) as content:
        tokens, masks, described = content["tokens"], content["masks"], json.loads(content["described"].tobytes())
    start = 0
    for one in described:
        samples = list[EncodedSample]()
        for length, document, turns, thinking, images, prompt in one.pop("samples"):
            rows = slice(start, start + length)
            start += length
            samples.append(EncodedSample(tokens[rows], masks[rows], document, turns, thinking, tuple(images), prompt))
        counts = PreparationCounts(**one.pop("counts"))
        yield Outcome(**one, counts=counts, samples=tuple(samples))
