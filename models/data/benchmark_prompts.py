"""Finds the prompts of benchmarks in training text, exactly or nearly. Used by the process that prepares samples.

The rule, on words alone (case, punctuation and white space do not count). A document holds a prompt where

- it shares 13 words in a row with it; words that several prompts have in common, such as an instruction, do not count;
- or one of its messages holds 80 % of the runs of 5 words of a prompt of 8 words or more;
- or one of its messages is a shorter prompt, word for word.

Runs of 13 words are the measure of GPT-3's own decontamination (arXiv 2005.14165, appendix C).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.refusal import Refusal
from models.data.conversations import as_document, read_records
from models.data.reading import converted

LONG_RUN = 13
SHINGLE = 5
LEAST_WORDS = 8
"""Of a prompt that is looked for inside longer messages."""
NEAR = 0.8

Words = tuple[str, ...]
Hashes = NDArray[np.uint64]

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
"""Written without spaces: each counts as a word."""
_WORD = re.compile(f"[{_IDEOGRAPHS}]|[^\\W_{_IDEOGRAPHS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIELDS = ("turns", "question", "problem", "prompt", "instruction")
"""Of the records of well-known benchmarks, beside those of training text."""


def words_of(text: str) -> Words:
    """The words alone."""
    return tuple(_WORD.findall(text.casefold()))


def read_excluded_prompts(sources: Iterable[str]) -> Iterator[str]:
    """Every prompt of benchmark files: what users say in conversations, plain text, or the field that holds it.

    Raises Refusal for sources that cannot be read and records without a prompt.
    """
    for source in sources:
        for prompts in converted(read_records(source), _prompts):
            yield from prompts


def _prompts(place: str, record: Any) -> list[str]:
    values: list[Any] = [record[name] for name in _FIELDS if record.get(name)] if isinstance(record, dict) else []
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    if texts and all(isinstance(text, str) for text in texts):
        return texts
    document = as_document(place, record)
    if document.tokens is not None:
        raise Refusal(f"{place}: tokens cannot be compared with training text: give the prompts' text")
    return [message.content for message in document.messages if document.plain or message.role == "user"]


class BenchmarkPrompts:
    """Prompts that training text must not hold."""

    def __init__(self, prompts: Iterable[str]):
        distinct = list(dict.fromkeys(words for prompt in prompts if (words := words_of(prompt))))
        self._count = len(distinct)
        self._short = frozenset(words for words in distinct if len(words) < LEAST_WORDS)
        numbers: dict[str, int] = {}
        for words in distinct:
            for word in words:
                numbers.setdefault(word, _number(word))
        self._numbers = numbers
        long = [np.unique(_runs(self._in_numbers(words), SHINGLE)) for words in distinct if len(words) >= LEAST_WORDS]
        self._shingles = np.array([len(shingles) for shingles in long], dtype=np.int64)
        """By prompt, how many there are."""
        owners = np.repeat(np.arange(len(long)), self._shingles)
        together = np.concatenate([*long, np.empty(0, dtype=np.uint64)])
        order = np.argsort(together, kind="stable")
        self._sorted, self._owners = together[order], owners[order]
        runs = Counter(run for words in distinct for run in set(_runs(self._in_numbers(words), LONG_RUN).tolist()))
        own = sorted(run for run, prompts_with_it in runs.items() if prompts_with_it == 1)
        self._own_runs: Hashes = np.array(own, dtype=np.uint64)

    def __len__(self) -> int:
        """Distinct prompts."""
        return self._count

    def found_in(self, messages: Sequence[str]) -> bool:
        """Whether one of the messages holds a prompt."""
        return bool(self._count) and any(self._held_by(words_of(message)) for message in messages)

    def _held_by(self, words: Words) -> bool:
        if len(words) < LEAST_WORDS and words in self._short:
            return True
        numbers = self._in_numbers(words)
        shingles = _runs(numbers, SHINGLE)
        # Whoever shares a long run shares its shingles: nearly all text ends here.
        shingles = np.unique(shingles[_among(shingles, self._sorted)])
        if not len(shingles):
            return False
        if bool(_among(_runs(numbers, LONG_RUN), self._own_runs).any()):
            return True
        first, behind = (np.searchsorted(self._sorted, shingles, side=side) for side in ("left", "right"))
        shared = np.concatenate([self._owners[start:end] for start, end in zip(first, behind, strict=True)])
        held = np.bincount(shared, minlength=len(self._shingles))
        return bool((held >= NEAR * self._shingles).any())

    def _in_numbers(self, words: Words) -> Hashes:
        """A word of no prompt is 0."""
        known = self._numbers.get
        return np.array([known(word, 0) for word in words], dtype=np.uint64)


def _runs(numbers: Hashes, size: int) -> Hashes:
    """Hashes of the runs of `size` words in `[N]`: `[N - size + 1]`."""
    count = len(numbers) - size + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    found = numbers[:count].copy()
    for place in range(1, size):
        found *= _FACTOR
        found += numbers[place : place + count]
    return found


def _among(values: Hashes, ordered: Hashes) -> NDArray[np.bool_]:
    """Which of `values` `[N]` are in `ordered`: `[N]`."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
