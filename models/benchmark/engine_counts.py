"""A benchmark whose acceptance the serving engine counts, for targets that the reference decoder cannot decode.

SGLang runs three times, one server after the other, over all inference GPUs: target with draft, with the champion, and
alone. All get the same prompts, greedily. Its verification steps take the place of the simulated walks, and its plain
text is what the served text must equal. What needs the target's logits is left out: other lookaheads, sampled text,
Token Recycling, goodput.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from infra.records.acceptance import (
    BenchmarkResult,
    Conditions,
    DivergenceRecord,
    GateEvidence,
    Ground,
    LosslessRecord,
    RequestCounts,
    Rows,
    ServedResult,
    ServedSpeed,
    SpeedRecord,
    SuiteResult,
)
from infra.records.benchmark_text import summary
from infra.refusal import Refusal
from infra.sglang.client import Answer, SGLangClient
from models.benchmark.categories import suite_result
from models.benchmark.conditions import Counter, conditions
from models.benchmark.gate import decide
from models.benchmark.measure import Walk, at
from models.benchmark.reference import speed_record
from models.benchmark.result import HELD_OUT
from models.benchmark.result import rows as counted
from models.benchmark.served import Setup, ask_all, counts_of, served_at, setup_of, time_all, whats_missing
from models.config.benchmark import TrafficConfig
from models.data.prompts import SuitePrompts, heldout_prompts, suite_prompts
from models.decoding.acceptance import AcceptedCounts, acceptance_length, distinct_token_share, summarise
from models.decoding.lossless import FLOAT32_DELTA, compare_texts, total
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import simulate
from models.progress_bars import bars
from models.run import PreparedRun
from models.targets.model import eos_ids

TIE_DELTAS = {"float32": FLOAT32_DELTA, "bfloat16": 0.25}
"""Two logits this close may be swapped by rounding. bfloat16 numbers between 16 and 32 are 0.125 apart, and both logits
are rounded; no float32 forward of such a target is there to say more."""


@dataclass(frozen=True)
class ServedText:
    """The target's own text, by a server without a draft."""

    client: SGLangClient
    setup: Setup
    eos_ids: frozenset[int]

    @property
    def max_new_tokens(self) -> int:
        return self.setup.max_new_tokens

    def continued(self, prefix: list[int], tokens: int) -> list[int]:
        """See `OwnText`."""
        return self.client.generate(prefix, self.setup.greedy | {"max_new_tokens": tokens}).tokens

    def judge(self, prefix: list[int], position: int, token: int) -> DivergenceRecord:
        """By the server's own log-probabilities after `prefix`."""
        once = self.setup.greedy | {"max_new_tokens": 1, "ignore_eos": True}
        asked = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [token]}
        meta = self.client.generate(prefix, once, **asked).meta
        # Of the only new token, the only entry: (log-probability, token, text).
        best, own = (meta[f"output_{name}_logprobs"][0][0][0] for name in ("top", "token_ids"))
        gap, delta = best - own, TIE_DELTAS[self.setup.dtype]
        return DivergenceRecord(position=position, token=token, gap=gap, delta=delta, tie=gap <= delta)


@dataclass(frozen=True)
class EngineCounts:
    """What the servers answered to all prompts: the held-out ones first, then those of the suites."""

    prompts: list[list[int]]
    draft: list[AcceptedCounts]
    champion: list[AcceptedCounts] | None
    served: list[list[int]]
    """Text of target and draft."""
    plain: list[list[int]]
    lossless: LosslessRecord
    plain_speeds: tuple[ServedSpeed, ...]
    speculative_speeds: tuple[ServedSpeed, ...]
    counter: Counter
    eos_ids: frozenset[int]

    def part(self, rows: slice) -> tuple[list[AcceptedCounts], list[AcceptedCounts] | None]:
        """Counts of draft and champion on some prompts."""
        return self.draft[rows], self.champion and self.champion[rows]

    def grounds_rows(self, rows: slice, lookahead: int) -> dict[str, Rows | None]:
        """What a ground compares: draft, champion and prompt lookup on some prompts."""
        draft, champion = self.part(rows)
        lookup = at(walk_prompt_lookup(self.prompts[rows], self.plain[rows], lookahead, self.eos_ids), lookahead)
        sides = {"challenger": draft, "champion": champion, "prompt_lookup": lookup}
        return {name: None if side is None else counted(side) for name, side in sides.items()}


