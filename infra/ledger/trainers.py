"""The trainer's side of the ledger: how it takes a run over from its predecessor, and how it plans a step."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import sqlalchemy as sa

from infra.ledger.generators import answer_of, evict
from infra.ledger.ledger import Ledger
from infra.ledger.planning import balance
from infra.ledger.schema import (
    CONSUMED,
    HOLDS_BYTES,
    NO_STEP,
    PENDING,
    QUARANTINED,
    READY,
    REMAINING,
    TAKEN,
    Rows,
    checkpoints,
    database_now,
    samples,
)
from infra.records.data_path import (
    CheckpointRecord,
    ObjectRecord,
    PlannedSample,
    Ranges,
    Record,
    SampleSlot,
    StepPlan,
)
from infra.refusal import Refusal

MAX_CRASHES = 3
"""Trainer crashes at one step, with no checkpoint between them, that stop a run."""


class RepeatedCrash(Refusal):
    """The trainer crashed again and again at the same step; the message names that step's samples."""


class Wait(Record):
    """The next step cannot be planned yet."""

    step: int
    needed: int
    """Samples of that step."""
    ready: int
    """Those of them that are ready."""


class EndOfEpoch(Record):
    """Every sample of the epoch is taken, consumed or quarantined."""

    epoch: int


class Resume(Record):
    """Where a trainer resumes."""

    incarnation: int
    """Named by every write of this trainer."""
    checkpoint: CheckpointRecord | None
    """None to start from the beginning."""
    epoch: int
    """The epoch to open (idempotent) and to resume in."""
    dropped: tuple[CheckpointRecord, ...]
    """Newer checkpoints whose files do not verify; their rows are gone."""


# Planning -----------------------------------------------------------------------------------------------------------


def plan_step(
    ledger: Ledger,
    incarnation: int,
    epoch: int,
    step: int,
    *,
    ranks: int,
    micro_batches: int,
    samples_per_step: int,
    current_step: int | None = None,
) -> StepPlan | Wait | EndOfEpoch:
    """Take the samples of optimizer step `step`; steps count up over all epochs.

    Order `strict`: the first `samples_per_step` remaining samples by ordinal, once all of them are ready. Order
    `any`: the first that are ready. Either way the epoch's last step may be short, and a step is never short while
    other samples may still come. `current_step` is the step that is being trained while this one is planned
    ahead (default: `step` itself); a crash is counted there. Call it even at the end of the epoch to tell. Whoever has
    to wait has not locked the run.
    """
    current = step if current_step is None else current_step
    with ledger.read() as rows:
        run = rows.run_row()
        if (run.incarnation, run.current_step) == (incarnation, current):
            found = _ready(rows, run, epoch, step, samples_per_step)
            if isinstance(found, Wait):
                return found
    with ledger.write(incarnation) as (rows, run):
        if current != run.current_step:
            rows.update_run(current_step=current)
        found = _ready(rows, run, epoch, step, samples_per_step)
        return _take(rows, epoch, step, found, ranks, micro_batches) if isinstance(found, int) else found


def _ready(rows: Rows, run: sa.Row[Any], epoch: int, step: int, samples_per_step: int) -> int | Wait | EndOfEpoch:
    """How many samples a step can take: all that it needs."""
    # One index walk per state.
    found = ((ordinal, state) for state in REMAINING for ordinal in _first(rows, epoch, state, samples_per_step))
    remaining = sorted(found)[:samples_per_step]
    if not remaining:
        return EndOfEpoch(epoch=epoch)
    ready = sum(state == READY for _, state in remaining)
    if run.plan_order == "any" and ready < len(remaining):
        ready = min(len(remaining), len(_first(rows, epoch, READY, samples_per_step)))
    return ready if ready == len(remaining) else Wait(step=step, needed=len(remaining), ready=ready)


def _first(rows: Rows, epoch: int, state: str, limit: int) -> list[int]:
    """The lowest ordinals in a state."""
    here = rows.first(state, samples.c.ordinal, limit=limit).where(samples.c.epoch == epoch)
    return [row.ordinal for row in rows.all(here)]


