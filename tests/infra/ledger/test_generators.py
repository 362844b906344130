from collections.abc import Callable

import pytest
import sqlalchemy as sa

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples
from infra.ledger.trainers import resume_run
from infra.records.data_path import BufferRecord, Lease, ObjectRecord, SampleSlot

Slots = Callable[..., list[SampleSlot]]
Captured = Callable[[Ledger, Lease], ObjectRecord]


def expire(ledger: Ledger, ordinal: int, seconds: float = 3600) -> None:
    """Let this much time pass for one lease; a negative number is a clock that jumps back."""
    change = sa.update(samples).where(samples.c.ordinal == ordinal, samples.c.state == "leased")
    with ledger._engine.begin() as connection:
        connection.execute(change.values(lease_expires=samples.c.lease_expires - seconds))


def ordinals(leases: list[Lease]) -> list[int]:
    return [lease.ordinal for lease in leases]


def test_creating_a_run_again(ledger: Ledger, url: str, slots: Slots) -> None:
    values = {"budget_bytes": 100, "bytes_per_token": 10, "lease_seconds": 60, "max_attempts": 2}
    ledger.create_run(**values, order="strict")
    for other in ({"budget_bytes": 99}, {"budget_bytes": 150, "bytes_per_token": 11}):
        with pytest.raises(
            ValueError, match=r"budget_bytes: 100 there, 99 here.*another name|bytes_per_token: 10 there"
        ):
            ledger.create_run(**(values | other), order="strict")
    with pytest.raises(ValueError, match="must be positive"):
        ledger.create_run(**(values | {"max_attempts": 0}), order="strict")
    ledger.open_epoch(None, 0, slots(5, 5, 5))
    assert ordinals(ledger.lease("g", 3)) == [0, 1]
    ledger.create_run(**(values | {"budget_bytes": 150}), order="strict")
    assert ordinals(ledger.lease("g", 3)) == [2], "resumed with room for more generators"
    with Ledger.open(url, "other") as other, pytest.raises(ValueError, match="holds no run 'other'"):
        other.lease("g", 1)
    with pytest.raises(ValueError, match="slash"):
        Ledger.open(url, "a/b")


def test_runs_do_not_see_each_other(ledger: Ledger, url: str, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(9))
    with Ledger.open(url, "other") as other:
        other.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        other.open_epoch(None, 0, slots(8, 2))
        assert ordinals(ledger.lease("g", 8)) == [0]
        assert ordinals(other.lease("g", 8)) == [0, 1]
        assert (ledger.held_keys(), other.held_keys()) == ({"run/0/0/1"}, {"other/0/0/1", "other/0/1/1"})
        assert (ledger.progress().total, other.progress().total) == (1, 2)


def test_opening_an_epoch(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1, 2))
    ledger.lease("g", 1)
    ledger.open_epoch(None, 0, slots(1, 2))
    assert ledger.progress(0).model_dump(exclude_defaults=True) == {"leased": 1, "pending": 1, "bytes_held": 10}
    with pytest.raises(ValueError, match="other samples"):
        ledger.open_epoch(None, 0, slots(1, 3))
    with pytest.raises(ValueError, match="other samples"):
        ledger.open_epoch(None, 0, slots(1))
    ledger.open_epoch(None, 2, slots(1))
    with pytest.raises(ValueError, match="in turn"):
        ledger.open_epoch(None, 1, slots(1))


def test_lease_is_in_order_and_never_skips(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(3, 4, 5, 1))
    first = ledger.lease("a", 1)
    assert first == [Lease(epoch=0, ordinal=0, sample=100, tokens=3, attempt=1, nbytes=30)]
    assert ordinals(ledger.lease("b", 9)) == [1], "30 bytes are free: sample 2 does not fit, sample 3 would"
    assert ledger.lease("b", 9) == []
    ledger.fail(first[0], "out of memory")
    assert ordinals(ledger.lease("b", 9)) == [0]
    assert ledger.progress().bytes_held == 70


def test_epochs_are_leased_in_turn(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1))
    ledger.open_epoch(None, 1, slots(1, 1))
    assert [(lease.epoch, lease.ordinal) for lease in ledger.lease("g", 2)] == [(0, 0), (1, 0)]


def test_expired_leases_lose(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    late, kept = ledger.lease("slow", 2)
    expire(ledger, 0)
    assert ordinals(ledger.lease("fast", 8)) == [0], "the lease that has not expired stays"
    assert ledger.publish(Publication(late, captured(ledger, late)))
    ledger.fail(late, "too late to count")
    assert ledger.progress().model_dump(exclude_defaults=True) == {"leased": 2, "bytes_held": 20}
    assert not ledger.publish(Publication(kept, captured(ledger, kept)))
    assert ledger.publish(Publication(kept, captured(ledger, kept))), "published already"
    assert ledger.held_keys() == {"run/0/0/2", "run/0/1/1"}


def test_an_expired_lease_that_nobody_took_back_still_publishes(
    ledger: Ledger, slots: Slots, captured: Captured
) -> None:
    ledger.open_epoch(None, 0, slots(1))
    (lease,) = ledger.lease("slow", 1)
    expire(ledger, 0)
    assert not ledger.publish(Publication(lease, captured(ledger, lease)))
    assert ledger.lease("other", 1) == []


def test_a_lease_ends_in_time_although_the_clock_has_jumped_back(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1))
    ledger.lease("dead", 1)
    jumped_by = 2 * 3600
    expire(ledger, 0, -jumped_by)
    assert ledger.lease("alive", 1) == [], "its owner may be alive"
    expire(ledger, 0, 61)
    assert ordinals(ledger.lease("alive", 1)) == [0]