def measure_in_engine(
    run: PreparedRun, champion: Path | None, heldout: list[list[int]], suites: dict[str, SuitePrompts]
) -> EngineCounts:
    """Ask all servers. Raises Refusal for a draft that SGLang cannot serve here."""
    config, quantization = run.config.benchmark, run.config.served_quantization(run.target.quantization)
    prompts = [*heldout, *(prompt for suite in suites.values() for prompt in suite.prompts)]
    setup = setup_of(run, max(map(len, prompts)))
    if missing := whats_missing(run.folder.export, setup.concurrency):
        raise Refusal(f"only the serving engine can count this target's acceptance, and the draft is {missing}")
    drafts, ends = [run.folder.export, *([champion] if champion else [])], eos_ids(setup.target)
    counted, speculative, answers = [], (), list[Answer]()
    with bars() as bar:
        for draft in drafts:
            name = "target and draft" if draft == run.folder.export else "target and champion"
            # A champion of another method may be served in whole blocks, or have fewer heads.
            proposed = config.lookahead if draft == run.folder.export else served_at(draft, config.lookahead)
            with setup.serving(draft, proposed) as client:
                found = setup.watch_all(client, prompts, bar(f"{name}, step by step", len(prompts)))
                if draft == run.folder.export:
                    answers, speculative = found, time_all(setup, client, heldout, name, bar)
            counted.append([counts_of(answer, proposed, ends) for answer in found])
        with setup.serving(None, config.lookahead) as client:
            answered = bar("target alone", len(prompts))
            ask = partial(client.generate, sampling=setup.greedy)
            plain = [a.tokens for a in ask_all(ask, prompts, max(setup.concurrency), answered)]
            own = ServedText(client, setup, ends)
            served = [answer.tokens for answer in answers]
            compared = [compare_texts(own, *texts) for texts in zip(prompts, served, plain, strict=True)]
            speeds = time_all(setup, client, heldout, "target alone", bar)
    counter = Counter.sglang(setup.dtype, max(setup.concurrency), quantization)
    rival = counted[1] if champion else None
    return EngineCounts(prompts, counted[0], rival, served, plain, total(compared), speeds, speculative, counter, ends)


def benchmark_in_engine(
    run: PreparedRun, champion: Path | None, champion_label: str
) -> tuple[BenchmarkResult, GateEvidence, RequestCounts]:
    """Measure a run's exported draft, and judge it. Raises Refusal for what a person has to correct."""
    config, promotion = run.config.benchmark, run.config.promotion
    heldout = heldout_prompts(run.open_samples("heldout"), config)
    suites = {name: suite_prompts(run.config, run.target, name) for name in promotion.suites}
    found, own = measure_in_engine(run, champion, heldout, suites), slice(0, len(heldout))
    grounds = [_ground(HELD_OUT, run.samples.dataset_hash, promotion.margin, found, own, config.lookahead)]
    shown, start = list[SuiteResult](), len(heldout)
    for name, suite in suites.items():
        rows, start = slice(start, start + len(suite.prompts)), start + len(suite.prompts)
        compared = _ground(
            name, suite.dataset_hash, promotion.suite_margin, found, rows, config.lookahead,
            categories=suite.categories, contexts=tuple(map(len, suite.prompts)),
        )  # fmt: skip
        grounds.append(compared)
        shown.append(suite_result(compared, distinct_token_share(found.plain[rows]), suite.too_long))
    evidence = GateEvidence(
        champion_label=champion_label,
        lookahead=config.lookahead,
        caveat=caveat(promotion.traffic),
        max_gap=promotion.max_gap,
        min_distinct_token_share=config.min_distinct_token_share,
        distinct_token_share=distinct_token_share(found.plain[own]),
        mismatches=found.lossless.mismatches,
        gap=None,
        category_tolerance=promotion.category_tolerance,
        grounds=tuple(grounds),
    )
    under = conditions(
        config, found.counter, target=run.target, draft=run.folder.export, dataset_hash=run.samples.dataset_hash,
        template_hash=run.samples.template_hash, prompts=len(heldout),
        texts=zip(heldout, found.plain[own], strict=True),
    )  # fmt: skip
    counts = {config.lookahead: tuple(
        one.as_served(len(text) - 1) for one, text in zip(found.draft[own], found.served[own], strict=True)
    )}  # fmt: skip
    shared = tuple(tuple(prompt) for prompt in heldout[: promotion.smoke_prompts])
    requests = RequestCounts(conditions=under, greedy=counts, sampled={}, prompts=shared)
    return _result(found, own, under, evidence, shown, config.max_lookahead), evidence, requests


