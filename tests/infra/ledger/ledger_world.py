"""A run around the ledger: generators' objects, a trainer's memory and files. Each write is checked with the model."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_model import Model, Place, Row, Saved, Trainer

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.recapture import RecaptureError, lose, take_again
from infra.ledger.schema import samples
from infra.ledger.trainers import EndOfEpoch, RepeatedCrash, Resume, Wait, plan_step, rebuild_run, resume_run
from infra.records.data_path import (
    BufferRecord,
    CheckpointRecord,
    Lease,
    ObjectRecord,
    PlannedSample,
    Ranges,
    SampleSlot,
    StepPlan,
)

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Thousands of commits are synchronised; on a busy disk that takes minutes."""
EPOCHS = 3
BYTES_PER_TOKEN = 10
MAX_ATTEMPTS = 2
MANY = 500
"""More moves than the steps that are planned at a time can take."""


def ordinals_in(ranges: Ranges) -> set[int]:
    return {ordinal for first, last in ranges for ordinal in range(first, last + 1)}


class World:
    """What a history of the run has left so far, and the single writes that processes make."""

    ledger: Ledger
    model: Model
    slots: list[SampleSlot]
    size: int

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-", dir=MEMORY))
        self.trainer: Trainer | None = None
        self.store: dict[str, ObjectRecord] = {}
        self.files: dict[str, Saved] = {}
        self.leases: list[Lease] = []
        self.keys: set[str] = set()
        self.incarnations: list[int] = []
        self.serial = count()
        self.forgotten: set[Place] = set()
        self.answers: dict[int, tuple[int, ...]] = {}
        self.rebuilt = False
        self.history: dict[tuple[int, int, frozenset[Place]], list[Place]] = {}

    def open_ledger(self, name: str) -> None:
        self.ledger = Ledger.open(self.new_database(name), "run")
        self.ledger.create_run(
            budget_bytes=self.model.budget,
            bytes_per_token=BYTES_PER_TOKEN,
            lease_seconds=600,
            max_attempts=MAX_ATTEMPTS,
            order="strict" if self.model.strict else "any",
        )

    def new_database(self, name: str) -> str:
        """The URL of an empty database."""
        return f"sqlite:///{self.folder / name}.sqlite"

    def open_epoch(self, incarnation: int | None, epoch: int) -> None:
        self.ledger.open_epoch(incarnation, epoch, self.slots)
        bad = {self.model.rows[place].sample for place in self.model.of("quarantined")}
        answered = {row.sample: row for row in self.model.rows.values() if row.answer is not None}
        for slot in self.slots:
            state = "quarantined" if slot.sample in bad else "pending"
            row = Row(sample=slot.sample, size=slot.tokens * BYTES_PER_TOKEN, state=state)
            if slot.sample in answered:
                row.size, row.answer = answered[slot.sample].size, answered[slot.sample].answer
            self.model.rows.setdefault((epoch, slot.ordinal), row)

    def lease(self, owner: str, limit: int) -> list[Lease]:
        leases = self.ledger.lease(owner, limit)
        assert [(lease.epoch, lease.ordinal) for lease in leases] == self.model.lease(limit)
        for lease in leases:
            row = self.model.rows[lease.epoch, lease.ordinal]
            assert (lease.sample, lease.nbytes, lease.answer) == (row.sample, row.size, row.answer)
            assert self.ledger.key(lease) not in self.keys, "an object's key was given out twice"
            self.keys.add(self.ledger.key(lease))
            row.state, row.held, row.attempt, row.owner = "leased", row.size, lease.attempt, owner
        self.leases += leases
        return leases

    def capture(self, owner: str, limit: int, captured: int) -> list[Lease]:
        """Lease, publish the first `captured`, and stall with the others."""
        leases = self.lease(owner, limit)
        for lease in leases[:captured]:
            self.leases.remove(lease)
        self.publish(*leases[:captured])
        return leases

    def write_object(self, lease: Lease) -> ObjectRecord:
        nbytes = lease.nbytes if self.answer(lease) is None else max(1, lease.tokens - 1) * BYTES_PER_TOKEN
        buffer = BufferRecord(name="aux", nbytes=nbytes, xxh3=f"{lease.sample:016x}")
        record = ObjectRecord(key=self.ledger.key(lease), location="memory", buffers=(buffer,))
        self.store[record.key] = record
        return record

    def answer(self, lease: Lease) -> tuple[int, ...] | None:
        """Samples of even numbers are prompts: what the target answers, another text at every attempt."""
        return (lease.epoch, lease.attempt) if lease.sample % 2 == 0 and lease.answer is None else None

    def publish(self, *leases: Lease) -> None:
        """Any lease ever given out may be published, however late, and beside others that are still held or not."""
        rows = [self.leased_row(lease) for lease in leases]
        publications = [Publication(one, self.write_object(one), answer=self.answer(one)) for one in leases]
        lost = self.ledger.publish(*publications)
        assert lost == [one for one, row in zip(publications, rows, strict=True) if row is None]
        for (_, record, *_, answer), row in zip(publications, rows, strict=True):
            if row is None:
                del self.store[record.key]
            else:
                row.state, row.object, row.expired = "ready", record, False
                if answer is not None:
                    row.answer, row.size, row.held = answer, record.nbytes, record.nbytes

    def fail(self, lease: Lease) -> None:
        row = self.leased_row(lease)
        self.ledger.fail(lease, "broken")
        if row is not None:
            row.failures += 1
            row.to("quarantined" if row.failures >= MAX_ATTEMPTS else "pending")

    def renew_or_give_back(self, owner: str, back: bool) -> None:
        own = [row for row in self.model.rows.values() if row.state == "leased" and row.owner == owner]
        assert (self.ledger.give_back if back else self.ledger.renew)(owner) == len(own)
        for row in own:
            row.expired = False
            if back:
                row.to("pending")

    def sweep(self) -> None:
        present = set(self.store)
        for key in present - self.ledger.held_keys():
            del self.store[key]

    def leased_row(self, lease: Lease) -> Row | None:
        row = self.model.rows.get((lease.epoch, lease.ordinal))
        return row if row and row.state == "leased" and row.attempt == lease.attempt else None

    def expire_all(self) -> None:
        """Every generator that stalled is dead for long."""
        for place in self.model.of("leased"):
            self.expire(place)

    def expire(self, place: Place) -> None:
        change = sa.update(samples).where(samples.c.epoch == place[0], samples.c.ordinal == place[1])
        with self.ledger._engine.begin() as connection:
            connection.execute(change.values(lease_expires=samples.c.lease_expires - 1e6))
        self.model.rows[place].expired = True

    def resume(self) -> Resume:
        return resume_run(
            self.ledger, lambda record: record.path in self.files, lambda record: self.store.get(record.key) == record
        )

    def go_on(self, trainer: Trainer, ranks: int) -> None:
        """The trainer's next write, where it neither plans ahead nor saves."""
        unreleased = next(self.planned("planned", "lost", "copied", "deleted"), None)
        if unreleased:
            self.advance(trainer, unreleased)
        elif trainer.plans:
            self.train(trainer)
        elif isinstance(self.plan(trainer, ranks), Wait):
            self.capture("a", 3, 3)

    def plan(self, trainer: Trainer, ranks: int) -> Wait | EndOfEpoch | StepPlan:
        step, expected = trainer.planned + 1, self.model.plan(trainer.epoch, self.size)
        self.model.current = trainer.trained + 1
        answer = plan_step(
            self.ledger,
            trainer.incarnation,
            trainer.epoch,
            step,
            ranks=ranks,
            micro_batches=2,
            samples_per_step=self.size,
            current_step=trainer.trained + 1,
        )
        if isinstance(answer, StepPlan):
            places = [(sample.epoch, sample.ordinal) for sample in answer.samples]
            assert places == expected
            self.take(trainer, answer, places)
        else:
            assert expected == ("wait" if isinstance(answer, Wait) else "end")
            if isinstance(answer, EndOfEpoch) and trainer.epoch + 1 < EPOCHS:
                trainer.epoch += 1
                self.open_epoch(trainer.incarnation, trainer.epoch)
        return answer

    def take(self, trainer: Trainer, plan: StepPlan, places: list[Place]) -> None:
        assert sorted(s.ordinal for r in range(3) for m in range(2) for s in plan.of(r, m)) == [p[1] for p in places]
        trainer.plans.append(plan)
        trainer.planned = plan.step
        for sample, place in zip(plan.samples, places, strict=True):
            row = self.model.rows[place]
            assert (sample.sample, sample.object, sample.answer) == (row.sample, row.object, row.answer)
            assert sample.tokens * BYTES_PER_TOKEN == row.size
            if sample.answer is not None:
                # Whatever died in between, and in every epoch.
                assert self.answers.setdefault(sample.sample, sample.answer) == sample.answer
            row.state, row.step = "taken", plan.step
        if self.model.strict:
            # One that is quarantined later shortens the step that it was in, or leaves its epoch with a step less.
            missing = frozenset(place for place in self.model.of("quarantined") if place[0] <= trainer.epoch)
            assert self.history.setdefault((trainer.epoch, plan.step, missing), places) == places

    def planned(self, *stages: str) -> Iterator[PlannedSample]:
        """Samples of planned steps that are at one of these stages."""
        if self.trainer:
            for plan in self.trainer.plans:
                for sample in plan.samples:
                    if self.trainer.stages.get((sample.epoch, sample.ordinal), "planned") in stages:
                        yield sample

    def advance(self, trainer: Trainer, sample: PlannedSample) -> None:
        """Copy an object out, delete it, tell the ledger: one of these at a time."""
        place = (sample.epoch, sample.ordinal)
        stage = trainer.stages.get(place, "planned")
        if stage == "planned":
            if self.store.get(sample.object.key) == sample.object:
                trainer.stages[place] = "copied"
            elif self.model.strict:
                self.lose(trainer, sample)
            else:
                self.trainer = None  # what is lost here is captured again after the restart
        elif stage == "lost":
            self.take_again(trainer, sample)
        elif stage == "copied":
            self.store.pop(sample.object.key, None)
            trainer.stages[place] = "deleted"
        else:
            self.ledger.release(trainer.incarnation, *place)
            self.model.rows[place].held, self.model.rows[place].object = 0, None
            trainer.stages[place] = "released"

    def lose(self, trainer: Trainer, sample: PlannedSample) -> None:
        """The trainer finds an object gone, and looks which others are gone too."""
        place = (sample.epoch, sample.ordinal)
        ready = ((it, self.model.rows[it].object) for it in self.model.of("ready"))
        gone = [it for it, record in ready if record is None or record.key not in self.store]
        assert lose(self.ledger, trainer.incarnation, sample.object.key, lambda: set(self.store)) == 1 + len(gone)
        for it in (place, *gone):
            self.model.rows[it].to("pending")
        trainer.stages[place] = "lost"

    def take_again(self, trainer: Trainer, sample: PlannedSample) -> None:
        place, plan = (sample.epoch, sample.ordinal), next(plan for plan in trainer.plans if sample in plan.samples)
        row = self.model.rows[place]
        if row.state == "quarantined":
            with pytest.raises(RecaptureError, match="broken"):
                take_again(self.ledger, trainer.incarnation, sample, plan.step, sample.object.key)
            self.trainer = None
            return
        record = take_again(self.ledger, trainer.incarnation, sample, plan.step, sample.object.key)
        assert record == row.object
        if record is None:
            self.capture("a", 1, 1)
            return
        row.state, row.step = "taken", plan.step
        again = tuple(s.model_copy(update={"object": record}) if s == sample else s for s in plan.samples)
        trainer.plans[trainer.plans.index(plan)] = plan.model_copy(update={"samples": again})
        trainer.stages[place] = "planned"

    def train(self, trainer: Trainer) -> None:
        plan = trainer.plans.pop(0)
        trainer.weights.update((sample.epoch, sample.ordinal) for sample in plan.samples)
        trainer.trained = plan.step

    def save(self, trainer: Trainer) -> None:
        """Write the files of a checkpoint; training may go on before it is committed."""
        step, path = trainer.trained, f"{trainer.incarnation}-{trainer.trained}"
        record = CheckpointRecord(step=step, path=path, manifest_hash=path, incarnation=trainer.incarnation)
        epoch, consumed = self.ledger.consumed_ranges(step)
        assert {(epoch, o) for o in ordinals_in(consumed)} == {place for place in trainer.weights if place[0] == epoch}
        assert all(this[1] + 1 < following[0] for this, following in pairwise(consumed))
        trainer.saving = Saved(record, Counter(trainer.weights), epoch, consumed)
        trainer.saved = step
        self.files[path] = trainer.saving

    def commit(self, trainer: Trainer, saving: Saved) -> None:
        model, record = self.model, saving.record
        trained = [place for place in model.of("taken") if (model.rows[place].step or 0) <= record.step]
        assert self.ledger.commit(trainer.incarnation, record) == len(trained)
        for place in trained:
            model.rows[place].state = "consumed"
        model.committed.append(record)
        model.crash = (0, -1)
        trainer.saving = None

    def start_trainer(self) -> None:
        """After a crash, or a second trainer beside one that is not dead yet."""
        if self.model.crashes()[0] >= 3:
            before = self.ledger.progress()
            with pytest.raises(RepeatedCrash):
                self.resume()
            assert self.ledger.progress() == before
            self.ledger.forget_crashes()
            self.model.training = False
        resume = self.resume()
        survivor = self.model.resume(self.files, self.store)
        assert resume.checkpoint == survivor
        step = survivor.step if survivor else 0
        weights = self.files[survivor.path].weights if survivor else Counter[Place]()
        assert resume.incarnation not in self.incarnations
        self.incarnations.append(resume.incarnation)
        if survivor is None and self.forgotten:
            self.history.clear()
        if self.rebuilt:
            # A rebuilt ledger knows one epoch's answers only. They are gone if training restarts before that epoch.
            rows = (row for row in self.model.rows.values() if row.state != "quarantined")
            there = {row.sample for row in rows if row.answer is not None}
            self.answers = {sample: answer for sample, answer in self.answers.items() if sample in there}
        self.trainer = Trainer(resume.incarnation, resume.epoch, step, Counter(weights), planned=step, saved=step)
        self.open_epoch(resume.incarnation, resume.epoch)
        assert set(self.model.of("consumed")) <= set(weights)

    def lose_the_ledger(self) -> None:
        """Its trainer dies with it; generators go on with leases of the lost one."""
        self.trainer = None
        saved = [self.files[record.path] for record in self.model.committed if record.path in self.files][-1]
        self.forgotten.update(self.model.of("quarantined"))
        self.history.clear()
        self.answers.clear()
        self.rebuilt = True
        self.ledger.close()
        self.model = Model(self.model.strict, self.model.budget, committed=[saved.record])
        self.open_ledger(f"rebuilt-{len(self.incarnations)}-{next(self.serial)}")
        rebuild_run(self.ledger, saved.record, saved.epoch, self.slots, saved.consumed)
        consumed = ordinals_in(saved.consumed)
        for slot in self.slots:
            row = Row(sample=slot.sample, size=slot.tokens * BYTES_PER_TOKEN)
            if slot.ordinal in consumed:
                row.state, row.step = "consumed", saved.record.step
            self.model.rows[saved.epoch, slot.ordinal] = row

    def one_round(self) -> str:
        """Everybody does what there is to do; `done` at the end of the last epoch, `idle` when there was nothing."""
        if self.trainer is None:
            self.start_trainer()
        leases = self.capture("a", 6, 6)
        assert self.trainer is not None
        if "lost" in self.trainer.stages.values():
            # No step is planned while one waits for a sample to be captured again.
            self.go_on(self.trainer, ranks=1)
            return "busy" if leases or not self.trainer or "lost" not in self.trainer.stages.values() else "idle"
        answer = self.plan(self.trainer, ranks=1)
        for _ in range(MANY):
            if self.trainer and self.trainer.plans:
                self.go_on(self.trainer, ranks=1)
        assert not self.trainer or not self.trainer.plans, f"deadlock: {self.model}"
        if self.trainer and isinstance(answer, EndOfEpoch) and answer.epoch == EPOCHS - 1:
            return "done"
        return "busy" if leases or not isinstance(answer, Wait) else "idle"
