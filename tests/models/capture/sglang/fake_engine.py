"""SGLang's scheduler as the capture plugin sees it: batches of requests, streams, events that a test lets happen."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any

import torch

from models.targets.hidden_states import HiddenStates

AUX, HIDDEN = 12, 4


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class Event:
    """Of the device; it has happened once `happened` is set."""

    def __init__(self) -> None:
        self.happened, self.recorded_on = Flag(), None

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        return self.happened.is_set()


class FakeDevice:
    """What torch calls a device's module."""

    Stream = Stream

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.default, self.entered = Stream(), list[Stream]()

    def Event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def current_stream(self) -> Stream:
        return self.default

    @contextmanager
    def stream(self, stream: Stream):
        self.entered.append(stream)
        yield


def fake_scheduler(overlap: bool = True) -> Any:
    device, forward = FakeDevice(), Stream()
    return SimpleNamespace(
        device_module=device, forward_stream=forward, enable_overlap=overlap, forward_stream_ctx=device.stream(forward)
    )


@dataclass
class FakeRequest:
    """What is read of SGLang's `Req`."""

    rid: str
    length: int
    key: str | None = ""
    """Empty: named after the request; None: not captured."""
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    """Output tokens up to the end of the answer; the step that held the end may have added more."""
    max_new_tokens: int = 1
    ended: bool = False
    aborted: bool = False
    customized_info: dict[str, list[Any]] | None = None
    finished_output: bool = False
    custom: Any = field(default_factory=dict)
    """Further parameters; of users, whatever they like."""
    routing_key: str | None = None
    spec_verify_ct: int = 0
    lora_id: str | None = None
    multimodal_inputs: Any = None
    input_embeds: Any = None

    @property
    def origin_input_ids(self) -> list[int]:
        return [0] * self.length

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids[: self.finished_len]

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(
            custom_params={"draftsmith": self.key or f"run/0/{self.rid}/1", **self.custom}
            if self.key is not None and isinstance(self.custom, dict)
            else self.custom or None,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def finished_reason(self) -> Any:
        return SimpleNamespace(to_json=lambda: {"type": "abort" if self.aborted else "length"})

    def finished(self) -> bool:
        return self.ended

    def rows(self, start: int, count: int) -> HiddenStates:
        """Nothing else could be mistaken for row r of this request."""
        values = (int(self.rid) * 1000 + torch.arange(start, start + count))[:, None].float()
        return HiddenStates(aux=values * 2 + torch.arange(AUX), last=values * 3 + torch.arange(HIDDEN))


def prefill(*chunks: tuple[FakeRequest, int, int]) -> tuple[Any, HiddenStates]:
    """A batch of (request, first position, number of rows), and what the engine computed for it."""
    computed = [request.rows(start, count).named() for request, start, count in chunks]
    hidden = {name: torch.cat([rows[name] for rows in computed]) for name in ("aux", "last")}
    batch = SimpleNamespace(
        reqs=[request for request, *_ in chunks],
        prefix_lens=[start for _, start, _ in chunks],
        extend_lens=[count for *_, count in chunks],
        forward_mode=SimpleNamespace(is_extend=lambda: True, is_decode=lambda: False),
    )
    return batch, HiddenStates(**hidden)


def decode(*rows: tuple[FakeRequest, int]) -> tuple[Any, HiddenStates]:
    """A step of decoding: a row for each request, at the given position."""
    batch, hidden = prefill(*((request, position, 1) for request, position in rows))
    mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True)
    return SimpleNamespace(reqs=batch.reqs, forward_mode=mode), hidden


class FakeStreamer:
    """SGLang's output streamer: one message for every request that finished, once."""

    def __init__(self, sender: Any):
        self.send_to_detokenizer = sender

    def stream_output(self, requests: Sequence[FakeRequest], _return_logprob: bool, skipped: Any = None) -> None:
        for request in requests:
            if request is not skipped and request.finished() and not request.finished_output:
                request.finished_output = True
                information = dict(request.customized_info) if request.customized_info else None
                self.send_to_detokenizer.send_output(SimpleNamespace(rid=request.rid, customized_info=information))