def _take(rows: Rows, epoch: int, step: int, count: int, ranks: int, micro_batches: int) -> StepPlan:
    """Spread the first samples that are ready over ranks and micro-batches, and mark them as taken."""
    planned_before = rows.select(samples.c.step).where(samples.c.step.is_not(None))
    latest = rows.scalar(planned_before.order_by(samples.c.step.desc()).limit(1))
    assert latest is None or latest < step, f"step {step} planned after step {latest}"
    here = (samples.c.state == READY, samples.c.epoch == epoch)
    chosen = rows.all(rows.first(READY, samples, limit=count).where(samples.c.epoch == epoch))
    places = balance([row.tokens for row in chosen], ranks, micro_batches)
    planned = tuple(
        PlannedSample(
            epoch=epoch,
            ordinal=row.ordinal,
            sample=row.sample,
            tokens=row.tokens,
            rank=rank,
            micro_batch=micro_batch,
            object=ObjectRecord.model_validate_json(row.object),
            answer=answer_of(row),
        )
        for row, (rank, micro_batch) in zip(chosen, places, strict=True)
    )
    # All that are ready up to the last one.
    taken = rows.update(*here, samples.c.ordinal <= chosen[-1].ordinal, state=TAKEN, step=step)
    assert taken == len(chosen) == count, f"{taken} of {count} samples of step {step} taken"
    return StepPlan(step=step, epoch=epoch, micro_batches=micro_batches, samples=planned)


# Resuming -----------------------------------------------------------------------------------------------------------


def resume_run(
    ledger: Ledger,
    verify_checkpoint: Callable[[CheckpointRecord], bool],
    verify_object: Callable[[ObjectRecord], bool],
) -> Resume:
    """Take the run over in one transaction; every older trainer's writes fail from here on.

    The newest checkpoint that verifies survives. Samples trained after it are pending again; samples taken or
    ready are ready if their object still verifies, else pending. Epochs after the surviving one are closed (their
    quarantined samples stay listed), but for the next one where nothing is left of it. Verifying happens before the
    lock is taken, except for what changed since. Raises RepeatedCrash, changing nothing, at the third crash of a
    trainer at the same step.
    """
    # Each record is verified once. Frozen models are hashable, which type checkers do not see.
    checkpoint_is_whole = cast(Callable[[CheckpointRecord], bool], cache(verify_checkpoint))
    object_is_whole = cast(Callable[[ObjectRecord], bool], cache(verify_object))
    with ledger.read() as rows:
        committed, objects = rows.checkpoints(), _objects(rows)
    _newest(committed, checkpoint_is_whole)
    for _, _, record in objects:
        object_is_whole(record)
    with ledger.write() as (rows, run):
        return _take_over(rows, run, checkpoint_is_whole, object_is_whole)


def _newest(
    committed: Sequence[CheckpointRecord], is_whole: Callable[[CheckpointRecord], bool]
) -> CheckpointRecord | None:
    return next((record for record in reversed(committed) if is_whole(record)), None)


def _objects(rows: Rows) -> list[tuple[int, int, ObjectRecord]]:
    """(epoch, ordinal, object) of every sample that still has one."""
    query = rows.select(samples.c.epoch, samples.c.ordinal, samples.c.object)
    held = query.where(samples.c.state.in_((READY, TAKEN)), samples.c.object.is_not(None))
    return [(row.epoch, row.ordinal, ObjectRecord.model_validate_json(row.object)) for row in rows.all(held)]


def _take_over(
    rows: Rows,
    run: sa.Row[Any],
    checkpoint_is_whole: Callable[[CheckpointRecord], bool],
    object_is_whole: Callable[[ObjectRecord], bool],
) -> Resume:
    crashes, crash_step = _count_crash(rows, run)
    committed = rows.checkpoints()
    survivor = _newest(committed, checkpoint_is_whole)
    step = survivor.step if survivor else NO_STEP
    rows.delete_checkpoints(checkpoints.c.step > step)
    rows.give_back(samples.c.state == CONSUMED, samples.c.step > step)
    newest = rows.scalar(rows.select(sa.func.max(samples.c.epoch)).where(samples.c.state == CONSUMED))
    epoch = newest or 0
    left = rows.select(samples.c.epoch).where(
        samples.c.epoch == newest, samples.c.state.not_in((CONSUMED, QUARANTINED))
    )
    is_done = newest is not None and not rows.all(left.limit(1))
    floor = _close_later_epochs(rows, epoch + is_done)
    _return_taken(rows, object_is_whole)
    if run.plan_order == "strict":
        evict(rows, run)
    rows.update_run(
        incarnation=run.incarnation + 1,
        attempt_floor=max(floor, run.attempt_floor),
        training=True,
        finished=False,
        current_step=NO_STEP,
        crashes=crashes,
        crash_step=crash_step,
    )
    dropped = tuple(record for record in committed if record.step > step)
    return Resume(incarnation=run.incarnation + 1, checkpoint=survivor, epoch=epoch, dropped=dropped)


