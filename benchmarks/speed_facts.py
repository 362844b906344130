"""Facts about speed and memory, for benchmarks/results_page.py."""

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Fact = tuple[str, str] | tuple[str, str, Json]


def capture(result: Json) -> Iterable[tuple[str, str]]:
    load, cpu_s = f"{result['load_average'][1]:.0f}", result["scheduler_cpu_s"]
    yield (
        f"SGLang's prefill throughput with capture, share of that without ({result['target']}; median, load {load})",
        f"{result['ratio_median']:.3f}",
    )
    yield (
        "share of the throughput by CPU seconds, which the load does not change",
        f"{cpu_s['plain'] / cpu_s['capture']:.3f}",
    )
    yield (
        f"share of a prefill of {result['tokens_per_prompt']:,} tokens for which capture keeps SGLang's scheduler",
        f"{result['blocked_share_of_prefill']:.2%}",
    )


def decode_capture(result: Json) -> Iterable[tuple[str, str]]:
    for target in ("tiny", "gemma3-270m"):
        found, how = result[target], f"{target}, answers of {result['new_tokens']} tokens"
        rounds = found["float32"]["rounds_s"]
        prefilled = sum(prefill for *_, prefill in rounds) / sum(answer + prefill for _, answer, prefill in rounds)
        ratios = sorted(one / (answer + prefill) for one, answer, prefill in rounds)
        yield (
            f"time of capturing while SGLang answers, of that of answering and then prefilling ({how}; the prefill is "
            f"{prefilled:.0%} of two passes): median (each round)",
            f"{found['float32']['one_pass_to_two']:.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
        )
        for dtype in ("float32", "bfloat16"):
            states = found[dtype]["states"]
            yield (
                f"relative distance of states captured while answering from those of a prefill, {dtype}: layers / "
                f"after the final norm ({how})",
                f"{states['aux_relative_distance']:.1e} / {states['last_relative_distance']:.1e}",
            )


def ledger(result: Json) -> Iterable[tuple[str, str]]:
    how = f"{result['ranks']} trainer ranks, {result['order']} order, processes and server on the same cores"
    for label, rate in result["samples_per_s"].items():
        yield f"samples/s through the ledger on {label} ({how})", f"{rate:,.0f}"
    killed = result["killed"]
    kills = ", ".join(f"{count} times a {what}" for what, count in sorted(killed["kills"].items()))
    yield f"{killed['samples']:,} samples through PostgreSQL with kills ({kills})", "every sample trained once"
    for database, by_rows in result["milliseconds_by_rows"].items():
        few, many = sorted(by_rows, key=int)
        for names in (("lease", "publish", "plan", "release", "commit"), ("progress",)):
            yield (
                f"milliseconds to {' / '.join(names)} {'' if names == ('progress',) else '64 samples '}on {database}, "
                f"in a run of {int(few):,} samples and of {int(many):,}",
                "; ".join(" / ".join(f"{by_rows[rows][name]:.1f}" for name in names) for rows in (few, many)),
            )


def transport(result: Json) -> Iterable[tuple[str, str]]:
    for one in result["objects"]:
        rates = one["of_memcpy"]
        yield (
            f"arena put / get of {one['bytes'] / 2**20:.0f} MiB, share of memcpy",
            f"{rates['arena put']:.2f} / {rates['arena get']:.2f}",
        )


def stored(result: Json) -> Iterable[tuple[str, str]]:
    for way, seconds in result["wall_s"].items():
        rounds = [one[way] for one in result.get("wall_s_of_rounds", [])]
        shown = f"{min(rounds):.0f} to {max(rounds):.0f} s" if rounds else f"{seconds:.0f} s, measured once"
        yield f"{result['steps']} steps of the tiny target, hidden states {way}", shown


def packing(result: Json) -> Iterable[tuple[str, str]]:
    for way, facts in result["ways"].items():
        if way != "packed":
            yield (
                f"CPU time {way}, relative to packed ({result['samples']} samples)",
                f"{facts['packed_is_faster']:.2f}",
            )


def context_parallel(result: Json) -> Iterable[tuple[str, str]]:
    longest = max(result["lengths"], key=lambda one: one["tokens"])
    yield (
        f"activation memory per rank, two ranks sharing samples of {longest['tokens']:,} tokens, relative to one",
        f"{longest['memory_ratio']:.2f}",
    )
    yield f"speed-up of two ranks sharing samples of {longest['tokens']:,} tokens", f"{longest['speed_up']:.2f}"


def planner(result: Json) -> Iterable[tuple[str, str]]:
    yield f"largest error of the planned memory at {len(result['points'])} points", f"{result['worst_error']:.1%}"


def data_wait(result: Json) -> Iterable[tuple[str, str]]:
    share = result["publisher_at_twice_the_trainers_rate"]["data_wait_share"]
    yield "share of the trainer's time spent waiting, samples arriving at twice its rate", f"{share:.3%}"


def overhead(result: Json) -> Iterable[tuple[str, str]]:
    for when, runs in result["runs"].items():
        mean = sum(run["overhead_s"] for run in runs) / len(runs)
        yield f"seconds that Prefect, MLflow and process starts add to a run ({when})", f"{mean:.1f}"


def block_step(result: Json) -> Iterable[Fact]:
    for one in result["steps"].values():
        method, sizes = one["method"], one["shape"]
        yield (
            f"{method}'s training step, {one['dtype']}, {sizes['layers']} layers of {sizes['hidden']}, "
            f"{sizes['vocabulary']:,} tokens, {sizes['anchors'] * len(sizes['lengths'])} blocks of "
            f"{sizes['block_size']}: times faster than speculators' on a CPU (CPU seconds); share of its peak memory",
            f"{one['times_faster']['cpu_s']:.2f}; {one['memory_of_speculators']:.2f}",
            one,
        )
