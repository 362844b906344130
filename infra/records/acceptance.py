"""The records of what a draft is worth: acceptance, conditions, verdicts, registered versions; never tensors."""

from collections.abc import Mapping
from typing import Literal

from infra.config import left_out
from infra.records.data_path import Record
from infra.records.goodput import GoodputEvidence, MeasuredGoodput

UNTRAINED = "no draft", "prompt lookup"
"""Rivals of every draft that need no training, as the gate calls them."""

Rows = tuple[tuple[float, float], ...]
"""Tokens and complete verification steps of each conversation; expectations where proposals are drawn."""


class SideAtLoad(Record):
    """One contestant on the conversations of a ground, at its own best lookahead."""

    lookahead: int
    step_s: float
    """Seconds of a step of all texts, drafting included."""
    rows: Rows


class GroundAtLoad(Record):
    """All contestants at one number of texts at once, to be compared by tokens per second."""

    batch: int
    plain_step_s: float
    """Seconds of a step without a draft, which emits one token of each text."""
    challenger: SideAtLoad
    champion: SideAtLoad | None
    prompt_lookup: SideAtLoad | None


class Ground(Record):
    """One set of prompts on which a challenger is compared, all contestants on the same texts."""

    name: str
    dataset_hash: str
    margin: float
    challenger: Rows
    """At the benchmark's lookahead, as the next two, but for a champion that the engine served at its own."""
    champion: Rows | None
    """None without a champion."""
    prompt_lookup: Rows | None = None
    loads: tuple[GroundAtLoad, ...] = ()
    """Those of the traffic; empty: tokens per step are compared."""
    categories: tuple[str, ...] = ()
    """Category of each conversation; empty without categories."""
    contexts: tuple[int, ...] = ()
    """Prompt tokens of each conversation; empty: not recorded."""


class GateEvidence(Record):
    """`gate.json`: all that a gate's decision follows from, so that it can be decided again."""

    champion_label: str
    """`version N`, or what else the champion is called."""
    lookahead: int
    """The benchmark's."""
    caveat: str = ""
    """Where the traffic that the recipe names was not measured: what decided in its place."""
    max_gap: float
    min_distinct_token_share: float
    distinct_token_share: float
    """Distinct tokens / tokens of the target's greedy text."""
    mismatches: int
    """Between speculative text and the target's own."""
    gap: float | None
    """Relative, between simulated and reference acceptance length; None where the serving engine counted."""
    served_gap: float | None = None
    """Relative difference of served and simulated acceptance length; None if not served."""
    category_tolerance: float = 0.05
    goodput: GoodputEvidence | None = None
    """None if `benchmark.loads` is empty."""
    grounds: tuple[Ground, ...]
    """The held-out prompts first, then the suites."""


class GroundDecision(Record):
    """The decision on one ground; `against` is the last opponent."""

    ground: str
    passed: bool
    against: str
    """`no draft`, `prompt lookup`, or `version N`."""
    load: int | None = None
    """Texts at once; then both sides' figures are tokens per second, otherwise tokens per step."""
    challenger: float
    champion: float
    difference: float
    lower_bound: float
    """One-sided 97.5 % bound of the relative difference."""
    margin: float
    smallest_detectable: float
    prompts_needed: int | None = None
    """To show a difference of this size; None: it is shown, or does not exceed the margin."""


class CategoryDecision(Record):
    """Challenger against champion on the prompts of one category of one ground."""

    ground: str
    category: str
    """Or the pooled ones."""
    prompts: int
    challenger: float
    champion: float
    difference: float
    """Relative."""
    p: float | None
    """Holm-adjusted, one-sided: that the challenger is worse by no more than the tolerance. None: too few prompts."""
    smallest_detectable: float | None
    """The worsening, relative, that would block with a power of 80 % if it were the only one."""
    blocks: bool


class GateDecision(GroundDecision):
    """Whether a challenger earned promotion, and why. The figures are of the ground that decided; `grounds` are all."""

    reason: str
    grounds: tuple[GroundDecision, ...]
    categories: tuple[CategoryDecision, ...] = ()
    instead: str | None = None
    """The method without training that is the better choice: `no draft` or `prompt lookup`; None: none is."""
    instead_arguments: tuple[str, ...] = ()
    unproven: bool = False
    """Not passed, and yet ahead of every rival: only certainty is missing."""


class RegisteredDraft(Record):
    """A version in the model registry."""

    name: str
    version: int
    model_id: str
    aliases: tuple[str, ...]
    acceptance_length: float | None = None
    tags: Mapping[str, str] = {}


