"""A simulated quarter of five drafts: does the watch retrain, the gate promote, and the overview show, what is right?

    python benchmarks/quarter.py [--seeds 10] [--json benchmarks/results/quarter.json]

Each draft is served by four servers that are looked at every hour for 90 days. Requests are drawn from the
recorded ones of a real benchmark. `slow` and `sudden` traffic drifts on one day (by 12 and 18 %), under `revision` the
target is replaced, `quiet` has one request in 15 minutes, and `noisy` rises and falls by the hour (3 % in the mean, an
hour much like the one before) and with the day (3 %) without ever changing for good. The code of the watch judges the
windows, the gate decides on evidence of 128 prompts, and a real registry (MLflow on SQLite) records versions and
decisions; a retraining takes half a day, a rollout some hours. Left out are HTTP, Prefect and the training itself: a
new version's true quality is drawn, for fresh traffic where its champion was trained for older one, else within 1.5 %
of the champion's.

Wrong is a promotion of a version that is truly worse. Needless is a retraining where nothing has changed for good.
Every alarm and every gate is decided again from what was stored as its evidence. Each day each row of the overview is
compared with what the simulation knows.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gates import evidence_of
from rollout import DAY_S, RESULTS, SEED, Rows, recorded, scaled

from infra.drift.config import WatchConfig
from infra.drift.decision import assess
from infra.drift.identity import identify_all
from infra.drift.scrape import Counters, Reading, Scrape, ServedDraft
from infra.drift.sequential import DriftTest, Reference
from infra.drift.target import ReportedTarget
from infra.drift.traffic import Series, TrafficRecord, judge
from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.acceptance import GateEvidence, RegisteredDraft
from infra.tracking import registry
from infra.tracking.promotion import DraftInService
from infra.tracking.runs import TrackedRun, log_folder, start_run
from models.benchmark.gate import decide
from models.config.benchmark import PromotionConfig
from tasks.overview import row_of

DAYS, LOOK_S, KEEP, LOOKAHEAD = 90, 3600, 30, 4
TRAINING_S, RESTART_S = DAY_S / 2, 3600.0
PERSON_S = DAY_S
"""Until somebody has named the new target in the recipe."""
BENCHMARKED, GATE_PROMPTS = 200, 128
SPREAD = 0.015
"""Of a new version's true quality, where nothing has changed."""


@dataclass(frozen=True)
class Traffic:
    """What becomes of one draft's traffic."""

    name: str
    requests: int = 64
    """Of each server between two looks."""
    changed_day: float = float("inf")
    fall: float = 0.0
    """What a version trained before that day accepts less from then on."""
    new_target: bool = False
    noise: float = 0.0

    def changed(self, now: float) -> bool:
        return now >= self.changed_day * DAY_S


QUARTER = (
    Traffic("slow", changed_day=30, fall=0.12),
    Traffic("sudden", changed_day=55, fall=0.18),
    Traffic("revision", changed_day=40, fall=0.10, new_target=True),
    Traffic("quiet", requests=4),
    Traffic("noisy", noise=0.03),
)


@dataclass
class Version:
    """A version as it truly is."""

    number: int
    trained: float
    quality: float
    """Acceptance length on the traffic that it was trained for, against the recorded requests'."""
    test: DriftTest

    def quality_at(self, traffic: Traffic, now: float) -> float:
        old = traffic.changed(now) and not traffic.changed(self.trained)
        return self.quality * (1 - traffic.fall if old else 1)


@dataclass
class Server:
    """A server, and when it is restarted with which version."""

    url: str
    version: int = 1
    starts: int = 0
    counters: Counters = field(default_factory=Counters)
    planned: tuple[float, int] | None = None
    revision: str = "a"

    def restart(self, version: int, revision: str) -> None:
        self.version, self.revision = version, revision
        self.starts, self.counters, self.planned = self.starts + 1, Counters(), None


