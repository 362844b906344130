from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import event

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger, StaleIncarnation
from infra.ledger.trainers import EndOfEpoch, RepeatedCrash, Wait, plan_step, rebuild_run, resume_run
from infra.records.data_path import CheckpointRecord, Lease, ObjectRecord, SampleSlot, StepPlan

Slots = Callable[..., list[SampleSlot]]
Captured = Callable[[Ledger, Lease], ObjectRecord]


def start(ledger: Ledger) -> int:
    return resume_run(ledger, lambda _: True, lambda _: True).incarnation


def capture(ledger: Ledger, captured: Captured, limit: int = 99) -> list[Lease]:
    leases = ledger.lease("g", limit)
    assert not ledger.publish(*(Publication(lease, captured(ledger, lease)) for lease in leases))
    return leases


def plan(ledger: Ledger, incarnation: int, step: int, size: int = 2, **extra: int) -> StepPlan | Wait | EndOfEpoch:
    epoch = extra.pop("epoch", 0)
    return plan_step(ledger, incarnation, epoch, step, ranks=1, micro_batches=1, samples_per_step=size, **extra)


def planned(answer: StepPlan | Wait | EndOfEpoch) -> list[int]:
    assert isinstance(answer, StepPlan)
    return [sample.ordinal for sample in answer.samples]


def train(ledger: Ledger, captured: Captured, incarnation: int, step: int, size: int = 2) -> None:
    """Capture, plan, copy out and release one step of epoch 0."""
    capture(ledger, captured, size)
    ledger.release(incarnation, 0, *planned(plan(ledger, incarnation, step, size)))


def checkpoint(step: int, incarnation: int) -> CheckpointRecord:
    return CheckpointRecord(step=step, path=f"step-{step}", manifest_hash=f"hash{step}", incarnation=incarnation)


def test_strict_waits_for_the_first_and_ends_short(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1, 1))
    incarnation = start(ledger)
    first, second, third = ledger.lease("g", 3)
    for lease in (second, third):
        ledger.publish(Publication(lease, captured(ledger, lease)))
    assert plan(ledger, incarnation, 1) == Wait(step=1, needed=2, ready=1)
    ledger.publish(Publication(first, captured(ledger, first)))
    answer = plan_step(ledger, incarnation, 0, 1, ranks=2, micro_batches=1, samples_per_step=2)
    assert planned(answer) == [0, 1]
    assert isinstance(answer, StepPlan)
    assert [sample.rank for sample in answer.samples] == [0, 1]
    assert answer.samples[0].object == captured(ledger, first)
    assert planned(plan(ledger, incarnation, 2)) == [2]
    assert plan(ledger, incarnation, 3) == EndOfEpoch(epoch=0)


def test_any_takes_what_is_ready(url: str, slots: Slots, captured: Captured) -> None:
    with Ledger.open(url, "any") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=1, order="any")
        ledger.open_epoch(None, 0, slots(1, 1, 1, 1, 1))
        incarnation = start(ledger)
        leases = ledger.lease("g", 5)
        ledger.publish(Publication(leases[3], captured(ledger, leases[3])))
        assert plan(ledger, incarnation, 1) == Wait(step=1, needed=2, ready=1)
        ledger.publish(Publication(leases[1], captured(ledger, leases[1])))
        assert planned(plan(ledger, incarnation, 1)) == [1, 3]
        ledger.fail(leases[2], "broken")
        ledger.publish(Publication(leases[4], captured(ledger, leases[4])))
        assert isinstance(plan(ledger, incarnation, 2), Wait), "sample 0 may still come"
        ledger.publish(Publication(leases[0], captured(ledger, leases[0])))
        assert planned(plan(ledger, incarnation, 2)) == [0, 4]
        assert plan(ledger, incarnation, 3) == EndOfEpoch(epoch=0)


def test_quarantine_moves_the_next_samples_up(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1, 1))
    incarnation = start(ledger)
    for _ in range(2):
        (lease,) = ledger.lease("g", 1)
        ledger.fail(lease, "broken")
    capture(ledger, captured)
    assert planned(plan(ledger, incarnation, 1)) == [1, 2]


