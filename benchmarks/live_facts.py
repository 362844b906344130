"""What benchmarks/results/ says of learning while serving, for docs/results.md."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Fact = tuple[str, str, Json]
"""What was measured, the figure, and the run that it is from."""


def live(result: Json) -> Iterable[Fact]:
    """What users notice of a run that learns from their server."""
    for name, found in result.items():
        off = found["off"]
        for arm, what in (("on", "a run learns"), ("full", "its store is full")):
            how = (
                f"{name}; {found['rate']:g} requests/s, {found['share']:.0%} asked for, {found[arm]['captured']} texts "
                f"captured among {found[arm]['requests']:,} requests"
            )
            for figure, title in (
                ("cpu_s_per_request", "processor time of the server for each request"),
                ("p50_s", "median latency"),
                ("p99_s", "99th percentile of latency"),
                ("requests_per_s", "requests answered a second"),
            ):
                ratio, low, high = found[arm]["to_off"][figure]
                yield (
                    f"{title} while {what}, of that without ({how})",
                    f"{ratio:.3f} ({low:.3f} to {high:.3f})",
                    found,
                )
        latencies = f"{off['p50_s']:.2f} / {off['p99_s']:.2f} s"
        yield f"latency without a run ({name}): median / 99th percentile", latencies, found


def one_pass_learned(result: Json) -> Iterable[Fact]:
    """What a draft learns where the target is captured while it answers."""
    for target, found in result.items():
        seeds = len(found["drafts"]) // 2
        tokens = sum(draft["tokens"] for draft in found["drafts"].values()) / len(found["drafts"])
        for temperature in ("1", "0"):
            of = found[f"temperature {temperature}"]
            lengths = (
                f"{', '.join(f'{one:.2f}' for one in sorted(values))}"
                for way in ("one pass", "two passes")
                if (values := [
                    draft["acceptance"][temperature][0] for name, draft in found["drafts"].items() if way in name
                ])
            )  # fmt: skip
            yield (
                f"acceptance length of a draft trained in one pass to one trained in two ({target}, temperature "
                f"{temperature}, {seeds} seeds, {tokens:,.0f} tokens each)",
                f"{of['one_pass_to_two']:.3f} ({'; '.join(lengths)})",
                found,
            )


def live_loop(result: Json) -> Iterable[Fact]:
    """The way back after users have changed the subject."""
    for seed, found in result.items():
        champion, offline, rounds = found["champion"], found["offline"], found["rounds"]
        last = rounds[-1]
        yield (
            f"tokens per step that a champion is served with, before and after users change the subject ({seed})",
            f"{champion['acceptance_before']:.2f} / {champion['acceptance']:.2f}",
            found,
        )
        lengths = ", ".join(f"{one['acceptance']:.2f} ({one['requests']:,})" for one in rounds)
        yield f"tokens per step after each live round (requests served until then; {seed})", lengths, found
        yield (
            f"tokens per step of a draft trained offline on as many samples of the new subject, from nothing; the live "
            f"drafts also have their champion's training ({seed})",
            f"{offline['acceptance']:.2f}; the loop reached {found['recovered']:.1%} of it",
            found,
        )
        gained = last["acceptance"] - champion["acceptance"]
        # What the server's prefills cost is not measured apart: as much as the offline capture of as many tokens.
        read_s = offline["read_s"] * sum(one["tokens"] for one in rounds) / offline["tokens"]
        spent = sum(one["cpu_s"] for one in rounds) + read_s
        regained = offline["acceptance"] - champion["acceptance"]
        if gained > 0 and regained > 0:
            yield (
                "core-seconds for 0.1 tokens per step: live / by regeneration, capture and training, the start of "
                f"processes included ({seed})",
                f"{spent / gained / 10:.0f} / {offline['cpu_s'] / regained / 10:.0f}",
                found,
            )


def live_flow(result: Json) -> Iterable[Fact]:
    """The same loop through Prefect, MLflow and a follower, with nobody watching."""
    for seed, found in result.items():
        promoted = sum(1 for _, outcome, _ in found["decisions"] if "promoted" in outcome) - 1
        rounds = f"{len(found['runs'])} runs of {found['samples']} samples, {promoted} of them promoted"
        yield (
            f"tokens per step on {found['servers']} servers that nobody watches: before users change the subject / "
            f"after it / after {rounds} ({seed}; training.start_from: {found['start_from']})",
            f"{found['before']:.2f} / {found['after_change']:.2f} / {found['acceptance']:.2f}",
            found,
        )
        offline = found["offline"]
        yield (
            f"tokens per step at the end, of those of a draft trained offline on {offline['samples']:,} samples of the "
            f"new subject, from nothing; the served draft also has its champion's training ({seed})",
            f"{found['of_offline']:.3f} of its {offline['acceptance']:.2f}",
            found,
        )
        yield (
            f"requests meanwhile: lost / asked of another server / all; server processes that were started again "
            f"({seed})",
            f"{len(found['lost'])} / {found['retried']} / {found['requests']:,}; {found['server_processes_gone']}",
            found,
        )
