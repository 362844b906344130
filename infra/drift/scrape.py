"""What SGLang's servers say of the requests they have finished: counters from `/metrics`. Runs in the flow's process.

SGLang raises its counters once per finished request: generated tokens, verification steps, requests. Each request's
first token comes from the prefill, so tokens emitted by verification steps are generated tokens less requests: bonus
tokens and a step that the end of the text cut are included. The gauge of the acceptance length covers the last few
steps only.
"""

from collections.abc import Iterable, Mapping, Sequence

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from infra.health import public
from infra.records import Record
from infra.refusal import Refusal

GENERATED = "sglang:generation_tokens_total"
REQUESTS = "sglang:num_requests_total"
STEPS = "sglang:spec_verify_calls_total"
LOOKAHEAD = "sglang:spec_num_steps"
DRAFT_TOKENS = "sglang:spec_num_draft_tokens"


class Counters(Record):
    """One server's counters since its start."""

    generated: int = 0
    requests: int = 0
    steps: int = 0

    def since(self, before: "Counters") -> "Counters":
        """What was added. A counter that has become smaller belongs to a server that was started again."""
        if self.generated < before.generated or self.requests < before.requests or self.steps < before.steps:
            return self
        return Counters(
            generated=self.generated - before.generated,
            requests=self.requests - before.requests,
            steps=self.steps - before.steps,
        )

    def plus(self, other: "Counters") -> "Counters":
        """Both together."""
        return Counters(
            generated=self.generated + other.generated,
            requests=self.requests + other.requests,
            steps=self.steps + other.steps,
        )

    @property
    def tokens(self) -> int:
        """Emitted by verification steps."""
        return self.generated - self.requests


class Reading(Record):
    """What one server said."""

    counters: Counters
    lookahead: int | None
    """None: it has not decoded since its start, so it does not say yet."""
    draft_tokens: int | None
    """Tokens verified at a time: lookahead + 1 for a chain, more for a tree."""


class Scrape(Record):
    """What all servers said at one time."""

    readings: Mapping[str, Reading]
    """By address."""
    silent: Mapping[str, str] = {}
    """Why a server did not answer."""

    def lookahead(self) -> int | None:
        """The one at which all servers decode chains; None where none says yet. Raises Refusal for anything else."""
        told = {url: reading for url, reading in self.readings.items() if reading.lookahead}
        lookaheads = {reading.lookahead for reading in told.values()}
        if len(lookaheads) > 1:
            shown = ", ".join(f"{public(url)} {reading.lookahead}" for url, reading in told.items())
            raise Refusal(f"the servers decode at different lookaheads ({shown}): watch each kind by itself")
        for url, reading in told.items():
            if reading.lookahead and reading.draft_tokens != reading.lookahead + 1:
                raise Refusal(
                    f"{public(url)} verifies {reading.draft_tokens} tokens at a lookahead of {reading.lookahead}, a "
                    "tree; the benchmark's figure is of chains, so serve with --speculative-eagle-topk 1"
                )
        return lookaheads.pop() if lookaheads else None


def read_metrics(text: str, server: str) -> Reading:
    """Read Prometheus text; sums over all labels. Raises Refusal for a server that does not count requests."""
    sums = _sums(text_string_to_metric_families(text))
    if not any(name.startswith("sglang:") for name in sums):
        raise Refusal(
            f"{server}/metrics shows no metrics of SGLang: start the server with --enable-metrics, and give its own "
            "address, not a gateway's"
        )
    lookahead, draft_tokens = sums.get(LOOKAHEAD), sums.get(DRAFT_TOKENS)
    counters = Counters(
        generated=int(sums.get(GENERATED, 0)), requests=int(sums.get(REQUESTS, 0)), steps=int(sums.get(STEPS, 0))
    )
    if counters.requests and counters.generated > counters.requests and not counters.steps:
        raise Refusal(f"{server} has finished {counters.requests} requests without a draft: nothing to watch there")
    return Reading(
        counters=counters,
        lookahead=int(lookahead) if lookahead else None,
        draft_tokens=int(draft_tokens) if draft_tokens else None,
    )


def _sums(families: Iterable[Metric]) -> dict[str, float]:
    """Counters summed over their labels; of the gauges, which all say the same, the largest."""
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if family.type == "gauge":
                found[sample.name] = max(found.get(sample.name, 0.0), sample.value)
            elif family.type == "counter":
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def scrape(servers: Sequence[str], timeout_s: float) -> Scrape:
    """Ask all servers. One that is away is left out and named; raises ConnectionError where none answers."""
    readings: dict[str, Reading] = {}
    silent: dict[str, str] = {}
    with httpx.Client(timeout=timeout_s) as client:
        for server in servers:
            try:
                answer = client.get(f"{server.rstrip('/')}/metrics").raise_for_status()
            except httpx.HTTPError as error:
                silent[server] = str(error) or type(error).__name__
                continue
            readings[server] = read_metrics(answer.text, public(server))
    if not readings:
        raise ConnectionError("; ".join(f"{public(server)}: {why}" for server, why in silent.items()))
    return Scrape(readings=readings, silent=silent)