def test_bytes_are_freed_by_release_not_by_commit(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(5, 5, 5, 5))
    incarnation = start(ledger)
    capture(ledger, captured)
    plan(ledger, incarnation, 1)
    assert ledger.lease("g", 1) == []
    ledger.release(incarnation, 0, 0)
    ledger.release(incarnation, 0, 0)
    assert [lease.ordinal for lease in ledger.lease("g", 9)] == [2]
    assert ledger.consumed_ranges(1) == (0, ((0, 1),))
    assert ledger.commit(incarnation, checkpoint(1, incarnation)) == 2
    assert ledger.commit(incarnation, checkpoint(1, incarnation)) == 0
    assert ledger.checkpoints() == [checkpoint(1, incarnation)]
    ledger.release(incarnation, 0, 1)
    assert ledger.progress().model_dump(exclude_defaults=True) == {
        "pending": 1,
        "leased": 1,
        "consumed": 2,
        "bytes_held": 50,
    }
    with pytest.raises(AssertionError, match="not taken"):
        ledger.release(incarnation, 0, 3)


def test_steps_only_count_up(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    incarnation = start(ledger)
    capture(ledger, captured)
    plan(ledger, incarnation, 5, size=1)
    with pytest.raises(AssertionError, match="step 5 planned after step 5"):
        plan(ledger, incarnation, 5, size=1)


def test_a_stale_trainer_writes_nothing(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    old = start(ledger)
    capture(ledger, captured)
    plan(ledger, old, 1, size=1)
    new = start(ledger)
    before = ledger.progress()
    for write in (
        lambda: plan(ledger, old, 2),
        lambda: ledger.release(old, 0, 0),
        lambda: ledger.commit(old, checkpoint(1, old)),
        lambda: ledger.finish(old),
        lambda: ledger.open_epoch(old, 1, slots(1)),
    ):
        with pytest.raises(StaleIncarnation, match=f"incarnation {new}; this is {old}"):
            write()
    assert ledger.progress() == before
    assert not ledger.finished()
    assert ledger.checkpoints() == []


def test_resume_goes_back_to_the_newest_whole_checkpoint(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(*[1] * 8))
    one = start(ledger)
    for step in (1, 2, 3):
        train(ledger, captured, one, step)
        ledger.commit(one, checkpoint(step, one))
    capture(ledger, captured)
    assert planned(plan(ledger, one, 4, size=1)) == [6]
    ledger.open_epoch(one, 1, slots(1))
    lost = "run/0/7/1"
    resume = resume_run(ledger, lambda c: c.step == 1, lambda o: o.key != lost)
    assert resume.checkpoint == checkpoint(1, one)
    assert resume.dropped == (checkpoint(2, one), checkpoint(3, one))
    assert (resume.incarnation, resume.epoch) == (one + 1, 0)
    assert ledger.checkpoints() == [checkpoint(1, one)]
    assert ledger.progress().model_dump(exclude_defaults=True) == {
        "consumed": 2,
        "pending": 5,
        "ready": 1,
        "bytes_held": 10,
    }
    capture(ledger, captured)
    assert planned(plan(ledger, resume.incarnation, 2, size=3)) == [2, 3, 4]


def test_resume_without_any_whole_checkpoint_starts_over(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    one = start(ledger)
    train(ledger, captured, one, 1)
    ledger.commit(one, checkpoint(1, one))
    ledger.finish(one)
    resume = resume_run(ledger, lambda _: False, lambda _: True)
    assert (resume.checkpoint, resume.dropped) == (None, (checkpoint(1, one),))
    assert ledger.progress().pending == 2
    assert not ledger.finished()


def test_a_reopened_epoch_reuses_no_key(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1))
    start(ledger)
    capture(ledger, captured)
    ledger.open_epoch(None, 1, slots(1))
    (late,) = ledger.lease("slow", 1)
    two = start(ledger)
    ledger.open_epoch(two, 1, slots(1))
    (again,) = ledger.lease("fast", 1)
    assert (again.epoch, again.ordinal) == (late.epoch, late.ordinal)
    assert ledger.publish(Publication(late, captured(ledger, late)))
    assert not ledger.publish(Publication(again, captured(ledger, again)))


def test_quarantine_outlives_the_closing_of_its_epoch(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1))
    start(ledger)
    capture(ledger, captured)
    ledger.open_epoch(None, 1, slots(1, 1))
    for _ in range(2):
        ledger.fail(ledger.lease("g", 1)[0], "broken")
    two = start(ledger)
    assert ledger.progress(1).model_dump(exclude_defaults=True) == {"quarantined": 1, "attempts": 2}
    ledger.open_epoch(two, 1, slots(1, 1))
    assert ledger.quarantined() == [(1, 0, 100, "broken")]
    assert ledger.progress(1).total == 2


def test_resume_evicts_what_would_block_the_samples_before(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(5, 5, 5, 5, 5))
    one = start(ledger)
    train(ledger, captured, one, 1)
    capture(ledger, captured)
    assert ledger.progress().bytes_held == 100
    resume = resume_run(ledger, lambda _: True, lambda _: True)
    assert (ledger.progress().pending, ledger.progress().ready) == (5, 0)
    assert [lease.ordinal for lease in capture(ledger, captured)] == [0, 1]
    assert planned(plan(ledger, resume.incarnation, 1)) == [0, 1]


def test_an_object_published_while_resume_verifies_is_verified_too(
    ledger: Ledger, slots: Slots, captured: Captured
) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    start(ledger)
    first, second = ledger.lease("g", 2)
    ledger.publish(Publication(first, captured(ledger, first)))
    asked: list[str] = []

    def verify(record: ObjectRecord) -> bool:
        asked.append(record.key)
        if len(asked) == 1:
            assert not ledger.publish(Publication(second, captured(ledger, second)))
        return record.key == "run/0/0/1"

    resume_run(ledger, lambda _: True, verify)
    assert asked == ["run/0/0/1", "run/0/1/1"]
    assert ledger.progress().model_dump(exclude_defaults=True) == {"ready": 1, "pending": 1, "bytes_held": 10}


def test_three_crashes_at_one_step_stop_the_run(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 2, 1))
    for _ in range(3):
        incarnation = start(ledger)
        capture(ledger, captured)
        plan(ledger, incarnation, 1, size=1, current_step=1)
        plan(ledger, incarnation, 2, size=1, current_step=1)
        plan(ledger, incarnation, 3, size=1, current_step=2)
    for _ in range(2):
        with pytest.raises(RepeatedCrash, match=r"3 times at step 2, which trains epoch 0 ordinal 1 \(sample 101, 2 t"):
            start(ledger)
    assert ledger.progress().taken == 3, "nothing changed"
    ledger.forget_crashes()
    start(ledger)


