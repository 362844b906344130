"""Does the traffic watch read rollouts correctly? Simulated months in which a better version is promoted.

    python benchmarks/rollout.py [--seeds 30] [--json benchmarks/results/rollout.json]

Requests are drawn from the recorded ones of a real benchmark (tokens and verification steps of each). A better version
needs fewer steps for the same tokens. Four servers are looked at every 15 minutes for 30 days; after some days the
better version is promoted, and the servers are restarted with it late, one by one, after a canary, or never. Scraped
records go through the code of the watch: identity, windows, test, decision. Only HTTP is left out, and old windows are
dropped early, which changes no verdict but whether a fall has lasted for a day: where it matters, a day is kept.

Nothing has fallen in these months, so every retraining is needless and every rollback wrong. `registry_decides` is the
same with the champion's version in place of the one that a server reports. Two more scenarios show that the watch is
not merely deaf: `fall` (traffic or engine lose 10 % after the rollout) and `worse` (the promoted version is served at
90 % of the version that it replaced, whatever its benchmark said).
"""

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from infra.drift.config import WatchConfig
from infra.drift.decision import assess
from infra.drift.identity import identify_all
from infra.drift.scrape import Counters, Reading, Scrape, ServedDraft
from infra.drift.sequential import DriftTest, Reference
from infra.drift.traffic import TrafficRecord
from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.acceptance import RegisteredDraft, RequestCounts
from infra.tracking.registry import REPLACES

RESULTS = Path(__file__).parent / "results"
DRAFT = "draft"
SERVERS = tuple(f"http://server-{number}:30000" for number in range(4))
LOOK_S, DAY_S = 900, 86_400
DAYS = 30
REQUESTS_A_LOOK = 16
"""Per server: four of them fill a window of 2000 steps in a little less than one look."""
PROMOTED_DAY = 4
FALL_DAY = 26
GAINS = (0.05, 0.10, 0.25)
KEEP, A_DAY = 10, 110
"""Windows that are kept: what decides of a rollback, and what decides whether a fall has lasted for a day."""
SEED = 20261123

Rollout = Literal["late", "one by one", "canary", "never"]
ROLLOUTS: Sequence[Rollout] = ("late", "one by one", "canary", "never")
Rows = NDArray[np.float64]
"""`[N, 2]` tokens and verification steps."""


@dataclass(frozen=True)
class Month:
    """One simulated month.

    Args:
        rows: by version, the requests that it serves.
        references: by version, the requests of its benchmark.
        rollout: how the servers come to run version 2.
        fall: relative fall of what every version accepts from `FALL_DAY` on.
        registry_decides: take every server for the champion's, whatever it reports.
        keep: windows that are kept.
    """

    rows: Mapping[int, Rows]
    references: Mapping[int, Rows]
    rollout: Rollout
    seed: int
    fall: float = 0.0
    registry_decides: bool = False
    keep: int = KEEP


@dataclass
class Server:
    """What a server has counted since its start."""

    url: str
    version: int = 1
    starts: int = 0
    counters: Counters = field(default_factory=Counters)

    def restart(self, version: int) -> None:
        self.version, self.starts, self.counters = version, self.starts + 1, Counters()

    def serve(self, tokens: int, steps: int) -> None:
        added = Counters(generated=tokens + REQUESTS_A_LOOK, requests=REQUESTS_A_LOOK, steps=steps)
        self.counters = self.counters.plus(added)

    def reading(self) -> Reading:
        draft = ServedDraft(start=f"{self.url}-{self.starts}", path=f"/drafts/{DRAFT}/{self.version}")
        return Reading(counters=self.counters, lookahead=4, draft_tokens=5, draft=draft)


def restarts(rollout: Rollout, seed: int) -> list[float]:
    """Day on which each server is restarted with the new version."""
    draw = random.Random(f"{rollout} {seed}")
    late = PROMOTED_DAY + draw.uniform(0.5, 15)
    match rollout:
        case "late":
            return [late] * len(SERVERS)
        case "one by one":
            return [late + index * draw.uniform(0.1, 2) for index in range(len(SERVERS))]
        case "canary":
            return [PROMOTED_DAY + 0.5, *[late + 3] * (len(SERVERS) - 1)]
        case "never":
            return [float("inf")] * len(SERVERS)


