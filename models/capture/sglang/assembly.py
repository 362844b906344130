"""Puts the hidden states of chunked prefills together. Runs in SGLang's scheduler process, inside the plugin."""

from dataclasses import dataclass, field
from typing import Any

import torch

from infra.refusal import Refusal
from models.targets.model import HiddenStates


@dataclass
class _Part:
    request: Any
    chunks: list[HiddenStates] = field(default_factory=list)
    rows: int = 0
    error: Exception | None = None


class Assembly:
    """Rows of unfinished prompts, per request. A prompt in one piece is never copied."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def add(self, request: Any, start: int, rows: HiddenStates) -> HiddenStates | None:
        """Take the rows from position `start` on; all of the prompt's, `[T, K*H]` and `[T, H]`, once they are there.

        `request` is SGLang's `Req`. A prompt that starts again (retracted, or sent again after an abort) forgets what
        was there. Raises Refusal where rows before `start` were never computed here, and what `fail` was told.
        """
        total, count = len(request.origin_input_ids), len(rows.last)
        if start == 0:
            self._parts.pop(request.rid, None)
            if count == total:
                return rows
        part = self._parts.setdefault(request.rid, _Part(request))
        if start + count == total:
            del self._parts[request.rid]
        if part.error is not None:
            raise part.error
        if part.rows != start:
            raise Refusal(
                f"rows {part.rows}..{start - 1} of the prompt were not computed, but taken from a cache: start the "
                "server with --disable-radix-cache"
            )
        # The engine uses its buffers again for the next chunk.
        part.chunks.append(HiddenStates(aux=rows.aux.clone(), last=rows.last.clone()))
        part.rows += count
        if part.rows < total:
            return None
        return HiddenStates(
            aux=torch.cat([chunk.aux for chunk in part.chunks]), last=torch.cat([chunk.last for chunk in part.chunks])
        )

    def fail(self, request: Any, error: Exception) -> None:
        """Remember why an earlier chunk failed: only the last chunk's reply leaves the engine."""
        if request.rid in self._parts:
            self._parts[request.rid].error = error

    def drop_finished(self) -> None:
        """Forget prompts whose requests ended before their last chunk: aborted ones."""
        for rid in [rid for rid, part in self._parts.items() if part.request.finished()]:
            del self._parts[rid]

    def __len__(self) -> int:
        return len(self._parts)