def test_crashes_elsewhere_or_after_a_checkpoint_are_counted_anew(
    ledger: Ledger, slots: Slots, captured: Captured
) -> None:
    ledger.open_epoch(None, 0, slots(1, 1, 1))
    for step in (1, 1, 2, 2):
        incarnation = start(ledger)
        capture(ledger, captured)
        plan(ledger, incarnation, step)
    incarnation = start(ledger)
    plan(ledger, incarnation, 2)
    ledger.commit(incarnation, checkpoint(2, incarnation))
    plan(ledger, start(ledger), 9, current_step=2)
    plan(ledger, start(ledger), 10, current_step=2)
    with pytest.raises(RepeatedCrash):
        start(ledger)


def test_three_crashes_before_the_first_step(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1))
    for _ in range(3):
        start(ledger)
    with pytest.raises(RepeatedCrash, match="before its first step"):
        start(ledger)


def test_a_lost_ledger_is_rebuilt(ledger: Ledger, slots: Slots, captured: Captured, tmp_path: Path) -> None:
    ledger.open_epoch(None, 0, slots(1, 1, 1, 1))
    one = start(ledger)
    train(ledger, captured, one, 1)
    epoch, consumed = ledger.consumed_ranges(1)
    (late,) = ledger.lease("slow", 1)
    with Ledger.open(f"sqlite:///{tmp_path / 'new.sqlite'}", "run") as new:
        new.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        with pytest.raises(ValueError, match=r"\[9\] beyond its epoch"):
            rebuild_run(new, checkpoint(1, one), epoch, slots(1, 1, 1, 1), ((9, 9),))
        rebuild_run(new, checkpoint(1, one), epoch, slots(1, 1, 1, 1), consumed)
        with pytest.raises(ValueError, match="not empty"):
            rebuild_run(new, checkpoint(1, one), epoch, slots(1, 1, 1, 1), ())
        resume = resume_run(new, lambda _: True, lambda _: True)
        assert (resume.checkpoint, resume.epoch) == (checkpoint(1, one), 0)
        (again,) = new.lease("fast", 1)
        assert again.ordinal == late.ordinal
        assert new.publish(Publication(late, captured(new, late)))
        with pytest.raises(StaleIncarnation):
            plan(new, one, 2)
        assert not new.publish(Publication(again, captured(new, again)))
        assert planned(plan(new, resume.incarnation, 2, size=1)) == [2]


