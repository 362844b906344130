"""Builds samples from documents: tokens, loss mask, length limits, and the held-out split."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.refusal import Refusal
from models.config.data import DataConfig
from models.data.benchmark_prompts import BenchmarkPrompts
from models.data.chat_template import UnrenderableError, open_chat_template
from models.data.conversations import Document, Tokens
from models.data.encoded import EncodedSample
from models.data.images import ImageShelf
from models.data.loss_mask import MaskedTokens, mask_generated, runs_of, tokenize_conversation
from models.data.outcomes import Outcome, PreparationCounts, collect
from models.data.spool import Chosen, Numbers, Spool
from models.data.thinking import without_thinking

PART = 256
"""Documents that are tokenized together, and kept in a file together."""

TEXT_ALONE = ", and a draft learns from text alone: leave it out"
PLACEHOLDER = (
    "the text holds a token that stands for an image or sound in this target: remove it, or leave the line out"
)


@dataclass(frozen=True)
class Splits:
    """Training and held-out samples, each ordered by content hash."""

    train: Sequence[EncodedSample]
    heldout: Sequence[EncodedSample]


@dataclass
class SampleEncoder:
    """Turns documents into samples and counts what it leaves out.

    Raises Refusal: the tokenizer lacks the beginning-of-text token that the recipe asks for, or the chat template
    cannot be used.
    """

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    add_bos: bool
    counts: PreparationCounts = field(default_factory=PreparationCounts)
    excluded: BenchmarkPrompts = field(default_factory=lambda: BenchmarkPrompts(()))
    tokenizer_hash: str | None = None
    """Expected hash of records that hold tokens."""
    vocabulary: int | None = None
    """Size of the target's vocabulary; default: the tokenizer's."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the target's answers."""
    media_ids: tuple[int, ...] = ()
    """The target's placeholder tokens of images, video and sound."""
    shelf: ImageShelf | None = None
    """Reads and keeps images; None: conversations with images are left out."""

    def __post_init__(self) -> None:
        bos: Any = self.tokenizer.bos_token_id
        if self.add_bos and bos is None:
            raise Refusal("target.add_bos is set, but the tokenizer has no beginning-of-text token: set it to false")
        self.known = self.vocabulary or len(self.tokenizer)
        self._text_prefix = text_prefix(self.tokenizer, self.add_bos)
        self.template = open_chat_template(
            self.tokenizer, self.config.chat_template, self.config.template_arguments, self.ends
        )
        if self.template is not None and self.config.overlong == "split":
            raise Refusal(
                "data.overlong=split cuts plain text only: with a chat template use truncate or drop, or set "
                "data.chat_template=none"
            )

    def encode(self, documents: Iterable[Document]) -> Iterator[EncodedSample]:
        """Samples of all documents in order, without duplicates and documents that contain a benchmark prompt."""
        ordered = iter(documents)
        parts = iter(lambda: list(islice(ordered, PART)), [])
        return collect((one for part in parts for one in self.outcomes(part)), self.config, self.counts)

    def outcomes(self, documents: Sequence[Document]) -> Iterator[Outcome]:
        """What becomes of each, whatever the others hold."""
        shown = [self._shown(document) for document in documents]
        plain = [] if self.template is not None else [one for one in shown if one is not None and not one.tokens]
        ids = iter(self._plain_ids([one.text for one in plain]))
        for document, one in zip(documents, shown, strict=True):
            counts, samples, error, wording = PreparationCounts(), list[EncodedSample](), "", ""
            known = next(ids) if self.template is None and one is not None and not one.tokens else None
            if document.media and not (self.shelf and document.images and not document.tokens):
                counts.refusals.append(f"{document.place}: {document.media}{self._unseen(document)}")
            else:
                wording = document.wording_hash
                try:
                    samples += self._samples(document, one, known, counts)
                except Refusal as refusal:
                    error = str(refusal)
            yield Outcome(document.place, wording, counts, tuple(samples), error)

    def _shown(self, document: Document) -> Document | None:
        """The document as it is learned; None where nothing is left of it."""
        strip = self.config.thinking == "strip" and not document.tokens
        return _without_thinking(document) if strip else document

    def _plain_ids(self, texts: list[str]) -> list[list[int]]:
        # verbose=False: a text longer than the target's context is no reason to warn, the limits are applied here.
        encode: Any = self.tokenizer
        return encode(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _samples(
        self, document: Document, shown: Document | None, ids: list[int] | None, counts: PreparationCounts
    ) -> list[EncodedSample]:
        """Its samples; `counts` are of documents, however many samples of one were cut or left out."""
        of_samples = PreparationCounts()
        samples = list(self._each(document, shown, ids, of_samples))
        counts.add(of_samples.of_a_document(bool(samples)))
        return samples

    def _each(
        self, document: Document, shown: Document | None, ids: list[int] | None, counts: PreparationCounts
    ) -> Iterator[EncodedSample]:
        opening = document.opening if document.messages else None
        if self.excluded.occur_in(self._texts(document), opening):
            counts.benchmark_prompts += 1
        elif shown is None:
            counts.unusable += 1
        elif shown.tokens:
            yield from self._tokens(shown, counts)
        elif ids is not None:
            masked = MaskedTokens(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))
            yield from self._limited(shown, self._text_prefix, masked, counts)
        else:
            yield from self._conversation(shown, counts)

    def _unseen(self, document: Document) -> str:
        """Why what a document holds beside text is not learned from."""
        if document.images and not document.tokens and self.media_ids:
            return ", and the draft learns from text alone: set data.images to the images' folder, or leave it out"
        return TEXT_ALONE

    def _texts(self, document: Document) -> list[str]:
        if not document.messages:
            return [str(self.tokenizer.decode(part.ids.tolist())) for part in document.tokens if len(self.excluded)]
        return [message.content for message in document.messages]

    def _tokens(self, document: Document, counts: PreparationCounts) -> Iterator[EncodedSample]:
        """Samples of tokens, which a user or the target made."""
        place, known = document.place, self.known
        if self.template is not None and not document.messages:
            raise Refusal(
                f"{place}: tokens have no turns for a chat template: set data.chat_template=none, or give conversations"
            )
        if self.config.thinking == "strip" and not document.plain:
            raise Refusal(
                f"{place}: data.thinking=strip would change what the target generated: set it to keep or mask"
            )
        for tokens in document.tokens if self.config.turns == "all" else document.tokens[-1:]:
            if tokens.room:
                yield self._unanswered(document, tokens)
                continue
            if len(tokens.ids) and int(tokens.ids.max()) >= known:
                raise Refusal(
                    f"{place}: token {int(tokens.ids.max())}, but the target knows {known}: another tokenizer made "
                    "these input_ids; give the text, or tokens of the target's own tokenizer"
                )
            if tokens.tokenizer_hash not in (None, self.tokenizer_hash):
                raise Refusal(
                    f"{place}: made with the tokenizer {tokens.tokenizer_hash:.16}, the target's is "
                    f"{self.tokenizer_hash or 'unknown':.16}: tokenize with the target's own, or give the text"
                )
            mask = last_run(tokens.loss_mask) if self.config.turns == "last" else tokens.loss_mask
            try:
                names = tuple(self.shelf.keep(image) for image in tokens.images) if self.shelf else ()
            except UnrenderableError as error:
                counts.refusals.append(f"{place}: {error}")
                continue
            masked = MaskedTokens(tokens.ids, mask, images=names)
            if not document.plain:
                mask_thinking = self.config.thinking == "mask"
                masked = mask_generated(self.tokenizer, masked, document, mask_thinking=mask_thinking)
            yield from self._limited(document, [], masked, counts)

    def _unanswered(self, document: Document, tokens: Tokens) -> EncodedSample:
        """A prompt, with a place for the answer."""
        prompt, room = len(tokens.ids), min(tokens.room, self.config.max_tokens - len(tokens.ids))
        assert room > 0, "regeneration leaves prompts out that leave no room"
        return EncodedSample(
            np.pad(tokens.ids, (0, room)),
            np.pad(tokens.loss_mask, (0, room), constant_values=True),
            document.dialogue_hash,
            turns=1,
            prompt=prompt,
        )

    def _conversation(self, document: Document, counts: PreparationCounts) -> Iterator[EncodedSample]:
        if document.plain:
            raise Refusal(
                f"{document.place}: plain text has no turns for a chat template: set data.chat_template=none, or give "
                "conversations"
            )
        assert self.template is not None
        turns, mask_thinking = self.config.turns, self.config.thinking == "mask"
        try:
            parts = tokenize_conversation(self.template, document, turns, mask_thinking=mask_thinking, shelf=self.shelf)
        except UnrenderableError as error:
            counts.refusals.append(str(error))
            return
        if not parts:
            counts.unusable += 1
        counts.reasoning_dropped += any(part.reasoning_dropped for part in parts)
        bos: Any = self.tokenizer.bos_token_id
        for part in parts:
            prefix = [bos] if self.add_bos and part.ids[:1].tolist() != [bos] else []
            yield from self._limited(document, prefix, part, counts)

    def _limited(
        self, document: Document, prefix: list[int], masked: MaskedTokens, counts: PreparationCounts
    ) -> Iterator[EncodedSample]:
        tokens, mask = masked.ids, masked.mask
        media = np.isin(tokens, self.media_ids).nonzero()[0]
        if len(media) and not masked.images:
            counts.refusals.append(f"{document.place}: {PLACEHOLDER}")
            return
        largest = max(int(tokens.max(initial=0)), *prefix, 0)
        if largest >= self.known:
            counts.refusals.append(f"{document.place}: {unknown_token(self.tokenizer, largest, self.known)}")
            return
        room, overlong = self.config.max_tokens - len(prefix), None
        if len(tokens) > room:
            # An image is seen whole or not at all.
            overlong = "drop" if len(media) and media[-1] >= room else self.config.overlong
        if len(tokens) + len(prefix) < self.config.min_tokens or overlong == "drop":
            counts.dropped += 1
            return
        pieces = [slice(room)]
        if overlong == "truncate":
            counts.truncated += 1
        elif overlong == "split":
            counts.split += 1
            pieces = even_pieces(len(tokens), room)
        head = np.array(prefix, dtype=np.int32)
        unsupervised = np.zeros(len(prefix), dtype=bool)
        for piece in pieces:
            sample = EncodedSample(
                np.concatenate([head, tokens[piece]]),
                np.concatenate([unsupervised, mask[piece]]),
                document.dialogue_hash,
                turns=masked.turns,
                thinking=masked.thinking,
                images=masked.images,
            )
            # The first token has no context from which a draft could predict it.
            if sample.loss_mask[1:].any():
                yield sample
            else:
                counts.unusable += 1


