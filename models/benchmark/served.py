"""`python -m models.benchmark.served RUN`: the exported draft in the serving engine, on the run's held-out prompts.

Two SGLang servers one after the other, target alone and target with draft: the same prompts, greedy, at several
concurrencies. Acceptance is what the engine emits step by step. Writes RUN/served.json.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.exit import run_main
from infra.files import write_atomically
from infra.processes import Owner
from infra.results import Acceptance, ServedResult, ServedSpeed
from infra.settings import leased_gpus, sglang_platform
from infra.sglang.client import Answer, SGLangClient
from infra.sglang.command import serving_command
from infra.sglang.server import SGLangServer
from models.benchmark.acceptance import summarise
from models.benchmark.bars import Advance, bars
from models.benchmark.prompts import heldout_prompts
from models.decoding.counts import Counts
from models.export.description import read_description
from models.run import Run
from models.targets.end_of_text import eos_ids
from models.targets.served import server_environment, server_spec

NO_MODEL = (
    "not served: SGLang has no model for {0} drafts that are configured like this one; its acceptance and speed are "
    "the reference decoder's"
)
NO_KERNELS = (
    "not served: SGLang has no kernels for speculation on a CPU; on a GPU it would run the target alone and with the "
    "draft, at concurrency {0}"
)

WATCHES = 5
"""A busy server now and then sends two steps together; asked again, greedy, it tells the same steps one by one."""

Ask = Callable[[Sequence[int]], Answer]


@dataclass(frozen=True)
class Served:
    """One server's answers to all prompts, and its speed at every concurrency."""

    answers: Sequence[Answer]
    speeds: tuple[ServedSpeed, ...]


def serve(run: Run) -> ServedResult:
    """Measure both servers. Raises ValueError for what a person has to mend."""
    config, draft = run.config.benchmark, read_description(run.folder.export)
    if not draft.served:
        return ServedResult(lookahead=config.lookahead, note=NO_MODEL.format(draft.config.title))
    if not _has_kernels():
        shown = ", ".join(map(str, config.served_concurrency))
        return ServedResult(lookahead=config.lookahead, note=NO_KERNELS.format(shown))
    plain, speculative = _measure(run, None), _measure(run, run.folder.export)
    pairs = list(zip(plain.answers, speculative.answers, strict=True))
    return ServedResult(
        lookahead=config.lookahead,
        acceptance=summarise([(counts_of(answer, config.lookahead),) for answer in speculative.answers]),
        same_text=sum(alone.tokens == together.tokens for alone, together in pairs),
        plain=plain.speeds,
        speculative=speculative.speeds,
        note=f"temperature 0, {config.max_new_tokens} new tokens at most",
    )


def served_acceptance(run: Run, draft: Path, prompts: Sequence[Sequence[int]]) -> Acceptance | None:
    """Acceptance of a draft in the serving engine; None where that is not the run's engine or cannot run it here."""
    config = run.config.benchmark
    if run.config.generator.engine != "sglang" or not config.served_concurrency or not _has_kernels():
        return None
    if not read_description(draft).served:
        return None
    with serving(run, draft) as client:
        ask = partial(watch, client, sampling=_sampling(run))
        answers = _ask_all(ask, prompts, max(config.served_concurrency), lambda _seconds: None)
    return summarise([(counts_of(answer, config.lookahead),) for answer in answers])


def _has_kernels() -> bool:
    """Whether SGLang can speculate here."""
    return bool(leased_gpus()) or sglang_platform() is not None


def watch(client: SGLangClient, prompt: Sequence[int], sampling: dict[str, Any]) -> Answer:
    """An answer whose every verification step was seen, unless the server sent some together each time it was asked."""
    answer = client.generate_in_steps(prompt, sampling)
    for _ in range(WATCHES - 1):
        if _each_was_seen(answer):
            break
        answer = client.generate_in_steps(prompt, sampling)
    return answer


def _each_was_seen(answer: Answer) -> bool:
    """Whether the steps after the prefill's are as many as the engine counted; one without a draft counts none."""
    return len(answer.steps) - 1 == answer.meta.get("spec_verify_ct", len(answer.steps) - 1)


