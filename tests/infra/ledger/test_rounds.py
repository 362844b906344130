"""Rounds of capture and training in turns: when a round is captured, and what a committed round gives back."""

from collections.abc import Callable

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.rounds import free_consumed, round_is_captured, trainer_has_turn
from infra.ledger.trainers import StepPlan, plan_step, resume_run
from infra.records.data_path import CheckpointRecord, Lease, ObjectRecord, SampleSlot

Slots = Callable[..., list[SampleSlot]]
Captured = Callable[[Ledger, Lease], ObjectRecord]


def test_a_round_is_captured_when_the_next_sample_does_not_fit(
    ledger: Ledger, slots: Slots, captured: Captured
) -> None:
    incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
    ledger.open_epoch(incarnation, 0, slots(4, 4, 3))
    assert not round_is_captured(ledger)
    assert trainer_has_turn(ledger)
    ledger.excuse(incarnation)
    assert not trainer_has_turn(ledger)
    leases = ledger.lease("g", 8)
    assert len(leases) == 2  # 80 of 100 bytes
    assert not round_is_captured(ledger)
    for lease in leases:
        ledger.publish(Publication(lease, captured(ledger, lease)))
    assert round_is_captured(ledger)
    plan = plan_step(ledger, incarnation, 0, 1, ranks=1, micro_batches=1, samples_per_step=2)
    assert isinstance(plan, StepPlan)
    ledger.commit(incarnation, CheckpointRecord(step=1, path="one", manifest_hash="x", incarnation=incarnation))
    assert round_is_captured(ledger)  # what is trained holds its bytes until the round ends
    free_consumed(ledger, incarnation)
    assert ledger.progress().bytes_held == 0
    assert ledger.held_keys() == set()
    assert not round_is_captured(ledger)
    (lease,) = ledger.lease("g", 8)
    ledger.publish(Publication(lease, captured(ledger, lease)))
    assert round_is_captured(ledger)  # nothing is pending


def test_a_crash_within_a_round_loses_no_capture(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
    ledger.open_epoch(incarnation, 0, slots(3, 3, 3))
    for lease in ledger.lease("g", 8):
        ledger.publish(Publication(lease, captured(ledger, lease)))
    plan_step(ledger, incarnation, 0, 1, ranks=1, micro_batches=1, samples_per_step=2)
    resume_run(ledger, lambda _: True, lambda _: True)
    assert ledger.progress().ready == 3
    assert round_is_captured(ledger)


def test_what_is_captured_of_the_next_epoch_survives_the_next_trainer(
    ledger: Ledger, slots: Slots, captured: Captured
) -> None:
    incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
    ledger.open_epoch(incarnation, 0, slots(3))
    (lease,) = ledger.lease("g", 8)
    ledger.publish(Publication(lease, captured(ledger, lease)))
    plan_step(ledger, incarnation, 0, 1, ranks=1, micro_batches=1, samples_per_step=1)
    ledger.commit(incarnation, CheckpointRecord(step=1, path="one", manifest_hash="x", incarnation=incarnation))
    ledger.open_epoch(incarnation, 1, slots(3))
    free_consumed(ledger, incarnation)
    (lease,) = ledger.lease("g", 8)
    ledger.publish(Publication(lease, captured(ledger, lease)))
    assert resume_run(ledger, lambda _: True, lambda _: True).epoch == 0
    assert ledger.progress(1).ready == 1