class Life:
    """One draft's quarter."""

    def __init__(self, traffic: Traffic, rows: Rows, folder: Path, seed: int):
        self.traffic, self.rows, self.name = traffic, rows, f"draft-{traffic.name}"
        self.uri, self.folder = f"sqlite:///{folder / 'mlflow.db'}", folder / traffic.name
        self.random = np.random.default_rng([SEED, seed, QUARTER.index(traffic)])
        self.config = WatchConfig(
            draft=self.name, servers=tuple(f"http://{traffic.name}-{at}:30000" for at in range(4))
        )
        self.servers = [Server(url) for url in self.config.servers]
        self.record, self.versions = TrafficRecord(draft=self.name), dict[int, Version]()
        self.due: float | None = None
        """When the retraining that runs has ended."""
        self.level = 0.0
        self.retrained, self.wrong, self.unequal, self.overview_errors = list[float](), 0, 0, list[str]()
        self.rollbacks, self.promoted, self.gates, self.alarms = 0, list[int](), 0, list[float]()
        self.folder.mkdir(parents=True)
        self.service = DraftInService(self.uri, self.name)
        self._register(0.0, 1.0, champion=None)
        self.service.promote(1, by="ada", reason="the first")
        self.promoted.append(1)
        self._read_registry()

    def _register(self, now: float, quality: float, champion: int | None) -> RegisteredDraft:
        number = len(self.versions) + 1
        benchmarked = scaled(self._drawn(BENCHMARKED), quality - 1, number)
        test = DriftTest(Reference(benchmarked), self.config.fall, self.config.average_run_length)
        self.versions[number] = Version(number, now, quality, test)
        weights = self.folder / f"weights-{number}"
        weights.mkdir()
        run: TrackedRun = start_run(weights / "tracking.json", self.uri, "quarter", f"{self.name}-{number}", {}, {})
        tags = {
            registry.RUN: f"run-{number}", registry.MEASURED_AGAINST: str(champion or ""),
            registry.ACCEPTANCE: f"{benchmarked[:, 0].sum() / benchmarked[:, 1].sum():.4f}",
            "lookahead": str(LOOKAHEAD),
        }  # fmt: skip
        model = log_folder(run, weights, "draft", 1, "draft")
        return registry.register(self.uri, self.name, model, run.run_id, tags)

    def _read_registry(self) -> None:
        self.drafts = {one.version: one for one in registry.list_drafts(self.uri, self.name)}
        self.decisions = registry.history(self.uri, self.name)
        self.champion = next(one for one in self.drafts.values() if registry.CHAMPION in one.aliases)

    def _drawn(self, number: int) -> Rows:
        return self.rows[self.random.integers(len(self.rows), size=number)]

    def look(self, now: float) -> None:
        """What happens between two looks, and the look."""
        self._serve(now)
        if self.due is not None and now >= self.due:
            self.due = None
            self._gate(now)
        readings = {server.url: self._reading(server) for server in self.servers}
        seen = Scrape(readings=readings)
        drafts = list(self.drafts.values())
        versions = {url: one.version for url, one in identify_all(self.record, seen, drafts).items()}
        self.record = self.record.observe(seen, versions, self.config.traffic, now, self.config.window_steps)
        for series in self.record.live(self.config.traffic):
            self._assess(series, now)
        change = self.record.change_under(self.champion.version)
        if change and now >= self.record.change_announced + 3600 * self.config.quiet_hours:
            self.record = self.record.with_change_announced(self.champion.version, change[1], now)
            self._retrain(now, PERSON_S)

    def _assess(self, series: Series, now: float) -> None:
        test, draft = self.versions[series.served.version].test, self.drafts[series.served.version]
        finding = assess(self.record, series.trimmed(KEEP, test), draft, self.champion, test, self.config)
        self.record = self.record.with_series(finding.series)
        if not finding.due:
            return
        stored = finding.series.model_dump_json()
        again = Series.model_validate_json(stored)
        if again.due(judge(again, test), self.config.quiet_hours * 3600) != finding.due:
            self.unequal += 1
        self.record = self.record.with_series(finding.series.with_announced(finding.due))
        if draft.version == self.champion.version:
            self.alarms.append(finding.due.ended)
        if finding.event == "drifted":
            self._retrain(now, 0.0)
        else:
            self.rollbacks += 1
            self.service.withdraw(draft.version, by="served traffic", reason="serves worse")
            self._read_registry()
            self._roll_out(now)

    def _retrain(self, now: float, later: float) -> None:
        if self.due is None:
            self.due = now + later + TRAINING_S
            self.retrained.append(now / DAY_S)

    def _gate(self, now: float) -> None:
        """Register the new version and let the gate decide."""
        champion = self.versions[self.champion.version]
        fresh = self.traffic.changed(now) and not self.traffic.changed(champion.trained)
        quality = 1.0 if fresh else champion.quality
        quality *= 1 + float(self.random.normal(0, SPREAD))
        draft = self._register(now, quality, champion.number)
        text, at = self._drawn(GATE_PROMPTS), champion.quality_at(self.traffic, now)
        ours, theirs = (scaled(text, of - 1, draft.version * 10 + side) for side, of in enumerate((quality, at)))
        evidence = evidence_of(ours.astype(np.int64), theirs.astype(np.int64), PromotionConfig())
        gate = decide(evidence)
        self.gates += 1
        if decide(GateEvidence.model_validate_json(evidence.model_dump_json())) != gate:
            self.unequal += 1
        step, _ = self.service.follow_gate(draft, gate, approval=False)
        self._read_registry()
        if step == "promote":
            self.wrong += quality <= at
            self.promoted.append(draft.version)
            self._roll_out(now)

    def _roll_out(self, now: float) -> None:
        """A canary first, the others a few hours later, one by one."""
        for at, server in enumerate(self.servers):
            server.planned = (now + (1 + at + 3 * (at > 0)) * RESTART_S, self.champion.version)

    def _serve(self, now: float) -> None:
        self.level = 0.7 * self.level + float(self.random.normal(0, self.traffic.noise * 0.51**0.5))
        by_day = self.traffic.noise * np.sin(2 * np.pi * now / DAY_S)
        revision = "b" if self.traffic.new_target and self.traffic.changed(now) else "a"
        for server in self.servers:
            if server.planned and now >= server.planned[0]:
                server.restart(server.planned[1], revision)
            elif server.revision != revision:
                server.restart(server.version, revision)
            quality = self.versions[server.version].quality_at(self.traffic, now) * (1 + self.level + by_day)
            tokens, steps = (int(total) for total in self._drawn(self.traffic.requests).sum(axis=0))
            # Accepted tokens are lost, or steps saved, at random.
            wanted = tokens / quality
            steps = max(1, int(np.floor(wanted * steps / tokens + self.random.random())))
            requests = self.traffic.requests
            server.counters = server.counters.plus(
                Counters(generated=tokens + requests, requests=requests, steps=steps)
            )

    def _reading(self, server: Server) -> Reading:
        path = f"/drafts/{self.name}/{server.version}"
        target = ReportedTarget(path="/targets/served", revision=server.revision)
        draft = ServedDraft(start=f"{server.url}-{server.starts}", path=path)
        return Reading(
            counters=server.counters, lookahead=LOOKAHEAD, draft_tokens=LOOKAHEAD + 1, draft=draft, target=target
        )

    def check_overview(self, now: float) -> None:
        """Compare the overview's row with what is known here."""
        row = row_of(list(self.drafts.values()), self.decisions, self.record, None, now)
        serving = [server.version for server in self.servers]
        champion = self.promoted[-1]
        alarms = [at for at in self.alarms if at >= self._serves_since(champion)]
        told = time.strftime("%Y-%m-%d", time.gmtime(alarms[-1])) if alarms else "no alarm"
        checks = {
            "champion": row.champion == champion,
            "servers": dict(row.servers) == {str(one): serving.count(one) for one in {*serving}},
            "drift": told in row.drift or row.series is None,
            "wanted": len(row.wanted) == sum(one != champion for one in serving),
            "alarms": row.alarms == len(alarms),
        }
        wrong = [name for name, right in checks.items() if not right]
        self.overview_errors += [f"day {now / DAY_S:.0f}: {', '.join(wrong)}"] if wrong else []

    def _serves_since(self, version: int) -> float:
        return self.versions[version].trained

    def needless(self) -> int:
        """Retrainings where nothing had changed for good since the champion was trained."""
        first = next((day for day in self.retrained if day >= self.traffic.changed_day), None)
        return sum(day != first for day in self.retrained)


