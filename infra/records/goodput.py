"""The records of goodput: measured step costs, the cost model, what every lookahead gives at every load.

Like `infra.records.acceptance`: numbers only. Goodput is tokens emitted per second (SmartSpec, arXiv 2406.14066).
"""

from infra.config import left_out
from infra.records.data_path import Record


class StepTime(Record):
    """Measured seconds of one forward of the target, or of one drafting."""

    batch: int
    """Texts."""
    tokens: int
    """Tokens per sequence: verified by the target (lookahead + 1), or proposed by the draft (lookahead)."""
    seconds: float


class CostFit(Record):
    """Seconds as a sum of what is paid once, by text and by token; dearer tokens beyond what the hardware does at once.

    constant + per_text B + per_token N + per_token_beyond max(0, N - knee), with B texts and N = B x tokens, and
    several + several_per_text B where tokens > 1: engines and processors have a faster way for one token of each text.
    together where B > 1: a single text needs neither padding nor a mask.
    per_position is paid by tokens of each text, however many texts there are: a chain is drafted token after token.
    """

    _gone = left_out("worst_error")
    constant: float
    per_text: float
    per_token: float
    knee: float
    per_token_beyond: float
    several: float
    several_per_text: float
    together: float
    per_position: float

    def seconds(self, batch: int, tokens: float) -> float:
        """`tokens` of each of `batch` texts, or on average."""
        total = batch * tokens
        beyond = self.per_token_beyond * max(0.0, total - self.knee)
        several = (self.several + self.several_per_text * batch) * (tokens > 1)
        shared = self.constant + self.together * (batch > 1) + self.per_position * tokens
        return shared + self.per_text * batch + self.per_token * total + beyond + several


class Goodput(Record):
    """What one lookahead is expected to give at one load."""

    batch: int
    lookahead: int
    step_s: float
    tokens_per_step: float
    """Tokens per sequence and step: the acceptance length."""
    tokens_per_s: float
    """Tokens per second of all sequences."""


class GoodputTable(Record):
    """Predicted goodput of every lookahead that can be served, 0 included, at every load, and what it follows from."""

    rates: tuple[float, ...]
    """Acceptance rate by position, given all before."""
    target: CostFit
    draft: CostFit
    rows: tuple[Goodput, ...]
    """Rows by batch size, then lookahead."""

    @property
    def best(self) -> dict[int, int]:
        """The lookahead of greatest goodput by batch, the smaller one of equals."""
        return {batch: self.best_at(batch).lookahead for batch in dict.fromkeys(row.batch for row in self.rows)}

    def best_at(self, batch: int) -> Goodput:
        """The row with the greatest goodput at this load; of equals, the smaller lookahead."""
        return max((row for row in self.rows if row.batch == batch), key=lambda row: (row.tokens_per_s, -row.lookahead))

    def proposing_at(self, batch: int) -> Goodput:
        """The row with the greatest goodput at this load that proposes something."""
        rows = (row for row in self.rows if row.batch == batch and row.lookahead)
        return max(rows, key=lambda row: (row.tokens_per_s, -row.lookahead))

    def plain_at(self, batch: int) -> Goodput:
        """The target alone."""
        return next(row for row in self.rows if row.batch == batch and row.lookahead == 0)


MOST_CALIBRATION_ERROR = 0.05
"""By which chances may be wrong on average, beyond what few steps show of exact ones."""


class ConfidenceFit(Record):
    """How a draft's confidences have to be read, by position of the proposal; see `models.decoding.calibration`."""

    temperatures: tuple[float, ...]
    steps: int
    """Verification steps that they were fitted to."""
    errors_before: tuple[float, ...]
    """Expected calibration error of the chance to reach and accept each position, as the draft says it."""
    errors_after: tuple[float, ...]
    """The same with temperatures that were fitted to other steps."""
    errors_by_chance: tuple[float, ...] = ()
    """What `errors_after` would be if the chances were exact: so few steps show some error in any case."""

    @property
    def meaningful(self) -> bool:
        """Whether scheduled verification may rely on them."""
        chance = self.errors_by_chance or (0.0,) * len(self.errors_after)
        return all(found - own <= MOST_CALIBRATION_ERROR for found, own in zip(self.errors_after, chance, strict=True))


class TreeGoodput(Record):
    """The dynamic tree (EAGLE-2, arXiv 2406.16858) of greatest predicted goodput at one load, and the best chain."""

    batch: int
    depth: int
    topk: int
    """Places of each depth that get children, and how many each."""
    tokens: int
    """Proposed tokens that are kept."""
    tokens_per_step: float
    step_s: float
    tokens_per_s: float
    """Tokens per second of all sequences."""
    without: float
    """Of the best that proposes no tree: a chain, or nothing."""

    @property
    def gain(self) -> float:
        """Relative gain over the best that is no tree."""
        return self.tokens_per_s / self.without - 1


class GoodputAtLoad(Record):
    """Predicted goodput of two drafts at one load, each at its own best lookahead."""

    batch: int
    challenger: float
    """Tokens per second."""
    challenger_lookahead: int
    champion: float | None
    """None without a champion."""
    champion_lookahead: int | None
    prompt_lookup: float | None = None
    """None: not predicted."""
    prompt_lookup_lookahead: int | None = None

    @property
    def loss(self) -> float:
        """The challenger's relative loss against the champion; negative for a gain."""
        return 0.0 if self.champion is None else 1.0 - self.challenger / self.champion


class GoodputEvidence(Record):
    """Part of a gate's evidence: goodput of challenger and champion at the recipe's loads."""

    max_loss: float
    loads: tuple[GoodputAtLoad, ...]


class MeasuredGoodput(Record):
    """`serving/goodput.json` of an exported draft: what it was predicted to give, and from what.

    Steps are timed in transformers, where engines have faster kernels; drafting is timed for all texts at once, as
    engines draft.
    """

    main_load: int
    """Texts at once that the static settings are for."""
    draft: GoodputTable
    champion: GoodputTable | None
    prompt_lookup: GoodputTable | None = None
    """Its proposals cost nothing here. None: not predicted."""
    trees: tuple[TreeGoodput, ...] = ()
    """One for each load, ascending; empty where no engine serves trees of such a draft, or they were not asked for."""
    confidence: ConfidenceFit | None = None
    """Of drafts that say how likely their proposals are accepted."""
    target_times: tuple[StepTime, ...]
    """Measured times of verification."""
    draft_times: tuple[StepTime, ...]
    """Measured times of drafting."""
    hardware: str

    @property
    def best(self) -> Goodput:
        """The best row at the main load."""
        return self.draft.best_at(self.main_load)

    @property
    def by_load(self) -> tuple[GoodputAtLoad, ...]:
        """Challenger and champion, loads ascending."""
        return tuple(self._at(batch) for batch in sorted(self.draft.best))

    def _at(self, batch: int) -> GoodputAtLoad:
        ours = self.draft.best_at(batch)
        other, lookup = (table and table.best_at(batch) for table in (self.champion, self.prompt_lookup))
        return GoodputAtLoad(
            batch=batch,
            challenger=ours.tokens_per_s,
            challenger_lookahead=ours.lookahead,
            champion=other.tokens_per_s if other else None,
            champion_lookahead=other.lookahead if other else None,
            prompt_lookup=lookup.tokens_per_s if lookup else None,
            prompt_lookup_lookahead=lookup.lookahead if lookup else None,
        )
