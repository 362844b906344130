"""Assembles the hidden states of chunked prefills, in SGLang's scheduler process."""

from dataclasses import dataclass, field
from typing import Any

import torch

from infra.refusal import Refusal
from models.targets.model import HiddenStates


@dataclass
class _UnfinishedPrompt:
    request: Any
    chunks: list[HiddenStates] = field(default_factory=list)
    rows: int = 0
    error: Exception | None = None


class Assembly:
    """Rows of unfinished prompts by request. A prompt that is prefilled in one chunk is not copied."""

    def __init__(self) -> None:
        self._parts: dict[str, _UnfinishedPrompt] = {}

    def add(self, request: Any, start: int, rows: HiddenStates) -> HiddenStates | None:
        """Add the rows from position `start`; returns the whole prompt's, `[T, K*H]` and `[T, H]`, once complete.

        `request` is SGLang's `Req`. A prompt that restarts (retracted, or sent again after an abort) drops its earlier
        rows. Raises Refusal if rows before `start` are missing, and the error that was passed to `fail`.
        """
        total, count = len(request.origin_input_ids), len(rows.last)
        if start == 0:
            self._parts.pop(request.rid, None)
            if count == total:
                return rows
        part = self._parts.setdefault(request.rid, _UnfinishedPrompt(request))
        if start + count == total:
            del self._parts[request.rid]
        if part.error is not None:
            raise part.error
        if part.rows != start:
            raise Refusal(
                f"rows {part.rows}..{start - 1} of the prompt were not computed, but taken from a cache: start the "
                "server with --disable-radix-cache"
            )
        # The engine reuses its buffers for the next chunk.
        part.chunks.append(HiddenStates(aux=rows.aux.clone(), last=rows.last.clone()))
        part.rows += count
        if part.rows < total:
            return None
        return HiddenStates(
            aux=torch.cat([chunk.aux for chunk in part.chunks]), last=torch.cat([chunk.last for chunk in part.chunks])
        )

    def fail(self, request: Any, error: Exception) -> None:
        """Keep the error of an earlier chunk, because the engine only sends the last chunk's reply."""
        if request.rid in self._parts:
            self._parts[request.rid].error = error

    def drop_finished(self) -> None:
        """Drop prompts of requests that were aborted before their last chunk."""
        for rid in [rid for rid, part in self._parts.items() if part.request.finished()]:
            del self._parts[rid]

    def __len__(self) -> int:
        return len(self._parts)
