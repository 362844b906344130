"""The ledger against a plain model of it, over random histories of kills, losses and restores.

A rule makes any number of single writes, so trainers die and generators stall between any two. `weights` is the
multiset of (epoch, ordinal) that a trainer's weights have seen; it is saved with each checkpoint and restored with it.
"""

import shutil
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import Model, Place, Trainer
from ledger_world import BYTES_PER_TOKEN, EPOCHS, MAX_ATTEMPTS, World

from infra.ledger.generators import answer_of
from infra.ledger.ledger import StaleIncarnation
from infra.ledger.schema import samples
from infra.ledger.trainers import plan_step
from infra.records.data_path import CheckpointRecord, SampleSlot
from infra.servers.postgres import PostgresServer

OWNERS = ("a", "b")
TRAINER_MOVES = ("go on", "plan ahead", "save", "commit")
GENERATOR_MOVES = ("capture", "publish late", "put, no more", "fail", "expire", "renew", "give back", "sweep")
MISFORTUNES = (
    *("the trainer dies", "a second trainer starts", "generators stall"),
    *("an object is lost", "a checkpoint is damaged", "the ledger is lost"),
)
MOVES = (*["go on"] * 10, *["save", "commit"] * 2, *TRAINER_MOVES, *GENERATOR_MOVES, *MISFORTUNES)


