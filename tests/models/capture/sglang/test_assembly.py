"""Chunks become prompts again, whatever order they come in, and nothing is kept of requests that ended."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.refusal import Refusal
from models.capture.sglang.assembly import Assembly
from models.targets.hidden_states import HiddenStates


@dataclass(frozen=True)
class Request:
    rid: str
    length: int


def rows(request: Request, start: int, count: int) -> HiddenStates:
    """Row r of request i is (i, r): nothing else could be mistaken for it."""
    place = torch.arange(start, start + count, dtype=torch.float32)
    mark = torch.full_like(place, float(request.rid))
    top = 1000 * mark.int() + place.int()
    return HiddenStates(aux=torch.stack([mark, place, -place], -1), last=torch.stack([mark, place], -1), top=top)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int | str]]:
    """(request, chunk length), (request, "retract") and (request, "abort"), interleaved."""
    moves = st.one_of(st.integers(1, 9), st.sampled_from(["retract", "abort"]))
    return draw(st.lists(st.tuples(st.integers(0, 3), moves), max_size=60))


@given(histories())
def test_what_is_whole_is_exact(history: list[tuple[int, int | str]]) -> None:
    assembly, serial, aborted = Assembly(), 0, []
    requests, reached = {}, {}
    for slot, move in history:
        if slot not in requests:
            serial += 1
            requests[slot], reached[slot] = Request(str(serial), 5 + serial % 17), 0
        request = requests[slot]
        if move == "retract":
            reached[slot] = 0
            continue
        if move == "abort":
            aborted.append(request.rid)
            del requests[slot]
            continue
        assembly.drop(aborted)
        count = min(int(move), request.length - reached[slot])
        part = rows(request, reached[slot], count)
        whole = assembly.add(request.rid, request.length, reached[slot], part)
        for tensor in part.named().values():
            tensor.fill_(-1)  # the engine uses its buffers again
        reached[slot] += count
        assert (whole is not None) == (reached[slot] == request.length)
        if whole is not None:
            if count < request.length:
                expected = rows(request, 0, request.length)
                assert torch.equal(whole.aux, expected.aux)
                assert torch.equal(whole.last, expected.last)
                assert torch.equal(whole.top, expected.top)
            del requests[slot]
    assembly.drop(aborted)
    assert len(assembly) <= len(requests)


def test_a_prompt_in_one_piece_is_not_copied() -> None:
    request = Request("1", 6)
    part = rows(request, 0, 6)
    assert Assembly().add(request.rid, 6, 0, part) is part


def test_rows_from_a_cache_are_named() -> None:
    assembly, request = Assembly(), Request("1", 6)
    with pytest.raises(Refusal, match=r"rows 0\.\.3 of the text were not computed"):
        assembly.add(request.rid, 6, 4, rows(request, 4, 2))
    assert len(assembly) == 0


def test_the_reason_of_an_early_chunk_is_told_with_the_last() -> None:
    assembly, request = Assembly(), Request("1", 6)
    assert assembly.add(request.rid, 6, 0, rows(request, 0, 2)) is None
    assembly.fail(request.rid, MemoryError("out of memory"))
    for start in (2, 4):
        with pytest.raises(MemoryError, match="out of memory"):
            assembly.add(request.rid, 6, start, rows(request, start, 2))
    assert len(assembly) == 0
