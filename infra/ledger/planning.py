"""Pure functions for step plans and byte budgets."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from infra.planner.traffic import samples_in_flight
from infra.refusal import Refusal


def balance(tokens: Sequence[int], ranks: int, micro_batches: int) -> list[tuple[int, int]]:
    """Spread samples over ranks x micro-batches so that all hold about the same number of tokens.

    `tokens[i]` is sample i's length; the answer's entry i is its (rank, micro_batch). Longest first, each to the
    emptiest place, ties to the earlier micro-batch, then the lower rank (Graham 1969: at most 4/3 of the best maximum).
    Depends on nothing but its arguments.
    """
    assert ranks >= 1
    assert micro_batches >= 1
    places = [(0, micro_batch, rank) for micro_batch in range(micro_batches) for rank in range(ranks)]
    assigned = [(0, 0)] * len(tokens)
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, micro_batch, rank = places[0]
        assigned[index] = (rank, micro_batch)
        heapq.heapreplace(places, (load + tokens[index], micro_batch, rank))
    return assigned


class InFlight(NamedTuple):
    """What is between capture and training at most.

    Every rank holds one step and `prefetch_steps` more; `generator_slots` is generators x samples leased and in flight.
    """

    bytes_per_token: int
    longest_sample_tokens: int
    samples_per_step: int
    ranks: int
    prefetch_steps: int
    generator_slots: int

    @property
    def samples(self) -> int:
        return samples_in_flight(self.samples_per_step, self.ranks, self.prefetch_steps, self.generator_slots)

    @property
    def nbytes(self) -> int:
        """With each sample as long as the longest."""
        return self.samples * self.longest_sample_tokens * self.bytes_per_token


def check_budget(budget_bytes: int, needs: InFlight, setting: str = "transport.budget_mib") -> None:
    """Refuse a budget, given by `setting`, that could stall the run; Refusal carries the numbers.

    What is in flight includes what progress needs in either order: that any one step fits whole
    (infra.ledger.generators).
    """
    if budget_bytes >= needs.nbytes:
        return
    raise Refusal(
        f"the transport's budget of {_mib(budget_bytes)} is too small: the longest sample has "
        f"{needs.longest_sample_tokens} tokens x {needs.bytes_per_token} bytes = "
        f"{_mib(needs.longest_sample_tokens * needs.bytes_per_token)}, and up to {needs.samples} samples are in flight "
        f"({max(needs.ranks, needs.samples_per_step)} per step x {needs.prefetch_steps + 1} steps + "
        f"{needs.generator_slots} being captured), which is {_mib(needs.nbytes)}. Set "
        f"{setting}={-(-needs.nbytes // 2**20)} or more, or lower data.max_tokens, training.samples_per_step, "
        "training.prefetch_steps, generator.lease_samples or generator.sglang.requests_in_flight"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
