"""The engine of generator.engine=serving: a server that has users, of whose requests a share is learned from."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any

import torch
from torch import Tensor

from infra.records.live import LiveText
from infra.refusal import Refusal
from infra.sglang.client import Answer, PromptRefusedError, ServerBusyError, ServerError, SGLangClient
from models.capture.engine import CANARY_TOKENS, Captured, Continued, EngineError
from models.capture.live_texts import LiveFilter, private_data_finder
from models.capture.sglang.engine import PREFILL, SGLangEngine
from models.capture.sglang.live import PASSWORD
from models.capture.sglang.tap import Tap, open_tap, wanted_of
from models.data.media import Prompt
from models.decoding.plain import end_of
from models.run import PreparedRun
from models.targets.layout import SampleError
from models.targets.model import eos_ids

BUSY_S = 1.0
"""Pause before a request is repeated that a busy server did not take."""
SHOWN_EVERY = 100
"""Requests between two lines of the log."""


@dataclass(frozen=True)
class OperatedServer:
    """A server that somebody else starts and stops, as a client sees it."""

    address: str

    @property
    def name(self) -> str:
        return f"the server at {self.address}"

    @property
    def log(self) -> str:
        return "its operator's"

    def check(self) -> None:
        """Nobody here would know that it ended."""


class ServingEngine(SGLangEngine):
    """Takes finished requests from a server, and has those that may be learned from captured there.

    One request at a time: users come first. A server that is restarted is waited for.
    """

    waits = True

    def __init__(self, run: PreparedRun, index: int):
        self._stopped, self._attaching, self._tap = Event(), Lock(), None
        live = run.config.generator.live
        assert live is not None, "generator.engine=serving has generator.live"
        self._server, self._wanted = live.servers[index], wanted_of(run)
        heldout, train = run.open_samples("heldout"), run.open_samples()
        known = [samples[at].id for samples in (heldout, train) for at in range(len(samples))]
        self._filter = LiveFilter(run, private_data_finder(), known)
        self._read, self._captured, self._restarted = 0, 0, False
        super().__init__(run, index)

    def _connect(self) -> SGLangClient:
        self._attached(self.settings.start_timeout_s)
        return SGLangClient(OperatedServer(self._server.address), self.settings.request_timeout_s)

    def _attached(self, timeout_s: float = math.inf) -> Tap:
        """The connection, opened where there is none.

        Raises EngineError at the end of the run, and Refusal where no server comes within `timeout_s`.
        """
        with self._attaching:
            if self._tap is None:
                self._tap = open_tap(self._server, self._wanted, self._stopped, timeout_s)
        if self._tap is None:
            raise EngineError("the generator stops")
        return self._tap

    def _detach(self) -> None:
        with self._attaching:
            if self._tap is not None:
                self._tap.close()
            self._tap = None

    def _marks(self, key: str) -> dict[str, Any]:
        return super()._marks(key) | {PASSWORD: self._attached().password}

    def _settings(self) -> dict[str, Any]:
        # A cache of its own: all rows are computed.
        return {"extra_key": uuid.uuid4().hex}

    def _generate(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> Answer:
        """Repeats the request while the server is busy: it is there, and what it holds for the run stays.

        Raises EngineError at the end of the run, and OSError where the server ends meanwhile.
        """
        told = False
        while not self._stopped.is_set():
            try:
                return super()._generate(tokens, sampling, **more)
            except ServerBusyError as error:
                if not told:
                    print(f"{error}; asking again every {BUSY_S:g} s", flush=True)
                told = True
            self._stopped.wait(BUSY_S)
            # A gateway also answers like this while the server is away; the next server does not know this run.
            self._attached().check()
        raise EngineError("the generator stops")

    def answer(self, key: str, prompt: Tensor, max_new_tokens: int) -> Captured:
        """The next request that may be learned from, and its answer, captured by a prefill of both.

        `prompt` is empty: users ask. `Captured.answer` marks what was asked, see `Learned.marked`.
        """
        while not self._stopped.is_set():
            try:
                if (text := self._next()) is not None and (captured := self._captured_text(key, text)) is not None:
                    return captured
            except (OSError, ServerError, EngineError) as error:
                # Restarted by its operator, or by a roll-out.
                if not self._stopped.is_set():
                    print(f"{self._server.address}: {error}; waiting for it", flush=True)
                    self._detach()
                    self._restarted = True
                    self._stopped.wait(1.0)
        raise EngineError("the generator stops")

    def _next(self) -> LiveText | None:
        tap = self._attached()
        if self._restarted:
            # Perhaps with another target, or at another precision. Raises Refusal.
            for sample in self.run.open_samples().canaries(CANARY_TOKENS):
                self.check_canary(sample.tokens)
            self._restarted = False
        taken = tap.take()
        if taken.text is not None:
            self._read += 1
            if self._read % SHOWN_EVERY == 1:
                print(self._filter.summary(self._captured, taken), flush=True)
        return taken.text

    def _captured_text(self, key: str, text: LiveText) -> Captured | None:
        learned = self._filter.learned(text)
        if learned is None:
            return None
        try:
            captured, _ = self.request(key, torch.tensor(learned.tokens), (), PREFILL)
        except SampleError as error:
            print(f"a request of {len(learned.tokens)} tokens is left out: {error}", flush=True)
            return None
        self._captured += 1
        return replace(captured, answer=learned.marked)

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        """Generate, then capture: with speculation a step of decoding also holds rows of rejected proposals."""
        ends = eos_ids(self.target)
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "stop_token_ids": sorted(ends)}
        continued = []
        for index, prompt in enumerate(prompts):
            try:
                answer = self._generate(prompt.tokens, sampling).tokens
            except PromptRefusedError as error:
                raise Refusal(f"a held-out prompt of {len(prompt.tokens)} tokens: {error}") from error
            except ServerError as error:
                raise EngineError(str(error)) from error
            text = tuple(end_of(answer, ends))
            read = torch.tensor([*prompt.tokens, *text[:-1]])
            hidden, _ = self._take_back(f"heldout-{index}", read, (), PREFILL)
            continued.append(Continued(prompt.tokens, text, hidden.features))
        return continued

    def interrupt(self) -> None:
        """Have `answer` return soon; may be called from a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        self.interrupt()
        self._detach()
        super().close()