class Acceptance(Record):
    """Acceptance of one source of proposals over one set of conversations: ratios of sums over complete steps."""

    conversations: int
    length: Mapping[int, float]
    """Acceptance length by lookahead: tokens emitted after the prefill token / verification steps."""
    steps: Mapping[int, int]
    """Verification steps by lookahead."""
    by_position: tuple[float | None, ...]
    """At the largest lookahead: share of steps that accept token i, given 1..i-1; None if never proposed."""


class Conditions(Record):
    """What an acceptance number depends on; numbers with different conditions are not compared."""

    target: str
    target_revision: str
    draft: str
    draft_revision: str
    """SHA-256 of the draft's weights."""
    dataset_hash: str
    template_hash: str
    thinking: bool
    """The target reasons in the texts that were measured."""
    temperature: float
    """Temperature of the main figures; sampled figures carry their own."""
    sampled_temperature: float
    sampled_top_k: int = 0
    """0: not used."""
    sampled_top_p: float = 1.0
    proposals: str = "drawn"
    """How the draft proposes for sampled text as it is served: `greedy` or `drawn`. Each sampled figure names its own
    rule."""
    prompts: int
    prompt_tokens: int
    max_new_tokens: int
    lookahead: int
    topk: int
    concurrency: int
    engine: str
    """What counted: `transformers` (the reference decoder), or `sglang` with its version."""
    quantization: str | None = None
    """Of the target as it was decoded; None: floating-point numbers."""
    versions: Mapping[str, str]
    dtype: str
    hardware: str
    threads: int


class GroupAcceptance(Record):
    """One source of proposals on the conversations of one category, or of one range of context."""

    group: str
    conversations: int
    length: float | None
    """Acceptance length at one lookahead; None without a complete step."""
    champion: float | None = None
    steps: int


class SuiteResult(Record):
    """Acceptance on one suite at the benchmark's lookahead, by category and by the length of the prompt."""

    name: str
    dataset_hash: str
    too_long: int = 0
    """Questions left out because of their length."""
    distinct_token_share: float
    """Distinct tokens / tokens of the target's text, sampled as the traffic is."""
    whole: GroupAcceptance
    by_category: tuple[GroupAcceptance, ...] = ()
    by_context: tuple[GroupAcceptance, ...] = ()


class RequestCounts(Record):
    """`request_counts.json`: what each conversation of a benchmark came to, as a serving engine counts requests.

    One row per conversation: tokens emitted after the prefill token, verification steps. A step that the maximum
    length cut is counted too, as engines do; the benchmark's own figures leave it out.
    """

    conditions: Conditions
    greedy: Mapping[int, Rows]
    """Counts by lookahead."""
    sampled: Mapping[int, Rows]
    """The same over text that the target sampled at `conditions.sampled_temperature`, proposals as `conditions` says,
    and steps expected where they are drawn; empty where an engine counted."""
    texts: tuple[tuple[int, ...], ...] = ()
    """The target's greedy text in the first conversations, for the smoke test, which in bfloat16 another batch, or
    another machine, would not write; empty where the serving engine counted."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Of the first conversations, as token ids, for whoever serves the draft."""


class DivergenceRecord(Record):
    """One place where speculative text leaves the target's own; `gap` None where only one text ends."""

    position: int
    token: int | None
    gap: float | None
    delta: float
    tie: bool


class LosslessRecord(Record):
    """Speculative text against the target's own."""

    tokens: int
    mismatches: int
    ties: int
    divergences: tuple[DivergenceRecord, ...]


class SpeedRecord(Record):
    """Decoding speed at batch 1 after the prefill, plain and speculative, on the same prompts in the same run."""

    tokens: int
    acceptance_length: float
    plain_tokens_per_s: float
    speculative_tokens_per_s: float | None
    """None if the figure is impossible and therefore not published."""
    speedup: float | None
    flagged: bool
    note: str


class ServedSpeed(Record):
    """All prompts through a serving engine at one concurrency."""

    _gone = left_out("latency_p50_s", "latency_p95_s")
    concurrency: int
    tokens_per_s: float


