"""The ledger in plain Python: what `test_ledger_machine.py` compares the real one with."""

from collections import Counter
from dataclasses import dataclass, field

from infra.records.data_path import CheckpointRecord, ObjectRecord, Ranges, StepPlan

Place = tuple[int, int]


@dataclass
class Row:
    """What the model knows of one (epoch, ordinal)."""

    sample: int
    size: int
    state: str = "pending"
    failures: int = 0
    held: int = 0
    step: int | None = None
    attempt: int | None = None
    owner: str | None = None
    expired: bool = False
    object: ObjectRecord | None = None
    answer: tuple[int, ...] | None = None
    """Kept whatever becomes of the row."""

    def to(self, state: str) -> None:
        self.state, self.held, self.step, self.owner, self.expired, self.object = state, 0, None, None, False, None


@dataclass
class Saved:
    """A checkpoint's files."""

    record: CheckpointRecord
    weights: Counter[Place]
    epoch: int
    consumed: Ranges


@dataclass
class Trainer:
    """A trainer process: what dies with it."""

    incarnation: int
    epoch: int
    trained: int
    weights: Counter[Place]
    planned: int
    plans: list[StepPlan] = field(default_factory=list)
    stages: dict[Place, str] = field(default_factory=dict)
    saving: Saved | None = None
    saved: int = 0


@dataclass
class Model:
    """The ledger in plain Python, one dictionary."""

    strict: bool
    budget: int
    rows: dict[Place, Row] = field(default_factory=dict)
    committed: list[CheckpointRecord] = field(default_factory=list)
    training: bool = False
    current: int = -1
    crash: tuple[int, int] = (0, -1)

    def of(self, *states: str) -> list[Place]:
        return sorted(place for place, row in self.rows.items() if row.state in states)

    def held(self) -> int:
        return sum(row.held for row in self.rows.values())

    def holes(self) -> int:
        top = max(self.of("leased", "ready"), default=(-1, -1))
        return sum(self.rows[place].size for place in self.of("pending") if place < top)

    def lease(self, limit: int) -> list[Place]:
        for place in self.of("leased"):
            if self.rows[place].expired:
                self.rows[place].to("pending")
        free, leased = self.budget - self.held(), []
        for place in self.of("pending")[:limit]:
            if self.rows[place].size > free:
                break
            free -= self.rows[place].size
            leased.append(place)
        return leased

    def plan(self, epoch: int, size: int) -> list[Place] | str:
        remaining = [place for place in self.of("pending", "leased", "ready") if place[0] == epoch]
        ready = [place for place in remaining if self.rows[place].state == "ready"]
        wanted = remaining[:size]
        if not wanted:
            return "end"
        if self.strict:
            return wanted if set(wanted) <= set(ready) else "wait"
        return ready[:size] if len(ready) >= len(wanted) else "wait"

    def crashes(self) -> tuple[int, int]:
        if not self.training:
            return 0, -1
        return (self.crash[0] + 1 if self.current == self.crash[1] else 1), self.current

    def resume(self, files: dict[str, Saved], store: dict[str, ObjectRecord]) -> CheckpointRecord | None:
        whole = [record for record in self.committed if record.path in files]
        survivor = max(whole, key=lambda record: record.step, default=None)
        step = survivor.step if survivor else -1
        self.committed = [record for record in self.committed if record.step <= step]
        for place in self.of("consumed"):
            row = self.rows[place]
            if row.step is not None and row.step > step:
                row.to("pending")
            row.held, row.object = 0, None
        epoch = max((place[0] for place in self.of("consumed")), default=0)
        left = any(place[0] == epoch for place in self.of("pending", "leased", "ready", "taken"))
        last = epoch + 1 if self.of("consumed") and not left else epoch
        self.rows = {place: row for place, row in self.rows.items() if place[0] <= last or row.state == "quarantined"}
        for place in self.of("taken", "ready"):
            row = self.rows[place]
            if row.object is None or store.get(row.object.key) != row.object:
                row.to("pending")
            else:
                row.state, row.step = "ready", None
        if self.strict:
            self._evict()
        self.crash, self.training, self.current = self.crashes(), True, -1
        return survivor

    def _evict(self) -> None:
        while self.held() + self.holes() > self.budget:
            self.rows[self.of("leased", "ready")[-1]].to("pending")
