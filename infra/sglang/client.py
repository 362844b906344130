"""A client of an SGLang server; one serves several threads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import httpx

from infra.network.http import open_client
from infra.processes.process import ProcessFailedError
from infra.refusal import Refusal

CONNECT_S = 10.0
REFUSAL_CHARACTERS = 500
NO_KEY, ELSEWHERE = (401, 403), (404, 405)
"""Statuses for which no prompt is to blame."""
BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Statuses of a server that is there and has too much to do, such as one whose queue is full."""
DATA, DONE = "data: ", "[DONE]"


class ServerError(Exception):
    """The server is dead, hangs or fails (HTTP 5xx); no request is to blame."""


class ServerBusyError(ServerError):
    """The server takes no more requests at the moment (HTTP 429 and 503): the same one may succeed later."""


class PromptRefusedError(Refusal):
    """The server refuses this prompt or these settings (HTTP 4xx), for instance a prompt that is too long."""


class AskedServer(Protocol):
    """What a client has to know of its server."""

    @property
    def address(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> object:
        """Where it is read."""
        ...

    def check(self) -> None:
        """Raises ProcessFailedError when it has ended."""
        ...


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt."""

    tokens: list[int]
    """Generated ones."""
    meta: dict[str, Any]
    """SGLang's `meta_info`."""
    steps: tuple[int, ...] = ()
    """Tokens emitted by each step of the engine, the prefill's one first; empty if not requested."""


class SGLangClient:
    """Token ids in, token ids out."""

    def __init__(self, server: AskedServer, request_timeout_s: float, first_answer_s: float = 0.0):
        """`first_answer_s`: the timeout until the server has answered once, if it is longer: on a GPU it compiles."""
        self.server, self._timeout_s = server, request_timeout_s
        self._first_s, self._answered = max(first_answer_s, request_timeout_s), False
        self._http = open_client(server.address, httpx.Timeout(request_timeout_s, connect=CONNECT_S), direct=True)

    def generate(
        self, tokens: Sequence[int], sampling: dict[str, Any], in_steps: bool = False, **settings: Any
    ) -> Answer:
        """Continue one prompt; `in_steps`: and watch the engine's steps; `settings`: further ones of the request.

        Raises ServerError, also for an aborted request, and as ServerBusyError from a server that has too much to do;
        PromptRefusedError for a prompt or settings that the server refuses; and Refusal where it refuses us.
        """
        body = {"input_ids": list(tokens), "sampling_params": sampling, "stream": in_steps, **settings}
        seen, last = [0], {}
        longest_s = self._timeout_s if self._answered else self._first_s
        timeout = httpx.Timeout(longest_s, connect=CONNECT_S)
        try:
            with self._http.stream("POST", "/generate", json=body, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self._error(answer, len(tokens))
                if not in_steps:
                    last = json.loads(answer.read())
                for line in answer.iter_lines() if in_steps else ():
                    if line.startswith(DATA) and line != DATA + DONE:
                        last = json.loads(line.removeprefix(DATA))
                        seen.append(last["meta_info"]["completion_tokens"])
        except httpx.TransportError as error:
            raise ServerError(self._reason(error, len(tokens), longest_s)) from error
        self._answered = True
        end = last["meta_info"].get("finish_reason") or {}
        if end.get("type") == "abort":
            raise ServerError(f"{self.server.name} aborted a prompt of {len(tokens)} tokens: {end.get('message')}")
        steps = tuple(after - before for before, after in pairwise(seen) if after > before)
        return Answer(last["output_ids"], last["meta_info"], steps)

    def settings(self) -> dict[str, Any]:
        """The server's arguments as it resolved them, and its version. Raises ServerError."""
        try:
            answer = self._http.get("/server_info").raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{self.server.name} does not tell its settings ({error})") from error
        return answer.json()

    def _error(self, answer: httpx.Response, tokens: int) -> Refusal | ServerError:
        server, reason = self.server, f"{answer.status_code} {answer.text[:REFUSAL_CHARACTERS]}"
        if answer.status_code in NO_KEY:
            return Refusal(f"{server.name} refuses: {reason}; set $DRAFTSMITH_SGLANG_API_KEY to its --api-key")
        if answer.is_redirect or answer.status_code in ELSEWHERE:
            return Refusal(f"{server.name} answers {reason}: give SGLang's own address, not a gateway's")
        if answer.status_code in BUSY:
            return ServerBusyError(f"{server.name} is too busy for a prompt of {tokens} tokens: {reason}")
        if answer.is_client_error:
            return PromptRefusedError(f"SGLang refused the prompt of {tokens} tokens: {reason}")
        return ServerError(f"{server.name} failed at a prompt of {tokens} tokens: {reason}; its log is {server.log}")

    def _reason(self, error: httpx.TransportError, tokens: int, longest_s: float) -> str:
        server = self.server
        try:
            server.check()
        except ProcessFailedError as failure:
            return str(failure)
        if isinstance(error, httpx.TimeoutException):
            setting = "request_timeout_s" if longest_s == self._timeout_s else "start_timeout_s, for the first answer"
            return (
                f"{server.name} did not answer a prompt of {tokens} tokens within {longest_s:g} s "
                f"(generator.sglang.{setting}); its log is {server.log}"
            )
        return f"{server.name} broke a connection off ({error}); its log is {server.log}"

    def close(self) -> None:
        self._http.close()