def test_a_run_that_no_process_has_entered_has_no_crashes_to_forget(url: str) -> None:
    with Ledger.open(url, "interrupted early") as ledger:
        ledger.forget_crashes()
        assert ledger.progress().total == 0


def test_generators_of_a_resumed_run_outlast_its_last_trainer(ledger: Ledger) -> None:
    """The final checkpoint of a finished run is damaged: its samples are captured again, by whoever runs by then."""
    ledger.finish(start(ledger))
    assert ledger.finished()
    ledger.reopen()
    assert not ledger.finished()
    ledger.finish(start(ledger))
    assert ledger.finished()


def test_sizes_beyond_32_bits(url: str, captured: Captured) -> None:
    """Of each sample, of their sum, and of the budget that it is compared with."""
    nbytes = 3 * 2**30
    slots = [SampleSlot(ordinal=i, sample=i, tokens=2**16) for i in range(4)]
    with Ledger.open(url, "run") as ledger:
        ledger.create_run(
            budget_bytes=3 * nbytes, bytes_per_token=nbytes // 2**16, lease_seconds=60, max_attempts=2, order="strict"
        )
        ledger.open_epoch(None, 0, slots)
        incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
        leases = ledger.lease("g", 4)
        assert [lease.nbytes for lease in leases] == [nbytes] * 3
        assert not ledger.publish(*(Publication(lease, captured(ledger, lease)) for lease in leases))
        assert ledger.progress().bytes_held == 3 * nbytes
        ledger.release(incarnation, 0, *planned(plan(ledger, incarnation, 1, 2)))
        assert len(ledger.lease("g", 4)) == 1
        resume_run(ledger, lambda _: True, lambda _: True)
        assert ledger.progress().pending == 3, "the first two come back, and the last had their room"


def test_an_epoch_that_was_opened_in_part(
    url: str, slots: Slots, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its third transaction; a generator has captured the first rows by then."""
    monkeypatch.setattr("infra.ledger.ledger.OPENED", 2)
    insertions = count(1)

    def interrupt_the_third_insertion(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO samples") and next(insertions) == 3:
            raise KeyboardInterrupt

    epoch = slots(*[1] * 7)
    with Ledger.open(url, "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        first = start(ledger)
        event.listen(ledger._engine, "before_cursor_execute", interrupt_the_third_insertion)
        with pytest.raises(KeyboardInterrupt):
            ledger.open_epoch(first, 0, epoch)
        event.remove(ledger._engine, "before_cursor_execute", interrupt_the_third_insertion)
        assert len(capture(ledger, captured)) == 4
        second = start(ledger)
        ledger.open_epoch(second, 0, epoch)
        assert (ledger.progress().ready, ledger.progress().pending) == (4, 3)
        capture(ledger, captured)
        assert planned(plan(ledger, second, 1, 7)) == list(range(7))
        with pytest.raises(StaleIncarnation):
            ledger.open_epoch(first, 0, epoch)
        with pytest.raises(ValueError, match="other samples"):
            ledger.open_epoch(second, 0, epoch[:5])
