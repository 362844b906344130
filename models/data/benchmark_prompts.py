"""Finds benchmark prompts in training text, exactly or nearly.

The rule looks at words only and ignores case, punctuation and white space. A document contains a prompt if

- it shares 13 consecutive words with it, except words that several prompts share, such as an instruction;
- or one of its messages contains 80 % of the 5-word shingles of a prompt with 8 words or more;
- or what it is asked first is a shorter prompt, word for word: "Thanks" or "Yes" later on is none.

GPT-3's decontamination used runs of 13 words too (arXiv 2005.14165, appendix C).
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
MIN_WORDS = 8
"""Shorter prompts are only compared with whole messages."""
NEAR = 0.8

Words = tuple[str, ...]
Hashes = NDArray[np.uint64]

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
"""Written without spaces, so each character counts as a word."""
_WORD = re.compile(f"[{_IDEOGRAPHS}]|[^\\W_{_IDEOGRAPHS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIELDS = ("turns", "question", "problem", "prompt", "instruction")
"""Prompt fields of well-known benchmarks, in addition to those of training text."""


def words_of(text: str) -> Words:
    """The words, case-folded."""
    return tuple(_WORD.findall(text.casefold()))


def read_excluded_prompts(sources: Iterable[str]) -> Iterator[str]:
    """Every prompt of benchmark files: what a conversation asks before its first answer, plain text, or a prompt field.

    Raises Refusal for unreadable sources and records without a prompt.
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
    if document.tokens and not document.messages:
        raise Refusal(f"{place}: tokens cannot be compared with training text: give the prompts' text")
    return list(document.opening)


class BenchmarkPrompts:
    """Prompts that training text must not contain."""

    def __init__(self, prompts: Iterable[str]):
        distinct = list(dict.fromkeys(words for prompt in prompts if (words := words_of(prompt))))
        self._count = len(distinct)
        self._short = frozenset(words for words in distinct if len(words) < MIN_WORDS)
        numbers: dict[str, int] = {}
        for words in distinct:
            for word in words:
                numbers.setdefault(word, _number(word))
        self._numbers = numbers
        long = [np.unique(_runs(self._in_numbers(words), SHINGLE)) for words in distinct if len(words) >= MIN_WORDS]
        self._shingles = np.array([len(shingles) for shingles in long], dtype=np.int64)
        """Number of shingles of each long prompt."""
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

    def occur_in(self, messages: Sequence[str], opening: Sequence[str] | None = None) -> bool:
        """Whether one of the messages contains a prompt. Short ones are looked for in `opening`; default: in all."""
        if not self._count:
            return False
        short = any(words_of(message) in self._short for message in (messages if opening is None else opening))
        return short or any(self._occurs_in(words_of(message)) for message in messages)

    def _occurs_in(self, words: Words) -> bool:
        numbers = self._in_numbers(words)
        shingles = _runs(numbers, SHINGLE)
        # Text that shares a long run also shares its shingles, so nearly all text returns here.
        shingles = np.unique(shingles[_among(shingles, self._sorted)])
        if not len(shingles):
            return False
        if bool(_among(_runs(numbers, LONG_RUN), self._own_runs).any()):
            return True
        starts, ends = (np.searchsorted(self._sorted, shingles, side=side) for side in ("left", "right"))
        shared = np.concatenate([self._owners[start:end] for start, end in zip(starts, ends, strict=True)])
        counts = np.bincount(shared, minlength=len(self._shingles))
        return bool((counts >= NEAR * self._shingles).any())

    def _in_numbers(self, words: Words) -> Hashes:
        """Numbers of the words; 0 for words that occur in no prompt."""
        known = self._numbers.get
        return np.array([known(word, 0) for word in words], dtype=np.uint64)


def _runs(numbers: Hashes, size: int) -> Hashes:
    """`[N - size + 1]` rolling hashes of `size` consecutive words in `[N]`."""
    count = len(numbers) - size + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    hashes = numbers[:count].copy()
    for place in range(1, size):
        hashes *= _FACTOR
        hashes += numbers[place : place + count]
    return hashes


def _among(values: Hashes, ordered: Hashes) -> NDArray[np.bool_]:
    """`[N]` bool: which of `values` `[N]` are in the sorted array `ordered`."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