def seeds_quarter(rows: Rows, seed: int) -> Iterator[dict[str, Any]]:
    """What became of each of the five drafts."""
    with TemporaryDirectory(prefix="quarter-") as folder:
        for traffic in QUARTER:
            life = Life(traffic, rows, Path(folder), seed)
            for look in range(DAYS * DAY_S // LOOK_S):
                life.look(float(look * LOOK_S))
                if (look + 1) * LOOK_S % DAY_S == 0:
                    life.check_overview(float(look * LOOK_S))
            yield {
                "seed": seed, "draft": traffic.name, "retrained_on": [round(day, 1) for day in life.retrained],
                "needless": life.needless(), "gates": life.gates, "promoted": len(life.promoted) - 1,
                "wrong_promotions": int(life.wrong), "rollbacks": life.rollbacks, "not_replayed": life.unequal,
                "overview_errors": life.overview_errors[:5],
                "answered": traffic.changed_day == float("inf") or len(life.promoted) > 1,
            }  # fmt: skip


def totals(found: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {
        "quarters": len(found),
        **{key: sum(one[key] for one in found) for key in ("gates", "promoted", "wrong_promotions", "rollbacks")},
        "needless_most_per_draft": max(one["needless"] for one in found),
        "needless": sum(one["needless"] for one in found),
        "changes_answered_by_a_promotion": sum(one["answered"] for one in found if one["draft"] in CHANGING),
        "changes": sum(one["draft"] in CHANGING for one in found),
        "decisions_not_replayed": sum(one["not_replayed"] for one in found),
        "wrong_days_of_the_overview": sum(len(one["overview_errors"]) for one in found),
    }


CHANGING = {traffic.name for traffic in QUARTER if traffic.fall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=Path, default=RESULTS / "drift_requests.json")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "quarter.json")
    options = parser.parse_args()
    begun, rows, found = time.monotonic(), recorded(options.counts), list[dict[str, Any]]()
    for seed in range(options.seeds):
        for one in seeds_quarter(rows, seed):
            found.append(one)
            print(json.dumps(one), flush=True)
    result = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "seed": SEED,
        "days": DAYS, "servers": 4, "look_s": LOOK_S, "seeds": options.seeds, "totals": totals(found),
        "quarters": found, "wall_s": round(time.monotonic() - begun),
    }  # fmt: skip
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["totals"]))


if __name__ == "__main__":
    run_main(main)
