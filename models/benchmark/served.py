"""Drafts in the serving engine, SGLang: servers, prompts watched step by step, acceptance and speed.

`python -m models.benchmark.served RUN` measures a run's exported draft on its held-out prompts, in two servers one
after the other: the target alone, and target with draft. Both get the same prompts, greedy, at several concurrencies.
Acceptance is what the engine emits step by step. Writes RUN/served.json.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.records.acceptance import Acceptance, ServedResult, ServedSpeed
from infra.refusal import Refusal
from infra.settings import leased_gpus, sglang_platform
from infra.sglang.client import Answer, SGLangClient
from infra.sglang.command import ServerSpec, draft_arguments, server_environment, serving_command
from infra.sglang.server import SGLangServer
from models.benchmark.counter import why_engine_counts
from models.config.generator import GeneratorConfig
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import AcceptedCounts, summarise
from models.devices import leased_bytes
from models.export.description import check_precision, read_description
from models.export.serving_settings import arguments_beside
from models.progress_bars import Advance, Bar, bars
from models.run import PreparedRun, RunWithTarget
from models.targets.model import eos_ids
from models.targets.quantization import read_quantization

NO_MODEL = (
    "not served: SGLang has no model for {0} drafts that are configured like this one; its acceptance and speed are "
    "the reference decoder's"
)
NO_KERNELS = (
    "not served: SGLang has no kernels for speculation on a CPU; on a GPU it would run the target alone and with the "
    "draft, at concurrency {0}"
)

WATCHES = 5
"""A busy server sends some steps together; asked again, greedy, it may tell the same steps one by one."""

Ask = Callable[[Sequence[int]], Answer]


def has_kernels() -> bool:
    """Whether SGLang can speculate here."""
    return bool(leased_gpus()) or sglang_platform() is not None


def whats_missing(draft: Path, concurrency: Sequence[int]) -> str | None:
    """Why SGLang cannot serve an exported draft here, for a person; None if it can."""
    description = read_description(draft)
    if not description.served:
        return NO_MODEL.format(description.config.title)
    return None if has_kernels() else NO_KERNELS.format(", ".join(map(str, concurrency)))


@dataclass(frozen=True)
class Setup:
    """How a target is served for a benchmark."""

    target: Path
    generator: GeneratorConfig
    """The generator's settings, for SGLang's arguments."""
    dtype: str
    prompt_tokens: int
    max_new_tokens: int
    concurrency: Sequence[int]
    """Requests at a time."""
    owner: Owner

    @contextmanager
    def serving(self, draft: Path | None, lookahead: int) -> Iterator[SGLangClient]:
        """A server that is up, and stopped again; without a draft the target alone."""
        settings, longest = self.generator.sglang, self.prompt_tokens + self.max_new_tokens + lookahead + 1
        spec = ServerSpec(self.target, self.dtype, longest, max(self.concurrency))
        speculation = []
        if draft is not None:
            quantization = read_quantization(self.target) or settings.quantization
            check_precision(draft, quantization)
            config = read_description(draft).config
            beside = arguments_beside(self.target, config, quantization, on_gpus=spec.gpus > 0)
            speculation = [*speculative_arguments(draft, lookahead), *beside]
        server = SGLangServer(
            lambda port: serving_command(spec, settings, speculation, port),
            "sglang-serving" if draft is None else "sglang-serving-draft",
            self.owner,
            server_environment(settings, self.generator.threads),
            settings.start_timeout_s,
            spec.machines,
        )
        try:
            client = SGLangClient(server, settings.request_timeout_s, settings.start_timeout_s)
            yield client
            client.close()
        finally:
            server.stop()

    def watch_all(
        self, client: SGLangClient, prompts: Sequence[Sequence[int]], advance: Advance = lambda _: None
    ) -> list[Answer]:
        """Greedy answers whose every step was seen."""
        return ask_all(partial(watch, client, sampling=self.greedy), prompts, max(self.concurrency), advance)

    @property
    def greedy(self) -> dict[str, Any]:
        """Sampling settings of a greedy request."""
        ends = sorted(eos_ids(self.target))
        return {"temperature": 0.0, "max_new_tokens": self.max_new_tokens, "stop_token_ids": ends}


def speculative_arguments(draft: Path, lookahead: int) -> list[str]:
    """SGLang's arguments for an exported draft, whatever its target."""
    return [*draft_arguments(draft), *read_description(draft).config.engine_arguments(lookahead)]


