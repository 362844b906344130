"""A client of an SGLang server; one serves several threads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import httpx

from infra.processes.process import ProcessFailedError
from infra.refusal import Refusal
from infra.settings import sglang_api_key

CONNECT_S = 10.0
REFUSAL_CHARACTERS = 500
DATA, DONE = "data: ", "[DONE]"


class ServerError(Exception):
    """The server is dead, hangs or fails (HTTP 5xx); no request is to blame."""


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

    def __init__(self, server: AskedServer, request_timeout_s: float):
        self.server, self._timeout_s, key = server, request_timeout_s, sglang_api_key()
        # A connection for every request: one that idled may be closed by the server just as the next request leaves.
        # No proxy of the environment stands between us and loopback.
        self._http = httpx.Client(
            base_url=server.address,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    def generate(
        self, tokens: Sequence[int], sampling: dict[str, Any], in_steps: bool = False, **settings: Any
    ) -> Answer:
        """Continue one prompt; `in_steps`: and watch the engine's steps; `settings`: further ones of the request.

        Raises ServerError, and PromptRefusedError for a prompt or settings that the server refuses.
        """
        body = {"input_ids": list(tokens), "sampling_params": sampling, "stream": in_steps, **settings}
        seen, last = [0], {}
        try:
            with self._http.stream("POST", "/generate", json=body) as answer:
                if answer.is_error:
                    answer.read()
                    raise self._error(answer, len(tokens))
                if not in_steps:
                    last = json.loads(answer.read())
                for line in answer.iter_lines() if in_steps else ():
                    if line.startswith(DATA) and line != DATA + DONE:
                        last = json.loads(line.removeprefix(DATA))
                        seen.append(last["meta_info"]["completion_tokens"])
        except httpx.TransportError as error:
            raise ServerError(self._reason(error, len(tokens))) from error
        steps = tuple(after - before for before, after in pairwise(seen) if after > before)
        return Answer(last["output_ids"], last["meta_info"], steps)

    def settings(self) -> dict[str, Any]:
        """The server's arguments as it resolved them, and its version. Raises ServerError."""
        try:
            answer = self._http.get("/server_info").raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{self.server.name} does not tell its settings ({error})") from error
        return answer.json()

    def _error(self, answer: httpx.Response, tokens: int) -> PromptRefusedError | ServerError:
        reason = f"{answer.status_code} {answer.text[:REFUSAL_CHARACTERS]}"
        if answer.is_client_error:
            return PromptRefusedError(f"SGLang refused the prompt of {tokens} tokens: {reason}")
        server = self.server
        return ServerError(f"{server.name} failed at a prompt of {tokens} tokens: {reason}; its log is {server.log}")

    def _reason(self, error: httpx.TransportError, tokens: int) -> str:
        server = self.server
        try:
            server.check()
        except ProcessFailedError as failure:
            return str(failure)
        if isinstance(error, httpx.TimeoutException):
            return (
                f"{server.name} did not answer a prompt of {tokens} tokens within {self._timeout_s:g} s "
                f"(generator.sglang.request_timeout_s); its log is {server.log}"
            )
        return f"{server.name} broke a connection off ({error}); its log is {server.log}"

    def close(self) -> None:
        self._http.close()