def _without_thinking(document: Document) -> Document | None:
    """The document without reasoning; None if an answer consists of nothing else."""
    messages = tuple(
        replace(message, reasoning="", content=without_thinking(message.content))
        if message.role == "assistant"
        else message
        for message in document.messages
    )
    pairs = zip(messages, document.messages, strict=True)
    empty = any(
        (old.content.strip() or old.reasoning) and not new.content.strip() and not new.tools_called
        for new, old in pairs
    )
    return None if empty else replace(document, messages=messages)


def unknown_token(tokenizer: PreTrainedTokenizerBase, token: int, known: int) -> str:
    """Why a text with this token, which the tokenizer has and the target has not, cannot be used."""
    return (
        f"the tokenizer makes token {token} ({tokenizer.decode([token])!r}) of the text, but the target knows {known} "
        "tokens: remove it from the text, or give the target the tokenizer that it was trained with"
    )


def last_run(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`[T]` bool: the last run of True in `mask`."""
    last = np.zeros(len(mask), dtype=bool)
    for start, end in runs_of(mask)[-1:]:
        last[start:end] = True
    return last


def text_prefix(tokenizer: Any, add_bos: bool) -> list[int]:
    """The beginning-of-text token where the recipe or the tokenizer itself prepends it, otherwise nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if add_bos or (bos is not None and tokenizer("")["input_ids"][:1] == [bos]) else []


def even_pieces(length: int, room: int) -> list[slice]:
    """Cut `length` tokens into the fewest pieces of at most `room`, of nearly equal length."""
    count = -(-length // room)
    edges = [length * number // count for number in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


def first_held(documents: int, share: float) -> int:
    """Where the held-out side begins among sorted documents: the last `share` of them, at least one and never all."""
    return documents - max(0, min(max(1, round(share * documents)), documents - 1))


def divide(
    samples: Iterable[EncodedSample], config: DataConfig, counts: PreparationCounts, folder: Path | None = None
) -> Splits:
    """Hold out whole dialogues, of those that are answered, and keep each sample once.

    The samples wait in a file in `folder`. Raises Refusal: no sample is left, or too few dialogues to hold one out.
    """
    spool = Spool(folder)
    for sample in samples:
        spool.add(sample)
    if not len(spool):
        _refuse(config, counts)
    names, document = np.unique(spool.documents, return_inverse=True)
    answered = np.unique(document[spool.prompts == 0])
    share = config.heldout_share * len(names) / max(1, len(answered))
    held = np.zeros(len(names), dtype=bool)
    held[answered[first_held(len(answered), share) :]] = True
    if not held.any():
        raise Refusal(
            "all that is usable begins with the same question: data.source needs at least two dialogues, one of them "
            "to be held out; what all of them share belongs into a system turn"
        )
    order, content = spool.by_content()
    is_held = held[document[order]]
    there = np.zeros(content[-1] + 1, dtype=bool)
    there[content[is_held]] = True
    heldout = _whole(spool, _last_of_each(order[is_held], content[is_held]))
    train = _whole(spool, _last_of_each(order[~is_held & ~there[content]], content[~is_held & ~there[content]]))
    counts.duplicates += len(spool) - len(heldout) - len(train)
    if not len(train):
        raise Refusal("every training sample also occurs in a held-out document: data.source needs more text")
    return Splits(train=Chosen(spool, train[: config.max_samples]), heldout=Chosen(spool, heldout))


def _last_of_each(order: Numbers, content: Numbers) -> Numbers:
    """Of the samples with the same content, which follow each other, the last that came."""
    return order[np.append(content[1:] != content[:-1], True)] if len(order) else order


def _whole(spool: Spool, chosen: Numbers) -> Numbers:
    """`chosen` without samples from which another one of their dialogue goes on: a log has it once for each turn."""
    answered = chosen[spool.prompts[chosen] == 0]
    _, dialogue, counts = np.unique(spool.documents[answered], return_inverse=True, return_counts=True)
    several = np.flatnonzero(counts[dialogue] > 1)
    several = several[np.argsort(dialogue[several], kind="stable")]
    continued = set[int]()
    for _, group in groupby(several.tolist(), key=lambda number: int(dialogue[number])):
        # In the order of their tokens, the next one begins with a sample if any does.
        samples = [(int(answered[number]), spool[int(answered[number])]) for number in group]
        samples.sort(key=lambda one: one[1].tokens.astype(">u4").tobytes())
        for (index, short), (_, long) in pairwise(samples):
            end = len(short.tokens)
            pairs = (long.tokens[:end], short.tokens), (long.loss_mask[:end], short.loss_mask)
            if all(np.array_equal(part, whole) for part, whole in pairs):
                continued.add(index)
    return chosen[[int(index) not in continued for index in chosen]] if continued else chosen


def _refuse(config: DataConfig, counts: PreparationCounts) -> None:
    if counts.benchmark_prompts > max(counts.unusable, counts.dropped):
        raise Refusal(
            f"no sample is left of {config.source}: {counts.benchmark_prompts} of {counts.documents} documents hold "
            "prompts of the benchmarks (promotion.suites, data.exclude). Train on other text"
        )
    if counts.unusable:
        raise Refusal(
            f"the supervised share of {config.source} is 0: {counts.unusable} of {counts.documents} documents hold no "
            f"assistant text within {config.max_tokens} tokens. Check the roles, raise data.max_tokens, or set "
            "data.chat_template=none"
        )
    raise Refusal(
        f"no sample is left of {config.source}: {counts.dropped} of {counts.documents} documents are shorter than "
        f"data.min_tokens={config.min_tokens} or longer than data.max_tokens={config.max_tokens} "
        f"(data.overlong={config.overlong}). Change these limits"
    )