def live(month: Month) -> list[dict[str, Any]]:
    """Every event of a month: day, kind, version."""
    config = WatchConfig(draft=DRAFT, servers=SERVERS)
    tests = {
        version: DriftTest(Reference(rows), config.fall, config.average_run_length)
        for version, rows in month.references.items()
    }
    draw, record = np.random.default_rng([SEED, month.seed]), TrafficRecord(draft=DRAFT)
    servers, planned = [Server(url) for url in SERVERS], restarts(month.rollout, month.seed)
    events: list[dict[str, Any]] = []
    for look in range(DAYS * DAY_S // LOOK_S):
        now = float(look * LOOK_S)
        drafts = registered(now >= PROMOTED_DAY * DAY_S)
        champion = next(draft for draft in drafts if "champion" in draft.aliases)
        for server, day in zip(servers, planned, strict=True):
            if server.version == 1 and now >= day * DAY_S:
                server.restart(2)
            fall = month.fall if now >= FALL_DAY * DAY_S else 0.0
            server.serve(*served(draw, month.rows[server.version], fall))
        seen = Scrape(readings={server.url: server.reading() for server in servers})
        versions = {url: identity.version for url, identity in identify_all(record, seen, drafts).items()}
        if month.registry_decides:
            versions = dict.fromkeys(versions, champion.version)
        record = record.observe(seen, versions, config.traffic, now, config.window_steps)
        for series in record.live(config.traffic):
            test, draft = tests[series.served.version], drafts[series.served.version - 1]
            finding = assess(record, series.trimmed(month.keep, test), draft, champion, test, config)
            record = record.with_series(finding.series)
            if finding.due:
                announced = finding.series.with_announced(finding.due)
                record = record.with_series(announced)
                events.append(
                    {
                        "day": round(now / DAY_S, 2),
                        "event": finding.event,
                        "version": draft.version,
                        "windows_after_fall": sum(window.began >= FALL_DAY * DAY_S for window in announced.windows),
                    }
                )
    return events


def registered(promoted: bool) -> list[RegisteredDraft]:
    """The registry before and after version 2 was promoted."""
    return [
        RegisteredDraft(name=DRAFT, version=1, model_id="", aliases=() if promoted else ("champion",)),
        RegisteredDraft(
            name=DRAFT, version=2, model_id="", aliases=("champion",) if promoted else ("challenger",),
            tags={REPLACES: "1"} if promoted else {},
        ),
    ]  # fmt: skip


def served(draw: np.random.Generator, rows: Rows, fall: float) -> tuple[int, int]:
    """Tokens and steps of one server's requests between two looks; a fall loses accepted tokens at random."""
    tokens, steps = (int(total) for total in rows[draw.integers(len(rows), size=REQUESTS_A_LOOK)].sum(axis=0))
    if fall:
        length = rows[:, 0].sum() / rows[:, 1].sum()
        tokens = steps + int(draw.binomial(max(tokens - steps, 0), 1 - fall * length / (length - 1)))
    return tokens, steps


def scaled(rows: Rows, gain: float, seed: int) -> Rows:
    """The same tokens in fewer steps (or more, where `gain` is negative), rounded at random."""
    steps = rows[:, 1] / (1 + gain)
    rounded = np.floor(steps + np.random.default_rng([SEED, seed, 7]).random(len(rows)))
    return np.stack([rows[:, 0], np.maximum(rounded, 1)], axis=1)


def promoted_month(rows: Rows, gain: float, seed: int, **more: Any) -> Month:
    """A month in which a version that is better by `gain` is promoted."""
    better = {1: rows, 2: scaled(rows, gain, seed)}
    return Month(better, better, ROLLOUTS[seed % len(ROLLOUTS)], seed, **more)


def tally(months: Sequence[Sequence[dict[str, Any]]]) -> dict[str, int]:
    """Events of each kind, and months that had one."""
    kinds = [[event["event"] for event in events] for events in months]
    return {
        "months": len(months),
        "retrainings": sum(one.count("drifted") for one in kinds),
        "rollbacks": sum(one.count("degraded") for one in kinds),
        "months_with_a_retraining": sum("drifted" in one for one in kinds),
    }


def true_falls(rows: Rows, seeds: Sequence[int]) -> dict[str, Any]:
    """A fall of 10 % after the rollout: windows from the first fallen one to the alarm, itself counted."""
    months = [live(promoted_month(rows, 0.10, seed, fall=0.10, keep=A_DAY)) for seed in seeds]
    rolled_out = [events for seed, events in zip(seeds, months, strict=True) if ROLLOUTS[seed % 4] != "never"]
    windows = [event["windows_after_fall"] for events in rolled_out for event in events if event["day"] >= FALL_DAY]
    never = [
        event for seed, events in zip(seeds, months, strict=True) if ROLLOUTS[seed % 4] == "never" for event in events
    ]
    return {
        "months": len(rolled_out),
        "seen": sum(any(event["day"] >= FALL_DAY for event in events) for events in rolled_out),
        "windows_mean": round(float(np.mean(windows)), 2),
        "windows_p95": round(float(np.quantile(windows, 0.95)), 1),
        "alarms_where_the_champion_is_never_served": len(never),
    }


def worse_versions(rows: Rows, seeds: Sequence[int]) -> dict[str, int]:
    """Version 2 promised 10 % more and is served at 10 % less than version 1."""
    promised = scaled(rows, 0.10, 0)
    months = [
        live(Month({1: rows, 2: scaled(rows, -0.10, seed)}, {1: rows, 2: promised}, ROLLOUTS[seed % 3], seed))
        for seed in seeds
    ]
    # Nobody carries the rollback out here, so only the first event of a month says something.
    rollbacks = sum(bool(one) and one[0]["event"] == "degraded" for one in months)
    return {"months": len(months), "first_event_is_a_rollback": rollbacks}


def recorded(path: Path) -> Rows:
    """The recorded requests that had a verification step."""
    counts: RequestCounts = RequestCounts.read(path)
    return Reference.of([row for row in counts.greedy[counts.conditions.lookahead] if row[1] > 0]).requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=Path, default=RESULTS / "drift_requests.json")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--json", type=Path, default=RESULTS / "rollout.json")
    options = parser.parse_args()
    begun, rows, seeds = time.monotonic(), recorded(options.counts), range(options.seeds)
    served_decides, registry_decides = {}, {}
    for gain in GAINS:
        name = f"+{gain:.0%}"
        served_decides[name] = tally([live(promoted_month(rows, gain, seed)) for seed in seeds])
        registry_decides[name] = tally(
            [live(promoted_month(rows, gain, seed, registry_decides=True)) for seed in seeds]
        )
        print(name, served_decides[name], "registry decides:", registry_decides[name], flush=True)
    falls, worse = true_falls(rows, seeds), worse_versions(rows, seeds)
    print("fall", falls, "worse", worse, flush=True)
    result = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "seed": SEED,
        "requests": str(options.counts.name), "servers": len(SERVERS), "look_s": LOOK_S, "days": DAYS,
        "requests_per_server_and_look": REQUESTS_A_LOOK, "rollouts": list(ROLLOUTS), "promoted_day": PROMOTED_DAY,
        "served_decides": served_decides, "registry_decides": registry_decides, "fall_of_10_percent": falls,
        "worse_by_10_percent": worse, "wall_s": round(time.monotonic() - begun),
    }  # fmt: skip
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    if any(one["retrainings"] > 1 or one["rollbacks"] for one in served_decides.values()):
        raise SystemExit("a needless retraining more than allowed, or a wrong rollback")


if __name__ == "__main__":
    run_main(main)