def _count_crash(rows: Rows, run: sa.Row[Any]) -> tuple[int, int]:
    """(crashes, step) with the last trainer's end counted, unless it finished or there was none."""
    if not run.training:
        return 0, NO_STEP
    crashes = run.crashes + 1 if run.current_step == run.crash_step else 1
    if crashes < MAX_CRASHES:
        return crashes, run.current_step
    named = ", ".join(
        f"epoch {row.epoch} ordinal {row.ordinal} (sample {row.sample}, {row.tokens} tokens)"
        for row in rows.all(rows.select(samples).where(samples.c.step == run.current_step).order_by(samples.c.ordinal))
    )
    place = f"at step {run.current_step}, which trains {named}" if named else "before its first step"
    raise RepeatedCrash(
        f"the trainer of run {rows.run!r} crashed {crashes} times {place}. "
        "Its log says why. Fix that, then resume the run"
    )


def _close_later_epochs(rows: Rows, epoch: int) -> int:
    """Remove the epochs after `epoch`; the highest attempt that their rows had.

    Their samples must not reuse those attempts when the epoch opens again: a late publish of a removed row would
    pass for the new one's.
    """
    later = (samples.c.run == rows.run, samples.c.epoch > epoch)
    highest = rows.scalar(sa.select(sa.func.max(samples.c.attempt)).where(*later)) or 0
    rows.connection.execute(sa.delete(samples).where(*later, samples.c.state != QUARANTINED))
    return highest


def _return_taken(rows: Rows, object_is_whole: Callable[[ObjectRecord], bool]) -> None:
    """Taken and ready rows become ready or pending; no consumed row holds bytes (the sweeper deletes those)."""
    rows.update(samples.c.state == CONSUMED, HOLDS_BYTES, bytes_held=0, object=None)
    rows.give_back(samples.c.state == TAKEN, samples.c.object.is_(None))
    for epoch, ordinal, record in _objects(rows):
        if not object_is_whole(record):
            rows.give_back(samples.c.epoch == epoch, samples.c.ordinal == ordinal)
    rows.update(samples.c.state == TAKEN, state=READY, step=None)


def rebuild_run(
    ledger: Ledger, checkpoint: CheckpointRecord, epoch: int, slots: Sequence[SampleSlot], consumed: Ranges
) -> None:
    """Write a lost ledger anew from a verified checkpoint and its manifest's epoch and consumed ordinals.

    The run must have been created and hold nothing. Incarnation and attempts continue from the database's clock in
    microseconds, above any number that a process of the lost ledger can hold. Raises Refusal where rows exist.
    """
    trained = {ordinal for first, last in consumed for ordinal in range(first, last + 1)}
    unknown = trained - {slot.ordinal for slot in slots}
    if unknown:
        raise Refusal(
            f"the manifest of {checkpoint.path} names ordinals {sorted(unknown)} beyond its epoch: the samples have "
            "changed since; restore them, or start a new run"
        )
    with ledger.write() as (rows, _):
        if rows.scalar(rows.select(sa.func.count())) or rows.checkpoints():
            raise Refusal(f"the ledger of run {rows.run!r} is not empty: resume it instead of rebuilding it")
        floor = int(rows.scalar(sa.select(database_now())) * 1e6)
        done, left = {"state": CONSUMED, "step": checkpoint.step}, {"state": PENDING, "step": None}
        rows.insert(
            {"epoch": epoch, "attempt": floor, **slot.model_dump(), **(done if slot.ordinal in trained else left)}
            for slot in slots
        )
        rows.insert_checkpoint(checkpoint)
        rows.update_run(incarnation=max(floor, checkpoint.incarnation), attempt_floor=floor)
