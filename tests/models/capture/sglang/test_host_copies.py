"""Copies to the host: in order, behind an event, in a ring of buffers, and without a wait of the engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, Traffic, emulated_device
from fake_engine import AUX, HIDDEN, FakeRequest, fake_scheduler, prefill

from models.capture.sglang import host_copies
from models.capture.sglang.host_copies import BUFFERS, HostCopies
from models.targets.float8 import FLOAT8
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout, SampleError, check_finite

LAYOUT = HiddenStateLayout(3, HIDDEN, torch.bfloat16, top_token=True)


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    with emulated_device() as traffic:
        yield traffic


def computed(rows: int, device: Any = DEVICE) -> HiddenStates:
    """Float32 hidden states of one prefill."""
    _, hidden = prefill((FakeRequest("1", rows), 0, rows))
    top = torch.arange(rows, dtype=torch.int32)
    return HiddenStates(hidden.aux.to(device), hidden.last.to(device), top.to(device))


@pytest.mark.parametrize("overlap", [True, False])
def test_copies_follow_the_forward_and_the_engine_waits_for_none(traffic: Traffic, overlap: bool) -> None:
    scheduler, hidden, copies = fake_scheduler(overlap), computed(5), HostCopies(LAYOUT)
    traffic.clear()
    copy = copies.start(hidden, scheduler)
    device = scheduler.device_module
    (stream,) = device.entered
    assert stream.waited_for == [scheduler.forward_stream if overlap else device.default]
    assert device.events[0].recorded_on is stream
    # In the stored type, and the flags of finite rows with them.
    assert sorted(traffic.to_host) == sorted([5 * AUX * 2, 5 * HIDDEN * 2, 5 * 4, 2 * 5])
    assert not +traffic.waits
    assert any(source is hidden.aux for source in copy.sources), "the engine would use its memory again"
    device.events[0].happened.set()
    copy.wait()
    assert copy.sources == ()
    expected = computed(5, "cpu")
    assert torch.equal(copy.hidden.aux, expected.aux.bfloat16())
    assert torch.equal(copy.hidden.last, expected.last.bfloat16())
    assert copy.hidden.top.tolist() == [0, 1, 2, 3, 4]
    assert copy.finite.all()


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_graph_wrote_is_copied_before_its_next_replay(traffic: Traffic, overlap: bool) -> None:
    """On the stream of the forward: the copy to the host reads nothing that the replay overwrites."""
    scheduler, hidden = fake_scheduler(overlap), computed(5)
    copy = HostCopies(LAYOUT).start(hidden, scheduler, replayed=True)
    device = scheduler.device_module
    assert device.entered[:-1] == ([scheduler.forward_stream] if overlap else [])
    buffers = [*hidden.named().values()]
    assert not any(source is buffer for source in copy.sources for buffer in buffers)
    device.events[0].happened.set()
    copy.wait()
    kept = copy.kept()
    copy.hidden.last.zero_()
    assert torch.equal(kept.last, computed(5, "cpu").last.bfloat16()), "rows of a step outlive the ring's buffer"


def test_float8_is_encoded_on_the_device_and_crosses_in_half_the_bytes(traffic: Traffic) -> None:
    layout = HiddenStateLayout(3, HIDDEN, FLOAT8, top_token=True)
    hidden, copies = computed(5), HostCopies(layout)
    traffic.clear()
    copy = copies.start(hidden, fake_scheduler())
    assert sorted(traffic.to_host) == sorted([5 * 3 * (HIDDEN + 4), 5 * (HIDDEN + 4), 5 * 4, 2 * 5])
    assert not +traffic.waits
    expected = layout.stored(computed(5, "cpu"))
    for name, buffer in layout.pack(copy.hidden).items():
        assert buffer == layout.pack(expected)[name]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["aux", "last"])
def test_rows_that_are_not_finite_are_found_on_the_device(traffic: Traffic, name: str, value: str) -> None:
    hidden = computed(5)
    getattr(hidden, name)[3, 2] = float(value)
    traffic.waits.clear()
    copy = HostCopies(LAYOUT).start(hidden, fake_scheduler())
    check_finite(copy.finite[:, :3])
    with pytest.raises(SampleError, match=f"{name} has values that are not finite"):
        check_finite(copy.finite[:, 3:4])
    check_finite(copy.finite[:, 4:])
    assert not +traffic.waits


def test_buffers_are_used_again_and_grow_in_powers_of_two(traffic: Traffic) -> None:
    copies, scheduler, sizes, places = HostCopies(LAYOUT), fake_scheduler(), [], set[int]()
    for rows in [50] * BUFFERS + [40] * BUFFERS + [60, 300]:
        copy = copies.start(computed(rows), scheduler)
        assert copy.hidden.last.shape == (rows, HIDDEN)
        sizes.append(copy.buffer.nbytes)
        places.add(copy.buffer.data_ptr())
        copies.release(copy)
    assert sizes == [2048] * 2 * BUFFERS + [4096, 16384]
    assert len(places) == BUFFERS + 2


def test_a_full_ring_holds_the_engine_back_until_a_prefill_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, hidden = HostCopies(LAYOUT), computed(2, "cpu")
    held = [copies.start(hidden, None) for _ in range(BUFFERS)]
    with ThreadPoolExecutor(1) as thread:
        one_more = thread.submit(copies.start, hidden, None)
        copies.release(held.pop())
        held.append(one_more.result(60))
    monkeypatch.setattr(host_copies, "BUFFER_S", 0.01)
    with pytest.raises(TimeoutError, match=r"no earlier prefill was written to the transport within 0\.01 s"):
        copies.start(hidden, None)
    copies.release(held.pop())
    copies.start(hidden, None)


def test_a_copy_that_cannot_begin_gives_its_buffer_back(traffic: Traffic) -> None:
    copies, hidden, scheduler = HostCopies(LAYOUT), computed(2), fake_scheduler()
    for _ in range(2 * BUFFERS):
        with pytest.raises(KeyError, match="top"):
            copies.start(HiddenStates(hidden.aux, hidden.last), scheduler)
    copies.start(hidden, scheduler)


def test_a_copy_that_does_not_end_is_given_up(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "COPY_S", 0.01)
    copy = HostCopies(LAYOUT).start(computed(2), fake_scheduler())
    with pytest.raises(TimeoutError, match=r"not copied to the host within 0\.01 s"):
        copy.wait()


def test_on_a_cpu_nothing_is_copied() -> None:
    hidden = computed(2, "cpu")
    copy = HostCopies(LAYOUT).start(hidden, None)
    copy.wait()
    assert copy.hidden is hidden
