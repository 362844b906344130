"""What SGLang's servers report: the counters of `/metrics`, and which draft runs from `/server_info` (SGLang 0.5.23).

SGLang raises its counters once per finished request: generated tokens, verification steps, requests. Each request's
first token comes from the prefill, so verification steps emitted the generated tokens less the requests: bonus tokens
and the last step, which the maximum length may cut, are included. The gauge of the acceptance length covers the last
few steps only. A request may have no first token: one that only scores its prompt, one that is aborted early, and one
that SGLang adds to fill the prefix cache for a request with n > 1. Counters do not tell them from others, but SGLang
times the tokens of every request that ended with two or more, which bounds their number.

`/server_info` holds the resolved command line, hence the draft's path, and how long the phases of the server's start
took. Those durations are measured once per start, which makes them a name of that start. The weight version in
`/model_info` changes while the server runs.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infra.drift.target import ReportedTarget, read_target
from infra.network.health import public
from infra.network.http import open_client
from infra.records.data_path import Record
from infra.refusal import Refusal

GENERATED = "sglang:generation_tokens_total"
REQUESTS = "sglang:num_requests_total"
STEPS = "sglang:spec_verify_calls_total"
TIMED = "sglang:request_time_per_output_token_seconds_count"
LOOKAHEAD = "sglang:spec_num_steps"
DRAFT_TOKENS = "sglang:spec_num_draft_tokens"
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""What a healthy server, or a gateway in front of it, answers for a while."""
SWAPPED = "draftsmith:"
"""Begins the server's weight version after a swap; NAME@VERSION follows."""


LEAST_SURE = 0.98
"""Share of the tokens that must be certain: the drift test is made for falls of a few per cent."""


class Counters(Record):
    """One server's counters since its start."""

    generated: int = 0
    requests: int = 0
    steps: int = 0
    unsure: int = 0
    """Requests that may have generated nothing: at least two tokens are known of the others."""

    def since(self, before: "Counters") -> "Counters":
        """The increase since `before`. Counters that have become smaller belong to a server that was restarted."""
        increase = {name: count - getattr(before, name) for name, count in self}
        # A difference of two counters, which a server may be read between; it was not always counted.
        unsure = min(max(0, increase.pop("unsure")), increase["requests"])
        return self if min(increase.values()) < 0 else Counters(**increase, unsure=unsure)

    def plus(self, other: "Counters") -> "Counters":
        """The sum of both."""
        return Counters(**{name: count + getattr(other, name) for name, count in self})

    @property
    def tokens(self) -> int:
        """Emitted by verification steps, if each request had a first token; otherwise a lower bound."""
        return self.generated - self.requests

    @property
    def is_sure(self) -> bool:
        """Whether requests without a first token can hide only few of the tokens."""
        return self.tokens >= LEAST_SURE * (self.tokens + self.unsure)


class ServedDraft(Record):
    """The draft that a server runs, in the server's own words."""

    start: str
    """Hash that differs between two starts of the server."""
    path: str | None
    """Value of --speculative-draft-model-path; None: the server runs no draft model."""
    swapped: str | None = None
    """NAME@VERSION of the weights that the serving follower has put into it since its start, if it did."""
    labels: tuple[str, ...] = ()
    """Names that an operator gave the server: --served-model-name and --weight-version."""
    is_adaptive: bool = False
    """Whether the server changes its lookahead with the load."""


class Reading(Record):
    """What one server reported."""

    counters: Counters
    lookahead: int | None
    """None until the server has decoded after its start."""
    draft_tokens: int | None
    """Tokens verified at a time: lookahead + 1 for a chain, more for a tree."""
    draft: ServedDraft
    target: ReportedTarget | None = None

    @property
    def is_tree(self) -> bool:
        """Whether the server drafts trees, which the benchmark of chains does not cover."""
        return self.lookahead is not None and self.draft_tokens != self.lookahead + 1

    @property
    def uncounted(self) -> str:
        """Why the counters cannot be compared with a benchmark's, whatever the draft; empty: they can."""
        if self.draft.is_adaptive:
            return (
                "it changes its lookahead with the load (--speculative-adaptive), and its counters do not say what was "
                "decoded at which: start it with a fixed --speculative-num-steps"
            )
        if self.is_tree:
            return (
                f"it verifies {self.draft_tokens} tokens at a lookahead of {self.lookahead}, a tree; the benchmark's "
                "figure is of chains, so serve with --speculative-eagle-topk 1"
            )
        return ""


class Scrape(Record):
    """What all servers reported at one time."""

    readings: Mapping[str, Reading]
    """Readings by the server's address."""
    silent: Mapping[str, str] = {}
    """Why a server did not answer, by address."""