def counts_of(answer: Answer, lookahead: int) -> Counts:
    """What happened in the engine's verification steps, as the reference decoder counts it.

    Raises ValueError where the engine's own counters tell another story than the tokens that came step by step.
    """
    _prefill, *emitted = answer.steps
    verified, accepted = answer.meta["spec_verify_ct"], answer.meta["spec_num_correct_drafts"]
    if not _each_was_seen(answer):
        raise ValueError(
            f"SGLang made {verified} verification steps, {len(emitted)} were seen: steps were sent together, so their "
            "acceptance cannot be told; lower benchmark.served_concurrency"
        )
    # An accepted draft token that closes the text is emitted without the token that would close the step.
    cut = int(accepted + verified > sum(emitted))
    whole = emitted[:-1] if cut else emitted
    return Counts(lookahead, tuple(tokens - 1 for tokens in whole), cut)


def _measure(run: Run, draft: Path | None) -> Served:
    """One server: a first pass that is watched step by step and warms it up, then one at every concurrency, timed."""
    config, prompts = run.config.benchmark, heldout_prompts(run)
    what = "target alone" if draft is None else "target and draft"
    with serving(run, draft) as client, bars() as bar:
        watched = bar(f"{what}, step by step", len(prompts))
        in_steps = partial(watch, client, sampling=_sampling(run))
        answers = _ask_all(in_steps, prompts, max(config.served_concurrency), lambda _: watched(1))
        speeds = [
            _time(partial(client.generate, sampling=_sampling(run)), prompts, concurrency, bar(what, len(prompts)))
            for concurrency in config.served_concurrency
        ]
    return Served(answers, tuple(speeds))


def _time(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, advance: Advance) -> ServedSpeed:
    latencies: list[float] = []

    def done(seconds: float) -> None:
        latencies.append(seconds)
        advance(1)

    begun = time.perf_counter()
    answers = _ask_all(ask, prompts, concurrency, done)
    wall_s = time.perf_counter() - begun
    ordered = sorted(latencies)
    return ServedSpeed(
        concurrency=concurrency,
        tokens_per_s=sum(len(answer.tokens) for answer in answers) / wall_s,
        latency_p50_s=ordered[len(ordered) // 2],
        latency_p95_s=ordered[int(0.95 * (len(ordered) - 1))],
    )


def _ask_all(
    ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, done: Callable[[float], None]
) -> list[Answer]:
    """All prompts, so many at a time; `done` is told the seconds of each."""

    def one(prompt: Sequence[int]) -> Answer:
        begun = time.perf_counter()
        answer = ask(prompt)
        done(time.perf_counter() - begun)
        return answer

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(one, prompts))


def _sampling(run: Run) -> dict[str, Any]:
    ends = sorted(eos_ids(Path(run.target.path)))
    return {"temperature": 0.0, "max_new_tokens": run.config.benchmark.max_new_tokens, "stop_token_ids": ends}


@contextmanager
def serving(run: Run, draft: Path | None) -> Iterator[SGLangClient]:
    """A server that is up, and stopped again."""
    config, settings = run.config.benchmark, run.config.generator.sglang
    longest = config.prompt_tokens + config.max_new_tokens + config.lookahead + 1
    target, in_flight = Path(run.target.path), max(config.served_concurrency)
    speculation = [] if draft is None else speculative_arguments(draft, config.lookahead)
    spec = server_spec(target, config.compute_dtype, longest, in_flight)
    server = SGLangServer(
        lambda port: serving_command(spec, settings, speculation, port),
        "sglang-serving" if draft is None else "sglang-serving-draft",
        Owner(run.folder.name, run.folder.logs),
        server_environment(run.config.generator, 1),
        settings.start_timeout_s,
    )
    try:
        client = SGLangClient(server, settings.request_timeout_s)
        yield client
        client.close()
    finally:
        server.stop()


def speculative_arguments(draft: Path, lookahead: int) -> list[str]:
    """What SGLang's command line says of an exported draft."""
    path = ["--speculative-draft-model-path", str(draft)]
    return [*path, *read_description(draft).config.engine_arguments(lookahead)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = Run.open(parser.parse_args().run)
    result = serve(run)
    write_atomically(run.folder.served, result)
    print(result.summary, flush=True)


if __name__ == "__main__":
    run_main(main)
