"""What flows between generators and trainers, and what the store must hold. For planner, tasks and docs."""

from typing import Literal

from infra.records.data_path import Record

LEDGER_TRANSACTIONS = 0.16
"""Per sample, where a generator publishes and leases eight at a time and a step has 64: a share of that exchange and
of the step's plan and release."""

CHECKPOINT_BYTES_PER_PARAMETER = 16
"""Weights, averaged weights and AdamW's two moments, in float32."""


TOP_TOKEN_BYTES = 4
PLACE_BYTES = 12
SCALE_BYTES = 4

StoredPrecision = Literal["float32", "bfloat16", "float8"]
STORED_BYTES: dict[StoredPrecision, int] = {"float32": 4, "bfloat16": 2, "float8": 1}


def bytes_per_token(aux_count: int, hidden_size: int, item_bytes: int, top_token: bool, embedded: bool = False) -> int:
    """Bytes of captured hidden states: K layer outputs, the output after the final norm, perhaps the embedding that the
    target read, with its place on three axes, perhaps the top token.

    Numbers of one byte have a scale for each of these.
    """
    row = hidden_size * item_bytes + (SCALE_BYTES if item_bytes == 1 else 0)
    return (aux_count + 1 + embedded) * row + TOP_TOKEN_BYTES * top_token + PLACE_BYTES * embedded


def stored_bytes_per_token(
    aux_count: int, hidden_size: int, dtype: StoredPrecision, top_token: bool, embedded: bool = False
) -> int:
    """The same by the name of the stored data type."""
    return bytes_per_token(aux_count, hidden_size, STORED_BYTES[dtype], top_token, embedded)


def samples_in_flight(samples_per_step: int, ranks: int, prefetch_steps: int, generator_slots: int) -> int:
    """Maximum number of samples between capture and training: every rank holds one step and the prefetched ones."""
    return max(ranks, samples_per_step) * (prefetch_steps + 1) + generator_slots


class Traffic(Record):
    """Data rates of a whole run."""

    samples_per_s: float
    tokens_per_s: float
    wire_bytes_per_s: float
    """Hidden states, once over the wire: out of the generators, into the ranks."""
    store_link_bytes_per_s: float
    """Each way over the link of a machine that holds a part of the store, where no sample is read on its own part's
    machine."""
    generator_bytes_per_s: float
    """Out of one generator."""
    rank_bytes_per_s: float
    """Into one rank."""
    ledger_transactions_per_s: float


def traffic(
    samples_per_s: float, tokens_per_sample: float, bytes_of_token: int, generators: int, ranks: int, machines: int = 1
) -> Traffic:
    """Data rates of a run that trains on `machines` machines, from its samples per second."""
    wire = samples_per_s * tokens_per_sample * bytes_of_token
    return Traffic(
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens_per_sample,
        wire_bytes_per_s=wire,
        store_link_bytes_per_s=wire / machines,
        generator_bytes_per_s=wire / max(1, generators),
        rank_bytes_per_s=wire / max(1, ranks),
        ledger_transactions_per_s=samples_per_s * LEDGER_TRANSACTIONS,
    )
