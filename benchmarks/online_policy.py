"""Which lookahead pays now: chosen anew in every step, from each request's own acceptance.

Goodput (SmartSpec, arXiv 2406.14066) is tokens emitted per second under the present load. Proposals that are likely
to be accepted are worth their time while few texts are decoded together and the target has time to spare; under a
high load they are not, and then nothing is proposed. What a step costs has been measured before; how many tokens
it will emit follows from a running estimate of acceptance at each position. The reference decoder asks it before every
step (`decode_together(conversations, choose=policy.step)`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import truediv
from typing import Any, Protocol

from torch import Tensor

from infra.refusal import Refusal
from models.decoding.speculative import Conversation, StepDecision

LARGEST_UNIT = 1e100


class StepCosts(Protocol):
    """Seconds of a verification step."""

    def seconds(self, batch: int, lookahead: int) -> float:
        """Time of a step of `batch` texts, drafting included, by the longest chain of proposals."""
        ...


class Accepting:
    """Running acceptance rate at each position, given that all before it were accepted.

    Old steps count less and less, whether or not anything was proposed since. So an estimate that has nothing new to
    go by returns to what it started from, and proposing is tried again after a while.

    Args:
        prior: rates to start from, by position, each from 0 to 1; another estimate: its rates, as they are later on.
        weight: steps that the prior is worth.
        memory: what a step still counts one step later, below 1.
    """

    def __init__(self, prior: "Sequence[float] | Accepting", weight: float, memory: float):
        self._prior, self.weight, self.memory = prior, weight, memory
        self.accepted = [0.0] * len(self.prior)
        self.offered = [0.0] * len(self.prior)
        self.unit = 1.0
        """What a step counts now: it grows where all earlier counts would shrink, which takes no time."""
        self._rates: list[float] | None = None

    @property
    def prior(self) -> Sequence[float]:
        return self._prior.rates if isinstance(self._prior, Accepting) else self._prior

    @property
    def rates(self) -> list[float]:
        if self._rates is not None:
            return self._rates
        counted, weight = zip(self.prior, self.accepted, self.offered, strict=True), self.weight * self.unit
        rates = [(rate * weight + accepted) / (weight + offered) for rate, accepted, offered in counted]
        # Many requests ask for their common prior before anything new is learnt; their own prior changes under them.
        if not isinstance(self._prior, Accepting):
            self._rates = rates
        return rates

    def learn(self, lookahead: int, accepted: int) -> None:
        """One step in which the first `accepted` of `lookahead` proposals were accepted."""
        self._rates = None
        self.unit /= self.memory
        for place in range(min(lookahead, accepted + 1)):
            self.offered[place] += self.unit
            self.accepted[place] += self.unit * (place < accepted)
        if self.unit > LARGEST_UNIT:
            self.accepted = [count / self.unit for count in self.accepted]
            self.offered = [count / self.unit for count in self.offered]
            self.unit = 1.0
        if isinstance(self._prior, Accepting):
            self._prior.learn(lookahead, accepted)


@dataclass
class LookaheadPolicy:
    """Chooses every step's lookahead, 0 included, so that its goodput is greatest.

    One policy serves all requests that are decoded together; what each one accepts is a prior for the next.
    """

    costs: StepCosts
    rates: Sequence[float]
    """Acceptance by position to start from, such as a benchmark's; as many as the largest lookahead."""
    request_weight: float = 4.0
    """Steps of a request that count as much as what all requests accept."""
    request_memory: float = 0.9
    all_weight: float = 20.0
    all_memory: float = 0.998
    _all: Accepting = field(init=False)
    _costs: dict[int, list[float]] = field(init=False, default_factory=dict)
    """Seconds of every lookahead, by batch size."""

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise Refusal(f"acceptance rates {list(self.rates)}: give at least one, each from 0 to 1")
        self._all = Accepting(self.rates, self.all_weight, self.all_memory)

    @property
    def max_lookahead(self) -> int:
        return len(self.rates)

    def request(self) -> Accepting:
        """The estimate of a new request."""
        return Accepting(self._all, self.request_weight, self.request_memory)

    def step(self, going: Sequence[Conversation]) -> int:
        """Lookahead of the next step of these texts."""
        texts = [text for text in going if isinstance(text, AdaptiveText)]
        lookahead = self.choose([text.accepting for text in texts])
        for text in texts:
            text.lookaheads.append(lookahead)
        return lookahead

    def choose(self, requests: Sequence[Accepting]) -> int:
        """Lookahead of the next step: the target verifies as many tokens of every text, so one serves all."""
        batch = len(requests)
        if batch not in self._costs:
            self._costs[batch] = [self.costs.seconds(batch, at) for at in range(self.max_lookahead + 1)]
        goodputs = list(map(truediv, accumulate(self._reached(requests)), self._costs[batch]))
        return goodputs.index(max(goodputs))

    def _reached(self, requests: Sequence[Accepting]) -> list[float]:
        """How many requests are expected to emit a token at each position; all do at the first."""
        # Steps may be short: for so few numbers lists are several times faster than arrays.
        reached = [float(len(requests)), *[0.0] * self.max_lookahead]
        for request in requests:
            chance = 1.0
            for place, rate in enumerate(request.rates, 1):
                chance *= rate
                reached[place] += chance
        return reached


class AdaptiveText(Conversation):
    """A text whose estimate learns from its steps; the arguments after `policy` are those of `Conversation`."""

    def __init__(self, policy: LookaheadPolicy, *arguments: Any, **named: Any):
        super().__init__(*arguments, shape=policy.max_lookahead, **named)
        self.accepting = policy.request()
        self.lookaheads: list[int] = []
        """Of every step."""

    def take(self, tokens: Sequence[int], aux: Tensor, decision: StepDecision) -> None:
        """See `Conversation.take`."""
        self.accepting.learn(self.lookaheads[-1], len(decision.path))
        super().take(tokens, aux, decision)