def test_renew_and_give_back_touch_own_leases_only(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1, 1, 1))
    ledger.lease("a", 2)
    ledger.lease("b", 1)
    for ordinal in range(3):
        expire(ledger, ordinal)
    assert ledger.renew("a") == 2
    assert ordinals(ledger.lease("c", 8)) == [2]
    assert ledger.give_back("a") == 2
    assert ledger.progress().model_dump(exclude_defaults=True) == {"leased": 1, "pending": 2, "bytes_held": 10}


def test_failures_quarantine_and_expiries_do_not(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    for _ in range(5):
        ledger.lease("g", 1)
        expire(ledger, 0)
    for error in ("first", "second"):
        assert ledger.quarantined() == []
        (lease,) = ledger.lease("g", 1)
        ledger.fail(lease, error)
    assert lease.attempt == 7
    assert ledger.quarantined() == [(0, 0, 100, "second")]
    assert ordinals(ledger.lease("g", 8)) == [1]
    assert ledger.progress().attempts == 2
    ledger.open_epoch(None, 1, slots(1, 1))
    assert ledger.quarantined() == [(0, 0, 100, "second"), (1, 0, 100, "second")], "for good: in every epoch"


def test_a_failed_sample_is_left_to_others_for_the_length_of_a_lease(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1, 1))
    ledger.fail(ledger.lease("a", 1, has_others=True)[0], "not finite")
    assert ledger.lease("a", 9, has_others=True) == [], "the sample after it is not leased either: none is skipped"
    assert ordinals(ledger.lease("b", 1, has_others=True)) == [0]
    assert ledger.give_back("b") == 1
    ledger.fail(ledger.lease("b", 1, has_others=True)[0], "not finite")
    assert [(bad.ordinal, bad.error) for bad in ledger.quarantined()] == [(0, "not finite")]
    ledger.fail(ledger.lease("a", 1, has_others=True)[0], "not finite")
    with ledger._engine.begin() as connection:
        connection.execute(sa.update(samples).values(lease_expires=samples.c.lease_expires - 3600))
    assert ordinals(ledger.lease("a", 1, has_others=True)) == [1], "nobody else has tried it: the same one again"


def test_a_lone_generator_tries_a_failed_sample_again_at_once(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1))
    ledger.fail(ledger.lease("a", 1)[0], "not finite")
    assert ordinals(ledger.lease("a", 1)) == [0]


def test_publish_refuses_what_the_lease_does_not_cover(ledger: Ledger, slots: Slots, captured: Captured) -> None:
    ledger.open_epoch(None, 0, slots(1, 2))
    small, large = ledger.lease("g", 2)
    with pytest.raises(ValueError, match="does not belong"):
        ledger.publish(Publication(small, captured(ledger, large)))
    with pytest.raises(ValueError, match="20 bytes does not belong"):
        ledger.publish(Publication(small, captured(ledger, large).model_copy(update={"key": ledger.key(small)})))


def test_a_finished_run_leases_nothing(ledger: Ledger, slots: Slots) -> None:
    ledger.open_epoch(None, 0, slots(1))
    incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
    assert not ledger.finished()
    ledger.finish(incarnation)
    assert ledger.finished()
    assert ledger.lease("g", 1) == []


def test_an_answer_stays_with_its_sample(ledger: Ledger, slots: Slots) -> None:
    """It takes what it really has, is captured again with the same text, and later epochs know it."""
    ledger.open_epoch(None, 0, slots(5, 5, 5))
    first, second = ledger.lease("g", 9)
    assert (first.answer, first.nbytes) == (None, 50)
    buffer = BufferRecord(name="aux", nbytes=30, xxh3="0")
    record = ObjectRecord(key=ledger.key(first), location="memory", buffers=(buffer,))
    assert not ledger.publish(Publication(first, record, answer=(7, 8)))
    assert ledger.progress().bytes_held == 30 + 50
    late = ObjectRecord(key=ledger.key(second), location="memory", buffers=(buffer,))
    ledger.give_back("g")
    assert ledger.publish(Publication(second, late, answer=(9,))), "a lease that is lost answers nothing"
    resume_run(ledger, lambda _: True, lambda _: False)
    again, second, *_ = ledger.lease("g", 9)
    assert (again.answer, again.tokens, again.nbytes, second.answer) == ((7, 8), 3, 30, None)
    ledger.open_epoch(None, 0, slots(5, 5, 5))
    with pytest.raises(ValueError, match="other samples"):
        ledger.open_epoch(None, 0, slots(2, 5, 5))
    ledger.open_epoch(None, 1, slots(5, 5, 5))
    with ledger.read() as rows:
        later = rows.all(rows.select(samples.c.tokens, samples.c.answer).where(samples.c.epoch == 1))
    assert [tuple(row) for row in later] == [(3, "[7, 8]"), (5, None), (5, None)]