class LedgerMachine(World, RuleBasedStateMachine):
    @initialize(
        strict=st.booleans(),
        tokens=st.lists(st.integers(1, 4), min_size=3, max_size=8),
        size=st.integers(1, 3),
        slack=st.integers(0, 6),
    )
    def start(self, strict: bool, tokens: list[int], size: int, slack: int) -> None:
        self.size = size
        self.slots = [SampleSlot(ordinal=i, sample=100 + i, tokens=count) for i, count in enumerate(tokens)]
        self.model = Model(strict, (max(tokens) * size + slack) * BYTES_PER_TOKEN)
        self.open_ledger("first")
        self.open_epoch(None, 0)

    @rule(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), min_size=10, max_size=40))
    def live(self, moves: list[tuple[str, int]]) -> None:
        """Single writes of everybody, in an order that may occur, and misfortunes between them."""
        for move, pick in moves:
            if move in MISFORTUNES:
                self.misfortune(move, pick)
            elif move in GENERATOR_MOVES:
                self.generator_moves(OWNERS[pick % 2], move, pick)
            elif self.trainer:
                self.trainer_moves(self.trainer, move, pick)
            else:
                self.start_trainer()

    def trainer_moves(self, trainer: Trainer, move: str, pick: int) -> None:
        if move == "save" and trainer.trained > trainer.saved and not trainer.saving:
            self.save(trainer)
        if move == "plan ahead":
            if "lost" not in trainer.stages.values():
                self.plan(trainer, ranks=1 + pick % 3)
        elif trainer.saving and (move == "commit" or (move == "save" and pick % 2)):
            self.commit(trainer, trainer.saving)
        elif move == "go on":
            for _ in range(1 + pick % 12):
                if self.trainer:
                    self.go_on(self.trainer, ranks=1 + pick % 3)

    def generator_moves(self, owner: str, move: str, pick: int) -> None:
        if move == "capture":
            self.capture(owner, 1 + pick % 6, pick % 7)
        elif move in ("renew", "give back"):
            self.capture("a", 1 + pick % 2, 0)
            self.capture("b", 1 + pick % 2, 0)
            self.renew_or_give_back(owner, back=move == "give back")
            if pick % 3 == 0:
                self.generator_moves(owner, "publish late", pick)
        elif move == "expire":
            for place in self.model.of("leased")[: 1 + pick % 3]:
                self.expire(place)
        elif move == "sweep":
            self.sweep()
        elif self.leases and move == "put, no more":
            self.write_object(self.leases[pick % len(self.leases)])
        elif move == "fail":
            for _ in range(1 + pick % MAX_ATTEMPTS):
                self.capture(owner, 1, 0)
                if self.leases:
                    self.fail(self.leases.pop(-(1 + pick % 3 % len(self.leases))))
        elif move == "publish late":
            count = min(1 + pick % 5, len(self.leases))
            self.publish(*(self.leases.pop(0 if pick % 2 else pick % len(self.leases)) for _ in range(count)))

    def misfortune(self, what: str, pick: int) -> None:
        committed = self.model.committed
        if what == "the trainer dies":
            self.trainer = None
        elif what == "a second trainer starts":
            self.start_trainer()
        elif what == "generators stall":
            self.capture("a", 6, 1)
            self.expire_all()
            self.capture("b", 6, pick % 6)
            self.generator_moves("a", "publish late", pick)
        elif what == "an object is lost" and self.store:
            self.store.pop(sorted(self.store)[pick % len(self.store)])
        elif what == "a checkpoint is damaged" and committed:
            self.files.pop(committed[pick % len(committed)].path, None)
        elif what == "the ledger is lost" and any(record.path in self.files for record in committed):
            self.lose_the_ledger()

    @precondition(lambda self: len(self.incarnations) > 1)
    @rule(pick=st.integers(0, 99), what=st.integers(0, 4))
    def write_as_a_stale_trainer(self, pick: int, what: int) -> None:
        old = self.incarnations[pick % (len(self.incarnations) - 1)]
        record = CheckpointRecord(step=1, path="stale", manifest_hash="stale", incarnation=old)
        writes = (
            lambda: plan_step(self.ledger, old, 0, 99, ranks=1, micro_batches=1, samples_per_step=self.size),
            lambda: self.ledger.release(old, 0, 0),
            lambda: self.ledger.commit(old, record),
            lambda: self.ledger.finish(old),
            lambda: self.ledger.open_epoch(old, 0, self.slots),
        )
        with pytest.raises(StaleIncarnation):
            writes[what]()

    # What always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        columns = (samples.c.state, samples.c.failures, samples.c.bytes_held, samples.c.step, samples.c.answer)
        with self.ledger.read() as rows:
            table = rows.all(rows.select(samples.c.epoch, samples.c.ordinal, *columns))
            there = {(row.epoch, row.ordinal): (*tuple(row)[2:-1], answer_of(row)) for row in table}
        known = {p: (r.state, r.failures, r.held, r.step, r.answer) for p, r in self.model.rows.items()}
        for rows in (there, known):
            # Nobody asks for the answer of a sample that is quarantined.
            rows.update({p: (*row[:-1], None) for p, row in rows.items() if row[0] == "quarantined"})
        assert there == known
        assert self.ledger.checkpoints() == sorted(self.model.committed, key=lambda record: record.step)
        held = {(place, row.attempt) for place, row in self.model.rows.items() if row.held}
        assert self.ledger.held_keys() == {f"run/{epoch}/{ordinal}/{attempt}" for (epoch, ordinal), attempt in held}
        assert self.ledger.progress().bytes_held == self.model.held() <= self.model.budget
        if self.model.strict:
            assert self.model.held() + self.model.holes() <= self.model.budget, "invariant I"

    def teardown(self) -> None:
        try:
            if hasattr(self, "ledger"):
                self.finish_the_run()
                self.ledger.close()
        finally:
            shutil.rmtree(self.folder)

    def finish_the_run(self) -> None:
        """No more misfortune: the run must come to its end, every sample trained once or quarantined and listed."""
        self.expire_all()
        idle = 0
        while (work := self.one_round()) != "done":
            self.the_ledger_is_the_model()
            idle = idle + 1 if work == "idle" else 0
            assert idle < 3, f"deadlock: {self.model}"
        trainer = self.trainer
        assert trainer is not None
        while trainer.saving or trainer.trained > trainer.saved:
            self.commit(trainer, trainer.saving) if trainer.saving else self.save(trainer)
        self.ledger.finish(trainer.incarnation)
        self.the_ledger_is_the_model()
        self.check_the_promise(trainer.weights)

    def check_the_promise(self, weights: Counter[Place]) -> None:
        listed = {(bad.epoch, bad.ordinal) for bad in self.ledger.quarantined()}
        assert all(bad.error == "broken" for bad in self.ledger.quarantined())
        for place in ((epoch, slot.ordinal) for epoch in range(EPOCHS) for slot in self.slots):
            if place in listed:
                assert weights[place] == 0, f"{place} is quarantined and trained"
            elif place not in self.forgotten:
                assert weights[place] == 1, f"{place} was trained {weights[place]} times"
            assert weights[place] <= 1
        assert self.ledger.lease("a", 6) == []


def lived(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=6,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


LedgerMachine.TestCase.settings = lived(15)
TestLedgerMachine = LedgerMachine.TestCase


class LongLedgerMachine(LedgerMachine):
    pass


LongLedgerMachine.TestCase.settings = lived(60)
TestLongLedgerMachine = pytest.mark.long(LongLedgerMachine.TestCase)


class PostgresMachine(LedgerMachine):
    server: ClassVar[PostgresServer]

    def new_database(self, name: str) -> str:
        return self.server.make_database(f"{self.folder.name}-{name}")


@pytest.fixture(autouse=True, scope="module")
def server(postgres: PostgresServer) -> None:
    PostgresMachine.server = postgres


PostgresMachine.TestCase.settings = lived(5)
TestPostgresMachine = PostgresMachine.TestCase
