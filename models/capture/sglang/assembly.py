"""Prompts that SGLang prefills in several chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from infra.refusal import Refusal
from models.targets.hidden_states import HiddenStates


@dataclass
class _UnfinishedPrompt:
    chunks: list[HiddenStates] = field(default_factory=list)
    rows: int = 0
    error: Exception | None = None


class Assembly:
    """Rows of unfinished prompts by request id. A prompt that is prefilled in one chunk is not copied."""

    def __init__(self) -> None:
        self._parts: dict[str, _UnfinishedPrompt] = {}

    def add(self, request: str, total: int, start: int, rows: HiddenStates) -> HiddenStates | None:
        """Add the rows from position `start` of a prompt of `total` tokens; returns the whole prompt's once complete.

        A prompt that restarts (retracted, or sent again after an abort) drops its earlier rows. Raises Refusal if rows
        before `start` are missing, and the error that was passed to `fail`.
        """
        count = len(rows.last)
        if start == 0:
            self._parts.pop(request, None)
            if count == total:
                return rows
        part = self._parts.setdefault(request, _UnfinishedPrompt())
        if start + count == total:
            del self._parts[request]
        if part.error is not None:
            raise part.error
        if part.rows != start:
            raise Refusal(
                f"rows {part.rows}..{start - 1} of the prompt were not computed, but taken from a cache: start the "
                "server with --disable-radix-cache"
            )
        # The memory of the rows is used again for a later prefill.
        part.chunks.append(HiddenStates(**{name: tensor.clone() for name, tensor in rows.named().items()}))
        part.rows += count
        if part.rows < total:
            return None
        named = [chunk.named() for chunk in part.chunks]
        return HiddenStates(**{name: torch.cat([chunk[name] for chunk in named]) for name in named[0]})

    def fail(self, request: str, error: Exception) -> None:
        """Keep the error of an early chunk, because the engine only sends the last chunk's reply."""
        self._parts.setdefault(request, _UnfinishedPrompt()).error = error

    def drop(self, requests: Iterable[str]) -> None:
        """Forget prompts whose last chunk will not come."""
        for request in requests:
            self._parts.pop(request, None)

    def __len__(self) -> int:
        return len(self._parts)
