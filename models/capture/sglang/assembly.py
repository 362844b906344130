"""Texts that SGLang computes in several pieces: chunks of a prompt, and the steps of an answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from infra.refusal import Refusal
from models.targets.hidden_states import HiddenStates


@dataclass
class _UnfinishedText:
    pieces: list[tuple[HiddenStates, slice]] = field(default_factory=list)
    """Rows of batches."""
    rows: int = 0
    error: Exception | None = None


class Assembly:
    """Rows of unfinished texts by request id. A prompt that is prefilled in one chunk is not copied."""

    def __init__(self) -> None:
        self._parts: dict[str, _UnfinishedText] = {}

    def add(self, request: str, total: int | None, start: int, rows: HiddenStates) -> HiddenStates | None:
        """Add the rows from position `start`; returns the whole text's once there are `total` of them.

        `total`: None where it is not known yet, see `take`. A text that restarts (retracted, or sent again after an
        abort) drops its earlier rows. Raises Refusal if rows before `start` are missing, and the error that was passed
        to `fail`.
        """
        count = len(rows.last)
        if start == 0:
            self._parts.pop(request, None)
            if count == total:
                return rows
        part = self._parts.setdefault(request, _UnfinishedText())
        if start + count == total:
            del self._parts[request]
        if part.error is not None:
            raise part.error
        if part.rows != start:
            raise Refusal(
                f"rows {part.rows}..{start - 1} of the text were not computed, but taken from a cache: start the "
                "server with --disable-radix-cache"
            )
        # The memory of the rows is used again for a later batch.
        kept = HiddenStates(**{name: tensor.clone() for name, tensor in rows.named().items()})
        part.pieces.append((kept, slice(None)))
        part.rows += count
        return _joined(part, part.rows) if part.rows == total else None

    def append(self, rows: Mapping[str, int], step: HiddenStates) -> None:
        """Add the next row of several texts, whose numbers in `step` are given. `step` lives as long as they do."""
        for request, row in rows.items():
            part = self._parts.get(request)
            if part is not None:  # it ended otherwise, and the engine has computed ahead
                part.pieces.append((step, slice(row, row + 1)))
                part.rows += 1

    def take(self, request: str, total: int) -> HiddenStates:
        """The first `total` rows of a text that has ended; rows that the engine computed ahead are left out.

        Raises the error that was passed to `fail`.
        """
        part = self._parts.pop(request, _UnfinishedText())
        if part.error is not None:
            raise part.error
        assert part.rows >= total, f"{part.rows} of {total} rows were computed"
        return _joined(part, total)

    def fail(self, request: str, error: Exception) -> None:
        """Keep the error of an early piece, because the engine only sends the last one's reply."""
        self._parts.setdefault(request, _UnfinishedText()).error = error

    def drop(self, requests: Iterable[str]) -> None:
        """Forget texts whose last piece will not come."""
        for request in requests:
            self._parts.pop(request, None)

    def __len__(self) -> int:
        return len(self._parts)


def _joined(text: _UnfinishedText, total: int) -> HiddenStates:
    names = text.pieces[0][0].named()
    rows = {name: [getattr(batch, name)[rows] for batch, rows in text.pieces] for name in names}
    return HiddenStates(**{name: torch.cat(parts)[:total] for name, parts in rows.items()})
