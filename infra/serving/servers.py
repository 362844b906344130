"""What SGLang servers say of themselves: whether they are healthy, what they run, what they count, what they answer."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from infra.drift.scrape import SWAPPED, Counters, ServedDraft, ask, ask_info, read_metrics, read_server_info
from infra.network.health import public
from infra.network.http import open_client
from infra.records.acceptance import RequestCounts
from infra.serving.comparison import StepGroup, compare_paired
from infra.serving.rollout import FOREIGN, NO_DRAFT, ProbeAnswer, ServerProbe

HEALTH_S = 30.0
"""SGLang itself waits 20 s for a sign of its scheduler."""
REQUEST_S = 120.0
SAME_TOKENS = 8
"""Drafts do not change a target's greedy text. In half precision ties may, somewhere; rarely so early."""
BUSY = (429, 503)
"""Statuses of a full queue, and of a proxy's limit."""


class BusyError(httpx.HTTPError):
    """A healthy server that takes no more requests at the moment."""


@dataclass(frozen=True)
class ServerReport:
    """What a healthy server reports."""

    draft: ServedDraft
    lookahead: int | None
    """None: it drafts nothing, trees, or changes its lookahead."""
    counters: Counters
    ranks: int = 1
    """Of tensor parallelism; each loads the weights of a swap for itself."""
    workers: int = 1
    """Processes that answer requests (--tokenizer-worker-num). After a swap only one of them would report it."""


class ServerClient:
    """Asks one server. Raises httpx.HTTPError where it does not answer as it should."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _open(self) -> httpx.Client:
        """For one use: the next one knows certificates that have changed."""
        return open_client(self.url, HEALTH_S)

    def answers(self) -> bool:
        """Whether anything listens at the address."""
        place = urlsplit(self.url)
        port = place.port or (443 if place.scheme == "https" else 80)
        try:
            socket.create_connection((place.hostname, port), timeout=5.0).close()
        except OSError:
            return False
        return True

    def report(self) -> ServerReport:
        """What it runs and has counted; it is healthy if this returns. Raises Refusal for one that will not tell."""
        with self._open() as http:
            ask(http, f"{self.url}/health")
            info = ask_info(http, self.url)
            page = ask(http, f"{self.url}/metrics").text
        draft = read_server_info(info)
        reading = read_metrics(page, public(self.url), draft)
        ranks, workers = (int(info.get(name) or 1) for name in ("tp_size", "tokenizer_worker_num"))
        return ServerReport(draft, _lookahead(info), reading.counters, ranks, workers)

    def probe(self, report: ServerReport, prompts: Sequence[Sequence[int]], new_tokens: int) -> ServerProbe:
        """Greedy answers to prompts, one after the other. Raises BusyError where its users leave no room for them."""
        answers = []
        for prompt in prompts:
            body = {
                "input_ids": list(prompt),
                "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens},
            }
            with self._open() as http:
                reply = http.post(f"{self.url}/generate", json=body, timeout=REQUEST_S)
            if reply.status_code in BUSY:
                raise BusyError(f"{public(self.url)} is too busy for prompts ({reply.status_code}): they wait")
            answer = reply.raise_for_status().json()
            tokens, steps = answer["output_ids"], int(answer["meta_info"].get("spec_verify_ct") or 0)
            answers.append(ProbeAnswer(tokens=tokens, group=StepGroup(tokens=max(0, len(tokens) - 1), steps=steps)))
        return ServerProbe(lookahead=report.lookahead, answers=tuple(answers))

    def swap(self, weights: str, ranks: int, name: str) -> None:
        """Load a draft's weights into the running server; from then on it reports `name` as `ServedDraft.swapped`.

        Requests wait meanwhile and are read again after it, so that no state of the old weights is left.
        """
        self._post("pause_generation", {"mode": "retract"})
        try:
            self._post("begin_weight_update", {"selector": "draft"})
            body = {"serialized_named_tensors": [weights] * ranks, "weight_version": SWAPPED + name}
            self._post("update_weights_from_tensor", body | {"selector": "draft"})
            self._post("end_weight_update", {})
        finally:
            self.resume()

    def resume(self) -> None:
        """Go on after an interrupted swap."""
        self._post("continue_generation", {"torch_empty_cache": False})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with self._open() as http:
            answer = http.post(f"{self.url}/{path}", json=body, timeout=REQUEST_S)
        if answer.is_error:  # the reason is in the text
            message = f"{path}: {answer.status_code} {answer.text[:300]}"
            raise httpx.HTTPStatusError(message, request=answer.request, response=answer)


def _lookahead(info: dict[str, Any]) -> int | None:
    tokens, topk = info.get("speculative_num_draft_tokens"), info.get("speculative_eagle_topk")
    if not info.get("speculative_draft_model_path") or info.get("speculative_adaptive") or not tokens:
        return None
    return int(tokens) - 1 if topk in (None, 1) else None


def version_of(draft: ServedDraft, folder: Path, name: str) -> int:
    """The version that a server runs, by what was put into it while it ran, or by the folder it loaded."""
    if draft.path is None:
        return NO_DRAFT
    if draft.swapped is not None:
        own, _, number = draft.swapped.rpartition("@")
        return int(number) if own == name and number.isdigit() else FOREIGN
    place = Path(draft.path)
    return int(place.name) if place.parent == folder / name and place.name.isdigit() else FOREIGN


def expected(counts: RequestCounts | None, lookahead: int | None) -> tuple[StepGroup, ...]:
    """What the benchmark counted for the prompts that came with it, at a server's lookahead; empty where unknown."""
    if counts is None or lookahead is None or lookahead not in counts.greedy:
        return ()
    rows = counts.greedy[lookahead][: len(counts.prompts)]
    return tuple(StepGroup(tokens=int(tokens), steps=int(steps)) for tokens, steps in rows)


def trouble_with(
    probe: ServerProbe, benchmarked: Sequence[StepGroup], before: ServerProbe | None, max_loss: float
) -> str | None:
    """What speaks against a version, from its answers to the prompts; None: nothing."""
    groups = [answer.group for answer in probe.answers]
    found = compare_paired(groups, benchmarked) if benchmarked else None
    if found is not None and found.is_worse(max_loss):
        return f"on the prompts of its benchmark its {found.words} when it was benchmarked"
    if before is None:
        return None
    other = [
        answer.tokens[:SAME_TOKENS] != then.tokens[:SAME_TOKENS]
        for answer, then in zip(probe.answers, before.answers, strict=True)
    ]
    if 2 * sum(other) > len(other):
        return f"{sum(other)} of {len(other)} greedy answers are not those of a server without it"
    if probe.lookahead is None or probe.lookahead != before.lookahead:
        return None
    found = compare_paired(groups, [answer.group for answer in before.answers])
    if found is not None and found.is_worse(max_loss):
        return f"on the prompts of its benchmark its {found.words} of the version before it"
    return None