def caveat(traffic: TrafficConfig) -> str:
    """What of the traffic an engine's counts do not show."""
    missing = ["sampled text"] if traffic.sampling == "sampled" else []
    missing += [] if traffic.loads == () else ["step costs"]
    why = f", because SGLang counted and has no figures of {' or '.join(missing)}" if missing else ""
    return why and f"decided on greedy text, by tokens per step{why}"


def _ground(
    name: str, dataset_hash: str, margin: float, found: EngineCounts, rows: slice, lookahead: int, **groups: tuple
) -> Ground:
    """All contestants on some prompts; `groups` as of `models.benchmark.result.ground`."""
    acceptance_length(found.draft[rows])  # refuses conversations without a complete step
    sides = found.grounds_rows(rows, lookahead)
    return Ground.model_validate({"name": name, "dataset_hash": dataset_hash, "margin": margin, **sides, **groups})


def _result(
    found: EngineCounts,
    own: slice,
    under: Conditions,
    evidence: GateEvidence,
    suites: Sequence[SuiteResult],
    max_lookahead: int,
) -> BenchmarkResult:
    ours, theirs = found.part(own)
    draft = summarise([(counts,) for counts in ours])
    lookup = summarise(walk_prompt_lookup(found.prompts[own], found.plain[own], max_lookahead, found.eos_ids))
    served = ServedResult(
        lookahead=under.lookahead,
        acceptance=draft,
        same_text=sum(one == other for one, other in zip(found.served[own], found.plain[own], strict=True)),
        plain=found.plain_speeds,
        speculative=found.speculative_speeds,
        note=f"temperature 0, {under.max_new_tokens} new tokens at most",
    )
    result = BenchmarkResult(
        conditions=under,
        traffic="greedy",
        target_distinct_token_share=evidence.distinct_token_share,
        acceptance=draft,
        prompt_lookup=lookup,
        champion=None if theirs is None else summarise([(counts,) for counts in theirs]),
        served=served,
        suites=tuple(suites),
        lossless=found.lossless,
        speed=_speed(found, own),
        gate=decide(evidence),
        summary="",
        wall_s=0.0,
    )
    return result.model_copy(update={"summary": summary(result)})


def walk_prompt_lookup(
    prompts: Sequence[list[int]], texts: Sequence[list[int]], max_lookahead: int, ends: frozenset[int]
) -> Walk:
    """A baseline that needs the texts alone."""
    walks = []
    for prompt, text in zip(prompts, texts, strict=True):
        unread = torch.empty(len(prompt) + len(text) - 1, 0)
        walks.append(simulate(PromptLookup(), prompt, text, unread, max_lookahead, eos_ids=ends))
    return walks


def _speed(found: EngineCounts, own: slice) -> SpeedRecord:
    """At the smallest concurrency."""
    plain, speculative = found.plain_speeds[0], found.speculative_speeds[0]
    tokens, length = sum(map(len, found.plain[own])), acceptance_length(found.draft[own])
    speed = speed_record(tokens, tokens / plain.tokens_per_s, tokens / speculative.tokens_per_s, length)
    how = f"{tokens} tokens, {plain.concurrency} at a time in the serving engine, prefill included"
    return speed if speed.flagged else speed.model_copy(update={"note": how})