def served_at(draft: Path, lookahead: int) -> int:
    """The lookahead of an exported draft beside another that is served at `lookahead`: the nearest that it has."""
    return read_description(draft).config.lookaheads(lookahead)[-1]


def ask_all(
    ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, advance: Advance = lambda _: None
) -> list[Answer]:
    """Send all prompts, several at a time; `advance` is called after each."""

    def one(prompt: Sequence[int]) -> Answer:
        answer = ask(prompt)
        advance(1)
        return answer

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(one, prompts))


def watch(client: SGLangClient, prompt: Sequence[int], sampling: dict[str, Any]) -> Answer:
    """An answer whose every verification step was seen, unless the server sent some together each time it was asked."""
    answer = client.generate(prompt, sampling, in_steps=True)
    for _ in range(WATCHES - 1):
        if _each_was_seen(answer):
            break
        answer = client.generate(prompt, sampling, in_steps=True)
    return answer


def _each_was_seen(answer: Answer) -> bool:
    """Whether the steps after the prefill's are as many as the engine counted; one without a draft counts none."""
    return len(answer.steps) - 1 == answer.meta.get("spec_verify_ct", len(answer.steps) - 1)


def counts_of(answer: Answer, lookahead: int, ends: frozenset[int]) -> AcceptedCounts:
    """What happened in the engine's verification steps, as the reference decoder counts it.

    Where the server sent steps together, the engine's histogram of accepted draft tokens takes their place: ascending,
    in place of the steps' order, which no figure depends on. If the text ends within a step, the largest count that
    fits the last message is taken for that step's: the end is likeliest to fall into a long step. One of `ends` closes
    it; otherwise the maximum length cut it.

    Raises Refusal where the engine's counters contradict each other.
    """
    # An answer that the prefill ended was not verified, and SGLang leaves out its counters.
    verified, accepted = answer.meta.get("spec_verify_ct", 0), answer.meta.get("spec_num_correct_drafts", 0)
    # An accepted draft token that closes the text is emitted without the token that would close the step.
    missing, unclosed = accepted + verified - (len(answer.tokens) - 1), 0
    if _each_was_seen(answer):
        counts = [tokens - 1 for tokens in answer.steps[1:]]
        if missing > 0:
            unclosed = counts.pop() + 1
    else:
        histogram = answer.meta["spec_correct_drafts_histogram"]
        counts = [count for count, steps in enumerate(histogram) for _ in range(steps)]
        fitting = [count for count in counts if missing <= count < answer.steps[-1] + missing]
        if missing < 0 or (len(counts), sum(counts)) != (verified, accepted) or (missing and not fitting):
            raise Refusal(
                f"SGLang's counters contradict each other: {verified} verification steps, {accepted} accepted tokens, "
                f"by step {histogram}, {len(answer.tokens)} tokens; install the SGLang that `make sglang` does"
            )
        if missing:
            counts.remove(max(fitting))
            unclosed = max(fitting) + 1 - missing
    ended = unclosed if answer.tokens[-1] in ends else 0
    return AcceptedCounts(lookahead, tuple(counts), int(unclosed > ended), ended)