class ServedResult(Record):
    """`served.json`: figures of the draft in the serving engine; empty if it cannot be served."""

    lookahead: int
    acceptance: Acceptance | None = None
    texts: tuple[tuple[int, ...], ...] = ()
    """What the engine emitted for each prompt."""
    same_text: int = 0
    """Conversations in which target and draft gave the target's own text."""
    plain: tuple[ServedSpeed, ...] = ()
    speculative: tuple[ServedSpeed, ...] = ()
    note: str

    @property
    def length(self) -> float | None:
        """Acceptance length; None where it was not served."""
        return self.acceptance and self.acceptance.length[self.lookahead]

    @property
    def summary(self) -> str:
        """One line for people."""
        if self.acceptance is None:
            return self.note
        speeds = ", ".join(
            f"{fast.tokens_per_s / slow.tokens_per_s:.2f}x at {slow.concurrency}"
            for slow, fast in zip(self.plain, self.speculative, strict=True)
        )
        return (
            f"served: acceptance length {self.length:.2f} at lookahead {self.lookahead} over "
            f"{self.acceptance.steps[self.lookahead]} verification steps, the target's own text in {self.same_text} of "
            f"{self.acceptance.conversations} conversations, throughput against the target alone {speeds} at a time"
        )


class SmokeResult(Record):
    """`smoke.json`: whether a draft from the registry decodes as it was benchmarked, and what was seen."""

    passed: bool
    reason: str


class BenchmarkResult(Record):
    """`benchmark.json`: what a draft is worth on the held-out prompts."""

    _gone = left_out("sampled_reference", "sampled_deviation", "vocabulary_mass")
    conditions: Conditions
    traffic: Literal["greedy", "sampled"]
    """Which of the target's texts the gate judges, and `length` is of."""
    target_distinct_token_share: float
    """Mean over greedy continuations of distinct tokens / tokens."""
    sampled_distinct_token_share: float | None = None
    acceptance: Acceptance
    """Over greedy text: simulated at every lookahead, or counted by the serving engine at one (`conditions.engine`)."""
    reference: Acceptance | None = None
    """Real decoding of the first conversations, at one lookahead. This and what follows, up to the baselines, is None
    where the serving engine counted."""
    gap: float | None = None
    """Relative difference of simulated and reference acceptance length on the reference conversations."""
    counts_identical: bool | None = None
    """Simulated and reference counts agree step by step (conversations with a tie or mismatch left out)."""
    counts_compared: int = 0
    """Conversations of that comparison."""
    sampled: Acceptance | None = None
    """Over text that the target alone sampled, on all conversations: what speculative sampling accepts of greedy
    proposals."""
    sampled_drawn: Acceptance | None = None
    """The same of proposals that are drawn from the draft's distribution: expectations given the text."""
    prompt_lookup: Acceptance
    prompt_lookup_sampled: Acceptance | None = None
    more_baselines: Mapping[str, Acceptance] = {}
    """What else needs no training, by name: Token Recycling, which needs the target's likely tokens, and suffix
    decoding, cold and, with a log of requests, warm."""
    more_baselines_sampled: Mapping[str, Acceptance] = {}
    served: ServedResult | None = None
    """Figures of the serving engine; None if not measured."""
    goodput: MeasuredGoodput | None = None
    """Tokens per second that are expected of a served draft; None: no loads were asked for."""
    champion: Acceptance | None = None
    champion_sampled: Acceptance | None = None
    """Over sampled text, with proposals as `conditions.proposals` says."""
    suites: tuple[SuiteResult, ...] = ()
    """Those of `promotion.suites`."""
    lossless: LosslessRecord
    speed: SpeedRecord
    gate: GateDecision
    summary: str
    wall_s: float

    def draft_on(self, traffic: str) -> Acceptance | None:
        """The draft over `greedy` or `sampled` text; None where that was not measured."""
        sampled = self.sampled_drawn if self.conditions.proposals == "drawn" else self.sampled
        return self.acceptance if traffic == "greedy" else sampled

    def champion_on(self, traffic: str) -> Acceptance | None:
        """The champion, likewise."""
        return self.champion if traffic == "greedy" else self.champion_sampled

    def baselines_on(self, traffic: str) -> dict[str, Acceptance]:
        """What needs no training, by name."""
        greedy = traffic == "greedy"
        lookup = self.prompt_lookup if greedy else self.prompt_lookup_sampled
        more = self.more_baselines if greedy else self.more_baselines_sampled
        return {**({"prompt lookup": lookup} if lookup else {}), **more}

    @property
    def length(self) -> float:
        """Acceptance length at the benchmark's lookahead, on the traffic's text."""
        judged = self.draft_on(self.traffic)
        assert judged is not None, "the gate judges what was measured"
        return judged.length[self.conditions.lookahead]

    @property
    def unbeaten(self) -> list[str]:
        """Names of the baselines that the draft does not beat on the traffic's text."""
        at = self.conditions.lookahead
        return [name for name, of in self.baselines_on(self.traffic).items() if of.length[at] >= self.length]
