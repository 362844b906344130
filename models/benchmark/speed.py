"""Speed of plain and speculative decoding, and the check that it is possible."""

from infra.records.acceptance import SpeedRecord

TOLERANCE = 1.03
"""A speed-up can exceed the acceptance length by measurement noise only, this much at most."""


def speed_record(tokens: int, plain_s: float, speculative_s: float, acceptance_length: float) -> SpeedRecord:
    """Judge one measurement.

    Args:
        tokens: emitted after the prefill tokens, the same text both ways.
        plain_s: seconds of the target alone for them.
        speculative_s: seconds of speculative decoding for them.
        acceptance_length: of the same conversations.
    """
    assert tokens >= 0
    assert plain_s > 0
    assert speculative_s > 0
    speedup = plain_s / speculative_s
    possible = speedup <= TOLERANCE * acceptance_length
    note = f"{tokens} tokens after the prefill, batch 1, after warm-up"
    if not possible:
        note = (
            f"not published: a measured speed-up of {speedup:.2f} cannot come from an acceptance length of "
            f"{acceptance_length:.2f}; measure again on an idle machine, with more benchmark.timed_tokens"
        )
    return SpeedRecord(
        tokens=tokens,
        acceptance_length=acceptance_length,
        plain_tokens_per_s=tokens / plain_s,
        speculative_tokens_per_s=tokens / speculative_s if possible else None,
        speedup=speedup if possible else None,
        flagged=not possible,
        note=note,
    )