def read_metrics(text: str, server: str, draft: ServedDraft) -> Reading:
    """Read Prometheus text; sums over all labels.

    Raises Refusal for a page without SGLang's metrics, and for one whose counters have other names.
    """
    try:
        sums = _sums(text)
    except ValueError:  # a web page, for instance
        sums = {}
    if not any(name.startswith("sglang:") for name in sums):
        raise Refusal(
            f"{server}/metrics shows no metrics of SGLang: start the server with --enable-metrics, and give its own "
            "address, not a gateway's"
        )
    names = (GENERATED, REQUESTS, STEPS, LOOKAHEAD, DRAFT_TOKENS)
    generated, requests, steps, lookahead, draft_tokens = (int(sums.get(name, 0)) for name in names)
    missing = [name for name in (GENERATED, REQUESTS, STEPS) if name not in sums]
    if draft.path and missing and generated > requests:
        raise Refusal(
            f"{server}/metrics has no {', '.join(missing)}, although the server drafts and has answered: its "
            "version of SGLang has other counters than 0.5.23, so its acceptance cannot be read"
        )
    unsure = requests - int(sums[TIMED]) if TIMED in sums else 0
    return Reading(
        counters=Counters(generated=generated, requests=requests, steps=steps, unsure=max(0, unsure)),
        lookahead=lookahead or None,
        draft_tokens=draft_tokens or None,
        draft=draft,
    )


def _sums(page: str) -> dict[str, float]:
    """Counters, and numbers of observations, summed over their labels; of each gauge, whose labels agree, the largest
    value."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if family.type == "gauge":
                sums[sample.name] = max(sums.get(sample.name, 0.0), sample.value)
            elif family.type == "counter" or sample.name == TIMED:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def read_server_info(info: Mapping[str, Any]) -> ServedDraft:
    """Read what `ask_info` returns. It may hold keys and tokens, so only names of draft and target are kept."""
    started = json.dumps([info.get("startup_time"), info.get("launch_command"), info.get("random_seed")], default=str)
    weights = str(info.get("weight_version") or "")
    swapped = weights.removeprefix(SWAPPED) if weights.startswith(SWAPPED) else None
    names = (info.get("served_model_name"), None if swapped else weights)
    path = info.get("speculative_draft_model_path")
    return ServedDraft(
        start=hashlib.sha256(started.encode()).hexdigest()[:16],
        path=str(path) if path else None,
        swapped=swapped,
        labels=tuple(str(name) for name in names if name),
        is_adaptive=bool(info.get("speculative_adaptive")),
    )


def ask(client: httpx.Client, url: str) -> httpx.Response:
    """One page of a server. Raises httpx.HTTPError where the server is away or fails, and Refusal where it, or what
    stands in front of it, answers that it does not give this page: a restart would not change that."""
    answer = client.get(url)
    if answer.status_code in (401, 403):
        remedy = "set $DRAFTSMITH_SGLANG_API_KEY to the server's --api-key"
    elif answer.is_redirect or (answer.is_client_error and answer.status_code not in PASSING):
        remedy = "start SGLang 0.5.23 or later with --enable-metrics, and give its own address, not a gateway's"
    else:
        return answer.raise_for_status()
    raise Refusal(f"{public(url)} answers {answer.status_code} {answer.reason_phrase}: {remedy}")


def ask_info(client: httpx.Client, url: str) -> dict[str, Any]:
    """A server's `/server_info`, with the weight version that it reports now. Raises as `ask`, also where something
    else answers."""
    info, model = ask(client, f"{url}/server_info").json(), ask(client, f"{url}/model_info").json()
    if not isinstance(info, dict) or not isinstance(model, dict):
        raise Refusal(f"{public(url)}/server_info is none of SGLang's: give the server's own address, not a gateway's")
    return info | {"weight_version": model.get("weight_version")}


def scrape(servers: Sequence[str], timeout_s: float) -> Scrape:
    """Ask all servers. Those without a usable answer are listed.

    Raises ConnectionError if there is no other, and Refusal where all of them have to be set up differently.
    """
    readings: dict[str, Reading] = {}
    silent: dict[str, Exception] = {}
    for server in servers:
        with open_client(server, timeout_s) as client:
            try:
                readings[server] = _ask(client, server.rstrip("/"), public(server))
            except (httpx.HTTPError, json.JSONDecodeError, ConnectionResetError, Refusal) as error:
                silent[server] = error
    why = {server: str(error) or type(error).__name__ for server, error in silent.items()}
    if not readings:
        kind = Refusal if all(isinstance(error, Refusal) for error in silent.values()) else ConnectionError
        raise kind("; ".join(f"{public(server)}: {words}" for server, words in why.items()))
    return Scrape(readings=readings, silent=why)


def _ask(client: httpx.Client, url: str, shown: str) -> Reading:
    """One server's reading. Its draft is asked for before and after the counters: a restart may fall in between.

    Raises ConnectionResetError for such a restart, or a swap: counters and draft may not belong together.
    """
    info = ask_info(client, url)
    before = read_server_info(info)
    page = ask(client, f"{url}/metrics").text
    after = read_server_info(ask_info(client, url))
    if before != after:
        raise ConnectionResetError("it was restarted, or got another draft, while it was read")
    return read_metrics(page, shown, after).model_copy(update={"target": read_target(info)})