def serve(run: PreparedRun) -> ServedResult:
    """Measure both servers. Raises Refusal for what a person has to correct."""
    config = run.config.benchmark
    missing = whats_missing(run.folder.export, config.served_concurrency)
    if missing:
        return ServedResult(lookahead=config.lookahead, note=missing)
    alone, plain = _measure(run, None)
    together, speculative = _measure(run, run.folder.export)
    return ServedResult(
        lookahead=config.lookahead,
        acceptance=acceptance_of(together, config.lookahead, eos_ids(Path(run.target.path))),
        texts=tuple(tuple(answer.tokens) for answer in together),
        same_text=sum(one.tokens == other.tokens for one, other in zip(alone, together, strict=True)),
        plain=plain,
        speculative=speculative,
        note=f"temperature 0, {config.max_new_tokens} new tokens at most",
    )


def served_answers(run: RunWithTarget, draft: Path, prompts: Sequence[Sequence[int]]) -> list[Answer] | None:
    """Answers of the serving engine with a draft; None if the run uses no serving engine or it cannot run here."""
    config = run.config.benchmark
    if run.config.own_engine != "sglang" or not config.served_concurrency:
        return None
    if whats_missing(draft, config.served_concurrency):
        return None
    setup = setup_of(run)
    with setup.serving(draft, config.lookahead) as client:
        return setup.watch_all(client, prompts)


def acceptance_of(answers: Sequence[Answer], lookahead: int, ends: frozenset[int]) -> Acceptance:
    """Acceptance in the engine at its lookahead."""
    return summarise([(counts_of(answer, lookahead, ends),) for answer in answers])


def setup_of(run: RunWithTarget, prompt_tokens: int = 0) -> Setup:
    """How a run's target is served: on as many GPUs as a generator's copy.

    `prompt_tokens`: of prompts that are longer than benchmark.prompt_tokens.
    """
    config, generator = run.config.benchmark, run.config.generator
    # A copy on more GPUs than a generator's has could have a number of ranks that does not divide the target's heads.
    sglang = generator.sglang.model_copy(update={"tensor_parallel": run.config.gpus_per_copy})
    return Setup(
        Path(run.target.path),
        generator.model_copy(update={"sglang": sglang}),
        run.config.benchmark_dtype,
        max(config.prompt_tokens, prompt_tokens),
        config.max_new_tokens,
        config.served_concurrency or (1,),
        Owner(run.folder.name, run.folder.logs),
    )


def _measure(run: PreparedRun, draft: Path | None) -> tuple[list[Answer], tuple[ServedSpeed, ...]]:
    """One server: a first pass that is watched step by step and warms it up, then one at every concurrency, timed."""
    config, setup = run.config.benchmark, setup_of(run)
    prompts = heldout_prompts(run.open_samples("heldout"), config)
    what = "target alone" if draft is None else "target and draft"
    with setup.serving(draft, config.lookahead) as client, bars() as bar:
        answers = setup.watch_all(client, prompts, bar(f"{what}, step by step", len(prompts)))
        return answers, time_all(setup, client, prompts, what, bar)


def time_all(
    setup: Setup, client: SGLangClient, prompts: Sequence[Sequence[int]], what: str, bar: Bar
) -> tuple[ServedSpeed, ...]:
    """Time the prompts at every concurrency, on a server that has seen them."""
    return tuple(
        _time(partial(client.generate, sampling=setup.greedy), prompts, concurrency, bar(what, len(prompts)))
        for concurrency in setup.concurrency
    )


def _time(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, advance: Advance) -> ServedSpeed:
    begun = time.perf_counter()
    answers = ask_all(ask, prompts, concurrency, advance)
    wall_s = time.perf_counter() - begun
    return ServedSpeed(concurrency=concurrency, tokens_per_s=sum(len(answer.tokens) for answer in answers) / wall_s)


def main() -> None:
    run = PreparedRun.open(Path(sys.argv[1]))
    if why := why_engine_counts(run, leased_bytes()):
        run.folder.served.unlink(missing_ok=True)
        print(f"served in the benchmark itself: {why}", flush=True)
        return
    result = serve(run)
    write_atomically(run.folder.served, result)
    print(result.summary, flush=True)


if __name__ == "__main__":
    run_main(main)
