"""Samples arrive whole, or not at all, in host memory and in registered memory of a device; real Mooncake."""

from collections.abc import Iterator

import pytest
import torch

from infra.config import TransportConfig
from infra.records.data_path import BufferRecord, ObjectRecord, StoreRecord
from infra.transport.base import TransferError
from infra.transport.mooncake.transport import MooncakeTransport
from models.targets.float8 import FLOAT8
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout
from models.training.receive import CHECKED, DeviceReceiver, HostReceiver, Receiver, open_receiver

LAYOUT = HiddenStateLayout(aux_count=3, hidden_size=8, dtype=torch.float32, top_token=True)
LENGTHS = (5, 1, 40)


@pytest.fixture
def transport(mooncake_store: StoreRecord) -> MooncakeTransport:
    return MooncakeTransport(mooncake_store)


@pytest.fixture(params=["host", "device"])
def receiver(
    request: pytest.FixtureRequest, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Receiver]:
    monkeypatch.setattr("models.training.receive.GRAIN", 1000)
    host = request.param == "host"
    opened = HostReceiver(transport, LAYOUT) if host else DeviceReceiver(transport, LAYOUT, torch.device("cpu"))
    yield opened
    opened.close()


def sample(tokens: int) -> HiddenStates:
    return HiddenStates(
        aux=torch.randn(tokens, 24), last=torch.randn(tokens, 8), top=torch.arange(tokens, dtype=torch.int32)
    )


def put(transport: MooncakeTransport, key: str, hidden: HiddenStates) -> ObjectRecord:
    return transport.put(key, LAYOUT.pack(hidden))


def test_a_micro_batch_holds_its_samples_one_after_the_other(transport: MooncakeTransport, receiver: Receiver) -> None:
    samples = [sample(tokens) for tokens in LENGTHS]
    batch, start = receiver.empty(sum(LENGTHS)), 0
    for index, hidden in enumerate(samples):
        record, end = put(transport, f"receive/0/{index}/1", hidden), start + len(hidden.last)
        receiver.receive(record, batch.rows(slice(start, end)))
        transport.delete(record.key)
        start = end
    assert torch.equal(batch.aux, torch.cat([hidden.aux for hidden in samples]))
    assert torch.equal(batch.last, torch.cat([hidden.last for hidden in samples]))
    assert batch.top is not None
    assert batch.top.tolist() == [token for tokens in LENGTHS for token in range(tokens)]


def test_an_object_larger_than_the_landing_place(transport: MooncakeTransport, receiver: Receiver) -> None:
    hidden = sample(100)
    record = put(transport, "receive/1/0/1", hidden)
    into = receiver.empty(100)
    receiver.receive(record, into)
    transport.delete(record.key)
    assert torch.equal(into.aux, hidden.aux)


def test_refused_is_what_is_gone_or_has_another_size_or_checksum(
    transport: MooncakeTransport, receiver: Receiver
) -> None:
    record = put(transport, "receive/2/0/1", sample(4))
    with pytest.raises(TransferError, match="expected"):
        receiver.receive(record, receiver.empty(5))
    wrong = tuple(replace_sum(buffer) for buffer in record.buffers)
    with pytest.raises(TransferError, match="checksum"):
        receiver.receive(record.model_copy(update={"buffers": wrong}), receiver.empty(4))
    transport.delete(record.key)
    with pytest.raises(TransferError, match="gone"):
        receiver.receive(record, receiver.empty(4))


def replace_sum(buffer: BufferRecord) -> BufferRecord:
    return buffer.model_copy(update={"xxh3": "0" * 32})


@pytest.mark.parametrize("receiver", ["device"], indirect=True)
def test_a_device_has_one_sample_in_so_many_verified(transport: MooncakeTransport, receiver: Receiver) -> None:
    record = put(transport, "receive/3/0/1", sample(4))
    wrong = record.model_copy(update={"buffers": tuple(map(replace_sum, record.buffers))})
    for index in range(2 * CHECKED):
        receiver.receive(wrong if index % CHECKED else record, receiver.empty(4))
    with pytest.raises(TransferError, match="checksum"):
        receiver.receive(wrong, receiver.empty(4))
    transport.delete(record.key)


def test_a_gpu_that_is_wanted_in_vain(transport: MooncakeTransport) -> None:
    with pytest.raises(ValueError, match=r"transport.receive=auto"):
        open_receiver(transport, TransportConfig(receive="device"), LAYOUT)
    assert isinstance(open_receiver(transport, TransportConfig(), LAYOUT), HostReceiver)


def test_a_build_of_mooncake_without_cuda_never_sees_a_gpus_address(
    transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would crash there; samples arrive in host memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    transport.protocol = "rdma"
    with pytest.raises(ValueError, match=r"Mooncake's build for CUDA 13 is not installed: `make GPUDIRECT=1`"):
        open_receiver(transport, TransportConfig(receive="device"), LAYOUT)
    receiver = open_receiver(transport, TransportConfig(), LAYOUT)
    assert isinstance(receiver, HostReceiver)
    assert "not by GPUDirect: Mooncake's build for CUDA 13" in receiver.words


def test_a_part_of_a_sample_in_float8_is_restored_alone(transport: MooncakeTransport) -> None:
    """Ranks that share a sample read its rows: each holds its own scales."""
    layout, hidden = HiddenStateLayout(3, 8, FLOAT8), sample(40)
    whole = layout.restored(layout.stored(hidden))
    record = transport.put("receive/float8/0/1", layout.pack(hidden))
    receiver = HostReceiver(transport, layout)
    part = receiver.empty(7, 9)
    receiver.receive_part(record, "aux", 5, part.aux)
    receiver.receive_part(record, "last", 30, part.last)
    transport.delete(record.key)
    back = layout.restored(part)
    assert torch.equal(back.aux, whole.aux[5:12])
    assert torch.equal(back.last, whole.last[30:39])
